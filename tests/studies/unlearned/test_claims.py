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
    balanced,
    crossed_components,
    departure,
    excess_memory,
    file_gap,
    gap,
    growth_with_width,
    imbalance,
    loss_of_holding,
    memory,
    slopes_over,
    variance_components,
    variance_ratio,
)
from kappascope.studies.unlearned.model import CENTRE, DECAYS


def rows_of_grid(excess: float, optimizer: str = "AdamW") -> Table:
    """A part that is above its ghosts by ``excess``, at all decays and at half and twice the rate.

    Ghosts are as the law of noise has them: proportional to the root of rate over decay.
    """
    rows: list[dict[str, Any]] = []
    usual, centre = 0.005, DECAYS[optimizer][CENTRE]
    cells = [("grid", usual, decay) for decay in DECAYS[optimizer]]
    cells += [("rate", usual * f, centre / f) for f in (0.5, 2.0)]
    cells += [("rate", usual * f, centre) for f in (0.5, 2.0)]
    for seed in range(4):
        for stage, rate, decay in cells:
            ghost = math.log(rate / (decay or 0.01)) / 2
            for kind in MATRICES:
                rows.append({
                    "stage": stage, "optimizer": optimizer, "rate": rate, "decay": decay,
                    "steps": 10, "epoch": 10, "seed": seed, "component": "log_norm",
                    "matrix": kind, "kind": kind, "ghost": ghost, "start": ghost - 3.0,
                    "value": ghost + excess + 0.01 * seed,
                })  # fmt: skip
    return Table.of(rows)


@pytest.mark.parametrize("place", [None, CENTRE])
def test_the_gap_is_what_is_beyond_the_ghosts(place: int | None) -> None:
    found = gap("AdamW", ("log_norm",), place=place)(rows_of_grid(0.5))
    assert found.value == pytest.approx(0.515)
    assert found.n == 4
    assert found.low is not None and found.low > 0.4


def test_a_gap_is_measured_to_the_null_that_is_asked_for() -> None:
    found = gap("AdamW", ("log_norm",), null="start")(rows_of_grid(0.5))
    assert found.value == pytest.approx(3.515)


@pytest.mark.parametrize("over", ["decays", "rates", "products"])
def test_a_part_that_noise_sets_follows_its_ghosts_one_for_one(over: str) -> None:
    slope = slopes_over("AdamW", "log_norm", over, "ghost")(rows_of_grid(0.5))
    assert slope.value == pytest.approx(1.0)


@pytest.mark.parametrize(("over", "power"), [("products", 1.0), ("rates", 0.75)])
def test_at_one_product_noise_is_proportional_to_the_rate(over: str, power: float) -> None:
    found = slopes_over("AdamW", "log_norm", over, "rate")(rows_of_grid(0.5))
    assert found.value == pytest.approx(power)


def test_what_grows_with_its_start_remembers_it() -> None:
    rows = Table.of(
        {
            "stage": "start", "optimizer": "SGD", "component": "log_norm", "kind": kind,
            "seed": seed, "steps": 1, "epoch": 1, "start_scale": scale,
            "value": 0.75 * math.log(scale), "ghost": 0.25 * math.log(scale),
        }
        for seed in range(3) for scale in (0.5, 2.0) for kind in MATRICES
    )  # fmt: skip
    assert memory("SGD", ("log_norm",), "value")(rows).value == pytest.approx(0.75)
    assert excess_memory("SGD", ("log_norm",))(rows).value == pytest.approx(0.5)


def test_matrices_of_a_checkpoint_are_the_sample() -> None:
    rows = Table.of(
        {
            "stage": "file", "model": model, "matrix": name, "component": part,
            "value": 1.0, "shaped": 0.5, "white": 0.9 if model == "a" else None,
        }
        for model in ("a", "b") for name in ("one", "two", "three") for part in GROUPS["bulk"]
    )  # fmt: skip
    every = file_gap("shaped", GROUPS["bulk"])(rows)
    assert (every.value, every.n) == (pytest.approx(0.5), 6)
    some = file_gap("white", GROUPS["bulk"])(rows)
    assert (some.value, some.n) == (pytest.approx(0.1), 3)


def test_crossed_variances_are_those_of_a_table_that_was_made_of_them() -> None:
    random = np.random.default_rng(0)
    rows, columns = 3 * random.standard_normal((200, 1, 1)), random.standard_normal((1, 200, 1))
    both = 2 * random.standard_normal((200, 200, 1))
    table = rows + columns + both + 0.5 * random.standard_normal((200, 200, 4))
    assert crossed_components(table) == pytest.approx([9.0, 1.0, 4.0, 0.25], rel=0.3)


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
    found = variance_ratio(("log_norm",), ("up",))(rows)
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


def test_a_balance_is_that_of_its_kind_and_two_that_are_alike_have_no_imbalance() -> None:
    pushes = {"query": 3.0, "key": 3.0, "value": 3.0, "output": 1.0}
    rows = Table.of(
        {
            "stage": "balance", "optimizer": "SGD", "decay": DECAYS["SGD"][CENTRE], "seed": seed,
            "component": "push", "matrix": f"{layer} {kind}", "kind": kind, "value": push,
        }
        for seed in range(3) for layer in range(2) for kind, push in pushes.items()
    )  # fmt: skip
    assert balanced("SGD", "push", ("query", "output"))(rows).value == pytest.approx(2.0)
    assert imbalance("SGD", "query", "key")(rows).value == pytest.approx(0.0)
    assert imbalance("SGD", "value", "output")(rows).value == pytest.approx(0.5)


def test_a_gap_that_is_the_same_at_every_width_departs_by_nothing() -> None:
    rows = Table.of(
        {
            "stage": "width", "scaling": "mup", "component": "log_norm", "kind": "up", "seed": seed,
            "steps": 1, "epoch": 1, "width": width, "value": 0.3 + (width == 256) * 0.2,
            "ghost": 0.0,
        }
        for seed in range(3) for width in (32, 64, 256)
    )  # fmt: skip
    assert departure("mup", "up", 64)(rows).value == pytest.approx(0.0)
    assert departure("mup", "up", 256)(rows).value == pytest.approx(0.2)
