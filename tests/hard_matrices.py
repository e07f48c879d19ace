"""Matrices that break naive spectra, by name; shared by tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.linalg
import torch
from torch import Tensor


def _random(seed: int) -> np.random.Generator:
    return np.random.default_rng([20260713, seed])


def orthogonal(rows: int, columns: int, random: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(random.standard_normal((rows, columns)))[0]


def with_values(values: np.ndarray, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A dense matrix with these singular values."""
    random = _random(seed)
    u, v = orthogonal(rows, len(values), random), orthogonal(columns, len(values), random)
    return torch.from_numpy((u * values) @ v.T)


def gaussian(n: int, m: int | None = None, seed: int = 0) -> Tensor:
    return torch.from_numpy(_random(seed).standard_normal((n, m or n)))


def spiked(n: int, seed: int = 0) -> Tensor:
    """Gaussian bulk with a few strong directions: what a trained layer looks like."""
    random = _random(seed)
    bulk = random.standard_normal((n, n)) / np.sqrt(n)
    left, right = (random.standard_normal((n, 8)) / np.sqrt(n) for _ in "uv")
    return torch.from_numpy(bulk + (left * np.geomspace(20, 3, 8)) @ right.T)


def power_law(n: int, exponent: float = 0.8, seed: int = 0) -> Tensor:
    return with_values(np.arange(1, n + 1) ** -exponent, n, n, seed)


def heavy_tailed(n: int, freedom: float = 2.0, seed: int = 0) -> Tensor:
    """Student's entries: the squares of the singular values have a tail of exponent 1 + freedom/2.

    Two is what Martin and Mahoney (2021) find at the heavy end of well-trained layers.
    """
    return torch.from_numpy(_random(seed).standard_t(freedom, (n, n)))


def tailed(n: int, exponent: float = 0.8, seed: int = 0) -> Tensor:
    """A Gaussian bulk whose largest tenth follows a power law down to the bulk's edge."""
    u, s, vt = np.linalg.svd(_random(seed).standard_normal((n, n)))
    top = n // 10
    s[:top] = s[top] * (top / np.arange(1, top + 1)) ** exponent
    return torch.from_numpy((u * s) @ vt)


def outlier(n: int, size: float, seed: int = 0) -> Tensor:
    random = _random(seed)
    u, v = random.standard_normal(n), random.standard_normal(n)
    bulk = random.standard_normal((n, n))
    return torch.from_numpy(bulk + size * np.outer(u, v) / np.sqrt(n))


def product(n: int, factors: int, seed: int = 0) -> Tensor:
    random = _random(seed)
    result = np.eye(n)
    for _ in range(factors):
        result = result @ random.standard_normal((n, n)) / np.sqrt(n)
    return torch.from_numpy(result)


def kahan(n: int, theta: float = 1.2) -> Tensor:
    s, c = np.sin(theta), np.cos(theta)
    upper = np.eye(n) - c * np.triu(np.ones((n, n)), 1)
    return torch.from_numpy(np.diag(s ** np.arange(n)) @ upper)


def wilkinson_growth(n: int) -> Tensor:
    """LU with partial pivoting grows by 2**(n-1) here."""
    a = np.eye(n) - np.tril(np.ones((n, n)), -1)
    a[:, -1] = 1
    return torch.from_numpy(a)


def jordan(n: int, value: float) -> Tensor:
    return torch.from_numpy(value * np.eye(n) + np.eye(n, k=1))


def duplicate_rows(n: int) -> Tensor:
    a = gaussian(n)
    a[-(n // 2) :] = a[: n // 2]
    return a


def at_threshold(n: int, spread: float, seed: int = 0) -> Tensor:
    """A third of the values within ``spread`` of 0.01 sigma_1, on both sides."""
    random = _random(seed)
    near = 0.01 * (1 + spread * random.uniform(-1, 1, n // 3))
    values = np.r_[1.0, random.uniform(0.02, 0.9, n - n // 3 - 1), near]
    return with_values(np.sort(values)[::-1], n, n, seed)


def graded(n: int, kappa: float) -> dict[str, np.ndarray]:
    """Spectra of size ``n`` that end at ``1/kappa``."""
    return {
        "log": np.geomspace(1, 1 / kappa, n),
        "linear": np.linspace(1, 1 / kappa, n),
        "one small": np.r_[np.linspace(1, 0.5, n - 1), 1 / kappa],
        "bottom cluster": np.r_[np.linspace(1, 0.1, n - 40), np.full(40, 1 / kappa)],
        "top cluster": np.r_[np.full(40, 1.0), np.linspace(0.5, 1 / kappa, n - 40)],
        "ulp clusters": np.repeat(np.geomspace(1, 1 / kappa, 10), -(-n // 10))[:n],
        "equal pair on top": np.r_[1.0, 1.0, np.linspace(0.9, 1 / kappa, n - 2)],
    }


def random_toeplitz(n: int, decay: float, seed: int = 0) -> Tensor:
    column, row = _random(seed).standard_normal((2, n)) * np.exp(-decay * np.arange(n))
    return torch.from_numpy(scipy.linalg.toeplitz(column, row))


def circulant(n: int, kappa: float, seed: int = 0) -> Tensor:
    """Normal, with pairs of equal singular values between 1 and ``1/kappa``."""
    sizes = np.exp(_random(seed).uniform(-np.log(kappa), 0, n // 2 + 1))
    return torch.from_numpy(scipy.linalg.circulant(np.fft.irfft(sizes, n)))


def scaled_permutation(n: int, kappa: float, seed: int = 0) -> Tensor:
    random = _random(seed)
    entries = np.geomspace(1, 1 / kappa, n) * random.choice([-1, 1], n)
    return torch.from_numpy(np.diag(entries)[random.permutation(n)])


def blocks(n: int, seed: int = 0) -> Tensor:
    """Block diagonal, the blocks on different scales and each there twice."""
    random = _random(seed)
    sizes = [7, 16, 33, n // 2 - 56]
    each = [random.standard_normal((k, k)) * random.uniform(1e-4, 1) for k in sizes]
    return torch.from_numpy(scipy.linalg.block_diag(*each, *each, np.eye(n % 2)))


def cluster_at(n: int, count: int, at: float, width: float, seed: int = 0) -> Tensor:
    """``count`` values within a relative ``width`` of ``at``, the others from 1 down to a half."""
    near = at * (1 + width * _random(seed).uniform(-1, 1, count))
    values = np.r_[np.linspace(1, 0.5, n - count), near]
    return with_values(np.sort(values)[::-1], n, n, seed)


def crowded(rows: int, columns: int, gap: float, kappa: float) -> Tensor:
    """Each value a factor ``1 - gap`` below the one before, the last twenty ``1/kappa`` of that."""
    values = (1 - gap) ** np.arange(columns)
    values[-20:] /= kappa
    return with_values(values, rows, columns)


def wilkinson(n: int) -> Tensor:
    """Tridiagonal, with pairs of values that agree to many digits."""
    beside = np.ones(n - 1)
    return torch.from_numpy(
        np.diag(abs(np.arange(n) - (n - 1) / 2)) + np.diag(beside, 1) + np.diag(beside, -1)
    )


def dchkbd(kind: int, rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Matrix ``kind``, 1 to 16, of those that LAPACK's dchkbd tests its bidiagonal SVD with."""
    random, info, k = _random(kind), torch.finfo(dtype), min(rows, columns)
    even, geometric = np.linspace(1, info.eps, k), np.geomspace(1, info.eps, k)
    clustered = np.r_[1.0, np.full(k - 1, info.eps)]
    large = np.sqrt(info.max) * info.eps / k
    small = np.sqrt(info.tiny) * max(rows, columns) / info.eps

    def diagonal(values: np.ndarray) -> np.ndarray:
        return np.eye(rows, k) * (values * random.choice([-1, 1], k)) @ np.eye(k, columns)

    def dense(values: np.ndarray) -> np.ndarray:
        return (orthogonal(rows, k, random) * values) @ orthogonal(columns, k, random).T

    def entries() -> np.ndarray:
        return random.uniform(-1, 1, (rows, columns))

    def bidiagonal() -> np.ndarray:
        sizes = info.eps ** random.uniform(-2, 2, (rows, columns))
        return np.triu(sizes) - np.triu(sizes, 2)

    build = [
        lambda: np.zeros((rows, columns)), lambda: np.eye(rows, columns),
        lambda: diagonal(even), lambda: diagonal(geometric), lambda: diagonal(clustered),
        lambda: diagonal(geometric) * large, lambda: diagonal(geometric) * small,
        lambda: dense(even), lambda: dense(geometric), lambda: dense(clustered),
        lambda: dense(even) * large, lambda: dense(even) * small,
        entries, lambda: entries() * large, lambda: entries() * small, bidiagonal,
    ]  # fmt: skip
    return torch.from_numpy(build[kind - 1]()).to(dtype)


def zoo(n: int) -> dict[str, Callable[[], Tensor]]:
    """Square matrices of size ``n``."""
    built = {
        f"{kind} kappa={kappa:.0e}": (lambda values=values: with_values(values, n, n))
        for kappa in (1e1, 1e3, 1e5, 1e7)
        for kind, values in graded(n, kappa).items()
    }
    return built | {
        "gaussian": lambda: gaussian(n),
        "spiked": lambda: spiked(n),
        "power law 0.5": lambda: power_law(n, 0.5),
        "power law 1.5": lambda: power_law(n, 1.5),
        "heavy-tailed 2": lambda: heavy_tailed(n),
        "heavy-tailed 1": lambda: heavy_tailed(n, 1.0),
        "tailed": lambda: tailed(n),
        "outlier 1e2": lambda: outlier(n, 1e2),
        "outlier 1e4": lambda: outlier(n, 1e4),
        "outlier 1e7": lambda: outlier(n, 1e7),
        "product of 2": lambda: product(n, 2),
        "product of 3": lambda: product(n, 3),
        "threshold 1e-1": lambda: at_threshold(n, 1e-1),
        "threshold 1e-4": lambda: at_threshold(n, 1e-4),
        "threshold 1e-7": lambda: at_threshold(n, 1e-7),
        "threshold 1e-9": lambda: at_threshold(n, 1e-9),
        "cluster at the threshold": lambda: cluster_at(n, 20, 0.01, 1e-8),
        "cluster below the threshold": lambda: cluster_at(n, 40, 0.003, 1e-5),
        "crowded": lambda: crowded(n, n, 2e-4, 1e4),
        "random toeplitz": lambda: random_toeplitz(n, 0.05),
        "circulant": lambda: circulant(n, 1e5),
        "scaled permutation": lambda: scaled_permutation(n, 1e6),
        "blocks": lambda: blocks(n),
        "identity": lambda: torch.eye(n, dtype=torch.float64),
        "orthogonal": lambda: torch.from_numpy(orthogonal(n, n, _random(1))),
        "rank 1": lambda: with_values(np.ones(1), n, n),
        "rank n/2": lambda: with_values(np.linspace(2, 1, n // 2), n, n),
        "rank n-1": lambda: with_values(np.linspace(2, 1, n - 1), n, n),
        "constant": lambda: torch.full((n, n), 0.1, dtype=torch.float64),
        "duplicate rows": lambda: duplicate_rows(n),
        "zero column": lambda: gaussian(n).index_fill(1, torch.tensor([3]), 0.0),
        "jordan": lambda: jordan(n, 1.01),
        "nilpotent": lambda: jordan(n, 0.0),
        "kahan": lambda: kahan(n),
        "wilkinson growth": lambda: wilkinson_growth(n),
        "hilbert": lambda: torch.from_numpy(scipy.linalg.hilbert(n)),
        "toeplitz": lambda: torch.from_numpy(scipy.linalg.toeplitz(0.9 ** np.arange(n))),
        "vandermonde": lambda: torch.from_numpy(np.vander(np.linspace(-1, 1, n), n)),
        "sparse": lambda: gaussian(n) * (gaussian(n, seed=2) > 2.0),
        "tiny scale": lambda: gaussian(n) * 1e-160,
        "huge scale": lambda: gaussian(n) * 1e200,
        "uneven rows": lambda: gaussian(n) * gaussian(n, 1, seed=3).mul(3).exp(),
        "uneven columns": lambda: gaussian(n) * gaussian(1, n, seed=3).mul(2).exp(),
    }
