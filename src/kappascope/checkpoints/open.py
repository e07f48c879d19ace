"""Open a checkpoint that nobody vouches for: what is in it at once, its numbers when asked for.

Safetensors files, folders of them as Hugging Face lays them out, what ``torch.save`` wrote, old or
new, or its distributed form, DeepSpeed's partitions, TorchScript's tensors, GGUF files, ONNX
models, Flax's MessagePack and NumPy's arrays. A file is what its content says, whatever its name;
no code in it is run, nothing is written, and only the tensor that is asked for is read.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from kappascope.checkpoints import (
    folders,
    gguf,
    numpyfiles,
    quantized,
    safetensors,
    torchao,
    torchfiles,
)
from kappascope.checkpoints.codes import CodedLocation
from kappascope.checkpoints.distributed import ChunkedLocation, read_distributed
from kappascope.checkpoints.flax import read_flax
from kappascope.checkpoints.formats import AGAIN, HEAD, Malformed, format_of, quoted
from kappascope.checkpoints.locations import (
    CheckpointFile,
    FileContents,
    StitchedLocation,
    TensorLocation,
    Tree,
)
from kappascope.checkpoints.onnx import read_onnx
from kappascope.checkpoints.pickles import ForbiddenCall
from kappascope.checkpoints.zero import read_zero
from kappascope.model.skipped import Reason, ReasonKind, Skipped, unreadable
from kappascope.refusal import Refusal
from kappascope.text import first_few

__all__ = ["Checkpoint", "Exhausted", "open"]

_LONGEST_INDEX = 1 << 25  # bytes: the index of 300,000 tensors
_LONGEST_CONFIG = 1 << 22
_MOST_SHARDS = 10_000
_FORMATS = {
    "safetensors": "safetensors",
    "gguf": "GGUF",
    "flax": "Flax",
    "npy": "NumPy",
    "npz": "NumPy",
    "zip": "PyTorch",
    "pickle": "PyTorch, before 1.6",
    "distributed": "PyTorch, distributed",
    "zero": "DeepSpeed ZeRO",
    "onnx": "ONNX",
}
_TITLES = {
    "zip": "a zip archive",
    "gguf": "a GGUF file",
    "flax": "a file of MessagePack",
    "npy": "a NumPy array",
    "onnx": "an ONNX model",
}
_READERS: Mapping[str, Callable[[CheckpointFile], FileContents]] = {
    "gguf": gguf.read_gguf,
    "flax": read_flax,
    "npy": numpyfiles.read_npy,
    "npz": numpyfiles.read_npz,
    "zip": lambda file: torchfiles.zipped(file.whole),
    "pickle": torchfiles.legacy,
}
_Location: TypeAlias = TensorLocation | CodedLocation | ChunkedLocation | StitchedLocation
_LOCATIONS = TensorLocation, CodedLocation, ChunkedLocation, StitchedLocation
_REPAIR = "download the index again"
_STATE_DICT = "save model.state_dict() where you trust it"


class Exhausted(Refusal, MemoryError):  # noqa: N818 - as its first parent
    """A checkpoint that takes more memory to read than there is.

    >>> isinstance(Exhausted(5, "x.pt", "too large", "free some memory"), MemoryError)
    True
    """


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
    faults: tuple[Skipped, ...] = ()
    adapter: Mapping[str, Any] = field(default_factory=dict, repr=False)  # peft's config of it

    @cached_property
    def contents(self) -> Mapping[str, Any]:
        """Nested as in the file, with text for keys; a shared storage is a shared meta storage."""
        storages: dict[tuple[str, int], torch.UntypedStorage] = {}

        def grown(node: Any) -> Any:
            if isinstance(node, dict):
                return {key: grown(value) for key, value in node.items()}
            if not isinstance(node, _LOCATIONS):
                return node
            place = node.storage.file.path, node.storage.begin
            if place not in storages:
                storages[place] = torch.UntypedStorage(node.storage.size, device="meta")
            return node.meta(storages[place])

        return {key: grown(value) for key, value in self.tree.items()}

    @property
    def files(self) -> tuple[str, ...]:
        """The files that hold its tensors, in the order in which they are met."""

        def met(node: Any) -> Iterator[str]:
            if isinstance(node, dict):
                for value in node.values():
                    yield from met(value)
            elif isinstance(node, _LOCATIONS):
                yield node.storage.file.path

        return tuple(dict.fromkeys(met(self.tree)))

    def read(self, path: tuple[str, ...]) -> Tensor:
        """Return the tensor at the end of a path of keys into ``contents``."""
        node = self._node(path)
        with _refusing(Path(node.storage.file.path)):
            return node.read()

    @cached_property
    def codes(self) -> Mapping[tuple[str, ...], str]:
        """The names of the codes that tensors are stored in, by paths; plain ones are not here."""
        found: dict[tuple[str, ...], str] = {}

        def look(node: Any, path: tuple[str, ...]) -> None:
            if isinstance(node, dict):
                for key, value in node.items():
                    look(value, (*path, key))
            elif isinstance(node, CodedLocation) and node.code.name:
                found[path] = node.code.name

        look(self.tree, ())
        return found

    def half_steps(self, path: tuple[str, ...]) -> Tensor:
        """Return half the distance between codes at each number of a tensor that is coded."""
        node = self._node(path)
        assert isinstance(node, CodedLocation), "plain numbers have no codes"
        with _refusing(Path(node.storage.file.path)):
            return node.half_steps()

    def is_one_code(self, path: tuple[str, ...]) -> bool:
        """Tell whether all codes of a tensor that is coded are one and the same."""
        node = self._node(path)
        with _refusing(Path(node.storage.file.path)):
            return isinstance(node, CodedLocation) and node.is_one_code()

    def _node(self, path: tuple[str, ...]) -> _Location:
        node: Any = self.tree
        for key in path:
            node = node[key] if isinstance(node, dict) else None
        if not isinstance(node, _LOCATIONS):
            raise KeyError(f"{path} is no path to a tensor in contents")
        return node

    def __getstate__(self) -> dict[str, Any]:
        # What a worker needs to read: the rest would go along as slowly as it is built anew.
        return {
            name: value for name, value in vars(self).items() if name not in ("contents", "codes")
        }


def open(path: Path | str) -> Checkpoint:
    """Return the checkpoint in a file or folder; a `Refusal` says what is wrong with any other.

    >>> open(Path("nowhere.pt"))
    Traceback (most recent call last):
    kappascope.refusal.Refusal: nowhere.pt: No such file or directory (give a ...)
    """
    path = Path(path)
    with _refusing(path):
        if path.is_dir():
            return _opened_folder(path)
        if folders.is_index(path.name):
            return _joined(path.parent, _listed(path.parent, path.name), path)
        checkpoint = _checkpoint(path, path.parent, *_load(folders.resolved(path), path))
        note = ("one shard of several: only what it holds is read",)
        more = note if folders.is_shard(path.name) else ()
        return replace(checkpoint, notes=more + checkpoint.notes)


def _checkpoint(path: Path, folder: Path, held: FileContents, form: str) -> Checkpoint:
    if not held.tree:
        raise Malformed("holds no tensors", "give the file with the weights")
    notes, faults = _said(held)
    config, more = _config(folder, "config.json", "heads are told from shapes")
    adapter, wrong = _config(folder, "adapter_config.json", "factors are read without their scale")
    config = {**held.config, **config}  # what lies beside a file may correct it
    tree = quantized.with_weights(torchao.with_subclasses(held.tree, held.metadata), config)
    told = notes + held.notes + more + wrong
    return Checkpoint(str(path), form, tree, config, told, faults, adapter)


@contextmanager
def _refusing(path: Path) -> Iterator[None]:
    """Turn what goes wrong inside into a refusal that names the file."""
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


def _load(real: Path, path: Path) -> tuple[FileContents, str]:
    """Return what a file holds, and its format by its content; other files lie beside ``path``."""
    name, file = path.name, CheckpointFile.at(real)
    if name == folders.METADATA:
        return read_distributed(file, path.parent), _FORMATS["distributed"]
    if name.endswith(".distcp"):
        raise Malformed("one file of a distributed checkpoint", "give its folder")
    head = file.read(0, HEAD)
    form = format_of(head)
    named = name.endswith(".safetensors")
    # Of a header's length alone, or a part of it, nothing can be told but that it is cut off.
    if form == "safetensors" or (named and (form == "unknown" or len(head) <= 8)):
        return safetensors.read_safetensors(file), "safetensors"
    if form == "unknown":
        return _oldest(file), _FORMATS["pickle"]
    if named:
        what = _TITLES.get(form, f"a {form}")
        raise Malformed(f"not a safetensors file but {what}", "give it the name it should have")
    if form == "onnx":
        return read_onnx(file, path.parent), _FORMATS["onnx"]
    if form == "zip" and numpyfiles.is_npz(file):
        form = "npz"
    return _READERS[form](file), _FORMATS[form]


def _oldest(file: CheckpointFile) -> FileContents:
    """Return what a file of no known beginning holds: the oldest pickles begin in any way."""
    text = file.read(0, HEAD).isascii()
    try:
        return torchfiles.legacy(file)
    except ForbiddenCall as error:
        if not text or re.search(r"asks for '[\w.]+'", error.wrong):  # else "import" and the like
            raise
    except Malformed:
        pass
    raise Malformed(
        f"neither a safetensors nor a PyTorch file{': it is text' if text else ''}",
        "give a checkpoint or its folder",
    )


def _said(held: FileContents) -> tuple[tuple[str, ...], tuple[Skipped, ...]]:
    """Return what the user is told of foreign classes."""
    names = [quoted(name) for name in held.kinds]
    asked = first_few(names)
    notes = (f"asks for {asked}: not built; {_STATE_DICT}",) if names else ()
    text = f"an object of a class: only the tensors it keeps are read; {_STATE_DICT}"
    reason = Reason(ReasonKind.FOREIGN_OBJECT, text)
    return notes, tuple(Skipped(name, reason) for name, holds in held.kinds.items() if holds)


def _config(folder: Path, name: str, without: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the configuration beside a model, if there is one that can be understood."""
    try:
        if not os.path.lexists(folder / name):
            return {}, ()
        text = CheckpointFile.at(folders.inside(folder, name)).read(0, _LONGEST_CONFIG + 1)
        config = json.loads(text.decode("utf-8-sig")) if len(text) <= _LONGEST_CONFIG else None
    except (Malformed, OSError, ValueError, RecursionError):
        config = None
    if isinstance(config, dict):
        return config, ()
    return {}, (f"{name} beside it cannot be read: {without}",)


# Folders

_Wanted: TypeAlias = Mapping[str, list[str]]  # the tensors of every shard; none listed: all of it


def _opened_folder(path: Path) -> Checkpoint:
    folder = folders.snapshot(path)
    choice = folders.choose_files(folder)
    wanted: _Wanted = {file: [] for file in sorted(choice.all)}
    if choice.listing:
        wanted = _listed(folder, choice.listing)
    if choice.is_zero:
        held = read_zero(folder, choice.files)
        checkpoint = _checkpoint(path, folder, held, _FORMATS["zero"])
    elif choice.listing or len(wanted) > 1:
        checkpoint = _joined(folder, wanted, path)
    else:
        first = choice.files[0]
        checkpoint = _checkpoint(
            path, folder, *_load(folders.inside(folder, first), folder / first)
        )
    return replace(checkpoint, notes=(*choice.notes(wanted), *checkpoint.notes))


def _listed(folder: Path, name: str) -> _Wanted:
    """Return the shards that an index lists, each with the tensors it should hold."""
    file = CheckpointFile.at(folders.inside(folder, name))
    if file.size > _LONGEST_INDEX:
        raise Malformed(f"an index of {file.size} bytes", _REPAIR)
    places = safetensors.parsed(file.read(0, file.size), "index").get("weight_map")
    if not isinstance(places, dict) or not places:
        raise Malformed(f"no weight_map in {quoted(name)}", _REPAIR)
    safetensors.check_count(places)
    if len(set(map(str, places.values()))) > _MOST_SHARDS:
        raise Malformed(f"an index of more than {_MOST_SHARDS} shards", _REPAIR)
    wanted: dict[str, list[str]] = {}
    for tensor, shard in places.items():
        if not folders.is_plain(shard):
            raise Malformed(f"shard name is not a plain file name: {quoted(shard)}", _REPAIR)
        names = wanted.setdefault(shard, [])
        if not shard.endswith(".msgpack"):  # whose index names parts by Flax's names
            names.append(tensor)
    return wanted


def _joined(folder: Path, wanted: _Wanted, path: Path) -> Checkpoint:
    """Return what the shards hold together; one that cannot be read is a fault of the whole."""
    reals = {shard: folders.inside(folder, shard) for shard in wanted}  # before any is opened
    loaded: dict[str, tuple[FileContents, str]] = {}
    faults: list[Skipped] = []
    for shard, names in wanted.items():
        try:
            loaded[shard] = _load(reals[shard], folder / shard)
            _check_unmixed(loaded)
        except (Malformed, OSError) as error:
            loaded.pop(shard, None)
            faults.append(Skipped(shard, _lost(error, names)))
    if not loaded:
        raise Malformed(f"no shard can be read: {quoted(faults[0].name)} {faults[0].reason}", AGAIN)
    same: list[str] = []
    united = _united([(shard, held.tree) for shard, (held, _) in loaded.items()], same)
    listed = {name: shard for shard, names in wanted.items() for name in names}
    safetensors.check_count(united)
    tree: Tree = {}
    for name in dict.fromkeys((*listed, *united)):  # in the order of the index, if there is one
        place = listed.get(name)
        if place is None or (place in loaded and name in loaded[place][0].tree):
            tree[name] = united[name]
        elif place in loaded:
            reason = unreadable(f"not in {quoted(place)}, where the index has it")
            faults.append(Skipped(name, reason))
    more = len(tree.keys() - listed.keys()) if listed else 0
    kinds = {name: holds for held, _ in loaded.values() for name, holds in held.kinds.items()}
    metadata = {name: text for held, _ in loaded.values() for name, text in held.metadata.items()}
    first, form = next(iter(loaded.values()))
    whole = FileContents(tree, kinds, first.config, first.notes, metadata)
    checkpoint = _checkpoint(path, folder, whole, form)
    notes = [f"{more} tensors in the shards that the index does not list"] if more else []
    if same:
        named = first_few([quoted(name) for name in same])
        notes.append(f"in several shards with the same values, read once: {named}")
    notes += checkpoint.notes
    return replace(checkpoint, notes=tuple(notes), faults=(*faults, *checkpoint.faults))


def _check_unmixed(loaded: Mapping[str, tuple[FileContents, str]]) -> None:
    *before, last = [form for _, form in loaded.values()]
    if before and (before[0] == "safetensors") != (last == "safetensors"):
        raise Malformed(f"is {last} among shards that are {before[0]}", AGAIN)


def _lost(error: Malformed | OSError, names: list[str]) -> Reason:
    wrong = error.wrong if isinstance(error, Malformed) else error.strerror or "cannot be read"
    return unreadable(f"{wrong}; {len(names)} tensors are lost" if names else wrong)


def _united(trees: list[tuple[str, Tree]], same: list[str], at: str = "") -> Tree:
    """Return the trees of several shards as one; names that two of them hold alike go to ``same``.

    Where two differ, neither is taken: nothing tells which of them the model is.
    """
    holders: dict[str, list[tuple[str, Any]]] = {}
    for shard, tree in trees:
        for name, node in tree.items():
            holders.setdefault(name, []).append((shard, node))
    united: Tree = {}
    for name, held in holders.items():
        (_, node), *others = held
        united[name] = node
        if others and all(isinstance(each, dict) for _, each in held):
            united[name] = _united(held, same, f"{at}{name}.")
        elif others and any(isinstance(each, (dict, *_LOCATIONS)) for _, each in held):
            why = next(filter(None, (_difference(node, each) for _, each in others)), "")
            if why:
                shards = first_few([quoted(shard) for shard, _ in held])
                united[name] = unreadable(f"{why} in {shards}")
            else:
                same.append(at + name)
    return united


def _difference(node: Any, other: Any) -> str:
    """Tell how two nodes of the same name differ, if they do."""
    if not (isinstance(node, _LOCATIONS) and isinstance(other, _LOCATIONS)):
        return "of different kinds"
    if (node.dtype, node.shape) != (other.dtype, other.shape):
        return "of different shapes or dtypes"
    try:
        # as bytes, for NaN is not equal to itself
        a, b = (each.read().contiguous().flatten().view(torch.uint8) for each in (node, other))
    except (Malformed, OSError, MemoryError):
        return "held twice and not to be compared"
    return "" if torch.equal(a, b) else "with different values"
