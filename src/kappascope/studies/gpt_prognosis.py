"""Does kappa foretell that training goes wrong? What is a spike, and who sees it coming.

All of this was fixed before the runs were seen.

- A *spike* is a step whose training loss is not finite, or above the median of the 50 steps before
  by more than 5 times 1.4826 times their median absolute deviation (5 standard deviations of
  normal noise). Upwards only, so that plain progress is none.
- Training is looked at in windows of 10 steps. A window is *asked* if it has no spike itself, the
  window after it has 50 steps before it, and two windows follow or training breaks off before
  that; the answer is yes if those that follow have a spike.
- Three witnesses are heard at the end of a window: the rise of log kappa (the largest of the
  blocks' matrices) over the last two windows, the largest gradient norm in it, and how far its mean
  loss is above that of the window before.
- A witness is as good as the share of pairs (a window before a spike, another of the same run) in
  which the former has the larger value, ties counted half: the area under the curve. One half is
  guessing. Runs of one seed share start and batches: the interval is a jackknife over seeds.

The first 50 steps, in which no finite loss can be a spike, were asked as well at first, and whole
runs were resampled; a reader objected before the full runs were seen.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import scipy

from kappascope.lab import Batch
from kappascope.statistics import Estimate, Floats, Table

SPAN = 10  # steps of a window
MEMORY, DEVIATIONS = 50, 5.0
AHEAD, BEHIND = 2, 2  # windows: 20 steps
FEWEST = 6  # seeds: as few as a median's interval needs
HIGHEST = "largest_log_condition_number"  # of the matrices in the blocks
WITNESSES = {"kappa": "rise of log kappa", "gradient": "gradient norm", "loss": "rise of the loss"}


def too_high(best: float) -> tuple[float, float]:
    """Eight times the best rate, at which training still learns, and 1.0.

    In trial runs no rate up to 16 times the best made a spike, and 1.0 did under both optimizers.
    """
    return 8 * best, 1.0


def spikes(losses: Sequence[float]) -> list[bool]:
    """Which steps spike; the first 50 can only do so by not being finite.

    >>> spikes([2.0, 2.1] * 30 + [9.0, 2.0, math.nan])[-4:]
    [False, True, False, True]
    """
    return [_spikes(losses[max(0, i - MEMORY) : i], loss) for i, loss in enumerate(losses)]


def _spikes(before: Sequence[float], loss: float) -> bool:
    if not math.isfinite(loss):
        return True
    if len(before) < MEMORY:
        return False
    middle = float(np.median(before))
    deviation = 1.4826 * float(np.median(np.abs(np.asarray(before) - middle)))
    return loss > middle + DEVIATIONS * deviation


def windows(steps: Sequence[Mapping[str, float]]) -> Iterable[Batch]:
    """A run in windows: mean loss, largest gradient norm, spikes, and kappa as the window ends."""
    found = spikes([step["loss"] for step in steps])
    for first in range(0, len(steps), SPAN):
        part = steps[first : first + SPAN]
        kappa = [step["kappa"] for step in part if "kappa" in step]
        told = {
            "train_loss": float(np.mean([step["loss"] for step in part])),
            "gradient_norm": max(step["gradient"] for step in part),
            "spikes": float(sum(found[first : first + SPAN])),
            HIGHEST: kappa[-1] if kappa else math.nan,
        }
        for component, value in told.items():
            yield {"component": component, "epoch": first + SPAN, "value": value}


def ending(steps: Sequence[Mapping[str, float]], total: int, lost: float) -> Iterable[Batch]:
    """The mean loss of the last 20 steps, and whether the run diverged.

    It did if it broke off, or ends with a loss above that of who knows only how frequent every
    character is.
    """
    whole = len(steps) == total and math.isfinite(steps[-1]["loss"])
    loss = float(np.mean([step["loss"] for step in steps[-20:]])) if whole else math.inf
    yield {"component": "final_loss", "epoch": total, "value": loss}
    yield {"component": "diverged", "epoch": total, "value": float(loss > lost)}


# --- reading --------------------------------------------------------------------------------------


def witnessed(run: Table) -> tuple[dict[str, Floats], Floats]:
    """What each witness says in the windows of a run that are asked, and whether a spike follows.

    A window after training broke off is not there; the one that broke it counts as a spike.
    """
    loss, gradient, count, kappa = (
        run.where(component=name).curves("epoch", "value")[0]
        for name in ("train_loss", "gradient_norm", "spikes", HIGHEST)
    )
    n = len(loss)
    first = max(BEHIND, MEMORY // SPAN - 1)  # before, nothing that follows can be a spike
    last = n - 1 if broke_off(loss) else n - AHEAD
    asked = [i for i in range(first, last) if count[i] == 0 and np.isfinite(kappa[i])]
    said = {
        "kappa": np.array([kappa[i] - kappa[i - BEHIND] for i in asked]),
        "gradient": np.array([gradient[i] for i in asked]),
        "loss": np.array([loss[i] - loss[i - 1] for i in asked]),
    }
    return said, np.array([float(count[i + 1 : i + 1 + AHEAD].any()) for i in asked])


def broke_off(loss: Floats) -> bool:
    """Whether training ended with a loss that is not finite."""
    return not np.isfinite(loss[-1])


def pairs_won(values: Floats, follows: Floats) -> tuple[float, int]:
    """Pairs of a yes and a no in which the yes has the larger value (ties half), and all pairs.

    >>> pairs_won(np.array([3.0, 1.0, 2.0]), np.array([1.0, 0.0, 1.0]))
    (2.0, 2)
    """
    yes, no = values[follows == 1], values[follows == 0]
    ranks = np.searchsorted(np.sort(no), yes, "left") + np.searchsorted(np.sort(no), yes, "right")
    return float(ranks.sum() / 2), len(yes) * len(no)


def area(won: Mapping[int, Sequence[tuple[float, int]]]) -> Estimate:
    """The share of pairs won within runs, by seed; its interval is a jackknife over the seeds.

    >>> print(area({seed: [(3.0 + seed % 2 / 2, 4)] for seed in range(8)}))
    area under the curve 0.812 [0.757, 0.868] (n = 8)
    >>> print(area({0: [(3.0, 4)]}))
    area under the curve 0.75 (n = 1; no interval: fewer than 6 seeds have spikes)
    """
    each = np.array([np.sum(runs, axis=0) for runs in won.values()], float).reshape(-1, 2)
    told = each[each[:, 1] > 0]
    n, what = len(told), "area under the curve"
    value = float(told[:, 0].sum() / told[:, 1].sum()) if n else math.nan
    if n < FEWEST:
        return Estimate(value, None, None, n, what, f"fewer than {FEWEST} seeds have spikes")
    without = (told.sum(axis=0) - told).T
    spread = math.sqrt((n - 1) / n * float(np.square(without[0] / without[1] - value).sum()))
    reach = float(scipy.stats.t.ppf(0.975, n - 1)) * spread
    return Estimate(value, max(0.0, value - reach), min(1.0, value + reach), n, what)
