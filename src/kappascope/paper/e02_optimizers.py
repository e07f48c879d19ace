"""Experiment 2: SGD against Adam (Section 4.2).

Does Adam learn the components that SGD does not? Both get the same targets, starts and batches,
and 200 steps. The paper's explanation of the difference, that Adam's element-wise rates spoil the
spectrum (Section 5.3), is tested by the claim e2.mechanism: Adam gets one rate for the whole
matrix, and every trial is looked at when its overall error has come down to the same level, so
that none is ahead of the others.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor
from torch.optim import Adam

from kappascope.lab.claims import Above, Claim
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import arms, sheet, spectrum_lines, strips
from kappascope.lab.measures import Where, compared, paired, printed, typical
from kappascope.lab.optimizers import Descent, MatrixAdam, Optimizer
from kappascope.lab.statistics import paired_difference
from kappascope.lab.tasks import LinearBatch, Random, Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, Step, last, outcome, rows, together, train
from kappascope.matrix.components import Components

OPTIMIZERS: dict[str, Callable[[Matrix], Optimizer]] = {
    "sgd": Descent,
    "adam": lambda model: Adam(model.parameters(), lr=0.001, fused=True),
    "matrix adam": MatrixAdam,
}
LEVEL = 0.3  # an overall error that all three reach within PATIENCE steps
PATIENCE = 1200


def trials(streams: Streams, size: int, question: str | None = None) -> Iterator[Rows]:
    """Learn the same target with every optimizer."""
    target, random = heterogeneous(streams.random(), size), streams.random(50)
    if question:
        yield from mechanism(target, random)
        return
    for optimizer, step in last(side_by_side(("sgd", "adam"), target, random, 200)).items():
        yield from outcome(step.weight, target, optimizer=optimizer)


def side_by_side(
    optimizers: tuple[str, ...], target: Tensor, random: Random, steps: int
) -> Iterator[dict[str, Step]]:
    """Train with several optimizers from one start, on the same batches."""
    origin = start(random, target.shape[-1])

    def fit(optimizer: str, batches: Iterator[LinearBatch]) -> Iterator[Step]:
        return train(model := Matrix(origin), OPTIMIZERS[optimizer](model), batches, steps)

    arms = {optimizer: partial(fit, optimizer) for optimizer in optimizers}
    return together(arms, Regression(target).batches(random))


def mechanism(target: Tensor, random: Random) -> Iterator[Rows]:
    """Look at every trial when its overall error has first come down to the level."""
    near = LEVEL * torch.linalg.matrix_norm(target)
    caught = {optimizer: torch.full_like(target, torch.nan) for optimizer in OPTIMIZERS}
    for steps in side_by_side(tuple(OPTIMIZERS), target, random, PATIENCE):
        late = {name: weight[:, 0, 0].isnan() for name, weight in caught.items()}
        late = {name: trials for name, trials in late.items() if trials.any()}
        for optimizer, trials in late.items():
            now = steps[optimizer].weight
            arrived = trials & (torch.linalg.matrix_norm(now - target) <= near)
            caught[optimizer][arrived] = now[arrived]
        if not late:
            break
    for optimizer, weight in caught.items():
        yield from rows(weight, target, optimizer=optimizer, level=LEVEL)


figure = partial(printed, source="P 4.2", seed=range(15))
FIGURES = (
    figure("e2/condition_number/optimizer=sgd/mean", "0.87"),
    figure("e2/condition_number/optimizer=sgd/std", "1.40"),
    figure("e2/row_norms/optimizer=sgd/mean", "0.13"),
    figure("e2/overall_matrix/optimizer=sgd/mean", "0.14"),
    figure("e2/condition_number/optimizer=adam/mean", "0.90"),
    figure("e2/condition_number/optimizer=adam/std", "0.97"),
    figure("e2/row_norms/optimizer=adam/mean", "0.59"),
    figure("e2/overall_matrix/optimizer=adam/mean", "0.60"),
)

EIGHT = (*Components.names, "overall_matrix")
SGD, ADAM, ONE_RATE = ({"optimizer": name} for name in ("sgd", "adam", "matrix adam"))
KAPPA_ROWS, NORM_ROWS = {"component": "condition_number"}, {"component": "row_norms"}
AT_LEVEL: Where = {"component": "log_condition_number", "question": "mechanism"}


CLAIMS = (
    Claim(
        "e2.adam-worse",
        "Adam is worse than SGD on all components (overall error 0.60 against 0.14).",
        "P abstract, 4.2, 5.3; S",
        measures={
            "ratios": {
                name.replace("_", " "): compared(ADAM, SGD, component=name, size=128)
                for name in EIGHT
                if name != "effective_rank"
            },
            # a difference, since SGD's error of the rank is often zero
            "rank": paired(paired_difference, ADAM, SGD, component="effective_rank", size=128),
        },
        expect={"ratios": Above(1), "rank": Above(0)},
        explain="After 200 steps Adam's error in multiples of SGD's (medians, n = {rank.n}): "
        "{ratios.names_first:.2f}; effective rank, as a difference: {rank:.3f}. Adam is not done "
        "then: e2.mechanism follows it until its overall error is the same as that of SGD.",
        answers=("W9(a)",),
    ),
    Claim(
        "e2.both-poor",
        "Both optimizers learn kappa poorly (0.87, 0.90), so the flaw is structural.",
        "P 4.2",
        measures={
            "sgd": compared(KAPPA_ROWS, NORM_ROWS, size=128, **SGD),
            "adam": compared(KAPPA_ROWS, NORM_ROWS, size=128, **ADAM),
            "sgd_kappa": typical(**KAPPA_ROWS, size=128, **SGD),
            "sgd_rows": typical(**NORM_ROWS, size=128, **SGD),
            "adam_kappa": typical(**KAPPA_ROWS, size=128, **ADAM),
            "adam_rows": typical(**NORM_ROWS, size=128, **ADAM),
        },
        expect={"sgd": Above(1), "adam": Above(1)},
        explain="In the median trial kappa's error is {sgd:.2f} times that of the row norms under "
        "SGD and {adam:.2f} times under Adam (n = {sgd.n}); the medians are {sgd_kappa.value:.2f} "
        "and {sgd_rows.value:.2f} under SGD, {adam_kappa.value:.2f} and {adam_rows.value:.2f} "
        "under Adam.",
        answers=("W9(a)",),
    ),
    Claim(
        "e2.mechanism",
        "Adam's element-wise rates disrupt coherent spectral structure.",
        "P 4.2, 5.3; S",
        measures={
            "over_one_rate": compared(ADAM, ONE_RATE, **AT_LEVEL),
            "over_sgd": compared(ADAM, SGD, **AT_LEVEL),
            "adam": typical(**AT_LEVEL, **ADAM),
            "one_rate": typical(**AT_LEVEL, **ONE_RATE),
            "sgd": typical(**AT_LEVEL, **SGD),
        },
        expect={"over_one_rate": Above(1), "over_sgd": Above(1)},
        explain="When the overall error is down to 0.3, log kappa is off by {adam:.2f} under Adam, "
        "by {one_rate:.2f} under Adam with one rate for the matrix, and by {sgd:.2f} under SGD "
        "(medians); trial by trial Adam's error is {over_one_rate:.2f} times that with one rate "
        "and {over_sgd:.2f} times SGD's (n = {over_one_rate.n}).",
        answers=("Q1",),
    ),
)

PLOT = sheet(
    arms(*EIGHT, by="optimizer", optimizer=("sgd", "adam"), stream="paper", size=128),
    strips("log_condition_number", by="optimizer", optimizer=("sgd", "matrix adam", "adam"),
           level=0.3, title="At the same overall error, 0.3"),
    spectrum_lines("Singular values, SGD", optimizer="sgd", size=128),
    spectrum_lines("Singular values, Adam", optimizer="adam", size=128),
)  # fmt: skip

EXPERIMENT = Experiment(
    number=2,
    title="SGD against Adam",
    section="4.2",
    question=__doc__,
    grid=grid(size=(128,)) + grid(size=(64,), question=("mechanism",)),
    trials=trials,
    paper=lambda setting: 0 if "question" in setting else 15,
    own=lambda setting: 64 if "question" in setting else 200,
    effort=4.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": lambda setting: 0 if "question" in setting else 8},  # 1200 steps are dear
)
