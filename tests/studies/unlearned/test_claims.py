"""Rules of the study, on rows whose answer is known."""

import math
from typing import Any

import numpy as np
import pytest

from kappascope.lab.table import Table
from kappascope.studies.unlearned.claims import (
    CLAIMS,
    GROUPS,
    MATRICES,
    following,
    gap,
    growth_with_width,
    loss_of_holding,
    variance_components,
    variance_ratio,
)


def rows_of_grid(excess: float, optimizer: str = "AdamW") -> Table:
    """A part that is above its ghosts by ``excess``, at two rates and decays, with and without."""
    rows: list[dict[str, Any]] = []
    for seed in range(4):
        for rate, decay in ((0.1, 0.0), (0.1, 0.5), (0.1, 2.0), (0.05, 0.5), (0.2, 0.5)):
            ghost = math.log(rate + 0.1) - decay
            for kind in MATRICES:
                rows.append({
                    "stage": "grid", "optimizer": optimizer, "rate": rate, "decay": decay,
                    "steps": 10, "epoch": 10, "seed": seed, "component": "log_norm",
                    "matrix": kind, "kind": kind, "ghost": ghost,
                    "value": ghost + excess + 0.01 * seed,
                })  # fmt: skip
    return Table.of(rows)


def test_the_gap_is_what_is_beyond_the_ghosts() -> None:
    found = gap("AdamW", ("log_norm",))(rows_of_grid(0.5))
    assert found.value == pytest.approx(0.515)
    assert found.n == 4
    assert found.low is not None and found.low > 0.4


def test_a_part_that_noise_sets_follows_its_ghosts_one_for_one() -> None:
    assert following("AdamW", "log_norm")(rows_of_grid(0.5)).value == pytest.approx(1.0)


def test_variances_are_those_of_a_table_that_was_made_of_them() -> None:
    random = np.random.default_rng(0)
    rows, columns = 3 * random.standard_normal(300), random.standard_normal(200)
    table = rows[:, None] + columns[None] + 0.5 * random.standard_normal((300, 200))
    found = variance_components(table)
    assert found == pytest.approx((9.0, 1.0, 0.25), rel=0.25)


@pytest.mark.parametrize(("cause", "sign"), [("rate", 1), ("text", -1)])
def test_what_causes_the_variance_is_found(cause: str, sign: int) -> None:
    rows = Table.of(
        {
            "stage": "data", "seed": seed, "rate": rate, "text": text, "steps": 1, "epoch": 1,
            "component": "log_norm", "matrix": "w", "kind": "up",
            "value": (rate if cause == "rate" else len(text)) + 0.01 * (rate * len(text)) % 0.03,
        }
        for seed in range(3) for rate in (1.0, 2.0, 4.0) for text in ("a", "bb", "cccc")
    )  # fmt: skip
    found = variance_ratio(("log_norm",))(rows)
    assert math.copysign(1, found.value) == sign


def test_a_loss_is_compared_seed_by_seed() -> None:
    rows = Table.of(
        {
            "stage": "matter", "optimizer": "AdamW", "component": "validation_loss",
            "held": "norm", "level": level, "seed": seed, "value": seed + 0.1 * (level != 1.0),
        }
        for level in (1.0, 2.0) for seed in range(4)
    )  # fmt: skip
    found = loss_of_holding("AdamW", "norm", 2.0, ("norm", 1.0))(rows)
    assert found.value == pytest.approx(0.1)
    assert found.n == 4


PARTS = [part for group in ("top", "bulk", "bottom") for part in GROUPS[group]]


def test_a_distance_that_halves_with_the_width_falls() -> None:
    rows = Table.of(
        {
            "stage": "width", "scaling": "mup", "component": component, "kind": "up",
            "seed": seed, "width": width, "steps": 1, "epoch": 1, "ghost": 0.0, "value": 32 / width,
        }
        for seed in range(3) for width in (32, 64, 128)
        for component in PARTS
    )  # fmt: skip
    assert growth_with_width("mup")(rows).value == pytest.approx(-0.375)


def test_ids_are_of_the_study_and_unique() -> None:
    ids = [claim.id for claim in CLAIMS]
    assert len(set(ids)) == len(ids)
    assert all(claim.experiment == "unlearned" for claim in CLAIMS)
