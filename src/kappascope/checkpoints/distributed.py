"""Folders that ``torch.distributed.checkpoint`` writes: one pickle of places, and files of chunks.

The file ``.metadata`` tells of every tensor its dtype, its shape and the chunks it was cut into,
and of every chunk in which file it lies and where. It is read by our own pickle machine. A chunk is
an archive of ``torch.save`` inside a file (``__0_0.distcp``), opened when its tensor is read: then
the tensor and one of its chunks at a time are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kappascope.checkpoints import folders, pickles
from kappascope.checkpoints.formats import AGAIN, SAVE, Malformed, quoted
from kappascope.checkpoints.locations import (
    CheckpointFile,
    FileContents,
    StorageLocation,
    TensorLocation,
    Tree,
    uninitialized,
)
from kappascope.checkpoints.pickles import DictItems, ForeignObject, GlobalName
from kappascope.checkpoints.rebuild import BUILDERS, DTYPES
from kappascope.checkpoints.torchfiles import zipped
from kappascope.model.skipped import Reason, unreadable

MOST_CHUNKS = 4096  # of a tensor: each is compared with all others; larger groups shard less finely
_DEEPEST = 32  # keys that lead to a tensor
_OWN = ("torch.distributed.", "pathlib.")  # whose classes tell of the checkpoint alone


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor: where in the tensor it begins, how large it is, and its archive."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    archive: StorageLocation

    @property
    def region(self) -> tuple[slice, ...]:
        """The entries of the tensor that it holds."""
        pairs = zip(self.offsets, self.sizes, strict=True)
        return tuple(slice(begin, begin + size) for begin, size in pairs)

    def read(self, dtype: torch.dtype) -> Tensor:
        """Return its numbers, once they are what the metadata says."""
        location = zipped(self.archive).tree.get("0")
        if not isinstance(location, TensorLocation):
            raise Malformed(f"a chunk that is no tensor: {location}", AGAIN)
        if (location.dtype, location.shape) != (dtype, self.sizes):
            stored = f"{location.dtype} of shape {list(location.shape)}"
            wrong = f"a chunk is {stored}, its metadata says {dtype} of {list(self.sizes)}"
            raise Malformed(wrong, AGAIN)
        return location.read()


@dataclass(frozen=True, slots=True)
class ChunkedLocation:
    """A tensor that lies in chunks, of one file or several; put together when it is read."""

    chunks: tuple[Chunk, ...]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def storage(self) -> StorageLocation:
        """The archive of its first chunk."""
        return self.chunks[0].archive

    @property
    def bytes(self) -> int:
        """Bytes of its numbers, without gaps."""
        return prod(self.shape) * self.dtype.itemsize

    def fault(self) -> str | None:
        """Say why these chunks cannot be such a tensor."""
        for chunk in self.chunks:
            if len(chunk.offsets) != len(self.shape) or len(chunk.sizes) != len(self.shape):
                return f"a chunk of another number of dimensions than {len(self.shape)}"
            ends = (begin + size for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
            if any(end > size for end, size in zip(ends, self.shape, strict=True)):
                return f"a chunk at {list(chunk.offsets)} reaches beyond {list(self.shape)}"
            if prod(chunk.sizes) * self.dtype.itemsize > chunk.archive.size:
                return f"a chunk of {list(chunk.sizes)} in {chunk.archive.size} bytes"
        held = sum(prod(chunk.sizes) for chunk in self.chunks)
        if held != prod(self.shape):
            return f"chunks of {held} numbers together, its shape is {list(self.shape)}"
        files = {chunk.archive.file for chunk in self.chunks}
        if self.bytes > sum(file.size for file in files):  # chunks that lie in the same bytes
            return "larger than its files"
        return None

    def read(self) -> Tensor:
        """Return the whole tensor; beside it one chunk is in memory."""
        if len(self.chunks) == 1:
            return self.chunks[0].read(self.dtype)
        self._check_apart()
        whole = uninitialized(self.shape, self.dtype)
        for chunk in self.chunks:
            whole[chunk.region] = chunk.read(self.dtype)
        return whole

    def meta(self, storage: torch.UntypedStorage) -> Tensor:
        """Return a tensor of this shape without content."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta")

    def _check_apart(self) -> None:
        """Refuse chunks that overlap, which leave as many numbers without a value."""
        chunks = [chunk for chunk in self.chunks if prod(chunk.sizes)]
        begins = torch.tensor([chunk.offsets for chunk in chunks])
        ends = begins + torch.tensor([chunk.sizes for chunk in chunks])
        for i in range(1, len(chunks)):
            overlap = (begins[:i] < ends[i]) & (begins[i] < ends[:i])
            if overlap.all(dim=1).any():
                raise Malformed(f"chunk at {list(chunks[i].offsets)} overlaps another", AGAIN)


def read_distributed(file: CheckpointFile, folder: Path) -> FileContents:
    """Return what a folder holds of which this file is the metadata."""
    if file.size > pickles.MOST_BYTES:
        raise Malformed(f"metadata of {file.size} bytes", SAVE)
    loaded = pickles.load(file.read(0, file.size), BUILDERS, str)
    metadata = _fields(loaded.value)
    tensors, places = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if not isinstance(tensors, DictItems) or not isinstance(places, DictItems):
        raise Malformed("no metadata of a distributed checkpoint", "give the folder of one")
    paths = dict(_texts(metadata.get("planner_data")))
    archives = _Archives(folder, places)
    tree: Tree = {}
    for name, value in _texts(tensors):
        fields = _fields(value)
        if "chunks" in fields:  # or else it is a plain value
            _put(tree, paths.get(name), name, _leaf(name, fields, archives))
    foreign = (kind for kind in loaded.asked if not kind.startswith(_OWN))
    return FileContents(tree, dict.fromkeys(foreign, False))


class _Archives:
    """Where the chunks lie, by the name of their tensor and the place in it where they begin."""

    def __init__(self, folder: Path, places: DictItems) -> None:
        self.folder = folder
        self.files: dict[str, CheckpointFile | str] = {}
        self.entries: dict[tuple[str, str], Mapping[str, Any]] = {}
        for key, entry in places:
            index = _fields(key)
            name, offset = index.get("fqn"), index.get("offset")
            if isinstance(name, str) and _sizes(offset) is not None:
                self.entries[name, str(offset)] = _fields(entry)  # text: its hash is not chosen

    def find(self, name: str, offsets: tuple[int, ...]) -> StorageLocation | str:
        """Return the archive of a chunk, or what is wrong with it."""
        entry = self.entries.get((name, str(offsets)))
        if entry is None:
            return f"its chunk at {list(offsets)} is missing from the metadata"
        if entry.get("transform_descriptors"):
            return "its chunks are packed by an extension"
        place = entry.get("relative_path")
        span = _sizes((entry.get("offset"), entry.get("length")))
        if not isinstance(place, str) or span is None:
            return f"the place of its chunk at {list(offsets)} cannot be understood"
        if place not in self.files:
            try:
                self.files[place] = CheckpointFile.at(folders.inside(self.folder, place))
            except (Malformed, OSError) as error:
                wrong = error.wrong if isinstance(error, Malformed) else error.strerror
                self.files[place] = f"its chunk in {quoted(place)} is lost: {wrong}"
        file = self.files[place]
        if isinstance(file, str):
            return file
        if sum(span) > file.size:
            return f"truncated: {quoted(place)} has {file.size} of {sum(span)} bytes"
        return StorageLocation(file, *span)


def _leaf(name: str, fields: Mapping[str, Any], archives: _Archives) -> ChunkedLocation | Reason:
    """Return a tensor in its chunks, or why it cannot be read."""
    shape, chunks = _sizes(fields.get("size")), fields.get("chunks")
    dtype = DTYPES.get(_dtype(fields.get("properties")))
    if dtype is None:
        return unreadable(f"dtype {quoted(_dtype(fields.get('properties')))}")
    if shape is None or prod(size or 1 for size in shape) >= 1 << 63:
        return unreadable("a shape that cannot be")
    if type(chunks) is not list or not 0 < len(chunks) <= MOST_CHUNKS:
        return unreadable(f"no list of 1 to {MOST_CHUNKS} chunks")
    parts: list[Chunk] = []
    for value in chunks:
        chunk = _fields(value)
        offsets, sizes = _sizes(chunk.get("offsets")), _sizes(chunk.get("sizes"))
        if offsets is None or sizes is None:
            return unreadable("a chunk without a place")
        archive = archives.find(name, offsets)
        if isinstance(archive, str):
            return unreadable(archive)
        parts.append(Chunk(offsets, sizes, archive))
    location = ChunkedLocation(tuple(parts), dtype, shape)
    fault = location.fault()
    return unreadable(fault) if fault else location


def _fields(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that was not built."""
    return dict(_texts(value.state)) if isinstance(value, ForeignObject) else {}


def _texts(items: Any) -> Iterator[tuple[str, Any]]:
    """Yield the items of a dict whose keys are texts."""
    if isinstance(items, DictItems):
        yield from ((key, value) for key, value in items if isinstance(key, str))


def _sizes(value: Any) -> tuple[int, ...] | None:
    """Return a tuple of sizes, if that is what it is."""
    if not isinstance(value, tuple) or len(value) > _DEEPEST:
        return None
    return value if all(type(n) is int and 0 <= n < 1 << 62 for n in value) else None


def _dtype(properties: Any) -> str:
    """Return the name of a dtype, the first of the properties of a tensor."""
    state = properties.state if isinstance(properties, ForeignObject) else None
    first = state[0] if isinstance(state, tuple) and state else _fields(properties).get("dtype")
    return first.text if isinstance(first, GlobalName) else "unknown"


def _put(tree: Tree, path: Any, name: str, leaf: ChunkedLocation | Reason) -> None:
    """Put a leaf where it was before its state dict was flattened, or else by its flat name."""
    nested = isinstance(path, tuple) and 0 < len(path) <= _DEEPEST
    keys = [str(key) for key in path if _is_key(key)] if nested else []
    *outer, last = keys if nested and len(keys) == len(path) else [name]
    node = tree
    for key in outer:
        node = node.setdefault(key, {})
        if not isinstance(node, dict):
            raise Malformed(f"a tensor stands before the last key of {quoted(name)}", AGAIN)
    if last in node:
        raise Malformed(f"duplicate name {quoted(name)}", AGAIN)
    node[last] = leaf


def _is_key(value: Any) -> bool:
    return isinstance(value, str) or (type(value) is int and 0 <= value < 1 << 63)
