"""What a model or a checkpoint stores: every tensor with its name, and why it is no matrix if so.

The walk is lazy and takes each tensor from its mapping when its turn comes. Weights made of other
tensors (a parametrization, weight normalization, pruning) come in their place, before those.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kappascope.model.parametrized import attempt, composed, made_weights, tensors
from kappascope.model.skipped import Reason, ReasonKind, acts_beside, no_weight, unreadable
from kappascope.refusal import Refusal

Contents: TypeAlias = nn.Module | Mapping[Any, Any]
Path: TypeAlias = tuple[Any, ...]  # keys into nested mappings; a module is a mapping of its weights
Read: TypeAlias = Callable[[Path], Tensor]
Firsts: TypeAlias = dict[Hashable, tuple[str, Callable[[], Any]]]  # a name, and what it named

MODEL_KEYS = {"state_dict", "model_state_dict", "model_state", "model", "module"}
LONGEST = 1 << 22  # numbers of a vector: a bias has 300,000 at most, a flattened model billions
DEEPEST = 8  # checkpoints nest two or three levels; one that contains itself never ends

REPEATED = no_weight("leads back to what is read elsewhere")
OPTIMIZER = Reason(ReasonKind.OPTIMIZER_STATE, "optimizer state")
SCALAR, VECTOR = acts_beside("scalar"), acts_beside("one-dimensional")


@dataclass(frozen=True, eq=False)
class Stored:
    """One stored tensor and its surroundings."""

    key: str
    value: Any
    near: Callable[[str], Any]  # what another key holds, or None
    at: str  # what precedes the key in the name
    path: Path = ()
    reason: Reason | None = None  # to skip it, known without a look at the tensor
    owner: nn.Module | None = None
    around: nn.Module | None = None  # what holds the owner
    made: bool = False  # of other tensors
    further: bool = False  # whether it goes through more than the first parametrization
    halves: tuple[Stored, ...] = ()  # these, if it is to be made of two
    factor: str = ""  # what the second of them is

    @property
    def name(self) -> str:
        """The key without what wraps it, unless another has that name."""
        plain = stripped(self.key)
        taken = plain != self.key and self.near(plain) is not None
        return self.at + (self.key if taken else plain)


def stripped(key: str) -> str:
    """``key`` without what DDP, FSDP and ``torch.compile`` add to it.

    >>> stripped("module._orig_mod.fc.weight")
    'fc.weight'
    """
    key = re.sub(r"(?<![^.])(_orig_mod|_(fsdp|checkpoint)_wrapped_module)\.", "", key)
    return re.sub(r"^(module\.)+", "", key)


def contents(value: Any) -> Contents | None:
    """``value`` as something with tensors in it, or None.

    >>> contents([torch.ones(2)])
    {0: tensor([1., 1.])}
    """
    if isinstance(value, list | tuple) and all(isinstance(item, Tensor) for item in value):
        return dict(enumerate(value))
    return value if isinstance(value, nn.Module | Mapping) else None


@dataclass
class Cycles:
    """Finds containers that lead back to themselves, so that each of them is gone through once.

    What is merely shared may stand in several places, as tied weights do.

    >>> cycles, endless = Cycles(), {}
    >>> with cycles.within(endless):
    ...     cycles.repeats(endless), cycles.repeats({})
    (True, False)
    """

    around: set[int] = field(default_factory=set)  # ids of what is being gone through
    closed: set[int] = field(default_factory=set)  # and of what led back to one of these
    count: int = 0  # how often that was found

    def repeats(self, container: object) -> bool:
        """Whether a container was or will be gone through elsewhere, being part of a cycle."""
        is_repeated = id(container) in self.around or id(container) in self.closed
        self.count += is_repeated
        return is_repeated

    @contextmanager
    def within(self, container: object) -> Iterator[None]:
        """Remember a container while it is gone through, and for good if it leads back."""
        before = self.count
        self.around.add(id(container))
        yield
        self.around.remove(id(container))
        if self.count > before:
            self.closed.add(id(container))


def stored_tensors(source: Contents) -> Iterator[Stored]:
    """Everything stored in ``source``, in its order.

    >>> source = {"model": {"fc.weight": torch.eye(2)}}
    >>> [(stored.name, stored.path) for stored in stored_tensors(source)]
    [('fc.weight', ('model', 'fc.weight'))]
    """
    for stored in _walk(source, "", (), Cycles()):
        yield from _composed(stored)


def _walk(source: Contents, at: str, path: Path, cycles: Cycles) -> Iterator[Stored]:
    if isinstance(source, nn.Module):
        yield from _module(source, at, path)
        return
    with cycles.within(source):
        yield from _mapping(source, at, path, cycles)


def _mapping(source: Mapping[Any, Any], at: str, path: Path, cycles: Cycles) -> Iterator[Stored]:
    keys = {str(key): key for key in source}
    own = OPTIMIZER if {"state", "param_groups"} <= keys.keys() else None
    steps = {match[1] for match in map(_LATER_STEP.match, keys) if match}

    def near(key: str) -> Any:
        return source[keys[key]] if key in keys else None

    for actual in source:
        key, value = str(actual), source[actual]
        inner = contents(value)
        reason = own or _foreign(key, inner, len(path), cycles)
        if inner is None or reason:
            further = key.rpartition(".")[0] in steps
            yield Stored(key, value, near, at, (*path, actual), reason, further=further)
        else:
            deeper = at if key in MODEL_KEYS else f"{at}{key}."
            yield from _walk(inner, deeper, (*path, actual), cycles)


def _foreign(key: str, inner: Contents | None, depth: int, cycles: Cycles) -> Reason | None:
    """Why what a checkpoint contains is not looked into."""
    if not isinstance(inner, Mapping):
        return None
    if key.startswith("optim") or "param_groups" in inner:
        return OPTIMIZER
    if cycles.repeats(inner):
        return REPEATED
    if depth == DEEPEST:
        return unreadable(f"nested more than {DEEPEST} deep")
    return None if inner else no_weight("empty")


# --- modules --------------------------------------------------------------------------------------


def _module(module: nn.Module, at: str, path: Path) -> Iterator[Stored]:
    near = {key: tensor for key, tensor, _ in tensors(module)}.get
    modules = dict(module.named_modules(remove_duplicate=False))
    ingredients: dict[str, Reason] = {}
    for inside, owner in modules.items():
        here = f"{inside}." if inside else ""
        around = modules.get(inside.rpartition(".")[0])
        store = partial(_within, path, here, near=near, at=at, owner=owner, around=around)

        for name, make, keys in made_weights(owner):
            value, reason = attempt(make)
            whole = f"{at}{stripped(here + name)}"  # of which alone a loss is told
            fate = f"a part of {whole}, which could not be made" if reason else f"read as {whole}"
            ingredients |= dict.fromkeys((here + key for key in keys), no_weight(fate))
            yield store(name, value, reason=reason, made=True)
        for name, tensor, buffer in tensors(owner, recurse=False):
            reason = ingredients.get(here + name, buffer)
            yield store(name, tensor, reason=reason)
        if "_packed_params" in vars(owner):  # torch.ao.nn.quantized
            yield store("_packed_params", None, reason=unreadable("quantized and packed"))


def _within(path: Path, here: str, name: str, value: Any, **more: Any) -> Stored:
    return Stored(here + name, value, path=(*path, here + name), **more)


def reader(source: Contents) -> Read:
    """What reads the tensors of ``source`` by their paths, as a checkpoint does from its file.

    >>> reader({"model": {"w": torch.eye(1)}})(("model", "w"))
    tensor([[1.]])
    """

    def read(path: Path) -> Tensor:
        value: Any = source
        for key in path:
            inner = contents(value)
            value = _of_module(inner, key) if isinstance(inner, nn.Module) else (inner or {})[key]
        return gathered(value)

    return read


@torch.no_grad()
def gathered(tensor: Tensor) -> Tensor:
    """The whole of a tensor that FSDP shards, asked for by all processes at once; or the tensor.

    >>> gathered(torch.ones(1))
    tensor([1.])
    """
    gather = getattr(tensor, "full_tensor", None)  # of a DTensor
    return tensor if gather is None else gather()


@torch.no_grad()
def _of_module(module: nn.Module, key: str) -> Tensor:
    path, _, name = key.rpartition(".")
    owner = module.get_submodule(path)
    made = {name: make for name, make, _ in made_weights(owner)}
    kept = {name: tensor for name, tensor, _ in tensors(owner, recurse=False)}
    return made[name]() if name in made else kept[name]


# --- weights made of two halves -------------------------------------------------------------------

# What is stored in place of a weight: by weight normalization, old and new, and by pruning.
_HALVES = (("_v", "_g"), (".original1", ".original0"), ("_orig", "_mask"))
_LORA = re.compile(r"(?P<stem>(.*\.)?)lora_B(?P<end>(\.\w+)*)")  # of a product B A, both kept
_LATER_STEP = re.compile(r"((?:.+\.)?parametrizations\.\w+)\.[1-9]\d*\.")


def _composed(stored: Stored) -> Iterator[Stored]:
    """``stored``, and before it the weight of which it is the larger half.

    Not where a later parametrization changes that weight again, as far as it keeps a tensor of its
    own: one without leaves no trace in a state dict.
    """
    for larger, smaller in _HALVES:
        base = re.sub(f"({re.escape(larger)}|{re.escape(smaller)})$", "", stored.key)
        whole = base.replace("parametrizations.", "")
        if stored.reason or stored.further or base == stored.key:
            continue
        if stored.near(whole) is not None:
            continue
        if "weight" not in whole:  # RWKV has vectors that end in _v and _g
            continue
        halves = [_half(stored, base + end) for end in (larger, smaller)]
        weight = _composition(halves, smaller)
        if weight is None:
            continue
        if stored.key.endswith(larger):
            parts = tuple(halves)
            yield replace(stored, key=whole, value=weight, made=True, halves=parts, factor=smaller)
        stored = replace(stored, reason=no_weight(f"read as {stored.at}{stripped(whole)}"))
    if adapter := _LORA.fullmatch(stored.key):
        halves = [stored, _half(stored, adapter["stem"] + "lora_A" + adapter["end"])]
        product = None if stored.reason else _composition(halves, "lora_A")
        if product is not None:
            key = adapter["stem"] + "lora_BA" + adapter["end"]
            yield replace(stored, key=key, value=product, halves=tuple(halves), factor="lora_A")
    yield stored


def _half(stored: Stored, key: str) -> Stored:
    if key == stored.key:
        return stored
    return replace(stored, key=key, value=stored.near(key), path=(*stored.path[:-1], key))


def _composition(halves: list[Stored], factor: str) -> Tensor | None:
    """A valueless tensor like the weight made of two halves, or None if they do not fit."""
    weight, scale = (half.value for half in halves)
    if objection(weight) or weight.itemsize == 1 or objection(scale) not in (None, SCALAR):
        return None
    first, second = (torch.empty(t.shape, dtype=t.dtype, device="meta") for t in (weight, scale))
    return composed(first, second, factor)


# --- which tensors are matrices -------------------------------------------------------------------


def objection(value: object) -> Reason | None:
    """Why ``value`` is no matrix whose numbers can be read as they lie there.

    >>> objection(torch.ones(3)), objection(7), objection(torch.ones(2, 2))
    ('one-dimensional', 'not a tensor (int)', None)
    """
    if not isinstance(value, Tensor):
        return value if isinstance(value, Reason) else _no_tensor(value)
    return next((reason for applies, reason in _objections(value) if applies), None)


def _no_tensor(value: object) -> Reason:
    """Say why it is not read; an array of another library may well be a weight."""
    reason, dimensions = f"not a tensor ({type(value).__name__})", getattr(value, "ndim", 0)
    is_array = isinstance(dimensions, int) and dimensions > 1
    return unreadable(reason) if is_array else no_weight(reason)


def _objections(tensor: Tensor) -> Iterator[tuple[bool, Reason]]:
    subclass = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    subclass = subclass and not hasattr(tensor, "full_tensor")  # which can be gathered
    yield is_lazy(tensor), unreadable("not initialized yet")
    yield tensor.is_nested, unreadable("nested")
    yield tensor.layout is not torch.strided, unreadable(f"layout {tensor.layout}")
    yield tensor.is_quantized, unreadable(f"quantized ({tensor.dtype})")
    yield subclass, unreadable(f"tensor subclass {type(tensor).__name__}")
    yield _is_integer(tensor.dtype) or tensor.dtype is torch.bool, no_weight(str(tensor.dtype))
    yield not tensor.is_floating_point(), unreadable(str(tensor.dtype))
    # four bits have no arithmetic, and e8m0 holds the scales of other tensors
    yield (
        tensor.dtype in (torch.float4_e2m1fn_x2, torch.float8_e8m0fnu),
        unreadable(str(tensor.dtype)),
    )
    yield tensor.ndim == 0, SCALAR
    yield tensor.ndim == 1, VECTOR
    yield tensor.numel() == 0, no_weight("empty")


def vectors(source: Contents) -> dict[str, Path]:
    """Where the numbers are that act beside matrices: biases, gains, scales, alone or in tables.

    >>> vectors({"fc.weight": torch.eye(2), "fc.bias": torch.ones(2), "steps": torch.tensor(3)})
    {'fc.bias': ('fc.bias',)}
    """
    used = set[str]()
    return {
        claimed(stored.name, used): stored.path
        for stored in stored_tensors(source)
        if stored.reason != OPTIMIZER
        and (reason := objection(stored.value) or bystander(stored))
        and reason.kind is ReasonKind.ACTS_BESIDE
        and stored.value.numel() <= LONGEST
    }


def claimed(name: str, used: set[str]) -> str:
    """``name``, primed if it is in use: no two share one.

    >>> used = {"fc.weight"}
    >>> claimed("fc.weight", used), claimed("fc.weight", used)
    ("fc.weight'", "fc.weight''")
    """
    while name in used:
        name += "'"
    used.add(name)
    return name


def bystander(stored: Stored) -> Reason | None:
    """Why a tensor in the shape of a matrix is none, by the names of those that models keep.

    >>> kept = {"attn.bias": torch.ones(1, 1, 4, 4), "rotary_emb.cos_cached": torch.ones(4, 4)}
    >>> [bystander(stored) for stored in stored_tensors(kept)]
    ['a buffer, the mask of attention', 'a buffer, a table of rotations']
    """
    leaf, shape = stored.key.rpartition(".")[2], tuple(stored.value.shape)
    if leaf == "bias" and len(shape) == 4 and shape[:2] == (1, 1):  # GPT-2
        return no_weight("a buffer, the mask of attention")
    if re.fullmatch("(cos|sin)_cached?", leaf):
        return acts_beside("a buffer, a table of rotations")
    if scales := _SCALES.fullmatch(stored.key):
        codes = [scales["of"] + end for end in _ENDS if _is_code(stored, scales["of"] + end)]
        return acts_beside(f"a buffer, the scales of {codes[0]}") if codes else None
    if "expert" in stored.key and leaf.endswith("bias") and len(shape) == 2:
        return acts_beside("one-dimensional for each expert")
    return None


# Quantized layers, by what GPTQ, AWQ, compressed-tensors, MXFP4, HQQ, AQLM, QuIP#, quanto and
# ComfyUI call them. An integer weight is one, too: only a buffer counts or points, and none of
# those has that name. Codes and their scales have the same name but for its end.
_CODES = re.compile(r"(.*[._])?(q_?weight|weight|packed|blocks|codes|W_q|Qidxs)")
_ENDS = ("", ".weight", ".qweight", "_weight", "_packed", "_blocks", ".codes", ".W_q", "_data",
         "_data._data")  # fmt: skip
_SCALING = ("scale", "scale_inv", "scales", "scale_weight", "absmax", "SCB")
_SHIFTS = r"shift|q?zeros?|zero_points?"
_SCALES = re.compile(rf"(?P<of>.+)[._]({'|'.join(_SCALING)}|{_SHIFTS})")


def coded(stored: Stored) -> Reason | None:
    """Whether whole numbers stand for a weight, to be decoded with scales stored beside them.

    >>> kept = {"up.qweight": torch.ones(2, 2).int(), "position_ids": torch.ones(1, 2).long()}
    >>> [coded(stored) for stored in stored_tensors(kept)]
    ['quantized codes (torch.int32)', None]
    """
    value = stored.value
    if not isinstance(value, Tensor) or not _is_whole(value) or value.ndim < 2:
        return None
    known = _CODES.fullmatch(stored.key) or _scale(stored)
    is_code = known and value.numel()
    return unreadable(f"quantized codes ({value.dtype})") if is_code else None


def _is_whole(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and not tensor.is_quantized
    return plain and _is_integer(tensor.dtype)


def _is_integer(dtype: torch.dtype) -> bool:
    return re.fullmatch(r"torch\.u?int\d+", str(dtype)) is not None


def _is_code(stored: Stored, key: str) -> bool:
    value = stored.near(key)
    return isinstance(value, Tensor) and (_is_whole(value) or value.itemsize == 1)


def needs_scales(stored: Stored) -> Reason | None:
    """Say by which scales, stored beside them, codes of eight bits are to be multiplied, if any.

    >>> eight = torch.ones(2, 2).to(torch.float8_e4m3fn)
    >>> tensors = stored_tensors({"w": eight, "w_scale": torch.ones(())})
    >>> [needs_scales(stored) for stored in tensors if stored.key == "w"]
    ['to be scaled by w_scale']
    """
    scale = _scale(stored) if stored.value.itemsize == 1 else None
    return unreadable(f"to be scaled by {scale}") if scale else None


def _scale(stored: Stored) -> str | None:
    """The key beside a code that holds its scales."""
    stems = [stored.key.removesuffix(end) for end in _ENDS if stored.key.endswith(end)]
    keys = (f"{stem}{sep}{name}" for stem in stems for sep in "._" for name in _SCALING)
    return next((key for key in keys if stored.near(key) is not None), None)


def tie(stored: Stored, name: str, firsts: Firsts) -> str | None:
    """The name, if any, under which the same view of the same memory came before.

    >>> firsts, shared = {}, torch.eye(2)
    >>> [tie(one, one.name, firsts) for one in stored_tensors({"a": shared, "b": shared})]
    [None, 'a']
    """
    it: Any = stored.owner if stored.made and stored.owner is not None else stored.value
    if stored.halves:
        it = stored.halves[0].value
    earlier, named = firsts.get(identity := _identity(stored, it), ("", lambda: None))
    if named() is not None:
        return earlier
    # Weakly, for once it is gone the next tensor of a file may lie in its place, and is no tie.
    firsts[identity] = name, weakref.ref(it)
    return None


def _identity(stored: Stored, it: Any) -> Hashable:
    if isinstance(it, nn.Module):  # a shared layer makes it anew under each of its names
        return id(it), stored.key.rpartition(".")[2]
    return tie_key(it), *(tie_key(half.value) for half in stored.halves[1:])


def refuse_meta(module: nn.Module) -> None:
    """Refuse a module that has parameters on the meta device: they have shapes and no values.

    >>> refuse_meta(nn.Linear(3, 2, device="meta"))
    Traceback (most recent call last):
    kappascope.refusal.Refusal: Linear: 2 of 2 parameters are on the meta device, ...
    """
    parameters = dict(module.named_parameters())
    empty = [name for name, parameter in parameters.items() if parameter.is_meta]
    if empty:
        count = f"{len(empty)} of {len(parameters)} parameters"
        wrong = f"{count} are on the meta device, without values, the first {empty[0]}"
        raise Refusal(2, type(module).__name__, wrong, "load the weights first")


def tie_key(tensor: Tensor) -> Hashable:
    """What tied tensors share and no others: the same view of the same memory.

    >>> shared = torch.eye(2)
    >>> tie_key(shared) == tie_key(shared.detach()), tie_key(shared) == tie_key(shared.T)
    (True, False)
    >>> tie_key(torch.ones(2, 3)) == tie_key(torch.ones(2, 3))
    False
    """
    is_own = type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__
    if is_own or is_lazy(tensor) or tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)  # without an address to compare
    address: Hashable = tensor.data_ptr()
    if tensor.is_meta:  # no address, but a storage that is shared or not
        address = tensor.untyped_storage()._cdata, tensor.storage_offset()
    return address, tensor.shape, tensor.stride(), tensor.dtype, tensor.device
