"""Quantized weights in safetensors and PyTorch files: GPTQ, AWQ, MLX, bitsandbytes, FP8, others.

A layer of these formats is several tensors beside one another: codes, scales, zero points, and
sometimes the order of columns. :func:`with_weights` finds such groups by their names and shapes and
puts one weight in their place, which is decoded when it is read. What does not fit to the letter is
left as it is, and listed as codes that are no numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil, prod
from typing import Any, NamedTuple, TypeAlias

import torch
from jaxtyping import Float, Int, Integer
from torch import Tensor

from kappascope.checkpoints.codes import Code, CodedLocation, enlarged, panels
from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.locations import TensorLocation, Tree
from kappascope.matrix.precision import half_ulps
from kappascope.model.skipped import no_weight

WORD = 32  # bits of the integers that codes are packed into
LONGEST_STATE = 1 << 16  # bytes of the JSON text in which bitsandbytes keeps shape and block size
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # in which AWQ packs eight neighbouring rows into a word
# The magnitudes of a float of four bits: two of exponent, one behind the point.
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_BLOCK = 32  # numbers that share a power of two

Facts: TypeAlias = Mapping[str, Any]
"""The ``quantization_config`` of a model."""


def with_weights(tree: Tree, config: Mapping[str, Any]) -> Tree:
    """Return a tree in which every group of codes and scales is one weight.

    ``config`` is the model's, whose ``quantization_config`` tells what shapes leave open.
    """
    facts = config.get("quantization_config", config.get("quantization"))  # which is MLX's
    facts = facts if isinstance(facts, Mapping) else {}
    weights: Tree = {}
    wholes: dict[str, str] = {}  # of each tensor that a weight is made of
    for name, node in tree.items():
        maker = next((end for end in _MAKERS if name.endswith(end)), None)
        if maker is None or not isinstance(node, TensorLocation):
            continue
        group = _Group(tree, name.removesuffix(maker))
        weight = _MAKERS[maker](group, facts)
        if weight is not None:
            whole = group.stem + group.weight
            weights[whole] = weight
            wholes |= {group.stem + end: whole for end in group.taken}
    shown: Tree = {}
    for name, node in tree.items():
        whole = wholes.get(name, name)
        if whole in weights:
            shown.setdefault(whole, weights[whole])
        if name not in shown:
            made = whole in weights
            shown[name] = no_weight(f"read as a part of {whole}") if made else node
        if isinstance(node, dict):
            shown[name] = with_weights(node, config)
    return shown


class _Group:
    """The tensors whose names begin alike; those that were asked for are parts of a weight."""

    def __init__(self, tree: Tree, stem: str) -> None:
        self.tree, self.stem = tree, stem
        self.taken: list[str] = []
        self.weight = ".weight"  # the end of the weight's own name

    def get(self, end: str, *shape: int | None) -> TensorLocation | None:
        """Return the tensor with this end if its shape fits; ``None`` stands for any size."""
        node = self.tree.get(self.stem + end)
        if not isinstance(node, TensorLocation) or len(node.shape) != len(shape):
            return None
        if not all(want in (None, size) for want, size in zip(shape, node.shape, strict=True)):
            return None
        self.taken.append(end)
        return node


# --- whole numbers of a few bits, in words --------------------------------------------------------


def unpacked(words: Integer[Tensor, "words other"], bits: int) -> Int[Tensor, "codes other"]:
    """Return the codes that are packed one after the other into the words of each column.

    >>> unpacked(torch.tensor([[0x21]], dtype=torch.int32), 4)[:3].flatten().tolist()
    [1, 2, 0]
    """
    unsigned = words.to(torch.int64) & 0xFFFF_FFFF
    begin = torch.arange(words.shape[0] * WORD // bits) * bits
    place, shift = begin // WORD, (begin % WORD)[:, None]
    # a code of three bits may begin in one word and end in the next
    next_words = torch.cat([unsigned[1:], torch.zeros_like(unsigned[:1])])
    pair = unsigned[place] | (next_words[place] << WORD)
    return ((pair >> shift) & ((1 << bits) - 1)).to(torch.int32)


def _unpacked_awq(words: Int[Tensor, "other words"], bits: int) -> Int[Tensor, "other codes"]:
    """Return the codes of each row, of which AWQ puts eight into a word in an order of its own."""
    count = WORD // bits
    unsigned = words.to(torch.int64) & 0xFFFF_FFFF
    codes = torch.empty(*words.shape, count, dtype=torch.int32)
    for i in range(count):
        place = AWQ_ORDER[i] if count == len(AWQ_ORDER) else i
        codes[..., place] = ((unsigned >> (i * bits)) & ((1 << bits) - 1)).to(torch.int32)
    return codes.flatten(1)


@dataclass(frozen=True)
class GroupedIntegers(Code):
    """Codes of a few bits: every group of columns has a scale and a zero point for each row.

    ``form`` is ``gptq`` or ``awq``, which store a weight's transpose, or ``packed``, which stores
    it as it is (compressed-tensors). ``shift`` is added to zero points, of which the first version
    of GPTQ stored one less. ``has_zeros`` and ``has_order`` tell which tensors follow the scales:
    zero points, without which codes are centred, and the group of every column.
    """

    form: str
    bits: int
    columns: int
    shift: int = 0
    has_zeros: bool = True
    has_order: bool = False

    @property
    def name(self) -> str:
        """The format and its bits."""
        title = {"gptq": "GPTQ", "awq": "AWQ", "packed": "integers"}[self.form]
        return f"{title} of {self.bits} bits"

    def decode(self, *stored: Tensor) -> Float[Tensor, "out in"]:
        """Return (code - zero point) * scale."""
        return self._by_rows(
            stored, torch.float32, lambda codes, scales, zeros: (codes - zeros) * scales
        )

    def half_steps(self, *stored: Tensor) -> Float[Tensor, "out in"]:
        """Return half the scale of every entry."""
        return self._by_rows(
            stored, torch.bfloat16, lambda codes, scales, zeros: enlarged(scales.abs() / 2)
        )

    def _by_rows(
        self, stored: tuple[Tensor, ...], dtype: torch.dtype, of: Callable[..., Tensor]
    ) -> Tensor:
        """Return a function of code, scale and zero point of every entry, a panel at a time."""
        words, scales, *more = stored
        zeros = more.pop(0) if self.has_zeros else None
        scales = scales if self.form == "packed" else scales.T  # (rows, groups)
        group = self._group(more, scales.shape[1])
        result = torch.empty(scales.shape[0], self.columns, dtype=dtype)
        for rows in panels(len(result), self.columns, multiple=WORD):  # so that no word is cut
            inner = slice(rows.start * self.bits // WORD, ceil(rows.stop * self.bits / WORD))
            codes = self._codes(words, rows, inner)[: rows.stop - rows.start]
            middle = torch.full((1, 1), float(1 << (self.bits - 1)))
            zero = middle.expand(codes.shape)
            if zeros is not None:
                zero = self._zeros(zeros, inner)[: rows.stop - rows.start].float()[:, group]
            result[rows] = of(codes, scales[rows].float()[:, group], zero + self.shift)
        return result

    def _group(self, more: list[Tensor], groups: int) -> Tensor:
        """Return the group of every column."""
        if not self.has_order:
            return torch.arange(self.columns) // ceil(self.columns / groups)
        group = more.pop(0).long()
        if int(group.min()) < 0 or int(group.max()) >= groups:
            raise Malformed("a column is in a group that does not exist", "quantize it again")
        return group

    def _codes(self, words: Tensor, rows: slice, inner: slice) -> Int[Tensor, "rows columns"]:
        if self.form == "gptq":  # (columns in words, rows)
            return unpacked(words[:, rows], self.bits).T
        if self.form == "awq":  # (columns, rows in words)
            return _unpacked_awq(words[:, inner], self.bits).T
        return unpacked(words[rows].T, self.bits).T[:, : self.columns]  # (rows, columns in words)

    def _zeros(self, words: Tensor, inner: slice) -> Int[Tensor, "rows groups"]:
        if self.form == "gptq":  # (groups, rows in words)
            return unpacked(words[:, inner].T, self.bits)
        if self.form == "awq":
            return _unpacked_awq(words[:, inner], self.bits).T
        return unpacked(words[inner], self.bits)  # (rows in words, groups)


def _gptq_or_awq(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return the weight of a layer of GPTQ or AWQ, which its shapes tell apart."""
    codes, scales = group.get(".qweight", None, None), group.get(".scales", None, None)
    if codes is None or scales is None or not prod(scales.shape) or not prod(codes.shape):
        return None
    groups, rows = scales.shape
    zeros = group.get(".qzeros", groups, None)
    if zeros is None or {codes.dtype, zeros.dtype} != {torch.int32}:
        return None
    bits, rest = divmod(zeros.shape[1] * WORD, rows)
    if rest or bits not in (2, 3, 4, 8):
        return None
    stored = codes, scales, zeros
    if codes.shape[1] == rows:
        columns = codes.shape[0] * WORD // bits
        order = group.get(".g_idx", columns)
        shift = int(facts.get("checkpoint_format") != "gptq_v2")
        code = GroupedIntegers("gptq", bits, columns, shift, has_order=order is not None)
        return CodedLocation(stored if order is None else (*stored, order), code, (rows, columns))
    if codes.shape[1] * WORD == rows * bits and bits in (4, 8):
        columns = codes.shape[0]
        return CodedLocation(stored, GroupedIntegers("awq", bits, columns), (rows, columns))
    return None


def _packed(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return the weight of a layer of compressed-tensors whose codes are packed."""
    codes, scales = group.get(".weight_packed", None, None), group.get(".weight_scale", None, None)
    shape = group.get(".weight_shape", 2)
    if codes is None or scales is None or shape is None or codes.dtype != torch.int32:
        return None
    rows, columns = (int(size) for size in shape.read())
    if rows != codes.shape[0] or rows != scales.shape[0] or not 0 < columns < 1 << 40:
        return None
    bits = next((b for b in (2, 4, 8) if ceil(columns * b / WORD) == codes.shape[1]), None)
    if bits is None or not scales.shape[1]:
        return None
    zeros = group.get(".weight_zero_point", ceil(rows * bits / WORD), scales.shape[1])
    order = group.get(".weight_g_idx", columns)
    code = GroupedIntegers(
        "packed", bits, columns, has_zeros=zeros is not None, has_order=order is not None
    )
    stored = [part for part in (codes, scales, zeros, order) if part is not None]
    return CodedLocation(tuple(stored), code, (rows, columns))


# --- MLX ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AffineIntegers(Code):
    """Codes of a few bits: every group of columns has a scale and an offset for each row (MLX)."""

    bits: int
    columns: int

    @property
    def name(self) -> str:
        """The format and its bits."""
        return f"MLX of {self.bits} bits"

    def decode(self, *stored: Tensor) -> Float[Tensor, "out in"]:
        """Return code * scale + offset."""
        return self._by_rows(
            stored, torch.float32, lambda codes, scale, offset: codes * scale + offset
        )

    def half_steps(self, *stored: Tensor) -> Float[Tensor, "out in"]:
        """Return half the scale of every entry, and all of it at the ends, where MLX clips.

        It makes one end of a group exact, and what is beyond the other is cut by up to a step.
        """
        last = (1 << self.bits) - 1

        def half_step(codes: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
            is_end = (codes == 0) | (codes == last)
            return enlarged(scale.abs() * torch.where(is_end, 1.0, 0.5))

        return self._by_rows(stored, torch.bfloat16, half_step)

    def _by_rows(
        self, stored: tuple[Tensor, ...], dtype: torch.dtype, of: Callable[..., Tensor]
    ) -> Tensor:
        """Return a function of code, scale and offset of every entry, a panel at a time."""
        words, scales, offsets = stored
        group = torch.arange(self.columns) // (self.columns // scales.shape[1])
        result = torch.empty(len(words), self.columns, dtype=dtype)
        for rows in panels(len(result), self.columns):
            codes = unpacked(words[rows].T, self.bits).T
            result[rows] = of(codes, *(part[rows].float()[:, group] for part in (scales, offsets)))
        return result


MLX_GROUP = 64  # columns that share a scale, where no config tells


def _affine(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return the weight of a layer of MLX; the config may tell of layers apart."""
    codes, scales = group.get(".weight", None, None), group.get(".scales", None, None)
    if codes is None or scales is None or codes.dtype != torch.uint32:
        return None
    rows, groups = scales.shape
    offsets = group.get(".biases", rows, groups)
    own = facts.get(group.stem)
    size = (own if isinstance(own, Mapping) else facts).get("group_size", MLX_GROUP)
    if offsets is None or codes.shape[0] != rows or not rows * groups:
        return None
    if type(size) is not int or not 0 < size < 1 << 20:
        return None
    columns = groups * size
    bits, rest = divmod(codes.shape[1] * WORD, columns)
    if rest or bits not in (2, 3, 4, 5, 6, 8):
        return None
    return CodedLocation((codes, scales, offsets), AffineIntegers(bits, columns), (rows, columns))


# --- bitsandbytes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class FourBitBlocks(Code):
    """bitsandbytes' codes of four bits: sixteen levels times the largest number of a block.

    With ``nested`` so many of those largest numbers are codes of eight bits under one scale, and
    have the ``offset`` in common.
    """

    kind: str
    block: int
    count: int
    nested: int = 0
    offset: float = 0.0

    @property
    def name(self) -> str:
        """The name of the levels: nf4 or fp4."""
        return self.kind

    def decode(self, *stored: Tensor) -> Float[Tensor, " count"]:
        """Return level times largest number; the upper half of a byte comes first."""
        codes, levels, largest = stored[0].flatten(), stored[2].float(), self._largest(stored)
        result = torch.empty(self.count)
        for blocks in panels(len(largest), self.block, multiple=2):
            begin, end = blocks.start * self.block, min(blocks.stop * self.block, self.count)
            part = codes[begin // 2 : ceil(end / 2)]
            halves = torch.stack([part >> 4, part & 15], dim=1).flatten()[: end - begin]
            scales = largest[blocks].repeat_interleave(self.block)[: end - begin]
            result[begin:end] = levels[halves.int()] * scales
        return result

    def half_steps(self, *stored: Tensor) -> Float[Tensor, " count"]:
        """Return half the widest step between levels, times the largest number of the block."""
        widest = stored[2].float().sort().values.diff().max()
        steps = enlarged(self._largest(stored).abs() * widest / 2)
        return steps.repeat_interleave(self.block)[: self.count]

    def _largest(self, stored: tuple[Tensor, ...]) -> Float[Tensor, " blocks"]:
        """Return the largest number of every block."""
        largest = stored[1]
        if not self.nested:
            return largest.float()
        scales, levels = stored[3].float(), stored[4].float()
        groups = torch.arange(len(largest)) // self.nested
        return levels[largest.int()] * scales[groups] + self.offset


class _State(NamedTuple):
    """What bitsandbytes keeps of a weight in a text beside it."""

    kind: str
    block: int
    shape: tuple[int, ...]
    nested: int
    offset: float

    @classmethod
    def read(cls, text: TensorLocation) -> _State | None:
        """Return what a text says, if it is one that makes sense."""
        if text.dtype != torch.uint8 or text.shape[0] > LONGEST_STATE:
            return None
        try:
            facts = json.loads(bytes(text.read().tolist()).decode())
            kind, block, shape = facts["quant_type"], facts["blocksize"], tuple(facts["shape"])
            nested, offset = facts.get("nested_blocksize") or 0, facts.get("nested_offset") or 0.0
            state = cls(kind, block, shape, nested, float(offset))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        sizes = (block, *shape, nested)
        whole = all(type(size) is int and 0 <= size < 1 << 40 for size in sizes)
        # an even block, so that none begins within a byte
        return state if whole and kind in ("nf4", "fp4") and block and block % 2 == 0 else None


def _four_bits(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return a weight of four bits of bitsandbytes."""
    codes = group.get(".weight", None, 1)
    texts = (group.get(f".weight.quant_state.bitsandbytes__{k}", None) for k in ("nf4", "fp4"))
    text = next((text for text in texts if text is not None), None)
    state = _State.read(text) if text else None
    if codes is None or codes.dtype != torch.uint8 or state is None:
        return None
    count = prod(state.shape)
    blocks = ceil(count / state.block)
    parts = [
        codes,
        group.get(".weight.absmax", blocks),
        group.get(".weight.quant_map", 16),
    ]
    if state.nested:
        parts.append(group.get(".weight.nested_absmax", ceil(blocks / state.nested)))
        parts.append(group.get(".weight.nested_quant_map", 256))
    stored = tuple(part for part in parts if part is not None)
    fits = len(stored) == len(parts) and ceil(count / 2) == codes.shape[0]
    if not fits or (state.nested and stored[1].dtype != torch.uint8):
        return None
    code = FourBitBlocks(state.kind, state.block, count, state.nested, state.offset)
    return CodedLocation(stored, code, state.shape)


# --- a small number for every entry, and scales ---------------------------------------------------


@dataclass(frozen=True)
class ScaledNumbers(Code):
    """Numbers of eight bits times scales: one of the whole, of each row, or of each block.

    Scales are divided by ``divisor`` first: bitsandbytes stores the largest number of a row, of
    which 127 is the code.
    """

    kind: str
    divisor: float = 1.0

    @property
    def name(self) -> str:
        """The type of the numbers."""
        return f"{self.kind} with scales"

    def decode(self, *stored: Tensor) -> Float[Tensor, "out in"]:
        """Return number times scale."""
        return self._by_rows(
            stored, torch.float32, lambda numbers, scales: numbers.float() * scales
        )

    def half_steps(self, *stored: Tensor) -> Float[Tensor, "out in"]:
        """Return half the distance to the next number of the type, times the scale."""

        def half(numbers: Tensor, scales: Tensor) -> Tensor:
            if not numbers.dtype.is_floating_point:
                return enlarged(scales.abs() / 2)
            return enlarged(half_ulps(numbers.double(), numbers.dtype).float() * scales.abs())

        return self._by_rows(stored, torch.bfloat16, half)

    def _by_rows(
        self, stored: tuple[Tensor, ...], dtype: torch.dtype, of: Callable[..., Tensor]
    ) -> Tensor:
        """Return a function of number and scale of every entry, a panel at a time."""
        numbers, scales = stored
        scales = scales.float() / self.divisor
        scales = scales.reshape(-1, 1) if scales.ndim < 2 else scales
        height, width = (
            ceil(size / count) for size, count in zip(numbers.shape, scales.shape, strict=True)
        )
        result = torch.empty(numbers.shape, dtype=dtype)
        for rows in panels(len(numbers), numbers.shape[1], multiple=height):
            lines = scales[rows.start // height : ceil(rows.stop / height)]
            lines = lines.repeat_interleave(height, 0)[: rows.stop - rows.start]
            lines = lines.repeat_interleave(width, 1)[:, : numbers.shape[1]]
            result[rows] = of(numbers[rows], lines)
        return result


def _scaled(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return a weight of eight-bit numbers with the scales that stand beside it."""
    numbers = group.get(".weight", None, None)
    if numbers is None or numbers.dtype not in _SCALED or not prod(numbers.shape):
        return None
    rows, _ = numbers.shape
    if numbers.dtype == torch.int8 and (largest := group.get(".SCB", rows)):
        return CodedLocation((numbers, largest), ScaledNumbers("int8", 127.0), numbers.shape)
    for end in (".weight_scale_inv", ".weight_scale"):
        for shape in ((), (1,), (rows,), (None, None)):
            scales = group.get(end, *shape)
            if scales is None or not scales.dtype.is_floating_point or not prod(scales.shape):
                continue
            if len(scales.shape) == 2 and not _divides(numbers.shape, scales.shape, facts):
                return None
            code = ScaledNumbers(str(numbers.dtype).removeprefix("torch."))
            return CodedLocation((numbers, scales), code, numbers.shape)
    return None


_SCALED = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
           torch.float8_e5m2fnuz}  # fmt: skip


def _divides(shape: tuple[int, ...], scales: tuple[int, ...], facts: Facts) -> bool:
    """Tell whether there is a scale for each block, of the size that the config tells, if it does.

    Blocks of another size than that which fits evenly would be taken for each other's.
    """
    sizes = [ceil(size / count) for size, count in zip(shape, scales, strict=True)]
    told = facts.get("weight_block_size")
    if told is not None and 1 not in scales and told != sizes:
        return False
    counts = [ceil(size / step) for size, step in zip(shape, sizes, strict=True)]
    return counts == list(scales)


# --- floats of four bits --------------------------------------------------------------------------


@dataclass(frozen=True)
class FourBitFloats(Code):
    """Floats of four bits, of which 32 share a power of two: MXFP4, as gpt-oss stores experts.

    Its experts are stored (out, in) and used (in, out), as they are without codes.
    """

    @property
    def name(self) -> str:
        """The name of the standard."""
        return "MXFP4"

    def decode(self, *stored: Tensor) -> Float[Tensor, experts in out]:
        """Return level times power of two; the lower half of a byte comes first."""
        codes, powers = stored[0].flatten(0, 2), stored[1].flatten()
        levels = torch.tensor([*FLOAT4, *(-level for level in FLOAT4)])
        result = torch.empty(len(codes), MXFP4_BLOCK)
        for rows in panels(len(codes), MXFP4_BLOCK):
            halves = torch.stack([codes[rows] & 15, codes[rows] >> 4], dim=-1).flatten(1)
            result[rows] = levels[halves.int()] * _power(powers[rows])
        return result.view(*stored[1].shape[:2], -1).mT

    def half_steps(self, *stored: Tensor) -> Float[Tensor, experts in out]:
        """Return the power of two: half the widest step, from level 4 to level 6."""
        powers = enlarged(_power(stored[1].flatten())).expand(-1, MXFP4_BLOCK)
        return powers.reshape(*stored[1].shape[:2], -1).mT


def _power(exponents: Integer[Tensor, " blocks"]) -> Float[Tensor, "blocks 1"]:
    """Return the powers of two that exponents stand for, 127 for one."""
    return torch.ldexp(torch.ones(len(exponents)), exponents.int() - 127)[:, None]


def _experts(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return a stack of experts in blocks of floats of four bits."""
    codes = group.get("_blocks", None, None, None, MXFP4_BLOCK // 2)
    powers = group.get("_scales", *codes.shape[:3]) if codes else None
    if codes is None or powers is None or {codes.dtype, powers.dtype} != {torch.uint8}:
        return None
    group.weight = ""
    experts, rows, blocks, _ = codes.shape
    return CodedLocation((codes, powers), FourBitFloats(), (experts, MXFP4_BLOCK * blocks, rows))


_MAKERS: dict[str, Callable[[_Group, Facts], CodedLocation | None]] = {
    ".qweight": _gptq_or_awq,
    ".weight_packed": _packed,
    ".weight": lambda group, facts: next(
        filter(None, (make(group, facts) for make in (_affine, _four_bits, _scaled))), None
    ),
    "_blocks": _experts,
}
