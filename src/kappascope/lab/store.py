"""Keep results in a folder: a file for every unit of work that proves itself, and one writer.

A unit that cannot be read back, digest and all, counts as not done.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from kappascope.refusal import Refusal
from kappascope.system.files import (
    read_own,
    read_sealed,
    refuse_link,
    strict,
    unwritable,
    write_own,
    write_sealed,
)


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


@dataclass(frozen=True)
class Store:
    """A folder of results: one file for every unit of work, and what is derived from them.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder, (store := Store(Path(folder))).lock():
    ...     store.put("a.unit", unit_bytes({"seeds": [0, 1]}, pa.table({"error": [0.5]})))
    ...     store.names(), store.take("a.unit")[0], store.take("b.unit")
    (['a.unit'], {'seeds': [0, 1]}, None)
    """

    folder: Path

    @property
    def units(self) -> Path:
        """The folder of the results of single units."""
        return self.folder / "units"

    @property
    def resume_points(self) -> Path:
        """The folder of the states from which interrupted units are resumed."""
        return self.folder / "resume"

    @contextmanager
    def lock(self) -> Iterator[str]:
        """Be the only writer; gives a notice if the last one died, else an empty string."""
        with self._opened() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Refusal(
                    2,
                    str(self.folder),
                    f"in use by {file.read(200).strip() or 'another process'}",
                    "wait for it to end or choose another --out",
                ) from None
            last = file.read(200).strip()
            self._sign(file, f"process {os.getpid()} on {socket.gethostname()}")
            try:
                for place in ("", "*/"):
                    for leftover in self.folder.glob(f"{place}.*.[0-9]*.tmp"):
                        leftover.unlink(missing_ok=True)
                yield f"{last} ended early: going on from its results" if last else ""
            finally:
                self._sign(file, "")

    def _opened(self) -> IO[str]:
        """Make the folders that are missing and open the lock file."""
        if self.folder.exists() and not self.folder.is_dir():
            raise Refusal(4, str(self.folder), "is a file", "give --out a folder")
        try:
            self._refuse_links()
            self.units.mkdir(parents=True, exist_ok=True)
            self.resume_points.mkdir(exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
            return os.fdopen(os.open(self.folder / "lock", flags, 0o666), "r+", errors="replace")
        except NotADirectoryError as error:
            raise Refusal(4, str(self.folder), "lies in a file", "give --out a folder") from error
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def _refuse_links(self) -> None:
        """Refuse a folder in which a link stands: we would write what it leads to, hours later."""
        for place in ("*", "*/*"):
            for path in self.folder.glob(place):
                refuse_link(path)

    def _sign(self, file: IO[str], owner: str) -> None:
        """Replace the name of the writer in the lock file."""
        try:
            file.seek(0)
            file.truncate()
            file.write(owner)
            file.flush()
        except OSError as error:
            raise unwritable(self.folder, error) from error

    def begin(self, study: Mapping[str, str | int]) -> None:
        """Continue the study in the folder; refuse to mix results of different code or machines."""
        path = self.folder / "study.json"
        try:
            before = json.loads(read_own(path))
        except (OSError, ValueError):  # absent or torn: the units know their study themselves
            before = {}
        if not isinstance(before, dict):
            before = {}
        for name in sorted(before.keys() & study.keys()):
            if before[name] != study[name]:
                was, now = (str(value)[:24] for value in (before[name], study[name]))
                raise Refusal(
                    4,
                    str(self.folder),
                    f"{name} was {was} and is {now}",
                    "choose another --out, or begin anew with --fresh",
                )
        write_own(path, strict({**before, **study}))

    def forget(self) -> None:
        """Remove every result, and nothing else: the next study is a new one."""
        for folder in (self.units, self.resume_points):
            for unit in folder.glob("*.unit"):
                unit.unlink(missing_ok=True)
        (self.folder / "study.json").unlink(missing_ok=True)

    def put(self, name: str, body: bytes) -> None:
        """Keep a unit, as :func:`unit_bytes` makes it, under a seal."""
        write_sealed(self.units / name, body)

    def take(self, name: str) -> tuple[dict[str, Any], pa.Table] | None:
        """Read the header and rows of a unit; None if it is not there, or not what was put."""
        body = read_sealed(self.units / name)
        if body is None:
            return None
        header, _, rows = body.partition(b"\n")
        try:
            described = json.loads(header)
            table = read_parquet(pa.BufferReader(rows))
        except (ValueError, OSError, RecursionError, pa.ArrowException):  # sealed by somebody else
            return None
        return (described, table) if isinstance(described, dict) else None

    def names(self) -> list[str]:
        """List the names of all units that may be there, in order."""
        return sorted(path.name for path in self.units.iterdir() if path.suffix == ".unit")
