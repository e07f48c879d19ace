"""The tail exponent against a slow loop, known answers and WeightWatcher's figures."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kappascope.matrix.powerlaw import (
    EIGENVALUE_FLOOR,
    MIN_TAIL,
    UNCORRECTED_FROM,
    PowerLaw,
    power_law,
)

Array = NDArray[np.float64]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "alpha.json"


def by_hand(eigenvalues: Array) -> PowerLaw | None:
    """Clauset, Shalizi and Newman, one xmin after the other, as written."""
    x = sorted(float(value) for value in eigenvalues if value > EIGENVALUE_FLOOR)
    few = len(x) < UNCORRECTED_FROM
    fits = []
    for i in range(len(x) - 1):
        tail = x[i:]
        n = len(tail)
        logs = sum(math.log(value / tail[0]) for value in tail)
        if logs <= 1e-12 * n or (few and n < MIN_TAIL):
            continue
        alpha = 1 + (n - 1 if few else n) / logs
        law = [1 - (value / tail[0]) ** (1 - alpha) for value in tail]
        distance = max(abs(law[j] - j / n) for j in range(n))
        fits.append(PowerLaw(alpha, tail[0], distance, n))
    return min(fits, key=lambda fit: fit.distance, default=None)


def spectrum(family: str, size: int, random: np.random.Generator) -> Array:
    match family:
        case "pareto":
            return 1 + random.pareto(random.uniform(0.5, 4), size)
        case "lognormal":
            return random.lognormal(0, 2, size)
        case "gaussian":
            matrix = random.standard_normal((size, size + 3))
            return np.linalg.svd(matrix, compute_uv=False) ** 2
        case "ties":
            return random.integers(1, 6, size).astype(float)
        case _:
            return np.geomspace(1e-8, random.uniform(1, 1e6), size)


@settings(max_examples=80)
@given(
    family=st.sampled_from(["pareto", "lognormal", "gaussian", "ties", "geometric"]),
    size=st.integers(MIN_TAIL, 200),
    seed=st.integers(0, 2**32),
)
def test_the_pruned_search_finds_what_the_loop_finds(family: str, size: int, seed: int) -> None:
    eigenvalues = spectrum(family, size, np.random.default_rng(seed))
    found, slow = power_law(eigenvalues), by_hand(eigenvalues)
    if slow is None or (eigenvalues > EIGENVALUE_FLOOR).sum() < MIN_TAIL:
        assert isinstance(found, str)
        return
    assert isinstance(found, PowerLaw)
    # two tails may be equally close but for rounding: the distance is unique, the tail is not
    assert found.distance == pytest.approx(slow.distance, abs=1e-12)
    if found.count == slow.count:
        assert (found.alpha, found.xmin) == pytest.approx((slow.alpha, slow.xmin), rel=1e-9)


@pytest.mark.parametrize("alpha", [1.5, 2.0, 3.0, 5.0])
def test_pareto_samples_give_their_exponent_within_its_standard_error(alpha: float) -> None:
    errors = []
    for seed in range(40):
        sample = 1 + np.random.default_rng(seed).pareto(alpha - 1, 2000)
        fit = power_law(sample)
        assert isinstance(fit, PowerLaw)
        errors.append((fit.alpha - alpha) / fit.sigma)
    # choosing xmin costs a little on top of the standard error, which takes xmin as known
    assert abs(np.mean(errors)) < 0.5
    assert np.sqrt(np.mean(np.square(errors))) < 1.6


def test_a_tail_behind_a_bulk_is_found() -> None:
    random = np.random.default_rng(0)
    fit = power_law(np.concatenate([random.uniform(0.1, 5, 3000), 5 * (1 + random.pareto(2, 600))]))
    assert isinstance(fit, PowerLaw)
    assert fit.alpha == pytest.approx(3.0, abs=3 * fit.sigma)
    assert 500 < fit.count < 700


@given(st.floats(-150, 150))
@settings(max_examples=25)
def test_without_a_floor_the_scale_does_not_matter(exponent: float) -> None:
    sample = 1 + np.random.default_rng(1).pareto(2, 100)
    fit, scaled = power_law(sample, floor=0), power_law(sample * 10**exponent, floor=0)
    assert isinstance(fit, PowerLaw) and isinstance(scaled, PowerLaw)
    assert scaled.alpha == pytest.approx(fit.alpha, rel=1e-9)
    assert (scaled.count, scaled.xmin / 10**exponent) == pytest.approx((fit.count, fit.xmin))


def test_the_order_does_not_matter() -> None:
    sample = 1 + np.random.default_rng(2).pareto(2, 300)
    assert power_law(sample) == power_law(sample[::-1]) == power_law(sample.reshape(3, 100))


@pytest.mark.parametrize(
    ("eigenvalues", "reason"),
    [
        ([], "0 of 0 eigenvalues exceed 1e-05, 8 are needed"),
        (np.zeros(50), "all 50 eigenvalues are equal"),
        (np.ones(50), "all 50 eigenvalues are equal"),
        ([0.0] * 50 + [1.0] * 20, "all 20 large eigenvalues are equal"),
        (np.linspace(1, 2, 7), "7 of 7 eigenvalues exceed 1e-05, 8 are needed"),
        ([0.0] * 99 + [1.0], "1 of 100 eigenvalues exceed 1e-05, 8 are needed"),
        ([-1e-18] * 99 + [1.0], "1 of 100 eigenvalues exceed 1e-05, 8 are needed"),
        ([1.0, math.nan, math.inf] * 10, "20 of 30 eigenvalues are not finite"),
        (np.linspace(1, 2, 50) * 1e-9, "0 of 50 eigenvalues exceed 1e-05, 8 are needed"),
    ],
)
def test_what_has_no_tail_has_a_reason(eigenvalues: Array, reason: str) -> None:
    assert power_law(eigenvalues) == reason


def test_what_rounding_leaves_of_a_zero_does_not_begin_a_tail() -> None:
    random = np.random.default_rng(3)
    sample = 1 + random.pareto(2, 200)
    rounding = (1e-16 * random.random(200)) ** 2
    assert power_law(np.r_[rounding, sample], floor=0) == power_law(sample, floor=0)


def test_a_fit_is_always_made_of_numbers() -> None:
    for seed in range(200):
        random = np.random.default_rng(seed)
        size = int(random.integers(MIN_TAIL, 60))
        values = np.repeat(random.random(size), random.integers(1, 4, size))
        fit = power_law(values)
        assert isinstance(fit, PowerLaw)
        assert np.isfinite([fit.alpha, fit.xmin, fit.distance, fit.sigma]).all()
        assert fit.alpha > 1 and 2 <= fit.count <= len(values)


def test_the_benchmark_agrees_with_weightwatcher() -> None:
    kept = json.loads(RESULTS.read_text())
    good = [row for row in kept["rows"] if 0 <= row["peer_distance"] < 0.1]
    assert len(good) > 100
    assert all(row["difference"] <= 0.02 for row in good)
