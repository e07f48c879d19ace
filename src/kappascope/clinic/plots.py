"""Figures of a diagnosis for notebooks and papers: the map of the model, and one spectrum."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kappascope.clinic.examination import Examination
from kappascope.clinic.maps import heat_map
from kappascope.clinic.metrics import Metric
from kappascope.system.extras import optional
from kappascope.text import clean

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes


def map_axes(rows: Sequence[Examination], shown: Metric, axes: Axes | None) -> Axes:
    """Draw layers by kinds of matrix, darker where a number is unusual, red where rules object."""
    axes = axes if axes is not None else _new_axes()
    grid = heat_map(rows)
    for y, (_, cells) in enumerate(grid.lines):
        for x, cell in enumerate(cells):
            if cell is None:
                continue
            row = max(cell.rows, key=lambda one: (one.is_alarming, shown.level_of(one) or 0))
            share = 0.12 + 0.15 * (shown.level_of(row) or 0)
            alarm = any(one.is_alarming for one in cell.rows)
            colour = ("#b3360b" if alarm else "#17609c", share)
            axes.add_patch(_rectangle(x, y, colour))
            axes.text(x, y, shown.text(row), ha="center", va="center", fontsize="small")
    axes.set_xticks(range(len(grid.columns)), [clean(name) for name in grid.columns], rotation=45)
    axes.set_yticks(range(len(grid.lines)), ["–" if d is None else str(d) for d, _ in grid.lines])
    axes.set_xlim(-0.5, len(grid.columns) - 0.5)
    axes.set_ylim(len(grid.lines) - 0.5, -0.5)
    axes.set_ylabel("layer")
    axes.set_title(shown.label)
    return axes


def spectrum_axes(row: Examination, axes: Axes | None) -> Axes:
    """Draw the singular values of a matrix beside those of a random matrix of its size."""
    axes = axes if axes is not None else _new_axes()
    points = row.plot.get("spectrum") or ()
    if not points:
        why = row.reasons.get("entropy_rank") or row.status
        raise ValueError(f"no singular values were kept of {clean(row.name)}: {clean(why)}")
    axes.loglog(*zip(*points, strict=True), marker=".", label="singular values")
    if chance := row.plot.get("null"):
        axes.loglog(*zip(*chance, strict=True), "k--", label="random matrix")
    floor = row.plot.get("floor")
    if floor and floor > 0:
        axes.axhline(floor, color="#b3360b", linestyle=":", label="resolved by the dtype above")
    axes.set_xlabel("index from the largest")
    axes.set_ylabel("singular value")
    axes.set_title(clean(row.name))
    axes.legend()
    return axes


def _new_axes() -> Axes:
    optional("matplotlib", "lab")
    from matplotlib.figure import Figure  # no global state: a figure that nobody keeps is freed

    axes: Axes = Figure(layout="constrained").subplots()
    return axes


def _rectangle(x: float, y: float, colour: Any) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, facecolor=colour)
