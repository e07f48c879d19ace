"""A sample of the wide grid of models, optimizers and loops: nothing fails, nothing silently."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

STRESS = Path(__file__).parents[2] / "benchmarks" / "stress.py"


@pytest.mark.parametrize("seed", range(4))
def test_no_combination_fails(seed, capsys) -> None:
    counts, reasons = runpy.run_path(str(STRESS))["stressed"](40, seed)
    assert not counts["failed"], capsys.readouterr().out
    assert counts["exact"] > 20 and sum(counts.values()) == 40
    assert sum(reasons.values()) == counts["explained"]
