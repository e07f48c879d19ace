"""Loss spikes, and how well kappa, the gradient norm and the loss predict them.

All of this was fixed before the runs were seen.

- A *spike* is a step whose training loss is not finite, or above the median of the 50 steps before
  by more than 5 times 1.4826 times their median absolute deviation (5 standard deviations of
  normal noise). Upwards only, so that plain progress is none.
- Training is divided into windows of 10 steps. A window is *tested* if it has no spike itself, the
  window after it has 50 steps before it, and two windows follow or training breaks off before
  that; the answer is yes if those that follow have a spike.
- Three predictors are read at the end of a window: the rise of log kappa (the largest of the
  blocks' matrices) over the last two windows, the largest gradient norm in it, and how far its mean
  loss is above that of the window before.
- A predictor is as good as the share of pairs (a window before a spike, another of the same run) in
  which the former has the larger value, ties counted half: the area under the curve. One half is
  guessing. Runs of one seed share start and batches: the interval is a jackknife over seeds.

The first 50 steps, in which no finite loss can be a spike, were tested as well at first, and whole
runs were resampled; a reader objected before the full runs were seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import scipy

from kappascope.lab.experiment import Rows
from kappascope.lab.statistics import LEVEL, Estimate
from kappascope.lab.table import Floats, Table

WINDOW = 10  # steps
STEPS_BEFORE, DEVIATIONS = 50, 5.0  # what a spike is compared with, and by how much it exceeds it
WINDOWS_AHEAD, WINDOWS_BEHIND = 2, 2  # 20 steps
MIN_SEEDS = 6  # with spikes: as few as a median's interval needs
HIGHEST = "largest_log_condition_number"  # of the matrices in the blocks
PREDICTORS = {"kappa": "rise of log kappa", "gradient": "gradient norm", "loss": "rise of the loss"}


def too_high(best: float) -> tuple[float, float]:
    """Give two rates that are too high: eight times the best, which still learns, and 1.0.

    In trial runs no rate up to 16 times the best made a spike, and 1.0 did under both optimizers.
    """
    return 8 * best, 1.0


def spikes(losses: Sequence[float]) -> list[bool]:
    """Tell which steps spike; the first 50 can only do so by not being finite.

    >>> spikes([2.0, 2.1] * 30 + [9.0, 2.0, math.nan])[-4:]
    [False, True, False, True]
    """

    def is_spike(before: Sequence[float], loss: float) -> bool:
        if not math.isfinite(loss):
            return True
        if len(before) < STEPS_BEFORE:
            return False
        middle = float(np.median(before))
        deviation = 1.4826 * float(np.median(np.abs(np.asarray(before) - middle)))
        return loss > middle + DEVIATIONS * deviation

    return [is_spike(losses[max(0, i - STEPS_BEFORE) : i], loss) for i, loss in enumerate(losses)]


def windows(steps: Sequence[Mapping[str, float]]) -> Iterable[Rows]:
    """Yield mean loss, largest gradient norm, spikes and last kappa of every window of a run."""
    spiked = spikes([step["loss"] for step in steps])
    for first in range(0, len(steps), WINDOW):
        part = steps[first : first + WINDOW]
        kappa = [step["kappa"] for step in part if "kappa" in step]
        values = {
            "train_loss": float(np.mean([step["loss"] for step in part])),
            "gradient_norm": max(step["gradient"] for step in part),
            "spikes": float(sum(spiked[first : first + WINDOW])),
            HIGHEST: kappa[-1] if kappa else math.nan,
        }
        for component, value in values.items():
            yield {"component": component, "epoch": first + WINDOW, "value": value}


def end_rows(steps: Sequence[Mapping[str, float]], total: int, lost: float) -> Iterable[Rows]:
    """Yield the mean loss of the last 20 steps, and whether the run diverged.

    It did if it broke off, or ends with a loss above ``lost``: that of a model which knows only
    how frequent every character is.
    """
    whole = len(steps) == total and math.isfinite(steps[-1]["loss"])
    loss = float(np.mean([step["loss"] for step in steps[-20:]])) if whole else math.inf
    yield {"component": "final_loss", "epoch": total, "value": loss}
    yield {"component": "diverged", "epoch": total, "value": float(loss > lost)}


def predictions(run: Table) -> tuple[dict[str, Floats], Floats]:
    """Read every predictor in the windows of a run that are tested, and whether a spike follows.

    A window after training broke off is not there; the one that broke it counts as a spike.
    """
    loss, gradient, count, kappa = (
        run.where(component=name).curves("epoch", "value")[0]
        for name in ("train_loss", "gradient_norm", "spikes", HIGHEST)
    )
    n, broke_off = len(loss), not np.isfinite(loss[-1])
    # before the first, nothing that follows can be a spike
    first = max(WINDOWS_BEHIND, STEPS_BEFORE // WINDOW - 1)
    last = n - 1 if broke_off else n - WINDOWS_AHEAD
    tested = [i for i in range(first, last) if count[i] == 0 and np.isfinite(kappa[i])]
    values = {
        "kappa": np.array([kappa[i] - kappa[i - WINDOWS_BEHIND] for i in tested]),
        "gradient": np.array([gradient[i] for i in tested]),
        "loss": np.array([loss[i] - loss[i - 1] for i in tested]),
    }
    follows = [float(count[i + 1 : i + 1 + WINDOWS_AHEAD].any()) for i in tested]
    return values, np.array(follows)


def warning_pairs(values: Floats, follows: Floats) -> tuple[float, int]:
    """Count pairs in which the window before a spike has the larger value, and all pairs.

    A tie counts half.

    >>> warning_pairs(np.array([3.0, 1.0, 2.0]), np.array([1.0, 0.0, 1.0]))
    (2.0, 2)
    """
    yes, no = values[follows == 1], values[follows == 0]
    ranks = np.searchsorted(np.sort(no), yes, "left") + np.searchsorted(np.sort(no), yes, "right")
    return float(ranks.sum() / 2), len(yes) * len(no)


def area(pairs_by_seed: Mapping[int, Sequence[tuple[float, int]]]) -> Estimate:
    """Estimate the share of pairs won within runs; the interval is a jackknife over seeds.

    >>> print(area({seed: [(3.0 + seed % 2 / 2, 4)] for seed in range(8)}))
    area under the curve 0.812 [0.757, 0.868] (n = 8)
    >>> print(area({0: [(3.0, 4)]}))
    area under the curve 0.75 (n = 1; no interval: fewer than 6 seeds have spikes)
    """
    counts = np.array([np.sum(runs, axis=0) for runs in pairs_by_seed.values()], float).reshape(
        -1, 2
    )
    counts = counts[counts[:, 1] > 0]
    n, what = len(counts), "area under the curve"
    value = float(counts[:, 0].sum() / counts[:, 1].sum()) if n else math.nan
    if n < MIN_SEEDS:
        return Estimate(value, None, None, n, what, f"fewer than {MIN_SEEDS} seeds have spikes")
    without = (counts.sum(axis=0) - counts).T
    spread = math.sqrt((n - 1) / n * float(np.square(without[0] / without[1] - value).sum()))

    def at(level: float) -> tuple[float, float]:
        reach = float(scipy.stats.t.isf((1 - level) / 2, n - 1)) * spread
        return max(0.0, value - reach), min(1.0, value + reach)

    return Estimate(value, *at(LEVEL), n, what, at=at)
