"""Weights that torchao quantized: tensor subclasses, in PyTorch files and in safetensors.

A PyTorch file holds the attributes of each such object. Safetensors holds the tensors among them
under names of their own (``fc._weight_qdata``), perhaps in several shards, and tells the class in
the metadata of its header. No class is built. The layouts of single processors and classes of
older releases are not decoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.checkpoints.codes import Code, CodedLocation, enlarged, panels
from kappascope.checkpoints.locations import TensorLocation, Tree
from kappascope.checkpoints.scaled import MX_BLOCK, ScaledNumbers, block_of
from kappascope.model.skipped import no_weight, unreadable

TORCHAO = "torchao."
NVFP4_BLOCK = 16  # numbers that share a scale
_PARTS = "qdata", "scale", "zero_point", "act_pre_scale", "per_tensor_scale"

InnerTensors: TypeAlias = Mapping[str, TensorLocation]
"""The tensors among the attributes of a subclass."""


def weight_of(kind: str, parts: InnerTensors, facts: Mapping[str, Any]) -> CodedLocation | None:
    """Return the weight that an object of this class stands for, if that is known.

    ``facts`` are its other attributes. A weight whose inputs are scaled first is another one.
    """
    numbers, scales = parts.get("qdata"), parts.get("scale")
    maker = _MAKERS.get(kind.rpartition(".")[2])
    if maker is None or numbers is None or scales is None or "act_pre_scale" in parts:
        return None
    is_empty = 0 in (*numbers.shape, *scales.shape)
    if is_empty or not 2 <= len(numbers.shape) <= 3:
        return None
    return maker(numbers, scales, parts, facts)


def with_subclasses(tree: Tree, metadata: Mapping[str, str]) -> Tree:
    """Return what safetensors hold with the weights in place of the tensors they are made of.

    >>> with_subclasses({"fc.bias": None}, {"tensor_names": '["fc.bias"]'})
    {'fc.bias': None}
    """
    if "tensor_names" not in metadata:
        return tree
    weights: Tree = {}
    for name, text in metadata.items():
        if (kind := _told(text)) is None or name in tree:
            continue
        stem, dot, last = name.rpartition(".")
        ends = {f"{stem}{dot}_{last}_{end}": end for end in _PARTS}
        nodes = {end: tree[full] for full, end in ends.items() if full in tree}
        parts = {end: node for end, node in nodes.items() if isinstance(node, TensorLocation)}
        facts = kind.get("_data")
        if len(parts) < len(nodes) or not isinstance(facts, Mapping):
            continue
        lost = unreadable(f"tensor subclass {TORCHAO}{kind['_type'][:40]}")
        weight = weight_of(kind["_type"], parts, facts) or lost
        weights |= {full: (name, weight) for full, end in ends.items() if end in parts}
    shown: Tree = {}
    for name, node in tree.items():
        whole, weight = weights.get(name, (name, node))
        shown.setdefault(whole, weight)
        if whole != name:
            shown[name] = no_weight(f"read as a part of {whole}")
    return shown


def _told(text: str) -> Mapping[str, Any] | None:
    """Return what metadata tell of a tensor if it is of a class."""
    try:
        kind = json.loads(text)
    except (ValueError, RecursionError):
        return None
    told = isinstance(kind, Mapping) and isinstance(kind.get("_type"), str)
    return kind if told and kind["_type"] != "Tensor" else None


def _numbers(
    numbers: TensorLocation, scales: TensorLocation, parts: InnerTensors, facts: Mapping[str, Any]
) -> CodedLocation | None:
    """Return a weight of integers or floats of eight bits, with scales of blocks."""
    kind = str(numbers.dtype).removeprefix("torch.")
    *outer, rows, columns = numbers.shape
    told = facts.get("block_size")
    told = tuple(told) if isinstance(told, list | tuple) else ()
    if prod(scales.shape) == 1:
        block: tuple[int, int] | None = (prod(outer) * rows, columns)
    elif len(scales.shape) != len(numbers.shape) or scales.shape[:-2] != tuple(outer):
        return None
    else:
        whole = len(told) == len(numbers.shape) and all(type(n) is int and n > 0 for n in told)
        block = block_of((rows, columns), scales.shape[-2:], [told[-2:]] if whole else [])
    # a block does not reach from one expert into the next
    if block is None or (outer and rows % block[0] and block[0] % rows):
        return None
    zeros = parts.get("zero_point")
    if kind not in _EIGHT_BITS or (zeros and prod(zeros.shape) != prod(scales.shape)):
        return None
    code = ScaledNumbers(kind, block, has_zeros=zeros is not None)
    stored = (numbers, scales) if zeros is None else (numbers, scales, zeros)
    return CodedLocation(stored, code, numbers.shape)


_EIGHT_BITS = {"int8", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"}


def _small_floats(
    numbers: TensorLocation, scales: TensorLocation, parts: InnerTensors, facts: Mapping[str, Any]
) -> CodedLocation | None:
    """Return a weight in a format of OCP (MX) or Nvidia."""
    whole = parts.get("per_tensor_scale")
    is_mx = scales.dtype == torch.float8_e8m0fnu
    if not is_mx and scales.dtype != torch.float8_e4m3fn:
        return None
    block = MX_BLOCK if is_mx else NVFP4_BLOCK
    packed = numbers.dtype == torch.uint8
    *outer, rows, columns = numbers.shape
    columns *= 1 + packed
    swizzled = facts.get("is_swizzled_scales") is True
    groups, rest = divmod(columns, block)
    lines = prod(outer) * rows
    # in tiles of 128 x 4 where they are swizzled
    count = -(-lines // 128) * 128 * -(-groups // 4) * 4 if swizzled else lines * groups
    contiguous = numbers.stride[-1] == 1  # or else a transpose that shares its storage
    if rest or prod(scales.shape) != count or not contiguous or (outer and swizzled):
        return None
    if whole and (is_mx or prod(whole.shape) not in (1, *outer)):
        return None
    number = "float4" if packed else str(numbers.dtype).removeprefix("torch.")
    if not packed and (not is_mx or number not in ("float8_e4m3fn", "float8_e5m2")):
        return None
    code = ScaledNumbers(
        number,
        (1, block),
        "power" if is_mx else "e4m3",
        whole="times" if whole else "",
        swizzled=swizzled,
        title="NVFP4" if not is_mx else "MXFP4" if packed else "MXFP8",
    )
    stored = (numbers, scales, whole) if whole else (numbers, scales)
    return CodedLocation(stored, code, (*outer, rows, columns))


@dataclass(frozen=True)
class SignedNibbles(Code):
    """Integers of four bits with sign, two a byte: groups of columns have a scale and an offset.

    Scales and offsets are stored (groups, rows), the transpose of what they scale.
    """

    @property
    def name(self) -> str:
        """The number of bits."""
        return "int4 with scales"

    def decode(self, *stored: Tensor) -> Float[Tensor, "rows columns"]:
        """Return code * scale + offset; the lower half of a byte comes first."""
        return self._by_rows(stored, torch.float32, lambda codes, scale, zero: codes * scale + zero)

    def half_steps(self, *stored: Tensor) -> Float[Tensor, "rows columns"]:
        """Return half the scale of every entry."""
        return self._by_rows(
            stored, torch.bfloat16, lambda codes, scale, zero: enlarged(scale.abs() / 2)
        )

    def _by_rows(
        self, stored: tuple[Tensor, ...], dtype: torch.dtype, of: Callable[..., Tensor]
    ) -> Tensor:
        codes = stored[0].contiguous().flatten(0, -2).view(torch.int8)
        scales, offsets = (part.mT.flatten(0, -2).float() for part in stored[1:])
        columns = 2 * codes.shape[1]
        group = torch.arange(columns) // (columns // scales.shape[1])
        result = torch.empty(len(codes), columns, dtype=dtype)
        for rows in panels(len(codes), columns):
            lower = (codes[rows] << 4) >> 4  # which keeps the sign
            halves = torch.stack([lower, codes[rows] >> 4], dim=-1).flatten(1)
            result[rows] = of(halves.float(), scales[rows][:, group], offsets[rows][:, group])
        return result


def _nibbles(
    numbers: TensorLocation, scales: TensorLocation, parts: InnerTensors, facts: Mapping[str, Any]
) -> CodedLocation | None:
    """Return a weight of integers of four bits in their plain layout."""
    offsets = parts.get("zero_point")
    *outer, rows, size = numbers.shape
    if offsets is None or offsets.shape != scales.shape or numbers.dtype.itemsize != 1:
        return None
    if len(scales.shape) != len(numbers.shape) or 2 * size % scales.shape[-2]:
        return None
    if (*scales.shape[:-2], scales.shape[-1]) != (*outer, rows):
        return None
    return CodedLocation((numbers, scales, offsets), SignedNibbles(), (*outer, rows, 2 * size))


_MAKERS: dict[str, Callable[..., CodedLocation | None]] = {
    "Float8Tensor": _numbers,
    "Int8Tensor": _numbers,
    "IntxUnpackedToInt8Tensor": _numbers,
    "Int4Tensor": _nibbles,
    "MXTensor": _small_floats,
    "NVFP4Tensor": _small_floats,
}
