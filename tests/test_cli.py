"""The command: one line for an error, a code for its kind, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kappascope import cli, lab, report, review
from kappascope.bookmarks import Bookmark
from kappascope.store import Store
from toys import BAD, LASTING, SLOW, STUDY, TOY
from toyshop import complete, sha

TOYS = Path(__file__).with_name("toyshop.py")


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command with toys for experiments: code, output, errors."""
    monkeypatch.setattr(lab, "discover", lambda: {1: TOY, 2: SLOW, 3: BAD})
    monkeypatch.setattr(lab, "studies", lambda: {"toy": STUDY, "lasting": LASTING})

    def run(*arguments: object) -> tuple[int, str, str]:
        code = cli.run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run


def test_help_and_version_load_nothing_heavy() -> None:
    code = """
import sys
from kappascope import cli
assert cli.run(["--help"]) == cli.run(["--version"]) == cli.run(["reproduce", "--help"]) == 0
assert not {"torch", "numpy", "scipy", "pyarrow", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "reproduce" in done.stdout


def test_without_a_command_there_is_help(run) -> None:
    code, output, errors = run()
    assert (code, errors) == (0, "")
    assert "reproduce" in output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["nothing"], 4, "nothing"),
        (["reproduce", "--nothing"], 4, "--nothing"),
        (["reproduce", "one"], 4, "one"),
        (["reproduce", "12"], 4, "experiment 12: there is none (choose from 1, 2, 3)"),
        (["reproduce", "--trials", "0"], 4, "--trials"),
        (["reproduce", "--jobs", "-1"], 4, "--jobs"),
        (["reproduce", "--jobs", "many"], 4, "--jobs"),
        (["reproduce", "--out"], 4, "--out"),
        (["reproduce", "--out", ""], 4, "expected a folder, got nothing"),
        (["reproduce", "--out", "/dev/null"], 4, "/dev/null: is a file"),
        (["reproduce", "--out", "/proc/none"], 5, "cannot be written"),
        (["reproduce", "\x1b[31m\n\r\u202e" + "x" * 500], 4, "(see kappascope reproduce --help)"),
        (["study", "--bad"], 4, "(see kappascope study --help)"),
        (["study", "none"], 4, "study none: there is none (choose from toy, lasting)"),
        (["study", "toy", "--text", "/nowhere"], 2, "/nowhere"),
        (["study", "toy", "--text", __file__], 4, "reads no text"),
        (["verify", "/nowhere"], 2, "/nowhere: holds no results"),
    ],
)
def test_a_refusal_is_one_short_line(run, arguments, code, words) -> None:
    found, output, errors = run(*arguments)
    assert (found, output) == (code, "")
    assert errors.startswith("kappascope: error: ") and words in errors
    assert errors.endswith(")\n") and errors[:-1].isprintable() and len(errors) <= 241


def test_an_unforeseen_error_is_one_line_and_a_traceback_only_on_demand(
    run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "files", lambda *_: 1 / 0)
    for arguments, lines in ((), 1), (("--debug",), 6):
        code, _, errors = run("reproduce", 1, "--quick", "--jobs", 0, "--out", tmp_path, *arguments)
        assert code == 5
        assert len(errors.splitlines()) >= lines
        assert ("Traceback" in errors) == (lines > 1)
        assert "ZeroDivisionError" in errors.splitlines()[-1]


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
    monkeypatch.setattr(lab, "discover", lambda: {1: TOY, 10: further})
    usual = run("reproduce", "--quick", "--jobs", 0, "--out", tmp_path)[1]
    assert "1 Toy" in usual and "Further" not in usual
    both = run("reproduce", "--beyond", "--quick", "--jobs", 0, "--out", tmp_path)[1]
    assert "1 Toy" in both and "10 Further" in both
    assert "Beyond the paper" in (tmp_path / "report.html").read_text()
    alone = run("reproduce", 10, "--quick", "--jobs", 0, "--out", tmp_path)[1]
    assert "Toy" not in alone and "10 Further" in alone


def test_findings_are_written_from_the_trials_and_nothing_is_written_elsewhere(
    run, tmp_path: Path
) -> None:
    results, docs = tmp_path / "results", tmp_path / "docs"
    assert run("findings", results, "--docs", docs)[0] == 2
    assert run("reproduce", 1, "--quick", "--jobs", 0, "--out", results)[0] == 0
    assert run("findings", results, "--docs", docs)[0] == 2
    docs.mkdir()
    page = f"# Paper\n{review.BEGIN}\n{review.END}\n"
    (docs / "paper.md").write_text(page)
    code, output, errors = run("findings", results, "--docs", docs)
    assert (code, errors) == (0, "") and "findings.md" in output
    assert "`e1.small`" in (docs / "findings.md").read_text()
    assert "| Q1 |" in (docs / "paper.md").read_text()
    assert sorted(path.name for path in docs.iterdir()) == ["findings.md", "paper.md"]


def test_findings_of_studies_are_tables_figures_and_verdicts(run, tmp_path: Path) -> None:
    docs, paper, nets = (tmp_path / name for name in ("docs", "paper", "nets"))
    docs.mkdir()
    (docs / "paper.md").write_text(f"# Paper\n{review.BEGIN}\n{review.END}\n")
    assert run("reproduce", 1, "--quick", "--jobs", 0, "--out", paper)[0] == 0
    assert run("study", "toy", "--jobs", 0, "--out", nets)[0] == 0
    code, _, errors = run("findings", paper, nets, "--docs", docs)
    assert (code, errors) == (0, "")
    page = (docs / "studies.md").read_text()
    assert "| loss | seconds |" in page and "**holds**: it learns (`toy.learns`, 0)" in page
    assert "`toy.learns`" in (docs / "findings.md").read_text()


def test_trials_asked_for_are_run(run, tmp_path: Path) -> None:
    arguments = "reproduce", 1, "--jobs", 0, "--out", tmp_path, "--quick", "--trials"
    assert run(*arguments, 3)[0] == 0
    few = sha(tmp_path)
    assert run(*arguments, 40)[0] == 0
    assert run(*arguments, 3)[0] == 0
    assert sha(tmp_path) == few


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


def test_verify_finds_the_same_bits(run, tmp_path: Path) -> None:
    complete(TOY, tmp_path)
    code, output, errors = run("verify", tmp_path, "--trials", 3)
    assert (code, errors) == (0, "")
    assert output.count("same") == 3


def test_who_stops_reading_is_no_error() -> None:
    command = f"{sys.executable} {TOYS} reproduce --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def descendants(pid: int) -> set[int]:
    found = {pid}
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda entry: int(entry.name)):
        with suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in found:
                found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    with suppress(OSError):
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    return False


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_stopped_by_a_signal_it_leaves_no_process_and_goes_on(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    arguments = [sys.executable, str(TOYS), "reproduce", "2", "--jobs", "2", "--out", str(tmp_path)]
    with subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True) as driver:
        until(lambda: len(list(tmp_path.glob("units/*.unit"))) >= 2 or driver.poll() is not None)
        started = descendants(driver.pid)
        driver.send_signal(number)
        errors = driver.stderr.read() if driver.stderr else ""
        assert driver.wait(30) == code
    until(lambda: not any(map(alive, started)), 10)
    assert len(started) >= 3  # the driver, two processes, and a tracker of their semaphores
    assert errors.count("kappascope: error: ") == (number != signal.SIGKILL)
    assert "Traceback" not in errors
    assert 2 <= len(list(tmp_path.glob("units/*.unit"))) < 12
    complete(SLOW, tmp_path)


def test_a_study_tunes_compares_and_shows_its_tables(run, tmp_path: Path) -> None:
    code, output, errors = run("study", "toy", "--jobs", 0, "--out", tmp_path)
    assert (code, errors) == (0, "")
    assert "toy: Doubling" in output and "Losses" in output and "In the end." in output
    rows = pq.read_table(tmp_path / "trials.parquet").to_pylist()
    assert {(row["stage"], row["seed"]) for row in rows} == {
        ("tune", 0), *(("compare", seed) for seed in range(4))
    }  # fmt: skip
    assert "seconds" not in {row["component"] for row in rows}
    assert pq.read_table(tmp_path / "times.parquet").num_rows == 6
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
    poor = replace(LASTING, materials=("moon dust",))
    monkeypatch.setattr(lab, "studies", lambda: {"toy": STUDY, "lasting": poor})
    code, output, errors = run("study", "--jobs", 0, "--out", tmp_path)
    assert code == 3 and "toy: Doubling" in output and "Lasting" not in output
    assert "moon dust: is no material" in errors
    assert errors.splitlines()[-1].startswith("kappascope: error: study lasting: left out")
    code, output, errors = run("study", "lasting", "--jobs", 0, "--out", tmp_path / "alone")
    assert (code, output) == (2, "") and errors.count("\n") == 1 and "moon dust" in errors


def test_training_killed_in_the_middle_ends_in_the_same_bits(tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    command = [sys.executable, str(TOYS), "study", "lasting", "--jobs", "2", "--out", str(killed)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as driver:
        until(lambda: len(list(killed.glob("bookmarks/*.unit"))) == 2)
        time.sleep(0.3)
        started = descendants(driver.pid)
        driver.kill()
    until(lambda: not any(map(alive, started)), 10)
    bookmarks = list(killed.glob("bookmarks/*.unit"))
    assert len(bookmarks) == 2 and not list(killed.glob("units/*.unit"))
    steps = [len(Bookmark(path)._saved()["log"]) for path in bookmarks]
    assert all(0 < step < 20 for step in steps)
    complete(LASTING, killed)
    complete(LASTING, whole)
    assert sha(killed) == sha(whole) and not list(killed.glob("bookmarks/*"))


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_early_interrupt_of_the_terminal_is_one_line(tmp_path: Path) -> None:
    arguments = [sys.executable, str(TOYS), "reproduce", "2", "--out", str(tmp_path)]
    group: dict[str, Any] = {"stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(arguments, **group) as driver:
        # as Ctrl-C does, to all: the server of processes is there, and loads its modules
        until(lambda: len(descendants(driver.pid)) >= 3 or driver.poll() is not None)
        os.killpg(driver.pid, signal.SIGINT)
        errors = driver.stderr.read() if driver.stderr else ""
        assert driver.wait(30) == 130
    assert errors.count("\n") == 1 and "stopped early" in errors


def test_an_interrupt_that_a_library_turns_into_another_error_is_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loading() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except BaseException as error:
            raise RecursionError("half loaded") from error

    monkeypatch.setattr(lab, "discover", loading)
    assert cli.run(["reproduce", "1"]) == 130
    assert "stopped early" in capsys.readouterr().err


def test_help_names_every_study(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["study", "--help"]) == 0
    told = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert " or ".join(", ".join(lab.studies()).rsplit(", ", 1)) in told


def test_a_second_interrupt_ends_at_once(tmp_path: Path) -> None:
    code = """
import time
from kappascope import cli
with cli._signals():
    try:
        print("ready", flush=True)
        time.sleep(60)
    except cli.Interrupted:
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
