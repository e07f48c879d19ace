"""What is printed where, and how far a long run has come."""

import pytest

from kappascope.cli import _terminal


def test_results_and_remarks_go_to_different_outputs(capsys: pytest.CaptureFixture[str]) -> None:
    _terminal.tell("result")
    _terminal.say("remark \x1b[31m")
    _terminal.say("")
    assert capsys.readouterr() == ("result\n", "remark ?[31m\n")


def test_without_a_terminal_progress_is_a_line_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 5.0, 20.0, 21.0, 40.0))
    monkeypatch.setattr(_terminal.time, "monotonic", lambda: next(clock))
    with _terminal.progress([("e1", 1.0)] * 4) as advance:
        for _ in range(4):
            advance(("e1", 1.0))
    assert capsys.readouterr() == ("", "50% done, about 20 s left\n")


def test_a_spinner_needs_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with _terminal.waiting("Loading"):
        pass
    assert capsys.readouterr() == ("", "")


def test_long_work_says_beforehand_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    _terminal.announce("9 trials to run", _terminal.LONG_RUN)
    assert capsys.readouterr() == ("", "")
    _terminal.announce("9,000 trials to run", 600)
    assert capsys.readouterr().err == (
        "9,000 trials to run, about 10 minutes if the machine has nothing else to do\n"
    )
