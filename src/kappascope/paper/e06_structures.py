"""Experiment 6: multipliers across structures (Section 4.6).

Do multipliers help more for some structures of the target than for others? The paper's two arms
share the target alone: ``pairing`` is "paper" for that, and "paired" where they share the start
and the batches too. It does not say what its blocks are, so there are several kinds of them.
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from kappascope.corrections import scaled
from kappascope.lab.claims import Above, Between, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import arms, sheet, strips
from kappascope.lab.measures import (
    KAPPA,
    LOG_KAPPA,
    ROW_NORMS,
    Where,
    improvement,
    printed,
    select,
    typical,
)
from kappascope.lab.statistics import Estimate, paired_difference, proportion
from kappascope.lab.table import Table
from kappascope.lab.tasks import STRUCTURES, Random, Regression, Streams, Structure, start
from kappascope.lab.training import Matrix, descend, floored, last, outcome, together


def blocks(random: Random, size: int, scales: Sequence[float]) -> Tensor:
    """Draw Gaussian blocks on the diagonal, each with a scale in units of 1 / root of its size."""
    b = size // len(scales)
    drawn = [scale * b**-0.5 * random.normal(b, b) for scale in scales]
    return torch.stack([torch.block_diag(*trial) for trial in zip(*drawn, strict=True)])


class Multiplied(Matrix):
    """A stack of matrices ``diag(r) W diag(c)`` whose factors start at one and are learned too."""

    def __init__(self, start: Float[Tensor, "trials out in"]) -> None:
        super().__init__(start)
        self.rows = nn.Parameter(torch.ones_like(start[..., 0]))
        self.columns = nn.Parameter(torch.ones_like(start[..., 0, :]))

    def forward(self) -> Float[Tensor, "trials out in"]:
        """Return the matrices with their factors applied."""
        return scaled(self.weight, self.rows, self.columns)


TARGETS: dict[str, Structure] = {
    **STRUCTURES,
    "equal blocks": partial(blocks, scales=[2**0.5] * 4),  # as large as its other targets
    "growing blocks": partial(blocks, scales=[i + 0.5 for i in range(8)]),  # prints its 93 % too
}


def trials(streams: Streams, structure: str, size: int) -> Iterator[Rows]:
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
FIGURES = (
    figure("e6/row_norms/structure=low-rank/improvement", "29 %", "P 4.6", strategy="multipliers"),
    figure(
        "e6/row_norms/structure=block-diagonal/improvement",
        "93 %",
        "P 4.6; of blocks chosen because they print it",
        strategy="multipliers",
    ),
    figure(
        "e6/floored_condition_number/structure=low-rank/mean",
        "~1.0",
        "R Q5; kappa with 1e-10 added to its denominator",
        strategy="standard",
    ),
)

MULTIPLIERS, STANDARD = {"strategy": "multipliers"}, {"strategy": "standard"}
gain = partial(improvement, MULTIPLIERS, STANDARD, pairing="paired")
extent = partial(typical, "frobenius_norm", column="target", **STANDARD)


def across(*measures: Measure) -> Measure:
    """Measure from the lowest end of several intervals to the highest; nobody knows which is meant.

    The value is the first one's, and n the smallest.
    """

    def measure(rows: Table) -> Estimate:
        estimates = [each(rows) for each in measures]
        ends = [end for each in estimates for end in each.interval or (-np.inf, np.inf)]
        n = min(each.n for each in estimates)
        return Estimate(estimates[0].value, min(ends), max(ends), n, "improvement in per cent")

    return measure


def lead(structure: str) -> Measure:
    """Measure by how many percentage points row norms gain more than log kappa, trial by trial."""

    def measure(rows: Table) -> Estimate:
        chosen = select(rows, stream="own", pairing="paired", structure=structure)
        gains = []
        for component in ROW_NORMS, LOG_KAPPA:
            errors = chosen.where(component=component)
            ours, theirs = errors.where(**MULTIPLIERS).paired(errors.where(**STANDARD))
            gains.append(100 * (1 - ours / theirs))
        return paired_difference(*gains)

    return measure


def same(
    column: str, ours_where: dict[str, str], theirs_where: dict[str, str], **where: str
) -> Measure:
    """Measure in how many of the paper's trials two arms have the same number in a column."""

    def measure(rows: Table) -> Estimate:
        chosen = select(rows, stream="paper", **where).by("structure").values()
        pairs = [
            part.where(**ours_where).paired(part.where(**theirs_where), column) for part in chosen
        ]
        ours, theirs = np.concatenate(pairs, axis=1)
        return proportion(int((ours == theirs).sum()), ours.size)

    return measure


def block_gain(pairing: str, component: str) -> Measure:
    """Measure what multipliers gain on the paper's block-diagonal trials, paired or as it did."""
    where: Where = {"stream": "paper", "structure": "block-diagonal"}
    return improvement(MULTIPLIERS, STANDARD, **where, pairing=pairing, component=component)


rows_gain = partial(gain, component=ROW_NORMS)
KINDS = {"drawn": "block-diagonal", "equal": "equal blocks", "growing": "growing blocks"}

CLAIMS = (
    Claim(
        "e6.block",
        "Block-diagonal targets gain 93 % from multipliers.",
        "P 4.6",
        measures={
            "any_kind": across(*(rows_gain(structure=name) for name in KINDS.values())),
            "gain": {kind: rows_gain(structure=name) for kind, name in KINDS.items()},
            "norm": {kind: extent(structure=name) for kind, name in KINDS.items()},
            "drawn_error": typical(ROW_NORMS, structure=KINDS["drawn"], **STANDARD),
            "equal_error": typical(ROW_NORMS, structure=KINDS["equal"], **STANDARD),
        },
        expect={"any_kind": Between(84, 99)},
        explain="The paper does not say what its blocks are, and they decide: four blocks of "
        "log-normal scale gain {gain[drawn]:.1f} %, eight of growing scale {gain[growing]:.1f} %, "
        "four equal ones {gain[equal]:.1f} %. The first are larger than the last (Frobenius norm "
        "{norm[drawn].value:.0f}, {norm[growing].value:.0f} and {norm[equal].value:.0f} in the "
        "median), while plain SGD is left with an error of {drawn_error.value:.3f} on the first "
        "and {equal_error.value:.3f} on the last.",
        answers=("Section 4, layer types",),
    ),
    Claim(
        "e6.low-rank",
        "Low-rank targets gain only 29 %.",
        "P 4.6",
        measures={
            "low_rank": rows_gain(structure="low-rank"),
            "low_rank_norm": extent(structure="low-rank"),
            "full_rank_norm": extent(structure="heterogeneous"),
            "full_rank": rows_gain(structure="heterogeneous"),
        },
        expect={"low_rank": Between(26, 32)},
        explain="With start and batches shared the row norms gain {low_rank:.1f} % (n = "
        "{low_rank.n}). This target, the product of two Gaussian factors of rank 16, is one of "
        "several that print 29 %; its Frobenius norm is {low_rank_norm.value:.1f} in the median, "
        "against {full_rank_norm.value:.1f} of a heterogeneous target, which gains "
        "{full_rank:.1f} %.",
        answers=("Section 4, layer types",),
    ),
    Claim(
        "e6.kappa-less",
        "For all structures kappa gains less from multipliers than norms do.",
        "P 4.6",
        measures={
            "heterogeneous": lead("heterogeneous"),
            "blocks": lead("block-diagonal"),
            "heterogeneous_kappa": gain(structure="heterogeneous", component=LOG_KAPPA),
            "blocks_kappa": gain(structure="block-diagonal", component=LOG_KAPPA),
        },
        expect={"heterogeneous": Above(0), "blocks": Above(0)},
        explain="The row norms' gain exceeds that of |log kappa - log kappa*| by "
        "{heterogeneous:.0f} percentage points on heterogeneous targets and {blocks:.0f} on "
        "block-diagonal ones, the median over {heterogeneous.n} and {blocks.n} trials. Kappa "
        "itself gains {heterogeneous_kappa:.0f} % and {blocks_kappa:.0f} %. Low-rank targets are "
        "no part of this: their kappa is infinite.",
        answers=("Section 3, components",),
    ),
    Claim(
        "e6.same-target",
        "The comparison is on the same target for both conditions (corrected).",
        "P 4.6; R W10",
        measures={
            "target": same("target", STANDARD, MULTIPLIERS, pairing="paper",
                           component="frobenius_norm"),
            "end": same("error", {"pairing": "paper"}, {"pairing": "paired"},
                        component=ROW_NORMS, **STANDARD),
            "rows_paper": block_gain("paper", ROW_NORMS),
            "rows_paired": block_gain("paired", ROW_NORMS),
            "kappa_paper": block_gain("paper", LOG_KAPPA),
            "kappa_paired": block_gain("paired", LOG_KAPPA),
        },
        expect={"target": Above(0.7)},
        explain="The target is the same in {target.value:.0%} of {target.n} trials of the "
        "recovered protocol. Start and batches are not: given those of the other arm, plain SGD "
        "ends with the same row norms in {end.value:.0%}. On block-diagonal targets the row norms' "
        "gain is {rows_paper:.1f} % as the paper compares and {rows_paired:.1f} % with both "
        "shared, that of log kappa {kappa_paper:.0f} % and {kappa_paired:.0f} %.",
        answers=("W10",),
    ),
)  # fmt: skip

side = partial(
    arms, by="strategy", strategy=("standard", "multipliers"), stream="paper", pairing="paired"
)
SHOWN = (ROW_NORMS, "singular_values", "overall_matrix", KAPPA)
PLOT = sheet(
    side(*SHOWN[:3], structure="low-rank", title="Low-rank targets: κ is infinite"),
    side(*SHOWN, structure="block-diagonal", title="Block-diagonal targets"),
    side(*SHOWN, structure="heterogeneous", title="Heterogeneous targets"),
    strips(
        ROW_NORMS,
        by="structure",
        stream="own",
        strategy="multipliers",
        title="With multipliers, by structure",
    ),
)

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
    figures=FIGURES,
    claims=CLAIMS,
    plot=PLOT,
    quick={"paper": lambda setting: 4 if setting["structure"] in STRUCTURES else 0, "own": 8},
)
