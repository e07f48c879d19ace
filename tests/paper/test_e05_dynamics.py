"""Experiment 5: training dynamics (Section 4.5)."""

import numpy as np

from experiment_rows import run
from kappascope.lab.table import Table
from kappascope.lab.tasks import Own
from kappascope.paper.e05_dynamics import falling, kappa_quartile, rises


def test_experiment_5_looks_at_the_start_the_first_step_and_every_tenth() -> None:
    found = run(5, Own([0, 1], "looks"), size=8)
    looks = dict.fromkeys(row["epoch"] for row in found if "epoch" in row)
    assert list(looks) == [0, 1, *range(10, 201, 10)]


def test_experiment_5_counts_falls_and_rises_from_look_to_look() -> None:
    curves = {0: (4.0, 3.0, 2.0), 1: (4.0, 5.0, 1.0), 2: (4.0, 5.0, 6.0)}
    rows = Table.of(
        {"stream": "own", "component": "condition_number", "seed": k, "epoch": i, "error": error}
        for k, errors in curves.items()
        for i, error in enumerate(errors)
    )
    assert falling("condition_number")(rows).value == 1 / 3
    assert rises(rows).value == 1
    assert kappa_quartile(0.25)(rows).value == np.quantile([2.0, 1.0, 6.0], 0.25)
