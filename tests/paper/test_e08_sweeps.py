"""Experiment 8: hyperparameters (Section 4.8)."""

from experiment_rows import mean, prints, run
from kappascope.lab.tasks import Paper


def test_experiment_8_prints_its_digits() -> None:
    found = run(8, Paper(range(10)), size=64)

    def error(component: str, rate: float = 0.01, decay: float = 0.0) -> float:
        return mean(found, learning_rate=rate, weight_decay=decay, component=component)

    for rate, printed in [(0.001, "1.0"), (0.01, "9.2")]:
        assert prints(error("condition_number", rate) / error("row_norms", rate), printed)
    for decay in (0.0, 1e-4, 1e-3):
        assert prints(error("condition_number", decay=decay), "1.23")
