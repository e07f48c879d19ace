"""Processes as /proc shows them: who descends from whom, and who is alive."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> set[int]:
    found = {pid}
    for entry in sorted(Path("/proc").glob("[0-9]*"), key=lambda entry: int(entry.name)):
        with suppress(OSError):
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent in found:
                found.add(int(entry.name))
    return found


def members(session: int) -> set[int]:
    """Processes of a session, whose first process may have ended."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[3]) == session:
                found.add(int(entry.name))
    return found


def alive(pid: int) -> bool:
    with suppress(OSError):
        return (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]) != "Z"
    return False


def until(holds: Callable[[], bool], seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)
