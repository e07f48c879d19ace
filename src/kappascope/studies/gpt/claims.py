"""What the study of the character GPT decides.

An arm's runs at its best rate are compared with those of the same optimizer alone, seed by seed:
same start, same batches. Differences of losses are means over 32,000 characters, and seeds enter
them in many small ways: Student's interval is taken. The largest kappa of a network is skewed: of
it the median is, with the exact interval. Fewer than eight seeds decide nothing.

A first run had five seeds, the penalties of an earlier version, and judged the square matrices of
heads, in which a head can hide shape. The rules below were changed after that run had been seen and
before the rows of the present one existed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from kappascope.lab.claims import Above, Below, Claim, Measure, Mended
from kappascope.lab.heads import (
    PRODUCTS,
    excess_by_seed,
    head_excess,
    head_multiple,
    multiples_by_rate,
)
from kappascope.lab.measures import LOG_KAPPA, select
from kappascope.lab.statistics import (
    Estimate,
    median,
    over_seeds,
    paired_difference,
    proportion,
    rank_correlation,
)
from kappascope.lab.table import Floats, Table
from kappascope.studies.gpt.prognosis import HIGHEST, area, predictions, warning_pairs
from kappascope.studies.gpt.tuning import ARMS, OPTIMIZERS, REMEDIES, arm_rows, best_correction
from kappascope.theory import GaussianNull

HIDDEN = ("query", "key", "value", "output", "up", "down")  # kinds of matrices in the blocks
SEEDS_BEFORE = (
    "The arms were trained anew, with eight seeds in place of five and with penalties whose steps "
    "are bounded. The rule is as it was."
)
SEEN = Mended(
    "not asked",
    "The claim was first put after an earlier run of five seeds had been seen. It is judged on "
    "eight runs that were trained after the rule, five of them with the seeds of that run.",
)


def kappas(
    rows: Table, optimizer: str, correction: str, kinds: tuple[str, ...] = HIDDEN
) -> dict[int, Floats]:
    """Collect log kappa of the matrices (or products) of these kinds after training, by seed."""
    chosen = arm_rows(rows, optimizer, correction, LOG_KAPPA).where(kind=kinds)
    last = chosen.where(epoch=max(chosen.rows["epoch"].to_pylist()))
    return {seed: part.values("value") for seed, part in last.by("seed").items()}


def loss_change(optimizer: str, correction: str, stage: str = "compare", base: str = "") -> Measure:
    """Subtract the loss of the optimizer alone (or of ``base``) from an arm's, seed by seed."""

    def measure(rows: Table) -> Estimate:
        ours = arm_rows(rows, optimizer, correction, stage=stage)
        theirs = arm_rows(rows, base or optimizer, "alone", stage=stage)
        return over_seeds(np.subtract(*ours.paired(theirs, "value")))

    return measure


def kappa_change(optimizer: str, correction: str, base: str = "") -> Measure:
    """Subtract the largest log kappa of the optimizer alone from an arm's, seed by seed."""

    def measure(rows: Table) -> Estimate:
        arms = kappas(rows, optimizer, correction), kappas(rows, base or optimizer, "alone")
        seeds = sorted(arms[0].keys() | arms[1].keys())
        largest = [[arm[k].max() if k in arm else math.nan for k in seeds] for arm in arms]
        return paired_difference(*largest)

    return measure


def kappa_with_loss(rows: Table, optimizers: Sequence[str] = OPTIMIZERS) -> float:
    """Return the rank correlation, over the arms, of the blocks' median log kappa and the loss.

    Each arm is one point, the mean over its seeds. Arms are chosen, no sample of anything: there is
    no interval.
    """
    arms = [arm for arm in ARMS if arm[0] in optimizers]
    kappa = [np.mean([np.median(v) for v in kappas(rows, *arm).values()]) for arm in arms]
    loss = [arm_rows(rows, *arm).values("value").mean() for arm in arms]
    return rank_correlation(kappa, loss).value


def square_multiple(optimizer: str) -> Measure:
    """Measure how many times chance's kappa the median square matrix of the blocks has."""
    kinds = ("query", "key", "value", "output")

    def measure(rows: Table) -> Estimate:
        width = int(select(rows, stage="compare").rows["width"].to_pylist()[0])
        null = GaussianNull(width, width).log_condition_number
        seeds = kappas(rows, optimizer, "alone", kinds).values()
        return median([math.exp(np.median(values) - null) for values in seeds])

    return measure


def rate_span(kind: str, optimizer: str) -> Measure:
    """Measure the multiple of chance at the lowest and at the highest rate tried, as an interval.

    It is one seed's median head: a range that was seen, not an estimate of anything.
    """

    def measure(rows: Table) -> Estimate:
        by_rate = multiples_by_rate(rows, kind, optimizer)
        medians = [float(np.median(heads)) for heads in by_rate.values()]
        n = len(next(iter(by_rate.values())))
        return Estimate(medians[0], min(medians), max(medians), n, "multiple of chance, by rate")

    return measure


def heads_compared(kind: str) -> Measure:
    """Subtract log kappa of the median head under AdamW from that under Muon, seed by seed."""

    def measure(rows: Table) -> Estimate:
        arms = [excess_by_seed(rows, kind, optimizer=o, stage="compare") for o in ("Muon", "AdamW")]
        seeds = sorted(arms[0].keys() & arms[1].keys())
        return over_seeds([np.median(arms[0][k]) - np.median(arms[1][k]) for k in seeds])

    return measure


# --- warmup and spikes ----------------------------------------------------------------------------


def unstable_runs(rows: Table) -> list[Table]:
    """Separate the runs at rates that are too high."""
    parts = [select(rows, stage="warmup")]
    for column in ("optimizer", "rate", "warmup", "seed"):
        parts = [part for whole in parts for part in whole.by(column).values()]
    return parts


def predicted_by(predictor: str) -> Measure:
    """Measure how well a predictor tells windows before a spike from others of the run."""

    def measure(rows: Table) -> Estimate:
        pairs_by_seed: dict[int, list[tuple[float, int]]] = {}
        for run in unstable_runs(rows):
            values, spike_follows = predictions(run)
            pairs = warning_pairs(values[predictor], spike_follows)
            pairs_by_seed.setdefault(run.rows["seed"][0].as_py(), []).append(pairs)
        return area(pairs_by_seed)

    return measure


def runs_by_warmup(rows: Table) -> list[dict[bool, Table]]:
    """Take each optimizer's runs at the lower of the rates that are too high, by warmup."""
    optimizers = select(rows, stage="warmup").by("optimizer").values()
    lower = [next(iter(runs.by("rate").values())).by("warmup") for runs in optimizers]
    return [dict(zip((False, True), runs.values(), strict=False)) for runs in lower]


def warmup_change(component: str, summary: Callable[[Floats], float]) -> Measure:
    """Measure the difference that warmup makes, seed by seed, as the mean over both optimizers.

    They share start and batches: sixteen differences would not be independent.
    """

    def measure(rows: Table) -> Estimate:
        optimizers = runs_by_warmup(rows)

        def mean(warm: bool, seed: int) -> float:
            runs = (by[warm].where(seed=seed, component=component) for by in optimizers)
            return float(np.mean([summary(run.values("value")) for run in runs]))

        seeds = sorted(select(rows, stage="warmup").by("seed"))
        return paired_difference(*([mean(warm, k) for k in seeds] for warm in (True, False)))

    return measure


def share_with(component: str, warm: bool) -> Measure:
    """Measure the share of runs, with warmup or without, in which something happened."""

    def measure(rows: Table) -> Estimate:
        parts = [by[warm].where(component=component) for by in runs_by_warmup(rows)]
        happened = [
            bool(run.values("value").any()) for part in parts for run in part.by("seed").values()
        ]
        return proportion(sum(happened), len(happened))

    return measure


def largest_finite(values: Floats) -> float:
    """Return the largest of the values that are finite."""
    return float(np.max(values[np.isfinite(values)], initial=-math.inf))


# --- claims ---------------------------------------------------------------------------------------


def lowers_loss(correction: str, sentence: str, source: str) -> Claim:
    """Claim that a correction lowers the loss under both optimizers."""
    return Claim(
        f"gpt.{correction}",
        f"{sentence} lowers the validation loss of a language model, under AdamW and under Muon.",
        source,
        measures={
            "adamw": loss_change("AdamW", correction),
            "muon": loss_change("Muon", correction),
        },
        expect={"adamw": Below(0), "muon": Below(0)},
        explain="With the correction at its best rate, the loss differs by {adamw:+.4f} nats a "
        "character from that of AdamW alone at its own best rate, and by {muon:+.4f} from that of "
        "Muon alone (paired seeds, n = {adamw.n}; Student's intervals).",
        mended=Mended("undecided", SEEDS_BEFORE),
        answers=("Section 4, layer types",),
    )


CLAIMS = (
    lowers_loss("multipliers", "A factor for every row and column", "Velikanov et al. 2026; P 5.2"),
    lowers_loss("penalty", "A penalty on kappa", "P 4.4, 5.2"),
    lowers_loss(
        "hybrid", "Hybrid, multipliers with a penalty on kappa,", "S (prescription); P 5.2"
    ),
    lowers_loss("bound", "A bound on kappa", "R W1(b)"),
    Claim(
        "gpt.hybrid-adamw",
        "Under AdamW, Hybrid lowers the validation loss of both sizes of language model.",
        "S (prescription); P 5.2",
        measures={
            "small": loss_change("AdamW", "hybrid"),
            "large": loss_change("AdamW", "hybrid", "confirm"),
        },
        expect={"small": Below(0), "large": Below(0)},
        explain="With Hybrid at its best rate, the loss differs from that of AdamW alone at its "
        "own best rate by {small:+.4f} nats a character in the small model and by {large:+.4f} in "
        "the larger one (paired seeds, n = {small.n} and {large.n}; Student's intervals). In a "
        "first run of five seeds, with an earlier version of the penalty, the differences were "
        "-0.0072 [-0.0099, -0.0045] and -0.0049 [-0.0083, -0.0016].",
        mended=SEEN,
        answers=("Section 4, layer types",),
    ),
    Claim(
        "gpt.kappa-controlled",
        "Penalty, Hybrid and bound lower the largest kappa of a language model's matrices.",
        "S (prescription); P 4.4",
        measures={
            **{name: kappa_change("AdamW", name) for name in REMEDIES},
            "muon": kappa_change("Muon", "alone", base="AdamW"),
        },
        expect={"penalty": Below(0), "hybrid": Below(0), "bound": Below(0)},
        explain="Under AdamW the largest log kappa of the blocks changes by {penalty:+.2f} with "
        "the penalty, by {hybrid:+.2f} with Hybrid and by {bound:+.2f} with the bound (medians "
        "over n = {penalty.n} seeds, every arm at its own best rate). It changes by "
        "{multipliers:+.2f} with multipliers, and by {muon:+.2f} with Muon in place of AdamW.",
        mended=Mended(
            "holds",
            "The largest kappa is skewed. So its median with the exact interval replaces its mean "
            "with Student's interval. There are eight seeds in place of five.",
        ),
        answers=("Section 4, layer types",),
    ),
    Claim(
        "gpt.exploded",
        "Training leaves a transformer's matrices worse conditioned than random matrices of "
        "their shape, by ten times or more.",
        "P 5.1; S (prognosis)",
        measures={
            **{f"adamw_{kind}": head_multiple(kind, "AdamW") for kind in PRODUCTS},
            **{f"muon_{kind}": head_multiple(kind, "Muon") for kind in PRODUCTS},
            "adamw_rates": rate_span("QK", "AdamW"),
            "muon_rates": rate_span("QK", "Muon"),
            "adamw_square": square_multiple("AdamW"),
            "muon_square": square_multiple("Muon"),
        },
        expect={
            f"{optimizer}_{kind}": Above(10) for optimizer in ("adamw", "muon") for kind in PRODUCTS
        },
        explain="QK is what a head compares and OV is what it writes; no change of basis inside "
        "the head touches either. The median kappa of such a product is this multiple of that of "
        "products of random factors: with AdamW {adamw_QK:.1f} for QK and {adamw_OV:.1f} for OV, "
        "with Muon {muon_QK:.1f} and {muon_OV:.1f} (best rates, n = {adamw_QK.n} seeds). Over the "
        "rates of tuning the multiple of QK goes from {adamw_rates.low:.1f} to "
        "{adamw_rates.high:.0f} with AdamW and from {muon_rates.low:.1f} to {muon_rates.high:.1f} "
        "with Muon (one seed). The square matrices alone have {adamw_square:.1f} times (AdamW) "
        "and {muon_square:.1f} times (Muon) the kappa of Gaussian ones.",
        mended=Mended(
            "fails",
            "Before, the rule judged the square matrices of a head, under AdamW alone. A head can "
            "shift shape from one of them to another. Now the rule judges the products QK and OV, "
            "under both optimizers.",
        ),
        answers=("W1(b)",),
    ),
    Claim(
        "gpt.qk-adamw",
        "With AdamW at its best learning rate, QK (what a head compares) is conditioned worse "
        "than products of random factors, by ten times or more.",
        "R W1(b)",
        measures={
            "excess": head_excess("QK", "AdamW"),
            "small": head_multiple("QK", "AdamW"),
            "large": head_multiple("QK", "AdamW", "confirm"),
        },
        expect={"excess": Above(math.log(10))},
        explain="The kappa of QK is {small:.1f} times that of products of random factors (n = "
        "{small.n} seeds). In the larger model, after fewer steps at half the rate, it is "
        "{large:.1f} times.",
        mended=SEEN,
        answers=("W1(b)",),
    ),
    Claim(
        "gpt.muon-heads",
        "At the best rates Muon leaves QK and OV better conditioned than AdamW does.",
        "R W1(b), Q1",
        measures={kind: heads_compared(kind) for kind in PRODUCTS},
        expect=dict.fromkeys(PRODUCTS, Below(0)),
        explain="Seed by seed, log kappa of the median head under Muon differs from that under "
        "AdamW by {QK:+.2f} for QK and by {OV:+.2f} for OV (n = {QK.n}).",
        mended=SEEN,
        answers=("W1(b)",),
    ),
    Claim(
        "gpt.prognosis",
        "Kappa foretells loss spikes: it rises before them.",
        "S (prognosis)",
        measures={name: predicted_by(name) for name in ("kappa", "gradient", "loss")},
        expect={"kappa": Above(0.5)},
        explain="A pair is a window of 10 steps before a spike and another window of the same "
        "run. The share of pairs that are told apart is {kappa:.2f} by the rise of log kappa, "
        "{gradient:.2f} by the gradient norm and {loss:.2f} by the rise of the loss, where 0.5 is "
        "guessing (n = {kappa.n} seeds with spikes). The runs have rates that are too high, and "
        "most of them never learned much.",
        mended=Mended("undecided", SEEDS_BEFORE),
        answers=("W1(b)",),
    ),
    Claim(
        "gpt.warmup",
        "With warmup kappa stays lower and training at a high rate goes better.",
        "P 5.1; S (prognosis)",
        measures={
            "highest": warmup_change(HIGHEST, largest_finite),
            "final": warmup_change("final_loss", lambda values: float(values[0])),
            "cold_diverged": share_with("diverged", warm=False),
            "warm_diverged": share_with("diverged", warm=True),
            "cold_spiked": share_with("spikes", warm=False),
            "warm_spiked": share_with("spikes", warm=True),
        },
        expect={"highest": Below(0), "final": Below(0)},
        explain="At 8 times the best rates, warmup changes the highest log kappa of a run by "
        "{highest:+.2f} and the loss of the last 20 steps by {final:+.3f} (medians of {highest.n} "
        "seeds). Without warmup a share of {cold_diverged:.2f} of the runs diverges and "
        "{cold_spiked:.2f} spikes; with warmup these shares are {warm_diverged:.2f} and "
        "{warm_spiked:.2f}.",
        mended=Mended("undecided", SEEDS_BEFORE),
        answers=("W1(b)",),
    ),
    Claim(
        "gpt.larger",
        "The correction that looks best in tuning (Hybrid aside) lowers the loss of a larger "
        "model as well.",
        "R W1(b)",
        measures={
            "best": lambda rows: loss_change("AdamW", best_correction(rows), "confirm")(rows),
            "hybrid": loss_change("AdamW", "hybrid", "confirm"),
            "muon": loss_change("Muon", "alone", "confirm", base="AdamW"),
        },
        expect={"best": Below(0)},
        explain="With 4 layers of width 128, the loss with that correction differs by {best:+.4f} "
        "from that of AdamW alone (n = {best.n} seeds). The loss with Hybrid differs by "
        "{hybrid:+.4f}, and that of Muon alone by {muon:+.4f}.",
        mended=Mended("holds", SEEDS_BEFORE),
        answers=("W1(b)",),
    ),
)
