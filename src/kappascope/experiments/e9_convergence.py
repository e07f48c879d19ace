"""Experiment 9: long training (Section 4.9).

Does kappa's error vanish with longer training? 1000 steps, looked at after 1, 10 and every
twentieth. Whether what remains is a matter of speed is tested by interventions (``e9_speed``).
"""

from collections.abc import Iterator

from kappascope.components import Components
from kappascope.experiments import e9_speed as speed
from kappascope.experiments.e9_claims import CLAIMS
from kappascope.figures import paths, sheet, spectrum
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import Where, printed
from kappascope.networks import Matrix
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import descend, outcome, rows


def trials(streams: Streams, size: int, intervention: str | None = None) -> Iterator[Batch]:
    """Learn one target for long."""
    if intervention:
        yield from speed.longer(streams, size, intervention)
        return
    random = streams.random()
    target = Components(heterogeneous(random, size))
    model, batches = Matrix(start(random, size)), Regression(target.matrix).batches(random)
    for step in descend(model, batches, steps=1000):
        if step.index in (1, 10) or (step.index and step.index % 20 == 0):
            yield from rows(step.weight, target, epoch=step.index)
    yield from outcome(step.weight, target)


TEN: Where = {"size": 128, "seed": range(10)}
FIGURES = (
    printed("e9/row_norms/epoch=1/mean", "0.93", "P 4.9", **TEN),
    printed("e9/row_norms/epoch=1000/mean", "6.6e-5", "P abstract, 4.9", **TEN),
    printed("e9/condition_number/epoch=1/mean", "0.75", "P 4.9", **TEN),
    printed("e9/condition_number/epoch=1000/mean", "0.017", "P abstract, 4.9", **TEN),
    printed("e9/condition_number/epoch=1/ratio", "0.8x", "P 4.9", **TEN),
    printed("e9/condition_number/epoch=1000/ratio", "250x", "P abstract, 4.9", **TEN),
)

EXPERIMENT = Experiment(
    number=9,
    title="Long training",
    section="4.9",
    question=__doc__,
    grid=grid(size=(128,)) + speed.GRID,
    trials=trials,
    paper=lambda setting: 0 if "intervention" in setting else 10,
    own=lambda setting: speed.TRIALS.get(str(setting.get("intervention")), 32),
    effort=6.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=sheet(
        paths("condition_number", "row_norms", size=128, stream="paper"),
        paths("condition_number / row_norms", size=128, stream="paper"),
        speed.PANEL,
        spectrum("Singular values after 1000 steps", size=128),
    ),
    quick={
        "paper": lambda setting: 0 if "intervention" in setting else 1,
        "own": lambda setting: 0 if "intervention" in setting else 6,  # 6 give an interval
    },
)
