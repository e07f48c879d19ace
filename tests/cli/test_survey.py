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


def test_a_survey_that_was_stopped_goes_on_from_its_rows(tmp_path: Path, capsys) -> None:
    paths, rows = [saved(tmp_path, seed) for seed in range(2)], tmp_path / "rows"
    assert run(["survey", *paths, "--json"]) == 0
    whole = capsys.readouterr().out
    assert run(["survey", paths[0], "--out", str(rows)]) == 0
    before = {unit.name: unit.read_bytes() for unit in (rows / "units").iterdir()}
    capsys.readouterr()
    assert run(["survey", *paths, "--out", str(rows), "--json"]) == 0
    assert capsys.readouterr().out == whole
    after = {unit.name: unit.read_bytes() for unit in (rows / "units").iterdir()}
    assert before.items() < after.items()  # what was there stays as it was


def test_shards_of_a_survey_are_joined_to_the_whole(tmp_path: Path, capsys) -> None:
    paths = [saved(tmp_path, seed) for seed in range(3)]
    parts = [str(tmp_path / f"part{k}") for k in (1, 2)]
    for k, part in enumerate(parts, 1):
        assert run(["survey", *paths, "--shard", f"{k}/2", "--out", part]) == 0
    assert "Shard 2/2: 1 checkpoint of 3" in capsys.readouterr().out
    assert run(["join", *parts, "--out", str(tmp_path / "whole")]) == 0
    (tmp_path / "2.pt").rename(tmp_path / "gone.pt")  # its rows are there, and it is not
    assert run(["survey", *paths, "--out", str(tmp_path / "whole")]) == 3
    (tmp_path / "gone.pt").rename(tmp_path / "2.pt")
    units = len(list((tmp_path / "whole" / "units").iterdir()))
    capsys.readouterr()
    assert run(["survey", *paths, "--out", str(tmp_path / "whole"), "--json"]) == 0
    joined = capsys.readouterr().out
    assert units == len(list((tmp_path / "whole" / "units").iterdir()))  # nothing was done again
    assert run(["survey", *paths, "--json"]) == 0
    assert capsys.readouterr().out == joined


def test_a_survey_takes_remote_folders(tmp_path: Path, capsys) -> None:
    """From a file system that only this process has: what is fetched is fetched here."""
    import fsspec

    files = fsspec.filesystem("memory")
    for seed in range(2):
        data = Path(saved(tmp_path, seed)).read_bytes()
        files.pipe_file(f"/hub/{seed}/pytorch_model.bin", data)
    urls = [f"memory://hub/{seed}" for seed in range(2)]
    assert run(["survey", *urls, "--out", str(tmp_path / "rows")]) == 0
    assert "10 trained matrices of 2 models" in capsys.readouterr().out
    files.pipe_file("/hub/0/pytorch_model.bin", files.cat_file("/hub/1/pytorch_model.bin"))
    assert run(["survey", urls[0], "--out", str(tmp_path / "rows")]) == 0  # another file by now
