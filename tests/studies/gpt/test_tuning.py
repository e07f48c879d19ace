"""The best rate of each arm, and the settings that follow from it."""

import math

from kappascope.lab.table import Table
from kappascope.studies.gpt import study as gpt
from kappascope.studies.gpt.tuning import best_correction, best_rate


def tuning(**best: float) -> Table:
    """Rows of tuning in which each arm is best at a known rate, the penalty best of all."""
    return Table.of(
        {**setting, "stream": "own", "seed": 0, "component": "validation_loss", "epoch": 1000,
         "value": 2 + abs(math.log2(setting["rate"] / best[setting["optimizer"]]))
         - 0.1 * (setting["correction"] == "penalty") - 0.2 * (setting["correction"] == "hybrid")}
        for setting in gpt.STUDY.grid
    )  # fmt: skip


def test_the_best_rate_of_each_arm_goes_on() -> None:
    found = tuning(AdamW=0.004, Muon=0.032)
    assert best_rate(found, "AdamW", "bound") == 0.004
    assert best_rate(found, "Muon", "alone") == 0.032
    assert best_correction(found) == "penalty"
    further = list(gpt.later_settings(found))
    rates = {s["rate"] for s in further if s["optimizer"] == "Muon" and s["stage"] == "compare"}
    assert rates == {0.032}
    confirm = [
        (s["optimizer"], s["correction"], s["rate"]) for s in further if s["stage"] == "confirm"
    ]
    assert confirm == [
        ("AdamW", "alone", 0.002), ("AdamW", "hybrid", 0.002), ("AdamW", "penalty", 0.002),
        ("Muon", "alone", 0.016),
    ]  # fmt: skip
    assert {s["rate"] for s in further if s["stage"] == "warmup"} == {0.032, 0.256, 1.0}
    keys = [repr(sorted(setting.items())) for setting in further]
    assert len(set(keys)) == len(keys)
    assert {frozenset(s) for s in further} == {frozenset(gpt.STUDY.grid[0])}


def test_a_run_that_diverged_in_tuning_is_never_the_best() -> None:
    rows = tuning(AdamW=0.004, Muon=0.032).rows.to_pylist()
    lost = [{**row, "value": math.nan} if row["rate"] == 0.004 else row for row in rows]
    assert best_rate(Table.of(lost), "AdamW", "alone") in (0.002, 0.008)


def test_every_arm_is_tuned_alike() -> None:
    counts = {}
    for setting in gpt.STUDY.grid:
        arm = setting["optimizer"], setting["correction"]
        counts[arm] = counts.get(arm, 0) + gpt.STUDY.count(setting, "own")
    assert set(counts.values()) == {5} and len(counts) == 10
