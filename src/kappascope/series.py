"""What a figure draws: one quantity of every trial, along the values of a setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kappascope.statistics import Table

Values = NDArray[np.float64]
Printed = Mapping[str, Mapping[Any, float]]
"""The paper's means: of a component, at the values of a setting."""

# Okabe and Ito's colours, told apart in every common kind of colour blindness, with olive in place
# of their yellow, which vanishes on white. A component keeps its colour in every figure.
COLOURS = {
    "condition_number": "#D55E00",
    "row_norms": "#0072B2",
    "column_norms": "#56B4E9",
    "singular_values": "#CC79A7",
    "frobenius_norm": "#009E73",
    "overall_matrix": "#333333",
    "spectral_gap": "#E69F00",
    "effective_rank": "#8C8C1A",
    "log_condition_number": "#7A2E00",
}
SPARE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#333333", "#8C8C1A")


@dataclass(frozen=True, eq=False)
class Series:
    """One quantity of every trial (a row) at every level of a setting (a column).

    >>> rows = Table.of(
    ...     {"size": d, "seed": k, "component": "row_norms", "error": d + k}
    ...     for d in (32, 64) for k in range(3)
    ... )
    >>> one = Series.of(rows, "row_norms", "size")
    >>> one.levels, one.means, one.note
    ((32, 64), array([33., 65.]), 'n = 3')
    """

    name: str
    colour: str
    levels: tuple[Any, ...]
    trials: Values  # NaN where absent or not finite
    missing: int = 0  # rows whose value is not finite
    least: float = 0.0  # where zeros stand on a logarithmic axis

    @classmethod
    def of(cls, rows: Table, name: str, by: str, column: str = "error") -> Series:
        """The magnitudes of a component, or the ratio of two: ``"a / b"``, trial by trial."""
        above, _, below = name.partition(" / ")
        colour = COLOURS.get(above, SPARE[0])
        if not len(rows) or not len(rows.where(component=above)):
            return cls(name, colour, (), np.empty((0, 0)))
        levels = [level for level in rows.where(component=above).by(by) if level is not None]
        rows = rows.where(**{by: levels})
        trials = np.abs(rows.where(component=above).curves(by, column))
        if below:
            trials = trials / np.abs(rows.where(component=below).curves(by, column))
        finite = np.isfinite(trials)
        missing = len(rows.where(component=above)) - int(finite.sum())
        return cls(name, colour, tuple(levels), np.where(finite, trials, np.nan), missing)

    def ordered(self, levels: object) -> Series:
        """The same with its levels in the order of a tuple, if it is one."""
        if not isinstance(levels, tuple):
            return self
        places = [self.levels.index(level) for level in levels if level in self.levels]
        chosen = tuple(self.levels[place] for place in places)
        return replace(self, levels=chosen, trials=self.trials[:, places])

    @property
    def shown(self) -> Values:
        """The trials as they are drawn, zeros lifted to where the axis has its zero."""
        return np.maximum(self.trials, self.least)

    @property
    def quartiles(self) -> Values:
        """Lower quartile, median and upper quartile at every level: shape (3, levels)."""
        return self._each(lambda values: np.quantile(values, (0.25, 0.5, 0.75)), 3)

    @property
    def means(self) -> Values:
        """The mean at every level."""
        return np.ravel(self._each(np.mean, 1))

    def _each(self, statistic: Callable[[Values], Any], size: int) -> Values:
        columns = [column[np.isfinite(column)] for column in self.trials.T]
        found = [statistic(c) if len(c) else np.full(size, np.nan) for c in columns]
        return np.asarray(np.maximum(np.reshape(found, (-1, size)).T, self.least))

    @property
    def note(self) -> str:
        """How many trials stand at a level, and how many could not be drawn."""
        counts = sorted({int(n) for n in np.isfinite(self.trials).sum(axis=0)})
        if not counts:
            return "no trials"
        n = f"n = {counts[0]:,}" if len(counts) == 1 else f"n = {counts[0]:,} to {counts[-1]:,}"
        return f"{n}, {self.missing:,} not finite" if self.missing else n

    def stars(self, printed: Printed | None) -> Iterator[tuple[int, float]]:
        """Place and mean of what the paper prints of this quantity."""
        for level, mean in (printed or {}).get(self.name, {}).items():
            if level in self.levels:
                yield self.levels.index(level), mean


def together(series: Iterable[Series]) -> list[Series]:
    """Series that share an axis: their zeros stand at one decade mark below all other values."""
    found = list(series)
    values = np.concatenate([one.trials.ravel() for one in found])
    if not (values == 0).any():
        return found
    smallest = min(values[values > 0], default=10.0)
    least = float(10.0 ** (np.ceil(np.log10(smallest)) - 1))
    return [replace(one, least=least) for one in found]
