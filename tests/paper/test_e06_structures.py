"""Experiment 6: multipliers across structures (Section 4.6)."""

import torch

from experiment_rows import mean, numbers, run
from kappascope.lab.tasks import Own, Paper
from kappascope.paper.e06_structures import SCALED, TARGETS, Multiplied


def test_experiment_6_prints_its_digits_where_a_target_was_found() -> None:
    for structure, printed in [("low-rank", 29), ("block-diagonal", 93)]:
        found = run(6, Paper(range(15)), structure=structure, size=64)
        before, after = (
            mean(found, strategy=strategy, pairing="paper", component="row_norms")
            for strategy in ("standard", "multipliers")
        )
        assert round(100 * (1 - after / before)) == printed
    assert numbers(
        run(6, Paper([0]), structure="low-rank", size=64),
        strategy="standard", pairing="paired", component="condition_number",
    ).isnan().all()  # fmt: skip


def test_experiment_6_has_several_kinds_of_blocks() -> None:
    random = Own(range(8), "blocks").random()
    target = TARGETS["growing blocks"](random, 64).unflatten(-1, (8, 8)).unflatten(-3, (8, 8))
    sizes = target.square().sum((0, -3, -1)).sqrt()  # of the blocks: rows down, columns across
    assert torch.equal(sizes, sizes.diagonal().diag())
    wanted = torch.arange(8).add(0.5) * 8  # each entry (i + 0.5) / 8^0.5, 64 of them, 8 trials
    torch.testing.assert_close(sizes.diagonal(), wanted.double(), rtol=0.15, atol=0)


def test_experiment_6_compares_structures_at_one_norm() -> None:
    for structure in SCALED:
        found = run(6, Own([0, 1], "norm"), structure=structure, size=8, norm=4.0)
        about = {"strategy": "standard", "component": "frobenius_norm"}
        torch.testing.assert_close(
            numbers(found, "target", **about), torch.full((2,), 4.0).double()
        )


def test_factors_start_at_one_and_scale_rows_and_columns() -> None:
    origin = torch.arange(6.0).reshape(1, 2, 3)
    model = Multiplied(origin)
    torch.testing.assert_close(model(), origin)
    with torch.no_grad():
        model.rows[:] = torch.tensor([1.0, 10.0])
        model.columns[:] = torch.tensor([1.0, 2.0, 3.0])
    torch.testing.assert_close(model(), torch.tensor([[[0.0, 2.0, 6.0], [30.0, 80.0, 150.0]]]))
