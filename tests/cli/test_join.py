"""The command join: shards of any command become the folder that one machine would have filled."""

import json
from pathlib import Path

import torch

from kappascope.cli import app
from tiny_runs import sha


def test_shards_of_a_run_are_joined_to_the_same_bytes(run, tmp_path: Path) -> None:
    parts = [tmp_path / f"part{k}" for k in (1, 2, 3)]
    for k, part in enumerate(parts, 1):
        code, told, _ = run("reproduce", 1, "--shard", f"{k}/3", "--out", part)
        assert code == 0 and f"Shard {k}/3" in told
        assert not (part / "trials.parquet").exists()
    assert sum(len(list((part / "units").iterdir())) for part in parts) > 3
    assert run("join", *parts, "--out", tmp_path / "whole")[0] == 0
    before = sorted(unit.stat().st_mtime_ns for unit in (tmp_path / "whole/units").iterdir())
    for folder in ("whole", "alone"):
        assert run("reproduce", 1, "--out", tmp_path / folder)[0] == 0
    after = sorted(unit.stat().st_mtime_ns for unit in (tmp_path / "whole/units").iterdir())
    assert before == after and sha(tmp_path / "whole") == sha(tmp_path / "alone")


def test_shards_of_a_study_are_joined_after_each_stage(run, tmp_path: Path) -> None:
    folder, here = tmp_path / "both", ("--jobs", 0)
    for _ in ("first stage", "second stage"):
        for k in (1, 2):  # one folder after the other, as if it were joined
            assert run("study", "toy", *here, "--shard", f"{k}/2", "--out", folder)[0] == 0
    for each in (folder, tmp_path / "alone"):
        assert run("study", "toy", *here, "--out", each)[0] == 0
    assert sha(folder) == sha(tmp_path / "alone")


def test_a_shard_with_failures_is_partial(run, tmp_path: Path) -> None:
    code, _, errors = run("reproduce", 3, "--jobs", 1, "--shard", "1/1", "--out", tmp_path / "part")
    assert code == 3 and "failed, first" in errors


def test_shards_of_a_diagnosis_are_joined_to_the_same_document(tmp_path: Path, capsys) -> None:
    path = tmp_path / "model.pt"
    torch.save({f"layers.{k}.weight": torch.randn(6, 6) for k in range(5)}, path)
    parts = [str(tmp_path / f"part{k}") for k in (1, 2)]
    for k, part in enumerate(parts, 1):
        assert app.run(["diagnose", str(path), "--shard", f"{k}/2", "--out", part]) == 0
    whole = str(tmp_path / "whole")
    assert app.run(["join", *parts, "--out", whole]) == 0
    capsys.readouterr()
    documents = []
    for more in (["--out", whole], []):
        assert app.run(["diagnose", str(path), "--json", *more]) == 0
        documents.append(json.loads(capsys.readouterr().out))
    assert documents[0] == documents[1]
    assert app.run(["diagnose", str(path), "--shard", "1/2"]) == 4
    assert app.run(["diagnose", str(path), "--shard", "3/2", "--out", str(tmp_path / "no")]) == 4
    assert not (tmp_path / "no").exists()
    assert "name a folder for them with --out" in capsys.readouterr().err


def test_damaged_units_are_left_out_and_counted(run, tmp_path: Path) -> None:
    assert run("reproduce", 1, "--shard", "1/2", "--out", tmp_path / "part")[0] == 0
    victim = next((tmp_path / "part" / "units").iterdir())
    victim.write_bytes(victim.read_bytes()[:-1])
    code, told, errors = run("join", tmp_path / "part", "--out", tmp_path / "whole")
    assert code == 3 and "1 unit is damaged and left out" in errors and " in " in told
    assert run("join", tmp_path / "nothing", "--out", tmp_path / "whole")[0] == 2
