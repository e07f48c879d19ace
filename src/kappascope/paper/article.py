"""The article that opens the report and is docs/findings.md: its text and its five figures.

The text is ``article.md``, whose numbers come from claims (:mod:`kappascope.lab.article`). Each
figure reads the rows of all experiments and studies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope.lab import drawing
from kappascope.lab.article import Article
from kappascope.lab.drawing import COLOURS, FAINT, INK, SPARE, STYLE, tell
from kappascope.lab.experiment import discover
from kappascope.lab.heads import excess_by_seed, multiples_by_rate
from kappascope.lab.measures import KAPPA, ROW_NORMS, select
from kappascope.lab.statistics import median
from kappascope.lab.table import Floats, Table
from kappascope.lab.verdicts import figure_counts, verdict_counts
from kappascope.paper.review import of_paper, review_counts
from kappascope.text import Record, number
from kappascope.theory import (
    Relaxation,
    disturbance,
    floor_ratio,
    kappa_error_quantile,
    log_kappa_rate,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Draw = Callable[["Axes", Table], None]

SET = 15  # trials whose mean the paper prints
PRINTED = {32: 0.27, 128: 1.59, 512: 34.9}  # means of kappa's error in Section 4.1 and the slides
LINE: Any = {"linewidth": 1.8}
THEORY: Any = {"color": INK, "linestyle": (0, (4, 2)), "linewidth": 1.2}
SMALL: Any = {"fontsize": 8}


def single(draw: Draw, rows: Table) -> Figure:
    """Draw one wide panel."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        draw(figure.add_subplot(), rows)
        return figure


def at_levels(
    axes: Axes, groups: Mapping[float, Floats], colour: str, name: str, level: str
) -> list[float]:
    """Draw medians with their exact intervals, which tell their numbers, by level; gives them."""
    estimates = {place: median(values) for place, values in groups.items()}
    values = [each.value for each in estimates.values()]
    axes.plot(list(estimates), values, color=colour, marker="o", markersize=4, label=name, **LINE)
    for place, each in estimates.items():
        axes.vlines(place, *each.interval or (each.value,) * 2, color=colour, lw=3, alpha=0.35)
        text = f"{name}, {level} {place:g}: median {each:.3g}, n = {each.n}"
        tell(axes, place, each.value, text)
    return values


def lottery(axes: Axes, rows: Table) -> None:
    """Means of fifteen trials, the median of all and theory's, by size: why means are a lottery."""
    trials = select(rows, experiment="e1", stream="own", component=KAPPA).by("size")
    sizes = np.array(list(trials), float)
    for size, part in trials.items():
        values = part.values()
        sets = values[: len(values) // SET * SET].reshape(-1, SET).mean(axis=1)
        places = size * np.exp(0.25 * (drawing.around(0, sets)))
        axes.plot(places, sets, ".", color=COLOURS[KAPPA], markersize=4, alpha=0.5)
        least, most = (number(float(end)) for end in (sets.min(), sets.max()))
        text = f"size {size}: {len(sets)} means of {SET} trials, from {least} to {most}"
        tell(axes, size, float(np.median(sets)), text)
    everything = {float(size): part.values() for size, part in trials.items()}
    middle = at_levels(axes, everything, INK, "all trials", "size")
    law = [kappa_error_quantile(0.5, disturbance(Relaxation(int(d)), step=200)) for d in sizes]
    axes.plot(sizes, law, **{**THEORY, "color": SPARE[0]})
    axes.plot(list(PRINTED), list(PRINTED.values()), **drawing.STAR, linestyle="")
    drawing.entitle(axes, "", "size d", "relative error of κ after 200 steps")
    drawing.logarithmic(axes, "y")
    _ticks(axes, sizes)
    texts = {
        "★ printed means of 15 trials": INK,
        "• means of 15 other trials": COLOURS[KAPPA],
        "— median of all": INK,
        "- - theory's median": SPARE[0],
    }
    drawing.key(axes, texts.items())
    axes.set_ylim(top=axes.get_ylim()[1] * 3, bottom=min(middle) / 4)


def relaxation(axes: Axes, rows: Table) -> None:
    """Errors of kappa and of the row norms against the step, with the closed forms."""
    size = 128
    e9 = select(rows, experiment="e9", stream="own", size=size)
    steps = np.unique(np.geomspace(1, 5000, 200).round())
    setting = Relaxation(size)
    kappa = np.array([kappa_error_quantile(0.5, disturbance(setting, step=t)) for t in steps])
    floor = kappa_error_quantile(0.5, disturbance(setting, step=5000)) / floor_ratio(size)
    norms = np.hypot([setting.mean(t) for t in steps], floor)
    for component, name, law in ((KAPPA, "κ", kappa), (ROW_NORMS, "row norms", norms)):
        chosen = e9.where(component=component)
        short = chosen.where(intervention=None).by("epoch")
        long = chosen.where(intervention="none").by("epoch")
        looks = {t: p for t, p in {**long, **short}.items() if t and (t < 20 or t % 100 == 0)}
        ordered = {float(t): looks[t].values() for t in sorted(looks)}
        at_levels(axes, ordered, COLOURS[component], name, "step")
        axes.plot(steps, law, **THEORY)
    drawing.entitle(axes, "", "step", "relative error, d = 128")
    drawing.logarithmic(axes, "x")
    drawing.logarithmic(axes, "y")
    axes.legend(frameon=False, loc="lower left", **SMALL)
    axes.annotate("closed forms", (steps[-1], kappa[-1] * 1.5), ha="right", **SMALL)


def depth(axes: Axes, rows: Table) -> None:
    """Kappa of products by depth, before training and at one overall error, with chance's slope."""
    own = {"experiment": "e7", "stream": "own", "intervention": "equal rate", "layer": 0}
    chosen = select(rows, **own, component=KAPPA)
    looks = {
        "untrained": (chosen.where(epoch=0), SPARE[0]),
        "trained to an overall error of 0.3": (chosen.where(level=0.3), SPARE[1]),
    }
    depths = np.array(sorted(chosen.by("depth")), float)
    for name, (part, colour) in looks.items():
        groups = {float(n): layers.values("value") for n, layers in part.by("depth").items()}
        at_levels(axes, groups, colour, name, "layers")
    target = float(np.median(chosen.where(epoch=0).values("target")))
    axes.axhline(target, color=FAINT, linewidth=1)
    axes.annotate("target", (depths[-1], target), va="bottom", ha="right", color=FAINT, **SMALL)
    first = float(np.median(chosen.where(epoch=0, depth=1).values("value")))
    chance = first * np.exp(log_kappa_rate(64) * (depths - 1))
    axes.plot(depths, chance, **THEORY)
    axes.annotate("random product", (depths[-1], chance[-1]), ha="right", va="bottom", **SMALL)
    drawing.entitle(axes, "", "layers", "κ of the product, d = 64")
    drawing.logarithmic(axes, "y")
    axes.set_xticks(depths.astype(int))
    axes.legend(frameon=False, loc="upper left", **SMALL)


def scale(axes: Axes, rows: Table) -> None:
    """The share of the row norms' error that multipliers take, against the target's scale."""
    own = {"experiment": "e6", "stream": "own", "pairing": "paired", "component": ROW_NORMS}
    chosen = select(rows, **own)
    norms = [norm for norm in chosen.by("norm") if norm]
    for (structure, part), colour in zip(
        chosen.where(norm=norms).by("structure").items(), SPARE, strict=False
    ):
        gains = {}
        for norm, at_norm in part.by("norm").items():
            arms = (at_norm.where(strategy=name) for name in ("multipliers", "standard"))
            ours, theirs = next(arms).paired(next(arms))
            gains[float(norm)] = 100 * (1 - ours / theirs)
        at_levels(axes, gains, colour, structure, "norm")
    drawing.entitle(axes, "", "Frobenius norm of the target, d = 64", "error taken, %")
    _ticks(axes, np.array(norms))
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, loc="lower right", **SMALL)


def heads(axes: Axes, rows: Table) -> None:
    """Kappa of QK in units of chance's, against the learning rate, for AdamW and Muon."""
    gpt = select(rows, experiment="gpt")
    for optimizer, colour in (("AdamW", SPARE[1]), ("Muon", SPARE[0])):
        by_rate = multiples_by_rate(gpt, "QK", optimizer)
        rates = np.array(list(by_rate), float)
        for rate, values in by_rate.items():
            axes.plot(np.full(len(values), rate), values, ".", color=colour, alpha=0.5)
            middle = float(np.median(values))
            tell(axes, rate, middle, f"{optimizer}, rate {rate:g}: {middle:.3g} times chance")
        medians = [float(np.median(values)) for values in by_rate.values()]
        axes.plot(rates, medians, color=colour, label=f"{optimizer}, QK", **LINE)
        seeds = excess_by_seed(gpt, "QK", optimizer=optimizer, stage="compare")
        best = float(select(gpt, stage="compare", optimizer=optimizer, correction="alone")
                     .rows["rate"][0].as_py())  # fmt: skip
        typical = [float(np.exp(np.median(values))) for values in seeds.values()]
        axes.plot(np.full(len(typical), best), typical, "D", color=colour, fillstyle="none")
    axes.axhline(1, **THEORY)
    drawing.entitle(axes, "", "learning rate", "κ of a head's QK, in units of chance's")
    drawing.logarithmic(axes, "y")
    tried = np.array(sorted(select(gpt, stage="tune").by("rate")))
    _ticks(axes, tried)
    axes.annotate("products of random factors", (tried[-1], 0.93), ha="right", va="top", **SMALL)
    axes.set_ylim(bottom=0.5)
    axes.legend(frameon=False, loc="upper left", **SMALL)


def _ticks(axes: Axes, places: Floats) -> None:
    """Mark these places on a logarithmic axis."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [f"{place:g}" for place in places])
    axes.minorticks_off()


def further_words(
    claims: Sequence[Record], figures: Sequence[Record], provenance: Mapping[str, Any]
) -> dict[str, str]:
    """Count claims, printed figures, items of the review and trials."""
    paper = [claim for claim in claims if of_paper(claim)]
    return {
        "paper_counts": verdict_counts(paper).replace("Of", "Of the paper's", 1),
        "own_counts": verdict_counts([claim for claim in claims if not of_paper(claim)]),
        "figure_counts": figure_counts(figures),
        "review_counts": review_counts(claims),
        "trials": f"{provenance.get('trials', 0):,}",
        "missing": missing_rows(claims),
    }


def missing_rows(claims: Sequence[Record]) -> str:
    """Name the experiments of which no row was judged, if there are any."""
    judged = {claim["experiment"] for claim in claims}
    absent = [page.id for page in discover().values() if page.id not in judged]
    return f"Rows of {', '.join(absent)} are missing here." if absent else ""


def template(name: str) -> str:
    """Read a template of this folder."""
    return files("kappascope.paper").joinpath(name).read_text(encoding="utf-8")


SUMMARY = Article(template("summary.md"), {}, further_words)
ARTICLE = Article(
    template("article.md"),
    {draw.__name__: partial(single, draw) for draw in (lottery, relaxation, depth, scale, heads)},
    further_words,
)
