"""A table of rows about components: select, group, pair and read them.

A row is one number about one trial: its setting, stream, seed and component, and an error, a value
or a target.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Row = Mapping[str, Any]

MEASURED = ("error", "value", "target")  # the numbers of a row; the other columns identify it


@dataclass(frozen=True, eq=False)
class Table:
    """Rows about components, read and never changed.

    >>> table = Table.of({"size": d, "seed": k, "error": d + k} for d in (32, 64) for k in range(3))
    >>> table.where(size=64, seed=(0, 2)).values()
    array([64., 66.])
    >>> {size: len(rows) for size, rows in table.by("size").items()}
    {32: 3, 64: 3}
    """

    rows: pa.Table

    @classmethod
    def of(cls, rows: Iterable[Row] | pa.Table) -> Table:
        """Collect rows; one that lacks a column has a null there."""
        if isinstance(rows, pa.Table):
            return cls(rows.combine_chunks())  # a thousand small pieces are searched a minute long
        rows = list(rows)
        columns = dict.fromkeys(name for row in rows for name in row)
        return cls(pa.table({name: [row.get(name) for row in rows] for name in columns}))

    def __len__(self) -> int:
        return int(self.rows.num_rows)

    def where(self, **equal: Any) -> Table:
        """Select rows whose columns equal these values, or one of a tuple (list, range) of them.

        >>> table = Table.of([{"optimizer": "sgd", "error": 0.1}, {"error": 0.2}])
        >>> len(table.where(optimizer="sgd")), len(table.where(optimizer=("sgd", None)))
        (1, 2)
        """
        rows = self.rows
        for name, wanted in equal.items():
            column = self._column(name, rows)
            choices = list(wanted) if isinstance(wanted, tuple | list | range) else [wanted]
            if pa.types.is_null(column.type):  # nothing was ever told there, so none of it is equal
                choices = [choice for choice in choices if choice is None]
            rows = rows.filter(pc.is_in(column, value_set=pa.array(choices, column.type)))
        return Table(rows)

    def by(self, name: str) -> dict[Any, Table]:
        """Split by a column, its values in rising order; rows without a value come last."""
        values = self._column(name).unique().to_pylist()
        present = sorted(value for value in values if value is not None)
        return {v: self.where(**{name: v}) for v in (*present, *([None] * (None in values)))}

    def values(self, column: str = "error") -> Floats:
        """Read one column in the order of seeds; what is absent is NaN.

        A row that occurs twice (same setting, stream, seed, component) is an error: counting it
        twice would be one too.
        """
        names = self._keys(column)
        if "seed" in names:
            self._refuse_duplicates(names)
        rows = self.rows.sort_by([(name, "ascending") for name in names]) if names else self.rows
        return self._floats(column, rows)

    def paired(self, other: Table, column: str = "error") -> tuple[Floats, Floats]:
        """Join both columns on stream and seed; a trial only one side has is NaN on the other.

        >>> table = Table.of(
        ...     {"arm": arm, "seed": k, "error": k + shift}
        ...     for arm, shift in (("a", 0.0), ("b", 0.5)) for k in range(3) if (arm, k) != ("b", 1)
        ... )
        >>> table.where(arm="a").paired(table.where(arm="b"))
        (array([0., 1., 2.]), array([0.5, nan, 2.5]))
        """
        ours, theirs = self._trials(column), other._trials(column)
        keys = sorted(ours.keys() | theirs.keys())
        return (
            np.array([ours.get(key, math.nan) for key in keys], dtype=float),
            np.array([theirs.get(key, math.nan) for key in keys], dtype=float),
        )

    def curves(self, along: str, column: str = "error") -> Floats:
        """Read a line of values for every trial, in rising order of ``along``; NaN where absent.

        >>> Table.of(
        ...     {"seed": k, "epoch": t, "error": k / t} for t in (2, 1) for k in (1, 2)
        ... ).curves("epoch")
        array([[1. , 0.5],
               [2. , 1. ]])
        """
        points = [table._trials(column) for table in self.by(along).values()]
        keys = sorted({key for point in points for key in point})
        return np.array([[point.get(key, math.nan) for point in points] for key in keys])

    def _column(self, name: str, rows: pa.Table | None = None) -> pa.ChunkedArray[Any]:
        if name not in self.rows.column_names:
            raise KeyError(f"no column {name!r}; this table has {self.rows.column_names}")
        return (self.rows if rows is None else rows)[name]

    def _floats(self, name: str, rows: pa.Table | None = None) -> Floats:
        """Read a column as numbers; a null becomes NaN."""
        return np.asarray(self._column(name, rows).cast(pa.float64()).to_numpy(), dtype=np.float64)

    def _keys(self, column: str) -> list[str]:
        fields = [f for f in self.rows.schema if not pa.types.is_nested(f.type)]
        names = [f.name for f in fields if f.name not in (*MEASURED, column)]
        return sorted(names, key=lambda name: name != "seed")

    def _refuse_duplicates(self, names: list[str]) -> None:
        groups = self.rows.group_by(names).aggregate([([], "count_all")])
        if groups.num_rows < len(self):
            twice = groups.sort_by([("count_all", "descending")]).slice(0, 1).to_pylist()[0]
            where = ", ".join(f"{k}={v!r}" for k, v in twice.items() if v is not None)
            raise ValueError(
                f"{len(self) - groups.num_rows} duplicate rows, such as {where}; "
                "remove the copies, or tell them apart by a column"
            )

    def _trials(self, column: str) -> dict[tuple[str, int], float]:
        streams = self.rows["stream"] if "stream" in self.rows.column_names else None
        names = streams.to_pylist() if streams is not None else [""] * len(self)
        seeds: list[Any] = self._column("seed").to_pylist()
        trials = list(zip(map(str, names), seeds, strict=True))
        if len(set(trials)) < len(trials):
            again = next(trial for trial in trials if trials.count(trial) > 1)
            raise ValueError(
                f"seed {again[1]} occurs {trials.count(again)} times on one side of a pairing; "
                "narrow the table with where() until a seed is one row"
            )
        return dict(zip(trials, self._floats(column).tolist(), strict=True))
