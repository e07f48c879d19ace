"""The tables and the figure of the study of pretrained checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import compress, product
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope.lab import drawing
from kappascope.lab.downloads import SHAKESPEARE
from kappascope.lab.drawing import SPARE
from kappascope.lab.experiment import Exhibit
from kappascope.lab.figures import Panel, sheet
from kappascope.lab.measures import Where
from kappascope.lab.statistics import median
from kappascope.lab.table import Floats, Table
from kappascope.studies.pretrained.changes import EQUAL, FORMATS, SINGLE
from kappascope.studies.pretrained.claims import (
    BERT,
    KAPPA,
    LLAMA,
    PRODUCTS,
    SQUARE,
    WIDE,
    if_run,
    matrix_rows,
    share,
    singly,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NETWORKS = {"Llama": LLAMA, "MiniLM": BERT}
KINDS = ("embedding", *SQUARE, *WIDE, "convolution", "head", "other")
BLUE, ORANGE, GREEN = SPARE[:3]


def values(rows: Table, where: Where) -> Floats:
    """Collect the values of the rows that are chosen, one a seed; none if they were not run."""
    known = set(where) <= set(rows.rows.column_names)
    return rows.where(**where).values("value") if known else np.empty(0)


def exhibits(rows: Table) -> Iterator[Exhibit]:
    """Yield spectra by kind, removals, removals by kind and rounding, as far as they ran."""
    for table in (_spectra(rows), _removals(rows), _removals_by_kind(rows), _rounding(rows)):
        if table.rows:
            ran = [any(cells) for cells in zip(*table.rows, strict=True)]  # columns with a value
            lines = tuple(tuple(compress(line, ran)) for line in table.rows)
            yield replace(table, columns=tuple(compress(table.columns, ran)), rows=lines)


def _spectra(rows: Table) -> Exhibit:
    lines = []
    models = rows.where(part="spectra").by("model") if "kind" in rows.rows.column_names else {}
    for model, part in models.items():
        for kind in (*KINDS, *PRODUCTS):
            matrices = part.where(kind=kind)
            if not len(matrices):
                continue
            kappa = matrices.where(component=KAPPA)
            parts = [matrices.where(component=c) for c in ("null_z", "top", "middle", "bottom")]
            middles = _middle(kappa), _middle(kappa, "target"), *map(_middle, parts)
            lines.append((str(model), kind, str(len(kappa)), *middles))
    return Exhibit(
        "Spectra against chance, by kind of matrix",
        ("network", "kind", "n", "κ", "κ of chance", "z", "largest", "median", "smallest"),
        tuple(lines),
        "Medians over the matrices of a kind. z: deviations of log κ from its mean for Gaussian "
        "matrices of the same shape. The last three: singular values in those of a Gaussian "
        "matrix of the same shape and norm. QK and OV: products of single heads, against products "
        "of Gaussian factors.",
    )


def _middle(rows: Table, column: str = "value") -> str:
    """Write the median of the finite values, or nothing if there are none."""
    numbers = rows.values(column) if len(rows) else np.empty(0)
    finite = numbers[np.isfinite(numbers)]
    if not finite.size:
        return ""
    middle = float(np.median(finite))
    return f"{middle:,.0f}" if abs(middle) >= 100 else f"{middle:.3g}"


def _removals(rows: Table) -> Exhibit:
    lines = []
    order = ("smallest", "bulk", "largest", *(f"{x} {EQUAL}" for x in ("bulk", "largest", "noise")))
    for what, part in ((w, s) for w in order for s in (0.01, 0.05, 0.1, 0.2, 0.4)):
        where = {"scope": "all", "change": what, "share": part}
        judged = LLAMA, LLAMA | {"text": SHAKESPEARE}, BERT
        cells = [_cost(rows, network | where) for network in judged]
        if any(cells):
            energy = [_energy(rows, network, where) for network in NETWORKS.values()]
            lines.append((what, f"{100 * part:g} %", *energy, *cells))
    return Exhibit(
        "Singular values removed from every matrix",
        ("removed", "share", "energy, Llama", "energy, MiniLM",
         "loss, own stories", "loss, Shakespeare", "MiniLM"),
        tuple(lines),
        "Medians over seeds with 95 % intervals: by what share the Llama's loss rises, on "
        "stories it tells itself and on Shakespeare, who is far from what it was trained on; one "
        "minus the cosine between MiniLM's sentences before and after. Energy: squared "
        f"Frobenius norm taken, of all; '{EQUAL}' is that of the smallest tenth, matrix by matrix.",
    )  # fmt: skip


def _removals_by_kind(rows: Table) -> Exhibit:
    lines = []
    removed = ("smallest", "bulk", f"bulk {EQUAL}", f"noise {EQUAL}")
    for network, kind in product(NETWORKS.values(), ("layers", *KINDS)):
        where = {"part": ("whole", "kinds"), "scope": kind, "share": 0.1}
        cells = [_cost(rows, network | where | {"change": what}) for what in removed]
        if any(cells):
            energy = _energy(rows, network, where | {"change": "smallest"})
            lines.append((network["model"], kind, energy, *cells))
    return Exhibit(
        "A tenth of the singular values removed from the matrices of one kind",
        ("network", "kind", "energy of the smallest", *removed),
        tuple(lines),
        "As above; layers: all matrices but the embedding.",
    )


def _rounding(rows: Table) -> Exhibit:
    lines = []
    for what in FORMATS:
        shares = [
            if_run(share("kappa_rounded", bound, "error", change=what))(rows)
            for bound in (0.01, 0.1)
        ]
        moved = [f"{100 * estimate.value:.0f} %" if estimate.n else "" for estimate in shares]
        where = {"scope": "all", "change": what}
        cells = [_cost(rows, network | where) for network in NETWORKS.values()]
        if any((*moved, *cells)):
            lines.append((what, *moved, *cells))
    return Exhibit(
        "Every matrix rounded",
        ("to", "κ moves > 1 %", "κ moves > 10 %", "Llama's loss", "MiniLM"),
        tuple(lines),
        "The share of all matrices whose κ moves, and what that costs, as above. int8 has one step "
        "for a matrix; by row, one for each of its rows.",
    )


def _cost(rows: Table, where: Where) -> str:
    """Write what a change costs, or nothing if it was not run."""
    found = values(rows, where)
    return f"{median(found):.2g}" if found.size else ""


def _energy(rows: Table, network: Where, where: Where) -> str:
    """Write the share of the energy that a change takes, or nothing if it was not run."""
    found = values(rows, {"model": network["model"], "component": "energy", **where})
    return f"{100 * float(found[0]):.2g} %" if found.size else ""


def against_chance(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw kappa of every matrix against that of chance."""
    drawing.entitle(axes, "κ of each matrix against chance", "κ of a random matrix", "κ")
    groups = {"attention": SQUARE, "feed-forward": WIDE,
              "others": ("embedding", "convolution", "head", "other")}  # fmt: skip
    lines = _matrices(rows, KAPPA, "value", "target")
    for (name, kinds), colour in zip(groups.items(), SPARE, strict=False):
        points = [(r["target"], r["value"]) for r in lines if r["kind"] in kinds]
        _scatter(axes, points, colour, name)
    both = [r[x] for r in lines for x in ("value", "target")] or [1.0, 10.0]
    axes.plot((min(both), max(both)), (min(both), max(both)), color=drawing.FAINT, linestyle=":")
    return _logged(axes, len(lines))


def edges(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw largest, median and smallest value of every matrix against those of chance."""
    drawing.entitle(axes, "Where the spectra differ from chance", "in that of a random matrix")
    names = {"bottom": "smallest", "middle": "median", "top": "largest"}
    groups = [[r["value"] for r in _matrices(rows, name, "value")] for name in names]
    _strips(axes, groups, tuple(names.values()), SPARE)
    axes.axvline(1.0, color=drawing.FAINT, linestyle=":")
    return f"{len(groups[0])} matrices"


def sweep(network: dict[str, str], title: str, unit: str) -> Panel:
    """Draw what is lost without more and more of the values."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title, "share of singular values removed", unit)
        count = 0
        for what, colour in (("smallest", ORANGE), ("bulk", BLUE)):
            where = network | {"scope": "all", "change": what}
            lost = {part: values(rows, where | {"share": part}) for part in (0.05, 0.1, 0.2, 0.4)}
            lost = {part: costs for part, costs in lost.items() if costs.size}
            count = max([count, *map(len, lost.values())])
            for part, costs in lost.items():
                drawing.cloud(axes, np.full(len(costs), part), costs, colour)
            quartiles = [np.quantile(costs, (0.25, 0.5, 0.75)) for costs in lost.values()]
            low, middle, high = np.reshape(quartiles, (-1, 3)).T
            axes.fill_between(list(lost), low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(list(lost), middle, color=colour, linewidth=1.8, label=what)
        return _logged(axes, count, "seeds")

    return draw


def by_kind(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw the cost of the smallest tenth over that of bulk values of the same energy."""
    title = "Smallest tenth against bulk of equal energy"
    drawing.entitle(axes, title, "ratio of what they cost")
    kinds = ("all", "layers", *KINDS[:8])

    def ratios(network: dict[str, str], kind: str) -> list[float]:
        where = network | {"part": ("whole", "kinds"), "scope": kind, "share": 0.1}
        changes = ("smallest", f"bulk {EQUAL}")
        ours, theirs = (values(rows, where | {"change": change}) for change in changes)
        return (ours / theirs).tolist() if len(ours) == len(theirs) else []

    for lane, (name, colour) in enumerate(zip(NETWORKS, (BLUE, GREEN), strict=True)):
        strips = [ratios(NETWORKS[name], kind) for kind in kinds]
        _strips(axes, strips, kinds, (colour,) * len(kinds), (lane - 0.5) * 0.4)
        axes.plot([], [], "o", color=colour, label=name)
    axes.axvline(1.0, color=drawing.FAINT, linestyle=":")
    axes.legend(frameon=False, fontsize=8)
    return f"n = {len(ratios(LLAMA, 'all'))} seeds"


def rounding_cost(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw what rounding one matrix costs, against its kappa."""
    drawing.entitle(axes, f"One matrix rounded to {SINGLE}", "its κ", "what it costs")
    count = 0
    for (name, network), colour in zip(NETWORKS.items(), (BLUE, GREEN), strict=True):
        with suppress(LookupError):  # not run
            cost = singly(rows, **network)
            lines = _matrices(rows, KAPPA, "value", model=network["model"])
            points = [(r["value"], cost[r["matrix"]]) for r in lines if r["matrix"] in cost]
            _scatter(axes, points, colour, name)
            count += len(points)
    return _logged(axes, count)


def _matrices(rows: Table, component: str, *columns: str, **where: Any) -> list[dict[str, Any]]:
    """List the rows about matrices that have all of these columns; none if they were not run."""
    with suppress(LookupError):
        lines = matrix_rows(rows, component, **where)
        return [line for line in lines if all(line[name] is not None for name in columns)]
    return []


def _strips(
    axes: Axes,
    groups: Sequence[Sequence[float]],
    names: Sequence[str],
    colours: Sequence[str],
    shift: float = 0.0,
) -> None:
    """Draw a row of points for each name, with its quartiles and median."""
    for row, (values, colour) in enumerate(zip(groups, colours, strict=False)):
        height, points = row + shift, np.asarray(values, dtype=float)
        if points.size:
            drawing.cloud(axes, points, drawing.around(height, points), colour)
            low, middle, high = np.quantile(points, (0.25, 0.5, 0.75))
            axes.hlines([height], [low], [high], color=colour, linewidth=4.5, alpha=0.3)
            axes.plot([middle], [height], color=colour, **drawing.TICK)
    axes.set_yticks(range(len(names)), list(names), fontsize=7)
    axes.set_ylim(len(names) - 0.5, -0.5)
    drawing.logarithmic(axes, "x")


def _scatter(axes: Axes, points: Sequence[tuple[float, float]], colour: str, name: str) -> None:
    if points:
        x, y = zip(*points, strict=True)
        axes.scatter(x, y, s=13, alpha=0.6, color=colour, linewidths=0, label=name)


def _logged(axes: Axes, count: int, what: str = "matrices") -> str:
    drawing.logarithmic(axes, "x")
    drawing.logarithmic(axes, "y")
    if not count:
        axes.text(0.5, 0.5, "not run", ha="center", transform=axes.transAxes, color=drawing.FAINT)
    elif axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)
    return f"{count} {what}"


plot = sheet(
    against_chance,
    edges,
    sweep(LLAMA, "The Llama without some values", "rise of the loss, in its loss"),
    sweep(BERT, "MiniLM without some values", "1 - cosine to what it was"),
    by_kind,
    rounding_cost,
    marks="Points: single matrices, or single sets of texts; thick lines and ticks: medians; bands "
    "and bars: quartiles. Chance: a Gaussian matrix of the same shape and norm.",
)
