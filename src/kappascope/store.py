"""Keep results: files that are whole or absent, results that prove themselves, one writer.

A folder of results survives a kill at any moment. Every file in it is written beside its place and
renamed into it; what cannot be read back, digest and all, counts as not done.
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import platform
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from kappascope.refusals import Refusal

PACKAGE = Path(__file__).parent
# What pages import to judge and draw rows, not to make them.
JUDGES = ("lab", "claims", "measures", "statistics", "figures")
SHOWING = "_exhibits"  # how pages end that draw the rows of a study
LIBRARIES = ("torch", "numpy", "scipy", "pyarrow")


def write(path: Path, data: bytes) -> None:
    """Put ``data`` at ``path``: whatever happens, the file there is the old one or the new one.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write(Path(folder) / "file", b"whole")
    ...     (Path(folder) / "file").read_bytes()
    b'whole'
    """
    try:
        if path.exists() and not path.is_file():  # a pipe or a device, which keeps nothing
            # without a reader a pipe would wait for ever; with this it is an error
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_NONBLOCK), "wb") as file:
                os.set_blocking(file.fileno(), True)
                file.write(data)
            return
        path = Path(os.path.realpath(path))  # not the link, but what it leads to
        beside = path.with_name(f".{path.name[:40]}.{os.getpid()}.tmp")  # names have a limit
        try:
            with beside.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
            _sync(path.parent)
        finally:
            with suppress(OSError):
                beside.unlink()
    except OSError as error:
        raise _unwritable(path, error) from error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)  # a rename lasts once its folder is on the disk
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _unwritable(path: Path, error: OSError) -> Refusal:
    wrong = f"cannot be written: {error.strerror or type(error).__name__}"
    return Refusal(5, str(path), wrong, "make room or name another place; what is done is kept")


def parquet(table: pa.Table) -> bytes:
    """The bytes of a Parquet file; the same table gives the same bytes.

    >>> table = pa.table({"error": [0.5, 0.25]})
    >>> parquet(table) == parquet(pa.concat_tables([table[:1], table[1:]]))
    True
    """
    sink = pa.BufferOutputStream()
    pq.write_table(table.combine_chunks(), sink, compression="zstd")
    return bytes(sink.getvalue())


def digest(value: Any) -> str:
    """Sha256 of a JSON value, whatever the order of its keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


@cache
def environment() -> Mapping[str, str | int]:
    """What the bits of a result depend on besides setting and code: libraries, processor.

    >>> environment()["threads"]
    1
    """
    return {
        "kappascope": version("kappascope"),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
        "cpu": _processor(),
        "threads": 1,
        "dtype": "float64 on paper streams, as its page says on own streams",
    }


def code(*pages: Path) -> str:
    """Digest of the pages and of all modules of the package whose code they run.

    >>> code(Path(__file__)) == code(Path(__file__), Path(__file__))
    True
    """
    found: dict[Path, str] = {}
    todo = list(pages)
    while todo:
        page = todo.pop()
        found[page], imported = _source(page)
        todo += [path for path in imported if path not in found]
    return digest(sorted((_place(page), one) for page, one in found.items()))


def _place(page: Path) -> str:
    """Where a page stands in the package, wherever that is installed; a name, if outside it."""
    inside = page.is_relative_to(PACKAGE)
    return page.relative_to(PACKAGE).as_posix() if inside else page.name


@cache
def _source(page: Path) -> tuple[str, tuple[Path, ...]]:
    """Digest of a page, and the modules of the package that it needs to make rows."""
    data = page.read_bytes()
    names: set[str] = set()
    for node in ast.walk(ast.parse(data)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kappascope":
            _, _, module = str(node.module).partition(".")
            inside = [f"{module}.{alias.name}".lstrip(".") for alias in node.names]
            names |= {module, *inside}  # a module itself, or modules of a package
    making = {name for name in names - {"", *JUDGES} if not name.endswith(SHOWING)}
    places = [PACKAGE.joinpath(*name.split(".")) for name in making]
    modules = [path for one in places for path in (one.with_suffix(".py"), one / "__init__.py")]
    return hashlib.sha256(data).hexdigest(), tuple(path for path in modules if path.is_file())


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True)
class Store:
    """A folder of results: one file for every unit of work, and what is derived from them.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder, (store := Store(Path(folder))).lock():
    ...     store.put("a.unit", {"seeds": [0, 1]}, pa.table({"error": [0.5]}))
    ...     store.names(), store.take("a.unit")[0], store.take("b.unit")
    (['a.unit'], {'seeds': [0, 1]}, None)
    """

    folder: Path

    @property
    def units(self) -> Path:
        """Where the results of single units are."""
        return self.folder / "units"

    @property
    def bookmarks(self) -> Path:
        """Where units that are under way are taken up again."""
        return self.folder / "bookmarks"

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
        if self.folder.exists() and not self.folder.is_dir():
            raise Refusal(4, str(self.folder), "is a file", "give --out a folder")
        try:
            self.units.mkdir(parents=True, exist_ok=True)
            self.bookmarks.mkdir(exist_ok=True)
            file = (self.folder / "lock").open("a+")
            file.seek(0)
            return file
        except NotADirectoryError as error:
            raise Refusal(4, str(self.folder), "lies in a file", "give --out a folder") from error
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def _sign(self, file: IO[str], owner: str) -> None:
        try:
            file.seek(0)
            file.truncate()
            file.write(owner)
            file.flush()
        except OSError as error:
            raise _unwritable(self.folder, error) from error

    def begin(self, study: Mapping[str, str | int]) -> None:
        """Take up the study in the folder; refuse to mix results that other code or hands made."""
        before = _json(self.folder / "study.json")
        for name in sorted(before.keys() & study.keys()):
            if before[name] != study[name]:
                was, now = (str(value)[:24] for value in (before[name], study[name]))
                raise Refusal(
                    4,
                    str(self.folder),
                    f"{name} was {was} and is {now}",
                    "choose another --out, or begin anew with --fresh",
                )
        write(self.folder / "study.json", strict({**before, **study}))

    def forget(self) -> None:
        """Remove every result, and nothing else: the next study is a new one."""
        for name in self.names():
            (self.units / name).unlink(missing_ok=True)
        for bookmark in self.bookmarks.glob("*.unit"):
            bookmark.unlink(missing_ok=True)
        (self.folder / "study.json").unlink(missing_ok=True)

    def put(self, name: str, header: Mapping[str, Any], rows: pa.Table) -> None:
        """Keep the rows of a unit: a digest, a line that says what they are, a Parquet file."""
        body = json.dumps(header).encode() + b"\n" + parquet(rows)
        seal = hashlib.sha256(body).hexdigest().encode()
        write(self.units / name, seal + b"\n" + body)

    def take(self, name: str) -> tuple[dict[str, Any], pa.Table] | None:
        """The header and rows of a unit; None if it is not there, or not what was put there."""
        try:
            seal, _, body = (self.units / name).read_bytes().partition(b"\n")
        except OSError:
            return None
        if hashlib.sha256(body).hexdigest().encode() != seal:
            return None
        header, _, rows = body.partition(b"\n")
        return json.loads(header), table(pa.BufferReader(rows))

    def names(self) -> list[str]:
        """The names of all units that may be there, in order."""
        return sorted(path.name for path in self.units.iterdir() if path.suffix == ".unit")


def table(source: Path | pa.NativeFile) -> pa.Table:
    """What :func:`parquet` made, read by this thread alone.

    Arrow's own threads, if the program ends soon after they read, end it with an abort.

    >>> table(pa.BufferReader(parquet(pa.table({"x": [1, 2]}))))["x"].to_pylist()
    [1, 2]
    """
    with pq.ParquetFile(source, pre_buffer=False) as file:
        return file.read(use_threads=False)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):  # absent or torn: the units know their study themselves
        return {}
    return value if isinstance(value, dict) else {}


def strict(value: Any) -> bytes:
    """JSON that every reader takes: a NaN or an infinity is an error.

    >>> strict([1, None])
    b'[1, null]'
    """
    return json.dumps(value, allow_nan=False).encode()
