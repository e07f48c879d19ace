"""Work for other processes, which find it here: they import nothing from the current folder."""

import os
import signal
import sys
import time
from pathlib import Path

import torch

from kappascope.system.workers import ONE_THREAD


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


def rest(item: int) -> None:
    time.sleep(0.05)


def dies(model: object) -> None:
    os.abort()


def hangs(model: object) -> None:
    time.sleep(600)


def hoards(model: object) -> None:
    torch.ones(2**31)


def stops(marker: str) -> None:
    """Leave the numbers of this process and of its server, and stop for ever."""
    Path(marker).write_text(f"{os.getpid()} {os.getppid()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def marks(item: tuple[str, float]) -> None:
    """Leave the number of this process and the seconds of its rest, and rest."""
    folder, seconds = item
    (Path(folder) / f"{os.getpid()} {seconds}").touch()
    time.sleep(seconds)


def kills_ray(item: tuple[str, str]) -> None:
    """Note one more try, and end the process of Ray that this one works for."""
    name, marker = item
    if name:
        with Path(marker).open("a") as file:
            file.write("x")
        os.kill(_worker_of_ray(), signal.SIGKILL)
        time.sleep(60)


def kills_ray_once(marker: str) -> None:
    if not Path(marker).exists():
        kills_ray(("dies", marker))


def stops_ray(marker: str) -> None:
    """Stop the process of Ray that this one works for, and note which it was."""
    with Path(marker).open("a") as file:
        file.write(f"{_worker_of_ray()} ")
    os.kill(_worker_of_ray(), signal.SIGSTOP)


def _worker_of_ray() -> int:
    """The parent of the server that this process was forked from."""
    return int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1])


def raylet(item: int) -> int:
    """Tell the node by the one process of Ray that all others there descend from."""
    time.sleep(0.2)
    pid = os.getpid()
    while not Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].endswith(b"raylet"):
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return pid


def rests(seconds: float) -> None:
    time.sleep(seconds)


def computes(size: int) -> float:
    """Factorize a matrix of this size; return the seconds of CPU that it took."""
    began = time.process_time()
    torch.linalg.svdvals(torch.randn(size, size, generator=torch.Generator().manual_seed(0)))
    return time.process_time() - began
