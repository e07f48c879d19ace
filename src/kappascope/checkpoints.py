"""Open a checkpoint that nobody vouches for: what is in it at once, its numbers when asked for.

Safetensors files, folders of them as Hugging Face lays them out, and what ``torch.save`` wrote, old
or new (`kappascope.files` takes them apart). A file is what its content says, whatever its name; no
code in it is run, nothing is written, and only the tensor that is asked for is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from kappascope.files import archives, folders, headers
from kappascope.files.formats import AGAIN, HEAD, Malformed, kind, quoted
from kappascope.files.machine import Asks
from kappascope.files.pieces import File, Piece, Unreadable
from kappascope.files.trees import Found, Tree
from kappascope.prose import listed
from kappascope.refusals import Refusal
from kappascope.weights.reasons import Unbuilt

__all__ = ["Checkpoint", "Exhausted", "Fault", "Unreadable", "open"]

_LONGEST_INDEX = 1 << 25  # bytes: the index of 300,000 tensors
_LONGEST_CONFIG = 1 << 22
_MOST_SHARDS = 10_000
_FORMATS = {"safetensors": "safetensors", "zip": "PyTorch", "pickle": "PyTorch, before 1.6"}
_REPAIR = "download the index again"
_STATE_DICT = "save model.state_dict() where you trust it"


class Exhausted(Refusal, MemoryError):  # noqa: N818 - as its first parent
    """A checkpoint that takes more memory to read than there is.

    >>> isinstance(Exhausted(5, "x.pt", "too large", "free some memory"), MemoryError)
    True
    """


class Fault(NamedTuple):
    """Something that belongs to a checkpoint and could not be read, and why.

    >>> Fault("model-00002-of-00002.safetensors", "No such file or directory").name
    'model-00002-of-00002.safetensors'
    """

    name: str
    reason: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk: everything in it but the numbers, which `read` brings.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "model.pt"
    ...     torch.save({"state_dict": {"fc.weight": torch.eye(2)}, "epoch": 3}, path)
    ...     checkpoint = open(path)
    ...     checkpoint.contents
    ...     checkpoint.read(("state_dict", "fc.weight"))
    {'state_dict': {'fc.weight': tensor(..., device='meta', size=(2, 2))}, 'epoch': 3}
    tensor([[1., 0.],
            [0., 1.]])
    """

    source: str
    format: str
    tree: Tree = field(repr=False)
    config: Mapping[str, Any] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

    @cached_property
    def contents(self) -> Mapping[str, Any]:
        """Nested as in the file, with text for keys; a shared storage is a shared meta storage."""
        storages: dict[tuple[str, int], torch.UntypedStorage] = {}

        def grown(node: Any) -> Any:
            if isinstance(node, dict):
                return {key: grown(value) for key, value in node.items()}
            if not isinstance(node, Piece):
                return node
            place = node.room.file.path, node.room.begin
            if place not in storages:
                storages[place] = torch.UntypedStorage(node.room.size, device="meta")
            return node.meta(storages[place])

        return {key: grown(value) for key, value in self.tree.items()}

    def read(self, path: tuple[str, ...]) -> Tensor:
        """The tensor at the end of a path of keys into ``contents``."""
        node: Any = self.tree
        for key in path:
            node = node[key] if isinstance(node, dict) else None
        if not isinstance(node, Piece):
            raise KeyError(f"{path} is no path to a tensor in contents")
        with _refusing(Path(node.room.file.path)):
            return node.read()

    def __getstate__(self) -> dict[str, Any]:
        # What a worker needs to read: contents would go along as slowly as it is built anew.
        return {name: value for name, value in vars(self).items() if name != "contents"}


def open(path: Path | str) -> Checkpoint:
    """The checkpoint in a file or folder; a `Refusal` says what is wrong with any other.

    >>> open(Path("nowhere.pt"))
    Traceback (most recent call last):
    kappascope.refusals.Refusal: nowhere.pt: No such file or directory (give a ...)
    """
    path = Path(path)
    with _refusing(path):
        if path.is_dir():
            return _opened_folder(path)
        if folders.is_index(path.name):
            return _joined(path.parent, _listed(path.parent, path.name), path)
        checkpoint = _checkpoint(path, path.parent, *_load(folders.resolved(path), path.name))
        note = ("one shard of several: only what it holds is read",)
        more = note if folders.is_shard(path.name) else ()
        return replace(checkpoint, notes=more + checkpoint.notes)


def _checkpoint(path: Path, folder: Path, found: Found, form: str) -> Checkpoint:
    if not found.tree:
        raise Malformed("holds no tensors", "give the file with the weights")
    notes, faults = _said(found)
    config, more = _config(folder)
    return Checkpoint(str(path), form, found.tree, config, notes + more, faults)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Says of which file it is that something is wrong."""
    given = str(path) if str(path).isprintable() else ascii(str(path))
    try:
        yield
    except Malformed as error:
        raise Refusal(2, given, error.wrong, error.advice) from error
    except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
        wrong = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Refusal(2, given, wrong, "give a checkpoint or its folder") from error
    except MemoryError as error:
        raise Exhausted(5, given, "not enough memory to read it", "free some memory") from error


def _load(real: Path, name: str) -> tuple[Found, str]:
    """What a file holds, and its format by its content."""
    file = File.at(real)
    head = file.read(0, HEAD)
    form = kind(head)
    named = name.endswith(".safetensors")
    # Of a header's length alone, or a part of it, nothing can be told but that it is cut off.
    if form == "safetensors" or (named and (form == "unknown" or len(head) <= 8)):
        return Found(headers.read(file), {}), "safetensors"
    if form == "unknown":
        return _oldest(file), _FORMATS["pickle"]
    if named:
        what = "zip archive" if form == "zip" else "pickle"
        raise Malformed(f"not a safetensors file but a {what}", "give it the name it should have")
    read = archives.zipped if form == "zip" else archives.legacy
    return read(file), _FORMATS[form]


def _oldest(file: File) -> Found:
    """A file whose beginning is of no known format: the oldest pickles begin in any way."""
    text = file.read(0, HEAD).isascii()
    try:
        return archives.legacy(file)
    except Asks as error:
        if not text or re.search(r"asks for '[\w.]+'", error.wrong):  # else "import" and the like
            raise
    except Malformed:
        pass
    raise Malformed(
        f"neither a safetensors nor a PyTorch file{': it is text' if text else ''}",
        "give a checkpoint or its folder",
    )


def _said(found: Found) -> tuple[tuple[str, ...], tuple[Fault, ...]]:
    """What the user is told of foreign classes."""
    names = [quoted(name) for name in found.kinds]
    asked = listed(names)
    notes = (f"asks for {asked}: not built; {_STATE_DICT}",) if names else ()
    reason = Unbuilt(f"an object of a class: only the tensors it keeps are read; {_STATE_DICT}")
    return notes, tuple(Fault(name, reason) for name, holds in found.kinds.items() if holds)


def _config(folder: Path) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The ``config.json`` of the model, if there is one that can be understood."""
    try:
        if not (folder / "config.json").exists():
            return {}, ()
        text = File.at(folders.inside(folder, "config.json")).read(0, _LONGEST_CONFIG + 1)
        config = json.loads(text) if len(text) <= _LONGEST_CONFIG else None
    except (Malformed, OSError, ValueError, RecursionError):
        config = None
    if isinstance(config, dict):
        return config, ()
    return {}, ("config.json beside it cannot be read: heads are told from shapes",)


# Folders

_Wanted: TypeAlias = Mapping[str, list[str]]  # the tensors of every shard; none listed: all of it


def _opened_folder(path: Path) -> Checkpoint:
    folder = folders.snapshot(path)
    choice = folders.choose(folder)
    wanted: _Wanted = {file: [] for file in sorted(choice.all)}
    if choice.listing:
        wanted = _listed(folder, choice.listing)
    if choice.listing or len(wanted) > 1:
        checkpoint = _joined(folder, wanted, path)
    else:
        found = _load(folders.inside(folder, choice.files[0]), choice.files[0])
        checkpoint = _checkpoint(path, folder, *found)
    return replace(checkpoint, notes=(*choice.notes(wanted), *checkpoint.notes))


def _listed(folder: Path, name: str) -> _Wanted:
    """The shards that an index lists, each with the tensors it should hold."""
    file = File.at(folders.inside(folder, name))
    if file.size > _LONGEST_INDEX:
        raise Malformed(f"an index of {file.size} bytes", _REPAIR)
    places = headers.parsed(file.read(0, file.size), "index").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise Malformed(f"no weight_map in {quoted(name)}", _REPAIR)
    if len(set(map(str, places.values()))) > _MOST_SHARDS:
        raise Malformed(f"an index of more than {_MOST_SHARDS} shards", _REPAIR)
    wanted: dict[str, list[str]] = {}
    for tensor, shard in places.items():
        if not folders.is_plain(shard):
            raise Malformed(f"shard name is not a plain file name: {quoted(shard)}", _REPAIR)
        wanted.setdefault(shard, []).append(tensor)
    return wanted


def _joined(folder: Path, wanted: _Wanted, path: Path) -> Checkpoint:
    """What the shards hold together; one that cannot be read is a fault of the whole."""
    reals = {shard: folders.inside(folder, shard) for shard in wanted}  # before any is opened
    loaded: dict[str, tuple[Found, str]] = {}
    faults: list[Fault] = []
    for shard, names in wanted.items():
        try:
            loaded[shard] = _load(reals[shard], shard)
            _check_unmixed(loaded)
        except (Malformed, OSError) as error:
            loaded.pop(shard, None)
            faults.append(Fault(shard, _lost(error, names)))
    if not loaded:
        raise Malformed(f"no shard can be read: {quoted(faults[0].name)} {faults[0].reason}", AGAIN)
    tree: Tree = {}
    for shard, (found, _) in loaded.items():
        faults += _place(tree, found.tree, wanted[shard], shard)
    more = _unlisted(wanted, loaded)
    kinds = {name: holds for found, _ in loaded.values() for name, holds in found.kinds.items()}
    form = next(form for _, form in loaded.values())
    checkpoint = _checkpoint(path, folder, Found(tree | more, kinds), form)
    notes = (f"{len(more)} tensors in the shards that the index does not list",) if more else ()
    return replace(checkpoint, notes=notes + checkpoint.notes, faults=(*faults, *checkpoint.faults))


def _check_unmixed(loaded: Mapping[str, tuple[Found, str]]) -> None:
    *before, last = [form for _, form in loaded.values()]
    if before and (before[0] == "safetensors") != (last == "safetensors"):
        raise Malformed(f"is {last} among shards that are {before[0]}", AGAIN)


def _lost(error: Malformed | OSError, names: list[str]) -> str:
    wrong = error.wrong if isinstance(error, Malformed) else error.strerror or "cannot be read"
    return f"{wrong}; {len(names)} tensors are lost" if names else wrong


def _place(tree: Tree, found: Tree, names: list[str], shard: str) -> Iterator[Fault]:
    """Put the tensors of a shard into the tree, and tell which of them are missing."""
    for name in names or found:
        if name not in found:
            yield Fault(name, f"not in {quoted(shard)}, where the index has it")
        elif name in tree:
            raise Malformed(f"duplicate tensor name {quoted(name)} in {quoted(shard)}", AGAIN)
        else:
            tree[name] = found[name]


def _unlisted(wanted: _Wanted, loaded: Mapping[str, tuple[Found, str]]) -> Tree:
    """Tensors that are there although the index has them nowhere."""
    listed = {name for names in wanted.values() for name in names}
    pairs = [pair for shard, (it, _) in loaded.items() if wanted[shard] for pair in it.tree.items()]
    return {name: leaf for name, leaf in pairs if name not in listed}
