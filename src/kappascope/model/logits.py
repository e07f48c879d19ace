"""How large attention logits can get: for each head a bound of |q·k| / sqrt(d), from the file.

What enters attention has passed a norm layer, so it is ``g z + b`` with gains g, a bias b and a z
whose length is at most the root of the model's width n. With ``A = Wq diag(g)`` and
``a = Wq b + bias``, and B and b likewise of the keys, a logit is ``(A z + a)' R (B z' + b)``, and

    |q·k| <= n |A'RB| + sqrt(n) (|A'R b| + |B'R'a|) + |a'R b|

with spectral norms: the largest value that any z and z' of that length give, but for biases. R
turns queries against keys by their distance: with rotary positions it is one of as many
rotations as there are distances, in the two layouts that are in use, and the bound is the largest
over all; where the angles are not known, |A| |B| bounds every rotation. Norms of queries and keys
(QK-norm) bound them by their own gains. A first layer that reads a table of tokens without
positions is bounded by the tokens of that table, pair by pair and over all angles.

To that is added what float32 arithmetic can add: (n + d) roundings of sums of absolute values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.model.attention import Attention, values
from kappascope.model.names import layer as path_of
from kappascope.model.tensors import Path, Read

MOST_DISTANCES = 1024  # rotations that are tried one by one: beyond, their angles are dense
FLOAT32_ROUNDING = 2.0**-24
SAFETY_ROUNDINGS = 16  # of norms, scales and rotations, beside the sums
TOKEN_BLOCK = 1024  # tokens compared with others at once

# Norm layers that feed attention, by the names that stand beside it in its block.
_BEFORE = (
    "input_layernorm", "attention_norm", "ln_1", "ln1", "norm1", "norm_1", "attn_norm",
    "layer_norm1", "self_attn_layer_norm", "layernorm_before", "pre_attention_layernorm",
)  # fmt: skip
# Where a block ends in a norm, it is the one before that feeds attention: in BERT's family.
_BLOCK_END = ("output.LayerNorm", "full_layer_layer_norm", "output_layer_norm")
_TABLE_NORMS = ("embeddings.LayerNorm", "embeddings_layer_norm")
_QUERY_NORMS = ("q_norm", "q_layernorm", "query_norm"), ("k_norm", "k_layernorm", "key_norm")

Vectors = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class LogitBound:
    """The largest |q·k| / sqrt(d) that a head can give, and how it was bounded.

    ``proxy`` is what the Frobenius norms of the two factors give.
    """

    layer: str
    head: int
    depth: int | None
    bound: float
    proxy: float
    method: str


@dataclass(frozen=True)
class _Affine:
    """What a head makes of a vector in a ball: a matrix, a constant, and the ball's radius."""

    matrix: Float[Tensor, "heads size width"]
    constant: Float[Tensor, "heads size"]
    radius: float


def logit_bounds(
    attention: Attention,
    read: Read,
    vectors: Mapping[str, Path],
    config: Mapping[str, Any],
    table: Tensor | None = None,
) -> Iterator[LogitBound]:
    """Bound the logits of every head of a layer; nothing where no norm layer is known to feed it.

    ``table`` is the table of tokens, where the first layer reads nothing else.
    """

    def vector(name: str) -> Tensor | None:
        return read(vectors[name]).detach().double() if name in vectors else None

    norm = _feeding_norm(attention, vector)
    if norm is None:
        return
    gain, shift, which = norm
    q, k = (weight.double() for weight in values(attention.units, _pair(attention), read))
    if q.shape[1] != len(gain) or k.shape[1] != len(gain):
        return
    size, heads = attention.heads.size, attention.heads
    left, right = (
        _affine(weight, gain, shift, vector(_bias(part.name)), size)
        for weight, part in zip((q, k), _pair(attention), strict=True)
    )
    right = _Affine(
        right.matrix.repeat_interleave(heads.shared, 0),
        right.constant.repeat_interleave(heads.shared, 0),
        right.radius,
    )
    width = len(gain)
    lengths = [
        one.matrix.flatten(1).norm(dim=1) * one.radius + one.constant.norm(dim=1)
        for one in (left, right)
    ]
    proxy = lengths[0] * lengths[1] / math.sqrt(size)
    if not bool(proxy.isfinite().all()):  # beyond float64's range there is no bound
        return
    slack = FLOAT32_ROUNDING * (width + size + SAFETY_ROUNDINGS) * proxy
    normed = _normed(attention, vector, size)
    rotation = _rotations(config, size)
    if normed is not None:
        bound, method = normed, "norms of queries and keys"
    elif attention.depth == 0 and table is not None and shift is None:
        bound = _over_table(table, left, right, rotation is not None)
        method = "every token of the table"
    elif rotation is None:
        bound, method = _without_rotation(left, right), f"the ball of {which}"
    else:
        bound = _with_rotations(left, right, rotation)
        many = f"{len(rotation)} distances" if len(rotation) else "any rotation"
        method = f"the ball of {which}, {many}"
    total = bound / math.sqrt(size) + slack
    for head, (value, other) in enumerate(zip(total.tolist(), proxy.tolist(), strict=True)):
        yield LogitBound(attention.name, head, attention.depth, value, other, method)


def _pair(attention: Attention) -> tuple[Any, Any]:
    return attention.query, attention.key


def _bias(name: str) -> str:
    part = name.partition("[")
    return f"{part[0].removesuffix('weight')}bias{part[1]}{part[2]}"


def _affine(
    weight: Tensor, gain: Tensor, shift: Tensor | None, bias: Tensor | None, size: int
) -> _Affine:
    constant = torch.zeros(len(weight), dtype=torch.float64)
    if shift is not None:
        constant = constant + weight @ shift
    if bias is not None and len(bias) == len(weight):
        constant = constant + bias
    scaled = weight * gain
    if shift is not None:  # a norm with a bias subtracts the mean: z has none
        scaled = scaled - scaled.mean(1, keepdim=True)
    radius = math.sqrt(len(gain))
    return _Affine(scaled.unflatten(0, (-1, size)), constant.unflatten(0, (-1, size)), radius)


def _feeding_norm(
    attention: Attention, vector: Vectors
) -> tuple[Tensor, Tensor | None, str] | None:
    """Find gain and bias of the norm layer whose output the layer reads, by name."""
    parts = path_of(attention.query.name).split(".")
    for depth in range(len(parts) - 1, -1, -1):
        block = ".".join(parts[:depth])
        for name in _BEFORE:
            gain = vector(f"{block}.{name}.weight" if block else f"{name}.weight")
            if gain is not None:
                stem = f"{block}.{name}" if block else name
                return gain, vector(f"{stem}.bias"), name
    numbers = [i for i, part in enumerate(parts) if part.isdigit()]
    if not numbers:
        return None
    at = numbers[0]
    prefix, number = ".".join(parts[:at]), int(parts[at])
    stems = [f"{prefix}.{number - 1}.{end}" for end in _BLOCK_END] if number else []
    if not number:
        roots = {".".join(parts[:i]) for i in range(at + 1)}
        stems = [f"{root}.{end}".lstrip(".") for root in roots for end in _TABLE_NORMS]
    for stem in stems:
        gain = vector(f"{stem}.weight")
        if gain is not None:
            return gain, vector(f"{stem}.bias"), stem.rpartition(".")[2]
    return None


def _normed(attention: Attention, vector: Vectors, size: int) -> Tensor | None:
    """Bound q·k by the gains of norms that act on queries and keys themselves."""
    place = path_of(attention.query.name).rpartition(".")[0]
    gains = []
    for names in _QUERY_NORMS:
        found = [vector(f"{place}.{name}.weight") for name in names]
        gain = next((one for one in found if one is not None), None)
        if gain is None or len(gain) != size:
            return None
        biases = [vector(f"{place}.{name}.bias") for name in names]
        bias = next((one for one in biases if one is not None), None)
        length = float(gain.abs().max()) * math.sqrt(size)
        gains.append(length + (float(bias.norm()) if bias is not None else 0.0))
    return torch.full((attention.heads.queries,), gains[0] * gains[1], dtype=torch.float64)


def _rotations(config: Mapping[str, Any], size: int) -> Tensor | None:
    """Return the angles of every distance and plane; none of them where any may occur.

    None where a config tells that positions are not rotary.
    """
    absolute = re.search("bert|gpt2|opt|electra", str(config.get("model_type", "")))
    if absolute or config.get("position_embedding_type") == "absolute":
        return None
    places = config.get("max_position_embeddings")
    known = isinstance(places, int) and 0 < places <= MOST_DISTANCES
    changes = "rope_scaling", "rope_parameters", "partial_rotary_factor"
    plain = not any(config.get(name) for name in changes)
    if not known or not plain or size % 2:
        return torch.zeros(0, size // 2, dtype=torch.float64)
    base = float(config.get("rope_theta", 10_000.0))
    speeds = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    assert isinstance(places, int)
    return torch.arange(places, dtype=torch.float64)[:, None] * speeds


def _without_rotation(left: _Affine, right: _Affine) -> Tensor:
    inner = _spectral(left.matrix, right.matrix)
    return _assembled(left, right, inner, left.constant, right.constant)


def _assembled(left: _Affine, right: _Affine, inner: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Add up the four terms of the bound."""
    first = torch.linalg.vector_norm(left.matrix.mT @ b[..., None], dim=(1, 2))
    second = torch.linalg.vector_norm(right.matrix.mT @ a[..., None], dim=(1, 2))
    mixed = left.radius * first + right.radius * second
    return left.radius * right.radius * inner + mixed + (a * b).sum(1).abs()


def _spectral(a: Tensor, b: Tensor) -> Tensor:
    """Return the spectral norms of a'b for stacks of wide matrices, through their small factors."""
    return torch.linalg.matrix_norm(_small(a) @ _small(b).mT, 2)


def _small(a: Float[Tensor, "heads size width"]) -> Float[Tensor, "heads size size"]:
    """Return the triangular factor T of ``a' = Q T``: the norm of ``a'b`` is that of ``T U'``."""
    return torch.linalg.qr(a.mT, mode="r").R


def _with_rotations(left: _Affine, right: _Affine, angles: Tensor) -> Tensor:
    """Return the largest bound over all rotations, in either layout of planes, both ways round."""
    alone = [
        torch.linalg.matrix_norm(one.matrix, 2) * one.radius + one.constant.norm(dim=1)
        for one in (left, right)
    ]
    every = alone[0] * alone[1]
    if not len(angles):
        return every
    a, b = _small(left.matrix), _small(right.matrix)
    largest = torch.zeros(len(a), dtype=torch.float64)
    constants = left.constant.norm(dim=1), right.constant.norm(dim=1)
    for angle in angles:
        for rotation in (_neighbours(angle), _halves(angle)):
            # both signs of a distance, for layers that look both ways
            for turn in (rotation, rotation.T):
                largest = torch.maximum(largest, torch.linalg.matrix_norm(a @ turn @ b.mT, 2))
    mixed = left.radius * torch.linalg.matrix_norm(left.matrix, 2) * constants[1]
    mixed = mixed + right.radius * torch.linalg.matrix_norm(right.matrix, 2) * constants[0]
    exact = left.radius * right.radius * largest + mixed + constants[0] * constants[1]
    return torch.minimum(every, exact)


def _neighbours(angles: Float[Tensor, " planes"]) -> Float[Tensor, "size size"]:
    """Return the rotation of entries 0 and 1, 2 and 3, and so on."""
    cos, sin = angles.cos(), angles.sin()
    blocks = torch.stack([torch.stack([cos, -sin], -1), torch.stack([sin, cos], -1)], -2)
    return torch.block_diag(*blocks)


def _halves(angles: Float[Tensor, " planes"]) -> Float[Tensor, "size size"]:
    """Return the rotation of each entry of the first half with one of the second."""
    cos, sin = torch.diag(angles.cos()), torch.diag(angles.sin())
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


def _over_table(table: Tensor, left: _Affine, right: _Affine, rotary: bool) -> Tensor:
    """Return the largest |q·k| over all pairs of tokens, and over all angles of the planes."""
    tokens = table.double()
    z = tokens / tokens.square().mean(1, keepdim=True).sqrt().clamp(min=1e-300)
    largest = []
    for head in range(len(left.matrix)):
        q = z @ left.matrix[head].T + left.constant[head]
        k = z @ right.matrix[head].T + right.constant[head]
        if not rotary:
            largest.append(max(_largest_pair(q, k), _largest_pair(q, -k)))
            continue
        planes = [
            [x.unflatten(1, (-1, 2)).norm(dim=2) for x in (q, k)],
            [x.unflatten(1, (2, -1)).norm(dim=1) for x in (q, k)],
        ]
        largest.append(max(_largest_pair(*pair) for pair in planes))
    return torch.tensor(largest, dtype=torch.float64)


def _largest_pair(a: Float[Tensor, "count size"], b: Float[Tensor, "others size"]) -> float:
    """Return the largest inner product of a row of each, looking only where it can be.

    The longest rows come first; once the product of lengths is below the best, none is left.
    """
    (a_length, i), (b_length, j) = (x.norm(dim=1).sort(descending=True) for x in (a, b))
    a, b = a[i], b[j]
    best = -math.inf
    for top in range(0, len(a), TOKEN_BLOCK):
        if float(a_length[top] * b_length[0]) <= best:
            break
        block = a[top : top + TOKEN_BLOCK]
        reach = int((b_length * a_length[top] > best).sum())
        for start in range(0, reach, 8 * TOKEN_BLOCK):
            if float(a_length[top] * b_length[start]) <= best:
                break
            best = max(best, float((block @ b[start : start + 8 * TOKEN_BLOCK].T).max()))
    return best
