"""Run tiny experiments in one call, or the command line with them in place of the real ones."""

import hashlib
import sys
from pathlib import Path

import tiny_experiments
from kappascope.cli import app
from kappascope.lab import experiment as lab
from kappascope.lab import runs
from kappascope.lab.experiment import Experiment
from kappascope.system.store import Store
from kappascope.system.workers import Engine, Here

# not this file as a script: no worker imports from the folder of one
COMMAND = (
    sys.executable,
    "-c",
    f"import sys; sys.path[0] = {str(Path(__file__).parent)!r}; import tiny_runs; tiny_runs.main()",
)


def complete(experiment: Experiment, folder: Path, engine: Engine | None = None) -> runs.Results:
    """Run what is missing of an experiment and publish it."""
    plan, store = runs.plan_runs([experiment]), Store(folder)
    with store.lock():
        store.begin(plan.study)
        done = list(runs.run(runs.survey(plan, store)[0], store, engine or Here()))
        results = runs.gather(plan, store, [one for one in done if one.failure])
        runs.publish(results, store, lab.verdicts([experiment], results.rows))
    return results


def sha(folder: Path) -> str:
    return hashlib.sha256((folder / "trials.parquet").read_bytes()).hexdigest()


def main() -> None:
    """Run the command line with tiny experiments."""
    lab.discover = lambda: {
        e.number: e for e in (tiny_experiments.TOY, tiny_experiments.SLOW, tiny_experiments.BAD)
    }
    lab.studies = lambda: {
        one.name: one for one in (tiny_experiments.STUDY, tiny_experiments.LASTING)
    }
    app.main()
