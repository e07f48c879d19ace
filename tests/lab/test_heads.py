"""Heads are compared with products of random factors, whatever the gauge."""

import numpy as np
import pytest

from kappascope.lab.heads import (
    HEAD_SIZE,
    chance_log_kappa,
    excess_by_seed,
    head_excess,
    head_multiple,
    multiples_by_rate,
)
from kappascope.lab.table import Table
from kappascope.studies.gpt.model import HEAD

WHERE = {"correction": "alone", "optimizer": "AdamW", "width": 64, "kind": "QK"}


def table(stage: str, rates: tuple[float, ...] = (0.1,), seeds: int = 8) -> Table:
    return Table.of(
        {
            **WHERE, "stage": stage, "rate": rate, "epoch": epoch, "seed": seed,
            "matrix": f"head {head}", "component": "log_condition_number",
            "value": chance_log_kappa(64) + epoch + head + 0.1 * seed,
        }
        for rate in rates for epoch in (0, 2) for seed in range(seeds) for head in range(3)
    )  # fmt: skip


def test_chance_is_that_of_numpy_as_well() -> None:
    random = np.random.default_rng(3)
    draws = [random.normal(size=(64, 16)) @ random.normal(size=(16, 64)) for _ in range(200)]
    values = np.linalg.svd(np.array(draws), compute_uv=False)
    logs = np.log(values[:, 0] / values[:, 15])
    # the standard error of a median is 1.25 times that of a mean; both sides are sampled
    error = 1.25 * logs.std() * (1 / 200 + 1 / 400) ** 0.5
    assert abs(np.median(logs) - chance_log_kappa(64)) < 4 * error


def test_heads_are_as_large_as_those_of_the_study() -> None:
    assert HEAD_SIZE == HEAD


def test_a_seed_counts_once_at_the_end_of_training() -> None:
    found = head_excess("QK", "AdamW")(table("compare"))
    assert found.n == 8
    assert found.value == pytest.approx(2 + 1 + 0.1 * 3.5)
    many = head_multiple("QK", "AdamW")(table("compare"))
    assert many.value == pytest.approx(np.exp(found.value))


def test_rates_are_told_apart() -> None:
    rows = table("tune", (0.1, 0.2), seeds=1)
    by_rate = multiples_by_rate(rows, "QK", "AdamW")
    assert list(by_rate) == [0.1, 0.2]
    assert all(len(heads) == 3 for heads in by_rate.values())


def test_what_was_not_run_is_said() -> None:
    with pytest.raises(LookupError, match="no trials"):
        excess_by_seed(table("compare"), "OV", stage="compare")
