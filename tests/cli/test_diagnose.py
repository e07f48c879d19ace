"""``kappascope diagnose``: exit codes, one line for an error, one document for a machine."""

import contextlib
import csv
import json
import math
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pyarrow.parquet as pq
import pytest
import torch

from kappascope.cli import app
from kappascope.cli._errors import Interrupted
from kappascope.clinic import symptoms
from monitored_runs import write_example
from processes import alive, members, until

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        code = app.run(["diagnose", *map(str, arguments), "--jobs", "1"])
        return code, *capsys.readouterr()

    return run


def weights(**more: torch.Tensor) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layers.{i}.fc.weight": torch.randn(12, 8, generator=generator) for i in (0, 1)} | more


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "model.pt"
    torch.save(weights(), path)
    return path


def one_line(errors: str) -> str:
    last = errors.splitlines()[-1]
    assert last.startswith("kappascope: error: ") and len(last) <= 240 and last.isprintable()
    assert "Traceback" not in errors
    return last


def test_a_healthy_checkpoint_ends_with_0_and_a_table(run: Run, saved: Path) -> None:
    code, output, errors = run(saved)
    assert (code, errors) == (0, "")
    assert "layers.0.fc" in output and "were examined" in output


def test_a_circle_of_links_is_refused_in_one_line(run: Run, saved: Path, tmp_path: Path) -> None:
    circle = tmp_path / "circle.html"
    circle.symlink_to(circle.name)
    for path in (circle, circle / "x.pt"):
        code, _, errors = run(path)
        assert code == 2 and "Too many levels of symbolic links" in one_line(errors)
    code, _, errors = run(saved, "--reference", circle)
    assert code == 2 and "Too many levels of symbolic links" in one_line(errors)
    code, _, errors = run(saved, "--html", circle)
    assert code == 4 and "a link that leads to itself" in one_line(errors)
    assert circle.is_symlink()


def test_json_is_one_document_and_nothing_else(run: Run, saved: Path) -> None:
    code, output, _ = run(saved, "--json")
    assert code == 0
    assert [one["name"] for one in json.loads(output)["matrices"]] == list(weights())


@pytest.mark.parametrize("bad", ["missing.pt", "empty.pt", "page.safetensors", "folder"])
def test_what_cannot_be_used_ends_with_2_and_a_document_if_asked(
    run: Run, tmp_path: Path, bad: str
) -> None:
    (tmp_path / "empty.pt").touch()
    (tmp_path / "page.safetensors").write_text("<!doctype html>")
    (tmp_path / "folder").mkdir()
    code, output, errors = run(tmp_path / bad, "--json")
    assert code == 2
    assert json.loads(output)["error"]["code"] == 2
    assert bad in one_line(errors)


def test_a_part_that_fails_ends_with_3_and_the_rest_is_there(run: Run, tmp_path: Path) -> None:
    torch.save(weights(bad=torch.full((3, 3), math.inf)), tmp_path / "model.pt")
    code, output, errors = run(tmp_path / "model.pt", "--json")
    told = json.loads(output)
    assert code == 3 and "bad: non-finite (9 of 9)" in one_line(errors)
    assert told["summary"] == told["summary"] | {"matrices": 3, "analysed": 2, "failed": 1}


def test_all_that_fails_ends_with_2(run: Run, tmp_path: Path) -> None:
    torch.save({"bad": torch.full((3, 3), math.nan)}, tmp_path / "model.pt")
    code, _, errors = run(tmp_path / "model.pt")
    assert code == 2 and "nothing analysed" in one_line(errors)


def test_no_matrix_at_all_ends_with_2(run: Run, tmp_path: Path) -> None:
    torch.save({"bias": torch.ones(3)}, tmp_path / "model.pt")
    code, output, errors = run(tmp_path / "model.pt", "--json")
    assert code == 2 and "no matrix to examine" in one_line(errors)
    assert json.loads(output)["matrices"] == []


def test_fail_on_ends_with_1_from_its_severity_on(run: Run, tmp_path: Path) -> None:
    dead = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    dead[:20] = 0
    torch.save({"layers.0.fc.weight": dead}, tmp_path / "model.pt")
    code, _, errors = run(tmp_path / "model.pt", "--fail-on", "info")
    assert code == 1 and "1 finding of severity info" in one_line(errors)
    assert run(tmp_path / "model.pt")[0] == 0


def test_files_are_written_whole(run: Run, saved: Path, tmp_path: Path) -> None:
    for name in ("a.html", "a.parquet", "a.csv"):
        option = "--html" if name.endswith("html") else "--table"
        assert run(saved, option, tmp_path / name)[0] == 0
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    assert pq.read_table(tmp_path / "a.parquet")["name"].to_pylist() == list(weights())
    rows = list(csv.DictReader((tmp_path / "a.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == list(weights())
    assert float(rows[0]["condition_number"]) > 1


@pytest.mark.parametrize(
    "case",
    [
        ("--table", "a.xlsx", 4),
        ("--html", ".", 4),
        ("--html", "nowhere/a.html", 5),
        ("--table", "model.pt", 4),
        ("--html", "model.pt", 4),
    ],
)
def test_places_that_cannot_be_written_to_are_refused_before_any_work(
    run: Run, saved: Path, tmp_path: Path, case: tuple[str, str, int]
) -> None:
    option, name, code = case
    before = saved.read_bytes()
    found, output, errors = run(saved, option, tmp_path / name)
    assert (found, output) == (code, "")
    one_line(errors)
    assert saved.read_bytes() == before


def test_nothing_is_written_into_a_model_folder(run: Run, tmp_path: Path) -> None:
    torch.save(weights(), tmp_path / "pytorch_model.bin")
    assert run(tmp_path, "--html", tmp_path / "report.html")[0] == 4
    assert sorted(one.name for one in tmp_path.iterdir()) == ["pytorch_model.bin"]


@pytest.mark.parametrize(
    "arguments", [[], ["--spectrum", "some"], ["--fail-on", "bad"], ["--jobs", "0"]]
)
def test_wrong_usage_ends_with_4(
    saved: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    path = [str(saved)] if arguments else []
    assert app.run(["diagnose", *path, *arguments]) == 4
    one_line(capsys.readouterr().err)


def test_several_paths_are_a_trajectory(run: Run, saved: Path, tmp_path: Path) -> None:
    moved = {name: 2 * weight for name, weight in weights().items()}
    torch.save(moved, tmp_path / "later.pt")
    code, output, _ = run(saved, tmp_path / "later.pt", "--json")
    told = json.loads(output)
    assert code == 0 and len(told["trajectory"]) == 2
    assert told["matrices"][0]["errors"]["frobenius_norm"] == pytest.approx(1.0)
    code, output, _ = run(saved, tmp_path / "later.pt")
    way = output.split("largest κ")[1].splitlines()
    assert code == 0 and "later.pt" in output
    assert any(line.split()[-2:-1] == ["1.00"] for line in way)


def test_names_neither_colour_the_terminal_nor_break_the_page(run: Run, tmp_path: Path) -> None:
    name = "</script><img src=x onerror=alert(1)>\x1b[31m\r\n\u202e{{ 1 + 1 }}" + "long" * 2500
    torch.save({name: torch.randn(4, 4)}, tmp_path / "model.pt")
    code, output, errors = run(tmp_path / "model.pt", "--html", tmp_path / "a.html")
    assert code == 0, errors
    assert not {"\x1b", "\r", "\u202e"} & set(output)
    assert "<img" not in (tmp_path / "a.html").read_text().lower()


def test_names_that_are_paths_write_no_file_anywhere(run: Run, tmp_path: Path) -> None:
    names = ["../above", "/tmp/absolute", "..", "nul", "a/b", "a\\b", "A", "a", "a ", "a."]
    inside = tmp_path / "deep" / "model.pt"
    inside.parent.mkdir()
    torch.save({name: torch.randn(4, 4) for name in names}, inside)
    out = tmp_path / "out"
    out.mkdir()
    code, output, errors = run(
        inside, "--json", "--html", out / "a.html", "--table", out / "a.parquet"
    )
    assert code == 0, errors
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")) == [
        "deep/model.pt", "out/a.html", "out/a.parquet",
    ]  # fmt: skip
    assert sorted(row["name"] for row in json.loads(output)["matrices"]) == sorted(names)


def test_input_is_never_executed_nor_changed(run: Run, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'marker'}",)

    path = tmp_path / "evil.pt"
    torch.save({"w": torch.eye(2), "x": Evil()}, path)
    before = path.read_bytes()
    code, _, errors = run(path)
    assert code == 2 and "system" in one_line(errors)
    assert not (tmp_path / "marker").exists() and path.read_bytes() == before


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("loaded", ["typer", "rich.console", "kappascope.clinic.atlas"])
def test_an_interrupt_leaves_nothing_running(loaded: str, sent: int, saved: Path) -> None:
    """It comes while a certain module is loaded, and not at a time: machines may be busy."""
    program = f"""
import os, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == {loaded!r}:
            os.kill(os.getpid(), {int(sent)})
from kappascope.__main__ import main
sys.meta_path.insert(0, Interrupting())
sys.argv = ["kappascope", "diagnose", {str(saved)!r}, "--json"]
main()
"""
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    output, errors = process.communicate(timeout=120)
    assert process.returncode == json.loads(output)["error"]["code"] == 128 + sent
    assert errors.count("\n") == 1 and "stopped early" in one_line(errors)
    until(lambda: not any(map(alive, members(process.pid))), seconds=10)


def test_a_report_never_replaces_the_reference(run: Run, saved: Path, tmp_path: Path) -> None:
    other = tmp_path / "base.pt"
    torch.save(weights(), other)
    before = other.read_bytes()
    for option, out in (("--html", other), ("--html", tmp_path / "." / "base.pt")):
        code, _, errors = run(saved, "--reference", other, option, out)
        assert code == 4 and "lies in the checkpoint" in one_line(errors)
    assert other.read_bytes() == before


def test_a_quantized_model_is_done_in_part(run: Run, tmp_path: Path) -> None:
    coded = {"up.qweight": torch.ones(4, 4).int(), "up.scales": torch.ones(1, 4)}
    torch.save(weights(**coded, position_ids=torch.ones(1, 4).long()), tmp_path / "model.pt")
    code, output, errors = run(tmp_path / "model.pt", "--json")
    assert code == 3 and "1 item not analysed, first up.qweight: quantized" in one_line(errors)
    assert [one["name"] for one in json.loads(output)["matrices"]] == list(weights())


def test_nothing_left_to_examine_is_told_by_what_was_lost_or_not_chosen(
    run: Run, saved: Path, tmp_path: Path
) -> None:
    torch.save({"bias": torch.ones(3), "up.qweight": torch.ones(4, 4).int()}, tmp_path / "q.pt")
    assert "first up.qweight: quantized" in one_line(run(tmp_path / "q.pt")[2])
    torch.save({"bias": torch.ones(3), **weights()}, saved)
    assert "not chosen" in one_line(run(saved, "--include", "nothing")[2])


def test_an_error_is_the_only_line_and_a_choice_is_told_with_the_result(
    run: Run, tmp_path: Path
) -> None:
    torch.save({"model": torch.nn.Linear(8, 12)}, tmp_path / "model.pt")
    code, output, errors = run(tmp_path / "model.pt")
    assert code == 3 and errors.splitlines() == [one_line(errors)]
    assert "not built" in output.replace("\n", " ")
    told = json.loads(run(tmp_path / "model.pt", "--json")[1])
    assert "not built" in told["provenance"]["notes"][0]


def test_the_terminal_tells_what_moved_from_the_reference(run: Run, saved: Path) -> None:
    moved = {name: (1 + i) * weight for i, (name, weight) in enumerate(weights().items())}
    torch.save(moved, saved.with_name("moved.pt"))
    output = run(saved.with_name("moved.pt"), "--reference", saved)[1]
    told = " ".join(output.split())
    assert "Compared with" in told and "2 of 2 matrices." in told
    assert "frobenius norm 0.500 1.00 layers.1.fc.weight" in told
    assert "Against" not in run(saved)[1]
    torch.save({"other": torch.eye(3)}, saved.with_name("other.pt"))
    assert "nothing there" in run(saved, "--reference", saved.with_name("other.pt"))[1]


def test_code_to_copy_is_not_broken_into_lines(run: Run, tmp_path: Path) -> None:
    name = "model.decoder.layers.0.some_rather_long_name_of_a_module.up_proj.weight"
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 3] *= 100
    torch.save({name: weight}, tmp_path / "model.pt")
    lines = run(tmp_path / "model.pt")[1].splitlines()
    assert any(".attach(model, optimizer" in line and f"{name}'" in line for line in lines)


def test_a_vector_that_is_not_finite_fails_a_run_that_asks_for_it(run: Run, tmp_path: Path) -> None:
    torch.save(weights(bias=torch.tensor([1.0, math.nan])), tmp_path / "model.pt")
    code, output, errors = run(tmp_path / "model.pt", "--fail-on", "critical")
    assert code == 1 and "critical: non-finite in bias" in output
    assert "bias: 1 finding of severity critical" in one_line(errors)


def test_an_ill_step_of_a_trajectory_is_named(run: Run, saved: Path, tmp_path: Path) -> None:
    torch.save(weights(w=torch.full((2, 2), math.nan)), tmp_path / "ill.pt")
    code, output, errors = run(tmp_path / "ill.pt", saved, "--fail-on", "critical")
    assert code == 1 and "ill.pt: w: 1 finding" in one_line(errors)
    assert "1 critical; the worst is non-finite in w." in " ".join(output.split())
    assert any("ill.pt" in line and line.split()[-2:] == ["1", "critical"]
               for line in output.splitlines())  # fmt: skip


def test_objects_beside_the_tensors_are_no_matrices_that_failed(run: Run, tmp_path: Path) -> None:
    torch.save({"state_dict": weights(), "args": Namespace(lr=1)}, tmp_path / "model.ckpt")
    code, output, errors = run(tmp_path / "model.ckpt")
    assert code == 3 and "2 matrices were examined; 1 object of another class was" in output
    assert "could not be examined" not in output and "failed:" not in output
    assert "args: object of class argparse.Namespace (every tensor was read" in one_line(errors)


def test_attention_without_a_number_of_heads_is_told_of(run: Run, tmp_path: Path) -> None:
    names = [f"h.0.attn.{name}_proj.weight" for name in "qkvo"]
    torch.save({name: torch.randn(8, 8) for name in names}, tmp_path / "model.pt")
    output = " ".join(run(tmp_path / "model.pt")[1].split())
    assert "No QK and OV products: number of heads unknown (h.0.attn); a config.json" in output
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
    assert "No QK" not in run(tmp_path / "model.pt")[1]


def test_what_the_reference_does_not_have_is_named(run: Run, saved: Path, tmp_path: Path) -> None:
    torch.save(weights(b=torch.eye(3), c=torch.eye(2)), tmp_path / "more.pt")
    torch.save(weights(c=torch.eye(4)), tmp_path / "other.pt")
    output = run(tmp_path / "more.pt", "--reference", tmp_path / "other.pt")[1]
    assert "not compared: b: not in the reference" in output
    assert "not compared: c: the reference has another shape: (4, 4), not (2, 2)" in output


def test_a_table_has_the_gravest_severity_and_the_rules(run: Run, tmp_path: Path) -> None:
    torch.save(weights(w=torch.full((2, 2), math.nan)), tmp_path / "model.pt")
    run(tmp_path / "model.pt", "--table", tmp_path / "t.csv")
    rows = list(csv.DictReader((tmp_path / "t.csv").read_text().splitlines()))
    assert [(row["severity"], row["findings"]) for row in rows if row["name"] == "w"] == [
        ("critical", "non-finite")
    ]
    assert all(row["findings"] == "" for row in rows if row["name"] != "w")


def test_a_reference_without_any_of_the_matrices_ends_with_3(
    run: Run, saved: Path, tmp_path: Path
) -> None:
    torch.save({"other.weight": torch.eye(7)}, tmp_path / "other.pt")
    code, output, errors = run(saved, "--reference", tmp_path / "other.pt")
    assert code == 3 and "matri" in output
    assert "nothing there has the name and shape" in one_line(errors)


def test_a_reference_that_cannot_be_compared_with_says_why(run: Run, tmp_path: Path) -> None:
    torch.save({"w": torch.eye(7)}, tmp_path / "model.pt")
    torch.save({"w": torch.full((7, 7), math.nan)}, tmp_path / "other.pt")
    code, output, errors = run(tmp_path / "model.pt", "--reference", tmp_path / "other.pt")
    assert code == 3 and "no matrix could be compared, first w: the reference" in one_line(errors)
    assert "not compared: w: the reference failed: non-finite" in output


def test_a_report_may_be_written_to_a_pipe_which_stays_one(
    run: Run, saved: Path, tmp_path: Path
) -> None:
    pipe, copy = tmp_path / "pipe", tmp_path / "copy"
    os.mkfifo(pipe)
    with copy.open("wb") as file, subprocess.Popen(["cat", str(pipe)], stdout=file) as reader:
        try:
            assert run(saved, "--html", pipe)[0] == 0
            assert pipe.is_fifo()
            reader.wait(20)
        finally:
            reader.kill()
    assert copy.read_text(encoding="utf-8").lower().startswith("<!doctype html>")


def test_a_folder_that_does_not_exist_is_told(run: Run, saved: Path, tmp_path: Path) -> None:
    code, _, errors = run(saved, "--html", tmp_path / "none" / "x.html")
    assert code == 5 and "its folder does not exist" in one_line(errors)


def test_a_signal_that_python_dropped_is_not_forgotten(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shows(*_: object) -> None:
        with contextlib.suppress(Interrupted):  # as a callback of the interpreter does
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("kappascope.cli.diagnose._show", shows)
    assert app.run(["diagnose", str(saved), "--jobs", "1"]) == 130
    assert "stopped early" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    "source", ["import os\nos.getcwd()\n", "class A:\n  b = 1\n", "[a]\nb = 1\n"]
)
def test_program_text_is_no_pickle(run: Run, tmp_path: Path, source: str) -> None:
    path = tmp_path / "model.pt"
    path.write_text(source)
    code, _, errors = run(path)
    assert code == 2 and "it is text" in one_line(errors)


def test_what_cannot_be_written_costs_no_result(
    run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(28, "no room")

    monkeypatch.setattr("kappascope.system.files.os.fsync", full)
    code, output, errors = run(saved, "--html", tmp_path / "x.html")
    assert code == 5 and "no room" in one_line(errors)
    assert "were examined" in output and "Written" not in output
    code, output, _ = run(saved, "--html", tmp_path / "x.html", "--json")
    assert code == 5 and json.loads(output)["summary"]["analysed"] == 2


def test_a_file_beside_the_checkpoint_is_not_written_over(run: Run, saved: Path) -> None:
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        shard = saved.with_name(name)
        shard.write_text("{}")
        code, _, errors = run(saved, "--html", shard)
        assert code == 4 and "beside the checkpoint" in one_line(errors)
        assert shard.read_text() == "{}"
    assert run(saved, "--html", saved.with_name("a.html"))[0] == 0
    assert run(saved, "--html", saved.with_name("a.html"))[0] == 0  # a report may be


def test_one_place_is_not_given_to_two_files(run: Run, saved: Path, tmp_path: Path) -> None:
    both = tmp_path / "report.csv"
    code, _, errors = run(saved, "--html", both, "--table", both)
    assert code == 4 and "named twice" in one_line(errors) and not both.exists()


def test_without_a_matrix_there_is_still_a_page_and_a_list(run: Run, tmp_path: Path) -> None:
    torch.save({"bias": torch.ones(3)}, tmp_path / "model.pt")
    out = tmp_path / "report.HTML"
    code, output, _ = run(tmp_path / "model.pt", "--json", "--html", out)
    told = json.loads(output)
    assert code == told["error"]["code"] == 2
    assert told["source"] == str(tmp_path / "model.pt")
    assert [one["name"] for one in told["skipped"]] == ["bias"]
    assert "nothing was examined" in out.read_text()


@pytest.mark.parametrize("wrong", [["--spectrum", "bogus"], ["--fail-on", "bad"], ["--nope"]])
def test_wrong_usage_is_told_in_a_document_too(run: Run, saved: Path, wrong: list[str]) -> None:
    code, output, errors = run(saved, "--json", *wrong)
    assert code == json.loads(output)["error"]["code"] == 4
    assert wrong[0] in one_line(errors)


def test_a_refused_document_names_its_source(run: Run, saved: Path) -> None:
    _, output, _ = run(saved, "--json", "--table", "x.txt")
    assert json.loads(output)["source"] == str(saved)


def test_a_step_that_fails_leaves_the_others(run: Run, saved: Path, tmp_path: Path) -> None:
    bad = {name: torch.full_like(w, math.nan) for name, w in weights().items()}
    torch.save(bad, tmp_path / "bad.pt")
    code, output, _ = run(saved, tmp_path / "bad.pt", saved)
    assert code == 3 and "were examined" in output


def test_all_steps_are_opened_before_any_is_examined(run: Run, saved: Path, monkeypatch) -> None:
    monkeypatch.setattr("kappascope.cli.diagnose.examined", lambda case: pytest.fail("worked"))
    code, _, errors = run(saved, saved.with_name("nowhere.pt"))
    assert code == 2 and "nowhere.pt" in one_line(errors)


def test_a_long_path_loses_its_middle_and_not_the_reason(run: Run, tmp_path: Path) -> None:
    code, _, errors = run(tmp_path / ("e" * 200) / "model.pt")
    assert code == 2 and "No such file" in one_line(errors) and "model.pt: " in errors


def test_a_path_without_a_name_is_refused(run: Run) -> None:
    code, _, errors = run("")
    assert code == 4 and "without a name" in one_line(errors)


def test_an_encoding_that_lacks_a_sign_is_no_error(saved: Path) -> None:
    surroundings = os.environ | {"PYTHONIOENCODING": "latin-1"}
    command = [sys.executable, "-m", "kappascope", "diagnose", str(saved), "--jobs", "1"]
    done = subprocess.run(command, env=surroundings, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"were examined" in done.stdout


def test_too_little_memory_is_told_beforehand_with_what_allows_more(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "large.pt"
    torch.save({"w": torch.zeros(3000, 3000, dtype=torch.bfloat16)}, path)
    code, _, errors = run(path, "--memory", "600M")
    assert code == 2 and len(errors.splitlines()) == 1
    assert "w: needs 0.7 GB of memory, more than the 0.6 GB that a worker may use" in errors
    assert "--memory" in errors and "whole" not in errors
    code, out, errors = run(path, "--memory", "1500M")
    assert code == 0, errors + out


@pytest.mark.parametrize("memory", ["much", "0", "-1G", "", "8X"])
def test_a_memory_that_is_no_size_is_wrong_usage(run: Run, saved: Path, memory: str) -> None:
    code, _, errors = run(saved, f"--memory={memory}")
    assert code == 4 and "like 8G" in errors and len(errors.splitlines()) == 1


# --- one document, whatever fails ----------------------------------------------------------------


def fails(*args: object, **kwargs: object) -> NoReturn:
    raise OverflowError("math range error")


def test_a_rule_that_fails_is_named_and_ends_with_3(
    run: Run, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fragile = symptoms.ClinicRule(fails, "defect", "none")
    monkeypatch.setitem(symptoms.RULES, "fragile", fragile)
    code, output, errors = run(saved, "--json")
    document = json.loads(output)
    reason = "the rule fragile failed: OverflowError: math range error"
    names = ["layers.0.fc.weight", "layers.1.fc.weight"]
    assert document["failed"] == [{"name": name, "reason": reason} for name in names]
    assert (
        code == 3
        and "the rule fragile failed" in one_line(errors)
        and len(document["matrices"]) == 2
    )
    code, output, errors = run(saved)
    assert code == 3 and "the rule fragile failed" in one_line(errors)
    assert f"failed: layers.0.fc.weight: {reason}" in " ".join(output.split())


@pytest.mark.parametrize(
    "broken",
    [
        "kappascope.clinic.diagnosis.document",
        "kappascope.clinic.diagnose.case",
        "kappascope.clinic.diagnose.Case.concluded",
        "kappascope.clinic.diagnose.Case.examine",
        "kappascope.clinic.html.diagnosis_page",
        "kappascope.clinic.diagnosis.spreadsheet",
        "kappascope.cli.diagnose._no_matrix",
    ],
)
def test_json_is_one_document_whatever_fails(
    broken: str, run: Run, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broken, fails)
    page, table = tmp_path / "page" / "p.html", tmp_path / "page" / "t.csv"
    page.parent.mkdir()
    code, output, errors = run(saved, "--json", "--html", page, "--table", table)
    document = json.loads(output)
    assert document["schema"] == "kappascope.diagnosis/2" and code in (3, 5)
    assert "OverflowError: math range error" in one_line(errors)


def test_json_is_one_document_if_torch_cannot_be_loaded(saved: Path) -> None:
    """Interrupted in the middle of loading it, torch cannot be loaded a second time."""
    program = f"""
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "torch._tensor":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupting())
from kappascope.cli import app
sys.exit(app.run(["diagnose", {str(saved)!r}, "--json"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    document = json.loads(ended.stdout)
    assert ended.returncode == 130 and document["matrices"] == []
    assert document["error"]["wrong"] and one_line(ended.stderr)


def test_a_recorded_run_is_a_trajectory_of_its_own(run: Run, saved: Path, tmp_path: Path) -> None:
    folder = write_example(tmp_path / "run")
    code, output, errors = run(folder, "--json", "--html", tmp_path / "page.html")
    assert (code, errors) == (0, "") and len(json.loads(output)["trajectory"]) == 11
    assert "Trajectory" in (tmp_path / "page.html").read_text()
    for others in ((folder, saved), (folder, "--reference", saved)):
        code, _, errors = run(*others)
        assert code == 4 and "name the run alone" in one_line(errors)


def test_json_is_one_document_if_there_is_no_room_for_torch(saved: Path) -> None:
    program = f"""
import sys
class Full:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ImportError("libtorch_cpu.so: failed to map segment from shared object")
sys.meta_path.insert(0, Full())
from kappascope.cli import app
sys.exit(app.run(["diagnose", {str(saved)!r}, "--json"]))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], check=False, capture_output=True, text=True
    )
    document = json.loads(ended.stdout)
    assert ended.returncode == 5 and document["provenance"]["cpu capability"] == "unknown"
    assert "ulimit -v" in document["error"]["advice"] and "ulimit -v" in one_line(ended.stderr)


def test_a_name_too_long_for_the_system_is_told_of_what_it_names(run: Run, saved: Path) -> None:
    code, output, errors = run("x" * 5000, "--json")
    assert code == json.loads(output)["error"]["code"] == 2
    assert "File name too long (give a checkpoint" in one_line(errors)
    code, output, errors = run(saved, "--html", f"{'x' * 300}.html")
    assert (code, output) == (5, "") and "cannot be written: File name" in one_line(errors)


def test_what_is_learned_is_told_where_the_optimizer_is(run: Run, tmp_path: Path) -> None:
    start = 0.1 * torch.randn(6, 5, generator=torch.Generator().manual_seed(0))
    torch.save({"fc.weight": start}, tmp_path / "before.pt")
    torch.save({"fc.weight": start + 3 * torch.eye(6, 5)}, tmp_path / "after.pt")
    compared = [tmp_path / "after.pt", "--reference", tmp_path / "before.pt"]
    compared += ["--optimizer", "AdamW lr=0.01 weight_decay=0.1"]
    code, output, _ = run(*compared, "--steps", 50, "--json")
    assert code == 0
    (matrix,) = json.loads(output)["matrices"]
    norm = next(part for part in matrix["unlearned"] if part["part"] == "log_norm")
    assert norm["answer"] == "beyond noise"
    assert norm["null"] == "AdamW on white noise"
    assert run(*compared)[0] == 4  # how many steps?
    code, _, errors = run(*compared[:3], "--steps", 50)  # of which optimizer?
    assert code == 4 and errors.startswith("kappascope: error: --steps 50: three things")


def test_top_and_sort_choose_the_rows_of_the_table(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"a": 9, "b": 30, "c": 20}
    path = tmp_path / "x.pt"
    torch.save({f"{name}.weight": torch.randn(n, n) for name, n in sizes.items()}, path)

    def listed(*options: str) -> list[str]:
        _, output, _ = run(path, *options)
        rows = (line.split() for line in output.splitlines())
        return [row[0] for row in rows if row and row[0] in sizes]

    assert listed("--sort", "size") == ["b", "c", "a"]
    assert listed("--sort", "name", "--top", "2") == ["a", "b"]
    assert listed("--top", "0") == []


def test_csv_is_a_table_on_the_standard_output(run: Run, saved: Path) -> None:
    code, output, errors = run(saved, "--csv", "--sort", "name")
    names = [row["name"] for row in csv.DictReader(output.splitlines())]
    assert code == 0 and not errors and names == sorted(names) and names
    _, output, _ = run(saved, "--csv", "--top", "1")
    assert len(list(csv.DictReader(output.splitlines()))) == 1


def test_quiet_prints_nothing_of_a_healthy_file(run: Run, saved: Path, tmp_path: Path) -> None:
    assert run(saved, "--quiet") == (0, "", "")
    path = tmp_path / "dead.pt"
    torch.save(weights(bad=torch.full((8, 8), math.nan)), path)
    code, output, _ = run(path, "-q")
    assert code == 3 and output.startswith("critical: non-finite in bad") and "κ" not in output


def test_what_is_not_finite_is_told_once(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    weight = torch.eye(8)
    weight[3, 4] = math.nan
    torch.save({"fc.weight": weight, "other.weight": torch.randn(8, 8)}, path)
    code, output, errors = run(path)
    assert code == 3 and (output + errors).count("[3, 4]") == 1
    code, output, errors = run(path, "--json")
    assert "[3, 4]" in one_line(errors)  # where no table stands above it


def test_an_adapter_is_told_as_what_it_changes_and_merged_into_its_base(
    run: Run, tmp_path: Path
) -> None:
    generator = torch.Generator().manual_seed(0)
    base, adapter = tmp_path / "base.pt", tmp_path / "adapter"
    adapter.mkdir()
    torch.save({"fc.weight": torch.randn(40, 30, generator=generator)}, base)
    factors = {"lora_A": torch.randn(3, 30, generator=generator)}
    factors["lora_B"] = torch.randn(40, 3, generator=generator)
    named = {f"base_model.model.fc.{part}.weight": it for part, it in factors.items()}
    torch.save(named, adapter / "adapter_model.bin")
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    code, output, _ = run(adapter)
    assert code == 0 and "3 of 3" in output and "ill-conditioned" not in output
    code, output, _ = run(adapter, "--base", base, "--json")
    (row,) = json.loads(output)["matrices"]
    expected = torch.load(base)["fc.weight"] + 2 * factors["lora_B"] @ factors["lora_A"]
    assert row["name"] == "fc.weight" and row["delta"]["rank"] == 3
    assert math.isclose(row["frobenius_norm"], float(expected.norm()), rel_tol=1e-5)
    code, output, _ = run(adapter, "--base", base)
    assert code == 0 and "rank_pattern={'fc': 3}" in output
    assert run(base, "--base", base)[0] == 2
