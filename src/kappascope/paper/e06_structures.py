"""Experiment 6: multipliers across structures (Section 4.6).

Do multipliers help more for some structures of the target than for others? The paper's two arms
share the target alone: there ``pairing`` is "paper". It is "paired" where the arms share the start
and the batches, too. The paper does not say what its blocks are, so there are several kinds of
blocks. Its structures differ in size, so all of them are compared at equal Frobenius norms
(``norm``).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from kappascope.corrections import scaled
from kappascope.lab.claims import Above, Between, Claim, Measure, Mended
from kappascope.lab.experiment import Experiment, Rows, Setting, grid
from kappascope.lab.figures import arms, error_lines, sheet
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
from kappascope.lab.statistics import Estimate, contrast, paired_difference, proportion
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


def gaussian(random: Random, size: int) -> Tensor:
    """Draw matrices without any structure."""
    return random.normal(size, size)


TARGETS: dict[str, Structure] = {
    **STRUCTURES,
    "gaussian": gaussian,
    "equal blocks": partial(blocks, scales=[2**0.5] * 4),  # as large as its other targets
    "growing blocks": partial(blocks, scales=[i + 0.5 for i in range(8)]),  # prints its 93 % too
}


# half and twice the norms of the paper's low-rank and heterogeneous targets, about 8 and 14
NORMS = (4.0, 8.0, 16.0, 32.0)
SCALED = (*STRUCTURES, "equal blocks", "gaussian")


def trials(
    streams: Streams, structure: str, size: int, norm: float | None = None
) -> Iterator[Rows]:
    """Learn targets of one structure with and without multipliers."""
    target = TARGETS[structure](streams.random(), size)
    if norm:
        target *= norm / torch.linalg.matrix_norm(target, keepdim=True)
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
    figure(
        "e6/row_norms/structure=low-rank/improvement",
        "29 %",
        "P 4.6; of one of several targets that print it",
        basis="fitted",
        strategy="multipliers",
    ),
    figure(
        "e6/row_norms/structure=block-diagonal/improvement",
        "93 %",
        "P 4.6; of blocks chosen because they print it",
        basis="fitted",
        strategy="multipliers",
    ),
    figure(
        "e6/floored_condition_number/structure=low-rank/mean",
        "~1.0",
        "R Q5; kappa with 1e-10 added to its denominator",
        basis="conjecture",
        strategy="standard",
    ),
)

MULTIPLIERS, STANDARD = {"strategy": "multipliers"}, {"strategy": "standard"}
gain = partial(improvement, MULTIPLIERS, STANDARD, pairing="paired")
extent = partial(typical, "frobenius_norm", column="target", norm=None, **STANDARD)


def rows_gain(structure: str, norm: float | None = None) -> Measure:
    """Measure what the row norms of a structure gain from multipliers, at its own or another norm.

    In per cent of plain training's error, start and batches shared.
    """
    return gain(component=ROW_NORMS, structure=structure, norm=norm)


def further(structure: str, than: str, norm: float) -> Measure:
    """Measure by how many percentage points one structure gains more than another of its norm."""

    def measure(rows: Table) -> Estimate:
        gains = [rows_gain(name, norm)(rows) for name in (structure, than)]
        return contrast(gains, (1, -1), "difference in percentage points")

    return measure


def growth(structure: str) -> Measure:
    """Measure by how many percentage points the gain grows from the least norm to the greatest."""

    def measure(rows: Table) -> Estimate:
        gains = [rows_gain(structure, norm)(rows) for norm in (NORMS[-1], NORMS[0])]
        return contrast(gains, (1, -1), "growth in percentage points")

    return measure


def lead(structure: str, norm: float | None = None) -> Measure:
    """Measure by how many percentage points row norms gain more than log kappa, trial by trial."""

    def measure(rows: Table) -> Estimate:
        chosen = select(rows, stream="own", pairing="paired", structure=structure, norm=norm)
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


def by_norm(structure: str) -> dict[str, Measure]:
    """Measure the row norms' gain of a structure at every norm."""
    return {f"at norm {norm:g}": rows_gain(structure, norm) for norm in NORMS}


FINITE = [name for name in SCALED if name != "low-rank"]  # structures with a finite kappa

CLAIMS = (
    Claim(
        "e6.block",
        "Block-diagonal targets gain 93 % from multipliers.",
        "P 4.6",
        measures={
            "more": {
                f"at norm {norm:g}": further("block-diagonal", "heterogeneous", norm)
                for norm in NORMS
            },
            "blocks": by_norm("block-diagonal"),
            "as_drawn": rows_gain("block-diagonal"),
            "norm": extent(structure="block-diagonal"),
            "equal": rows_gain("equal blocks"),
            "equal_norm": extent(structure="equal blocks"),
        },
        # a gain of block-diagonal targets is one that others of their size do not have
        expect={"more": Above(10)},
        explain="The paper does not say what its blocks are. Four blocks of log-normal scale, "
        "chosen because they print 93 %, gain {as_drawn:.1f} % at their Frobenius norm "
        "of {norm.value:.0f}; four equal blocks gain {equal:.1f} % at "
        "{equal_norm.value:.0f}. The norm makes the difference: scaled to equal norms, "
        "block-diagonal targets gain {blocks:.0f} per cent, which is {more:.1f} "
        "percentage points more than heterogeneous ones (n = {more.n}).",
        answers=("Section 4, layer types", "S5"),
        mended=Mended(
            "undecided",
            "Any kind of blocks had to gain 84 to 99 %, at whatever norm. Now block-diagonal "
            "targets are compared with others of their norm, in trials that are younger than the "
            "rule.",
        ),
    ),
    Claim(
        "e6.low-rank",
        "Low-rank targets gain only 29 %.",
        "P 4.6",
        measures={
            "less": {
                f"at norm {norm:g}": further("heterogeneous", "low-rank", norm) for norm in NORMS
            },
            "low_rank": by_norm("low-rank"),
            "as_drawn": rows_gain("low-rank"),
            "norm": extent(structure="low-rank"),
            "full_rank": rows_gain("heterogeneous"),
            "full_rank_norm": extent(structure="heterogeneous"),
        },
        # "only" is by comparison: with full-rank targets of the same size
        expect={"less": Above(10)},
        explain="The product of two Gaussian factors of rank 16, one of several targets that "
        "print 29 %, gains {as_drawn:.1f} % at its Frobenius norm of {norm.value:.1f} "
        "(n = {as_drawn.n}). Heterogeneous targets gain {full_rank:.1f} % at "
        "{full_rank_norm.value:.1f}. Scaled to equal norms, low-rank targets gain "
        "{low_rank:.0f} per cent, which is {less:.1f} percentage points less than "
        "heterogeneous ones.",
        answers=("Section 4, layer types", "S5"),
        mended=Mended(
            "holds",
            "A generator was chosen because it gives the printed 29 %, and was then asked whether "
            "it gives 29 %. Now low-rank targets are compared with others of their norm, in trials "
            "that are younger than the rule.",
        ),
    ),
    Claim(
        "e6.kappa-less",
        "For all structures kappa gains less from multipliers than norms do.",
        "P 4.6",
        measures={
            "lead": {
                f"for {structure} targets of norm {norm:g}": lead(structure, norm)
                for structure in FINITE
                for norm in NORMS
            },
            "heterogeneous": lead("heterogeneous"),
            "blocks": lead("block-diagonal"),
            "heterogeneous_kappa": gain(
                structure="heterogeneous", component=LOG_KAPPA, norm=None
            ),
            "blocks_kappa": gain(structure="block-diagonal", component=LOG_KAPPA, norm=None),
        },
        expect={"heterogeneous": Above(0), "blocks": Above(0), "lead": Above(0)},
        explain="The gain of the row norms exceeds that of |log kappa - log kappa*| by "
        "{heterogeneous:.0f} percentage points on heterogeneous targets and by "
        "{blocks:.0f} on block-diagonal ones (medians, n = {heterogeneous.n} and "
        "{blocks.n}). Kappa gains {heterogeneous_kappa:.0f} % and {blocks_kappa:.0f} % "
        "there. Over four structures and four norms the difference is {lead.span:.0f}. "
        "Low-rank targets are left out, because their kappa is infinite. At the full "
        "learning rate multipliers treat kappa too (e4.trade-off).",
        answers=("Section 3, components",),
        mended=Mended(
            "holds",
            "Two structures at one norm stood for all structures. Now four structures at four "
            "norms decide as well, in trials that are younger than the rule.",
        ),
    ),
    Claim(
        "e6.scale",
        "The scale of the target decides what multipliers gain, not its structure: at equal "
        "norms the gains of the structures differ by less than 10 percentage points, and from "
        "norm 4 to norm 32 the gain grows by more than 30.",
        "control; P 4.6",
        measures={
            "apart": {
                f"{name} at {norm:g}": further(name, "gaussian", norm)
                for name in SCALED
                if name != "gaussian"
                for norm in NORMS
            },
            "growth": {f"for {name} targets": growth(name) for name in SCALED},
            "gaussian": by_norm("gaussian"),
        },
        expect={"apart": Between(-10, 10), "growth": Above(30)},
        explain="Targets without structure gain {gaussian:.0f} per cent. At equal norms the "
        "others differ from them by {apart.span:.1f} percentage points. From norm 4 to "
        "norm 32 the gain grows by {growth:.0f} points (n = {apart.n}).",
        answers=("Section 4, layer types", "S5"),
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
                "recovered protocol. Start and batches differ: with the start and the batches of "
                "the other arm, plain SGD ends with the same row norms in {end.value:.0%}. On "
                "block-diagonal targets the gain of the row norms is {rows_paper:.1f} % as the "
                "paper compares, and {rows_paired:.1f} % if start and batches are shared. The gain "
                "of log kappa is {kappa_paper:.0f} % and {kappa_paired:.0f} %.",
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
    *(
        error_lines(ROW_NORMS, by="norm", stream="own", pairing="paired", strategy="multipliers",
                    structure=name, norm=NORMS, title=f"With multipliers, {name}")
        for name in ("gaussian", "low-rank", "block-diagonal")
    ),
)  # fmt: skip


def as_the_paper(setting: Setting) -> bool:
    """Tell whether a setting has a structure of the paper at the norm it is drawn with."""
    return setting["structure"] in STRUCTURES and "norm" not in setting


EXPERIMENT = Experiment(
    number=6,
    title="Multipliers across structures",
    section="4.6",
    question=__doc__,
    grid=(
        *grid(structure=tuple(name for name in TARGETS if name != "gaussian"), size=(64,)),
        *grid(structure=SCALED, size=(64,), norm=NORMS),
    ),
    trials=trials,
    paper=lambda setting: 15 if as_the_paper(setting) else 0,
    own=lambda setting: 192 if as_the_paper(setting) else 48 if "norm" in setting else 64,
    effort=3.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 0},  # the paper's trials decide `same-target`
)
