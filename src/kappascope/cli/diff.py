"""``kappascope diff``: what became of each layer between two checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kappascope.checkpoints.paths import refuse_unreadable
from kappascope.cli._errors import refusal_of
from kappascope.cli._options import AsJson, Debug, Jobs, MemoryOption
from kappascope.cli._terminal import draw, loading, progress, refuse_lost_folder, tell, waiting
from kappascope.clinic import MODULES
from kappascope.refusal import Refusal
from kappascope.system.files import strict
from kappascope.system.memory import bytes_of
from kappascope.system.workers import CORES, Processes
from kappascope.text import clean, number, plural, ruled_table

if TYPE_CHECKING:
    from kappascope.clinic.diff import ComparedLayer, Diff

TABLE_ROWS = 40  # layers that are not the same, the gravest first
SHORTEST_NAME, OTHER_COLUMNS = 24, 53  # characters: of a name that is cut, and beside it
COLOURS = {"damaged": "bold red", "missing": "red", "replaced": "yellow", "added": "yellow"}


def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A checkpoint.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The checkpoint that A became.")],
    *,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Compare only tensors whose name contains this text or matches this pattern.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave out tensors whose name contains this text or matches this pattern.",
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NEW=OLD", help="The text NEW in names of B stands for OLD in names of A."
        ),
    ] = None,
    as_json: AsJson = False,
    fail_on: Annotated[
        Literal["rounding", "rearranged", "trained", "added", "replaced", "missing", "damaged"]
        | None,
        typer.Option(
            help="Exit with code 1 if the verdict on a layer is this one or a graver one."
        ),
    ] = None,
    jobs: Jobs = CORES,
    memory: MemoryOption = None,
    debug: Debug = False,
) -> None:
    """Say of every layer whether it is the same, rounded, rearranged, trained or damaged.

    Names may differ by prefixes; fused, transposed and reordered layers are recognised by their
    values.

    For example:
      kappascope diff base/ tuned/ --fail-on damaged
    """
    try:
        refuse_lost_folder()
        limit, pairs = None if memory is None else _bytes(memory), renames(rename or ())
        if not (before and after):
            raise Refusal(4, "''", "a path without a name", "name a checkpoint")
        for given in (before, after):
            refuse_unreadable(given)
        Processes(jobs, loaded=MODULES).warm()
        with loading():
            from kappascope.clinic.diagnose import Selection, case
            from kappascope.clinic.diff import DiffCase

        selection = Selection(tuple(include or ()), tuple(exclude or ()), "none")
        with waiting(f"Opening {after}"):
            opened = case(after, before, selection, jobs, limit, renames=pairs)
        found = _compared(DiffCase.of(opened))
    except BaseException as error:
        if as_json:
            print_failed_diff(refusal_of(error, ("diff", before, after)), before, after)
        raise
    if as_json:
        tell(strict(found.document()).decode())
    else:
        _show(found)
    _refuse(found, fail_on)


def renames(given: Sequence[str]) -> list[tuple[str, str]]:
    """Return pairs of texts from what was typed as NEW=OLD.

    >>> renames(["encoder.=model.encoder."])
    [('encoder.', 'model.encoder.')]
    """
    pairs = []
    for each in given:
        new, mark, old = each.partition("=")
        if not mark or not new:
            raise Refusal(4, f"--rename {each}", "not of the form A=B", "give it like old.=new.")
        pairs.append((new, old))
    return pairs


def _bytes(given: str) -> int:
    try:
        return bytes_of(given)
    except ValueError as error:
        raise Refusal(4, f"--memory {given}", str(error), "give it like 8G") from None


def _compared(work: Any) -> Diff:
    """Compare all groups of layers and show the progress."""
    rows = []
    parts = [("layers", 1.0)] * (len(work.groups) + 1)  # and the biases and gains
    with progress(parts) as advance, closing(work.examine()) as ended:
        for done in ended:
            advance(("layers", 1.0))
            rows += work.rows(done)
    result: Diff = work.concluded(rows)
    return result


def print_failed_diff(refusal: Refusal, before: str = "", after: str = "") -> None:
    """Print the one JSON document of a diff that failed; torch need not be loaded for it."""
    from kappascope.system.files import unloaded_environment

    document = {
        "schema": "kappascope.diff/1",
        "source": after,
        "reference": before,
        "layers": [],
        "failed": [],
        "summary": {"by_verdict": {}, "verdict": "Nothing could be compared."},
        "provenance": {**unloaded_environment(), "dtype": "float64", "notes": []},
        "error": vars(refusal),
    }
    tell(strict(document).decode())


def _show(found: Diff) -> None:
    """Print a row for every layer that is not the same, and a sentence that counts all."""
    from rich.console import Console
    from rich.text import Text

    from kappascope.clinic.terminal import plain

    room = max(SHORTEST_NAME, Console().width - OTHER_COLUMNS)

    changed = [layer for layer in found.ranked if layer.verdict != "same" or layer.text]
    drawn = ruled_table("layer", "verdict", "moved", "what", numbers=(2,))
    drawn.columns[0].no_wrap = True
    for layer in changed[:TABLE_ROWS]:
        drawn.add_row(
            Text(plain(layer.name or layer.before, room)),
            Text(layer.verdict, COLOURS.get(layer.verdict, "")),
            Text(number(layer.distance, 2)),
            Text(plain(_untold(layer))),
        )
    if changed:
        draw(drawn)
    if len(changed) > TABLE_ROWS:
        tell(f"{len(changed) - TABLE_ROWS} more layers; --json has all of them.")
    for note in found.notes:
        tell(clean(note))
    for item in found.failed:
        tell(clean(f"failed: {item.name}: {item.reason}"))
    tell(clean(found.verdict))


def _untold(layer: ComparedLayer) -> str:
    """Return what is said of a layer but how far it moved, which has a column of its own."""
    if layer.distance is None:
        return layer.text
    return layer.text.removeprefix(f"moved by {layer.distance:.2g} of its norm, ")


def _refuse(found: Diff, fail_on: str | None) -> None:
    """End with 1 for what the user said, with 2 if nothing and 3 if only a part was compared."""
    if not found.layers:
        first = f": {found.failed[0].name}: {found.failed[0].reason}" if found.failed else ""
        wrong = f"nothing could be compared{first}"
        raise Refusal(2, found.source, wrong, "see --include, or name two checkpoints")
    severe = found.above(fail_on) if fail_on else ()
    if severe:
        worst = severe[0]
        wrong = f"{plural(len(severe), 'layer')} {fail_on} or worse, first {worst.verdict}"
        told = f"{wrong}: {worst.text}" if worst.text else wrong
        raise Refusal(1, worst.name or worst.before, told, "see the table above")
    if found.failed:
        first_failed = found.failed[0]
        wrong = f"{plural(len(found.failed), 'item')} not compared, first {first_failed.name}"
        raise Refusal(3, found.source, f"{wrong}: {first_failed.reason}", "the rest is above")
