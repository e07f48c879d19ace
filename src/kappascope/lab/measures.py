"""What is measured on rows: the figures a paper prints, and medians for its claims.

Pages of :mod:`kappascope.paper` are written with these functions. Each gives a function of the
rows, to be evaluated when there are some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from kappascope.lab.claims import Basis, Measure, Printed
from kappascope.lab.statistics import Estimate, growth_exponent, median, paired_ratio, ratio
from kappascope.lab.table import Floats, Table

# The components of which most claims speak.
KAPPA, LOG_KAPPA, ROW_NORMS = "condition_number", "log_condition_number", "row_norms"
SHORT = {"d": "size", "lr": "learning_rate", "wd": "weight_decay"}  # in the ids of figures
Where = Mapping[str, Any]
"""Columns and the value, or tuple of values, that rows must have there."""


def printed(
    id: str,
    text: str,
    source: str,
    measure: Callable[[Table], Any] | None = None,
    basis: Basis = "protocol",
    **where: Any,
) -> Printed:
    """Describe a printed figure by an id that tells how it is measured, on the paper's streams.

    The id is a path: experiment, component, settings, statistic (one of ``STATISTICS``). A setting
    without ``=`` stands for each of its values, of which a printed range shows the least and the
    greatest; ``trials=10`` are the first ten. ``measure`` replaces the statistic and is given the
    selected rows, ``basis`` is what a match is worth (:class:`Printed`). Further columns of the
    rows are chosen by keywords; of a tuple or range (``seed=range(15)``) all must be there, for the
    mean of fewer trials is another number.

    >>> rows = Table.of(
    ...     {"stream": "paper", "size": d, "seed": k, "component": "row_norms", "error": 1 / d + k}
    ...     for d in (32, 64) for k in range(2)
    ... )
    >>> figure = printed("e1/row_norms/d=32/mean", "0.53", "4.1", seed=range(2))
    >>> figure.what, figure.measure(rows)
    ('row norms, d=32, mean (4.1)', 0.53125)
    >>> printed("e1/row_norms/d/std", "0.5-0.5", "4.1").measure(rows)
    [0.5, 0.5]
    """
    _, component, *settings, statistic = id.split("/")
    if not measure and statistic not in STATISTICS:
        raise ValueError(f"{id} ends in none of {', '.join(STATISTICS)}; pass measure=")
    chosen = {"stream": "paper", "component": component, **where}
    for name, value in (setting.split("=") for setting in settings if "=" in setting):
        if name == "trials":
            chosen["seed"] = range(int(value))
        else:
            chosen[SHORT.get(name, name)] = _value(value)
    each = [SHORT.get(name, name) for name in settings if "=" not in name]

    def measured(rows: Table) -> Any:
        if measure:
            return measure(select(rows, **chosen))
        if not each:
            return STATISTICS[statistic](rows, chosen)
        levels = select(rows, **chosen).by(each[0])
        return [STATISTICS[statistic](rows, {**chosen, each[0]: level}) for level in levels]

    what = ", ".join([component.replace("_", " "), *settings, statistic])
    return Printed(id, f"{what} ({source})", text, measured, basis)


def _value(text: str) -> str | int | float:
    """Read a number where the text is one."""
    for kind in int, float:
        with suppress(ValueError):
            return kind(text)
    return text


def select(rows: Table, **where: Any) -> Table:
    """Select the rows that a figure or claim speaks of, and raise if they are not all there.

    A column that no row has is null in every row.
    """
    known = set(rows.rows.column_names)
    where = {name: wanted for name, wanted in where.items() if name in known or wanted is not None}
    chosen, so_far = rows, ""
    for name, wanted in where.items():
        if name not in known:
            raise LookupError(f"this run has no trials with any {name}")
        chosen = chosen.where(**{name: wanted})
        if absent := _absent(chosen, name, wanted):
            raise LookupError(f"this run has no trials with {so_far}{name} {absent}")
        so_far += f"{name} {wanted}, " if isinstance(wanted, str) else ""
    for name, wanted in where.items():  # which later conditions may have left without rows
        if absent := _absent(chosen, name, wanted):
            raise LookupError(f"this run has no trials with {so_far}{name} {absent}")
    return chosen


def _absent(rows: Table, name: str, wanted: Any) -> str:
    """Name the wanted values of a column that no row has, if any."""
    values = list(wanted) if isinstance(wanted, tuple | list | range) else [wanted]
    present = rows.rows[name].unique().to_pylist()
    absent = [str(value) for value in values if value not in present]
    return f"{absent[0]} to {absent[-1]}" if len(absent) > 1 else "".join(absent)


def _mean(rows: Table, where: Where, column: str = "error") -> float:
    return float(np.mean(select(rows, **where).values(column)))


def _ratio(rows: Table, where: Where, **other: str) -> float:
    return _mean(rows, where) / _mean(rows, {**where, **other})


STATISTICS: dict[str, Callable[[Table, Where], float]] = {
    "mean": _mean,
    "std": lambda rows, where: float(np.std(select(rows, **where).values())),  # the paper's: over n
    "learned": lambda rows, where: _mean(rows, where, "value"),
    "target": lambda rows, where: _mean(rows, where, "target"),
    "ratio": lambda rows, where: _ratio(rows, where, component="row_norms"),
    "improvement": lambda rows, where: 100 * (1 - _ratio(rows, where, strategy="standard")),
}
"""The statistics a figure may be: the mean of the error, its standard deviation, its ratio to that
of the row norms, or how many per cent it is below that of plain training; or the mean value,
learned or wanted."""


def typical(component: str, *, column: str = "error", **where: Any) -> Measure:
    """Measure the median over the own trials that ``where`` selects."""
    chosen = {"stream": "own", "component": component, **where}
    return lambda rows: median(select(rows, **chosen).values(column))


def paired(
    statistic: Callable[[Floats, Floats], Estimate],
    ours: Where,
    theirs: Where,
    /,
    *,
    column: str = "error",
    **where: Any,
) -> Measure:
    """Compare ours with theirs, two selections of own trials, by a statistic of paired values."""
    shared = {"stream": "own", **where}

    def measure(rows: Table) -> Estimate:
        arms = (select(rows, **{**shared, **arm}) for arm in (ours, theirs))
        return statistic(*next(arms).paired(next(arms), column))

    return measure


def compared(ours: Where, theirs: Where, /, *, column: str = "error", **where: Any) -> Measure:
    """Measure the median over own trials of the ratio of ours to theirs, trial by trial."""
    return paired(paired_ratio, ours, theirs, column=column, **where)


def improvement(ours: Where, theirs: Where, **where: Any) -> Measure:
    """Measure by how many per cent our error is below theirs, the median over own trials."""
    left_over = compared(ours, theirs, **where)
    return lambda rows: left_over(rows).map(
        lambda left: 100 * (1 - left), "improvement in per cent"
    )


def medians_compared(ours: Where, theirs: Where, **where: Any) -> Measure:
    """Measure the ratio of our median over own trials to theirs, where these are other trials."""
    groups = [{**group, "stream": "own", **where} for group in (ours, theirs)]
    return lambda rows: ratio(*(select(rows, **group).values() for group in groups))


def growth_with_size(**where: Any) -> Measure:
    """Measure the power of the size with which the median error of the selected rows grows."""

    def measure(rows: Table) -> Estimate:
        sizes = select(rows, **where).by("size")
        return growth_exponent({size: part.values() for size, part in sizes.items()})

    return measure
