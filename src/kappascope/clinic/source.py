"""Where a model is, on disk or in memory, and how to get at its matrices there."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from socket import gethostname
from typing import Any, TypeAlias

from torch import Tensor, nn

from kappascope.checkpoints import open
from kappascope.checkpoints.folders import is_index, resolved, snapshot
from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.locations import MIRRORS, Stamp
from kappascope.checkpoints.paths import NO_CHECKPOINT, advice_on_missing, is_remote
from kappascope.checkpoints.remote import Mirror, in_hub_cache, public, relocated
from kappascope.clinic.examine import non_finite_entries
from kappascope.clinic.moments import Moments, moments
from kappascope.clinic.vectors import Vector
from kappascope.corrections.saved import merged
from kappascope.matrix.precision import Rounding
from kappascope.model.adapters import adapter_parts, merged_contents, with_deltas
from kappascope.model.matrices import Plan, Unit, plan, reader
from kappascope.model.names import is_mask, stored
from kappascope.model.skipped import Reason, ReasonKind, Skipped, unreadable
from kappascope.model.tensors import Path as Keys
from kappascope.model.tensors import Read, refuse_meta, vectors
from kappascope.refusal import Refusal
from kappascope.system.extras import plugins
from kappascope.system.memory import is_out_of_memory
from kappascope.text import error_text

Model: TypeAlias = nn.Module | Mapping[Any, Any]
Source: TypeAlias = str | Path | Model

GIGABYTE = 2**30
WEIGHT_SUFFIXES = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".onnx_data",
                   ".data", ".npz", ".npy", ".distcp", ".msgpack"}  # fmt: skip
READ_BESIDE = ("config.json", "adapter_config.json", ".metadata")  # how weights are to be read
Stamps: TypeAlias = tuple[tuple[str, Stamp], ...]
"""The files of a checkpoint by their names, as they were when we first saw them."""


@dataclass(frozen=True, eq=False)
class Opened:
    """A model that can be read: what is in it, and how to get at a tensor.

    >>> import torch
    >>> InMemory({"fc.weight": torch.eye(2)}).opened().matrices(["fc.weight", "fc.bias"])
    {'fc.weight': tensor([[1., 0.],
            [0., 1.]])}
    """

    plan: Plan
    read: Read
    config: Mapping[str, Any] | None = None
    faults: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    vectors: Mapping[str, Keys] = field(default_factory=dict)
    moments: tuple[Moments, ...] = ()
    files: tuple[str, ...] = ()  # of which it was read
    codes: Mapping[Keys, str] = field(default_factory=dict)  # what tensors are stored in, if coded
    half_steps: Read | None = None  # of those codes
    is_one_code: Callable[[Keys], bool] | None = None  # tells of which all are the same
    ranks: Mapping[str, int] = field(default_factory=dict)  # what factors allow, by their products

    def roundings(self, unit: Unit) -> dict[str, Rounding]:
        """Return how far the entries of each matrix of a coded tensor may have been rounded.

        >>> import torch
        >>> opened = InMemory({"fc.weight": torch.eye(2)}).opened()
        >>> opened.roundings(opened.plan.units[0])
        {}
        """
        code = self.codes.get(unit.paths[0])
        if not code or self.half_steps is None:
            return {}
        pairs = unit.matrices(self.half_steps)
        return {logical.name: Rounding(code, steps) for logical, steps in pairs}

    def holds_one_code(self, unit: Unit) -> bool:
        """Tell whether a tensor is stored in codes that are all one value.

        >>> import torch
        >>> opened = InMemory({"fc.weight": torch.zeros(2, 2)}).opened()
        >>> opened.holds_one_code(opened.plan.units[0])
        False
        """
        path = unit.paths[0]
        return path in self.codes and self.is_one_code is not None and self.is_one_code(path)

    def examined_vectors(self) -> Iterator[Vector | Skipped]:
        """Yield the vectors, or why one cannot be read or is not finite: all outputs pass them.

        >>> import torch
        >>> broken = {"fc.bias": torch.tensor([1.0, float("nan")])}
        >>> list(InMemory(broken).opened().examined_vectors())
        [Skipped(name='fc.bias', reason='non-finite (1 of 2), first at [1]')]
        """
        for name, path in self.vectors.items():
            try:
                vector = self.read(path)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                wrong = error.wrong if isinstance(error, Refusal) else error_text(error)
                yield Skipped(name, unreadable(f"cannot be read: {wrong}"))
                continue
            reason = non_finite_entries(vector)
            if reason is None and not vector.is_meta:
                yield Vector.of(name, vector)
            elif reason and not (reason.kind is ReasonKind.MINUS_INFINITY and is_mask(name)):
                yield Skipped(name, reason)

    def matrices(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the matrices of these names that are there.

        A tensor is read once for all its parts.
        """
        wanted = frozenset(names)
        pairs = (pair for unit in self.units(wanted) for pair in unit.matrices(self.read))
        return {logical.name: matrix for logical, matrix in pairs if logical.name in wanted}

    def absence(self, name: str) -> Reason:
        """Say why there is no matrix of this name to compare another with.

        >>> import torch
        >>> InMemory({"w": torch.eye(2).int()}).opened().absence("w")
        'in the reference: torch.int32'
        """
        why = self._skipped.get(stored(name))
        if why:
            return unreadable(f"in the reference: {why}")
        return Reason(ReasonKind.NO_COUNTERPART, "not in the reference")

    def units(self, names: Iterable[str]) -> tuple[Unit, ...]:
        """Return the stored tensors that hold those matrices of these names that exist."""
        holders = (self._holders[name] for name in names if name in self._holders)
        return tuple({unit.paths: unit for unit in holders}.values())

    @cached_property
    def _holders(self) -> dict[str, Unit]:
        return {part.name: unit for unit in self.plan.units for part in unit.parts}

    @cached_property
    def _skipped(self) -> dict[str, Reason]:
        return dict(self.plan.skipped)


@dataclass(frozen=True)
class OnDisk:
    """A checkpoint on disk, as it was when we first saw it."""

    path: str
    stamp: Stamps
    host: str = field(default_factory=gethostname, compare=False, repr=False)

    @classmethod
    def at(cls, path: str | Path) -> OnDisk:
        """Look at the file or folder of this name."""
        try:
            return cls(str(path), _stamps(Path(path)))
        except (OSError, ValueError) as error:
            wrong = getattr(error, "strerror", None) or str(error)
            is_missing = isinstance(error, FileNotFoundError)
            advice = advice_on_missing(Path(path)) if is_missing else NO_CHECKPOINT
            raise Refusal(2, str(path), wrong, advice) from error

    def __str__(self) -> str:
        return self.path

    def opened(self) -> Opened:
        """Parse it, once in each process; to be called where a hostile file does no harm.

        Refused if it is no longer what it was: two versions would be mixed in one diagnosis.
        """
        opened = _opened(self.path, self.stamp)
        try:
            unchanged = self._is_unchanged(_stamps(Path(self.path)))
        except OSError:
            unchanged = False
        if not unchanged:
            advice = "try again once nothing writes to it"
            raise Refusal(2, self.path, "changed while it was read", advice)
        return opened

    def _is_unchanged(self, now: Stamps) -> bool:
        """Tell whether these are the files that we first saw, perhaps from another machine."""
        if self.host == gethostname():
            return now == self.stamp
        return OnDisk(self.path, now).identity == self.identity

    @property
    def identity(self) -> list[list[str | int]]:
        """What tells the files from others on every machine that shares them."""
        return [[name, stamp.size, stamp.modified] for name, stamp in self.stamp]

    def holds(self, path: str) -> bool:
        """Tell whether this is the very file at ``path``, whatever links lead to it."""
        return resolved(Path(path)) == resolved(Path(self.path))

    def portion(self, names: Iterable[str]) -> OnDisk:
        """Return the whole checkpoint, which is read where the work is done."""
        return self

    @property
    def parse_seconds(self) -> float:
        """Seconds it may take to parse: half a minute, and a minute for every gigabyte."""
        path = Path(self.path)
        try:
            files = list(path.iterdir()) if path.is_dir() else [path]
            size = sum(file.stat().st_size for file in files if file.is_file())
        except OSError:  # who parses it will say why
            size = 0
        return 30 + 60 * size / GIGABYTE


@dataclass(frozen=True)
class Mirrored(OnDisk):
    """A checkpoint far away, whose bytes come into a folder of ours as they are asked for."""

    url: str = ""
    mirror: Mirror | None = field(default=None, compare=False, repr=False)  # where the network is

    @classmethod
    def of(cls, url: str) -> Mirrored:
        """Look at what is at an address."""
        mirror = Mirror.of(url)
        return cls(str(mirror.path), (), url=url, mirror=mirror)

    def __str__(self) -> str:
        return public(self.url)

    def __reduce__(self) -> tuple[Any, ...]:
        return Mirrored, (
            self.path,
            (),
            self.host,
            self.url,
        )  # the others ask for bytes, and fetch none

    def opened(self) -> Opened:
        """Parse what was fetched of it; `Absent` says what is missing."""
        path = Path(relocated(self.path))
        MIRRORS.add(str(path if path.is_dir() else path.parent))
        try:
            return _opened(str(path), ())
        except Refusal as refusal:  # by a reader, which knows the folder of ours alone
            raise type(refusal)(refusal.code, self.url, refusal.wrong, refusal.advice) from None

    @property
    def identity(self) -> list[list[str | int]]:
        """What tells the files from others: their address, their lengths, their versions."""
        files = self.mirror.files.values() if self.mirror else ()
        return [[self.url, *file] for file in files]

    def holds(self, path: str) -> bool:
        """Tell whether this is the file at ``path``: never, for it is elsewhere."""
        return False


def _stamps(path: Path) -> Stamps:
    """Return what tells whether a file, or a weight in a folder, was written to meanwhile.

    An index stands for the weights beside it. Logs are left out: they may grow meanwhile.
    """
    files, status = [path], path.stat()  # which may be an error
    folder = path.parent
    if stat.S_ISDIR(status.st_mode):
        files, folder = [], path
        with suppress(OSError, Malformed):  # who reads it says why it cannot
            folder = snapshot(path)
    if (not files or is_index(path.name)) and os.access(folder, os.R_OK | os.X_OK):
        names = sorted(folder.iterdir())
        files += [each for each in names if each.suffix in WEIGHT_SUFFIXES and each.is_file()]
    if os.access(folder, os.X_OK):
        files += [beside for name in READ_BESIDE if (beside := folder / name).is_file()]
    return tuple((str(file), Stamp.of(file.stat())) for file in dict.fromkeys(files))


@cache
def _opened(path: str, stamp: Stamps) -> Opened:
    checkpoint = open.open(Path(path))
    model = merged(checkpoint.contents, checkpoint.read)
    adapted = with_deltas(model.contents, checkpoint.adapter, model.read)
    return Opened(
        plan(adapted.contents, checkpoint.config),
        adapted.read,
        checkpoint.config,
        checkpoint.faults,
        (*checkpoint.notes, *adapted.notes),
        vectors(adapted.contents),
        moments(adapted.contents),
        checkpoint.files,
        checkpoint.codes,
        checkpoint.half_steps,
        checkpoint.is_one_code,
        adapted.ranks,
    )


@dataclass(frozen=True)
class Adapted(OnDisk):
    """An adapter on disk, to be read as the model that it was trained on with it merged in."""

    base: OnDisk | None = None

    def opened(self) -> Opened:
        """Parse both, and merge a weight when it is read."""
        assert self.base is not None, "an adapter is merged into a model"
        super().opened(), self.base.opened()  # refused if either changed meanwhile
        return _opened_adapted(self.path, self.stamp, self.base.path, self.base.stamp)

    @property
    def identity(self) -> list[list[str | int]]:
        """What tells the files of both from others."""
        return [*super().identity, *(self.base.identity if self.base else [])]

    @property
    def parse_seconds(self) -> float:
        """Seconds it may take to parse both."""
        return super().parse_seconds + (self.base.parse_seconds if self.base else 0.0)


@cache
def _opened_adapted(path: str, stamp: Stamps, base_path: str, base_stamp: Stamps) -> Opened:
    adapter, base = open.open(Path(path)), open.open(Path(base_path))
    if not adapter_parts(adapter.contents, adapter.adapter):
        raise Refusal(2, path, "holds no adapter to merge", "give it without --base")
    model = merged(base.contents, base.read)
    both = merged_contents(
        model.contents, model.read, adapter.contents, adapter.adapter, adapter.read
    )
    return Opened(
        plan(both.contents, base.config),
        both.read,
        base.config,
        (*base.faults, *adapter.faults),
        (*base.notes, *both.notes),
        vectors(both.contents),
        (),
        (*base.files, *adapter.files),
    )


@dataclass(frozen=True, eq=False)
class InMemory:
    """A model in memory."""

    model: Model

    def __str__(self) -> str:
        return type(self.model).__name__

    def opened(self) -> Opened:
        """Return the model as it is, looked over once."""
        return self._opened

    @cached_property
    def _opened(self) -> Opened:
        read = reader(self.model)

        def here(path: Keys) -> Tensor:
            # where every dtype can be computed with: some devices have no float64
            tensor = read(path).detach()
            return tensor if tensor.is_meta else tensor.cpu()  # without values nothing is copied

        if isinstance(self.model, nn.Module):
            return Opened(plan(self.model), here, vectors=vectors(self.model))
        model = merged(self.model, here)
        return Opened(
            plan(model.contents),
            model.read,
            vectors=vectors(model.contents),
            moments=moments(model.contents),
        )

    def portion(self, names: Iterable[str]) -> Portion:
        """Return what of it is needed for the matrices of these names."""
        opened, wanted = self.opened(), {stored(name) for name in names}
        skipped = tuple(item for item in opened.plan.skipped if item.name in wanted)
        config = opened.plan.config
        return Portion(opened.units(names), opened.read, skipped, opened.vectors, config)


@dataclass(frozen=True, eq=False)
class Portion:
    """Some tensors of a model in memory; they are copied when they are sent to another process."""

    units: tuple[Unit, ...]
    read: Read
    skipped: tuple[Skipped, ...] = ()
    vectors: Mapping[str, Keys] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)

    def opened(self) -> Opened:
        """These tensors as a model with nothing else in it."""
        plan = Plan(self.units, self.skipped, self.config)
        return Opened(plan, self.read, vectors=self.vectors)

    def holds(self, path: str) -> bool:
        """Tell whether this is the file at ``path``: never, for it is in no file."""
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        paths = [path for unit in self.units for path in unit.paths]
        tensors = {path: self.read(path).clone() for path in paths}  # a view would send its whole
        return Portion, (self.units, tensors.__getitem__, self.skipped)  # without what is beside


Location: TypeAlias = OnDisk | InMemory
Readable: TypeAlias = OnDisk | Portion
"""A model, or what is needed of it, that can be opened in whichever process."""


@dataclass(frozen=True, eq=False)
class Reference:
    """A model to compare another with, whose matrices are asked for by the names of the other."""

    model: Readable
    names: Mapping[str, str]  # of the other's matrices, to those of this one

    def matrices(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the counterparts of the matrices of these names that are there."""
        there = {self.names[name]: name for name in names if name in self.names}
        found = self.model.opened().matrices(there)
        return {there[name]: matrix for name, matrix in found.items()}

    def absence(self, name: str) -> Reason:
        """Say why a matrix of this name has no counterpart."""
        return self.model.opened().absence(self.names.get(name, name))


def located(source: Source, base: Source | None = None) -> Location:
    """Return where a model is that was named or handed over; an adapter may be merged into a base.

    >>> str(located(nn.Linear(2, 2)))
    'Linear'
    """
    if base is not None:
        adapter, model = located(source), located(base)
        if not isinstance(adapter, OnDisk) or not isinstance(model, OnDisk):
            raise TypeError("expected paths of an adapter and of its base")
        if isinstance(adapter, Mirrored) or isinstance(model, Mirrored):
            raise Refusal(
                4, str(source), "merges what is on this disk alone", "download both first"
            )
        return Adapted(adapter.path, adapter.stamp, base=model)
    if isinstance(source, str) and is_remote(source):
        kept = in_hub_cache(source)
        return OnDisk.at(kept) if kept else Mirrored.of(source)
    if isinstance(source, str | Path):
        if reader := plugins("readers").get(Path(source).suffix.lstrip(".")):
            return InMemory(reader(Path(source)))  # in this process: its author vouches for it
        return OnDisk.at(source)
    given: object = source
    if not isinstance(given, nn.Module | Mapping):
        wanted = "a path, an nn.Module or a mapping from names to tensors"
        raise TypeError(f"expected {wanted}, got {type(given).__name__}")
    if isinstance(given, nn.Module):
        refuse_meta(given)
    return InMemory(source)
