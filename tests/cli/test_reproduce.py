"""``kappascope reproduce``: the report is there, and nothing is run twice."""

import json
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from kappascope.lab import experiment, runs
from kappascope.lab.table import Table
from kappascope.lab.verdicts import DECIDED
from kappascope.system.store import Store
from processes import alive, descendants, until
from tiny_experiments import SLOW, TOY
from tiny_runs import COMMAND, complete, sha


def test_reproduce_writes_what_it_promises_and_says_where(run, tmp_path: Path) -> None:
    code, output, errors = run("reproduce", 1, "--jobs", 0, "--out", tmp_path)
    assert (code, errors) == (0, "")
    assert "1 Toy" in output and str(tmp_path / "report.html") in output.replace("\n", "")
    for name in ("trials.parquet", "spectra.parquet", "verdicts.json", "report.html"):
        assert (tmp_path / name).stat().st_size
    assert json.loads((tmp_path / "verdicts.json").read_bytes())["provenance"]["trials"] == 270
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert run("reproduce", 1, "--jobs", 0, "--out", tmp_path)[0] == 0
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_what_is_beyond_the_paper_runs_when_asked_for(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    further = replace(TOY, number=10, title="Further", figures=(), claims=())
    monkeypatch.setattr(experiment, "discover", lambda: {1: TOY, 10: further})
    usual = run("reproduce", "--jobs", 0, "--out", tmp_path)[1]
    assert "1 Toy" in usual and "Further" not in usual
    both = run("reproduce", "--beyond", "--jobs", 0, "--out", tmp_path)[1]
    assert "1 Toy" in both and "10 Further" in both
    assert "Beyond the paper" in (tmp_path / "report.html").read_text()
    alone = run("reproduce", 10, "--jobs", 0, "--out", tmp_path)[1]
    assert "Toy" not in alone and "10 Further" in alone


def test_trials_asked_for_are_run(run, tmp_path: Path) -> None:
    arguments = "reproduce", 1, "--jobs", 0, "--out", tmp_path, "--quick", "--trials"
    assert run(*arguments, 3)[0] == 0
    few = sha(tmp_path)
    assert run(*arguments, 40)[0] == 0
    assert run(*arguments, 3)[0] == 0
    assert sha(tmp_path) == few


def test_a_quick_run_decides_ten_claims_and_none_otherwise_than_the_full_run() -> None:
    results = Path(__file__).parents[2] / "results" / "reproduce"
    whole = {e.id: e for e in experiment.Pages().values() if not e.beyond}
    rows = runs.published(results).rows
    quick = [e.quickly() for e in whole.values()]
    parts = []
    for block in runs.plan_runs(quick).blocks:
        keys = {key for setting in whole[block.experiment].grid for key in setting}
        setting = {key: block.setting.get(key) for key in keys}
        where = {"experiment": block.experiment, "stream": block.stream, "seed": block.seeds}
        parts.append(rows.where(**where).where(**setting).rows)
        assert len(parts[-1]), block
    judged = experiment.verdicts(quick, Table.of(pa.concat_tables(parts)))["claims"]
    decided = {(claim["id"], claim["verdict"]) for claim in judged if claim["verdict"] in DECIDED}
    full = json.loads((results / "verdicts.json").read_bytes())["claims"]
    assert len(decided) >= 10
    assert decided <= {(claim["id"], claim["verdict"]) for claim in full}


def test_a_study_made_by_other_code_is_refused_unless_begun_anew(run, tmp_path: Path) -> None:
    arguments = "reproduce", 1, "--quick", "--jobs", 0, "--out", tmp_path
    assert run(*arguments)[0] == 0
    study = json.loads((tmp_path / "study.json").read_bytes())
    (tmp_path / "study.json").write_text(json.dumps({**study, "numpy": "1.0"}))
    code, _, errors = run(*arguments)
    assert code == 4 and "numpy was 1.0" in errors
    assert run(*arguments, "--fresh")[0] == 0


def test_a_folder_in_use_is_refused(run, tmp_path: Path) -> None:
    with Store(tmp_path).lock():
        code, _, errors = run("reproduce", 1, "--out", tmp_path)
    assert code == 2 and f"process {os.getpid()}" in errors


def test_trials_that_fail_make_it_partial_and_the_report_is_there(run, tmp_path: Path) -> None:
    code, output, errors = run("reproduce", 3, "--jobs", 2, "--out", tmp_path)
    assert code == 3 and errors.count("kappascope: error: ") == 1
    assert "5 blocks of trials failed" in errors
    assert all(line.isprintable() for line in errors.splitlines())
    assert "report.html" in output
    failed = json.loads((tmp_path / "verdicts.json").read_bytes())["provenance"]["failed"]
    assert len(failed) == 5


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_stopped_by_a_signal_it_leaves_no_process_and_goes_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    arguments = [*COMMAND, "reproduce", "2", "--jobs", "2", "--out", str(tmp_path)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as driver:
        until(lambda: len(list(tmp_path.glob("units/*.unit"))) >= 2 or driver.poll() is not None)
        started = descendants(driver.pid)
        driver.send_signal(number)
        errors = driver.stderr.read() if driver.stderr else ""
        assert driver.wait(30) == code
    until(lambda: not any(map(alive, started)), 10)
    assert len(started) == 4  # the driver, its server and two processes
    assert errors.count("kappascope: error: ") == (number != signal.SIGKILL)
    assert "Traceback" not in errors
    assert 2 <= len(list(tmp_path.glob("units/*.unit"))) < 12
    complete(SLOW, tmp_path)


def test_an_early_interrupt_of_the_terminal_is_one_line(tmp_path: Path) -> None:
    arguments = [*COMMAND, "reproduce", "2", "--out", str(tmp_path)]
    group: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(arguments, **group) as driver:
        # as Ctrl-C does, to all: the server of processes is there, and loads its modules
        until(lambda: len(descendants(driver.pid)) >= 2 or driver.poll() is not None)
        os.killpg(driver.pid, signal.SIGINT)
        errors = driver.stderr.read() if driver.stderr else ""
        assert driver.wait(30) == 130
    assert errors.count("\n") == 1 and "stopped early" in errors
