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
from kappascope.checkpoints.scaled import MX_BLOCK, ScaledNumbers, TurnedExperts, block_of
from kappascope.model.skipped import no_weight

WORD = 32  # bits of the integers that codes are packed into
LONGEST_STATE = 1 << 16  # bytes of the JSON text in which bitsandbytes keeps shape and block size
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # in which AWQ packs eight neighbouring rows into a word

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


_GLOBAL = ".weight_global_scale"


def _packed(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return the weight of a layer of compressed-tensors whose codes are packed."""
    codes, scales = group.get(".weight_packed", None, None), group.get(".weight_scale", None, None)
    if codes is None or scales is None or codes.shape[0] != scales.shape[0]:
        return None
    if codes.dtype == torch.int32:
        return _packed_integers(group, codes, scales, facts)
    has = [group.stem + end in group.tree for end in (".weight_zero_point", _GLOBAL)]
    whole = group.get(_GLOBAL, 1) or group.get(_GLOBAL)
    return (
        _small_floats(codes, scales, whole, "over") if has == [False, whole is not None] else None
    )


def _packed_integers(
    group: _Group, codes: TensorLocation, scales: TensorLocation, facts: Facts
) -> CodedLocation | None:
    """Return a weight whose codes are packed into words."""
    shape = group.get(".weight_shape", 2)
    rows, columns = (int(size) for size in shape.read()) if shape else (0, 0)
    if rows != codes.shape[0] or not 0 < columns < 1 << 40 or not scales.shape[1]:
        return None
    # 32 neighbours take as many words as a code has bits; a short row may fit to several numbers.
    fits = [b for b in range(2, 9) if ceil(columns * b / WORD) == codes.shape[1]]
    told = [b for b in fits if b in _told_bits(facts)]
    bits, *others = told or [b for b in fits if b in (2, 4, 8)] or fits or [0]
    zeros = group.get(".weight_zero_point", ceil(rows * bits / WORD), scales.shape[1])
    has_zeros = group.stem + ".weight_zero_point" in group.tree
    if not bits or others or (zeros is None) == has_zeros:
        return None
    order = group.get(".weight_g_idx", columns)
    code = GroupedIntegers(
        "packed", bits, columns, has_zeros=has_zeros, has_order=order is not None
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
        words, scales, offsets = (part.flatten(0, -2) for part in stored)
        group = torch.arange(self.columns) // (self.columns // scales.shape[1])
        result = torch.empty(len(words), self.columns, dtype=dtype)
        for rows in panels(len(result), self.columns):
            codes = unpacked(words[rows].T, self.bits).T
            result[rows] = of(codes, *(part[rows].float()[:, group] for part in (scales, offsets)))
        return result


MLX_GROUP = 64  # columns that share a scale, where no config tells


def _affine(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return the weight of a layer of MLX; the config may tell of layers apart."""
    # a stack of experts has a dimension more
    codes = group.get(".weight", None, None) or group.get(".weight", None, None, None)
    if codes is None or codes.dtype != torch.uint32:
        return None
    *outer, words = codes.shape
    scales = group.get(".scales", *outer, None)
    offsets = group.get(".biases", *scales.shape) if scales else None
    if scales is None or offsets is None or not prod(scales.shape):
        return None
    own = facts.get(group.stem)
    size = (own if isinstance(own, Mapping) else facts).get("group_size", MLX_GROUP)
    if type(size) is not int or not 0 < size < 1 << 20:
        return None
    columns = scales.shape[-1] * size
    bits, rest = divmod(words * WORD, columns)
    if rest or bits not in (2, 3, 4, 5, 6, 8):
        return None
    stored = codes, scales, offsets
    return CodedLocation(stored, AffineIntegers(bits, columns), (*outer, columns))


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


# --- small numbers and scales --------------------------------------------------------------------


def _scaled(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return a weight of eight-bit numbers with the scales that stand beside it."""
    numbers = group.get(".weight", None, None)
    if numbers is None or numbers.dtype not in _SCALED or not prod(numbers.shape):
        return None
    rows, columns = numbers.shape
    kind = str(numbers.dtype).removeprefix("torch.")
    if numbers.dtype == torch.int8 and (largest := group.get(".SCB", rows)):
        code = ScaledNumbers(kind, (1, columns), divisor=127.0)
        return CodedLocation((numbers, largest), code, numbers.shape)
    for end in (".weight_scale_inv", ".weight_scale"):
        for shape in ((), (1,), (rows,), (None, None)):
            scales = group.get(end, *shape)
            if scales is None or not prod(scales.shape) or scales.dtype in _NO_SCALES:
                continue
            counts = scales.shape if len(shape) == 2 else (prod(scales.shape), 1)
            block = block_of(numbers.shape, counts, _told_blocks(facts))
            zeros = group.get(".weight_zero_point", *scales.shape)
            if block is None or (zeros is None and group.stem + ".weight_zero_point" in group.tree):
                return None
            scale = "power" if scales.dtype == torch.uint8 else "plain"
            code = ScaledNumbers(kind, block, scale, has_zeros=zeros is not None)
            stored = (numbers, scales) if zeros is None else (numbers, scales, zeros)
            return CodedLocation(stored, code, numbers.shape)
    return None


_SCALED = {torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
           torch.float8_e5m2fnuz}  # fmt: skip
_NO_SCALES = {torch.int8, torch.int16, torch.int32, torch.int64, torch.bool}


def _told_blocks(facts: Facts) -> list[tuple[int, int]]:
    """Return the blocks that a config tells of, as transformers or compressed-tensors write it."""
    groups = facts.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [each.get("weights") for each in groups if isinstance(each, Mapping)]
    told = [each.get("block_structure") for each in weights if isinstance(each, Mapping)]
    pairs = [each for each in (facts.get("weight_block_size"), *told) if isinstance(each, list)]
    return [
        (height, width)
        for height, width in (pair for pair in pairs if len(pair) == 2)
        if all(type(size) is int and 0 < size < 1 << 40 for size in (height, width))
    ]


def _told_bits(facts: Facts) -> set[int]:
    """Return the bits of packed integers that a config of compressed-tensors tells of."""
    groups = facts.get("config_groups")
    groups = list(groups.values()) if isinstance(groups, Mapping) else []
    weights = [each.get("weights") for each in groups if isinstance(each, Mapping)]
    bits = [each.get("num_bits") for each in weights if isinstance(each, Mapping)]
    return {each for each in bits if type(each) is int}


# (bytes that share a scale, whether scales are powers of two): the numbers, and their title
_SMALL_FLOATS = {
    (8, False): ("float4", 16, "NVFP4"),
    (16, True): ("float4", MX_BLOCK, "MXFP4"),
    (24, True): ("float6", MX_BLOCK, "MXFP6"),
    (32, True): ("float8_e4m3fn", MX_BLOCK, "MXFP8"),
}


def _small_floats(
    codes: TensorLocation, scales: TensorLocation, whole: TensorLocation | None = None, by: str = ""
) -> CodedLocation | None:
    """Return a weight of floats of four to eight bits whose columns share scales, as OCP or Nvidia.

    What shares a scale tells which it is. ``whole`` scales all, and ``by`` is `times` or `over`.
    """
    *outer, size = codes.shape
    groups = scales.shape[-1]
    size *= codes.dtype.itemsize
    if codes.dtype not in (torch.uint8, torch.uint32) or not prod(codes.shape) or not groups:
        return None
    is_mlx = codes.dtype == torch.uint32  # whose scales are bytes, whatever they mean
    bits8 = scales.dtype == torch.uint8
    is_power = scales.dtype == torch.float8_e8m0fnu or (
        bits8 and not (is_mlx and size == 8 * groups)
    )
    found = _SMALL_FLOATS.get((size // groups, is_power))
    if found is None or size % groups or (is_power and whole is not None):
        return None
    if not is_power and scales.dtype != torch.float8_e4m3fn and not bits8:
        return None
    number, block, title = found
    scale = "power" if is_power else "e4m3"
    code = ScaledNumbers(number, (1, block), scale, whole=by if whole else "", title=title)
    stored = (codes, scales) if whole is None else (codes, scales, whole)
    return CodedLocation(stored, code, (*outer, groups * block))


def _float_bytes(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return a weight of floats in bytes, as modelopt, Quark and MLX store it."""
    codes = group.get(".weight", None, None) or group.get(".weight", None, None, None)
    if codes is None or codes.dtype not in (torch.uint8, torch.uint32):
        return None
    end = ".scales" if codes.dtype == torch.uint32 else ".weight_scale"
    scales = group.get(end, *codes.shape[:-1], None)
    if scales is None or group.stem + ".biases" in group.tree:
        return None
    ends = [end for end in (".weight_scale_2",) if group.stem + end in group.tree]
    whole = next((it for it in (group.get(e, *s) for e in ends for s in ((), (1,))) if it), None)
    return None if ends and whole is None else _small_floats(codes, scales, whole, "times")


def _experts(group: _Group, facts: Facts) -> CodedLocation | None:
    """Return a stack of experts in blocks of floats of four bits."""
    codes = group.get("_blocks", None, None, None, MX_BLOCK // 2)
    powers = group.get("_scales", *codes.shape[:3]) if codes else None
    if codes is None or powers is None or {codes.dtype, powers.dtype} != {torch.uint8}:
        return None
    group.weight = ""
    experts, rows, blocks, _ = codes.shape
    return CodedLocation((codes, powers), TurnedExperts(), (experts, MX_BLOCK * blocks, rows))


_MAKERS: dict[str, Callable[[_Group, Facts], CodedLocation | None]] = {
    ".qweight": _gptq_or_awq,
    ".weight_packed": _packed,
    ".weight": lambda group, facts: next(
        filter(None, (make(group, facts) for make in (_affine, _float_bytes, _four_bits, _scaled))),
        None,
    ),
    "_blocks": _experts,
}
