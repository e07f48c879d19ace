"""``kappascope verify``: run some trials of a folder again and compare every bit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kappascope.cli._laboratory import every_experiment, require_laboratory, set_text
from kappascope.cli._options import Debug
from kappascope.cli._terminal import loading, tell
from kappascope.refusal import Refusal
from kappascope.text import clean


def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder of results.")],
    trials: Annotated[int, typer.Option(min=1, help="The number of trials to run again.")] = 5,
    text: Annotated[Path | None, typer.Option(help="The text that a study was given.")] = None,
    debug: Debug = False,
) -> None:
    """Run some trials of a folder again, each alone, and compare every bit.

    For example:
      kappascope verify kappascope-report --trials 20
    """
    require_laboratory()
    set_text(text)
    if not (folder / "units").is_dir():
        raise Refusal(2, str(folder), "holds no results", "name a folder that reproduce has filled")
    with loading():
        from kappascope.lab import runs
        from kappascope.system.store import Store

    differing, compared = [], 0
    for block, same in runs.verify(every_experiment(), Store(folder), trials):
        tell(f"{'same' if same else 'DIFFERS'}: {clean(str(block))}")
        compared += 1
        differing += [] if same else [str(block)]
    if not compared:
        raise Refusal(2, str(folder), "holds no results of this version", "run reproduce again")
    if differing:
        wrong = f"{len(differing)} of {compared} trials differ, first {differing[0]}"
        raise Refusal(1, str(folder), wrong, "begin anew with reproduce --fresh")
