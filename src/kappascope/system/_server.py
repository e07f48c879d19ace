"""The server that workers are forked from: it has loaded torch once, and nothing of a stranger.

Not multiprocessing's: that one imports from the current folder, runs the user's script again, needs
a socket in the temporary folder, a second process for semaphores and a caller that is no daemon.

A driver asks its server over a socket. A request is two descriptors: the worker's channel, on which
it receives parcels and answers them, and a pipe on which the server reports its process id (or the
negative number of the error for which there is none) and at last its exit code.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import pickle
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from fcntl import F_DUPFD_CLOEXEC, fcntl
from importlib import import_module
from threading import RLock, Thread
from typing import Final, cast, final

from kappascope.system.imports import trusted, trusted_environment

Answer = Callable[[bytes], bytes]
DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux's prctl
START_SECONDS = 300.0  # for a server to load torch: on a slow and busy disk a minute
END_SECONDS = 10.0  # for a killed process to be gone: the system frees its memory first
PIECE = 2**20  # bytes moved at once
NUMBER = struct.Struct("=q")


# --- the driver's side ----------------------------------------------------------------------------


@final
class Server:
    """A process that loads modules, and then forks a worker whenever it is asked to."""

    def __init__(self, modules: Sequence[str], variables: Mapping[str, str]) -> None:
        ours, theirs = map(_above_standard, socket.socketpair())
        self.control: Final = ours
        self.alive = True
        started: Future[None] = Future()
        try:
            # The system ends a server with the thread that started it: one that lasts.
            keeper = Thread(target=self._keep, args=(theirs, modules, variables, started))
            keeper.daemon = True
            keeper.start()
            started.result()
        except RuntimeError as error:  # no thread can be started
            ours.close()
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)) from error
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()

    def _keep(
        self,
        theirs: socket.socket,
        modules: Sequence[str],
        variables: Mapping[str, str],
        started: Future[None],
    ) -> None:
        """Start the process and wait for its end."""
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C is for the driver
        control = theirs.fileno()
        program = (
            f"import sys; sys.path[:] = {trusted(sys.path)!r}; "
            f"from {__name__} import serve; serve({control}, {os.getpid()}, {tuple(modules)!r})"
        )
        flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
        try:
            if not sys.executable:  # inside another program
                raise OSError(errno.ENOENT, "sys.executable names no Python")
            process = subprocess.Popen(
                [sys.executable, *flags, "-P", "-c", program],
                env={**trusted_environment(), **variables},
                cwd="/",  # MKL ends a process that loads it in a folder that was removed
                pass_fds=(control,),
                stdin=subprocess.DEVNULL,
                stdout=None if _is_open(1) else subprocess.DEVNULL,
                stderr=None if _is_open(2) else subprocess.DEVNULL,
            )
        except BaseException as error:
            started.set_exception(error)
            return
        started.set_result(None)
        process.wait()
        self.alive = False


@final
class Worker:
    """A forked process as its driver sees it: it takes a parcel, and answers it, one at a time.

    No method waits for the process for longer than it says, even if that one has been stopped.
    """

    def __init__(self, server: Server, begin: Callable[[], Answer]) -> None:
        """Ask the server for a process that does what ``begin`` gives with every parcel."""
        ours, theirs = map(_above_standard, socket.socketpair())
        report, their_report = os.pipe()
        try:
            socket.send_fds(server.control, [b"!"], [theirs.fileno(), their_report])
        except BaseException:
            ours.close()
            os.close(report)
            raise
        finally:
            theirs.close()
            os.close(their_report)
        self.channel, self._report = ours, report
        self._outgoing, self._incoming = memoryview(b""), bytearray()
        self._ready, self._since, self.ended = False, time.monotonic(), False
        self.channel.setblocking(False)
        try:
            self.pid = self._number(START_SECONDS) or -errno.ECHILD
            if self.pid < 0:
                raise OSError(-self.pid, os.strerror(-self.pid))
        except BaseException:  # a process that was forked nevertheless ends: it reads nothing
            self._close()
            raise
        self._send(pickle.dumps(begin))

    def give(self, parcel: bytes) -> None:
        """Begin to send a parcel; the time it takes counts from here, or when the worker is up."""
        self._since = time.monotonic()
        self._send(parcel)

    def _send(self, parcel: bytes) -> None:
        self._outgoing = memoryview(bytes(self._outgoing) + NUMBER.pack(len(parcel)) + parcel)
        self._write()

    def _write(self) -> None:
        with suppress(OSError):  # it takes no more now, or it died: then there is an end to read
            while self._outgoing:
                sent = self.channel.send(self._outgoing[:PIECE])
                self._outgoing = self._outgoing[sent:]

    @property
    def seconds(self) -> float:
        """How long the worker has had its parcel; its start counts only if it takes very long."""
        since = time.monotonic() - self._since
        return since if self._ready else max(0.0, since - START_SECONDS)

    @property
    def wanted(self) -> int:
        """The events of the channel that a driver waits for."""
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    def answer(self) -> bytes | None:
        """Return the answer once all of it has come.

        Raises EOFError when none will come any more.
        """
        self._write()
        ended = self._read()
        while (message := self._message()) is not None:
            if self._ready:
                return message
            self._ready, self._since = True, time.monotonic()  # the first says that it is up
        if ended:
            raise EOFError
        return None

    def _read(self) -> bool:
        """Take what has come; true if nothing more will."""
        while True:
            try:
                piece = self.channel.recv(PIECE)
            except BlockingIOError:
                return False
            except OSError:
                return True
            if not piece:
                return True
            self._incoming += piece

    def _message(self) -> bytes | None:
        if len(self._incoming) < NUMBER.size:
            return None
        end = NUMBER.size + NUMBER.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        message = bytes(self._incoming[NUMBER.size : end])
        del self._incoming[:end]
        return message

    def end(self, patience: float = 0.0) -> int | None:
        """Return the exit code, if the process ends in some seconds; after that it is killed."""
        code = self._number(patience)
        if code is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self._number(END_SECONDS)
        self._close()
        self.ended = True
        return code

    def _number(self, seconds: float) -> int | None:
        """Return the next number that the server reports; None if it ends before."""
        data = b""
        while len(data) < NUMBER.size and _readable(self._report, seconds):
            piece = os.read(self._report, NUMBER.size - len(data))
            if not piece:
                break
            data += piece
        return NUMBER.unpack(data)[0] if len(data) == NUMBER.size else None

    def _close(self) -> None:
        self.channel.close()
        os.close(self._report)


def started(modules: Sequence[str], variables: Mapping[str, str]) -> Server:
    """Return the server of this process, started now if there is none or if it has died."""
    with _CURRENT.lock:
        if _CURRENT.server is None or not _CURRENT.server.alive:
            _CURRENT.forget()
            _CURRENT.server = Server(modules, variables)
        return _CURRENT.server


class _Current:
    """The one server of this process; a forked child has none of its own yet."""

    def __init__(self) -> None:
        self.lock, self.server = RLock(), cast("Server | None", None)

    def forget(self) -> None:
        """Let the server go."""
        if self.server:
            self.server.control.close()
        self.server = None

    def forked(self) -> None:
        """Begin anew in a child, whose parent may have held the lock."""
        self.lock = RLock()
        self.forget()


_CURRENT = _Current()
os.register_at_fork(after_in_child=_CURRENT.forked)


def _above_standard(end: socket.socket) -> socket.socket:
    """Return the socket under a number that nobody takes for a closed standard stream.

    >>> [end.close() for end in map(_above_standard, socket.socketpair())]
    [None, None]
    """
    if end.fileno() > 2:
        return end
    with end:
        return socket.socket(fileno=fcntl(end.fileno(), F_DUPFD_CLOEXEC, 3))


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _readable(descriptor: int, seconds: float) -> bool:
    poll = select.poll()  # not select: descriptors may be above its limit
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


# --- the server's side ----------------------------------------------------------------------------


def serve(control: int, driver: int, modules: Sequence[str]) -> None:
    """Load the modules, then fork a worker for every request until the driver ends."""
    _end_with(driver)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in modules:
        with suppress(Exception):  # whoever needs it will fail, and say so
            import_module(name)
    gc.freeze()  # what is loaded is no garbage, and need not be looked through again
    bell, reports = _bell_of_ends(), dict[int, int]()
    poll = select.poll()  # not select: descriptors may be above its limit
    for descriptor in (control, bell):
        poll.register(descriptor, select.POLLIN)
    with socket.socket(fileno=control) as requests:
        while True:
            ready = {descriptor for descriptor, _ in poll.poll()}
            if bell in ready:
                os.read(bell, PIECE)
                _report_ends(reports)
            if control in ready:
                message, descriptors, _, _ = socket.recv_fds(requests, 1, 2)
                if not message:
                    break
                _fork(descriptors, reports, (control, bell))
    for pid in reports:
        os.kill(pid, signal.SIGKILL)


def _end_with(parent: int) -> None:
    """Let the system kill this process when its parent ends, even if it is stopped then."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _bell_of_ends() -> int:
    """Return a descriptor that becomes readable whenever a child ends."""
    heard, rung = os.pipe()
    for end in (heard, rung):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(rung, warn_on_full_buffer=False)
    return heard


def _report_ends(reports: dict[int, int]) -> None:
    """Tell drivers the exit codes of the workers that ended."""
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            if pid in reports:
                report = reports.pop(pid)
                _tell(report, os.waitstatus_to_exitcode(status))
                os.close(report)


def _tell(report: int, number: int) -> None:
    with suppress(OSError):  # nobody listens any more
        os.write(report, NUMBER.pack(number))


def _fork(descriptors: list[int], reports: dict[int, int], private: tuple[int, ...]) -> None:
    """Make a worker of the descriptors of a request; there are fewer if too many are open."""
    pid = -errno.EMFILE
    if len(descriptors) == 2:
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            pid = -(error.errno or errno.EAGAIN)
    if pid == 0:
        code = 1
        try:
            _work(server, descriptors[0], (*private, *descriptors[1:], *reports.values()))
            code = 0
        finally:
            os._exit(code)
    *channel, report = descriptors or (-1,)
    _tell(report, pid)
    if pid > 0:
        reports[pid] = report
    for done_with in (*channel, *([] if pid > 0 else descriptors[-1:])):
        os.close(done_with)


def _work(server: int, channel: int, private: Sequence[int]) -> None:
    """Answer parcels until the driver has no more."""
    _end_with(server)
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for descriptor in private:
        os.close(descriptor)
    with socket.socket(fileno=channel) as driver:
        parcels = _parcels(driver)
        answer: Answer = pickle.loads(next(parcels))()
        _put(driver, b"")
        for parcel in parcels:
            _put(driver, answer(parcel))


def _parcels(driver: socket.socket) -> Iterator[bytes]:
    with driver.makefile("rb") as file:
        while len(length := file.read(NUMBER.size)) == NUMBER.size:
            yield file.read(NUMBER.unpack(length)[0])


def _put(driver: socket.socket, message: bytes) -> None:
    driver.sendall(NUMBER.pack(len(message)))
    driver.sendall(message)
