"""The server: it forks workers, tells how they end, and ends with its driver."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import pytest

from kappascope.system import _server
from kappascope.system._server import PIECE, Server, Worker, started
from processes import alive, until

EVALUATE = partial(partial, eval)  # a worker that answers what a parcel of Python is worth


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server((), {})
    yield server
    server.control.close()
    until(lambda: not server.alive)


@pytest.fixture
def worker(server: Server) -> Iterator[Worker]:
    worker = Worker(server, EVALUATE)
    yield worker
    if not worker.ended:
        worker.end()


def answered(worker: Worker, parcel: bytes) -> bytes:
    worker.give(parcel)
    poll = select.poll()
    for _ in range(1000):
        if (answer := worker.answer()) is not None:
            return answer
        poll.register(worker.channel, worker.wanted)
        poll.poll(1000)
    raise TimeoutError


def test_a_worker_answers_one_parcel_after_another(worker: Worker) -> None:
    assert [answered(worker, parcel) for parcel in (b"b'one'", b"bytes(2)")] == [b"one", bytes(2)]


def test_parcels_larger_than_a_pipe_pass_both_ways(worker: Worker) -> None:
    size = 3 * PIECE + 1
    assert answered(worker, b"b'%s'" % (b"x" * size)) == b"x" * size


def test_a_worker_that_fails_gives_no_answer_but_its_exit_code(worker: Worker) -> None:
    with pytest.raises(EOFError):
        answered(worker, b"1 / 0")
    assert worker.end(patience=10) == 1


def test_the_exit_code_of_a_signal_is_negative(worker: Worker) -> None:
    with pytest.raises(EOFError):
        answered(worker, b"__import__('os').kill(__import__('os').getpid(), 15)")
    assert worker.end(patience=10) == -signal.SIGTERM


def test_a_stopped_worker_is_ended_at_once(worker: Worker) -> None:
    assert answered(worker, b"b''") == b""
    os.kill(worker.pid, signal.SIGSTOP)
    worker.give(b"b''")
    assert worker.end() is None
    until(lambda: not alive(worker.pid))


def test_one_server_has_several_workers_at_a_time(server: Server) -> None:
    workers = [Worker(server, EVALUATE) for _ in range(3)]
    try:
        pids = {answered(each, b"str(__import__('os').getpid()).encode()") for each in workers}
        assert pids == {str(each.pid).encode() for each in workers} and len(pids) == 3
    finally:
        for each in workers:
            each.end()


def test_a_worker_holds_no_descriptor_of_another(server: Server) -> None:
    first, second = Worker(server, EVALUATE), Worker(server, EVALUATE)
    counted = b"str(len(__import__('os').listdir('/proc/self/fd'))).encode()"
    try:
        assert answered(first, counted) == answered(second, counted)
        first.channel.close()  # as if its driver had ended: nobody else keeps it open
        until(lambda: not alive(first.pid))
    finally:
        second.end()


def test_the_time_of_a_parcel_counts_from_when_the_worker_is_up(worker: Worker) -> None:
    assert worker.seconds == 0.0
    answered(worker, b"b''")
    worker.give(b"b''")
    time.sleep(0.05)
    assert worker.seconds >= 0.05


def test_a_server_that_was_killed_is_known_and_starts_no_worker(server: Server) -> None:
    pid = os.getpid()
    worker = Worker(server, EVALUATE)
    parent = int(answered(worker, b"str(__import__('os').getppid()).encode()"))
    assert parent != pid
    os.kill(parent, signal.SIGKILL)
    until(lambda: not server.alive)
    until(lambda: not alive(worker.pid))  # no worker outlives its server
    assert worker.end() is None
    with pytest.raises(OSError):
        Worker(server, EVALUATE)


def test_a_process_has_one_server_until_that_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_server, "_CURRENT", _server._Current())
    first = started((), {})
    assert started((), {}) is first
    first.alive = False  # as the thread says that waits for it
    second = started((), {})
    assert second is not first
    second.control.close()
    until(lambda: not second.alive)


def test_a_server_whose_module_cannot_be_loaded_serves_nevertheless() -> None:
    server = Server(("no_such_module",), {})
    worker = Worker(server, EVALUATE)
    assert answered(worker, b"b'here'") == b"here"
    worker.end()
    server.control.close()


def test_variables_reach_the_workers() -> None:
    server = Server((), {"OMP_NUM_THREADS": "7"})
    worker = Worker(server, EVALUATE)
    assert answered(worker, b"__import__('os').environb[b'OMP_NUM_THREADS']") == b"7"
    worker.end()
    server.control.close()


def test_a_server_ends_without_a_word() -> None:
    """Not even of a socket that is open, where warnings are errors."""
    program = """
from kappascope.system._server import Server
server = Server((), {})
server.control.close()
while server.alive:
    pass
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
