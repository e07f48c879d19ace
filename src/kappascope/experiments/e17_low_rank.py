"""Experiment 17: low rank, and what the data do not show.

Does gradient descent end at a higher rank than a low-rank target has, or at a lower one? First,
fresh inputs without end: what becomes of the directions that the target does not have. Then fixed
data that leave much of the matrix open, depth 1 to 3: half as many inputs as there are columns, or
every second entry of the matrix. There, and only there, something else than the data must decide.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat

import torch
from torch import Tensor, nn

from kappascope import tasks
from kappascope.components import Components
from kappascope.experiments.e7_amplification import layers
from kappascope.experiments.e17_claims import CLAIMS, DEPTHS, LOOKS, SIZE
from kappascope.figures import paths, sheet, spectrum, strips
from kappascope.lab import Batch, Experiment, grid
from kappascope.networks import DeepLinear
from kappascope.spectra import decomposition
from kappascope.tasks import Regression, Streams, low_rank, start
from kappascope.training import descend, last, outcome, rows

RANK = 2  # of the targets that fixed data leave open
SMALL = 0.01  # of the start; a low-rank bias needs a small one (Arora et al. 2019)


Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fixed(tasks.Batch):
    """The same data at every step, by their gradient."""

    gradient: Part

    def backward(self, model: nn.Module) -> None:
        """Leave the gradient in the layers."""
        weight = model()
        weight.backward(self.gradient(weight.detach()))


def trials(streams: Streams, size: int, data: str) -> Iterator[Batch]:
    """Learn one target at every depth, from one kind of data."""
    for depth in DEPTHS:
        if data == "endless":
            found = endless(streams, size, depth)
        else:
            found = fixed(streams, size, depth, data)
        yield from ({**row, "depth": depth} for row in found)


def endless(streams: Streams, size: int, depth: int) -> Iterator[Batch]:
    """Learn a target of a quarter of the rank, and watch the directions it does not have."""
    target, random = low_rank(streams.random(), size), streams.random(1)
    u, _, vt = decomposition(target)
    beyond = size // 4
    model = DeepLinear(layers(random, depth, size))
    rate, wanted = (0.01 if depth == 1 else 0.005), Components(target)
    for step in descend(model, Regression(target).batches(random), rate, steps=LOOKS[-1]):
        if step.index in LOOKS:
            outside = u[..., beyond:].mT @ step.weight @ vt[..., beyond:, :].mT
            size_of = torch.linalg.matrix_norm(outside)
            yield {"epoch": step.index, "component": "outside", "value": size_of}
            yield from rows(step.weight, wanted, epoch=step.index)


def fixed(streams: Streams, size: int, depth: int, data: str) -> Iterator[Batch]:
    """Learn a target of rank 2 from data that leave most of it open."""
    random, again = streams.random(), streams.random(1)
    target = random.normal(size, RANK) @ random.normal(RANK, size) / (size * RANK) ** 0.5
    inputs, seen = random.normal(size, size // 2), (random.normal(size, size) > 0).to(target)
    if data == "inputs":
        basis, moments = torch.linalg.qr(inputs).Q, 2 / size * inputs @ inputs.mT
        shown: Part = lambda w: (w @ basis) @ basis.mT  # noqa: E731 - one of a pair
        slope: Part = lambda w: (w - target) @ moments  # noqa: E731 - the other
    else:
        shown, slope = (lambda w: w * seen), (lambda w: (w - target) * seen)
    model = DeepLinear([start(again, size, SMALL ** (1 / depth)) for _ in range(depth)])
    rate = 0.02 if depth == 1 else 0.01  # the largest layers of a product need smaller steps
    step = last(descend(model, repeat(Fixed(slope)), rate, steps=3000))
    lacking, seen_of_it = step.weight - target, shown(target)
    for name, part, of in (
        ("seen", shown(lacking), seen_of_it),
        ("unseen", lacking - shown(lacking), target - seen_of_it),
    ):
        error = torch.linalg.matrix_norm(part) / torch.linalg.matrix_norm(of)
        yield {"component": name, "error": error}
    entropy = Components(step.weight).entropy_rank
    yield {"component": "entropy_rank", "value": entropy}
    yield from outcome(step.weight, target)


EXPERIMENT = Experiment(
    number=17,
    title="Low rank",
    section="review Q5",
    question=__doc__,
    grid=grid(size=(SIZE,), data=("endless", "inputs", "entries")),
    trials=trials,
    own=32,
    effort=60.0,
    claims=CLAIMS,
    plot=sheet(
        paths("outside", column="value", split="depth", data="endless",
              title="Outside the target's directions"),
        strips("unseen", "seen", by="depth", data="inputs", title="Half as many inputs as columns"),
        strips("unseen", "seen", by="depth", data="entries", title="Every second entry"),
        spectrum("Singular values, entries, depth 3", data="entries", depth=3),
    ),
    quick={"own": 6},
)  # fmt: skip
