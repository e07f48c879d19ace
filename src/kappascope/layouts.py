"""How a stored tensor is cut into matrices, by its name, its shape and what stands beside it.

Nothing here looks at a value. A :class:`Layout` is a reshape, a permutation and a list of indices,
so every cut is said in the same words and can be sent to another process.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from kappascope import roles
from kappascope.heads import Heads, heads, model_types, sections

Shape: TypeAlias = tuple[int, ...]
Index: TypeAlias = tuple[int | slice, ...]
ALL = slice(None)

_MOST_PARTS = 1024  # the largest stacks in use have 512 experts; a file may claim millions

# Layers that hold q, k and v below one another, each with the layer that follows attention: this
# one is as wide as q, which tells where k and v begin if they are narrower than q.
_JOINED = {
    "in_proj_weight": "out_proj",  # torch
    "c_attn": "c_proj",  # GPT-2
    "qkv": "proj",  # timm, SAM
    "Wqkv": "out_proj",  # MPT, DBRX
    "W_pack": "o_proj",  # Baichuan
    "qkv_proj": "o_proj",  # Phi-3
    "att_proj": "attn_out",  # OLMo
}
# Layers that hold gate and up in this order, each with the layer that reads what they make, half as
# wide as they are long. The gate is the one that goes through the nonlinearity.
_GATED = {
    "gate_up_proj": ("down_proj", "gate up"),  # Phi-3, GLM-4, stacks of experts
    "dense_h_to_4h": ("dense_4h_to_h", "gate up"),  # ChatGLM
    "input_linear": ("output_linear", "gate up"),  # Granite's experts
    "w12": ("w3", "gate up"),  # DINOv2
    "weights_in": ("weights_out", "gate up"),  # DINOv2 in transformers
    "Wi": ("Wo", "gate up"),  # ModernBERT
    "gated_layers": ("wo", "gate up"),  # MosaicBERT
    "ff_proj": ("ff_out", "up gate"),  # OLMo
    "net.0.proj": ("net.2", "up gate"),  # diffusers
    "fc1": ("fc2", "up gate"),  # flash-attn, if its config speaks of a gated linear unit
}
# Families that store (in, out): layers, and stacks of experts
_CONV1D = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}
_TURNED_STACKS = {"llama4", "llama4_text", "gpt_oss"}


@dataclass(frozen=True)
class Place:
    """A stored tensor's key and shape, and what is known around it."""

    key: str
    shape: Shape
    near: Callable[[str], Shape | None] = lambda _: None  # the shape under another key
    owner: nn.Module | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """The key of the layer, without ``.weight``."""
        return self.key.removesuffix(".weight")

    def beside(self, leaf: str, layer: str = "") -> Shape:
        """Shape of the sibling ``leaf``, two numbers at least: zeros if there is none."""
        layer = layer or self.path.rpartition(".")[2]
        stem, end = self.path.removesuffix(layer), self.key.removeprefix(self.path)
        found = self.near(f"{stem}{leaf}") or self.near(f"{stem}{leaf}{end or '.weight'}")
        return found if found is not None and len(found) > 1 else (0, 0)


@dataclass(frozen=True)
class Layout:
    """A tensor as a grid whose last dimension are columns, and the parts of the grid.

    >>> import torch
    >>> halves = Layout((2, 3, 4), (0, 1, 2), (("gate", (0,)), ("up", (1,))))
    >>> [(label, tuple(matrix.shape)) for label, matrix in halves.cut(torch.zeros(6, 4))]
    [('', (6, 4)), ('gate', (3, 4)), ('up', (3, 4))]
    """

    shape: Shape
    order: Shape
    parts: tuple[tuple[str, Index], ...] = ()
    columns: int = 1  # how many of the last dimensions are columns

    def cut(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The whole as a matrix, then the parts with their labels; views where possible."""
        grid = tensor.reshape(self.shape).permute(self.order).flatten(-self.columns)
        yield "", grid.flatten(0, -2)
        yield from ((label, grid[index].flatten(0, -2)) for label, index in self.parts)


def layout(place: Place) -> Layout:
    """The cut of a tensor with two or more dimensions.

    >>> layout(Place("attn.qkv.weight", (12, 4))).parts[1]
    ('k', (slice(4, 8, None),))
    >>> layout(Place("conv.weight", (8, 3, 5, 5))).shape
    (8, 75)
    """
    if len(place.shape) > 2:
        return _deep(place)
    for rule in (_gates, _interleaved, _joined, _gated, _flat_stack):
        if found := rule(place):
            return found
    return _plain(place)


def _plain(place: Place, *parts: tuple[str, Index]) -> Layout:
    return Layout(place.shape, (1, 0) if _is_turned(place) else (0, 1), parts)


def _below(place: Place, sizes: Mapping[str, int]) -> Layout:
    """Parts of the given sizes, one below another."""
    parts, start = [], 0
    for label, size in sizes.items():
        parts.append((label, (slice(start, start + size),)))
        start += size
    return _plain(place, *parts)


# --- stored (in, out) -----------------------------------------------------------------------------


def _is_turned(place: Place) -> bool:
    """Whether a matrix is stored (in, out), as GPT-2's ``Conv1D`` does."""
    if place.owner is not None:
        return any(kind.__name__ == "Conv1D" for kind in type(place.owner).__mro__)
    match = re.fullmatch(r"(|.*\.)(c_attn|c_proj|c_fc|q_attn)\.weight", place.key)
    if not match:
        return False
    block = re.sub(r"(^|\.)\w+\.$", r"\1", match[1])
    keys = [place.key, f"{match[1]}c_attn.weight", f"{block}attn.c_attn.weight"]
    for found in map(place.near, keys):
        if found and len(found) == 2 and 3 in (found[0] / found[1], found[1] / found[0]):
            return found[1] == 3 * found[0]
    return bool(model_types(place.config) & _CONV1D)


def _oriented(place: Place) -> Shape:
    """(out, in)."""
    out, width = place.shape
    return (width, out) if _is_turned(place) else (out, width)


# --- matrices of several in one -------------------------------------------------------------------


def _gates(place: Place) -> Layout | None:
    """Of LSTM and GRU."""
    gates = re.fullmatch(r"(?:.*\.)?weight_[ih]h(.*)", place.path)
    if not gates:
        return None
    hidden = getattr(place.owner, "hidden_size", 0)
    # the width of what the projection takes in; without a projection, of what the gates do
    for leaf in ("weight_hr", "weight_hh"):
        hidden = hidden or place.beside(leaf + gates[1])[1]
    labels = {3 * hidden: "rzn", 4 * hidden: "ifgo"}.get(place.shape[0], "")
    return _below(place, dict.fromkeys(labels, hidden))


def _joined(place: Place) -> Layout | None:
    """q, k and v below one another."""
    leaf = place.path.rpartition(".")[2]
    if leaf == "query_key_value" and "chatglm" in model_types(place.config):
        found = _heads(place) if _has(place, "multi_query_group_num") else None
        return _below(place, _thirds(found)) if found else None
    if leaf not in _JOINED:
        return None
    length, width = _oriented(place)
    outputs, inputs = place.beside(_JOINED[leaf])[:2]
    if not outputs and leaf == "qkv_proj":  # CodeGen shuffles its own, which has no o_proj
        return None
    q = inputs if outputs == width else length // 3 if length == 3 * width else 0
    k = (length - q) // 2
    certain = 0 < k <= q and q % k == 0 and q + 2 * k == length
    return _below(place, {"q": q, "k": k, "v": k}) if certain else None


def _thirds(found: Heads) -> dict[str, int]:
    return {"q": found.queries * found.size} | dict.fromkeys("kv", found.keys * found.size)


def _interleaved(place: Place) -> Layout | None:
    """q, k and v of one head (or of the heads that share a key) together, then of the next.

    So store GPT-NeoX, BLOOM, Falcon, Megatron and InternLM2. Only a config tells how many.
    """
    leaf, types = place.path.rpartition(".")[2], model_types(place.config)
    rows, columns = place.shape
    if leaf == "qkv_proj" and "codegen" in types and rows == 3 * columns and rows % 12 == 0:
        # four pieces for as many of the machines that trained it, and values before keys
        indices = [(label, (ALL, i)) for label, i in (("q", 0), ("k", 2), ("v", 1))]
        return Layout((4, 3, rows // 12, columns), (0, 1, 2, 3), tuple(indices))
    starcoder = leaf == "c_attn" and "gpt_bigcode" in types and not _has(place, "multi_query")
    chatglm = "chatglm" in types and _has(place, "multi_query_group_num")
    if chatglm or not (starcoder or leaf in ("query_key_value", "wqkv")):
        return None
    if (found := _heads(place)) is None:
        return None
    g = found.shared
    parts: tuple[tuple[str, Index], ...] = (
        ("q", (ALL, slice(g))), ("k", (ALL, g)), ("v", (ALL, g + 1)),
    )  # fmt: skip
    return Layout((found.keys, g + 2, found.size, columns), (0, 1, 2, 3), parts)


def _heads(place: Place) -> Heads | None:
    """Heads of a layer that holds q, k and v, by its length."""
    rows = place.shape[0]
    fits = lambda h: (h.queries + 2 * h.keys) * h.size == rows  # noqa: E731
    return heads(place.config, place.key, fits)


def _has(place: Place, key: str) -> bool:
    return any(section.get(key) for _, section in sections(place.config))


def _gated(place: Place) -> Layout | None:
    """Gate and up, one below the other."""
    for leaf, (sibling, order) in _GATED.items():
        if not re.search(rf"(^|\.){re.escape(leaf)}$", place.path):
            continue
        rows, columns = place.shape
        beside = place.beside(sibling, leaf)
        certain = rows == 2 * beside[1] or (leaf == "gate_up_proj" and beside == (0, 0))
        if rows % 2 or not certain or (leaf == "fc1" and not _speaks_of_gates(place)):
            return None
        labels = enumerate(order.split())
        parts = tuple((label, (i,)) for i, label in labels)
        return Layout((2, rows // 2, columns), (0, 1, 2), parts)
    return None


def _speaks_of_gates(place: Place) -> bool:
    keys = ("hidden_act", "activation_function", "activation", "hidden_activation", "mlp_type")
    values = [str(section.get(key)) for _, section in sections(place.config) for key in keys]
    return any("glu" in value.lower() for value in values)


def _flat_stack(place: Place) -> Layout | None:
    """Experts below one another in one matrix, as DBRX stores them."""
    found = re.search(r"experts\.mlp\.(w1|v1|w2)$", place.path)
    counts = [section.get("moe_num_experts") for _, section in sections(place.config)]
    count = next((n for n in counts if type(n) is int and 1 < n <= _MOST_PARTS), 0)
    if not found or not count or place.shape[0] % count:
        return None
    shape = (count, place.shape[0] // count, place.shape[1])
    return Layout(shape, (0, 2, 1) if found[1] == "w2" else (0, 1, 2), _numbered(count))


# --- three dimensions and more --------------------------------------------------------------------


def _numbered(count: int) -> tuple[tuple[str, Index], ...]:
    return tuple((str(i), (i,)) for i in range(count)) if 1 < count <= _MOST_PARTS else ()


def _deep(place: Place) -> Layout:
    first, *rest = place.shape
    is_weight = place.key.rpartition(".")[2] == "weight"
    if is_weight and isinstance(place.owner, _ConvNd) and first % place.owner.groups == 0:
        return _convolution(place, place.owner)
    size = _product(rest)
    if is_weight and not re.search("expert|moe", place.key):
        return Layout((first, size), (0, 1))
    kind = roles.kind(place.key)
    if kind == "embedding":  # a table, whatever its positions are ordered by
        return Layout((_product(place.shape[:-1]), place.shape[-1]), (0, 1))
    if first == size and kind in ("query", "key", "value", "output"):  # XLNet: (width, heads, size)
        return Layout((first, size), (0, 1) if kind == "output" else (1, 0))
    return _stack(place)


def _product(sizes: Any) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total


def _convolution(place: Place, owner: _ConvNd) -> Layout:
    """Groups of (out, in * kernel); a transposed convolution stores (in, out, kernel)."""
    first, second, *kernel = place.shape
    count, size = owner.groups, _product(kernel)
    if owner.transposed:
        parts = _numbered(count) if second > 1 else ()
        return Layout((count, first // count, second, size), (0, 2, 1, 3), parts, columns=2)
    parts = _numbered(count) if first > count else ()
    return Layout((count, first // count, second * size), (0, 1, 2), parts)


def _stack(place: Place) -> Layout:
    """Matrices below one another, in each of them gate and up if its name and neighbour say so."""
    *counts, a, b = place.shape
    count = _product(counts)
    turned = _is_turned_stack(place)
    order = (0, 2, 1) if turned else (0, 1, 2)
    length = b if turned else a
    if turned is None or not _is_gated_stack(place) or length % 2 or not 1 < count <= _MOST_PARTS:
        return Layout((count, a, b), order, _numbered(count) if length > 1 else ())
    if not turned:
        return Layout((count, 2, a // 2, b), (0, 1, 2, 3), _gated_parts(count, 2))
    if "gpt_oss" in model_types(place.config) or place.near(f"{place.key}_bias"):
        # gate and up in turn
        return Layout((count, a, b // 2, 2), (0, 2, 3, 1), _gated_parts(count, 3))
    return Layout((count, a, 2, b // 2), (0, 2, 3, 1), _gated_parts(count, 2))


def _gated_parts(count: int, at: int) -> tuple[tuple[str, Index], ...]:
    """Gate and up of every expert: halves of its grid, or every other row of it."""
    between: Index = (ALL,) * (at - 2)
    halves = ((0, "gate"), (1, "up"))
    return tuple((f"{i}.{label}", (i, *between, j)) for i in range(count) for j, label in halves)


def _is_gated_stack(place: Place) -> bool:
    return bool(re.search(r"(^|\.)(gate_up_proj|input_linear)$", place.path))


def _is_turned_stack(place: Place) -> bool | None:
    """Whether the matrices of a stack are stored (in, out); None if gate and up may be either."""
    leaf = place.path.rpartition(".")[2]
    a, b = place.shape[-2:]
    if _is_gated_stack(place):
        c, d = place.beside(_GATED[leaf][0])[-2:]
        if (b, a) == (2 * c, d) or (a, b) == (2 * d, c):
            return (b, a) == (2 * c, d)
    elif leaf in ("down_proj", "output_linear"):
        c, d = place.beside("gate_up_proj" if leaf == "down_proj" else "input_linear")[-2:]
        if (d, c) == (2 * a, b) or (c, d) == (2 * b, a):
            return (d, c) == (2 * a, b)
    known = bool(model_types(place.config) & _TURNED_STACKS)
    return known or (None if _is_gated_stack(place) else False)
