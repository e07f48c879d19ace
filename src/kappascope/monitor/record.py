"""The record of a training run: a folder that is only ever added to, and how it is read.

The folder of a run holds ``segment-000001.jsonl``, ``segment-000002.jsonl``, ... Every session (a
process that trains, or goes on training) begins a segment of its own, and a segment that has grown
large is followed by another. No byte that was written is ever written again. Beside them ``lock``
names the process that writes, and keeps a second one out.

A segment has one entry a line: sixteen digits of the sha256 of what follows, a blank, and a JSON
object. An entry is handed to the system whole as soon as it is known, so a killed run keeps what it
had; a line that is torn or damaged does not fit its digest, is left out and counted. NaN and the
infinities, which JSON has not, are the strings "nan", "inf" and "-inf".

Every entry has a ``kind`` and a ``step``, the number of finished steps of the optimizer:

``start``
    A session begins. ``version`` of this format, ``time`` (seconds since 1970), ``model`` (its
    class), ``every`` and other ``options``, ``matrices`` by name with their ``kind``, ``depth``,
    ``shape`` and ``dtype``, ``skipped`` by name with the reason, ``optimizers`` (their classes),
    and ``resumed``: false, or true where the folder had a record; ``cut`` then says in words if
    that one was closed, and at which step it ends. What an earlier session recorded after the
    ``step`` of this one is superseded: the run was taken up from an earlier checkpoint.
``matrices``
    Matrices that came later, as in ``start``: a layer was added, or its shape changed.
``reading``
    ``rows``: by matrix, by quantity, a value or a list of pairs ``[index, value]``. ``time``, and
    the ``seconds`` that it took.
``norms``
    ``rows`` and ``time`` likewise: Frobenius norms of a step between two readings.
``settings``
    ``optimizer`` (its number), ``groups``: a list of ``lr``, ``betas``, ``weight_decay``, ... of
    each parameter group. Written when something changed, so the latest holds.
``log``
    ``values`` by name: what the user logged, as a loss.
``alert``
    ``name`` (a word for the kind of trouble), ``matrix`` (or ""), ``text``, a sentence; ``others``
    are further matrices in the same trouble.
``ring``
    ``steps`` and ``norms`` by matrix: the Frobenius norm after each of the last steps, kept in
    memory and written when something breaks. ``gradients`` likewise, and ``text``: who moved first.
``end``
    A session was closed.

A quantity is a component (``condition_number``, ``sigma_min``, ``row_norms``, ...) or what
:mod:`~kappascope.monitor.signal`, :mod:`~kappascope.monitor.updates` and
:mod:`~kappascope.monitor.swallowed` call theirs. Of a vector (``singular_values``, ``row_norms``,
``signal``) a row has one entry, and its ``index`` says which: 0 is the first, or the largest, 1 the
last, 0.5 the one in the middle. Rows of the whole run are about the matrix "" .
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import math
import os
import re
import socket
import time
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet, finalize

from kappascope.refusal import Refusal
from kappascope.system.files import refuse_link, unwritable

VERSION = 1
SEGMENT_BYTES = 2**23  # after which another is begun: a reader holds one at a time
SEAL_DIGITS = 16  # of sha256: damage is recognized, forgery is not what it is for
NAMING_SECONDS = (
    0.2  # for another that began just now to write its name, where nothing can be locked
)
_NAME = re.compile(r"segment-(\d{6,})\.jsonl")
_CLAIMS: WeakSet[IO[bytes]] = WeakSet()
_WORDS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}

Entry = dict[str, Any]
Key = tuple[str, str, float | None]
"""Which number of a reading it is: matrix, quantity, and index in a vector."""
Readings = Mapping[str, Mapping[str, Any]]
"""Values by matrix and quantity: a number, or a list of pairs of index and number."""


@dataclass(frozen=True, slots=True)
class Row:
    """One number of a run: a quantity of a matrix after so many steps.

    >>> Row(50, "fc.weight", "condition_number", 12.5)
    Row(step=50, matrix='fc.weight', quantity='condition_number', value=12.5, index=None)
    """

    step: int
    matrix: str
    quantity: str
    value: float
    index: float | None = None


@dataclass(frozen=True)
class Alert:
    """Something a user should know, in words; ``name`` is its kind, ``matrix`` may be empty.

    ``others`` are the matrices that are in the same trouble at the same step.

    >>> Alert(40, "dead-row", "fc.weight", "fc.weight: row 3 is zero since step 40").name
    'dead-row'
    """

    step: int
    name: str
    matrix: str
    text: str
    others: tuple[str, ...] = ()

    @property
    def sentence(self) -> str:
        """The text for a place that tells the step itself.

        >>> Alert(1000, "audit", "", "it is not what it says (step 1,000)").sentence
        'it is not what it says'
        """
        return self.text.removesuffix(f" (step {self.step:,})")


@dataclass(frozen=True)
class Session:
    """A stretch of training by one process; ``cut`` says in words how the one before it ended.

    >>> Session(0, 1763400000.0, {"every": 50}, "").step
    0
    """

    step: int
    time: float
    options: Mapping[str, Any]
    cut: str


@dataclass(frozen=True, slots=True)
class Reading:
    """When a reading was taken (seconds since 1970), after which step, and how long it took.

    >>> Reading(50, 1763400000.0, 0.02).seconds
    0.02
    """

    step: int
    time: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Column:
    """One number of a run over its steps, packed: a long run has millions of values.

    >>> column = Column()
    >>> for step in (0, 50, 50, 100):
    ...     column.add(step, 2.0 * step)
    >>> column.cut(50)
    >>> list(column)
    [(0, 0.0), (50, 100.0)]
    """

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def add(self, step: int, value: float) -> None:
        """Take the value of a step; of a step that is known the first is kept."""
        if self.steps and step <= self.steps[-1]:
            if step == self.steps[-1]:
                return
            self.cut(step - 1)  # the run was taken up from before, and the line saying so is lost
        self.steps.append(step)
        self.values.append(value)

    def cut(self, step: int) -> None:
        """Forget what came after a step."""
        kept = bisect_right(self.steps, step)
        del self.steps[kept:], self.values[kept:]

    def __iter__(self) -> Iterator[tuple[int, float]]:
        return zip(self.steps, self.values, strict=True)

    def __len__(self) -> int:
        return len(self.steps)


# --- writing --------------------------------------------------------------------------------------


class WriteLock:
    """The right of one monitor to write a folder, until it is closed or its process has ended.

    It is a lock on the file ``lock``, in which the process has its name. Where a file system has no
    locks the name alone keeps others out, and it goes when the claim is closed.
    """

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self.path, self._file = path, file
        _CLAIMS.add(file)
        self.close = finalize(self, _unclaim, file, os.getpid())

    @property
    def is_removed(self) -> bool:
        """Whether the lock has no name any more, so that it keeps nobody out."""
        return self._file.closed or not os.fstat(self._file.fileno()).st_nlink

    @property
    def is_here(self) -> bool:
        """Whether the file of this name is the one that is locked: a folder may be moved."""
        with suppress(OSError, ValueError):
            return os.path.samestat(self.path.stat(), os.fstat(self._file.fileno()))
        return False


def sole_writer(folder: Path) -> WriteLock | None:
    """Claim a folder for one monitor; while another one writes it, refuse.

    None where there is nothing to lock: a folder that cannot be written, which its record will
    tell.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    path = folder / "lock"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = os.fdopen(os.open(path, flags, 0o644), "r+b", buffering=0)
    except OSError:
        return None
    owner = file.read(200).decode(errors="replace").strip()
    has_locks = True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        has_locks = isinstance(error, BlockingIOError)
        if has_locks or (owner and not _has_ended(owner)):
            file.close()
            raise _taken(folder, owner, has_locks) from None
    with suppress(OSError):  # a full disk: the lock holds without a name
        file.truncate(0)
        file.seek(0)
        file.write(_this_process().encode())
    if not has_locks:
        time.sleep(NAMING_SECONDS)
        file.seek(0)
        if (owner := file.read(200).decode(errors="replace")) not in ("", _this_process()):
            file.close()
            raise _taken(folder, owner, has_locks)
    return WriteLock(path, file)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _has_ended(owner: str) -> bool:
    """Whether a process of this machine, by the name it left, is no more."""
    match = re.fullmatch(r"process (\d+) on (.+)", owner)
    if match is None or match[2] != socket.gethostname():
        return False
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except OSError:
        return False
    return False


def _taken(folder: Path, owner: str, has_locks: bool) -> Refusal:
    """Say who writes a folder, and what lets another one in."""
    if owner == _this_process():
        wrong, advice = "another monitor of this process records a run there", "close that one"
    else:
        wrong = f"{owner or 'another process'} records a run there"
        advice = "close that monitor or end that process"
    if not has_locks:
        advice += ", remove the file lock if it has ended"
    return Refusal(2, str(folder), wrong, f"{advice}, or name another folder")


def _unclaim(file: IO[bytes], process: int) -> None:
    """Take the name out of a lock and let go of it; a child that was forked leaves the name."""
    with suppress(OSError, ValueError):
        if os.getpid() == process:
            file.truncate(0)
    file.close()


def _forked() -> None:
    """Close in a child what it shares with its parent: a loader's worker may outlive a run."""
    for file in _CLAIMS:
        file.close()


os.register_at_fork(after_in_child=_forked)


class Recorder:
    """Add entries to the record of a run, each of them whole or recognizably torn.

    With a ``claim`` it writes only while the folder is its own: a lock that was removed is made
    anew, but a folder that another one has taken since is left to that one. A child that was forked
    has no part in the record.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     recorder = Recorder(Path(folder))
    ...     recorder.write({"kind": "reading", "step": 0, "rows": {"w": {"sigma_max": 2.0}}})
    ...     recorder.close()
    ...     Run.read(folder).rows
    [Row(step=0, matrix='w', quantity='sigma_max', value=2.0, index=None)]
    """

    def __init__(self, folder: Path, claim: WriteLock | None = None) -> None:
        self.folder, self._claim, self._process = folder, claim, os.getpid()
        self._file: int | None = None
        self._size = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._open()
        except OSError as error:
            raise unwritable(folder, error) from error

    def write(self, entry: Entry) -> None:
        """Append one entry; what a full disk tears is followed by a new segment."""
        if os.getpid() != self._process:
            wrong = "the process that this one was forked from records a run there"
            raise Refusal(2, str(self.folder), wrong, "attach a monitor to another folder")
        is_gone = self._file is not None and not os.fstat(self._file).st_nlink  # and nobody told
        if self._claim is not None and self._claim.is_removed:
            self._claim_again(is_gone)
        if self._file is None or is_gone or self._size > SEGMENT_BYTES:
            self._open()
        line = sealed(entry)
        try:
            written = 0
            while written < len(line):
                assert self._file is not None
                written += os.write(self._file, line[written:])
        except OSError:
            self.close()
            raise
        self._size += len(line)

    def close(self) -> None:
        """Let go of the file; another entry would begin another segment."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def release(self) -> None:
        """Let go of the folder, too: another monitor may record there."""
        self.close()
        if self._claim is not None:
            self._claim.close()

    def _claim_again(self, is_gone: bool) -> None:
        """Make a lock anew that was removed, if the record is still there and nobody else came."""
        assert self._claim is not None
        if is_gone or self._claim.path.exists():
            raise self._lost()
        self._claim = sole_writer(self.folder) or self._claim

    def _lost(self) -> Refusal:
        wrong = "its record was removed or moved, or another monitor has come"
        return Refusal(2, str(self.folder), wrong, "nothing more is recorded; name another folder")

    def _open(self) -> None:
        self.close()
        if self._claim is not None and not self._claim.is_here:
            raise self._lost()
        numbers = [number for number, _ in _segments(self.folder)]
        path = self.folder / f"segment-{max(numbers, default=0) + 1:06d}.jsonl"
        refuse_link(path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        self._file, self._size = os.open(path, flags, 0o644), 0


def sealed(entry: Entry) -> bytes:
    r"""One line of a segment: the digest of an entry, and the entry.

    >>> sealed({"kind": "end", "step": 3})
    b'ff6a37dd22f36011 {"kind":"end","step":3}\n'
    """
    try:
        text = json.dumps(entry, allow_nan=False, separators=(",", ":"), default=_plain)
    except ValueError:  # seldom: some number is not finite
        text = json.dumps(_finite(entry), allow_nan=False, separators=(",", ":"), default=_plain)
    body = text.encode()
    return _seal(body) + b" " + body + b"\n"


def _seal(body: bytes) -> bytes:
    return hashlib.sha256(body).hexdigest()[:SEAL_DIGITS].encode()


def _plain(value: Any) -> Any:
    """What JSON has no form for: a tensor or number of some library, or anything as its text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return _finite(_plain(value)) if hasattr(value, "tolist") else value


# --- reading --------------------------------------------------------------------------------------


def is_run(folder: str | Path) -> bool:
    """Whether a folder holds the record of a run.

    >>> is_run("/nowhere")
    False
    """
    return next(_segments(Path(folder)), None) is not None


def _segments(folder: Path) -> Iterator[tuple[int, Path]]:
    if not folder.is_dir():
        return
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.iterdir())
    yield from sorted((int(match[1]), path) for match, path in matches if match)


@dataclass
class Run:
    """All that a record tells, superseded rows left out; :meth:`refresh` adds what is new.

    ``columns`` has the series of every number by matrix, quantity and index, ``matrices`` what is
    known of each matrix, ``logs`` what the user logged by name as pairs of step and value,
    ``settings`` the entries of that kind, ``rings`` likewise of the last session. ``step`` is the
    last one heard of, ``is_closed`` whether the last session was closed; ``damaged`` counts lines
    that do not fit their digests.
    """

    folder: Path
    columns: dict[Key, Column] = field(default_factory=dict, repr=False)
    readings: list[Reading] = field(default_factory=list, repr=False)
    alerts: list[Alert] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    matrices: dict[str, dict[str, Any]] = field(default_factory=dict, repr=False)
    skipped: dict[str, str] = field(default_factory=dict, repr=False)
    logs: dict[str, list[tuple[int, float]]] = field(default_factory=dict, repr=False)
    settings: list[Entry] = field(default_factory=list, repr=False)
    rings: list[Entry] = field(default_factory=list, repr=False)
    model: str = ""
    step: int = 0
    is_closed: bool = False
    damaged: int = 0

    _offsets: dict[Path, int] = field(default_factory=dict, repr=False)

    @classmethod
    def read(cls, folder: str | Path) -> Run:
        """Read the whole record of a run.

        >>> Run.read("/nowhere")
        Traceback (most recent call last):
        kappascope.refusal.Refusal: /nowhere: holds no record of a run (...)
        """
        if not is_run(folder):
            wrong = "holds no record of a run"
            raise Refusal(2, str(folder), wrong, "name the folder that a Monitor writes")
        run = cls(Path(folder))
        run.refresh()
        return run

    def refresh(self) -> int:
        """Read what was added since the last time; a line without an end is left for later."""
        count = 0
        segments = [path for _, path in _segments(self.folder)]
        for path in segments:
            for entry in self._added(path, is_last=path == segments[-1]):
                self._take(entry)
                count += 1
        return count

    @property
    def rows(self) -> list[Row]:
        """Every number of the run as a row of its own, by step."""
        rows = (
            Row(step, matrix, quantity, value, index)
            for (matrix, quantity, index), column in self.columns.items()
            for step, value in column
        )
        return sorted(rows, key=lambda row: row.step)

    def series(
        self, matrix: str, quantity: str, index: float | None = None
    ) -> list[tuple[int, float]]:
        """Pairs of step and value of one quantity of one matrix."""
        return list(self.columns.get((matrix, quantity, index), ()))

    def _added(self, path: Path, is_last: bool) -> Iterator[Entry]:
        offset = self._offsets.get(path, 0)
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read()
        lines = data.split(b"\n")
        rest = lines.pop()  # after the last end of a line: nothing, or what is being written
        self._offsets[path] = offset + len(data) - len(rest)
        if rest and not is_last:  # nobody will ever end it
            self._offsets[path] = offset + len(data)
            self.damaged += 1
        for line in lines:
            entry = _opened(line)
            if entry is None:
                self.damaged += 1
            else:
                yield entry

    def _take(self, entry: Entry) -> None:
        step = entry["step"]
        if entry["kind"] == "start":
            self._start(entry, step)
        self.is_closed = entry["kind"] == "end"
        self.step = step if entry["kind"] == "start" else max(self.step, step)
        match entry["kind"]:
            case "reading" | "norms":
                self._read(entry, step)
            case "matrices":
                self.matrices |= entry["matrices"]
            case "alert":
                others = tuple(entry.get("others", ()))
                alert = Alert(step, entry["name"], entry["matrix"], entry["text"], others)
                self.alerts.append(alert)
            case "log":
                for name, value in entry["values"].items():
                    self.logs.setdefault(name, []).append((step, _number(value)))
            case "settings":
                self.settings.append(entry)
            case "ring":
                self.rings.append(entry)

    def _start(self, entry: Entry, step: int) -> None:
        """Begin a session: what another recorded after its first step is superseded."""
        for column in self.columns.values():
            column.cut(step)
        self.readings = [reading for reading in self.readings if reading.step <= step]
        self.alerts = [alert for alert in self.alerts if alert.step <= step]
        self.settings = [each for each in self.settings if each["step"] <= step]
        self.rings = []  # what broke an earlier session is no news about this one
        for name, pairs in self.logs.items():
            self.logs[name] = [pair for pair in pairs if pair[0] <= step]
        options = {"every": entry.get("every"), **entry.get("options", {})}
        self.sessions.append(Session(step, entry.get("time", 0.0), options, entry.get("cut", "")))
        self.model = entry.get("model", "")
        self.matrices |= entry.get("matrices", {})
        self.skipped = entry.get("skipped", {})

    def _read(self, entry: Entry, step: int) -> None:
        """Take the numbers of a reading; a session begins with those the one before ended with."""
        if entry["kind"] == "reading":
            self.readings.append(Reading(step, entry.get("time", 0.0), entry.get("seconds", 0.0)))
        for key, value in _numbers_of(entry["rows"]):
            column = self.columns.get(key)
            if column is None:
                column = self.columns[key] = Column()
            column.add(step, value)


def rows_of(step: int, readings: Readings) -> Iterator[Row]:
    """The rows of one reading, entries of a vector one by one.

    >>> [row.value for row in rows_of(0, {"w": {"singular_values": [[0.0, 3.0], [1.0, 1.0]]}})]
    [3.0, 1.0]
    """
    for (matrix, quantity, index), value in _numbers_of(readings):
        yield Row(step, matrix, quantity, value, index)


def _numbers_of(readings: Readings) -> Iterator[tuple[Key, float]]:
    for matrix, quantities in readings.items():
        for quantity, value in quantities.items():
            if isinstance(value, list | tuple):
                for index, each in value:
                    yield (matrix, quantity, float(index)), _number(each)
            else:
                yield (matrix, quantity, None), _number(value)


def _number(value: Any) -> float:
    return _WORDS[value] if isinstance(value, str) else float(value)


def _opened(line: bytes) -> Entry | None:
    """The entry in a line, or None where it does not fit its digest or is none of ours."""
    seal, _, body = line.partition(b" ")
    if seal != _seal(body):
        return None
    try:
        entry = json.loads(body)
    except ValueError:
        return None
    is_ours = isinstance(entry, dict) and isinstance(entry.get("step"), int)
    return entry if is_ours and isinstance(entry.get("kind"), str) else None


class PlainRows(list[dict[str, Any]]):
    """Rows as dictionaries, where there is no pyarrow: a list that answers as its tables do.

    >>> PlainRows([{"step": 0}]).to_pylist()
    [{'step': 0}]
    """

    def to_pylist(self) -> list[dict[str, Any]]:
        """Return the rows, by the name that this has for an Arrow table."""
        return list(self)


def table_of(rows: Iterable[Row]) -> Any:
    """Rows as an Arrow table, where pyarrow is installed, or else as a list of dictionaries.

    Either has ``to_pylist``.

    >>> table_of([Row(0, "w", "sigma_max", 2.0)]).to_pylist()
    [{'step': 0, 'matrix': 'w', 'quantity': 'sigma_max', 'value': 2.0, 'index': None}]
    """
    rows = list(rows)
    try:
        import pyarrow
    except ImportError:
        return PlainRows(asdict(row) for row in rows)
    kinds = {"step": "int64", "matrix": "string", "quantity": "string"}
    names = [each.name for each in fields(Row)]
    arrays = [
        pyarrow.array([getattr(row, name) for row in rows], kinds.get(name, "float64"))
        for name in names
    ]
    return pyarrow.table(dict(zip(names, arrays, strict=True)))
