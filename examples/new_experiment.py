"""Ask a question of your own in the laboratory: trials, a claim, a verdict.

It needs ``pip install 'kappascope[lab]'``.
"""

from collections.abc import Iterator
from pathlib import Path

from kappascope.lab import experiment
from kappascope.lab.claims import Below, Claim
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.measures import typical
from kappascope.lab.runs import gather, plan_runs, run
from kappascope.lab.tasks import Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, descend, outcome
from kappascope.matrix.components import Components
from kappascope.system.store import Store
from kappascope.system.workers import Here


def trials(streams: Streams, size: int) -> Iterator[Rows]:
    """Learn one target in 200 steps and look at the end."""
    random = streams.random()
    target = Components(heterogeneous(random, size))
    model = Matrix(start(random, size))
    for step in descend(model, Regression(target.matrix).batches(random)):
        if not step.batch:  # the last one
            yield from outcome(step.weight, target, epoch=step.index)


CLAIM = Claim(
    "e99.norms", "Row norms are learned to 20 %.", "this example",
    measures={"error": typical("row_norms")},
    expect={"error": Below(0.2)},
    explain="The median error of row norms is {error:.2f}.",
)  # fmt: skip
EXPERIMENT = Experiment(
    99, "An example", "none", "Are row norms learned?", grid(size=(16,)), trials, own=32,
    claims=(CLAIM,),
)  # fmt: skip

store, plan = Store(Path("my-report")), plan_runs([EXPERIMENT])
with store.lock():
    failed = [done for done in run(plan.blocks, store, Here()) if done.failure]
verdicts = experiment.verdicts([EXPERIMENT], gather(plan, store).rows)
(judged,) = verdicts["claims"]

assert not failed and judged["verdict"] == "holds", judged
print(judged["id"], judged["verdict"], "-", judged["explanation"])
