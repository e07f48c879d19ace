"""One thread of OpenBLAS for matrices that several threads would only slow down.

numpy and scipy have an OpenBLAS each, with threads that wait busily for one another at every column
of a factorization, and for the cores that torch's own threads hold. With two threads on two idle
cores the vitals of a matrix took 1.4 seconds at 2048 columns, with one 0.35; at 4096 6.3 and
3.6; on busy cores it is worse. One thread also makes the bits independent of how many there are.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, wraps
from threading import RLock
from typing import Any, ParamSpec, TypeVar

import scipy.linalg  # noqa: F401 - only an OpenBLAS that is loaded can be found
from threadpoolctl import ThreadpoolController

P = ParamSpec("P")
R = TypeVar("R")

MOST_COLUMNS = 4096  # beyond, products of large blocks prevail, which threads do divide well


@cache
def _libraries() -> tuple[Any, ...]:
    """Find every OpenBLAS that this process has loaded."""
    return tuple(ThreadpoolController().select(internal_api="openblas").lib_controllers)


class OneThread:
    """Holds OpenBLAS to one thread while somebody is inside, in whichever threads of Python.

    >>> with OneThread() as held:
    ...     held.inside
    1
    """

    def __init__(self) -> None:
        self.lock, self.inside = RLock(), 0
        self.before: dict[Any, int] = {}  # threads of each library that is held

    def __enter__(self) -> OneThread:
        with self.lock:
            self.inside += 1
            if self.inside == 1:
                counts = {library: library.get_num_threads() for library in _libraries()}
                self.before = {
                    library: count
                    for library, count in counts.items()
                    if count > 1 and _allow(library, 1)
                }
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if not self.inside:
                self._release()

    def _release(self) -> None:
        for library, count in self.before.items():
            _allow(library, count)
        self.before = {}

    def forked(self) -> None:
        """Begin anew in a child, in which the threads that were inside do not go on."""
        self.lock, self.inside = RLock(), 0
        self._release()


def _allow(library: Any, count: int) -> bool:
    """Give a library so many threads, unless somebody else has limited it just now.

    A library obeys the thread of Python that limited it first, until that lets go. Here whoever
    leaves last restores the count, so the library is let go at once.
    """
    library.set_num_threads(count)
    getattr(library, "clear_controlling_thread", bool)()  # newer releases have it
    return bool(library.get_num_threads() == count)


_HELD = OneThread()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_HELD.forked)


def steady(function: Callable[P, R]) -> Callable[P, R]:
    """Give a function of a matrix, its first argument, one thread of OpenBLAS if it is small.

    >>> import torch
    >>> steady(lambda matrix: _HELD.inside)(torch.eye(2))
    1
    """

    @wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        if _is_large(args[0] if args else next(iter(kwargs.values()), None)):
            return function(*args, **kwargs)
        with _HELD:
            return function(*args, **kwargs)

    return wrapper


def _is_large(matrix: Any) -> bool:
    """Whether several threads may pay; what is no matrix is for the function to refuse."""
    try:
        return bool(min(matrix.shape[-2:]) > MOST_COLUMNS)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
