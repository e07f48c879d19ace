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

Where positions and types are added to tokens, there are too many sums for pairs of them. Every sum
is looked at alone: for any positive M, |q·k|^2 is at most the largest q'Mq times the largest
k'M^-1 k. The best M makes this at most d times the largest |q·k|^2 that any pair of sums gives
(John's theorem), and it is found from the sums that are farthest out. A linear map between tables
and attention (ALBERT, ELECTRA) is multiplied into Wq and Wk; ALBERT's one layer reads both that and
its own output, and its bound is the larger of the two.

To that is added what float32 arithmetic can add: (n + d) roundings of sums of absolute values.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import gcd, prod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix.balance import balanced
from kappascope.model.attention import Attention, values
from kappascope.model.matrices import Plan, Unit
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
_SHARED = re.compile(r"(^|\.)albert_layers\.\d+(\.|$)")  # layers that read their own output, too
_SHARED_END = ".full_layer_layer_norm.weight"
# Tables of a model whose first layer reads their sum, and maps between the two.
_TOKENS, _ADDED = (
    ("word_embeddings", "wte"),
    ("position_embeddings", "token_type_embeddings", "wpe"),
)
_MAPPINGS = ("embedding_hidden_mapping_in", "embeddings_project")
MAX_TABLE_ENTRIES = 2**25  # of a table of tokens: a copy in float64 has 268 megabytes
MAX_SUMS = 2**26  # tokens times rows added to them: ten seconds for a head of 64
SUMS_AT_ONCE = 2**18  # in float32 they stay in cache
FIRST_POINTS, MORE_POINTS, ROUNDS = 2048, 512, 3
LEAST_VARIANCE = 1e-3  # of what its two parts have: below that float32 loses the digits of a sum
_QUERY_NORMS = ("q_norm", "q_layernorm", "query_norm"), ("k_norm", "k_layernorm", "key_norm")

Vectors = Callable[[str], Tensor | None]


@dataclass(frozen=True)
class Tables:
    """What the first layer of a model reads: a table of tokens, others that are added, and a map.

    >>> from kappascope.model.matrices import plan
    >>> state = {"wte.weight": torch.empty(9, 4), "wpe.weight": torch.empty(5, 4)}
    >>> found = Tables.of(plan(state))
    >>> found.tokens.parts[0].name, len(found.added), found.mapping
    ('wte.weight', 1, None)
    """

    tokens: Unit
    added: tuple[Unit, ...] = ()
    mapping: Unit | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """All tensors that are read for it."""
        return (self.tokens, *self.added, *([self.mapping] if self.mapping else []))

    @classmethod
    def of(cls, plan: Plan) -> Tables | None:
        """Find the tables of a model, if it is known that it adds them up and how.

        A table alone is one of tokens; several are what the names that BERT and GPT-2 gave them
        say. Large ones are left aside.
        """
        tables = [unit for unit in plan.units if unit.parts[0].kind == "embedding"]
        if any(prod(unit.parts[0].shape) > MAX_TABLE_ENTRIES for unit in tables):
            return None
        leaves = [path_of(unit.parts[0].name).rpartition(".")[2] for unit in tables]
        tokens = [unit for unit, leaf in zip(tables, leaves, strict=True) if leaf in _TOKENS]
        added = [unit for unit, leaf in zip(tables, leaves, strict=True) if leaf in _ADDED]
        if len(tables) == 1:
            tokens, added = tables, []
        is_known = len(tokens) == 1 and len(tokens) + len(added) == len(tables)
        widths = {unit.parts[0].shape[1] for unit in tables}
        if not is_known or len(set(leaves)) < len(leaves) or len(widths) > 1:
            return None
        maps = [u for u in plan.units if path_of(u.parts[0].name).endswith(_MAPPINGS)]
        return cls(tokens[0], tuple(added), maps[0] if len(maps) == 1 else None)


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


@dataclass(frozen=True)
class _Input:
    """What a layer reads: the output of a norm layer, which may have passed a linear map."""

    gain: Tensor
    shift: Tensor | None
    name: str
    mapping: Tensor | None = None
    offset: Tensor | None = None
    of_tables: bool = False


def logit_bounds(
    attention: Attention,
    read: Read,
    vectors: Mapping[str, Path],
    config: Mapping[str, Any],
    tables: Tables | None = None,
) -> Iterator[LogitBound]:
    """Bound the logits of every head of a layer; nothing where no norm layer is known to feed it.

    ``tables`` are what the layer reads, if it is the first one.
    """
    q, k = (weight.double() for weight in values(attention.units, _pair(attention), read))
    layer = _Layer(attention, q, k, read, vectors, config, tables)
    inputs = list(layer.inputs())
    results = [result for each in inputs if (result := layer.bounds(each))]
    if not inputs or len(results) < len(inputs):
        return
    totals = torch.stack([total for total, _, _ in results])
    for head, which in enumerate(totals.argmax(0).tolist()):
        total, proxy, method = results[which]
        bounds = float(total[head]), float(proxy[head])
        yield LogitBound(attention.name, head, attention.depth, *bounds, method)


@dataclass(frozen=True)
class _Layer:
    """A layer of attention and what is around it."""

    attention: Attention
    q: Tensor
    k: Tensor
    read: Read
    vectors: Mapping[str, Path]
    config: Mapping[str, Any]
    tables: Tables | None

    def vector(self, name: str) -> Tensor | None:
        """Return a gain or a bias by its name, if there is one."""
        known = self.vectors.get(name)
        return None if known is None else self.read(known).detach().double()

    def inputs(self) -> Iterator[_Input]:
        """Yield what the layer reads; nothing where that is not known."""
        path, mapping = path_of(self.attention.query.name), None
        if self.tables is not None and self.tables.mapping is not None:
            mapping = self.tables.mapping
        if shared := _SHARED.search(path):
            if mapping is not None:
                yield from self._own_and_mapped(path[: shared.start()], mapping)
            return
        norm = _feeding_norm(self.attention, self.vector)
        if norm is None:
            return
        gain, shift, name = norm
        is_first = self.attention.depth == 0 and self.tables is not None
        if mapping is not None and is_first and len(gain) == mapping.parts[0].shape[1]:
            yield self._behind(mapping, gain, shift, name)
        else:
            yield _Input(gain, shift, name, of_tables=is_first)

    def _own_and_mapped(self, place: str, mapping: Unit) -> Iterator[_Input]:
        """Yield what a shared layer reads: the tables through a map, then outputs of its kind."""
        root = place.rpartition(".albert_layer_groups")[0]
        stem = f"{root.removesuffix('encoder')}{_TABLE_NORMS[0]}"
        gain = self.vector(f"{stem}.weight")
        ends = [
            name for name in self.vectors if name.startswith(root) and name.endswith(_SHARED_END)
        ]
        if gain is None or not ends:
            return
        yield self._behind(mapping, gain, self.vector(f"{stem}.bias"), "LayerNorm")
        for name in ends:
            own = self.vector(name)
            assert own is not None
            shift = self.vector(f"{name.removesuffix('weight')}bias")
            yield _Input(own, shift, "full_layer_layer_norm")

    def _behind(self, mapping: Unit, gain: Tensor, shift: Tensor | None, name: str) -> _Input:
        weight = next(mapping.matrices(self.read))[1].double()
        offset = self.vector(f"{path_of(mapping.parts[0].name)}.bias")
        return _Input(gain, shift, name, weight, offset, of_tables=True)

    def bounds(self, fed: _Input) -> tuple[Tensor, Tensor, str] | None:
        """Return the bounds of all heads for one input, their proxies and the method."""
        size, shared = self.attention.heads.size, self.attention.heads.shared
        biases = [self.vector(_bias(part.name)) for part in _pair(self.attention)]
        pairs = [_mapped(w, bias, fed) for w, bias in zip((self.q, self.k), biases, strict=True)]
        if any(weight.shape[1] != len(fed.gain) for weight, _ in pairs):
            return None
        left, right = (_affine(weight, fed.gain, fed.shift, bias, size) for weight, bias in pairs)
        right = _Affine(
            right.matrix.repeat_interleave(shared, 0),
            right.constant.repeat_interleave(shared, 0),
            right.radius,
        )
        lengths = [
            one.matrix.flatten(1).norm(dim=1) * one.radius + one.constant.norm(dim=1)
            for one in (left, right)
        ]
        proxy = lengths[0] * lengths[1] / math.sqrt(size)
        if not bool(proxy.isfinite().all()):  # beyond float64's range there is no bound
            return None
        widest = max(len(fed.gain), self.q.shape[1])
        slack = FLOAT32_ROUNDING * (widest + size + SAFETY_ROUNDINGS) * proxy
        bound, method = self._largest(fed, left, right)
        return bound / math.sqrt(size) + slack, proxy, method

    def _largest(self, fed: _Input, left: _Affine, right: _Affine) -> tuple[Tensor, str]:
        """Return a bound of |q·k| of every head, the tightest that is known for the input."""
        size = self.attention.heads.size
        normed, rotation = _normed(self.attention, self.vector, size), _rotations(self.config, size)
        if normed is not None:
            return normed, "norms of queries and keys"
        tables = self.tables if fed.of_tables else None
        summed = _sums(tables, self.read, fed) if tables is not None else None
        if summed is not None and not len(summed.added):
            bound = _over_table(summed.tokens, left, right, rotation is not None)
            return bound, "every token of the table"
        if summed is not None and rotation is None:
            ball, heads = _without_rotation(left, right), range(len(left.matrix))
            told = [summed.bound(_head(left, h), _head(right, h)) for h in heads]
            method = f"every token at {len(summed.added)} positions and types"
            return torch.minimum(ball, torch.tensor(told, dtype=torch.float64)), method
        if rotation is None:
            return _without_rotation(left, right), f"the ball of {fed.name}"
        many = f"{len(rotation)} distances" if len(rotation) else "any rotation"
        return _with_rotations(left, right, rotation), f"the ball of {fed.name}, {many}"


def _mapped(weight: Tensor, bias: Tensor | None, fed: _Input) -> tuple[Tensor, Tensor | None]:
    """Return a projection and its bias behind the map that its input has passed, if there is one.

    Where they do not fit each other the projection is returned as it is.
    """
    if fed.mapping is None or weight.shape[1] != len(fed.mapping):
        return weight, bias
    offset = weight.new_zeros(len(weight)) if fed.offset is None else weight @ fed.offset
    if bias is not None and len(bias) == len(weight):
        offset = offset + bias
    return weight @ fed.mapping, offset


def _sums(tables: Tables, read: Read, fed: _Input) -> _Sums | None:
    """Return tokens and all sums of what is added to them, as the norm layer sees them.

    Nothing if they do not fit it, are too many, or if a sum nearly vanishes.
    """
    tokens, *added = (
        next(unit.matrices(read))[1].double() for unit in (tables.tokens, *tables.added)
    )
    # of a norm layer without a bias it is not known whether it subtracts the mean
    if tokens.shape[1] != len(fed.gain) or (added and fed.shift is None):
        return None
    rows = torch.zeros(1 if added else 0, tokens.shape[1], dtype=torch.float64)
    for each in added:
        if len(rows) * len(each) * len(tokens) > MAX_SUMS:
            return None
        rows = (rows[:, None] + each).flatten(0, 1)
    if fed.shift is not None:  # its norm layer subtracts the mean
        tokens, rows = (x - x.mean(1, keepdim=True) for x in (tokens, rows))
    if not added:
        return _Sums(tokens, rows)
    sums = _Sums(tokens.float(), rows.float())
    return sums if sums.least_share() >= LEAST_VARIANCE else None


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
    z = table / table.square().mean(1, keepdim=True).sqrt().clamp(min=1e-300)
    # what is added to a variance shortens a token: between it and nothing, where the bound ends
    z = torch.cat([z, torch.zeros_like(z[:1])])
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


# --- sums of tables -------------------------------------------------------------------------------


def _head(side: _Affine, head: int) -> tuple[Tensor, Tensor]:
    return side.matrix[head], side.constant[head]


@dataclass(frozen=True, eq=False)
class _Sums:
    """All sums of a row of one table and a row of another, each divided by its deviation."""

    tokens: Float[Tensor, "tokens width"]
    added: Float[Tensor, "rows width"]

    def blocks(self) -> Iterator[slice]:
        """Yield slices of tokens whose sums are looked at together."""
        height = max(1, SUMS_AT_ONCE // len(self.added))
        yield from (slice(at, at + height) for at in range(0, len(self.tokens), height))

    def scales(self, block: slice) -> Float[Tensor, "block rows"]:
        """Return one over the deviation of every sum of a block."""
        tokens = self.tokens[block]
        squares = torch.addmm(self._squares[1], tokens, self.added.T, alpha=2.0)
        squares += self._squares[0][block, None]
        return (squares / self.tokens.shape[1]).rsqrt_()

    @cached_property
    def _squares(self) -> tuple[Tensor, Tensor]:
        return self.tokens.square().sum(1), self.added.square().sum(1)

    def least_share(self) -> float:
        """Return the least that is left of the squares of both parts in any sum."""
        first, second = self._squares
        width = self.tokens.shape[1]
        shares = (
            float((width / self.scales(block).square() / (first[block, None] + second)).min())
            for block in self.blocks()
        )
        return min(shares)

    def bound(self, left: tuple[Tensor, Tensor], right: tuple[Tensor, Tensor]) -> float:
        """Bound |q·k| of one head, of which both sides are a matrix and a constant."""
        count = len(self.tokens) * len(self.added)
        # every so many sums, by a step that shares no factor with their number
        step = next(
            k for k in range(count // FIRST_POINTS | 1, 2 * count + 3) if gcd(k, count) == 1
        )
        indices = torch.arange(min(count, FIRST_POINTS)) * step % count
        points = [self._points(indices, side) for side in (left, right)]
        best = math.inf
        for _ in range(ROUNDS):
            root, inverse = balanced(*points)
            largest = []
            for i, (side, by) in enumerate(((left, root), (right, inverse))):
                square, farthest = self._farthest(side, by)
                largest.append(square)
                points[i] = torch.cat([points[i], self._points(farthest, side)])
            best = min(best, math.sqrt(largest[0] * largest[1]))
        return best

    def _points(self, indices: Tensor, side: tuple[Tensor, Tensor]) -> Tensor:
        """Return what a head makes of some sums, and of nothing."""
        token, row = indices // len(self.added), indices % len(self.added)
        sums = (self.tokens[token] + self.added[row]).double()
        sums = sums / sums.square().mean(1, keepdim=True).sqrt()
        matrix, constant = side
        return torch.cat([sums @ matrix.T + constant, constant[None]])

    def _farthest(self, side: tuple[Tensor, Tensor], by: Tensor) -> tuple[float, Tensor]:
        """Return the largest square of ``by`` times what a head makes of any sum, and which those.

        A sum is the less of what a norm layer gives the more is added to its variance: between it
        and nothing, whose square counts as well.
        """
        matrix, constant = ((by @ part.double()).float() for part in side)
        u, v = self.tokens @ matrix.T, self.added @ matrix.T
        lengths = u.square().sum(1), v.square().sum(1)
        along = u @ constant, v @ constant
        offset = float(constant.square().sum())
        tops, places, widest = [], [], 0.0
        for block in self.blocks():
            scales = self.scales(block)
            widest = max(widest, float(scales.max()))
            squares = torch.addmm(lengths[1], u[block], v.T, alpha=2.0)
            squares += lengths[0][block, None]
            squares *= scales
            squares += 2 * along[0][block, None]
            squares += 2 * along[1]
            squares *= scales
            top = squares.max(1)
            tops.append(top.values)
            places.append(top.indices)
        every, place = torch.cat(tops), torch.cat(places)
        most = every.topk(min(MORE_POINTS, len(every))).indices
        # what float32 may have lost of sums of so many products
        rounded = 2.0**-23 * (self.tokens.shape[1] + len(constant) + SAFETY_ROUNDINGS)
        reach = widest * (lengths[0].max().sqrt() + lengths[1].max().sqrt())
        lost = rounded * float(reach + constant.norm()) ** 2
        return max(float(every.max()), 0.0) + offset + lost, most * len(self.added) + place[most]
