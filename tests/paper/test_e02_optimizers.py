"""Experiment 2: SGD against Adam (Section 4.2)."""

import math

import torch

from experiment_rows import mean, numbers, prints, run
from kappascope.lab.tasks import Own, Paper
from kappascope.paper.e02_optimizers import RATES, misalignment


def test_experiment_2_prints_its_digits() -> None:
    found = run(2, Paper(range(15)), size=128)
    printed = {
        "sgd": {"condition_number": "0.87", "row_norms": "0.13", "overall_matrix": "0.14"},
        "adam": {"condition_number": "0.90", "row_norms": "0.59", "overall_matrix": "0.60"},
    }
    for optimizer, figures in printed.items():
        for component, figure in figures.items():
            assert prints(mean(found, optimizer=optimizer, component=component), figure)


def test_experiment_2_tries_other_rates_on_the_same_start_and_batches() -> None:
    found = run(2, Own(range(3), "rates"), size=8, question="rates")
    tried = {(row["optimizer"], row["learning_rate"]) for row in found}
    assert tried == {(name, rate) for name, rates in RATES.items() for rate in rates}
    plain = run(2, Own(range(3), "rates"), size=8)
    for optimizer, rate in (("sgd", 0.01), ("adam", 0.001)):
        about = {"optimizer": optimizer, "component": "overall_matrix"}
        again = numbers(found, learning_rate=rate, **about)
        torch.testing.assert_close(again, numbers(plain, **about))


def test_misalignment_is_the_share_of_a_subspace_that_has_turned() -> None:
    target = torch.diag(torch.arange(8.0, 0.0, -1.0).double())[None]
    for part in misalignment(3 * target, target).values():  # a common factor turns nothing
        torch.testing.assert_close(part, torch.zeros(1).double(), atol=1e-12, rtol=0)
    turn = torch.eye(8).double()
    c, s = math.cos(0.3), math.sin(0.3)
    turn[1, 1], turn[1, 2], turn[2, 1], turn[2, 2] = c, -s, s, c  # the second row into the third
    found = misalignment(turn @ target, target)
    # one of two leading left vectors has turned by 0.3, no right one and none of the last two
    torch.testing.assert_close(found["leading misalignment"].item(), s**2 / 4)
    assert abs(found["last misalignment"].item()) < 1e-12
    never = misalignment(target * torch.nan, target)
    assert all(part.isnan().all() for part in never.values())
