"""What experiment 15 decides: which choices matter to kappa, each against the paper's own."""

from kappascope.claims import Above, Below, Between, Claim, Measure
from kappascope.measures import compared, listed, typical

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
LOG, ROWS = "log_condition_number", "row_norms"


def against_paper(sweep: str, level: str, component: str = LOG) -> Measure:
    """The error in that of the paper's choice, trial by trial."""
    return compared(
        {"sweep": sweep, "choice": level},
        {"sweep": "none", "choice": "the paper's"},
        component=component,
    )


def within(sweep: str, level: str, than: str, component: str) -> Measure:
    """The error at one level of a sweep in that at another, trial by trial."""
    return compared({"choice": level}, {"choice": than}, sweep=sweep, component=component)


def every(sweep: str) -> tuple[Measure, ...]:
    """All levels of a sweep."""
    return tuple(against_paper(sweep, level) for level in SWEEPS[sweep])


def told(sweep: str) -> list[str]:
    """The names of the levels."""
    return [f"at {level}" for level in SWEEPS[sweep]]


TIMES = "In the median trial the error of log kappa is this multiple of that with the paper's "
RANK = "effective_rank"
EITHER = Between(0.8, 1.25)  # no more than a quarter either way counts as no difference
CLAIMS = (
    Claim(
        "e15.learning-rate",
        "A larger learning rate learns kappa: three times the paper's halves the error.",
        "R W9",
        against_paper("learning rate", "0.03"),
        Below(0.5),
        lambda _, *found: listed(TIMES + "0.01: {0} (n = {n}).", *told("learning rate"))(*found),
        also=every("learning rate"),
    ),
    Claim(
        "e15.batch",
        "The batch size hardly matters to kappa, from 16 to 256.",
        "R W8, W9",
        every("batch"),
        (EITHER,) * 2,
        listed(TIMES + "64: {0} (n = {n}).", *told("batch")),
    ),
    Claim(
        "e15.noise",
        "Label noise ten times the paper's changes nothing, a hundred times (1.0) doubles the "
        "error.",
        "R code-level",
        (against_paper("label noise", "0.1"), against_paper("label noise", "1")),
        (EITHER, Above(2)),
        lambda one, two, *found: listed(TIMES + "0.01: {0} (n = {n}).", *told("label noise"))(
            *found
        ),
        also=every("label noise"),
    ),
    Claim(
        "e15.start",
        "What is not learned of kappa after 200 steps is the random start: from zero the error "
        "is halved, from a start ten times larger doubled.",
        "R W3, W7",
        (against_paper("start scale", "0"), against_paper("start scale", "1")),
        (Below(0.5), Above(2)),
        lambda one, two, *found: listed(TIMES + "0.1: {0} (n = {n}).", *told("start scale"))(
            *found
        ),
        also=every("start scale"),
    ),
    Claim(
        "e15.orthogonal",
        "An orthogonal start, as Saxe et al. propose, leaves a smaller error than a Gaussian one.",
        "R W7",
        against_paper("start kind", "orthogonal"),
        Below(0.8),
        "In the median trial the error of log kappa is {0:.2f} times that from a Gaussian start of "
        "the same norm (n = {0.n}), and {1:.2f} times from a multiple of the identity.",
        also=(against_paper("start kind", "identity"),),
    ),
    Claim(
        "e15.multiplier-rate",
        "The multipliers' learning rate matters: the full one leaves less of the norms' error than "
        "a tenth of it.",
        "R W8, code-level",
        within("multiplier rate", "1", "0.1", ROWS),
        Below(0.8),
        "The row norms' error is {0:.2f} times that at a tenth, log kappa's {1:.2f} times; at a "
        "hundredth they are {2:.2f} and {3:.2f} times (n = {0.n}).",
        also=(
            within("multiplier rate", "1", "0.1", LOG),
            within("multiplier rate", "0.01", "0.1", ROWS),
            within("multiplier rate", "0.01", "0.1", LOG),
        ),
    ),
    Claim(
        "e15.penalty",
        "A penalty ten times stronger leaves less of the error of log kappa.",
        "R W4(a)",
        within("penalty", "0.05", "0.005", LOG),
        Below(0.8),
        "It leaves {0:.2f} times what the paper's strength leaves (n = {0.n}), a hundred times "
        "stronger {1:.2f} times, ten times weaker {2:.2f} times.",
        also=(
            within("penalty", "0.5", "0.005", LOG),
            within("penalty", "0.0005", "0.005", LOG),
        ),
    ),
    Claim(
        "e15.threshold",
        "The effective rank is well learned (below 0.05) at every threshold from 0.001 to 0.1.",
        "R W11, section 2",
        tuple(typical(RANK, sweep="threshold", choice=level) for level in SWEEPS["threshold"]),
        (Below(0.05),) * 3,
        listed("The median error of the effective rank is {0} (n = {n}).", *told("threshold")),
    ),
)
