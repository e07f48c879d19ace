"""Where work is done: in this process, or in others that may hang or die without harm.

An engine runs one function on many items and yields each as :class:`Done`, in the order in which
they end. Nothing an item does ends the run: what it raised, or how its process ended, is its
``failure``. A cluster would be one more class with a ``run``.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import pickle
import select
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext, ForkServerProcess
from threading import RLock, Thread, get_ident
from types import ModuleType
from typing import Any, Generic, Protocol, TypeVar, cast, final

T = TypeVar("T")

ONE_THREAD = {
    # Two threads change the bits of a spectrum, and lose time on small products.
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "OMP_WAIT_POLICY": "passive",
}
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl


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
        """Every item exactly once, as they end; closing the iterator ends all work."""


@final
@dataclass(frozen=True)
class Here:
    """The process we are in, one item after the other.

    >>> [(done.result, done.failure) for done in Here().run(lambda n: 2 / n, [1, 0])]
    [(2.0, ''), (None, 'ZeroDivisionError: division by zero')]
    """

    def run(self, work: Callable[[T], object], items: Sequence[T]) -> Generator[Done[T]]:
        """Each item in turn; only the user ends one that hangs."""
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
        """Every process takes the next item when it has done its last."""
        todo = deque((item, self.retries) for item in items)
        busy: dict[Future[Done[T]], tuple[T, int, Any]] = {}
        with _one_thread():
            # One pool for each process: if it dies holding its pool's lock, it blocks no other.
            idle = [self._pool() for _ in range(min(self.jobs, len(items)))]
            try:
                while todo or busy:
                    while todo and idle:
                        (item, lives), pool = todo.popleft(), self._ready(idle.pop())
                        busy[_schedule(pool, work, item, self.limit)] = item, lives, pool
                    for future in _ended(busy):
                        item, lives, pool = busy.pop(future)
                        done = self._outcome(future, item)
                        ended = isinstance(done.error, ChildProcessError | TimeoutError)
                        idle.append(self._renewed(pool) if ended else pool)
                        if isinstance(done.error, ChildProcessError) and lives:
                            todo.appendleft((item, lives - 1))
                        else:
                            yield done
            finally:
                _stop(*idle, *(pool for _, _, pool in busy.values()))

    def _ready(self, pool: Any) -> Any:
        """The pool, or another one if its process died while it had nothing to do."""
        with _deaf():
            return pool if pool.active else self._renewed(pool)

    def _renewed(self, pool: Any) -> Any:
        _stop(pool)
        return self._pool()

    def _pool(self) -> Any:
        from pebble import ProcessPool

        # Not fork: such a child hangs in a factorization if its parent ran one with two threads.
        # Not spawn: each would load torch anew, for seconds; here one server does, then it forks.
        self.warm()
        arguments = os.getpid(), self.memory
        return ProcessPool(1, initializer=_enter, initargs=arguments, context=_Alone())

    def warm(self) -> None:
        """Start the server that processes are forked from; it loads while we do something else."""
        resource_tracker.ensure_running()  # or the server will, and hear Ctrl-C again after that
        with _one_thread(), _deaf():
            multiprocessing.get_context("forkserver").set_forkserver_preload(list(self.loaded))
            forkserver.ensure_running()

    def _outcome(self, future: Future[Done[T]], item: T) -> Done[T]:
        try:
            return replace(future.result(timeout=0), item=item)
        except TimeoutError as error:
            if future.done():
                return Done(item, self.limit, f"timeout: more than {self.limit:g} s", error)
            return Done(item, 0.0, "its process died", ChildProcessError())
        except Exception as error:
            code = getattr(error, "exitcode", None) or 0
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return Done(item, 0.0, f"its process died: {how}", ChildProcessError(how))


class _Stranger(ForkServerProcess):
    """A process that does not run the user's script up to the line that started it."""

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 - multiprocessing's name
        main, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
        try:
            return ForkServerProcess._Popen(process)
        finally:
            sys.modules["__main__"] = main


class _Alone(ForkServerContext):
    Process = _Stranger


def _enter(parent: int, memory: int | None) -> None:
    """Make a new process end with its parent, and at once when told to; confine it."""
    gc.freeze()  # what the server loaded is no garbage, and need not be looked through again
    if memory:
        _confine(memory)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # pebble's handler waits for LAPACK to return
    try:
        os.kill(parent, 0)
    except ProcessLookupError:
        os._exit(1)
    if hasattr(os, "pidfd_open"):  # else we end with the item that we are at
        # the server, with which we end, waits for us when our parent has died
        Thread(target=_outlive, args=(os.pidfd_open(parent),), daemon=True).start()


def _outlive(parent: int) -> None:
    """Wait for the end of a process, and end."""
    select.select([parent], [], [])
    os._exit(1)


def _confine(memory: int) -> None:
    """Bound what this process may hold, and let nobody hear it."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    with suppress(ImportError, ValueError, OSError):  # a system without, or with a lower limit
        import resource

        # of data, not of addresses: libraries map gigabytes they never touch
        _, highest = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (memory, highest))


def _schedule(pool: Any, work: Callable[[T], object], item: T, limit: float) -> Future[Done[T]]:
    """Start an item; pickled here, so that what cannot be unpickled fails alone."""
    future: Future[Done[T]] = Future()
    try:
        parcel = pickle.dumps((work, item))
    except Exception as error:
        future.set_result(_failed(item, error, 0.0))
        return future
    try:
        with _deaf():
            return cast("Future[Done[T]]", pool.schedule(_unpack, args=(parcel,), timeout=limit))
    except Exception as error:  # no process could be started, or it is dead again
        future.set_exception(error)
        return future


@contextmanager
def _deaf() -> Iterator[None]:
    """Start processes and threads that a Ctrl-C does not reach: it is for their parent."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ended(busy: Mapping[Future[Any], tuple[Any, int, Any]]) -> list[Future[Any]]:
    """The items that ended, or whose pool did without telling them."""
    ended = wait(busy, timeout=1.0, return_when=FIRST_COMPLETED).done
    lost = [future for future, (_, _, pool) in busy.items() if not pool.active]
    return [future for future in busy if future in ended or future in lost]


def _stop(*pools: Any) -> None:
    for pool in pools:
        pool.stop()
    for pool in pools:
        pool.join()


def _unpack(parcel: bytes) -> Done[None]:
    """Do an item in another process; its answer is small, and can be read by its parent."""
    try:
        work, item = pickle.loads(parcel)
        return replace(_attempt(work, item), item=None)
    except BaseException as error:  # an exit is the item's alone
        return _failed(None, error, 0.0)


def _attempt(work: Callable[[T], object], item: T) -> Done[T]:
    start = time.perf_counter()
    try:
        result = work(item)
    except Exception as error:
        return _failed(item, error, time.perf_counter() - start)
    return Done(item, time.perf_counter() - start, result=result)


def _failed(item: T, error: BaseException, seconds: float) -> Done[T]:
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

    def end(self, torch: Any, asker: int) -> None:
        """Put back what was this thread's, and with the last one to leave what was everybody's."""
        with self.lock:
            self.askers.remove(asker)
            if torch and asker not in self.askers:
                torch.set_num_threads(self.threads)
            for name, value in () if self.askers else self.names.items():
                os.environ.pop(name, None)
                os.environ.update({} if value is None else {name: value})


_SOLO = _Solo()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Give one thread to this process's torch and to every process it starts, for a while."""
    torch: Any = sys.modules.get("torch")
    asker = _SOLO.begin(torch)
    try:
        yield
    finally:
        _SOLO.end(torch, asker)
