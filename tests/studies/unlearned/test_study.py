"""Trials of the study: shared starts, nulls beside every run, and resumption."""

from pathlib import Path
from typing import Any

import pytest
import torch

from kappascope.lab.heads import PRODUCTS
from kappascope.lab.resume import ResumePoint
from kappascope.lab.table import Table
from kappascope.studies.gpt.model import Corpus
from kappascope.studies.unlearned import study
from kappascope.studies.unlearned.claims import MATRICES
from short_runs import run


def test_every_part_has_its_nulls_beside_it(small_rows: Table) -> None:
    parts = [row for row in small_rows.rows.to_pylist() if row["component"] == "log_sigma_50"]
    assert {row["epoch"] for row in parts} == {3, 12, 24}
    for row in parts:
        assert all(row[null] is not None for null in ("ghost", "start", "shaped"))
        assert (row["white"] is not None) == (row["epoch"] == 24)


@pytest.mark.parametrize(
    ("optimizer", "stage"),
    [("AdamW", "grid"), ("Muon", "grid"), ("SGD", "grid"), ("AdamW", "balance")],
)
def test_what_was_killed_goes_on_to_the_last_bit(
    optimizer: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(optimizer=optimizer, stage=stage)
    kept, calls, drawn = ResumePoint(tmp_path / "trial", every=0.0), 0, Corpus.batch

    def killed(*given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 16:
            raise KeyboardInterrupt
        return drawn(*given)

    monkeypatch.setattr(Corpus, "batch", killed)
    with pytest.raises(KeyboardInterrupt):
        run(resume_point=kept, optimizer=optimizer, stage=stage)
    assert repr(run(resume_point=kept, optimizer=optimizer, stage=stage)) == repr(whole)
    assert calls == 16 + 24 - 15


@pytest.mark.parametrize("held", ["norm", "tail", "share", "shape"])
def test_a_part_is_held_at_its_multiple(held: str) -> None:
    weight = torch.nn.Parameter(torch.diag(torch.tensor([4.0, 3.0, 2.0, 1.0])))
    holding = study.Held(held, 0.5, since=70)
    holding.apply({"w": weight}, 70)
    if held == "norm":
        assert float(torch.linalg.matrix_norm(weight.detach())) == pytest.approx(30**0.5 / 2)
    else:
        expected = torch.tensor([4.0, 3.0, 1.0, 0.5])
        if held == "share":
            expected *= 30**0.5 / torch.linalg.vector_norm(expected)
        if held == "shape":  # roots, at the same norm
            expected = torch.tensor([4.0, 3.0, 2.0, 1.0]).sqrt() * 3**0.5
        torch.testing.assert_close(torch.linalg.svdvals(weight.detach()), expected)
    held_once = weight.detach().clone()
    holding.apply({"w": weight}, 70 + study.HOLD_EVERY)  # where it was, not half of it
    torch.testing.assert_close(weight.detach(), held_once)


def test_nothing_is_held_before_its_time() -> None:
    weight = torch.nn.Parameter(torch.eye(3))
    study.Held("norm", 4.0, since=70).apply({"w": weight}, 69)
    assert torch.equal(weight, torch.eye(3))


@pytest.mark.parametrize("held", list(study.FREED))
def test_a_part_can_be_freed(held: str) -> None:
    rows = run(stage="matter", held=held, steps=4)
    (loss,) = (row["value"] for row in rows if row["component"] == "validation_loss")
    assert loss < 10


def test_arms_share_start_and_batches() -> None:
    arms = [run(stage="matter", held=held, steps=1) for held in ("nothing", *study.HELD)]
    losses = [[r["value"] for r in arm if r["component"] == "training_loss"] for arm in arms]
    assert all(each == losses[0] for each in losses)


def test_a_temperature_is_a_factor_of_every_query() -> None:
    model = study.started(11, 0, 32, "standard", 1.0)
    handle = study.freed_by("temperature", model, list(study.steppers(model, "Muon", 0.1).values()))
    assert handle is not None
    assert handle.weights == tuple(f"blocks.{k}.attention.query.weight" for k in range(2))


def test_a_start_of_another_scale_has_the_same_directions() -> None:
    one, twice = (study.started(11, 0, 32, "standard", scale) for scale in (1.0, 2.0))
    for p, q in zip(study.hidden(one).values(), study.hidden(twice).values(), strict=True):
        torch.testing.assert_close(2 * p, q)
    assert torch.equal(one.head.weight, twice.head.weight)


def test_parts_of_a_text_are_there_without_nulls() -> None:
    rows = run(stage="data", steps=2)
    assert {row["kind"] for row in rows if row["component"] == "log_norm"} == {
        *MATRICES,
        *PRODUCTS,
    }


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_the_balance_of_a_norm_is_that_of_its_ghosts(optimizer: str) -> None:
    """Four ghosts lie about the mean square of all; the gap to it lies about the gap to them."""
    about = {"optimizer": optimizer, "decay": study.DECAYS[optimizer][2]}
    parts = {(r["component"], r.get("matrix")): r for r in run(**about)}
    for row in run(**about, stage="balance"):
        if row["component"] == "push_gap":
            sampled = parts["log_norm", row["matrix"]]
            near = 0.02 + 4 * sampled["ghost_spread"]
            assert row["value"] == pytest.approx(sampled["value"] - sampled["ghost"], abs=near)


def test_what_the_loss_says_of_a_size_is_one_thing_for_two_matrices() -> None:
    """Query and key have the same one, which is that of the temperature."""
    rows = run(stage="balance", steps=12)
    radial = {r["matrix"]: r["value"] for r in rows if r["component"] == "radial"}
    for layer in range(2):
        of = {kind: radial[f"blocks.{layer}.attention.{kind}.weight"] for kind in MATRICES[:4]}
        assert of["query"] == pytest.approx(of["key"], rel=1e-3)
        assert of["value"] == pytest.approx(of["output"], rel=1e-3)


def test_no_run_is_in_the_grid_twice_and_all_that_train_have_eight_seeds() -> None:
    grid = study.whole_grid()
    assert len({repr(sorted(cell.items())) for cell in grid}) == len(grid)
    trained = [cell for cell in grid if cell["stage"] != "file"]
    assert all(study.STUDY.count(cell, "own") == 8 for cell in trained)


def test_rates_differ_at_one_product_and_at_one_decay() -> None:
    same = study.rate_cells("Muon", power=1)
    products = [float(c["rate"]) * float(c["decay"]) for c in same]  # type: ignore[arg-type]
    assert products == pytest.approx([0.0025, 0.0025])
    assert [c["decay"] for c in study.rate_cells("Muon", power=0)] == [0.5, 0.5]


def test_a_quick_run_has_every_stage() -> None:
    whole, quick = ({c["stage"] for c in grid} for grid in (study.whole_grid(), study.quick_grid()))
    assert quick == whole
