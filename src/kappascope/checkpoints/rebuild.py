"""From the value of a pickle to a tree of tensors: mappings with text for keys, and leaves.

A few functions that pickled tensors ask for are known here as recipes: which view of which storage.
These, and no function of a file's own choice, make values while a pickle is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from kappascope.checkpoints import torchao
from kappascope.checkpoints.codes import CodedLocation
from kappascope.checkpoints.formats import AGAIN, SAVE, Malformed, quoted
from kappascope.checkpoints.locations import FileContents, StorageLocation, TensorLocation, Tree
from kappascope.checkpoints.pickles import (
    SCRIPT,
    Builders,
    DictItems,
    ForeignObject,
    GlobalName,
    LoadedPickle,
    build_value,
    forbidden,
)
from kappascope.model.skipped import Reason, ReasonKind, unreadable
from kappascope.model.tensors import REPEATED, Cycles, claimed

_MOST_NODES = 1_000_000  # of the tree: 100,000 tensors with their optimizer's state, twice
_MOST_ATTRIBUTES = 64  # of a tensor
_DEEPEST = 32  # checkpoints nest two or three levels; one that contains itself never ends


@dataclass(frozen=True, slots=True)
class PickledStorage:
    """Numbers side by side, to be found by their key."""

    key: str
    dtype: torch.dtype | None  # None: bytes, of a dtype that its tensor tells
    count: int
    shift: int = 0  # of a view of another storage, as torch wrote them once


@dataclass(frozen=True, slots=True)
class PickledTensor:
    """A tensor: some numbers of a storage."""

    storage: PickledStorage
    dtype: torch.dtype | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PickledSubclass:
    """A tensor of a class of its own: the name of the class, and the attributes of the object."""

    kind: str
    attributes: DictItems


_STORAGES = {
    "Float": torch.float32,
    "Double": torch.float64,
    "Half": torch.float16,
    "BFloat16": torch.bfloat16,
    "Long": torch.int64,
    "Int": torch.int32,
    "Short": torch.int16,
    "Char": torch.int8,
    "Byte": torch.uint8,
    "Bool": torch.bool,
    "ComplexFloat": torch.complex64,
    "ComplexDouble": torch.complex128,
    "QInt8": torch.int8,  # the codes of quantized numbers, which no view makes readable
    "QUInt8": torch.uint8,
    "QInt32": torch.int32,
    "QUInt4x2": torch.uint8,
    "QUInt2x4": torch.uint8,
}
# Formats without a storage of their own come after those that have one.
_NEWER = "uint16 uint32 uint64 complex32 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz"
DTYPES = {str(d): d for d in _STORAGES.values()}
DTYPES |= {f"torch.{name}": getattr(torch, name) for name in (*_NEWER.split(), "float8_e8m0fnu")}


def pickled_storage(identity: Any) -> Any:
    """Return what a persistent id stands for: a storage, by its type, key, device and size.

    >>> pickled_storage(("storage", GlobalName("torch.HalfStorage"), "0", "cuda:0", 6))
    PickledStorage(key='0', dtype=torch.float16, count=6, shift=0)
    """
    match identity[:6] if isinstance(identity, tuple) else None:
        case ("storage", GlobalName(text=kind), str(key), str(), int(count), *rest) if count >= 0:
            form = re.fullmatch(r"torch\.(cuda\.|storage\.)?_?(\w+)Storage", kind)
            if not form or form[2] not in {*_STORAGES, "Untyped"}:
                raise Malformed(f"a storage of unknown type {quoted(kind)}", SAVE)
            dtype = _STORAGES.get(form[2])
            match rest:
                case [(_, int(shift), _)]:
                    return PickledStorage(key, dtype, count, shift)
            return PickledStorage(key, dtype, count)
        case ("module", it, *_):  # a class with its source, which is of no use here
            return it
    raise ValueError("no such storage")


def _view(storage: Any, offset: Any, shape: Any, stride: Any, *more: Any) -> Any:
    if not isinstance(storage, PickledStorage) or not isinstance(offset, int):
        return unreadable("not a view of a storage")
    if not (isinstance(shape, tuple) and isinstance(stride, tuple)):
        return unreadable("a shape that is no tuple")
    if more[2:] and more[2]:  # after requires_grad and hooks; in practice it is one of these two
        return unreadable("a conjugate or negative view")
    return PickledTensor(storage, storage.dtype, offset + storage.shift, shape, stride)


def _view_as(*given: Any) -> Any:
    """Version 3: the seventh argument is the dtype."""
    view, dtype = _view(*given[:6], *given[7:]), given[6]
    known = DTYPES.get(dtype.text) if isinstance(dtype, GlobalName) else None
    if known is None or not isinstance(view, PickledTensor):
        return view if known else unreadable(f"dtype {quoted(dtype)}")
    return PickledTensor(view.storage, known, view.offset, view.shape, view.stride)


def _unread(reason: str) -> Callable[..., Reason]:
    return lambda *given: unreadable(reason)


def _sparse(layout: Any, *given: Any) -> Reason:
    return unreadable(f"layout {layout[:40]}" if isinstance(layout, str) else "sparse layout")


def _pairs(*given: Any) -> DictItems:
    """Return an ordered dict; its items are taken, lest copies of one list fill the memory."""
    (items,) = given or ([],)
    if not isinstance(items, list):
        raise ValueError("not a list of pairs")
    pairs = DictItems((key, value) for key, value in items)
    items.clear()
    return pairs


def _items(items: Any = ()) -> Any:
    if not isinstance(items, list | tuple):
        raise ValueError("not a sequence")
    return items


def _text(*given: Any) -> str:
    if not all(
        isinstance(part, str) or (type(part) is int and part in range(256)) for part in given
    ):
        raise ValueError("not a device or layout")
    return ":".join(str(part)[:40] for part in given)


def _typed(function: Any, kind: Any, given: Any, *state: Any) -> Any:
    """Return a tensor with attributes, or of a class of its own."""
    if not (
        isinstance(function, GlobalName)
        and isinstance(kind, GlobalName)
        and isinstance(given, tuple)
    ):
        raise ValueError("not a tensor of a type")
    attributes = state[0] if state else None
    if function.text == _WRAPPER and kind.text.startswith(torchao.TORCHAO):
        items = attributes if isinstance(attributes, DictItems) else DictItems()
        return PickledSubclass(kind.text, items)
    if function.text not in _TENSORS:
        raise forbidden(function.text)
    if kind.text not in ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"):
        return unreadable(f"tensor subclass {kind.text}")
    return build_value(_TENSORS, function.text, given)


_WRAPPER = "torch._utils._rebuild_wrapper_subclass"
_TENSORS: Builders = {
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _view_as,
    "torch._utils._rebuild_parameter": lambda data, *more: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *more: data,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_qtensor": _unread("quantized"),
    "torch._utils._rebuild_nested_tensor": _unread("nested"),
    "torch._utils._rebuild_meta_tensor_no_storage": _unread("meta: saved without values"),
    _WRAPPER: lambda kind, *more: unreadable(f"tensor subclass {kind.text}"),
    "torch._utils._rebuild_xla_tensor": _unread("a tensor of an XLA device"),
    "torch._utils._rebuild_device_tensor_from_numpy": _unread("a tensor of a foreign device"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda data, *more: data,
}
_PLACES = ("builtins", "__builtin__")  # the second in Python 2, and in protocols of its time
_PLAIN: Builders = {
    "dict": _pairs,
    **dict.fromkeys(("set", "frozenset", "list", "tuple"), _items),
    **dict.fromkeys(("bytes", "bytearray", "str"), lambda text="", *encoding: text),
    **dict.fromkeys(("int", "float", "complex", "slice", "range"), lambda *given: given),
}
_JIT = "build_intlist build_tensorlist build_doublelist build_boollist restore_type_tag"
BUILDERS: Builders = {
    **_TENSORS,
    "collections.OrderedDict": _pairs,
    "collections.defaultdict": lambda *given: DictItems(),
    **{f"{module}.{name}": build for module in _PLACES for name, build in _PLAIN.items()},
    "torch.Size": _items,
    **{f"torch.jit._pickle.{name}": lambda value, *kind: value for name in _JIT.split()},
    "torch.device": _text,
    "_codecs.encode": lambda text, *encoding: text,  # how protocol 2 writes bytes
    "torch.serialization._get_layout": _text,
    "copyreg._reconstructor": lambda kind, *more: ForeignObject(kind.text),
    "copy_reg._reconstructor": lambda kind, *more: ForeignObject(kind.text),
    "copyreg.__newobj__": lambda kind, *more: ForeignObject(kind.text, more),
}


# --- the tree -------------------------------------------------------------------------------------


@dataclass
class TreeBuilder:
    """Turn what a pickle holds into a tree, node by node within a budget.

    >>> storage = PickledStorage("0", torch.float32, 4)
    >>> items = DictItems([("w", PickledTensor(storage, torch.float32, 0, (2, 2), (2, 1)))])
    >>> builder = TreeBuilder(lambda storage: "its storage is lost")
    >>> builder.build(LoadedPickle(items, 0, {})).tree
    {'w': 'its storage is lost'}
    """

    locate: Callable[
        [PickledStorage], StorageLocation | str
    ]  # a storage in its file, or why it is not there
    kinds: dict[str, bool] = field(default_factory=dict)
    plain: dict[int, bool] = field(default_factory=dict)  # sequences by id: numbers and texts only
    cycles: Cycles = field(default_factory=Cycles)
    decoded: list[str] = field(default_factory=list)  # the classes of tensors of torchao
    nodes: int = 0
    tensors: int = 0

    def build(self, loaded: LoadedPickle) -> FileContents:
        """Return the tree; refused if there is no tensor in it."""
        self.kinds = dict.fromkeys(loaded.asked, False)
        tree = self._node(loaded.value, 0)
        if not self.tensors:
            asked = ", ".join([quoted(kind) for kind in self.kinds][:2])
            raise Malformed(f"holds no tensors{'; it asks for ' if asked else ''}{asked}", SAVE)
        if (
            self.decoded
        ):  # what its tensors ask for beside their classes is how to compute with them
            own = (kind for kind in self.kinds if kind.startswith(torchao.TORCHAO))
            self.kinds = {kind: self.kinds[kind] for kind in self.kinds.keys() - set(own)}
        return FileContents(tree if isinstance(tree, dict) else {"0": tree}, self.kinds)

    def _node(self, value: Any, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise Malformed(f"more than {_MOST_NODES} values beside one another", SAVE)
        if isinstance(value, PickledTensor | PickledSubclass | Reason):
            self.tensors += 1
            if isinstance(value, PickledSubclass):
                return self._subclass(value)
            return self._leaf(value) if isinstance(value, PickledTensor) else value
        if isinstance(value, DictItems | list | tuple | ForeignObject):
            if self.cycles.repeats(value):
                return REPEATED
            if depth == _DEEPEST:
                return unreadable(f"nested more than {_DEEPEST} deep")
            with self.cycles.within(value):
                return self._branch(value, depth)
        return value.text if isinstance(value, GlobalName) else value

    def _branch(self, value: Any, depth: int) -> Any:
        if isinstance(value, ForeignObject):
            return self._object(value, depth)
        if isinstance(value, DictItems):
            return self._mapping(value, depth)
        if id(value) not in self.plain:
            self.plain[id(value)] = all(isinstance(item, _LEAF_TYPES) for item in value)
        return value if self.plain[id(value)] else self._mapping(enumerate(value), depth)

    def _mapping(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> Tree:
        tree: Tree = {}
        used, keys = set[str](), set[tuple[type, str]]()
        for key, value in pairs:
            label = _label(key, len(tree))
            if (type(key), label) in keys:
                raise Malformed(f"duplicate name {quoted(label)}", AGAIN)
            keys.add((type(key), label))
            tree[claimed(label, used)] = self._node(value, depth + 1)  # 7 and "7" are two keys
        return tree

    def _object(self, it: ForeignObject, depth: int) -> Any:
        """Return the tensors that an object of a foreign class keeps, if there are any."""
        before = self.tensors
        states = it.state[:2] if isinstance(it.state, tuple) else (it.state,)  # dict and slots
        attributes = [state for state in states if isinstance(state, DictItems)]
        parts = (*attributes, it.pairs, enumerate(it.items))
        tree = _side_by_side(self._mapping(pairs, depth) for pairs in parts)
        holds = self.tensors > before
        if it.kind.startswith(f"{SCRIPT}."):  # its attributes are all there is
            return tree
        self.kinds[it.kind] = holds or self.kinds.get(it.kind, False)
        if holds:
            return _module(tree)
        return Reason(ReasonKind.FOREIGN_OBJECT, f"object of class {it.kind}")

    def _subclass(self, it: PickledSubclass) -> CodedLocation | Reason:
        """Return the weight that an object of torchao stands for."""
        facts = {key: value for key, value in it.attributes[:_MOST_ATTRIBUTES] if type(key) is str}
        leaves = {k: self._leaf(it) for k, it in facts.items() if isinstance(it, PickledTensor)}
        parts = {k: leaf for k, leaf in leaves.items() if isinstance(leaf, TensorLocation)}
        weight = torchao.weight_of(it.kind, parts, facts) if len(parts) == len(leaves) else None
        if weight is None:
            return unreadable(f"tensor subclass {it.kind}")
        self.decoded.append(it.kind)
        return weight

    def _leaf(self, view: PickledTensor) -> TensorLocation | Reason:
        location, storage = self.locate(view.storage), view.storage
        if isinstance(location, str):
            return unreadable(location)
        said = storage.count * (storage.dtype.itemsize if storage.dtype else 1)
        if said != location.size:
            return unreadable(f"its storage has {location.size} bytes, its pickle says {said}")
        piece = TensorLocation(
            location, view.dtype or torch.uint8, view.shape, view.stride, view.offset
        )
        fault = piece.fault()
        return unreadable(fault) if fault else piece


_LEAF_TYPES = (str, bytes, int, float, type(None))


def _label(key: Any, index: int) -> str:
    if isinstance(key, str | GlobalName):
        return key if isinstance(key, str) else key.text
    if isinstance(key, int) and abs(key) < 1 << 63:  # longer ones may be too long to print
        return str(key)
    return f"{type(key).__name__} {index}"


def _module(tree: Tree) -> Tree:
    """Return what an ``nn.Module`` keeps, in the places where its state dict has it."""
    if not {"_parameters", "_buffers", "_modules"} <= tree.keys():
        return tree
    parts = [tree[part] for part in ("_parameters", "_buffers", "_modules")]
    kept = _side_by_side(part for part in parts if isinstance(part, dict))
    return {key: value for key, value in kept.items() if value is not None}  # a bias may be none


def _side_by_side(parts: Iterable[Tree]) -> Tree:
    """Return several mappings as one, in which none hides another of the same name."""
    used = set[str]()
    return {claimed(name, used): node for part in parts for name, node in part.items()}
