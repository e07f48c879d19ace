"""Experiment 17: low rank, and what the data do not show.

Does gradient descent end at a higher rank than a low-rank target has, or at a lower one? First,
fresh inputs without end: what becomes of the directions that the target does not have. Then fixed
data that leave much of the matrix open, depth 1 to 3: half as many inputs as there are columns, or
every second entry of the matrix. There, and only there, something else than the data must decide.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, nn

from kappascope.lab.claims import Above, Below, Between, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import paths, sheet, spectrum_lines, strips
from kappascope.lab.measures import compared, typical
from kappascope.lab.statistics import Estimate
from kappascope.lab.table import Table
from kappascope.lab.tasks import Batch, Regression, Streams, low_rank, start
from kappascope.lab.training import DeepLinear, descend, last, outcome, rows
from kappascope.matrix.components import Components
from kappascope.matrix.spectra import decomposition
from kappascope.paper.e07_depth import layers

DEPTHS, SIZE = (1, 2, 3), 32
LOOKS = (0, 200, 1000, 5000)  # steps
RANK = 2  # of the targets that fixed data leave open
SMALL = 0.01  # of the start; a low-rank bias needs a small one (Arora et al. 2019)

Part = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Fixed(Batch):
    """The same data at every step, by their gradient."""

    gradient: Part

    def backward(self, model: nn.Module) -> None:
        """Leave the gradient in the layers."""
        weight = model()
        weight.backward(self.gradient(weight.detach()))


def trials(streams: Streams, size: int, data: str) -> Iterator[Rows]:
    """Learn one target at every depth, from one kind of data."""
    for depth in DEPTHS:
        if data == "endless":
            learned = endless(streams, size, depth)
        else:
            learned = fixed(streams, size, depth, data)
        yield from ({**row, "depth": depth} for row in learned)


def endless(streams: Streams, size: int, depth: int) -> Iterator[Rows]:
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


def fixed(streams: Streams, size: int, depth: int, data: str) -> Iterator[Rows]:
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


def unseen(data: str, depth: int) -> Measure:
    """Measure what is lacking of what the data do not show."""
    return typical("unseen", data=data, depth=depth)


def kept(depth: int, epoch: int) -> Measure:
    """Measure what is left of the start in directions that the target does not have."""
    where: Any = {"component": "outside", "data": "endless", "depth": depth, "column": "value"}
    return compared({"epoch": epoch}, {"epoch": 0}, **where)


def rank_ratio(table: Table) -> Estimate:
    """Compare the effective rank after 5,000 steps with the target's."""
    rank = typical("effective_rank", column="value", data="endless", depth=1, epoch=5000)
    return rank(table).map(lambda rank: rank / (SIZE // 4), "ratio")


CLAIMS = (
    Claim(
        "e17.outside",
        "Directions that a low-rank target does not have keep what is left of the start, 0.99^200.",
        "R Q5",
        measures={
            "early": kept(1, 200),
            "late": kept(1, 5000),
            "deep_early": kept(3, 200),
            "deep_late": kept(3, 5000),
        },
        expect={"early": Between(0.125, 0.145)},
        explain="After 200 steps they keep {early:.3f} of the start (n = {early.n}; 0.99^200 = "
        "0.134), after 5,000 {late:.2g}; at depth 3 {deep_early:.2f} and {deep_late:.2g}. At depth "
        "1 what is to be unlearned goes at the rate at which everything is learned.",
        answers=("Q5",),
    ),
    Claim(
        "e17.higher-rank",
        "On low-rank targets SGD converges to a solution of higher effective rank.",
        "R Q5",
        measures={
            "ratio": rank_ratio,
            "error": typical("overall_matrix", data="endless", depth=1, epoch=5000),
        },
        expect={"ratio": Above(1)},
        explain="After 5,000 steps the effective rank is {ratio:.2f} times the target's (n = "
        "{ratio.n}), with an overall error of {error:.2g}. The kappa of such a target is "
        "infinite; the paper's error of about 1.0 comes from the number 1e-10 that it adds "
        "to its denominator.",
        answers=("Section 2, definition", "Q5"),
    ),
    Claim(
        "e17.inputs",
        "With fewer inputs than columns, nothing is learned at any depth of directions that "
        "the inputs do not show.",
        "R Q5; refs 1, 2, 13",
        measures={"lacking": {f"at depth {depth}": unseen("inputs", depth) for depth in DEPTHS}},
        expect={"lacking": Above(0.9)},
        explain="Of the part of the target that the inputs do not show this is lacking: "
        "{lacking:.4g} (n = {lacking.n}).",
        answers=("Code, fresh batches", "Q5"),
    ),
    Claim(
        "e17.completion",
        "With half of the entries shown, depth fills in the others: a bias towards low rank.",
        "R Q5; refs 1, 2, 13",
        measures={
            "three": unseen("entries", 3),
            "two": unseen("entries", 2),
            "one": unseen("entries", 1),
        },
        expect={"three": Below(0.5), "two": Below(0.5), "one": Above(0.9)},
        explain="Of the entries that were not shown this is lacking: {three:.4g} at depth 3, "
        "{two:.4g} at depth 2, {one:.4g} at depth 1 (n = {one.n}).",
        answers=("W7", "Q5"),
    ),
)

PLOT = sheet(
    paths("outside", column="value", split="depth", data="endless",
          title="Outside the target's directions"),
    strips("unseen", "seen", by="depth", data="inputs", title="Half as many inputs as columns"),
    strips("unseen", "seen", by="depth", data="entries", title="Every second entry"),
    spectrum_lines("Singular values, entries, depth 3", data="entries", depth=3),
)  # fmt: skip

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
    plot=PLOT,
    quick={"own": 6},
)
