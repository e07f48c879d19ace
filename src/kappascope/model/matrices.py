"""The logical matrices of a model: what it stores, and which matrices that stands for.

A matrix maps inputs (columns) to outputs (rows), as in ``nn.Linear``. A tensor appears whole under
its own name, and the matrices joined in it follow as ``name[part]``:

- a convolution is (out, in / groups * kernel), also a transposed one, which is stored the other way
  round; its groups follow as ``[0]``, ``[1]``, ... unless each is a single row;
- fused q, k and v follow as ``[q]``, ``[k]``, ``[v]`` where name and shape are those of a layout
  that keeps each in one piece, and where they are interleaved by head (``query_key_value`` of
  GPT-NeoX and BLOOM) if the model's config tells the number of heads;
- fused gate and up follow as ``[gate]``, ``[up]``, and so do queries with a gate as ``[q]``,
  ``[gate]``; the projections of latent attention (DeepSeek) as ``[latent]``, ``[nope]``,
  ``[rope]``, ``[k]``, ``[v]``, and those of state spaces as ``[x]``, ``[z]``, ``[B]``, ``[C]``,
  ``[dt]``;
- LoRA's two factors follow their product, the matrix ``lora_BA``, which is without their scale;
- the gates follow as ``[i]``, ``[f]``, ``[g]``, ``[o]`` (LSTM) or ``[r]``, ``[z]``, ``[n]`` (GRU);
- any other (..., a, b), such as a stack of experts, is its matrices below one another, which follow
  as ``[0]``, ``[1]``, ..., or as ``[0.gate]``, ``[0.up]``, ... where each is fused.

Attention heads are no matrices of their own here: 32 heads in each of 128 matrices would bury the
rest. :mod:`kappascope.model.attention` looks at them, at the products in which they act.

A module tells more than its state dict. Only there are parameters known from buffers, and grouped
and transposed convolutions from plain ones. GPT-2's ``Conv1D``, stored (in, out), is turned round
in a state dict, too, where a config or the shape of its ``c_attn`` gives it away. There a tensor of
three or more dimensions called ``weight`` counts as a kernel (out, in, ...) unless its name speaks
of experts.

A weight made of other tensors is read as its layer uses it in evaluation mode. A state dict
determines it for weight normalization and pruning alone; the originals of any other
parametrization, or of several, appear there under their own names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from kappascope.model import names
from kappascope.model._heads import Config, count_beside
from kappascope.model.kinds import Layer, kinds_by_neighbours
from kappascope.model.layouts import Layout, Near, Surroundings, layout_of
from kappascope.model.parametrized import composed
from kappascope.model.skipped import Reason, ReasonKind, Skipped, no_weight, unreadable
from kappascope.model.tensors import (
    Contents,
    Firsts,
    Path,
    Read,
    Stored,
    bystander,
    claimed,
    coded,
    contents,
    gathered,
    needs_scales,
    objection,
    reader,
    refuse_meta,
    stored_tensors,
    tie,
)
from kappascope.text import html_table, plural

__all__ = ["Logical", "Matrices", "Plan", "Unit", "matrices", "plan", "reader"]

MOST_SHOWN = 200  # matrices in a notebook: more would fill it
NO_VALUES = unreadable("on the meta device, without values")


@dataclass(frozen=True)
class Logical:
    """What is known of a matrix before its values are.

    ``kind`` is a word for what it does, ``depth`` the number of its layer, and ``whole`` the name
    of the tensor it is a part of. The columns of a convolution are its inputs, each with its
    ``taps``; its ``stride`` is known from a module alone.

    >>> part = plan({"h.3.attn.q_proj.weight": torch.empty(2, 4, device="meta")}).units[0].parts[0]
    >>> part.kind, part.depth, part.shape, part.whole
    ('query', 3, (2, 4), None)
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: str
    depth: int | None
    whole: str | None
    taps: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()


@dataclass(frozen=True)
class Unit:
    """A stored tensor (or two that make one weight) and the matrices in it, the whole first."""

    paths: tuple[Path, ...]
    parts: tuple[Logical, ...]
    layout: Layout
    factor: str = ""  # how the second tensor goes into the first
    heads: int = 0  # of the queries in it, where something beside it tells
    biased: bool = False  # a bias of its rows is stored beside it: it multiplies

    @property
    def layer(self) -> Layer:
        """The name, shape and kind by which it and its neighbours are known."""
        whole, layout = self.parts[0], self.layout
        count = layout.grid[0] if layout.stack else 1
        return Layer(whole.name, whole.shape, whole.kind, count, whole.taps, self.biased)

    def matrices(self, read: Read) -> Iterator[tuple[Logical, Tensor]]:
        """The matrices with their values, for which ``read`` is asked once for each path.

        >>> source = {"attn.qkv.weight": torch.ones(6, 2)}
        >>> (unit,) = plan(source).units
        >>> for logical, matrix in unit.matrices(reader(source)):
        ...     print(logical.name, logical.kind, tuple(matrix.shape))
        attn.qkv.weight fused (6, 2)
        attn.qkv.weight[q] query (2, 2)
        attn.qkv.weight[k] key (2, 2)
        attn.qkv.weight[v] value (2, 2)
        """
        tensor = gathered(read(self.paths[0]))
        if self.factor:
            tensor = _made(tensor, gathered(read(self.paths[1])), self.factor)
        pieces = self.layout.cut(tensor.detach().as_subclass(Tensor))
        for logical, (_, matrix) in zip(self.parts, pieces, strict=True):
            yield logical, matrix


@dataclass(frozen=True)
class Plan:
    """Which matrices there are, and how to read them one tensor at a time. It can be pickled.

    >>> len(plan(nn.Linear(3, 2)).units), plan(nn.Linear(3, 2)).skipped
    (1, (Skipped(name='bias', reason='one-dimensional'),))
    """

    units: tuple[Unit, ...]
    skipped: tuple[Skipped, ...]
    config: Mapping[str, Any] = field(default_factory=dict)


def plan(source: Contents | Sequence[Tensor], config: Mapping[str, Any] | None = None) -> Plan:
    """The matrices of a model or a checkpoint by names, shapes and shared memory alone.

    ``config`` is the model's ``config.json``; a module of transformers brings its own. Tensors may
    be on the meta device, and a :class:`Reason` stands for one that cannot be read.

    >>> blank = torch.empty(24, 4, device="meta")
    >>> config = {"hidden_size": 4, "num_attention_heads": 2, "head_dim": 4}
    >>> found = plan({"h.3.query_key_value.weight": blank}, config)
    >>> [(part.name, part.shape, part.depth) for part in found.units[0].parts]
    [('h.3.query_key_value.weight', (24, 4), 3), ('h.3.query_key_value.weight[q]', (8, 4), 3),
     ('h.3.query_key_value.weight[k]', (8, 4), 3), ('h.3.query_key_value.weight[v]', (8, 4), 3)]
    """
    units, skipped = [], []
    opened = _opened(source)
    config = _config(opened) if config is None else config
    for item in _survey(opened, Config(config)):
        if isinstance(item, Skipped):
            skipped.append(item)
        else:
            units.append(item[0])
    return Plan(_with_kinds(units), tuple(skipped), config)


def _with_kinds(units: list[Unit]) -> tuple[Unit, ...]:
    """The units with the kinds that only the whole model tells."""
    kinds = kinds_by_neighbours([unit.layer for unit in units])

    def renamed(unit: Unit) -> Unit:
        whole, *parts = unit.parts
        return replace(unit, parts=(replace(whole, kind=kinds[whole.name]), *parts))

    return tuple(renamed(unit) if unit.parts[0].name in kinds else unit for unit in units)


def matrices(source: Contents | Sequence[Tensor] | Tensor) -> Matrices:
    """The logical matrices of a module, a state dict, or a checkpoint with one inside.

    >>> for name, matrix in matrices(nn.MultiheadAttention(4, num_heads=2)):
    ...     print(name, tuple(matrix.shape))
    in_proj_weight (12, 4)
    in_proj_weight[q] (4, 4)
    in_proj_weight[k] (4, 4)
    in_proj_weight[v] (4, 4)
    out_proj.weight (4, 4)
    """
    opened = _opened(source)
    if isinstance(opened, nn.Module):
        refuse_meta(opened)
    return Matrices(opened)


def _opened(source: Any) -> Contents:
    opened = contents([source] if isinstance(source, Tensor) else source)
    if opened is None:
        raise TypeError(
            "expected an nn.Module or a mapping from names to tensors, "
            f"got {type(source).__name__}; pass model or model.state_dict()"
        )
    return opened


@dataclass(eq=False, repr=False)
class Matrices:
    """Pairs of name and matrix, read one at a time and afresh by every iteration.

    A matrix is detached and keeps its dtype; where possible it shares the model's memory. One that
    is sharded over processes is gathered when its turn comes, by all of them at once.

    >>> dict(Matrices({"module.fc.weight": torch.eye(2, dtype=torch.bfloat16)}))
    {'fc.weight': tensor([[1., 0.], [0., 1.]], dtype=torch.bfloat16)}
    """

    source: Contents

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for item in self._survey():
            if isinstance(item, Skipped):
                continue
            unit, stored = item
            at_hand = dict(zip(unit.paths, _values(stored), strict=True))
            for logical, matrix in unit.matrices(at_hand.__getitem__):
                yield logical.name, matrix

    def _repr_html_(self) -> str:
        """Return a table of names, shapes and dtypes; no matrix is read for it."""
        rows = []
        for item in self._survey():
            if not isinstance(item, Skipped):
                for part in item[0].parts:
                    shape = " × ".join(map(str, part.shape))
                    dtype = str(part.dtype).removeprefix("torch.")
                    rows.append((part.name, shape, dtype, part.kind))
        more = [("…", f"{len(rows) - MOST_SHOWN:,} more")] if len(rows) > MOST_SHOWN else []
        caption = f"{plural(len(rows), 'matrix', 'matrices')}, {len(self.skipped)} skipped"
        return html_table(caption, [*rows[:MOST_SHOWN], *more])

    @cached_property
    def skipped(self) -> tuple[Skipped, ...]:
        """All that is stored and not among the matrices, known before any iteration, too.

        >>> matrices({"steps": torch.tensor(7), "w": torch.eye(2)}).skipped
        (Skipped(name='steps', reason='torch.int64'),)
        """
        return tuple(item for item in self._survey() if isinstance(item, Skipped))

    def _survey(self) -> Iterator[Skipped | tuple[Unit, Stored]]:
        for item in _survey(self.source, Config(_config(self.source))):
            if not isinstance(item, Skipped) and any(value.is_meta for value in _values(item[1])):
                yield Skipped(item[0].parts[0].name, NO_VALUES)
            else:
                yield item


def _values(stored: Stored) -> list[Tensor]:
    return [half.value for half in stored.halves] or [stored.value]


def _survey(source: Contents, config: Config) -> Iterator[Skipped | tuple[Unit, Stored]]:
    """What is stored, in order: why it is skipped, or the unit it makes."""
    used: set[str] = set()
    firsts: Firsts = {}
    for stored in stored_tensors(source):
        name = claimed(stored.name, used)
        if reason := stored.reason or _refused(stored):
            yield Skipped(name, reason)
        elif earlier := tie(stored, name, firsts):
            yield Skipped(name, Reason(ReasonKind.TIED, f"tied to {earlier}"))
        else:
            unit = _unit(stored, config, partial(claimed, used=used), name)
            yield unit, stored
            if count := unit.layout.undivided:
                yield Skipped(f"{name}[0:{count}]", no_weight("too many to be examined one by one"))


def _refused(stored: Stored) -> Reason | None:
    whole = coded(stored) or objection(stored.value)
    return whole or needs_scales(stored) or bystander(stored)


def _config(source: Contents) -> Mapping[str, Any]:
    """The config that a module of transformers carries."""
    to_dict = getattr(getattr(source, "config", None), "to_dict", dict)
    config: object = to_dict() if isinstance(source, nn.Module) else {}
    return config if isinstance(config, Mapping) else {}


def _made(weight: Tensor, scale: Tensor, factor: str) -> Tensor:
    made = composed(weight, scale, factor)
    if made is None:
        shapes = f"{tuple(weight.shape)} and {tuple(scale.shape)}"
        raise ValueError(f"expected two halves of a weight, got shapes {shapes}; plan again")
    return made


def _unit(stored: Stored, config: Config, claim: Callable[[str], str], name: str) -> Unit:
    tensor = stored.value

    def near(key: str) -> tuple[int, ...] | None:
        beside = tensor if key == stored.key else stored.near(key)
        return tuple(beside.shape) if isinstance(beside, Tensor) else None

    def logical(label: str, piece: Tensor) -> Logical:
        facts = (tuple(piece.shape), tensor.dtype)
        if not label:
            return Logical(name, *facts, kind, depth, None, taps, stride)
        part = Logical(claim(f"{name}[{label}]"), *facts, _part_kind(kind, label), depth, name)
        return replace(part, taps=taps, stride=stride)

    place = ".".join(map(str, stored.path))
    around = Surroundings(stored.key, tuple(tensor.shape), near, stored.owner, config, place)
    layout = layout_of(around)
    kind, depth = _kind(around, layout, stored.name), names.depth(name)
    taps = tuple(tensor.shape[2:]) if around.is_kernel else ()
    stride = getattr(stored.owner, "stride", ()) if taps else ()
    stride = stride if isinstance(stride, tuple) and len(stride) == len(taps) else ()
    biased = near(f"{stored.key.removesuffix('weight')}bias") == tuple(tensor.shape[:1])
    blank = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    parts = tuple(logical(label, piece) for label, piece in layout.cut(blank))
    paths = tuple(half.path for half in stored.halves) or (stored.path,)
    heads = layout.heads or _heads(stored, parts, near)
    return Unit(paths, parts, layout, stored.factor, heads, biased)


def _heads(stored: Stored, parts: tuple[Logical, ...], near: Near) -> int:
    rows = next((part.shape[0] for part in parts if part.kind == "query"), 0)
    if not rows or stored.value.ndim > 2:  # XLNet stores (width, heads, size)
        return int(stored.value.shape[1]) if rows else 0
    path = names.layer(stored.key)
    return count_beside(path, rows, near, stored.owner, stored.around)


_PARTS = {
    "q": "query", "k": "key", "v": "value", "gate": "gate", "up": "up", "nope": "query",
    "rope": "rotary", "latent": "latent", "x": "input", "z": "gate",
} | dict.fromkeys(("B", "C", "dt"), "state")  # fmt: skip


def _part_kind(kind: str, label: str) -> str:
    return _PARTS.get(label, kind) if kind == "fused" else kind


def _kind(tensor: Surroundings, layout: Layout, name: str) -> str:
    """The kind of a whole tensor: what is known of its layer, or else what its name says."""
    if len(tensor.shape) > 2 and tensor.is_expert:
        return "expert"
    if tensor.is_kernel:
        return "depthwise" if 1 < tensor.groups == tensor.shape[0] else "convolution"
    if tensor.is_looked_up or isinstance(tensor.owner, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    kind = names.kind(name)
    if kind == "embedding" and isinstance(tensor.owner, nn.Linear):
        return "other"  # it is multiplied, whatever it is called
    is_whole = kind in ("expert", "recurrent", "state") or not layout.parts
    return "fused" if not is_whole and layout.parts[0][0] in _PARTS else kind
