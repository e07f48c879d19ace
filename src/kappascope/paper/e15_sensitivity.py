"""Experiment 15: sensitivity to the paper's fixed choices.

Which of the paper's fixed choices decide what is learned of kappa? One is changed at a time, about
the paper's own: learning rate, batch, label noise, scale and kind of the start, the multipliers'
learning rate, the penalty's strength, and the threshold of the effective rank. The same target for
all arms, and the same start and batches where these are not what is changed.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from kappascope.corrections import Multipliers, PaperPenalty
from kappascope.lab.claims import Above, Below, Between, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import sheet, spectrum_lines, strips
from kappascope.lab.measures import LOG_KAPPA, ROW_NORMS, compared, typical
from kappascope.lab.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, Step, descend, last, outcome, rows, together
from kappascope.matrix.components import Components, errors
from kappascope.paper.e04_strategies import fit

Arm = Callable[[Iterator[LinearBatch]], Iterator[Step]]
SWEEPS = {
    "learning rate": ("0.001", "0.003", "0.03", "0.1"),
    "batch": ("16", "256"),
    "label noise": ("0", "0.1", "1"),
    "start scale": ("0", "0.01", "1"),
    "start kind": ("orthogonal", "identity"),
    "multiplier rate": ("0.01", "0.1", "1"),  # in those of the weight; the paper's is 0.1
    "penalty": ("0.0005", "0.005", "0.05", "0.5"),  # the paper's is 0.005
    "threshold": ("0.001", "0.01", "0.1"),  # of the effective rank; the paper's is 0.01
}
PAPERS = "the paper's"


def labelled(noise: float, origin: Tensor, batches: Iterator[LinearBatch]) -> Iterator[Step]:
    """Train on the same inputs with labels that are more or less noisy."""
    return descend(Matrix(origin), (replace(b, task=replace(b.task, noise=noise)) for b in batches))


def arms(origin: Tensor, spectrum: Tensor) -> Iterator[tuple[tuple[str, str], Arm]]:
    """List the ways of training that see the same batches, by what is changed and to what."""
    yield ("none", PAPERS), partial(descend, Matrix(origin))
    for level in SWEEPS["learning rate"]:
        yield ("learning rate", level), partial(descend, Matrix(origin), learning_rate=float(level))
    for level in SWEEPS["label noise"]:
        yield ("label noise", level), partial(labelled, float(level), origin)
    for level in SWEEPS["start scale"]:
        yield ("start scale", level), partial(descend, Matrix(float(level) / 0.1 * origin))
    orthogonal = torch.linalg.qr(origin).Q
    kinds = {"orthogonal": orthogonal, "identity": torch.eye(origin.shape[-1]).expand_as(origin)}
    for kind in SWEEPS["start kind"]:  # each with the norm that a Gaussian start has on average
        yield ("start kind", kind), partial(descend, Matrix(0.1 * 2**0.5 * kinds[kind].to(origin)))
    for level in SWEEPS["multiplier rate"]:
        multipliers = Multipliers(rate=float(level), weight_decay=0.0)
        yield ("multiplier rate", level), partial(fit, origin, multipliers)
    for level in SWEEPS["penalty"]:
        penalty = PaperPenalty(float(level), target=lambda weight: spectrum)
        yield ("penalty", level), partial(fit, origin, penalty)


def trials(streams: Streams, size: int) -> Iterator[Rows]:
    """Learn one target in every way."""
    target, random = Components(heterogeneous(streams.random(), size)), streams.random(1)
    origin = start(random, size)
    task = Regression(target.matrix)
    every = dict(arms(origin, target.singular_values))
    for (sweep, level), step in last(together(every, task.batches(random))).items():
        look = outcome if sweep in ("none", "start scale") else rows
        yield from look(step.weight, target, sweep=sweep, choice=level)
        if sweep == "none":
            yield from ranks(step.weight, target.matrix)
    for place, level in enumerate(SWEEPS["batch"]):
        batches = replace(task, rows=int(level)).batches(streams.random(2 + place))
        yield from rows(last(descend(Matrix(origin), batches)).weight, target, sweep="batch",
                        choice=level)  # fmt: skip


def ranks(weight: Tensor, target: Tensor) -> Iterator[Rows]:
    """Give the error of the effective rank at other thresholds."""
    for level in SWEEPS["threshold"]:
        pair = (Components(matrix, float(level)) for matrix in (weight, target))
        error = errors(*pair)["effective_rank"]
        about = {"sweep": "threshold", "choice": level, "component": "effective_rank"}
        yield {**about, "error": error}


EITHER = Between(0.8, 1.25)  # no more than a quarter either way counts as no difference


def against_paper(sweep: str, level: str) -> Measure:
    """Compare the error of log kappa with that of the paper's choice, trial by trial."""
    return compared(
        {"sweep": sweep, "choice": level}, {"sweep": "none", "choice": PAPERS}, component=LOG_KAPPA
    )


def every(sweep: str) -> dict[str, Measure]:
    """Compare every level of a sweep with the paper's choice."""
    return {f"at {level}": against_paper(sweep, level) for level in SWEEPS[sweep]}


def within(sweep: str, level: str, than: str, component: str) -> Measure:
    """Compare the error at one level of a sweep with that at another, trial by trial."""
    return compared({"choice": level}, {"choice": than}, sweep=sweep, component=component)


TIMES = "In the median trial the error of log kappa is this multiple of that with the paper's "
CLAIMS = (
    Claim(
        "e15.learning-rate",
        "A larger learning rate learns kappa: three times the paper's halves the error.",
        "R W9",
        measures={
            "tripled": against_paper("learning rate", "0.03"),
            "every": every("learning rate"),
        },
        expect={"tripled": Below(0.5)},
        explain=TIMES + "0.01: {every:.4g} (n = {every.n}).",
        answers=("W9(c)",),
    ),
    Claim(
        "e15.batch",
        "The batch size hardly matters to kappa, from 16 to 256.",
        "R W8, W9",
        measures={"every": every("batch")},
        expect={"every": EITHER},
        explain=TIMES + "64: {every:.4g} (n = {every.n}).",
        answers=("W9(c)",),
    ),
    Claim(
        "e15.noise",
        "Label noise ten times the paper's changes nothing, and a hundred times (1.0) doubles "
        "the error.",
        "R code-level",
        measures={
            "tenfold": against_paper("label noise", "0.1"),
            "hundredfold": against_paper("label noise", "1"),
            "every": every("label noise"),
        },
        expect={"tenfold": EITHER, "hundredfold": Above(2)},
        explain=TIMES + "0.01: {every:.4g} (n = {every.n}).",
        answers=("Code, noise",),
    ),
    Claim(
        "e15.start",
        "What is not learned of kappa after 200 steps is the random start: a start from zero "
        "halves the error, and a start ten times larger doubles it.",
        "R W3, W7",
        measures={
            "from_zero": against_paper("start scale", "0"),
            "tenfold": against_paper("start scale", "1"),
            "every": every("start scale"),
        },
        expect={"from_zero": Below(0.5), "tenfold": Above(2)},
        explain=TIMES + "0.1: {every:.4g} (n = {every.n}).",
    ),
    Claim(
        "e15.orthogonal",
        "An orthogonal start, as Saxe et al. propose, leaves a smaller error than a Gaussian one.",
        "R W7",
        measures={
            "orthogonal": against_paper("start kind", "orthogonal"),
            "identity": against_paper("start kind", "identity"),
        },
        expect={"orthogonal": Below(0.8)},
        explain="In the median trial the error of log kappa is {orthogonal:.2f} times that from a "
        "Gaussian start of the same norm (n = {orthogonal.n}). From a multiple of the "
        "identity it is {identity:.2f} times.",
        answers=("W7",),
    ),
    Claim(
        "e15.multiplier-rate",
        "The multipliers' learning rate matters: the full one leaves less of the norms' error than "
        "a tenth of it.",
        "R W8, code-level",
        measures={
            "full_rows": within("multiplier rate", "1", "0.1", ROW_NORMS),
            "full_kappa": within("multiplier rate", "1", "0.1", LOG_KAPPA),
            "hundredth_rows": within("multiplier rate", "0.01", "0.1", ROW_NORMS),
            "hundredth_kappa": within("multiplier rate", "0.01", "0.1", LOG_KAPPA),
        },
        expect={"full_rows": Below(0.8)},
        explain="At the full rate the row norms' error is {full_rows:.2f} times that at a tenth, "
        "and log kappa's is {full_kappa:.2f} times. At a hundredth they are "
        "{hundredth_rows:.2f} and {hundredth_kappa:.2f} times (n = {full_rows.n}).",
        answers=("W8", "Code, multiplier rate"),
    ),
    Claim(
        "e15.penalty",
        "A penalty ten times stronger leaves less of the error of log kappa.",
        "R W4(a)",
        measures={
            "tenfold": within("penalty", "0.05", "0.005", LOG_KAPPA),
            "hundredfold": within("penalty", "0.5", "0.005", LOG_KAPPA),
            "tenth": within("penalty", "0.0005", "0.005", LOG_KAPPA),
        },
        expect={"tenfold": Below(0.8)},
        explain="It leaves {tenfold:.2f} times what the paper's strength leaves (n = {tenfold.n}). "
        "A penalty a hundred times stronger leaves {hundredfold:.2f} times, one ten times "
        "weaker {tenth:.2f} times.",
        answers=("W4(a)",),
    ),
    Claim(
        "e15.threshold",
        "The effective rank is well learned (below 0.05) at every threshold from 0.001 to 0.1.",
        "R W11, section 2",
        measures={
            "error": {
                f"at {level}": typical("effective_rank", sweep="threshold", choice=level)
                for level in SWEEPS["threshold"]
            }
        },
        expect={"error": Below(0.05)},
        explain="The median error of the effective rank is {error:.4g} (n = {error.n}).",
        answers=("W11", "Section 2, threshold"),
    ),
)

PLOT = sheet(
    *(
        strips(LOG_KAPPA, ROW_NORMS, by="choice", sweep=(sweep, "none"), choice=(*levels, PAPERS),
               title=sweep.capitalize())
        for sweep, levels in SWEEPS.items() if sweep != "threshold"
    ),
    spectrum_lines("Singular values, start from zero", sweep="start scale", choice="0"),
)  # fmt: skip

EXPERIMENT = Experiment(
    number=15,
    title="Sensitivity",
    section="review W9, detailed comments",
    question=__doc__,
    grid=grid(size=(32,)),  # small, for many trials: ratios of kappa errors scatter widely
    trials=trials,
    own=256,
    effort=45.0,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 8},
)
