"""Rows drawn: every trial a point, the quartiles a band, the median a line.

A figure is a sheet of panels, and a panel says what it shows:

>>> plot = sheet(
...     errors("condition_number", "row_norms", by="size", stream="paper"),
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

``plot`` takes the trials and the representative spectra. ``svg``, ``png`` and ``cells`` turn its
figure into files and into the pictures of the report; the same rows give the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope import drawing
from kappascope.drawing import DIAMOND, FAINT, INK, SHADES, STAR, STYLE
from kappascope.prose import words
from kappascope.series import SPARE, Printed, Series, Values, together
from kappascope.statistics import Table, tail_index

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
    """A figure of lettered panels; its caption explains the marks and tells the n of each.

    >>> sheet(spectrum(), marks=PAIRS)(NOTHING, NOTHING).get_supxlabel()
    'Dashed: target; solid: learned; one colour a trial. 0 trials.'
    """

    def plot(rows: Table, spectra: Table) -> Figure:
        import matplotlib as mpl

        with mpl.rc_context(STYLE):
            figure = drawing.blank(len(panels), min(columns, len(panels)))
            pairs = zip(figure.axes, panels, strict=True)
            notes = [draw(axes, rows, spectra) for axes, draw in pairs]
            return drawing.caption(figure, notes, marks)

    return plot


def errors(
    *components: str, by: str, printed: Printed | None = None, title: str = "", **where: Any
) -> Panel:
    """Errors along a numeric setting; ``"a / b"`` is the ratio of two of them, trial by trial.

    ``printed`` maps a component to the paper's means at values of the setting; further keywords
    choose rows, as in :meth:`Table.where`.

    >>> sheet(errors("row_norms", by="size"))(NOTHING, NOTHING).axes[0].get_ylabel()
    'relative error'
    """

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title or f"Error by {words(by)}", words(by), _unit(components))
        series = _series(rows, components, by, where)
        for one in series:
            places = np.arange(len(one.levels), dtype=float)
            for place, values in zip(places.tolist(), one.shown.T, strict=True):
                drawing.cloud(axes, drawing.around(place, values), values, one.colour)
            drawing.middle(axes, places, one)
            axes.plot(places, one.means, color=one.colour, **DIAMOND)
            for star, mean in one.stars(printed):
                axes.plot(star, mean, **STAR)
        axes.set_xticks(range(len(series[0].levels)), [words(v) for v in series[0].levels])
        return drawing.upright(axes, series)

    return draw


def paths(
    *components: str,
    over: str = "epoch",
    column: str = "error",
    split: str = "",
    title: str = "",
    **where: Any,
) -> Panel:
    """Every trial's way through training; with ``split``, one line a value of that setting.

    >>> sheet(paths("gradient", column="value"))(NOTHING, NOTHING).axes[0].get_ylabel()
    'gradient'
    """

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        unit = _unit(components) if column == "error" else words(components[0])
        drawing.entitle(axes, title or f"{unit} over training".capitalize(), words(over), unit)
        chosen = _where(rows, where)
        series = together(_lines(chosen, components, over, column, split))
        for one in series:
            axes.plot(one.levels, one.shown.T, color=one.colour, alpha=0.35, linewidth=0.5)
            drawing.middle(axes, np.asarray(one.levels, float), one)
        return drawing.upright(axes, series)

    return draw


def strips(
    *components: str, by: str, printed: Printed | None = None, title: str = "", **where: Any
) -> Panel:
    """The trials under each value of a setting that has names, one strip a component.

    The rows stand in rising order, or as a tuple says: ``by="strategy", strategy=("sgd", ...)``.

    >>> sheet(strips("row_norms", by="strategy"))(NOTHING, NOTHING).axes[0].get_title(loc="left")
    'Error by strategy'
    """

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title or f"Error by {words(by)}", _unit(components))
        series = _series(rows, components, by, where)
        for lane, one in enumerate(series):
            heights = [drawing.lanes(row, len(series))[lane] for row in range(len(one.levels))]
            drawing.strip(axes, np.array(heights), one, printed)
        tags = [(words(one.name), one.colour) for one in series if len(series) > 1]
        return drawing.across(axes, series, [words(v) for v in series[0].levels], tags)

    return draw


def arms(
    *components: str, by: str, printed: Printed | None = None, title: str = "", **where: Any
) -> Panel:
    """Each component under the arms of a comparison; a thin line joins the points of one trial.

    >>> sheet(arms("row_norms", by="optimizer"))(NOTHING, NOTHING).axes[0].get_xlabel()
    'relative error'
    """

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title or f"Error by {words(by)}", _unit(components))
        series = _series(rows, components, by, where)
        for row, one in enumerate(series):
            heights = drawing.lanes(row, len(one.levels))
            axes.plot(one.shown.T, heights, color=FAINT, linewidth=0.4, alpha=0.5)
            drawing.strip(axes, heights, one, printed)
        names = [words(level) for level in series[0].levels]
        if len(names) == 2:
            names = [f"upper: {names[0]}", f"lower: {names[1]}"]
        tags = [(name, INK) for name in names]
        return drawing.across(axes, series, [words(name) for name in components], tags)

    return draw


def tail(component: str, by: str, title: str = "", **where: Any) -> Panel:
    """The share of trials whose error exceeds x; a quantity without a mean falls like 1/x.

    >>> sheet(tail("condition_number", by="size"))(NOTHING, NOTHING).axes[0].get_ylabel()
    'share of trials above x'
    """

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        name = title or f"Tail of the {words(component)} error"
        drawing.entitle(axes, name, "relative error x", "share of trials above x")
        [one] = _series(rows, [component], by, where)
        for line, values in enumerate(one.trials.T):
            colour = SHADES[line % len(SHADES)]
            axes.plot(*drawing.survival(values), color=colour, linewidth=1.2)
            label = f"{_level(by, one.levels[line])}{_index(values)}"
            height = 0.04 + 0.08 * (len(one.levels) - 1 - line)
            axes.text(0.03, height, label, color=colour, fontsize=8, transform=axes.transAxes)
        _reciprocal(axes, one)
        drawing.logarithmic(axes, "x")
        drawing.logarithmic(axes, "y")
        return drawing.note(axes, [one])

    return draw


def spectrum(title: str = "Singular values", **where: Any) -> Panel:
    """Singular values of representative trials, target (dashed) and learned, smallest first.

    >>> sheet(spectrum(size=64))(NOTHING, NOTHING).axes[0].get_xlabel()
    'place from the smallest'
    """

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
    """The representative spectra of an experiment, a panel for each of its settings.

    >>> one = {"seed": 0, "which": "target", "values": [2.0, 1.0]}
    >>> len(gallery(Table.of([{"size": 2, **one}, {"size": 3, **one}])).axes)
    2
    """
    rows, fixed = spectra.rows, ("experiment", "stream", "seed", "which", "values")
    varied = [n for n in rows.column_names if n not in fixed and len(rows[n].unique()) > 1]
    settings = {tuple(row.items()): row for row in rows.select(varied).to_pylist()}
    panels = [spectrum(_setting(one), **one) for one in settings.values()]
    return sheet(*panels or [spectrum()], columns=3, marks=PAIRS)(spectra, spectra)


def svg(figure: Figure) -> str:
    """The figure as an SVG document: same rows, same bytes.

    >>> svg(gallery(NOTHING))[:5]
    '<?xml'
    """
    return drawing.vector(figure)


def png(figure: Figure) -> bytes:
    """The figure as a PNG file.

    >>> png(gallery(NOTHING))[1:4]
    b'PNG'
    """
    return drawing.saved(figure, "png")


def cells(figure: Figure, document: str | None = None) -> tuple[str, ...]:
    """Each panel as an SVG document of its own, for a page that lays them out by its width.

    The figure's own document is made if it is not given.

    >>> len(cells(gallery(NOTHING)))
    1
    """
    return tuple(drawing.panels(figure, document or svg(figure)))


def _unit(components: Iterable[str]) -> str:
    names = " ".join(components)
    if " / " in names:
        return "ratio of errors"
    return "difference of log κ" if names == "log_condition_number" else "relative error"


def _level(name: str, value: object) -> str:
    """A value with its name, unless it is one itself: ``size 32``, but ``Adam``."""
    return words(value) if isinstance(value, str) else f"{words(name)} {words(value)}"


def _setting(setting: dict[str, Any]) -> str:
    known = [_level(name, value) for name, value in setting.items() if value is not None]
    return ", ".join(known) or "Singular values"


def _where(rows: Table, where: Mapping[str, Any]) -> Table:
    """The rows of a setting: none where no trial of it was run, and its column is not there."""
    known = set(where) <= set(rows.rows.column_names)
    return rows.where(**where) if known else NOTHING


def _series(rows: Table, components: Iterable[str], by: str, where: dict[str, Any]) -> list[Series]:
    chosen = _where(rows, where)
    return together(Series.of(chosen, name, by).ordered(where.get(by)) for name in components)


def _lines(
    rows: Table, components: tuple[str, ...], over: str, column: str, split: str
) -> list[Series]:
    """The lines of :func:`paths`: components, or the values of a setting."""
    if not split or not len(rows):
        return [Series.of(rows, name, over, column) for name in components]
    parts = rows.where(component=components[0]).by(split).items()
    return [
        replace(
            Series.of(part, components[0], over, column), name=_level(split, level), colour=colour
        )
        for (level, part), colour in zip(parts, SPARE * len(parts), strict=False)
    ]


def _index(values: Values) -> str:
    """The estimated tail index, where n allows one."""
    index = tail_index(values[np.isfinite(values)])
    return f": α = {index.value:.2f}" if index.interval else ""


def _reciprocal(axes: Axes, series: Series) -> None:
    """The line that falls like 1/x, from the largest median on."""
    if series.trials.size:
        start, end = np.nanmax(series.quartiles[1]), np.nanmax(series.trials)
        axes.plot((start, end), (0.5, 0.5 * start / end), color=FAINT, linestyle=":", linewidth=1)
        axes.annotate(
            "1/x ", (end, 0.5 * start / end), color=FAINT, fontsize=8, ha="right", va="top"
        )
