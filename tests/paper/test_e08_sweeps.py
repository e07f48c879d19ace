"""Experiment 8: hyperparameters (Section 4.8)."""

from experiment_rows import EXPERIMENTS, mean, numbers, prints, run
from kappascope.lab.table import Table
from kappascope.lab.tasks import Own, Paper


def test_experiment_8_prints_its_digits() -> None:
    found = run(8, Paper(range(10)), size=64)

    def error(component: str, rate: float = 0.01, decay: float = 0.0) -> float:
        return mean(found, learning_rate=rate, weight_decay=decay, component=component)

    for rate, printed in [(0.001, "1.0"), (0.01, "9.2")]:
        assert prints(error("condition_number", rate) / error("row_norms", rate), printed)
    for decay in (0.0, 1e-4, 1e-3):
        assert prints(error("condition_number", decay=decay), "1.23")


def test_strong_decay_shrinks_the_matrix_and_forgets_the_start() -> None:
    found = run(8, Own(range(24), "decay"), size=12, question="decay")
    about = {"epoch": 200, "weight_decay": 1.0}
    norms = numbers(found, component="row_norms", **about)
    assert ((norms > 0.4) & (norms < 0.6)).all()  # towards W* / (1 + decay)
    kappa, plain = (
        numbers(found, component="log_condition_number", epoch=200, weight_decay=decay)
        for decay in (1.0, 0.0)
    )
    assert (kappa / plain).median() < 0.6


def test_ratio_of_rounded_means_is_the_printed_one() -> None:
    [figure] = [f for f in EXPERIMENTS[8].figures if "rounded" in f.id]
    about = {"stream": "paper", "learning_rate": 0.05, "weight_decay": 0.0}
    rows = Table.of(
        {**about, "seed": seed, "component": component, "error": error}
        for seed in range(10)
        for component, error in (("condition_number", 0.04409), ("row_norms", 1.164e-4))
    )
    assert prints(figure.measure(rows), "440")
