"""What ``torch.save`` writes: a pickle that says what there is, and storages that hold the numbers.

Both forms are read, the zip archive of today and the plain pickle of before torch 1.6; neither by
torch, and no code in them is run. Of a TorchScript archive, which is such an archive with code and
constants beside it, the tensors are read and the code is not. The tree that comes back holds
mappings with text for keys, a `TensorLocation` for every tensor, a `Reason` for what is none, and
plain values as they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from kappascope.checkpoints import pickles
from kappascope.checkpoints.formats import AGAIN, SAVE, Malformed, quoted
from kappascope.checkpoints.locations import CheckpointFile, FileContents, StorageLocation
from kappascope.checkpoints.pickles import DictItems, ForeignObject, forbidden
from kappascope.checkpoints.rebuild import (
    BUILDERS,
    PickledStorage,
    TreeBuilder,
    pickled_storage,
)
from kappascope.checkpoints.zips import archive_members

_MAGIC = 0x1950A86A20F9469CFC6C  # begins the plain form; its version is 1001
_VERSION = 1001


def zipped(archive: StorageLocation) -> FileContents:
    """Return the tree of a zip archive that torch wrote, which may be a part of a file.

    >>> import torch
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     torch.save({"w": torch.ones(2), "epoch": 3}, Path(folder) / "x.pt")
    ...     tree = zipped(CheckpointFile.at(Path(folder) / "x.pt").whole).tree
    ...     tree["w"].read(), tree["epoch"]
    (tensor([1., 1.]), 3)
    """
    members = archive_members(archive)
    if not members:
        raise Malformed("an empty zip archive", AGAIN)
    mains = [name for name in members if re.fullmatch(r"([^/]+/)?data\.pkl", name)]
    if len(mains) != 1:
        raise _other_archive(members)
    root = mains[0].removesuffix("data.pkl")
    order = members.get(f"{root}byteorder")  # which torch wrote from 2.1 on
    byte_order = b"little" if order is None else order.read() if order.size < 64 else b""
    if byte_order == b"big":
        raise Malformed("its numbers are big-endian", "save it again on a little-endian machine")
    if byte_order != b"little":
        raise Malformed(f"the order of its bytes is unknown: {quoted(repr(byte_order))}", AGAIN)
    loaded = _loaded(members, root, "data")
    notes: tuple[str, ...] = ()
    if any(name.startswith((f"{root}code/", f"{root}constants.pkl")) for name in members):
        notes = ("a TorchScript archive: its tensors are read, its code is not",)
    if f"{root}constants.pkl" in members:
        constants = _loaded(members, root, "constants")
        whole = DictItems([*_attributes(loaded.value), ("constants", constants.value)])
        loaded = loaded._replace(value=whole, asked=loaded.asked | constants.asked)

    def locate(it: PickledStorage) -> StorageLocation | str:
        location = members.get(f"{root}{it.key}")
        return location or f"its storage {quoted(it.key)} is missing from the archive"

    return TreeBuilder(locate).build(loaded)._replace(notes=notes)


def _loaded(members: Mapping[str, StorageLocation], root: str, folder: str) -> pickles.LoadedPickle:
    """Return the value of a pickle whose storages lie in the folder of its name."""
    data = members[f"{root}{folder}.pkl"]
    if data.size > pickles.MOST_BYTES:
        raise Malformed(f"its pickle has {data.size} bytes without any tensor", SAVE)

    def persistent(identity: Any) -> Any:
        it = pickled_storage(identity)
        return replace(it, key=f"{folder}/{it.key}") if isinstance(it, PickledStorage) else it

    return pickles.load(data.read(), BUILDERS, persistent)


def _attributes(module: Any) -> list[tuple[Any, Any]]:
    """Return what a module of TorchScript keeps, by name."""
    state = module.state if isinstance(module, ForeignObject) else module
    return state if isinstance(state, DictItems) else [("0", module)]


def _other_archive(names: dict[str, StorageLocation]) -> Malformed:
    """Return what a zip archive is that is no checkpoint."""
    signs = {
        r"(^|/)\.data/(extern_modules|python_version)$": (
            "an archive of torch.package, code and all",
            "where you trust it: save the state_dict() of what PackageImporter loads from it",
        ),
        r"(^|/)(code|constants\.pkl)(/|$)": (
            "a TorchScript archive without its data.pkl",
            "where you trust it: torch.save(torch.jit.load(...).state_dict(), ...)",
        ),
        r"archive_format$|serialized_exported_program": ("a torch.export archive", SAVE),
        r"model\.weights\.h5$": ("a Keras model", "convert it to safetensors first"),
        r"(^|/)data\.pkl$": ("a zip archive with several checkpoints", "give one of them"),
        r"\.(safetensors|pt|pth|bin|ckpt|zip)$": ("a zip archive of files", "unpack it first"),
    }
    for pattern, (wrong, advice) in signs.items():
        if any(re.search(pattern, name) for name in names):
            return Malformed(wrong, advice)
    return Malformed("a zip archive that torch did not write", "give the checkpoint inside")


# The plain pickle


def legacy(file: CheckpointFile) -> FileContents:
    """Read a file from before torch 1.6: four pickles, then the keys, then the storages.

    >>> import torch
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "x.pt"
    ...     torch.save([torch.ones(2)], path, _use_new_zipfile_serialization=False)
    ...     legacy(CheckpointFile.at(path)).tree["0"].read()
    tensor([1., 1.])
    """
    data = file.read(0, pickles.MOST_BYTES)
    seen: dict[str, PickledStorage] = {}

    def persistent(identity: Any) -> Any:
        it = pickled_storage(identity)
        if isinstance(it, PickledStorage):
            seen.setdefault(it.key, it)
        return it

    def load(at: int) -> pickles.LoadedPickle:
        return pickles.load(data, BUILDERS, persistent, at)

    loaded = load(_begin(load))
    try:
        keys = load(loaded.end)
    except Malformed as error:
        if loaded.asked:
            raise forbidden(*loaded.asked, wrong="a damaged file") from error
        raise
    members = dict(_locations(file, keys.value, keys.end, seen))

    def locate(it: PickledStorage) -> StorageLocation | str:
        return members.get(it.key) or f"its storage {quoted(it.key)} is missing"

    return TreeBuilder(locate).build(loaded)


def _begin(load: Callable[[int], pickles.LoadedPickle]) -> int:
    """Return where the pickle of the tensors begins, after three that say how it was written."""
    magic = load(0)
    if magic.value != _MAGIC:
        wrong = "a pickle that torch.save did not write"
        if magic.asked:
            raise forbidden(*magic.asked, wrong=f"{wrong} and")
        raise Malformed(wrong, "save a state_dict with torch")
    version = load(magic.end)
    system = load(version.end)
    if version.value != _VERSION:
        raise Malformed(f"a format of torch that is not {_VERSION}", SAVE)
    if isinstance(system.value, DictItems) and ("little_endian", False) in system.value:
        raise Malformed("its numbers are big-endian", "save it again on a little-endian machine")
    return system.end


def _locations(
    file: CheckpointFile, keys: Any, at: int, seen: dict[str, PickledStorage]
) -> Iterator[tuple[str, StorageLocation]]:
    """Yield the storages in the order of their keys: how many numbers, then the numbers."""
    if type(keys) is not list:
        raise Malformed("damaged: a list of storages was expected after its pickle", AGAIN)
    with file.opened() as descriptor:
        for key in keys:
            if not isinstance(key, str) or key not in seen:
                raise Malformed(f"a storage {quoted(key)} that no tensor uses", AGAIN)
            dtype = seen[key].dtype
            file.require(at, 8)
            count = int.from_bytes(os.pread(descriptor, 8, at), "little")
            size = count * (dtype.itemsize if dtype else 1)
            at += 8
            if at + size > file.size:
                raise Malformed(f"truncated: need {at + size} bytes, have {file.size}", AGAIN)
            yield key, StorageLocation(file, at, size)
            at += size
