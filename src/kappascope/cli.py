"""The command line; the only module that prints.

Results go to the standard output, progress and the one line of an error to the other. Exit codes:
0 done, 1 done but results differ, 2 input refused, 3 done in part, 4 wrong usage, 5 no room or
memory, 130 and 143 interrupted.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kappascope.engines import ONE_THREAD, Done, Here, Processes

if TYPE_CHECKING:  # what needs torch is loaded when there is work
    from kappascope.lab import Experiment
    from kappascope.store import Refusal, Store
    from kappascope.study import Block, Plan

app = typer.Typer(
    help="A laboratory and clinic for the weight matrices of neural networks.",
    pretty_exceptions_enable=False,
    add_completion=False,
)
LONGEST = 240  # characters of an error line
QUIET = 10.0  # seconds between two lines of progress
CORES = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
OUTCOMES = ("holds", "fails", "undecided", "ill-posed")


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
        typer.Option(min=1, max=1_000_000, help="Trials on own streams, up to size 128."),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=0, max=1024, help="Processes to run trials in; 0 uses this one.")
    ] = CORES,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("kappascope-report"),
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget what is in that folder.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error arose.")] = False,
) -> None:
    """Run the paper's experiments, judge its claims, write the report.

    Trials that are in the folder already are not run again: after an interruption, or to add
    experiments or trials, name the same folder.
    """
    from kappascope import study
    from kappascope.store import Store

    experiments = _chosen(numbers or [], beyond, quick)
    plan = study.plan(experiments, trials)
    store = Store(out)
    with store.lock() as notice:
        for note in (notice, *plan.notes):
            _say(note)
        if fresh:
            store.forget()
        store.begin(plan.study)
        failures = _run(plan, store, Processes(jobs) if jobs else Here())
        _conclude(experiments, plan, store, failures)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="Folder of results.")],
    trials: Annotated[int, typer.Option(min=1, help="How many to run again.")] = 5,
    debug: Annotated[bool, typer.Option("--debug", help="Show where an error arose.")] = False,
) -> None:
    """Run some trials of a folder again, each alone, and compare every bit."""
    from kappascope.store import Refusal, Store

    if not (folder / "units").is_dir():
        raise Refusal(2, str(folder), "holds no results", "name a folder reproduce has filled")
    from kappascope import lab, study

    differing, compared = [], 0
    for block, same in study.verify(lab.discover().values(), Store(folder), trials):
        _tell(f"{'same' if same else 'DIFFERS'}: {_clean(str(block))}")
        compared += 1
        differing += [] if same else [str(block)]
    if not compared:
        raise Refusal(2, str(folder), "holds no results of this version", "run reproduce again")
    if differing:
        wrong = f"{len(differing)} of {compared} trials differ, first {differing[0]}"
        raise Refusal(1, str(folder), wrong, "begin anew with reproduce --fresh")


def _chosen(numbers: Sequence[int], beyond: bool, quick: bool) -> list[Experiment]:
    from kappascope.lab import discover
    from kappascope.store import Refusal

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
    with _progress(todo) as advance, closing(study.run(todo, store, engine)) as ended:
        for done in ended:
            advance(done.item)
            if done.failure:
                failures.append(done)
    return failures


@contextmanager
def _progress(todo: Sequence[Block]) -> Iterator[Callable[[Block], None]]:
    """Bars with the time left on a terminal, now and then a line elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _lines(todo)
        return
    columns = "{task.description}", BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    costs = Counter[str]()
    for block in sorted(todo, key=lambda block: int(block.experiment[1:])):
        costs[block.experiment] += block.cost
    with Progress(*columns, console=console, speed_estimate_period=120) as bars:
        whole = bars.add_task("all", total=costs.total())
        tasks = {name: bars.add_task(name, total=cost) for name, cost in costs.items()}

        def advance(block: Block) -> None:
            bars.advance(tasks[block.experiment], block.cost)
            bars.advance(whole, block.cost)

        yield advance


def _lines(todo: Sequence[Block]) -> Callable[[Block], None]:
    whole, start = sum(block.cost for block in todo), time.monotonic()
    done, said = 0, start

    def advance(block: Block) -> None:
        nonlocal done, said
        done, now = done + block.cost, time.monotonic()
        if now - said > QUIET and done < whole:
            said, left = now, (now - start) * (whole / done - 1)
            _say(f"{done / whole:.0%} of the trials are run, about {left:.0f} s left")

    return advance


def _conclude(
    experiments: Sequence[Experiment], plan: Plan, store: Store, failures: Sequence[Done[Block]]
) -> None:
    """Write everything that is derived from the trials, and say what came out."""
    from kappascope import lab, report, study
    from kappascope.store import Refusal, write

    results = study.gather(plan, store, failures)
    verdicts = lab.verdicts(experiments, results.rows)
    study.publish(results, store, verdicts)
    for name, data in report.files(experiments, results, verdicts):
        (store.folder / name).parent.mkdir(exist_ok=True)
        write(store.folder / name, data)
    _table(experiments, verdicts)
    _tell(f"Report: {_clean(str(store.folder / 'report.html'))}")
    if failed := results.provenance["failed"]:
        first = f"{failed[0]['trials']}: {failed[0]['reason']}"
        wrong = f"{len(failed)} blocks of trials failed, first {first}"
        raise Refusal(3, str(store.folder), wrong, "run the same command to try them again")


def _table(experiments: Sequence[Experiment], verdicts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("experiment", *OUTCOMES, "figures matched")
    for column in table.columns[1:]:
        column.justify = "right"
    names = {one.id: f"{one.number} {one.title}" for one in experiments}
    if any(row["experiment"] == "all" for row in verdicts["claims"]):
        names["all"] = "of several"
    for name, title in names.items():
        claims = [row["verdict"] for row in verdicts["claims"] if row["experiment"] == name]
        figures = [row["matches"] for row in verdicts["figures"] if row["experiment"] == name]
        matched = f"{sum(figures)} of {len(figures)}" if figures else ""
        counts = (str(claims.count(outcome)) for outcome in OUTCOMES)
        table.add_row(title, *counts, matched)
    console = Console()
    with console.capture() as drawn:
        console.print(table)
    _tell(drawn.get().rstrip("\n"))


def _tell(text: str) -> None:
    try:
        typer.echo(text)
    except BrokenPipeError:  # who reads us has enough; what was to be done is done
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    if text:
        typer.echo(_clean(text), err=True)


def _clean(text: str) -> str:
    """Text without the characters that would move a cursor or hide what follows."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _shortened(line: str) -> str:
    """At most as long as an error line may be; the advice at its end stays."""
    advice = line[line.rfind(" (") :] if line.endswith(")") else ""
    room = LONGEST - len(advice)
    if room < LONGEST // 2:
        advice, room = "", LONGEST
    return line if len(line) <= LONGEST else f"{line[: room - 1]}…{advice}"


def _refusal(error: BaseException, arguments: Sequence[str]) -> Refusal:
    """What to say of anything that can end a command early."""
    from kappascope.store import Refusal

    given = " ".join(arguments)
    known: dict[type[BaseException], tuple[int, str, str]] = {
        Interrupted: (getattr(error, "code", 130), "stopped early", "the same command goes on"),
        MemoryError: (5, "out of memory", "use fewer --jobs"),
        ImportError: (5, str(error), "install kappascope with its dependencies"),
        OSError: (5, str(error), "see to it and give the same command again"),
        BaseException: (5, f"{type(error).__name__}: {error}", "a bug; --debug shows where"),
    }
    if isinstance(error, Refusal):
        return error
    if hasattr(error, "format_message"):  # typer's, whichever module it keeps them in
        wrong = str(error.format_message()).rstrip(".")
        return Refusal(4, given, wrong, "see kappascope --help")
    code, wrong, advice = next(known[kind] for kind in known if isinstance(error, kind))
    return Refusal(code, given, wrong, advice)


@contextmanager
def _signals() -> Iterator[None]:
    """Turn the first signal into an exception, so that all is closed; the second ends at once."""
    numbers = (signal.SIGINT, signal.SIGTERM)

    def first(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, lambda number, frame: os._exit(128 + number))
        raise Interrupted(number)

    before = {number: signal.signal(number, first) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(arguments: Sequence[str]) -> int:
    """Do what the arguments say and give the exit code."""
    os.environ.update(ONE_THREAD)  # before numpy and torch are loaded, or it is too late
    command = typer.main.get_command(app)
    with _signals():
        try:
            code = command.main(list(arguments), "kappascope", standalone_mode=False)
            return int(code or 0)
        except SystemExit:  # rich found that nobody reads its help
            return 0
        except BaseException as error:
            if "--debug" in arguments:
                traceback.print_exc()
            refusal = _refusal(error, arguments)
            _say(_shortened(f"kappascope: error: {refusal}"))
            return refusal.code


def main() -> None:
    """Be the command."""
    sys.exit(run(sys.argv[1:]))
