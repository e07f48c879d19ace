"""Keep results in a folder: a file for every unit of work that proves itself, and one writer.

A unit that cannot be read back, digest and all, counts as not done. The folder may lie in an object
store: then it has a twin on this machine, and whatever is kept here is sent there at once.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar, final

from kappascope.refusal import Refusal
from kappascope.system.extras import optional
from kappascope.system.files import (
    read_own,
    read_sealed,
    refuse_link,
    seal,
    sealed_body,
    strict,
    unwritable,
    write_own,
    write_sealed,
)

T = TypeVar("T")
LOCK_SECONDS = 600.0  # after which a writer elsewhere that shows no life counts as dead
SIGN_SECONDS = 60.0  # between two signs of life
LONGEST_DIFFERENCE = 48  # characters of a value that a refusal quotes


@final
@dataclass(frozen=True)
class Shard:
    """One of so many parts of the work, which others do elsewhere.

    >>> Shard.of("2/3").part(range(7))
    [1, 4]
    """

    number: int
    count: int

    @classmethod
    def of(cls, text: str) -> Shard:
        """Read a shard as it is written: ``2/8`` is the second of eight."""
        match = re.fullmatch(r"0*(\d{1,6})/0*(\d{1,6})", text)
        number, count = map(int, match.groups()) if match else (0, 0)
        if not 1 <= number <= count:
            wrong = "expected a number from 1 and how many there are"
            raise Refusal(4, f"--shard {text}", wrong, "give it like 2/8")
        return cls(number, count)

    def part(self, items: Sequence[T]) -> list[T]:
        """Return the items of this shard: every so many, so that long and short ones are shared."""
        return list(items[self.number - 1 :: self.count])

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"


@dataclass(frozen=True)
class Store:
    """A folder of results: one file for every unit of work, and what is derived from them.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder, (store := Store(Path(folder))).lock():
    ...     store.put("a.unit", b"rows")
    ...     store.names(), store.take("a.unit"), store.take("b.unit")
    (['a.unit'], b'rows', None)
    """

    folder: Path
    depot: Depot | None = field(default=None, compare=False)

    @classmethod
    def at(cls, place: str | Path) -> Store:
        """Return the folder of this name, or the twin of one in an object store."""
        if not re.match(r"[a-z][a-z0-9+.-]+://", str(place)):
            return cls(Path(place))
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        twin = hashlib.sha256(str(place).encode()).hexdigest()[:16]
        return cls(cache / "kappascope" / "results" / twin, Depot.at(str(place)))

    def __str__(self) -> str:
        return self.depot.url if self.depot else str(self.folder)

    @property
    def units(self) -> Path:
        """The folder of the results of single units."""
        return self.folder / "units"

    @property
    def resume_points(self) -> Path:
        """The folder of the states from which runs are resumed."""
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
                    str(self),
                    f"in use by {file.read(200).strip() or 'another process'}",
                    "wait for it to end or choose another --out",
                ) from None
            last = file.read(200).strip()
            self._sign(file, f"process {os.getpid()} on {socket.gethostname()}")
            try:
                for place in ("", "*/"):
                    for leftover in self.folder.glob(f"{place}.*.[0-9]*.tmp"):
                        leftover.unlink(missing_ok=True)
                with self.depot.lock() if self.depot else nullcontext():
                    if self.depot:
                        self._fetch(self.depot)
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

    def _fetch(self, depot: Depot) -> None:
        """Bring the units that are there and not here; a damaged one counts as not there."""
        missing = set(depot.names("units")) - {*self.names()}
        for name in sorted(missing):
            body = sealed_body(depot.fetch(f"units/{name}"))
            if body is not None and re.fullmatch(r"[\w.-]+\.unit", name):
                write_sealed(self.units / name, body)
        if "study.json" in depot.names(""):
            write_own(self.folder / "study.json", depot.fetch("study.json"))

    def begin(self, study: Mapping[str, str | int]) -> None:
        """Continue the study in the folder; refuse to mix results of different code or machines."""
        for difference in self.differences(study):
            advice = "choose another --out, or begin anew with --fresh"
            raise Refusal(4, str(self), difference, advice)
        self.write("study.json", strict({**self.study(), **study}))

    def differences(self, study: Mapping[str, str | int]) -> Iterator[str]:
        """Yield what is other in a study than in that of the folder."""
        before = self.study()
        for name in sorted(before.keys() & study.keys()):
            if before[name] != study[name]:
                was, now = apart(str(before[name]), str(study[name]))
                yield f"{name} was {was} and is {now}"

    def study(self) -> dict[str, Any]:
        """Return what the results in the folder depend on, as far as it can be read."""
        try:
            before = json.loads(read_own(self.folder / "study.json"))
        except (OSError, ValueError):  # absent or torn: the units know their study themselves
            return {}
        return before if isinstance(before, dict) else {}

    def forget(self) -> None:
        """Remove every result, and nothing else: the next study is a new one."""
        for folder in (self.units, self.resume_points):
            for unit in folder.glob("*.unit"):
                unit.unlink(missing_ok=True)
        (self.folder / "study.json").unlink(missing_ok=True)
        if self.depot:
            self.depot.forget([*(f"units/{name}" for name in self.depot.names("units"))])

    def put(self, name: str, body: bytes) -> None:
        """Keep the bytes of a unit under a seal."""
        write_sealed(self.units / name, body)
        if self.depot:
            self.depot.send(f"units/{name}", seal(body))

    def take(self, name: str) -> bytes | None:
        """Return the bytes of a unit; None if it is not there, or not what was put."""
        return read_sealed(self.units / name)

    def names(self) -> list[str]:
        """List the names of all units that may be there, in order."""
        return sorted(path.name for path in self.units.iterdir() if path.suffix == ".unit")

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is derived from the units, by its path in the folder."""
        place = self.folder / name
        if place.parent != self.folder:  # which the user named, and may be a link
            refuse_link(place.parent)
        place.parent.mkdir(exist_ok=True)
        write_own(place, data)
        if self.depot:
            self.depot.send(name, data)


def join(folders: Iterable[Path], store: Store) -> list[str]:
    """Bring the units of several folders into one; returns the names of damaged ones.

    Folders of another study, or of machines that give other bits, are refused.
    """
    damaged = []
    for folder in folders:
        source = Store(folder)
        if not source.units.is_dir():
            raise Refusal(2, str(folder), "no folder of results", "name what --out named")
        store.begin(source.study())
        here = {*store.names()}
        for name in source.names():
            body = source.take(name)
            if body is None:
                damaged.append(f"{folder}: {name}")
            elif name not in here:
                store.put(name, body)
    return damaged


@dataclass
class Depot:
    """A folder in an object store, or wherever fsspec can write."""

    url: str
    system: Any
    path: str
    _signed: float = -SIGN_SECONDS

    @classmethod
    def at(cls, url: str) -> Depot:
        """Open the file system of an address; what it needs may not be installed."""
        core = optional("fsspec.core", "remote")
        try:
            system, path = core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            wrong = str(error).partition("\n")[0].rstrip(".")[:120]
            raise Refusal(2, url, wrong, "install what it names, or name another place") from error
        return cls(url.rstrip("/"), system, path.rstrip("/"))

    def names(self, folder: str) -> list[str]:
        """List the files of a folder below this one."""

        def listed() -> list[dict[str, Any]]:
            try:
                self.system.invalidate_cache()
                found: list[dict[str, Any]] = self.system.ls(self._whole(folder), detail=True)
            except FileNotFoundError:
                return []
            return found

        files = [entry for entry in self._tried(listed) if entry.get("type") == "file"]
        return [str(entry["name"]).rpartition("/")[2] for entry in files]

    def fetch(self, name: str) -> bytes:
        """Return the bytes of a file."""
        data: bytes = self._tried(lambda: self.system.cat_file(self._whole(name)))
        return data

    def send(self, name: str, data: bytes) -> None:
        """Write a file, and a sign of life from time to time."""

        def written() -> None:
            self.system.makedirs(self._whole(name).rpartition("/")[0], exist_ok=True)
            self.system.pipe_file(self._whole(name), data)

        self._tried(written)
        if time.monotonic() - self._signed > SIGN_SECONDS and name != "lock":
            self._signed = time.monotonic()
            self.send("lock", _owner())

    def forget(self, names: Sequence[str]) -> None:
        """Remove files that may be gone already."""
        for name in names:
            with suppress(FileNotFoundError):
                self.system.rm_file(self._whole(name))

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer among machines; one that showed no life for ten minutes is dead."""
        if "lock" in self.names(""):
            told = self.fetch("lock").decode(errors="replace")
            when, _, owner = told.partition(" ")
            fresh = when.isdecimal() and time.time() - int(when) < LOCK_SECONDS
            if fresh and not owner.endswith(f" on {socket.gethostname()}"):
                advice = "wait for it to end (ten minutes if it died) or choose another --out"
                raise Refusal(2, self.url, f"in use by {owner[:200]}", advice)
        self.send("lock", _owner())
        self._signed = time.monotonic()
        try:
            yield
        finally:
            with suppress(Exception):  # or it is taken for dead in ten minutes
                self.forget(["lock"])

    def _whole(self, name: str) -> str:
        return f"{self.path}/{name}".rstrip("/")

    def _tried(self, action: Callable[[], T]) -> T:
        """Do something over a network; what goes wrong is one line."""
        try:
            return action()
        except Refusal:
            raise
        except Exception as error:  # every file system has its own
            wrong = f"cannot be reached: {' '.join(str(error).split()) or type(error).__name__}"
            advice = "try again; what is done is kept on this machine"
            raise Refusal(5, self.url, wrong[:200], advice) from error


def _owner() -> bytes:
    return f"{int(time.time())} process {os.getpid()} on {socket.gethostname()}".encode()


def apart(one: str, other: str) -> tuple[str, str]:
    """Cut two texts to the part in which they differ.

    >>> apart("Intel(R) Xeon(R) Platinum 8480+", "Intel(R) Xeon(R) Platinum 8488C")
    ('…8480+', '…8488C')
    """
    pairs = enumerate(zip(one, other, strict=False))
    shared = next((k for k, (a, b) in pairs if a != b), min(len(one), len(other)))
    start = max(one.rfind(" ", 0, max(0, shared - 1)) + 1, shared - LONGEST_DIFFERENCE // 2)
    cut = (text[start : start + LONGEST_DIFFERENCE] for text in (one, other))
    was, now = (f"…{text}" if start else text for text in cut)
    return was, now
