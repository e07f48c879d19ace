"""Experiment 14: corrections, with and without an oracle."""

import torch

from kappascope.lab.tasks import Own, Regression, heterogeneous, start
from kappascope.lab.training import descend, last
from kappascope.matrix.components import Components
from kappascope.paper.e14_corrections import Normalized, bounded


def test_experiment_14_normalizes_with_torchs_own() -> None:
    random = Own([0, 1, 2], "norm").random()
    target, norms = heterogeneous(random, 6), torch.tensor([1.0, 2.0, 0.5]).double()
    model = Normalized(start(random, 6), norms)
    torch.testing.assert_close(Components(model()).singular_values[:, 0], norms)
    last(descend(model, Regression(target).batches(random), 0.01))
    for _ in range(500):  # torch makes one power iteration a call, and lags while weights move
        settled = model()
    torch.testing.assert_close(Components(settled).singular_values[:, 0], norms)


def test_experiment_14_bounds_each_trial_by_its_own_kappa() -> None:
    random = Own([0, 1], "bound").random()
    target, kappa = heterogeneous(random, 6), torch.tensor([2.0, 5.0]).double()
    step = last(bounded(start(random, 6), kappa, Regression(target).batches(random)))
    assert (Components(step.weight).condition_number <= kappa * (1 + 1e-9)).all()
