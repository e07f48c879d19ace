"""The application: help, refusals of wrong usage, and commands that are found."""

import errno
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kappascope.__main__ import main
from kappascope.cli import app
from kappascope.system.workers import Processes
from tiny_runs import COMMAND


def test_help_and_version_load_nothing_heavy() -> None:
    code = """
import sys
from kappascope.__main__ import main
from kappascope.cli import app
assert app.run(["-h"]) == app.run(["--version"]) == app.run(["reproduce", "--help"]) == 0
assert not {"torch", "numpy", "scipy", "pyarrow", "matplotlib"} & set(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "reproduce" in done.stdout


def test_what_cannot_be_used_is_refused_without_torch(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("# Notes\n")
    wrong = [
        ["diagnose", "nowhere.pt"],
        ["diagnose", "org/name"],
        ["diagnose", "notes.txt"],
        ["diagnose", "notes.txt", "--json"],
        ["diagnose", "--nonsense", "model.pt"],
        ["diagnose", "model.pt", "--sort", "colour"],
        ["diagnose", str(tmp_path), "--reference", "nowhere.pt"],
        ["diagnose", str(tmp_path), "--atlas", "nowhere.json"],
        ["diagnose", str(tmp_path), "--memory", "much"],
        ["diagnose", str(tmp_path), "--rename", "x"],
        ["diagnose", str(tmp_path), "--json", "--csv"],
        ["diff", "nowhere.pt", "notes.txt"],
        ["survey", "nowhere.pt", "notes.txt"],
    ]
    code = f"""
import sys
from kappascope.cli import app
for arguments in {wrong!r}:
    assert app.run(arguments) in (2, 4), arguments
    assert not {{"torch", "numpy", "scipy"}} & set(sys.modules), arguments
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    lines = done.stderr.splitlines()
    assert (done.returncode, len(lines)) == (0, len(wrong)), done.stderr
    assert "hf://org/name" in lines[1]


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


def test_verbose_tells_of_every_matrix_on_the_error_output(tmp_path: Path) -> None:
    torch.save({"fc.weight": torch.eye(3)}, tmp_path / "model.pt")
    command = [*COMMAND, "diagnose", str(tmp_path / "model.pt"), "--json", "-v"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and json.loads(done.stdout)["summary"]["analysed"] == 1
    assert "kappascope.clinic.diagnose: fc.weight: " in done.stderr
    assert "kappascope.clinic.diagnose: digest of model.pt: " in done.stderr
    assert [line for line in done.stderr.splitlines() if line != line.rstrip()] == []


def test_the_shell_completes_commands_and_options() -> None:
    wanted = {"kappascope diag": "diagnose", "kappascope diagnose --fa": "--fail-on"}
    for words, expected in wanted.items():
        asked = {"_KAPPASCOPE_COMPLETE": "complete_bash", "COMP_WORDS": words}
        asked["COMP_CWORD"] = str(words.count(" "))
        done = subprocess.run(
            COMMAND, capture_output=True, text=True, check=False, env=os.environ | asked
        )
        assert (done.returncode, done.stdout.split(), done.stderr) == (0, [expected], "")


def test_who_stops_reading_is_no_error() -> None:
    command = f"{shlex.join(COMMAND)} reproduce --help | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_a_command_is_a_file_with_a_function_of_its_name(run) -> None:
    folder = Path(app.__file__).parent
    files = {path.stem for path in folder.glob("[a-z]*.py")} - {"app"}
    assert set(app.command_names()) == files
    for name in files:
        assert run(name, "--help")[0] == 0


def test_a_broken_pipe_inside_a_command_is_an_error(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(Processes, "warm", broken)
    code, output, errors = run("diagnose", ".")
    assert (code, output) == (5, "") and errors.count("\n") == 1 and "Broken pipe" in errors


def closed(redirection: str, model: Path) -> tuple[str, str]:
    """The exit code and what is printed where the shell closes streams; -OO drops docstrings."""
    command = shlex.join([sys.executable, "-OO", "-m", "kappascope", "diagnose", str(model)])
    shell = ["bash", "-c", f"{command} --json {redirection}; echo code $?"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    return done.stdout, done.stderr


def test_closed_streams_are_no_traceback(tmp_path: Path) -> None:
    torch.save({"weight": torch.eye(3)}, tmp_path / "model.pt")
    output, errors = closed("2>&-", tmp_path / "model.pt")
    document, code = output.splitlines()
    assert json.loads(document)["summary"]["analysed"] == 1 and (code, errors) == ("code 0", "")
    output, errors = closed(">&-", tmp_path / "model.pt")
    assert output == "code 5\n" and errors.count("\n") == 1 and "standard output" in errors


@pytest.mark.parametrize("columns", ["0", "-1", "none", "\N{SUPERSCRIPT TWO}", "9" * 5000, ""])
def test_a_terminal_without_width_hides_no_result(
    columns: str, run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"weight": torch.eye(3)}, tmp_path / "model.pt")
    monkeypatch.setenv("COLUMNS", columns)
    code, output, errors = run("diagnose", tmp_path / "model.pt")
    assert (code, errors) == (0, "") and "1 matrix was examined" in output


def test_a_removed_current_folder_is_one_line_and_one_document(tmp_path: Path) -> None:
    script = (
        f"cd {shlex.quote(str(tmp_path))} && mkdir gone && cd gone && rmdir ../gone && "
        f"{shlex.join([sys.executable, '-P', '-m', 'kappascope'])} diagnose m.pt --json"
    )
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 5 and json.loads(done.stdout)["error"]["code"] == 5
    assert done.stderr.count("\n") == 1 and "the current folder: does not exist" in done.stderr


# --- limits under which little or nothing can be done ---------------------------------------------


def limited(limits: list[str], *arguments: object) -> subprocess.CompletedProcess[str]:
    command = ["prlimit", *limits, sys.executable, "-P", "-m", "kappascope", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


needs_prlimit = pytest.mark.skipif(not shutil.which("prlimit"), reason="no prlimit here")


@needs_prlimit
@pytest.mark.parametrize("command", ["diagnose", "survey"])
@pytest.mark.parametrize(
    "limit", ["--as=64000000", "--as=600000000", "--data=14000000", "--data=60000000",
              "--data=150000000", "--nofile=5", "--nofile=7"],
)  # fmt: skip
def test_json_is_one_document_where_nothing_can_be_loaded(
    command: str, limit: str, tmp_path: Path
) -> None:
    """Libraries that lack memory while they are loaded print, and end the process."""
    torch.save({"weight": torch.eye(3)}, tmp_path / "model.pt")
    done = limited([limit], command, tmp_path / "model.pt", "--json", "--jobs", 1)
    assert done.returncode == json.loads(done.stdout)["error"]["code"] == 5
    last = done.stderr.splitlines()[-1]
    assert last.startswith("kappascope: error: ") and "raise the limit" in last
    assert "OpenBLAS" not in done.stderr and "terminate" not in done.stderr


@needs_prlimit
@pytest.mark.parametrize("most", [1, 3, 8])
def test_few_processes_are_enough_or_one_line(most: int, tmp_path: Path) -> None:
    torch.save({"weight": torch.eye(3)}, tmp_path / "model.pt")
    arguments = "diagnose", tmp_path / "model.pt", "--json", "--jobs", 2
    if os.geteuid():
        done = limited([f"--nproc={most}"], *arguments)
    else:  # the system does not limit its administrator: somebody else, who may read our files
        if not shutil.which("setpriv"):
            pytest.skip("no setpriv here, and root may have any number of processes")
        reading = "-all,+dac_read_search"
        somebody = ["setpriv", "--reuid=65533", "--regid=65533", "--clear-groups"]
        somebody += [f"--{kind}={reading}" for kind in ("inh-caps", "ambient-caps", "bounding-set")]
        if subprocess.run([*somebody, sys.executable, "-c", ""], check=False).returncode:
            pytest.skip("nobody else may be impersonated here")
        done = limited([f"--nproc={most}", *somebody], *arguments)
    document = json.loads(done.stdout)
    if done.returncode == 0:
        assert most > 3 and document["summary"]["analysed"] == 1 and not done.stderr
    else:
        assert done.returncode == document["error"]["code"] == 5
        assert done.stderr.count("\n") == 1 and "`ulimit -u`" in done.stderr


def test_an_error_before_the_application_is_told_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unloadable() -> None:
        raise OSError(errno.EMFILE, 'Too many "open"\n\\files')

    monkeypatch.setattr(app, "main", unloadable)
    monkeypatch.setattr("signal.pthread_sigmask", lambda *_: set())  # other tests take signals
    monkeypatch.setattr(sys, "path", [*sys.path])  # which main changes in place
    monkeypatch.setattr(sys, "argv", ["kappascope", "diff", "a", "b", "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    output, errors = capsys.readouterr()
    assert ended.value.code == json.loads(output)["error"]["code"] == 5
    assert errors.startswith("kappascope: error: ") and errors.count("\n") == 1


@pytest.mark.parametrize("arguments", [["survey", "/nowhere"], ["survey", "--nope"], ["--nope"]])
def test_a_command_without_a_document_of_its_own_for_errors_has_one(
    arguments: list[str], run
) -> None:
    code, output, errors = run(*arguments, "--json")
    assert code == json.loads(output)["error"]["code"]
    assert errors.splitlines()[-1].startswith("kappascope: error: ")
