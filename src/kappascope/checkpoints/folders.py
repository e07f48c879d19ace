"""Which files of a folder are the model, and that they lie inside it.

The first of these that is there is read, all else is left aside and said so:

1. ``model.safetensors``, or the shards of ``model.safetensors.index.json``;
2. the same as diffusers names them (``diffusion_pytorch_model...``);
3. ``pytorch_model.bin``, or the shards of its index; the same of diffusers;
4. an adapter: ``adapter_model.safetensors`` or ``.bin``;
5. the only index, the only safetensors file or family of shards, the only GGUF file or family of
   shards, the only other checkpoint, the only ONNX model,
   the only file or family of shards of Flax;
6. what ``torch.distributed.checkpoint`` wrote: its ``.metadata``.

Where there is none of the first four, the files of DeepSpeed's ZeRO are read, also of the folder
that its file ``latest`` names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from kappascope.checkpoints.formats import Malformed, quoted
from kappascope.text import first_few

MAP = ".fetched"  # in the folder of a mirror: which bytes of its files are there
METADATA = ".metadata"  # what torch.distributed.checkpoint writes beside its shards
_STEMS = ("model.safetensors", "diffusion_pytorch_model.safetensors", "pytorch_model.bin",
          "diffusion_pytorch_model.bin")  # fmt: skip
_RANKED = [name for stem in _STEMS for name in (stem, f"{stem}.index.json")]
_ADAPTERS = ("adapter_model.safetensors", "adapter_model.bin")
_INDEX = r".+\.index(\.\w+)?\.json"
_SHARD = r"(.+)-\d{5}-of-(\d{5})((?:\.\w+){1,2})"  # diffusers once had a variant at the end
_PICKLED = r".+\.(pt|pth|ckpt|bin)"
_KINDS = (_INDEX, r".+\.safetensors", r".+\.gguf", _PICKLED, r".+\.onnx", r".+\.msgpack")
# What trainers write beside the weights.
_OTHER = r"(training_args|optimizer|optim|scheduler|scaler|rng_state|random_states).*"
_DISTRIBUTED = re.escape(METADATA)
# A process has a file of the optimizer, and in stage 3 of the model, too.
ZERO_FILE = (r"(?:(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d{1,6})_)?mp_rank_(?P<tensor>\d{1,6})"
        r"_(?P<what>model|optim)_states\.pt")  # fmt: skip
_LATEST = "latest"  # beside the folders of DeepSpeed: the name of the last of them
_LONGEST_NAME = 255  # what file systems take
_MOST_ENTRIES = 100_000  # of a folder; more is no model


class CheckpointFiles(NamedTuple):
    """The files of a folder to read: one, or shards, or what an index tells."""

    listing: str | None
    files: tuple[str, ...]
    missing: tuple[str, ...] = ()
    others: tuple[str, ...] = ()  # checkpoints beside it

    @property
    def all(self) -> tuple[str, ...]:
        """The files, and those that should be beside them."""
        return self.files + self.missing

    @property
    def is_zero(self) -> bool:
        """Whether these are the files of DeepSpeed's ZeRO."""
        return bool(self.files) and all(re.fullmatch(ZERO_FILE, name) for name in self.files[:1])

    def notes(self, read: Collection[str]) -> Iterator[str]:
        """Yield what to say once it is known which files are read.

        >>> list(CheckpointFiles(None, ("a.bin",), others=("b.bin",)).notes({"a.bin"}))
        ['read a.bin, left aside b.bin']
        """
        if aside := [name for name in self.others if name not in read]:
            yield f"read {self.listing or self.files[0]}, left aside {_list(aside)}"
        if set(self.files) & set(_ADAPTERS):
            yield "an adapter alone: what it changes, not the model, into which --base merges it"


def choose_files(folder: Path) -> CheckpointFiles:
    """Return the model in a folder.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     for name in ("model.safetensors", "pytorch_model.bin", "config.json"):
    ...         _ = (Path(folder) / name).write_bytes(b"")
    ...     choose_files(Path(folder)).others
    ('pytorch_model.bin',)
    """
    names = _names(folder)
    chosen = next((name for name in (*_RANKED, *_ADAPTERS) if name in names), None)
    choice = _single(chosen) if chosen else _zero(names) or _only(names)
    if choice is None:
        raise _without(folder, names)
    own = {choice.listing, *choice.files}
    return choice._replace(others=tuple(n for n in names if _is_checkpoint(n) and n not in own))


def snapshot(folder: Path) -> Path:
    """Return the folder that is meant by one that holds several of the same model.

    It is the revision that a repository in Hugging Face's cache points to, or the last step of
    DeepSpeed.
    """
    latest = folder / _LATEST
    if (
        latest.is_file()
        and not latest.is_symlink()
        and not any(map(_is_checkpoint, _names(folder)))
    ):
        with latest.open("rb") as file:
            name = file.read(_LONGEST_NAME).decode("utf-8", "replace").strip()
        if is_plain(name) and (folder / name).is_dir() and not (folder / name).is_symlink():
            return folder / name
    revisions = folder / "snapshots"
    if not revisions.is_dir() or not (folder / "blobs").is_dir():
        return folder
    head = folder / "refs" / "main"
    name = head.read_text()[:100].strip() if head.is_file() else ""
    names = [name] if is_plain(name) else _names(revisions)
    if len(names) != 1:
        raise Malformed(f"holds {len(names)} revisions", "give one folder of its snapshots")
    return revisions / names[0]


def inside(folder: Path, name: str) -> Path:
    """Return where ``name`` really lies.

    Refused unless that is in the folder, or in its cache's blobs.

    >>> inside(Path("models"), "../secret")
    Traceback (most recent call last):
    kappascope.checkpoints.formats.Malformed: shard name is not a plain file name: '../secret' (...)
    """
    if not is_plain(name):
        wrong = f"shard name is not a plain file name: {quoted(name)}"
        raise Malformed(wrong, "repair the index")
    root = resolved(folder)
    real = resolved(root / name)
    roots = [root]
    for parent in (root, *root.parents):
        if parent.parent.name == "snapshots":  # .../snapshots/<revision>/x -> ../../blobs/<digest>
            roots.append(parent.parent.parent / "blobs")
            break
    if not any(real.is_relative_to(root) for root in roots):
        raise Malformed(f"{quoted(name)} is a link out of the folder", "copy the file into it")
    return real


def resolved(path: Path) -> Path:
    """Return where a path leads; one that goes round in a circle of links, to where it is.

    >>> resolved(Path("/")) == Path("/")
    True
    """
    return Path(os.path.realpath(path))  # Path.resolve is an error in a circle before Python 3.13


def is_index(name: str) -> bool:
    """Tell whether a file lists the tensors of shards, by its name.

    >>> is_index("model.safetensors.index.fp16.json")
    True
    """
    return bool(re.fullmatch(_INDEX, name))


def is_shard(name: str) -> bool:
    """Tell whether a file is one of several, by its name.

    >>> is_shard("model-00001-of-00002.safetensors")
    True
    """
    return bool(re.fullmatch(_SHARD, name))


def is_plain(name: object) -> bool:
    r"""Tell whether a name is that of a file in this very folder.

    >>> [is_plain(name) for name in ("a.bin", "../a.bin", "/a.bin", "C:\\a.bin", "~", "")]
    [True, False, False, False, False, False]
    """
    if not isinstance(name, str) or not 0 < len(name.encode("utf-8", "replace")) <= _LONGEST_NAME:
        return False
    return name.isprintable() and not re.search(r"[/\\:]|^~|^\.{1,2}$", name)


def plain_name(name: str) -> str | None:
    """Return a name if it is that of a file in a folder, and of none that is ours.

    >>> plain_name("model.pt"), plain_name("../model.pt"), plain_name(".fetched")
    ('model.pt', None, None)
    """
    return name if is_plain(name) and not name.startswith(MAP) else None


def _names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = [entry.name for entry in islice(entries, _MOST_ENTRIES + 1)]
    if len(names) > _MOST_ENTRIES:  # the model may be among those that were not looked at
        wrong = f"a folder of more than {_MOST_ENTRIES:,} files"
        raise Malformed(wrong, "give the checkpoint in it")
    return sorted(names)


def _single(name: str) -> CheckpointFiles:
    return CheckpointFiles(name, ()) if is_index(name) else CheckpointFiles(None, (name,))


def _is_checkpoint(name: str) -> bool:
    """Tell by its name whether a file is a checkpoint, and not what a trainer keeps beside it."""
    if re.fullmatch(_OTHER, name):
        return False
    return bool(re.fullmatch("|".join((*_KINDS, _DISTRIBUTED)), name))


def _only(names: list[str]) -> CheckpointFiles | None:
    """Return the only checkpoint of the first kind that is there."""
    for pattern in (*_KINDS, _DISTRIBUTED):
        candidates = [n for n in names if re.fullmatch(pattern, n) and _is_checkpoint(n)]
        families = {_family(name): name for name in candidates}
        if len(families) > 1:
            raise Malformed(f"several checkpoints: {_list(candidates)}", "give one of them")
        if len(candidates) == 1 and not is_shard(candidates[0]):
            return _single(candidates[0])
        if candidates:
            return _shards(candidates)
    return None


def _zero(names: list[str]) -> CheckpointFiles | None:
    """Return the files of DeepSpeed's ZeRO, if there is a partition."""
    files = [name for name in names if re.fullmatch(ZERO_FILE, name)]
    partitions = [name for name in files if name.endswith("_optim_states.pt")]
    return CheckpointFiles(None, tuple(files)) if partitions else None


def _family(name: str) -> str:
    shard = re.fullmatch(_SHARD, name)
    return f"{shard[1]}-of-{shard[2]}{shard[3]}" if shard else name


def _shards(shards: list[str]) -> CheckpointFiles:
    """Return shards that no index lists."""
    shard = re.fullmatch(_SHARD, shards[0])
    assert shard  # two names of one family
    stem, count, end = shard.groups()
    places = range(1, min(int(count), _MOST_ENTRIES) + 1)
    missing = {f"{stem}-{i:05d}-of-{count}{end}" for i in places} - set(shards)
    return CheckpointFiles(None, tuple(shards), tuple(sorted(missing)))


def _without(folder: Path, names: list[str]) -> Malformed:
    """Return what to say of a folder without a checkpoint of its own."""
    if any(name.endswith(".distcp") for name in names):
        return Malformed("a distributed checkpoint without its .metadata", "copy all of its files")
    inner = [n for n in names[:1000] if (folder / n).is_dir() and not (folder / n).is_symlink()]
    inner = [n for n in inner if _holds_checkpoint(folder / n)]
    if inner:
        return Malformed(f"checkpoints only in its folders {_list(inner)}", "give one of them")
    foreign = [n for n in names if re.fullmatch(r".+\.(h5|pb|npz|npy|tflite)", n)]
    if foreign:
        return Malformed(
            f"no safetensors or PyTorch file in it, but {_list(foreign)}", "convert it"
        )
    return Malformed("no checkpoint in it", "give a folder with safetensors or PyTorch files")


def _holds_checkpoint(folder: Path) -> bool:
    try:
        return any(map(_is_checkpoint, _names(folder)))
    except (OSError, Malformed):  # not ours to read, as lost+found, or far too large
        return False


def _list(names: list[str]) -> str:
    return first_few([n if is_plain(n) and len(n) < 54 else quoted(n) for n in names])
