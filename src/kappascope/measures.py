"""What is measured on rows: the figures a paper prints, and medians for its claims.

Words for pages of :mod:`kappascope.experiments`: each gives a function of the rows, to be evaluated
when there are some.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from kappascope.claims import Measure, Printed
from kappascope.statistics import Estimate, Table, median, paired_ratio

SHORT = {"d": "size", "lr": "learning_rate", "wd": "weight_decay"}  # in the ids of figures
Where = Mapping[str, Any]
"""Columns and the value, or tuple of values, that rows must have there."""


def printed(
    id: str,
    text: str,
    source: str,
    measure: Callable[[Table], Any] | None = None,
    **where: Any,
) -> Printed:
    """A figure whose id tells how it is measured, on the paper's streams.

    The id is a path: experiment, component, settings, statistic (one of ``STATISTICS``). A setting
    without ``=`` stands for each of its values, of which a printed range shows the least and the
    greatest; ``trials=10`` are the first ten. ``measure`` replaces the statistic and is given the
    selected rows. Further columns of the rows are chosen by keywords; of a tuple or range
    (``seed=range(15)``) all must be there, for the mean of fewer trials is another number.

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
    chosen |= dict(_equal(*setting.split("=")) for setting in settings if "=" in setting)
    each = [SHORT.get(name, name) for name in settings if "=" not in name]

    def found(rows: Table) -> Any:
        if measure:
            return measure(select(rows, **chosen))
        if not each:
            return STATISTICS[statistic](rows, chosen)
        levels = select(rows, **chosen).by(each[0])
        return [STATISTICS[statistic](rows, {**chosen, each[0]: level}) for level in levels]

    what = ", ".join([component.replace("_", " "), *settings, statistic])
    return Printed(id, f"{what} ({source})", text, found)


def select(rows: Table, **where: Any) -> Table:
    """The rows a figure or claim speaks of; that they are there is part of the question.

    >>> select(Table.of([{"seed": 0, "error": 0.1}]), seed=range(15))
    Traceback (most recent call last):
        ...
    LookupError: this run has no trials with seed 1 to 14
    >>> select(Table.of([{"stream": "own", "size": 32}]), stream="own", size=512)
    Traceback (most recent call last):
        ...
    LookupError: this run has no trials with stream own, size 512
    """
    chosen, so_far = rows, ""
    for name, wanted in where.items():
        if name not in rows.rows.column_names:
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
    """The wanted values of a column that no row has, if any."""
    several = list(wanted) if isinstance(wanted, tuple | list | range) else [wanted]
    present = rows.rows[name].unique().to_pylist()
    absent = [str(one) for one in several if one not in present]
    return f"{absent[0]} to {absent[-1]}" if len(absent) > 1 else "".join(absent)


def _mean(rows: Table, where: Where, column: str = "error") -> float:
    return float(np.mean(select(rows, **where).values(column)))


def _ratio(rows: Table, where: Where, other: Where) -> float:
    return _mean(rows, where) / _mean(rows, {**where, **other})


STATISTICS: dict[str, Callable[[Table, Where], float]] = {
    "mean": _mean,
    "std": lambda rows, where: float(np.std(select(rows, **where).values())),  # the paper's: over n
    "learned": lambda rows, where: _mean(rows, where, "value"),
    "target": lambda rows, where: _mean(rows, where, "target"),
    "ratio": lambda rows, where: _ratio(rows, where, {"component": "row_norms"}),
    "improvement": lambda rows, where: 100 * (1 - _ratio(rows, where, {"strategy": "standard"})),
}
"""What a figure may be: of the error its mean, standard deviation, ratio to that of the row norms,
or how many per cent it is below that of plain training; or the mean value, learned or wanted."""


def _equal(name: str, text: str) -> tuple[str, Any]:
    """The column that a setting of an id speaks of, and its value there."""
    if name == "trials":
        return "seed", range(int(text))
    return SHORT.get(name, name), _value(text)


def _value(text: str) -> str | int | float:
    for kind in int, float:
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def typical(component: str, *, column: str = "error", **where: Any) -> Measure:
    """For ``measure``: the median over the own trials that ``where`` selects.

    >>> rows = Table.of(
    ...     {"stream": "own", "seed": k, "component": "row_norms", "error": 0.1 * k}
    ...     for k in range(1, 8)
    ... )
    >>> print(typical("row_norms")(rows))
    median 0.4 [0.1, 0.7] (n = 7)
    """
    chosen = {"stream": "own", "component": component, **where}
    return lambda rows: median(select(rows, **chosen).values(column))


def compared(ours: Where, theirs: Where, *, column: str = "error", **where: Any) -> Measure:
    """For ``measure``: the median over own trials of the ratio of ours to theirs, trial by trial.

    >>> rows = Table.of(
    ...     {"stream": "own", "seed": k, "component": component, "error": error}
    ...     for k in range(7) for component, error in [("row_norms", 0.1), ("spectral_gap", 0.05)]
    ... )
    >>> print(compared({"component": "spectral_gap"}, {"component": "row_norms"})(rows))
    median paired ratio 0.5 [0.5, 0.5] (n = 7; zero width: 7 of 7 values are equal)
    """
    shared = {"stream": "own", **where}

    def measure(rows: Table) -> Estimate:
        arms = (select(rows, **{**shared, **arm}) for arm in (ours, theirs))
        return paired_ratio(*next(arms).paired(next(arms), column))

    return measure


def improvement(ours: Where, theirs: Where, **where: Any) -> Measure:
    """For ``measure``: by how many per cent our error is below theirs, the median over own trials.

    >>> rows = Table.of(
    ...     {"stream": "own", "seed": k, "strategy": strategy, "error": error}
    ...     for k in range(7) for strategy, error in [("standard", 0.4), ("svd", 0.1)]
    ... )
    >>> improvement({"strategy": "svd"}, {"strategy": "standard"})(rows).value
    75.0
    """
    ratio = compared(ours, theirs, **where)
    return lambda rows: ratio(rows).map(lambda left: 100 * (1 - left), "improvement in per cent")


def listed(sentence: str, *names: str) -> Callable[..., str]:
    """For ``explain``: the estimate of every part beside its name, where the sentence has ``{0}``.

    >>> explain = listed("The medians are {0} (n = {n}).", "at d = 32", "at d = 64")
    >>> explain(median(range(7)), median(range(9)), "holds")
    'The medians are 3 [0, 6] at d = 32, 4 [1, 7] at d = 64 (n = 7 to 9).'
    """

    def explain(*found: Any) -> str:
        *estimates, _ = found
        parts = (f"{one:.4g} {name}" for one, name in zip(estimates, names, strict=True))
        counts = sorted({one.n for one in estimates})
        n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        return sentence.format(", ".join(parts), n=n)

    return explain
