"""The tables and the figure of the teacher study: who arrives, and what is recovered."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope.lab import drawing
from kappascope.lab.drawing import COLOURS, SPARE, Series, with_common_zero
from kappascope.lab.experiment import Exhibit
from kappascope.lab.figures import Panel, sheet
from kappascope.lab.measures import LOG_KAPPA, Where
from kappascope.lab.statistics import median
from kappascope.lab.table import Floats, Table
from kappascope.matrix.components import Components
from kappascope.studies.teacher.claims import (
    AT_TEACHER,
    COMPARED_AT,
    LATE,
    OVERALL,
    at_teacher,
    per_student,
)
from kappascope.studies.teacher.model import ARCHITECTURES, LEVELS, OPTIMIZERS, Architecture
from kappascope.studies.teacher.symmetry import gauge
from kappascope.text import number, words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPONENTS = (*Components.names, LOG_KAPPA, OVERALL)
STARTS = ("fresh", "near")


def exhibits(rows: Table) -> Iterator[Exhibit]:
    """Yield arrivals, what not finding the teacher costs, and every component of every matrix."""
    yield arrivals(rows)
    yield fates(rows)
    for depth in sorted({architecture.depth for architecture in trained(rows)}):
        yield recovered(rows, depth)


def trained(rows: Table) -> list[Architecture]:
    """List the architectures that were trained."""
    names = [field.name for field in fields(Architecture)]
    columns = rows.where(stage="compare").rows.select(names)
    present = {Architecture(**row) for row in columns.to_pylist()}
    return [architecture for architecture in ARCHITECTURES if architecture in present]


def arrivals(rows: Table) -> Exhibit:
    """Tell how many reach each level, in how many steps, and how many end at the teacher."""

    def arrived(steps: dict[Any, float], n: int) -> str:
        return f"{len(steps)} of {n}, {np.median([*steps.values()]):.0f}" if steps else f"0 of {n}"

    lines, at_an_end = [], {optimizer: list[bool]() for optimizer in OPTIMIZERS}
    for start, architecture, optimizer in product(STARTS, trained(rows), OPTIMIZERS):
        where = {"start": start, "optimizer": optimizer, **asdict(architecture)}
        ends = per_student(rows, "distance", "value", level=0.0, **where)
        if ends:
            rate = rows.where(stage="compare", **where).rows["learning_rate"][0].as_py()
            steps = [per_student(rows, "steps", "value", level=level, **where) for level in LEVELS]
            cells = (arrived(level_steps, len(ends)) for level_steps in steps)
            finders = f"{len(at_teacher(rows, **where))} of {len(ends)}"
            names = (start, str(architecture), words(optimizer), words(rate))
            lines.append((*names, *cells, finders))
            tried = [*rows.where(stage="tune", optimizer=optimizer).by("learning_rate")]
            at_an_end[optimizer].append(rate in tried[:1] + tried[-1:])  # a better may lie beyond
    counts = [f"{words(name)} {sum(each)} of {len(each)}" for name, each in at_an_end.items()]
    levels = (f"to {level:g}" for level in LEVELS)
    return Exhibit(
        "Who arrives at which loss, and who finds the teacher",
        ("start", "network", "optimizer", "rate", *levels, "found"),
        tuple(lines),
        f"How many students arrive, and after how many steps in the median. Losses are held-out, "
        f"in units of the variance of the teacher's answers. Found: the overall error ends below "
        f"{AT_TEACHER:g}. The rate of every line is the best of four, chosen on other seeds. Lines "
        f"whose best rate is the lowest or the highest that was tried: {', '.join(counts)}.",
    )


def fates(rows: Table) -> Exhibit:
    """Compare, at every level, fresh students that will find the teacher with the others."""
    lines = []
    for optimizer in OPTIMIZERS:
        where = {"optimizer": optimizer, "start": "fresh"}
        finders = at_teacher(rows, **where)
        for level in LEVELS:
            columns = [
                *(per_student(rows, name, level=level, **where) for name in (OVERALL, LOG_KAPPA)),
                per_student(rows, "loss", "value", level=level, **where),
            ]
            for fate in ("all", "found", "stuck"):
                keys = [
                    k for k in columns[0] if fate == "all" or (k in finders) == (fate == "found")
                ]
                values = ([column[key] for key in keys] for column in columns)
                cells = (f"{median(group):.2g}" if group else "–" for group in values)
                lines.append((words(optimizer), f"{level:g}", fate, str(len(keys)), *cells))
    return Exhibit(
        "At one loss, students that find the teacher and students that do not",
        ("optimizer", "loss", "students", "n", "overall error", "error of log κ", "loss then"),
        tuple(lines),
        "Fresh starts, all architectures. Medians over students, with 95 % intervals, of means "
        "over the matrices of a network. Only the end tells whether a student finds the teacher.",
    )


def recovered(rows: Table, depth: int) -> Exhibit:
    """Give the median error of every component at the lowest loss, or why there is none."""
    networks = [architecture for architecture in trained(rows) if architecture.depth == depth]

    def cell(architecture: Architecture, matrix: str, component: str) -> str:
        if reason := gauge(architecture, matrix).get(component):
            return f"gauge: {reason}"
        where = {"start": "near", "level": LATE, "optimizer": "adam", **asdict(architecture)}
        errors = per_student(rows, component, matrix=matrix, **where)
        return number(float(np.median([*errors.values()])), 2) if errors else "none arrived"

    lines = [
        (matrix, words(component), *(cell(network, matrix, component) for network in networks))
        for matrix in Architecture(depth, "gelu", "plain").matrices
        for component in COMPONENTS
    ]
    return Exhibit(
        f"What is recovered of {depth}-layer networks at a loss of {LATE:g}",
        ("matrix", "component", *map(str, networks)),
        tuple(lines),
        "Median relative errors (of log κ: the difference) of students that started near the "
        "teacher, under Adam, after matching hidden units. What a network leaves free is fixed "
        "first, and κ is that of the fixed matrix. ReLU networks get incoming rows of length one. "
        "LayerNorm's matrices lose their mean row and get norm one. A residual ties the units of "
        "its layers: both layers share one permutation and, under ReLU, one scale for each unit, "
        "so the middle matrix keeps its norms. GELU allows permutations only. No matrix has "
        "singular values near the threshold of the effective rank, so a correct effective rank "
        "says little.",
    )


def levels(component: str, start: str) -> Panel:
    """Draw errors as the loss falls, a line for each optimizer."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        unit = "difference of log κ" if component == LOG_KAPPA else "relative error"
        drawing.entitle(axes, f"{words(component)}, {start} start", "held-out loss", unit)

        def students(optimizer: str) -> Floats:  # a row each, NaN at levels they do not reach
            where = {"start": start, "optimizer": optimizer}
            levels = [per_student(rows, component, level=level, **where) for level in LEVELS]
            names = sorted({student for level in levels for student in level})
            table = [[level.get(student, np.nan) for level in levels] for student in names]
            return np.array(table).reshape(-1, len(LEVELS))

        series = with_common_zero(
            Series(optimizer, colour, LEVELS, students(optimizer))
            for optimizer, colour in zip(OPTIMIZERS, SPARE[:3], strict=True)
        )
        return drawing.line_panel(axes, series)

    return draw


def at_lowest_loss(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw components side by side at the lowest loss."""
    drawing.entitle(axes, f"Near start, Adam, loss {LATE:g}", "relative error")
    where: Where = {"start": "near", "optimizer": "adam", "level": LATE}
    names = (
        OVERALL, "row_norms", "column_norms", "singular_values", "condition_number", LOG_KAPPA
    )  # fmt: skip
    errors = {name: [*per_student(rows, name, **where).values()] for name in names}
    return drawing.row_panel(axes, errors, [COLOURS[name] for name in names])


def shares(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw the share of fresh students that end at the teacher."""
    drawing.entitle(axes, "Fresh students that find the teacher", "share")
    networks = trained(rows)
    for lane, (optimizer, colour) in enumerate(zip(OPTIMIZERS, SPARE, strict=False)):
        for height, architecture in enumerate(networks):
            where = {"start": "fresh", "optimizer": optimizer, **asdict(architecture)}
            n = len(per_student(rows, "distance", "value", level=0.0, **where))
            place = drawing.lanes(height, 3)[lane]
            share = len(at_teacher(rows, **where)) / n if n else np.nan
            axes.plot(share, place, "o", color=colour, markersize=4)
        axes.plot([], [], "o", color=colour, label=words(optimizer))
    for height, architecture in enumerate(networks):
        axes.text(-0.06, height, str(architecture), ha="right", va="center", fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(max(len(networks), 1) - 0.5, -0.5)
    axes.set_xlim(-0.6, 1.03)  # the names stand left of zero
    axes.set_xticks((0, 0.5, 1))
    axes.legend(fontsize=7, loc="lower right", frameon=False)
    return "as in the table"


plot = sheet(
    *(levels(component, start) for component in (LOG_KAPPA, OVERALL) for start, _ in COMPARED_AT),
    at_lowest_loss,
    shares,
    marks="κ: condition number. Points: single students, means over their matrices; thick lines "
    "and ticks: medians; bands and bars: quartiles; diamonds: means. Students that do not arrive "
    "at a loss are missing there.",
)
