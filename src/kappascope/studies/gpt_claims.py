"""What the study of the character GPT decides; every rule is older than the full run.

An arm's runs at its best rate are compared with those of the same optimizer alone, seed by seed:
same start, same batches. Five seeds allow no 95 % interval without a distribution (the sign test's
least p is 1/16), so Student's is taken: the differences are of means over 32,000 characters, and
seeds enter them in many small ways. Fewer than three seeds decide nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy
from numpy.typing import ArrayLike

from kappascope.claims import Above, Below, Claim, Measure
from kappascope.measures import select
from kappascope.statistics import (
    LEVEL,
    Estimate,
    Floats,
    Table,
    paired_difference,
    proportion,
    rank_correlation,
)
from kappascope.studies.gpt_prognosis import HIGHEST, area, pairs_won, witnessed
from kappascope.theory import GaussianNull

OPTIMIZERS = ("AdamW", "Muon")
REMEDIES = ("multipliers", "penalty", "hybrid", "bound")
ARMS = tuple((o, c) for o in OPTIMIZERS for c in ("alone", *REMEDIES))
HIDDEN = ("query", "key", "value", "output", "up", "down")  # kinds of matrices in the blocks
LEAST, TOO_FEW = 3, "fewer than 3 seeds"
LOSS, LOG = "validation_loss", "log_condition_number"


# --- choosing -------------------------------------------------------------------------------------


def tuned(found: Table, optimizer: str, correction: str) -> dict[float, float]:
    """The validation loss of an arm at every rate that was tried; infinite if it diverged."""
    arm = {"stage": "tune", "optimizer": optimizer, "correction": correction}
    each = select(found, **arm, component=LOSS).by("rate").items()
    return {
        rate: float(np.nan_to_num(rows.values("value")[0], nan=math.inf)) for rate, rows in each
    }


def best_rate(found: Table, optimizer: str, correction: str) -> float:
    """The rate with the lowest validation loss; of two alike, the lower rate."""
    losses = tuned(found, optimizer, correction)
    return min(losses, key=lambda rate: (losses[rate], rate))


def best_correction(found: Table) -> str:
    """Of all but Hybrid, the one with the lowest tuned loss under AdamW."""
    others = [name for name in REMEDIES if name != "hybrid"]
    return min(others, key=lambda name: min(tuned(found, "AdamW", name).values()))


# --- reading --------------------------------------------------------------------------------------


def losses(found: Table, optimizer: str, correction: str, stage: str = "compare") -> Table:
    """The validation losses of an arm, one a seed."""
    arm = {"optimizer": optimizer, "correction": correction, "stage": stage}
    return select(found, **arm, component=LOSS)


def kappas(
    found: Table, optimizer: str, correction: str, kinds: tuple[str, ...] = HIDDEN
) -> dict[int, Floats]:
    """Log kappa of the matrices (or products) of these kinds after training, by seed."""
    arm = {"stage": "compare", "optimizer": optimizer, "correction": correction}
    rows = select(found, **arm, component=LOG).where(kind=kinds)
    last = rows.where(epoch=max(rows.rows["epoch"].to_pylist()))
    return {seed: part.values("value") for seed, part in last.by("seed").items()}


def over_seeds(values: ArrayLike, what: str = "mean difference") -> Estimate:
    """The mean with Student's interval, from three seeds on, if all of them are finite.

    >>> print(over_seeds([0.1, 0.2, 0.3]))
    mean difference 0.2 [-0.0484, 0.448] (n = 3)
    >>> print(over_seeds([0.0, 0.0, 0.0]))
    mean difference 0 [0, 0] (n = 3; zero width: 3 of 3 values are equal)
    >>> print(over_seeds([0.1, 0.2]))
    mean difference 0.15 (n = 2; no interval: fewer than 3 seeds)
    """
    every = np.asarray(values, float)
    finite = every[np.isfinite(every)]
    n, missing = finite.size, every.size - finite.size
    value = float(finite.mean()) if n else math.nan
    if n < LEAST or missing:
        reason = f"{missing} runs diverged" if missing else TOO_FEW
        return Estimate(value, None, None, n, what, reason, missing)
    reach = float(scipy.stats.t.ppf((1 + LEVEL) / 2, n - 1) * scipy.stats.sem(finite))
    equal = None if reach else f"zero width: {n} of {n} values are equal"
    return Estimate(value, value - reach, value + reach, n, what, equal)


def gained(optimizer: str, correction: str, stage: str = "compare", base: str = "") -> Measure:
    """The validation loss less that of the optimizer alone (of ``base``), seed by seed."""

    def measure(found: Table) -> Estimate:
        ours = losses(found, optimizer, correction, stage)
        theirs = losses(found, base or optimizer, "alone", stage)
        return over_seeds(np.subtract(*ours.paired(theirs, "value")))

    return measure


def lowered(optimizer: str, correction: str, base: str = "") -> Measure:
    """The largest log kappa of the blocks, less that of the optimizer alone, seed by seed."""

    def measure(found: Table) -> Estimate:
        ours, theirs = (
            kappas(found, optimizer, correction),
            kappas(found, base or optimizer, "alone"),
        )
        both = sorted(ours.keys() | theirs.keys())
        ends = [[arm[k].max() if k in arm else math.nan for k in both] for arm in (ours, theirs)]
        return over_seeds(np.array(ends[0]) - np.array(ends[1]))

    return measure


def kappa_with_loss(found: Table, optimizers: Sequence[str] = OPTIMIZERS) -> float:
    """The rank correlation, over the arms, of the blocks' median log kappa and the loss.

    Each arm is one point, the mean over its seeds. Arms are chosen, no sample of anything: there is
    no interval.
    """
    arms = [arm for arm in ARMS if arm[0] in optimizers]
    kappa = [np.mean([np.median(v) for v in kappas(found, *arm).values()]) for arm in arms]
    each = [losses(found, *arm).values("value").mean() for arm in arms]
    return rank_correlation(kappa, each).value


def beyond_random(found: Table) -> Estimate:
    """By how much log kappa of the square matrices exceeds a Gaussian matrix's, AdamW alone."""
    kinds = ("query", "key", "value", "output")
    width = int(select(found, stage="compare").rows["width"].to_pylist()[0])
    null = GaussianNull(width, width).log_condition_number
    return over_seeds(
        [np.median(v) - null for v in kappas(found, "AdamW", "alone", kinds).values()], "excess"
    )


# --- warmup and spikes ----------------------------------------------------------------------------


def runs(found: Table) -> list[Table]:
    """The runs at rates that are too high, each by itself."""
    rows = select(found, stage="warmup")
    parts = [rows]
    for column in ("optimizer", "rate", "warmup", "seed"):
        parts = [part for whole in parts for part in whole.by(column).values()]
    return parts


def foretold(witness: str) -> Measure:
    """How well a witness tells the windows before a spike from others of the same run."""

    def measure(found: Table) -> Estimate:
        won: dict[int, list[tuple[float, int]]] = {}
        for run in runs(found):
            said, follows = witnessed(run)
            pairs = pairs_won(said[witness], follows)
            won.setdefault(run.rows["seed"][0].as_py(), []).append(pairs)
        return area(won)

    return measure


def learning(found: Table) -> list[dict[int, Table]]:
    """For each optimizer, the runs at the lower of the rates that are too high, by warmup."""
    every = select(found, stage="warmup").by("optimizer").values()
    return [next(iter(rows.by("rate").values())).by("warmup") for rows in every]


def warmed(component: str, reduce: Callable[[Floats], float]) -> Measure:
    """With warmup less without, seed by seed, the mean over both optimizers.

    They share start and batches: sixteen differences would not be independent.
    """

    def measure(found: Table) -> Estimate:
        seeds = sorted(select(found, stage="warmup").by("seed"))
        pairs = [
            [
                np.mean([reduce(own(by, warm, seed)) for by in learning(found)])
                for warm in (True, False)
            ]
            for seed in seeds
        ]
        return paired_difference(*np.array(pairs).T)

    def own(by: dict[int, Table], warm: bool, seed: int) -> Floats:
        rows = list(by.values())[warm]
        return rows.where(seed=seed, component=component).values("value")

    return measure


def share(component: str, warm: bool) -> Measure:
    """The share of runs, with warmup or without, in which something happened."""

    def measure(found: Table) -> Estimate:
        some = [list(by.values())[warm].where(component=component) for by in learning(found)]
        hits = [part.values("value").any() for rows in some for part in rows.by("seed").values()]
        return proportion(sum(map(bool, hits)), len(hits))

    return measure


def highest(run: Table) -> float:
    """The largest log kappa on the way."""
    return _highest(run.where(component=HIGHEST).values("value"))


def _highest(values: Floats) -> float:
    return float(np.max(values[np.isfinite(values)], initial=-math.inf))


# --- claims ---------------------------------------------------------------------------------------


def helps(correction: str, sentence: str, source: str) -> Claim:
    """A correction lowers the loss under both optimizers."""
    return Claim(
        f"gpt.{correction}",
        f"{sentence} lowers the validation loss of a language model, under AdamW and under Muon.",
        source,
        tuple(gained(optimizer, correction) for optimizer in OPTIMIZERS),
        (Below(0), Below(0)),
        "At its best rate the loss is {0:+.4f} nats a character different from AdamW's "
        "alone at its own best, and {1:+.4f} from Muon's (paired seeds, n = {0.n}; Student's "
        "intervals).",
    )


CLAIMS = (
    helps("multipliers", "A factor for every row and column", "Velikanov et al. 2026; P 5.2"),
    helps("penalty", "A penalty on kappa", "P 4.4, 5.2"),
    helps("hybrid", "Hybrid, multipliers with a penalty on kappa,", "S (prescription); P 5.2"),
    helps("bound", "A bound on kappa", "R W1(b)"),
    Claim(
        "gpt.kappa-controlled",
        "Penalty, Hybrid and bound lower the largest kappa of a language model's matrices.",
        "S (prescription); P 4.4",
        tuple(lowered("AdamW", name) for name in REMEDIES[1:]),
        (Below(0),) * 3,
        "Under AdamW the largest log kappa of the blocks changes by {0:+.2f} with the penalty, by "
        "{1:+.2f} with Hybrid and by {2:+.2f} with the bound (n = {0.n} seeds), each at its own "
        "best rate; by {3:+.2f} with multipliers, and by {4:+.2f} with Muon in place of AdamW.",
        also=(lowered("AdamW", "multipliers"), lowered("Muon", "alone", base="AdamW")),
    ),
    Claim(
        "gpt.exploded",
        "Training leaves a transformer's matrices far worse conditioned, by ten times or more, "
        "than random matrices of their shape.",
        "P 5.1; S (prognosis)",
        beyond_random,
        Above(math.log(10)),
        "With AdamW alone the median log kappa of the square matrices in the blocks is {0:+.2f} "
        "beyond the expectation for Gaussian ones (ten times would be +2.30; n = {0.n} seeds). "
        "Heads can trade shape between query and key, value and output: the table has the "
        "products, where they cannot.",
    ),
    Claim(
        "gpt.prognosis",
        "Kappa leads loss spikes: it rises before them.",
        "S (prognosis)",
        foretold("kappa"),
        Above(0.5),
        "Windows of 10 steps before a spike are told from others of the same run, in a share of "
        "pairs, {0:.2f} by the rise of log kappa, {1:.2f} by the gradient norm, {2:.2f} by the "
        "rise of the loss (0.5 is guessing; n = {0.n} seeds with spikes, of runs at rates that "
        "are too high, most of which never learned much).",
        also=(foretold("gradient"), foretold("loss")),
    ),
    Claim(
        "gpt.warmup",
        "With warmup kappa stays lower and training at a high rate goes better.",
        "P 5.1; S (prognosis)",
        (
            warmed(HIGHEST, _highest),
            warmed("final_loss", lambda values: float(values[0])),
        ),
        (Below(0), Below(0)),
        "At 8 times the best rates the highest log kappa of a run changes by {0:+.2f} with "
        "warmup, and the loss of the last 20 steps by {1:+.3f} (medians of {0.n} seeds); of the "
        "runs without warmup {2:.2f} diverge and {4:.2f} spike, with it {3:.2f} and {5:.2f}.",
        also=tuple(share(what, warm) for what in ("diverged", "spikes") for warm in (False, True)),
    ),
    Claim(
        "gpt.larger",
        "The correction that looks best in tuning, Hybrid aside, lowers the loss of a larger model "
        "as well.",
        "R W1(b)",
        lambda found: gained("AdamW", best_correction(found), "confirm")(found),
        Below(0),
        "With 4 layers of width 128 its loss differs by {0:+.4f} from AdamW's alone (n = {0.n} "
        "seeds), Hybrid's by {1:+.4f}, and Muon's alone by {2:+.4f}.",
        also=(
            gained("AdamW", "hybrid", "confirm"),
            gained("Muon", "alone", "confirm", base="AdamW"),
        ),
    ),
)  # fmt: skip
