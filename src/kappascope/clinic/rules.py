"""The rules of a diagnosis: each one function, with its threshold and the reason for it.

Chance is the measure: a limit is a quantile of what random matrices of the same shape do, shared by
all matrices of the model (Bonferroni), so that of a thousand fresh models about one gets a false
warning from a rule. What chance excludes is not yet an illness, for a trained matrix is no random
one. Hence each rule also has a size below which nobody would act.

A new rule is one function here: of a matrix under ``@rule``, of the model under ``@model_rule``.
Its name with hyphens is its id, and its docstring has its reasons.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any, TypeAlias, TypeVar

from scipy.special import betaincinv, chdtri, gammaincinv

from kappascope.clinic import SEVERITIES, Severity
from kappascope.clinic.examination import Examination, Finding, Spread
from kappascope.clinic.prescriptions import Flaw, Prescription, is_left_alone, prescribe
from kappascope.model.attention import Product
from kappascope.model.chains import Chain
from kappascope.model.names import is_mask
from kappascope.model.skipped import Reason, ReasonKind, Skipped
from kappascope.system.extras import plugins
from kappascope.text import error_text, first_few, number
from kappascope.theory import GaussianNull, MarchenkoPastur

FALSE_ALARM_RATE = 1e-3  # the share of fresh models that a rule may accuse
# Sizes from which a rule speaks, and from which it warns.
KAPPA_INFO, KAPPA_WARNING = 10.0, 100.0  # times the usual: one digit lost beyond chance, and two
NORM_INFO, NORM_WARNING = 3.0, 10.0  # times the median: beyond what is common, and of another scale
CV_INFO, CV_WARNING = 0.5, 1.0  # coefficients of variation: trained layers have 0.05 to 0.35
RANK_WARNING = 0.5  # of the rank that chance gives


@dataclass(frozen=True)
class Symptom:
    """What a rule says; of the matrix that it was shown, unless ``subject`` and ``about`` tell.

    >>> Symptom("info", "all entries are zero").flaw is None
    True
    """

    severity: Severity
    evidence: str
    advice: str = ""
    flaw: Flaw | None = None  # what a correction could treat
    subject: str = ""
    about: tuple[Examination, ...] = ()


@dataclass(frozen=True)
class Measurements:
    """All that was measured of a model: what a matrix is compared with, and shares its chance with.

    >>> Measurements(rows=(Examination("w", (8, 8), "float32", "ok"),) * 4).chance
    0.00025
    """

    rows: tuple[Examination, ...]
    products: tuple[Product, ...] = ()
    chains: tuple[Chain, ...] = ()
    unsound: tuple[Skipped, ...] = ()  # vectors that are not finite or cannot be read

    @property
    def chance(self) -> float:
        """How unlikely a matrix must be to be noticed among so many."""
        return FALSE_ALARM_RATE / max(1, len(self.rows) + len(self.products) + len(self.chains))

    @cached_property
    def is_fresh(self) -> bool:
        """Whether most matrices that can tell look as initialised."""
        fresh = [is_fresh(row) for row in self.rows if can_tell(row)]
        return 2 * sum(fresh) >= len(fresh)


MatrixRule: TypeAlias = Callable[[Examination, Measurements], Symptom | None]
ModelRule: TypeAlias = Callable[[Measurements], Iterator[Symptom | Skipped]]
T = TypeVar("T")
RULES: dict[str, MatrixRule] = {}
MODEL_RULES: dict[str, ModelRule] = {}


def rule(judge: MatrixRule) -> MatrixRule:
    """Register a rule for every matrix; its name is its id."""
    RULES[judge.__name__.replace("_", "-")] = judge
    return judge


def model_rule(judge: ModelRule, rule_id: str = "") -> ModelRule:
    """Register a rule for the model as a whole; its name is its id, unless another is given.

    It may also say what it could not judge.
    """
    MODEL_RULES[rule_id or judge.__name__.replace("_", "-")] = judge
    return judge


@dataclass(frozen=True)
class Judgement:
    """What all rules say of a model, worst first, and which of them failed where and why."""

    findings: tuple[Finding, ...]
    failed: tuple[Skipped, ...]


def judgement(model: Measurements) -> Judgement:
    """Ask every rule; one that fails on a matrix costs what it would have said there, no more.

    >>> judgement(Measurements(rows=()))
    Judgement(findings=(), failed=())
    """
    for offered in plugins("rules").values():
        rule(offered)
    results: list[Finding | Skipped | None] = []
    for row in model.rows:
        for rule_id, judge in RULES.items():
            symptom = _attempt(rule_id, row.name, partial(judge, row, model))
            results.append(_finding(rule_id, symptom, row.name, (row,)))
    for rule_id, ask in MODEL_RULES.items():
        symptoms = chain.from_iterable(map(ask, [model]))  # asked by the first next()
        while symptom := _attempt(rule_id, "model", partial(next, symptoms, None)):
            results.append(_finding(rule_id, symptom, "model", ()))
    found = [result for result in results if isinstance(result, Finding)]
    failed = [result for result in results if isinstance(result, Skipped)]
    found.sort(key=lambda finding: -SEVERITIES.index(finding.severity))
    return Judgement(tuple(found), tuple(failed))


def _attempt(rule_id: str, subject: str, judge: Callable[[], T]) -> T | Skipped:
    """Return what a rule says of its subject, or why it failed to say anything."""
    try:
        return judge()
    except Exception as error:
        text = f"the rule {rule_id} failed: {error_text(error)}"
        return Skipped(subject, Reason(ReasonKind.RULE_FAILED, text))


def _finding(
    rule_id: str, symptom: Symptom | Skipped | None, subject: str, about: tuple[Examination, ...]
) -> Finding | Skipped | None:
    """Turn a symptom into a finding; what a rule could not judge stays as it is."""
    if not isinstance(symptom, Symptom):
        return symptom
    subject, about = symptom.subject or subject, symptom.about or about
    return _attempt(rule_id, subject, partial(_treated, rule_id, symptom, subject, about))


def _treated(
    rule_id: str, symptom: Symptom, subject: str, about: tuple[Examination, ...]
) -> Finding:
    """Add the correction that treats a symptom, if there is one for this kind of layer."""
    treatment, severity = Prescription(None, "", symptom.advice), symptom.severity
    if symptom.flaw is not None and about:
        treatment = prescribe(symptom.flaw, *about)
        if all(map(is_left_alone, about)):
            severity = "info"  # where nothing is to be done about it, nobody is to be alarmed
    calm = "no need to act; if the layer trains badly, "
    advice = f"{calm if severity == 'info' and treatment.correction else ''}{treatment.advice}"
    correction, snippet = treatment.correction, treatment.snippet
    return Finding(rule_id, severity, subject, symptom.evidence, advice, correction, snippet)


# --- numbers that are none, or none left ----------------------------------------------------------


DIVERGED = "the file is damaged or training diverged: go back to an earlier checkpoint"


@rule
def non_finite(row: Examination, model: Measurements) -> Symptom | None:
    """A NaN or an infinity spreads to every output: critical, at any count.

    A mask alone may have one kind of them, minus infinity.
    """
    if row.failure is None or not row.failure.is_non_finite:
        return None
    evidence = str(row.failure)
    if row.failure.kind is ReasonKind.MINUS_INFINITY and is_mask(row.name):
        return Symptom("info", evidence, "fine in a mask, which adds minus infinity to logits")
    return Symptom("critical", evidence, DIVERGED)


@partial(model_rule, rule_id="non-finite")
def non_finite_vectors(model: Measurements) -> Iterator[Symptom]:
    """A NaN in a bias, a gain or another vector spreads as one in a matrix does."""
    for vector in model.unsound:
        if vector.reason.is_non_finite:
            yield Symptom("critical", str(vector.reason), DIVERGED, subject=vector.name)


@rule
def zero(row: Examination, model: Measurements) -> Symptom | None:
    """All entries zero: usual for what is to start as nothing (adapters, last layers of branches).

    In a model whose other matrices are trained, a layer that passes nothing on is a warning.
    """
    if row.frobenius_norm != 0 or not min(row.shape):
        return None
    meant = model.is_fresh or is_left_alone(row)
    advice = "fine if it is initialised so; otherwise it was not loaded or not trained"
    return Symptom("info" if meant else "warning", "all entries are zero", advice)


# --- rows and columns -----------------------------------------------------------------------------


_DEAD = "prune them, or look for {} that were constant during training"


def _dead(dead: int, every: int, what: str) -> str:
    return f"{dead} of {every} {what} {'is' if dead == 1 else 'are'} dead"


@rule
def dead_rows(row: Examination, model: Measurements) -> Symptom | None:
    """Rows that are nothing beside the median: outputs that do not depend on the input.

    No initialisation in use makes some rows zero, but a lookup table has them for padding, by its
    kind or, where the name does not tell, by being the only dead row of a tall matrix.
    """
    dead, rows = row.dead_rows or 0, row.shape[0]
    if not dead or not row.frobenius_norm:
        return None
    padding = dead == 1 and rows > row.shape[1] and row.kind == "other"
    expected = padding or is_left_alone(row)
    advice = "usual for padding and tokens never seen" if expected else _DEAD.format("outputs")
    return Symptom("info" if expected else "warning", _dead(dead, rows, "rows"), advice)


@rule
def dead_columns(row: Examination, model: Measurements) -> Symptom | None:
    """Columns that are nothing beside the median: inputs that nothing reads.

    A masked or identity-like convolution has columns of zeros by design.
    """
    dead, columns = row.dead_columns or 0, row.shape[1]
    if not dead or not row.frobenius_norm:
        return None
    expected = is_left_alone(row) or row.kind == "convolution"
    advice = "usual for masked kernels" if row.kind == "convolution" else _DEAD.format("inputs")
    return Symptom("info" if expected else "warning", _dead(dead, columns, "columns"), advice)


@rule
def outlier_rows(row: Examination, model: Measurements) -> Symptom | None:
    """A row far longer than the median one; see :func:`_outlying`."""
    return _outlying("row", row.row_norms, row.outlier_rows, row.shape, model)


@rule
def outlier_columns(row: Examination, model: Measurements) -> Symptom | None:
    """A column far longer than the median one; see :func:`_outlying`."""
    return _outlying("column", row.column_norms, row.outlier_columns, row.shape[::-1], model)


def _outlying(
    what: str, norms: Spread | None, count: int | None, shape: tuple[int, int], model: Measurements
) -> Symptom | None:
    """Return a norm beyond chance that is at least three times the median one.

    Trained transformers have two to five times. From ten on one vector decides sigma_1 and the
    scale at which the matrix can be quantized: a warning.
    """
    if norms is None or not norms.median or not count:
        return None
    times = norms.max / norms.median
    if times < max(NORM_INFO, _usual_excess(*shape, model.chance)):
        return None
    longest = f"the longest {what} has {times:.1f} times the median norm"
    evidence = f"{longest}; {count} {'stands' if count == 1 else 'stand'} out"
    return Symptom("warning" if times >= NORM_WARNING else "info", evidence, flaw=Flaw.SCALE)


def _usual_excess(count: int, length: int, chance: float) -> float:
    """Return by how much chance lets the longest of ``count`` vectors exceed the median.

    Squared norms are chi-square; half the chance is for a long vector and half for a short median,
    which few vectors may have (the share below an order statistic is a beta variable).
    """
    middle = (count + 1) // 2
    share = float(betaincinv(middle, count - middle + 1, chance / 2))
    # quantiles of chi squared, without scipy.stats, which takes half a second to load
    longest, usual = chdtri(length, chance / (2 * count)), 2 * gammaincinv(length / 2, share)
    return math.sqrt(longest / max(usual, sys.float_info.min))


@rule
def uneven_norms(row: Examination, model: Measurements) -> Symptom | None:
    """Row or column norms that vary far more than those of a random matrix, 1/sqrt(2 n).

    Worth a word from a coefficient of variation of 0.5 on (trained transformers have 0.05 to
    0.35); from 1 on the norms differ as much as they measure: a warning.
    """
    spread, what = max(_spreads(row), default=(0.0, ""))
    if spread < CV_INFO:
        return None
    evidence = f"{what} norms vary by {spread:.2f} of their mean"
    return Symptom("warning" if spread >= CV_WARNING else "info", evidence, flaw=Flaw.SCALE)


def _spreads(row: Examination) -> Iterator[tuple[float, str]]:
    """Yield coefficients of variation at least three times those of chance, dead ones left out."""
    rows = ("row", row.row_norms, row.dead_rows, *row.shape)
    columns = ("column", row.column_norms, row.dead_columns, *row.shape[::-1])
    for what, norms, dead, count, length in (rows, columns):
        if norms is not None and norms.cv is not None:
            # with a share p of the norms and none else, 1 + cv^2 is (1 + their own cv^2) / p
            own = math.sqrt(max(0.0, (1 + norms.cv**2) * (1 - (dead or 0) / count) - 1))
            if own >= 3 / math.sqrt(2 * length):
                yield own, what


# --- the spectrum ---------------------------------------------------------------------------------


@rule
def ill_conditioned(row: Examination, model: Measurements) -> Symptom | None:
    """Kappa beyond chance, by the low end of its interval: what is certain despite rounding.

    A square random matrix has a kappa beyond x with probability 2 n / x, so that the tail
    probability, not the number of deviations, decides. A rectangular one hardly varies, and every
    trained one is beyond chance: worth a word is ten times the usual kappa, a warning a hundred.
    """
    times = _times_usual(row, row.condition_number_low or row.condition_number, model)
    if times < KAPPA_INFO:
        return None
    (m, n), known = row.shape, row.resolved or row.condition_number_low is None
    kappa = number(row.condition_number if known else row.condition_number_low)
    what = f"kappa {kappa}" if known else f"kappa, at least {kappa},"
    usual = f"at least {times:,.0f} times that of a random {m} x {n} matrix"
    evidence = f"{what} is beyond chance: {usual}"
    if times < KAPPA_WARNING and not known:
        return Symptom("info", evidence, "no need to act; its size is not resolved")
    severity: Severity = "warning" if times >= KAPPA_WARNING else "info"
    return Symptom(severity, evidence, flaw=_flaw(row, model))


def _flaw(row: Examination, model: Measurements) -> Flaw:
    """Return the flaw that makes kappa large, so that all rules advise one treatment."""
    if rank_deficient(row, model):
        return Flaw.RANK
    return Flaw.BOTH if uneven_norms(row, model) else Flaw.SHAPE


def _times_usual(row: Examination, kappa: float | None, model: Measurements) -> float:
    """Return the ratio of kappa to that of a random matrix of the shape.

    0 if it is not beyond chance.
    """
    # the stored null_tail spares a look at the null in most cases
    if kappa is None or row.null_tail is None or row.null_tail > model.chance:
        return 0.0
    null = GaussianNull(*row.shape)
    if null.tail(kappa) > model.chance:
        return 0.0
    return kappa / math.exp(null.log_condition_number)


@rule
def unresolved(row: Examination, model: Measurements) -> Symptom | None:
    """Kappa not known to a factor of two, because of how the matrix is stored.

    Usual for large square matrices in 16 bits. A warning if the stored kappa looks grave and might
    be nothing but rounding: somebody might act on it.
    """
    kappa, low, high = row.condition_number, row.condition_number_low, row.condition_number_high
    if row.resolved or kappa is None or low is None or min(row.shape) < 2:
        return None
    top = "infinity" if high is None else number(high)
    evidence = f"{row.storage} leaves kappa open between {number(low)} and {top}"
    least = _times_usual(row, low, model)
    if least >= KAPPA_WARNING:
        return Symptom("info", evidence, "that it is large is certain, how large is not")
    grave = _times_usual(row, kappa, model) >= KAPPA_WARNING
    advice = "do not act on kappa; examine a checkpoint with more digits"
    return Symptom("warning" if grave else "info", evidence, advice)


@rule
def rank_deficient(row: Examination, model: Measurements) -> Symptom | None:
    """Singular to the last digit, or with less than half the effective rank that chance gives.

    Chance gives Marchenko and Pastur's share of singular values above 1 % of the largest, almost
    all of them, and fluctuates by one or two. Dead rows or columns are told elsewhere.
    """
    if not row.sigma_max or row.effective_rank is None or min(row.shape) < 2:
        return None
    alive = _alive(row)
    singular = row.condition_number is None and alive == min(row.shape)
    null = MarchenkoPastur(*row.shape)
    usual = alive * float(1 - null.cdf(0.01 * null.edges[1]))
    if not singular and row.effective_rank >= RANK_WARNING * usual:
        return None
    rank = f"effective rank {row.effective_rank}, where chance gives {usual:.0f}"
    evidence = f"numerically singular, {rank}" if singular else rank
    return Symptom("warning", evidence, flaw=Flaw.RANK)


def _alive(row: Examination) -> int:
    """Return the rank that rows and columns which are not dead could have."""
    rows, columns = row.shape
    return max(1, min(rows - (row.dead_rows or 0), columns - (row.dead_columns or 0)))


# --- matrices that look as initialised -----------------------------------------------------------
# Training that leaves the bulk of spectrum and entries as it was stays hidden, the more so in small
# matrices.

TELLING_SIZE = 32  # singular values from which a spectrum tells a fresh matrix from another
MOVED_FROM = 1e-3  # of its norm, from the reference: what even bfloat16 would show
# Excess kurtosis, and the variance of that of n entries, times n (from moments up to the eighth).
LAWS = {"normal": (0.0, 24.0), "truncated normal": (-0.634, 3.85), "uniform": (-1.2, 1.32)}
LAW_DEVIATIONS = 4.0  # from the kurtosis of a law
ORTHOGONAL_KAPPA = 1.01  # what rounding to bfloat16 leaves of 1


def is_fresh(row: Examination) -> bool:
    """Tell whether a spectrum is as near to Marchenko and Pastur's as chance, or orthogonal.

    Singular values of a random matrix repel each other: their distance from the law is of order
    log(n) / n, not 1/sqrt(n), so that little training shows. The entries must be of a law that
    layers are drawn from, too, and not have moved from those of a reference.

    >>> import torch
    >>> from kappascope.clinic.examination import examine
    >>> is_fresh(examine("w", torch.eye(40))), is_fresh(examine("w", torch.ones(40, 40)))
    (True, False)
    """
    moved_by = (row.errors or {}).get("overall_matrix") or 0.0
    if row.null_distance is None or moved_by > MOVED_FROM:
        return False
    if is_orthogonal(row):
        return True
    within_chance = not row.outliers and row.null_distance < usual_distance(row)
    return within_chance and law(row) is not None


def law(row: Examination) -> str | None:
    """Return the law of initial entries whose kurtosis a matrix has, within chance.

    >>> law(Examination("w", (40, 40), "float32", "ok", entry_kurtosis=-1.17))
    'uniform'
    >>> law(Examination("w", (40, 40), "float32", "ok", entry_kurtosis=-0.9))
    """
    entries, kurtosis = row.shape[0] * row.shape[1], row.entry_kurtosis or 0.0
    distances = {
        name: abs(kurtosis - excess) / math.sqrt(variance / entries)
        for name, (excess, variance) in LAWS.items()
    }
    nearest = min(distances, key=lambda name: distances[name])
    return nearest if distances[nearest] < LAW_DEVIATIONS else None


def can_tell(row: Examination) -> bool:
    """Tell whether there are enough singular values for a fresh matrix to be told from another.

    >>> can_tell(Examination("w", (40, 31), "float32", "ok", null_distance=0.1))
    False
    """
    return row.null_distance is not None and min(row.shape) >= TELLING_SIZE


def usual_distance(row: Examination) -> float:
    """Return the distance that 999 of 1000 fresh matrices stay below.

    Fitted to simulated quantiles of 32 to 1024 singular values, checked with other random numbers.

    >>> round(usual_distance(Examination("w", (512, 2048), "float32", "ok")), 4)
    0.0084
    """
    n = min(row.shape)
    return (1.3 + 0.48 * math.log(n)) / n


def is_orthogonal(row: Examination) -> bool:
    """Tell whether all singular values are equal.

    >>> is_orthogonal(Examination("w", (8, 8), "float32", "ok", condition_number=1.0002))
    True
    """
    return row.condition_number is not None and row.condition_number < ORTHOGONAL_KAPPA


@rule
def untrained(row: Examination, model: Measurements) -> Symptom | None:
    """A spectrum that chance alone explains; see :func:`is_fresh`."""
    if not can_tell(row) or not is_fresh(row):
        return None
    advice = "fine if it is new, frozen or small; otherwise it was not loaded or not trained"
    if is_orthogonal(row):
        return Symptom(
            "info", "all singular values are equal, as after orthogonal initialisation", advice
        )
    distance = f"distance {row.null_distance:.4f}; chance reaches {usual_distance(row):.4f}"
    evidence = f"its spectrum could be that of freshly drawn {law(row)} entries ({distance})"
    return Symptom("info", evidence, advice)


# --- the model as a whole -------------------------------------------------------------------------


@model_rule
def duplicates(model: Measurements) -> Iterator[Symptom]:
    """Matrices with all the same numbers, stored apart: clones that were not trained, or errors."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for row in model.rows:
        if row.sigma_max and row.entry_std and row.part_of is None:
            extremes = (row.sigma_max, row.sigma_2, row.sigma_min, row.frobenius_norm)
            entries = (row.entry_mean, row.entry_kurtosis)
            # no two different matrices share all of these by accident
            key = (row.shape, *extremes, *entries, row.row_norms, row.column_norms)
            groups.setdefault(key, []).append(row.name)
    for first, *others in groups.values():
        if others:
            evidence = f"{len(others)} more are equal to it: {first_few(others)}"
            advice = "fine among cloned fresh layers; otherwise tie them, or check the loading"
            yield Symptom("info", evidence, advice, subject=first)


@model_rule
def exploding_product(model: Measurements) -> Iterator[Symptom | Skipped]:
    """Kappa of a head's QK or OV, or of a chain of layers, beyond that of random factors.

    A product of rank r sends r directions through each factor, which sees them as a random matrix
    with r columns would. Kappas multiply at most, so that of n factors one has to be beyond the
    quantile that leaves it an n-th of the chance. Sizes as for one matrix; heads of trained models
    have up to 30 times the usual kappa.
    """
    asked = [
        (product.name, partial(_product_explodes, product, model)) for product in model.products
    ]
    asked += [(links.name, partial(_chain_explodes, links, model)) for links in model.chains]
    for subject, explodes in asked:
        if symptom := _attempt("exploding-product", subject, explodes):
            yield symptom


def _product_explodes(product: Product, model: Measurements) -> Symptom | None:
    if not product.values or product.values[0] <= 0:
        return None
    widths = (product.shape[1], len(product.values), product.shape[0])
    symptom = _explodes(product, widths, model)
    return symptom and replace(symptom, about=_factors(product, model))


def _chain_explodes(layers: Chain, model: Measurements) -> Symptom | None:
    members = tuple(row for row in model.rows if row.name in layers.members)
    if any(row.condition_number is None for row in members):  # which is told of the member
        return None
    symptom = _explodes(layers, layers.widths, model)
    return symptom and replace(symptom, about=members)


def _explodes(it: Product | Chain, widths: tuple[int, ...], model: Measurements) -> Symptom | None:
    if it.condition_number is None or min(widths) < 2:
        return None
    # float64 cannot tell more; the product of many fresh layers is beyond that
    kappa = min(it.condition_number, 1 / (sys.float_info.epsilon * max(widths)))
    times = _times_random_factors(kappa, widths, model.chance)
    if times < KAPPA_INFO:
        return None
    severity: Severity = "warning" if times >= KAPPA_WARNING else "info"
    value = f"{'' if kappa == it.condition_number else 'of at least '}{number(kappa)}"
    evidence = f"kappa {value} of the product is at least {times:,.0f} times"
    evidence += " that of random factors"
    return Symptom(severity, evidence, flaw=Flaw.SHAPE, subject=it.name)


def _times_random_factors(kappa: float, widths: tuple[int, ...], chance: float) -> float:
    """Return the ratio of kappa to the usual kappas of all factors.

    0 if it is not beyond chance.
    """
    narrowest = widths.index(min(widths))
    others = [*widths[:narrowest], *widths[narrowest + 1 :]]
    nulls = [GaussianNull(widths[narrowest], width) for width in others]
    # in logarithms, for the usual kappa of hundreds of factors is beyond float64's range
    log_usual = sum(null.log_condition_number for null in nulls)
    if math.log(kappa) < math.log(KAPPA_INFO) + log_usual:
        return 0.0
    usual = math.exp(log_usual)
    limit = math.prod(float(null.quantile(1 - chance / len(nulls))) for null in nulls)
    return kappa / usual if kappa > limit else 0.0


def _factors(product: Product, model: Measurements) -> tuple[Examination, ...]:
    """Return the matrices whose heads a product multiplies: by kind, in the same layer."""
    kinds = {"QK": ("query", "key"), "OV": ("output", "value")}.get(product.kind, ())
    near = [row for row in model.rows if row.depth == product.depth and row.kind in kinds]
    inside = [row for row in near if row.name.startswith(product.layer)]
    return tuple(inside or near)
