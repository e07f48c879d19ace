"""Whatever ends a command early becomes one refusal, and a refusal becomes one line.

Exit codes: 0 done, 1 done but results differ, 2 input refused, 3 done in part, 4 wrong usage, 5 no
room or memory, 130 and 143 interrupted.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from kappascope.refusal import Refusal
from kappascope.text import clean

LONGEST_LINE = 240  # characters: three lines of a terminal
RESUMABLE = ("reproduce", "study", "watch")  # what was done already is in their folder


class Interrupted(BaseException):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


_CAME: list[Interrupted] = []  # the signals so far
_HOLDERS: list[None] = []  # one for each that holds them back


@contextmanager
def signals() -> Iterator[list[Interrupted]]:
    """Turn the first signal into an exception, so that all is closed; the second ends at once.

    The exception is also in the list: a library that is being loaded may turn it into another.
    """
    numbers, came = (signal.SIGINT, signal.SIGTERM), _CAME
    came.clear()

    def first(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, lambda number, frame: os._exit(128 + number))
        came.append(Interrupted(number))
        if not _HOLDERS:
            raise came[0]

    def dropped(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Interrupted):  # that one is in the list
            told(unraisable)

    told, sys.unraisablehook = sys.unraisablehook, dropped
    before = {number: signal.signal(number, first) for number in numbers}
    try:
        yield came
    finally:
        sys.unraisablehook = told
        for number, handler in before.items():
            signal.signal(number, handler)


def take_signals() -> None:
    """Let signals come that have waited while the application was loaded."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))


@contextmanager
def signals_held() -> Iterator[None]:
    """Hold the first signal back: inside a library's C++ code an exception would end in a crash."""
    _HOLDERS.append(None)
    try:
        yield
    finally:
        _HOLDERS.pop()
    if _CAME and not _HOLDERS:
        raise _CAME[0]


def usage_error(error: BaseException) -> str:
    """Say what typer found wrong with the arguments; empty for any other error."""
    # recognised by its method: the class has moved between modules of typer's releases
    message = getattr(error, "format_message", str)
    return str(message())


def refusal_of(error: BaseException, arguments: Sequence[str]) -> Refusal:
    """Describe any error but wrong usage as a refusal with its exit code."""
    if isinstance(error, Refusal):
        return error
    goes_on = arguments[:1] and arguments[0] in RESUMABLE
    again = f"the same command {'goes on' if goes_on else 'begins anew'}"
    known: dict[type[BaseException], tuple[int, str, str]] = {
        Interrupted: (getattr(error, "code", 130), "stopped early", again),
        MemoryError: (5, "out of memory", "use fewer --jobs"),
        ImportError: (5, str(error), _import_advice(error)),
        OSError: (5, str(error), "see to it and give the same command again"),
        BaseException: (5, f"{type(error).__name__}: {error}", "a bug; --debug shows where"),
    }
    code, wrong, advice = next(known[kind] for kind in known if isinstance(error, kind))
    return Refusal(code, " ".join(arguments), wrong, advice)


def _import_advice(error: BaseException) -> str:
    # the loader's words where `ulimit -v` leaves no room for a library
    if re.search("failed to map segment|annot allocate memory", str(error)):
        return "free some memory, or raise the limit that `ulimit -v` shows"
    return "install kappascope with its dependencies"


def error_line(refusal: Refusal) -> str:
    """Write a refusal on one line that is not too long.

    A long name of what was given loses its middle; a long reason loses its end, but never the
    advice that stands behind it.
    """
    start, wrong, advice = "kappascope: error: ", refusal.wrong, f" ({refusal.advice})"
    given = clean(refusal.given)
    room = max(LONGEST_LINE // 3, LONGEST_LINE - len(f"{start}: {wrong}{advice}"))
    if len(given) > room:
        given = f"{given[: room // 2]}…{given[-(room - room // 2 - 1) :]}"
    line = f"{start}{given}: {wrong}"
    if len(line + advice) <= LONGEST_LINE:
        return line + advice
    if len(advice) > LONGEST_LINE // 2:
        line, advice = line + advice, ""
    return f"{line[: LONGEST_LINE - len(advice) - 1]}…{advice}"
