"""Experiment 3: gradient signal (Section 4.3)."""

import pytest
import torch

from experiment_rows import run
from kappascope.lab.tasks import Paper


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
