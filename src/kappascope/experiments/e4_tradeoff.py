"""What each strategy of experiment 4 gains on norms and on kappa, and whether the paper says so."""

from functools import partial

from kappascope.claims import Above, Below, Between, Claim, Measure, no_mean
from kappascope.measures import compared, improvement, select, typical
from kappascope.statistics import tail_index

ROWS, KAPPA, LOG = "row_norms", "condition_number", "log_condition_number"
STANDARD = {"strategy": "standard"}


def gain(strategy: str, component: str) -> Measure:
    """By how many per cent a strategy lowers an error of plain SGD, trial by trial."""
    return improvement({"strategy": strategy}, STANDARD, experiment="e4", component=component)


def left(strategy: str, component: str, than: str = "standard") -> Measure:
    """The error under a strategy in units of the error under another."""
    return compared({"strategy": strategy}, {"strategy": than}, component=component)


def tail(strategy: str) -> Measure:
    """The tail index of kappa's error."""
    chosen = {"stream": "own", "strategy": strategy, "component": KAPPA}
    return lambda rows: tail_index(select(rows, **chosen).values())


def medians(strategy: str) -> tuple[Measure, ...]:
    """Kappa's error under plain SGD and under a strategy, and what of log kappa's it takes away."""
    errors = (typical(KAPPA, strategy=name) for name in ("standard", strategy))
    return (*errors, gain(strategy, LOG))


MEDIANS = (
    "Medians exist: the error goes from {1:.3f} to {2:.3f}, trial by trial it falls by {0:.0f} %, "
    "that of log kappa by {3:.0f} % (n = {0.n}). The tail index with the strategy is {4:.2f}."
)
infinite = partial(
    no_mean,
    "A percentage of a mean that does not exist: the smallest singular value that is learned has a "
    "positive density at 0, and the share of trials whose error exceeds x falls like 1/x.",
    stream="own",
    component=KAPPA,
    **STANDARD,
)


CLAIMS = (
    Claim(
        "e4.multipliers-norms",
        "Multipliers cut norm errors by 67 %.",
        "P 4.4, 5.2; S",
        gain("multipliers", ROWS),
        Between(60, 74),
        "Of plain SGD's row-norm error multipliers take away {0:.1f} % (n = {0.n}), from "
        "{1.value:.4f} to {2.value:.4f} in the median; without them, 0.99^200 = 0.1340 is what 200 "
        "steps leave of any difference.",
        also=tuple(typical(ROWS, strategy=name) for name in ("standard", "multipliers")),
    ),
    Claim(
        "e4.multipliers-kappa",
        "Multipliers cut the error of kappa by only 10 %.",
        "P 4.4, 5.2; S",
        gain("multipliers", KAPPA),
        Between(5, 15),
        MEDIANS,
        infinite(),
        also=(*medians("multipliers"), tail("multipliers")),
    ),
    Claim(
        "e4.spectral-kappa",
        "Spectral regularization cuts the error of kappa by 77 %.",
        "P abstract, 1(5), 4.4, 5.2; S",
        gain("spectral", KAPPA),
        Between(70, 84),
        MEDIANS,
        infinite(),
        also=(*medians("spectral"), tail("spectral")),
    ),
    Claim(
        "e4.spectral-norms",
        "Spectral regularization leaves norm errors unchanged.",
        "P 4.4, 5.2; S",
        left("spectral", ROWS),
        Between(0.98, 1.02),
        "The row norms' error is {0:.4f} times that of plain SGD in the median of {0.n} trials.",
    ),
    Claim(
        "e4.svd-middle",
        "SVD correction is a middle ground: 64 % on norms, 32 % on kappa.",
        "P 4.4, 5.2; S",
        (gain("svd", ROWS), left("svd", LOG, "multipliers"), left("svd", LOG, "spectral")),
        (Between(58, 70), Below(1), Above(1)),
        "It takes {0:.1f} % of the row norms' error away. What it leaves of |log kappa - log "
        "kappa*| is {1:.2f} times what multipliers leave and {2:.2f} times what spectral "
        "regularization leaves; of plain SGD's it takes {3:.0f} % away (n = {0.n}).",
        also=(gain("svd", LOG),),
    ),
    Claim(
        "e4.trade-off",
        "There is a fundamental trade-off between norms and spectrum: no single strategy treats "
        "both.",
        "P abstract, 4.4, 5.2; S",
        (gain("multipliers", LOG), gain("spectral", ROWS), gain("svd", LOG)),
        (Below(50), Below(50), Below(50)),
        "Multipliers take {3:.0f} % of the row norms' error away and {0:.0f} % of |log kappa - log "
        "kappa*|, spectral regularization {1:.1f} % and {4:.0f} %, SVD correction {5:.0f} % and "
        "{2:.0f} %; a treatment of both would take half of each. It need not be a conflict: "
        "multipliers and spectral regularization together take {6:.0f} % and {7:.0f} % "
        "(n = {0.n}).",
        also=(
            gain("multipliers", ROWS),
            gain("spectral", LOG),
            gain("svd", ROWS),
            gain("hybrid", ROWS),
            gain("hybrid", LOG),
        ),
    ),
    Claim(
        "e4.hybrid",
        "Combining multipliers and spectral regularization treats both.",
        "P 5.2, 6; S",
        (gain("hybrid", ROWS), gain("hybrid", LOG)),
        (Above(50), Above(50)),
        "Both together take {0:.1f} % of the row norms' error away and {1:.0f} % of |log kappa - "
        "log kappa*| (n = {1.n}); multipliers alone {2:.1f} % of the former, spectral "
        "regularization alone {3:.0f} % of the latter.",
        also=(gain("multipliers", ROWS), gain("spectral", LOG)),
    ),
)
