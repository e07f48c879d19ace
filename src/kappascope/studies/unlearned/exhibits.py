"""The tables and the figure of the study of what is not learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import scipy

from kappascope.lab import drawing
from kappascope.lab.claims import Measure
from kappascope.lab.drawing import INK, SPARE
from kappascope.lab.experiment import Exhibit
from kappascope.lab.figures import Panel, sheet
from kappascope.lab.heads import PRODUCTS
from kappascope.lab.measures import select
from kappascope.lab.statistics import Estimate, over_seeds
from kappascope.lab.table import Floats, Table
from kappascope.studies.unlearned.claims import (
    GROUPS,
    LEARNERS,
    LOSS,
    MAIN,
    MATRICES,
    WITHIN,
    balanced,
    by_seed,
    cells,
    column,
    file_gap,
    final,
    gap,
    hypothesis,
    levels,
    loss_of_holding,
    memory,
    slopes_over,
    variance_shares,
)
from kappascope.studies.unlearned.files import CHECKPOINTS, KINDS
from kappascope.studies.unlearned.model import CENTRE, DECAYS, GHOSTS, OPTIMIZERS
from kappascope.theory.beyond import LEVEL, MARGIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NONE = "–"
WORDS = {"holds": "noise", "fails": "learned", "undecided": "undecided"}
SHOWN: Mapping[str, tuple[str, ...]] = {
    "norm": GROUPS["norm"],
    "spread of row norms": ("row_spread",),
    "spread of column norms": ("column_spread",),
    "sigma_1": ("log_sigma_1",),
    "bulk": GROUPS["bulk"],
    "sigma_min": ("log_sigma_min",),
    "kappa": ("log_kappa",),
    "stable rank": ("log_stable_rank",),
}
NAMES = dict(zip(MAIN, ("norm", "sigma_1", "median sigma", "sigma above 10 %"), strict=True))
SUMS = ("0", "1", "5", "30")  # of rate times decay, at the four decays of the grid
FREED = ("multipliers", "values", "temperature")
MULTIPLES = (0.25, 0.5, 2.0, 4.0)
# at which levels a part is compared with itself at one, and at which with the optimizer alone
HELD = {"norm": MULTIPLES, "tail": MULTIPLES, "share": MULTIPLES, "shape": (0.0, 0.5, 2.0)}
ALONE = {"norm": (1.0, 2.0), "tail": (1.0, 2.0, 4.0), "share": (1.0, 4.0), "shape": (0.0, 0.5, 1.0)}
SEEDS = "means over seeds with 95 % intervals"


def exhibits(rows: Table) -> Iterator[Exhibit]:
    """Yield the tables whose runs are there."""
    tables = (
        kind_table,
        decay_table,
        share_table,
        law_table,
        law_by_kind_table,
        slope_table,
        power_table,
        memory_table,
        balance_table,
        loss_table,
        holding_table,
        data_table,
        data_by_kind_table,
        text_table,
        width_table,
        width_by_kind_table,
        file_table,
    )
    for table in tables:
        found = table(rows)
        if found.rows:
            yield found


def measured(measure: Measure, rows: Table) -> Estimate | None:
    """Measure, or give nothing where the runs are missing."""
    try:
        return measure(rows)
    except (LookupError, ValueError):
        return None


def told(found: Estimate | None, spec: str = "+.2f") -> str:
    """Write an estimate with its interval, or a dash."""
    return f"{found:{spec}}" if found else NONE


def kind_table(rows: Table) -> Exhibit:
    """Tabulate the gap of the parts of every kind of layer at the centre, with the answer."""
    lines = []
    for kind in (*MATRICES, *PRODUCTS):
        for name, parts in SHOWN.items():
            found = [measured(gap(o, parts, (kind,)), rows) for o in OPTIMIZERS]
            if any(found):
                row = [f"{e:+.2f} {WORDS[WITHIN.decide(e)]}" if e else NONE for e in found]
                lines.append((kind, name, *row))
    return Exhibit(
        "How far parts end from their ghosts, by kind of layer, at the centre of the grid",
        ("kind", "part", *OPTIMIZERS),
        tuple(lines),
        f"Trained less ghosts, in natural logarithms: {SEEDS}. Noise: the interval lies within "
        f"{MARGIN}. Learned: the interval lies wholly outside.",
    )


def decay_table(rows: Table) -> Exhibit:
    """Tabulate how the gap of every kind's norm changes with decay."""
    lines = []
    for kind in (*MATRICES, *PRODUCTS):
        for optimizer in OPTIMIZERS:
            places = range(len(SUMS))
            found = [
                measured(gap(optimizer, GROUPS["norm"], (kind,), place=k), rows) for k in places
            ]
            if any(found):
                lines.append((kind, optimizer, *map(told, found)))
    return Exhibit(
        "The gap of norms, by decay",
        ("kind", "optimizer", *(f"sum {each}" for each in SUMS)),
        tuple(lines),
        f"Natural logarithms: {SEEDS}. Columns: the sum of rate times decay over the run.",
    )


def share_table(rows: Table) -> Exhibit:
    """Tabulate the share of matrices whose part is beyond noise, by kind of layer."""
    lines = []
    for kind in (*MATRICES, *PRODUCTS):
        for part in ("log_norm", "log_sigma_1", "log_sigma_50", "log_sigma_min"):
            found = [measured(learned_share(o, part, kind), rows) for o in OPTIMIZERS]
            if any(found):
                lines.append((kind, part, *(told(e, ".2f") for e in found)))
    return Exhibit(
        "The learned share: matrices whose part is beyond noise, by kind of layer",
        ("kind", "part", *OPTIMIZERS),
        tuple(lines),
        "At the centre of the grid. A part is beyond noise if it is more than ten per cent away "
        "from its ghosts, and if Student's law tells it from them at a false discovery rate of 5 % "
        "over all matrices of the part.",
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
            law = measured(gap(optimizer, parts, null="shaped", of="ghost"), rows)
            start, noise = found["start"], found["shaped"]
            if start and noise:
                answer = hypothesis(start, noise)
                lines.append((optimizer, group, *map(told, found.values()), told(law), answer))
    return Exhibit(
        "Three laws: trained less predicted, without a free parameter",
        (
            "optimizer", "part", "start (H1)", "white noise", "noise (H2)", "ghosts",
            "ghosts less H2", "law",
        ),
        tuple(lines),
        f"At the centre of the grid, in natural logarithms: {SEEDS}. H1: the part is what decay "
        "leaves of the start. H2: it is noise with the covariances of gradients. H3: it is more "
        "than a tenth from both.",
    )  # fmt: skip


def law_by_kind_table(rows: Table) -> Exhibit:
    """Tabulate which law holds for which part of which kind of matrix."""
    lines = []
    for kind in MATRICES:
        for group, parts in GROUPS.items():
            row = []
            for optimizer in OPTIMIZERS:
                start, noise = (
                    measured(gap(optimizer, parts, (kind,), null=null), rows)
                    for null in ("start", "shaped")
                )
                if start and noise:
                    row.append(f"{hypothesis(start, noise)}: {noise:+.2f}")
                else:
                    row.append(NONE)
            if set(row) != {NONE}:
                lines.append((kind, group, *row))
    return Exhibit(
        "Which law for which part of which matrix",
        ("kind", "part", *OPTIMIZERS),
        tuple(lines),
        "H2 or H1: the part lies within a tenth of that prediction. H3: it surely lies within a "
        "tenth of neither. The number is the trained part less the noise of H2.",
    )


def slope_table(rows: Table) -> Exhibit:
    """Tabulate how parts follow their ghosts over decays and rates, and the rate itself."""
    lines = []
    for optimizer in OPTIMIZERS:
        for part, name in NAMES.items():
            ways = (("decays", "ghost"), ("rates", "ghost"), ("products", "rate"))
            found = [
                measured(slopes_over(optimizer, part, over, on), rows)
                if over == "decays" or optimizer in LEARNERS
                else None
                for over, on in ways
            ]
            if any(found):
                lines.append((optimizer, name, *(told(e, ".2f") for e in found)))
    return Exhibit(
        "Which knob sets which part",
        (
            "optimizer", "part", "on its ghosts, over decays", "on its ghosts, over rates",
            "power of the rate, at one product with decay",
        ),
        tuple(lines),
        f"Slopes on logarithmic scales, matrix by matrix: {SEEDS}. Noise alone has a slope of 1.",
    )  # fmt: skip


def memory_table(rows: Table) -> Exhibit:
    """Tabulate how much of the size of the start is left in parts and in ghosts."""
    lines = []
    for optimizer in OPTIMIZERS:
        for group, parts in GROUPS.items():
            found = [measured(memory(optimizer, parts, of), rows) for of in ("value", "ghost")]
            if any(found):
                lines.append((optimizer, group, *(told(e, ".2f") for e in found)))
    return Exhibit(
        "What remembers the size of its start",
        ("optimizer", "part", "trained", "ghosts"),
        tuple(lines),
        "The power with which a part grows with the size of the start, where rate times decay "
        f"sums to one: {SEEDS}. At 1 all of the size is remembered, at 0 nothing.",
    )


def loss_table(rows: Table) -> Exhibit:
    """Tabulate the validation loss by decay."""
    lines = []
    for optimizer in OPTIMIZERS:
        found = []
        for decay in DECAYS[optimizer]:

            def loss(rows: Table, optimizer: str = optimizer, decay: float = decay) -> Estimate:
                about = {"stage": "grid", "optimizer": optimizer, "component": LOSS}
                return over_seeds(select(rows, **about, decay=decay).values("value"), "mean loss")

            found.append(measured(loss, rows))
        if any(found):
            lines.append((optimizer, *(told(e, ".3f") for e in found)))
    return Exhibit(
        "The validation loss, by decay",
        ("optimizer", *(f"sum {each}" for each in SUMS)),
        tuple(lines),
        f"Nats a character: {SEEDS}. Columns: the sum of rate times decay over the run.",
    )


def holding_table(rows: Table) -> Exhibit:
    """Tabulate the loss of holding or freeing a part."""
    lines = []
    for optimizer in LEARNERS:
        arms = {
            f"{held}, {level}": measure
            for held, which in HELD.items()
            for level, measure in levels(optimizer, held, which).items()
        }
        arms |= {
            f"free {held}": loss_of_holding(optimizer, held, 1.0, ("nothing", 1.0))
            for held in FREED
        }
        arms |= {
            f"{held}, at {level:g}, against the optimizer alone": loss_of_holding(
                optimizer, held, level, ("nothing", 1.0)
            )
            for held, levels_ in ALONE.items()
            for level in levels_
        }
        for arm, measure in arms.items():
            found = measured(measure, rows)
            if found:
                lines.append((optimizer, arm, f"{found:+.4f}", str(found.n)))
    return Exhibit(
        "Does it matter: the loss of holding a part at another level, or of freeing it",
        ("optimizer", "arm", "loss difference", "seeds"),
        tuple(lines),
        "Nats a character, from paired seeds, with 95 % intervals. The difference is from the same "
        "part held at one, or from the optimizer alone.",
    )


def data_table(rows: Table) -> Exhibit:
    """Tabulate the variance components of every group of parts."""
    lines = []
    wanted: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
        **{group: (parts, MATRICES) for group, parts in GROUPS.items()},
        "sigma_1 of QK": (("log_sigma_1",), ("QK",)),
    }
    for name, (parts, kinds) in wanted.items():
        try:
            shares = variance_shares(rows, parts, kinds)
        except (LookupError, ValueError):
            continue
        lines.append((name, *(f"{100 * share:.0f} %" for share in shares)))
    return Exhibit(
        "Data against settings: shares of the variance of parts at equal loss",
        ("part", "settings", "text", "both together", "seed and rest"),
        tuple(lines),
        "Shares of the variance of all runs about the mean of each matrix. Texts: prose, code, "
        "Markov, shuffled. Settings: pairs of rate and decay. Shares are corrected for chance.",
    )


def data_by_kind_table(rows: Table) -> Exhibit:
    """Tabulate the shares of settings and of texts in the variance, by kind of layer."""
    lines = []
    for kind in (*MATRICES, *PRODUCTS):
        row = []
        for group in ("norm", "top", "bulk"):
            try:
                settings, text, *_ = variance_shares(rows, GROUPS[group], (kind,))
            except (LookupError, ValueError):
                continue
            row.append(f"{100 * settings:.0f} % / {100 * text:.0f} %")
        if row:
            lines.append((kind, *row))
    return Exhibit(
        "Data against settings, by kind of layer",
        ("kind", "norm: settings / text", "top: settings / text", "bulk: settings / text"),
        tuple(lines),
        "Shares of the variance, as in the table before.",
    )


def power_table(rows: Table) -> Exhibit:
    """Tabulate with which power of the rate parts grow at one product with decay, by kind."""
    lines = []
    for optimizer in LEARNERS:
        for kind in MATRICES:
            found = [
                measured(
                    slopes_over(optimizer, part, "products", "rate", kinds=(kind,), of=of), rows
                )
                for part in ("log_norm", "log_sigma_50")
                for of in ("value", "ghost")
            ]
            if any(found):
                lines.append((optimizer, kind, *(told(e, ".2f") for e in found)))
    return Exhibit(
        "The power of the rate, at one product with decay, by kind of layer",
        ("optimizer", "kind", "norm", "its ghosts", "median sigma", "its ghosts "),
        tuple(lines),
        f"The gain of a norm layer is folded into the matrix behind it: {SEEDS}. White noise has "
        "a power of 1.",
    )


def text_table(rows: Table) -> Exhibit:
    """Tabulate the loss of every text at the settings that were chosen for equal loss."""
    lines: list[tuple[str, ...]] = []
    rates: list[float] = []
    try:
        chosen = select(rows, stage="data", component=LOSS)
        rates = sorted(chosen.by("rate"))
    except LookupError:
        chosen = Table.of([])
    for text, runs in chosen.by("text").items() if rates else ():
        losses = {
            rate: over_seeds(each.values("value"), "mean loss")
            for rate, each in runs.by("rate").items()
        }
        lines.append((text, *(told(losses.get(rate), ".3f") for rate in rates)))
    return Exhibit(
        "The validation loss of texts, at settings of equal loss",
        ("text", *(f"rate {rate:g}" for rate in rates)),
        tuple(lines),
        f"Nats a character under AdamW: {SEEDS}. The decays were chosen on the pilot's seeds, on "
        "prose.",
    )


def balance_table(rows: Table) -> Exhibit:
    """Tabulate what coherent gradients add to each kind's norm, and what the loss says of it."""
    lines = []
    for optimizer in ("AdamW", "SGD"):
        for kind in MATRICES:
            gaps = [
                measured(balanced(optimizer, "push_gap", (kind,), place), rows)
                for place in (1, 2, 3)
            ]
            radial = measured(balanced(optimizer, "radial", (kind,)), rows)
            cells_ = [*(told(gap_, "+.2f") for gap_ in gaps), told(radial, "+.4f")]
            lines.append((optimizer, kind, *cells_))
    return Exhibit(
        "The balance of norms, against all ghosts in closed form",
        ("optimizer", "kind", *(f"sum {total}" for total in SUMS[1:]), "loss by log size"),
        tuple(line for line in lines if set(line[2:]) != {NONE}),
        "The logarithm of the norm less that of the ghosts' root mean square, at three decays: "
        f"{SEEDS}. The last column: how the held-out loss changes with the logarithm of the "
        "matrix's size, at sum 5.",
    )


def width_table(rows: Table) -> Exhibit:
    """Tabulate the mean distance of spectra from their ghosts, by width."""
    parts = tuple(part for group in ("top", "bulk", "bottom") for part in GROUPS[group])
    found: dict[str, dict[int, Estimate]] = {}
    for scaling in ("standard", "mup"):
        about = {"stage": "width", "scaling": scaling, "component": parts, "kind": MATRICES}
        try:
            chosen = final(select(rows, **about))
        except LookupError:
            continue
        found[scaling] = {}
        for width, runs in chosen.by("width").items():
            apart = np.abs(column(runs, "value") - column(runs, "ghost"))
            found[scaling][width] = over_seeds(list(by_seed(runs, apart).values()), "mean distance")
    widths = sorted({width for each in found.values() for width in each})
    lines = [
        (scaling, *(told(each.get(width), ".3f") for width in widths))
        for scaling, each in found.items()
    ]
    return Exhibit(
        "The mean distance of singular values from their ghosts, by width",
        ("scaling", *(f"width {width}" for width in widths)),
        tuple(lines),
        f"Natural logarithms under AdamW: {SEEDS}.",
    )


def gaps_by_width(rows: Table, scaling: str, kind: str) -> dict[int, Estimate]:
    """Measure the gap of a kind's norm at every width that ran."""
    about = {"stage": "width", "scaling": scaling, "component": "log_norm", "kind": kind}
    try:
        chosen = final(select(rows, **about))
    except LookupError:
        return {}
    found = {}
    for width, runs in sorted(chosen.by("width").items()):
        apart = column(runs, "value") - column(runs, "ghost")
        found[width] = over_seeds(list(by_seed(runs, apart).values()), "mean gap")
    return found


def width_by_kind_table(rows: Table) -> Exhibit:
    """Tabulate the gap of every kind's norm, by width."""
    found = {
        (scaling, kind): gaps_by_width(rows, scaling, kind)
        for scaling in ("standard", "mup")
        for kind in MATRICES
    }
    widths = sorted({width for each in found.values() for width in each})
    return Exhibit(
        "The gap of norms, by width",
        ("scaling", "kind", *(f"width {width}" for width in widths)),
        tuple(
            (*about, *(told(each.get(width)) for width in widths))
            for about, each in found.items()
            if each
        ),
        f"Natural logarithms under AdamW: {SEEDS}.",
    )


def file_table(rows: Table) -> Exhibit:
    """Tabulate how far public checkpoints lie from the nulls that a file allows."""
    nulls = (
        ("start", "log_norm"), ("white", "log_norm"), ("shaped", "log_sigma_1"),
        ("shaped", "log_sigma_50"), ("shaped", "log_sigma_min"),
    )  # fmt: skip
    lines = []
    for model in CHECKPOINTS:
        for kind in KINDS:
            where = {"model": model, "kind": kind}
            found = [measured(file_gap(null, (part,), **where), rows) for null, part in nulls]
            if any(found):
                cells = (told(e) if e and e.n else NONE for e in found)
                lines.append((model, kind, *cells))
    return Exhibit(
        "Public checkpoints: how far parts lie from the nulls that a file allows",
        (
            "model", "kind", "norm, from the start", "norm, from noise and decay",
            "sigma_1, from random", "median sigma, from random", "sigma_min, from random",
        ),
        tuple(lines),
        "Natural logarithms, means over the matrices of a kind with 95 % intervals. Random: noise "
        "with the matrix's own row and column norms.",
    )  # fmt: skip


# --- the figure -----------------------------------------------------------------------------------

DECILES = tuple(part for group in ("top", "bulk", "bottom") for part in GROUPS[group])


def along_the_spectrum(optimizer: str, title: str) -> Panel:
    """Draw the gap of every decile, kind by kind."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(
            axes, title, "singular value: first, above so many %, last", "log(trained / noise)"
        )
        n = 0
        for kind, colour in zip(MATRICES, SPARE, strict=False):
            found = [measured(gap(optimizer, (part,), (kind,)), rows) for part in DECILES]
            points = [(k, e) for k, e in enumerate(found) if e]
            if points:
                places, values = [k for k, _ in points], [e.value for _, e in points]
                axes.plot(places, values, "o-", markersize=3, color=colour, label=kind)
                ends = np.array([e.interval or (e.value, e.value) for _, e in points])
                axes.fill_between(places, ends[:, 0], ends[:, 1], color=colour, alpha=0.15)
                n = max(n, points[0][1].n)
        axes.axhspan(-MARGIN, MARGIN, color=INK, alpha=0.08)
        axes.set_xticks(range(len(DECILES)), ["1", *(f"{d}" for d in range(90, 0, -10)), "min"])
        if n:
            axes.legend(ncols=2)
        return f"{n} seeds"

    return draw


def over_decays(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw norms against decay: trained, ghosts, and the law without a free parameter."""
    drawing.entitle(axes, "Norm against decay", "sum of rate times decay", "log of the mean norm")
    n = 0
    for optimizer, colour in zip(OPTIMIZERS, SPARE, strict=False):
        for label, style in (("value", "o-"), ("ghost", "s--"), ("shaped", "x:")):
            points = {}
            for place, total in enumerate(SUMS):
                try:
                    chosen = cells(rows, optimizer, GROUPS["norm"], MATRICES, place)
                except LookupError:
                    continue
                means = by_seed(chosen, column(chosen, label))
                points[max(float(total), 0.2)] = float(np.mean(list(means.values())))
                n = max(n, len(means))
            if points:
                name = optimizer if label == "value" else None
                axes.plot(list(points), list(points.values()), style, color=colour, label=name)
    axes.set_xscale("log")
    axes.set_xticks([0.2, 1, 5, 30], ["0", "1", "5", "30"])
    if n:
        axes.legend()
    return f"{n} seeds"


def over_time(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw singular values during training at the centre: trained, ghosts, and the law."""
    drawing.entitle(axes, "AdamW's spectrum over time", "step", "mean log singular value")
    n = 0
    for part, colour in zip(("log_sigma_1", "log_sigma_50", "log_sigma_10"), SPARE, strict=False):
        about = {"stage": "grid", "optimizer": "AdamW", "decay": DECAYS["AdamW"][CENTRE]}
        try:
            chosen = select(rows, **about, component=part, kind=MATRICES)
        except LookupError:
            continue
        steps = column(chosen, "epoch")
        n = len(set(column(chosen, "seed").tolist()))
        for label, style in (("value", "o-"), ("ghost", "s--"), ("shaped", "x:")):
            values = column(chosen, label)
            points = {step: float(values[steps == step].mean()) for step in sorted(set(steps))}
            name = part.removeprefix("log_") if label == "value" else None
            axes.plot(list(points), list(points.values()), style, color=colour, label=name)
    if n:
        axes.legend()
    return f"{n} seeds"


def against_the_level(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw the loss against the level at which the norm, or the lower half, is held."""
    drawing.entitle(axes, "Loss of holding a part", "multiple of its value", "nats a character")
    n = 0
    arms = [(o, held) for o in LEARNERS for held in ("norm", "tail", "share")]
    for (optimizer, held), colour in zip(arms, SPARE, strict=False):
        found = {name: measured(m, rows) for name, m in levels(optimizer, held).items()}
        points = {float(name.split()[1]): e for name, e in found.items() if e}
        if points:
            x = sorted({*points, 1.0})
            known = [points.get(level) for level in x]
            ends = [(e.interval or (e.value, e.value)) if e else (0.0, 0.0) for e in known]
            y = [e.value if e else 0.0 for e in known]
            axes.plot(x, y, "o-", color=colour, label=f"{optimizer}, {held}")
            lows, highs = zip(*ends, strict=True)
            axes.fill_between(x, lows, highs, color=colour, alpha=0.15)
            n = max(n, *(e.n for e in points.values()))
    axes.set_xscale("log", base=2)
    axes.set_xticks([0.25, 0.5, 1.0, 2.0, 4.0], ["1/4", "1/2", "1", "2", "4"])
    axes.axhline(0.0, color=INK, linewidth=0.5)
    if axes.get_legend_handles_labels()[1]:
        axes.legend()
    return f"{n} seeds"


def over_widths(scaling: str, title: str) -> Panel:
    """Draw the gap of every kind's norm against the width, in doublings."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title, "width", "log(trained / noise)")
        n, widths = 0, set[int]()
        for kind, colour in zip(MATRICES, SPARE, strict=False):
            found = gaps_by_width(rows, scaling, kind)
            if found:
                places, values = np.log2([*found]), [e.value for e in found.values()]
                axes.plot(places, values, "o-", markersize=4, color=colour, label=kind)
                ends = np.array([e.interval or (e.value, e.value) for e in found.values()])
                axes.fill_between(places, ends[:, 0], ends[:, 1], color=colour, alpha=0.15)
                n, widths = max(n, *(e.n for e in found.values())), widths | {*found}
        axes.axhspan(-MARGIN, MARGIN, color=INK, alpha=0.08)
        axes.set_xticks(np.log2(sorted(widths)), [str(width) for width in sorted(widths)])
        axes.set_ylim(-1.0, 0.8)
        if n:
            axes.legend(ncols=3, loc="upper center")
        return f"{n} seeds"

    return draw


def against_a_public_model(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw the norm of every kind of matrix against noise: this study's GPT, and a public Llama."""
    drawing.entitle(axes, "Norm against noise, by kind", "", "log(trained / noise)")
    sources: dict[str, dict[str, Measure]] = {
        "this GPT, ghosts": {kind: gap("AdamW", GROUPS["norm"], (kind,)) for kind in MATRICES},
        "stories15m, published settings": {
            kind: file_gap("white", GROUPS["norm"], model="stories15m", kind=kind) for kind in KINDS
        },
    }
    n = 0
    for (label, measures), colour, shift in zip(sources.items(), SPARE, (-0.1, 0.1), strict=False):
        found = {kind: measured(measure, rows) for kind, measure in measures.items()}
        known = {kind: e for kind, e in found.items() if e and e.interval}
        if known:
            places = [KINDS.index(kind) + shift for kind in known]
            values = np.array([e.value for e in known.values()])
            ends = np.array([e.interval for e in known.values()])
            reach = np.abs(ends - values[:, None]).T
            axes.errorbar(places, values, reach, fmt="o", color=colour, label=label)
            n = max(n, *(e.n for e in known.values()))
    axes.axhspan(-MARGIN, MARGIN, color=INK, alpha=0.08)
    axes.set_xticks(range(len(KINDS)), KINDS)
    if n:
        axes.legend()
    return f"{n} seeds or matrices of a kind"


plot = sheet(
    along_the_spectrum("AdamW", "Trained against noise, AdamW"),
    along_the_spectrum("Muon", "Trained against noise, Muon"),
    over_decays,
    over_time,
    against_the_level,
    against_a_public_model,
    over_widths("mup", "Norm against noise, by width, muP"),
    over_widths("standard", "Norm against noise, by width, standard"),
    marks="Means over seeds, bands: 95 % intervals; grey: within ten per cent of noise. Dots: "
    "trained; squares, dashed: ghosts; crosses, dotted: the law of noise with measured "
    "covariances.",
)
