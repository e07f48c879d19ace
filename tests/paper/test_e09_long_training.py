"""Experiment 9: long training (Section 4.9)."""

import torch

from experiment_rows import mean, numbers, prints, run
from kappascope.lab.tasks import Own, Paper
from kappascope.theory import floor_ratio


def test_experiment_9_prints_its_digits() -> None:
    found = run(9, Paper(range(10)), size=128)
    assert prints(mean(found, epoch=1, component="row_norms"), "0.93")
    assert prints(1e5 * mean(found, epoch=1000, component="row_norms"), "6.6")
    assert prints(mean(found, epoch=1, component="condition_number"), "0.75")
    assert prints(mean(found, epoch=1000, component="condition_number"), "0.017")


def test_experiment_9_goes_on_without_label_noise_only() -> None:
    def left(intervention: str) -> torch.Tensor:
        found = run(9, Own(range(9), "long"), size=8, intervention=intervention)
        after, before = (
            numbers(found, component="log_condition_number", epoch=epoch) for epoch in (2000, 1000)
        )
        return (after / before).median()

    assert left("no noise") < 0.01 * left("smaller steps") < left("none")


def test_draws_of_theory_end_at_the_noise_floor() -> None:
    found = run(9, Own(range(900), "drawn"), size=32, intervention="drawn")
    kappa, norms = (
        numbers(found, component=name, epoch=5000) for name in ("condition_number", "row_norms")
    )
    assert 0.85 < (kappa / norms).median() / floor_ratio(32) < 1.15
