"""How the rows of a unit are kept: a line that says what they are, then a Parquet file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq


def parquet_bytes(table: pa.Table) -> bytes:
    """Write the bytes of a Parquet file; the same table gives the same bytes.

    >>> table = pa.table({"error": [0.5, 0.25]})
    >>> parquet_bytes(table) == parquet_bytes(pa.concat_tables([table[:1], table[1:]]))
    True
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table.combine_chunks(), sink, compression="zstd")
    return bytes(sink.getvalue())


def read_parquet(source: Path | pa.NativeFile) -> pa.Table:
    """Read what :func:`parquet_bytes` wrote, by this thread alone.

    Arrow's own threads, if the program ends soon after they read, end it with an abort.

    >>> read_parquet(pa.BufferReader(parquet_bytes(pa.table({"x": [1, 2]}))))["x"].to_pylist()
    [1, 2]
    """
    with pq.ParquetFile(source, pre_buffer=False) as file:
        return file.read(use_threads=False)


def unit_bytes(header: Mapping[str, Any], rows: pa.Table) -> bytes:
    """Return the rows of a unit as they are kept: a line that says what they are, then Parquet.

    >>> unit_bytes({"seeds": [0, 1]}, pa.table({"error": [0.5]})).splitlines()[0]
    b'{"seeds": [0, 1]}'
    """
    return json.dumps(header).encode() + b"\n" + parquet_bytes(rows)


def unit_of(body: bytes | None) -> tuple[dict[str, Any], pa.Table] | None:
    """Read the header and rows of a unit; None if it is not what :func:`unit_bytes` makes.

    >>> unit_of(unit_bytes({"seeds": [0, 1]}, pa.table({"error": [0.5]})))[0]
    {'seeds': [0, 1]}
    """
    if body is None:
        return None
    header, _, rows = body.partition(b"\n")
    try:
        described = json.loads(header)
        table = read_parquet(pa.BufferReader(rows))
    except (ValueError, OSError, RecursionError, pa.ArrowException):  # sealed by somebody else
        return None
    return (described, table) if isinstance(described, dict) else None
