"""``kappascope join``: bring what several machines have done into one folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kappascope.cli._options import Debug, Out
from kappascope.cli._terminal import say, tell
from kappascope.refusal import Refusal
from kappascope.system import store
from kappascope.text import clean, plural


def join(
    folders: Annotated[
        list[Path], typer.Argument(metavar="FOLDER...", help="The folders that --shard has filled.")
    ],
    *,
    out: Out,
    debug: Debug = False,
) -> None:
    """Join the results of several machines in one folder.

    Then give the command that filled the folders once more, with this folder as --out and without
    --shard. It runs what is missing and shows the results.

    For example:
      kappascope join part1 part2 part3 --out whole
    """
    whole = store.Store.at(out)
    with whole.lock() as notice:
        say(notice)
        damaged = store.join(folders, whole)
        units = plural(len(whole.names()), "unit is", "units are")
    tell(f"{units} in {clean(str(whole))}.")
    if damaged:
        wrong = f"{plural(len(damaged), 'unit is', 'units are')} damaged and left out"
        raise Refusal(3, damaged[0], wrong, "the command that filled it will do it again")
