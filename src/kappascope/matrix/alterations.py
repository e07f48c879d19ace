"""What became of a matrix: nothing, a rounding, training, a scale, or damage.

Two matrices of one shape are compared entry by entry. A rounding leaves every entry on the grid of
its type and next to what it was. Training moves entries all over a matrix, each by little more than
the others; decay alone scales all of them. What no training does is damage: entries that are not
finite, that changed sign or size alone while the others stayed, runs that were overwritten, zeros
in the place of large numbers, values in another order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kappascope.matrix.precision import FloatGrid, Rounding, half_ulps, storage_dtype

AlterationKind: TypeAlias = Literal["same", "rounding", "scaled", "trained", "replaced", "damaged"]

TYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)  # in which weights are stored, the finest first
INTEGER_LEVELS = {"int8": 127, "int4": 7}  # the largest code on either side of zero
CHUNK = 64  # entries whose direction is compared: of unrelated ones the cosine is 0 +- 1/8
TORN = 0.4  # of an entry, or of the root mean square: a flipped sign or exponent changes more
TORN_OVER_USUAL = 50  # times the 90 % quantile of changes, which training does not reach
CHANCE = 6.0  # standard deviations of the cosine of unrelated matrices
MOST_SHIFT = 128  # entries by which a misread file is looked for
COARSE_EPS = 2.0**-11  # from here on a type swallows the updates of most entries
LEAST_DECAY = 0.5  # below this factor, no run decays a weight that has no gradient


@dataclass(frozen=True)
class Alteration:
    """What became of a matrix, in a word and in a sentence.

    ``distance`` is the Frobenius norm of the difference over that of the matrix before, ``factors``
    those of a matrix that was only scaled: one, or one for every row or column.

    >>> alteration(torch.eye(2), torch.eye(2)).kind
    'same'
    """

    kind: AlterationKind
    text: str = ""
    distance: float | None = None
    cosine: float | None = None
    factors: Tensor | None = None
    axis: int | None = None  # along which factors go: 0 rows, 1 columns


def alteration(
    before: Tensor,
    after: Tensor,
    codes: tuple[Rounding | None, Rounding | None] = (None, None),
    *,
    is_table: bool = False,
) -> Alteration:
    """Tell what became of a matrix of finite numbers.

    ``codes`` say in which code each of the two is stored, and how far it rounds. Of a table of
    tokens single rows may be trained.

    >>> weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    >>> alteration(weight, weight.bfloat16().float()).text
    'rounded to bfloat16'
    >>> flipped = weight.clone()
    >>> flipped[3, 5] *= -(2**20)
    >>> alteration(weight, flipped).kind
    'damaged'
    """
    if broken := _byte_order(before, after) or _not_finite(before, after):
        return broken
    if torch.equal(before.double(), after.double()):
        return Alteration("same", distance=0.0, cosine=1.0)
    pair = _Pair.of(before, after)
    found = next(filter(None, _exact(before, after, codes, pair)), None)
    if found is None:
        found = next(filter(None, _statistical(pair, is_table)), None)
    found = found or Alteration("trained", _moved(pair))
    return replace(found, distance=pair.distance, cosine=pair.cosine)


def _byte_order(before: Tensor, after: Tensor) -> Alteration | None:
    """Recognise numbers whose bytes were read from the wrong end."""
    size = before.element_size()
    if before.dtype != after.dtype or size == 1 or not before.numel():
        return None
    one, other = (
        matrix.contiguous().view(torch.uint8).view(-1, size) for matrix in (before, after)
    )
    if torch.equal(one, other) or not torch.equal(one[:64], other[:64].flip(1)):
        return None
    is_reversed = torch.equal(one, other.flip(1))
    return Alteration("damaged", "its bytes stand in reversed order") if is_reversed else None


def _not_finite(before: Tensor, after: Tensor) -> Alteration | None:
    for matrix, when in ((after, "now"), (before, "before")):
        broken = ~matrix.double().isfinite()
        if broken.any():
            first = broken.nonzero()[0].tolist()
            text = f"{int(broken.sum())} of {matrix.numel()} entries not finite {when}"
            return Alteration("damaged", f"{text}, first at {first}")
    return None


@dataclass(frozen=True)
class _Pair:
    """The two in float64, over a power of two that brings the larger entries before near one."""

    before: Tensor
    after: Tensor
    moved: Tensor
    rms: float
    cosine: float | None
    distance: float | None
    eps: float  # of the coarser type of the two
    dtype: torch.dtype

    @classmethod
    def of(cls, before: Tensor, after: Tensor) -> _Pair:
        a, b = before.double(), after.double()
        largest = float(a.abs().max()) or float(b.abs().max())
        unit = 2.0 ** math.frexp(largest)[1] if largest < 2.0**1000 else 2.0**1000
        a, b = a / unit, b / unit
        types = storage_dtype(before), storage_dtype(after)
        dtype = max(types, key=lambda each: FloatGrid.of(each).eps)
        (x, left), (y, right) = _unit(a), _unit(b)
        moved, (_, gone) = b - a, _unit(b - a)
        is_zero = not left or not right
        return cls(
            a,
            b,
            moved,
            left / math.sqrt(a.numel()),
            None if is_zero else float((x * y).sum()),
            gone / left if left else None,
            FloatGrid.of(dtype).eps,
            dtype,
        )


def _unit(matrix: Tensor) -> tuple[Tensor, float]:
    """Return a matrix over its Frobenius norm, and the norm, without squaring what is too large."""
    largest = float(matrix.abs().max())
    if not largest:
        return matrix, 0.0
    scaled = matrix / largest
    norm = float(scaled.norm())
    return scaled / norm, norm * largest


# --- what is exact --------------------------------------------------------------------------------


def _exact(
    before: Tensor, after: Tensor, codes: tuple[Rounding | None, Rounding | None], pair: _Pair
) -> Iterator[Alteration | None]:
    """Yield what every single entry agrees with."""
    yield _rounded(before, after, "")
    yield _rounded(after, before, ", before")
    for code, was in zip(codes, (", before", ""), strict=True):
        yield _coded(before, after, code, was)
    yield _on_integers(before, after)
    if not after.any():
        yield Alteration("damaged", "all zero now")
    if not before.any():
        yield Alteration("trained", "all zero before")
    yield _scaled(pair)


def _rounded(exact: Tensor, rounded: Tensor, when: str) -> Alteration | None:
    """Recognise one matrix as the other rounded to a type that is coarser than its own."""
    own = FloatGrid.of(storage_dtype(exact))
    for dtype in TYPES:
        grid = FloatGrid.of(dtype)
        if grid.eps <= own.eps and grid.tiny * grid.eps <= own.tiny * own.eps:
            continue
        there = rounded.double()
        if not torch.equal(rounded.to(dtype).double(), there):
            continue
        name = str(dtype).removeprefix("torch.")
        if torch.equal(exact.to(dtype).double(), there):
            lost = int(((there == 0) & (exact.double() != 0)).sum())
            zeros = f"; {lost} entries became zero" if lost else ""
            return Alteration("rounding", f"rounded to {name}{when}{zeros}")
        a = exact.double()
        step = 2 * half_ulps(a.abs(), dtype)
        toward_zero = (there.abs() <= a.abs()) & ((a - there).abs() < step) & (a * there >= 0)
        if toward_zero.all():
            return Alteration("rounding", f"cut off to {name}{when}")
    return None


def _coded(before: Tensor, after: Tensor, code: Rounding | None, when: str) -> Alteration | None:
    """Recognise a code: an entry is a step of it away at the most, where ends are cut off."""
    if code is None or ((after.double() - before.double()).abs() > 2 * code.half_steps).any():
        return None
    return Alteration("rounding", f"rounded to {code.code}{when}")


def _on_integers(before: Tensor, after: Tensor) -> Alteration | None:
    """Recognise whole numbers times a scale, for every row or for all rows."""
    a, b = before.double(), after.double()
    for name, levels in INTEGER_LEVELS.items():
        for largest, what in ((b.abs().amax(1, True), "row"), (b.abs().max(), "tensor")):
            step = (largest / levels).clamp(min=torch.finfo(torch.float64).tiny)
            codes = b / step
            is_grid = (codes - codes.round()).abs().max() < 0.01  # of a step: float32 has 1e-5
            if is_grid and ((a - b).abs() <= 0.51 * step).all():
                return Alteration("rounding", f"rounded to {name} with a scale for each {what}")
    return None


def _scaled(pair: _Pair) -> Alteration | None:
    """Recognise a matrix times one factor, or one for every row or column."""
    a, b = pair.before, pair.after
    for axes, axis, what in (((0, 1), None, "it"), ((1,), 0, "rows"), ((0,), 1, "columns")):
        if axis is not None and a.shape[1 - axis] < 2:
            continue  # anything is a multiple of one number
        squares = (a * a).sum(axes, keepdim=True)
        if not squares.all():
            continue
        factors = (a * b).sum(axes, keepdim=True) / squares
        if float((factors - 1).abs().max()) <= 8 * pair.eps:
            continue  # no more than a few roundings
        room = 4 * pair.eps * (factors * a).abs() + 4 * half_ulps(a.abs(), pair.dtype) * pair.eps
        if ((b - factors * a).abs() <= room).all():
            flat = factors.flatten()
            if axis is None and LEAST_DECAY <= float(flat) < 1:
                text = f"only shrunk, by a factor of {float(flat):.4g}: decay without a gradient"
                return Alteration("trained", text)
            span = f"{float(flat.min()):.4g}" if axis is None else ""
            span = span or f"{float(flat.min()):.3g} to {float(flat.max()):.3g}"
            text = f"multiplied by {span}" if axis is None else f"{what} multiplied by {span}"
            return Alteration("scaled", text, factors=flat, axis=axis)
    return None


# --- what is statistical --------------------------------------------------------------------------


def _statistical(pair: _Pair, is_table: bool) -> Iterator[Alteration | None]:
    """Yield what no training does, the surest first."""
    yield _reordered(pair)
    yield _signs(pair)
    yield _zeroed(pair)
    yield _isolated(pair, is_table)
    yield _torn(pair, is_table)
    yield _overwritten(pair, is_table)
    yield _unrelated(pair)


def _reordered(pair: _Pair) -> Alteration | None:
    a, b = pair.before.flatten(), pair.after.flatten()
    if not torch.equal(a.sort().values, b.sort().values):
        return _shifted(a, b)
    return _shifted(a, b) or Alteration("damaged", "its entries stand in another order")


def _shifted(a: Tensor, b: Tensor) -> Alteration | None:
    """Recognise a file that was read from some entries too early or too late."""
    for k in range(1, min(MOST_SHIFT, len(a) // 4) + 1):
        for first, second, where in ((a[:-k], b[k:], "later"), (a[k:], b[:-k], "earlier")):
            if first[0] == second[0] and float((first == second).double().mean()) > 0.9:
                entries = "entry" if k == 1 else "entries"
                return Alteration("damaged", f"shifted: everything stands {k} {entries} {where}")
    return None


def _signs(pair: _Pair) -> Alteration | None:
    flipped = (pair.before == -pair.after) & (pair.before != 0)
    if not torch.equal(pair.before.abs(), pair.after.abs()):
        return None
    return Alteration(
        "damaged", f"{int(flipped.sum())} entries changed their sign and nothing else"
    )


def _zeroed(pair: _Pair) -> Alteration | None:
    """Recognise zeros in the place of numbers, unless these were the smallest: that is pruning."""
    gone = (pair.after == 0) & (pair.before != 0)
    kept = pair.before[pair.after != 0].abs()
    many = int(gone.sum())
    if not many or not len(kept):
        return None
    sizes = pair.before[gone].abs()
    if float(sizes.median()) < 0.5 * float(kept.median()) and sizes.max() <= 2 * kept.median():
        share = 100 * many / gone.numel()
        return Alteration(
            "trained", f"pruned: the smallest {share:.2g} % of its entries are zero now"
        )
    if float(sizes.max()) <= TORN * pair.rms:  # small numbers may meet zero on a coarse grid
        return None
    first = gone.nonzero()[0].tolist()
    return Alteration("damaged", f"{many} entries are zero now that were not, first at {first}")


def _isolated(pair: _Pair, is_table: bool) -> Alteration | None:
    """Recognise a few entries that differ where all others are equal to the bit."""
    changed = pair.moved != 0
    many = int(changed.sum())
    if many > changed.numel() / 10 or (is_table and _fills_rows(changed)):
        return None
    steps = 4 * half_ulps(pair.before.abs(), pair.dtype)
    if pair.eps >= COARSE_EPS and (pair.moved.abs() <= steps).all():
        name = str(pair.dtype).removeprefix("torch.")
        text = f"{many} of {changed.numel()} entries moved, by a step or two of {name}"
        return Alteration("trained", text)
    first = changed.nonzero()[0].tolist()
    text = f"{many} of {changed.numel()} entries differ, first at {first}"
    return Alteration("damaged", f"{text}; all others are equal to the bit")


def _fills_rows(mask: Tensor) -> bool:
    """Tell whether rows that have something of a mask are mostly full of it: rows of a table."""
    return float(mask[mask.any(1)].double().mean()) > 0.5


def _torn(pair: _Pair, is_table: bool) -> Alteration | None:
    """Recognise entries that went far further than others and than their own size."""
    sizes = pair.moved.abs()
    usual = float(sizes.flatten().kthvalue(math.ceil(0.9 * sizes.numel())).values)
    torn = sizes > (TORN * pair.before.abs().clamp(min=pair.rms)).clamp(min=TORN_OVER_USUAL * usual)
    if not torn.any() or (is_table and _fills_rows(torn)):
        return None
    first = torn.nonzero()[0].tolist()
    text = f"{int(torn.sum())} entries changed by more than {TORN_OVER_USUAL} times what others did"
    return Alteration("damaged", f"{text}, first at {first}")


def _overwritten(pair: _Pair, is_table: bool) -> Alteration | None:
    """Recognise runs of entries that have nothing of what they were, where others have much of it.

    A run that merely was small before moves as far as others do: that is no loss.
    """
    count = pair.before.numel() // CHUNK
    if count < 8:  # chunks, of which half must be sound
        return None
    a, b, moved = (
        each.flatten()[: count * CHUNK].view(count, CHUNK)
        for each in (pair.before, pair.after, pair.moved)
    )
    cosines = torch.nan_to_num(torch.cosine_similarity(a, b, dim=1, eps=0.0))
    far = moved.square().mean(1).sqrt()
    lost = (cosines < 0.5) & (far > 4 * far.median()) & (far > TORN * pair.rms)
    if not lost.any() or float(cosines.median()) < 0.9:
        return None
    mask = torch.zeros(pair.before.numel(), dtype=torch.bool)
    mask[: count * CHUNK] = lost.repeat_interleave(CHUNK)
    if is_table and _fills_rows(mask.view_as(pair.before)):
        return None
    first = divmod(int(mask.nonzero()[0]), pair.before.shape[1])
    text = f"about {int(mask.sum())} of {mask.numel()} entries are overwritten"
    return Alteration("damaged", f"{text}, from about {list(first)} on")


def _unrelated(pair: _Pair) -> Alteration | None:
    """Recognise that nothing is left of what was: trained anew, or another matrix."""
    chance = CHANCE / math.sqrt(pair.before.numel())
    if pair.cosine is None or chance > 0.5 or abs(pair.cosine) > chance:
        return None
    return Alteration("replaced", "nothing is left of what it was: trained anew, or another matrix")


def _moved(pair: _Pair) -> str:
    if pair.distance is None or pair.cosine is None:
        return "moved"
    return f"moved by {pair.distance:.2g} of its norm, cosine {pair.cosine:.4f}"
