"""Whether a part of a trained matrix lies beyond what noise alone would have made of it.

A null gives draws of every part: of :class:`~kappascope.theory.noise.NoiseLaw`, of ghosts, of the
start. A part's place among them is its p-value, exact for any number of draws: the value and its n
draws are n + 1 numbers in random order if the null holds. Values that are equal share their places
by lot, so that p is uniform for a discrete part, too.

Three verdicts: *beyond noise*, *what noise alone would have done*, and *undecided*. A difference of
less than a tenth counts as none (`MARGIN`, on the log scale of the parts): in a large matrix
noise is so regular that any small fault of the null would else be called learning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import scipy
import torch
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

from kappascope.matrix.parts import StartFrame, matrix_parts
from kappascope.theory.noise import Array, NoiseLaw

DRAWS = 999  # so that the least p-value is about 0.001
LEVEL = 0.05  # of false discoveries among all parts that are tested together
MARGIN = 0.1  # ten per cent: on log scales, and of shares

Answer = Literal["beyond noise", "what noise alone would have done", "undecided"]
BEYOND: Answer = "beyond noise"
NOISE: Answer = "what noise alone would have done"
UNDECIDED: Answer = "undecided"


@dataclass(frozen=True)
class PartComparison:
    """A part of a matrix beside what a null gives: its median and the ends of its middle 90 %.

    ``p`` is two-sided, ``adjusted`` the same with regard to all that was tested together.

    >>> found = compared_with_draws("log_norm", 1.0, np.linspace(-0.04, 0.04, 999), "white noise")
    >>> found.p < 0.01, answered([found])[0].answer
    (True, 'beyond noise')
    """

    part: str
    value: float
    usual: float
    low: float
    high: float
    p: float
    null: str
    adjusted: float | None = None
    answer: Answer = UNDECIDED

    @property
    def difference(self) -> float:
        """How far the part lies from the null's median."""
        return self.value - self.usual


def place(value: float, draws: ArrayLike, random: np.random.Generator) -> float:
    """Return the place of a value among draws, in (0, 1); equal ones share it by lot.

    >>> place(2.0, [1.0, 3.0, 4.0], np.random.default_rng(0)) < 0.5
    True
    """
    others = np.asarray(draws, dtype=float)
    below, equal = int((others < value).sum()), int((others == value).sum())
    return float((below + random.uniform() * (equal + 1)) / (len(others) + 1))


def compared_with_draws(
    part: str, value: float, draws: ArrayLike, null: str, random: np.random.Generator | None = None
) -> PartComparison:
    """Compare a part with the draws of a null.

    >>> compared_with_draws("log_norm", 0.5, [0.0, 0.4, 0.6, 1.0], "a null").usual
    0.5
    """
    others = np.asarray(draws, dtype=float)
    low, usual, high = np.quantile(others, (0.05, 0.5, 0.95))
    u = place(value, others, random or np.random.default_rng(0))
    return PartComparison(
        part, value, float(usual), float(low), float(high), 2 * min(u, 1 - u), null
    )


def compared_with_few(part: str, value: float, draws: ArrayLike, null: str) -> PartComparison:
    """Compare a part with a few draws, such as ghosts, taken as normal: Student's law.

    >>> round(compared_with_few("log_norm", 3.0, [0.9, 1.0, 1.1, 1.0], "ghosts").p, 4)
    0.0004
    """
    others = np.asarray(draws, dtype=float)
    n = len(others)
    centre, spread = float(others.mean()), float(others.std(ddof=1)) * np.sqrt(1 + 1 / n)
    reach = float(scipy.stats.t.ppf(0.95, n - 1)) * spread
    if spread:
        p = float(2 * scipy.stats.t.sf(abs(value - centre) / spread, n - 1))
    else:  # all alike: so is the value, or there is no doubt
        p = float(value == centre)
    return PartComparison(part, value, centre, centre - reach, centre + reach, p, null)


def answered(
    found: Iterable[PartComparison], level: float = LEVEL, margin: float = MARGIN
) -> list[PartComparison]:
    """Answer for all parts together, at most ``level`` of what is called beyond noise falsely.

    Beyond noise: the adjusted p-value (Benjamini and Hochberg 1995) is at most ``level``, and the
    difference from the median exceeds ``margin``. What noise would have done: 90 % of the null's
    draws are within ``margin`` of the value, which is two one-sided tests at 5 %.

    >>> near = PartComparison("log_norm", 0.01, 0.0, -0.02, 0.02, 0.4, "a null")
    >>> answered([near])[0].answer
    'what noise alone would have done'
    """
    every = list(found)
    if not every:
        return []
    adjusted = scipy.stats.false_discovery_control([each.p for each in every])
    return [
        replace(each, adjusted=float(p), answer=_answer(each, float(p), level, margin))
        for each, p in zip(every, adjusted, strict=True)
    ]


def _answer(each: PartComparison, adjusted: float, level: float, margin: float) -> Answer:
    if adjusted <= level and abs(each.difference) > margin:
        return BEYOND
    if max(each.value - each.low, each.high - each.value) <= margin:
        return NOISE
    return UNDECIDED


def drawn_parts(
    law: NoiseLaw,
    start: Float[Tensor, "out in"],
    count: int = DRAWS,
    seed: int = 0,
    frame: StartFrame | None = None,
) -> dict[str, Array]:
    """Draw the law of every part of a matrix that noise alone makes of its start.

    >>> law = NoiseLaw(kept=0.0, spread=1.0)
    >>> drawn = drawn_parts(law, torch.zeros(6, 4), count=50)
    >>> len(drawn["log_kappa"]), "alignment" in drawn  # a start of zeros has no directions
    (50, False)
    """
    if frame is None and bool(start.any()):
        frame = StartFrame(start)
    parts = [matrix_parts(each, frame) for each in law.draws(start, count, seed)]
    return {name: torch.cat([part[name] for part in parts]).cpu().numpy() for name in parts[0]}


def parts_compared(
    values: Mapping[str, float], drawn: Mapping[str, Sequence[float] | Array], null: str, seed: int
) -> list[PartComparison]:
    """Compare every part with its draws; ``seed`` decides between equal ones.

    >>> found = parts_compared({"log_norm": 2.0}, {"log_norm": [0.0, 1.0]}, "a null", seed=0)
    >>> found[0].part, found[0].difference
    ('log_norm', 1.5)
    """
    random = np.random.default_rng(seed)
    return [compared_with_draws(name, values[name], drawn[name], null, random) for name in drawn]
