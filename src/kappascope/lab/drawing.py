"""The series and the marks of a figure: points, bands, strips, labels, axes, files.

:mod:`kappascope.lab.figures` says what is shown, this module how it looks.
"""

from __future__ import annotations

import io
import logging
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

import numpy as np
from numpy.typing import ArrayLike, NDArray

from kappascope.lab.table import Table
from kappascope.text import number, words

if TYPE_CHECKING:  # loaded when something is drawn: workers that only train never need it
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# It tells of caches and of fonts that it looks for, beside which an error is not the only line.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

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
INK, FAINT = "#222222", "#6B6B6B"
SHADES = ("#440154", "#3B528B", "#21908C", "#4CA64C", "#B5900F")  # viridis, darkened

# Inches. 4.4 are 422 CSS pixels: a phone shows the whole panel with letters of 10 pixels.
WIDTH, HEIGHT = 4.4, 3.3
LEFT, RIGHT, BOTTOM, TOP = 0.74, 0.16, 0.52, 0.40
FOOT = 0.8  # five lines of caption under one column, fewer under more
TAG = 1.0  # the longest name of a component
POINTS = 72  # an inch

SVG = "{http://www.w3.org/2000/svg}"
ElementTree.register_namespace("", SVG[1:-1])
ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")

STYLE: Any = {
    "svg.hashsalt": "kappascope",  # otherwise the ids of every file are random
    "svg.fonttype": "path",  # the same letters on every machine
    "font.family": "DejaVu Sans",  # comes with matplotlib
    "text.parse_math": False,  # a dollar in a name is a dollar
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titley": 1.0,  # where it is anyhow; looking for room takes a fifth of the time
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
DIAMOND: Any = {"marker": "D", "markersize": 4.5, "fillstyle": "none", "linestyle": ""}
STAR: Any = {"marker": "*", "markersize": 11, "fillstyle": "none", "color": INK, "zorder": 5}
TICK: Any = {"marker": "|", "markersize": 9, "markeredgewidth": 2, "linestyle": ""}
BESIDE: Any = {"va": "center", "fontsize": 8, "annotation_clip": False}


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
        """Read the magnitudes of a component, or the ratio of two: ``"a / b"``, trial by trial."""
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
        """Put the levels into the order of a tuple, if it is one."""
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
        values = [np.ravel(statistic(c)) if len(c) else np.full(size, np.nan) for c in columns]
        return np.asarray(np.maximum(np.reshape(values, (-1, size)).T, self.least))

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


def with_common_zero(series: Iterable[Series]) -> list[Series]:
    """Series that share an axis: their zeros stand at one decade mark below all other values."""
    shared = list(series)
    values = np.concatenate([each.trials.ravel() for each in shared])
    if not (values == 0).any():
        return shared
    smallest = min(values[values > 0], default=10.0)
    least = float(10.0 ** (np.ceil(np.log10(smallest)) - 1))
    return [replace(each, least=least) for each in shared]


def blank(panels: int, columns: int) -> Figure:
    """Make a figure of empty panels, row by row, with room for a caption below."""
    from matplotlib.figure import Figure

    rows = -(-panels // columns)
    width, height = columns * WIDTH, rows * HEIGHT + 0.1 + FOOT / columns
    figure = Figure(figsize=(width, height))
    for place in range(panels):
        row, column = divmod(place, columns)
        left, bottom = column * WIDTH + LEFT, height - (row + 1) * HEIGHT + BOTTOM
        size = (WIDTH - LEFT - RIGHT) / width, (HEIGHT - BOTTOM - TOP) / height
        figure.add_axes((left / width, bottom / height, *size))
    return figure


def entitle(axes: Axes, title: str, x: str, y: str = "") -> None:
    """Name the panel and its axes."""
    axes.set_title(words(title), loc="left")
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def caption(figure: Figure, notes: Sequence[str], marks: str) -> Figure:
    """Letter the panels; say below what the marks are and how many trials they show."""
    letters = "abcdefghijklmnopqrstuvwxyz"[: len(notes)] if len(notes) > 1 else ""
    for letter, axes in zip(letters, figure.axes, strict=False):
        axes.set_title(f"{letter}  {axes.get_title(loc='left')}", loc="left")
    alike = len(set(notes)) == 1
    listed = notes[:1] if alike else [f"{a}: {n}" for a, n in zip(letters, notes, strict=False)]
    text = textwrap.fill(f"{marks} {'; '.join(listed)}.", int(17 * figure.get_figwidth()))
    place = {"x": 0.1 / figure.get_figwidth(), "y": 0.06 / figure.get_figheight()}
    figure.supxlabel(text, fontsize=7.5, ha="left", va="bottom", **place)
    return figure


def note(axes: Axes, series: Sequence[Series]) -> str:
    """Give the n of a panel for its caption; an empty panel says that it is."""
    notes = list(dict.fromkeys(each.note for each in series))
    if notes == ["no trials"]:
        empty(axes)
    return " / ".join(notes)


def empty(axes: Axes) -> str:
    """Say on a panel that there is nothing to draw; the caption says it too."""
    axes.text(0.5, 0.5, "no trials", ha="center", transform=axes.transAxes, color=FAINT)
    axes.set(xticks=[], yticks=[])
    return "no trials"


def readable(colour: str) -> str:
    """Darken a colour until letters in it can be read on white, with a contrast of 5.

    >>> readable("#333333"), readable("#E69F00")
    ('#333333', '#926500')
    """
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    while 1.05 / (luminance(channels) + 0.05) < 5:
        channels = [round(0.97 * channel) for channel in channels]
    return (
        colour
        if channels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        else ("#" + "".join(f"{channel:02x}" for channel in channels))
    )


def luminance(channels: Sequence[float]) -> float:
    """Return the relative luminance of an sRGB colour, channels from 0 to 255, as WCAG has it."""
    linear = [
        c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4
        for c in channels
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def key(axes: Axes, names: Iterable[tuple[str, str]]) -> None:
    """Write names in their colours into the upper left corner."""
    for place, (name, colour) in enumerate(names):
        style: Any = {"color": readable(colour), "fontsize": 8, "transform": axes.transAxes}
        axes.text(0.02, 0.94 - 0.07 * place, name, **style)


def around(place: float, values: Values) -> Values:
    """Spread points evenly about their place, the same way every time."""
    golden = 0.6180339887  # its multiples, modulo 1, never bunch
    return np.asarray(place + 0.22 * (np.arange(len(values)) * golden % 1 - 0.5))


def cloud(axes: Axes, x: Values, y: Values, colour: str) -> None:
    """Single trials; many of them as a picture, or the file would weigh megabytes."""
    many = len(x) > 200
    style: Any = {"s": 5 if many else 11, "alpha": 0.25 if many else 0.55, "rasterized": many}
    axes.scatter(x, y, color=colour, linewidths=0, **style)


def quartile_band(axes: Axes, x: Values, series: Series) -> None:
    """Draw the quartile band and the median line."""
    low, median, high = series.quartiles
    axes.fill_between(x, low, high, color=series.colour, alpha=0.18, linewidth=0)
    axes.plot(x, median, color=series.colour, linewidth=1.8)


def lanes(row: int, count: int) -> Values:
    """Place ``count`` strips within one row of a panel.

    >>> lanes(0, 1), lanes(3, 2)
    (array([0.]), array([2.8, 3.2]))
    """
    return row + 0.8 * (np.arange(count) - (count - 1) / 2) / max(count, 2)


def strip(axes: Axes, heights: Values, series: Series, printed: Printed | None = None) -> None:
    """Draw the trials of each level at its height: points, quartile bar, median, mean."""
    low, median, high = series.quartiles
    if len(heights) and not np.isfinite(median).any():
        at: Any = axes.get_yaxis_transform()
        axes.text(0.02, heights.mean(), "not finite", transform=at, color=FAINT, va="center")
    for values, height in zip(series.shown.T, heights, strict=True):
        cloud(axes, values, around(height, values), series.colour)
    axes.hlines(heights, low, high, color=series.colour, linewidth=4.5, alpha=0.3)
    axes.plot(median, heights, color=series.colour, **TICK)
    tell_medians(axes, series, median, heights)
    axes.plot(series.means, heights, color=series.colour, **DIAMOND)
    for place, mean in series.stars(printed):
        axes.plot(mean, heights[place], **STAR)


def tell(axes: Axes, x: float, y: float, text: str) -> None:
    """Let a place of a panel tell its numbers to who points at it.

    The mark is not seen; its text is the title of an SVG element, and belongs to what is read out
    in place of the picture.
    """
    if not (np.isfinite(x) and np.isfinite(y)):
        return
    # `opacity` and not `alpha`: a mark without fill feels no pointer
    [mark] = axes.plot(x, y, marker="o", markersize=9, linestyle="", alpha=0.0, zorder=9)
    mark.set_gid(f"told:{text}")  # escaped where it is written


def tell_medians(axes: Axes, series: Series, x: Values, y: Values) -> None:
    """Let the medians of a series tell what they are, with quartiles and n."""
    low, middle, high = series.quartiles
    counts = np.isfinite(series.trials).sum(axis=0)
    for place, level in enumerate(series.levels):
        if np.isfinite(middle[place]):
            numbers = [number(float(each[place])) for each in (middle, low, high)]
            at = f" at {words(level)}" if str(level) else ""
            text = (
                f"{words(series.name)}{at}: median {numbers[0]}, quartiles {numbers[1]} and "
                f"{numbers[2]}, n = {counts[place]:,}"
            )
            tell(axes, float(x[place]), float(y[place]), text)


def alt_text(axes: Axes) -> str:
    """Say in words what a panel shows: its title and what its marks tell."""
    told = [str(line.get_gid())[5:] for line in axes.lines if _tells(line.get_gid())]
    title = re.sub(r"^[a-z]  ", "", axes.get_title(loc="left"))
    few = told if len(told) < 7 else [*told[:3], *told[-3:]]
    return ". ".join(filter(None, [title, *few])) + "."


def _tells(gid: object) -> bool:
    return str(gid).startswith("told:")


def share_axes(axes: Sequence[Axes]) -> None:
    """Give panels that show one quantity on logarithmic axes the same limits."""
    for which in "xy":
        groups: dict[str, list[Axes]] = {}
        for each in axes:
            label = each.get_xlabel() if which == "x" else each.get_ylabel()
            scale = each.get_xscale() if which == "x" else each.get_yscale()
            if label and scale == "log":
                groups.setdefault(label, []).append(each)
        for group in groups.values():
            limits = [each.get_xlim() if which == "x" else each.get_ylim() for each in group]
            both = min(low for low, _ in limits), max(high for _, high in limits)
            for each in group if len(group) > 1 else ():
                each.set(**{f"{which}lim": both})
                mark_decades(each.xaxis if which == "x" else each.yaxis, which, *both)


def line_panel(axes: Axes, series: Sequence[Series], printed: Printed | None = None) -> str:
    """Draw series along their levels: trials, quartiles, medians and means; gives the n."""
    for each in series:
        places = np.arange(len(each.levels), dtype=float)
        for place, values in zip(places.tolist(), each.shown.T, strict=True):
            cloud(axes, around(place, values), values, each.colour)
        quartile_band(axes, places, each)
        tell_medians(axes, each, places, each.quartiles[1])
        axes.plot(places, each.means, color=each.colour, **DIAMOND)
        for star, mean in each.stars(printed):
            axes.plot(star, mean, **STAR)
    levels = series[0].levels
    axes.set_xticks(range(len(levels)), [words(level) for level in levels])
    return upright(axes, series)


def strip_panel(axes: Axes, series: Sequence[Series], printed: Printed | None = None) -> str:
    """Draw a row for every level, with a strip of trials for each series; gives the n."""
    for lane, each in enumerate(series):
        heights = [lanes(row, len(series))[lane] for row in range(len(each.levels))]
        strip(axes, np.array(heights), each, printed)
    tags = [(words(each.name), each.colour) for each in series if len(series) > 1]
    return across(axes, series, [words(level) for level in series[0].levels], tags)


def row_panel(axes: Axes, samples: Mapping[str, ArrayLike], colours: Iterable[str]) -> str:
    """Draw a row of its own, in its own colour, for every named sample of values; gives the n."""
    pairs = zip(samples.items(), colours, strict=False)
    series = with_common_zero(
        Series(name, colour, ("",), np.reshape(np.asarray(values, float), (-1, 1)))
        for (name, values), colour in pairs
    )
    for height, each in enumerate(series):
        strip(axes, np.array([float(height)]), each)
    return across(axes, series, [words(each.name) for each in series], [])


def survival(values: Values) -> tuple[Values, Values]:
    """Errors and the share of trials at or above each: all of the tail, a sample of the rest."""
    x = np.sort(values[values > 0])
    share = 1 - np.arange(len(x)) / max(len(x), 1)
    start = int(np.searchsorted(-share, -0.95))  # the tiniest would only push the tail aside
    kept = np.unique(np.r_[start : len(x) : max(1, len(x) // 100), max(0, len(x) - 100) : len(x)])
    return x[kept], share[kept]


def thinned(values: Values) -> tuple[Values, Values]:
    """Places from 1 on and the values there, about 100 at most, even over the decades."""
    values = np.where(values > 0, values, np.nan)  # a singular matrix's zeros have no logarithm
    places = np.unique(np.geomspace(1, len(values), 100).round().astype(int))
    return places.astype(float), values[places - 1]


def upright(axes: Axes, series: Sequence[Series]) -> str:
    """Finish a panel of lines: logarithmic errors, a name at the end of each; answers with n."""
    logarithmic(axes, "y", series[0].least)
    medians = [(each.quartiles[1], each) for each in series]
    ends = [(float(m[np.isfinite(m)][-1]), each) for m, each in medians if np.isfinite(m).any()]
    if len(ends) > 1:
        ends.sort(key=lambda end: end[0])
        _indent(axes, right=TAG)
        to_axes = axes.transData + axes.transAxes.inverted()
        heights = [float(to_axes.transform((1, end))[1]) for end, _ in ends]
        # the names are moved apart where they would cover each other
        for (_, each), end, height in zip(ends, heights, _apart(heights, 0.078), strict=True):
            text = {"xycoords": "axes fraction", "color": readable(each.colour), **BESIDE}
            axes.annotate(words(each.name), (1.045, height), **text)
            line: Any = {"transform": axes.transAxes, "clip_on": False, "linewidth": 0.7}
            axes.plot((1.005, 1.035), (end, height), color=each.colour, **line)
    return note(axes, series)


def across(
    axes: Axes, series: Sequence[Series], names: Sequence[str], tags: Sequence[tuple[str, str]]
) -> str:
    """Finish a panel of strips: named rows, tags beside the strips of the first; answers with n."""
    logarithmic(axes, "x", series[0].least)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.tick_params(axis="y", length=0)
    _indent(axes, left=0.4, right=TAG if tags else 0)
    heights = _apart(lanes(0, len(tags)).tolist(), 0.05 * len(names))  # a line of text is a 20th
    for (text, colour), height in zip(tags, heights, strict=True):
        at: Any = ("axes fraction", "data")
        axes.annotate(text, (1.02, height), xycoords=at, color=readable(colour), **BESIDE)
    return note(axes, series)


def logarithmic(axes: Axes, which: str, least: float = 0.0) -> None:
    """Decades on the ``x`` or ``y`` axis; ``least``, if any, is the mark that stands for zero."""
    from matplotlib.ticker import FuncFormatter, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    low, high = axis.get_data_interval()
    if not 0 < low <= high:
        return  # nothing is drawn
    axes.set(**{f"{which}scale": "log"})
    mark_decades(axis, which, low, high)
    axis.set_major_formatter(FuncFormatter(partial(_tick, least)))
    axis.set_minor_locator(NullLocator())  # they take longer to draw than all the rest


def mark_decades(axis: Any, which: str, low: float, high: float) -> None:
    """Mark decades on a logarithmic axis, and their halves and fifths if there are few."""
    from matplotlib.ticker import LogLocator

    steps = (1.0, 2.0, 5.0) if high / low < 30 else (1.0,)
    axis.set_major_locator(LogLocator(subs=steps, numticks=5 if which == "x" else 9))


def _tick(least: float, value: float, place: int) -> str:
    return "0" if value <= least else words(float(value))


def _indent(axes: Axes, left: float = 0.0, right: float = 0.0) -> None:
    """Give up some inches for names."""
    box, inch = axes.get_position(), 1 / (WIDTH - LEFT - RIGHT)
    left, right = left * inch * box.width, right * inch * box.width
    axes.set_position((box.x0 + left, box.y0, box.width - left - right, box.height))


def _apart(wanted: Sequence[float], gap: float) -> list[float]:
    """Rising heights, at least ``gap`` apart, as near to the wanted ones as that allows.

    >>> [round(height, 2) for height in _apart([0.5, 0.5, 0.9], 0.1)]
    [0.45, 0.55, 0.9]
    """
    groups: list[list[float]] = []
    for height in wanted:
        groups.append([height])
        while len(groups) > 1 and _spread(groups[-2], gap)[-1] + gap > _spread(groups[-1], gap)[0]:
            groups[-2:] = [groups[-2] + groups[-1]]
    return [height for group in groups for height in _spread(group, gap)]


def _spread(group: Sequence[float], gap: float) -> list[float]:
    centre, half = sum(group) / len(group), (len(group) - 1) / 2
    return [centre + gap * (place - half) for place in range(len(group))]


def svg(figure: Figure) -> str:
    """Write the figure as an SVG document: same rows, same bytes.

    No comments, no line breaks, hundredths of a point: half the bytes, the same picture.
    """
    text = re.sub(r"<!--.*?-->", "", _saved(figure, "svg").decode(), flags=re.DOTALL)
    marks = r"""<g id=(["'])told:(.*?)\1>"""  # which text it has decides how it is quoted
    text = re.sub(marks, r"<g class='told'><title>\2</title>", text)
    text = re.sub(r"([1-9]\d*\.\d\d)\d+", r"\1", text)  # scales below 1 stay exact
    return re.sub(r"\s*\n\s*", " ", text).replace("> <", "><")


def png(figure: Figure) -> bytes:
    """Write the figure as a PNG file: same rows, same bytes."""
    return _saved(figure, "png")


def cells(figure: Figure, document: str) -> tuple[str, ...]:
    """Cut each panel out of a figure's document, for a page that lays them out.

    They have no ground, and are cut out, not drawn again, which would take as long as all the rest.
    """
    root = ElementTree.fromstring(document)
    shared = [element for defs in root.iter(f"{SVG}defs") for element in defs]
    groups = {group.get("id"): group for group in root.iter(f"{SVG}g")}
    columns = round(figure.get_figwidth() / WIDTH)
    width, height = WIDTH * POINTS, HEIGHT * POINTS
    documents = []
    for place in range(len(figure.axes)):
        row, column = divmod(place, columns)
        panel = groups[f"axes_{place + 1}"]
        panel.remove(panel[0])  # its ground
        cut = Element(f"{SVG}svg", version="1.1", width=f"{width:g}pt", height=f"{height:g}pt")
        cut.set("viewBox", f"{column * width:g} {row * height:g} {width:g} {height:g}")
        used = set(re.findall(r"#([\w.-]+)", ElementTree.tostring(panel, "unicode")))
        needed = used - {element.get("id") for element in panel.iter()} | {
            None
        }  # the style has no name
        defs = ElementTree.SubElement(cut, f"{SVG}defs")
        defs.extend(element for element in shared if element.get("id") in needed)
        cut.append(panel)
        documents.append(ElementTree.tostring(cut, "unicode"))
    return tuple(documents)


def inlined(document: str, prefix: str) -> str:
    """Write an SVG document as part of a page: its names are its own, and no style is needed.

    A page whose policy allows no inline style would drop colours; as attributes they stay.

    >>> inlined('<svg><g id="a" style="fill: none; stroke: #123456"/></svg>', "x")
    '<svg><g id="x-a" fill="none" stroke="#123456"/></svg>'
    """

    def attributes(found: re.Match[str]) -> str:
        pairs = (pair.split(":", 1) for pair in found[1].split(";") if ":" in pair)
        return " ".join(f'{name.strip()}="{value.strip()}"' for name, value in pairs)

    text = re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>|<metadata>.*?</metadata>", "", document, flags=re.S)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.S)
    text = re.sub(r'<g id="patch_1">.*?</g>', "", text, count=1, flags=re.S)  # the page's ground
    text = re.sub(r'style="([^"]*)"', attributes, text)
    text = re.sub(r'\bid="([^"]*)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'href="#([^"]*)"', rf'href="#{prefix}-\1"', text)
    return re.sub(r"url\(#([^)]*)\)", rf"url(#{prefix}-\1)", text).strip()


def _saved(figure: Figure, kind: str) -> bytes:
    """Write the bytes of a file without a date."""
    import matplotlib as mpl

    undated = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}}[kind]
    with mpl.rc_context(STYLE), io.BytesIO() as file:
        figure.savefig(file, format=kind, dpi=150, metadata=undated)
        return file.getvalue()
