"""Options that several commands take."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _folder(text: str) -> Path:
    if not text:  # an unset variable of the shell; the current folder has a name
        raise typer.BadParameter("expected a folder, got nothing")
    return Path(text)


Debug = Annotated[bool, typer.Option("--debug", help="Show where an error arose.")]
"""Every command takes it; ``app.run`` looks for it, since a command may not even begin."""
Out = Annotated[Path, typer.Option(help="Folder of the results.", parser=_folder, metavar="PATH")]
Fresh = Annotated[bool, typer.Option("--fresh", help="Forget what is in that folder.")]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="local|ray|ray://ADDRESS",
        help="Where to work: here, or where Ray says.",
    ),
]
