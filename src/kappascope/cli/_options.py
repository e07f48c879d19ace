"""Options that several commands take."""

from __future__ import annotations

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
        help="Folder of the results, here or in an object store.", parser=_folder, metavar="PATH"
    ),
]
Keep = Annotated[
    str | None,
    typer.Option(
        "--out",
        help="Keep rows in this folder; a command that was stopped goes on from them.",
        parser=_folder,
        metavar="PATH",
    ),
]
ShardOption = Annotated[
    str | None,
    typer.Option(
        "--shard", metavar="I/N", help="Do part I of N; `kappascope join` brings them together."
    ),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget what is in that folder.")]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="local|ray|ray://ADDRESS",
        help="Work on this machine, or on those of a Ray cluster.",
    ),
]
