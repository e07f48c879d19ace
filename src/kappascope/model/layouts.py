"""How a tensor is a matrix: transposed, fused, stacked, a convolution; stored, live or saved alike.

A :class:`Layout` is a reshape, a permutation and a list of indices, so it can be sent to another
process. :func:`stored_layout` tells it from the name and shape of a stored tensor and what stands
beside it, :func:`live_layout` from the module that uses a weight. Nothing here looks at a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from kappascope.model import names
from kappascope.model._heads import Config, Heads

Shape: TypeAlias = tuple[int, ...]
Near: TypeAlias = Callable[[str], Shape | None]  # the shape under another key, or nothing
Index: TypeAlias = tuple[int | slice, ...]
Parts: TypeAlias = tuple[tuple[str, Index], ...]
ALL = slice(None)
MAX_PARTS = 1024  # the largest stacks in use have 512 experts; a file may claim millions


@dataclass(frozen=True)
class Layout:
    """A tensor as a grid whose last dimensions are columns, and the parts of the grid.

    The grid is the tensor reshaped and permuted; ``stack`` of its first dimensions count matrices
    of their own, and the others up to the columns are rows.

    >>> import torch
    >>> halves = Layout((2, 3, 4), (0, 1, 2), (("gate", (0,)), ("up", (1,))))
    >>> [(label, tuple(matrix.shape)) for label, matrix in halves.cut(torch.zeros(6, 4))]
    [('', (6, 4)), ('gate', (3, 4)), ('up', (3, 4))]
    """

    grid: Shape  # before the permutation
    order: Shape
    parts: Parts = ()
    columns: int = 1  # how many of the last dimensions are columns
    stack: int = 0
    stored: Shape = ()  # the shape of the tensor itself, where it is not that of the grid

    @classmethod
    def plain(cls, shape: Shape) -> Layout:
        """A tensor ``(..., out, in)`` as it is.

        >>> import torch
        >>> Layout.plain((5, 3, 4)).matrix(torch.ones(5, 3, 4)).shape
        torch.Size([5, 3, 4])
        """
        return cls(shape, tuple(range(len(shape))), stack=max(len(shape) - 2, 0))

    @classmethod
    def transposed(cls, shape: Shape) -> Layout:
        """A matrix that is stored ``(in, out)``.

        >>> import torch
        >>> Layout.transposed((2, 3)).matrix(torch.ones(2, 3)).shape
        torch.Size([3, 2])
        """
        return cls(shape, (1, 0))

    @classmethod
    def kernel(cls, shape: Shape) -> Layout:
        """A tensor ``(out, in, ...)`` whose dimensions after the first are columns.

        >>> import torch
        >>> Layout.kernel((8, 3, 5, 5)).matrix(torch.ones(8, 3, 5, 5)).shape
        torch.Size([8, 75])
        """
        return cls((shape[0], prod(shape[1:])), (0, 1), stored=shape)

    @classmethod
    def convolution(cls, shape: Shape, layer: _ConvNd) -> Layout:
        """Groups of (out, in * kernel); a transposed convolution stores (in, out, kernel).

        A group of one row is a vector: such groups are taken together as one matrix.

        >>> layer = nn.Conv2d(4, 6, 3, groups=2)
        >>> Layout.convolution((6, 2, 3, 3), layer).matrix(layer.weight).shape
        torch.Size([2, 3, 18])
        """
        first, second, *kernel = shape
        count, size = layer.groups, prod(kernel)
        grid: Shape = (count, first // count, second * size)
        order: Shape = (0, 1, 2)
        if layer.transposed:
            grid, order = (count, first // count, second, size), (0, 2, 1, 3)
        columns = len(grid) - 2
        has_matrices = count > 1 and grid[order[1]] > 1
        parts = numbered(count) if has_matrices else ()
        return cls(grid, order, parts, columns, stack=int(has_matrices), stored=shape)

    @property
    def shape(self) -> Shape:
        """The shape of ``matrix``.

        >>> Layout.kernel((8, 3, 5, 5)).shape
        (8, 75)
        """
        sizes = [self.grid[i] for i in self.order]
        rows, columns = sizes[self.stack : -self.columns], sizes[-self.columns :]
        return (*sizes[: self.stack], prod(rows), prod(columns))

    def matrix(self, tensor: Tensor) -> Float[Tensor, "*stack out in"]:
        """The tensor as one matrix, or as a stack of them; a view where possible."""
        return tensor if self._is_plain else self._permuted(tensor).flatten(self.stack, -2)

    def tensor(self, matrix: Float[Tensor, "*stack out in"]) -> Tensor:
        """The matrix, or the stack of them, as the tensor is stored: the inverse of ``matrix``.

        >>> import torch
        >>> layout = Layout.transposed((2, 3))
        >>> layout.tensor(layout.matrix(torch.ones(2, 3))).shape
        torch.Size([2, 3])
        """
        if self._is_plain:
            return matrix
        permuted = matrix.reshape([self.grid[i] for i in self.order])
        inverse = [self.order.index(i) for i in range(len(self.order))]
        return permuted.permute(inverse).reshape(self.stored or self.grid)

    def cut(self, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The whole as a matrix, then the parts with their labels; views where possible."""
        permuted = self._permuted(tensor)
        yield "", permuted.flatten(0, -2)
        yield from ((label, permuted[index].flatten(0, -2)) for label, index in self.parts)

    def _permuted(self, tensor: Tensor) -> Tensor:
        return tensor.reshape(self.grid).permute(self.order).flatten(-self.columns)

    @property
    def _is_plain(self) -> bool:
        """Whether a tensor is its own matrix, or its own stack of them."""
        is_grid = not self.stored and self.order == tuple(range(len(self.grid)))
        return is_grid and self.stack == max(len(self.grid) - 2, 0)

    @property
    def undivided(self) -> int:
        """How many matrices of a stack are only looked at together, being too many to part.

        >>> Layout((2000, 3, 4), (0, 1, 2)).undivided, Layout((2000, 1, 4), (0, 1, 2)).undivided
        (2000, 0)
        """
        rows = prod(self.grid[i] for i in self.order[1 : -self.columns])
        return self.grid[0] if rows > 1 and self.grid[0] > MAX_PARTS and not self.parts else 0


def numbered(count: int) -> Parts:
    """Every matrix of a stack, unless there is only one, or more than can be listed.

    >>> numbered(2), numbered(10**9)
    ((('0', (0,)), ('1', (1,))), ())
    """
    return tuple((str(i), (i,)) for i in range(count)) if 1 < count <= MAX_PARTS else ()


# --- the weight of a module -----------------------------------------------------------------------


def live_layout(module: nn.Module, shape: Shape) -> Layout:
    """How ``module`` uses its weight of this shape; as it is, unless the layer is known.

    >>> live_layout(nn.Linear(4, 3), (3, 4)).order
    (0, 1)
    """
    if isinstance(module, _ConvNd):
        return Layout.convolution(shape, module)
    return Layout.transposed(shape) if _is_conv1d(module, shape) else Layout.plain(shape)


def _is_conv1d(module: nn.Module, shape: Shape) -> bool:
    """Whether a module is GPT-2's ``Conv1D``, which stores its matrix (in, out)."""
    return len(shape) == 2 and any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


# --- a stored tensor ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Surroundings:
    """A stored tensor's key and shape, and what is known around it."""

    key: str
    shape: Shape
    near: Near = lambda _: None
    owner: nn.Module | None = None
    config: Config = field(default_factory=Config)

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
# Keys of a config that may speak of a gated linear unit.
_ACTIVATIONS = ("hidden_act", "activation_function", "activation", "hidden_activation", "mlp_type")
_TRANSPOSING = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}  # families: (in, out)
_TRANSPOSING_EXPERTS = {"llama4", "llama4_text", "gpt_oss"}  # families whose experts are (in, out)


def stored_layout(tensor: Surroundings) -> Layout:
    """The layout of a stored tensor with two or more dimensions.

    >>> stored_layout(Surroundings("attn.qkv.weight", (12, 4))).parts[1]
    ('k', (slice(4, 8, None),))
    >>> stored_layout(Surroundings("conv.weight", (8, 3, 5, 5))).grid
    (8, 75)
    >>> stored_layout(Surroundings("mlp.experts.w1", (4, 8, 2))).parts[3]
    ('3', (3,))
    """
    if len(tensor.shape) > 2:
        return _deep(tensor)
    for rule in (_recurrent_gates, _interleaved_heads, _joined_heads, _gated, _flat_experts):
        if found := rule(tensor):
            return found
    return _two_dimensional(tensor)


def _two_dimensional(tensor: Surroundings, *parts: tuple[str, Index]) -> Layout:
    return Layout(tensor.shape, (1, 0) if _is_transposed(tensor) else (0, 1), parts)


def _below_one_another(tensor: Surroundings, sizes: Mapping[str, int]) -> Layout:
    """Parts with these numbers of rows, one below another."""
    parts, start = [], 0
    for label, size in sizes.items():
        parts.append((label, (slice(start, start + size),)))
        start += size
    return _two_dimensional(tensor, *parts)


def _is_transposed(tensor: Surroundings) -> bool:
    """Whether a matrix is stored (in, out), as GPT-2's ``Conv1D`` does."""
    if tensor.owner is not None:
        return _is_conv1d(tensor.owner, tensor.shape)
    match = re.fullmatch(r"(|.*\.)(c_attn|c_proj|c_fc|q_attn)\.weight", tensor.key)
    if not match:
        return False
    block = re.sub(r"(^|\.)\w+\.$", r"\1", match[1])
    keys = [tensor.key, f"{match[1]}c_attn.weight", f"{block}attn.c_attn.weight"]
    for shape in map(tensor.near, keys):
        if shape and len(shape) == 2 and shape[0] != shape[1]:  # both are 0 in an empty one
            rows, columns = shape
            if 3 * rows == columns or rows == 3 * columns:
                return 3 * rows == columns
    return bool(tensor.config.types & _TRANSPOSING)


def _out_in(tensor: Surroundings) -> Shape:
    """The shape (out, in) of a matrix, whichever way it is stored."""
    return tensor.shape[::-1] if _is_transposed(tensor) else tensor.shape


# --- several matrices in one ----------------------------------------------------------------------


def _recurrent_gates(tensor: Surroundings) -> Layout | None:
    """The gates of LSTM and GRU, one below another."""
    gates = re.fullmatch(r"(?:.*\.)?weight_[ih]h(.*)", tensor.path)
    if not gates:
        return None
    hidden = getattr(tensor.owner, "hidden_size", 0)
    # the width of what the projection takes in; without a projection, of what the gates do
    for leaf in ("weight_hr", "weight_hh"):
        hidden = hidden or tensor.beside(leaf + gates[1])[1]
    labels = {3 * hidden: "rzn", 4 * hidden: "ifgo"}.get(tensor.shape[0], "")
    return _below_one_another(tensor, dict.fromkeys(labels, hidden))


def _joined_heads(tensor: Surroundings) -> Layout | None:
    """Queries, keys and values of all heads, one below another."""
    leaf = tensor.path.rpartition(".")[2]
    if leaf == "query_key_value" and "chatglm" in tensor.config.types:
        heads = _heads(tensor) if tensor.config.all("multi_query_group_num") else None
        if heads is None:
            return None
        sizes = {"q": heads.queries * heads.size} | dict.fromkeys("kv", heads.keys * heads.size)
        return _below_one_another(tensor, sizes)
    if leaf not in _JOINED:
        return None
    length, width = _out_in(tensor)
    if any(tensor.beside("q_attn")):  # GPT-2's attention to another text: k and v alone
        halves = dict.fromkeys("kv", length // 2)
        return _below_one_another(tensor, halves) if length % 2 == 0 else None
    outputs, inputs = tensor.beside(_JOINED[leaf])[:2]
    is_shuffled = not outputs and leaf == "qkv_proj"  # CodeGen's, which has no o_proj
    # twice the width is k and v alone, or two queries to a key
    if is_shuffled or (length == 2 * width and not _heads(tensor)):
        return None
    q = inputs if outputs == width else length // 3 if length == 3 * width else 0
    k = (length - q) // 2
    is_certain = 0 < k <= q and q % k == 0 and q + 2 * k == length
    return _below_one_another(tensor, {"q": q, "k": k, "v": k}) if is_certain else None


def _interleaved_heads(tensor: Surroundings) -> Layout | None:
    """q, k and v of one head (or of the heads that share a key) together, then of the next.

    So store GPT-NeoX, BLOOM, Falcon, Megatron and InternLM2. Only a config tells how many.
    """
    leaf, types = tensor.path.rpartition(".")[2], tensor.config.types
    rows, columns = tensor.shape
    if leaf == "qkv_proj" and "codegen" in types and rows == 3 * columns and rows % 12 == 0:
        # four pieces for as many of the machines that trained it, and values before keys
        indices = [(label, (ALL, i)) for label, i in (("q", 0), ("k", 2), ("v", 1))]
        return Layout((4, 3, rows // 12, columns), (0, 1, 2, 3), tuple(indices))
    is_chatglm = "chatglm" in types and tensor.config.all("multi_query_group_num")
    is_starcoder = leaf == "c_attn" and "gpt_bigcode" in types
    is_starcoder = is_starcoder and not tensor.config.all("multi_query")
    if is_chatglm or not (is_starcoder or leaf in ("query_key_value", "wqkv")):
        return None
    if (heads := _heads(tensor)) is None or _is_transposed(tensor):
        return None
    g = heads.shared
    parts: Parts = (("q", (ALL, slice(g))), ("k", (ALL, g)), ("v", (ALL, g + 1)))
    return Layout((heads.keys, g + 2, heads.size, columns), (0, 1, 2, 3), parts)


def _heads(tensor: Surroundings) -> Heads | None:
    """The heads of a layer that holds q, k and v, by its length."""
    rows = _out_in(tensor)[0]
    return tensor.config.heads(tensor.key, lambda h: (h.queries + 2 * h.keys) * h.size == rows)


def _gated(tensor: Surroundings) -> Layout | None:
    """Gate and up, one below the other."""
    for leaf, (sibling, order) in _GATED.items():
        if not f".{tensor.path}".endswith(f".{leaf}"):
            continue
        rows, columns = tensor.shape
        beside = tensor.beside(sibling, leaf)
        is_certain = rows == 2 * beside[1] or (leaf == "gate_up_proj" and beside == (0, 0))
        if leaf == "fc1":
            told = [value for key in _ACTIVATIONS for value in tensor.config.all(key)]
            is_certain = is_certain and any("glu" in str(value).lower() for value in told)
        if rows % 2 or not is_certain:
            return None
        parts = tuple((label, (i,)) for i, label in enumerate(order.split()))
        return Layout((2, rows // 2, columns), (0, 1, 2), parts)
    return None


def _flat_experts(tensor: Surroundings) -> Layout | None:
    """Experts below one another in one matrix, as DBRX stores them.

    >>> config = Config({"ffn_config": {"moe_num_experts": 4}})
    >>> _flat_experts(Surroundings("ffn.experts.mlp.w1", (32, 8), config=config)).grid
    (4, 8, 8)
    """
    match = re.search(r"experts\.mlp\.(w1|v1|w2)$", tensor.path)
    counts = tensor.config.all("moe_num_experts")
    count = next((n for n in counts if type(n) is int and 1 < n <= MAX_PARTS), 0)
    if not match or not count or tensor.shape[0] % count:
        return None
    grid = (count, tensor.shape[0] // count, tensor.shape[1])
    return Layout(grid, (0, 2, 1) if match[1] == "w2" else (0, 1, 2), numbered(count))


# --- three and more dimensions --------------------------------------------------------------------


def _deep(tensor: Surroundings) -> Layout:
    """Kernels, tables, and stacks of matrices."""
    first, *rest = tensor.shape
    is_weight = tensor.key.rpartition(".")[2] == "weight"
    if is_weight and isinstance(tensor.owner, _ConvNd) and first % tensor.owner.groups == 0:
        return Layout.convolution(tensor.shape, tensor.owner)
    if is_weight and not re.search("expert|moe", tensor.key):
        return Layout.kernel(tensor.shape)
    kind = names.kind(tensor.key)
    if kind == "embedding":  # a table, whatever its positions are ordered by
        return Layout((prod(tensor.shape[:-1]), tensor.shape[-1]), (0, 1))
    if first == prod(rest) and re.search(r"rel_attn\.[qkvor]$", tensor.key):
        # XLNet: (width, heads, size)
        return Layout((first, first), (0, 1) if kind == "output" else (1, 0))
    return _matrices(tensor)


def _matrices(tensor: Surroundings) -> Layout:
    """Matrices below one another, in each of them gate and up if its name and neighbour say so."""
    *counts, a, b = tensor.shape
    count = prod(counts)
    transposed = _is_transposed_stack(tensor)
    order = (0, 2, 1) if transposed else (0, 1, 2)
    length = b if transposed else a
    is_gated = transposed is not None and _is_gated_stack(tensor) and length % 2 == 0
    if not is_gated or not 1 < count <= MAX_PARTS:
        return Layout((count, a, b), order, numbered(count) if length > 1 else ())
    if not transposed:
        return Layout((count, 2, a // 2, b), (0, 1, 2, 3), _gated_parts(count, 2))
    if "gpt_oss" in tensor.config.types or tensor.near(f"{tensor.key}_bias"):
        # gate and up in turn
        return Layout((count, a, b // 2, 2), (0, 2, 3, 1), _gated_parts(count, 3))
    return Layout((count, a, 2, b // 2), (0, 2, 3, 1), _gated_parts(count, 2))


def _gated_parts(count: int, at: int) -> Parts:
    """Gate and up of every expert: halves of its grid, or every other row of it."""
    between: Index = (ALL,) * (at - 2)
    halves = ((0, "gate"), (1, "up"))
    return tuple((f"{i}.{label}", (i, *between, j)) for i in range(count) for j, label in halves)


def _is_gated_stack(tensor: Surroundings) -> bool:
    return bool(re.search(r"(^|\.)(gate_up_proj|input_linear)$", tensor.path))


def _is_transposed_stack(tensor: Surroundings) -> bool | None:
    """Whether the matrices of a stack are stored (in, out); None if gate and up may be either."""
    leaf = tensor.path.rpartition(".")[2]
    a, b = tensor.shape[-2:]
    if _is_gated_stack(tensor):
        c, d = tensor.beside(_GATED[leaf][0])[-2:]
        if (b, a) == (2 * c, d) or (a, b) == (2 * d, c):
            return (b, a) == (2 * c, d)
    elif leaf in ("down_proj", "output_linear"):
        c, d = tensor.beside("gate_up_proj" if leaf == "down_proj" else "input_linear")[-2:]
        if (d, c) == (2 * a, b) or (c, d) == (2 * b, a):
            return (d, c) == (2 * a, b)
    is_known = bool(tensor.config.types & _TRANSPOSING_EXPERTS)
    return is_known or (None if _is_gated_stack(tensor) else False)
