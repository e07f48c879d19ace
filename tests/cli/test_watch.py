"""``kappascope watch``: one screen or many, a page on this machine, a line for what is wrong."""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from kappascope.cli import watch
from kappascope.monitor.record import Recorder
from monitored_runs import write_example

Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_run_is_shown_once(run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    code, output, errors = run("watch", write_example(tmp_path, closed=False), "--once")
    assert (code, errors) == (0, "") and "Step 200" in output and "h.1.mlp.fc1" in output


def test_without_a_terminal_there_is_one_screen(run: Command, tmp_path: Path) -> None:
    code, output, _ = run("watch", write_example(tmp_path, closed=False))
    assert code == 0 and output.count("Step 200") == 1


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["nowhere"], 2, "holds no record of a run (name the folder that a Monitor writes)"),
        (["."], 2, "holds no record"),
        ([".", "8123"], 4, "a port without --serve"),
        ([".", "--serve", "--once"], 4, "exclude each other"),
        ([".", "--serve", "99999"], 4, "99999"),
        ([".", "--serve", "many"], 4, "many"),
    ],
)
@pytest.mark.usefixtures("elsewhere")
def test_what_is_wrong_is_told_on_one_line(
    run: Command, arguments: list[str], code: int, told: str
) -> None:
    ended, output, errors = run("watch", *arguments)
    assert ended == code and output == "" and errors.count("\n") == 1 and told in errors


def test_a_terminal_follows_the_run_until_it_is_closed(
    run: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "SECONDS_BETWEEN_LOOKS", 0.02)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    folder = write_example(tmp_path, closed=False)

    def train() -> None:
        recorder = Recorder(folder)
        for step in (220, 240):
            time.sleep(0.1)
            recorder.write({"kind": "log", "step": step, "values": {"loss": 1.0}})
        recorder.write({"kind": "end", "step": 240})
        recorder.close()

    thread = Thread(target=train)
    thread.start()
    code, output, errors = run("watch", folder)
    thread.join()
    assert (code, errors) == (0, "") and "Step 200" in output and "Step 240" in output


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "kappascope", "watch", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )


def test_a_page_is_served_until_the_user_ends_it(tmp_path: Path) -> None:
    with started(str(write_example(tmp_path)), "--serve") as process:
        assert process.stdout and process.stderr
        line = process.stdout.readline()
        address = re.match(r"http://127\.0\.0\.1:\d+/", line)
        assert address
        with urllib.request.urlopen(address[0], timeout=20) as answer:
            assert b"Run of" in answer.read()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read().count("\n") == 1 and process.stdout.read() == ""


def test_watching_needs_no_torch(tmp_path: Path) -> None:
    folder = write_example(tmp_path)
    code = (
        "import sys; from kappascope.cli import app\n"
        f"app.run(['watch', {str(folder)!r}, '--once'])\n"
        "sys.exit('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True)
    assert done.returncode == 0 and b"Step 200" in done.stdout
