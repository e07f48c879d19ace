"""Experiment 11: optimizers at matched convergence."""

from kappascope.lab.table import Table
from kappascope.paper.e11_convergence import tuned


def test_experiment_11_takes_the_rate_at_which_the_last_trial_arrives_first() -> None:
    steps = {0.1: (10, 900), 0.03: (200, 300), 0.3: (5, float("nan"))}
    rows = [
        {"learning_rate": rate, "seed": k, "value": value}
        for rate, values in steps.items()
        for k, value in enumerate(values)
    ]
    assert tuned(Table.of(rows)) == 0.03
