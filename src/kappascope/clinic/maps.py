"""Where each matrix of a model stands: lines for layers, columns for what a matrix does there."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kappascope.clinic.examination import Examination
from kappascope.model.adapters import adapted_layer
from kappascope.pages.rendering import legible
from kappascope.text import number

KINDS = (
    "embedding", "query", "key", "value", "fused", "output", "gate", "up", "down", "expert",
    "convolution", "other", "head",
)  # fmt: skip
"""Columns in the order in which data flow; kinds not named here come after these."""
ATTENTION = {"query", "key", "value", "fused", "output"}  # kinds that make a model a transformer
MOST_IN_CELL = 24  # matrices of one kind in one layer that are shown one by one


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
    """The matrices that do the same in one layer, the worst of them first."""

    rows: tuple[Examination, ...]

    @property
    def shown(self) -> tuple[Examination, ...]:
        """The matrices that have a place of their own in the cell."""
        return self.rows[:MOST_IN_CELL]


def matrix_label(row: Examination) -> str:
    """Return what hovering, focus and screen readers tell of a matrix.

    >>> matrix_label(Examination("w", (1, 9), "", "ok", condition_number=1.0, resolved=True))
    'w; κ 1.00, 1.0 × chance'
    """
    found = len(row.findings)
    parts = [
        one_line(row.name),
        _compared(row),
        "not resolved by its dtype" if row.is_unresolved else "",
        f"{found} finding{'s' * (found != 1)}" if found else "",
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
    times = f"{least}{number(row.ratio, 2)} × chance"
    return f"κ {least}{number(row.kappa)}, {times}{beside}"


def heat_map(rows: Sequence[Examination]) -> HeatMap:
    """Return the matrices by layer and kind or, where there is no attention, by their own names.

    >>> kinds = ("up", "query")
    >>> rows = [Examination(k, (2, 2), "", "ok", kind=k, depth=d) for d in (0, 1) for k in kinds]
    >>> heat_map(rows).columns, [depth for depth, _ in heat_map(rows).lines]
    (('query', 'up'), [0, 1])
    >>> names = "conv1.weight", "conv2.weight", "blocks.0.conv1.weight"
    >>> grid = heat_map([Examination(name, (2, 2), "", "ok") for name in names])
    >>> grid.columns, [head for head, _ in grid.lines]
    (('conv1', 'conv2'), [None, 'blocks.0'])
    """
    is_transformer = any(row.kind in ATTENTION for row in rows)
    places = [(row.depth, row.kind) if is_transformer else own_place(row.name) for row in rows]
    cells: dict[tuple[Any, str], list[Examination]] = {}
    for place, row in zip(places, rows, strict=True):
        cells.setdefault(place, []).append(row)
    heads = list(dict.fromkeys(head for head, _ in places))
    columns = list(dict.fromkeys(column for _, column in places))
    if is_transformer:
        heads.sort(key=lambda depth: (depth is None, depth or 0))
        columns.sort(key=flow_order)
    lines = []
    for head in heads:
        groups = (cells.get((head, column)) for column in columns)
        lines.append((head, tuple(_cell(those) if those else None for those in groups)))
    return HeatMap(tuple(columns), tuple(lines))


def _cell(rows: Sequence[Examination]) -> Cell:
    return Cell(tuple(sorted(rows, key=lambda row: row.badness, reverse=True)))


def own_place(name: str) -> tuple[str | None, str]:
    """Return the numbered block that a matrix stands in, if any, and its name there.

    >>> own_place("layer1.0.conv2.weight"), own_place("classifier.weight"), own_place("2.weight")
    (('layer1.0', 'conv2'), (None, 'classifier'), ('2', 'weight'))
    """
    path = adapted_layer(name).split(".")
    last = max((k for k, part in enumerate(path) if re.fullmatch(r"\d+", part)), default=-1)
    block, inside = path[: last + 1], path[last + 1 :]
    return ".".join(block) or None, ".".join(inside) or "weight"


def flow_order(kind: str) -> tuple[int, str]:
    """Return the key that sorts kinds in the order in which data flow.

    >>> sorted(["down", "query", "mixer"], key=flow_order)
    ['query', 'down', 'mixer']
    """
    return (KINDS.index(kind) if kind in KINDS else len(KINDS)), kind
