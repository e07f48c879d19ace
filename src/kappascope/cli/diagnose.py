"""``kappascope diagnose``: examine checkpoints, show what is wrong, write pages and tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kappascope.checkpoints.paths import refuse_unreadable
from kappascope.cli._errors import refusal_of
from kappascope.cli._options import (
    AsJson,
    Debug,
    EngineName,
    Html,
    Jobs,
    Keep,
    MemoryOption,
    ShardOption,
)
from kappascope.cli._terminal import (
    announce,
    draw,
    loading,
    progress,
    refuse_lost_folder,
    say,
    tell,
    waiting,
)
from kappascope.cli.diff import renames
from kappascope.clinic import MODULES, Extent, Order, Severity, blank_document
from kappascope.model.skipped import ReasonKind, Skipped
from kappascope.monitor.record import is_run
from kappascope.refusal import Refusal
from kappascope.system.cluster import Cluster, engine_of
from kappascope.system.files import environment, source_digest, strict, unwritable
from kappascope.system.memory import bytes_of
from kappascope.system.store import Shard, Store
from kappascope.system.workers import CORES, Done, Processes
from kappascope.text import clean, plural

if TYPE_CHECKING:  # what needs torch is loaded when there is work
    from kappascope.clinic.diagnose import Case, Selection
    from kappascope.clinic.diagnosis import Diagnosis
    from kappascope.clinic.tasks import Task
    from kappascope.clinic.training import Trainings

LARGE = 10**9  # parameters, from which on the first rows are shown while the others are made
FIRST_ROWS = 5
MORE_MEMORY = "allow more with --memory, or free some"
OWN_SUFFIXES = (".html", ".htm", ".csv", ".parquet")  # of reports, which may be written over


def diagnose(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="PATH...",
            help="A checkpoint. Several, or a folder of numbered ones, are a trajectory.",
        ),
    ],
    *,
    include: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Examine only tensors whose name contains this text or matches this pattern.",
        ),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Leave out tensors whose name contains this text or matches this pattern.",
        ),
    ] = None,
    spectrum: Annotated[
        Extent,
        typer.Option(
            help="auto: all singular values up to a size of 2048, the two ends beyond it. full: "
            "always all. none: only the two ends."
        ),
    ] = "auto",
    reference: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Compare every component with those of this checkpoint."),
    ] = None,
    base: Annotated[
        str | None,
        typer.Option(
            metavar="PATH", help="Merge the adapter into this model before the examination."
        ),
    ] = None,
    rename: Annotated[
        list[str] | None,
        typer.Option(
            metavar="A=B", help="The text A in names here stands for B in names of the reference."
        ),
    ] = None,
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="How the model was trained from the reference, like 'AdamW lr=0.001 "
            "weight_decay=0.1'. The diagnosis then tells what was learned from what noise alone "
            "would have done."
        ),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="The number of steps that the optimizer made from the reference on."
        ),
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
    table: Annotated[
        Path | None, typer.Option(help="Write one row per matrix to this file, .parquet or .csv.")
    ] = None,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print one row per matrix as CSV and no table.")
    ] = False,
    top: Annotated[
        int | None,
        typer.Option(
            min=0, help="The number of matrices to show. By default 24 in the table and all in CSV."
        ),
    ] = None,
    sort: Annotated[
        Order | None,
        typer.Option(
            help="The order of the matrices. By default the worst come first, and with --reference "
            "those that moved most."
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option(
            "-q", "--quiet", help="Print only what failed and the findings that can be acted on."
        ),
    ] = False,
    atlas: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Compare matrices with this atlas of trained ones, which `survey --atlas` wrote.",
        ),
    ] = None,
    verbose: Annotated[
        bool, typer.Option("-v", "--verbose", help="Show every observation, too.")
    ] = False,
    fail_on: Annotated[
        Severity | None,
        typer.Option(help="Exit with code 1 if a finding has this severity or a graver one."),
    ] = None,
    jobs: Jobs = CORES,
    memory: MemoryOption = None,
    engine: EngineName = "local",
    shard: ShardOption = None,
    out: Keep = None,
    debug: Debug = False,
) -> None:
    """Examine the weights in a checkpoint; no model code is needed, and none in the file is run.

    A checkpoint is a file (.safetensors, .pt, .gguf, .onnx, .npz, ...), a folder, or an address
    (https://, hf://, s3://, gs://). It may also be the folder of a run that a Monitor recorded,
    whose readings are a trajectory.

    For example:
      kappascope diagnose model.safetensors --html report.html
      kappascope diagnose tuned/ --reference base/
      kappascope diagnose step100.pt step200.pt step300.pt
      kappascope diagnose model.pt --fail-on critical
    """
    with _document_of_an_error(as_json, paths[-1]), kept_rows(out, shard) as store:
        inputs = [*paths, *(path for path in (reference, base) if path is not None)]
        limit, pairs = memory_limit(memory), renames(rename or ())
        _check_arguments(paths, [reference, base], as_json, as_csv, atlas)
        _check_outputs(inputs, html, table)
        place = start_place(jobs, engine)  # the workers load torch while we do
        with loading():
            from kappascope.clinic import trajectories
            from kappascope.clinic.atlas import Atlas
            from kappascope.clinic.diagnose import Selection, case

        known = Atlas.read(atlas) if atlas is not None else None
        trainings = _trainings(reference, optimizer, steps)
        selection = Selection(tuple(include or ()), tuple(exclude or ()), spectrum)
        if any(map(_is_recorded, paths)):
            diagnoses = _recorded(paths, reference, selection)
        else:
            paths, cases = trajectories.steps(paths), []
            for number, path in enumerate(paths):
                earlier = paths[number - 1] if number else reference
                count = f" {number + 1} of {len(paths)}:" if len(paths) > 1 else ""
                with waiting(f"Opening{count} {path}"):
                    cases.append(
                        case(
                            path,
                            earlier,
                            selection,
                            jobs,
                            limit,
                            atlas=known,
                            trainings=trainings,
                            renames=pairs,
                            base=base,
                            cluster=place,
                            store=store,
                            tell=say,
                        )
                    )
            if store and shard:
                examine_shard(cases, Shard.of(shard), store)
                return
            diagnoses = [examined(each, quiet) for each in cases]
        unwritten = _write_files(diagnoses, html, table)
        empty = next(filter(None, map(_no_matrix, diagnoses)), None)
    untold = None
    if as_json:
        untold = print_document(diagnoses, empty, paths[-1])
    elif as_csv:
        _print_csv(diagnoses, sort, top)
    else:
        written = [path for path in (html, table) if path and not unwritten]
        _show(diagnoses, written, View(top, sort, verbose, quiet))
    for refusal in (untold, unwritten, empty):
        if refusal:
            raise refusal
    _refuse_severe(diagnoses, fail_on)
    _refuse_incomplete(diagnoses, told=not (as_json or as_csv))


@dataclass(frozen=True)
class View:
    """What the terminal shows of a diagnosis."""

    most: int | None  # rows of the table
    order: Order | None
    verbose: bool
    quiet: bool


def _check_arguments(
    paths: Sequence[str],
    beside: Sequence[str | None],
    as_json: bool,
    as_csv: bool,
    atlas: str | None,
) -> None:
    """Refuse what is surely wrong before torch is loaded, which takes seconds.

    ``beside`` are the reference and the base, where there are such.
    """
    refuse_lost_folder()
    inputs = [*paths, *(given for given in beside if given is not None)]
    if not all(inputs):
        raise Refusal(4, "''", "a path without a name", "name a checkpoint")
    if beside[-1] is not None and len(paths) > 1:
        raise Refusal(4, f"--base {beside[-1]}", "merges one adapter", "name one adapter")
    if as_json and as_csv:
        raise Refusal(4, "--json --csv", "two forms for one output", "give one of them")
    for given in inputs:
        refuse_unreadable(given)
    if atlas is not None and not Path(atlas).exists():
        advice = "give a file that `kappascope survey --atlas` wrote"
        raise Refusal(2, atlas, "No such file or directory", advice)


def _trainings(reference: str | None, optimizer: str | None, steps: int | None) -> Trainings | None:
    """Return how the model was trained from the reference on, if that is told."""
    if optimizer is None and steps is None:
        return None
    if not (optimizer and steps and reference):
        wrong = "three things belong together: --reference, --optimizer and --steps"
        given = f"--steps {steps}" if optimizer is None else f"--optimizer {optimizer}"
        raise Refusal(4, given, wrong, "give all of them, or none")
    from kappascope.clinic.training import Trainings

    return Trainings.of(optimizer, None, steps)


def start_place(jobs: int, engine: str) -> Cluster | None:
    """Start the processes of this machine, and the cluster that was named, if one was."""
    here = Processes(jobs, retries=0, loaded=MODULES)
    here.warm()  # files are opened here, wherever their matrices are examined
    place = engine_of(engine, here, say)
    if not isinstance(place, Cluster):
        return None
    place.warm()
    return place


@contextmanager
def kept_rows(out: str | None, shard: str | None = None) -> Iterator[Store | None]:
    """Give the folder in which rows are kept, locked, if one was named."""
    if out is None:
        if shard:
            wrong = "its rows would be lost"
            raise Refusal(4, f"--shard {shard}", wrong, "name a folder for them with --out")
        yield None
        return
    if shard:
        Shard.of(shard)  # what is no shard is refused before there is a folder
    store = Store.at(out)
    with store.lock() as notice:
        say(notice)
        study = {**environment(), "code of diagnose": source_digest("clinic", "matrix")[:16]}
        for difference in list(store.differences(study))[:1]:
            say(f"{store}: {difference}: older rows in it are kept apart and not used")
        store.write("study.json", strict(study))
        yield store


def examine_shard(cases: Sequence[Case], shard: Shard, store: Store) -> None:
    """Do the tasks of one shard, and say what comes next."""
    tasks = [(case, task) for case in cases for task in case.tasks]
    own = {id(task) for _, task in shard.part(tasks)}
    failed = []
    for case in cases:
        part = case.part([task for task in case.tasks if id(task) in own])
        failed += [done.failure for done in examined_tasks(part) if done.failure]
    told = f"Shard {shard}: {len(own)} of {len(tasks)} tasks, rows in {clean(str(store))}."
    tell(f"{told} When all shards are done: kappascope join")
    if failed:
        wrong = f"{plural(len(failed), 'task')} failed, first {failed[0]}"
        raise Refusal(3, str(store), wrong, "run the same command to try them again")


def memory_limit(given: str | None) -> int | None:
    """Return the bytes of a worker that the user allows, if any."""
    try:
        return None if given is None else bytes_of(given)
    except ValueError as error:
        raise Refusal(4, f"--memory {given}", str(error), "give it like 8G") from None


@contextmanager
def _document_of_an_error(as_json: bool, source: str) -> Iterator[None]:
    """Print a document with the error where one is expected, whatever goes wrong."""
    try:
        yield
    except BaseException as error:
        if as_json:
            print_document([], refusal_of(error, ("diagnose", source)), source)
        raise


def print_document(
    diagnoses: Sequence[Diagnosis], refusal: Refusal | None, source: str = ""
) -> Refusal | None:
    """Print the one JSON document, with the refusal if there is one.

    Where the diagnoses cannot be told, a document that says so is printed, and the refusal that it
    has is given back. Without diagnoses torch is not loaded: to load it may be what has failed.
    """
    untold = None
    try:
        document = blank_document(source)
        if diagnoses:
            from kappascope.clinic import diagnosis

            document = diagnosis.document(diagnoses)
        text = strict(document | _error(refusal))
    except Exception as error:
        untold = refusal_of(error, ("diagnose", source))
        text = strict(blank_document(source) | _error(untold))
    tell(text.decode())
    return untold


def _error(refusal: Refusal | None) -> dict[str, Any]:
    return {"error": vars(refusal)} if refusal else {}


def _check_outputs(inputs: Sequence[str], html: Path | None, table: Path | None) -> None:
    """Refuse files that cannot or must not be written, before any work is done."""
    if table and table.suffix.lower() not in (".parquet", ".csv"):
        raise Refusal(4, str(table), "neither .parquet nor .csv", "name a file of one of these")
    refuse_unwritable(inputs, html, table)


def refuse_unwritable(inputs: Sequence[str], *outputs: Path | None) -> None:
    """Refuse outputs that are the same file, lie among the inputs, or cannot be written."""
    from kappascope.checkpoints.folders import resolved

    named = [path for path in outputs if path]
    if len({resolved(path) for path in named}) < len(named):
        raise Refusal(4, str(named[0]), "is named twice", "name one file for each")
    checkpoints = {resolved(Path(path)) for path in inputs}
    for out in named:
        try:
            _check_output(out, checkpoints)
        except OSError as error:  # a name that is too long, a folder that may not be entered
            raise unwritable(out, error) from error


def _check_output(out: Path, checkpoints: Set[Path]) -> None:
    """Refuse a place that is not ours to write to."""
    from kappascope.checkpoints.folders import resolved

    folder = resolved(out).parent
    if checkpoints & {resolved(out), folder, *folder.parents}:
        raise Refusal(4, str(out), "lies in the checkpoint", "write it somewhere else")
    beside = folder in {path.parent for path in checkpoints}
    if beside and out.is_file() and out.suffix.lower() not in OWN_SUFFIXES:
        # it may be a shard, or a configuration
        raise Refusal(4, str(out), "is a file beside the checkpoint", "name another")
    if out.is_dir():
        raise Refusal(4, str(out), "is a folder", "name a file")
    if resolved(out).is_symlink():  # which is where a circle of links ends
        raise Refusal(4, str(out), "is a link that leads to itself", "name a file")
    if out.exists() and not out.is_file():  # a pipe or a device is written to where it is
        return
    if not folder.exists():
        raise Refusal(5, str(out), "its folder does not exist", "make it, or name another")
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise Refusal(5, str(out), "its folder cannot be written to", "name another place")


def _is_recorded(path: str) -> bool:
    try:
        return is_run(path)
    except OSError:  # a name that is too long, or not ours to look at: who opens it will tell
        return False


def _recorded(paths: Sequence[str], reference: str | None, selection: Selection) -> list[Diagnosis]:
    """Judge the record of a run, whose readings are a trajectory of their own."""
    if len(paths) > 1 or reference:
        given = " ".join([*paths, *(["--reference", reference] if reference else [])])
        raise Refusal(4, given, "a recorded run and something else", "name the run alone")
    from kappascope.clinic.recorded import recorded

    with waiting(f"Reading {paths[0]}"):
        return recorded(paths[0], selection)


def _ignored(*done: object) -> None:
    """Take progress and show none of it."""


def examined(case: Case, quiet: bool = False) -> Diagnosis:
    """Examine one checkpoint and show the progress, unless ``quiet``."""
    rows = [row for done in examined_tasks(case, quiet) for row in done.result]
    with waiting("Judging"):
        return case.concluded(rows)


def examined_tasks(case: Case, quiet: bool = False) -> Iterator[Done[Task]]:
    """Yield what becomes of the tasks of a checkpoint, and show the progress, unless ``quiet``."""
    if not quiet:
        tensors = plural(len(case.inventory.plan.units), "tensor")
        announce(f"{case.model}: {tensors} to examine", case.seconds)
    parts = [("matrices", task.effort) for task in case.tasks]
    unshown = FIRST_ROWS if not quiet and case.parameters >= LARGE else 0
    silent: AbstractContextManager[Callable[..., None]] = nullcontext(_ignored)
    shown = silent if quiet else progress(parts)
    with shown as advance, closing(case.examine()) as ended:
        for done in ended:
            advance(("matrices", done.item.effort), case.fetched)
            for row in done.result[:unshown]:
                if kappa := getattr(row, "kappa_text", ""):
                    say(f"{row.name}: κ {kappa}")
                    unshown -= 1
            yield done


def _write_files(
    diagnoses: Sequence[Diagnosis], html: Path | None, table: Path | None
) -> Refusal | None:
    """Write the files that were asked for, or give the reason why they cannot be written."""
    from kappascope.clinic import diagnosis
    from kappascope.clinic.html import diagnosis_page
    from kappascope.system.files import write

    try:
        with waiting("Writing"):
            if html:
                write(html, diagnosis_page(diagnoses).encode())
            if table:
                joined = diagnosis.joined(diagnoses)
                write(table, _encoded(table.suffix.lower(), joined))
    except Exception as error:  # a result is worth more than its files: it is shown first
        return refusal_of(error, [str(path) for path in (html, table) if path])
    return None


def _encoded(suffix: str, table: Any) -> bytes:
    from kappascope.clinic.diagnosis import spreadsheet

    if suffix == ".csv":
        return spreadsheet(table)
    from kappascope.lab.store import parquet_bytes  # it needs pyarrow, which the table has loaded

    return parquet_bytes(table)


def _print_csv(diagnoses: Sequence[Diagnosis], order: Order | None, most: int | None) -> None:
    """Print one row per matrix, in the order and to the number that were asked for."""
    from kappascope.clinic import diagnosis

    ordered = [replace(each, matrices=each.ordered(order)[:most]) for each in diagnoses]
    tell(diagnosis.spreadsheet(diagnosis.joined(ordered)).decode().rstrip("\n"))


def _show(diagnoses: Sequence[Diagnosis], written: Sequence[Path], view: View) -> None:
    """Print the last checkpoint in full, after the trajectory that leads to it."""
    from rich.console import Console

    from kappascope.clinic import terminal
    from kappascope.clinic.trajectories import trajectory_lines

    if view.quiet:
        for line in (*terminal.earlier(diagnoses), *terminal.urgent(diagnoses[-1])):
            draw(line)
        return
    width = Console().width
    if len(diagnoses) > 1:
        draw(terminal.trajectory_table(diagnoses, width))
        for line in terminal.earlier(diagnoses):
            draw(line)
        for moved in trajectory_lines(diagnoses):
            tell(clean(moved))
    most = terminal.TABLE_ROWS if view.most is None else view.most
    if diagnoses[-1].matrices and most:
        draw(terminal.matrix_table(diagnoses[-1], width, most, view.order))
    for line in terminal.lines(diagnoses[-1], view.verbose, most):
        draw(line)
    for path in written:
        tell(f"Written: {clean(str(path))}")


def _no_matrix(diagnosis: Diagnosis) -> Refusal | None:
    """Refuse a checkpoint without a matrix to examine; what may be a weight is named first."""
    if diagnosis.matrices:
        return None
    skipped = sorted(
        diagnosis.skipped,
        key=lambda one: (not one.lost, one.reason.kind is not ReasonKind.NOT_CHOSEN),
    )
    first = f", first {_first(skipped)}" if skipped else ""
    wrong = f"no matrix to examine in it ({plural(len(skipped), 'item')}{first})"
    return Refusal(2, diagnosis.source, wrong, "see --include and --exclude, or name a checkpoint")


def _refuse_severe(diagnoses: Sequence[Diagnosis], fail_on: Severity | None) -> None:
    """End with 1 if a finding is as severe as the user said or worse."""
    severe = [
        (each, finding)
        for each in diagnoses
        for finding in (each.above(fail_on) if fail_on else ())
    ]
    if severe:
        diagnosis, first = severe[0]
        count = plural(len(severe), "finding")
        wrong = f"{count} of severity {fail_on} or worse, first {first.rule}: {first.evidence}"
        several = len(diagnoses) > 1
        given = f"{diagnosis.source}: {first.subject}" if several else first.subject
        raise Refusal(1, given, wrong, first.advice)


def _refuse_incomplete(diagnoses: Sequence[Diagnosis], told: bool) -> None:
    """End with 3 if a part could not be examined or compared, with 2 if nothing could.

    What findings have ``told`` already is named and not told again.
    """
    for diagnosis in diagnoses:
        failed = diagnosis.failed
        if diagnosis.analysed and diagnosis.incomparable:
            wrong = f"{diagnosis.incomparable}, first {_first(diagnosis.uncompared)}"
            advice = "give another reference of the same model"
            raise Refusal(3, str(diagnosis.reference), wrong, advice)
        if not failed:
            continue
        if not any(each.analysed for each in diagnoses):
            wrong, advice = f"nothing analysed: {_first(failed)}", "see whether the file is whole"
            if failed[0].reason.kind is ReasonKind.NO_MEMORY:
                advice = MORE_MEMORY
            raise Refusal(2, diagnosis.source, wrong, advice)
        if len(diagnosis.unbuilt) == len(failed):
            wrong = f"{plural(len(failed), 'object')} not built, first {_first(failed)}"
            advice = "every tensor was read; save model.state_dict() where you trust it"
        else:
            first = _first(failed)
            if told and failed[0].reason.kind is ReasonKind.NON_FINITE:
                first = failed[0].name
            wrong = f"{plural(len(failed), 'item')} not analysed, first {first}"
            advice = "the rest is above; --json lists them all"
            if failed[0].reason.kind is ReasonKind.NO_MEMORY:
                advice = f"the rest is above; {MORE_MEMORY}"
        raise Refusal(3, diagnosis.source, wrong, advice)


def _first(skipped: Sequence[Skipped]) -> str:
    return f"{skipped[0].name}: {skipped[0].reason}"
