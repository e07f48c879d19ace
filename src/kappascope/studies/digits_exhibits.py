"""What the digits show: the grid of correlations, the networks themselves, and six panels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from kappascope import drawing
from kappascope.claims import Measure
from kappascope.drawing import FAINT
from kappascope.figures import Panel, sheet
from kappascope.lab import Exhibit
from kappascope.prose import words
from kappascope.series import SPARE
from kappascope.statistics import Table
from kappascope.studies.digits_claims import (
    ALL,
    KAPPA,
    LEVEL,
    MEDIUM,
    NORMS,
    OTHERS,
    TESTS,
    across,
    arrived,
    medians,
    within,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS: dict[str, Callable[..., Measure]] = {"across settings": across, "between seeds": within}
OUTCOME = {
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
    """Correlations with every outcome, alone and beyond the norms; the networks by setting."""
    for kind, measure in KINDS.items():
        yield correlations(rows, measure, f"Beyond the norms, {kind}", (KAPPA, *OTHERS), NORMS)
    for kind, measure in KINDS.items():
        names = (KAPPA, *NORMS, "stable_rank")
        yield correlations(rows, measure, f"Norms not given, {kind}", names, ())
    yield networks(rows)


def correlations(
    rows: Table,
    measure: Callable[..., Measure],
    title: str,
    components: tuple[str, ...],
    given: tuple[str, ...],
) -> Exhibit:
    """Rank correlations with intervals, of every component with every outcome."""

    def cell(component: str, outcome: str) -> str:
        found = measure(component, outcome, given)(rows)
        sure = measure(component, outcome, given, level=ALL)(rows).interval
        return f"{found:.2f}" + " *" * bool(sure and not sure[0] <= 0 <= sure[1])

    return Exhibit(
        title,
        ("outcome", *map(words, components)),
        tuple((OUTCOME[one], *(cell(name, one) for name in components)) for one in OUTCOME),
        "Rank correlations of mean logarithms over the matrices, 95 % intervals; training loss"
        f"{', shape' * (measure is across)}{', norms' * bool(given)} given. "
        f"*: not zero even if {TESTS} are looked at. Of every outcome, less is better.",
    )


def networks(rows: Table) -> Exhibit:
    """What the networks are worth, by the values of a setting."""
    names = ("optimizer", "width", "depth", "decay", "scale", "batch")
    parts = [
        (f"{words(name)} {words(value)}", part)
        for name in names
        for value, part in rows.by(name).items()
    ]
    return Exhibit(
        "Networks",
        ("setting", "arrived", "accuracy", "calibration", "noise", "4 bits", "κ"),
        tuple(line(name, part) for name, part in [("all", rows), *parts]),
        f"Medians of the networks that arrived at a training cross-entropy of {LEVEL}. On 897 "
        "images an accuracy of 96 % has a standard error of 0.7 %; noise: points of accuracy "
        "lost; 4 bits: rise of the cross-entropy; κ: geometric mean over the matrices. One split "
        "of the images and one set of noise serve all networks.",
    )


def line(name: str, rows: Table) -> tuple[str, ...]:
    """How many networks of a setting arrived, and the middle ones of those."""
    nets, count = arrived(rows), len(rows.where(component="train_loss"))
    told = (name, f"{len(nets.draw)} of {count}")
    if not len(nets.draw):
        return (*told, *["–"] * 5)
    of = ("error", "calibration", "noise", "int4", KAPPA)
    error, calibration, noise, bits, kappa = (float(np.median(nets.of(one))) for one in of)
    worth = f"{100 * (1 - error):.1f} %", f"{calibration:.3f}", f"{100 * noise:.1f} %"
    return (*told, *worth, f"{bits:.3f}", f"{np.exp(kappa):.1f}")


def cloud(component: str, outcome: str) -> Panel:
    """The median network of every setting, coloured by optimizer."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        title = f"{OUTCOME[outcome].capitalize()} and {words(component)}"
        drawing.entitle(axes, title, AXES[component], AXES[outcome])
        parts = rows.by("optimizer") if len(rows) else {}
        for part, colour in zip(parts.values(), SPARE, strict=False):
            nets = arrived(part)
            x, y = (medians(nets, nets.of(one)) for one in (component, outcome))
            axes.scatter(x, y, s=12, color=colour, alpha=0.7, linewidths=0)
        tag(axes, [(words(name), colour) for name, colour in zip(parts, SPARE, strict=False)])
        return f"{len(np.unique(arrived(rows).draw))} settings"

    return draw


def forest(component: str, given: tuple[str, ...], title: str) -> Panel:
    """The intervals of the correlations with every outcome, across settings and between seeds."""

    def draw(axes: Axes, rows: Table, spectra: Table) -> str:
        drawing.entitle(axes, title, "rank correlation")
        axes.set(xlim=(-1, 1), ylim=(len(OUTCOME) - 0.4, -1.8), xticks=(-1, -0.5, 0, 0.5, 1))
        axes.set_yticks(range(len(OUTCOME)), list(OUTCOME.values()), fontsize=8)
        for bound in (-MEDIUM, 0, MEDIUM):
            axes.axvline(bound, color=FAINT, linewidth=0.8, linestyle="-" if not bound else ":")
        tag(axes, list(zip(KINDS, SPARE, strict=False)))
        for lane, (measure, colour) in enumerate(zip(KINDS.values(), SPARE, strict=False)):
            for row, outcome in enumerate(OUTCOME if len(rows) else ()):
                found = measure(component, outcome, given)(rows)
                height = drawing.lanes(row, len(KINDS))[lane]
                axes.plot(found.value, height, "o", color=colour, markersize=3.5)
                axes.hlines(height, *(found.interval or 2 * (found.value,)), color=colour)
        return f"{len(arrived(rows).draw)} networks"

    return draw


def inheritance(axes: Axes, rows: Table, spectra: Table) -> str:
    """Kappa of the first matrix, before and after training, coloured by width."""
    drawing.entitle(axes, "First matrix", "log κ at the start", "log κ in the end")
    parts = rows.by("width") if len(rows) else {}
    for part, colour in zip(parts.values(), SPARE, strict=False):
        nets = arrived(part)
        drawing.cloud(axes, nets.of(KAPPA, "start"), nets.of(KAPPA, "0"), colour)
    axes.axline((2, 2), slope=1, color=FAINT, linewidth=0.8)
    tag(axes, [(f"{width} wide", colour) for width, colour in zip(parts, SPARE, strict=False)])
    return f"{len(arrived(rows).draw)} networks"


def tag(axes: Axes, names: list[tuple[str, str]]) -> None:
    """Names in their colours, in the upper left corner."""
    for place, (name, colour) in enumerate(names):
        axes.text(
            0.02, 0.94 - 0.07 * place, name, color=colour, fontsize=8, transform=axes.transAxes
        )


plot = sheet(
    forest(KAPPA, NORMS, "κ, the norms given"),
    forest("spectral_norm", (KAPPA,), "Spectral norm, κ given"),
    cloud(KAPPA, "error"),
    cloud("spectral_norm", "noise"),
    cloud(KAPPA, "int4"),
    inheritance,
    marks=f"Bars: 95 % intervals; dotted: {MEDIUM}, where telling begins. Of every outcome, less "
    "is better. Points: the median networks of settings; in f networks. κ and norms: means of "
    "logarithms over the matrices.",
)
