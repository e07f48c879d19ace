"""A tensor inside a file: where it lies, and how it is read without reading anything else."""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kappascope.checkpoints.folders import MAP
from kappascope.checkpoints.formats import AGAIN, Malformed

MIRRORS: set[str] = set()  # folders that are mirrors, in this process: no file says so of itself
_BLOCK = 1 << 20  # bytes inflated at a time
_MOST_DIMENSIONS = 64  # what torch's own loops can take


Tree: TypeAlias = dict[str, Any]
"""What a file holds: mappings with text for keys, and tensors, reasons or plain values in them."""


class FileContents(NamedTuple):
    """What a file holds, and the foreign names it asks for (true: a class with tensors inside).

    ``config`` is what the file itself tells of the model, ``notes`` what is to be said of it, and
    ``metadata`` are texts beside its tensors, by name.
    """

    tree: Tree
    kinds: dict[str, bool]
    config: Mapping[str, Any] = MappingProxyType({})
    notes: tuple[str, ...] = ()
    metadata: Mapping[str, str] = MappingProxyType({})


class Absent(BaseException):
    """Bytes of a mirrored file that were not fetched yet: no error, but a question to the parent.

    >>> Absent("model.safetensors", 0, 8).end
    8
    """

    def __init__(self, path: str, begin: int, end: int) -> None:
        super().__init__(path, begin, end)
        self.path, self.begin, self.end = path, begin, end


class Stamp(NamedTuple):
    """What differs once a file is written to or replaced.

    >>> Stamp.of(os.stat(__file__)) == Stamp.of(os.stat(__file__))
    True
    """

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds, as the next
    changed: int  # which nobody can set back

    @classmethod
    def of(cls, now: os.stat_result) -> Stamp:
        """Return the stamp of a file whose status this is."""
        return cls(now.st_dev, now.st_ino, now.st_size, now.st_mtime_ns, now.st_ctime_ns)


@dataclass(frozen=True)
class CheckpointFile:
    """A regular file as it was when it was first opened; what is read once it has changed is lost.

    >>> file = CheckpointFile.at(Path(__file__))
    >>> file.read(0, 10)
    b'\"\"\"A tenso'
    """

    path: str
    stamp: Stamp
    mirrored: bool = False  # from elsewhere, by whoever fetches what is asked for

    @property
    def size(self) -> int:
        """The number of its bytes."""
        return self.stamp.size

    def require(self, begin: int, size: int) -> None:
        """Ask for bytes of a mirrored file that are not there; local files have all of theirs."""
        end = min(begin + size, self.size)
        if not self.mirrored or begin >= end:
            return
        path = Path(self.path)
        ranges = json.loads((path.parent / MAP).read_text())[path.name]
        if not any(start <= begin and end <= stop for start, stop in ranges):
            raise Absent(self.path, begin, end)

    @classmethod
    def at(cls, path: Path) -> CheckpointFile:
        """Return the file at ``path``; links are for the caller to resolve."""
        with _opened(str(path)) as descriptor:
            is_mirrored = str(path.parent) in MIRRORS
            return cls(str(path), Stamp.of(os.fstat(descriptor)), is_mirrored)

    @contextmanager
    def opened(self) -> Iterator[int]:
        """Give a descriptor to read from.

        Refused where the file changed before, or does meanwhile.
        """
        with _opened(self.path) as descriptor:
            self._check_unchanged(descriptor)
            try:
                yield descriptor
            finally:  # also of what seems truncated or damaged
                self._check_unchanged(descriptor)

    @property
    def whole(self) -> StorageLocation:
        """All of its bytes."""
        return StorageLocation(self, 0, self.size)

    def read(self, begin: int, size: int) -> bytes:
        """Return the bytes from ``begin``, as many of ``size`` as there are."""
        data = bytearray(max(0, min(size, self.size - begin)))
        self.require(begin, len(data))
        with self.opened() as descriptor:
            _fill(descriptor, memoryview(data), begin)
        return bytes(data)

    def _check_unchanged(self, descriptor: int) -> None:
        if not self.mirrored and Stamp.of(os.fstat(descriptor)) != self.stamp:
            raise Malformed("changed while it was read", "try again once nothing writes to it")


@dataclass(frozen=True, slots=True)
class StorageLocation:
    """Where a storage lies in its file; packed, it takes up fewer bytes there than it has."""

    file: CheckpointFile
    begin: int
    size: int
    packed: int | None = None  # bytes of its deflated form
    checksum: int = 0  # crc32 of all its bytes; 0 if unknown

    @property
    def taken(self) -> int:
        """Bytes that it takes up in its file."""
        return self.size if self.packed is None else self.packed

    def read(self) -> bytes:
        """Read all bytes of the storage."""
        data = bytearray(self.size)
        self.fill(memoryview(data), 0)
        return bytes(data)

    def first(self, size: int) -> bytes:
        """Read as many bytes of its beginning as there are of ``size``."""
        part = StorageLocation(self.file, self.begin, min(size, self.size), self.packed)
        return part.read()

    def fill(self, view: memoryview, skip: int) -> None:
        """Put the bytes after the first ``skip`` into ``view``."""
        if self.packed is None:
            self.file.require(self.begin + skip, len(view))
        else:
            self.file.require(self.begin, self.taken)
        with self.file.opened() as descriptor:
            if self.packed is None:
                _fill(descriptor, view, self.begin + skip)
            else:
                stored = _blocks(descriptor, self.begin, self.taken)
                _take(_inflated(stored, skip + len(view)), view, skip)
        if self.checksum and self.checksum != self._checksum(view):
            raise Malformed("damaged: the checksum of its content is another", AGAIN)

    def _checksum(self, view: memoryview) -> int:
        # A part tells nothing of the whole, which is gone through once for all its parts.
        return zlib.crc32(view) if len(view) == self.size else _checksum(self)


@cache
def _checksum(location: StorageLocation) -> int:
    checksum = 0
    location.file.require(location.begin, location.taken)
    with location.file.opened() as descriptor:
        stored = _blocks(descriptor, location.begin, location.taken)
        for block in stored if location.packed is None else _inflated(stored, location.size):
            checksum = zlib.crc32(block, checksum)
    return checksum


@dataclass(frozen=True, slots=True)
class TensorLocation:
    """A tensor as a file holds it: a view of a storage.

    >>> with Path(__file__).open("rb") as source:
    ...     first = list(source.read(4))
    >>> location = StorageLocation(CheckpointFile.at(Path(__file__)), begin=0, size=4)
    >>> TensorLocation(location, torch.uint8, (2, 2), (1, 2)).read().T.flatten().tolist() == first
    True
    """

    storage: StorageLocation
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int = 0  # elements of the storage before its first
    skip: int = 0  # bytes before these, which are no whole element

    @property
    def span(self) -> int:
        """Elements of the storage from its first to its last."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    def fault(self) -> str | None:
        """Say why there can be no such tensor."""
        numbers = (*self.shape, *self.stride, self.offset)
        if len(self.shape) != len(self.stride):
            return f"{len(self.shape)} dimensions with {len(self.stride)} strides"
        if len(self.shape) > _MOST_DIMENSIONS:
            return f"{len(self.shape)} dimensions, more than {_MOST_DIMENSIONS}"
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in numbers):
            return "a size, stride or offset that is no whole number from 0 to 2^63"
        if prod(n or 1 for n in self.shape) >= 1 << 63:
            return f"shape {list(self.shape)} overflows"
        need = self.skip + (self.offset + self.span) * self.dtype.itemsize
        have = self.storage.size
        if need > have:
            return f"needs {need} bytes of a storage of {have}"
        # An expanded tensor stands for more numbers than it has: as many as fit into its file pass.
        return "larger than its file" if self.bytes > max(self.storage.file.size, have) else None

    @property
    def bytes(self) -> int:
        """Bytes of its numbers, without gaps."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the tensor; it takes its own memory once."""
        size = self.dtype.itemsize
        data = uninitialized((self.span * size,), torch.uint8)
        self.storage.fill(data.numpy().data, self.skip + self.offset * size)
        if not self.span:
            return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)
        return data.view(self.dtype).as_strided(self.shape, self.stride)

    def meta(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the same view of a storage without content."""
        empty = torch.empty(0, dtype=self.dtype, device="meta")
        return empty.set_(storage, self.offset, self.shape, self.stride)


@dataclass(frozen=True, slots=True)
class StitchedLocation:
    """A tensor that lies in pieces, of one file or several, to be laid end to end."""

    pieces: tuple[TensorLocation, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def storage(self) -> StorageLocation:
        """The storage of its first piece, from where the piece begins: two weights may share it."""
        first = self.pieces[0]
        skip = first.offset * first.dtype.itemsize
        return replace(first.storage, begin=first.storage.begin + skip, size=self.bytes)

    @property
    def bytes(self) -> int:
        """Bytes of its numbers, without gaps."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> Tensor:
        """Return the whole tensor; beside it one piece is in memory."""
        whole = uninitialized((prod(self.shape),), self.dtype)
        at = 0
        for piece in self.pieces:
            whole[at : at + piece.shape[0]] = piece.read()
            at += piece.shape[0]
        return whole.as_strided(self.shape, self.stride)

    def meta(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor of this shape without content."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device="meta")


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the steps between neighbours of each dimension, the last the fastest.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    steps = accumulate((max(size, 1) for size in shape[:0:-1]), mul, initial=1)
    return tuple(steps)[: len(shape)][::-1]


def uninitialized(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor without values yet; a `MemoryError` where there is too little for it."""
    try:
        return torch.empty(shape, dtype=dtype)
    except RuntimeError as error:  # torch's word for too little memory
        raise MemoryError(f"{prod(shape) * dtype.itemsize} bytes") from error


@contextmanager
def _opened(path: str) -> Iterator[int]:
    # Not through a link that came later; and a pipe without a writer must not make us wait.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise Malformed("is not a regular file", "give a checkpoint or its folder")
        yield descriptor
    finally:
        os.close(descriptor)


def _fill(descriptor: int, view: memoryview, begin: int) -> None:
    done = 0
    while done < len(view):
        count = os.preadv(descriptor, [view[done:]], begin + done)
        if not count:
            have = begin + done
            raise Malformed(f"truncated: need {begin + len(view)} bytes, have {have}", AGAIN)
        done += count


def _blocks(descriptor: int, begin: int, size: int) -> Iterator[bytes]:
    for start in range(0, size, _BLOCK):
        yield os.pread(descriptor, min(_BLOCK, size - start), begin + start)


def _inflated(blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """Yield the first bytes of a deflated storage, of which there must be ``size``."""
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    for block in blocks:
        rest = block
        while rest and size:
            try:
                data = inflater.decompress(rest, min(_BLOCK, size))
            except zlib.error as error:
                raise Malformed(f"damaged: {error}", AGAIN) from error
            rest = inflater.unconsumed_tail
            size -= len(data)
            yield data
    if size:
        raise Malformed(f"truncated: {size} bytes of a packed storage are missing", AGAIN)


def _take(blocks: Iterable[bytes], view: memoryview, skip: int) -> None:
    """Fill ``view`` with what follows the first ``skip`` bytes."""
    at = -skip
    for data in blocks:
        new = data[max(0, -at) :]
        view[max(0, at) : max(0, at) + len(new)] = new
        at += len(data)
