"""Experiment 19: a proven bound against measurement."""

import math

import pytest
import torch

from experiment_rows import Found, numbers, run
from kappascope.lab.table import Table
from kappascope.lab.tasks import Own
from kappascope.matrix.components import Components
from kappascope.paper.e19_bound import CELLS, TIMES, arrival, bounds, conditioned, kept, rates
from kappascope.theory import Relaxation


def test_experiment_19_learns_targets_of_a_stated_kappa() -> None:
    target = Components(conditioned(Own([0, 1], "kappa").random(), 8, kappa=100.0))
    torch.testing.assert_close(target.condition_number, torch.full((2,), 100.0).double())
    torch.testing.assert_close(target.singular_values[:, 0], torch.ones(2).double())


def test_experiment_19_has_no_bound_until_the_condition_holds_and_then_a_true_one() -> None:
    setting = {"size": 8, "structure": "kappa 100", "noise": 0.0, "learning_rate": 0.02}
    found = run(19, Own(range(9), "bound"), **setting)
    log = {"component": "log_condition_number"}
    for quantity in ("bound", "hindsight"):
        assert numbers(found, **log, quantity=quantity, epoch=50).isnan().all()
        for epoch in (500, 1000):
            error = numbers(found, **log, quantity="measured", epoch=epoch)
            assert (error < numbers(found, **log, quantity=quantity, epoch=epoch)).all()


def test_experiment_19_knows_in_hindsight_what_was_disturbed() -> None:
    target = torch.diag(torch.tensor([2.0, 0.5]).double())[None]
    setting = Relaxation(2)
    weight = (1 - setting.mean(100)) * (target + 0.1 * torch.eye(2))
    found = list(bounds(weight, Components(target), 0 * target, setting, 100))
    torch.testing.assert_close(numbers(found, "value", component="disturbance").item(), 0.2)
    bound = numbers(found, quantity="hindsight").item()
    torch.testing.assert_close(bound, float(torch.tensor(1.05 / 0.8).log()))


def test_experiment_19_measures_shares_rates_and_arrivals() -> None:
    def rows(time: float, seed: int) -> Found:
        bound, scale = math.exp(-time), 100.0 if seed == 7 else 0.1  # trial 7 begins above
        log = {"component": "log_condition_number"}
        return [
            {**log, "quantity": "bound", "error": bound if time > 2 else math.nan},
            {**log, "quantity": "measured", "error": scale * bound**2},
            {"component": "disturbance", "value": math.exp(3.5 - time)},
        ]

    cell = CELLS[0]
    found = Table.of(
        {"stream": "own", **cell, "epoch": round(100 * time), "seed": seed, **row}
        for time in TIMES
        for seed in range(8)
        for row in rows(time, seed)
    )
    assert kept(found, cell).value == 7 / 8
    assert rates(cell)(found).value == pytest.approx(0.5)
    assert arrival(found, cell).tolist() == pytest.approx([350.0] * 8)
