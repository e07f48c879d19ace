"""The tables and the figure of the study of what is not learned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import scipy

from kappascope.lab import drawing
from kappascope.lab.claims import Measure
from kappascope.lab.drawing import INK, SPARE
from kappascope.lab.experiment import Exhibit
from kappascope.lab.figures import sheet
from kappascope.lab.statistics import Estimate, over_seeds
from kappascope.lab.table import Floats, Table
from kappascope.studies.unlearned.claims import (
    GROUPS,
    MATRICES,
    PRODUCTS,
    WITHIN,
    by_seed,
    cells,
    column,
    gap,
    hypothesis,
    levels,
    loss_of_holding,
)
from kappascope.studies.unlearned.model import CENTRE, OPTIMIZERS
from kappascope.theory.beyond import LEVEL, MARGIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NONE = "–"
WORDS = {"holds": "noise", "fails": "learned", "undecided": "undecided"}
SHOWN = (
    "log_norm", "row_spread", "column_spread", "log_sigma_1", "log_sigma_90", "log_sigma_50",
    "log_sigma_10", "log_sigma_min", "log_kappa", "log_stable_rank",
)  # fmt: skip
GHOSTS = 4  # beside every run


def exhibits(rows: Table) -> Iterator[Exhibit]:
    """Yield the tables whose runs are there."""
    for table in (gap_table, share_table, law_table, holding_table):
        found = table(rows)
        if found.rows:
            yield found


def measured(measure: Measure, rows: Table) -> Estimate | None:
    """Measure, or give nothing where the runs are missing."""
    try:
        return measure(rows)
    except (LookupError, ValueError):
        return None


def gap_table(rows: Table) -> Exhibit:
    """Tabulate the gap of every part under every optimizer, with the answer."""
    lines = []
    for part in SHOWN:
        found = [measured(gap(o, (part,)), rows) for o in OPTIMIZERS]
        if any(found):
            cells = [f"{e:+.2f} {WORDS[WITHIN.decide(e)]}" if e else NONE for e in found]
            lines.append((part, *cells))
    return Exhibit(
        "How far parts of the matrices end from their ghosts, where weights decay",
        ("part", *OPTIMIZERS),
        tuple(lines),
        f"Natural logarithms, means over seeds with 95 % intervals; noise: within {MARGIN}.",
    )


def share_table(rows: Table) -> Exhibit:
    """Tabulate the share of matrices whose part is beyond noise, by kind of layer."""
    lines = []
    for kind in (*MATRICES, *PRODUCTS):
        for part in ("log_norm", "log_sigma_1", "log_sigma_50", "log_sigma_min"):
            found = [measured(learned_share(o, part, kind), rows) for o in OPTIMIZERS]
            if any(found):
                lines.append((kind, part, *(f"{e:.2f}" if e else NONE for e in found)))
    return Exhibit(
        "The learned share: matrices whose part is beyond noise, by kind of layer",
        ("kind", "part", *OPTIMIZERS),
        tuple(lines),
        "Beyond noise: a false discovery rate of 5 % against the ghosts by Student's law, over all "
        "matrices and cells of the part, and more than ten per cent away.",
    )


def learned_share(optimizer: str, part: str, kind: str) -> Measure:
    """Measure the share of the matrices of a kind whose part is beyond noise, over seeds."""

    def measure(rows: Table) -> Estimate:
        chosen = cells(rows, optimizer, (part,), (*MATRICES, *PRODUCTS), CENTRE)
        beyond = beyond_ghosts(chosen)
        kinds = np.asarray(chosen.rows["kind"].to_pylist())
        mine = Table.of(chosen.rows.filter((kinds == kind).tolist()))
        return over_seeds(list(by_seed(mine, beyond[kinds == kind]).values()), "mean share")

    return measure


def beyond_ghosts(rows: Table) -> Floats:
    """Tell which rows are beyond noise, with regard to all of them together."""
    apart = column(rows, "value") - column(rows, "ghost")
    spread = np.maximum(column(rows, "ghost_spread"), 1e-12) * np.sqrt(1 + 1 / GHOSTS)
    p = 2 * scipy.stats.t.sf(np.abs(apart) / spread, GHOSTS - 1)
    adjusted = scipy.stats.false_discovery_control(p)
    return np.asarray((adjusted <= LEVEL) & (np.abs(apart) > MARGIN), dtype=float)


def law_table(rows: Table) -> Exhibit:
    """Tabulate what start, white noise and noise as measured predict, and which law holds."""
    lines = []
    for optimizer in OPTIMIZERS:
        for group, parts in GROUPS.items():
            nulls = ("start", "white", "shaped", "ghost")
            found = {n: measured(gap(optimizer, parts, null=n), rows) for n in nulls}
            start, noise = found["start"], found["shaped"]
            if start and noise:
                cells = [f"{e:+.2f}" if e else NONE for e in found.values()]
                lines.append((optimizer, group, *cells, hypothesis(start, noise)))
    return Exhibit(
        "Three laws: trained less predicted, without a free parameter",
        ("optimizer", "part", "start (H1)", "white noise", "noise (H2)", "ghosts", "law"),
        tuple(lines),
        "Natural logarithms, means over seeds with 95 % intervals. H1: what decay leaves of the "
        "start. H2: noise with the covariances of gradients. H3: neither, by more than a tenth.",
    )


def holding_table(rows: Table) -> Exhibit:
    """Tabulate the loss of holding or freeing a part."""
    lines = []
    for optimizer in ("AdamW", "Muon"):
        arms = {
            f"{held}, {level}": measure
            for held in ("norm", "tail")
            for level, measure in levels(optimizer, held).items()
        }
        arms |= {
            f"free {held}": loss_of_holding(optimizer, held, 1.0, ("nothing", 1.0))
            for held in ("multipliers", "values", "temperature")
        }
        for arm, measure in arms.items():
            found = measured(measure, rows)
            if found:
                lines.append((optimizer, arm, f"{found:+.4f}", str(found.n)))
    return Exhibit(
        "Does it matter: the loss of holding a part at another level, or of freeing it",
        ("optimizer", "arm", "loss difference", "seeds"),
        tuple(lines),
        "Nats a character, paired seeds, 95 % intervals; against the same part held at one, or "
        "against the optimizer alone.",
    )


def along_the_spectrum(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw the gap of every decile under each optimizer."""
    parts = tuple(part for group in ("top", "bulk", "bottom") for part in GROUPS[group])
    drawing.entitle(
        axes, "Trained less noise", "singular value: first, above so many %, last", "log ratio"
    )
    n = 0
    for optimizer, colour in zip(OPTIMIZERS, SPARE, strict=False):
        found = [measured(gap(optimizer, (part,)), rows) for part in parts]
        points = [(k, e) for k, e in enumerate(found) if e]
        if points:
            places, values = [k for k, _ in points], [e.value for _, e in points]
            axes.plot(places, values, "o-", color=colour, label=optimizer)
            ends = np.array([e.interval or (e.value, e.value) for _, e in points])
            axes.fill_between(places, ends[:, 0], ends[:, 1], color=colour, alpha=0.2)
            n = max(n, points[0][1].n)
    axes.axhspan(-MARGIN, MARGIN, color=INK, alpha=0.08)
    axes.set_xticks(range(len(parts)), ["1", *(f"{d}" for d in range(90, 0, -10)), "min"])
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    return f"{n} seeds"


def against_the_level(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw the loss against the level at which the norm, or the lower half, is held."""
    drawing.entitle(axes, "Loss of holding a part", "multiple of its value", "nats a character")
    n = 0
    arms = [(o, held) for o in ("AdamW", "Muon") for held in ("norm", "tail")]
    for (optimizer, held), colour in zip(arms, SPARE, strict=False):
        found = {name: measured(m, rows) for name, m in levels(optimizer, held).items()}
        points = {float(name.split()[1]): e for name, e in found.items() if e}
        if points:
            x = sorted({*points, 1.0})
            y = [points[level].value if level in points else 0.0 for level in x]
            axes.plot(x, y, "o-", color=colour, label=f"{optimizer}, {held}")
            n = max(n, *(e.n for e in points.values()))
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.25, 0.5, 1.0, 2.0, 4.0], ["1/4", "1/2", "1", "2", "4"])
    axes.axhline(0.0, color=INK, linewidth=0.5)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    return f"{n} seeds"


plot = sheet(
    along_the_spectrum,
    against_the_level,
    marks="Means over seeds, bands: 95 % intervals; grey: within ten per cent of noise.",
)
