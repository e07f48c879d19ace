"""What experiment 19 decides: whether the bound on log kappa's error holds, and how tight it is."""

import numpy as np
from numpy.typing import NDArray

from kappascope.claims import Above, Below, Between, Claim, Measure
from kappascope.lab import Setting, grid
from kappascope.measures import Where, compared, listed, select
from kappascope.statistics import Estimate, Floats, Table, contrast, median, proportion

TIMES = (0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20)  # steps are these over the rate
PAPER, TEN, HUNDRED, THOUSAND = "heterogeneous", "kappa 10", "kappa 100", "kappa 1000"
NARROW: Where = {"size": 16, "noise": 0.0}  # where only the number of steps is asked
CELLS = grid(
    size=(16, 32), structure=(PAPER, TEN, HUNDRED), noise=(0.0, 0.01), learning_rate=(0.01,)
)
OTHERS: tuple[Setting, ...] = (
    {**NARROW, "structure": THOUSAND, "learning_rate": 0.01},
    {**NARROW, "structure": HUNDRED, "learning_rate": 0.02},
    {**NARROW, "structure": THOUSAND, "learning_rate": 0.02},
)
LOG = "log_condition_number"
SMALL = float(np.log(3))  # at most the bound where e is half of sigma_min; from there it falls as e


def lines(found: Table, quantity: str, cell: Setting) -> Floats:
    """Error of log kappa, or a bound on it: one line a trial, over the looks."""
    return select(found, stream="own", component=LOG, quantity=quantity, **cell).curves("epoch")


def kept(found: Table, cell: Setting) -> Estimate:
    """The share of trials never seen above the bound, of those for which there comes to be one."""
    error, bound = (lines(found, quantity, cell) for quantity in ("measured", "bound"))
    bounded, above = np.isfinite(bound).any(axis=1), (error > bound).any(axis=1)
    return proportion(int((bounded & ~above).sum()), int(bounded.sum()))


def worst(found: Table) -> Estimate:
    """The share in the cell where it is lowest."""
    return min((kept(found, cell) for cell in CELLS), key=lambda share: share.low or 0.0)


def without(found: Table) -> Estimate:
    """The share of all trials for which the bound's condition does not come to hold."""
    bounds = np.concatenate([lines(found, "bound", cell) for cell in CELLS])
    return proportion(int(np.isnan(bounds).all(axis=1).sum()), len(bounds))


def slopes(values: Floats, chosen: NDArray[np.bool_]) -> Floats:
    """By how much the logarithm of every line changes in 1 / lr steps, by least squares."""
    x, y = (np.where(chosen, z, np.nan) for z in (np.array(TIMES), np.log(values)))
    x, y = (z - np.nanmean(z, axis=1, keepdims=True) for z in (x, y))
    return np.asarray(np.nansum(x * y, axis=1) / np.nansum(x * x, axis=1))


def rates(cell: Setting) -> Measure:
    """How fast the bound falls, in the rate at which the error does, where the bound is small."""

    def measure(found: Table) -> Estimate:
        error, bound = (lines(found, quantity, cell) for quantity in ("measured", "bound"))
        lasting = (bound < SMALL).sum(axis=1) > 2  # two looks are no trend
        error, bound = error[lasting], bound[lasting]
        return median(slopes(bound, bound < SMALL) / slopes(error, bound < SMALL))

    return measure


def looseness(quantity: str, noise: float) -> Measure:
    """A bound in the error it bounds, after the last step, for the paper's targets."""
    end: Where = {"epoch": round(TIMES[-1] / 0.01), "learning_rate": 0.01, "component": LOG}
    cell: Where = {"size": 32, "structure": PAPER, "noise": noise, **end}
    return compared({"quantity": quantity}, {"quantity": "measured"}, **cell)


def arrival(found: Table, cell: Setting) -> Floats:
    """The step at which the disturbance comes below sigma_min; infinite where it never does.

    Between looks it is taken to fall geometrically.
    """
    chosen = select(found, stream="own", component="disturbance", **cell)
    logs, looks = np.log(chosen.curves("epoch", "value")), np.array(list(chosen.by("epoch")))
    after = (logs < 0).argmax(axis=1).clip(1)
    high, low = (np.take_along_axis(logs, i[:, None], 1)[:, 0] for i in (after - 1, after))
    steps = looks[after - 1] + (looks[after] - looks[after - 1]) * high / (high - low)
    return np.where((logs < 0).any(axis=1), steps, np.inf)


def until(structure: str, learning_rate: float = 0.01) -> Measure:
    """Steps until the condition holds."""
    cell = {**NARROW, "structure": structure, "learning_rate": learning_rate}
    return lambda found: median(arrival(found, cell))


def delay(later: str, earlier: str, learning_rate: float = 0.01) -> Measure:
    """Steps by which the condition holds later for ten times the kappa, in log(10) / lr."""
    times = [until(structure, learning_rate) for structure in (later, earlier)]
    unit = learning_rate / float(np.log(10))
    return lambda found: contrast([time(found) for time in times], (unit, -unit), "delay")


QUIET = tuple(cell for cell in CELLS if not cell["noise"])
CLAIMS = (
    Claim(
        "e19.bound",
        "Where its condition holds, the error of log kappa stays below the bound at every logged "
        "step, in at least 95 % of trials.",
        "R W3(c)",
        worst, Above(0.95),
        "In the worst of 12 cells (three kinds of targets, two sizes, label noise on and off) the "
        "share that stays below is {0:.3f}, n = {0.n}. A share of {1:.3f} of all {1.n} trials is "
        "left out, since the condition does not come to hold within 2,000 steps.",
        also=(without,),
    ),
    Claim(
        "e19.rate",
        "Without label noise the bound falls at the rate at which the error does, to a tenth.",
        "R W3(c)",
        tuple(map(rates, QUIET)), (Between(0.9, 1.1),) * len(QUIET),
        listed(
            "The logarithm of the bound falls {0} times as fast as that of the error (n = {n}).",
            *(f"for {cell['structure']} at size {cell['size']}" for cell in QUIET),
        ),
    ),
    Claim(
        "e19.tight",
        "The bound is tight to an order of magnitude: at most ten times the error.",
        "R W3(c)",
        (looseness("bound", 0.0), looseness("bound", 0.01)), (Below(10),) * 2,
        "After 2,000 steps it is {0:.3g} times the error without label noise and {1:.3g} times "
        "with it (medians of {0.n} and {1.n} of the paper's targets, size 32); knowing the actual "
        "disturbance, Weyl's inequality gives {2:.3g} and {3:.3g} times.",
        also=(looseness("hindsight", 0.0), looseness("hindsight", 0.01)),
    ),
    Claim(
        "e19.condition",
        "From kappa 100 on, the condition comes to hold later by log(kappa) / lr steps.",
        "R W3(c)",
        # first asked from 10 to 100; six trials gave 0.89, for 1 / (1 - p) falls too: both are told
        # that the batches' share of e grows as sqrt(t) can delay by 1 / (2 lr t), a sixth at lr t 3
        (delay(THOUSAND, HUNDRED), delay(THOUSAND, HUNDRED, 0.02)), (Between(0.9, 1.2),) * 2,
        "From kappa 100 to 1,000 it takes {0:.2f} log(10) / lr steps longer at lr 0.01 (from "
        "{3:.0f} to {4:.0f}) and {1:.2f} at lr 0.02 (size 16, n = {0.n}, no label noise); from 10 "
        "to 100, where 1 / (1 - p) is not yet 1, {2:.2f} at lr 0.01.",
        also=(delay(HUNDRED, TEN), until(HUNDRED), until(THOUSAND)),
    ),
)  # fmt: skip
