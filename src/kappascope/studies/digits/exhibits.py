"""The tables and the figure of the digits: correlations with every outcome, and the networks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from kappascope.lab import drawing
from kappascope.lab.drawing import FAINT, SPARE
from kappascope.lab.experiment import Exhibit
from kappascope.lab.figures import Panel, sheet
from kappascope.lab.measures import KAPPA
from kappascope.lab.table import Table
from kappascope.studies.digits.claims import (
    CORRELATIONS,
    JOINT_LEVEL,
    NORMS,
    OTHERS,
    TELLING,
    Correlation,
    arrived,
    medians,
)
from kappascope.studies.digits.model import TRAIN_LOSS
from kappascope.text import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = {"across settings": Correlation.across, "between seeds": Correlation.within}
OUTCOME_NAMES = {
    "error": "error rate",
    "cross_entropy": "loss",
    "calibration": "calibration",
    "brier": "Brier score",
    "noise": "noise",
    "int8": "8 bits",
    "int4": "4 bits",
    "int3": "3 bits",
}
AXES = {
    KAPPA: "mean log κ",
    "spectral_norm": "mean log spectral norm",
    "error": "error rate",
    "noise": "accuracy lost to noise",
    "int4": "loss added by 4 bits",
}


def exhibits(rows: Table) -> Iterator[Exhibit]:
    """Yield correlations with every outcome, beyond the norms and without; then the networks."""
    for kind in KINDS:
        yield correlations(rows, kind, "Beyond the norms", (KAPPA, *OTHERS), NORMS)
    for kind in KINDS:
        yield correlations(rows, kind, "Norms not given", (KAPPA, *NORMS, "stable_rank"), ())
    yield networks(rows)


def correlations(
    rows: Table, kind: str, title: str, components: tuple[str, ...], given: tuple[str, ...]
) -> Exhibit:
    """Tabulate the rank correlation of every component with every outcome."""

    def cell(component: str, outcome: str) -> str:
        estimate = KINDS[kind](Correlation(component, outcome, given), rows)
        joint = KINDS[kind](Correlation(component, outcome, given, level=JOINT_LEVEL), rows)
        star = joint.interval and not joint.interval[0] <= 0 <= joint.interval[1]
        return f"{estimate:.2f}" + " *" * bool(star)

    return Exhibit(
        f"{title}, {kind}",
        ("outcome", *map(words, components)),
        tuple(
            (name, *(cell(component, outcome) for component in components))
            for outcome, name in OUTCOME_NAMES.items()
        ),
        "Rank correlations of the outcome with the mean logarithm of the component over the "
        "matrices, with 95 % intervals. Held fixed: training loss"
        f"{', shape' * (kind == 'across settings')}{', norms' * bool(given)}. A star: the "
        f"correlation differs from zero when all {CORRELATIONS} correlations of the table are "
        "tested together. Less is better for every outcome.",
    )


def networks(rows: Table) -> Exhibit:
    """Count the networks that arrived, and give their medians, by the values of a setting."""

    def line(name: str, part: Table) -> tuple[str, ...]:
        nets, count = arrived(part), len(part.where(component="train_loss"))
        head = (name, f"{len(nets.draw)} of {count}")
        if not len(nets.draw):
            return (*head, *["–"] * 5)
        names = ("error", "calibration", "noise", "int4", KAPPA)
        error, calibration, noise, bits, kappa = (float(np.median(nets.of(n))) for n in names)
        worth = f"{100 * (1 - error):.1f} %", f"{calibration:.3f}", f"{100 * noise:.1f} %"
        return (*head, *worth, f"{bits:.3f}", f"{np.exp(kappa):.1f}")

    parts = [
        (f"{words(name)} {words(value)}", part)
        for name in ("optimizer", "width", "depth", "decay", "scale", "batch")
        for value, part in rows.by(name).items()
    ]
    return Exhibit(
        "Networks",
        ("setting", "arrived", "accuracy", "calibration", "noise", "4 bits", "κ"),
        tuple(line(name, part) for name, part in [("all", rows), *parts]),
        f"Medians of the networks that arrived at a training cross-entropy of {TRAIN_LOSS}. On 897 "
        "images an accuracy of 96 % has a standard error of 0.7 %. Noise: points of accuracy that "
        "noise in the pixels costs. 4 bits: rise of the cross-entropy when weights are rounded. "
        "κ: geometric mean over the matrices. All networks have the same split of the images and "
        "the same noise.",
    )


def cloud(component: str, outcome: str) -> Panel:
    """Draw the median network of every setting, coloured by optimizer."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        title = f"{OUTCOME_NAMES[outcome].capitalize()} and {words(component)}"
        drawing.entitle(axes, title, AXES[component], AXES[outcome])
        parts = rows.by("optimizer") if len(rows) else {}
        for part, colour in zip(parts.values(), SPARE, strict=False):
            nets = arrived(part)
            x, y = (medians(nets, nets.of(name)) for name in (component, outcome))
            drawing.cloud(axes, x, y, colour)
        drawing.key(
            axes, [(words(name), colour) for name, colour in zip(parts, SPARE, strict=False)]
        )
        return f"{len(np.unique(arrived(rows).draw))} settings"

    return draw


def forest(component: str, given: tuple[str, ...], title: str) -> Panel:
    """Draw the intervals of the correlations with every outcome, for both kinds."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title, "rank correlation")
        axes.set(xlim=(-1, 1), ylim=(len(OUTCOME_NAMES) - 0.4, -1.8), xticks=(-1, -0.5, 0, 0.5, 1))
        axes.set_yticks(range(len(OUTCOME_NAMES)), list(OUTCOME_NAMES.values()), fontsize=8)
        for bound in (-TELLING, 0, TELLING):
            axes.axvline(bound, color=FAINT, linewidth=0.8, linestyle="-" if not bound else ":")
        drawing.key(axes, list(zip(KINDS, SPARE, strict=False)))
        for lane, (measure, colour) in enumerate(zip(KINDS.values(), SPARE, strict=False)):
            for row, outcome in enumerate(OUTCOME_NAMES if len(rows) else ()):
                estimate = measure(Correlation(component, outcome, given), rows)
                height = drawing.lanes(row, len(KINDS))[lane]
                axes.plot(estimate.value, height, "o", color=colour, markersize=3.5)
                axes.hlines(height, *(estimate.interval or 2 * (estimate.value,)), color=colour)
        return f"{len(arrived(rows).draw)} networks"

    return draw


def inheritance(axes: Axes, rows: Table, spectra: Table) -> str:
    """Draw kappa of the first matrix before and after training, coloured by width."""
    drawing.entitle(axes, "First matrix", "log κ at the start", "log κ in the end")
    parts = rows.by("width") if len(rows) else {}
    for part, colour in zip(parts.values(), SPARE, strict=False):
        nets = arrived(part)
        drawing.cloud(axes, nets.of(KAPPA, "start"), nets.of(KAPPA, "0"), colour)
    axes.axline((2, 2), slope=1, color=FAINT, linewidth=0.8)
    drawing.key(
        axes, [(f"{width} wide", colour) for width, colour in zip(parts, SPARE, strict=False)]
    )
    return f"{len(arrived(rows).draw)} networks"


plot = sheet(
    forest(KAPPA, NORMS, "κ, the norms given"),
    forest("spectral_norm", (KAPPA,), "Spectral norm, κ given"),
    cloud(KAPPA, "error"),
    cloud("spectral_norm", "noise"),
    cloud(KAPPA, "int4"),
    inheritance,
    marks=f"Bars: 95 % intervals; dotted: {TELLING}, where telling begins. Of every outcome, less "
    "is better. Points: the median networks of settings; in f networks. κ and norms: means of "
    "logarithms over the matrices.",
)
