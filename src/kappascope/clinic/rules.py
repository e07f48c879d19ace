"""The rules of a diagnosis: each one function, with its threshold and the reason for it.

Chance is the measure: a limit is a quantile of what random matrices of the same shape do, shared by
all matrices of the model (Bonferroni), so that of a thousand fresh models about one gets a false
warning from a rule. What chance excludes is not yet an illness, for a trained matrix is no random
one. Hence each rule also has a size below which nobody would act.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from scipy.special import betaincinv, chdtri, gammaincinv

from kappascope.chains import Chain
from kappascope.clinic import Severity
from kappascope.clinic.examination import Examination, Spread
from kappascope.clinic.freshness import can_tell, is_fresh, is_orthogonal, law, usual_distance
from kappascope.clinic.prescriptions import Flaw, is_left_alone
from kappascope.clinic.status import Status
from kappascope.matrices import Skipped
from kappascope.products import Product
from kappascope.prose import number
from kappascope.theory import GaussianNull, MarchenkoPastur
from kappascope.weights.reasons import Masking, NonFinite
from kappascope.weights.roles import is_mask

FALSE_ALARM = 1e-3  # the share of fresh models that a rule may accuse
NOTABLE, GRAVE = 10.0, 100.0  # times kappa's usual value: one digit lost beyond chance, and two
TALL, TALLEST = 3.0, 10.0  # times the median norm: beyond what is common, and all the others' scale
UNEVEN, VERY_UNEVEN = 0.5, 1.0  # coefficients of variation: trained layers have 0.05 to 0.35
LOST = 0.5  # of the rank that chance gives


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
class Model:
    """All examinations of a model: what a matrix is compared with, and shares its chance with.

    >>> Model(rows=(Examination("w", (8, 8), "float32", "ok"),) * 4).chance
    0.00025
    """

    rows: tuple[Examination, ...]
    products: tuple[Product, ...] = ()
    chains: tuple[Chain, ...] = ()
    unsound: tuple[Skipped, ...] = ()  # vectors

    @property
    def chance(self) -> float:
        """How unlikely a matrix must be to be noticed among so many."""
        return FALSE_ALARM / max(1, len(self.rows) + len(self.products) + len(self.chains))

    @cached_property
    def is_fresh(self) -> bool:
        """Whether most matrices that can tell look as initialised."""
        told = [is_fresh(row) for row in self.rows if can_tell(row)]
        return 2 * sum(told) >= len(told)


MatrixRule: TypeAlias = Callable[[Examination, Model], Symptom | None]
ModelRule: TypeAlias = Callable[[Model], Iterator[Symptom]]
RULES: dict[str, MatrixRule] = {}
MODEL_RULES: dict[str, ModelRule] = {}


def rule(judge: MatrixRule) -> MatrixRule:
    """Register a rule for every matrix; its name is its id."""
    RULES[_id(judge)] = judge
    return judge


def model_rule(judge: ModelRule) -> ModelRule:
    """Register a rule for the model as a whole."""
    MODEL_RULES[_id(judge)] = judge
    return judge


def _id(judge: Callable[..., Any]) -> str:
    return judge.__name__.replace("_", "-")


# --- numbers that are none, or none left ----------------------------------------------------------


@rule
def non_finite(row: Examination, model: Model) -> Symptom | None:
    """A NaN or an infinity spreads to every output: critical, at any count.

    A mask alone may have one kind of them, minus infinity.
    """
    evidence = Status(row.status).reason
    if not isinstance(evidence, NonFinite):
        return None
    if isinstance(evidence, Masking) and is_mask(row.name):
        return Symptom("info", evidence, "fine in a mask, which adds minus infinity to logits")
    return Symptom("critical", evidence, DIVERGED)


DIVERGED = "the file is damaged or training diverged: go back to an earlier checkpoint"


@rule
def zero(row: Examination, model: Model) -> Symptom | None:
    """All entries zero: usual for what is to start as nothing (adapters, last layers of branches).

    In a model whose other matrices are trained, a layer that passes nothing on is a warning.
    """
    if row.frobenius_norm != 0 or not min(row.shape):
        return None
    meant = model.is_fresh or is_left_alone(row)
    advice = "fine if it is initialised so; otherwise it was not loaded or not trained"
    return Symptom("info" if meant else "warning", "all entries are zero", advice)


# --- rows and columns -----------------------------------------------------------------------------


@rule
def dead_rows(row: Examination, model: Model) -> Symptom | None:
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
def dead_columns(row: Examination, model: Model) -> Symptom | None:
    """Columns that are nothing beside the median: inputs that nothing reads.

    A masked or identity-like convolution has columns of zeros by design.
    """
    dead, columns = row.dead_columns or 0, row.shape[1]
    if not dead or not row.frobenius_norm:
        return None
    expected = is_left_alone(row) or row.kind == "convolution"
    advice = "usual for masked kernels" if row.kind == "convolution" else _DEAD.format("inputs")
    return Symptom("info" if expected else "warning", _dead(dead, columns, "columns"), advice)


def _dead(dead: int, every: int, what: str) -> str:
    return f"{dead} of {every} {what} {'is' if dead == 1 else 'are'} dead"


_DEAD = "prune them, or look for {} that were constant during training"


@rule
def outlier_rows(row: Examination, model: Model) -> Symptom | None:
    """A row far longer than the median one; see :func:`_outlying`."""
    return _outlying("row", row.row_norms, row.outlier_rows, row.shape, model)


@rule
def outlier_columns(row: Examination, model: Model) -> Symptom | None:
    """A column far longer than the median one; see :func:`_outlying`."""
    return _outlying("column", row.column_norms, row.outlier_columns, row.shape[::-1], model)


def _outlying(
    what: str, norms: Spread | None, found: int | None, shape: tuple[int, int], model: Model
) -> Symptom | None:
    """A norm beyond chance that is at least three times the median one.

    Trained transformers have two to five times. From ten on one vector decides sigma_1 and the
    scale at which the matrix can be quantized: a warning.
    """
    if norms is None or not norms.median or not found:
        return None
    times = norms.max / norms.median
    if times < max(TALL, _usual_excess(*shape, model.chance)):
        return None
    longest = f"the longest {what} has {times:.1f} times the median norm"
    evidence = f"{longest}; {found} {'stands' if found == 1 else 'stand'} out"
    return Symptom("warning" if times >= TALLEST else "info", evidence, flaw=Flaw.SCALE)


def _usual_excess(count: int, length: int, chance: float) -> float:
    """Times the median norm that the longest of ``count`` normal vectors has by chance at most.

    Squared norms are chi-square; half the chance is for a long vector and half for a short median,
    which few vectors may have (the share below an order statistic is a beta variable).
    """
    middle = (count + 1) // 2
    share = float(betaincinv(middle, count - middle + 1, chance / 2))
    # quantiles of chi squared, without scipy.stats, which takes half a second to load
    longest, usual = chdtri(length, chance / (2 * count)), 2 * gammaincinv(length / 2, share)
    return math.sqrt(longest / max(usual, sys.float_info.min))


@rule
def uneven_norms(row: Examination, model: Model) -> Symptom | None:
    """Row or column norms that vary far more than those of a random matrix, 1/sqrt(2 n).

    Worth a word from a coefficient of variation of 0.5 on (trained transformers have 0.05 to
    0.35); from 1 on the norms differ as much as they measure: a warning.
    """
    spread, what = max(_spreads(row), default=(0.0, ""))
    if spread < UNEVEN:
        return None
    evidence = f"{what} norms vary by {spread:.2f} of their mean"
    return Symptom("warning" if spread >= VERY_UNEVEN else "info", evidence, flaw=Flaw.SCALE)


def _spreads(row: Examination) -> Iterator[tuple[float, str]]:
    """Coefficients of variation at least three times those of chance, dead ones left out."""
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
def ill_conditioned(row: Examination, model: Model) -> Symptom | None:
    """Kappa beyond chance, by the low end of its interval: what is certain despite rounding.

    A square random matrix has a kappa beyond x with probability 2 n / x, so that the tail
    probability, not the number of deviations, decides. A rectangular one hardly varies, and every
    trained one is beyond chance: worth a word is ten times the usual kappa, a warning a hundred.
    """
    times = _times_usual(row, row.condition_number_low or row.condition_number, model)
    if times < NOTABLE:
        return None
    (m, n), known = row.shape, row.resolved or row.condition_number_low is None
    kappa = number(row.condition_number if known else row.condition_number_low)
    what = f"kappa {kappa}" if known else f"kappa, at least {kappa},"
    usual = f"at least {times:,.0f} times that of a random {m} x {n} matrix"
    evidence = f"{what} is beyond chance: {usual}"
    if times < GRAVE and not known:
        return Symptom("info", evidence, "no need to act; its size is not resolved")
    severity: Severity = "warning" if times >= GRAVE else "info"
    return Symptom(severity, evidence, flaw=_flaw(row, model))


def _flaw(row: Examination, model: Model) -> Flaw:
    """What makes kappa large: one matrix, one treatment, whichever rule speaks of it."""
    if rank_deficient(row, model):
        return Flaw.RANK
    return Flaw.BOTH if uneven_norms(row, model) else Flaw.SHAPE


def _times_usual(row: Examination, kappa: float | None, model: Model) -> float:
    """Kappa over that of a random matrix of the shape; 0 if it is not beyond chance."""
    # the stored null_tail spares a look at the null in most cases
    if kappa is None or row.null_tail is None or row.null_tail > model.chance:
        return 0.0
    null = GaussianNull(*row.shape)
    if null.tail(kappa) > model.chance:
        return 0.0
    return kappa / math.exp(null.log_condition_number)


@rule
def unresolved(row: Examination, model: Model) -> Symptom | None:
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
    if least >= GRAVE:
        return Symptom("info", evidence, "that it is large is certain, how large is not")
    grave = _times_usual(row, kappa, model) >= GRAVE
    advice = "do not act on kappa; examine a checkpoint with more digits"
    return Symptom("warning" if grave else "info", evidence, advice)


@rule
def rank_deficient(row: Examination, model: Model) -> Symptom | None:
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
    if not singular and row.effective_rank >= LOST * usual:
        return None
    rank = f"effective rank {row.effective_rank}, where chance gives {usual:.0f}"
    evidence = f"numerically singular, {rank}" if singular else rank
    return Symptom("warning", evidence, flaw=Flaw.RANK)


def _alive(row: Examination) -> int:
    """The rank that rows and columns which are not dead could have."""
    rows, columns = row.shape
    return max(1, min(rows - (row.dead_rows or 0), columns - (row.dead_columns or 0)))


@rule
def untrained(row: Examination, model: Model) -> Symptom | None:
    """A spectrum that chance alone explains; see :func:`is_fresh`."""
    if not can_tell(row) or not is_fresh(row):
        return None
    advice = "fine if it is new, frozen or small; otherwise it was not loaded or not trained"
    if is_orthogonal(row):
        return Symptom(
            "info", "all singular values are equal, as after orthogonal initialisation", advice
        )
    distance = f"distance {row.null_distance:.4f}; chance reaches {usual_distance(row):.4f}"
    told = f"its spectrum could be that of freshly drawn {law(row)} entries ({distance})"
    return Symptom("info", told, advice)
