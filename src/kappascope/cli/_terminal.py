"""How the command speaks: results on the standard output, progress on the error output.

No other room prints. Text that comes from files is cleaned first.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar

import typer

from kappascope.cli._errors import signals_held
from kappascope.refusal import Refusal
from kappascope.text import clean, duration

if TYPE_CHECKING:  # the command starts without it
    from rich.console import RenderableType

SECONDS_BETWEEN_LINES = 10.0  # of progress, where no bar can be drawn
LONG_RUN = 10.0  # seconds from which on a run says beforehand how long it may take
T = TypeVar("T")
Part: TypeAlias = tuple[str, float]
"""What a piece of work belongs to, and its share of the time."""


_TOLD: list[bool] = []  # one for every result that was printed


def told() -> bool:
    """Tell whether a result was printed since this was last asked."""
    any_result = bool(_TOLD)
    _TOLD.clear()
    return any_result


def tell(text: str) -> None:
    """Print a result on the standard output."""
    try:
        typer.echo(text)
        _TOLD.append(True)
    except BrokenPipeError:  # the reader has enough, and the work is done: no error
        _discard()
        _TOLD.append(True)
    except OSError as error:
        _discard()
        wrong = f"cannot be written to: {error.strerror or type(error).__name__}"
        advice = "send it to a place that takes it"
        raise Refusal(5, "the standard output", wrong, advice) from error


def _discard() -> None:
    """Lose what is left to be printed, or Python would try once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print a line beside the results, on the error output."""
    if text:
        with suppress(OSError):  # a line that nobody can read costs no result
            typer.echo(clean(text), err=True)


def announce(work: str, seconds: float) -> None:
    """Say how long some work may take, if it is long."""
    if seconds > LONG_RUN:
        say(f"{work}, about {duration(seconds)} if the machine has nothing else to do")


def draw(result: RenderableType) -> None:
    """Print a result in colours, where there is a terminal for them."""
    from rich.console import Console

    console = Console()
    with console.capture() as drawn:
        # rich ignores these attributes of a text, and would break lines of code
        no_wrap, overflow = getattr(result, "no_wrap", None), getattr(result, "overflow", None)
        console.print(result, crop=False, no_wrap=no_wrap, overflow=overflow)
    tell(drawn.get().rstrip("\n"))


@contextmanager
def waiting(work: str) -> Iterator[None]:
    """Show on a terminal what is done and for how long, while nothing can be counted."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, SpinnerColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    columns = SpinnerColumn(), "{task.description}", TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as shown:
        shown.add_task(escape(clean(work)))
        yield


def counted(work: str, items: Iterable[T], number: int) -> Iterator[T]:
    """Yield ``number`` items, and show how many of them are done and the time left."""
    with progress([(work, 1.0)] * number) as advance:
        for item in items:
            yield item
            advance((work, 1.0))


def refuse_lost_folder() -> None:
    """Refuse a current folder that was removed: MKL, which torch loads, would end the process."""
    try:
        Path.cwd()
    except OSError as error:
        advice = "change to one that does"
        raise Refusal(5, "the current folder", "does not exist any more", advice) from error


@contextmanager
def loading() -> Iterator[None]:
    """Show that torch is loaded, which takes seconds; a signal waits until that is done."""
    refuse_lost_folder()
    with waiting("Loading torch"), signals_held():
        yield


@contextmanager
def progress(parts: Sequence[Part]) -> Iterator[Callable[..., None]]:
    """Show bars with the time left on a terminal, and now and then a line elsewhere.

    The function it gives is called with each part as it is done, and what else there is to say.
    """
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(sum(cost for _, cost in parts))
        return
    columns = "{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    costs: dict[str, float] = {}
    for name, cost in sorted(parts, key=lambda part: (len(part[0]), part[0])):
        costs[name] = costs.get(name, 0.0) + cost
    several = costs if len(costs) > 1 else {}
    whole = "all" if several else next(iter(costs), "all")
    with Progress(*columns, console=console, speed_estimate_period=120) as bars:
        total = bars.add_task(whole, total=sum(costs.values()))
        tasks = {name: bars.add_task(name, total=cost) for name, cost in several.items()}

        def advance(part: Part, remark: str = "") -> None:
            name, cost = part
            bars.update(total, advance=cost, description=", ".join(filter(None, (whole, remark))))
            if tasks:
                bars.advance(tasks[name], cost)

        yield advance


def _lines(total: float) -> Callable[..., None]:
    """Count what is done and print a line from time to time."""
    start = last = time.monotonic()
    done = 0.0

    def advance(part: Part, remark: str = "") -> None:
        nonlocal done, last
        done, now = done + part[1], time.monotonic()
        if now - last <= SECONDS_BETWEEN_LINES or not done:
            return
        last, left = now, (now - start) * (total / done - 1)
        if left >= 1:
            more = f", {remark}" if remark else ""
            say(f"{done / total:.0%} done, about {left:.0f} s left{more}")

    return advance
