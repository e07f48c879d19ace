"""The tables and the figure of the study of pretrained checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import compress, product, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope.lab import drawing
from kappascope.lab.downloads import SHAKESPEARE
from kappascope.lab.drawing import SPARE, Series
from kappascope.lab.experiment import Exhibit
from kappascope.lab.figures import Panel, paths, sheet
from kappascope.lab.heads import PRODUCTS
from kappascope.lab.measures import KAPPA, Where
from kappascope.lab.statistics import median
from kappascope.lab.table import Floats, Table
from kappascope.studies.pretrained.changes import EQUAL, FORMATS, SINGLE
from kappascope.studies.pretrained.claims import (
    BERT,
    LLAMA,
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
        "Medians over the matrices of a kind. z: how far log κ lies above its mean for Gaussian "
        "matrices of the same shape, in standard deviations. The last three columns: a singular "
        "value over that of a Gaussian matrix of the same shape and norm. QK and OV are products "
        "of single heads, compared with products of Gaussian factors.",
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
        "Medians over seeds with 95 % intervals. Loss: the share by which the Llama's loss rises, "
        "on stories that it tells itself and on Shakespeare, who is far from its training texts. "
        "MiniLM: one minus the cosine between a sentence's vectors before and after. Energy: the "
        f"share of the squared Frobenius norm that was removed. '{EQUAL}': as much energy as the "
        "smallest tenth has, matrix by matrix.",
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
        "Numbers as in the table above. Layers: all matrices but the embedding.",
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
        "The share of all matrices whose κ moves, and what the rounding costs, measured as above. "
        "int8 has one step for a whole matrix, int8 by row one for each row.",
    )


def _cost(rows: Table, where: Where) -> str:
    """Write what a change costs, or nothing if it was not run."""
    costs = values(rows, where)
    return f"{median(costs):.2g}" if costs.size else ""


def _energy(rows: Table, network: Where, where: Where) -> str:
    """Write the share of the energy that a change takes, or nothing if it was not run."""
    energies = values(rows, {"model": network["model"], "component": "energy", **where})
    return f"{100 * float(energies[0]):.2g} %" if energies.size else ""


def against_chance(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw kappa of every matrix against that of chance."""
    drawing.entitle(axes, "κ of each matrix against chance", "κ of a random matrix", "κ")
    groups = {"attention": SQUARE, "feed-forward": WIDE,
              "others": ("embedding", "convolution", "head", "other")}  # fmt: skip
    matrices = _matrices(rows, KAPPA, "value", "target")
    both = [matrix[x] for matrix in matrices for x in ("value", "target")] or [1.0, 10.0]
    axes.plot((min(both), max(both)), (min(both), max(both)), color=drawing.FAINT, linestyle=":")
    points = {
        name: [(m["target"], m["value"]) for m in matrices if m["kind"] in kinds]
        for name, kinds in groups.items()
    }
    return _clouds(axes, points)


def edges(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw largest, median and smallest value of every matrix against those of chance."""
    drawing.entitle(axes, "Where the spectra differ from chance", "in that of a random matrix")
    axes.axvline(1.0, color=drawing.FAINT, linestyle=":")
    names = {"smallest": "bottom", "median": "middle", "largest": "top"}
    samples = {
        name: [matrix["value"] for matrix in _matrices(rows, component, "value")]
        for name, component in names.items()
    }
    return drawing.row_panel(axes, samples, SPARE)


def removed(title: str, component: str, **network: str) -> Panel:
    """Draw what is lost without more and more of the values."""
    where: Where = {"part": "whole", "scope": "all", "change": ("smallest", "bulk"), **network}
    return paths(component, over="share", column="value", split="change", title=title, **where)


def by_kind(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw the cost of the smallest tenth over that of bulk values of the same energy."""
    title = "Smallest tenth against bulk of equal energy"
    drawing.entitle(axes, title, "ratio of what they cost")
    axes.axvline(1.0, color=drawing.FAINT, linestyle=":")
    kinds = ("all", "layers", *KINDS[:8])
    series = []
    for (name, network), colour in zip(NETWORKS.items(), SPARE, strict=False):
        ratios = []
        for kind in kinds:
            where = network | {"part": ("whole", "kinds"), "scope": kind, "share": 0.1}
            changes = ("smallest", f"bulk {EQUAL}")
            ours, theirs = (values(rows, where | {"change": change}) for change in changes)
            ratios.append(ours / theirs if len(ours) == len(theirs) else np.empty(0))
        if any(map(len, ratios)):
            trials = np.array(list(zip_longest(*ratios, fillvalue=np.nan)))
            series.append(Series(name, colour, kinds, trials))
    return drawing.strip_panel(axes, series) if series else drawing.empty(axes)


def rounding_cost(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw what rounding one matrix costs, against its kappa."""
    drawing.entitle(axes, f"One matrix rounded to {SINGLE}", "its κ", "what it costs")
    points: dict[str, list[tuple[float, float]]] = {}
    for name, network in NETWORKS.items():
        with suppress(LookupError):  # not run
            cost = singly(rows, **network)
            kappas = _matrices(rows, KAPPA, "value", model=network["model"])
            points[name] = [(m["value"], cost[m["matrix"]]) for m in kappas if m["matrix"] in cost]
    return _clouds(axes, points)


def _matrices(rows: Table, component: str, *columns: str, **where: Any) -> list[dict[str, Any]]:
    """List the rows about matrices that have all of these columns; none if they were not run."""
    with suppress(LookupError):
        lines = matrix_rows(rows, component, **where)
        return [line for line in lines if all(line[name] is not None for name in columns)]
    return []


def _clouds(axes: Axes, groups: dict[str, list[tuple[float, float]]]) -> str:
    """Draw a point for every matrix on logarithmic axes, in the colour of its group."""
    count = sum(map(len, groups.values()))
    if not count:
        return drawing.empty(axes)
    for points, colour in zip(groups.values(), SPARE, strict=False):
        x, y = np.reshape(points, (-1, 2)).T
        drawing.cloud(axes, x, y, colour)
    drawing.key(axes, zip(groups, SPARE, strict=False))
    drawing.logarithmic(axes, "x")
    drawing.logarithmic(axes, "y")
    return f"{count} matrices"


plot = sheet(
    against_chance,
    edges,
    removed("Rise of the Llama's loss, in its loss", **LLAMA),
    removed("Distance of MiniLM's sentences, 1 - cosine", **BERT),
    by_kind,
    rounding_cost,
    marks="Points: single matrices, or single sets of texts; thick lines and ticks: medians; bands "
    "and bars: quartiles; diamonds: means. Chance: a Gaussian matrix of the same shape and norm.",
)
