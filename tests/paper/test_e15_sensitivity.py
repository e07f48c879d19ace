"""Experiment 15: sensitivity to the paper's fixed choices."""

import torch

from experiment_rows import numbers, run
from kappascope.lab.tasks import Own
from kappascope.paper.e15_sensitivity import SWEEPS, ranks


def test_experiment_15_changes_one_choice_at_a_time_to_every_level() -> None:
    found = run(15, Own([0, 1], "sweeps"), size=8)
    arms = {(row["sweep"], row["choice"]) for row in found if row.get("sweep")}
    levels = {(sweep, level) for sweep, many in SWEEPS.items() for level in many}
    assert arms == levels | {("none", "the paper's")}


def test_experiment_15_counts_the_rank_at_every_threshold() -> None:
    target = torch.diag(torch.tensor([1.0, 0.05, 0.005, 0.0005]).double())[None]
    found = list(ranks(torch.eye(4).double()[None], target))  # of rank 4 at every threshold
    errors = [numbers(found, choice=level).item() for level in SWEEPS["threshold"]]
    torch.testing.assert_close(errors, [1 / 3, 1.0, 3.0])
