"""Experiment 14: corrections, with and without an oracle."""

import torch

from kappascope.lab.table import Table
from kappascope.lab.tasks import Own, Regression, heterogeneous, start
from kappascope.lab.training import descend, last
from kappascope.matrix.components import Components
from kappascope.paper.e14_corrections import FREE, Normalized, bounded, gain


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


def test_every_correction_has_three_choices_and_plain_training_one() -> None:
    assert {name: len(choices) for name, choices in FREE.items() if len(choices) != 3} == {
        "standard": 1
    }


def test_trials_that_choose_are_not_judged() -> None:
    """The choice that looks best in the first half is judged on the other, where it is worse."""

    def rows(seed: int) -> list[dict[str, object]]:
        chosen = 0.1 if seed < 10 else 0.5
        arms = (("standard", "", 1.0), ("bound", "weak", chosen), ("bound", "strong", 0.3))
        return [
            {"strategy": name, "choice": choice, "oracle": False, "error": error}
            for name, choice, error in arms
        ]

    table = Table.of(
        {"stream": "own", "seed": seed, "component": "row_norms", **row}
        for seed in range(20)
        for row in rows(seed)
    )
    found = gain("bound", "row_norms")(table)
    assert found.value == 50 and found.n == 10
