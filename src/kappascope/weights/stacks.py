"""Tensors of three and more dimensions: kernels, tables, and stacks of matrices."""

from __future__ import annotations

import re
from math import prod

from torch.nn.modules.conv import _ConvNd

from kappascope.weights import roles
from kappascope.weights.layouts import ALL, GATED, MOST_PARTS, Index, Layout, Parts, Place, numbered

_TURNED = {"llama4", "llama4_text", "gpt_oss"}  # families whose experts are stored (in, out)


def stack(place: Place) -> Layout:
    """The cut of a tensor with three or more dimensions.

    >>> stack(Place("mlp.experts.w1", (4, 8, 2))).parts[3]
    ('3', (3,))
    """
    first, *rest = place.shape
    is_weight = place.key.rpartition(".")[2] == "weight"
    if is_weight and isinstance(place.owner, _ConvNd) and first % place.owner.groups == 0:
        return _convolution(place, place.owner)
    size = prod(rest)
    if is_weight and not re.search("expert|moe", place.key):
        return Layout((first, size), (0, 1))
    kind = roles.kind(place.key)
    if kind == "embedding":  # a table, whatever its positions are ordered by
        return Layout((prod(place.shape[:-1]), place.shape[-1]), (0, 1))
    if first == size and re.search(r"rel_attn\.[qkvor]$", place.key):  # XLNet: (width, heads, size)
        return Layout((first, size), (0, 1) if kind == "output" else (1, 0))
    return _matrices(place)


def _convolution(place: Place, owner: _ConvNd) -> Layout:
    """Groups of (out, in * kernel); a transposed convolution stores (in, out, kernel)."""
    first, second, *kernel = place.shape
    count, size = owner.groups, prod(kernel)
    if owner.transposed:
        parts = numbered(count) if second > 1 else ()
        return Layout((count, first // count, second, size), (0, 2, 1, 3), parts, columns=2)
    parts = numbered(count) if first > count else ()
    return Layout((count, first // count, second * size), (0, 1, 2), parts)


def _matrices(place: Place) -> Layout:
    """Matrices below one another, in each of them gate and up if its name and neighbour say so."""
    *counts, a, b = place.shape
    count = prod(counts)
    turned = _is_turned_stack(place)
    order = (0, 2, 1) if turned else (0, 1, 2)
    length = b if turned else a
    if turned is None or not _is_gated_stack(place) or length % 2 or not 1 < count <= MOST_PARTS:
        return Layout((count, a, b), order, numbered(count) if length > 1 else ())
    if not turned:
        return Layout((count, 2, a // 2, b), (0, 1, 2, 3), _gated_parts(count, 2))
    if "gpt_oss" in place.config.types or place.near(f"{place.key}_bias"):
        # gate and up in turn
        return Layout((count, a, b // 2, 2), (0, 2, 3, 1), _gated_parts(count, 3))
    return Layout((count, a, 2, b // 2), (0, 2, 3, 1), _gated_parts(count, 2))


def _gated_parts(count: int, at: int) -> Parts:
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
        c, d = place.beside(GATED[leaf][0])[-2:]
        if (b, a) == (2 * c, d) or (a, b) == (2 * d, c):
            return (b, a) == (2 * c, d)
    elif leaf in ("down_proj", "output_linear"):
        c, d = place.beside("gate_up_proj" if leaf == "down_proj" else "input_linear")[-2:]
        if (d, c) == (2 * a, b) or (c, d) == (2 * b, a):
            return (d, c) == (2 * a, b)
    known = bool(place.config.types & _TURNED)
    return known or (None if _is_gated_stack(place) else False)


def flat_stack(place: Place) -> Layout | None:
    """Experts below one another in one matrix, as DBRX stores them.

    >>> from kappascope.weights.heads import Config
    >>> config = Config({"ffn_config": {"moe_num_experts": 4}})
    >>> flat_stack(Place("ffn.experts.mlp.w1", (32, 8), config=config)).shape
    (4, 8, 8)
    """
    found = re.search(r"experts\.mlp\.(w1|v1|w2)$", place.path)
    counts = place.config.all("moe_num_experts")
    count = next((n for n in counts if type(n) is int and 1 < n <= MOST_PARTS), 0)
    if not found or not count or place.shape[0] % count:
        return None
    shape = (count, place.shape[0] // count, place.shape[1])
    return Layout(shape, (0, 2, 1) if found[1] == "w2" else (0, 1, 2), numbered(count))
