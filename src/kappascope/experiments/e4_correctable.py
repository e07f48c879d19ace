"""Whether errors of scale can be corrected and those of kappa cannot: rows of three experiments."""

from kappascope.claims import Above, Below, Between, Claim, Measure
from kappascope.experiments.e4_tradeoff import KAPPA, LOG, ROWS, gain
from kappascope.measures import compared, select, typical
from kappascope.statistics import Estimate, Table, growth_exponent


def growth(component: str) -> Measure:
    """The power of the size with which the median error of experiment 1 grows."""

    def measure(rows: Table) -> Estimate:
        sizes = select(rows, experiment="e1", stream="own", component=component).by("size")
        return growth_exponent({size: part.values() for size, part in sizes.items()})

    return measure


def late(component: str) -> Measure:
    """The median error after the 1000 steps of experiment 9."""
    return typical(component, experiment="e9", intervention=None, epoch=1000)


plateau = compared(
    {"epoch": 2000}, {"epoch": 1000}, experiment="e9", intervention="none", component=KAPPA
)

CORRECTABLE = Claim(
    "all.correctable",
    "Scale errors do not depend on dimension, are correctable by multipliers and vanish; "
    "kappa errors grow, resist and plateau.",
    "P 5.1",
    (
        growth(ROWS),
        gain("multipliers", ROWS),
        late(ROWS),
        growth(KAPPA),
        gain("multipliers", LOG),
        plateau,
    ),
    (Between(-0.05, 0.05), Above(50), Below(1e-3), Above(0), Below(50), Above(0.5)),
    "Row norms: the error grows with size to the power {0:.3f} (experiment 1), multipliers take "
    "{1:.0f} % away (4), and {2:.2g} is left after 1000 steps (9). Kappa: the power is {3:.2f}, "
    "multipliers take {4:.0f} % of |log kappa - log kappa*| away, and 2000 steps leave {5:.2f} "
    "times the error that 1000 steps leave.",
)
