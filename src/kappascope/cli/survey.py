"""``kappascope survey``: many checkpoints in one table, and what their matrices have in common."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kappascope.checkpoints.paths import refuse_unreadable
from kappascope.cli._errors import refusal_of
from kappascope.cli._options import (
    Debug,
    EngineName,
    Html,
    Jobs,
    Keep,
    MemoryOption,
    ShardOption,
)
from kappascope.cli._terminal import draw, loading, refuse_lost_folder, say, tell, waiting
from kappascope.cli.diagnose import (
    examined,
    kept_rows,
    memory_limit,
    refuse_unwritable,
    start_place,
)
from kappascope.refusal import Refusal
from kappascope.system.files import strict
from kappascope.system.store import Shard
from kappascope.system.workers import CORES
from kappascope.text import clean, plural

if TYPE_CHECKING:
    from kappascope.clinic.surveys import Surveyed


def survey(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...", help="Checkpoints, each a model of its own: files, folders, hf://…"
        ),
    ],
    *,
    atlas: Annotated[Path | None, typer.Option(help="Write the atlas to this JSON file.")] = None,
    html: Html = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the atlas as JSON and no table.")
    ] = False,
    jobs: Jobs = CORES,
    memory: MemoryOption = None,
    engine: EngineName = "local",
    shard: ShardOption = None,
    out: Keep = None,
    debug: Debug = False,
) -> None:
    """Put many checkpoints into one table, and learn what trained matrices are like.

    The atlas has the quantiles of each quantity by kind and shape of matrix. `kappascope diagnose
    --atlas` takes it. Matrices that were never trained are left out, and so are checkpoints that
    cannot be read; the output names both.

    With --out the rows of every checkpoint are kept, and a survey that was stopped goes on from
    them.

    For example:
      kappascope survey models/* --atlas ours.json --html survey.html
      kappascope survey hf://org/one hf://org/two --out rows --engine ray
    """
    refuse_lost_folder()
    limit = memory_limit(memory)
    refuse_unwritable(paths, atlas, html)
    _refuse_hopeless(paths)
    with kept_rows(out, shard) as store:
        place = start_place(jobs, engine)
        with loading():
            from kappascope.clinic.diagnose import case
            from kappascope.clinic.surveys import Surveyed

        models, refused = [], []
        for number, path in enumerate(paths):
            if shard and not Shard.of(shard).part(range(len(paths))).count(number):
                continue
            try:
                with waiting(f"Opening {number + 1} of {len(paths)}: {path}"):
                    prepared = case(
                        path, None, None, jobs, limit, cluster=place, store=store, tell=say
                    )
                models.append(examined(prepared))
            except Refusal as refusal:  # one bad file costs no other
                refused.append(refusal)
                say(f"left out: {clean(str(refusal))}")
    if shard:
        told = f"Shard {shard}: {plural(len(models), 'checkpoint')} of {len(paths)}, rows in {out}."
        tell(f"{told} When all shards are done: kappascope join")
        _refuse_left_out(refused)
        return
    if not models:
        raise refused[0]
    found = Surveyed.of(models)
    unwritten = _write(found, atlas, html)
    if as_json:
        tell(strict(found.atlas.document()).decode())
    else:
        draw(found.table())
        for line in found.lines():
            tell(clean(line))
        for written in (atlas, html):
            if written and not unwritten:
                tell(f"Written: {clean(str(written))}")
    if unwritten:
        raise unwritten
    _refuse_left_out(refused)


def _refuse_left_out(refused: Sequence[Refusal]) -> None:
    if refused:
        wrong = f"{plural(len(refused), 'checkpoint')} left out"
        raise Refusal(3, refused[0].given, wrong, refused[0].advice)


def _refuse_hopeless(paths: Sequence[str]) -> None:
    """Refuse paths of which none can be a checkpoint, before torch is loaded."""
    refused = []
    for path in paths:
        try:
            refuse_unreadable(path)
        except Refusal as refusal:
            refused.append(refusal)
    if len(refused) == len(paths):
        raise refused[0]


def _write(found: Surveyed, atlas: Path | None, html: Path | None) -> Refusal | None:
    from kappascope.system.files import write

    try:
        if atlas:
            write(atlas, strict(found.atlas.document()) + b"\n")
        if html:
            write(html, found.html().encode())
    except Exception as error:
        return refusal_of(error, [str(path) for path in (atlas, html) if path])
    return None
