"""Experiment 13: gradient signal of every singular value."""

import itertools

import torch

from kappascope.lab.tasks import Own, Regression, heterogeneous
from kappascope.paper.e13_profile import profile


def test_experiment_13_finds_every_direction_lacking_all_of_itself_at_zero() -> None:
    random = Own([0, 1], "signal").random()
    target = heterogeneous(random, 8)
    samples = list(itertools.islice(Regression(target).batches(random), 3))
    found = [row for row in profile(0 * target, samples) if row["component"] == "relative"]
    assert len(found) == 8
    for row in found:
        torch.testing.assert_close(row["value"], torch.ones(2, dtype=torch.float64))
