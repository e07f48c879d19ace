"""How a tensor is a matrix: transposed, fused, stacked, a convolution; stored, live or saved alike.

A :class:`Layout` is a reshape, a permutation and a list of indices, so it can be sent to another
process. :func:`layout_of` tells it from a tensor's name and shape, from what stands beside it, and
from the module that uses it if there is one. Nothing here looks at a value.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod
from typing import Any, TypeAlias

import torch
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
# Under this key a file's own facts tell what its graph does with tensors: kernels and tables.
GRAPH_FACTS = "graph facts of the file"
MAX_PARTS = 1024  # the largest stacks in use have 512 experts; a file may claim millions


@dataclass(frozen=True)
class Layout:
    """A tensor as a grid whose last dimensions are columns, and the parts of the grid.

    The grid is the tensor reshaped and permuted; ``stack`` of its first dimensions count matrices
    of their own, and the others up to the columns are rows. ``heads`` is the number of queries'
    heads where the layout depends on it.

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
    heads: int = 0

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
    def convolution(cls, shape: Shape, groups: int = 1, transposed: bool = False) -> Layout:
        """Groups of (out, in * kernel); a transposed convolution stores (in, out, kernel).

        A group of one row is a vector: such groups are taken together as one matrix.

        >>> layer = nn.Conv2d(4, 6, 3, groups=2)
        >>> Layout.convolution((6, 2, 3, 3), groups=2).matrix(layer.weight).shape
        torch.Size([2, 3, 18])
        """
        if groups == 1 and not transposed:
            return cls.kernel(shape)
        first, second, *kernel = shape
        size = prod(kernel)
        grid: Shape = (groups, first // groups, second * size)
        order: Shape = (0, 1, 2)
        if transposed:
            grid, order = (groups, first // groups, second, size), (0, 2, 1, 3)
        columns = len(grid) - 2
        has_matrices = groups > 1 and grid[order[1]] > 1
        parts = numbered(groups) if has_matrices else ()
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

    def rows(self, label: str) -> list[int]:
        """The rows of the whole matrix that make up a part.

        >>> heads = Layout((2, 3, 1, 4), (0, 1, 2, 3), (("k", (ALL, 1)),))
        >>> heads.rows("k")
        [1, 4]
        """
        sizes = [self.grid[i] for i in self.order[: -self.columns]]
        numbers = torch.arange(prod(sizes)).reshape(sizes)
        return [int(row) for row in numbers[dict(self.parts)[label]].flatten()]

    @property
    def sides(self) -> tuple[str, ...]:
        """What every dimension of the tensor itself counts: rows, columns or matrices of a stack.

        >>> Layout.convolution((6, 4, 3, 3)).sides, Layout.transposed((4, 6)).sides
        (('rows', 'columns', 'columns', 'columns'), ('columns', 'rows'))
        """
        shape = self.stored or self.grid
        words = ["stack"] * self.stack + ["rows"] * (len(self.order) - self.stack - self.columns)
        words += ["columns"] * self.columns
        sides = []
        for dimension in range(len(shape)):
            offset = prod(shape[dimension + 1 :])  # of the next entry along this dimension
            axes = (a for a, n in enumerate(self.grid) if offset // prod(self.grid[a + 1 :]) % n)
            sides.append(words[self.order.index(next(axes, 0))])
        return tuple(sides)

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


# --- a tensor and what is around it ---------------------------------------------------------------


@dataclass(frozen=True)
class Surroundings:
    """A tensor's key and shape, and what is known around it."""

    key: str
    shape: Shape
    near: Near = lambda _: None
    owner: nn.Module | None = None
    config: Config = field(default_factory=Config)
    place: str = ""  # where it stands in its file

    @cached_property
    def _kernel_facts(self) -> tuple[int, bool] | None:
        """Groups and transposition of a kernel, where the file has a graph that tells them."""
        known = self._graph("kernels")
        if not isinstance(known, list) or len(known) != 2 or type(known[0]) is not int:
            return None
        return (known[0], known[1] is True) if len(self.shape) > 2 else None

    def _graph(self, what: str) -> Any:
        facts = self.config.content.get(GRAPH_FACTS)
        told = facts.get(what) if isinstance(facts, Mapping) else None
        return told.get(self.place) if isinstance(told, Mapping) else None

    @property
    def is_looked_up(self) -> bool:
        """Whether the graph of its file looks up its rows and does nothing else with it."""
        return len(self.shape) == 2 and self._graph("tables") is True

    @property
    def groups(self) -> int:
        """The groups of a convolution; one where nothing tells."""
        told = self._kernel_facts[0] if self._kernel_facts else getattr(self.owner, "groups", 1)
        return told if type(told) is int and told > 0 and self.shape[0] % told == 0 else 1

    @property
    def is_turned_kernel(self) -> bool:
        """Whether it is the kernel of a transposed convolution, stored (in, out, ...)."""
        if self._kernel_facts:
            return self._kernel_facts[1]
        return getattr(self.owner, "transposed", False) is True

    @cached_property
    def path(self) -> str:
        """The path of the layer, without ``.weight`` and without what an adapter wraps it in."""
        return names.layer(self.key)

    @cached_property
    def leaf(self) -> str:
        """The last part of the layer's path."""
        return self.path.rpartition(".")[2]

    def shape_of(self, leaf: str, layer: str = "") -> Shape | None:
        """The shape of the sibling ``leaf``, or of its weight; None if there is none."""
        stem = self.path.removesuffix(layer or self.leaf)
        ends = ("", ".weight", ".base_layer.weight")
        shapes = (self.near(f"{stem}{leaf}{end}") for end in ends)
        return next((shape for shape in shapes if shape is not None), None)

    def beside(self, leaf: str, layer: str = "") -> Shape:
        """Shape of the sibling ``leaf``, two numbers at least: zeros if there is none."""
        shape = self.shape_of(leaf, layer)
        return shape if shape is not None and len(shape) > 1 else (0, 0)

    @property
    def is_expert(self) -> bool:
        """Whether the name speaks of experts, of which a stack has one matrix each."""
        return re.search(r"expert|moe|_exps$|(^|\.)(in|out)put_linear$", self.path) is not None

    @property
    def is_kernel(self) -> bool:
        """Whether the tensor is the kernel of a convolution, or acts like one: (out, in, ...).

        Any ``weight`` of more than two dimensions that is no stack of experts does. A module of
        a class of one's own may hold a stack of matrices (..., out, in) instead: three dimensions
        are one unless the class speaks of a convolution.
        """
        if self._kernel_facts:
            return True
        if isinstance(self.owner, _ConvNd):
            return self.key.rpartition(".")[2].startswith("weight")
        if len(self.shape) < 3 or self.is_expert:
            return False
        kind = type(self.owner)
        is_own = self.owner is not None and not kind.__module__.startswith("torch.")
        speaks = hasattr(self.owner, "kernel_size") or "conv" in kind.__name__.lower()
        if is_own and (speaks or len(self.shape) == 3):
            return speaks
        return self.key.rpartition(".")[2] == "weight"


def _is_conv1d(module: nn.Module, shape: Shape) -> bool:
    """Whether a module is GPT-2's ``Conv1D``, which stores its matrix (in, out)."""
    return len(shape) == 2 and any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


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


def layout_of(tensor: Surroundings) -> Layout:
    """The layout of a tensor with two or more dimensions.

    >>> layout_of(Surroundings("attn.qkv.weight", (12, 4))).parts[1]
    ('k', (slice(4, 8, None),))
    >>> layout_of(Surroundings("conv.weight", (8, 3, 5, 5))).grid
    (8, 75)
    >>> layout_of(Surroundings("mlp.experts.w1", (4, 8, 2))).parts[3]
    ('3', (3,))
    """
    layout = _deep(tensor) if len(tensor.shape) > 2 else _flat(tensor)
    return layout if layout.grid == tensor.shape else replace(layout, stored=tensor.shape)


def _flat(tensor: Surroundings) -> Layout:
    """The layout of a tensor with two dimensions, by the first rule that knows its layer."""
    rules = (
        *(_recurrent_gates, _interleaved_heads, _chatglm_heads, _jetmoe_heads, _joined_heads),
        *(_gated_queries, _latent_heads, _delta_rule, _state_space, _gated, _flat_experts),
    )
    for rule in rules:
        if layout := rule(tensor):
            return layout
    return _two_dimensional(tensor)


def _two_dimensional(tensor: Surroundings, *parts: tuple[str, Index]) -> Layout:
    return Layout(tensor.shape, (1, 0) if _is_transposed(tensor) else (0, 1), parts)


def _below_one_another(tensor: Surroundings, sizes: Mapping[str, int]) -> Layout:
    """Parts with these numbers of rows, one below another."""
    return _two_dimensional(tensor, *_slices(sizes))


def _slices(sizes: Mapping[str, int]) -> Parts:
    ends = list(accumulate(sizes.values(), initial=0))
    return tuple(
        (label, (slice(a, b),)) for label, (a, b) in zip(sizes, pairwise(ends), strict=True)
    )


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


def _chatglm_heads(tensor: Surroundings) -> Layout | None:
    """Queries, then the keys and the values that groups of them share."""
    is_chatglm = tensor.leaf == "query_key_value" and "chatglm" in tensor.config.types
    heads = _heads(tensor) if is_chatglm and tensor.config.all("multi_query_group_num") else None
    if heads is None:
        return None
    sizes = {"q": heads.queries * heads.size} | dict.fromkeys("kv", heads.keys * heads.size)
    return _below_one_another(tensor, sizes)


def _jetmoe_heads(tensor: Surroundings) -> Layout | None:
    """Keys, then values, as wide as the queries of an expert beside them."""
    half, queries = tensor.shape[0] // 2, tensor.beside("experts.input_linear")[1]
    is_jetmoe = tensor.leaf == "kv_proj" and tensor.shape[0] == 2 * queries > 0
    return _below_one_another(tensor, dict.fromkeys("kv", half)) if is_jetmoe else None


def _joined_heads(tensor: Surroundings) -> Layout | None:
    """Queries, keys and values of all heads, one below another."""
    leaf = tensor.leaf
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

    GPT-NeoX, BLOOM, Falcon, Megatron, InternLM2 and DeBERTa store them so. Only a config tells the
    number of heads.
    """
    leaf, types = tensor.leaf, tensor.config.types
    rows, columns = tensor.shape
    if leaf == "qkv_proj" and "codegen" in types and rows == 3 * columns and rows % 12 == 0:
        # four pieces for as many of the machines that trained it, and values before keys
        indices = [(label, (ALL, i)) for label, i in (("q", 0), ("k", 2), ("v", 1))]
        return Layout((4, 3, rows // 12, columns), (0, 1, 2, 3), tuple(indices))
    is_chatglm = "chatglm" in types and tensor.config.all("multi_query_group_num")
    is_starcoder = leaf == "c_attn" and "gpt_bigcode" in types
    is_starcoder = is_starcoder and not tensor.config.all("multi_query")
    is_deberta = leaf == "in_proj" and tensor.shape_of("q_bias") == (rows // 3,)
    if is_chatglm or not (is_starcoder or is_deberta or leaf in ("query_key_value", "wqkv")):
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


def _gated_queries(tensor: Surroundings) -> Layout | None:
    """Each head's queries with the gate of its output below them, as Qwen3-Next has them.

    >>> near = {"attn.o_proj.weight": (4, 6), "attn.q_norm.weight": (3,)}.get
    >>> _gated_queries(Surroundings("attn.q_proj.weight", (12, 4), near)).grid
    (2, 2, 3, 4)
    """
    rows, columns = tensor.shape
    if tensor.leaf != "q_proj" or rows == 0 or rows != 2 * tensor.beside("o_proj")[1]:
        return None
    norm = tensor.shape_of("q_norm") or ()
    known = tensor.config.heads(tensor.key, lambda heads: 2 * heads.queries * heads.size == rows)
    size = norm[0] if len(norm) == 1 else known.size if known else 0
    if not size or rows % (2 * size):
        return None
    parts: Parts = (("q", (ALL, 0)), ("gate", (ALL, 1)))
    heads = rows // (2 * size)
    return Layout((heads, 2, size, columns), (0, 1, 2, 3), parts, heads=heads)


def _latent_heads(tensor: Surroundings) -> Layout | None:
    """The projections of DeepSeek's latent attention, in which a part of each head is rotated.

    A head's queries are rows without rotation (``nope``) and rows with it (``rope``). Its keys
    without rotation and its values come from a latent vector; the rotated keys, which all heads
    share, come beside that vector. The shapes of all projections together tell every size.
    """
    rows, columns = tensor.shape
    is_query = tensor.leaf == "q_b_proj" or (
        tensor.leaf == "q_proj" and not tensor.beside("q_b_proj")[0]
    )
    if not (is_query or tensor.leaf in ("kv_a_proj_with_mqa", "kv_b_proj")):
        return None
    down, latent = tensor.beside("kv_a_proj_with_mqa")[0], tensor.beside("kv_b_proj")[1]
    written, values = tensor.beside("kv_b_proj")[0], tensor.beside("o_proj")[1]
    queries = tensor.beside("q_b_proj")[0] or tensor.beside("q_proj")[0]
    rotated = down - latent  # rows of one head
    heads, rest = divmod(queries - (written - values), rotated) if rotated > 0 else (0, 1)
    if rest or heads < 1 or not 0 < values < written or written % heads or values % heads:
        return None
    if tensor.leaf == "kv_a_proj_with_mqa":
        return _below_one_another(tensor, {"latent": latent, "rope": rotated})
    first, second = ("nope", "rope") if is_query else ("k", "v")
    size, still = rows // heads, (written - values) // heads
    parts: Parts = ((first, (ALL, slice(still))), (second, (ALL, slice(still, size))))
    return Layout((heads, size, columns), (0, 1, 2), parts, heads=heads)


def _delta_rule(tensor: Surroundings) -> Layout | None:
    """Queries, keys, values and gates (z) of linear attention by the delta rule (Qwen)."""
    rows, columns = tensor.shape
    values = tensor.beside("out_proj")[1]
    keys, rest = divmod(rows - values, 2)
    channels = (tensor.shape_of("conv1d") or (0,))[0]
    if tensor.leaf == "in_proj_qkv" and rows == channels > values > 0 == rest:
        return _below_one_another(tensor, {"q": keys, "k": keys, "v": values})
    counts = [n for n in tensor.config.all("linear_num_key_heads") if type(n) is int and n > 0]
    groups = counts[0] if counts else 0
    if tensor.leaf not in ("in_proj_qkvz", "in_proj_ba") or not groups or rows % (2 * groups):
        return None
    half = rows // 2 // groups
    sizes = {"b": half, "a": half}
    if tensor.leaf == "in_proj_qkvz":
        keys, v = (rows // 2 - values) // groups, values // groups
        sizes = {"q": keys, "k": keys, "v": v, "z": v}
    if groups * sum(sizes.values()) != rows or min(sizes.values()) < 1:
        return None
    parts = tuple((label, (ALL, *index)) for label, index in _slices(sizes))
    return Layout((groups, rows // groups, columns), (0, 1, 2), parts)


def _state_space(tensor: Surroundings) -> Layout | None:
    """The projections of Mamba (input x, gate z, then dt, B, C) and Mamba-2 (z, x, B, C, dt)."""
    rows, columns = tensor.shape
    if tensor.leaf == "x_proj":
        rank, state = tensor.beside("dt_proj")[1], tensor.beside("A_log")[1]
        is_certain = 0 < rank == rows - 2 * state < rows
        sizes = {"dt": rank, "B": state, "C": state}
        return _below_one_another(tensor, sizes) if is_certain else None
    inner, channels = tensor.beside("out_proj")[1], (tensor.shape_of("conv1d") or (0,))[0]
    if tensor.leaf != "in_proj" or not 0 < inner <= channels:
        return None
    if rows == 2 * inner == 2 * channels:
        if tensor.shape_of("x_proj_weight"):  # Zamba has x and z in turn
            return Layout((inner, 2, columns), (0, 1, 2), (("x", (ALL, 0)), ("z", (ALL, 1))))
        is_mamba = tensor.shape_of("x_proj") is not None
        return _below_one_another(tensor, {"x": inner, "z": inner}) if is_mamba else None
    heads, (state, rest) = rows - inner - channels, divmod(channels - inner, 2)
    if heads < 1 or state < 1 or rest or tensor.shape_of("dt_bias") != (heads,):
        return None
    return _below_one_another(tensor, {"z": inner, "x": inner, "B": state, "C": state, "dt": heads})


def _gated(tensor: Surroundings) -> Layout | None:
    """Gate and up, one below the other."""
    for leaf, (sibling, order) in _GATED.items():
        if not f".{tensor.path}".endswith(f".{leaf}"):
            continue
        rows, columns = tensor.shape
        beside = tensor.beside(sibling, leaf)
        is_certain = rows == 2 * beside[1] or (leaf == "gate_up_proj" and beside == (0, 0))
        if leaf == "fc1":
            words = [value for key in _ACTIVATIONS for value in tensor.config.all(key)]
            is_certain = is_certain and any("glu" in str(word).lower() for word in words)
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
    return Layout(grid, (0, 2, 1) if match[1] == "w2" else (0, 1, 2), numbered(count), stack=1)


# --- three and more dimensions --------------------------------------------------------------------


def _deep(tensor: Surroundings) -> Layout:
    """Kernels, tables, and stacks of matrices."""
    first, *rest = tensor.shape
    if tensor.is_kernel:
        return Layout.convolution(tensor.shape, tensor.groups, tensor.is_turned_kernel)
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
        return Layout((count, a, b), order, numbered(count) if length > 1 else (), stack=1)
    if not transposed:
        return Layout((count, 2, a // 2, b), (0, 1, 2, 3), _gated_parts(count, 2), stack=1)
    if "gpt_oss" in tensor.config.types or tensor.near(f"{tensor.key}_bias"):
        # gate and up in turn
        return Layout((count, a, b // 2, 2), (0, 2, 3, 1), _gated_parts(count, 3), stack=1)
    return Layout((count, a, 2, b // 2), (0, 2, 3, 1), _gated_parts(count, 2), stack=1)


def _gated_parts(count: int, at: int) -> Parts:
    """Gate and up of every expert: halves of its grid, or every other row of it."""
    between: Index = (ALL,) * (at - 2)
    halves = ((0, "gate"), (1, "up"))
    return tuple((f"{i}.{label}", (i, *between, j)) for i in range(count) for j, label in halves)


def _is_gated_stack(tensor: Surroundings) -> bool:
    return bool(re.search(r"(^|\.)(gate_up_proj|input_linear)$", tensor.path))


def _is_transposed_stack(tensor: Surroundings) -> bool | None:
    """Whether the matrices of a stack are stored (in, out); None if gate and up may be either."""
    leaf = tensor.leaf
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
