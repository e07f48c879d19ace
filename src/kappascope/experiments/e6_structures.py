"""Experiment 6: multipliers across structures (Section 4.6).

Do multipliers help more for some structures of the target than for others? The paper's two arms
share the target alone: ``pairing`` is "paper" for that, and "paired" where they share the start
and the batches too. It does not say what its blocks are, so there are several kinds of them.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from kappascope.experiments.e6_gains import CLAIMS
from kappascope.figures import arms, sheet, strips
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import printed
from kappascope.networks import Matrix, Multiplied
from kappascope.tasks import STRUCTURES, Random, Regression, Streams, Structure, start
from kappascope.training import descend, floored, last, outcome, together


def blocks(random: Random, size: int, scales: Sequence[float]) -> Tensor:
    """Gaussian blocks on the diagonal, each with a scale in units of one over its root of size."""
    b = size // len(scales)
    drawn = [scale * b**-0.5 * random.normal(b, b) for scale in scales]
    return torch.stack([torch.block_diag(*trial) for trial in zip(*drawn, strict=True)])


TARGETS: dict[str, Structure] = {
    **STRUCTURES,
    "equal blocks": partial(blocks, scales=[2**0.5] * 4),  # as large as its other targets
    "growing blocks": partial(blocks, scales=[i + 0.5 for i in range(8)]),  # prints its 93 % too
}


def trials(streams: Streams, structure: str, size: int) -> Iterator[Batch]:
    """Learn targets of one structure with and without multipliers."""
    target = TARGETS[structure](streams.random(), size)
    task, random, other = Regression(target), streams.random(1), streams.random(1)
    origin = start(random, size)
    both = {
        "standard": lambda batches: descend(Matrix(origin), batches),
        "multipliers": lambda batches: descend(Multiplied(origin), batches),
    }
    pairings = {"paired": last(together(both, task.batches(random)))}
    if streams.name == "paper":
        other.normal(size, size)  # thrown away in this arm alone: its start and batches are others
        alone = last(descend(Matrix(start(other, size)), task.batches(other)))
        pairings["paper"] = {**pairings["paired"], "standard": alone}
    for pairing, steps in pairings.items():
        for strategy, step in steps.items():
            columns = {"strategy": strategy, "pairing": pairing}
            yield from outcome(step.weight, target, **columns)
            yield from floored(step.weight, target, **columns)


figure = partial(printed, pairing="paper", seed=range(15))
gain = partial(figure, strategy="multipliers")
ORDER = ("standard", "multipliers")
side = partial(arms, by="strategy", strategy=ORDER, stream="paper", pairing="paired")
SHOWN = ("row_norms", "singular_values", "overall_matrix", "condition_number")

EXPERIMENT = Experiment(
    number=6,
    title="Multipliers across structures",
    section="4.6",
    question=__doc__,
    grid=grid(structure=tuple(TARGETS), size=(64,)),
    trials=trials,
    paper=lambda setting: 15 if setting["structure"] in STRUCTURES else 0,
    own=lambda setting: 192 if setting["structure"] in STRUCTURES else 64,
    effort=3.0,
    figures=(
        gain("e6/row_norms/structure=low-rank/improvement", "29 %", "P 4.6"),
        gain(
            "e6/row_norms/structure=block-diagonal/improvement",
            "93 %",
            "P 4.6; of blocks chosen because they print it",
        ),
        figure(
            "e6/floored_condition_number/structure=low-rank/mean",
            "~1.0",
            "R Q5; kappa with 1e-10 added to its denominator",
            strategy="standard",
        ),
    ),
    claims=CLAIMS,
    plot=sheet(
        side(*SHOWN[:3], structure="low-rank", title="Low-rank targets: κ is infinite"),
        side(*SHOWN, structure="block-diagonal", title="Block-diagonal targets"),
        side(*SHOWN, structure="heterogeneous", title="Heterogeneous targets"),
        strips(
            "row_norms",
            by="structure",
            stream="own",
            strategy="multipliers",
            title="With multipliers, by structure",
        ),
    ),
    quick={"paper": lambda setting: 4 if setting["structure"] in STRUCTURES else 0, "own": 8},
)
