"""The nulls against simulation, against each other, and against what is known exactly."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.integrate import quad, simpson
from scipy.linalg import eigh_tridiagonal
from scipy.stats import ks_1samp, ks_2samp

from kappascope.theory import (
    GaussianNull,
    MarchenkoPastur,
    hard_edge_log_cdf,
    square_limit_cdf,
    square_limit_quantile,
    tail_bounds,
    tracy_widom_cdf,
)

Array = NDArray[np.float64]


def log_condition_numbers(rows: int, columns: int, trials: int) -> Array:
    """Of true Gaussian matrices: the obviously right oracle."""
    random = np.random.default_rng((rows, columns))
    s = np.linalg.svd(random.standard_normal((trials, rows, columns)), compute_uv=False)
    return np.log(s[:, 0] / s[:, -1])


def bidiagonal_log_condition_numbers(rows: int, columns: int, trials: int) -> Array:
    """The same law from 2n random numbers a matrix instead of mn (Dumitriu & Edelman 2002).

    Householder reflections make a Gaussian matrix bidiagonal, its entries independent chis. Its
    singular values are the positive eigenvalues of the tridiagonal matrix that alternates them.
    """
    random = np.random.default_rng((rows, columns, 2))
    long, n = max(rows, columns), min(rows, columns)
    degrees = np.empty(2 * n - 1)
    degrees[::2], degrees[1::2] = long - np.arange(n), n - 1 - np.arange(n - 1)

    def extreme(chis: Array, index: int) -> float:
        zeros = np.zeros(2 * n)
        found = eigh_tridiagonal(zeros, chis, True, "i", (index, index), lapack_driver="stebz")
        return float(found[0])

    draws = np.sqrt(random.chisquare(degrees, (trials, 2 * n - 1)))
    return np.array([np.log(extreme(c, 2 * n - 1) / extreme(c, n)) for c in draws])


def z_error(null: GaussianNull, simulated: Array) -> float:
    return abs(float(null.log_condition_number - simulated.mean())) / null.spread


SMALL = [
    (2, 2),
    (2, 9),
    (3, 3),
    (3, 4),
    (6, 3),
    (3, 60),
    (4, 4),
    (4, 24),
    (5, 7),
    (8, 8),
    (8, 9),
    (8, 40),
]
LARGE = [(64, 64), (64, 65), (84, 64), (64, 96), (64, 640), (300, 300), (300, 303), (200, 800)]
shapes = st.tuples(st.integers(2, 400), st.integers(2, 400))


@pytest.mark.parametrize(("rows", "columns"), SMALL)
def test_null_of_a_small_shape_is_that_of_gaussian_matrices(rows: int, columns: int) -> None:
    null = GaussianNull(rows, columns)
    simulated = log_condition_numbers(rows, columns, trials=20_000)
    noise = 4 / np.sqrt(len(simulated))  # four standard errors, in spreads
    assert abs(null.log_condition_number - simulated.mean()) < 0.015 + noise * null.spread
    assert z_error(null, simulated) < 0.1 + noise
    assert null.spread == pytest.approx(simulated.std(), rel=0.05 + noise)
    assert ks_1samp(simulated, lambda x: 1 - null.tail(np.exp(x))).statistic < 0.05


@pytest.mark.parametrize(("rows", "columns"), LARGE)
def test_null_of_a_large_shape_is_that_of_bidiagonal_matrices(rows: int, columns: int) -> None:
    null = GaussianNull(rows, columns)
    simulated = bidiagonal_log_condition_numbers(rows, columns, trials=2000)
    assert z_error(null, simulated) < 0.02 + 4 / np.sqrt(len(simulated))
    assert null.spread == pytest.approx(simulated.std(), rel=0.12)  # what 2000 heavy tails allow
    assert ks_1samp(simulated, lambda x: 1 - null.tail(np.exp(x))).pvalue > 1e-4


@pytest.mark.parametrize(
    ("rows", "columns"), [(1500, 1500), (4096, 11008), (3, 40_000), (700, 20_000)]
)
def test_null_of_a_shape_of_real_layers(rows: int, columns: int) -> None:
    simulated = bidiagonal_log_condition_numbers(rows, columns, trials=150)
    assert z_error(GaussianNull(rows, columns), simulated) < 0.1 + 4 / np.sqrt(len(simulated))


@pytest.mark.parametrize(("rows", "columns"), [(5, 5), (6, 11)])
def test_bidiagonal_oracle_agrees_with_gaussian_matrices(rows: int, columns: int) -> None:
    chis = bidiagonal_log_condition_numbers(rows, columns, trials=4000)
    assert ks_2samp(chis, log_condition_numbers(rows, columns, trials=20_000)).pvalue > 1e-3


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (10, 12), (8, 24)])
def test_one_random_matrix_in_a_hundred_has_a_tail_below_a_hundredth(
    rows: int, columns: int
) -> None:
    simulated = log_condition_numbers(rows, columns, trials=40_000)
    share = np.mean(GaussianNull(rows, columns).tail(np.exp(simulated)) < 0.01)
    assert share == pytest.approx(0.01, rel=0.25)  # 400 hits are known to 5 %


@pytest.mark.parametrize("columns", range(2, 12))
def test_two_rows_are_exact(columns: int) -> None:
    x = np.array([1.0, 1.5, 4.0, 1e3])
    null = GaussianNull(2, columns)
    np.testing.assert_allclose(null.tail(x), (2 * x / (1 + x**2)) ** (columns - 1))
    mean, _ = quad(lambda y: np.cosh(y) ** (1 - columns), 0, 50)
    assert null.log_condition_number == pytest.approx(mean, abs=1e-6)


@pytest.mark.parametrize("columns", [1, 2, 5000])
def test_one_row_always_has_condition_number_one(columns: int) -> None:
    null = GaussianNull(1, columns)
    assert (null.log_condition_number, null.spread) == (0.0, 0.0)
    assert null.tail([0.5, 1.0, 2.0]).tolist() == [1.0, 0.0, 0.0]
    assert null.z([1.0, 2.0]).tolist() == [0.0, np.inf]
    assert null.quantile([0.0, 0.5, 0.99]).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("excess", [0, 1, 2, 3])
@pytest.mark.parametrize("short", [3, 30, 300])
def test_tail_falls_with_the_exponent_of_chen_and_dongarra(short: int, excess: int) -> None:
    near, far = GaussianNull(short, short + excess).tail([1e7 * short, 1e8 * short])
    assert np.log10(near / far) == pytest.approx(excess + 1, rel=1e-6)


@settings(max_examples=40)
@given(shapes, st.floats(0, 6))
def test_tail_and_mean_obey_the_proven_bounds(shape: tuple[int, int], digits: float) -> None:
    null, x = GaussianNull(*shape), max(shape) * 10**digits
    low, high = tail_bounds(x, *shape)
    assert low <= null.tail(x) <= high
    ratio = max(shape) / (abs(shape[0] - shape[1]) + 1)
    assert 0 < null.log_condition_number < np.log(ratio) + 2.258


@settings(max_examples=25)
@given(shapes)
def test_tail_falls_from_one_to_zero_and_the_quantile_inverts_it(shape: tuple[int, int]) -> None:
    null = GaussianNull(*shape)
    x = np.exp(np.linspace(0, 40, 500))
    tail = null.tail(x)
    assert tail[0] == pytest.approx(1, abs=0.01)
    assert (np.diff(tail) <= 1e-12).all()
    assert null.tail(np.inf) == 0
    p = np.array([0.001, 0.25, 0.5, 0.75, 0.999])
    np.testing.assert_allclose(1 - null.tail(null.quantile(p)), p, rtol=1e-9)


@settings(max_examples=10)
@given(shapes)
def test_null_of_the_transpose_is_the_same(shape: tuple[int, int]) -> None:
    null, transposed = GaussianNull(*shape), GaussianNull(*reversed(shape))
    assert null.log_condition_number == transposed.log_condition_number
    assert null.z(7.0) == transposed.z(7.0)


def test_expected_condition_number_falls_and_narrows_as_a_matrix_grows_wider() -> None:
    nulls = [GaussianNull(64, columns) for columns in (64, 65, 67, 80, 128, 500, 5000)]
    assert (np.diff([null.log_condition_number for null in nulls]) < 0).all()
    assert (np.diff([null.spread for null in nulls]) < 0).all()


def test_null_takes_tensors_and_passes_what_is_not_a_number_on() -> None:
    null = GaussianNull(*torch.zeros(16, 16).shape)
    z = null.z(torch.tensor([torch.e**3, torch.inf, torch.nan], dtype=torch.float64))
    assert np.isfinite(z[0])
    assert z[1] == np.inf
    assert np.isnan(z[2])
    assert np.isnan(null.tail(np.nan))
    assert np.isnan(null.quantile(np.nan))


@pytest.mark.parametrize("null", [GaussianNull, MarchenkoPastur])
def test_an_empty_shape_is_refused(null: type[GaussianNull | MarchenkoPastur]) -> None:
    with pytest.raises(ValueError, match="got 0 x 5"):
        null(0, 5)


def test_large_square_null_is_edelmans_limit() -> None:
    n = 20_000
    null, p = GaussianNull(n, n), np.array([0.01, 0.5, 0.99])
    np.testing.assert_allclose(null.quantile(p) / n, square_limit_quantile(p), rtol=0.003)
    assert null.log_condition_number == pytest.approx(np.log(n) + 1.537, abs=0.002)


def test_square_limit_has_its_density_and_its_median() -> None:
    x, h = np.array([0.7, 2.0, 9.0]), 1e-6
    slope = (square_limit_cdf(x + h) - square_limit_cdf(x - h)) / (2 * h)
    np.testing.assert_allclose(slope, (2 * x + 4) / x**3 * np.exp(-2 / x - 2 / x**2), rtol=1e-6)
    assert square_limit_quantile(0.5) == pytest.approx(2 / (np.sqrt(1 + np.log(4)) - 1))
    assert square_limit_cdf([-1, 0, np.inf]).tolist() == [0, 0, 1]
    assert square_limit_quantile([0, 1]).tolist() == [0, np.inf]


def test_tracy_widom_law_has_its_known_mean_and_variance() -> None:
    s = np.linspace(-10, 12, 441)
    below, left = tracy_widom_cdf(s), s[-1] - s
    mean = s[-1] - simpson(below, x=s)
    variance = simpson(2 * left * below, x=s) - (s[-1] - mean) ** 2
    assert mean == pytest.approx(-1.2065335745820, abs=1e-6)  # Bornemann 2010, table 10
    assert variance == pytest.approx(1.607781034581, abs=1e-6)


def test_hard_edge_law_of_orders_zero_and_one_is_edelmans() -> None:
    r = np.geomspace(1e-6, 12, 30)
    for order, exact in ((0, -np.expm1(-r / 2 - r**2 / 8)), (1, -np.expm1(-(r**2) / 8))):
        np.testing.assert_allclose(np.exp(hard_edge_log_cdf(r, order)), exact, rtol=1e-11)


def test_hard_edge_law_of_a_large_order_is_tracy_and_widoms() -> None:
    order, s = 20_000.0, np.linspace(-3, 3, 7)
    r = order * np.exp(-s * (2 ** (-1 / 3)) * order ** (-2 / 3))
    np.testing.assert_allclose(
        np.exp(hard_edge_log_cdf(r, order)), 1 - tracy_widom_cdf(s), atol=1e-3
    )


@pytest.mark.parametrize(
    ("rows", "columns", "deviation"), [(300, 200, 0.3), (250, 250, 2.0), (80, 900, 1.0)]
)
class TestMarchenkoPastur:
    def test_its_quantiles_are_the_singular_values_of_a_random_matrix(
        self, rows: int, columns: int, deviation: float
    ) -> None:
        law = MarchenkoPastur(rows, columns, deviation)
        matrix = deviation * np.random.default_rng(0).standard_normal((rows, columns))
        s = np.sort(np.linalg.svd(matrix, compute_uv=False))
        expected = law.quantile((np.arange(len(s)) + 0.5) / len(s))
        assert np.abs(s - expected).max() < 0.02 * law.edges[1]

    def test_its_edges_are_those_of_its_quantiles(
        self, rows: int, columns: int, deviation: float
    ) -> None:
        law = MarchenkoPastur(rows, columns, deviation)
        spread = deviation * np.sqrt([rows, columns])
        assert law.edges == pytest.approx((abs(spread[0] - spread[1]), spread.sum()))
        assert law.quantile([0, 1]) == pytest.approx(law.edges, abs=1e-7)
        assert law.cdf([-1, *law.edges, 1e9]) == pytest.approx([0, 0, 1, 1], abs=1e-12)
        assert law.density([-1, law.edges[1], 1e9]).tolist() == [0, 0, 0]

    def test_its_cdf_is_the_integral_of_its_density(
        self, rows: int, columns: int, deviation: float
    ) -> None:
        law = MarchenkoPastur(rows, columns, deviation)
        x = law.quantile([0.1, 0.3, 0.5, 0.9])
        for value in x:
            area, _ = quad(law.density, law.edges[0], value, epsabs=1e-10)
            assert law.cdf(value) == pytest.approx(area, abs=1e-7)
        np.testing.assert_allclose(law.cdf(x), [0.1, 0.3, 0.5, 0.9], rtol=1e-12)

    def test_its_mean_square_is_that_of_the_entries(
        self, rows: int, columns: int, deviation: float
    ) -> None:
        law = MarchenkoPastur(rows, columns, deviation)
        mean_square, _ = quad(lambda x: x**2 * law.density(x), *law.edges)
        assert mean_square == pytest.approx(max(rows, columns) * deviation**2, rel=1e-6)


def test_marchenko_pastur_of_a_square_matrix_is_a_quarter_circle() -> None:
    x = np.linspace(0, 20, 9)
    np.testing.assert_allclose(
        MarchenkoPastur(100, 100).density(x), np.sqrt(400 - x**2) / (100 * np.pi), atol=1e-15
    )


def test_a_deviation_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="deviation above 0"):
        MarchenkoPastur(3, 5, deviation=0.0)
