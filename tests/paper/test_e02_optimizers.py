"""Experiment 2: SGD against Adam (Section 4.2)."""

from experiment_rows import mean, prints, run
from kappascope.lab.tasks import Paper


def test_experiment_2_prints_its_digits() -> None:
    found = run(2, Paper(range(15)), size=128)
    printed = {
        "sgd": {"condition_number": "0.87", "row_norms": "0.13", "overall_matrix": "0.14"},
        "adam": {"condition_number": "0.90", "row_norms": "0.59", "overall_matrix": "0.60"},
    }
    for optimizer, figures in printed.items():
        for component, figure in figures.items():
            assert prints(mean(found, optimizer=optimizer, component=component), figure)
