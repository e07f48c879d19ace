"""The tables and panels of the study of pretrained checkpoints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope import drawing
from kappascope.figures import Panel
from kappascope.lab import Exhibit
from kappascope.series import SPARE
from kappascope.statistics import Estimate, Floats, Table, median
from kappascope.studies.pretrained_changes import EQUAL, FORMATS
from kappascope.studies.pretrained_claims import (
    KAPPA,
    ONE_BY_ONE,
    PRODUCTS,
    of_matrices,
    share,
    singly,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = (
    "Points: single matrices, or single sets of texts; thick lines and ticks: medians; bands and "
    "bars: quartiles. Chance: a Gaussian matrix of the same shape and norm."
)
COST = {"stories15m": "rise", "minilm": "distance"}  # how each network is judged
OWN = {"stories15m": "own", "minilm": "tiny-shakespeare"}  # and on which text
KINDS = ("embedding", "query", "key", "value", "output", "gate", "up", "down", "convolution",
         "head", "other")  # fmt: skip
BLUE, ORANGE, GREEN = SPARE[:3]


def costs(rows: Table, model: str, **where: Any) -> Floats:
    """What a change costs a network, one number a seed; nothing if it was not run."""
    chosen = {"model": model, "text": OWN[model], "component": COST[model], **where}
    known = set(chosen) <= set(rows.rows.column_names)
    return rows.where(**chosen).values("value") if known else np.empty(0)


def exhibits(rows: Table) -> Iterator[Exhibit]:
    """What stands in the report: spectra by kind, removals, removals by kind, rounding."""
    makers = (_spectra, _removals, _by_kind, _rounding)
    return (_filled(found) for maker in makers if (found := maker(rows)).rows)


def _filled(one: Exhibit) -> Exhibit:
    """Without the columns of what was not run."""
    kept = [place for place in range(len(one.columns)) if any(row[place] for row in one.rows)]
    lines = tuple(tuple(row[place] for place in kept) for row in one.rows)
    return replace(one, columns=tuple(one.columns[place] for place in kept), rows=lines)


def _spectra(rows: Table) -> Exhibit:
    found = list(_kinds(rows))
    return Exhibit(
        "Spectra against chance, by kind of matrix",
        ("network", "kind", "n", "κ", "κ of chance", "z", "largest", "median", "smallest"),
        tuple((*name, *map(str, cells)) for name, cells in found),
        "Medians over the matrices of a kind. z: deviations of log κ from its mean for Gaussian "
        "matrices of the same shape. The last three: singular values in those of a Gaussian "
        "matrix of the same shape and norm. QK and OV: products of single heads, against products "
        "of Gaussian factors.",
    )


def _kinds(rows: Table) -> Iterator[tuple[tuple[str, str], list[str]]]:
    if "kind" not in rows.rows.column_names:
        return
    for model, part in rows.where(part="spectra").by("model").items():
        for kind in (*KINDS, *PRODUCTS):
            of = part.where(kind=kind)
            if not len(of):
                continue
            kappa = of.where(component=KAPPA)
            middles = [_middle(kappa, "value"), _middle(kappa, "target")]
            names = ("null_z", "top", "middle", "bottom")
            middles += [_middle(of.where(component=name), "value") for name in names]
            yield (model, kind), [str(len(kappa)), *map(_digits, middles)]


def _digits(value: float) -> str:
    return "" if np.isnan(value) else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _middle(rows: Table, column: str) -> float:
    values = rows.values(column) if len(rows) else np.empty(0)
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else np.nan


def _removals(rows: Table) -> Exhibit:
    lines = []
    order = ("smallest", "bulk", "largest", *(f"{x} {EQUAL}" for x in ("bulk", "largest", "noise")))
    for what, part in ((w, s) for w in order for s in (0.01, 0.05, 0.1, 0.2, 0.4)):
        where = {"scope": "all", "change": what, "share": part}
        cells = [_cell(costs(rows, "stories15m", **where))]
        cells += [_cell(costs(rows, "stories15m", text="tiny-shakespeare", **where))]
        cells += [_cell(costs(rows, "minilm", **where))]
        if any(cells):
            energy = [_energy(rows, model, **where) for model in COST]
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


def _by_kind(rows: Table) -> Exhibit:
    lines = []
    for model in COST:
        for kind in ("layers", *KINDS):
            where = {"part": ("whole", "kinds"), "scope": kind, "share": 0.1}
            whats = ("smallest", "bulk", f"bulk {EQUAL}", f"noise {EQUAL}")
            cells = [_cell(costs(rows, model, change=what, **where)) for what in whats]
            if any(cells):
                lines.append(
                    (model, kind, _energy(rows, model, change="smallest", **where), *cells)
                )
    return Exhibit(
        "A tenth of the singular values removed from the matrices of one kind",
        ("network", "kind", "energy of the smallest", "smallest", "bulk", f"bulk {EQUAL}",
         f"noise {EQUAL}"),
        tuple(lines),
        "As above; layers: all matrices but the embedding.",
    )  # fmt: skip


def _rounding(rows: Table) -> Exhibit:
    lines = []
    for what in FORMATS:
        moved = [_share(rows, bound, what) for bound in (0.01, 0.1)]
        where = {"scope": "all", "change": what}
        cells = [_cell(costs(rows, model, **where)) for model in COST]
        if any((*moved, *cells)):
            lines.append((what, *moved, *cells))
    return Exhibit(
        "Every matrix rounded",
        ("to", "κ moves > 1 %", "κ moves > 10 %", "Llama's loss", "MiniLM"),
        tuple(lines),
        "The share of all matrices whose κ moves, and what that costs, as above. int8 has one step "
        "for a matrix; by row, one for each of its rows.",
    )


def _cell(values: Floats) -> str:
    return f"{median(values):.2g}" if values.size else ""


def _energy(rows: Table, model: str, **where: Any) -> str:
    known = {"model", *where} <= set(rows.rows.column_names)
    chosen = {"model": model, "component": "energy", **where}
    found = rows.where(**chosen).values("value") if known else np.empty(0)
    return f"{100 * float(found[0]):.2g} %" if found.size else ""


def _share(rows: Table, bound: float, what: str) -> str:
    try:
        found: Estimate = share("kappa_rounded", bound, "error", change=what)(rows)
    except (LookupError, KeyError):
        return ""
    return f"{100 * found.value:.0f} %"


def against_chance(axes: Axes, rows: Table, spectra: Table) -> str:
    """Kappa of every matrix beside that of chance."""
    drawing.entitle(axes, "κ of each matrix against chance", "κ of a random matrix", "κ")
    found = _matrices(rows, KAPPA, "value", "target")
    groups = {"attention": ("query", "key", "value", "output"), "feed-forward": KINDS[5:8],
              "others": ("embedding", "convolution", "head", "other")}  # fmt: skip
    for (name, kinds), colour in zip(groups.items(), SPARE, strict=False):
        points = [(r["target"], r["value"]) for r in found if r["kind"] in kinds]
        _scatter(axes, points, colour, name)
    both = [r[x] for r in found for x in ("value", "target")] or [1.0, 10.0]
    axes.plot((min(both), max(both)), (min(both), max(both)), color=drawing.FAINT, linestyle=":")
    return _logged(axes, len(found))


def edges(axes: Axes, rows: Table, spectra: Table) -> str:
    """Largest, median and smallest value of every matrix beside those of chance."""
    drawing.entitle(axes, "Where the spectra differ from chance", "in that of a random matrix")
    names = {"bottom": "smallest", "middle": "median", "top": "largest"}
    found = [[r["value"] for r in _matrices(rows, name, "value")] for name in names]
    _strips(axes, found, tuple(names.values()), SPARE)
    axes.axvline(1.0, color=drawing.FAINT, linestyle=":")
    return f"{len(found[0])} matrices"


def sweep(model: str, title: str, unit: str) -> Panel:
    """What is lost without more and more of the values."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title, "share of singular values removed", unit)
        count = 0
        for what, colour in (("smallest", ORANGE), ("bulk", BLUE)):
            found = {
                part: costs(rows, model, scope="all", change=what, share=part)
                for part in (0.05, 0.1, 0.2, 0.4)
            }
            found = {part: values for part, values in found.items() if values.size}
            count = max([count, *map(len, found.values())])
            quartiles = [np.quantile(v, (0.25, 0.5, 0.75)) for v in found.values()]
            for part, values in found.items():
                drawing.cloud(axes, np.full(len(values), part), values, colour)
            low, middle, high = np.reshape(quartiles, (-1, 3)).T
            axes.fill_between(list(found), low, high, color=colour, alpha=0.18, linewidth=0)
            axes.plot(list(found), middle, color=colour, linewidth=1.8, label=what)
        return _logged(axes, count, "seeds")

    return draw


def by_kind(axes: Axes, rows: Table, spectra: Table) -> str:
    """What the smallest tenth costs, in what bulk values of the same energy cost."""
    title = "Smallest tenth against bulk of equal energy"
    drawing.entitle(axes, title, "ratio of what they cost")
    kinds = ("all", "layers", *KINDS[:8])
    for lane, (model, colour) in enumerate(zip(COST, (BLUE, GREEN), strict=True)):
        ratios = [_ratios(rows, model, kind) for kind in kinds]
        _strips(axes, ratios, kinds, (colour,) * len(kinds), (lane - 0.5) * 0.4)
        axes.plot([], [], "o", color=colour, label=("Llama", "MiniLM")[lane])
    axes.axvline(1.0, color=drawing.FAINT, linestyle=":")
    axes.legend(frameon=False, fontsize=8)
    return f"n = {len(_ratios(rows, 'stories15m', 'all'))} seeds"


def _ratios(rows: Table, model: str, kind: str) -> list[float]:
    where = {"part": ("whole", "kinds"), "scope": kind, "share": 0.1}
    ours, theirs = (
        costs(rows, model, change=change, **where) for change in ("smallest", f"bulk {EQUAL}")
    )
    return (ours / theirs).tolist() if len(ours) == len(theirs) else []


def suffering(axes: Axes, rows: Table, spectra: Table) -> str:
    """What rounding one matrix costs, beside its kappa."""
    drawing.entitle(axes, f"One matrix rounded to {ONE_BY_ONE}", "its κ", "what it costs")
    count = 0
    for model, colour in zip(COST, (BLUE, GREEN), strict=True):
        try:
            cost = singly(rows, {"model": model, "text": OWN[model]}, COST[model])
        except (LookupError, KeyError):
            continue
        kappa = {r["matrix"]: r["value"] for r in _matrices(rows, KAPPA, "value", model=model)}
        points = [(kappa[name], value) for name, value in cost.items() if name in kappa]
        _scatter(axes, points, colour, {"stories15m": "Llama"}.get(model, "MiniLM"))
        count += len(points)
    return _logged(axes, count)


def _matrices(rows: Table, component: str, *columns: str, **where: Any) -> list[dict[str, Any]]:
    try:
        found = of_matrices(rows, component, *columns, **where)
    except (LookupError, KeyError):
        return []
    lines = (dict(zip(found, line, strict=True)) for line in zip(*found.values(), strict=True))
    return [line for line in lines if all(line[name] is not None for name in columns)]


def _strips(
    axes: Axes,
    groups: Sequence[Sequence[float]],
    names: Sequence[str],
    colours: Sequence[str],
    shift: float = 0.0,
) -> None:
    """A row of points for each name, with its quartiles and median."""
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


PANELS: tuple[Panel, ...] = (
    against_chance,
    edges,
    sweep("stories15m", "The Llama without some values", "rise of the loss, in its loss"),
    sweep("minilm", "MiniLM without some values", "1 - cosine to what it was"),
    by_kind,
    suffering,
)
