"""What the study of unlearned parts decides; every rule is older than its rows.

The **gap** of a part is its trained value less the mean of its ghosts, on the part's log scale. It
is averaged over the matrices and the cells of one seed, and over seeds with Student's interval. A
gap whose interval lies within a tenth of zero (`MARGIN`, ten per cent) is what noise would have
done; one that lies wholly outside is learned; else it is undecided. Which law holds for a part is
decided by the same margin, against two predictions without a free parameter:

- H1, the **start**: a_t W_0, what decay has left of it;
- H2, **noise**: a_t W_0 + s_t R^(1/2) N C^(1/2) with the covariances of gradients as measured;
- H3, **learned**: neither, surely.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from kappascope.lab.claims import Above, Below, Between, Claim, Measure
from kappascope.lab.measures import select
from kappascope.lab.statistics import Estimate, over_seeds
from kappascope.lab.table import Floats, Table
from kappascope.theory.beyond import MARGIN

OPTIMIZERS = ("AdamW", "Muon", "SGD")
MATRICES = ("query", "key", "value", "output", "up", "down")
PRODUCTS = ("QK", "OV")
LOSS = "validation_loss"
# The groups of parts that laws speak of; kappa is apart, for its lower end has a long tail.
GROUPS: dict[str, tuple[str, ...]] = {
    "norm": ("log_norm",),
    "top": ("log_sigma_1", "log_sigma_90"),
    "bulk": tuple(f"log_sigma_{decile}" for decile in range(80, 10, -10)),
    "bottom": ("log_sigma_10", "log_sigma_min"),
}
KAPPA_MARGIN = math.log(1.5)  # log kappa of a square matrix of noise has a spread of about one
WITHIN = Between(-MARGIN, MARGIN)


def final(rows: Table) -> Table:
    """Keep the rows at the end of training."""
    epochs, steps = rows.rows["epoch"], rows.rows["steps"]
    same = [e == s for e, s in zip(epochs.to_pylist(), steps.to_pylist(), strict=True)]
    return Table.of(rows.rows.filter(same))


def column(rows: Table, name: str) -> Floats:
    """Read a column as it stands."""
    return np.array(rows.rows[name].to_pylist(), dtype=float)


def decayed(rows: Table, optimizer: str, parts: Sequence[str], kinds: Sequence[str]) -> Table:
    """Select parts at the end of an optimizer's runs with decay, at its usual rate."""
    chosen = select(
        rows, stage="grid", optimizer=optimizer, component=tuple(parts), kind=tuple(kinds)
    )
    rates = sorted(set(chosen.rows["rate"].to_pylist()))
    usual = rates[len(rates) // 2]
    chosen = final(chosen.where(rate=usual))
    return Table.of(chosen.rows.filter([d > 0 for d in chosen.rows["decay"].to_pylist()]))


def by_seed(rows: Table, values: Floats) -> dict[int, float]:
    """Average values over the rows of each seed."""
    seeds = column(rows, "seed").astype(int)
    return {int(k): float(np.mean(values[seeds == k])) for k in sorted(set(seeds.tolist()))}


def gap(
    optimizer: str,
    parts: Sequence[str],
    kinds: Sequence[str] = MATRICES,
    null: str = "ghost",
    of: str = "value",
) -> Measure:
    """Subtract what a null gives from parts at the end of training, on average, seed by seed."""

    def measure(rows: Table) -> Estimate:
        chosen = decayed(rows, optimizer, parts, kinds)
        apart = column(chosen, of) - column(chosen, null)
        return over_seeds(list(by_seed(chosen, apart).values()), "mean gap")

    return measure


def following(optimizer: str, part: str) -> Measure:
    """Regress a part on its ghosts over the cells of the grid with decay: one, if noise sets it."""

    def measure(rows: Table) -> Estimate:
        chosen = final(select(rows, stage="grid", optimizer=optimizer, component=part))
        chosen = chosen.where(kind=MATRICES)
        chosen = Table.of(chosen.rows.filter([d > 0 for d in chosen.rows["decay"].to_pylist()]))
        slopes = []
        for runs in chosen.by("seed").values():
            x, y, m = (column(runs, "ghost"), column(runs, "value"), runs.rows["matrix"])
            names = np.asarray(m.to_pylist())
            for name in set(names.tolist()):  # each matrix has a level of its own
                x[names == name] -= x[names == name].mean()
                y[names == name] -= y[names == name].mean()
            slopes.append(float(x @ y / (x @ x)))
        return over_seeds(slopes, "mean slope")

    return measure


def hypothesis(start: Estimate, noise: Estimate) -> str:
    """Say which law holds for a part, by the gaps to start and to noise.

    >>> near, far = (Estimate(x, x - 0.05, x + 0.05, 4, "mean gap") for x in (0.0, 0.5))
    >>> hypothesis(far, near), hypothesis(near, far), hypothesis(far, far), hypothesis(near, near)
    ('H2', 'H1', 'H3', 'H1 and H2')
    """
    decided = [WITHIN.decide(each) for each in (start, noise)]
    holding = [
        name for name, verdict in zip(("H1", "H2"), decided, strict=True) if verdict == "holds"
    ]
    if holding:
        return " and ".join(holding)
    return "H3" if decided == ["fails", "fails"] else "undecided"


# --- does it matter -------------------------------------------------------------------------------


def loss_of_holding(optimizer: str, held: str, level: float, base: tuple[str, float]) -> Measure:
    """Subtract the loss of a base arm from that of an arm which holds or frees a part."""

    def measure(rows: Table) -> Estimate:
        about = {"stage": "matter", "optimizer": optimizer, "component": LOSS}
        ours = select(rows, **about, held=held, level=level)
        theirs = select(rows, **about, held=base[0], level=base[1])
        return over_seeds(np.subtract(*ours.paired(theirs, "value")))

    return measure


def levels(optimizer: str, held: str) -> dict[str, Measure]:
    """Compare every other level with that which was there when holding began."""
    return {
        f"at {level:g}": loss_of_holding(optimizer, held, level, (held, 1.0))
        for level in (0.25, 0.5, 2.0, 4.0)
    }


# --- data against settings ------------------------------------------------------------------------


def variance_ratio(parts: Sequence[str]) -> Measure:
    """Measure the log of the variance that settings cause over that which texts cause.

    Of a two-way table, with the residue's share subtracted from each and a hundredth of the whole
    as the least; the interval is Student's over seeds.
    """

    def measure(rows: Table) -> Estimate:
        chosen = final(select(rows, stage="data", component=tuple(parts)).where(kind=MATRICES))
        ratios = [_variance_ratio(runs) for runs in chosen.by("seed").values()]
        return over_seeds(ratios, "mean log ratio")

    return measure


def _variance_ratio(rows: Table) -> float:
    settings, texts, whole = 0.0, 0.0, 0.0
    for matrix in rows.by("matrix").values():
        for part in matrix.by("component").values():
            cells = {
                (rate, text): float(column(cell, "value").mean())
                for rate, runs in part.by("rate").items()
                for text, cell in runs.by("text").items()
            }
            rates, names = (sorted({key[k] for key in cells}, key=str) for k in (0, 1))
            table = np.array([[cells[rate, name] for name in names] for rate in rates])
            shares = variance_components(table)
            settings, texts = settings + shares[0], texts + shares[1]
            whole += float(table.var())
    least = whole / 100
    return math.log(max(settings, least) / max(texts, least))


def variance_components(table: Floats) -> tuple[float, float, float]:
    """Return the variances due to rows, to columns and to neither, of one value a cell.

    >>> rows, columns, rest = variance_components(np.array([[0.0, 0.0], [2.0, 2.0]]))
    >>> rows, columns, rest
    (2.0, 0.0, 0.0)
    """
    r, c = table.shape
    by_row, by_column, mean = table.mean(1), table.mean(0), table.mean()
    rest = table - by_row[:, None] - by_column[None] + mean
    residue = float((rest**2).sum() / ((r - 1) * (c - 1)))
    rows = max(0.0, float(by_row.var(ddof=1)) - residue / c)
    columns = max(0.0, float(by_column.var(ddof=1)) - residue / r)
    return rows, columns, residue


def growth_with_width(scaling: str) -> Measure:
    """Measure how the mean distance of spectra from their ghosts changes by doubling of width."""

    def measure(rows: Table) -> Estimate:
        parts = tuple(part for group in ("top", "bulk", "bottom") for part in GROUPS[group])
        chosen = select(rows, stage="width", scaling=scaling, component=parts).where(kind=MATRICES)
        chosen = final(chosen)
        slopes = []
        for runs in chosen.by("seed").values():
            by_width = {
                math.log2(width): float(np.abs(column(r, "value") - column(r, "ghost")).mean())
                for width, r in runs.by("width").items()
            }
            slopes.append(float(np.polyfit(list(by_width), list(by_width.values()), 1)[0]))
        return over_seeds(slopes, "mean slope")

    return measure


# --- claims ---------------------------------------------------------------------------------------


def gaps(parts: Sequence[str], kinds: Sequence[str] = MATRICES) -> dict[str, Measure]:
    """Measure the gap to ghosts under every optimizer."""
    return {optimizer.lower(): gap(optimizer, parts, kinds) for optimizer in OPTIMIZERS}


ANSWERS = ("W1(b)",)
EXPLAINED = (
    "The mean gap to the ghosts, in natural logarithms, is {adamw:+.2f} under AdamW, {muon:+.2f} "
    "under Muon and {sgd:+.2f} under SGD (n = {adamw.n} seeds, three decays, twelve matrices)."
)
CLAIMS = (
    Claim(
        "unlearned.norm",
        "Where weights decay, the norm of a matrix is what noise alone would have made of it.",
        "Velikanov et al. 2026",
        measures=gaps(GROUPS["norm"]),
        expect={"adamw": WITHIN, "muon": WITHIN},
        explain=EXPLAINED,
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.follows",
        "Rate and decay, by way of noise, set the norm: over settings it follows its ghosts one "
        "for one.",
        "Velikanov et al. 2026",
        measures={o.lower(): following(o, "log_norm") for o in OPTIMIZERS},
        expect={"adamw": Between(0.8, 1.2), "muon": Between(0.8, 1.2)},
        explain="The slope of log norm on the ghosts' is {adamw:.2f} under AdamW, {muon:.2f} under "
        "Muon and {sgd:.2f} under SGD, over five settings with decay (n = {adamw.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.top",
        "The top of the spectrum is learned: it lies above what noise alone would have made.",
        "P 1 (open question)",
        measures=gaps(GROUPS["top"]),
        expect={"adamw": Above(MARGIN), "muon": Above(MARGIN)},
        explain=EXPLAINED,
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.bulk",
        "The bulk of the spectrum is not learned: it is what noise alone would have made.",
        "P 1 (open question)",
        measures=gaps(GROUPS["bulk"]),
        expect={"adamw": WITHIN, "muon": WITHIN},
        explain=EXPLAINED,
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.kappa",
        "The condition number is not learned: it is what noise alone would have made, within a "
        "factor of 1.5.",
        "P 6",
        measures=gaps(("log_kappa",)),
        expect=dict.fromkeys(("adamw", "muon"), Between(-KAPPA_MARGIN, KAPPA_MARGIN)),
        explain=EXPLAINED,
        answers=("W1(b)", "W9(d)"),
    ),
    Claim(
        "unlearned.heads",
        "What a head compares (QK) is learned: its largest singular value is beyond noise.",
        "R W1(b)",
        measures=gaps(("log_sigma_1",), ("QK",)),
        expect={"adamw": Above(MARGIN), "muon": Above(MARGIN)},
        explain="The mean gap to the ghosts, in natural logarithms, is {adamw:+.2f} under AdamW, "
        "{muon:+.2f} under Muon and {sgd:+.2f} under SGD (n = {adamw.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.law",
        "The covariances of gradients tell what noise makes of a spectrum, without a free "
        "parameter: every group of it to ten per cent.",
        "R W1(b)",
        measures={
            optimizer.lower(): {
                f"({group})": gap(optimizer, GROUPS[group], null="shaped", of="ghost")
                for group in GROUPS
            }
            for optimizer in OPTIMIZERS
        },
        expect={optimizer.lower(): WITHIN for optimizer in OPTIMIZERS},
        explain="Ghosts less prediction, in natural logarithms: AdamW {adamw:+.2f}; Muon "
        "{muon:+.2f}; SGD {sgd:+.2f} (n = {adamw.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.start",
        "Under SGD the lower end of the spectrum is its start, shrunk by decay.",
        "P 4.9; R W9",
        measures={o.lower(): gap(o, GROUPS["bottom"], null="start") for o in OPTIMIZERS},
        expect={"sgd": WITHIN},
        explain="The lower end lies {sgd:+.2f} from the start that decay has left under SGD, "
        "{adamw:+.2f} under AdamW and {muon:+.2f} under Muon, in natural logarithms (n = {sgd.n} "
        "seeds).",
        answers=ANSWERS,
    ),
    *(
        Claim(
            f"unlearned.{held}-{optimizer.lower()}",
            f"Under {optimizer} every other {what} than that at which training has arrived costs "
            "loss.",
            "Velikanov et al. 2026",
            measures={"levels": levels(optimizer, held)},
            expect={"levels": Above(0)},
            explain="Held at a multiple of where it was, the loss differs by {levels:+.4f} nats a "
            "character from that held at one (paired seeds, n = {levels.n}).",
            answers=ANSWERS,
        )
        for held, what in (("norm", "norm"), ("tail", "lower half of the spectrum"))
        for optimizer in ("AdamW", "Muon")
    ),
    *(
        Claim(
            f"unlearned.free-{held}",
            f"To free {what} lowers the loss, under AdamW and under Muon.",
            "Velikanov et al. 2026",
            measures={
                o.lower(): loss_of_holding(o, held, 1.0, ("nothing", 1.0))
                for o in ("AdamW", "Muon")
            },
            expect={"adamw": Below(0), "muon": Below(0)},
            explain="The loss differs by {adamw:+.4f} nats a character under AdamW and by "
            "{muon:+.4f} under Muon (paired seeds, n = {adamw.n}).",
            answers=ANSWERS,
        )
        for held, what in (("multipliers", "row and column norms"), ("values", "singular values"))
    ),
    Claim(
        "unlearned.data",
        "Settings move norm and bulk more than the text does, and the text moves the top more.",
        "R W1(b)",
        measures={group: variance_ratio(GROUPS[group]) for group in GROUPS},
        expect={"norm": Above(0), "bulk": Above(0), "top": Below(0)},
        explain="The log of the variance that settings cause over that which texts cause is "
        "{norm:+.2f} for the norm, {top:+.2f} for the top, {bulk:+.2f} for the bulk and "
        "{bottom:+.2f} for the bottom of the spectrum (n = {norm.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.width",
        "The wider the network, the nearer are its spectra to what noise would have made.",
        "R W2; Yang et al. 2021",
        measures={name: growth_with_width(name) for name in ("standard", "mup")},
        expect={"standard": Below(0), "mup": Below(0)},
        explain="With each doubling of the width the mean distance from the ghosts changes by "
        "{standard:+.3f}, under muP by {mup:+.3f} (n = {standard.n} seeds).",
        answers=ANSWERS,
    ),
)
