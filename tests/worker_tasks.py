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
