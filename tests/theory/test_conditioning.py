"""The law of kappa's error and its bound, against random matrices and SGD."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import ks_1samp
from torch import Tensor

from kappascope import errors
from kappascope.lab.statistics import tail_index
from kappascope.lab.tasks import Own, Regression, heterogeneous, start
from kappascope.lab.training import Matrix, descend
from kappascope.matrix.components import Components
from kappascope.matrix.spectra import decomposition
from kappascope.theory import (
    Relaxation,
    direction_bound,
    disturbance,
    floor_ratio,
    hard_edge_scale,
    kappa_error_cdf,
    kappa_error_quantile,
    kappa_error_tail,
    log_kappa_bound,
    predicted_weights,
    smallest_value_quantile,
    weyl_bound,
)


def disturbed(size: int, r: float, count: int) -> Tensor:
    """Errors of kappa of the paper's targets after independent normal entries were added."""
    random = Own(range(count), f"disturbed {size} {r}").random()
    target = heterogeneous(random, size)
    tau = r * math.sqrt(2) * math.exp(-0.25) / size
    return errors(target + tau * random.normal(size, size), target)["condition_number"]


def test_smallest_singular_value_of_the_papers_target_follows_its_law() -> None:
    size = 48
    random = Own(range(1500), "smallest").random()
    target = heterogeneous(random, size)
    s = hard_edge_scale(np.sqrt(2) * np.exp(0.5 * np.random.default_rng(0).normal(size=10**6)))
    assert s == pytest.approx(math.sqrt(2) * math.exp(-0.25), rel=0.01)
    y = Components(target).singular_values[:, -1] * size / s
    assert ks_1samp(y, lambda x: 1 - np.exp(-x - x**2 / 2)).pvalue > 1e-3


def test_smallest_value_quantile_inverts_the_law() -> None:
    p = np.array([0.0, 0.1, 0.5, 0.99])
    y = smallest_value_quantile(p)
    np.testing.assert_allclose(1 - np.exp(-y - y**2 / 2), p, atol=1e-12)
    assert float(smallest_value_quantile(1e-6)) == pytest.approx(1e-6, rel=1e-3)  # density 1 at 0


@pytest.mark.parametrize("r", [0.01, 0.1, 0.4])
def test_error_of_a_disturbed_target_follows_the_law(r: float) -> None:
    measured = disturbed(24, r, count=2000)
    assert float(measured.median()) == pytest.approx(kappa_error_quantile(0.5, r), rel=0.12)
    for p in (0.25, 0.75):
        found = float(measured.quantile(p))
        assert found == pytest.approx(kappa_error_quantile(p, r), rel=0.15)


def test_the_law_is_not_good_for_large_disturbances() -> None:
    """It says so: kappas of unrelated matrices differ less than its limit of 1."""
    assert kappa_error_quantile(0.5, 50.0) == pytest.approx(1, abs=0.03)
    assert disturbed(16, 50.0, count=500).median() < 0.85


def test_cdf_rises_from_zero_to_one_and_the_quantile_inverts_it() -> None:
    x = np.geomspace(1e-6, 1e9, 200)
    for r in (1e-3, 0.1, 1.0):
        below = kappa_error_cdf(x, r)
        assert (np.diff(below) >= 0).all()
        assert below[0] < 0.01
        assert below[-1] == pytest.approx(1, abs=1e-6)
        assert kappa_error_cdf(kappa_error_quantile(0.3, r), r) == pytest.approx(0.3, abs=1e-9)


@pytest.mark.parametrize("r", [0.05, 0.3, 1.0])
def test_the_tail_falls_as_one_over_x_so_the_mean_is_infinite(r: float) -> None:
    x = 1e4
    assert x * float(1 - kappa_error_cdf(x, r)) == pytest.approx(kappa_error_tail(r), rel=0.01)


def test_simulated_errors_have_a_tail_index_of_one() -> None:
    measured = disturbed(16, 0.3, count=6000)
    low, high = tail_index(measured).interval or (0, 0)
    assert low < 1 < high
    share = float((measured > 20).double().mean())
    assert share == pytest.approx(kappa_error_tail(0.3) / 20, rel=0.35)  # 90 of 6000


def test_median_grows_as_the_root_of_d_from_the_start_and_as_d_from_the_noise() -> None:
    sizes = (32, 128, 512)
    early = [disturbance(Relaxation(d, noise=0.0), 300) for d in sizes]
    late = [disturbance(Relaxation(d), 4000) for d in sizes]
    np.testing.assert_allclose(np.diff(np.log2(early)), 1, atol=0.2)  # times 4 in d: 2
    np.testing.assert_allclose(np.diff(np.log2(late)), 2, atol=0.03)
    small = [kappa_error_quantile(0.5, r) / r for r in late]
    assert small == pytest.approx([1.23] * 3, abs=0.02)


@pytest.mark.parametrize(("size", "step"), [(32, 100), (24, 200), (32, 1000)])
def test_closed_form_agrees_with_the_model_of_sgd(size: int, step: int) -> None:
    """And the model with SGD: tests of `relaxation`."""
    streams = Own(range(1500), "closed form")
    random = streams.random()
    target, begin = heterogeneous(random, size), start(random, size)
    (weight,) = predicted_weights(target, begin, [step], streams.random(1).normal)
    median = float(errors(weight, target)["condition_number"].median())
    r = disturbance(Relaxation(size), step)
    assert kappa_error_quantile(0.5, r) == pytest.approx(median, rel=0.15)


matrices = st.integers(0, 2**31)


@settings(max_examples=60)
@given(matrices, st.floats(1e-4, 2), st.floats(0.01, 100))
def test_weyl_bound_holds_for_every_matrix(seed: int, size: float, factor: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    target = torch.randn(6, 6, generator=draw, dtype=torch.float64)
    change = size * torch.randn(6, 6, generator=draw, dtype=torch.float64)
    wanted, found = Components(target), Components(factor * (target + change))
    s, e = wanted.singular_values, torch.linalg.matrix_norm(change, 2)
    bound = weyl_bound(e, s[0], s[-1])
    error = (found.log_condition_number - wanted.log_condition_number).abs()
    assert error <= bound + 1e-9


def test_weyl_bound_is_attained() -> None:
    target = torch.diag(torch.tensor([3.0, 1.0], dtype=torch.float64))
    change = torch.diag(torch.tensor([0.2, -0.2], dtype=torch.float64))
    error = errors(target + change, target)["log_condition_number"]
    torch.testing.assert_close(error, weyl_bound(torch.tensor(0.2).double(), 3.0, 1.0))


def test_weyl_bound_is_infinite_where_nothing_can_be_said() -> None:
    assert weyl_bound(1.0, 3.0, 1.0) == math.inf
    assert weyl_bound(2.0, 3.0, 1.0) == math.inf


def test_sgd_never_exceeds_the_bound_of_its_disturbance_nor_often_that_of_its_setting() -> None:
    size, looks, risk = 12, (100, 200, 400, 800), 0.05
    streams = Own(range(200), "bound")
    random = streams.random()
    target, begin = heterogeneous(random, size), start(random, size)
    setting, wanted = Relaxation(size), Components(target)
    s, informative = wanted.singular_values, 0.0
    for step in descend(Matrix(begin), Regression(target).batches(streams.random(1)), steps=800):
        if step.index not in looks:
            continue
        error = errors(step.weight, wanted)["log_condition_number"]
        left = step.weight / (1 - setting.mean(step.index)) - target
        realised = weyl_bound(torch.linalg.matrix_norm(left, 2), s[:, 0], s[:, -1])
        assert (error <= realised + 1e-9).all()
        bound = log_kappa_bound(setting, target, begin, step.index, risk)
        assert (error > bound).double().mean() <= risk
        informative = float(bound.isfinite().double().mean())
    assert informative > 0.9  # at the last look the condition holds for nearly all targets


def test_bound_falls_by_the_root_of_q_a_step_to_its_floor() -> None:
    target = torch.diag(torch.linspace(3, 1, 8, dtype=torch.float64))
    begin, setting = 0.01 * target, Relaxation(8, noise=0.0)
    early, late = (log_kappa_bound(setting, target, begin, t) for t in (800, 1000))
    rate = float((late / early).log()) / 200
    assert rate == pytest.approx(math.log(setting.mean_square(1)) / 2, rel=0.08)  # sqrt(t)
    floors = [log_kappa_bound(Relaxation(8), target, begin, t) for t in (3000, 4000)]
    assert float(floors[0]) == pytest.approx(float(floors[1]), rel=0.01)


def test_no_bound_where_a_batch_can_overshoot() -> None:
    setting = Relaxation(8, learning_rate=0.9, rows=4)
    assert log_kappa_bound(setting, torch.eye(8), torch.zeros(8, 8), 10) == math.inf


@pytest.mark.parametrize("size", [16, 32, 64])
def test_ratio_of_errors_at_the_noise_floor_follows_its_law(size: int) -> None:
    random = Own(range(1200), f"floor {size}").random()
    target = heterogeneous(random, size)
    (weight,) = predicted_weights(target, start(random, size), [4000], random.normal)
    found = errors(weight, target)
    for norms in ("row_norms", "column_norms"):
        ratio = float((found["condition_number"] / found[norms]).median())
        assert ratio == pytest.approx(floor_ratio(size), rel=0.12)


def test_the_law_at_the_floor_knows_neither_noise_nor_rate_nor_batch() -> None:
    random = Own(range(1500), "floor, other settings").random()
    target = heterogeneous(random, 32)
    other = Relaxation(32, learning_rate=0.05, rows=128, noise=0.003)
    (weight,) = predicted_weights(target, 0 * target, [1500], random.normal, other)
    found = errors(weight, target)
    ratio = float((found["condition_number"] / found["row_norms"]).median())
    assert ratio == pytest.approx(floor_ratio(32), rel=0.12)


def test_the_law_at_the_floor_takes_any_row_deviations() -> None:
    random = Own(range(1500), "floor, two kinds of rows").random()
    deviations = torch.tensor([1.0, 4.0]).repeat(16).double()
    target = deviations[:, None] * random.normal(32, 32) / 32**0.5
    found = errors(target + 1e-5 * random.normal(32, 32), target)
    ratio = float((found["condition_number"] / found["row_norms"]).median())
    assert ratio == pytest.approx(floor_ratio(32, deviations), rel=0.12)


@pytest.mark.parametrize("step", [60, 250])
def test_the_first_order_of_sigma_min_has_its_mean_and_variance(step: int) -> None:
    """Of one target and start, over batches: what Chebyshev's inequality is given is exact."""
    size, count = 6, 3000
    fixed = Own([0], "direction").random()
    target, begin = heterogeneous(fixed, size), 3 * start(fixed, size)
    setting = Relaxation(size, noise=0.3, rows=8)
    batches = Regression(target.expand(count, -1, -1), noise=0.3, rows=8).batches(
        Own(range(count), "direction, batches").random()
    )
    *_, last = descend(Matrix(begin.repeat(count, 1, 1)), batches, steps=step)
    (u, s, vt), p = decomposition(target[0]), setting.mean(step)
    form = torch.einsum("o,koi,i->k", u[:, -1], last.weight / (1 - p) - target, vt[-1])
    mean = float(u[:, -1] @ begin[0] @ vt[-1]) * p / (1 - p)
    low, high = (float(direction_bound(setting, target[0], begin[0], step, x)) for x in (1, 0.25))
    deviation = (high - low) * float(s[-1])  # sqrt(V / risk) is V^0.5 longer at a quarter
    assert float(form.mean()) == pytest.approx(mean, abs=4 * deviation / count**0.5)
    assert float(form.std()) == pytest.approx(deviation, rel=0.06)
    assert low * float(s[-1]) == pytest.approx(abs(mean) + deviation, rel=1e-9)


def test_sigma_min_of_sgd_stays_within_its_first_order_bound() -> None:
    size, step = 16, 900
    streams = Own(range(150), "direction bound")
    random = streams.random()
    target, begin = heterogeneous(random, size), start(random, size)
    *_, last = descend(Matrix(begin), Regression(target).batches(streams.random(1)), steps=step)
    setting, s = Relaxation(size), Components(target).singular_values
    found = Components(last.weight).singular_values[:, -1] / (1 - setting.mean(step))
    bound = direction_bound(setting, target, begin, step)
    within = ((found / s[:, -1] - 1).abs() <= bound)[bound < 1].double().mean()
    assert within > 0.95
    assert (bound < log_kappa_bound(setting, target, begin, step)).all()
