"""What experiment 16 decides: what inputs that are not white do to kappa."""

import numpy as np

from kappascope.claims import Above, Below, Between, Claim, Measure
from kappascope.inputs import INPUTS
from kappascope.measures import Where, listed, select, typical
from kappascope.statistics import Estimate, Floats, Table, median, ratio

LOOKS = (200, 1000, 5000)
RATE = 0.01
LOG, ROWS, END = "log_condition_number", "row_norms", LOOKS[-1]


def curves(found: Table, inputs: str, epoch: int, column: str = "value") -> Floats:
    """One line a trial, from the direction of most variance to that of least."""
    chosen = select(found, stream="own", component="direction", inputs=inputs, epoch=epoch)
    return chosen.curves("place", column)


def exponent(inputs: str) -> Measure:
    """Of what is lacking after 200 steps, how it falls with lr * variance * steps; theory says 1.

    By least squares over the directions of each trial of which a tenth to nine tenths are lacking.
    """

    def measure(found: Table) -> Estimate:
        lacking, variances = (curves(found, inputs, 200, c) for c in ("value", "variance"))
        y, x = -np.log(lacking), RATE * 200 * variances
        within = (x > 0.1) & (x < 2.3)
        x, y = np.where(within, x, np.nan), np.where(within, y, np.nan)
        x, y = (z - np.nanmean(z, axis=1, keepdims=True) for z in (x, y))
        return median(np.nansum(x * y, axis=1) / np.nansum(x * x, axis=1))

    return measure


def last_direction(inputs: str) -> Measure:
    """What the direction of least variance lacks in the end."""
    return lambda found: median(curves(found, inputs, END)[:, -1])


def end(component: str, inputs: str, epoch: int = END) -> Measure:
    """The median error after some steps."""
    return typical(component, inputs=inputs, epoch=epoch)


MILD, STEEP = ("power law", "tokens"), ("steep power law", "digits")
NAMES = [f"for {name}" for name in INPUTS]


def against_white(inputs: str) -> Measure:
    """The median error of log kappa in the end, in that with white inputs."""
    where: Where = {"stream": "own", "component": LOG, "epoch": END}
    pair = (inputs, "white")
    return lambda found: ratio(*(select(found, inputs=name, **where).values() for name in pair))


CLAIMS = (
    Claim(
        "e16.stays",
        "Where inputs hardly vary in some directions log kappa is off by more than 0.1 after 5,000 "
        "steps.",
        "R W1, W3",
        tuple(end(LOG, name) for name in STEEP), (Above(0.1),) * 2,
        "The median error is {0:.3g} for variances that fall like k^-2 and {1:.3g} for digits, "
        "with white inputs {2:.2g} (n = {0.n}). A direction of variance v takes 1/(lr v) steps; "
        "here some have a v below 0.01.",
        also=(end(LOG, "white"),),
    ),
    Claim(
        "e16.delay",
        "Where inputs vary in every direction they only delay: after 5,000 steps the error of log "
        "kappa is that of white inputs.",
        "R W1, W3",
        tuple(map(against_white, MILD)), (Between(0.5, 2),) * 2,
        "After 5,000 steps the median error is {0:.2f} times that of white inputs for variances "
        "that fall like 1/k and {1:.2f} times for words (n = {0.n}); after 200 steps the errors "
        "are {2:.2f} and {3:.2f}, and {4:.2f} for white inputs.",
        also=tuple(end(LOG, name, 200) for name in (*MILD, "white")),
    ),
    Claim(
        "e16.rates",
        "Each direction is learned at a rate that is the variance of the inputs along it.",
        "R W3",
        (exponent("power law"), exponent("digits")), (Between(0.9, 1.1),) * 2,
        "What a direction of variance v lacks after 200 steps falls as exp(-{0:.2f} lr v 200) for "
        "the power law and exp(-{1:.2f} lr v 200) for digits (n = {0.n}); white inputs have v = 1 "
        "in every direction.",
    ),
    Claim(
        "e16.never",
        "What the inputs never show is never learned: the last direction of the digits lacks "
        "all of itself.",
        "R W3",
        last_direction("digits"), Between(0.95, 1.05),
        "After 5,000 steps the direction of least variance lacks {0:.2f} of itself for digits, of "
        "which three pixels are blank, {1:.2g} for the power law, {2:.2g} for tokens and {3:.2g} "
        "for white inputs (n = {0.n}).",
        also=tuple(map(last_direction, ("power law", "tokens", "white"))),
    ),
    Claim(
        "e16.norms",
        "Row norms are learned (below 0.05) whatever the inputs, after 5,000 steps.",
        "R W1",
        tuple(end(ROWS, name) for name in INPUTS), (Below(0.05),) * len(INPUTS),
        listed("The median error of the row norms after 5,000 steps is {0} (n = {n}).", *NAMES),
    ),
)  # fmt: skip
