"""What depth does: the mode equations of deep linear networks, and their gradient flow.

A product W = W_N ... W_1 follows, for white inputs and small learning rates h (time is h times
steps), the gradient flow

    dW_l/dt = - (W_N ... W_l+1)' (W - W*) (W_l-1 ... W_1)'.

If the layers start balanced and aligned with the target's singular vectors, the singular values
separate into modes (Saxe et al. 2014; Arora et al. 2018, 2019):

    ds/dt = N s^(2 - 2/N) (s* - s).

A mode waits near zero, for a time that grows as 1 / s* and with a small start; while small modes
wait, kappa of the product is large. The paper's start is neither balanced nor aligned: for it the
flow itself is integrated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce

import numpy as np
import scipy  # its integrators load when first used: nobody who diagnoses waits for them
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def mode_speed(strength: ArrayLike, target: ArrayLike, depth: int) -> Array:
    """ds/dt = N s^(2 - 2/N) (s* - s) of a mode of the product.

    >>> float(mode_speed(0.25, target=1.0, depth=2))  # 2 s (s* - s)
    0.375
    """
    s, goal = np.asarray(strength, dtype=float), np.asarray(target, dtype=float)
    return np.asarray(depth * s ** (2 - 2 / depth) * (goal - s))


def learning_time(target: float, start: float, depth: int, share: float = 0.01) -> float:
    """Integrate ds / speed: the time until a mode has come within ``share`` of its target.

    Divide by the learning rate for steps. Depth 1: log((1 - start/target) / share), alike for
    every strength. From depth 2 on, a mode of half the strength takes about twice as long.

    >>> [round(learning_time(s, 1e-3, depth=1), 2) for s in (2.0, 1.0)]
    [4.6, 4.6]
    >>> [round(learning_time(s, 1e-3, depth=2), 2) for s in (2.0, 1.0)]
    [3.05, 5.75]
    """
    if not 0 < start < (1 - share) * target:
        raise ValueError(f"expected 0 < start < (1 - share) target, got {start} and {target}")

    def slowness(log_rest: float) -> float:  # in log(s* - s), where the end is no longer steep
        rest = math.exp(log_rest)
        return rest / float(mode_speed(target - rest, target, depth))

    def early(log_s: float) -> float:  # in log s, where the beginning is not
        s = math.exp(log_s)
        return s / float(mode_speed(s, target, depth))

    middle = max(start, target / 2)
    first, _ = scipy.integrate.quad(early, math.log(start), math.log(middle))
    second, _ = scipy.integrate.quad(slowness, math.log(share * target), math.log(target - middle))
    return first + second


def mode_path(targets: ArrayLike, starts: ArrayLike, depth: int, times: ArrayLike) -> Array:
    """Follow the strengths of modes, (times, modes), from aligned and balanced layers.

    >>> mode_path([2.0, 0.5], [0.01, 0.01], depth=2, times=[0, 2, 10]).round(2)
    array([[0.01, 0.01],
           [1.87, 0.07],
           [2.  , 0.5 ]])
    """
    goal, s, t = (np.asarray(values, dtype=float) for values in (targets, starts, times))
    if depth == 1:
        return np.asarray(goal + (s - goal) * np.exp(-t[:, None]))
    if depth == 2:  # the logistic function of Saxe et al., also of a target of zero
        age = 2 * t[:, None] * np.ones_like(goal)
        grown = np.divide(-np.expm1(-goal * age), goal, out=age.copy(), where=goal != 0)
        return np.asarray(s / (np.exp(-goal * age) + s * grown))
    moving = s > 0  # from zero nothing moves
    aim = goal[moving]
    # in log s, because a start of 1e-9 is as far from 1e-8 as 0.1 is from 1

    def speed(_: float, log: Array) -> Array:
        return mode_speed(np.exp(log), aim, depth) / np.exp(log)

    begin = np.log(s[moving])
    path = scipy.integrate.solve_ivp(speed, _span(t), begin, "LSODA", t, rtol=1e-8, atol=1e-10)
    strengths = np.zeros((len(t), len(s)))
    strengths[:, moving] = np.exp(path.y.T)
    return strengths


def mode_kappa(targets: ArrayLike, starts: ArrayLike, depth: int, times: ArrayLike) -> Array:
    """Divide the strongest mode by the weakest: kappa of the product at each time.

    >>> mode_kappa([2.0, 0.5], [0.01, 0.01], depth=2, times=[0, 2, 10]).round(1)  # kappa* = 4
    array([ 1. , 28.6,  4. ])
    """
    modes = np.abs(mode_path(targets, starts, depth, times))
    return np.asarray(modes.max(-1) / modes.min(-1))


def _span(times: Array) -> tuple[float, float]:
    """From zero to the last time, and some way where that is zero too: a point is no path."""
    return 0.0, float(times.max()) or 1.0


def product(layers: Sequence[Array]) -> Array:
    """W_N ... W_1, the first layer next to the input.

    >>> product([np.diag([1.0, 2.0]), np.array([[0.0, 1.0], [1.0, 0.0]])])
    array([[0., 2.],
           [1., 0.]])
    """
    return reduce(lambda w, layer: layer @ w, layers)


def flow(layers: Sequence[Array], target: Array, times: ArrayLike) -> list[list[Array]]:
    """Follow the layers along the gradient flow from any start, to each of the rising times.

    It conserves W_l+1' W_l+1 - W_l W_l', so imbalance of the start stays for ever.

    >>> (later,) = flow([0.1 * np.eye(2)] * 2, np.diag([2.0, 0.5]), times=[2.0])
    >>> product(later).round(2)
    array([[1.87, 0.  ],
           [0.  , 0.07]])
    """
    shapes = [np.shape(layer) for layer in layers]
    cuts = np.cumsum([rows * columns for rows, columns in shapes])[:-1]

    def parts(flat: Array) -> list[Array]:
        pieces = np.split(flat, cuts)
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def speed(_: float, flat: Array) -> Array:
        return np.concatenate([g.ravel() for g in _descent(parts(flat), target)])

    t = np.asarray(times, dtype=float)
    begin = np.concatenate([np.asarray(layer, dtype=float).ravel() for layer in layers])
    # small singular values of a product are differences of large ones: hence so many digits
    path = scipy.integrate.solve_ivp(speed, _span(t), begin, "DOP853", t, rtol=1e-9, atol=1e-11)
    return [parts(flat) for flat in path.y.T]


def _descent(layers: list[Array], target: Array) -> list[Array]:
    """Return minus the gradient of half the squared error, for every layer."""
    before = [np.eye(layers[0].shape[1])]
    for layer in layers:
        before.append(layer @ before[-1])
    back, gradients = target - before[-1], []
    for layer, seen in zip(reversed(layers), reversed(before[:-1]), strict=True):
        gradients.append(back @ seen.T)
        back = layer.T @ back
    return gradients[::-1]
