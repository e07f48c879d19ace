"""The short form of the odd models in benchmarks/fuzz.py: an answer, or one line, for each."""

from pathlib import Path

import odd_models


def test_odd_but_valid_models_are_answered(tmp_path: Path) -> None:
    tally = odd_models.run("odd", odd_models.odd_models(28, seed=21), tmp_path)
    assert tally.crashes == []
    assert (tally.count, tally.accepted + tally.refused) == (28, 28) and tally.accepted > 20
