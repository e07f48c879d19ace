"""The command survey: one table, one page, one atlas; a bad file costs no other."""

import json
from pathlib import Path

import torch

from kappascope.cli.app import run
from kappascope.clinic.atlas import Atlas


def saved(folder: Path, seed: int) -> str:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(5, 48, 48, generator=random) * torch.linspace(2, 0.1, 48)
    torch.save({f"layers.{i}.up.weight": w for i, w in enumerate(drawn)}, folder / f"{seed}.pt")
    return str(folder / f"{seed}.pt")


def test_a_survey_writes_an_atlas_that_diagnose_takes(tmp_path: Path, capsys) -> None:
    paths = [saved(tmp_path, seed) for seed in range(2)]
    (tmp_path / "out").mkdir()
    atlas, page = tmp_path / "out" / "atlas.json", tmp_path / "out" / "survey.html"
    assert run(["survey", *paths, "--atlas", str(atlas), "--html", str(page)]) == 0
    assert "10 trained matrices of 2 models" in capsys.readouterr().out
    assert Atlas.read(atlas).ranges["up", "square", "kappa_over_chance"].n == 10
    assert "<!doctype html>" in page.read_text()
    assert run(["diagnose", paths[0], "--atlas", str(atlas), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert len(told["files"]) == 1 and len(told["files"][0]["sha256"]) == 64


def test_a_file_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, capsys) -> None:
    (tmp_path / "bad.pt").write_text("no checkpoint")
    assert run(["survey", saved(tmp_path, 0), str(tmp_path / "bad.pt")]) == 3
    told = capsys.readouterr()
    assert "5 trained matrices of 1 model" in told.out and "1 checkpoint left out" in told.err
