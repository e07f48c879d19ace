"""Forks: a child does not wait for what a thread of its parent was doing."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHILD = """
import os, sys, threading
import torch, kappascope
model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 5))

def works(model):
    child = os.fork()
    if not child:
        try:
            os._exit(0 if len(kappascope.diagnose(model).matrices) == 2 else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1]
"""


def printed(program: str) -> str:
    """What a program prints that forks: it has a process of its own, with no threads of others."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD + program],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    assert not done.stderr
    return done.stdout


def test_a_fork_waits_while_another_thread_loads_the_package() -> None:
    program = """
thread = threading.Thread(target=kappascope.diagnose, args=(model,))
thread.start()
while "kappascope.clinic.diagnose" not in sys.modules:
    pass
print(works(model))
thread.join()
"""
    assert printed(program) == "0\n"


def test_nothing_is_loaded_while_a_model_is_examined() -> None:
    # a child that is forked meanwhile would wait for what its parent loads
    program = """
work = kappascope.diagnose
torch.manual_seed(0)
moved = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.Linear(7, 5))
before = set(sys.modules)
work(model), work(model, reference=moved)
print(sorted(set(sys.modules) - before))
"""
    assert printed(program) == "[]\n"


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="cached properties have no lock there")
def test_a_child_does_not_wait_for_a_property_that_a_thread_of_its_parent_reads() -> None:
    program = """
from kappascope.clinic.source import InMemory
from kappascope.matrix.components import Components
held, free = threading.Event(), threading.Event()

def hold():
    with vars(InMemory)["_opened"].lock, vars(Components)["singular_values"].lock:
        held.set()
        free.wait()

thread = threading.Thread(target=hold)
thread.start()
held.wait()
print(works(model))
free.set()
"""
    assert printed(program) == "0\n"


def test_children_of_a_busy_parent_examine_models_and_files(tmp_path: Path) -> None:
    torch.save({"a.weight": torch.eye(4), "b.weight": torch.ones(3, 2)}, tmp_path / "model.pt")
    program = f"""
over = False

def work():
    while not over:
        kappascope.diagnose(model)

thread = threading.Thread(target=work)
thread.start()
print(*[works(each) for each in (model, {str(tmp_path / "model.pt")!r}, model)])
over = True
thread.join()
"""
    assert printed(program) == "0 0 0\n"


def test_a_thread_of_the_parent_goes_on_after_a_fork() -> None:
    program = """
from kappascope.system.forks import LOADING
child = os.fork()
if not child:
    os._exit(0 if LOADING.acquire(blocking=False) else 1)
print(os.waitpid(child, 0)[1])
threads = [threading.Thread(target=lambda: print(LOADING.acquire(timeout=9)))]
threads[0].start()
threads[0].join()
"""
    assert printed(program) == "0\nTrue\n"
