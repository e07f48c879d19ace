"""Rows drawn: every trial a point, the quartiles a band, the median a line.

A figure is a sheet of panels, and a panel says what it shows:

>>> plot = sheet(
...     error_lines("condition_number", "row_norms", by="size", stream="paper"),
...     tail("condition_number", by="size", stream="paper"),
... )
>>> rows = Table.of([
...     {"stream": "paper", "size": size, "seed": seed, "component": component, "error": 0.1 + seed}
...     for size in (32, 64) for seed in range(3)
...     for component in ("condition_number", "row_norms")
... ])
>>> figure = plot(rows, NOTHING)
>>> [axes.get_title(loc="left") for axes in figure.axes]
['a  Error by size', 'b  Tail of the κ error']

``plot`` takes the trials and the representative spectra; ``svg``, ``png`` and ``cells`` of
:mod:`kappascope.lab.drawing` turn its figure into files and into the pictures of the report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope.lab import drawing
from kappascope.lab.drawing import (
    FAINT,
    INK,
    SHADES,
    SPARE,
    STYLE,
    Printed,
    Series,
    with_common_zero,
)  # fmt: skip
from kappascope.lab.statistics import tail_index
from kappascope.lab.table import Table
from kappascope.text import words

if TYPE_CHECKING:  # loaded when something is drawn: workers that only train never need it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = Callable[["Axes", Table, Table], str]
"""Draws trials or spectra on the axes, and answers with the n that the caption must tell."""

Plot = Callable[[Table, Table], "Figure"]
"""From trials and representative spectra to a figure: what an experiment's page gives."""

MARKS = (
    "κ: condition number. Points and thin lines: single trials; thick lines: medians; bands and "
    "bars: quartiles; diamonds: means; stars: means the paper prints."
)
NOTHING = Table.of([])
PAIRS = "Dashed: target; solid: learned; one colour a trial."


def sheet(*panels: Panel, columns: int = 2, marks: str = MARKS) -> Plot:
    """Make a figure of lettered panels; its caption explains the marks and tells the n of each.

    >>> sheet(spectrum_lines(), marks=PAIRS)(NOTHING, NOTHING).get_supxlabel()
    'Dashed: target; solid: learned; one colour a trial. 0 trials.'
    """

    def plot(rows: Table, spectra: Table) -> Figure:
        import matplotlib as mpl

        with mpl.rc_context(STYLE):
            figure = drawing.blank(len(panels), min(columns, len(panels)))
            pairs = zip(figure.axes, panels, strict=True)
            notes = [draw(axes, rows, spectra) for axes, draw in pairs]
            drawing.share_axes(figure.axes)
            return drawing.caption(figure, notes, marks)

    return plot


def error_lines(
    *components: str, by: str, printed: Printed | None = None, title: str = "", **where: Any
) -> Panel:
    """Errors along a numeric setting; ``"a / b"`` is the ratio of two of them, trial by trial.

    ``printed`` maps a component to the paper's means at values of the setting; further keywords
    choose rows, as in :meth:`Table.where`.
    """

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title or f"Error by {words(by)}", words(by), _unit(components))
        return drawing.line_panel(axes, _series(rows, components, by, where), printed)

    return draw


def paths(
    *components: str,
    over: str = "epoch",
    column: str = "error",
    split: str = "",
    title: str = "",
    **where: Any,
) -> Panel:
    """Draw every trial's way through training, or with ``split`` a line for each value of it."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        unit = _unit(components) if column == "error" else words(components[0])
        drawing.entitle(axes, title or f"{unit} over training".capitalize(), words(over), unit)
        chosen = _where(rows, where)
        if split and len(chosen):
            parts = chosen.where(component=components[0]).by(split).items()
            lines = [
                replace(Series.of(part, components[0], over, column), name=_level(split, level))
                for level, part in parts
            ]
            lines = [replace(each, colour=c) for each, c in zip(lines, cycle(SPARE), strict=False)]
        else:
            lines = [Series.of(chosen, name, over, column) for name in components]
        series = with_common_zero(lines)
        for each in series:
            axes.plot(each.levels, each.shown.T, color=each.colour, alpha=0.35, linewidth=0.5)
            places = np.asarray(each.levels, float)
            drawing.quartile_band(axes, places, each)
            ends = replace(each, levels=each.levels[-1:], trials=each.trials[:, -1:])
            drawing.tell_medians(axes, ends, places[-1:], ends.quartiles[1])
        return drawing.upright(axes, series)

    return draw


def strips(
    *components: str, by: str, printed: Printed | None = None, title: str = "", **where: Any
) -> Panel:
    """Draw the trials under each value of a setting that has names, one strip a component.

    The rows stand in rising order, or as a tuple says: ``by="strategy", strategy=("sgd", ...)``.
    """

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title or f"Error by {words(by)}", _unit(components))
        return drawing.strip_panel(axes, _series(rows, components, by, where), printed)

    return draw


def arms(*components: str, by: str, title: str = "", **where: Any) -> Panel:
    """Draw each component under the arms of a comparison; thin lines join the points of a trial."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title or f"Error by {words(by)}", _unit(components))
        series = _series(rows, components, by, where)
        for row, each in enumerate(series):
            heights = drawing.lanes(row, len(each.levels))
            axes.plot(each.shown.T, heights, color=FAINT, linewidth=0.4, alpha=0.5)
            drawing.strip(axes, heights, each)
        names = [words(level) for level in series[0].levels]
        if len(names) == 2:
            names = [f"upper: {names[0]}", f"lower: {names[1]}"]
        tags = [(name, INK) for name in names]
        return drawing.across(axes, series, [words(name) for name in components], tags)

    return draw


def tail(component: str, by: str, title: str = "", **where: Any) -> Panel:
    """Draw the share of trials whose error exceeds x; without a mean it falls like 1/x."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        name = title or f"Tail of the {words(component)} error"
        drawing.entitle(axes, name, "relative error x", "share of trials above x")
        [series] = _series(rows, [component], by, where)
        for line, values in enumerate(series.trials.T):
            colour = SHADES[line % len(SHADES)]
            axes.plot(*drawing.survival(values), color=colour, linewidth=1.2)
            index = tail_index(values[np.isfinite(values)])
            known = f": α = {index.value:.2f}" if index.interval else ""  # where n allows one
            label = f"{_level(by, series.levels[line])}{known}"
            height = 0.04 + 0.08 * (len(series.levels) - 1 - line)
            style: Any = {"color": drawing.readable(colour), "transform": axes.transAxes}
            axes.text(0.03, height, label, fontsize=8, **style)
        if series.trials.size:  # the line that falls like 1/x, from the largest median on
            start, end = np.nanmax(series.quartiles[1]), np.nanmax(series.trials)
            foot = (end, 0.5 * start / end)
            axes.plot((start, end), (0.5, foot[1]), color=FAINT, linestyle=":", linewidth=1)
            axes.annotate("1/x ", foot, color=FAINT, fontsize=8, ha="right", va="top")
        drawing.logarithmic(axes, "x")
        drawing.logarithmic(axes, "y")
        return drawing.note(axes, [series])

    return draw


def spectrum_lines(title: str = "Singular values", **where: Any) -> Panel:
    """Singular values of representative trials, target (dashed) and learned, smallest first."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title, "place from the smallest", "singular value")
        lines = spectra.where(**where).rows.to_pylist() if len(spectra) else []
        for line in lines:
            style: Any = (0, (3, 1.5)) if line["which"] == "target" else "-"
            place, values = drawing.thinned(np.array(line["values"], dtype=float)[::-1])
            colour = SPARE[line["seed"] % len(SPARE)]
            axes.plot(place, values, color=colour, linestyle=style, linewidth=1.1)
        drawing.logarithmic(axes, "x")
        drawing.logarithmic(axes, "y")
        key: Any = {"ha": "right", "fontsize": 8, "transform": axes.transAxes}
        axes.text(0.97, 0.05, "dashed: target\nsolid: learned", **key)
        return f"{len({line['seed'] for line in lines})} trials"

    return draw


def gallery(spectra: Table) -> Figure:
    """Draw the representative spectra of an experiment, a panel for each of its settings."""
    rows, fixed = spectra.rows, ("experiment", "stream", "seed", "which", "values")
    varied = [n for n in rows.column_names if n not in fixed and len(rows[n].unique()) > 1]
    settings = {tuple(row.items()): row for row in rows.select(varied).to_pylist()}
    titles = [
        ", ".join(_level(name, value) for name, value in setting.items() if value is not None)
        for setting in settings.values()
    ]
    panels = [
        spectrum_lines(title or "Singular values", **setting)
        for title, setting in zip(titles, settings.values(), strict=True)
    ]
    return sheet(*panels or [spectrum_lines()], columns=3, marks=PAIRS)(spectra, spectra)


def _unit(components: Iterable[str]) -> str:
    names = " ".join(components)
    if " / " in names:
        return "ratio of errors"
    return "difference of log κ" if names == "log_condition_number" else "relative error"


def _level(name: str, value: object) -> str:
    """Write a value with its name, unless it is one itself: ``size 32``, but ``Adam``."""
    return words(value) if isinstance(value, str) else f"{words(name)} {words(value)}"


def _where(rows: Table, where: Mapping[str, Any]) -> Table:
    """Select the rows of a setting: none where no trial of it was run."""
    known = set(where) <= set(rows.rows.column_names)
    return rows.where(**where) if known else NOTHING


def _series(rows: Table, components: Iterable[str], by: str, where: dict[str, Any]) -> list[Series]:
    chosen = _where(rows, where)
    return with_common_zero(
        Series.of(chosen, name, by).ordered(where.get(by)) for name in components
    )
