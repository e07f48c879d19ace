"""Where work is done: in this process, or in others that may hang or die without harm.

An engine runs one function on many items and yields each as :class:`Done`, in the order in which
they end. Nothing an item does ends the run: what it raised, or how its process ended, is its
``failure``. Machines of a cluster are in :mod:`kappascope.system.cluster`.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from threading import RLock, get_ident
from typing import Any, Generic, Protocol, TypeVar, final

from kappascope.refusal import Refusal
from kappascope.system._server import END_SECONDS, Worker, started
from kappascope.system.imports import trusted
from kappascope.system.memory import (
    LIBRARY_BYTES,
    LOADING_ADDRESSES,
    LOADING_DATA,
    gigabytes,
    has_room,
    held_bytes,
)

T = TypeVar("T")

ONE_THREAD = {
    # Two threads change the bits of a spectrum, and lose time on small products.
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "OMP_WAIT_POLICY": "passive",
}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Done(Generic[T]):
    """An item that is done, or one that cannot be and says why."""

    item: T
    seconds: float = 0.0
    failure: str = ""
    error: BaseException | None = None
    result: Any = None


class Engine(Protocol):
    """A place where a function is run on many items."""

    def run(self, work: Callable[[T], object], items: Sequence[T]) -> Generator[Done[T]]:
        """Return every item exactly once, as they end; closing the iterator ends all work."""


@final
@dataclass(frozen=True)
class Here:
    """The process we are in, one item after the other.

    >>> [(done.result, done.failure) for done in Here().run(lambda n: 2 / n, [1, 0])]
    [(2.0, ''), (None, 'ZeroDivisionError: division by zero')]
    """

    def run(self, work: Callable[[T], object], items: Sequence[T]) -> Generator[Done[T]]:
        """Yield each item in turn; only the user ends one that hangs."""
        with _one_thread():
            for item in items:
                yield _attempt(work, item)


@final
@dataclass(frozen=True)
class Processes:
    """Processes of this machine, one thread each.

    An item that takes longer than ``limit`` seconds is ended; one whose process dies is tried
    ``retries`` times more. No process outlives its parent, however that one ends. With ``memory``,
    a process may hold that many bytes of data, and what it prints is lost: it is not trusted.

    >>> [done.failure for done in Processes(jobs=1).run(abs, [-1, "one"])]
    ['', "TypeError: bad operand type for abs(): 'str'"]
    """

    jobs: int
    limit: float = 900.0  # seconds; a unit of the paper's experiments takes some of them
    retries: int = 1  # a process killed for its memory may find more of it the second time
    memory: int | None = None
    loaded: tuple[str, ...] = ("torch", "scipy.linalg")  # modules that no process loads again

    def __post_init__(self) -> None:
        if self.jobs < 1:
            raise ValueError(f"expected jobs of 1 or more, got {self.jobs}: nothing would be done")

    def run(self, work: Callable[[T], object], items: Sequence[T]) -> Generator[Done[T]]:
        """Yield items as they end; a process takes the next when it has done its last."""
        idle: list[Worker] = []
        try:
            yield from self.run_with(idle, work, items)
        finally:
            for worker in idle:
                worker.end()

    def run_with(
        self, idle: list[Worker], work: Callable[[T], object], items: Sequence[T]
    ) -> Generator[Done[T]]:
        """Do the same with processes that are there already, and leave those that can go on."""
        todo = deque((item, self.retries) for item in items)
        busy: dict[Worker, tuple[T, int]] = {}
        jobs = self.jobs
        with _one_thread():
            try:
                while todo or busy:
                    while todo and len(busy) < jobs:
                        item, lives = todo.popleft()
                        try:  # pickled here, so that what cannot be unpickled fails alone
                            parcel = pickle.dumps((work, item))
                        except Exception as error:
                            yield failed(item, error, 0.0)
                            continue
                        try:
                            worker = self._worker(idle)
                        except OSError as error:
                            if not busy:
                                raise _unstartable(error) from error
                            todo.appendleft((item, lives))
                            jobs = len(busy)  # there is room for no more
                            break
                        busy[worker] = item, lives
                        worker.give(parcel)
                    for worker, done in self._ended(busy):
                        item, lives = busy.pop(worker)
                        if not worker.ended:
                            idle.append(worker)
                        if worker.ended and isinstance(done.error, ChildProcessError) and lives:
                            todo.appendleft((item, lives - 1))
                        else:
                            yield replace(done, item=item)
            finally:
                for worker in busy:
                    worker.end()

    def warm(self) -> None:
        """Start the server that processes are forked from; it loads while we do something else."""
        if "torch" in self.loaded and "torch" not in sys.modules:
            _refuse_without_room()
        try:
            started(self.loaded, ONE_THREAD)
        except OSError as error:
            raise _unstartable(error) from error

    def _worker(self, idle: list[Worker]) -> Worker:
        """Return a process that has nothing to do: one that is idle and lives, or a new one."""
        while idle:
            worker = idle.pop()
            try:
                worker.answer()
            except EOFError:  # it died while it had nothing to do
                worker.end()
            else:
                return worker
        begin = partial(_enter, self.memory, working_folder(), trusted(sys.path))
        try:
            return Worker(started(self.loaded, ONE_THREAD), begin)
        except (BrokenPipeError, ChildProcessError):  # the server died, perhaps for its memory
            return Worker(started(self.loaded, ONE_THREAD), begin)

    def _ended(self, busy: Mapping[Worker, object]) -> Iterator[tuple[Worker, Done[Any]]]:
        """Yield the processes that have done their item, or will not, once there are some."""
        poll = select.poll()
        for worker in busy:
            poll.register(worker.channel, worker.wanted)
        left = min((self.limit - worker.seconds for worker in busy), default=0.0)
        poll.poll(1000 * min(max(left, 0.0), 1.0) + 1)
        for worker in list(busy):
            try:
                answer = worker.answer()
            except EOFError:
                how = _how(worker.end(END_SECONDS))
                yield worker, Done(None, 0.0, f"its process died{how}", ChildProcessError(how))
                continue
            if answer is not None:
                yield worker, pickle.loads(answer)
            elif worker.seconds > self.limit:
                worker.end()
                late = f"timeout: more than {self.limit:g} s"
                yield worker, Done(None, self.limit, late, TimeoutError())


def _refuse_without_room() -> None:
    """Refuse limits under which a library would end this process while it is loaded."""
    if not has_room(LOADING_ADDRESSES, LOADING_DATA):
        needs = f"{gigabytes(LOADING_ADDRESSES)} of addresses and {gigabytes(LOADING_DATA)} of data"
        wrong = f"there is no room for it: it needs {needs}"
        advice = "free some memory, or raise the limits that `ulimit -v` and `-d` show"
        raise Refusal(5, "torch", wrong, advice)


def _unstartable(error: OSError) -> Refusal:
    """Return the refusal where the system gives no process, thread or descriptor."""
    wrong = f"cannot be started: {error.strerror or error}"
    advice = "end others, or raise the limits that `ulimit -u`, `-n` and `-v` show"
    return Refusal(5, "worker processes", wrong, advice)


def _how(code: int | None) -> str:
    """Tell how a process ended, as the end of a sentence.

    >>> _how(-9), _how(7), _how(None)
    (': signal SIGKILL', ': exit code 7', '')
    """
    if code is None:
        return ""
    if code >= 0:
        return f": exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f": signal {known.get(-code, -code)}"


def working_folder() -> Path:
    """Return the current folder, by another name if it was removed.

    >>> working_folder().is_absolute()
    True
    """
    try:
        return Path.cwd()
    except OSError:  # it was removed: on Linux another process can enter it nevertheless
        return Path(f"/proc/{os.getpid()}/cwd")


def _enter(memory: int | None, folder: Path, path: list[str]) -> Callable[[bytes], bytes]:
    """Make a new process as its driver is now, confine it, and give what it does with parcels."""
    sys.path[:] = path
    with suppress(OSError):
        os.chdir(folder)
    if memory:
        _confine(memory)
    return _answer


def _confine(memory: int) -> None:
    """Bound what this process may hold, and let nobody hear it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    with suppress(ImportError, ValueError, OSError):  # a system without, or with a lower limit
        import resource

        # of data, not of addresses: libraries map gigabytes they never touch
        # a driver that did other work before has a server with more libraries than usual
        more = max(0, held_bytes() - LIBRARY_BYTES)
        _, highest = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory + more, highest))


def _answer(parcel: bytes) -> bytes:
    """Do an item in another process; its answer is small, and can be read by its driver."""
    try:
        work, item = pickle.loads(parcel)
        return pickle.dumps(replace(_attempt(work, item), item=None))
    except BaseException as error:  # an exit is the item's alone
        return pickle.dumps(failed(None, error, 0.0))


def _attempt(work: Callable[[T], object], item: T) -> Done[T]:
    start = time.perf_counter()
    try:
        result = work(item)
    except Exception as error:
        return failed(item, error, time.perf_counter() - start)
    return Done(item, time.perf_counter() - start, result=result)


def failed(item: T, error: BaseException, seconds: float) -> Done[T]:
    """Return an item that ended with an error, which another process can read.

    >>> failed("item", ValueError("no"), 0.0).failure
    'ValueError: no'
    """
    text = f"{type(error).__name__}: {error}".removesuffix(": ")[:500]
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = RuntimeError(text)
    return Done(item, seconds, text, error)


@dataclass
class _Solo:
    """Which threads asked for one thread each, and what there was before the first of them did."""

    lock: RLock = field(default_factory=RLock)  # a forgotten engine may end while it is held
    askers: list[int] = field(default_factory=list)
    names: dict[str, str | None] = field(default_factory=dict)
    threads: int = 1

    def begin(self, torch: Any) -> int:
        """Ask, and give what to end with."""
        with self.lock:
            if not self.askers:
                self.names = {name: os.environ.get(name) for name in ONE_THREAD}
                self.threads = torch.get_num_threads() if torch else 1
                os.environ.update(ONE_THREAD)
            self.askers.append(asker := get_ident())
            if torch:
                torch.set_num_threads(1)  # of this thread alone
        return asker

    def forked(self) -> None:
        """Begin anew in a child, in which the threads of its parent do not go on."""
        self.lock = RLock()
        if self.askers:
            self.askers.clear()
            self._restore()

    def end(self, torch: Any, asker: int) -> None:
        """Put back what was this thread's, and with the last one to leave what was everybody's."""
        with self.lock:
            self.askers.remove(asker)
            if torch and asker not in self.askers:
                torch.set_num_threads(self.threads)
            if not self.askers:
                self._restore()

    def _restore(self) -> None:
        """Put the variables back that were everybody's."""
        for name, value in self.names.items():
            os.environ.pop(name, None)
            os.environ.update({} if value is None else {name: value})


_SOLO = _Solo()
os.register_at_fork(after_in_child=_SOLO.forked)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give one thread to this process's torch and to every process it starts, for a while."""
    torch: Any = sys.modules.get("torch")
    asker = _SOLO.begin(torch)
    try:
        yield
    finally:
        _SOLO.end(torch, asker)
