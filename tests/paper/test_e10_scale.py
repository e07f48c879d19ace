"""Experiment 10: scale, up to the sizes that networks have."""

from experiment_rows import numbers, run
from kappascope.lab.tasks import Own


def test_experiment_10_gives_the_error_before_training_beside_the_one_after() -> None:
    found = run(10, Own(range(9), "untrained"), size=16)
    after = numbers(found, component="log_condition_number")
    before = numbers(found, component="untrained")
    assert after.median() < before.median()
