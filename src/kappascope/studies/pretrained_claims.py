"""What the study of pretrained checkpoints decides.

All bounds were fixed before any of these numbers was seen. A pilot with two texts then showed that
the embedding decides what all matrices together lose, and that square and other matrices differ:
those parts are told beside the claims (``also``) and decide none; so is the split by what bf16
resolves, which came after a first run of one text. Where matrices are counted, the
interval treats them as a sample of the matrices of such networks; where texts are, of the texts
that this one network could be given.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from kappascope.claims import Above, Below, Claim, Measure
from kappascope.measures import select
from kappascope.statistics import (
    Estimate,
    Floats,
    Table,
    median,
    paired_difference,
    paired_ratio,
    proportion,
    rank_correlation,
)
from kappascope.studies.pretrained_changes import EQUAL
from kappascope.weights.roles import kind

KAPPA, DECILE = "condition_number", 0.1
PRODUCTS = ("QK", "OV")
SQUARE, WIDE = ("query", "key", "value", "output"), ("gate", "up", "down")
LLAMA, BERT = {"model": "stories15m", "text": "own"}, {"model": "minilm"}
ONE_BY_ONE = "int8 by row"


def of_matrices(found: Table, component: str, *columns: str, **where: Any) -> dict[str, list[Any]]:
    """Columns of the rows about single matrices, products of heads left out, in one order."""
    chosen = select(found, part="spectra", component=component, **where)
    names = ("model", "matrix", "kind", *columns)
    rows = chosen.rows.select(names).to_pylist()
    rows = sorted((r for r in rows if r["kind"] not in PRODUCTS), key=_which)
    return {name: [row[name] for row in rows] for name in names}


def _which(row: dict[str, Any]) -> tuple[str, str]:
    return row["model"], row["matrix"]


def matrices(component: str, column: str = "value", **where: Any) -> Measure:
    """The median over matrices."""
    return lambda found: median(_floats(of_matrices(found, component, column, **where)[column]))


def share(component: str, above: float, column: str, **where: Any) -> Measure:
    """The share of matrices with more than so much."""

    def measure(found: Table) -> Estimate:
        values = _floats(of_matrices(found, component, column, **where)[column])
        return proportion(int((values > above).sum()), len(values))

    return measure


def moved(resolved: float) -> Measure:
    """As :func:`share` of bf16 and 1 %, of the matrices whose kappa bf16 resolves, or does not."""

    def measure(found: Table) -> Estimate:
        error = _floats(of_matrices(found, "kappa_rounded", "error", change="bf16")["error"])
        chosen = _floats(of_matrices(found, "resolved", "value")["value"]) == resolved
        return proportion(int((error[chosen] > 0.01).sum()), int(chosen.sum()))

    return measure


def _floats(values: list[Any]) -> Floats:
    return np.array([np.nan if value is None else value for value in values], dtype=float)


def deeper(found: Table) -> Estimate:
    """The rank correlation of kappa with depth, within the matrices of a kind and model."""
    rows = of_matrices(found, KAPPA, "value", "depth", model=("stories15m", "minilm"))
    groups = [f"{model} {kind}" for model, kind in zip(rows["model"], rows["kind"], strict=True)]
    deep = [place for place, depth in enumerate(rows["depth"]) if depth is not None]
    kappa, depth = (_floats([rows[name][i] for i in deep]) for name in ("value", "depth"))
    return rank_correlation(depth, kappa, within=[groups[i] for i in deep])


def edges(found: Table) -> Estimate:
    """How many more e-folds of kappa come from below than from above what chance would give."""
    top, bottom = (
        np.log(_floats(of_matrices(found, name, "value")["value"])) for name in ("top", "bottom")
    )
    return paired_difference(-bottom, top)


def of_heads(found: Table) -> Estimate:
    """Kappa of the products of heads, in that of products of random factors."""
    chosen = select(found, part="spectra", component=KAPPA, kind=PRODUCTS).rows
    return paired_ratio(*(_floats(chosen[name].to_pylist()) for name in ("value", "target")))


def damage(change: str, model: Any = LLAMA, share: float = DECILE, scope: str = "all") -> Measure:
    """The median over texts of what a change costs: of the Llama's loss, or a cosine."""
    return lambda found: median(_harm(found, change, model, share, scope).values("value"))


def harms(ours: str, theirs: str, model: Any = LLAMA, scope: str = "all") -> Measure:
    """What one change costs in what another does, text by text."""

    def measure(found: Table) -> Estimate:
        arms = (_harm(found, change, model, DECILE, scope) for change in (ours, theirs))
        return paired_ratio(*next(arms).paired(next(arms), "value"))

    return measure


def _harm(found: Table, change: str, model: Any, share: float, scope: str) -> Table:
    component = "rise" if model == LLAMA else "distance"
    where = {**model, "change": change, "share": share, "scope": scope}
    return select(found, component=component, part="whole", **where)


def held(component: str) -> Measure:
    """The share of the embedding's energy that its smallest tenth of values holds."""
    where = {"model": LLAMA["model"], "change": "smallest", "scope": "embedding", "part": "whole"}
    return lambda found: median(select(found, component=component, **where).values("value"))


def known(measure: Measure) -> Measure:
    """For ``also``: what was not run is no reason to say nothing."""

    def told(found: Table) -> Estimate:
        try:
            return measure(found)
        except (LookupError, KeyError) as absent:
            return NotRun(math.nan, None, None, 0, "estimate", str(absent))

    return told


@final
@dataclass(frozen=True)
class NotRun(Estimate):
    """In the place of an estimate whose trials are not part of this run."""

    def __format__(self, digits: str) -> str:
        return "(not run)"


def suffers(predictor: str, model: Any = LLAMA, **alike: bool) -> Measure:
    """The rank correlation over matrices of a predictor with what rounding that one costs."""

    def measure(found: Table) -> Estimate:
        cost = singly(found, model, "rise" if model == LLAMA else "distance")
        if predictor == "energy":
            told = singly(found, {"model": model["model"]}, "energy")
        else:
            rows = of_matrices(found, predictor, "value", model=model["model"])
            told = dict(zip(rows["matrix"], rows["value"], strict=True))
        names = sorted(cost)
        pairs = _floats([told[name] for name in names]), [cost[name] for name in names]
        return rank_correlation(*pairs, within=list(map(kind, names)) if alike else None)

    return measure


def singly(found: Table, where: Any, component: str) -> dict[str, float]:
    """The mean over texts of what the change of one matrix does, by its name."""
    chosen = select(found, part="single", change=ONE_BY_ONE, component=component, **where)
    return {name: float(np.mean(rows.values("value"))) for name, rows in chosen.by("scope").items()}


CLAIMS = tuple(replace(claim, also=tuple(map(known, claim.also))) for claim in (
    Claim(
        "pretrained.severe",
        "Matrices that people trained are far worse conditioned than random ones of their shape: "
        "log kappa is more than two deviations of chance above its mean.",
        "P 5.1; S; R Q7",
        matrices("null_z"), Above(2),
        "The median matrix of five networks lies {0:.2g} deviations above (n = {0.n}). Those of "
        "attention, nearly all square, lie {1:.2g} above (n = {1.n}), where chance alone gives a "
        "large kappa; those of the feed-forward layers, whose kappa is small, {2:.2g} (n = {2.n}).",
        also=(matrices("null_z", kind=SQUARE), matrices("null_z", kind=WIDE)),
    ),
    Claim(
        "pretrained.bottom-heavy",
        "What kappa exceeds chance by comes from the smallest singular value more than from the "
        "largest.",
        "P 3, 5.1",
        edges, Above(0),
        "In the median matrix the bottom adds {0:.2f} e-folds more than the top (n = {0.n}). At "
        "equal Frobenius norm the largest value is {1:.2f} times that of chance, the median one "
        "{2:.2f} times, the smallest {3:.2g} times.",
        also=tuple(map(matrices, ("top", "middle", "bottom"))),
    ),
    Claim(
        "pretrained.depth-grows",
        "Deeper layers are worse conditioned.",
        "P 4.7, 5.1; S",
        deeper, Above(0),
        "Within the matrices of one kind and network kappa and depth have a rank correlation of "
        "{0:.2f} (n = {0.n}).",
    ),
    Claim(
        "pretrained.products",
        "What a head of attention uses, the products QK and OV, is worse conditioned than products "
        "of random factors.",
        "R Q7; P 5.1",
        of_heads, Above(1),
        "The median product has {0:.3g} times their kappa (n = {0.n} heads, QK and OV). Gains of "
        "the norms before them are not folded in, and the Llama's QK is that of equal positions.",
    ),
    Claim(
        "pretrained.bottom-matters",
        "The smallest singular values matter: without the smallest tenth in every matrix the "
        "language model's loss is more than 1 % higher.",
        "P 1, 5.1",
        damage("smallest"), Above(0.01),
        "It is higher by a share of {0:.2g} (n = {0.n} sets of texts); with the embedding left "
        "whole by {1:.2g}. The smallest tenth of the embedding holds a share of {2.value:.2g} of "
        "its energy, but of {3.value:.2g} over the tokens that are spoken: most never are.",
        also=(damage("smallest", scope="layers"), held("energy"), held("energy_spoken")),
    ),
    Claim(
        "pretrained.bottom-count",
        "The smallest tenth of the singular values matters less than as many of the bulk.",
        "practice of low-rank compression",
        harms("smallest", "bulk"), Below(1),
        "It costs the Llama {0:.3g} times what a tenth about the median costs (n = {0.n}), MiniLM "
        "{1:.3g} times; in their layers, the embedding left whole, {2:.3g} and {3:.3g} times.",
        also=(harms("smallest", "bulk", BERT), harms("smallest", "bulk", scope="layers"),
              harms("smallest", "bulk", BERT, "layers")),
    ),
    Claim(
        "pretrained.bottom-energy",
        "Energy for energy, the smallest singular values, on which kappa hangs, matter more than "
        "the bulk.",
        "P 5.1",
        harms("smallest", f"bulk {EQUAL}"), Above(1),
        "They cost the Llama {0:.3g} times what bulk values of equal energy cost (n = {0.n}), "
        "MiniLM {1:.3g} times; in their layers, the embedding left whole, {2:.3g} and {3:.3g} "
        "times, and there {4:.3g} and {5:.3g} times what random noise of equal energy costs.",
        also=(harms("smallest", f"bulk {EQUAL}", BERT),
              *(harms("smallest", f"{what} {EQUAL}", model, "layers")
                for what in ("bulk", "noise") for model in (LLAMA, BERT))),
    ),
    Claim(
        "pretrained.rounding-kappa",
        "Rounding to bf16 changes the kappa of most matrices by more than 1 %.",
        "R Q7",
        share("kappa_rounded", 0.01, "error", change="bf16"), Above(0.5),
        "It does of a share of {0:.2f} (n = {0.n} matrices): of {1.value:.2f} of the {1.n} whose "
        "kappa bf16 is said to resolve, of {2.value:.2f} of the {2.n} others. Int8 with a scale a "
        "row does of {3:.2f}, int4 of {4:.2f}.",
        also=(moved(1.0), moved(0.0),
              *(share("kappa_rounded", 0.01, "error", change=what)
                for what in ("int8 by row", "int4 by row"))),
    ),
    Claim(
        "pretrained.interval",
        "The interval that is given for the kappa of a matrix in bf16 covers what it was in fp32.",
        "kappascope's own",
        share("covered", 0.5, "value"), Above(0.95),
        "It does for a share of {0:.3f} of the matrices (n = {0.n}).",
    ),
    Claim(
        "pretrained.rounding-loss",
        "Rounding every matrix to int8 with a scale a row costs less than 1 % of the loss.",
        "practice of quantization",
        damage(ONE_BY_ONE, share=0.0), Below(0.01),
        "The Llama's loss rises by a share of {0:.2g} (n = {0.n}); with bf16 {1:.2g}, with one "
        "scale a matrix {2:.2g}, with int4 {3:.2g}.",
        also=tuple(damage(what, share=0.0) for what in ("bf16", "int8", "int4 by row")),
    ),
    Claim(
        "pretrained.kappa-predicts",
        "Matrices with a larger kappa suffer more from rounding: one at a time, in both networks.",
        "P 5.1; S",
        (suffers(KAPPA), suffers(KAPPA, BERT)), (Above(0), Above(0)),
        "Kappa and the cost of rounding that matrix to int8 have a rank correlation of {0:.2f} "
        "(n = {0.n}) in the Llama, {1:.2f} (n = {1.n}) in MiniLM; among matrices of one kind "
        "{2:.2f} and {3:.2f}. With the energy of the rounding in place of kappa it is {4:.2f} and "
        "{5:.2f}.",
        also=(suffers(KAPPA, alike=True), suffers(KAPPA, BERT, alike=True),
              suffers("energy"), suffers("energy", BERT)),
    ),
))  # fmt: skip
