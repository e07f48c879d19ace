"""Experiment 2: SGD against Adam (Section 4.2).

Does Adam learn the components that SGD does not? Both get the same targets, starts and batches,
and 200 steps. The paper's explanation of the difference is tested by the claim e2.mechanism.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from kappascope.claims import Above, Claim, Measure
from kappascope.components import Components
from kappascope.experiments.e2_mechanism import CLAIM, mechanism, side_by_side
from kappascope.figures import arms, sheet, spectrum, strips
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import Where, compared, printed, select, typical
from kappascope.statistics import Estimate, Table, paired_difference
from kappascope.tasks import Streams, heterogeneous
from kappascope.training import last, outcome

EIGHT = (*Components.names, "overall_matrix")


def trials(streams: Streams, size: int, question: str | None = None) -> Iterator[Batch]:
    """Learn the same target with every optimizer."""
    target, random = heterogeneous(streams.random(), size), streams.random(50)
    if question:
        yield from mechanism(target, random)
        return
    for optimizer, step in last(side_by_side(("sgd", "adam"), target, random, 200)).items():
        yield from outcome(step.weight, target, optimizer=optimizer)


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

SGD: Where = {"optimizer": "sgd", "size": 128}
ADAM: Where = {"optimizer": "adam", "size": 128}
KAPPA, ROWS = {"component": "condition_number"}, {"component": "row_norms"}


def rank_lost(rows: Table) -> Estimate:
    """By how much Adam's error of the effective rank exceeds SGD's, which is often zero."""
    one, other = (
        select(rows, stream="own", component="effective_rank", **arm) for arm in (ADAM, SGD)
    )
    return paired_difference(*one.paired(other))


def adam_over_sgd(component: str) -> Measure:
    """The ratio of the errors, trial by trial."""
    return compared(ADAM, SGD, component=component)


def worse(*found: Any) -> str:
    """Adam beside SGD in every component."""
    *ratios, lost, _ = found
    names = [name.replace("_", " ") for name in EIGHT if name != "effective_rank"]
    told = [f"{name} {one:.2f}" for name, one in zip(names, ratios, strict=True)]
    return (
        f"After 200 steps Adam's error in multiples of SGD's (medians, n = {lost.n}): "
        f"{', '.join(told)}; effective rank, as a difference: {lost:.3f}. Adam is not done then: "
        "e2.mechanism follows it until its overall error is the same as that of SGD."
    )


CLAIMS = (
    Claim(
        "e2.adam-worse",
        "Adam is worse than SGD on all components (overall error 0.60 against 0.14).",
        "P abstract, 4.2, 5.3; S",
        measure=(*(adam_over_sgd(name) for name in EIGHT if name != "effective_rank"), rank_lost),
        expect=(*[Above(1)] * 7, Above(0)),
        explain=worse,
    ),
    Claim(
        "e2.both-poor",
        "Both optimizers learn kappa poorly (0.87, 0.90), so the flaw is structural.",
        "P 4.2",
        measure=tuple(compared(KAPPA, ROWS, **arm) for arm in (SGD, ADAM)),
        expect=(Above(1), Above(1)),
        also=tuple(typical(**part, **arm) for arm in (SGD, ADAM) for part in (KAPPA, ROWS)),
        explain="In the median trial kappa's error is {0:.2f} times that of the row norms under "
        "SGD and {1:.2f} times under Adam (n = {0.n}); the medians are {2.value:.2f} and "
        "{3.value:.2f} under SGD, {4.value:.2f} and {5.value:.2f} under Adam.",
    ),
    CLAIM,
)

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
    plot=sheet(
        arms(*EIGHT, by="optimizer", optimizer=("sgd", "adam"), stream="paper", size=128),
        strips("log_condition_number", by="optimizer", optimizer=("sgd", "matrix adam", "adam"),
               level=0.3, title="At the same overall error, 0.3"),
        spectrum("Singular values, SGD", optimizer="sgd", size=128),
        spectrum("Singular values, Adam", optimizer="adam", size=128),
    ),
    quick={"own": lambda setting: 0 if "question" in setting else 8},  # 1200 steps are dear
)  # fmt: skip
