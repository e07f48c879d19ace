"""Work on many machines: Ray says where an item is done, and its node does it as we would here.

A task of Ray is one item, pickled: a path and names travel, never tensors. On its node the item is
done by :class:`~kappascope.system.workers.Processes`, in a process of its own with limits of time
and memory and one thread, so that an answer has the same bits as here and nothing of a stranger
runs inside Ray. Nodes that would give other bits (another processor, another library) are found by
their own account and not used.
"""

from __future__ import annotations

import ctypes
import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from kappascope.refusal import Refusal
from kappascope.system._server import START_SECONDS, Worker
from kappascope.system.extras import optional
from kappascope.system.files import MODES, environment
from kappascope.system.imports import trusted, trusted_environment
from kappascope.system.workers import Done, Engine, Processes, failed, working_folder

T = TypeVar("T")
log = logging.getLogger(__name__)

LOSSES = 3  # nodes or processes of Ray that an item may lose before it is given up
QUEUED = 2  # items for every core: one that runs, and one that waits beside it
NODES_SECONDS = 2.0  # between two looks at which nodes there are
STORE_BYTES = 10**8  # of Ray's object store where we start it: answers are rows
HELD = b"Ray is held at "  # what comes before the address that a holder tells
QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.FATAL}
JOIN_TRIES = 3  # of a client: the fork of a server for it fails by chance (Ray's issue 63202)
FORK_FAILED = (  # what a client is told of it: the forked process aborted, or it hangs
    "Starting Ray client server failed",
    "Proxy failed to Connect to backend",
)
NO_FORK_HANDLERS = "GRPC_ENABLE_FORK_SUPPORT=0"  # gRPC's own are what fails there
GONE_SECONDS = 5  # after which a cluster ends the work of a client; Ray itself takes 30
LISTEN_SECONDS = 10.0  # until a port answers; Ray itself would look for it for minutes
CLIENT_PORT = 10001  # of Ray's server for clients, unless it is told another
NODE = "ray.io/node-id"  # the label by which Ray knows a node
OURS = "KAPPASCOPE_"  # variables of this package, which workers need as the driver has them


@dataclass(frozen=True)
class _Errand:
    """An item on its way to a node, and what the node has to be like."""

    parcel: bytes
    engine: Engine
    kind: Mapping[str, str | int]
    folder: str
    path: tuple[str, ...]
    variables: Mapping[str, str]


@dataclass(frozen=True)
class _Unfit:
    """A node that would give other bits, and what is other there."""

    node: str
    why: str


@dataclass
class _Flight(Generic[T]):
    """An item that Ray has, or that it lost so many times."""

    item: T
    losses: int = 0
    since: float = 0.0


@final
@dataclass(frozen=True)
class Cluster:
    """The machines that Ray joins, or this one where it joins none.

    ``worker`` does an item on its node. An item whose node or process of Ray is lost is given to
    another, a bounded number of times. ``reserved`` bytes of a node's memory are kept for an item.
    ``address`` is as ``ray.init`` takes it, or in ``RAY_ADDRESS``; without either Ray is started on
    this machine, for as long as this process lives.
    """

    worker: Processes
    address: str | None = None
    engine: Engine | None = None  # of a node, where it is more than the worker alone
    reserved: int = 0
    patience: float = START_SECONDS  # beyond the time limit, for a node to load its libraries
    tell: Callable[[str], None] = field(default=log.warning, compare=False)

    def run(self, work: Callable[[T], object], items: Sequence[T]) -> Generator[Done[T]]:
        """Yield items as they end, wherever that is; closing the iterator ends all work."""
        if not items:
            return
        self.warm()
        ray = optional("ray", "ray")
        todo = deque(_Flight(item) for item in items)
        flights: dict[Any, _Flight[T]] = {}
        nodes = _Nodes(self.tell)
        try:
            while todo or flights:
                while todo and len(flights) < QUEUED * max(1, nodes.cores):
                    flight = todo.popleft()
                    try:
                        errand = self._errand(pickle.dumps((work, flight.item)))
                    except Exception as error:
                        yield failed(flight.item, error, 0.0)
                        continue
                    flight.since = time.monotonic()
                    flights[self._sent(errand, nodes)] = flight
                ready, _ = ray.wait(list(flights), timeout=1.0) if flights else ([], [])
                for answer in (*ready, *self._overdue(flights)):
                    flight = flights.pop(answer)
                    done, again = _received(answer, flight)
                    if isinstance(done.result, _Unfit):
                        nodes.exclude(done.result)
                        todo.appendleft(flight)
                    elif again and flight.losses < LOSSES:
                        todo.appendleft(replace(flight, losses=flight.losses + 1))
                    else:
                        yield done
        finally:
            for answer in flights:
                _cancel(answer)

    def warm(self) -> None:
        """Join the cluster, or start Ray on this machine."""
        address = self.address or os.environ.get("RAY_ADDRESS")
        if not address and "RAY_AUTH_MODE" not in os.environ and "ray" not in sys.modules:
            # Ray of our own is for us alone; it looks for these when it is loaded
            os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        # nobody is told of it
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_CLIENT_RECONNECT_GRACE_PERIOD", str(GONE_SECONDS))
        ray = optional("ray", "ray")
        if ray.is_initialized():
            return
        if address:
            _check_listening(address)
        # Ray puts the current folder, in which a stranger's files may lie, on its workers' path
        with chdir("/"), _signals_kept(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _join(address or _held(self.worker.jobs))
            except Refusal:
                raise
            except Exception as error:  # whatever is wrong there: its version, its time limits
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                first, *more = lines or [type(error).__name__]
                # of a traceback from there the last line says why
                wrong = f"{first} {more[-1]}" if more and first.endswith(":") else first
                wrong = wrong.rstrip(".")[:160]
                advice = _start_otherwise() if _fork_failed(error) else _look(address)
                raise Refusal(5, _given(address), wrong, advice) from error

    @property
    def node_bytes(self) -> int | None:
        """Return the memory of the largest node; None where Ray does not tell."""
        self.warm()
        nodes = optional("ray", "ray").nodes()
        return max((int(node["Resources"].get("memory", 0)) for node in nodes), default=0) or None

    def _errand(self, parcel: bytes) -> _Errand:
        variables = {
            name: value
            for name, value in os.environ.items()
            if name in MODES or name.startswith(OURS)
        }
        engine = self.engine or replace(self.worker, jobs=1)
        path = tuple(trusted(sys.path))
        return _Errand(parcel, engine, dict(environment()), str(working_folder()), path, variables)

    def _sent(self, errand: _Errand, nodes: _Nodes) -> Any:
        ray = optional("ray", "ray")
        where = {"label_selector": {NODE: f"!in({','.join(nodes.unfit)})"}} if nodes.unfit else {}
        most = self.node_bytes if self.reserved else None
        memory = {"memory": min(self.reserved, most)} if most else {}
        # retried here, and not by Ray: an item has a bounded number of tries, whatever befalls it
        options = {"num_cpus": 1, "max_retries": 0, "name": "kappascope"}
        return ray.remote(done_there).options(**options, **where, **memory).remote(errand)

    def _overdue(self, flights: Mapping[Any, _Flight[T]]) -> list[Any]:
        """Return the answers that should have come: their process of Ray hangs."""
        most = QUEUED * (self.worker.limit * (1 + self.worker.retries) + self.patience)
        now = time.monotonic()
        return [answer for answer, flight in flights.items() if now - flight.since > most]


@dataclass
class _Nodes:
    """The nodes that are alive, and those that are not used."""

    tell: Callable[[str], None]
    unfit: dict[str, str] = field(default_factory=dict)
    _cores: int = 0
    _seen: float = -NODES_SECONDS

    @property
    def cores(self) -> int:
        """Cores of the nodes that are used, as Ray counts them."""
        if time.monotonic() - self._seen >= NODES_SECONDS:
            self._seen = time.monotonic()
            used = [node for node in self._alive() if node["NodeID"] not in self.unfit]
            self._cores = int(sum(node["Resources"].get("CPU", 0) for node in used))
        return self._cores

    def exclude(self, unfit: _Unfit) -> None:
        """Use a node no more and say so once; refused where no other is left."""
        if unfit.node in self.unfit:
            return
        self.unfit[unfit.node] = unfit.why
        self._seen = -NODES_SECONDS
        if not self.cores:
            wrong = f"no node would give the bits of this machine: {unfit.why}"
            advice = "start the command on a node of the kind that shall do the work"
            raise Refusal(4, "--engine ray", wrong, advice)
        self.tell(f"node {unfit.node[:8]} of the cluster is not used: {unfit.why}")

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in optional("ray", "ray").nodes() if node["Alive"]]


def _received(answer: Any, flight: _Flight[T]) -> tuple[Done[T], bool]:
    """Return what came of an item, and whether another node may do it better."""
    ray = optional("ray", "ray")
    item, seconds, lost = flight.item, time.monotonic() - flight.since, ray.exceptions
    try:
        done = ray.get(answer, timeout=0)
    except lost.GetTimeoutError:
        _cancel(answer)
        return Done(item, seconds, "its node does not answer", TimeoutError()), True
    except lost.OutOfMemoryError:
        return Done(item, seconds, "its node had no memory left", MemoryError()), True
    except (
        lost.WorkerCrashedError,
        lost.NodeDiedError,
        lost.ObjectLostError,
        lost.LocalRayletDiedError,
    ) as error:
        wrong = f"its node was lost: {type(error).__name__}"
        return Done(item, seconds, wrong, ChildProcessError(wrong)), True
    except Exception as error:  # what is wrong with a node itself: it has no kappascope, say
        wrong = f"its node cannot do it: {str(error).strip().rpartition(chr(10))[2]}"[:500]
        return Done(item, seconds, wrong, RuntimeError(wrong)), True
    if isinstance(done, _Unfit):
        return Done(item, result=done), True
    result = pickle.loads(done.result) if done.result is not None else None
    return replace(done, item=item, result=result), False


def _cancel(answer: Any) -> None:
    """End what a node still does for us; its processes end with the worker of Ray."""
    with suppress(Exception):  # the cluster may be gone
        optional("ray", "ray").cancel(answer, force=True)


def _given(address: str | None) -> str:
    """Return how the user named a cluster."""
    named = f"RAY_ADDRESS={address}"
    return named if address and not address.startswith("ray://") else f"--engine {address or 'ray'}"


def _look(address: str | None) -> str:
    """Return what to look at where a cluster cannot be joined."""
    if address and address.startswith("ray://"):
        return (
            f"see whether Ray runs there (ray status) and serves clients: port {CLIENT_PORT}? "
            "On a node of the cluster --engine ray needs no such server"
        )
    return "see whether Ray runs there: ray status"


def _start_otherwise() -> str:
    """Return what to do where Ray cannot start a server for this client."""
    return (
        f"start the head with {NO_FORK_HANDLERS} in its environment, "
        "or give the command on a node of the cluster, with --engine ray"
    )


def _fork_failed(error: Exception) -> bool:
    """Tell whether Ray could not start a server for this client."""
    return isinstance(error, ConnectionAbortedError) and any(
        told in str(error) for told in FORK_FAILED
    )


def _check_listening(address: str) -> None:
    """Refuse an address at which nothing listens; ``auto`` and the like name none."""
    place = address.removeprefix("ray://")
    host, _, port = place.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), LISTEN_SECONDS).close()
        except (OSError, OverflowError) as error:
            wrong = f"nothing answers: {getattr(error, 'strerror', None) or error}"
            raise Refusal(5, _given(address), wrong, _look(address)) from error
    elif place != address:
        raise Refusal(4, _given(address), "no host and port", f"ray://head:{CLIENT_PORT}")


def _join(address: str) -> None:
    """Join the cluster at an address, as a client some times if need be."""
    ray = optional("ray", "ray")
    for tried in range(1, JOIN_TRIES + 1):
        try:
            ray.init(address=address, **QUIET)
        except ConnectionAbortedError as error:
            if tried == JOIN_TRIES or not _fork_failed(error):
                raise
        else:
            return


@contextmanager
def _signals_kept() -> Iterator[None]:
    """Put the handlers of signals back that Ray replaces, and end as we would without it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    ended = False
    try:
        yield
    except SystemExit:  # what Ray makes of a SIGTERM
        ended = True
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if ended:
        signal.raise_signal(signal.SIGTERM)


# --- Ray of our own -------------------------------------------------------------------------------

SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl
HOLDERS: list[subprocess.Popen[bytes]] = []  # each ends, with all that it started, once we do


def _held(cores: int) -> str:
    """Start Ray on this machine for as long as this process lives; returns its address.

    Not by this process itself: were it killed, Ray's helpers would look for their dead master for a
    minute. Those of a holder are its children for ever, and it ends them.
    """
    program = f"from {__name__} import hold; hold({cores})"
    holder = subprocess.Popen(
        [sys.executable, "-P", "-c", program],
        stdin=subprocess.PIPE,  # which closes when this process ends
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=trusted_environment() | {"PYTHONPATH": os.pathsep.join(trusted(sys.path))},
        cwd="/",
        start_new_session=True,  # Ctrl-C is for the driver
    )
    HOLDERS.append(holder)
    assert holder.stdout
    for line in holder.stdout:
        if line.startswith(HELD):
            return line.removeprefix(HELD).decode().strip()
    raise Refusal(5, "--engine ray", "Ray cannot be started here", "try `ray start --head`")


def hold(cores: int) -> None:
    """Start Ray, tell its address, and end it with whoever waits for that."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SUBREAPER, 1)
    threading.Thread(target=_end_with_driver, daemon=True).start()
    ray = optional("ray", "ray")
    ray.init(
        address="local",
        num_cpus=cores,
        object_store_memory=STORE_BYTES,
        include_dashboard=False,
        **QUIET,
    )
    sys.stdout.buffer.write(HELD + ray.get_runtime_context().gcs_address.encode() + b"\n")
    sys.stdout.buffer.flush()
    threading.Event().wait()


def _end_with_driver() -> None:
    """Wait until the driver has ended; then end every process that descends from this one."""
    sys.stdin.buffer.read()
    while found := _descendants():
        for pid in found:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.05)
    os._exit(0)


def _descendants() -> set[int]:
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parents[int(entry.name)] = int(
                (entry / "stat").read_text().rpartition(")")[2].split()[1]
            )
    found: set[int] = set()
    while (
        more := {pid for pid, parent in parents.items() if parent in {os.getpid(), *found}} - found
    ):
        found |= more
    return found


# --- on a node ------------------------------------------------------------------------------------


_IDLE: dict[Processes, list[Worker]] = {}
"""Processes of a node that have nothing to do; they end with the worker of Ray that has them."""


def done_there(errand: _Errand) -> Done[None] | _Unfit:
    """Do an item on the node we are on, if that is of the kind that was asked for."""
    os.environ.update(errand.variables)
    sys.path += [entry for entry in errand.path if entry not in sys.path]
    try:
        os.chdir(errand.folder)
    except OSError:
        os.chdir("/")  # names from the root may be found nevertheless
    node = optional("ray", "ray").get_runtime_context().get_node_id()
    theirs = _kind()
    other = [name for name, value in errand.kind.items() if theirs.get(name) != value]
    if other:
        whats = (f"its {name} is {theirs.get(name)}, here {errand.kind[name]}" for name in other)
        return _Unfit(node, next(whats))
    engine = errand.engine
    if isinstance(engine, Processes):  # whose process may have the next item, too
        idle = _IDLE.setdefault(engine, [])
        (done,) = engine.run_with(idle, _opened, [errand.parcel])
    else:
        (done,) = engine.run(_opened, [errand.parcel])
    return Done(None, done.seconds, done.failure, done.error, done.result)


def _opened(parcel: bytes) -> bytes:
    """Do an item in its own process, whose answer Ray need not understand."""
    work, item = pickle.loads(parcel)
    return pickle.dumps(work(item))


@cache
def _kind() -> Mapping[str, str | int]:
    """Return what the bits of a result depend on here, as a process that works here tells."""
    (done,) = Processes(1, limit=START_SECONDS).run(_told, [None])
    if done.error:
        raise done.error
    return done.result


def _told(nothing: None) -> dict[str, str | int]:
    return dict(environment())


def engine_of(name: str, worker: Processes, tell: Callable[[str], None]) -> Processes | Cluster:
    """Return the engine of a name: ``local``, ``ray``, or the address of a cluster of Ray.

    >>> engine_of("local", Processes(2), print)
    Processes(jobs=2, ...)
    >>> engine_of("dask", Processes(2), print)
    Traceback (most recent call last):
    kappascope.refusal.Refusal: --engine dask: there is none (local, ray or ray://address)
    """
    if name == "local":
        return worker
    if name == "ray" or name.startswith("ray://"):
        return Cluster(worker, None if name == "ray" else name, tell=tell)
    raise Refusal(4, f"--engine {name}", "there is none", "local, ray or ray://address")
