"""Experiment 10: scale, up to the sizes that networks have."""

from experiment_rows import numbers, run
from kappascope.lab.tasks import Own


def test_experiment_10_gives_the_error_before_training_beside_the_one_after() -> None:
    found = run(10, Own(range(9), "untrained"), size=16)
    after = numbers(found, component="log_condition_number")
    before = numbers(found, component="untrained")
    assert after.median() < before.median()


def test_experiment_10_draws_what_training_would_learn() -> None:
    """Decided beforehand: medians of 400 draws and of 400 trials are within a third."""
    drawn, trained = (
        numbers(run(10, Own(range(400), "drawn"), size=24, **how), component="log_condition_number")
        for how in ({"source": "drawn"}, {})
    )
    assert 2 / 3 < drawn.median() / trained.median() < 3 / 2
