"""``kappascope study``: train real networks, or look into pretrained ones."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kappascope.cli._laboratory import (
    conclude,
    conclude_shard,
    locked,
    run_missing,
    set_text,
    start_engine,
)
from kappascope.cli._options import Debug, EngineName, Fresh, Out, ShardOption
from kappascope.cli._terminal import say, waiting
from kappascope.refusal import Refusal
from kappascope.system.workers import CORES

if TYPE_CHECKING:  # what needs torch is loaded when there is work
    from kappascope.lab.experiment import Study


def study(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="[NAME]",
            help="teacher, digits, gpt, pretrained or unlearned. By default all of them.",
        ),
    ] = None,
    *,
    quick: Annotated[
        bool, typer.Option("--quick", help="Run few trials, for about a minute.")
    ] = False,
    text: Annotated[Path | None, typer.Option(help="Train the character GPT on this text.")] = None,
    jobs: Annotated[
        int, typer.Option(min=0, max=1024, help="The number of processes. 0 trains in this one.")
    ] = CORES,
    engine: EngineName = "local",
    shard: ShardOption = None,
    out: Out = "kappascope-study",
    fresh: Fresh = False,
    debug: Debug = False,
) -> None:
    """Ask the paper's questions of real networks, trained here or pretrained.

    After an interruption name the same folder: training goes on where it stopped.

    For example:
      kappascope study digits --quick
      kappascope study gpt --text my.txt
    """
    set_text(text)
    place = start_engine(jobs, engine)
    from kappascope.lab import downloads, experiment, runs
    from kappascope.system.store import Shard, Store

    every = experiment.studies()
    if name and name not in every:
        raise Refusal(4, f"study {name}", "there is none", f"choose from {', '.join(every)}")
    wanted = [every[name]] if name else list(every.values())
    if text:
        label = downloads.label_of(text)
        wanted = [each.on(label) for each in wanted]
        if not any(label == setting.get("text") for each in wanted for setting in each.grid):
            raise Refusal(4, f"--text {text}", f"study {name} reads no text", "leave it out")
    if quick:
        wanted = [each.quickly() for each in wanted]
    studies = _with_downloads(wanted)
    plan, store = runs.plan_runs(studies), Store.at(out)
    part = Shard.of(shard) if shard else None
    with locked(store, plan, fresh):
        failures = run_missing(plan, store, place, part)
        if part and runs.survey(plan, store)[0]:  # what comes next depends on all of this
            conclude_shard(plan, store, failures, part)
            return
        # now that the first stage is there, each study says what comes next
        rows = runs.gather(plan, store).rows
        studies = [each.continued(rows.where(experiment=each.id)) for each in studies]
        plan = runs.plan_runs(studies)
        failures = run_missing(plan, store, place, part)
        if part:
            conclude_shard(plan, store, failures, part)
            return
        conclude(studies, plan, store, failures, place)
    ran = {each.name for each in studies}
    if absent := [each.name for each in wanted if each.name not in ran]:
        wrong = f"left out, for what {'they need' if len(absent) > 1 else 'it needs'} is not here"
        advice = "give the same command again where pip and npm can fetch it"
        raise Refusal(3, f"study {', '.join(absent)}", wrong, advice)


def _with_downloads(studies: Sequence[Study]) -> list[Study]:
    """Fetch what the studies need; keep those that have it all, and say what the others lack."""
    from kappascope.lab import downloads

    refused: dict[str, Refusal] = {}
    for name in dict.fromkeys(name for each in studies for name in each.downloads):
        try:
            with waiting(f"Fetching {name}"):
                downloads.fetch(name)
        except Refusal as refusal:
            refused[name] = refusal
    ready = [each for each in studies if not refused.keys() & set(each.downloads)]
    if not ready:
        raise next(iter(refused.values()))
    for reason in refused.values():
        say(str(reason))
    return ready
