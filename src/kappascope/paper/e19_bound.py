"""Experiment 19: a proven bound against measurement.

How fast does plain SGD reduce the error of log kappa, and does the bound of docs/theory.md say so?
The bound holds with a probability of 0.95 at least, on the condition that the disturbance e that it
allows for is below the target's smallest singular value. In *hindsight*, with the norm of W_t / (1
- p) - W*, p = (1 - lr)^t, in place of e, it always holds (Weyl). Weyl's inequality takes the
disturbance for an arbitrary one. Along the *direction* of the smallest singular value the variance
of the disturbance is known exactly. It bounds, to first order, the error of that value.
"""

from collections.abc import Iterator
from functools import partial

import numpy as np
import torch
from torch import Tensor

from kappascope.lab.claims import Above, Below, Between, Claim, Measure
from kappascope.lab.experiment import Experiment, Rows, Setting, grid
from kappascope.lab.figures import MARKS, Panel, paths, sheet
from kappascope.lab.measures import LOG_KAPPA, Where, compared, select
from kappascope.lab.statistics import Estimate, contrast, median, proportion, slopes
from kappascope.lab.table import Floats, Table
from kappascope.lab.tasks import Random, Regression, Streams, Structure, heterogeneous, start
from kappascope.lab.training import Matrix, descend, outcome, rows
from kappascope.matrix import spectra
from kappascope.matrix.components import Components
from kappascope.theory import Relaxation, direction_bound, log_kappa_bound, weyl_bound

PAPER, TEN, HUNDRED, THOUSAND = "heterogeneous", "kappa 10", "kappa 100", "kappa 1000"
TIMES = (0.5, 1, 1.5, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20)  # steps are these over the rate
RISK = 0.05
SMALLEST = "smallest_singular_value"


def conditioned(random: Random, size: int, kappa: float) -> Tensor:
    """Draw singular vectors; singular values fall from 1 to 1 / kappa, evenly in logs."""
    left, right = (torch.linalg.qr(random.normal(size, size)).Q for _ in range(2))
    values = kappa ** -torch.linspace(0, 1, size, dtype=left.dtype)
    return left * values @ right.mT


TARGETS: dict[str, Structure] = {
    PAPER: heterogeneous,
    TEN: partial(conditioned, kappa=10.0),
    HUNDRED: partial(conditioned, kappa=100.0),
    THOUSAND: partial(conditioned, kappa=1000.0),
}


def trials(
    streams: Streams, size: int, structure: str, noise: float, learning_rate: float
) -> Iterator[Rows]:
    """Learn one target, and bound the error on the way."""
    target, random = Components(TARGETS[structure](streams.random(), size)), streams.random(1)
    setting, origin = Relaxation(size, learning_rate, noise=noise), start(random, size)
    batches = Regression(target.matrix, noise=noise).batches(random)
    looks = [round(time / learning_rate) for time in TIMES]
    for step in descend(Matrix(origin), batches, learning_rate, steps=looks[-1]):
        if step.index in looks:
            look = outcome if step.batch is None else rows
            yield from look(step.weight, target, epoch=step.index, quantity="measured")
            for row in bounds(step.weight, target, origin, setting, step.index):
                yield {"epoch": step.index, **row}


def bounds(
    weight: Tensor, target: Components, origin: Tensor, setting: Relaxation, step: int
) -> Iterator[Rows]:
    """Give both bounds, NaN where their condition fails, and the norm that hindsight knows."""
    rest = weight / (1 - setting.mean(step)) - target.matrix
    norm, s = spectra.singular_values(rest)[:, 0], target.singular_values
    yield {"component": "disturbance", "value": norm / s[:, -1]}  # below 1: the condition
    bounds_on_error = {
        "bound": log_kappa_bound(setting, target.matrix, origin, step, RISK),
        "hindsight": weyl_bound(norm, s[:, 0], s[:, -1]),
    }
    for quantity, bound in bounds_on_error.items():
        known = torch.where(bound.isfinite(), bound, torch.nan)
        yield {"quantity": quantity, "component": "log_condition_number", "error": known}
    smallest = spectra.singular_values(weight)[:, -1] / (1 - setting.mean(step))
    yield {"component": SMALLEST, "quantity": "measured", "error": (smallest / s[:, -1] - 1).abs()}
    along = direction_bound(setting, target.matrix, origin, step, RISK)
    known = torch.where(along < 1, along, torch.nan)  # beyond, first order says nothing
    yield {"component": SMALLEST, "quantity": "direction", "error": known}


NARROW: Where = {"size": 16, "noise": 0.0}  # where only the number of steps is asked
CELLS = grid(
    size=(16, 32), structure=(PAPER, TEN, HUNDRED), noise=(0.0, 0.01), learning_rate=(0.01,)
)
OTHERS: tuple[Setting, ...] = (
    {**NARROW, "structure": THOUSAND, "learning_rate": 0.01},
    {**NARROW, "structure": HUNDRED, "learning_rate": 0.02},
    {**NARROW, "structure": THOUSAND, "learning_rate": 0.02},
)
END = round(TIMES[-1] / 0.01)  # the last step at the paper's learning rate
SMALL = float(np.log(3))  # at most the bound where e is half of sigma_min; from there it falls as e


def lines(table: Table, quantity: str, cell: Setting) -> Floats:
    """Read the error of log kappa, or a bound on it: one line a trial, over the looks."""
    return select(table, stream="own", component=LOG_KAPPA, quantity=quantity, **cell).curves(
        "epoch"
    )


def kept(table: Table, cell: Setting) -> Estimate:
    """Measure the share of trials never above the bound, of those for which there is one."""
    error, bound = (lines(table, quantity, cell) for quantity in ("measured", "bound"))
    bounded, above = np.isfinite(bound).any(axis=1), (error > bound).any(axis=1)
    return proportion(int((bounded & ~above).sum()), int(bounded.sum()))


def worst(table: Table) -> Estimate:
    """Measure that share in the cell where it is lowest."""
    return min((kept(table, cell) for cell in CELLS), key=lambda share: share.low or 0.0)


def without(table: Table) -> Estimate:
    """Measure the share of all trials for which the bound's condition never holds."""
    bounds = np.concatenate([lines(table, "bound", cell) for cell in CELLS])
    return proportion(int(np.isnan(bounds).all(axis=1).sum()), len(bounds))


def direction_kept(cell: Setting) -> Measure:
    """Measure the share of trials within the bound along its direction after the last step."""

    def measure(table: Table) -> Estimate:
        where: Where = {"stream": "own", "component": SMALLEST, "epoch": END, **cell}
        error, bound = (
            select(table, **where, quantity=quantity).values()
            for quantity in ("measured", "direction")
        )
        bounded = np.isfinite(bound)
        return proportion(int((error <= bound)[bounded].sum()), int(bounded.sum()))

    return measure


def direction_looseness(size: int, structure: str, noise: float) -> Measure:
    """Compare the bound along its direction with the error of sigma_min, after the last step."""
    cell: Where = {"size": size, "structure": structure, "noise": noise, "learning_rate": 0.01}
    arms = ({"quantity": "direction"}, {"quantity": "measured"})
    return compared(*arms, component=SMALLEST, epoch=END, **cell)


def rates(cell: Setting) -> Measure:
    """Compare the rates at which bound and error fall, where the bound is small."""

    def measure(table: Table) -> Estimate:
        error, bound = (lines(table, quantity, cell) for quantity in ("measured", "bound"))
        lasting = (bound < SMALL).sum(axis=1) > 2  # two looks are no trend
        error, bound = error[lasting], bound[lasting]
        times = np.where(bound < SMALL, TIMES, np.nan)
        return median(slopes(times, np.log(bound)) / slopes(times, np.log(error)))

    return measure


def looseness(quantity: str, noise: float) -> Measure:
    """Compare a bound with the error it bounds, after the last step, for the paper's targets."""
    end: Where = {"epoch": round(TIMES[-1] / 0.01), "learning_rate": 0.01, "component": LOG_KAPPA}
    cell: Where = {"size": 32, "structure": PAPER, "noise": noise, **end}
    return compared({"quantity": quantity}, {"quantity": "measured"}, **cell)


def arrival(table: Table, cell: Setting) -> Floats:
    """Find the step at which the disturbance comes below sigma_min; infinite where it never does.

    Between looks it is taken to fall geometrically.
    """
    chosen = select(table, stream="own", component="disturbance", **cell)
    logs, looks = np.log(chosen.curves("epoch", "value")), np.array(list(chosen.by("epoch")))
    after = (logs < 0).argmax(axis=1).clip(1)
    high, low = (np.take_along_axis(logs, i[:, None], 1)[:, 0] for i in (after - 1, after))
    steps = looks[after - 1] + (looks[after] - looks[after - 1]) * high / (high - low)
    return np.where((logs < 0).any(axis=1), steps, np.inf)


def until(structure: str, learning_rate: float = 0.01) -> Measure:
    """Measure the steps until the condition holds."""
    cell = {**NARROW, "structure": structure, "learning_rate": learning_rate}
    return lambda table: median(arrival(table, cell))


def delay(later: str, earlier: str, learning_rate: float = 0.01) -> Measure:
    """Measure how much later the condition holds for ten times the kappa, in log(10) / lr."""
    times = [until(structure, learning_rate) for structure in (later, earlier)]
    unit = learning_rate / float(np.log(10))
    return lambda table: contrast([time(table) for time in times], (unit, -unit), "delay")


CLAIMS = (
    Claim(
        "e19.bound",
        "Where its condition holds, the error of log kappa stays below the bound at every logged "
        "step, in at least 95 % of trials.",
        "R W3(c)",
        measures={"kept": worst, "left_out": without},
        expect={"kept": Above(0.95)},
        explain="In the worst of 12 cells (three kinds of targets, two sizes, label noise on and "
        "off) the share that stays below is {kept:.3f}, n = {kept.n}. A share of {left_out:.3f} of "
        "all {left_out.n} trials is left out, since the condition does not come to hold within "
        "2,000 steps.",
        answers=("W3(c)",),
    ),
    Claim(
        "e19.rate",
        "Without label noise the bound falls at the rate of the error, to a tenth.",
        "R W3(c)",
        measures={
            "rates": {
                f"for {cell['structure']} at size {cell['size']}": rates(cell)
                for cell in CELLS
                if not cell["noise"]
            }
        },
        expect={"rates": Between(0.9, 1.1)},
        explain="The logarithm of the bound falls {rates:.4g} times as fast as that of the error "
        "(n = {rates.n}).",
        answers=("W3(c)",),
    ),
    Claim(
        "e19.tight",
        "The bound is tight to an order of magnitude: at most ten times the error.",
        "R W3(c)",
        measures={
            "noiseless": looseness("bound", 0.0),
            "noisy": looseness("bound", 0.01),
            "noiseless_hindsight": looseness("hindsight", 0.0),
            "noisy_hindsight": looseness("hindsight", 0.01),
        },
        expect={"noiseless": Below(10), "noisy": Below(10)},
        explain="After 2,000 steps the bound is {noiseless:.3g} times the error without label "
        "noise and {noisy:.3g} times with it (medians of {noiseless.n} and {noisy.n} of "
        "the paper's targets, size 32). With the actual disturbance, Weyl's inequality "
        "gives {noiseless_hindsight:.3g} and {noisy_hindsight:.3g} times.",
        answers=("W3(c)",),
    ),
    Claim(
        "e19.direction",
        "Along its own direction, to first order, the error of the smallest singular value is "
        "within its bound in at least 90 % of trials.",
        "R W3(c)",
        measures={
            "kept": {
                f"for {cell['structure']}, size {cell['size']}, noise {cell['noise']}": (
                    direction_kept(cell)
                )
                for cell in CELLS
            }
        },
        # Chebyshev's 95 % is no theorem beyond first order; 90 % can be told from it by 96 trials
        expect={"kept": Above(0.90)},
        explain="After 2,000 steps the error of sigma_min is within the bound in a share of "
        "{kept.span:.3f} of the trials in each of 12 cells (n = {kept.n}).",
        answers=("W3(c)",),
    ),
    Claim(
        "e19.direction-tight",
        "Along its own direction the bound is tight to an order of magnitude: at most ten times "
        "the error of the smallest singular value.",
        "R W3(c)",
        measures={
            "looseness": {
                f"for {structure}, {'with' if noise else 'no'} label noise": direction_looseness(
                    32, structure, noise
                )
                for structure in (PAPER, HUNDRED)
                for noise in (0.0, 0.01)
            }
        },
        # 1 / sqrt(risk) = 4.5 deviations; the median of a normal number's magnitude is 0.67 of one
        expect={"looseness": Between(1, 10)},
        explain="After 2,000 steps this bound is {looseness:.3g} times the error (medians, n = "
        "{looseness.n}, size 32). Weyl's bound is looser by orders of magnitude "
        "(e19.tight).",
        answers=("W3(c)",),
    ),
    Claim(
        "e19.condition",
        "From kappa 100 on, the condition comes to hold later by log(kappa) / lr steps.",
        "R W3(c)",
        # first asked from 10 to 100; six trials gave 0.89, for 1 / (1 - p) falls too: both are told
        measures={
            "delay": delay(THOUSAND, HUNDRED),
            "fast_delay": delay(THOUSAND, HUNDRED, 0.02),
            "early_delay": delay(HUNDRED, TEN),
            "hundred": until(HUNDRED),
            "thousand": until(THOUSAND),
        },
        # that the batches' share of e grows as sqrt(t) can delay by 1 / (2 lr t), a sixth at lr t 3
        expect={"delay": Between(0.9, 1.2), "fast_delay": Between(0.9, 1.2)},
        explain="From kappa 100 to 1,000 it takes {delay:.2f} log(10) / lr steps longer at lr 0.01 "
        "(from {hundred:.0f} to {thousand:.0f}) and {fast_delay:.2f} at lr 0.02 (size 16, "
        "n = {delay.n}, no label noise); from 10 to 100, where 1 / (1 - p) is not yet 1, "
        "{early_delay:.2f} at lr 0.01.",
        answers=("W3(c)",),
    ),
)


def against(size: int, structure: str, noise: float) -> Panel:
    """Draw the measurement under the two bounds."""
    where: Where = {"size": size, "structure": structure, "noise": noise, "learning_rate": 0.01}
    title = f"{structure}, size {size}, {'with' if noise else 'no'} label noise"
    return paths(LOG_KAPPA, split="quantity", title=title, seed=range(32), **where)


PLOT = sheet(
    *(against(32, PAPER, noise) for noise in (0.0, 0.01)),
    *(against(16, HUNDRED, noise) for noise in (0.0, 0.01)),
    paths("disturbance", column="value", split="structure", seed=range(32), learning_rate=0.01,
          **NARROW, title="Disturbance / smallest σ: condition below 1"),
    paths("disturbance", column="value", split="learning_rate", seed=range(32),
          structure=THOUSAND, **NARROW, title="The same for kappa 1000, by learning rate"),
    marks=f"{MARKS} Bounds are drawn for the trials in which their condition holds.",
)  # fmt: skip

EXPERIMENT = Experiment(
    number=19,
    title="A bound on the rate",
    section="review W3(c)",
    question=__doc__,
    grid=(*CELLS, *OTHERS),
    trials=trials,
    own=96,  # from 72 on, none above the bound is more than 95 %
    effort=12.0,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 6},
)
