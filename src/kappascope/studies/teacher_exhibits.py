"""What the teacher study shows: who arrives, what is recovered, and what no student could."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope import drawing
from kappascope.components import Components
from kappascope.figures import Panel, sheet
from kappascope.lab import Exhibit
from kappascope.measures import Where
from kappascope.prose import number, words
from kappascope.series import COLOURS, SPARE, Series, together
from kappascope.statistics import Table, median
from kappascope.studies.teacher_claims import (
    FOUND,
    LATE,
    LEVELS,
    LOG,
    LOOKS,
    OPTIMIZERS,
    OVERALL,
    found_by,
    students,
)
from kappascope.studies.teacher_model import ARCHITECTURES, Architecture
from kappascope.studies.teacher_symmetry import gauge

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPONENTS = (*Components.names, LOG, OVERALL)
STARTS = ("fresh", "near")


def exhibits(rows: Table) -> Iterator[Exhibit]:
    """Arrivals, the price of not finding the teacher, and every component of every matrix."""
    yield arrivals(rows)
    yield fates(rows)
    for depth in sorted({one.depth for one in shown(rows)}):
        yield recovered(rows, depth)


def kind(architecture: Architecture) -> dict[str, Any]:
    """The columns that name an architecture."""
    names = ("depth", "activation", "variant")
    return {name: getattr(architecture, name) for name in names}


def shown(rows: Table, depth: tuple[int, ...] = (2, 3)) -> list[Architecture]:
    """The architectures that were trained."""
    trained = rows.where(stage="compare").rows.select(["depth", "activation", "variant"])
    present = {tuple(row.values()) for row in trained.to_pylist()}
    return [a for a in ARCHITECTURES if tuple(kind(a).values()) in present and a.depth in depth]


def arrivals(rows: Table) -> Exhibit:
    """How many reach each level, in how many steps, and how many end at the teacher."""
    lines = []
    for start in STARTS:
        for architecture in shown(rows):
            for optimizer in OPTIMIZERS:
                where = {"start": start, "optimizer": optimizer, **kind(architecture)}
                ends = students(rows, "distance", "value", level=0.0, **where)
                if not ends:
                    continue
                rate = rows.where(stage="compare", **where).rows["learning_rate"][0].as_py()
                steps = [students(rows, "steps", "value", level=x, **where) for x in LEVELS]
                cells = (_arrived(one, len(ends)) for one in steps)
                home = f"{len(found_by(rows, **where))} of {len(ends)}"
                names = (start, str(architecture), words(optimizer), words(rate))
                lines.append((*names, *cells, home))
    levels = (f"to {level:g}" for level in LEVELS)
    return Exhibit(
        "Who arrives at which loss, and who finds the teacher",
        ("start", "network", "optimizer", "rate", *levels, "found"),
        tuple(lines),
        f"Students that arrive, of all, and their median steps. Losses are held-out and in the "
        f"variance of the teacher's answers; found: overall error in the end below {FOUND:g}. The "
        f"rate is the best of four for every line, on other seeds. {_at_an_end(rows)}",
    )


def _at_an_end(rows: Table) -> str:
    """How often the best rate is the lowest or highest tried: a better one may lie beyond."""
    tried = {o: rows.where(stage="tune", optimizer=o).by("learning_rate") for o in OPTIMIZERS}
    names = ("start", "depth", "activation", "variant", "learning_rate")
    told = []
    for optimizer, rates in tried.items():
        chosen = rows.where(stage="compare", optimizer=optimizer).rows.select(names).to_pylist()
        cells = {tuple(one.values()) for one in chosen}
        ends = sum(cell[-1] in (min(rates, default=0), max(rates, default=0)) for cell in cells)
        told.append(f"{words(optimizer)} {ends} of {len(cells)}")
    return f"At an end of the rates tried: {', '.join(told)}."


def _arrived(steps: dict[Any, float], n: int) -> str:
    return f"{len(steps)} of {n}, {np.median([*steps.values()]):.0f}" if steps else f"0 of {n}"


def fates(rows: Table) -> Exhibit:
    """Fresh students at every level: all of them, those that will find the teacher, the others."""
    lines = []
    for optimizer in OPTIMIZERS:
        where = {"optimizer": optimizer, "start": "fresh"}
        home = found_by(rows, **where)
        for level in LEVELS:
            at = [students(rows, name, level=level, **where) for name in (OVERALL, LOG)]
            at.append(students(rows, "loss", "value", level=level, **where))
            for fate in ("all", "found", "stuck"):
                keys = [k for k in at[0] if fate == "all" or (k in home) == (fate == "found")]
                cells = (_median([one[key] for key in keys]) for one in at)
                lines.append((words(optimizer), f"{level:g}", fate, str(len(keys)), *cells))
    return Exhibit(
        "At one loss, students that find the teacher and students that do not",
        ("optimizer", "loss", "students", "n", "overall error", "error of log κ", "loss then"),
        tuple(lines),
        "Fresh starts, all architectures; medians with 95 % intervals, means over the matrices of "
        "a network. Whether a student finds the teacher is known only in the end.",
    )


def recovered(rows: Table, depth: int) -> Exhibit:
    """Component by architecture: the median error late, or why there is none."""
    networks = shown(rows, (depth,))
    lines = [
        (matrix, words(component), *(_cell(rows, one, matrix, component) for one in networks))
        for matrix in Architecture(depth, "gelu", "plain").matrices
        for component in COMPONENTS
    ]
    return Exhibit(
        f"What is recovered of {depth}-layer networks at a loss of {LATE:g}",
        ("matrix", "component", *map(str, networks)),
        tuple(lines),
        "Median relative errors (of log κ: the difference) of students that started near the "
        "teacher, under Adam, after matching hidden units. ReLU networks are compared with "
        "incoming rows of length one, LayerNorm's matrices without their mean row and with norm "
        "one; kappa is that of the matrix so fixed. A residual ties the units of its layers: one "
        "permutation and, under ReLU, one scale a unit for both, so the middle matrix keeps its "
        "norms. GELU allows permutations only. No matrix has singular values near the effective "
        "rank's threshold: that it is right says little.",
    )


def _cell(rows: Table, architecture: Architecture, matrix: str, component: str) -> str:
    reason = gauge(architecture, matrix).get(component)
    if reason:
        return f"gauge: {reason}"
    where = {"start": "near", "level": LATE, "optimizer": "adam", **kind(architecture)}
    found = students(rows, component, matrix=matrix, **where)
    return number(float(np.median([*found.values()])), 2) if found else "none arrived"


def _median(values: list[float]) -> str:
    return f"{median(values):.2g}" if values else "–"


def levels(component: str, start: str) -> Panel:
    """Errors as the loss falls, a line an optimizer."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        unit = "difference of log κ" if component == LOG else "relative error"
        drawing.entitle(axes, f"{words(component)}, {start} start", "held-out loss", unit)
        pairs = zip(OPTIMIZERS, SPARE[:3], strict=True)
        series = together(_series(rows, component, start, *pair) for pair in pairs)
        places = np.arange(len(LEVELS), dtype=float)
        for one in series:
            for place, values in zip(places.tolist(), one.shown.T, strict=True):
                drawing.cloud(axes, drawing.around(place, values), values, one.colour)
            drawing.middle(axes, places, one)
        axes.set_xticks(places, [words(level) for level in LEVELS])
        return drawing.upright(axes, series)

    return draw


def _series(rows: Table, component: str, start: str, optimizer: str, colour: str) -> Series:
    """Every student (a row) at every level it reaches."""
    where = {"start": start, "optimizer": optimizer}
    at = [students(rows, component, level=level, **where) for level in LEVELS]
    keys = sorted({key for one in at for key in one})
    table = np.array([[one.get(key, np.nan) for one in at] for key in keys])
    return Series(optimizer, colour, LEVELS, table.reshape(-1, len(LEVELS)))


def strips(names: Iterable[str]) -> Panel:
    """Components side by side at the lowest loss."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, f"Near start, Adam, loss {LATE:g}", "relative error")
        where: Where = {"start": "near", "optimizer": "adam", "level": LATE}
        found = {name: [*students(rows, name, **where).values()] for name in names}
        series = together(
            Series(name, COLOURS[name], (LATE,), np.array(values).reshape(-1, 1))
            for name, values in found.items()
        )
        for height, one in enumerate(series):
            drawing.strip(axes, np.array([float(height)]), one, None)
        return drawing.across(axes, series, [words(one.name) for one in series], [])

    return draw


def shares(axes: Axes, rows: Table, spectra: Table) -> str:
    """Fresh students that end at the teacher."""
    drawing.entitle(axes, "Fresh students that find the teacher", "share")
    networks = shown(rows)
    for optimizer, colour in zip(OPTIMIZERS, SPARE, strict=False):
        for height, one in enumerate(networks):
            where = {"start": "fresh", "optimizer": optimizer, **kind(one)}
            n = len(students(rows, "distance", "value", level=0.0, **where))
            place = drawing.lanes(height, 3)[OPTIMIZERS.index(optimizer)]
            share = len(found_by(rows, **where)) / n if n else np.nan
            axes.plot(share, place, "o", color=colour, markersize=4)
        axes.plot([], [], "o", color=colour, label=words(optimizer))
    for height, one in enumerate(networks):
        axes.text(-0.06, height, str(one), ha="right", va="center", fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(max(len(networks), 1) - 0.5, -0.5)
    axes.set_xlim(-0.6, 1.03)  # the names stand left of zero
    axes.set_xticks((0, 0.5, 1))
    axes.legend(fontsize=7, loc="lower right", frameon=False)
    return "as in the table"


plot = sheet(
    *(levels(component, start) for component in (LOG, OVERALL) for start, _ in LOOKS),
    strips((OVERALL, "row_norms", "column_norms", "singular_values", "condition_number", LOG)),
    shares,
    marks="κ: condition number. Points: single students, means over their matrices; thick lines "
    "and ticks: medians; bands and bars: quartiles; diamonds: means. Students that do not arrive "
    "at a loss are missing there.",
)
