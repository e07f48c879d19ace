"""Matrices that act only together: query and key of a head, its output and value.

A head of attention never uses its query matrix alone. What it compares is ``x' Wq' Wk y``, and what
it writes is ``Wo Wv y``: two products, as wide as the model and of the rank of a head. Their
spectra come from the thin factors, without forming them, each value within a few roundings of the
factors' norms (:func:`kappascope.spectra.product_singular_values`).

- With rotary embeddings ``QK`` is what compares two tokens at equal positions; at others a rotation
  stands between the factors. With ALiBi or no positions in attention it is exact. Biases and the
  factor ``1 / sqrt(size)`` are left out.
- With grouped queries the heads of a group share key and value.
- In latent attention (DeepSeek) ``QK`` compares the latent vectors, in the rows that no rotation
  acts on, and ``OV`` reads the latent vector.
- Where a convolution stands between, where queries come from experts, and where an adapter adds to
  a factor, there is no such product but a reason.
- The number of heads comes from the model's config, the module, or tensors that give it away. If
  none does, there is no product but a reason: a wrong number would give plausible nonsense.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from torch import Tensor

from kappascope.matrix import spectra
from kappascope.matrix.status import OK, Outcome, Status
from kappascope.model._heads import Config, Heads
from kappascope.model.matrices import Logical, Plan, Unit
from kappascope.model.names import family, layer
from kappascope.model.skipped import Reason, ReasonKind, Skipped, no_weight
from kappascope.model.tensors import Read

HEADLESS = "number of heads unknown"  # and with it where a head begins and ends


@dataclass(frozen=True)
class Product:
    """The singular values of one head's product, largest first, as many as a head has rows.

    ``condition_number`` is the first over the last: infinite where float64 cannot tell the last
    from zero, and None where there are no values. Where a ``layer`` failed as a whole, its row is
    of no ``head``. Where float64 cannot hold them, the values are those listed times
    ``2**exponent``.

    >>> Product("attn", "QK", 0, (8, 8), (3.0, 1.0), 3.0, OK, head=0).name
    'attn[qk.0]'
    """

    layer: str
    kind: str
    depth: int | None
    shape: tuple[int, int]
    values: tuple[float, ...]
    condition_number: float | None
    status: Status
    head: int | None = None
    exponent: int = 0

    @property
    def name(self) -> str:
        """The layer with what is multiplied in it."""
        head = "" if self.head is None else f".{self.head}"
        return f"{self.layer}[{self.kind.lower()}{head}]"


@dataclass(frozen=True)
class Attention:
    """The matrices of one attention layer and their heads. It can be pickled."""

    name: str
    depth: int | None
    heads: Heads
    query: Logical
    key: Logical
    value: Logical | None  # None if there is no product of this and the next
    output: Logical | None
    units: tuple[Unit, ...]

    def products(self, read: Read) -> Iterator[Product]:
        """``QK`` and then ``OV`` of every head; two of the matrices are held at a time.

        >>> from torch import nn
        >>> from kappascope.model.matrices import plan, reader
        >>> layer = nn.MultiheadAttention(4, num_heads=2)
        >>> (found,), _ = attention(plan(layer))
        >>> [product.name for product in found.products(reader(layer))]
        ['attention[qk.0]', 'attention[qk.1]', 'attention[ov.0]', 'attention[ov.1]']
        """
        q, k = values(self.units, (self.query, self.key), read)
        size = self.heads.size
        yield from self._each("QK", q.unflatten(0, (-1, size)).mT, k.unflatten(0, (-1, size)))
        del q, k
        if self.value and self.output:
            o, v = values(self.units, (self.output, self.value), read)
            left = o.unflatten(1, (self.heads.queries, -1)).movedim(1, 0)
            yield from self._each("OV", left, v.unflatten(0, (self.heads.keys, -1)))

    @property
    def members(self) -> tuple[Logical, ...]:
        """The matrices of the layer: query and key, and value and output where there are some."""
        return tuple(m for m in (self.query, self.key, self.value, self.output) if m is not None)

    def factors(self, read: Read) -> Iterator[tuple[str, Tensor, Tensor]]:
        """The factors of ``QK`` and then of ``OV``, stacked by head: a product is left @ right.

        >>> from torch import nn
        >>> from kappascope.model.matrices import plan, reader
        >>> layer = nn.MultiheadAttention(4, num_heads=2)
        >>> (found,), _ = attention(plan(layer))
        >>> [(kind, left.shape, right.shape) for kind, left, right in found.factors(reader(layer))]
        [('QK', torch.Size([2, 4, 2]), torch.Size([2, 2, 4])),
         ('OV', torch.Size([2, 4, 2]), torch.Size([2, 2, 4]))]
        """
        q, k = values(self.units, (self.query, self.key), read)
        shared = k.unflatten(0, (-1, self.heads.size))
        yield "QK", q.unflatten(0, (-1, self.heads.size)).mT, self._for_each_query(shared)
        if self.value and self.output:
            o, v = values(self.units, (self.output, self.value), read)
            left = o.unflatten(1, (self.heads.queries, -1)).movedim(1, 0)
            yield "OV", left, self._for_each_query(v.unflatten(0, (self.heads.keys, -1)))

    def _for_each_query(self, right: Tensor) -> Tensor:
        """The right factors once for every head that shares them."""
        return right if self.heads.shared == 1 else right.repeat_interleave(self.heads.shared, 0)

    def _each(self, kind: str, left: Tensor, right: Tensor) -> Iterator[Product]:
        """The products of the heads that share a right factor, one group after another."""
        shape = (left.shape[1], right.shape[2])
        for i, (group, shared) in enumerate(zip(left.split(self.heads.shared), right, strict=True)):
            # of factors near one: kappa is known even where float64 cannot hold the values
            (a, first), (b, second) = spectra.scaled_to_one(group), spectra.scaled_to_one(shared)
            spectrum = (*spectra.product_singular_values(a, b[None]), first + second)
            heads = enumerate(zip(*spectrum, strict=True), i * self.heads.shared)
            for j, (sigma, floor, power) in heads:
                scaled, kappa, status = judged(sigma, float(floor))
                restored, exponent = _restored(scaled, int(power))
                row = Product(self.name, kind, self.depth, shape, restored, kappa, status, head=j)
                yield replace(row, exponent=exponent)


def values(units: Sequence[Unit], wanted: Sequence[Logical], read: Read) -> list[Tensor]:
    """The matrices that are ``wanted``, of the units that hold them.

    >>> import torch
    >>> from kappascope.model.matrices import plan
    >>> unit = plan({"w": torch.empty(2, 2, device="meta")}).units[0]
    >>> values([unit], unit.parts, lambda path: torch.eye(2))
    [tensor([[1., 0.], [0., 1.]])]
    """
    matrices: dict[str, Tensor] = {}
    names = {each.name for each in wanted}
    for unit in units:
        if names & {part.name for part in unit.parts}:
            pairs = unit.matrices(read)
            matrices |= {part.name: matrix for part, matrix in pairs if part.name in names}
    return [matrices[each.name] for each in wanted]


def _restored(values: tuple[float, ...], exponent: int) -> tuple[tuple[float, ...], int]:
    """The values times a power of two, and the power that is left where float64 has no room."""
    try:
        restored = tuple(math.ldexp(value, exponent) for value in values)
    except OverflowError:
        return values, exponent
    kept = (x for x, value in zip(restored, values, strict=True) if value)
    exact = min(kept, default=1.0) >= sys.float_info.min
    return (restored, 0) if exact else (values, exponent)


def judged(sigma: Tensor, floor: float) -> tuple[tuple[float, ...], float | None, Status]:
    """Singular values, kappa, and a word on both.

    >>> import torch
    >>> judged(torch.tensor([3.0, 1.0]), 1e-15), judged(torch.tensor([3.0, 0.0]), 1e-15)[1]
    (((3.0, 1.0), 3.0, 'ok'), inf)
    """
    if sigma.isnan().any():
        return (), None, Status(Outcome.FAILED, "non-finite")
    if not sigma.any():
        detail = "zero product in float64, kappa is undefined"
        return tuple(sigma.tolist()), None, Status(Outcome.DEGENERATE, detail)
    smallest = max(float(sigma[-1]), floor)  # 0 where both are below the range of float64
    least = max(1.0, float(sigma[0]) / smallest) if smallest else 1.0
    if float(sigma[-1]) <= floor:
        detail = f"numerically singular, condition number at least {least:.3g}"
        return tuple(sigma.tolist()), math.inf, Status(Outcome.OK, detail)
    return tuple(sigma.tolist()), least, OK


# --- finding the layers ---------------------------------------------------------------------------


def attention(
    plan: Plan, config: Mapping[str, Any] | None = None
) -> tuple[tuple[Attention, ...], tuple[Skipped, ...]]:
    """The attention layers of a plan whose heads are known, and why others are left out.

    ``config`` is that of the plan unless another is given.

    >>> import torch
    >>> from kappascope.model.matrices import plan
    >>> names = [f"h.0.attn.{name}_proj.weight" for name in "qkvo"]
    >>> found = plan({name: torch.empty(8, 8, device="meta") for name in names})
    >>> attention(found, {"hidden_size": 8, "num_attention_heads": 2})[0][0].heads
    Heads(queries=2, keys=2, size=4)
    >>> attention(found)[1]
    (Skipped(name='h.0.attn[qk]', reason='number of heads unknown: ...'),)
    """
    settings = Config(plan.config if config is None else config)
    places, count = Places.of(plan), _of_t5(plan)
    layers: list[Attention | Skipped] = []
    for place in places.here:
        layers += _layer(place, places, count, settings)
    skipped = tuple(each for each in layers if isinstance(each, Skipped))
    return tuple(each for each in layers if isinstance(each, Attention)), skipped


Member: TypeAlias = tuple[Unit, Logical]


@dataclass(frozen=True)
class Places:
    """The matrices of a plan by the place in which they stand, and by their kind there.

    >>> import torch
    >>> from kappascope.model.matrices import plan
    >>> bert = [f"layer.0.attention.{name}.weight" for name in ("self.query", "output.dense")]
    >>> places = Places.of(plan({name: torch.empty(2, 2, device="meta") for name in bert}))
    >>> [part.name for _, part in places.near("layer.0.attention.self", "output")]
    ['layer.0.attention.output.dense.weight']
    """

    here: Mapping[str, Mapping[str, list[Member]]]
    around: Mapping[tuple[str, str], list[Member]]  # by what the place stands in, and by kind

    @classmethod
    def of(cls, plan: Plan) -> Places:
        """Index the matrices of a plan."""
        here: dict[str, dict[str, list[Member]]] = {}
        around: dict[tuple[str, str], list[Member]] = {}
        for unit in plan.units:
            for part in unit.parts:
                place = family(part.name)
                here.setdefault(place, {}).setdefault(part.kind, []).append((unit, part))
                above = place.rpartition(".")[0]
                around.setdefault((above, part.kind), []).append((unit, part))
        return cls(here, around)

    def near(self, place: str, kind: str) -> list[Member]:
        """Find the matrices of a kind in a place, or else in the places beside it."""
        here = self.here.get(place, {})
        if kind in here or "." not in place:
            return here.get(kind, [])
        return self.around.get((place.rpartition(".")[0], kind), [])


def _layer(name: str, places: Places, count: int, config: Config) -> Iterator[Attention | Skipped]:
    """The attention layer in one place, if there is one."""
    shown, members = name or "attention", places.here[name]
    queries, keys = members.get("query", []), members.get("key", [])
    if reason := _no_product(name, places):
        yield Skipped(f"{shown}[qk]", no_weight(reason))
    if reason or not queries:
        return
    (unit, q), (_, k) = queries[0], keys[0]
    known = _heads(q, k, unit.heads or count, config)
    if known is None:
        why = "no config fits its shapes" if config.content else "there is no config"
        text = f"{HEADLESS}: {why} and nothing beside it tells"
        yield Skipped(f"{shown}[qk]", Reason(ReasonKind.HEADS_UNKNOWN, text))
        return
    compared = Attention(shown, q.depth, known, q, k, None, None, _held(queries, keys))
    value, output = members.get("value", []), places.near(name, "output")
    if len(value) == 1 and len(output) == 1 and _fit(known, value[0][1], output[0][1]):
        units = _held(queries, keys, value, output)
        yield replace(compared, value=value[0][1], output=output[0][1], units=units)
        return
    yield compared
    reason = "no value and output matrices that fit the heads"
    yield Skipped(f"{shown}[ov]", no_weight(reason))


def _no_product(name: str, places: Places) -> str:
    """Why queries and keys in a place do not simply meet in a product, or nothing."""
    members = places.here[name]
    queries, keys = members.get("query", []), members.get("key", [])
    joined_keys = [part for _, part in keys if part.whole]
    if not queries:
        are_experts = joined_keys and places.near(f"{name}.experts", "expert")
        return "its queries come from experts" if are_experts else ""
    if len(queries) != 1 or len(keys) != 1:
        return f"expected one query and one key matrix, found {len(queries)} and {len(keys)}"
    kernels = (*members.get("convolution", []), *members.get("depthwise", []))
    convolutions = [part.name for _, part in kernels]
    if any(layer(each).endswith("conv1d") for each in convolutions):
        return "a convolution stands between queries and keys"
    held = {
        layer(part.name) for kind in ("query", "key", "value") for _, part in members.get(kind, [])
    }
    held |= {layer(part.name) for _, part in places.near(name, "output")}
    adapted = {path.partition(".lora_")[0] for path in places.here if ".lora_" in path}
    return "adapters add to its matrices: merge them first" if held & adapted else ""


def _held(*members: list[Member]) -> tuple[Unit, ...]:
    """The units of these members, each once."""
    units = [unit for each in members for unit, _ in each]
    return tuple({unit.paths: unit for unit in units}.values())


def _fit(known: Heads, value: Logical, output: Logical) -> bool:
    rows, rest = divmod(value.shape[0], known.keys)
    return not rest and output.shape[1] == known.queries * rows


def _heads(q: Logical, k: Logical, count: int, config: Config) -> Heads | None:
    """The heads that fit the shapes of query and key, by the config or what is beside them."""

    def fits(heads: Heads) -> bool:
        rows = (heads.queries * heads.size, heads.keys * heads.size)
        return rows == (q.shape[0], k.shape[0]) and heads.queries % heads.keys == 0

    if known := config.heads(q.name, fits):
        return known
    if not count or not q.shape[0] or q.shape[0] % count:
        return None
    size = q.shape[0] // count
    heads = Heads(count, max(k.shape[0] // size, 1), size)
    return heads if fits(heads) else None


def _of_t5(plan: Plan) -> int:
    """T5 tells its heads once for all layers, by the columns of a table in the first."""
    parts = [unit.parts[0] for unit in plan.units]
    counts = {p.shape[1] for p in parts if p.name.endswith("relative_attention_bias.weight")}
    return counts.pop() if len(counts) == 1 else 0
