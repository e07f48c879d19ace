"""Where factors of rows and columns are free, and where another parameter undoes them.

Scaling a row of one layer and the matching column of the next by inverse amounts changes nothing:
such pairs of factors drift together without end (a *gauge freedom*). One of each pair is enough:

- queries and keys meet in products, row by row: the keys' rows are left alone, and so are the rows
  with which Mamba reads a state (C), which meet those that write it (B);
- what values (or an up-projection) write, the output (or down-projection) reads: its columns are
  left alone, and so are those of a layer behind another with nothing but rectifiers between, and
  those of LoRA's second factor;
- a norm layer with weights scales the columns of what reads it, and undoes the rows of the queries,
  keys or latent vectors that it normalises, as a batch norm does those of any layer: these are left
  alone;
- a convolution with one channel to a group scales what the layer before it writes: its rows are
  left alone;
- rows of a language model's head scale logits, which hurts: it is left alone altogether.

What stays is one number for some matrices: the scale of a matrix as a whole is in its neighbours as
well (values and output, up and down, the gains of a norm layer and all that reads it).

What a weight does, and which of its rows are whose, is what :func:`kappascope.matrices` says of it;
neighbours are read off ``nn.Sequential`` and off the order of a module's children. The first layer
after all blocks (a pooler, a classifier, the dense layer before a masked language model's logits)
reads the norm layer that comes before it in the order of modules. Of several heads that read one
norm layer it is the first that is left alone: the gains cannot undo the factors of the others.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from kappascope.model.kinds import language_heads
from kappascope.model.names import depth, family, layer
from kappascope.model.weights import LiveWeight

READERS = {"query", "key", "value", "fused", "input", "latent", "up", "gate"}
WRITERS = {"output", "down"}
PARTNERS = {"value", "up", "fused"}  # whose rows a writer's columns would repeat
# scaling passes through these unchanged
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity, nn.Dropout, nn.Flatten, nn.MaxPool2d)
TRANSPARENT = (nn.Dropout, nn.Identity, nn.Flatten)
AVERAGING = (nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)  # per channel
MATRIX = (nn.Linear, _ConvNd)
# the parts that a norm layer beside them normalises, by the name of that layer without "norm"
_NORMALISED = {"q": "query", "query": "query", "k": "key", "key": "key", "qk": ""}

Modules: TypeAlias = Mapping[str, nn.Module]


@dataclass(frozen=True)
class FreeSides:
    """Which sides of a weight may have factors; those of the rows ``undone`` stay at one."""

    rows: bool = True
    columns: bool = True
    undone: tuple[int, ...] = ()

    def mask(self, length: int) -> Tensor | None:
        """Which of ``length`` rows are free, if not all.

        >>> FreeSides(undone=(2, 3)).mask(6)
        tensor([ True,  True, False, False,  True,  True])
        """
        if not self.undone:
            return None
        free = torch.ones(length, dtype=torch.bool)
        free[list(self.undone)] = False
        return free


class _Part(NamedTuple):
    """A matrix in a weight: what it does, where it stands, and its rows if they are not all."""

    name: str
    place: str
    kind: str
    rows: tuple[int, ...] | None = None


def free_sides(model: nn.Module, weights: Sequence[LiveWeight]) -> dict[str, FreeSides]:
    """The sides left free, for every weight that is not free altogether.

    >>> from kappascope.model.weights import live_weights
    >>> model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.BatchNorm1d(8))
    >>> free_sides(model, live_weights(model))
    {'1.weight': FreeSides(rows=False, columns=False, undone=())}
    """
    modules = dict(model.named_modules())
    parts = [part for weight in weights for part in _parts(weight)]
    heads = set(language_heads([weight.unit.layer for weight in weights if weight.unit]))
    neighbours = [*_neighbours(modules), *_behind_blocks(model)]
    columns = heads | {name for name, side in neighbours if side == "columns"}
    columns |= set(_bound_columns(modules, weights, parts))
    rows = heads | {name for name, side in neighbours if side == "rows"}
    undone = defaultdict[str, set[int]](set)
    for part in _bound_rows(modules, parts):
        if part.rows is None:
            rows.add(part.name)
        undone[part.name].update(part.rows or ())
    sides = {}
    for weight in weights:
        name, its = weight.name, undone[weight.name]
        has_rows = name not in rows and len(its) < weight.layout.shape[-2]
        free = FreeSides(has_rows, name not in columns, tuple(sorted(its)) if has_rows else ())
        if free != FreeSides():
            sides[name] = free
    return sides


def _parts(weight: LiveWeight) -> Iterator[_Part]:
    """The matrices in a weight whose places and kinds matter."""
    place, kind = family(weight.name), weight.kind
    if kind == "expert":
        kind = _expert_kind(weight.name)
    if kind not in ("fused", "state") or weight.unit is None or not weight.layout.parts:
        yield _Part(weight.name, place, kind)
        return
    for (label, _), part in zip(weight.layout.parts, weight.unit.parts[1:], strict=True):
        its_kind = part.kind if kind == "fused" else label  # dt, B and C of Mamba
        yield _Part(weight.name, place, its_kind, tuple(weight.layout.rows(label)))


def _expert_kind(name: str) -> str:
    """What a stack of experts, or one of them, does in its perceptron.

    >>> _expert_kind("mlp.experts.gate_up_proj"), _expert_kind("moe.output_linear.weight")
    ('up', 'down')
    """
    leaf = layer(name).rpartition(".")[2]
    if re.search("down|output|w2|wo$|fc2", leaf):
        return "down"
    return "up" if re.search("up|input|w1|w3|v1|wi|gate|fc1", leaf) else "expert"


def _bound_rows(modules: Modules, parts: Sequence[_Part]) -> Iterator[_Part]:
    """The parts whose rows another weight of the same attention undoes."""
    kinds = defaultdict[str, set[str]](set)
    channelwise = {part.place for part in parts if _is_channelwise(modules, part)}
    for part in parts:
        kinds[part.place].add(part.kind)
    for part in parts:
        leaf = layer(part.name).rpartition(".")[2]
        norms = [_normalised(n) for n, m in _children(modules, part.place) if _gains(m)]
        is_latent = part.kind == "latent" and any(leaf.startswith(f"{n}_") for n in norms if n)
        is_normalised = is_latent or part.kind in (_NORMALISED.get(norm) for norm in norms)
        meets_query = part.rows is not None or "query" in kinds[part.place]
        is_key = part.kind == "key" and meets_query and part.place not in channelwise
        is_key |= part.kind == "rotary" and leaf.startswith("kv_")  # of all heads of DeepSeek's
        # q, k and v in an order that nothing tells
        is_unknown = part.kind == "fused" and re.search("qkv|key|attn|att_|pack", leaf)
        is_scale = _is_channelwise(modules, part) and READERS & kinds[part.place]
        if is_normalised or is_key or is_unknown or is_scale or part.kind == "C":
            yield part


def _is_channelwise(modules: Modules, part: _Part) -> bool:
    """Whether a part is a convolution of each channel with a kernel of its own."""
    module = modules.get(layer(part.name))
    return isinstance(module, _ConvNd) and 1 < module.groups == module.out_channels


def _bound_columns(
    modules: Modules, weights: Sequence[LiveWeight], parts: Sequence[_Part]
) -> Iterator[str]:
    """The weights whose columns scale what another weight writes, or what a norm layer scales."""
    kinds, beside = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for part in parts:
        kinds[part.place].add(part.kind)
        beside[part.place.rpartition(".")[0]].add(part.kind)
    inputs = {weight.name: weight.layout.shape[-1] for weight in weights}
    for name, place, kind, _ in parts:
        above, width = place.rpartition(".")[0], inputs[name]
        company = kinds[place] if kinds[place] & READERS else beside[above]  # beside, as in BERT
        is_normed = width in _norm_sizes(modules, place) - _norm_sizes(modules, above)  # Mamba-2
        if kind in WRITERS and (company & PARTNERS or is_normed):
            yield name
        if layer(name).endswith("dt_proj") and "dt" in kinds[place]:
            yield name
        if kind in READERS and _reads_norm(modules, place, width):
            yield name
        if kind == "adapter" and re.sub(r"lora_(B|up)\b", "lora_A", name) in inputs.keys() - {name}:
            yield name


def _children(modules: Modules, path: str) -> list[tuple[str, nn.Module]]:
    return list(modules[path].named_children()) if path in modules else []


def _norm_sizes(modules: Modules, path: str) -> set[int]:
    """The widths of the norm layers with weights in a module."""
    return {size for _, child in _children(modules, path) if (size := _gains(child))}


def _reads_norm(modules: Modules, path: str, width: int) -> bool:
    """Whether the nearest module around with norm layers of this width scales with them."""
    while True:
        norms = [
            child
            for name, child in _children(modules, path)
            if "Norm" in type(child).__name__ and _normalised(name) not in _NORMALISED
        ]
        sizes = {_gains(norm) for norm in norms}
        if not path or sizes & {0, width}:
            return width in sizes
        path = path.rpartition(".")[0]


def _normalised(name: str) -> str:
    """What a norm layer is named after.

    >>> _normalised("q_norm"), _normalised("kv_a_layernorm"), _normalised("norm")
    ('q', 'kv_a', '')
    """
    return re.sub(r"_?(layer)?norm_?|_?ln_?", "", name)


def _gains(module: nn.Module) -> int:
    """How many numbers a norm layer multiplies by; none if it is no norm layer or has none."""
    gains = getattr(module, "weight", None) if "Norm" in type(module).__name__ else None
    return gains.numel() if isinstance(gains, Tensor) else 0


def _neighbours(modules: Modules) -> Iterator[tuple[str, str]]:
    """Sides that a neighbour undoes: in an ``nn.Sequential``, or among a module's children."""
    for path, module in modules.items():
        stem = f"{path}." if path else ""
        # dropout and the like are no neighbours; a rectifier is one for norms only
        layers = [(n, m) for n, m in module.named_children() if not isinstance(m, TRANSPARENT)]
        for i, (name, before) in enumerate(layers):
            if isinstance(before, MATRIX) and _is_batch_normed(name, before, layers[i + 1 :]):
                yield f"{stem}{name}.weight", "rows"
        norms = [m for _, m in layers if _gains(m)]
        matrices = [(name, m) for name, m in layers if isinstance(m, MATRIX)]
        if len(norms) == len(matrices) == 1 and not isinstance(module, nn.Sequential):
            (name, only), (norm,) = matrices[0], norms
            if _reads(only, norm) and _outputs(only) != _gains(norm):  # as Swin merges patches
                yield f"{stem}{name}.weight", "columns"
        if not isinstance(module, nn.Sequential):
            continue
        for (_, before), (name, after) in pairwise(layers):
            if isinstance(after, MATRIX) and _gains(before):
                yield f"{stem}{name}.weight", "columns"
        linear = [(n, m) for n, m in layers if not isinstance(m, HOMOGENEOUS)]
        for (_, before), (name, after) in pairwise(linear):
            if isinstance(after, MATRIX) and isinstance(before, MATRIX):
                yield f"{stem}{name}.weight", "columns"


def _behind_blocks(model: nn.Module) -> Iterator[tuple[str, str]]:
    """The columns of layers outside of blocks that come right after a norm layer of their width.

    >>> blocks = nn.ModuleList([nn.Linear(4, 4)])
    >>> layers = {"blocks": blocks, "norm": nn.LayerNorm(4), "head": nn.Linear(4, 2)}
    >>> [*_behind_blocks(nn.ModuleDict(layers))]
    [('head.weight', 'columns')]
    """
    last, is_behind = nn.Module(), False
    for path, module in model.named_modules():
        is_apart = isinstance(module, (*TRANSPARENT, *AVERAGING)) or "Rotary" in str(type(module))
        if any(module.children()) or is_apart:
            continue
        is_outside = depth(path) is None
        if isinstance(module, MATRIX) and is_outside and is_behind and _reads(module, last):
            yield f"{path}.weight", "columns"
        is_behind |= not is_outside
        last = module


def _reads(module: nn.Module, norm: nn.Module) -> bool:
    """Whether a layer has as many inputs as a norm layer has gains."""
    inputs = getattr(module, "in_channels", 0) or getattr(module, "in_features", 0)
    return _gains(norm) == inputs > 0


def _outputs(module: nn.Module) -> int:
    return getattr(module, "out_channels", 0) or getattr(module, "out_features", 0)


def _is_batch_normed(name: str, module: nn.Module, later: Sequence[tuple[str, nn.Module]]) -> bool:
    """Whether a batch norm follows: the next child, or a later one of the same number."""
    outputs = _outputs(module)
    number = re.sub(r"\D", "", name)
    return any(
        isinstance(norm, _BatchNorm)
        and norm.num_features == outputs
        and (i == 0 or (number != "" and re.sub(r"\D", "", its_name) == number))
        for i, (its_name, norm) in enumerate(later)
    )
