"""``kappascope watch``: follow a training run, in the terminal or on a page of this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kappascope.cli._options import Debug
from kappascope.cli._terminal import draw, tell
from kappascope.refusal import Refusal

if TYPE_CHECKING:  # the command starts without them
    from rich.console import Console, RenderableType

    from kappascope.monitor.record import Run

SECONDS_BETWEEN_LOOKS = 1.0


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that a Monitor writes.")],
    port: Annotated[
        int | None,
        typer.Argument(
            metavar="[PORT]", help="The port for --serve. By default a free one.", min=0, max=65535
        ),
    ] = None,
    *,
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve a page on 127.0.0.1 that follows the run.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="Show the run as it is now, and end.")
    ] = False,
    debug: Debug = False,
) -> None:
    """Follow a training run that a Monitor records: its loss, alerts, and matrices in need of care.

    The command ends when the run is closed. Ctrl-C ends the command earlier; the run goes on.

    For example:
      kappascope watch runs/gpt
      kappascope watch runs/gpt --serve 8123
    """
    from kappascope.monitor.record import Run

    if port is not None and not serve:
        raise Refusal(4, str(port), "a port without --serve", "give watch RUN --serve PORT")
    if serve and once:
        raise Refusal(4, "--serve --once", "exclude each other", "give one of them")
    record = Run.read(run)
    if serve:
        _serve(record, port or 0)
    else:
        _follow(record, once)


def _serve(record: Run, port: int) -> None:
    """Serve the page until Ctrl-C."""
    from kappascope.monitor.serving import served

    with served(record, port) as address:
        tell(f"{address} follows the run; Ctrl-C ends this, not the run.")
        while True:
            time.sleep(SECONDS_BETWEEN_LOOKS)


def _follow(record: Run, once: bool) -> None:
    """Show the run until it is closed; without a terminal there is one screen to show."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if once or record.is_closed or not console.is_terminal:
        draw(_screen(record, console))
        return
    with Live(_screen(record, console), console=console, auto_refresh=False) as live:
        while not record.is_closed:
            time.sleep(SECONDS_BETWEEN_LOOKS)
            record.refresh()
            live.update(_screen(record, console), refresh=True)


def _screen(record: Run, console: Console) -> RenderableType:
    from kappascope.monitor.overview import seconds_of_silence
    from kappascope.monitor.terminal import run_screen

    return run_screen(record, console.width, console.height - 1, seconds_of_silence(record))
