"""The logical matrices of a model: what it stores, and which matrices that stands for.

A matrix maps inputs (columns) to outputs (rows), as in ``nn.Linear``. A tensor appears whole under
its own name, and the matrices joined in it follow as ``name[part]``:

- a convolution is (out, in / groups * kernel), also a transposed one, which is stored the other way
  round; its groups follow as ``[0]``, ``[1]``, ... unless each is a single row;
- fused q, k and v follow as ``[q]``, ``[k]``, ``[v]`` where name and shape are those of a layout
  that keeps each in one piece (not ``query_key_value``: GPT-NeoX and BLOOM interleave it by head);
- the gates follow as ``[i]``, ``[f]``, ``[g]``, ``[o]`` (LSTM) or ``[r]``, ``[z]``, ``[n]`` (GRU);
- any other (..., a, b) is its matrices below one another, which follow as ``[0]``, ``[1]``, ...

A module tells more than its state dict. Only there are parameters known from buffers, grouped and
transposed convolutions from plain ones, and GPT-2's ``Conv1D``, stored (in, out), from a linear
layer. In a state dict a tensor of three or more dimensions called ``weight`` counts as a kernel
(out, in, ...) unless its name speaks of experts, and a matrix stays as it is stored.

A weight made of other tensors is read as its layer uses it in evaluation mode. A state dict
determines it for weight normalization and pruning; the originals of any other parametrization
appear there under their own names.
"""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.spectral_norm import SpectralNorm

Contents: TypeAlias = nn.Module | Mapping[Any, Any]
_First: TypeAlias = dict[Hashable, tuple[str, Callable[[], Any]]]  # a name, and what it named


class Skipped(NamedTuple):
    """Something stored that is no matrix, and why.

    >>> matrices(nn.Linear(3, 2)).skipped
    (Skipped(name='bias', reason='one-dimensional'),)
    """

    name: str
    reason: str


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
    contents = _contents([source] if isinstance(source, Tensor) else source)
    if contents is None:
        raise TypeError(
            "expected an nn.Module or a mapping from names to tensors, "
            f"got {type(source).__name__}; pass model or model.state_dict()"
        )
    return Matrices(contents)


@dataclass(eq=False)
class Matrices:
    """Pairs of name and matrix, read one at a time and afresh by every iteration.

    A matrix is detached and keeps its dtype; where possible it shares the model's memory.

    >>> dict(Matrices({"module.fc.weight": torch.eye(2, dtype=torch.bfloat16)}))
    {'fc.weight': tensor([[1., 0.], [0., 1.]], dtype=torch.bfloat16)}
    """

    source: Contents
    _skipped: tuple[Skipped, ...] | None = None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        skipped: list[Skipped] = []
        used: set[str] = set()
        first: _First = {}
        for stored in chain.from_iterable(map(_composed, _walk(self.source))):
            name = _claim(stored.name, used)
            if reason := stored.reason or _objection(stored.value) or _scaled(stored):
                skipped.append(Skipped(name, reason))
            elif earlier := _tie(stored, name, first):
                skipped.append(Skipped(name, f"tied to {earlier}"))
            else:
                for label, matrix in _unfolded(stored):
                    yield _claim(f"{name}[{label}]", used) if label else name, matrix
        self._skipped = tuple(skipped)

    @property
    def skipped(self) -> tuple[Skipped, ...]:
        """All that is stored and not among the matrices, known before any iteration, too.

        >>> matrices({"steps": torch.tensor(7), "w": torch.eye(2)}).skipped
        (Skipped(name='steps', reason='torch.int64'),)
        """
        if self._skipped is None:
            for _ in self:
                pass
        return self._skipped or ()


# Where tensors are stored

_MODEL_KEYS = {"state_dict", "model_state_dict", "model_state", "model", "module"}
_DEEPEST = 8  # checkpoints nest two or three levels; one that contains itself never ends


@dataclass(frozen=True, eq=False)
class _Stored:
    """One stored tensor and its surroundings."""

    key: str
    value: Any
    near: Callable[[str], Any]  # what another key holds, or None
    at: str  # what precedes the key in the name
    reason: str | None = None  # to skip it, known without a look at the tensor
    owner: nn.Module | None = None
    made: bool = False  # of other tensors, just now

    @property
    def name(self) -> str:
        plain = _stripped(self.key)
        taken = plain != self.key and self.near(plain) is not None
        return self.at + (self.key if taken else plain)


def _stripped(key: str) -> str:
    """``key`` without what DDP, FSDP and ``torch.compile`` add to it."""
    key = re.sub(r"(?<![^.])(_orig_mod|_(fsdp|checkpoint)_wrapped_module)\.", "", key)
    return re.sub(r"^(module\.)+", "", key)


def _claim(name: str, used: set[str]) -> str:
    """``name``, primed if it is in use: no two matrices share one."""
    while name in used:
        name += "'"
    used.add(name)
    return name


def _contents(value: Any) -> Contents | None:
    if isinstance(value, list | tuple) and all(isinstance(item, Tensor) for item in value):
        return dict(enumerate(value))
    return value if isinstance(value, nn.Module | Mapping) else None


def _walk(source: Contents, at: str = "", depth: int = 0) -> Iterator[_Stored]:
    if isinstance(source, nn.Module):
        yield from _walk_module(source, at)
        return
    keys = {str(key): key for key in source}

    def near(key: str) -> Any:
        return source[keys[key]] if key in keys else None

    for key, value in ((str(key), source[key]) for key in source):
        contents = _contents(value)
        reason = _foreign(key, contents, depth)
        if contents is None or reason:
            yield _Stored(key, value, near, at, reason)
        else:
            yield from _walk(contents, at if key in _MODEL_KEYS else f"{at}{key}.", depth + 1)


def _foreign(key: str, contents: Contents | None, depth: int) -> str | None:
    """Why what a checkpoint contains is not looked into."""
    if not isinstance(contents, Mapping):
        return None
    if key.startswith("optim") or "param_groups" in contents:
        return "optimizer state"
    if depth == _DEEPEST:
        return f"nested more than {_DEEPEST} deep"
    return None if contents else "empty"


def _walk_module(module: nn.Module, at: str) -> Iterator[_Stored]:
    near = {key: tensor for key, tensor, _ in _tensors(module)}.get
    ingredients: dict[str, str] = {}
    for path, owner in module.named_modules(remove_duplicate=False):
        here = f"{path}." if path else ""
        store = partial(_Stored, near=near, at=at, owner=owner)
        for name, read, keys in _makings(owner):
            ingredients |= {here + key: f"read as {at}{_stripped(here + name)}" for key in keys}
            value, reason = _attempt(read)
            yield store(here + name, value, reason=reason, made=True)
        for name, tensor, reason in _tensors(owner, recurse=False):
            yield store(here + name, tensor, reason=ingredients.get(here + name, reason))
        if "_packed_params" in vars(owner):  # torch.ao.nn.quantized
            yield store(f"{here}_packed_params", None, reason="quantized and packed")


def _tensors(module: nn.Module, recurse: bool = True) -> Iterator[tuple[str, Tensor, str | None]]:
    for name, parameter in module.named_parameters(recurse=recurse, remove_duplicate=False):
        yield name, parameter, None
    for name, buffer in module.named_buffers(recurse=recurse, remove_duplicate=False):
        yield name, buffer, "a buffer, not a parameter"


# Weights made of other tensors


def _makings(owner: nn.Module) -> Iterator[tuple[str, Callable[[], Tensor], list[str]]]:
    """Each weight that ``owner`` makes: its name, how to read it without a trace, and of what."""
    # Not getattr: a compiled module passes off its content's parametrizations as its own.
    parametrized = dict(owner.named_children()).get("parametrizations", nn.Module())
    for name, steps in parametrized.named_children():
        if isinstance(steps, ParametrizationList):
            keys = [f"parametrizations.{name}.{key}" for key, *_ in _tensors(steps, recurse=False)]
            yield name, partial(_evaluated, steps), keys
    for hook in owner._forward_pre_hooks.values():
        if isinstance(hook, SpectralNorm):
            read = partial(hook.compute_weight, owner, do_power_iteration=False)
            yield hook.name, read, [f"{hook.name}_{end}" for end in ("orig", "u", "v")]


def _evaluated(steps: ParametrizationList) -> Tensor:
    # A copy, for in training mode spectral_norm moves its vectors and a dropout draws numbers.
    devices = {tensor.device for _, tensor, _ in _tensors(steps) if tensor.is_cuda}
    with torch.random.fork_rng(list(devices)):
        weight: Tensor = copy.deepcopy(steps).eval()()
    return weight


@torch.no_grad()
def _attempt(read: Callable[[], Tensor]) -> tuple[Tensor | None, str | None]:
    try:
        return read(), None
    except Exception as error:  # a stranger's code may raise anything; the rest is still read
        return None, f"could not be made: {error}"


# What is stored in place of a weight: by weight normalization, old and new, and by pruning.
_HALVES = (("_v", "_g"), (".original1", ".original0"), ("_orig", "_mask"))


def _composed(stored: _Stored) -> Iterator[_Stored]:
    """``stored``, and before it the weight of which it is the larger half."""
    for larger, smaller in _HALVES:
        base = re.sub(f"({re.escape(larger)}|{re.escape(smaller)})$", "", stored.key)
        whole = base.replace("parametrizations.", "")
        if stored.reason or base == stored.key or stored.near(whole) is not None:
            continue
        weight = _product(stored.near(base + larger), stored.near(base + smaller), smaller)
        if weight is None or "weight" not in whole:  # RWKV has vectors that end in _v and _g
            continue
        if stored.key.endswith(larger):
            yield replace(stored, key=whole, value=weight, made=True)
        stored = replace(stored, reason=f"read as {stored.at}{_stripped(whole)}")
    yield stored


@torch.no_grad()
def _product(weight: Any, factor: Any, kind: str) -> Tensor | None:
    """The weight made of two halves, or None if they do not fit."""
    if _objection(weight) or weight.itemsize == 1 or _objection(factor) not in (None, "scalar"):
        return None
    if kind == "_mask":
        return weight * factor if factor.shape == weight.shape else None
    ones = [1] * weight.ndim
    lengths = {(*ones[:d], size, *ones[d + 1 :]): d for d, size in enumerate(weight.shape)}
    dim = ({(): -1} | lengths).get(tuple(factor.shape))  # one length, or one for each index of dim
    return None if dim is None else weight * (factor / torch.norm_except_dim(weight, 2, dim))


# Which tensors are matrices


def _objection(value: object) -> str | None:
    """Why ``value`` is no matrix whose numbers can be read as they lie there."""
    if not isinstance(value, Tensor):
        return f"not a tensor ({type(value).__name__})"
    return next((reason for applies, reason in _objections(value) if applies), None)


def _objections(tensor: Tensor) -> Iterator[tuple[bool, str]]:
    subclass = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    yield is_lazy(tensor), "not initialized yet"
    yield tensor.is_nested, "nested"
    yield tensor.layout is not torch.strided, f"layout {tensor.layout}"
    yield tensor.is_quantized, f"quantized ({tensor.dtype})"
    yield subclass, f"tensor subclass {type(tensor).__name__}"
    yield tensor.is_meta, "on the meta device, without values"
    yield not tensor.is_floating_point(), str(tensor.dtype)
    # four bits have no arithmetic, and e8m0 holds the scales of other tensors
    yield tensor.dtype in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu), str(tensor.dtype)
    yield tensor.ndim == 0, "scalar"
    yield tensor.ndim == 1, "one-dimensional"
    yield tensor.numel() == 0, "empty"


def _scaled(stored: _Stored) -> str | None:
    """Eight bits are often to be multiplied, block by block, with scales stored beside them."""
    ends = ("_scale_inv", "_scale") if stored.value.itemsize == 1 else ()
    keys = [stored.key + end for end in ends if stored.near(stored.key + end) is not None]
    return f"to be scaled by {keys[0]}" if keys else None


def _tie(stored: _Stored, name: str, first: _First) -> str | None:
    """The name, if any, under which the same view of the same memory came before."""
    it, owner = stored.value, stored.owner
    if stored.made and owner is not None:  # a shared layer makes it anew under each of its names
        identity: Hashable = (id(owner), stored.key.rpartition(".")[2])
        it = owner
    else:
        identity = (it.data_ptr(), it.shape, it.stride(), it.dtype, it.device)
    earlier, named = first.get(identity, ("", lambda: None))
    if named() is not None:
        return earlier
    # Weakly, for once it is gone the next tensor of a file may lie in its place, and is no tie.
    first[identity] = name, weakref.ref(it)
    return None


# How a tensor becomes matrices

# Layers that hold q, k and v below one another, each with the layer that follows attention: this
# one is as wide as q, which tells where k and v begin if they are narrower than q.
_FUSED = {
    "in_proj_weight": "out_proj",  # torch
    "c_attn": "c_proj",  # GPT-2
    "qkv": "proj",  # timm, SAM
    "Wqkv": "out_proj",  # MPT, DBRX
    "W_pack": "o_proj",  # Baichuan
    "qkv_proj": "o_proj",  # Phi-3
}


def _unfolded(stored: _Stored) -> Iterator[tuple[str, Tensor]]:
    """The whole tensor as a matrix, then its parts with their labels."""
    tensor, owner = stored.value.detach().as_subclass(Tensor), stored.owner
    if tensor.ndim == 2:
        is_conv1d = any(kind.__name__ == "Conv1D" for kind in type(owner).__mro__)
        matrix = tensor.T if is_conv1d else tensor
        yield "", matrix
        yield from _fused(matrix, stored)
        return
    stack = _stack(tensor, stored.key, owner)
    yield "", stack.flatten(0, 1)
    if len(stack) > 1 and stack.shape[1] > 1:
        yield from ((str(i), matrix) for i, matrix in enumerate(stack))


def _stack(tensor: Tensor, key: str, owner: nn.Module | None) -> Tensor:
    """The matrices of a tensor with three or more dimensions."""
    is_weight = key.rpartition(".")[2] == "weight"
    if is_weight and isinstance(owner, _ConvNd) and len(tensor) % owner.groups == 0:
        groups = tensor.reshape(owner.groups, -1, *tensor.shape[1:])
        return (groups.transpose(1, 2) if owner.transposed else groups).flatten(2)
    if is_weight and not re.search("expert|moe", key):
        return tensor.flatten(1)[None]
    return tensor.flatten(0, -3)


def _fused(matrix: Tensor, stored: _Stored) -> Iterator[tuple[str, Tensor]]:
    """The parts of a matrix that is several in one, by its name and shape."""
    path, _, leaf = stored.key.removesuffix(".weight").rpartition(".")
    (length, width), along = matrix.shape, 0
    if leaf == "c_attn" and width == 3 * length:  # stored (in, out), as GPT-2 does
        length, width, along = width, length, 1

    def shape(key: str) -> tuple[int, ...]:
        beside = stored.near(f"{path}.{key}" if path else key)
        return tuple(beside.shape) if isinstance(beside, Tensor) and beside.ndim == 2 else (0, 0)

    sizes: dict[str, int] = {}
    if gates := re.fullmatch("weight_[ih]h(.*)", leaf):
        hidden = getattr(stored.owner, "hidden_size", 0)
        # the width of what the projection takes in; without a projection, of what the gates do
        hidden = hidden or shape(f"weight_hr{gates[1]}")[1] or shape(f"weight_hh{gates[1]}")[1]
        sizes = dict.fromkeys({3 * hidden: "rzn", 4 * hidden: "ifgo"}.get(length, ""), hidden)
    elif leaf in _FUSED:
        outputs, inputs = shape(f"{_FUSED[leaf]}.weight")
        if outputs or leaf != "qkv_proj":  # CodeGen shuffles its own, which has no o_proj
            sizes = _heads(length, width, outputs, inputs)
    parts = torch.split(matrix, list(sizes.values()), along) if sizes else ()
    return zip(sizes, parts, strict=True)


def _heads(length: int, width: int, outputs: int, inputs: int) -> dict[str, int]:
    """Rows of q, k and v of a layer (length, width) before one (outputs, inputs), if certain."""
    q = inputs if outputs == width else length // 3 if length == 3 * width else 0
    k = (length - q) // 2
    return {"q": q, "k": k, "v": k} if 0 < k <= q and q % k == 0 and q + 2 * k == length else {}
