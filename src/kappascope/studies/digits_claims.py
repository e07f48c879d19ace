"""What the digits decide: whether kappa tells of a network what its norms do not.

Every sentence is asked twice. Across settings: the median network of each, with its shape, its
training loss and its norms given. Between the seeds of one setting: ranks inside every setting,
its norms and training loss given, so that nothing a setting fixes can stand behind both. A
correlation below 0.3 in size, a tenth of the variance, is not called telling.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from kappascope import statistics
from kappascope.claims import Above, Below, Claim, Measure
from kappascope.statistics import Estimate, Floats, Table, median, rank_correlation

LEVEL = 0.01  # training cross-entropy at which a network is done, as in Jiang et al. 2020
MEDIUM = 0.3  # a medium correlation (Cohen 1988)
BITS = (8, 4, 3)
KAPPA = "condition_number"
NORMS = ("frobenius_norm", "spectral_norm")  # together they also tell the stable rank
OTHERS = ("effective_rank", "spectral_gap", "row_dispersion")
OUTCOMES = ("error", "cross_entropy", "calibration", "brier", "noise", *(f"int{b}" for b in BITS))
TESTS = (1 + len(OTHERS)) * len(OUTCOMES)  # in a table of correlations
ALL = 1 - (1 - statistics.LEVEL) / TESTS  # Bonferroni: all their intervals cover at once


@dataclass(frozen=True, eq=False)
class Networks:
    """A number of every network that arrived, by component and matrix; and its setting."""

    draw: Floats
    columns: Mapping[tuple[str, str], Floats]

    def of(self, component: str, matrix: str = "mean") -> Floats:
        """A component's logarithm over the matrices, or, if there is none, an outcome."""
        key = (component, matrix)
        return self.columns[key if key in self.columns else (component, "")]


@lru_cache(maxsize=2)
def arrived(rows: Table) -> Networks:
    """The networks that reached the training loss asked for."""
    if not len(rows):
        return Networks(np.empty(0), {})
    found: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
    names = ("component", "matrix", "draw", "seed", "value", "width", "depth")
    for component, matrix, draw, seed, value, *shape in zip(
        *(rows.rows[name].to_pylist() for name in names), strict=True
    ):
        found.setdefault((component, matrix or ""), {})[draw, seed] = value
        found.setdefault(("shape", ""), {})[draw, seed] = 10.0 * shape[0] + shape[1]
    done = [net for net, loss in sorted(found["train_loss", ""].items()) if loss <= LEVEL]
    return Networks(
        np.array([draw for draw, _ in done], dtype=float),
        {key: np.array([values.get(net, np.nan) for net in done]) for key, values in found.items()},
    )


def across(
    component: str,
    outcome: str,
    given: tuple[str, ...] = NORMS,
    matrix: str = "mean",
    level: float = statistics.LEVEL,
) -> Measure:
    """The rank correlation over settings, the median network of each; its shape is given too."""

    def measure(rows: Table) -> Estimate:
        nets = arrived(rows)
        typical = [medians(nets, nets.of(name)) for name in (outcome, "train_loss", *given)]
        shapes = medians(nets, nets.of("shape"))
        alike = [shapes == one for one in np.unique(shapes)[1:]]  # no line through all of them
        x = medians(nets, nets.of(component, matrix))
        return rank_correlation(x, typical[0], (*typical[1:], *alike), level=level)

    return measure


def within(
    component: str,
    outcome: str,
    given: tuple[str, ...] = NORMS,
    matrix: str = "mean",
    level: float = statistics.LEVEL,
) -> Measure:
    """The rank correlation between the seeds of one setting, over all settings."""

    def measure(rows: Table) -> Estimate:
        nets = arrived(rows)
        others = [nets.of(name) for name in ("train_loss", *given)]
        x, y = nets.of(component, matrix), nets.of(outcome)
        return rank_correlation(x, y, others, within=nets.draw, level=level)

    return measure


def medians(nets: Networks, values: Floats) -> Floats:
    """The middle network of every setting."""
    firsts = np.unique(nets.draw, return_index=True)[1]  # networks stand in the order of draws
    return np.array([np.median(one) for one in np.split(values, firsts)[1:]])


def largest(measures: list[Measure], what: str) -> Measure:
    """The largest size of several correlations whose intervals cover at once; so does its own."""

    def measure(rows: Table) -> Estimate:
        found = [one(rows) for one in measures]
        value, n = max(abs(one.value) for one in found), min(one.n for one in found)
        ends = [one.interval for one in found if one.interval]
        if len(ends) < len(found):
            reason = next(one.reason for one in found if not one.interval)
            return Estimate(value, None, None, n, what, reason)
        low = max(max(low, -high, 0.0) for low, high in ends)
        return Estimate(value, low, max(max(-low, high) for low, high in ends), n, what)

    return measure


def told_by_others(kind: Callable[..., Measure]) -> Measure:
    """How much the component that tells most tells beyond the norms."""
    measures = [kind(one, outcome, level=ALL) for one in OTHERS for outcome in OUTCOMES]
    return largest(measures, "largest partial rank correlation")


def inherited(rows: Table) -> Estimate:
    """How kappa of the first matrix goes with its value at the start, between seeds."""
    nets = arrived(rows)
    return rank_correlation(nets.of(KAPPA, "start"), nets.of(KAPPA, "0"), within=nets.draw)


def unwritten(rows: Table) -> Estimate:
    """By which factor the pixels never written on change kappa of the first matrix."""
    nets = arrived(rows)
    gap = nets.of(KAPPA, "0") - nets.of(KAPPA, "written")
    return median(np.exp(np.abs(medians(nets, gap))))


def telling(word: str, sentence: str, outcome: str) -> Claim:
    """A claim that a larger kappa goes with more of an outcome, beyond the norms."""
    return Claim(
        f"digits.kappa-{word}",
        sentence,
        "P 5.1; S; R W1(a)",
        (across(KAPPA, outcome), within(KAPPA, outcome)),
        (Above(MEDIUM), Above(MEDIUM)),
        "Rank correlation of mean log kappa, the norms given: {0:.2f} across {0.n} settings, "
        "{1:.2f} between the seeds of one setting ({1.n} networks); without the norms {2:.2f} and "
        "{3:.2f}; of the largest kappa, the norms given, {4:.2f} and {5:.2f}. "
        f"Telling begins at {MEDIUM}.",
        also=(
            across(KAPPA, outcome, given=()), within(KAPPA, outcome, given=()),
            across(KAPPA, outcome, matrix="max"), within(KAPPA, outcome, matrix="max"),
        ),
    )  # fmt: skip


CLAIMS = (
    telling("accuracy", "Of two networks with the same norms and training loss the one with the "
            "larger kappa errs more on new images.", "error"),
    telling("calibration", "Of two networks with the same norms and training loss the confidence "
            "of the one with the larger kappa is further from its accuracy.", "calibration"),
    telling("noise", "Of two networks with the same norms and training loss noise in the pixels "
            "harms the one with the larger kappa more.", "noise"),
    telling("quantization", "Of two networks with the same norms and training loss rounding the "
            "weights to four bits harms the one with the larger kappa more.", "int4"),
    Claim(
        "digits.norms-first",
        "The spectral norm tells what kappa does not: given kappa, the larger it is, the more "
        "noise harms and the worse is the calibration.",
        "P 2.3; R W1(a)",
        # first judged across settings alone, where it holds; now as strictly as kappa is
        tuple(how("spectral_norm", outcome, (KAPPA,))
              for how in (across, within) for outcome in ("noise", "calibration")),
        (Above(MEDIUM),) * 4,
        "Kappa given, its rank correlation across {0.n} settings is {0:.2f} with the harm of noise "
        "and {1:.2f} with the calibration error; between the seeds of one setting {2:.2f} and "
        "{3:.2f}.",
    ),
    Claim(
        "digits.others",
        "Some other component, effective rank, spectral gap or dispersion of the row norms, tells "
        "some outcome beyond the norms, across settings and between seeds.",
        "S; R W1(a)",
        (told_by_others(across), told_by_others(within)),
        (Above(MEDIUM), Above(MEDIUM)),
        "The largest rank correlation of one of them, the norms given, is {0:.2f} in size across "
        "{0.n} settings and {1:.2f} between the seeds of one setting; the intervals cover for all "
        f"{len(OTHERS) * len(OUTCOMES)} at once.",
    ),
    Claim(
        "digits.first-layer",
        "Kappa of the first matrix is learned: it depends neither on the start nor on the pixels "
        "that no training image writes on.",
        "P 5.1; S",
        (inherited, unwritten),
        (Below(MEDIUM), Below(1.1)),
        "Between the seeds of one setting it has a rank correlation of {0:.2f} with its value at "
        "the start ({0.n} networks). The weights of the three blank pixels touch no training loss, "
        "yet change it by a factor of {1:.3g} in the median setting. Where the matrix is square, "
        "at width 64, these are {2:.2f} and {3:.3g}.",
        also=(lambda rows: inherited(rows.where(width=64)),
              lambda rows: unwritten(rows.where(width=64))),
    ),
)  # fmt: skip
