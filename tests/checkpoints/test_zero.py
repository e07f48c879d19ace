"""DeepSpeed's partitions: put together as they were before, and refused where one is missing."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import broken_files
import broken_formats
from broken_files import refused
from kappascope.checkpoints.open import open as open_checkpoint
from kappascope.clinic.diagnose import diagnose
from zero_folders import save_zero, weights


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_partitions_make_the_weights_they_were_cut_from(
    tmp_path: Path, stage: int, processes: int
) -> None:
    checkpoint = open_checkpoint(save_zero(tmp_path / "x", stage, processes))
    for name, weight in weights().items():
        assert torch.equal(checkpoint.read((name,)), weight), name
    assert torch.equal(checkpoint.read(("frozen",)), torch.arange(10.0).reshape(2, 5))
    assert torch.equal(checkpoint.read(("pos",)), torch.arange(4.0))
    assert torch.equal(checkpoint.read(("head.weight",)), weights()["emb.weight"])
    assert set(checkpoint.tree) == {*weights(), "frozen", "pos", "head.weight"}
    assert checkpoint.format == "DeepSpeed ZeRO"


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_puts_the_same_together(tmp_path: Path, stage: int) -> None:
    script = pytest.importorskip("deepspeed.utils.zero_to_fp32", reason="DeepSpeed is not there")
    folder = save_zero(tmp_path / "global_step1", stage, 5)
    (tmp_path / "latest").write_text("global_step1")
    expected = script.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path))
    checkpoint = open_checkpoint(folder)
    assert set(checkpoint.tree) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read((name,)), tensor.contiguous().float())


def test_rows_are_those_of_the_weights(tmp_path: Path) -> None:
    rows = diagnose(save_zero(tmp_path / "x", 3)).matrices
    plain = {row.name: row for row in diagnose(weights()).matrices}
    assert {row.name for row in rows} >= {"emb.weight", "fc.weight"}
    for row in rows:
        if row.name in plain:
            assert row.sigma_max == pytest.approx(plain[row.name].sigma_max, rel=1e-12)
            assert row.condition_number == pytest.approx(plain[row.name].condition_number, rel=1e-9)


def test_the_last_step_is_read_from_the_folder_around_it(tmp_path: Path) -> None:
    save_zero(tmp_path / "global_step7", 2)
    (tmp_path / "latest").write_text("global_step7\n")
    (tmp_path / "zero_to_fp32.py").write_text("raise SystemExit('must not run')")
    assert "fc.weight" in open_checkpoint(tmp_path).tree


@pytest.mark.parametrize("text", ["../x", "/etc", "", "nowhere", "a\0b", "x" * 999])
def test_a_last_step_that_is_no_folder_here_is_not_followed(tmp_path: Path, text: str) -> None:
    save_zero(tmp_path / "x", 2)
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "latest").write_text(text)
    refused(tmp_path / "inner", "no checkpoint in it")


def test_groups_with_paddings_between_parameters(tmp_path: Path) -> None:
    """As DeepSpeed aligns the parameters of Muon."""
    folder = save_zero(tmp_path / "x", 2, 2)
    full = weights()
    groups = [["emb.weight", "fc.weight"], ["fc.bias", "norm.weight"]]
    rows = [
        torch.cat([part for n in group for part in (full[n].flatten(), torch.full((3,), 9.0))])
        for group in groups
    ]
    for rank in range(2):
        path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        saved = torch.load(path)
        state = saved["optimizer_state_dict"]
        halves = [row.split((len(row) + 1) // 2)[rank].clone() for row in rows]
        state["single_partition_of_fp32_groups"] = halves
        state["param_alignment_paddings"] = [[3, 3], [3, 3]]
        torch.save(saved, path)
    checkpoint = open_checkpoint(folder)
    for name, weight in full.items():
        assert torch.equal(checkpoint.read((name,)), weight)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(), "2 of 3 partitions"),
        (lambda f: (f / "mp_rank_00_model_states.pt").unlink(), "without its model_states.pt"),
        (
            lambda f: shutil.copy(*(f / f"mp_rank_0{i}_model_states.pt" for i in (0, 1))),
            "split within layers",
        ),
        (
            lambda f: torch.save({"optimizer_state_dict": {"partition_count": 1}},
                                 f / "zero_pp_rank_0_mp_rank_00_optim_states.pt"),
            "holds no tensors",
        ),
    ],
)  # fmt: skip
def test_what_is_not_whole_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    folder = save_zero(tmp_path / "x", 2)
    change(folder)
    refused(folder, words)


def test_a_weight_that_its_partitions_do_not_hold_costs_it_alone(tmp_path: Path) -> None:
    folder = save_zero(tmp_path / "x", 2)
    path = folder / "mp_rank_00_model_states.pt"
    model = torch.load(path)
    model["param_shapes"][1]["norm.weight"] = torch.Size((7_000,))
    torch.save(model, path)
    checkpoint = open_checkpoint(folder)
    assert str(checkpoint.contents["norm.weight"]) == "its pieces do not make it whole"
    assert torch.equal(checkpoint.read(("fc.weight",)), weights()["fc.weight"])


@pytest.mark.parametrize("stage", [2, 3])
def test_mutated_partitions_are_refused_or_read(tmp_path: Path, stage: int) -> None:
    place = broken_formats.zero_folder(tmp_path / "x", stage)
    broken_files.examine(place.parent)
    files = broken_formats.zero_files(200, seed=41, stage=stage)
    assert broken_files.sound(broken_files.run("zero", files, place))
