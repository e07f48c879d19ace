"""What is printed where, and how far a long run has come."""

import io

import pytest
import rich.progress  # noqa: F401  # it keeps the clock that it finds, also a test's

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


def test_no_line_says_that_nothing_is_left(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter((0.0, 20.0, 40.0, 60.0))
    monkeypatch.setattr(_terminal.time, "monotonic", lambda: next(clock))
    parts = [("free", 0.0), ("long", 999.0), ("short", 1.0)]
    with _terminal.progress(parts) as advance:
        for part in parts:
            advance(part)
    assert capsys.readouterr() == ("", "")


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


class Terminal(io.StringIO):
    """An output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make a terminal of the error output; a fixture's would be gone when the test begins."""
    shown = Terminal()
    monkeypatch.setattr(_terminal.sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    return shown


def test_what_cannot_be_counted_shows_how_long_it_has_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = terminal(monkeypatch)
    with _terminal.waiting("Opening [a/b] model.pt"):
        pass
    assert "Opening [a/b] model.pt" in shown.getvalue() and "0:00:00" in shown.getvalue()


def test_what_can_be_counted_shows_its_name_and_how_much_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = terminal(monkeypatch)
    assert list(_terminal.counted("drawn", "abc", 3)) == ["a", "b", "c"]
    assert "drawn" in shown.getvalue() and "100%" in shown.getvalue()


def test_an_error_among_counted_items_ends_the_bar(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown = terminal(monkeypatch)

    def broken():
        yield 1
        raise ValueError("the second is broken")

    with pytest.raises(ValueError, match="the second is broken"):
        list(_terminal.counted("drawn", broken(), 3))
    assert shown.getvalue().endswith("\x1b[?25h")  # the cursor is shown again
