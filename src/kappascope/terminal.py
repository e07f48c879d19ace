"""How the command speaks: results on the standard output, progress on the other one.

With :mod:`kappascope.cli` the only module that prints. Text from files is cleaned first.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeAlias

import typer

from kappascope.prose import clean

if TYPE_CHECKING:  # the command starts without it
    from rich.console import RenderableType

QUIET = 10.0  # seconds between two lines of progress
Part: TypeAlias = tuple[str, float]
"""What a piece of work belongs to, and its share of the time."""


def tell(text: str) -> None:
    """A result."""
    try:
        typer.echo(text)
    except BrokenPipeError:  # who reads us has enough; what was to be done is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Something beside the results."""
    if text:
        typer.echo(clean(text), err=True)


def draw(what: RenderableType) -> None:
    """A result in colours, where there is a terminal for them."""
    from rich.console import Console

    console = Console()
    with console.capture() as drawn:
        # rich forgets what a text says of itself, and would break the lines of code in it
        no_wrap, overflow = getattr(what, "no_wrap", None), getattr(what, "overflow", None)
        console.print(what, crop=False, no_wrap=no_wrap, overflow=overflow)
    tell(drawn.get().rstrip("\n"))


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """Something turns on a terminal while nothing can be counted."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(clean(what)):
        yield


@contextmanager
def progress(parts: Sequence[Part]) -> Iterator[Callable[[Part], None]]:
    """Bars with the time left on a terminal, now and then a line elsewhere.

    What is given is called with each part as it is done.
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
    with Progress(*columns, console=console, speed_estimate_period=120) as bars:
        whole = bars.add_task("all", total=sum(costs.values()))
        several = costs if len(costs) > 1 else {}
        tasks = {name: bars.add_task(name, total=cost) for name, cost in several.items()}

        def advance(part: Part) -> None:
            name, cost = part
            bars.advance(whole, cost)
            if tasks:
                bars.advance(tasks[name], cost)

        yield advance


def _lines(whole: float) -> Callable[[Part], None]:
    start = said = time.monotonic()
    done = 0.0

    def advance(part: Part) -> None:
        nonlocal done, said
        done, now = done + part[1], time.monotonic()
        if now - said > QUIET and done < whole:
            said, left = now, (now - start) * (whole / done - 1)
            say(f"{done / whole:.0%} done, about {left:.0f} s left")

    return advance
