"""Experiment 3: gradient signal (Section 4.3)."""

import pytest
import torch

from experiment_rows import numbers, run
from kappascope.lab.tasks import Own, Paper


def test_experiment_3_has_the_recovered_ratio_of_mean_signals() -> None:
    found = run(3, Paper([0]), size=128)
    signals = [
        torch.stack(
            [row["value"] for row in found if row.get("component") == name and row["index"] == i]
        )
        for name in ("signal", "gradient")
        for i in (0, 127)
    ]
    first, final, slope, _ = (s.abs().mean().item() for s in signals)
    assert first / final == pytest.approx(71, abs=0.5)
    assert slope == pytest.approx(first, rel=1e-4)  # the closed form is the difference quotient


def test_experiment_3_compares_at_the_same_overall_error() -> None:
    found = run(3, Own(range(3), "matched"), size=6, question="matched")
    for gradient in ("mini-batch", "exact"):
        for imbalance in (True, False):
            for level in (0.3, 0.137):
                about = {"gradient": gradient, "imbalance": imbalance, "level": level}
                error = numbers(found, component="overall_matrix", **about)
                torch.testing.assert_close(error, torch.full((3,), level).double())
