"""``kappascope study``: tuning, comparison, and training that goes on after a kill."""

import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from kappascope.cli import app
from kappascope.lab import experiment
from kappascope.lab.resume import ResumePoint
from processes import alive, descendants, until
from tiny_experiments import LASTING, STUDY
from tiny_runs import COMMAND, complete, sha


def test_a_study_tunes_compares_and_shows_its_tables(run, tmp_path: Path) -> None:
    code, output, errors = run("study", "toy", "--jobs", 0, "--out", tmp_path)
    assert (code, errors) == (0, "")
    assert "toy: Doubling" in output and "Losses" in output and "In the end." in output
    rows = pq.read_table(tmp_path / "trials.parquet").to_pylist()
    assert {(row["stage"], row["seed"]) for row in rows} == {
        ("tune", 0), *(("compare", seed) for seed in range(8))
    }  # fmt: skip
    assert "seconds" not in {row["component"] for row in rows}
    assert pq.read_table(tmp_path / "times.parquet").num_rows == 10
    page = (tmp_path / "report.html").read_text()
    assert "Real networks" in page and "In the end." in page and "Printed figures" not in page
    assert "toy.learns" in page
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run("study", "toy", "--jobs", 0, "--out", tmp_path)[0] == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    code, output, _ = run("verify", tmp_path, "--trials", 3)
    assert code == 0 and output.count("same: ") == 3


def test_a_study_whose_material_cannot_be_had_leaves_the_others_alone(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poor = replace(LASTING, downloads=("moon dust",))
    monkeypatch.setattr(experiment, "studies", lambda: {"toy": STUDY, "lasting": poor})
    code, output, errors = run("study", "--jobs", 0, "--out", tmp_path)
    assert code == 3 and "toy: Doubling" in output and "Lasting" not in output
    assert "moon dust: is no download" in errors
    assert errors.splitlines()[-1].startswith("kappascope: error: study lasting: left out")
    code, output, errors = run("study", "lasting", "--jobs", 0, "--out", tmp_path / "alone")
    assert (code, output) == (2, "") and errors.count("\n") == 1 and "moon dust" in errors


def test_training_killed_in_the_middle_ends_in_the_same_bits(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [*COMMAND, "study", "lasting", "--jobs", "2", "--out"]
    with subprocess.Popen([*command, str(killed)], stderr=subprocess.PIPE) as driver:
        until(lambda: len(list(killed.glob("resume/*.unit"))) == 2)
        time.sleep(0.3)
        started = descendants(driver.pid)
        driver.kill()
    until(lambda: not any(map(alive, started)), 10)
    saved = list(killed.glob("resume/*.unit"))
    assert len(saved) == 2 and not list(killed.glob("units/*.unit"))
    steps = [len(ResumePoint(path)._saved()["log"]) for path in saved]
    assert all(0 < step < 20 for step in steps)
    complete(LASTING, killed)
    complete(LASTING, whole)
    assert sha(killed) == sha(whole) and not list(killed.glob("resume/*"))


def test_help_names_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["study", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert " or ".join(", ".join(experiment.studies()).rsplit(", ", 1)) in told
