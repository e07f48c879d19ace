"""A model at a glance: its matrices by depth and kind, worst first, beside chance or a reference.

Condition numbers are compared after division by what a random matrix of the same shape has: that
ratio means the same for a square and for a long matrix, which z does not, for long random matrices
have almost one and the same condition number.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from statistics import median
from typing import Any

from kappascope.clinic import SEVERITIES
from kappascope.clinic.status import INFINITE, Status
from kappascope.components import Components
from kappascope.prose import number
from kappascope.theory import GaussianNull

Matrix = Mapping[str, Any]
"""One matrix as the diagnosis document tells of it."""

KINDS = (
    "embedding", "query", "key", "value", "fused", "output", "gate", "up", "down", "expert",
    "convolution", "other", "head",
)  # fmt: skip
"""Columns in the order in which data flow; kinds not named here come after these."""
FACTORS = (1.5, 3, 10, 100, 1000)  # of kappa over its null; chance alone gives a square one 3
MOVES = (1e-3, 1e-2, 0.1, 1)  # of relative errors; below the first even bfloat16 hides a move
RANKS: Mapping[str, int] = {severity: rank for rank, severity in enumerate(SEVERITIES, 1)}


@dataclass(frozen=True)
class Row:
    """A matrix in the table of all.

    >>> row = Row({"name": "w", "shape": [1, 9], "condition_number": 1.0})
    >>> row.ratio, row.level, row.severity
    (1.0, 0, '')
    """

    matrix: Matrix

    @property
    def name(self) -> str:
        """On one line, and something to press."""
        return str(self.matrix.get("name", "")).replace("\n", "\\n") or "(no name)"

    @property
    def place(self) -> int:
        """Its place in the document."""
        return int(self.matrix["place"])

    @property
    def status(self) -> Status:
        """What became of it."""
        return Status(str(self.matrix.get("status") or ""))

    @property
    def failed(self) -> bool:
        """Whether nothing is known of it."""
        return self.status.failed

    @property
    def unresolved(self) -> bool:
        """Whether rounding to the stored dtype alone could give such a condition number."""
        nothing = self.status.word in ("failed", "degenerate")  # to be resolved
        return self.matrix.get("resolved") is False and not nothing

    @property
    def severity(self) -> str:
        """That of its worst finding, or nothing."""
        found = (one.get("severity", "") for one in self.matrix.get("findings") or ())
        return max(found, key=lambda s: RANKS.get(s, 0), default="")

    @property
    def bounded(self) -> bool:
        """Whether of the condition number no more is known than the least that it can be."""
        return self.unresolved or self.matrix.get("condition_number") is None

    @property
    def kappa(self) -> float | None:
        """The condition number, infinite for a singular matrix, or the least that it can be.

        >>> Row({"condition_number": 900.0, "condition_number_low": 30.0, "resolved": False}).kappa
        30.0
        """
        known: float | None = None if self.bounded else self.matrix["condition_number"]
        least: float | None = self.matrix.get("condition_number_low")
        why = Status(str((self.matrix.get("reasons") or {}).get("condition_number")))
        infinite = math.inf if why.word == INFINITE else None
        return next((k for k in (known, least, infinite) if k is not None), None)

    @cached_property
    def ratio(self) -> float | None:
        """The condition number, or its least, over that of a random matrix of this shape."""
        shape = self.matrix.get("shape") or ()
        if not self.kappa or len(shape) != 2 or min(shape) < 1:
            return None
        usual = self.matrix.get("null_condition_number")  # a tenth of a second where it is not told
        return self.kappa / (usual or math.exp(GaussianNull(*shape).log_condition_number))

    @property
    def level(self) -> int | None:
        """How many of FACTORS its ratio exceeds, or (negative) its inverse does.

        What is only bounded is not shown below chance, where it need not be.
        """
        if self.ratio is None:
            return None
        if self.ratio >= 1:
            return bisect_right(FACTORS, self.ratio)
        return 0 if self.bounded else -bisect_right(FACTORS, 1 / self.ratio)

    @property
    def size(self) -> int:
        """Entries."""
        return math.prod(self.matrix.get("shape") or ())

    @property
    def rank(self) -> int:
        """Its severity as a number."""
        return RANKS.get(self.severity, 0)

    @property
    def badness(self) -> tuple[bool, int, float]:
        """What cannot be measured is worst, then what has findings, then what is far from chance.

        >>> Row({"status": "failed: not finite"}).badness > Row({"condition_number": 1e9}).badness
        True
        """
        return self.failed, self.rank, self.ratio or 0.0


def ranked(matrices: Iterable[Matrix]) -> list[Row]:
    """Worst first.

    >>> kappas = {"a": 2.0, "b": 9e9, "c": None}
    >>> many = [{"name": n, "shape": [4, 4], "condition_number": k} for n, k in kappas.items()]
    >>> [row.name for row in ranked(many)]
    ['b', 'a', 'c']
    """
    return sorted(map(Row, matrices), key=lambda row: row.badness, reverse=True)


@dataclass(frozen=True)
class Cell:
    """The matrices of one kind in one layer; one that failed or is farthest above chance is shown.

    >>> Cell((Row({"shape": [1, 2], "condition_number": 1.0}), Row({"status": "failed: NaN"}))).text
    '✗'
    """

    rows: tuple[Row, ...]

    @property
    def worst(self) -> Row:
        """The one shown."""
        return max(self.rows, key=lambda row: (row.failed, row.ratio or 0.0))

    @property
    def severity(self) -> str:
        """That of the worst finding in it."""
        return max((row.severity for row in self.rows), key=lambda s: RANKS.get(s, 0))

    @property
    def text(self) -> str:
        """What stands in it."""
        if self.worst.ratio is None:
            return "✗" if self.worst.failed else "·"
        return f"×{number(self.worst.ratio, 2)}"

    @property
    def label(self) -> str:
        """What hovering, focus and screen readers tell."""
        row, many = self.worst, len(self.rows)
        found = sum(len(one.matrix.get("findings") or ()) for one in self.rows)
        parts = [
            f"{many} matrices, shown is {row.name}" if many > 1 else row.name,
            _compared(row),
            "not resolved by its dtype" if row.unresolved else "",
            f"{found} finding{'s' * (found != 1)}" if found else "",
        ]
        return "; ".join(part for part in parts if part)


def _compared(row: Row) -> str:
    if row.failed:
        return str(row.matrix["status"])
    if row.ratio is None:
        return str((row.matrix.get("reasons") or {}).get("condition_number") or "κ unknown")
    z, least = row.matrix.get("null_z"), "at least " if row.bounded else ""
    beside = "" if z is None or row.bounded else f" (z {number(z)})"
    times = f"{least}{number(row.ratio, 2)} times that of a random matrix of its shape"
    return f"κ {least}{number(row.kappa)}, {times}{beside}"


@dataclass(frozen=True)
class Grid:
    """A heat map: columns, and for every line its head and cells (None where there is nothing)."""

    columns: tuple[str, ...]
    lines: tuple[tuple[Any, tuple[Any, ...]], ...]


def heat(rows: Iterable[Row]) -> Grid:
    """Depth by kind.

    >>> rows = ranked({"name": k, "depth": d, "kind": k} for d in (0, 1) for k in ("up", "query"))
    >>> grid = heat(rows)
    >>> grid.columns, [depth for depth, _ in grid.lines]
    (('query', 'up'), [0, 1])
    """
    cells: dict[tuple[Any, str], list[Row]] = {}
    for row in rows:
        cells.setdefault((row.matrix.get("depth"), kind(row.matrix)), []).append(row)
    depths = sorted({depth for depth, _ in cells}, key=lambda d: (d is None, d or 0))
    columns = tuple(sorted({one for _, one in cells}, key=_order))
    lines = (
        (
            depth,
            tuple(Cell(tuple(cells[depth, c])) if (depth, c) in cells else None for c in columns),
        )
        for depth in depths
    )
    return Grid(columns, tuple(lines))


def kind(matrix: Matrix) -> str:
    """Its column."""
    return str(matrix.get("kind") or "other")


def _order(kind: str) -> tuple[int, str]:
    return (KINDS.index(kind) if kind in KINDS else len(KINDS)), kind


@dataclass(frozen=True)
class Change:
    """What moved since the reference: median errors of each component, by kind and by layer."""

    total: Mapping[str, float | None]
    by_kind: Grid
    by_depth: Grid

    @property
    def most_and_least(self) -> list[tuple[str, float]]:
        """The components that moved most and least, relative to their size; none if nothing did."""
        known = [(n, e) for n, e in self.total.items() if e is not None and n in Components.names]
        known.sort(key=lambda pair: pair[1], reverse=True)
        if not known or not known[0][1]:
            return []
        return [known[0], known[-1]] if len(known) > 1 else known


def change(rows: Sequence[Row]) -> Change | None:
    """The errors against a reference, or None if there was none.

    >>> errors = {"row_norms": 0.5, "effective_rank": 0.0, "condition_number": None}
    >>> found = change(ranked([{"name": "w", "kind": "up", "depth": 3, "errors": errors}]))
    >>> found.by_kind.lines
    (('up', (0.5, 0.0, None)),)
    >>> found.most_and_least
    [('row_norms', 0.5), ('effective_rank', 0.0)]
    """
    compared = [row for row in rows if row.matrix.get("errors")]
    if not compared:
        return None
    columns = tuple(dict.fromkeys(name for row in compared for name in row.matrix["errors"]))
    kinds = sorted({kind(row.matrix) for row in compared}, key=_order)
    depths = sorted({d for row in compared if (d := row.matrix.get("depth")) is not None})
    [(_, total)] = _medians(columns, {"all": compared}).lines
    return Change(
        dict(zip(columns, total, strict=True)),
        _medians(columns, {k: [r for r in compared if kind(r.matrix) == k] for k in kinds}),
        _medians(columns, {d: [r for r in compared if r.matrix.get("depth") == d] for d in depths}),
    )


def _medians(columns: tuple[str, ...], groups: Mapping[Any, Sequence[Row]]) -> Grid:
    lines = (
        (head, tuple(middle(row.matrix["errors"].get(name) for row in rows) for name in columns))
        for head, rows in groups.items()
    )
    return Grid(columns, tuple(lines))


def middle(values: Iterable[float | None]) -> float | None:
    """The median of those that are known.

    >>> middle([3.0, None, 1.0]), middle([None])
    (2.0, None)
    """
    known = [value for value in values if value is not None]
    return median(known) if known else None


def moved(error: float) -> int:
    """How many of MOVES an error exceeds.

    >>> [moved(error) for error in (0.0, 0.02, 5.0)]
    [0, 2, 4]
    """
    return bisect_right(MOVES, error)


@dataclass(frozen=True)
class Step:
    """A checkpoint of a trajectory: its condition numbers, and how far it is from the last."""

    name: str
    matrices: int
    median: float | None
    largest: float | None
    log_change: float | None  # of the condition number
    change: float | None  # of the matrix
    findings: str  # the gravest, counted


def steps(checkpoints: Sequence[Mapping[str, Any]]) -> list[Step]:
    """What there is to say of each, medians over its matrices.

    >>> errors = {"log_condition_number": 0.5, "overall_matrix": 0.1}
    >>> matrix = {"shape": [2, 2], "condition_number": 3.0, "errors": errors}
    >>> steps([{"source": "run/1.pt", "matrices": [matrix]}])
    [Step(name='1.pt', matrices=1, median=3.0, largest=3.0, log_change=0.5, change=0.1, ...)]
    """
    return [_step(name, one) for name, one in zip(sources(checkpoints), checkpoints, strict=True)]


def _step(name: str, one: Mapping[str, Any]) -> Step:
    rows = [row for row in map(Row, one["matrices"]) if not row.failed]
    kappas = [row.kappa for row in rows]
    errors = [row.matrix.get("errors") or {} for row in rows]
    return Step(
        name,
        len(rows),
        middle(kappas),
        max((kappa for kappa in kappas if kappa is not None), default=None),
        middle(each.get("log_condition_number") for each in errors),
        middle(each.get("overall_matrix") for each in errors),
        tally((one.get("summary") or {}).get("by_severity") or {}).partition(",")[0] or "none",
    )


def sources(checkpoints: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Their names, without folders where that tells them apart.

    >>> sources([{"source": "run/1.pt"}, {"source": "run/2.pt"}]), sources([{}])
    (('1.pt', '2.pt'), ('1',))
    """
    whole = tuple(str(one.get("source") or place) for place, one in enumerate(checkpoints, 1))
    last = tuple(PurePath(name).name or name for name in whole)
    return last if len(set(last)) == len(last) else whole


def tally(counts: Mapping[str, int]) -> str:
    """Findings by severity, the gravest first.

    >>> tally({"info": 1, "critical": 2})
    '2 critical, 1 note'
    """
    words = {"critical": ("critical",) * 2, "warning": ("warning", "warnings")}
    words["info"] = ("note", "notes")
    known = [(counts.get(severity, 0), words[severity]) for severity in reversed(SEVERITIES)]
    return ", ".join(f"{many} {word[many != 1]}" for many, word in known if many)


def trajectory(checkpoints: Sequence[Mapping[str, Any]]) -> dict[str, Grid]:
    """Medians over the matrices of a kind, one column a checkpoint, of kappa and of the norm.

    >>> steps = [{"source": s, "matrices": [{"kind": "up", "frobenius_norm": s}]} for s in (1, 2)]
    >>> trajectory(steps)["frobenius_norm"].lines
    (('up', (1, 2)),)
    """
    names = sources(checkpoints)
    kinds = sorted({kind(m) for one in checkpoints for m in one["matrices"]}, key=_order)
    return {
        field: Grid(names, tuple((k, _path(checkpoints, k, field)) for k in kinds))
        for field in ("condition_number", "frobenius_norm")
    }


def _path(
    checkpoints: Iterable[Mapping[str, Any]], which: str, field: str
) -> tuple[float | None, ...]:
    def known(matrix: Matrix) -> float | None:
        value: float | None = matrix.get(field)
        return Row(matrix).kappa if field == "condition_number" else value

    its = ([m for m in one["matrices"] if kind(m) == which] for one in checkpoints)
    return tuple(middle(map(known, matrices)) for matrices in its)
