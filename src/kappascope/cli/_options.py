"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _folder(text: str) -> str:
    if not text:  # an unset variable of the shell; the current folder has a name
        raise typer.BadParameter("expected a folder, got nothing")
    return text


Debug = Annotated[bool, typer.Option("--debug", help="Show where an error arose.")]
"""Every command takes it; ``app.run`` looks for it, since a command may not even begin."""
Out = Annotated[
    str,
    typer.Option(
        help="The folder of the results, on this machine or in an object store.",
        parser=_folder,
        metavar="PATH",
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        "--out",
        help="Keep the rows in this folder. A command that was stopped goes on from them.",
        parser=_folder,
        metavar="PATH",
    ),
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard", metavar="I/N", help="Do part I of N. `kappascope join` joins the parts."
    ),
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Remove the results that are in the folder first.")
]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="local|ray|ray://ADDRESS",
        help="Work on this machine or on a Ray cluster.",
    ),
]
Jobs = Annotated[int, typer.Option(min=1, max=1024, help="The number of processes.")]
MemoryOption = Annotated[
    str | None,
    typer.Option(
        "--memory",
        metavar="SIZE",
        help="The memory that each process may use, like 8G. By default what it needs.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and no table.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write the page to this HTML file.")]
