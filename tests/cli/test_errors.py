"""Errors become one line, signals an exit code."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kappascope.cli import app
from kappascope.cli._errors import Interrupted, refusal_of, signals, signals_held
from kappascope.lab import experiment, report


def test_an_unforeseen_error_is_one_line_and_a_traceback_only_on_demand(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "files", lambda *_, **__: 1 / 0)
    for arguments, lines in ((), 1), (("--debug",), 6):
        code, _, errors = run("reproduce", 1, "--quick", "--jobs", 0, "--out", tmp_path, *arguments)
        assert code == 5
        assert len(errors.splitlines()) >= lines
        assert ("Traceback" in errors) == (lines > 1)
        assert "ZeroDivisionError" in errors.splitlines()[-1]


def test_an_interrupt_that_a_library_turns_into_another_error_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            raise RecursionError("half loaded") from error

    monkeypatch.setattr(experiment, "discover", loading)
    assert app.run(["reproduce", "1"]) == 130
    assert "stopped early" in capsys.readouterr().err


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    code = """
import time
from kappascope.cli import _errors
with _errors.signals():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except _errors.Interrupted:
        print("closing", flush=True)
        time.sleep(60)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            assert line in ("ready\n", "closing\n")
            process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130


def test_a_signal_while_a_library_loads_waits_until_it_is_loaded() -> None:
    steps = []
    with pytest.raises(Interrupted) as interrupted, signals() as came, signals_held():
        os.kill(os.getpid(), signal.SIGTERM)
        steps.append("loaded nevertheless")
    assert steps and came == [interrupted.value] and interrupted.value.code == 143


def test_without_a_signal_nothing_waits() -> None:
    with signals() as came, signals_held():
        pass
    assert came == []
    with signals(), pytest.raises(Interrupted):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_library_for_which_there_is_no_room_is_no_missing_one() -> None:
    full = ImportError("libtorch_cpu.so: failed to map segment from shared object")
    assert "ulimit -v" in refusal_of(full, ["diagnose"]).advice
    assert "install" in refusal_of(ImportError("No module named 'torch'"), ["diagnose"]).advice


def test_a_signal_that_python_drops_in_a_callback_is_not_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Falls:
        def __del__(self) -> None:
            os.kill(os.getpid(), signal.SIGINT)

    with signals() as came:
        Falls()
    assert len(came) == 1 and capsys.readouterr().err == ""
