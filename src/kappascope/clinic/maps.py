"""Where each matrix of a model stands: lines for layers, columns for what a matrix does there."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kappascope.clinic.examination import Examination
from kappascope.clinic.metrics import RATIO_LEVELS
from kappascope.pages.rendering import legible
from kappascope.text import number

KINDS = (
    "embedding", "query", "key", "value", "fused", "output", "gate", "up", "down", "expert",
    "convolution", "other", "head",
)  # fmt: skip
"""Columns in the order in which data flow; kinds not named here come after these."""


def one_line(name: str) -> str:
    r"""Return a name on one line, and something to press where there is none.

    >>> one_line("two\nlines"), one_line("")
    ('two\\nlines', '(no name)')
    """
    return legible(name).replace("\n", "\\n") or "(no name)"


@dataclass(frozen=True)
class HeatMap:
    """Columns, and for every line its head and cells (None where there is nothing)."""

    columns: tuple[str, ...]
    lines: tuple[tuple[Any, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class Cell:
    """The matrices of one kind in one layer; one that failed or is farthest above chance is shown.

    >>> from kappascope.model.skipped import unreadable
    >>> Cell((Examination.failed("w", (1, 2), "float32", unreadable("NaN")),)).text
    '✗'
    """

    rows: tuple[Examination, ...]

    @property
    def worst(self) -> Examination:
        """The matrix that is shown."""
        return max(self.rows, key=lambda row: (row.failure is not None, row.ratio or 0.0))

    @property
    def severity(self) -> str:
        """The severity of the worst finding in it, or nothing."""
        return max(self.rows, key=lambda row: row.gravity).severity

    @property
    def text(self) -> str:
        """What is written in the cell."""
        if self.worst.ratio is None:
            return "✗" if self.worst.failure else "·"
        return f"×{number(self.worst.ratio, 2)}"

    @property
    def label(self) -> str:
        """What hovering, focus and screen readers tell."""
        row, many = self.worst, len(self.rows)
        findings, name = sum(len(each.findings) for each in self.rows), one_line(row.name)
        parts = [
            f"{many} matrices, shown is {name}" if many > 1 else name,
            _compared(row),
            "not resolved by its dtype" if row.is_unresolved else "",
            f"{findings} finding{'s' * (findings != 1)}" if findings else "",
        ]
        return "; ".join(part for part in parts if part)


def _compared(row: Examination) -> str:
    """Return the condition number beside that of a random matrix, in words."""
    if row.failure is not None:
        return row.status
    if row.ratio is None:
        return row.reasons.get("condition_number") or "κ unknown"
    least = "at least " if row.is_bounded else ""
    beside = "" if row.null_z is None or row.is_bounded else f" (z {number(row.null_z)})"
    times = f"{least}{number(row.ratio, 2)} times that of a random matrix of its shape"
    return f"κ {least}{number(row.kappa)}, {times}{beside}"


def ratio_level(row: Examination) -> int | None:
    """Tell how many of RATIO_LEVELS a matrix's ratio exceeds, or (negative) its inverse does.

    What is only bounded is not shown below chance, where it need not be.

    >>> ratio_level(Examination("w", (1, 9), "", "ok", condition_number=1.0, resolved=True))
    0
    """
    if row.ratio is None:
        return None
    if row.ratio >= 1:
        return bisect_right(RATIO_LEVELS, row.ratio)
    return 0 if row.is_bounded else -bisect_right(RATIO_LEVELS, 1 / row.ratio)


def heat_map(rows: Iterable[Examination]) -> HeatMap:
    """Return the matrices by depth and kind.

    >>> kinds = ("up", "query")
    >>> rows = [Examination(k, (2, 2), "", "ok", kind=k, depth=d) for d in (0, 1) for k in kinds]
    >>> heat_map(rows).columns, [depth for depth, _ in heat_map(rows).lines]
    (('query', 'up'), [0, 1])
    """
    cells: dict[tuple[int | None, str], list[Examination]] = {}
    for row in rows:
        cells.setdefault((row.depth, row.kind), []).append(row)
    depths = sorted({depth for depth, _ in cells}, key=lambda d: (d is None, d or 0))
    columns = tuple(sorted({kind for _, kind in cells}, key=flow_order))
    lines = []
    for depth in depths:
        groups = (cells.get((depth, kind)) for kind in columns)
        lines.append((depth, tuple(Cell(tuple(those)) if those else None for those in groups)))
    return HeatMap(columns, tuple(lines))


def flow_order(kind: str) -> tuple[int, str]:
    """Return the key that sorts kinds in the order in which data flow.

    >>> sorted(["down", "query", "mixer"], key=flow_order)
    ['query', 'down', 'mixer']
    """
    return (KINDS.index(kind) if kind in KINDS else len(KINDS)), kind
