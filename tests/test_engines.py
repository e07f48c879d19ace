"""Engines: every item ends exactly once, whatever it does to its process."""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from kappascope.engines import ONE_THREAD, Done, Engine, Here, Processes


class AwkwardError(Exception):
    """Can be raised, and pickled, but not read back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(one)


def task(name: str) -> None:
    match name:
        case "raises":
            raise ValueError("no")
        case "awkward":
            raise AwkwardError(1, 2)
        case "exits":
            sys.exit(3)
        case "memory":
            raise MemoryError
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "aborts":
            os.abort()
        case "ends":
            os._exit(7)
        case "hangs":
            time.sleep(600)
        case "threads":
            assert os.environ.items() >= ONE_THREAD.items()


def dies_once(marker: str) -> None:
    if not Path(marker).exists():
        Path(marker).touch()
        os.kill(os.getpid(), signal.SIGKILL)


def failures(engine: Engine, items: list[str]) -> dict[str, str]:
    done: list[Done[str]] = list(engine.run(task, items))
    assert sorted(one.item for one in done) == sorted(items)
    return {one.item: one.failure for one in done if one.failure}


def children() -> set[int]:
    """Living processes that come from this one, but for the two servers that end with it."""
    parents, servers = {}, set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes()
            if state != "Z":
                parents[int(entry.name)] = int(parent)
            if b"resource_tracker" in command or (
                b"multiprocessing.forkserver" in command and int(parent) == os.getpid()
            ):
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


def rest(item: int) -> None:
    time.sleep(0.05)


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
