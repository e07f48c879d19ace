"""The rules for one matrix: each one function, with its threshold and the reason for it.

Chance comes first: a limit is a quantile of what random matrices of the same shape do, shared by
all matrices of the model (Bonferroni), so that of a thousand fresh models about one gets a false
warning from a rule. What chance excludes is not yet an illness, for a trained matrix is no random
one: where an atlas has enough trained matrices of the kind, a rule speaks only of what is beyond
all of them, and elsewhere only of a size at which somebody would act.

What can be done about a file as it is leads: indices to remove, bits that are lost, ranks that can
be cut off. Corrections are for those who train on.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

from scipy.special import betaincinv, chdtri, gammaincinv

from kappascope.clinic.atlas import QUANTITIES, TrainedRange, beyond_trained
from kappascope.clinic.examination import Examination, Spread
from kappascope.clinic.fresh import (
    MOVED_FROM,
    can_tell,
    is_orthogonal,
    is_random,
    law,
    moved_by,
    starting_scale,
    usual_distance,
)
from kappascope.clinic.prescriptions import NO_MAPS, Flaw, is_left_alone, kind_of
from kappascope.clinic.symptoms import FALSE_ALARM_RATE, Measurements, Symptom, rule, warning_if
from kappascope.clinic.vectors import Vector
from kappascope.model.names import is_mask
from kappascope.model.skipped import ReasonKind
from kappascope.text import number, plural
from kappascope.theory import GaussianNull, MarchenkoPastur

# Sizes from which a rule speaks where no atlas tells what trained matrices have.
KAPPA_SIZE = 100.0  # times the usual kappa: two digits lost beyond chance
KAPPA_HARM = 1 / 2**-23  # at which a float32 solver loses every digit
RANK_SIZE, RANK_WARNING = 0.5, 0.1  # of the rank that chance gives
BITS_SIZE, BITS_WARNING = 2.0, 3.0  # of int8's eight: six are left, and five
SAVING_SIZE = 0.5  # of the parameters: below that two factors are not worth a change of code
FEW_OUTLIERS = 0.1  # of the lines: where more stand out there is a heavy tail, and no outlier
FEWEST_VALUES = 8  # singular values: of a classifier of two the softmax sees the difference alone
STALLED_SIZE = 0.25  # of the entries, beyond those that a step of this size would leave
DIVERGED = "the file is damaged or training diverged: go back to an earlier checkpoint"
NAMED_INDICES = 8  # of lines in a sentence; the document has more


# --- numbers that are none, or none left ----------------------------------------------------------


@rule("defect")
def non_finite(row: Examination, model: Measurements) -> Symptom | None:
    """The matrix has NaN or infinite entries.

    One such entry spreads to every output, so any number of them is critical. Minus infinity in a
    mask is an observation: a mask is added to logits.
    """
    if row.failure is None or not row.failure.is_non_finite:
        return None
    evidence = str(row.failure)
    if row.failure.kind is ReasonKind.MINUS_INFINITY and is_mask(row.name):
        advice = "this is normal in a mask, which adds minus infinity to logits"
        return Symptom("info", evidence, advice, concern="observation")
    return Symptom("critical", evidence, DIVERGED)


@rule("defect", "start")
def zero(row: Examination, model: Measurements) -> Symptom | None:
    """All entries of the matrix are zero.

    Adapters and the last layers of branches often start at zero, so this is an observation in a
    fresh model. In a model whose other matrices are trained it is a warning: the layer passes
    nothing on and can be deleted.
    """
    if row.frobenius_norm != 0 or not min(row.shape):
        return None
    if model.is_fresh or is_left_alone(row):
        advice = "fine if it is initialised so; otherwise it was not loaded or not trained"
        return Symptom("info", "all entries are zero", advice, concern="observation")
    saved = f"delete the layer except its bias, which saves {row.parameters:,} parameters"
    advice = f"{saved}; if the layer should act, it was not loaded or not trained"
    return Symptom("warning", "all entries are zero: the layer passes nothing on", advice, harm=1.0)


@rule("defect")
def one_code(row: Examination, model: Measurements) -> Symptom | None:
    """All codes of a quantized weight have one value, so only the scales are left of it.

    A quantizer spreads the entries of a group over its codes, so even the coarsest code has several
    values in every group. The finding is critical at any size.
    """
    if not row.one_code:
        return None
    evidence = f"all its codes ({row.dtype}) have one value"
    return Symptom("critical", evidence, "the file is damaged or was not filled: quantize again")


# --- rows and columns -----------------------------------------------------------------------------


def _indices(indices: Sequence[int]) -> str:
    """Return the first of some indices as a sentence has them."""
    shown = ", ".join(map(str, sorted(indices[:NAMED_INDICES])))
    return f"{shown}, …" if len(indices) > NAMED_INDICES else shown


def _dead(row: Examination, side: str, dead: int, every: int) -> Symptom:
    """Tell of dead lines by their indices, and what they cost."""
    channels = "inputs" if side == "column" and row.taps else f"{side}s"
    evidence = f"{dead} of {every} {channels} {'is' if dead == 1 else 'are'} dead"
    if where := row.lines.get(f"dead_{side}s"):
        evidence += f" ({_indices(where)})"
    cost = plural(dead * row.parameters // every, "parameter")
    what = "outputs: they are constant" if side == "row" else "inputs: nothing reads them"
    goes = "goes" if cost == "1 parameter" else "go"
    advice = f"remove these {what}, and {cost} here {goes} with them"
    severity = warning_if(not is_left_alone(row))
    return Symptom(severity, evidence, advice, harm=dead / every)


def _bias(row: Examination, model: Measurements) -> Vector | None:
    """Return the bias beside a weight, if there is one."""
    return model.vector(f"{row.name.removesuffix('weight')}bias")


@rule("defect", "start")
def dead_rows(row: Examination, model: Measurements) -> Symptom | None:
    """Some rows are zero beside the median row: these outputs do not depend on the input.

    No usual initialisation makes some rows zero. Two things are left out: one dead row of a table,
    which is its padding (a tall matrix without a bias counts as a table where the name does not
    tell), and fixed bases of waves, in which the sine of zero is zero.
    """
    dead, rows = row.dead_rows or 0, row.shape[0]
    if not dead or not row.frobenius_norm or kind_of(row) in ("basis", "table"):
        return None
    may_be_table = row.kind in ("other", "embedding") and _bias(row, model) is None
    is_padding = dead == 1 and rows > row.shape[1] and may_be_table
    if is_padding or _are_dead_by_chance(row, rows, row.shape[1], model):
        return None
    return _dead(row, "row", dead, rows)


def _are_dead_by_chance(row: Examination, count: int, length: int, model: Measurements) -> bool:
    """Tell whether some of so many lines are likely to be all zero, zeros being as many as here.

    In codes of a few bits, in a pruned matrix, or in a single row a zero is an entry like others.
    """
    return count * (row.negligible or 0.0) ** length > model.chance


@rule("defect", "start")
def dead_columns(row: Examination, model: Measurements) -> Symptom | None:
    """Some columns are zero beside the median column: nothing reads these inputs.

    In a convolution a column is an input with all its taps, so a masked tap is no dead input.
    """
    dead = row.dead_columns or 0
    if not dead or not row.frobenius_norm or kind_of(row) in ("basis", "table"):
        return None
    length = row.parameters // max(1, row.inputs)
    if _are_dead_by_chance(row, row.inputs, length, model):
        return None
    return _dead(row, "column", dead, row.inputs)


@rule("harm", "trained")
def outlier_rows(row: Examination, model: Measurements) -> Symptom | None:
    """One row is so long that int8 with one scale for the tensor loses bits of the other rows.

    With one scale for each row the long row harms nothing. The rule speaks from two of eight lost
    bits on.
    """
    bits = row.int8.bits_lost_by_tensor if row.int8 else 0.0
    if not row.outlier_rows or not _stands_out("row", row, model):
        return None
    by_columns = row.int8.bits_lost_by_rows if row.int8 else 0.0
    if bits - by_columns >= BITS_SIZE:
        evidence = f"{_longest('row', row)}; int8 with one scale for the tensor keeps"
        evidence += f" {max(0.0, 8 - bits):.1f} of 8 bits for the others"
        evidence += f" (error {_error(row, 'tensor')})"
        advice = "quantize it with a scale for each row"
        return Symptom("info", evidence, advice, Flaw.SCALE, harm=bits / 8, null="chance")
    return _beyond("longest_row_over_median", math.inf, _longest("row", row), row, model)


@rule("harm", "trained")
def outlier_columns(row: Examination, model: Measurements) -> Symptom | None:
    """One column is so long that int8 loses bits of the other columns.

    One scale for each row does not help, because every row contains the long entry. The rule speaks
    from two of eight lost bits on, and warns from three on, for then five bits are left. Below two
    bits it speaks only if the column is longer than in all trained matrices of the kind. In a
    convolution a column is an input.
    """
    if not row.outlier_columns or not _stands_out("column", row, model):
        return None
    bits = row.int8.bits_lost_by_rows if row.int8 else 0.0
    if bits >= BITS_SIZE:
        where = _indices(row.lines.get("outlier_columns", ()))
        evidence = f"{_longest('column', row)} ({where}); int8 with a scale for each row keeps"
        evidence += f" {max(0.0, 8 - bits):.1f} of 8 bits for the others"
        evidence += f" (error {_error(row, 'row')})"
        advice = "keep these columns in 16 bits, or divide them here and multiply what feeds them"
        severity = warning_if(bits >= BITS_WARNING and not is_left_alone(row))
        return Symptom(severity, evidence, advice, Flaw.SCALE, harm=bits / 8, null="chance")
    return _beyond("longest_column_over_median", math.inf, _longest("column", row), row, model)


def _longest(side: str, row: Examination) -> str:
    norms = row.row_norms if side == "row" else row.column_norms
    times = norms.max / norms.median if norms is not None and norms.median else math.inf
    count = row.outlier_rows if side == "row" else row.outlier_columns
    many = f"; {count} stand out" if count and count > 1 else ""
    return f"the longest {side} has {number(times)} times the median norm{many}"


def _error(row: Examination, scale: str) -> str:
    assert row.int8 is not None
    pair = {
        "row": (row.int8.row_scale, row.int8.row_scale_apart),
        "tensor": (row.int8.tensor_scale, row.int8.tensor_scale_apart),
    }[scale]
    return f"{pair[0]:.1%} of their norm, {pair[1]:.1%} without"


def _stands_out(side: str, row: Examination, model: Measurements) -> bool:
    """Tell whether the longest line is beyond what chance does, and of another size."""
    norms = row.row_norms if side == "row" else row.column_norms
    if norms is None or not norms.median:
        return False
    taps = max(1, math.prod(row.taps))
    rows, columns = (row.shape[0], row.shape[1]), (row.inputs, row.shape[0] * taps)
    count, entries = rows if side == "row" else columns
    outlying = row.outlier_rows if side == "row" else row.outlier_columns
    if entries < FEWEST_VALUES:  # a line of few entries is hardly more than an entry
        return False
    if (outlying or 0) > max(1, FEW_OUTLIERS * count):
        return False
    return norms.max / norms.median >= max(3.0, _usual_excess(count, entries, model.chance))


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


def _trained(quantity: str, row: Examination, model: Measurements) -> TrainedRange | None:
    return model.atlas.range(row.kind, row.shape, quantity)


def _beyond(
    quantity: str, size: float, evidence: str, row: Examination, model: Measurements
) -> Symptom | None:
    """Observe a quantity that is larger than in all trained matrices of the kind.

    It is told if it also reaches a ``size``, or if one more model would rarely have as much.
    Where no trained matrices are known, the ``size`` alone decides.
    """
    value, known = QUANTITIES[quantity](row), _trained(quantity, row, model)
    if value is None or model.is_fresh:
        return None
    if known is None:
        found = Symptom("info", evidence, NOTHING, concern="observation", null="chance")
        return found if value >= size and not is_left_alone(row) else None
    if value <= known.largest or value <= min(known.limit(FALSE_ALARM_RATE), size):
        return None
    told = f"{evidence}: {beyond_trained(known, row.kind)} (at most {number(known.largest)})"
    return Symptom("info", told, NOTHING, concern="observation", null="trained")


NOTHING = "nothing to do by itself; compare with an earlier checkpoint"


@rule("observation", "trained")
def uneven_norms(row: Examination, model: Measurements) -> Symptom | None:
    """Row or column norms vary more than in all trained matrices of the kind.

    They must also vary three times as much as those of a random matrix, 1/sqrt(2 n). Where no
    trained matrices are known the rule is silent: uneven norms harm nothing by themselves.
    """
    spread, what = max(_spreads(row), default=(0.0, ""))
    if not spread or outlier_rows(row, model) or outlier_columns(row, model):
        return None  # which tells it
    evidence = f"{what} norms vary by {spread:.2f} of their mean"
    return _beyond(f"{what}_norm_cv", math.inf, evidence, row, model)


def _spreads(row: Examination) -> Iterator[tuple[float, str]]:
    """Yield coefficients of variation at least three times those of chance, dead ones left out."""
    taps = max(1, math.prod(row.taps))
    rows = ("row", row.row_norms, row.dead_rows, *row.shape)
    columns = ("column", row.column_norms, row.dead_columns, row.inputs, row.shape[0] * taps)
    for what, norms, dead, count, length in (rows, columns):
        own = _own_spread(norms, dead or 0, count)
        if own is not None and own >= 3 / math.sqrt(2 * length):
            yield own, what


def _own_spread(norms: Spread | None, dead: int, count: int) -> float | None:
    """Return the coefficient of variation of the norms that are not dead.

    With a share p of the norms and none else, 1 + cv^2 is (1 + their own cv^2) / p.
    """
    if norms is None or norms.cv is None:
        return None
    return math.sqrt(max(0.0, (1 + norms.cv**2) * (1 - dead / count) - 1))


# --- the spectrum ---------------------------------------------------------------------------------


@rule("observation", "trained")
def ill_conditioned(row: Examination, model: Measurements) -> Symptom | None:
    """Kappa is beyond chance, even at the low end of its interval.

    The probability of a larger kappa decides and not the number of deviations, because a square
    random matrix has a kappa beyond x with probability 2 n / x. In networks that were trained to
    answer this, kappa told nothing of accuracy. So the finding is an observation. It needs a kappa
    beyond all trained matrices of the kind or, without an atlas, a hundred times the usual kappa.
    From 2^23 on it is a warning, because undoing or merging the layer in float32 loses every digit.
    Tables of constants are left out, and so is an observation beside a rank that is too low.
    """
    times = _times_usual(row, row.condition_number_low or row.condition_number, model)
    if not times or min(row.shape) < FEWEST_VALUES or kind_of(row) in NO_MAPS:
        return None
    (m, n), known = row.shape, row.resolved or row.condition_number_low is None
    kappa = row.condition_number if known else row.condition_number_low
    what = f"kappa {number(kappa)}" if known else f"kappa, at least {number(kappa)},"
    usual = f"at least {times:,.0f} times that of a random {m} x {n} matrix"
    evidence = f"{what} is beyond chance: {usual}"
    if kappa and kappa >= KAPPA_HARM and times >= KAPPA_SIZE:
        advice = "do not invert, merge or whiten it in float32: no digit would be left"
        severity = warning_if(not is_left_alone(row))
        flaw = Flaw.RANK if rank_deficient(row, model) else Flaw.SHAPE
        return Symptom(severity, evidence, advice, flaw, concern="harm", harm=1.0, null="chance")
    if rank_deficient(row, model):  # which says the same, and what can be done
        return None
    return _beyond("kappa_over_chance", KAPPA_SIZE, evidence, row, model)


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


@rule("harm", "chance")
def rank_deficient(row: Examination, model: Measurements) -> Symptom | None:
    """The matrix is singular, or its effective rank is less than half of what chance gives.

    Chance gives Marchenko and Pastur's share of singular values above 1 % of the largest. That is
    almost all of them, and it fluctuates by one or two. The finding is a warning if the matrix is
    singular, or if its rank is below a tenth of that. Dead rows and columns have rules of their
    own.
    """
    if not row.sigma_max or row.effective_rank is None or min(row.shape) < 2:
        return None
    if kind_of(row) in NO_MAPS:
        return None
    alive = _alive(row)
    singular = row.condition_number is None and alive == min(row.shape)
    null = MarchenkoPastur(*row.shape)
    usual = alive * float(1 - null.cdf(0.01 * null.edges[1]))
    if not singular and row.effective_rank >= RANK_SIZE * usual:
        return None
    rank = f"effective rank {row.effective_rank}, where chance gives {usual:.0f}"
    evidence = f"numerically singular, {rank}" if singular else rank
    is_grave = singular or row.effective_rank < RANK_WARNING * usual
    severity = warning_if(is_grave and not is_left_alone(row))
    saving, text = _truncation(row, "0.999")
    advice = text if saving > 0 else "nothing is lost in its last directions: they can be cut off"
    return Symptom(severity, evidence, advice, Flaw.RANK, harm=1 - row.effective_rank / usual)


@rule("harm", "none", "low-rank")
def of_low_rank(row: Examination, model: Measurements) -> Symptom | None:
    """Two factors that hold 99 % of the energy have at most half of the parameters.

    Energy is not loss. In a small language model the smallest singular values mattered more than
    their energy says, so the advice is to measure.
    """
    if model.is_fresh or kind_of(row) in (*NO_MAPS, "embedding"):
        return None
    if rank_deficient(row, model) or min(row.shape) < FEWEST_VALUES:
        return None
    saving, text = _truncation(row, "0.99")
    if saving < SAVING_SIZE:
        return None
    rank, smaller = row.energy_ranks["0.99"], min(row.shape)
    evidence = f"{rank} of {smaller} singular values hold 99 % of the energy"
    return Symptom("info", evidence, text, harm=0.01)


def _truncation(row: Examination, energy: str) -> tuple[float, str]:
    """Return the share of parameters that two factors of this energy save, and how to say it."""
    rank, (m, n) = row.energy_ranks.get(energy), row.shape
    if not rank:
        return 0.0, ""
    saving = 1 - rank * (m + n) / (m * n)
    lost = 1 - float(energy)
    text = f"cut it to two factors of rank {rank}: that saves {saving:.0%} of its {m * n:,}"
    return saving, f"{text} parameters and loses {lost:.1%} of its energy; measure the loss"


def _alive(row: Examination) -> int:
    """Return the rank that rows and columns which are not dead could have."""
    rows, columns = row.shape
    taps = max(1, math.prod(row.taps))
    return max(1, min(rows - (row.dead_rows or 0), columns - taps * (row.dead_columns or 0)))


# --- matrices that never moved --------------------------------------------------------------------


@rule("defect", "start")
def untrained(row: Examination, model: Measurements) -> Symptom | None:
    """The matrix could be a fresh random draw, and something else says so, too.

    Chance alone explains its spectrum and its entries. One more sign is needed: its scale is one
    with which layers begin; or the bias beside it is exactly zero (weight decay shrinks a layer
    that gets no gradient and leaves its bias); or it is equal to the reference although other
    matrices have moved. The last sign makes the finding a warning: the layer never received a
    gradient.
    """
    if not can_tell(row) or not is_random(row) or is_left_alone(row):
        return None
    signs = []
    if scale := starting_scale(row, model.layers):
        signs.append(f"its scale is that of a start: {scale}")
    bias = _bias(row, model)
    if bias is not None and bias.is_at_start and not model.is_fresh:
        signs.append("its bias is exactly zero")
    is_unmoved = bool(row.errors) and moved_by(row) <= MOVED_FROM and model.moved
    if is_unmoved:
        signs.append("it has not moved from the reference: it never received a gradient")
    if not signs:
        return None
    drawn = "all singular values are equal, as after orthogonal initialisation"
    if not is_orthogonal(row):
        distance = f"distance {row.null_distance:.4f}; chance reaches {usual_distance(row):.4f}"
        drawn = f"its spectrum could be that of freshly drawn {law(row)} entries ({distance})"
    evidence = "; ".join((drawn, *signs))
    if is_unmoved:
        advice = "it can be left out if nothing uses it; else connect it to the loss"
        return Symptom("warning", evidence, advice, harm=1.0)
    advice = "fine if it is new, frozen or unused; otherwise it was not loaded or not trained"
    return Symptom("info", evidence, advice, concern="observation" if model.is_fresh else None)


@rule("defect", "start")
def stalled_entries(row: Examination, model: Measurements) -> Symptom | None:
    """More entries are equal to the reference's to the bit than a step of this size leaves.

    The size of the step is fitted to the change as it is stored. The rule speaks from a quarter of
    the entries on. Then a part was frozen, or the dtype swallowed its updates. Tables are left out,
    because a row that was never looked up never moved.
    """
    share, expected = row.unchanged.get("share", 0.0), row.unchanged.get("expected", 0.0)
    if share - expected < STALLED_SIZE or is_left_alone(row):
        return None
    evidence = f"{share:.0%} of the entries are those of the reference to the bit; a change of"
    evidence += f" this size would leave {expected:.0%}"
    advice = f"a part was frozen, or {row.storage} swallowed its updates: keep float32 weights"
    return Symptom("warning", evidence, advice, harm=share - expected)


@rule("defect", "start")
def rearranged(row: Examination, model: Measurements) -> Symptom | None:
    """The matrix has the numbers of the reference's matrix, in another order.

    They are transposed, or their rows or columns are permuted. The conventions of two libraries
    differ: loading one file for the other gives another function and no error.
    """
    if row.likeness in ("", "equal"):
        return None
    evidence = f"it is the reference's {row.likeness}: the same numbers in another order"
    advice = "load it by its own library's convention, or convert it"
    return Symptom("warning", evidence, advice, harm=1.0)
