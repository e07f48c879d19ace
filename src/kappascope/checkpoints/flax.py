"""What Flax writes: mappings in MessagePack whose leaves are arrays (``flax_model.msgpack``).

The markers of https://github.com/msgpack/msgpack/blob/master/spec.md are walked by a reader of our
own, which steps over the numbers of arrays. Flax multiplies by x from the left: a kernel is stored
(in, out), and is shown as PyTorch has it, under the name that it has there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from kappascope.checkpoints.formats import AGAIN, Malformed, quoted
from kappascope.checkpoints.locations import (
    CheckpointFile,
    FileContents,
    StitchedLocation,
    StorageLocation,
    TensorLocation,
    Tree,
    row_major,
)
from kappascope.model.skipped import Reason, unreadable

_MOST_VALUES = 1_000_000
_DEEPEST = 64
_LONGEST_TEXT = 4096  # bytes of a key or another text
_WINDOW = 1 << 14  # bytes read at a time
_ARRAY, _SCALAR = 1, 3  # Flax's own types of MessagePack's extensions
_CHUNKED = "__msgpack_chunked_array__"
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.uint8,
    torch.int16, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64, torch.bool,
    torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2)}  # fmt: skip


def read_flax(file: CheckpointFile) -> FileContents:
    """Return the arrays of a file, nested as they are there."""
    reader = _Reader(file)
    tree = reader.value(0)
    if reader.at != file.size:
        raise Malformed(f"{file.size - reader.at} bytes too many after its last value", AGAIN)
    if not isinstance(tree, dict) or not reader.arrays:
        raise Malformed("MessagePack without arrays of Flax", "give the file with the weights")
    shown = _as_pytorch(tree)
    if isinstance(shown.get("opt_state"), dict):  # of a TrainState
        shown["optimizer"] = shown.pop("opt_state")
    return FileContents(shown, {})


@dataclass
class _Reader:
    """Where a walk through a file is."""

    file: CheckpointFile
    at: int = 0
    window: bytes = b""
    begin: int = 0  # of the window
    values: int = 0
    arrays: int = 0

    def take(self, size: int) -> bytes:
        """Return the next bytes, which are few."""
        start = self.at - self.begin
        if not 0 <= start <= start + size <= len(self.window):
            self.window, self.begin, start = self.file.read(self.at, max(size, _WINDOW)), self.at, 0
        taken = self.window[start : start + size]
        if len(taken) < size:
            need = self.at + size
            raise Malformed(f"truncated: need {need} bytes, have {self.file.size}", AGAIN)
        self.at += size
        return taken

    def number(self, size: int) -> int:
        """Return a whole number without sign."""
        return int.from_bytes(self.take(size), "big")

    def text(self, size: int) -> str:
        """Return a text of so many bytes, or what stands for one that is too long."""
        if size > _LONGEST_TEXT:
            raise Malformed(f"a text of {size} bytes among its names", AGAIN)
        return self.take(size).decode("utf-8", "backslashreplace")

    def value(self, depth: int) -> Any:
        """Return the next value: a mapping, a leaf, or None for what is of no use here."""
        self.values += 1
        if self.values > _MOST_VALUES or depth > _DEEPEST:
            raise Malformed(f"more than {_MOST_VALUES} values, or nested too deep", AGAIN)
        mark = self.number(1)
        if mark < 0x80 or mark >= 0xE0:  # a small number
            return mark if mark < 0x80 else mark - 256
        if mark < 0x90 or mark in (0xDE, 0xDF):
            return self.mapping(self._count(mark, 0x90, 0xDE), depth)
        if mark < 0xA0 or mark in (0xDC, 0xDD):
            count = self._few(self._count(mark, 0xA0, 0xDC))
            return {str(i): self.value(depth + 1) for i in range(count)}
        if mark < 0xC0 or mark in (0xD9, 0xDA, 0xDB):
            return self.text(mark & 31 if mark < 0xC0 else self.number(1 << (mark - 0xD9)))
        return self._scalar(mark)

    def _scalar(self, mark: int) -> Any:
        """Return a number, a truth, or what is stepped over."""
        if mark in (0xC0, 0xC2, 0xC3):
            return {0xC0: None, 0xC2: False, 0xC3: True}[mark]
        if mark in _SIZES:
            size, signed = _SIZES[mark]
            return int.from_bytes(self.take(size), "big", signed=signed)
        if mark in (0xC4, 0xC5, 0xC6):  # bytes
            return self._skipped(self.number(1 << (mark - 0xC4)))
        if mark in (0xC7, 0xC8, 0xC9):
            return self.extension(self.number(1 << (mark - 0xC7)))
        if 0xD4 <= mark <= 0xD8:
            return self.extension(1 << (mark - 0xD4))
        raise Malformed(f"damaged: no value begins with byte {mark}", AGAIN)

    def _count(self, mark: int, end: int, wide: int) -> int:
        return mark & 15 if mark < end else self.number(2 << (mark - wide))

    def _few(self, count: int) -> int:
        if count > self.file.size - self.at:  # each takes a byte at least
            raise Malformed(f"truncated: {count} values in {self.file.size - self.at} bytes", AGAIN)
        return count

    def _skipped(self, size: int) -> None:
        if self.at + size > self.file.size:
            need = self.at + size
            raise Malformed(f"truncated: need {need} bytes, have {self.file.size}", AGAIN)
        self.at += size

    def mapping(self, count: int, depth: int) -> Tree:
        """Return so many pairs."""
        tree: Tree = {}
        for _ in range(self._few(count)):
            key = self.value(depth + 1)
            if not isinstance(key, str | int):
                raise Malformed("a key that is no text", AGAIN)
            if str(key) in tree:
                raise Malformed(f"duplicate name {quoted(str(key))}", AGAIN)
            tree[str(key)] = self.value(depth + 1)
        return tree

    def extension(self, size: int) -> Any:
        """Return an array, or None for what else Flax keeps."""
        kind, begin = self.number(1), self.at
        self._skipped(size)
        if kind not in (_ARRAY, _SCALAR):
            return None
        self.arrays += 1
        end, self.at = self.at, begin
        try:
            return self._array(end)
        finally:
            self.at = end

    def _array(self, end: int) -> TensorLocation | Reason:
        """Return where the numbers of an array lie: after its shape and the name of its dtype."""
        if self.number(1) != 0x93:  # a list of three
            return unreadable("an array that Flax did not write")
        shape, name = self.value(_DEEPEST - 1), self.value(_DEEPEST)
        mark = self.number(1)
        if not isinstance(shape, dict) or not isinstance(name, str) or not 0xC4 <= mark <= 0xC6:
            return unreadable("an array that Flax did not write")
        size = self.number(1 << (mark - 0xC4))
        sizes = tuple(shape.values())
        dtype = _DTYPES.get(name)
        if dtype is None:
            return unreadable(f"dtype {quoted(name)}")
        if not all(type(n) is int and 0 <= n < 1 << 62 for n in sizes) or self.at + size != end:
            return unreadable("a shape or a length that cannot be")
        storage = StorageLocation(self.file, self.at, size)
        tensor = TensorLocation(storage, dtype, sizes, row_major(sizes))
        fault = tensor.fault()
        if fault is None and tensor.bytes != size:
            fault = f"{size} bytes, its shape and dtype take {tensor.bytes}"
        return unreadable(fault) if fault else tensor


# The numbers of a fixed width: bytes, and whether they have a sign. Fractions are of no use here.
_SIZES = {0xCA: (4, False), 0xCB: (8, False)}
_SIZES |= {0xCC + k: (1 << k, False) for k in range(4)} | {
    0xD0 + k: (1 << k, True) for k in range(4)
}


# --- as PyTorch has them --------------------------------------------------------------------------

_NAMES = {"kernel": "weight", "embedding": "weight", "scale": "weight"}
# Their kernels are (in, heads, size of a head) in Flax, and their biases (heads, size of a head).
_HEADS = "query", "key", "value"


def _as_pytorch(tree: Tree, parent: str = "") -> Tree:
    """Return a tree with PyTorch's names and its order of dimensions."""
    shown: Tree = {}
    for name, node in tree.items():
        if isinstance(node, dict):
            whole = _chunked(node)
            node = _as_pytorch(node, name) if whole is None else whole  # noqa: PLW2901
        leaf = isinstance(node, TensorLocation | StitchedLocation)
        if leaf and name == "kernel":
            node = _turned(node, parent)  # noqa: PLW2901
        elif leaf and name == "bias" and parent in _HEADS:
            node = replace(node, shape=(prod(node.shape),), stride=(1,))  # noqa: PLW2901
        new = _NAMES.get(name, name) if leaf else name
        shown[name if new in tree and new != name else new] = node
    return shown


def _turned(
    node: TensorLocation | StitchedLocation, parent: str
) -> TensorLocation | StitchedLocation:
    """Return a kernel with its outputs first: of a dense layer, of heads, or of a convolution."""
    shape, stride = node.shape, node.stride
    if len(shape) < 2 or 0 in shape:
        return node
    if len(shape) == 3 and parent in _HEADS:
        first, heads, size = shape
        shape, stride = (first, heads * size), (heads * size, 1)
    elif len(shape) == 3 and parent == "out":
        heads, size, last = shape
        shape, stride = (heads * size, last), (last, 1)
    *window, inputs, outputs = range(len(shape))
    order = (outputs, inputs, *window)
    return replace(
        node, shape=tuple(shape[i] for i in order), stride=tuple(stride[i] for i in order)
    )


def _chunked(node: Mapping[str, Any]) -> StitchedLocation | Reason | None:
    """Return an array that Flax cut, because no value of MessagePack is longer than 2 GB."""
    if node.get(_CHUNKED) is not True:
        return None
    sizes, chunks = node.get("shape"), node.get("chunks")
    shape = tuple(sizes.values()) if isinstance(sizes, dict) else (None,)
    pieces = list(chunks.values()) if isinstance(chunks, dict) else []
    flat = [piece for piece in pieces if isinstance(piece, TensorLocation)]
    sound = flat and len(flat) == len(pieces) and all(len(it.shape) == 1 for it in flat)
    whole = all(type(n) is int and 0 < n < 1 << 62 for n in shape)
    if not sound or not whole or len({it.dtype for it in flat}) > 1:
        return unreadable("an array in pieces that do not fit")
    if sum(it.shape[0] for it in flat) != prod(shape):
        return unreadable("an array in pieces that do not make it whole")
    return StitchedLocation(tuple(flat), flat[0].dtype, shape, row_major(shape))
