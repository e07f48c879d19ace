"""What the map of a model shows: one number of each matrix, and how far it is from usual.

A level says how much of a colour a cell gets, 0 where the number is usual. The colour itself says
what the rules found, so that a colour that alarms always stands for a finding.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

from kappascope.clinic.examination import Examination
from kappascope.text import number

RATIO_LEVELS = (1.5, 3, 10, 100, 1000)  # of kappa over its null; chance alone gives a square one 3
ERROR_LEVELS = (1e-3, 1e-2, 0.1, 1)  # relative; below the first even bfloat16 hides a move
LOST_LEVELS = (
    0.01,
    0.05,
    0.2,
    0.5,
    0.8,
)  # of the directions; chance loses 0.6 % of a square matrix
COUNT_LEVELS = (1, 4, 16, 64, 256)  # singular values above the edge
USUAL_ALPHA = (2.0, 6.0)  # Martin and Mahoney's range of well trained layers
ALPHA_LEVELS = (1.0, 1.25, 1.5, 2.0, 4.0)  # factors beyond that range


@dataclass(frozen=True)
class Metric:
    """A number of a matrix, what it means, and where it is unusual."""

    key: str
    label: str
    meaning: str
    of: Callable[[Examination], float | None]
    level: Callable[[float], int]

    def text(self, row: Examination) -> str:
        """Return the number as a cell shows it."""
        value = self.of(row)
        if value is None:
            return "–"
        if self.key == "rank":
            return f"{value:.0%}"
        least = "≥" if self.key == "chance" and row.is_bounded else ""
        return (
            f"{least}{number(value, 2)}"
            if value < 99.5 or self.key != "outliers"
            else f"{value:.0f}"
        )

    def level_of(self, row: Examination) -> int | None:
        """Return how unusual a matrix is by this number, up to 5; nothing where there is none."""
        value = self.of(row)
        if value is None:
            return None
        is_open = self.key == "chance" and row.is_bounded and value < 1  # it may well be above
        return 0 if is_open else self.level(value)


def usual_stable_rank(shape: tuple[int, int]) -> float:
    """Return the stable rank of a large random matrix: its energy over its squared edge.

    >>> usual_stable_rank((100, 100))
    25.0
    """
    rows, columns = shape
    return rows * columns / (rows**0.5 + columns**0.5) ** 2


def _ratio(row: Examination) -> float | None:
    return row.ratio


def _stable(row: Examination) -> float | None:
    if row.stable_rank is None or not min(row.shape):
        return None
    return row.stable_rank / usual_stable_rank(row.shape)


def _rank(row: Examination) -> float | None:
    return None if row.effective_rank is None else row.effective_rank / max(1, min(row.shape))


def _beyond(value: float) -> int:
    """Tell how far a ratio is from one, in either direction, by RATIO_LEVELS."""
    return bisect_right(RATIO_LEVELS, value if value >= 1 else 1 / value) if value > 0 else 5


def _alpha_level(value: float) -> int:
    low, high = USUAL_ALPHA
    factor = low / value if value < low else value / high
    return bisect_right(ALPHA_LEVELS, factor) if factor > 1 else 0


METRICS = (
    Metric("chance", "κ against chance",
           "the condition number as a multiple of that of a random matrix of its shape",
           _ratio, _beyond),
    Metric("stable", "stable rank",
           "energy over the largest squared singular value, as a multiple of chance",
           _stable, _beyond),
    Metric("rank", "σ > 1 %", "the share of singular values above 1 % of the largest",
           _rank, lambda share: bisect_right(LOST_LEVELS, 1 - share)),
    Metric("outliers", "outliers", "singular values above the edge of a random matrix",
           lambda row: row.outliers, lambda count: bisect_right(COUNT_LEVELS, count)),
    Metric("alpha", "tail exponent α", "the exponent of the spectrum's tail; 2 to 6 is usual",
           lambda row: row.alpha, _alpha_level),
    Metric("moved", "moved", "the change since the reference, relative to its size",
           lambda row: row.moved, lambda error: bisect_right(ERROR_LEVELS, error)),
)  # fmt: skip


def metric(key: str) -> Metric:
    """Return the metric of a name, or say which there are.

    >>> metric("alpha").label
    'tail exponent α'
    """
    known = {one.key: one for one in METRICS}
    if key not in known:
        raise ValueError(f"expected one of {', '.join(known)} for metric, got {key!r}")
    return known[key]
