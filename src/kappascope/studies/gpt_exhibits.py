"""The tables of the study of the character GPT."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from kappascope.lab import Exhibit
from kappascope.measures import select
from kappascope.prose import number
from kappascope.statistics import Estimate, Floats, Table
from kappascope.studies.gpt_claims import (
    ARMS,
    HIDDEN,
    best_rate,
    foretold,
    gained,
    highest,
    kappa_with_loss,
    kappas,
    losses,
    over_seeds,
    runs,
    tuned,
)
from kappascope.studies.gpt_prognosis import WITNESSES
from kappascope.theory import GaussianNull

NONE = "–"
LINES = ("AdamW", "Muon")


def exhibits(found: Table) -> Iterator[Exhibit]:
    """The comparison, the larger model, the rates that are too high, as far as they were run."""
    tables = {main: "compare", shapes: "compare", confirmation: "confirm", instability: "warmup"}
    for table, stage in tables.items():
        if ran(found, stage):
            yield table(found)


def ran(found: Table, stage: str) -> bool:
    """Whether there are rows of a stage."""
    return "stage" in found.rows.column_names and len(found.where(stage=stage)) > 0


def there(found: Table) -> list[tuple[str, str]]:
    """The arms that were compared."""
    rows = found.where(stage="compare")
    return [(o, c) for o, c in ARMS if len(rows.where(optimizer=o, correction=c))]


def main(found: Table) -> Exhibit:
    """Every arm at its best rate."""
    level = level_of(found)
    arms = there(found)
    rows = tuple(tuple(_arm(found, level, *arm)) for arm in arms)
    columns = ("arm", "rate", "validation loss", "against alone", f"steps to {level:.2f}", "cost")
    seeds = len(losses(found, *arms[0]))
    edges = [f"{o} {c}" for o, c in arms if best_rate(found, o, c) in _ends(found, o, c)]
    at = f"Best at an end of the rates tried: {', '.join(edges)}. " if edges else ""
    note = (
        f"Mean over {seeds} fresh seeds, in nats a character, at the best of "
        f"{len(tuned(found, *ARMS[0]))} learning rates tried at one other seed; the same windows "
        "of the validation text chose the rate and judge here. Against alone: paired by seed, "
        "with Student's 95 % interval, which is over seeds and not over texts. Steps: until the "
        "validation loss is where AdamW alone has it after half of its tuning run. Cost: CPU time "
        "of a step, alone = 1. "
        f"{at}{answer(found)}"
    )
    return Exhibit("Corrections compared", columns, rows, note)


def _arm(found: Table, level: float, optimizer: str, correction: str) -> Iterator[str]:
    yield _name(optimizer, correction)
    yield f"{best_rate(found, optimizer, correction):g}"
    yield _with_reach(over_seeds(losses(found, optimizer, correction).values("value")), ".4f")
    gap = gained(optimizer, correction)(found)
    yield NONE if correction == "alone" else _with_reach(gap, "+.4f")
    yield number(float(np.mean(steps_to(found, level, optimizer, correction))))
    yield f"{cost(found, optimizer, correction):.2f}"


def _with_reach(found: Estimate, digits: str) -> str:
    """A value and how far Student's interval reaches to either side: shorter than its ends."""
    if found.low is None or found.high is None:
        return f"{found.value:{digits}}"
    return f"{found.value:{digits}} ± {(found.high - found.low) / 2:{digits.lstrip('+')}}"


def shapes(found: Table) -> Exhibit:
    """What training leaves of every arm's kappa."""
    rows = tuple((_name(*arm), *_decades(found, *arm)) for arm in there(found))
    columns = ("arm", "matrices, median", "matrices, largest", "QK, median", "OV, median")
    note = (
        "Mean over seeds of log10 kappa after training: of the matrices in the blocks, and of what "
        "the heads compare (QK) and write (OV), which no change of basis inside a head touches; "
        f"gains of the norms before them are not folded in. {together(found)}{defaults(found)}"
    )
    return Exhibit("Kappa after training", columns, rows, note)


def together(found: Table) -> str:
    """Whether arms with lower kappa have the lower loss."""
    if len(there(found)) < len(ARMS):
        return ""
    mixed, *apart = (kappa_with_loss(found, some) for some in (LINES, *((o,) for o in LINES)))
    return (
        f"Over the ten arms the rank correlation of the median log kappa with the loss is "
        f"{mixed:.2f}, over AdamW's five {apart[0]:.2f}, over Muon's {apart[1]:.2f}: arms are no "
        "sample, and nothing is decided by it. "
    )


def _decades(found: Table, optimizer: str, correction: str) -> Iterator[str]:
    kinds = ((HIDDEN, np.median), (HIDDEN, np.max), (("QK",), np.median), (("OV",), np.median))
    for kind, reduce in kinds:
        each = kappas(found, optimizer, correction, kind).values()
        yield f"{np.mean([reduce(values) for values in each]) / math.log(10):.2f}"


def _ends(found: Table, optimizer: str, correction: str) -> tuple[float, float]:
    rates = tuned(found, optimizer, correction)
    return min(rates), max(rates)


def level_of(found: Table) -> float:
    """The loss of AdamW alone after half of its best tuning run."""
    rate = best_rate(found, "AdamW", "alone")
    arm = {"stage": "tune", "optimizer": "AdamW", "correction": "alone", "rate": rate}
    curve = select(found, **arm, component="loss_on_the_way").curves("epoch", "value")[0]
    return float(curve[len(curve) // 2])


def steps_to(found: Table, level: float, optimizer: str, correction: str) -> Floats:
    """When each seed has the level, between two looks in proportion; NaN if it never has."""
    steps, curves = on_the_way(found, optimizer, correction)
    return np.array([_crossing(steps, curve, level) for curve in curves])


def _crossing(steps: Floats, curve: Floats, level: float) -> float:
    below = np.flatnonzero(curve <= level)
    if not below.size or not below[0]:
        return math.nan if not below.size else float(steps[0])
    i = below[0]
    share = (curve[i - 1] - level) / (curve[i - 1] - curve[i])
    return float(steps[i - 1] + share * (steps[i] - steps[i - 1]))


def on_the_way(found: Table, optimizer: str, correction: str) -> tuple[Floats, Floats]:
    """The steps at which the validation loss was looked at, and the losses, a line a seed."""
    arm = {"stage": "compare", "optimizer": optimizer, "correction": correction}
    rows = select(found, **arm, component="loss_on_the_way")
    return np.array(list(rows.by("epoch")), float), rows.curves("epoch", "value")


def cost(found: Table, optimizer: str, correction: str) -> float:
    """The time of a step in that of the optimizer alone; NaN where times are not among the rows."""
    own, base = (milliseconds(found, optimizer, name) for name in (correction, "alone"))
    return float(np.median(own) / np.median(base))


def milliseconds(found: Table, optimizer: str, correction: str) -> Floats:
    """The median CPU time of a step, one a seed."""
    arm = {"stage": "compare", "optimizer": optimizer, "correction": correction}
    return 1000 * found.where(**arm, component="seconds").values("value")


def defaults(found: Table) -> str:
    """What the corrections do as they come, and how many matrices ended at the bound."""
    width = int(select(found, stage="compare").rows["width"][0].as_py())
    free = float(GaussianNull(width, width).quantile(0.95))
    ends = [kappas(found, *arm).values() for arm in there(found) if arm[1] == "bound"]
    at = [
        f"{np.mean(np.concatenate([*one]) > math.log(90)):.0%}".replace("%", " %") for one in ends
    ]
    return (
        f"The penalty begins where one of 20 random matrices is (kappa {free:.0f} if square), the "
        f"bound at kappa 100: of the blocks' matrices {' (AdamW) and '.join(at)} (Muon) end "
        "within a tenth of it."
    )


def answer(found: Table) -> str:
    """Who helps, in one sentence."""
    every = {arm: gained(*arm)(found) for arm in there(found) if arm[1] != "alone"}
    open_ = [f"{c} under {o} ({one.reason})" for (o, c), one in every.items() if not one.interval]
    unknown = f" No interval: {', '.join(open_)}." if open_ else ""
    ends = {f"{c} under {o}": one.interval for (o, c), one in every.items() if one.interval}
    if not ends:
        return "Too few seeds, or too many that diverged, to say who helps."
    better = [name for name, (_, high) in ends.items() if high < 0]
    worse = [name for name, (low, _) in ends.items() if low > 0]
    told = f"Shown to lower the loss: {', '.join(better)}." if better else "None is shown to help."
    harm = f" Shown to raise it: {', '.join(worse)}." if worse else ""
    most = max(abs(end) for both in ends.values() for end in both)
    optimizer = _with_reach(gained("Muon", "alone", base="AdamW")(found), "+.4f")
    return (
        f"{told}{harm}{unknown} Each by its own interval, {len(every)} of them; none of these "
        f"reaches further than {most:.4f} from zero. Muon in place of AdamW: {optimizer}."
    )


def confirmation(found: Table) -> Exhibit:
    """The larger model."""
    rows = select(found, stage="confirm")
    arms = [arm for arm in ARMS if len(rows.where(optimizer=arm[0], correction=arm[1]))]
    shown = []
    for optimizer, correction in arms:
        own = losses(found, optimizer, correction, "confirm")
        alone = (optimizer, correction) == ARMS[0]
        gap = gained(optimizer, correction, "confirm", "AdamW")(found)
        against = NONE if alone else _with_reach(gap, "+.4f")
        rate = own.rows["rate"][0].as_py()
        loss = _with_reach(over_seeds(own.values("value")), ".4f")
        shown.append((_name(optimizer, correction), f"{rate:g}", loss, against))
    first = rows.rows.slice(0, 1).to_pylist()[0]
    note = (
        f"{first['layers']} layers of width {first['width']}, {first['steps']} steps, "
        f"{len(losses(found, *arms[0], 'confirm'))} seeds; rates are half of the best of the small "
        "model's, its width being half. Arms: Hybrid, the other correction that tuned best under "
        "AdamW, and Muon alone."
    )
    columns = ("arm", "rate", "validation loss", "against AdamW alone")
    return Exhibit("A larger model", columns, tuple(shown), note)


def _name(optimizer: str, correction: str) -> str:
    return optimizer if correction == "alone" else f"{optimizer} + {correction}"


def instability(found: Table) -> Exhibit:
    """Rates that are too high, with and without warmup."""
    groups: dict[tuple[str, float, int], list[Table]] = {}
    for run in runs(found):
        first = run.rows.slice(0, 1).to_pylist()[0]
        groups.setdefault((first["optimizer"], first["rate"], first["warmup"]), []).append(run)
    shown = tuple(
        (optimizer, f"{rate:g}", str(warmup), *_unrest(some))
        for (optimizer, rate, warmup), some in groups.items()
    )
    columns = ("optimizer", "rate", "warmup", "runs", "diverged", "with spikes", "spikes a run",
               "final loss", "highest log10 κ")  # fmt: skip
    heard = {name: foretold(key)(found) for key, name in WITNESSES.items()}
    areas = ", ".join(f"{one:.2f} {name}" if one.n else "no spikes" for name, one in heard.items())
    note = (
        "Rates are 8 times the best, and 1; they do not decay. Medians over runs of the final loss "
        "and of the highest kappa. Who foretells a spike within 20 steps, by the share of pairs "
        "(a window before a spike, another of the same run) told apart, 0.5 being guesswork: "
        f"{areas}."
    )
    return Exhibit("Rates that are too high", columns, shown, note)


def _unrest(some: Sequence[Table]) -> Iterator[str]:
    counts = [run.where(component="spikes").values("value").sum() for run in some]
    ends = [run.where(component="final_loss").values("value")[0] for run in some]
    yield str(len(some))
    yield str(sum(bool(run.where(component="diverged").values("value")[0]) for run in some))
    yield str(sum(count > 0 for count in counts))
    yield f"{np.mean(counts):.1f}"
    yield number(float(np.median(ends)))
    yield f"{np.median([highest(run) for run in some]) / math.log(10):.2f}"
