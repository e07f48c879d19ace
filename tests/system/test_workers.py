"""Engines: every item ends exactly once, whatever it does to its process."""

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from kappascope.refusal import Refusal
from kappascope.system import _server, workers
from kappascope.system._server import Worker
from kappascope.system.workers import ONE_THREAD, Done, Engine, Here, Processes
from processes import alive, until
from worker_tasks import dies_once, rest, task


def failures(engine: Engine, items: list[str]) -> dict[str, str]:
    done: list[Done[str]] = list(engine.run(task, items))
    assert sorted(one.item for one in done) == sorted(items)
    return {one.item: one.failure for one in done if one.failure}


def children() -> set[int]:
    """Living processes that come from this one, but for the server that ends with it."""
    parents, servers = {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes()
            if state != "Z":
                parents[int(entry.name)] = int(parent)
            if b"kappascope.system._server" in command and int(parent) == os.getpid():
                servers.add(int(entry.name))
    found = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - servers - {os.getpid()}


@pytest.fixture
def no_orphans() -> Iterator[None]:
    before = children()
    yield
    assert children() <= before


def test_here_items_fail_alone() -> None:
    assert failures(Here(), ["fine", "raises", "awkward", "memory", "threads"]) == {
        "raises": "ValueError: no",
        "awkward": "AwkwardError: 1",
        "memory": "MemoryError",
    }


def test_here_an_interrupt_is_the_users() -> None:
    def interrupt(item: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Here().run(interrupt, [1]))


@pytest.mark.usefixtures("no_orphans")
def test_in_processes_every_misfortune_is_one_failure_and_the_rest_goes_on() -> None:
    items = ["killed", "raises", "awkward", "exits", "memory", "ends", "threads", "fine"]
    assert failures(Processes(2, retries=0), items) == {
        "raises": "ValueError: no",
        "awkward": "AwkwardError: 1",
        "exits": "SystemExit: 3",
        "memory": "MemoryError",
        "killed": "its process died: signal SIGKILL",
        "ends": "its process died: exit code 7",
    }


@pytest.mark.usefixtures("no_orphans")
def test_an_item_that_hangs_is_ended_at_its_time_limit() -> None:
    assert failures(Processes(1, limit=1.0), ["hangs", "fine"]) == {
        "hangs": "timeout: more than 1 s"
    }


@pytest.mark.usefixtures("no_orphans")
def test_a_process_that_dies_is_given_a_second_try(tmp_path: Path) -> None:
    (done,) = Processes(1).run(dies_once, [str(tmp_path / "marker")])
    assert not done.failure


@pytest.mark.usefixtures("no_orphans")
def test_processes_killed_at_any_moment_lose_no_item() -> None:
    chance, over, bystanders = random.Random(0), threading.Event(), children()

    def kill() -> None:
        for _ in range(8):  # then they are left alone: a slow machine shall end, too
            over.wait(chance.uniform(0, 0.6))
            for victim in list(children() - bystanders)[:1]:
                with suppress(ProcessLookupError):
                    os.kill(victim, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        done = list(Processes(2, retries=8).run(rest, range(30)))
    finally:
        over.set()
        killer.join()
    assert sorted(one.item for one in done) == list(range(30))
    assert not any(one.failure for one in done)


def test_what_cannot_be_pickled_fails_and_says_so() -> None:
    (done,) = Processes(1).run(lambda item: None, [1])
    assert "pickle" in done.failure


@pytest.mark.usefixtures("no_orphans")
def test_closing_the_iterator_ends_the_processes() -> None:
    running = Processes(2).run(task, ["fine", "hangs", "hangs"])
    next(running)
    running.close()


def test_an_engine_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    before = dict(os.environ)
    list(Here().run(task, ["threads"]))
    assert dict(os.environ) == before


def test_an_engine_leaves_alone_what_its_caller_sets_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("A_VARIABLE", "before")
    for _ in Here().run(task, ["threads"]):
        os.environ["A_VARIABLE"] = "meanwhile"
    assert os.environ["A_VARIABLE"] == "meanwhile"


@pytest.mark.parametrize("first", [0, 1])
def test_of_engines_that_overlap_the_last_to_end_restores(
    first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    running = [Here().run(task, ["threads", "threads"]) for _ in range(2)]
    assert not [next(one).failure for one in running if next(one).failure]
    running.pop(first).close()
    assert os.environ.items() >= ONE_THREAD.items()
    running.pop().close()
    assert "OMP_WAIT_POLICY" not in os.environ


def test_engines_of_several_threads_give_each_its_own_threads_back() -> None:
    before, found = (torch.get_num_threads(), dict(os.environ)), []

    def many() -> None:
        for _ in range(200):
            found.extend(done.failure for done in Here().run(task, ["threads"]))
        found.append(torch.get_num_threads())

    torch.set_num_threads(2)
    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    after = torch.get_num_threads()
    torch.set_num_threads(before[0])
    assert set(found) == {"", 2} and after == 2
    assert dict(os.environ) == before[1]


@pytest.mark.parametrize("jobs", [0, -1])
def test_an_engine_without_processes_is_refused(jobs: int) -> None:
    with pytest.raises(ValueError, match=f"1 or more, got {jobs}"):
        Processes(jobs)


def test_no_items_need_no_process() -> None:
    assert list(Processes(2).run(task, [])) == []


# --- callers and surroundings of all kinds --------------------------------------------------------

CALLER = """
import multiprocessing, os, sys, threading
sys.path.insert(0, {tests!r})
from kappascope.system.workers import Processes

def go(*_):
    return [done.failure for done in Processes(1, loaded=()).run(abs, [-1])]

def check(*_):
    os._exit(0 if go() == [""] else 1)
"""


def called(program: str, tmp_path: Path, **variables: str) -> str:
    """What a program prints that is a script of its own."""
    script = tmp_path / "script.py"
    script.write_text(CALLER.format(tests=str(Path(__file__).parents[1])) + program)
    done = subprocess.run(
        [sys.executable, script], env={**os.environ, **variables}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout


def test_a_daemonic_or_forked_caller_has_processes_of_its_own(tmp_path: Path) -> None:
    program = """
if __name__ == "__main__":
    go()
    process = multiprocessing.get_context("fork").Process(target=check, daemon=True)
    process.start()
    process.join()
    forked = os.fork()
    if not forked:
        check()
    print(process.exitcode, os.waitpid(forked, 0)[1], go())
"""
    assert called(program, tmp_path) == "0 0 ['']\n"


def test_several_threads_keep_the_main_module_whole(tmp_path: Path) -> None:
    program = """
main, seen = sys.modules["__main__"], []
threads = [threading.Thread(target=lambda: seen.extend(go())) for _ in range(4)]
for thread in threads:
    thread.start()
while any(thread.is_alive() for thread in threads):
    assert sys.modules["__main__"] is main
print(seen)
"""
    assert called(program, tmp_path) == "['', '', '', '']\n"  # and the script is run once


def test_the_temporary_folder_may_have_a_long_name(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    assert called("print(go())", tmp_path, TMPDIR=str(folder)) == "['']\n"
    assert list(folder.iterdir()) == []


def test_a_stopped_process_ends_with_its_driver(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    script = tmp_path / "script.py"
    program = f"""
from worker_tasks import stops
list(Processes(1, loaded=()).run(stops, [{str(marker)!r}]))
"""
    script.write_text(CALLER.format(tests=str(Path(__file__).parents[1])) + program)
    with subprocess.Popen([sys.executable, script]) as driver:
        until(lambda: marker.exists() and len(marker.read_text().split()) == 2)
        started = [int(pid) for pid in marker.read_text().split()]
        os.kill(started[1], signal.SIGSTOP)  # its server too
        driver.kill()
    until(lambda: not any(map(alive, started)), 10)


def test_processes_that_cannot_start_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(_server, "_CURRENT", _server._Current())
    monkeypatch.setattr(_server.subprocess, "Popen", refused)
    for start in (Processes(1).warm, lambda: list(Processes(1).run(abs, [1]))):
        with pytest.raises(Refusal, match="cannot be started: Resource temp") as refusal:
            start()
        assert refusal.value.code == 5


def test_where_a_second_process_cannot_start_one_does_all(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def few(*arguments: Any) -> Worker:
        if made:
            raise OSError(errno.EMFILE, "Too many open files")
        made.append(Worker(*arguments))
        return made[0]

    monkeypatch.setattr(workers, "Worker", few)
    assert [done.result for done in Processes(3).run(abs, [-1, -2, -3])] == [1, 2, 3]


def test_few_open_files_are_enough_or_one_line(tmp_path: Path) -> None:
    for most in (5, 6, 8, 16):
        program = f"""
import resource
from kappascope import Refusal
resource.setrlimit(resource.RLIMIT_NOFILE, ({most}, {most}))
try:
    print(go())
except Refusal as refusal:
    print(refusal.code)
"""
        assert called(program, tmp_path) in {"['']\n", "5\n"}


def test_more_open_files_than_select_can_take_are_no_hindrance(tmp_path: Path) -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (2048, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1200)]
print(go())
"""
    assert called(program, tmp_path) == "['']\n"


def test_a_current_folder_that_was_removed_is_the_workers_too(tmp_path: Path) -> None:
    program = f"""
os.mkdir({str(tmp_path / "gone")!r})
os.chdir({str(tmp_path / "gone")!r})
os.rmdir({str(tmp_path / "gone")!r})
done, = Processes(1, loaded=("torch",)).run(os.listdir, ["."])
print(done.result, go())
"""
    assert called(program, tmp_path) == "[] ['']\n"  # not the files of another folder


@pytest.mark.parametrize("executable", ["", None])
def test_a_program_that_knows_no_python_is_told_so(
    executable: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_server, "_CURRENT", _server._Current())
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(Refusal, match="names no Python") as refusal:
        Processes(1).warm()
    assert refusal.value.code == 5


def test_a_child_does_not_wait_for_a_thread_that_its_parent_had() -> None:
    """It runs in a process of its own, for a fork takes along whatever threads hold here."""
    program = """
import os, threading
from kappascope.system import workers
held, free = threading.Event(), threading.Event()

def hold():
    with workers._one_thread(), workers._SOLO.lock:
        held.set()
        free.wait()

threading.Thread(target=hold).start()
held.wait()
child = os.fork()
if not child:
    alone = not workers._SOLO.askers and "OMP_WAIT_POLICY" not in os.environ
    os._exit(0 if alone and [one.result for one in workers.Here().run(abs, [-3])] == [3] else 1)
code = os.waitpid(child, 0)[1]
free.set()
print(code)
"""
    environment = {name: value for name, value in os.environ.items() if name not in ONE_THREAD}
    ended = subprocess.run(
        [sys.executable, "-c", program],
        check=False,
        env=environment,
        capture_output=True,
        timeout=120,
    )
    assert ended.stdout == b"0\n", ended.stderr
