"""What an optimizer makes of a weight when gradients are noise: W_t = a_t W_0 + s_t N.

Decay keeps the share a_t of the start; the steps add a random matrix whose entries have the
deviation s_t. Gradients without coherent signal are taken as white: independent in time, normal,
of one size. Both numbers then follow from learning rates, weight decay and betas alone, by linear
recursions for SGD, and for Adam and Muon, which divide out the size of a gradient, by averages
over their own randomness:

- SGD with momentum is linear: two numbers, weight and momentum, and their second moments.
- Adam's step is sum_i w_i g_i / sqrt(v), and v knows g_i^2 only. So E[(sum_i g_i h_i)^2] is
  sum_i E[g_i^2 h_i^2] with h_i = sum over the steps k from i on of c_k w_ki / sqrt(v_k): its cross
  terms vanish by sign, and an average over few entries and all steps has an error below 0.1 %.
- Muon's step is the orthogonal factor O_k of averaged gradients. Two of these, whose averages
  have the correlation rho, have a correlation F(rho) that is simulated once a shape.

N is normal once many independent steps are in it: Adam's and SGD's from a few momentum times on.
Muon's steps have no freedom but their directions, and its momentum is long. Its N is drawn as what
it is, a sum of the orthogonal factors of a momentum that is looked at several times while it
changes. A sum of n independent factors departs from normal noise by its fourth cumulant, which
falls as 1 / n, and slowly: with 70 of them singular values are still off by one per cent. So a long
sum is drawn as a shorter one of m factors and normal noise, in shares of sqrt(m / n) and the rest
of the variance, whose fourth cumulant is the same; from `NORMAL` factors on it is normal.

Noise need not be white in space: with covariances of rows and of columns it is
W_t = a_t W_0 + s_t R^(1/2) N C^(1/2), both of mean diagonal one (:meth:`NoiseLaw.shaped`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import scipy  # its filters load when first used: nobody who diagnoses waits for them
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from kappascope.matrix.covariance import covariance_root
from kappascope.matrix.orthogonal import orthogonalized

Array = NDArray[np.float64]
Settings = Mapping[str, Any]
"""Settings as an optimizer's parameter group has them: weight_decay, betas, momentum, ..."""

FORGOTTEN = 1e-5  # of the largest weight of a step in the sum: what came before adds nothing
ADAM_SAMPLES = 2**23  # entries times steps: their mean square is known to 0.05 %
MUON_SIDE = 128  # larger matrices are simulated with this longer side, of the same shape
MUON_ENTRIES = 2**18  # of the factors that are simulated: their mean square is known to 0.2 %
MAX_PIECES = 24  # independent orthogonal factors in a sum, up to which it is drawn as it is
STAND_IN = 12  # of them in the sum that stands for a longer one
NORMAL = 600  # of them from which on a sum is drawn as normal: it is, to 0.2 per cent
LOOKS = 6  # at the momentum, in the time in which it changes
FADED = 0.01  # of the largest weight: orthogonal factors that weigh less are not drawn
DRAW_ENTRIES = 2**22  # held at a time while matrices are drawn


@dataclass(frozen=True)
class FactorSum:
    """A sum of the orthogonal factors of averaged noise, every ``stride`` steps, scaled to one.

    The averages are those of Muon's ``momentum``, looked up ``ahead`` (Nesterov); ``is_fresh`` says
    that they begin with nothing, at the first step of training. The sum has a ``share`` of the
    variance; the rest is normal noise.

    >>> law = FactorSum((1.0, 1.0), stride=3, momentum=0.9, ahead=0.9, is_fresh=True)
    >>> drawn = law.drawn((2000, 4, 6), torch.Generator().manual_seed(0))
    >>> round(float(drawn.square().mean()), 1)
    1.0
    """

    weights: tuple[float, ...]
    stride: int
    momentum: float
    ahead: float
    is_fresh: bool
    share: float = 1.0

    def drawn(self, shape: tuple[int, int, int], random: torch.Generator) -> Tensor:
        """Draw a stack of sums; the average and its newest gradient are followed exactly."""
        mu, stride = self.momentum, self.stride
        older = math.sqrt(sum(mu ** (2 * j) for j in range(1, stride)))
        average = torch.zeros(shape)
        if not self.is_fresh:
            average = torch.randn(shape, generator=random) / math.sqrt(1 - mu**2)
        total = torch.zeros(shape)
        for weight in self.weights:
            newest = torch.randn(shape, generator=random)
            average = mu**stride * average + newest
            if older:
                average += older * torch.randn(shape, generator=random)
            seen = newest + self.ahead * average if self.ahead < 1 else average
            total += weight * orthogonalized(seen)
        total *= math.sqrt(self.share / self._square(shape[1], shape[2]))
        if self.share < 1:
            total += math.sqrt(1 - self.share) * torch.randn(shape, generator=random)
        return total

    def _square(self, rows: int, columns: int) -> float:
        """Return the mean square of an entry of the plain sum."""
        weights = np.array(self.weights)
        first = self.stride if self.is_fresh else 10**6
        times = first + self.stride * np.arange(len(weights), dtype=float)
        correlation, total = factor_correlation(rows, columns), 0.0
        for lag in range(len(weights)):
            early = times[: len(weights) - lag]
            rho = _momentum_correlation(early, lag * self.stride, self.momentum, self.ahead)
            pairs = weights[: len(weights) - lag] * weights[lag:] * np.interp(rho, *correlation)
            total += (1 if lag == 0 else 2) * float(pairs.sum())
        return total * _factor_square(rows, columns)


@dataclass(frozen=True, eq=False)
class NoiseLaw:
    """The law of W_t = kept W_0 + spread N, with ``factors`` if N is no normal matrix but Muon's.

    >>> law = noise_law("SGD", {"weight_decay": 0.1}, [0.1] * 1000, (4, 4), gradient=1.0)
    >>> round(law.kept, 6), round(law.spread, 3)  # sqrt(lr / (2 wd)), nearly
    (4.3e-05, 0.709)
    """

    kept: float
    spread: float
    factors: FactorSum | None = None
    rows: Tensor | None = field(default=None, repr=False)  # square roots of covariances
    columns: Tensor | None = field(default=None, repr=False)

    def shaped(self, rows: Float[Tensor, "out out"], columns: Float[Tensor, "in in"]) -> NoiseLaw:
        """Give the noise covariances of rows and columns, of which only the shape counts."""
        return replace(
            self, rows=covariance_root(rows), columns=covariance_root(columns), factors=None
        )

    def draws(
        self, start: Float[Tensor, "out in"], count: int, seed: int = 0
    ) -> Iterator[Float[Tensor, "draws out in"]]:
        """Yield ``count`` weights that noise could have made of a start, some at a time."""
        base = start.detach().cpu().float()
        rows, columns = base.shape
        size = max(1, min(count, DRAW_ENTRIES // base.numel()))
        for first in range(0, count, size):
            stack = min(size, count - first)
            wide = _noise(
                self.factors, (stack, min(rows, columns), max(rows, columns)), seed, first
            )
            noise = wide if rows <= columns else wide.mT
            noise = noise if self.rows is None else self.rows.to(noise) @ noise
            noise = noise if self.columns is None else noise @ self.columns.to(noise)
            yield self.kept * base + self.spread * noise


@lru_cache(maxsize=8)  # stacks of 16 MB: all matrices of a shape in a run have the same noise
def _noise(factors: FactorSum | None, shape: tuple[int, int, int], seed: int, first: int) -> Tensor:
    random = torch.Generator().manual_seed(2**32 * seed + first)
    return torch.randn(shape, generator=random) if not factors else factors.drawn(shape, random)


def noise_law(
    optimizer: str,
    settings: Settings,
    rates: Sequence[float] | Array,
    shape: tuple[int, int],
    gradient: float | None = None,
) -> NoiseLaw:
    """Return the law of a weight after steps at these learning rates, driven by white gradients.

    ``optimizer`` is the name of a class of torch's, ``settings`` are those of its parameter group.
    ``gradient`` is the deviation of a gradient's entries, on which only SGD's noise depends.

    >>> law = noise_law("AdamW", {"weight_decay": 0.0}, [0.01] * 2000, (9, 9))
    >>> 0.99 < law.spread / (0.01 * 2000**0.5) < 1.04  # a walk of steps of size lr
    True
    """
    if optimizer not in LAWS:
        known = ", ".join(LAWS)
        raise ValueError(f"expected one of {known}, whose noise is known; got {optimizer}")
    steps = np.asarray(rates, dtype=float)
    if steps.ndim != 1 or not len(steps) or not (steps >= 0).all():
        raise ValueError("expected learning rates of one step or more, none of them negative")
    if any(settings.get(name) for name in ("amsgrad", "maximize")):
        raise ValueError(f"expected {optimizer} without amsgrad and maximize")
    return LAWS[optimizer](settings, steps, shape, gradient)


# --- SGD ------------------------------------------------------------------------------------------


def _sgd(
    settings: Settings, rates: Array, shape: tuple[int, int], gradient: float | None
) -> NoiseLaw:
    """Follow the second moments of weight and momentum, runs of equal rates at once."""
    if gradient is None:
        raise ValueError("SGD's noise depends on the size of gradients; pass gradient=")
    mean: Array = np.array([1.0, 0.0])
    moments: Array = np.zeros(4)
    first = True
    for rate, same in groupby(rates):
        count = sum(1 for _ in same)
        if first:  # torch's momentum begins with the gradient itself, not with a share of it
            matrix, input_ = _sgd_step(settings, rate, first=True)
            mean = matrix @ mean
            moments = np.asarray(np.kron(input_, input_), dtype=np.float64)
            count, first = count - 1, False
        matrix, input_ = _sgd_step(settings, rate, first=False)
        square = np.zeros((5, 5))
        square[:4, :4], square[:4, 4], square[4, 4] = (
            np.kron(matrix, matrix),
            np.kron(input_, input_),
            1.0,
        )
        moments = (np.linalg.matrix_power(square, count) @ np.append(moments, 1.0))[:4]
        mean = np.linalg.matrix_power(matrix, count) @ mean
    return NoiseLaw(float(mean[0]), float(gradient * math.sqrt(max(moments[0], 0.0))))


def _sgd_step(settings: Settings, rate: float, first: bool) -> tuple[Array, Array]:
    """Return A and B of (weight, momentum)' = A (weight, momentum) + B gradient."""
    decay, momentum = settings.get("weight_decay", 0.0), settings.get("momentum", 0.0)
    share = 1.0 if first or not momentum else 1.0 - settings.get("dampening", 0.0)
    old = 0.0 if first or not momentum else momentum
    buffer, buffer_input = np.array([share * decay, old]), share
    step, step_input = buffer, buffer_input
    if momentum and settings.get("nesterov"):
        step, step_input = np.array([decay, 0.0]) + momentum * buffer, 1 + momentum * share
    matrix = np.array([np.array([1.0, 0.0]) - rate * step, buffer])
    return matrix, np.array([-rate * step_input, buffer_input])


# --- decoupled decay ------------------------------------------------------------------------------


def _remaining(rates: Array, decay: float) -> tuple[float, Array, int]:
    """Return the share of the start that decay leaves, what each step still weighs, and the first.

    Steps before the first one weigh next to nothing and are left out.
    """
    logs = np.log1p(-np.minimum(rates * decay, 1 - 1e-12))
    after = np.concatenate([np.cumsum(logs[::-1])[::-1][1:], [0.0]])
    weights = rates * np.exp(after)
    kept = float(np.exp(logs.sum()))
    worth = np.flatnonzero(weights > FORGOTTEN * weights.max(initial=0.0))
    return kept, weights, int(worth[0]) if len(worth) else len(rates) - 1


def _adamw(
    settings: Settings, rates: Array, shape: tuple[int, int], gradient: float | None
) -> NoiseLaw:
    """Average g_i^2 h_i^2 over simulated entries, where h_i is what g_i has done in the end."""
    beta_1, beta_2 = settings.get("betas", (0.9, 0.999))
    kept, weights, first = _remaining(rates, float(settings.get("weight_decay", 0.01)))
    square = _adam_square(weights.tobytes(), first, beta_1, beta_2)
    return NoiseLaw(kept, math.sqrt(square))


def _adam(
    settings: Settings, rates: Array, shape: tuple[int, int], gradient: float | None
) -> NoiseLaw:
    """Return AdamW's law for Adam without decay; with it, decay would be divided by gradients."""
    if settings.get("weight_decay") and not settings.get("decoupled_weight_decay"):
        raise ValueError("Adam's coupled weight decay has no such law; AdamW's has")
    return _adamw({"weight_decay": 0.0, **settings}, rates, shape, gradient)


@lru_cache(maxsize=64)  # all matrices of a run have one rate and decay, whatever their shape
def _adam_square(weights_bytes: bytes, first: int, beta_1: float, beta_2: float) -> float:
    weights = np.frombuffer(weights_bytes)
    begin = max(0, first - math.ceil(10 / (1 - beta_2)))  # by then v is stationary
    times = np.arange(begin + 1, len(weights) + 1)
    used = np.where(times > first, weights[begin:], 0.0)
    scale = used / (1 - beta_1**times)
    first_moment_bias, count = 1 - beta_2**times, len(times)
    random = np.random.default_rng(0)
    total, samples = 0.0, 0
    chunk = max(8, 2**21 // count)
    while samples * count < ADAM_SAMPLES or samples < 8:
        square = random.standard_normal((chunk, count)) ** 2
        state = np.zeros((chunk, 1)) if begin == 0 else np.full((chunk, 1), beta_2)
        v, _ = scipy.signal.lfilter([1 - beta_2], [1, -beta_2], square, zi=state)
        divided = scale / np.sqrt(v / first_moment_bias)
        done = scipy.signal.lfilter([1 - beta_1], [1, -beta_1], divided[:, ::-1])[:, ::-1]
        total += float((square * done**2).sum())
        samples += chunk
    return total / samples


# --- Muon -----------------------------------------------------------------------------------------


def _muon(
    settings: Settings, rates: Array, shape: tuple[int, int], gradient: float | None
) -> NoiseLaw:
    """Sum c_k c_l F(rho_kl) over the lags at which momentum is correlated."""
    momentum = float(settings.get("momentum", 0.95))
    ahead = momentum if settings.get("nesterov", True) else 1.0
    kept, weights, first = _remaining(rates, float(settings.get("weight_decay", 0.1)))
    used, times = weights[first:], np.arange(first + 1.0, len(weights) + 1)
    rows, columns = min(shape), max(shape)
    correlation = factor_correlation(rows, columns)
    lags = min(len(used), 1 + math.ceil(math.log(1e-4) / math.log(max(momentum, 1e-4))))
    square, together = 0.0, 1.0  # the sum, and the time in which momentum changes
    for lag in range(lags):
        early, late = used[: len(used) - lag], used[lag:]
        alike = np.interp(
            _momentum_correlation(times[: len(early)], lag, momentum, ahead), *correlation
        )
        square += (1 if lag == 0 else 2) * float((early * late * alike).sum())
        together += 0.0 if lag == 0 else 2 * float(alike[-1])
    matched = settings.get("adjust_lr_fn") == "match_rms_adamw"
    size = 0.2 * math.sqrt(columns) if matched else math.sqrt(max(1, shape[0] / shape[1]))
    spread = size * math.sqrt(max(square, 0.0) * _factor_square(rows, columns))
    return NoiseLaw(kept, spread, _factors(weights, used, together, momentum, ahead))


def _factors(
    weights: Array, used: Array, together: float, momentum: float, ahead: float
) -> FactorSum | None:
    """Choose what stands for the sum of a run's factors, if it is not normal.

    ``together`` is the number of steps in which momentum changes.
    """
    square = np.square(used)
    length = float(square.sum() ** 2 / np.square(square).sum())  # as many alike: fourth cumulants
    stride = max(1, round(min(together, length) / LOOKS))
    if length >= NORMAL * together:
        return None
    if length > MAX_PIECES * together:
        looks = round(STAND_IN * together / stride)
        share = math.sqrt(looks * stride / length)
        return FactorSum((1.0,) * looks, stride, momentum, ahead, is_fresh=False, share=share)
    faded = np.flatnonzero(weights > FADED * weights.max())[0]
    looked = weights[len(weights) % stride if faded < stride else faded :]
    blocks = looked[len(looked) % stride :].reshape(-1, stride).sum(1)
    return FactorSum(tuple(blocks.tolist()), stride, momentum, ahead, bool(faded < stride))


def _momentum_correlation(times: Array, lag: int, momentum: float, ahead: float) -> Array:
    """Correlate what is made orthogonal at a step with the same ``lag`` steps on.

    The gradient of step i enters the average of step k with the weight mu^(k - i); what is made
    orthogonal is the average, or under Nesterov's rule the gradient with mu times the average.
    """
    now = 1.0 if ahead == 1 else 1 + ahead
    ratio = momentum**2

    def older(t: Array) -> Array:  # the sum of mu^(2j), j from 1 to t - 1
        return np.asarray(ratio * (1 - ratio ** (t - 1)) / (1 - ratio))

    def variance(t: Array) -> Array:
        return np.asarray(now**2 + ahead**2 * older(t))

    if lag == 0:
        return np.ones_like(times)
    shared = momentum**lag * (now * ahead + ahead**2 * older(times))
    return np.asarray(shared / np.sqrt(variance(times) * variance(times + lag)))


def _simulated_shape(rows: int, columns: int) -> tuple[int, int]:
    long = max(rows, columns)
    if long <= MUON_SIDE:
        return rows, columns
    return max(1, round(rows * MUON_SIDE / long)), max(1, round(columns * MUON_SIDE / long))


@cache
def _factor_square(rows: int, columns: int) -> float:
    """Return the mean square of an entry of the orthogonal factor of noise, by Muon's products.

    It is 1 / max(rows, columns) for an exact factor; Muon's singular values are 0.7 to 1.2.
    """
    short = _simulated_shape(rows, columns)
    count = math.ceil(MUON_ENTRIES / math.prod(short))
    noise = torch.randn(count, *short, generator=torch.Generator().manual_seed(0))
    return float(orthogonalized(noise).square().mean()) * max(short) / max(rows, columns)


@cache
def factor_correlation(rows: int, columns: int) -> tuple[Array, Array]:
    """Return correlations of two Gaussian matrices, and those of their orthogonal factors.

    >>> before, after = factor_correlation(8, 64)  # a long matrix is its own factor, nearly
    >>> bool(abs(after - before).max() < 0.1)
    True
    """
    short = _simulated_shape(rows, columns)
    random = torch.Generator().manual_seed(1)
    rhos = np.concatenate([np.linspace(0, 0.9, 10), [0.95, 0.98, 1.0]])
    count = math.ceil(MUON_ENTRIES / math.prod(short))
    one, other = (torch.randn(count, *short, generator=random) for _ in range(2))
    factor = orthogonalized(one)
    square = float(factor.square().sum())

    def alike(rho: float) -> float:
        signs = (1, -1)  # of what is not shared: the correlation at rho = 0 is then zero on average
        return sum(
            float((factor * orthogonalized(rho * one + s * math.sqrt(1 - rho**2) * other)).sum())
            for s in signs
        ) / (2 * square)

    return rhos, np.array([0.0, *(alike(float(rho)) for rho in rhos[1:-1]), 1.0])


LAWS: Mapping[str, Callable[[Settings, Array, tuple[int, int], float | None], NoiseLaw]] = {
    "SGD": _sgd,
    "AdamW": _adamw,
    "Adam": _adam,
    "Muon": _muon,
}
