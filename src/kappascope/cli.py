"""The command line; with its terminal the only module that prints.

Results go to the standard output, progress and the one line of an error to the other. Exit codes:
0 done, 1 done but results differ, 2 input refused, 3 done in part, 4 wrong usage, 5 no room or
memory, 130 and 143 interrupted.
"""

from __future__ import annotations

import gc
import importlib
import io
import os
import signal
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kappascope.clinic import MODULES, Extent, Severity
from kappascope.engines import CORES, ONE_THREAD, Done, Engine, Here, Processes
from kappascope.prose import OUTCOMES, clean, plural, tally, unmeasured
from kappascope.refusals import Refusal
from kappascope.terminal import draw, progress, say, tell, waiting

if TYPE_CHECKING:  # what needs torch is loaded when there is work
    from kappascope.clinic.diagnosing import Case, Choice
    from kappascope.clinic.diagnosis import Diagnosis
    from kappascope.exhibition import Publication
    from kappascope.lab import Exhibit, Experiment, Study
    from kappascope.matrices import Skipped
    from kappascope.store import Store
    from kappascope.study import Block, Plan

app = typer.Typer(
    help="A laboratory and clinic for the weight matrices of neural networks.",
    pretty_exceptions_enable=False,
    add_completion=False,
)


def _folder(text: str) -> Path:
    if not text:  # an unset variable of the shell; the current folder has a name
        raise typer.BadParameter("expected a folder, got nothing")
    return Path(text)


Debug = Annotated[bool, typer.Option("--debug", help="Show where an error arose.")]
"""Of every command; it is `run` that looks for it, since a command may not even begin."""
Out = Annotated[Path, typer.Option(help="Folder of the results.", parser=_folder, metavar="PATH")]
LABORATORY = (  # what workers need; torch's optimizers load its compiler, which takes a second
    "torch._dynamo", "matplotlib.figure", "kappascope.study", "kappascope.report",
)  # fmt: skip
CONCLUSION = ("scipy.stats", "matplotlib.figure", "kappascope.study")  # what we need ourselves
LOADING = "Loading torch"
LONGEST = 240  # characters of an error line
ADVICE = "see whether the file is whole"
TRUSTED = "every tensor was read; save model.state_dict() where you trust it"


class Interrupted(BaseException):
    """A signal that asks us to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Answer what needs no command."""
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"kappascope {installed('kappascope')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def reproduce(
    numbers: Annotated[
        list[int] | None,
        typer.Argument(metavar="[1 4 7 ...]", help="Experiments; the paper's nine if none."),
    ] = None,
    *,
    beyond: Annotated[
        bool, typer.Option("--beyond", help="Also those that answer the paper's review.")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials: half a minute.")] = False,
    trials: Annotated[
        int | None,
        typer.Option(min=1, max=1_000_000, help="Trials of each setting on our own streams."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=0, max=1024, help="Processes to run trials in; 0 uses this one.")
    ] = CORES,
    out: Out = Path("kappascope-report"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what is in that folder.")] = False,
    debug: Debug = False,
) -> None:
    """Run the paper's experiments, judge its claims, write the report.

    Trials that are in the folder already are not run again: after an interruption, or to add
    experiments or trials, name the same folder.
    """
    engine = _laboratory(jobs)
    from kappascope import study
    from kappascope.store import Store

    experiments = _chosen(numbers or [], beyond, quick)
    plan = study.plan(experiments, trials)
    store = Store(out)
    with _begun(store, plan, fresh):
        failures = _run(plan, store, engine)
        _conclude(experiments, plan, store, failures, engine)


@app.command("study")
def networks(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]", help="teacher, digits, gpt or pretrained; all of them if none."
        ),
    ] = None,
    *,
    quick: Annotated[bool, typer.Option("--quick", help="In small form: a minute.")] = False,
    text: Annotated[Path | None, typer.Option(help="Train the character GPT on this text.")] = None,
    jobs: Annotated[
        int, typer.Option(min=0, max=1024, help="Processes to train in; 0 uses this one.")
    ] = CORES,
    out: Out = Path("kappascope-study"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what is in that folder.")] = False,
    debug: Debug = False,
) -> None:
    """Train real networks, look into pretrained ones, and see whether any of it matters there.

    After an interruption, name the same folder: training goes on in the middle.
    """
    _name_text(text)
    engine = _laboratory(jobs)
    from kappascope import study
    from kappascope.store import Store

    wanted = _studies(name, quick, text)
    studies = _provided(wanted)
    plan, store = study.plan(studies), Store(out)
    with _begun(store, plan, fresh):
        _run(plan, store, engine)
        studies = [one.continued(rows) for one, rows in study.begun(studies, plan, store)]
        plan = study.plan(studies)
        failures = _run(plan, store, engine)
        _conclude(studies, plan, store, failures, engine)
    if absent := [one.name for one in wanted if one.name not in {each.name for each in studies}]:
        wrong = f"left out, for what {'they need' if len(absent) > 1 else 'it needs'} is not here"
        advice = "give the same command again where pip and npm can fetch it"
        raise Refusal(3, f"study {', '.join(absent)}", wrong, advice)


@contextmanager
def _begun(store: Store, plan: Plan, fresh: bool) -> Iterator[None]:
    """The folder, ours alone, for what is planned."""
    with store.lock() as notice:
        for note in (notice, *plan.notes):
            say(note)
        if fresh:
            store.forget()
        store.begin(plan.study)
        yield


def _name_text(text: Path | None) -> None:
    """Tell the workers, which inherit it."""
    if text:
        os.environ["KAPPASCOPE_TEXT"] = str(text.absolute())


def _laboratory(jobs: int) -> Processes | Here:
    """Where trials are run; it and we load our modules at the same time."""
    engine = Processes(jobs, loaded=LABORATORY) if jobs else Here()
    if isinstance(engine, Processes):
        engine.warm()
    with waiting(LOADING):
        for module in CONCLUSION:
            importlib.import_module(module)
    return engine


def _studies(name: str | None, quick: bool, text: Path | None) -> list[Study]:
    from kappascope import lab, materials

    found = lab.studies()
    if name and name not in found:
        raise Refusal(4, f"study {name}", "there is none", f"choose from {', '.join(found)}")
    chosen = [found[name]] if name else list(found.values())
    if quick:
        chosen = [one.quickly() for one in chosen]
    if text:
        label = materials.label_of(text)
        chosen = [one.on(label) for one in chosen]
        if not any(label == setting.get("text") for one in chosen for setting in one.grid):
            raise Refusal(4, f"--text {text}", f"study {name} reads no text", "leave it out")
    return chosen


def _provided(studies: Sequence[Study]) -> list[Study]:
    """The studies for which all is here, or can be fetched; what cannot is said."""
    from kappascope import materials

    lacking: dict[str, Refusal] = {}
    for name in dict.fromkeys(name for one in studies for name in one.materials):
        try:
            with waiting(f"Fetching {name}"):
                materials.fetch(name)
        except Refusal as refusal:
            lacking[name] = refusal
    ready = [one for one in studies if not lacking.keys() & set(one.materials)]
    if not ready:
        raise next(iter(lacking.values()))
    for reason in lacking.values():
        say(str(reason))
    return ready


@app.command()
def diagnose(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH...", help="A checkpoint; several are a trajectory."),
    ],
    *,
    include: Annotated[
        list[str] | None, typer.Option(help="Only tensors whose name contains this, or matches it.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option(help="No tensors whose name contains this, or matches it.")
    ] = None,
    spectrum: Annotated[
        Extent,
        typer.Option(help="All singular values: up to size 2048, always, or where they come free."),
    ] = "auto",
    reference: Annotated[
        str | None, typer.Option(help="A checkpoint to compare every component with.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document, no table.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
    table: Annotated[
        Path | None, typer.Option(help="Write one row per matrix: .parquet or .csv.")
    ] = None,
    fail_on: Annotated[
        Severity | None, typer.Option(help="Exit with 1 from this severity on.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, max=1024, help="Processes to work in.")] = CORES,
    debug: Debug = False,
) -> None:
    """Examine the weights in a checkpoint: no model code, no network, no trust in the file.

    A .safetensors file, a Hugging Face folder, or what torch.save wrote. Example:

    kappascope diagnose model.safetensors --html report.html
    """
    with _answering(as_json, paths[-1]):
        Processes(jobs, loaded=MODULES).warm()  # while we load torch, too
        with waiting(LOADING):
            from kappascope.clinic.diagnosing import Choice

        choice = Choice(tuple(include or ()), tuple(exclude or ()), spectrum)
        if not all((*paths, reference is None or reference)):
            raise Refusal(4, "''", "a path without a name", "name a checkpoint")
        _writable([*paths, reference] if reference else paths, html, table)
        pairs = zip(paths, [reference, *paths[:-1]], strict=True)
        cases = [_opened(path, other, choice, jobs) for path, other in pairs]
        found = [_examined(case) for case in cases]
    unwritten = _unwritten(found, html, table)
    empty = next(filter(None, map(_empty, found)), None)
    if as_json:
        _answer(found, empty)
    else:
        _show(found, [one for one in (html, table) if one and not unwritten])
    for problem in (unwritten, empty):
        if problem:
            raise problem
    _judged(found, fail_on)


@contextmanager
def _answering(as_json: bool, source: str) -> Iterator[None]:
    """Where a document is expected, one that says why there is nothing in it."""
    try:
        yield
    except BaseException as error:
        if as_json:
            _answer([], _refusal(error, ("diagnose", source)), source)
        raise


def _answer(found: Sequence[Diagnosis], refusal: Refusal | None, source: str = "") -> None:
    """The document, with what was wrong."""
    from kappascope.clinic.diagnosis import Diagnosis, document
    from kappascope.store import strict

    wrong = {"error": vars(refusal)} if refusal else {}
    tell(strict(document(found or [Diagnosis(source)]) | wrong).decode())


REPORTS = (".html", ".htm", ".csv", ".parquet")  # what of ours may be written over


def _writable(paths: Sequence[str], html: Path | None, table: Path | None) -> None:
    """Refuse places that cannot be written to before any work is done."""
    if table and table.suffix.lower() not in (".parquet", ".csv"):
        raise Refusal(4, str(table), "neither .parquet nor .csv", "name a file of one of these")
    if html and table and html.resolve() == table.resolve():
        raise Refusal(4, str(html), "is named twice", "name one file for each")
    inputs = [Path(path).resolve() for path in paths]
    for out in (html, table):
        if out is None:
            continue
        place = out.resolve()
        folder = place.parent
        if {*inputs} & {place, folder, *folder.parents}:
            raise Refusal(4, str(out), "lies in the checkpoint", "write it somewhere else")
        beside = folder in {each.parent for each in inputs} and out.suffix.lower() not in REPORTS
        if beside and out.is_file():  # it may be a shard, or a configuration
            raise Refusal(4, str(out), "is a file beside the checkpoint", "name another")
        if out.is_dir():
            raise Refusal(4, str(out), "is a folder", "name a file")
        if out.exists() and not out.is_file():  # a pipe or a device is in no folder to write to
            continue
        if not folder.exists():
            raise Refusal(5, str(out), "its folder does not exist", "make it, or name another")
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise Refusal(5, str(out), "its folder cannot be written to", "name another place")


def _opened(path: str, reference: str | None, choice: Choice, jobs: int) -> Case:
    from kappascope.clinic import diagnosing

    with waiting(f"Opening {path}"):
        return diagnosing.case(path, reference, choice, jobs)


def _examined(case: Case) -> Diagnosis:
    """One checkpoint, under a bar."""
    rows = []
    parts = [("matrices", task.effort) for task in case.tasks]
    with progress(parts) as advance, closing(case.examine()) as ended:
        for done in ended:
            advance(("matrices", done.item.effort))
            rows += done.result
    with waiting("Judging"):
        return case.concluded(rows)


def _empty(found: Diagnosis) -> Refusal | None:
    """What to say of a checkpoint without a matrix to examine."""
    from kappascope.clinic.diagnosing import UNCHOSEN

    if found.matrices:
        return None
    skipped = sorted(found.skipped, key=lambda one: (not one.lost, one.reason != UNCHOSEN))
    reason = f", first {_first(skipped)}" if skipped else ""
    wrong = f"no matrix to examine in it ({plural(len(skipped), 'item')}{reason})"
    return Refusal(2, found.source, wrong, "see --include and --exclude, or name a checkpoint")


def _first(skipped: Sequence[Skipped]) -> str:
    return f"{skipped[0].name}: {skipped[0].reason}"


def _unwritten(found: Sequence[Diagnosis], html: Path | None, table: Path | None) -> Refusal | None:
    """Write the files that were asked for; why they are not there, if so."""
    from kappascope import store
    from kappascope.clinic import diagnosis, page

    try:
        with waiting("Writing"):
            if html:
                store.write(html, page.page(diagnosis.document(found, plots=True)).encode())
            if table:
                parquet = table.suffix.lower() == ".parquet"
                make = store.parquet if parquet else diagnosis.spreadsheet
                store.write(table, make(diagnosis.joined(found)))
    except Refusal as refusal:  # a result is worth more than its files
        return refusal
    return None


def _show(found: Sequence[Diagnosis], written: Sequence[Path]) -> None:
    """The last step in full, after the way there."""
    from rich.console import Console

    from kappascope.clinic import bulletin

    width = Console().width
    if len(found) > 1:
        draw(bulletin.trajectory(found, width))
        for line in bulletin.earlier(found):
            draw(line)
    if found[-1].matrices:
        draw(bulletin.table(found[-1], width))
    for line in bulletin.lines(found[-1]):
        draw(line)
    for path in written:
        tell(f"Written: {clean(str(path))}")


def _judged(found: Sequence[Diagnosis], fail_on: Severity | None) -> None:
    """The exit code, if it is not 0."""
    bad = [(each, one) for each in found for one in (each.above(fail_on) if fail_on else ())]
    if bad:
        step, first = bad[0]
        wrong = f"{plural(len(bad), 'finding')} of severity {fail_on} or worse, first {first.rule}"
        given = f"{step.source}: {first.subject}" if len(found) > 1 else first.subject
        raise Refusal(1, given, f"{wrong}: {first.evidence}", first.advice)
    for each in found:
        if each.analysed and each.incomparable:
            wrong = f"{each.incomparable}, first {_first(each.uncompared)}"
            advice = "give another reference of the same model"
            raise Refusal(3, str(each.reference), wrong, advice)
        if each.failed and not any(other.analysed for other in found):
            raise Refusal(2, each.source, f"nothing analysed: {_first(each.failed)}", ADVICE)
        if each.failed and len(each.unbuilt) == len(each.failed):
            told = _first(each.failed).partition(": only")[0]
            wrong = f"{plural(len(each.failed), 'object')} not built, first {told}"
            raise Refusal(3, each.source, wrong, TRUSTED)
        if each.failed:
            many = plural(len(each.failed), "item")
            wrong = f"{many} not analysed, first {_first(each.failed)}"
            raise Refusal(3, each.source, wrong, "the rest is above; --json lists them all")


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="Folder of results.")],
    trials: Annotated[int, typer.Option(min=1, help="How many to run again.")] = 5,
    text: Annotated[Path | None, typer.Option(help="The text that a study was given.")] = None,
    debug: Debug = False,
) -> None:
    """Run some trials of a folder again, each alone, and compare every bit."""
    _name_text(text)
    from kappascope.store import Store

    if not (folder / "units").is_dir():
        raise Refusal(2, str(folder), "holds no results", "name a folder reproduce has filled")
    with waiting(LOADING):
        from kappascope import lab, study

    differing, compared = [], 0
    every = [*lab.discover().values(), *lab.studies().values()]
    for block, same in study.verify(every, Store(folder), trials):
        tell(f"{'same' if same else 'DIFFERS'}: {clean(str(block))}")
        compared += 1
        differing += [] if same else [str(block)]
    if not compared:
        raise Refusal(2, str(folder), "holds no results of this version", "run reproduce again")
    if differing:
        wrong = f"{len(differing)} of {compared} trials differ, first {differing[0]}"
        raise Refusal(1, str(folder), wrong, "begin anew with reproduce --fresh")


@app.command()
def findings(
    folders: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders of results.")],
    docs: Annotated[Path, typer.Option(help="Folder of the pages to write.")] = Path("docs"),
    debug: Debug = False,
) -> None:
    """Write what runs found, and their answers to the paper's review, into the documentation.

    Nothing is run: the trials in the folders are judged and drawn anew, reports and all.
    """
    with waiting(LOADING):
        from kappascope import conclusions, exhibition, review
        from kappascope.store import Store, write

    found = [_published(folder) for folder in folders]
    claims = [claim for one in found for claim in one.claims]
    paper = docs / "paper.md"
    try:
        told = review.inserted(paper.read_text(encoding="utf-8"), review.table(claims))
    except (OSError, ValueError) as error:
        raise Refusal(2, str(paper), str(error), "name the folder of the documentation") from error
    for one in found:
        with Store(one.folder).lock() if (one.folder / "lock").exists() else nullcontext():
            _write(one.folder, one.files(Here()))
    pages = {paper: told}
    if rooms := [room for one in found for room in one.rooms(docs)]:
        pages[docs / "studies.md"] = exhibition.page(rooms)
    for one in found:
        if not one.studies:
            pages[docs / "findings.md"] = conclusions.page(claims, one.provenance)
    for path, text in pages.items():
        write(path, text.encode())
    tell(f"Written: {clean(', '.join(str(path) for path in pages))}")


def _published(folder: Path) -> Publication:
    from kappascope import lab
    from kappascope.exhibition import Publication

    if not (folder / "trials.parquet").is_file():
        wrong = "holds no results"
        raise Refusal(2, str(folder), wrong, "name a folder reproduce or study has filled")
    every = [*lab.discover().values(), *lab.studies().values()]
    return Publication.of(folder, every)


def _chosen(numbers: Sequence[int], beyond: bool, quick: bool) -> list[Experiment]:
    from kappascope.lab import discover

    found = discover()
    for number in numbers:
        if number not in found:
            there = ", ".join(map(str, found))
            raise Refusal(4, f"experiment {number}", "there is none", f"choose from {there}")
    usual = [] if numbers else [number for number, one in found.items() if not one.beyond]
    further = [number for number, one in found.items() if one.beyond] if beyond else []
    wanted = [found[number] for number in sorted({*numbers, *usual, *further})]
    return [experiment.quickly() for experiment in wanted] if quick else wanted


def _run(plan: Plan, store: Store, engine: Processes | Here) -> list[Done[Block]]:
    """Run what is missing under a bar; the failures."""
    from kappascope import study

    todo = study.missing(plan, store)
    failures = []
    parts = [(block.experiment, float(block.cost)) for block in todo]
    with progress(parts) as advance, closing(study.run(todo, store, engine)) as ended:
        for done in ended:
            advance((done.item.experiment, done.item.cost))
            if done.failure:
                failures.append(done)
    return failures


def _conclude(
    experiments: Sequence[Experiment],
    plan: Plan,
    store: Store,
    failures: Sequence[Done[Block]],
    engine: Engine,
) -> None:
    """Write everything that is derived from the trials, and say what came out."""
    from kappascope import lab, report, study

    with waiting("Judging the claims, drawing the figures"):
        results = study.gather(plan, store, failures)
        verdicts = lab.verdicts(experiments, results.rows)
        study.publish(results, store, verdicts)
        _write(store.folder, report.files(experiments, results, verdicts, engine))
    _table(experiments, verdicts)
    for experiment in experiments:
        rows = results.everything.where(experiment=experiment.id)
        if tables := list(report.exhibits(experiment, rows)):
            _exhibit(tables[0], len(tables) - 1)
    tell(f"Report: {clean(str(store.folder / 'report.html'))}")
    if failed := results.provenance["failed"]:
        first = f"{failed[0]['trials']}: {failed[0]['reason']}"
        wrong = f"{plural(len(failed), 'block')} of trials failed, first {first}"
        raise Refusal(3, str(store.folder), wrong, "run the same command to try them again")


def _write(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    from kappascope.store import write

    for name, data in files:
        (folder / name).parent.mkdir(exist_ok=True)
        write(folder / name, data)


def _table(experiments: Sequence[Experiment], verdicts: dict[str, Any]) -> None:
    from rich.table import Table

    compared = ["figures matched"] if verdicts["figures"] else []
    table = Table("experiment", *OUTCOMES, *compared)
    for column in table.columns[1:]:
        column.justify = "right"
    names = {one.id: one.heading for one in experiments}
    if any(row["experiment"] == "all" for row in verdicts["claims"]):
        names["all"] = "of several"
    for name, title in names.items():
        claims = [row["verdict"] for row in verdicts["claims"] if row["experiment"] == name]
        figures = [row for row in verdicts["figures"] if row["experiment"] == name]
        taken = [row["matches"] for row in figures if not unmeasured(row)]
        matched = f"{sum(taken)} of {len(taken)}" if taken else "not measured" if figures else ""
        counts = (str(claims.count(outcome)) for outcome in OUTCOMES)
        table.add_row(title, *counts, *([matched] if compared else []))
    draw(table)
    if verdicts["claims"]:
        tell(tally(verdicts["claims"]))


def _exhibit(one: Exhibit, more: int) -> None:
    """A table, and how many more there are to be read elsewhere."""
    from rich.table import Table
    from rich.text import Text

    if one.rows:
        table = Table(*one.columns, title=clean(one.title), title_justify="left")
        for cells in one.rows:
            table.add_row(*(Text(clean(text)) for text in cells))
        draw(table)
    further = f"{plural(more, 'more table is', 'more tables are')} in the report."
    tell(clean(" ".join([one.note, further] if more else [one.note])))


def _line(refusal: Refusal) -> str:
    """The one line of an error; a long name of what was given loses its middle, not the reason."""
    whole = f"kappascope: error: {refusal}"
    given = clean(refusal.given)
    room = max(LONGEST // 3, LONGEST - (len(whole) - len(given)))
    if len(given) > room:
        given = f"{given[: room // 2]}…{given[-(room - room // 2 - 1) :]}"
    shorter = Refusal(refusal.code, given, refusal.wrong, refusal.advice)
    return _shortened(f"kappascope: error: {shorter}")


def _shortened(line: str) -> str:
    """At most as long as an error line may be; the advice at its end stays."""
    advice = line[line.rfind(" (") :] if line.endswith(")") else ""
    room = LONGEST - len(advice)
    if room < LONGEST // 2:
        advice, room = "", LONGEST
    return line if len(line) <= LONGEST else f"{line[: room - 1]}…{advice}"


def _refusal(error: BaseException, arguments: Sequence[str]) -> Refusal:
    """What to say of anything that can end a command early."""
    given = " ".join(arguments)
    begins = "diagnose" in arguments[:1]
    again = f"the same command {'begins anew' if begins else 'goes on'}"
    known: dict[type[BaseException], tuple[int, str, str]] = {
        Interrupted: (getattr(error, "code", 130), "stopped early", again),
        MemoryError: (5, "out of memory", "use fewer --jobs"),
        ImportError: (5, str(error), "install kappascope with its dependencies"),
        OSError: (5, str(error), "see to it and give the same command again"),
        BaseException: (5, f"{type(error).__name__}: {error}", "a bug; --debug shows where"),
    }
    if isinstance(error, Refusal):
        return error
    if told := _usage(error):
        wrong = told.replace("Value error, ", "").rstrip(".")
        named = getattr(typer.main.get_command(app), "commands", {})
        of = f"{arguments[0]} " if arguments and arguments[0] in named else ""
        return Refusal(4, given, wrong, f"see kappascope {of}--help")
    code, wrong, advice = next(known[kind] for kind in known if isinstance(error, kind))
    return Refusal(code, given, wrong, advice)


def _usage(error: BaseException) -> str:
    """What typer says of arguments it does not take, whichever module it keeps its errors in."""
    told = getattr(error, "format_message", str)
    return str(told())


@contextmanager
def _signals() -> Iterator[list[Interrupted]]:
    """Turn the first signal into an exception, so that all is closed; the second ends at once.

    It is also in the list: a library that is just being loaded may turn it into another.
    """
    numbers, came = (signal.SIGINT, signal.SIGTERM), list[Interrupted]()

    def first(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, lambda number, frame: os._exit(128 + number))
        came.append(Interrupted(number))
        raise came[0]

    before = {number: signal.signal(number, first) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say and give the exit code."""
    os.environ.update(ONE_THREAD)  # before numpy and torch are loaded, or it is too late
    gc.set_threshold(100_000)  # loading torch makes a million objects and no garbage
    command = typer.main.get_command(app)
    with _signals() as came:
        try:
            code = command.main(list(arguments), "kappascope", standalone_mode=False)
            if came:  # in a callback, where Python drops exceptions
                raise came[0]
            return int(code or 0)
        except SystemExit:  # rich found that nobody reads its help
            return 0
        except BaseException as error:
            if "--debug" in arguments:
                traceback.print_exc()
            refusal = _refusal(came[0] if came else error, arguments)
            if _usage(error) and "diagnose" in arguments[:1] and "--json" in arguments:
                _answer([], refusal)
            say(_line(refusal))
            return refusal.code


def main() -> None:
    """The console script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # whose encoding may lack what names are made of
            stream.reconfigure(errors="replace")
    code = run(sys.argv[1:])
    gc.freeze()  # or Python looks through a million objects once more, for a second, before it ends
    sys.exit(code)
