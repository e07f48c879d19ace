"""A disk that fails at a chosen call, as a full one does."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OPEN = Path.open


class Faults:
    """Let the n-th of the calls that change a disk fail, as a full disk would make it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        for owner, name in (Path, "open"), (os, "fsync"), (Path, "replace"), (os, "open"):
            monkeypatch.setattr(owner, name, self.failing(getattr(owner, name)))

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            mode = [*args[1:2], kwargs.get("mode", "r")][0]
            reads = call is OPEN and mode.startswith("r")
            self.left -= not reads
            if self.left == 0 and not reads:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return wrapped
