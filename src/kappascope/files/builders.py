"""The few functions that pickled tensors ask for, as recipes: which view of which storage.

These, and no function of a file's own choice, make values while a pickle is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from kappascope.files.formats import SAVE, Malformed, quoted
from kappascope.files.machine import Builders, Inert, Name, Pairs, built, refused
from kappascope.files.pieces import Unreadable


@dataclass(frozen=True, slots=True)
class Storage:
    """Numbers side by side, to be found by their key."""

    key: str
    dtype: torch.dtype | None  # None: bytes, of a dtype that its tensor tells
    count: int
    shift: int = 0  # of a view of another storage, as torch wrote them once


@dataclass(frozen=True, slots=True)
class View:
    """A tensor: some numbers of a storage."""

    storage: Storage
    dtype: torch.dtype | None
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]


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
_DTYPES = {str(d): d for d in _STORAGES.values()}
_DTYPES |= {f"torch.{name}": getattr(torch, name) for name in (*_NEWER.split(), "float8_e8m0fnu")}


def storage(identity: Any) -> Any:
    """What a persistent id stands for: a storage, by its type, key, device and size.

    >>> storage(("storage", Name("torch.HalfStorage"), "0", "cuda:0", 6))
    Storage(key='0', dtype=torch.float16, count=6, shift=0)
    """
    match identity[:6] if isinstance(identity, tuple) else None:
        case ("storage", Name(text=kind), str(key), str(), int(count), *rest) if count >= 0:
            form = re.fullmatch(r"torch\.(cuda\.|storage\.)?_?(\w+)Storage", kind)
            if not form or form[2] not in {*_STORAGES, "Untyped"}:
                raise Malformed(f"a storage of unknown type {quoted(kind)}", SAVE)
            dtype = _STORAGES.get(form[2])
            match rest:
                case [(_, int(shift), _)]:
                    return Storage(key, dtype, count, shift)
            return Storage(key, dtype, count)
        case ("module", it, *_):  # a class with its source, which is of no use here
            return it
    raise ValueError("no such storage")


def _view(storage: Any, offset: Any, shape: Any, stride: Any, *more: Any) -> Any:
    if not isinstance(storage, Storage) or not isinstance(offset, int):
        return Unreadable("not a view of a storage")
    if not (isinstance(shape, tuple) and isinstance(stride, tuple)):
        return Unreadable("a shape that is no tuple")
    if more[2:] and more[2]:  # after requires_grad and hooks; in practice it is one of these two
        return Unreadable("a conjugate or negative view")
    return View(storage, storage.dtype, offset + storage.shift, shape, stride)


def _view_as(*given: Any) -> Any:
    """Version 3: the seventh argument is the dtype."""
    view, dtype = _view(*given[:6], *given[7:]), given[6]
    known = _DTYPES.get(dtype.text) if isinstance(dtype, Name) else None
    if known is None or not isinstance(view, View):
        return view if known else Unreadable(f"dtype {quoted(dtype)}")
    return View(view.storage, known, view.offset, view.shape, view.stride)


def _unreadable(reason: str) -> Callable[..., Unreadable]:
    return lambda *given: Unreadable(reason)


def _sparse(layout: Any, *given: Any) -> Unreadable:
    return Unreadable(f"layout {layout[:40]}" if isinstance(layout, str) else "sparse layout")


def _pairs(*given: Any) -> Pairs:
    """An ordered dict; its items are taken, lest copies of one list fill the memory."""
    (items,) = given or ([],)
    if not isinstance(items, list):
        raise ValueError("not a list of pairs")
    pairs = Pairs((key, value) for key, value in items)
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
    """A tensor with attributes, or of a class of its own."""
    if not (isinstance(function, Name) and isinstance(kind, Name) and isinstance(given, tuple)):
        raise ValueError("not a tensor of a type")
    if function.text not in _TENSORS:
        raise refused(function.text)
    if kind.text not in ("torch.Tensor", "torch._tensor.Tensor", "torch.nn.parameter.Parameter"):
        return Unreadable(f"tensor subclass {kind.text}")
    return built(_TENSORS, function.text, given)


_TENSORS: Builders = {
    "torch._utils._rebuild_tensor": _view,
    "torch._utils._rebuild_tensor_v2": _view,
    "torch._utils._rebuild_tensor_v3": _view_as,
    "torch._utils._rebuild_parameter": lambda data, *more: data,
    "torch._utils._rebuild_parameter_with_state": lambda data, *more: data,
    "torch._tensor._rebuild_from_type_v2": _typed,
    "torch._utils._rebuild_sparse_tensor": _sparse,
    "torch._utils._rebuild_sparse_csr_tensor": _sparse,
    "torch._utils._rebuild_qtensor": _unreadable("quantized"),
    "torch._utils._rebuild_nested_tensor": _unreadable("nested"),
    "torch._utils._rebuild_meta_tensor_no_storage": _unreadable("meta: saved without values"),
    "torch._utils._rebuild_wrapper_subclass": lambda kind, *more: Unreadable(
        f"tensor subclass {kind.text}"
    ),
    "torch._utils._rebuild_xla_tensor": _unreadable("a tensor of an XLA device"),
    "torch._utils._rebuild_device_tensor_from_numpy": _unreadable("a tensor of a foreign device"),
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": lambda data, *more: data,
}
_PLACES = ("builtins", "__builtin__")  # the second in Python 2, and in protocols of its time
_PLAIN: Builders = {
    "dict": _pairs,
    **dict.fromkeys(("set", "frozenset", "list", "tuple"), _items),
    **dict.fromkeys(("bytes", "bytearray", "str"), lambda text="", *encoding: text),
    **dict.fromkeys(("int", "float", "complex", "slice", "range"), lambda *given: given),
}
BUILDERS: Builders = {
    **_TENSORS,
    "collections.OrderedDict": _pairs,
    "collections.defaultdict": lambda *given: Pairs(),
    **{f"{module}.{name}": build for module in _PLACES for name, build in _PLAIN.items()},
    "torch.Size": _items,
    "torch.device": _text,
    "_codecs.encode": lambda text, *encoding: text,  # how protocol 2 writes bytes
    "torch.serialization._get_layout": _text,
    "copyreg._reconstructor": lambda kind, *more: Inert(kind.text),
    "copy_reg._reconstructor": lambda kind, *more: Inert(kind.text),
    "copyreg.__newobj__": lambda kind, *more: Inert(kind.text, more),
}
