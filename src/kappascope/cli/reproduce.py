"""``kappascope reproduce``: the experiments of the paper and those that answer its review."""

from __future__ import annotations

from typing import Annotated

import typer

from kappascope.cli._laboratory import conclude, conclude_shard, locked, run_missing, start_engine
from kappascope.cli._options import Debug, EngineName, Fresh, Out, ShardOption
from kappascope.refusal import Refusal
from kappascope.system.workers import CORES


def reproduce(
    numbers: Annotated[
        list[int] | None,
        typer.Argument(
            metavar="[1 4 7 ...]", help="The numbers of experiments. By default the paper's nine."
        ),
    ] = None,
    *,
    beyond: Annotated[
        bool,
        typer.Option("--beyond", help="Run also the experiments that answer the paper's review."),
    ] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Compare printed figures with ours and decide a dozen claims in half a minute.",
        ),
    ] = False,
    trials: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1_000_000,
            help="The number of trials of each setting, with random numbers of our own.",
        ),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=0, max=1024, help="The number of processes. 0 runs the trials in this one."
        ),
    ] = CORES,
    engine: EngineName = "local",
    shard: ShardOption = None,
    out: Out = "kappascope-report",
    fresh: Fresh = False,
    debug: Debug = False,
) -> None:
    """Run the paper's experiments, judge its claims, write the report.

    Trials that are in the folder already are not run again. So name the same folder after an
    interruption, or to add experiments or trials.

    For example:
      kappascope reproduce --quick
      kappascope reproduce 1 4 7 --trials 5000 --jobs 8 --out study
      kappascope reproduce --beyond
    """
    place = start_engine(jobs, engine)
    from kappascope.lab import experiment, runs
    from kappascope.system.store import Shard, Store

    every = experiment.discover()
    for number in numbers or ():
        if number not in every:
            there = ", ".join(map(str, every))
            raise Refusal(4, f"experiment {number}", "there is none", f"choose from {there}")
    further = {number for number in every if number > experiment.NINE}
    wanted = set(numbers or set(every) - further) | (further if beyond else set())
    experiments = [every[number] for number in sorted(wanted)]
    if quick:
        experiments = [each.quickly() for each in experiments]
    plan, store = runs.plan_runs(experiments, trials), Store.at(out)
    part = Shard.of(shard) if shard else None
    with locked(store, plan, fresh):
        failures = run_missing(plan, store, place, part)
        if part:
            conclude_shard(plan, store, failures, part)
            return
        conclude(experiments, plan, store, failures, place, quick=quick)
