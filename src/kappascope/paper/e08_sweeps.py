"""Experiment 8: hyperparameters (Section 4.8).

Do the learning rate or weight decay change what is learned? Experiment 4's standard arm, swept.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from kappascope.lab.claims import Above, Between, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import error_lines, sheet, spectrum_lines
from kappascope.lab.measures import compared, printed, select, typical
from kappascope.lab.statistics import ratio
from kappascope.lab.table import Table
from kappascope.lab.tasks import Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, descend, last, outcome, together

LEARNING_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)  # the paper names 0.001, 0.01 and 0.05
WEIGHT_DECAYS = (1e-4, 1e-3, 1e-2)
SWEEPS = [(rate, 0.0) for rate in LEARNING_RATES] + [(0.01, decay) for decay in WEIGHT_DECAYS]


def trials(streams: Streams, size: int) -> Iterator[Rows]:
    """Learn the same target with every learning rate and weight decay."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    origin = start(random, size)
    arms = {
        (rate, decay): partial(descend, Matrix(origin), learning_rate=rate, weight_decay=decay)
        for rate, decay in SWEEPS
    }
    for (rate, decay), step in last(together(arms, Regression(target).batches(random))).items():
        yield from outcome(step.weight, target, learning_rate=rate, weight_decay=decay)


rate = partial(printed, weight_decay=0.0, seed=range(10))
decay = partial(printed, learning_rate=0.01, seed=range(10))
FIGURES = (
    rate("e8/condition_number/lr=0.001/ratio", "1.0x", "P 4.8"),
    rate("e8/condition_number/lr=0.01/ratio", "9.2x", "P 4.8"),
    rate("e8/condition_number/lr=0.05/ratio", "440x", "P 4.8"),
    *(
        decay(f"e8/condition_number/wd={value}/mean", "~1.23", "P 4.8")
        for value in ("0", "0.0001", "0.001", "0.01")
    ),
)

KAPPA_ROWS, NORM_ROWS = {"component": "condition_number"}, {"component": "row_norms"}


def gap(rate: float, decay: float = 0.0) -> Measure:
    """Compare the kappa error with the norm error of the same trial."""
    return compared(KAPPA_ROWS, NORM_ROWS, learning_rate=rate, weight_decay=decay)


def growth(before: float, after: float) -> Measure:
    """Measure by what the median of that ratio grows from one learning rate to another."""

    def ratios(rows: Table, rate: float) -> Any:
        chosen = select(rows, stream="own", learning_rate=rate, weight_decay=0.0)
        kappa, norms = chosen.where(**KAPPA_ROWS).paired(chosen.where(**NORM_ROWS))
        return kappa / norms

    return lambda rows: ratio(ratios(rows, after), ratios(rows, before))


def medians(component: str) -> dict[str, Measure]:
    """Measure the median error at each of the learning rates that the paper names."""
    rates = {"low": 0.001, "usual": 0.01, "high": 0.05}
    return {
        name: typical(component, learning_rate=rate, weight_decay=0.0)
        for name, rate in rates.items()
    }


def of(experiment: str, measure: Measure) -> Measure:
    """Measure on the rows of one experiment, for a claim that speaks of several."""
    return lambda rows: measure(select(rows, experiment=experiment))


CLAIMS = (
    Claim(
        "e8.every-lr",
        "At every learning rate the kappa error exceeds the norm error.",
        "P 4.8",
        measures={"ratios": {f"at rate {rate:g}": gap(rate) for rate in LEARNING_RATES}},
        expect={"ratios": Above(1)},
        explain="In the median trial the kappa error is this multiple of the norm error: "
        "{ratios:.4g} (n = {ratios.n}); at rates of 0.001 and 0.002 there is little to compare, "
        "for 200 steps leave (1 - rate)^200 = 0.82 and 0.67 of what was to be learned.",
        answers=("W9(c)",),
    ),
    Claim(
        "e8.ratio-grows",
        "The ratio of kappa's error to the norms' grows with the learning rate: 1.0, 9.2, 440.",
        "P 4.8",
        measures={
            "from_low": growth(0.001, 0.01),
            "to_high": growth(0.01, 0.05),
            "norms": medians("row_norms"),
            "kappa": medians("condition_number"),
        },
        expect={"from_low": Above(1), "to_high": Above(1)},
        explain="The median ratio changes by a factor of {from_low:.2g} from rate 0.001 to 0.01 "
        "and of {to_high:.3g} from there to 0.05 (n = {from_low.n}): at the three rates the norms' "
        "median error is {norms[low].value:.2g}, {norms[usual].value:.2g} and "
        "{norms[high].value:.2g}, kappa's {kappa[low].value:.2g}, {kappa[usual].value:.2g} and "
        "{kappa[high].value:.2g}.",
        answers=("W9(c)",),
    ),
    Claim(
        "e8.decay-no-effect",
        "Weight decay up to 0.01 leaves kappa's error as it is, at about 1.23.",
        "P abstract, 4.8; S",
        measures={
            "ratios": {
                f"with decay {decay:g}": compared(
                    {"weight_decay": decay}, {"weight_decay": 0.0}, learning_rate=0.01, **KAPPA_ROWS
                )
                for decay in WEIGHT_DECAYS
            }
        },
        expect={"ratios": Between(0.95, 1.05)},
        explain="In the median trial the error is multiplied by {ratios:.4g} (n = {ratios.n}); a "
        "decay of 0.01 alone takes 2 % of a weight in 200 steps at rate 0.01.",
        answers=("W9(d)",),
    ),
    Claim(
        "all.persists",
        "The flaw persists across optimizers, learning rates and weight decay.",
        "P 6(3)",
        measures={
            "ratios": {
                "with SGD": of("e2", compared(KAPPA_ROWS, NORM_ROWS, optimizer="sgd", size=128)),
                "with Adam": of("e2", compared(KAPPA_ROWS, NORM_ROWS, optimizer="adam", size=128)),
                **{f"at rate {rate:g}": of("e8", gap(rate)) for rate in LEARNING_RATES},
                **{f"with decay {decay:g}": of("e8", gap(0.01, decay)) for decay in WEIGHT_DECAYS},
            }
        },
        expect={"ratios": Above(1)},
        explain="In the median trial the kappa error is this multiple of the norm error: "
        "{ratios:.4g}.",
    ),
)

BOTH, GAP = ("condition_number", "row_norms"), "condition_number / row_norms"
PLOT = sheet(
    error_lines(*BOTH, by="learning_rate", weight_decay=0.0, stream="own"),
    error_lines(GAP, by="learning_rate", weight_decay=0.0, stream="own",
           title="κ error over norm error", printed={GAP: {0.001: 1.0, 0.01: 9.2, 0.05: 440}}),
    error_lines(*BOTH, by="weight_decay", learning_rate=0.01, stream="own"),
    spectrum_lines("Singular values, learning rate 0.05", learning_rate=0.05),
)  # fmt: skip

EXPERIMENT = Experiment(
    number=8,
    title="Hyperparameters",
    section="4.8",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    paper=10,
    own=300,
    effort=5.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 8},
)
