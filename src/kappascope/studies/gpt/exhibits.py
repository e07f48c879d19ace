"""The tables and the figure of the study of the character GPT."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from kappascope.lab import drawing
from kappascope.lab.drawing import INK, SPARE
from kappascope.lab.experiment import Exhibit
from kappascope.lab.figures import Panel, sheet
from kappascope.lab.measures import LOG_KAPPA, select
from kappascope.lab.statistics import Estimate, over_seeds
from kappascope.lab.table import Floats, Table
from kappascope.studies.gpt.claims import (
    HIDDEN,
    kappa_with_loss,
    kappas,
    largest_finite,
    loss_change,
    predicted_by,
    unstable_runs,
)
from kappascope.studies.gpt.prognosis import HIGHEST, PREDICTORS
from kappascope.studies.gpt.tuning import (
    ARMS,
    OPTIMIZERS,
    REMEDIES,
    arm_rows,
    best_rate,
    losses_by_rate,
)
from kappascope.text import number
from kappascope.theory import GaussianNull

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NONE = "–"
COLOURS = dict(zip(("alone", *REMEDIES), ("#333333", *SPARE), strict=False))
LINES: dict[str, Any] = {"AdamW": "-", "Muon": (0, (3, 1.5))}
MARKERS = {"AdamW": "o", "Muon": "^"}


def exhibits(rows: Table) -> Iterator[Exhibit]:
    """Yield the comparison, the larger model and the rates that are too high, where they ran."""
    tables = {
        comparison: "compare",
        kappa_after_training: "compare",
        confirmation: "confirm",
        instability: "warmup",
    }
    for table, stage in tables.items():
        if ran(rows, stage):
            yield table(rows)


def ran(rows: Table, stage: str) -> bool:
    """Tell whether there are rows of a stage."""
    return "stage" in rows.rows.column_names and len(rows.where(stage=stage)) > 0


def arms_of(rows: Table, stage: str = "compare") -> list[tuple[str, str]]:
    """List the arms that were run in a stage."""
    chosen = rows.where(stage=stage)
    return [(o, c) for o, c in ARMS if len(chosen.where(optimizer=o, correction=c))]


def comparison(rows: Table) -> Exhibit:
    """Compare every arm at its best rate."""
    base = {"optimizer": "AdamW", "correction": "alone"}
    tuned = select(rows, stage="tune", **base, rate=best_rate(rows, **base))
    curve = tuned.where(component="loss_on_the_way").curves("epoch", "value")[0]
    level = float(curve[len(curve) // 2])  # steps are counted until this loss
    arms = arms_of(rows)

    def line(optimizer: str, correction: str) -> Iterator[str]:
        yield name_of(optimizer, correction)
        yield f"{best_rate(rows, optimizer, correction):g}"
        yield with_reach(over_seeds(arm_rows(rows, optimizer, correction).values("value")), ".4f")
        change = loss_change(optimizer, correction)(rows)
        yield NONE if correction == "alone" else with_reach(change, "+.4f")
        steps, curves = loss_curves(rows, optimizer, correction)
        yield number(float(np.mean([_crossing(steps, curve, level) for curve in curves])))
        own, plain = (milliseconds(rows, optimizer, name) for name in (correction, "alone"))
        yield f"{np.median(own) / np.median(plain):.2f}"

    columns = ("arm", "rate", "validation loss", "against alone", f"steps to {level:.2f}", "cost")
    seeds = len(arm_rows(rows, *arms[0]))
    tried = {arm: losses_by_rate(rows, *arm) for arm in arms}
    at_an_end = [
        " ".join(arm)
        for arm, rates in tried.items()
        if best_rate(rows, *arm) in (min(rates), max(rates))
    ]
    ends = f"Best at an end of the rates tried: {', '.join(at_an_end)}. " if at_an_end else ""
    note = (
        f"Validation loss in nats a character: the mean over {seeds} fresh seeds at the best of "
        f"{len(tried[arms[0]])} learning rates, which were tried at one other seed. The same "
        "windows of the validation text chose the rate and judge here. Against alone: the "
        "difference from the optimizer alone, paired by seed, with Student's 95 % interval over "
        "seeds, not over texts. Steps: how many it takes to reach the validation loss that AdamW "
        "alone has after half of its tuning run. Cost: CPU time of a step; the optimizer alone "
        "costs 1. "
        f"{ends}{answer(rows)}"
    )
    return Exhibit("Corrections compared", columns, tuple(tuple(line(*arm)) for arm in arms), note)


def name_of(optimizer: str, correction: str) -> str:
    """Name an arm as tables do."""
    return optimizer if correction == "alone" else f"{optimizer} + {correction}"


def with_reach(estimate: Estimate, digits: str) -> str:
    """Write a value and how far its interval reaches to either side: shorter than its ends."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{digits}}"
    reach = (estimate.high - estimate.low) / 2
    return f"{estimate.value:{digits}} ± {reach:{digits.lstrip('+')}}"


def kappa_after_training(rows: Table) -> Exhibit:
    """Tabulate kappa after training, for every arm."""

    def decades(arm: tuple[str, str]) -> Iterator[str]:
        kinds = ((HIDDEN, np.median), (HIDDEN, np.max), (("QK",), np.median), (("OV",), np.median))
        for kind, reduce in kinds:
            seeds = kappas(rows, *arm, kind).values()
            yield f"{np.mean([reduce(values) for values in seeds]) / math.log(10):.2f}"

    lines = tuple((name_of(*arm), *decades(arm)) for arm in arms_of(rows))
    columns = ("arm", "matrices, median", "matrices, largest", "QK, median", "OV, median")
    note = (
        "Mean over seeds of log10 kappa after training, of the matrices in the blocks and of two "
        "products: QK is what a head compares, OV is what it writes. A change of basis inside a "
        "head changes neither product. Gains of the norms before them are not folded in. "
        f"{correlation(rows)}{defaults(rows)}"
    )
    return Exhibit("Kappa after training", columns, lines, note)


def correlation(rows: Table) -> str:
    """Say whether arms with lower kappa have the lower loss."""
    if len(arms_of(rows)) < len(ARMS):
        return ""
    groups = (OPTIMIZERS, ("AdamW",), ("Muon",))
    both, adamw, muon = (kappa_with_loss(rows, group) for group in groups)
    return (
        f"Over the ten arms the rank correlation of the median log kappa with the loss is "
        f"{both:.2f}, over AdamW's five {adamw:.2f}, over Muon's {muon:.2f}. The "
        "arms are no random sample, so these correlations decide nothing. "
    )


def _crossing(steps: Floats, curve: Floats, level: float) -> float:
    """Interpolate the step at which a loss is first at a level; NaN if it never is."""
    below = np.flatnonzero(curve <= level)
    if not below.size:
        return math.nan
    i = below[0]
    if i == 0:
        return float(steps[0])
    share = (curve[i - 1] - level) / (curve[i - 1] - curve[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def loss_curves(rows: Table, optimizer: str, correction: str) -> tuple[Floats, Floats]:
    """Read the steps at which the validation loss was taken, and the losses, a line a seed."""
    chosen = arm_rows(rows, optimizer, correction, "loss_on_the_way")
    return np.array(list(chosen.by("epoch")), float), chosen.curves("epoch", "value")


def milliseconds(rows: Table, optimizer: str, correction: str) -> Floats:
    """Read the median CPU time of a step, one a seed; none where times are not among the rows."""
    arm = {"stage": "compare", "optimizer": optimizer, "correction": correction}
    return 1000 * rows.where(**arm, component="seconds").values("value")


def defaults(rows: Table) -> str:
    """Say where penalty and bound begin by default, and how many matrices ended at the bound."""
    width = int(select(rows, stage="compare").rows["width"][0].as_py())
    free = float(GaussianNull(width, width).quantile(0.95))
    bounded = [kappas(rows, *arm).values() for arm in arms_of(rows) if arm[1] == "bound"]
    at = [
        f"{np.mean(np.concatenate([*seeds]) > math.log(90)):.0%}".replace("%", " %")
        for seeds in bounded
    ]
    return (
        f"The penalty acts above the kappa that one of 20 random matrices exceeds ({free:.0f} if "
        "square). The bound acts above kappa 100. Of the blocks' matrices "
        f"{' (AdamW) and '.join(at)} (Muon) end within a tenth of the bound."
    )


def answer(rows: Table) -> str:
    """Say which corrections are shown to help."""
    changes = {
        f"{correction} under {optimizer}": loss_change(optimizer, correction)(rows)
        for optimizer, correction in arms_of(rows)
        if correction != "alone"
    }
    without = [
        f"{name} ({change.reason})" for name, change in changes.items() if not change.interval
    ]
    unknown = f" No interval: {', '.join(without)}." if without else ""
    ends = {name: change.interval for name, change in changes.items() if change.interval}
    if not ends:
        return "Too few seeds, or too many that diverged, to say who helps."
    better = [name for name, (_, high) in ends.items() if high < 0]
    worse = [name for name, (low, _) in ends.items() if low > 0]
    gain = (
        f"Shown to lower the loss: {', '.join(better)}."
        if better
        else "No correction is shown to help."
    )
    harm = f" Shown to raise it: {', '.join(worse)}." if worse else ""
    most = max(abs(end) for both in ends.values() for end in both)
    optimizer = with_reach(loss_change("Muon", "alone", base="AdamW")(rows), "+.4f")
    return (
        f"{gain}{harm}{unknown} Each of these {len(changes)} is judged by its own interval, and no "
        f"interval reaches further than {most:.4f} from zero. Muon in place of AdamW changes the "
        f"loss by {optimizer}."
    )


def confirmation(rows: Table) -> Exhibit:
    """Compare a few arms in a larger model."""
    arms = arms_of(rows, "confirm")
    lines = []
    for arm in arms:
        own = arm_rows(rows, *arm, stage="confirm")
        change = loss_change(*arm, "confirm", "AdamW")(rows)
        against = NONE if arm == ARMS[0] else with_reach(change, "+.4f")
        rate = own.rows["rate"][0].as_py()
        loss = with_reach(over_seeds(own.values("value")), ".4f")
        lines.append((name_of(*arm), f"{rate:g}", loss, against))
    seeds = len(arm_rows(rows, *arms[0], stage="confirm"))
    first = select(rows, stage="confirm").rows.slice(0, 1).to_pylist()[0]
    note = (
        f"{first['layers']} layers of width {first['width']}, {first['steps']} steps, "
        f"{seeds} seeds. Rates are half of the small model's best ones, because the width is "
        "doubled. Arms: Hybrid, the correction other than Hybrid that tuned best under AdamW, and "
        "Muon alone."
    )
    columns = ("arm", "rate", "validation loss", "against AdamW alone")
    return Exhibit("A larger model", columns, tuple(lines), note)


def instability(rows: Table) -> Exhibit:
    """Tabulate training at rates that are too high, with and without warmup."""
    groups: dict[tuple[str, float, int], list[Table]] = {}
    for run in unstable_runs(rows):
        first = run.rows.slice(0, 1).to_pylist()[0]
        groups.setdefault((first["optimizer"], first["rate"], first["warmup"]), []).append(run)

    def summary(runs: Sequence[Table]) -> Iterator[str]:
        spikes, final, diverged, kappa = (
            [run.where(component=name).values("value") for run in runs]
            for name in ("spikes", "final_loss", "diverged", HIGHEST)
        )
        counts = [values.sum() for values in spikes]
        yield str(len(runs))
        yield str(sum(bool(values[0]) for values in diverged))
        yield str(sum(count > 0 for count in counts))
        yield f"{np.mean(counts):.1f}"
        yield number(float(np.median([values[0] for values in final])))
        yield f"{np.median([largest_finite(values) for values in kappa]) / math.log(10):.2f}"

    lines = tuple(
        (optimizer, f"{rate:g}", str(warmup), *summary(runs))
        for (optimizer, rate, warmup), runs in groups.items()
    )
    columns = ("optimizer", "rate", "warmup", "runs", "diverged", "with spikes", "spikes a run",
               "final loss", "highest log10 κ")  # fmt: skip
    areas = {name: predicted_by(key)(rows) for key, name in PREDICTORS.items()}
    shares = [f"{area:.2f} {name}" if area.n else "no spikes" for name, area in areas.items()]
    note = (
        "One rate is 8 times the best one, the other is 1. Neither decays. Final loss and highest "
        "kappa are medians over runs. What foretells a spike within 20 steps? Each pair has a "
        "window before a spike and another window of the same run. The share of pairs that a "
        f"quantity tells apart, where 0.5 is guesswork: {', '.join(shares)}."
    )
    return Exhibit("Rates that are too high", columns, lines, note)


# --- the figure -----------------------------------------------------------------------------------


def panel(stage: str, draw: Callable[[Axes, Table], str], *labels: str) -> Panel:
    """Make a panel of the runs of a stage, with its title and labels; empty if none was run."""

    def drawn(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, *labels)
        return draw(axes, rows) if ran(rows, stage) else drawing.empty(axes)

    return drawn


def pareto(x: Callable[[Table, str, str], Floats]) -> Callable[[Axes, Table], str]:
    """Draw the validation loss of every run against its cost, or against its largest kappa."""

    def draw(axes: Axes, rows: Table) -> str:
        for arm in arms_of(rows):
            at, y = x(rows, *arm), arm_rows(rows, *arm).values("value")
            how: Any = {"color": COLOURS[arm[1]], "marker": MARKERS[arm[0]], "linestyle": ""}
            axes.plot(at, y, markersize=3, alpha=0.5, markeredgewidth=0, **how)
            axes.plot(np.median(at), y.mean(), markersize=7, **how)
        return _seeds(rows)

    return draw


def largest_kappas(rows: Table, optimizer: str, correction: str) -> Floats:
    """Return the largest log10 kappa of the blocks' matrices after training, one a seed."""
    seeds = kappas(rows, optimizer, correction).values()
    return np.array([values.max() / math.log(10) for values in seeds])


def tuning(axes: Axes, rows: Table) -> str:
    """Draw the loss of every arm at every rate that was tried; explain the figure's colours."""
    for arm in arms_of(rows, "tune"):
        tried = losses_by_rate(rows, *arm)
        axes.plot(list(tried), list(tried.values()), **_line(arm))
    for name, colour in COLOURS.items():
        axes.plot([], [], color=colour, label=name)
    axes.legend(frameon=False, fontsize=7.5, ncols=2, loc="upper center", handlelength=1.2)
    axes.set_xscale("log")
    rates = sorted(rows.where(stage="tune").by("rate"))
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.minorticks_off()
    return "n = 1"


def progress(axes: Axes, rows: Table) -> str:
    """Draw the mean validation loss during training."""
    for arm in arms_of(rows):
        steps, curves = loss_curves(rows, *arm)
        axes.plot(steps[1:], curves.mean(axis=0)[1:], **_line(arm))
    return _seeds(rows)


def conditioning(axes: Axes, rows: Table) -> str:
    """Draw the median log kappa of the matrices in the blocks, as the mean over seeds."""
    for arm in arms_of(rows):
        steps = arm_rows(rows, *arm, LOG_KAPPA).where(kind=HIDDEN).by("epoch")
        medians = [
            np.mean([np.median(seed.values("value")) for seed in seeds.by("seed").values()])
            for seeds in steps.values()
        ]
        axes.plot(list(steps), np.array(medians) / math.log(10), **_line(arm))
    return _seeds(rows)


def unstable_losses(axes: Axes, rows: Table) -> str:
    """Draw the training loss at rates that are too high, and every window with a spike."""
    runs = unstable_runs(rows)
    for run in runs:
        first = run.rows.slice(0, 1).to_pylist()[0]
        loss = run.where(component="train_loss")
        steps, values = np.array(list(loss.by("epoch"))), loss.curves("epoch", "value")[0]
        spiked = run.where(component="spikes").curves("epoch", "value")[0] > 0
        how: Any = {"color": SPARE[bool(first["warmup"])], "linestyle": LINES[first["optimizer"]]}
        axes.plot(steps, values, linewidth=0.6, alpha=0.7, **how)
        axes.plot(steps[spiked], values[spiked], "x", color=INK, markersize=4)
    drawing.logarithmic(axes, "y")
    return f"n = {len(runs)}"


def _seeds(rows: Table) -> str:
    return f"n = {len(arm_rows(rows, *arms_of(rows)[0]))}"


def _line(arm: tuple[str, str]) -> Any:
    return {"color": COLOURS[arm[1]], "linestyle": LINES[arm[0]], "linewidth": 1.2}


LOSS_LABEL = "validation loss"
plot = sheet(
    panel("compare", pareto(milliseconds), "Loss and cost of a step", "CPU time of a step, ms",
          LOSS_LABEL),
    panel("compare", pareto(largest_kappas), "Loss and the largest kappa",
          "largest log10 κ of the blocks", LOSS_LABEL),
    panel("tune", tuning, "Tuning: one seed", "learning rate", LOSS_LABEL),
    panel("compare", progress, "Learning", "step", LOSS_LABEL),
    panel("compare", conditioning, "Kappa over training", "step", "median log10 κ of the blocks"),
    panel("warmup", unstable_losses, "Rates too high (orange: with warmup)", "step",
          "training loss"),
    marks="Solid lines and circles: AdamW; dashed and triangles: Muon. Large marks: means over "
    "seeds; small: single runs. Crosses: windows of 10 steps with a loss spike.",
)  # fmt: skip
