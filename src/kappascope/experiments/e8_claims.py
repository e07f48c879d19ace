"""What experiment 8 decides: the claims of Section 4.8, and that the flaw persists."""

from typing import Any

from kappascope.claims import Above, Between, Claim, Measure
from kappascope.measures import compared, listed, select, typical
from kappascope.statistics import Table, ratio

LEARNING_RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05)  # the paper names 0.001, 0.01 and 0.05
WEIGHT_DECAYS = (1e-4, 1e-3, 1e-2)
SWEEPS = [(rate, 0.0) for rate in LEARNING_RATES] + [(0.01, decay) for decay in WEIGHT_DECAYS]

KAPPA, NORMS = {"component": "condition_number"}, {"component": "row_norms"}


def gap(rate: float, decay: float = 0.0) -> Measure:
    """The kappa error over the norm error of the same trial."""
    return compared(KAPPA, NORMS, learning_rate=rate, weight_decay=decay)


def growth(before: float, after: float) -> Measure:
    """By what the median of that ratio grows from one learning rate to another."""

    def ratios(rows: Table, rate: float) -> Any:
        chosen = select(rows, stream="own", learning_rate=rate, weight_decay=0.0)
        kappa, norms = chosen.where(**KAPPA).paired(chosen.where(**NORMS))
        return kappa / norms

    return lambda rows: ratio(ratios(rows, after), ratios(rows, before))


def medians(component: str) -> list[Measure]:
    """The median error at each of the learning rates that the paper names."""
    return [typical(component, learning_rate=r, weight_decay=0.0) for r in (0.001, 0.01, 0.05)]


def against_none(decay: float) -> Measure:
    """The kappa error with weight decay over that of the same trial without."""
    return compared({"weight_decay": decay}, {"weight_decay": 0.0}, learning_rate=0.01, **KAPPA)


def of(experiment: str, measure: Measure) -> Measure:
    """The measure on the rows of one experiment, for a claim that speaks of several."""
    return lambda rows: measure(select(rows, experiment=experiment))


RATES = [f"at rate {rate:g}" for rate in LEARNING_RATES]
DECAYS = [f"with decay {decay:g}" for decay in WEIGHT_DECAYS]
MULTIPLE = "In the median trial the kappa error is this multiple of the norm error: {0}"
CLAIMS = (
    Claim(
        "e8.every-lr",
        "At every learning rate the kappa error exceeds the norm error.",
        "P 4.8",
        measure=tuple(gap(rate) for rate in LEARNING_RATES),
        expect=(Above(1),) * len(LEARNING_RATES),
        explain=listed(
            f"{MULTIPLE} (n = {{n}}); at rates of 0.001 and 0.002 there is little to compare, for "
            "200 steps leave (1 - rate)^200 = 0.82 and 0.67 of what was to be learned.",
            *RATES,
        ),
    ),
    Claim(
        "e8.ratio-grows",
        "The ratio of kappa's error to the norms' grows with the learning rate: 1.0, 9.2, 440.",
        "P 4.8",
        measure=(growth(0.001, 0.01), growth(0.01, 0.05)),
        expect=(Above(1), Above(1)),
        also=(*medians("row_norms"), *medians("condition_number")),
        explain="The median ratio changes by a factor of {0:.2g} from rate 0.001 to 0.01 and of "
        "{1:.3g} from there to 0.05 (n = {0.n}): at the three rates the norms' median error is "
        "{2.value:.2g}, {3.value:.2g} and {4.value:.2g}, kappa's {5.value:.2g}, {6.value:.2g} and "
        "{7.value:.2g}.",
    ),
    Claim(
        "e8.decay-no-effect",
        "Weight decay up to 0.01 leaves kappa's error as it is, at about 1.23.",
        "P abstract, 4.8; S",
        measure=tuple(against_none(decay) for decay in WEIGHT_DECAYS),
        expect=(Between(0.95, 1.05),) * len(WEIGHT_DECAYS),
        explain=listed(
            "In the median trial the error is multiplied by {0} (n = {n}); a decay of 0.01 alone "
            "takes 2 % of a weight in 200 steps at rate 0.01.",
            *DECAYS,
        ),
    ),
    Claim(
        "all.persists",
        "The flaw persists across optimizers, learning rates and weight decay.",
        "P 6(3)",
        measure=(
            *(of("e2", compared(KAPPA, NORMS, optimizer=o, size=128)) for o in ("sgd", "adam")),
            *(of("e8", gap(rate, decay)) for rate, decay in SWEEPS),
        ),
        expect=(Above(1),) * (2 + len(SWEEPS)),
        explain=listed(f"{MULTIPLE}.", "with SGD", "with Adam", *RATES, *DECAYS),
    ),
)
