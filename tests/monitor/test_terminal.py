"""A run on the terminal: it fits, whatever its size, and the needy come first."""

import math
from pathlib import Path

import pytest
from rich.console import Console

from kappascope.monitor.record import Recorder, Run
from kappascope.monitor.terminal import run_screen, spark, steps_per_second
from monitored_runs import MATRICES, write_example


def drawn(run: Run, width: int, height: int, silence: float = 0.0) -> list[str]:
    console = Console(width=width, height=height, no_color=True)
    with console.capture() as found:
        console.print(run_screen(run, width, height, silence))
    return found.get().rstrip("\n").split("\n")


def test_it_tells_loss_speed_alerts_and_matrices(tmp_path: Path) -> None:
    lines = drawn(Run.read(write_example(tmp_path)), 130, 30)
    text = "\n".join(lines)
    assert lines[0].startswith("GPT  Step 200; 11 readings of 6 matrices; closed.")
    assert "loss 2.00 █" in lines[1] and "1.00 steps/s" in lines[1]
    assert "! step 60 swallowed: h.1.mlp.fc1.weight: 31 %" in text
    rows = [line for line in lines if line.startswith("h.")]
    assert rows[0].startswith("h.1.mlp.fc1") and rows[0].rstrip().endswith("swallowed")
    assert len(rows) == len(MATRICES)


@pytest.mark.parametrize("width", [30, 50, 80, 200])
@pytest.mark.parametrize("height", [8, 12, 24, 60])
def test_it_fits_the_terminal(tmp_path: Path, width: int, height: int) -> None:
    lines = drawn(Run.read(write_example(tmp_path)), width, height)
    assert max(map(len, lines)) <= width
    assert len(lines) <= max(height, 11)  # a matrix is shown even where there is no room for it


def test_silence_is_told_unless_the_run_was_closed(tmp_path: Path) -> None:
    run = Run.read(write_example(tmp_path, closed=False))
    assert "silent for 5 min" in "".join(drawn(run, 120, 30, silence=300.0))
    run.is_closed = True
    assert "silent" not in "".join(drawn(run, 120, 30, silence=300.0))


def test_a_run_that_was_heard_of_lately_is_running(tmp_path: Path) -> None:
    run = Run.read(write_example(tmp_path, closed=False))
    assert "running" in drawn(run, 80, 30)[0]
    text = " ".join(line.strip() for line in drawn(run, 80, 30, silence=90.0)[:2])
    assert "no end was written since 2023-11-14 22:16 UTC: the run goes on, or was killed." in text


@pytest.mark.parametrize("width", [60, 80])
def test_what_to_look_at_is_not_cut_off(tmp_path: Path, width: int) -> None:
    run = Run.read(write_example(tmp_path))
    text = " ".join(line.strip() for line in drawn(run, width, 24))
    assert f"! step 60 swallowed: {run.alerts[0].text}" in text


def test_a_run_without_readings_says_so(tmp_path: Path) -> None:
    Recorder(tmp_path).write({"kind": "start", "step": 0, "model": "GPT"})
    assert drawn(Run.read(tmp_path), 80, 24)[-1] == "No reading yet."


def test_names_move_no_cursor(tmp_path: Path) -> None:
    name = "\x1b[31mred\r"
    recorder = Recorder(tmp_path)
    recorder.write({"kind": "start", "step": 0, "model": name})
    recorder.write({"kind": "reading", "step": 0, "rows": {name: {"condition_number": 2.0}}})
    alert = {"name": name, "matrix": name, "text": name}
    recorder.write({"kind": "alert", "step": 0, **alert})
    text = "\n".join(drawn(Run.read(tmp_path), 80, 24))
    assert "\x1b" not in text and "\r" not in text and "?[31mred?" in text


def test_a_spark_shows_spikes_and_gaps() -> None:
    assert spark([1.0] * 50 + [100.0] + [1.0] * 50, 12).count("█") == 1
    assert spark([1.0, math.nan, 2.0], 5) == "▁×█"
    assert spark([], 5) == "" and spark([math.inf] * 2, 5) == "××"
    assert len(spark([float(k) for k in range(-500, 500)], 16)) <= 16


def test_speed_is_that_of_the_last_session(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    for began, pace in ((100.0, 1.0), (10_000.0, 4.0)):
        first = 0 if pace == 1.0 else 20
        recorder.write({"kind": "start", "step": first, "time": began})
        for step in (first, first + 10, first + 20):
            reading = {"kind": "reading", "step": step, "rows": {}, "seconds": 0.0}
            recorder.write({**reading, "time": began + (step - first) / pace})
    assert steps_per_second(Run.read(tmp_path)) == pytest.approx(4.0)
