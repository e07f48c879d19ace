"""The figure of the study of the character GPT: what is gained, for what, and how it came."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope import drawing
from kappascope.drawing import FAINT, INK
from kappascope.figures import Panel, sheet
from kappascope.measures import select
from kappascope.series import SPARE
from kappascope.statistics import Table
from kappascope.studies.gpt_claims import ARMS, HIDDEN, LOG, REMEDIES, kappas, losses, runs, tuned
from kappascope.studies.gpt_exhibits import milliseconds, on_the_way, ran, there

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = dict(zip(("alone", *REMEDIES), ("#333333", *SPARE), strict=False))
LINES: dict[str, Any] = {"AdamW": "-", "Muon": (0, (3, 1.5))}
MARKERS = {"AdamW": "o", "Muon": "^"}


def pareto(x: str) -> Panel:
    """The validation loss of every run against what its arm costs, or against its largest kappa."""

    def draw(axes: Axes, found: Table, spectra: Table) -> str:
        title, label = PARETO[x]
        drawing.entitle(axes, title, label, "validation loss")
        if not ran(found, "compare"):
            return _nothing(axes)
        for arm in there(found):
            y = losses(found, *arm).values("value")
            highest = [v.max() / math.log(10) for v in kappas(found, *arm).values()]
            at = np.array(highest) if x == "kappa" else milliseconds(found, *arm)
            how: Any = {"color": COLOURS[arm[1]], "marker": MARKERS[arm[0]], "linestyle": ""}
            axes.plot(at, y, markersize=3, alpha=0.5, markeredgewidth=0, **how)
            axes.plot(np.median(at), y.mean(), markersize=7, **how)
        return _seeds(found)

    return draw


PARETO = {
    "cost": ("Loss and cost of a step", "CPU time of a step, ms"),
    "kappa": ("Loss and the largest kappa", "largest log10 κ of the blocks"),
}


def tuning(axes: Axes, found: Table, spectra: Table) -> str:
    """What every arm has at every rate that was tried."""
    drawing.entitle(axes, "Tuning: one seed", "learning rate", "validation loss")
    if not ran(found, "tune"):
        return _nothing(axes)
    tried = found.where(stage="tune")
    for optimizer, correction in ARMS:
        if not len(tried.where(optimizer=optimizer, correction=correction)):
            continue
        losses_at = tuned(found, optimizer, correction)
        how: Any = {"color": COLOURS[correction], "linestyle": LINES[optimizer], "linewidth": 1.2}
        axes.plot(list(losses_at), list(losses_at.values()), **how)
    _key(axes)
    axes.set_xscale("log")
    rates = sorted(tried.by("rate"))
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    return "n = 1"


def progress(axes: Axes, found: Table, spectra: Table) -> str:
    """The mean loss on the way."""
    drawing.entitle(axes, "Learning", "step", "validation loss")
    if not ran(found, "compare"):
        return _nothing(axes)
    for arm in there(found):
        steps, curves = on_the_way(found, *arm)
        axes.plot(steps[1:], curves.mean(axis=0)[1:], **_line(arm))
    return _seeds(found)


def conditioning(axes: Axes, found: Table, spectra: Table) -> str:
    """The median log kappa of the matrices in the blocks, mean over seeds."""
    drawing.entitle(axes, "Kappa over training", "step", "median log10 κ of the blocks")
    if not ran(found, "compare"):
        return _nothing(axes)
    for arm in there(found):
        rows = select(found, stage="compare", component=LOG, optimizer=arm[0], correction=arm[1])
        looks = rows.where(kind=HIDDEN).by("epoch").items()
        medians = [
            np.mean([np.median(part.values("value")) for part in look.by("seed").values()])
            for _, look in looks
        ]
        axes.plot([step for step, _ in looks], np.array(medians) / math.log(10), **_line(arm))
    return _seeds(found)


def unrest(axes: Axes, found: Table, spectra: Table) -> str:
    """Training loss at rates that are too high, with every window that has a spike."""
    drawing.entitle(axes, "Rates too high (orange: with warmup)", "step", "training loss")
    if not ran(found, "warmup"):
        return _nothing(axes)
    every = runs(found)
    for run in every:
        first = run.rows.slice(0, 1).to_pylist()[0]
        colour = SPARE[1] if first["warmup"] else SPARE[0]
        loss = run.where(component="train_loss")
        steps, values = list(loss.by("epoch")), loss.curves("epoch", "value")[0]
        spiked = run.where(component="spikes").curves("epoch", "value")[0] > 0
        how: Any = {"color": colour, "linestyle": LINES[first["optimizer"]]}
        axes.plot(steps, values, linewidth=0.6, alpha=0.7, **how)
        axes.plot(np.array(steps)[spiked], values[spiked], "x", color=INK, markersize=4)
    drawing.logarithmic(axes, "y")
    return f"n = {len(every)}"


def _nothing(axes: Axes) -> str:
    axes.text(0.5, 0.5, "no trials", ha="center", transform=axes.transAxes, color=FAINT)
    return "no trials"


def _seeds(found: Table) -> str:
    return f"n = {len(losses(found, *there(found)[0]))}"


def _line(arm: tuple[str, str]) -> Any:
    return {"color": COLOURS[arm[1]], "linestyle": LINES[arm[0]], "linewidth": 1.2}


def _key(axes: Axes) -> None:
    """The colours of the corrections, once for the sheet."""
    for name, colour in COLOURS.items():
        axes.plot([], [], color=colour, label=name)
    axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper center", handlelength=1.2)


PLOT = sheet(
    pareto("cost"), pareto("kappa"), tuning, progress, conditioning, unrest,
    marks="Solid lines and circles: AdamW; dashed and triangles: Muon. Large marks: means over "
    "seeds; small: single runs. Crosses: windows of 10 steps with a loss spike.",
)  # fmt: skip
