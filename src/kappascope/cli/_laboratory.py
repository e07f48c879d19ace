"""What the commands of the laboratory share: start, run what is missing, conclude and show."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kappascope.cli._terminal import announce, counted, draw, loading, progress, say, tell, waiting
from kappascope.refusal import Refusal
from kappascope.system.cluster import Cluster, engine_of
from kappascope.system.extras import optional
from kappascope.system.store import Shard, Store
from kappascope.system.workers import CORES, Done, Engine, Here, Processes
from kappascope.text import Record, clean, plural, ruled_table

if TYPE_CHECKING:  # what needs torch is loaded when there is work
    from kappascope.lab.experiment import Exhibit, Experiment
    from kappascope.lab.runs import Block, RunPlan

WORKER_MODULES = (  # torch's optimizers load its compiler, which takes a second
    "torch._dynamo", "kappascope.lab.drawing", "matplotlib.figure", "kappascope.lab.runs",
    "kappascope.lab.report",
)  # fmt: skip
OWN_MODULES = ("scipy.stats", "kappascope.lab.drawing", "matplotlib.figure", "kappascope.lab.runs")


def require_laboratory() -> None:
    """Refuse to go on without the packages that the laboratory alone needs."""
    optional("pyarrow", "lab")
    optional("matplotlib", "lab")


def start_engine(jobs: int, name: str = "local") -> Processes | Cluster | Here:
    """Start the place where trials run; it and this process load their modules at one time."""
    require_laboratory()
    if not jobs and name != "local":
        raise Refusal(
            4, f"--engine {name}", "--jobs 0 is this process alone", "leave one of them out"
        )
    engine = engine_of(name, Processes(jobs, loaded=WORKER_MODULES), say) if jobs else Here()
    if not isinstance(engine, Here):
        engine.warm()
    with loading():
        for module in OWN_MODULES:
            import_module(module)
    return engine


def set_text(text: Path | None) -> None:
    """Name the text that a study trains on to all workers, which inherit the environment."""
    if text:
        os.environ["KAPPASCOPE_TEXT"] = str(text.absolute())


def every_experiment() -> list[Experiment]:
    """List all experiments of the paper and all studies."""
    from kappascope.lab import experiment

    return [*experiment.discover().values(), *experiment.studies().values()]


@contextmanager
def locked(store: Store, plan: RunPlan, fresh: bool) -> Iterator[None]:
    """Lock the folder of results for a plan; another process is refused meanwhile."""
    with store.lock() as notice:
        for note in (notice, *plan.notes):
            say(note)
        if fresh:
            store.forget()
        store.begin(plan.study)
        yield


def run_missing(
    plan: RunPlan, store: Store, engine: Engine, shard: Shard | None = None
) -> list[Done[Block]]:
    """Run the trials that the folder lacks, show the progress, and give those that failed.

    Of several shards only one's.
    """
    from kappascope.lab import runs

    blocks, damaged = runs.survey(plan, store)
    if damaged:
        count = plural(len(damaged), "stored unit is", "stored units are")
        say(f"{store}: {count} damaged and run again, first {damaged[0]}")
    if shard:
        blocks = runs.dealt(plan, blocks, shard)
    if not isinstance(engine, Cluster):  # whose machines nobody knows
        at_once = min(engine.jobs, CORES) if isinstance(engine, Processes) else 1
        trials = plural(sum(len(block.seeds) for block in blocks), "trial")
        announce(f"{trials} to run", sum(block.cost for block in blocks) / 1000 / at_once)
    failures = []
    parts = [(block.experiment, float(block.cost)) for block in blocks]
    with progress(parts) as advance, closing(runs.run(blocks, store, engine)) as ended:
        for done in ended:
            advance((done.item.experiment, done.item.cost))
            if done.failure:
                failures.append(done)
    return failures


def conclude_shard(
    plan: RunPlan, store: Store, failures: Sequence[Done[Block]], shard: Shard
) -> None:
    """Say what is in the folder of a shard, and what comes next."""
    from kappascope.lab import runs

    missing = sum(len(block.seeds) for block in runs.survey(plan, store)[0])
    trials = sum(len(block.seeds) for block in plan.blocks)
    told = f"Shard {shard}: {trials - missing} of {trials} trials are in {clean(str(store))}."
    tell(f"{told} When all shards are done: kappascope join")
    if failures:
        first = f"{failures[0].item}: {failures[0].failure}"
        wrong = f"{plural(len(failures), 'block')} of trials failed, first {first}"
        raise Refusal(3, str(store), wrong, "run the same command to try them again")


def conclude(
    experiments: Sequence[Experiment],
    plan: RunPlan,
    store: Store,
    failures: Sequence[Done[Block]],
    engine: Engine,
    *,
    quick: bool = False,
) -> None:
    """Write everything that is derived from the trials, and show what came out.

    Of a quick run that is what few trials can decide, and the printed figures beside ours.
    """
    from kappascope.lab import experiment, report, runs
    from kappascope.paper.article import ARTICLE

    with waiting("Reading the trials"):
        results = runs.gather(plan, store, failures)
    judged = counted("judged", experiments, len(experiments))
    verdicts = experiment.verdicts(judged, results.rows)
    with waiting("Storing the verdicts"):
        runs.publish(results, store, verdicts)
    drawn_by = engine.worker if isinstance(engine, Cluster) else engine
    files = report.files(experiments, results, verdicts, drawn_by, ARTICLE, counted=counted)
    for name, data in files:
        store.write(name, data)
    if quick:
        _show_decided(verdicts)
    else:
        _show_verdicts(experiments, verdicts)
    for each in experiments:
        rows = results.everything.where(experiment=each.id)
        if tables := list(report.exhibits(each, rows)):
            _show_exhibit(tables[0], len(tables) - 1)
    tell(f"Report: {clean(str(store))}/report.html")
    if failed := results.provenance["failed"]:
        first = f"{failed[0]['trials']}: {failed[0]['reason']}"
        wrong = f"{plural(len(failed), 'block')} of trials failed, first {first}"
        raise Refusal(3, str(store), wrong, "run the same command to try them again")


def write_files(folder: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write files below a folder; each has a path there and its bytes."""
    for name, data in files:
        Store(folder).write(name, data)


def _show_verdicts(experiments: Sequence[Experiment], verdicts: dict[str, Any]) -> None:
    """Print how many claims of each experiment have which verdict."""
    from kappascope.lab.verdicts import OUTCOMES, unmeasured, verdict_counts

    compared = ["figures matched"] if verdicts["figures"] else []
    columns = "experiment", *OUTCOMES, *compared
    table = ruled_table(*columns, numbers=range(1, len(columns)))
    headings = {each.id: each.heading for each in experiments}
    if any(row["experiment"] == "all" for row in verdicts["claims"]):
        headings["all"] = "of several"
    for name, heading in headings.items():
        outcomes = [row["verdict"] for row in verdicts["claims"] if row["experiment"] == name]
        figures = [row for row in verdicts["figures"] if row["experiment"] == name]
        matches = [row["matches"] for row in figures if not unmeasured(row)]
        matched = f"{sum(matches)} of {len(matches)}" if matches else ""
        if figures and not matches:
            matched = "not measured"
        counts = (str(outcomes.count(outcome)) for outcome in OUTCOMES)
        table.add_row(heading, *counts, *([matched] if compared else []))
    draw(table)
    if verdicts["claims"]:
        tell(verdict_counts(verdicts["claims"]))


def _show_decided(verdicts: dict[str, Any]) -> None:
    """Print printed figures beside ours, the claims that are decided, and how many need more."""
    from rich.text import Text

    from kappascope.lab.verdicts import DECIDED, failures_first, measured, unmeasured

    compared = [row for row in verdicts["figures"] if not unmeasured(row)]
    if compared:
        table = ruled_table("figure", "the paper prints", "we get", "match", numbers=(1, 2))
        for row in _prominent(compared):
            match = "yes" if row["matches"] else "no"
            what = row["what"].rpartition(" (")[0].replace("condition number", "κ")
            cells = f"{row['experiment']}: {what}", row["printed"], measured(row, 4), match
            table.add_row(*(Text(clean(cell)) for cell in cells))
        draw(table)
        matched = sum(row["matches"] for row in compared)
        left = len(verdicts["figures"]) - len(compared)
        more = f"; {plural(left, 'needs', 'need')} the full run" if left else ""
        told = f"{matched} of {plural(len(compared), 'printed figure')} come out as printed"
        tell(f"{told}{more}. The report has all of them.")
    decided = [row for row in verdicts["claims"] if row["verdict"] in DECIDED]
    if decided:
        table = ruled_table("claim", "verdict", "the paper says")
        for row in failures_first(decided):
            table.add_row(*(Text(clean(row[name])) for name in ("id", "verdict", "sentence")))
        draw(table)
    left = len(verdicts["claims"]) - len(decided)
    tell(
        f"{plural(len(decided), 'claim is', 'claims are')} decided; "
        f"{plural(left, 'needs', 'need')} the full run: kappascope reproduce"
    )


def _prominent(figures: Sequence[Record]) -> list[Record]:
    """Choose the figures of the abstract, and the first of each experiment that has none there."""
    chosen = [row for row in figures if "abstract" in row["what"]]
    known = {row["experiment"] for row in chosen}
    first = {row["experiment"]: row for row in reversed(figures) if row["experiment"] not in known}
    kept = [row["id"] for row in (*chosen, *first.values())]
    return [row for row in figures if row["id"] in kept]


def _show_exhibit(exhibit: Exhibit, more: int) -> None:
    """Print a table, and how many more there are in the report."""
    from rich.text import Text

    if exhibit.rows:
        table = ruled_table(*exhibit.columns)
        table.title, table.title_justify = clean(exhibit.title), "left"
        for cells in exhibit.rows:
            table.add_row(*(Text(clean(text)) for text in cells))
        draw(table)
    further = f"{plural(more, 'more table is', 'more tables are')} in the report."
    tell(clean(" ".join([exhibit.note, further] if more else [exhibit.note])))
