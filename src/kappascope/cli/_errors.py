"""Whatever ends a command early becomes one refusal, and a refusal becomes one line.

Exit codes: 0 done, 1 done but results differ, 2 input refused, 3 done in part, 4 wrong usage, 5 no
room or memory, 130 and 143 interrupted.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from kappascope.refusal import Refusal
from kappascope.text import clean

LONGEST_LINE = 240  # characters: three lines of a terminal
RESUMABLE = ("reproduce", "study", "watch")  # what was done already is in their folder


class Interrupted(BaseException):
    """A signal asks the command to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


@contextmanager
def signals() -> Iterator[list[Interrupted]]:
    """Turn the first signal into an exception, so that all is closed; the second ends at once.

    The exception is also in the list: a library that is being loaded may turn it into another.
    """
    numbers, came = (signal.SIGINT, signal.SIGTERM), list[Interrupted]()

    def first(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, lambda number, frame: os._exit(128 + number))
        came.append(Interrupted(number))
        raise came[0]

    before = {number: signal.signal(number, first) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


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
        ImportError: (5, str(error), "install kappascope with its dependencies"),
        OSError: (5, str(error), "see to it and give the same command again"),
        BaseException: (5, f"{type(error).__name__}: {error}", "a bug; --debug shows where"),
    }
    code, wrong, advice = next(known[kind] for kind in known if isinstance(error, kind))
    return Refusal(code, " ".join(arguments), wrong, advice)


def error_line(refusal: Refusal) -> str:
    """Write a refusal on one line that is not too long.

    A long name of what was given loses its middle; a long reason loses its end, but never the
    advice that stands behind it.
    """
    given = clean(refusal.given)
    room = max(LONGEST_LINE // 3, LONGEST_LINE - (len(_line(refusal, refusal.given)) - len(given)))
    if len(given) > room:
        given = f"{given[: room // 2]}…{given[-(room - room // 2 - 1) :]}"
    line = _line(refusal, given)
    if len(line) <= LONGEST_LINE:
        return line
    advice = line[line.rfind(" (") :] if line.endswith(")") else ""
    room = LONGEST_LINE - len(advice)
    if room < LONGEST_LINE // 2:
        advice, room = "", LONGEST_LINE
    return f"{line[: room - 1]}…{advice}"


def _line(refusal: Refusal, given: str) -> str:
    return f"kappascope: error: {Refusal(refusal.code, given, refusal.wrong, refusal.advice)}"
