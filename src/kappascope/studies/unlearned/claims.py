"""What the study of unlearned parts decides; every rule is older than its rows.

The **gap** of a part is its trained value less the mean of its ghosts, on the part's log scale. It
is averaged over the matrices of a kind in one run, and over seeds with Student's interval. A gap
whose interval lies within a tenth of zero (`MARGIN`, ten per cent) is what noise would have done;
one that lies wholly outside is learned; else it is undecided. Kinds of layers are judged apart: in
the pilot they differed in sign. What is judged is the centre of the grid, where rate times decay
sums to five: the start has gone and the network still learns; the other decays are reported.

Which law holds for a part is decided by the same margin, against two predictions without a free
parameter:

- H1, the **start**: a_t W_0, what decay has left of it;
- H2, **noise**: a_t W_0 + s_t R^(1/2) N C^(1/2) with the covariances of gradients as measured;
- H3, **learned**: neither, surely.

Most signs and sizes that are expected here are those of a pilot with other seeds and more steps,
none of whose rows counts. What no pilot saw: other rates, starts and texts, Muon's and the tail's
levels, freed parts, widths, and checkpoints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from kappascope.lab.claims import Above, Below, Between, Claim, Measure
from kappascope.lab.measures import select
from kappascope.lab.statistics import Estimate, over_seeds
from kappascope.lab.table import Floats, Table
from kappascope.studies.unlearned.model import CENTRE, DECAYS, OPTIMIZERS
from kappascope.theory.beyond import MARGIN

MATRICES = ("query", "key", "value", "output", "up", "down")
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


def cells(
    rows: Table,
    optimizer: str,
    parts: Sequence[str],
    kinds: Sequence[str],
    place: int | None = None,
) -> Table:
    """Select parts at the end of an optimizer's runs on the grid, at one of its decays or at all.

    A ``place`` counts the decays from none to the strongest; without one, all but none are taken.
    """
    chosen = final(
        select(rows, stage="grid", optimizer=optimizer, component=tuple(parts), kind=tuple(kinds))
    )
    decays = DECAYS[optimizer]
    return select(chosen, decay=decays[1:] if place is None else decays[place])


def by_seed(rows: Table, values: Floats) -> dict[int, float]:
    """Average values over the rows of each seed."""
    seeds = column(rows, "seed").astype(int)
    return {int(k): float(np.mean(values[seeds == k])) for k in sorted(set(seeds.tolist()))}


def gap(
    optimizer: str,
    parts: Sequence[str],
    kinds: Sequence[str] = MATRICES,
    *,
    null: str = "ghost",
    of: str = "value",
    place: int | None = CENTRE,
) -> Measure:
    """Subtract what a null gives from parts at the end of training, on average, seed by seed."""

    def measure(rows: Table) -> Estimate:
        chosen = cells(rows, optimizer, parts, kinds, place)
        apart = column(chosen, of) - column(chosen, null)
        return over_seeds(list(by_seed(chosen, apart).values()), "mean gap")

    return measure


def by_kind(
    optimizers: Sequence[str], kinds: Sequence[str], parts: Sequence[str]
) -> dict[str, Measure]:
    """Measure the gap to ghosts of every kind of layer under each optimizer."""
    return {
        f"({kind}, {optimizer})": gap(optimizer, parts, (kind,))
        for optimizer in optimizers
        for kind in kinds
    }


def slope_within(rows: Table, x: Floats, y: Floats) -> float:
    """Fit the slope of y on x with a level of its own for every matrix."""
    names = np.asarray(rows.rows["matrix"].to_pylist())
    x, y = x.copy(), y.copy()
    for name in set(names.tolist()):
        x[names == name] -= x[names == name].mean()
        y[names == name] -= y[names == name].mean()
    return float(x @ y / (x @ x))


def slopes_over(
    optimizer: str,
    part: str,
    over: str,
    on: str,
    *,
    kinds: Sequence[str] = MATRICES,
    of: str = "value",
) -> Measure:
    """Regress a part on its ghosts, or on the log of the rate, over decays or over rates.

    ``over`` is ``decays`` (those above none), ``rates`` (the same product of rate and decay, or the
    same decay) or ``products`` (the same product alone).
    """

    def measure(rows: Table) -> Estimate:
        chosen = select(_varied(rows, optimizer, part, over), kind=tuple(kinds))
        slopes = []
        for runs in chosen.by("seed").values():
            x = np.log(column(runs, "rate")) if on == "rate" else column(runs, on)
            slopes.append(slope_within(runs, x, column(runs, of)))
        return over_seeds(slopes, "mean slope")

    return measure


def _varied(rows: Table, optimizer: str, part: str, over: str) -> Table:
    if over == "decays":
        return cells(rows, optimizer, (part,), MATRICES)
    usual = cells(rows, optimizer, (part,), MATRICES, CENTRE)
    other = select(rows, stage="rate", optimizer=optimizer, component=part, kind=MATRICES)
    other = final(other)
    if over == "products":
        product = column(usual, "rate")[0] * column(usual, "decay")[0]
        same = np.isclose(column(other, "rate") * column(other, "decay"), product)
        other = Table.of(other.rows.filter(same.tolist()))
    return Table.of(pa.concat_tables([usual.rows, other.rows], promote_options="permissive"))


def memory(optimizer: str, parts: Sequence[str], of: str) -> Measure:
    """Measure how much of a start's size is left in parts: one if all of it is, zero if none."""

    def measure(rows: Table) -> Estimate:
        about = {"stage": "start", "optimizer": optimizer, "component": tuple(parts)}
        chosen = final(select(rows, **about, kind=MATRICES))
        found = []
        for runs in chosen.by("seed").values():
            large, small = (select(runs, start_scale=scale) for scale in (2.0, 0.5))
            found.append(float(column(large, of).mean() - column(small, of).mean()) / math.log(4))
        return over_seeds(found, "mean memory")

    return measure


def excess_memory(optimizer: str, parts: Sequence[str]) -> Measure:
    """Subtract the ghosts' memory of the start from that of the trained parts."""

    def measure(rows: Table) -> Estimate:
        about = {"stage": "start", "optimizer": optimizer, "component": tuple(parts)}
        chosen = final(select(rows, **about, kind=MATRICES))
        found = []
        for runs in chosen.by("seed").values():
            large, small = (select(runs, start_scale=scale) for scale in (2.0, 0.5))
            gaps_ = [
                float((column(r, "value") - column(r, "ghost")).mean()) for r in (large, small)
            ]
            found.append((gaps_[0] - gaps_[1]) / math.log(4))
        return over_seeds(found, "mean excess memory")

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


def levels(
    optimizer: str, held: str, which: Sequence[float] = (0.25, 0.5, 2.0, 4.0)
) -> dict[str, Measure]:
    """Compare other levels with that which was there when holding began."""
    return {
        f"at {level:g}": loss_of_holding(optimizer, held, level, (held, 1.0)) for level in which
    }


# --- the balance of a norm ------------------------------------------------------------------------


def balanced(optimizer: str, part: str, kinds: Sequence[str], place: int = CENTRE) -> Measure:
    """Average what coherent gradients added to norms, or what the loss says of their size."""

    def measure(rows: Table) -> Estimate:
        about = {"stage": "balance", "optimizer": optimizer, "decay": DECAYS[optimizer][place]}
        chosen = select(rows, **about, component=part, kind=tuple(kinds))
        return over_seeds(list(by_seed(chosen, column(chosen, "value")).values()), "mean")

    return measure


def imbalance(optimizer: str, one: str, other: str) -> Measure:
    """Compare the pushes on two kinds: their difference over the sum of their sizes."""

    def measure(rows: Table) -> Estimate:
        about = {"stage": "balance", "optimizer": optimizer, "component": "push"}
        chosen = select(rows, **about, decay=DECAYS[optimizer][CENTRE])
        sums = [
            by_seed(part, column(part, "value"))
            for part in (select(chosen, kind=kind) for kind in (one, other))
        ]
        found = [(sums[0][k] - sums[1][k]) / (abs(sums[0][k]) + abs(sums[1][k])) for k in sums[0]]
        return over_seeds(found, "mean imbalance")

    return measure


# --- data against settings ------------------------------------------------------------------------


def variance_ratio(parts: Sequence[str], kinds: Sequence[str] = MATRICES) -> Measure:
    """Measure the log of the variance that settings cause over that which texts cause.

    Of a two-way table, with the residue's share subtracted from each and a hundredth of the whole
    as the least; the interval is Student's over seeds.
    """

    def measure(rows: Table) -> Estimate:
        chosen = final(select(rows, stage="data", component=tuple(parts), kind=tuple(kinds)))
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


def variance_shares(
    rows: Table, parts: Sequence[str], kinds: Sequence[str] = MATRICES
) -> tuple[float, float, float, float]:
    """Return the shares that settings, texts, both together and seeds have in the variance.

    Of a table of settings x texts with seeds in its cells, matrix by matrix and part by part.
    """
    chosen = final(select(rows, stage="data", component=tuple(parts), kind=tuple(kinds)))
    total = np.zeros(4)
    for matrix in chosen.by("matrix").values():
        for part in matrix.by("component").values():
            cells_ = {
                (rate, text): cell
                for rate, runs in part.by("rate").items()
                for text, cell in runs.by("text").items()
            }
            rates, texts = (sorted({key[k] for key in cells_}, key=str) for k in (0, 1))
            values = np.array(
                [[column(cells_[rate, text], "value") for text in texts] for rate in rates]
            )
            total += crossed_components(values)
    settings, texts_, both, rest = (float(each) for each in total / total.sum())
    return settings, texts_, both, rest


def crossed_components(values: Floats) -> Floats:
    """Estimate the variances due to rows, columns, their interaction and repetition.

    ``values`` has the shape rows x columns x repetitions; mean squares are those of the analysis
    of variance, and what chance adds to each is taken away.

    >>> table = np.array([[[0.0, 0.0], [0.0, 0.0]], [[2.0, 2.0], [2.0, 2.0]]])
    >>> crossed_components(table).tolist()
    [2.0, 0.0, 0.0, 0.0]
    """
    r, c, n = values.shape
    cell, row, col = values.mean(2), values.mean((1, 2)), values.mean((0, 2))
    mean = values.mean()
    rest = float(((values - cell[..., None]) ** 2).sum() / (r * c * (n - 1)))
    crossed = cell - row[:, None] - col[None] + mean
    both = n * float((crossed**2).sum()) / ((r - 1) * (c - 1))
    rows_ = n * c * float(row.var(ddof=1))
    columns = n * r * float(col.var(ddof=1))
    return np.array([(rows_ - both) / (n * c), (columns - both) / (n * r), (both - rest) / n, rest])


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


def departure(scaling: str, kind: str, width: int) -> Measure:
    """Measure how far the gap of a kind's norm at one width is from its mean at lesser widths."""

    def measure(rows: Table) -> Estimate:
        about = {"stage": "width", "scaling": scaling, "component": "log_norm", "kind": kind}
        chosen = final(select(rows, **about))
        found = []
        for runs in chosen.by("seed").values():
            gaps = {
                each: float((column(r, "value") - column(r, "ghost")).mean())
                for each, r in runs.by("width").items()
            }
            lesser = [value for each, value in gaps.items() if each < width]
            found.append(gaps[width] - float(np.mean(lesser)))
        return over_seeds(found, "mean departure")

    return measure


# --- checkpoints ----------------------------------------------------------------------------------


def file_gap(null: str, parts: Sequence[str], **where: Any) -> Measure:
    """Measure how far parts of checkpoints' matrices lie from a null; matrices are the sample."""

    def measure(rows: Table) -> Estimate:
        chosen = select(rows, stage="file", component=tuple(parts), **where)
        known = [value is not None for value in chosen.rows[null].to_pylist()]
        chosen = Table.of(chosen.rows.filter(known))
        names = [
            f"{a} {b}"
            for a, b in zip(*(chosen.rows[k].to_pylist() for k in ("model", "matrix")), strict=True)
        ]
        apart = column(chosen, "value") - column(chosen, null)
        means = [float(apart[np.asarray(names) == name].mean()) for name in sorted(set(names))]
        return over_seeds(means, "mean gap")

    return measure


# --- claims ---------------------------------------------------------------------------------------


ANSWERS = ("W1(b)",)
FILES = ("W1(c)", "Q7")
HALF_TO_TWICE = Between(-math.log(2), math.log(2))
ONE_FOR_ONE = Between(0.8, 1.2)
MAIN = ("log_norm", "log_sigma_1", "log_sigma_50", "log_sigma_10")
SMALL_LOSS = 0.02  # nats a character: half of what half the norm costs under AdamW in the pilot
LEARNERS = ("AdamW", "Muon")


def slopes_of(optimizers: Sequence[str], over: str, on: str = "ghost") -> dict[str, Measure]:
    """Measure the slopes of norm, first, median and lower singular value."""
    return {f"({part}, {o})": slopes_over(o, part, over, on) for o in optimizers for part in MAIN}


def by_group(optimizer: str, groups: Sequence[str], **more: Any) -> dict[str, Measure]:
    """Measure the gap of groups of parts."""
    return {f"({group})": gap(optimizer, GROUPS[group], **more) for group in groups}


CLAIMS = (
    Claim(
        "unlearned.above",
        "The norms of query and key are learned: under AdamW and Muon they end more than a "
        "tenth above what noise alone would have made.",
        "Velikanov et al. 2026; R W1(b)",
        measures={
            "gaps": by_kind(LEARNERS, ("query", "key"), GROUPS["norm"]),
            "sgd": by_kind(("SGD",), ("query", "key"), GROUPS["norm"]),
        },
        expect={"gaps": Above(MARGIN)},
        explain="The gap to the ghosts, in natural logarithms, is {gaps:+.2f}. Under SGD it is "
        "{sgd:+.2f} (n = {gaps.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.below",
        "Under AdamW the norms of value, output, up and down are held below what noise alone "
        "would have made.",
        "Velikanov et al. 2026; R W1(b)",
        measures={
            "gaps": by_kind(("AdamW",), ("value", "output", "up", "down"), GROUPS["norm"]),
            "others": by_kind(("Muon", "SGD"), ("value", "output", "up", "down"), GROUPS["norm"]),
        },
        expect={"gaps": Below(0)},
        explain="The gap to the ghosts, in natural logarithms, is {gaps:+.2f}. Under the other "
        "optimizers it is {others:+.2f} (n = {gaps.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.level",
        "Noise and decay set the level of every kind of matrix: under AdamW and Muon the norm "
        "is within a factor of two of what noise alone would have made.",
        "Velikanov et al. 2026",
        measures={"gaps": by_kind(LEARNERS, MATRICES, GROUPS["norm"])},
        expect={"gaps": HALF_TO_TWICE},
        explain="The gap to the ghosts, in natural logarithms, is {gaps:+.2f} (n = {gaps.n} "
        "seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.heads",
        "QK (what a head compares) is learned: under every optimizer its largest singular "
        "value is beyond noise.",
        "R W1(b)",
        measures={"gaps": by_kind(OPTIMIZERS, ("QK",), ("log_sigma_1",))},
        expect={"gaps": Above(MARGIN)},
        explain="The gap to the ghosts, in natural logarithms, is {gaps:+.2f} (n = {gaps.n} "
        "seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.bulk",
        "The bulk of the spectrum follows its matrix and is no part of its own: under AdamW "
        "the bulk ends above noise in query and key, and below noise in up and down.",
        "P 1 (open question)",
        measures={
            "above": by_kind(("AdamW",), ("query", "key"), GROUPS["bulk"]),
            "below": by_kind(("AdamW",), ("up", "down"), GROUPS["bulk"]),
            "others": by_kind(("AdamW",), ("value", "output"), GROUPS["bulk"]),
        },
        expect={"above": Above(MARGIN), "below": Below(0)},
        explain="The gap to the ghosts, in natural logarithms, is {above:+.2f}, {below:+.2f}, "
        "{others:+.2f} (n = {above.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.kappa",
        "Under AdamW the condition number is what noise alone would have made, on average over "
        "matrices and within a factor of 1.5.",
        "P 6",
        measures={"adamw": gap("AdamW", ("log_kappa",))},
        expect={"adamw": Between(-KAPPA_MARGIN, KAPPA_MARGIN)},
        explain="The mean gap of log kappa to the ghosts is {adamw:+.2f} (n = {adamw.n} seeds).",
        answers=("W1(b)", "W9(d)"),
    ),
    Claim(
        "unlearned.bottom",
        "Under Muon and SGD the lower end of the spectrum is pressed below what noise alone "
        "would have made, and so kappa is raised above it.",
        "P 4.9; P 6",
        measures={
            "lower": {o: gap(o, GROUPS["bottom"]) for o in ("Muon", "SGD")},
            "kappa": {o: gap(o, ("log_kappa",)) for o in ("Muon", "SGD")},
        },
        expect={"lower": Below(-MARGIN), "kappa": Above(0)},
        explain="The mean gap of the lower end to the ghosts is {lower:+.2f}. The mean gap of log "
        "kappa is {kappa:+.2f} (n = {lower.n} seeds).",
        answers=("W1(b)", "W9(d)"),
    ),
    Claim(
        "unlearned.decay",
        "Decay sets every part of the spectrum by way of noise: if decay changes, norm, top, "
        "median and lower end change as much as in their ghosts (copies trained on noise "
        "alone), under every optimizer.",
        "Velikanov et al. 2026",
        measures={"slopes": slopes_of(OPTIMIZERS, "decays")},
        expect={"slopes": ONE_FOR_ONE},
        explain="The slope of the trained part on that of its ghosts is {slopes:.2f} (n = "
        "{slopes.n} seeds).",
        answers=("W1(b)", "W9(d)"),
    ),
    Claim(
        "unlearned.rate",
        "The learning rate, too, sets every part of the spectrum by way of noise: if the rate "
        "changes, norm, top, median and lower end change as much as in their ghosts (copies "
        "trained on noise alone), under AdamW and Muon.",
        "Velikanov et al. 2026",
        measures={"slopes": slopes_of(LEARNERS, "rates")},
        expect={"slopes": ONE_FOR_ONE},
        explain="The slope of the trained part on that of its ghosts is {slopes:.2f} (n = "
        "{slopes.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.knob",
        "At the same product of rate and decay every part of the spectrum is proportional to "
        "the rate, as the law of noise says, under AdamW and Muon.",
        "Velikanov et al. 2026",
        measures={"powers": slopes_of(LEARNERS, "products", "rate")},
        expect={"powers": ONE_FOR_ONE},
        explain="Each part grows with this power of the rate: {powers:.2f} (n = {powers.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.law",
        "The covariances of gradients predict to ten per cent what noise makes of norm, top "
        "and bulk, without a free parameter, under AdamW and Muon.",
        "R W1(b)",
        measures={
            o.lower(): by_group(o, ("norm", "top", "bulk"), null="shaped", of="ghost")
            for o in LEARNERS
        }
        | {"bottom": {o: gap(o, GROUPS["bottom"], null="shaped", of="ghost") for o in OPTIMIZERS}},
        expect={o.lower(): WITHIN for o in LEARNERS},
        explain="Ghosts less prediction, in natural logarithms: under AdamW {adamw:+.2f}; under "
        "Muon {muon:+.2f}; at the lower end {bottom:+.2f} (n = {adamw.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.no-product",
        "Under SGD, which whitens nothing, covariances of rows and columns do not predict what "
        "noise does: top and bulk lie below the prediction by more than a tenth.",
        "R W1(b)",
        measures={"sgd": by_group("SGD", ("top", "bulk"), null="shaped", of="ghost")},
        expect={"sgd": Below(-MARGIN)},
        explain="Ghosts less prediction, in natural logarithms: {sgd:+.2f} (n = {sgd.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.forgotten",
        "The size of the start is forgotten: under AdamW and Muon every part of the spectrum "
        "is more than twice what decay has left of the start.",
        "P 4.9; R W9",
        measures={o.lower(): by_group(o, tuple(GROUPS), null="start") for o in LEARNERS},
        expect={o.lower(): Above(math.log(2)) for o in LEARNERS},
        explain="Trained less start, in natural logarithms: under AdamW {adamw:+.2f}; under Muon "
        "{muon:+.2f} (n = {adamw.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.start",
        "Under SGD the lower end of the spectrum is that of the start, shrunk by decay, within "
        "a factor of 1.5.",
        "P 4.9; R W9",
        measures={"sgd": gap("SGD", GROUPS["bottom"], null="start")},
        expect={"sgd": Between(-KAPPA_MARGIN, KAPPA_MARGIN)},
        explain="The lower end lies {sgd:+.2f} from the start that decay has left, in natural "
        "logarithms (n = {sgd.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.directions",
        "The directions of the start are not forgotten: training rebuilds what decays along "
        "the old directions, so that under every optimizer the cosine with the start exceeds "
        "that of the ghosts (copies trained on noise alone) by 0.05.",
        "P 4.9; R W9",
        measures={"cosines": {o: gap(o, ("alignment",)) for o in OPTIMIZERS}},
        expect={"cosines": Above(0.05)},
        explain="The cosine with the start exceeds that of the ghosts by {cosines:.2f} (n = "
        "{cosines.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.memory",
        "The memory of the start's size is that of noise: norm, top and bulk remember as much "
        "as their ghosts (copies trained on noise alone), to a tenth, where rate times decay "
        "sums to one.",
        "R W9",
        measures={
            "excess": {
                f"({group}, {o})": excess_memory(o, GROUPS[group])
                for o in OPTIMIZERS
                for group in ("norm", "top", "bulk")
            },
            "memory": {o: memory(o, GROUPS["norm"], "value") for o in OPTIMIZERS},
        },
        expect={"excess": WITHIN},
        explain="The norm grows with the size of the start with the power {memory:.2f}. The power "
        "less that of the ghosts is {excess:+.2f} (n = {excess.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.pairs",
        "What is learned of a norm belongs to a block of the network and not to one matrix: "
        "under SGD gradients add as much to the squared norm of query as to that of key, and "
        "as much to that of value as to that of output, to a tenth.",
        "Velikanov et al. 2026",
        measures={
            "pairs": {
                f"({one}, {other})": imbalance("SGD", one, other)
                for one, other in (("query", "key"), ("value", "output"))
            },
            "perceptron": imbalance("SGD", "up", "down"),
            "adamw": {
                f"({one}, {other})": imbalance("AdamW", one, other)
                for one, other in (("query", "key"), ("value", "output"), ("up", "down"))
            },
        },
        expect={"pairs": WITHIN},
        explain="The difference of what the two gain, over the sum of the two sizes, is "
        "{pairs:+.2f}. For up and down it is {perceptron:+.2f}. Under AdamW it is {adamw:+.2f} "
        "(n = {pairs.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.radial",
        "A norm is above noise where a larger norm would lower the loss, and below noise where "
        "a smaller one would: at the end of training under AdamW the loss of held-out text "
        "falls with the size of query and key, and rises with that of value, output, up and "
        "down.",
        "Velikanov et al. 2026",
        measures={
            "above": {f"({kind})": balanced("AdamW", "radial", (kind,)) for kind in MATRICES[:2]},
            "below": {f"({kind})": balanced("AdamW", "radial", (kind,)) for kind in MATRICES[2:]},
            "sgd": {f"({kind})": balanced("SGD", "radial", (kind,)) for kind in MATRICES},
        },
        expect={"above": Below(0), "below": Above(0)},
        explain="With the logarithm of the size the loss changes by {above:+.4f}, {below:+.4f} "
        "nats a character. Under SGD it changes by {sgd:+.4f} (n = {above.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.norm-adamw",
        "Under AdamW a norm of a quarter, half or four times the trained one costs loss.",
        "Velikanov et al. 2026",
        measures={"levels": levels("AdamW", "norm", (0.25, 0.5, 4.0))},
        expect={"levels": Above(0)},
        explain="With the norm held at a multiple of what it was, the loss differs from that at a "
        "multiple of one by {levels:+.4f} (nats a character, paired seeds, n = {levels.n}).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.twice-adamw",
        "Under AdamW twice the trained norm lowers the loss.",
        "Velikanov et al. 2026",
        measures={"levels": levels("AdamW", "norm", (2.0,))},
        expect={"levels": Below(0)},
        explain="With the norm held at a multiple of what it was, the loss differs from that at a "
        "multiple of one by {levels:+.4f} (nats a character, paired seeds, n = {levels.n}).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.norm-muon",
        "Under Muon a norm of a quarter or four times the trained one costs loss.",
        "Velikanov et al. 2026",
        measures={
            "levels": levels("Muon", "norm", (0.25, 4.0)),
            "near": levels("Muon", "norm", (0.5, 2.0)),
        },
        expect={"levels": Above(0)},
        explain="With the norm held at a multiple of what it was, the loss differs from that at a "
        "multiple of one by {levels:+.4f}, {near:+.4f} (nats a character, paired seeds, n = "
        "{levels.n}).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.tail",
        "Under AdamW the size of the lower half of the spectrum does not matter: at half or twice "
        "its value the loss is the same to 0.02 nats a character.",
        "P 1 (open question)",
        measures={
            "levels": levels("AdamW", "tail", (0.5, 2.0)),
            "far": levels("AdamW", "tail", (0.25, 4.0)),
        },
        expect={"levels": Between(-SMALL_LOSS, SMALL_LOSS)},
        explain="With each value of the lower half held at a multiple of what it was, the loss "
        "differs from that at a multiple of one by {levels:+.4f}, {far:+.4f} (nats a character, "
        "paired seeds, n = {levels.n}).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.shape",
        "Shape matters at a given scale: under AdamW, with every norm as it was, a spectrum "
        "with the root of the trained kappa lowers the loss, and a spectrum with the square of "
        "the trained kappa raises it.",
        "P 1 (open question)",
        measures={
            "flatter": levels("AdamW", "shape", (0.5,)),
            "steeper": levels("AdamW", "shape", (2.0,)),
            "flat": levels("AdamW", "shape", (0.0,)),
            "muon": levels("Muon", "shape", (0.5, 2.0)),
        },
        expect={"flatter": Below(0), "steeper": Above(0)},
        explain="With the singular values held at a power of what they were, the loss differs "
        "from that at a power of one by {flatter:+.4f}, {steeper:+.4f}, {flat:+.4f}, and under "
        "Muon by {muon:+.4f} (nats a character, paired seeds, n = {flatter.n}).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.share",
        "The lower half of the spectrum is too small at any scale: under AdamW, with every "
        "norm as it was and the upper half free, the loss falls if the lower half has four "
        "times its size relative to the upper one.",
        "P 1 (open question)",
        measures={
            "levels": levels("AdamW", "share", (4.0,)),
            "others": levels("AdamW", "share", (0.25, 0.5, 2.0)),
            "muon": levels("Muon", "share", (4.0,)),
        },
        expect={"levels": Below(0)},
        explain="With the relative size of the lower half held at a multiple of what it was, the "
        "loss differs from that at a multiple of one by {levels:+.4f}, {others:+.4f}, and under "
        "Muon by {muon:+.4f} (nats a character, paired seeds, n = {levels.n}).",
        answers=ANSWERS,
    ),
    *(
        Claim(
            f"unlearned.free-{held}",
            f"Freeing {what} lowers the loss, under AdamW and under Muon.",
            "Velikanov et al. 2026",
            measures={o.lower(): loss_of_holding(o, held, 1.0, ("nothing", 1.0)) for o in LEARNERS},
            expect={"adamw": Below(0), "muon": Below(0)},
            explain="The loss differs by {adamw:+.4f} nats a character under AdamW and by "
            "{muon:+.4f} under Muon (paired seeds, n = {adamw.n}).",
            answers=ANSWERS,
        )
        for held, what in (
            ("multipliers", "row and column norms"),
            ("values", "singular values"),
            ("temperature", "the temperature of heads"),
        )
    ),
    Claim(
        "unlearned.data",
        "At equal loss the settings move norm, top and bulk more than the text does.",
        "R W1(b)",
        measures={group: variance_ratio(GROUPS[group]) for group in GROUPS}
        | {"heads": variance_ratio(("log_sigma_1",), ("QK",))},
        expect={"norm": Above(0), "top": Above(0), "bulk": Above(0)},
        explain="The logarithm of the variance that settings cause over that which texts cause is "
        "{norm:+.2f} for the norm, {top:+.2f} for the top, {bulk:+.2f} for the bulk and "
        "{bottom:+.2f} for the bottom of the spectrum. For the largest singular value of QK it is "
        "{heads:+.2f} (n = {norm.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.width",
        "The wider the network, the nearer its spectra are to what noise would have made, "
        "under standard scaling and under muP.",
        "R W2; Yang et al. 2021",
        measures={name: growth_with_width(name) for name in ("standard", "mup")},
        expect={"standard": Below(0), "mup": Below(0)},
        explain="With each doubling of the width the mean distance of singular values from their "
        "ghosts changes by {standard:+.3f}, under muP by {mup:+.3f} (n = {standard.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.mup",
        "Under muP the learned factor on the norm of a kind of matrix is the same at every "
        "width: to a tenth, the gap to noise at 256 is its mean at 32, 64 and 128.",
        "R W2; Yang et al. 2021",
        measures={
            scaling: {f"({kind})": departure(scaling, kind, 256) for kind in MATRICES}
            for scaling in ("mup", "standard")
        },
        expect={"mup": WITHIN},
        explain="At 256 the gap departs from that mean by {mup:+.2f}. Under standard scaling it "
        "departs by {standard:+.2f} (n = {mup.n} seeds).",
        answers=ANSWERS,
    ),
    Claim(
        "unlearned.file-bulk",
        "In public checkpoints the bulk of the spectrum is, to ten per cent, that of noise "
        "with the same row and column norms.",
        "R W1(c), Q7",
        measures={"every": file_gap("shaped", GROUPS["bulk"])},
        expect={"every": WITHIN},
        explain="The bulk lies {every:+.2f} from that of noise, in natural logarithms (n = "
        "{every.n} matrices).",
        answers=FILES,
    ),
    Claim(
        "unlearned.file-top",
        "In public checkpoints the largest singular value is larger than that of noise with "
        "the same row and column norms.",
        "R W1(c), Q7",
        measures={"every": file_gap("shaped", ("log_sigma_1",))},
        expect={"every": Above(MARGIN)},
        explain="The largest singular value lies {every:+.2f} above that of noise, in natural "
        "logarithms (n = {every.n} matrices).",
        answers=FILES,
    ),
    Claim(
        "unlearned.file-decay",
        "The published rate, decay and steps of a Llama predict the norms of its matrices "
        "within a factor of 1.5.",
        "R W1(c), Q7",
        measures={
            "norm": file_gap("white", GROUPS["norm"], model="stories15m"),
            "start": file_gap("start", GROUPS["norm"], model="stories15m"),
        },
        expect={"norm": Between(-KAPPA_MARGIN, KAPPA_MARGIN)},
        explain="The norms lie {norm:+.2f} from the law of noise and decay, and {start:+.2f} from "
        "the start, in natural logarithms (n = {norm.n} matrices).",
        answers=FILES,
    ),
)
