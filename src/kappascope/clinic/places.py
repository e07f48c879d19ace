"""Where a model is, on disk or in memory, and how to get at its matrices there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from kappascope import checkpoints
from kappascope.clinic.examination import unsound
from kappascope.matrices import Plan, Skipped, Unit, plan, reader
from kappascope.refusals import Refusal
from kappascope.weights.factored import merged
from kappascope.weights.inventory import Path as Keys
from kappascope.weights.inventory import Read, vectors
from kappascope.weights.reasons import Masking, Unlike
from kappascope.weights.roles import is_mask, stored

Model: TypeAlias = nn.Module | Mapping[Any, Any]
Source: TypeAlias = str | Path | Model

GIGABYTE = 2**30


@dataclass(frozen=True, eq=False)
class Opened:
    """A model that can be read: what is in it, and how to get at a tensor.

    >>> import torch
    >>> Memory({"fc.weight": torch.eye(2)}).opened().matrices(["fc.weight", "fc.bias"])
    {'fc.weight': tensor([[1., 0.],
            [0., 1.]])}
    """

    plan: Plan
    read: Read
    config: Mapping[str, Any] | None = None
    faults: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    vectors: Mapping[str, Keys] = field(default_factory=dict)

    def unsound(self) -> Iterator[Skipped]:
        """The vectors that cannot be read or are not finite: no matrices, but all pass them.

        >>> import torch
        >>> list(Memory({"fc.bias": torch.tensor([1.0, float("nan")])}).opened().unsound())
        [Skipped(name='fc.bias', reason='non-finite (1 of 2), first at [1]')]
        """
        for name, path in self.vectors.items():
            try:
                vector = self.read(path)
            except Refusal as refusal:
                yield Skipped(name, f"cannot be read: {refusal.wrong}")
                continue
            if (found := unsound(vector)) and not (isinstance(found, Masking) and is_mask(name)):
                yield Skipped(name, found)

    def matrices(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Those of these names that are there; a tensor is read once for all its parts."""
        wanted = frozenset(names)
        found = (pair for unit in self.units(wanted) for pair in unit.matrices(self.read))
        return {logical.name: matrix for logical, matrix in found if logical.name in wanted}

    def absence(self, name: str) -> str:
        """Why there is no matrix of this name to compare another with.

        >>> import torch
        >>> Memory({"w": torch.eye(2).int()}).opened().absence("w")
        'in the reference: torch.int32'
        """
        why = self._skipped.get(stored(name))
        return f"in the reference: {why}" if why else Unlike("not in the reference")

    def units(self, names: Iterable[str]) -> tuple[Unit, ...]:
        """Those that hold the matrices of these names, as far as there are any."""
        holders = (self._holders[name] for name in names if name in self._holders)
        return tuple({unit.paths: unit for unit in holders}.values())

    @cached_property
    def _holders(self) -> dict[str, Unit]:
        return {part.name: unit for unit in self.plan.units for part in unit.parts}

    @cached_property
    def _skipped(self) -> dict[str, str]:
        return dict(self.plan.skipped)


@dataclass(frozen=True)
class File:
    """A checkpoint on disk, as it was when we first saw it."""

    path: str
    stamp: int

    @classmethod
    def at(cls, path: str | Path) -> File:
        """The file or folder of this name."""
        try:
            return cls(str(path), Path(path).stat().st_mtime_ns)
        except (OSError, ValueError) as error:
            wrong = getattr(error, "strerror", None) or str(error)
            raise Refusal(2, str(path), wrong, "give a checkpoint or its folder") from error

    def __str__(self) -> str:
        return self.path

    def opened(self) -> Opened:
        """Parsed, once in each process; to be called where a hostile file does no harm."""
        return _opened(self.path, self.stamp)

    def holds(self, path: str) -> bool:
        """Whether this is the very file at ``path``, whatever links lead to it."""
        return Path(path).resolve() == Path(self.path).resolve()

    def portion(self, names: Iterable[str]) -> File:
        """All of it: it is read where the work is done."""
        return self

    @property
    def patience(self) -> float:
        """Seconds it may take to parse: half a minute, and a minute for every gigabyte."""
        path = Path(self.path)
        try:
            files = list(path.iterdir()) if path.is_dir() else [path]
            size = sum(one.stat().st_size for one in files if one.is_file())
        except OSError:  # who parses it will say why
            size = 0
        return 30 + 60 * size / GIGABYTE


@cache
def _opened(path: str, stamp: int) -> Opened:
    found = checkpoints.open(Path(path))
    faults = tuple(Skipped(*fault) for fault in found.faults)
    whole = merged(found.contents, found.read)
    planned, small = plan(whole.contents, found.config), vectors(whole.contents)
    return Opened(planned, whole.read, found.config, faults, found.notes, small)


@dataclass(frozen=True, eq=False)
class Memory:
    """A model in memory."""

    model: Model

    def __str__(self) -> str:
        return type(self.model).__name__

    def opened(self) -> Opened:
        """As it is, looked over once."""
        return self._opened

    @cached_property
    def _opened(self) -> Opened:
        read = reader(self.model)

        def here(path: Keys) -> Tensor:
            # where every dtype can be computed with: some devices have no float64
            return read(path).detach().cpu()

        if isinstance(self.model, nn.Module):
            return Opened(plan(self.model), here, vectors=vectors(self.model))
        whole = merged(self.model, here)
        return Opened(plan(whole.contents), whole.read, vectors=vectors(whole.contents))

    def portion(self, names: Iterable[str]) -> Portion:
        """What of it is needed for the matrices of these names."""
        opened, wanted = self.opened(), {stored(name) for name in names}
        skipped = tuple(one for one in opened.plan.skipped if one.name in wanted)
        return Portion(opened.units(names), opened.read, skipped)


@dataclass(frozen=True, eq=False)
class Portion:
    """Some tensors of a model in memory; they are copied when they are sent to another process."""

    units: tuple[Unit, ...]
    read: Read
    skipped: tuple[Skipped, ...] = ()

    def opened(self) -> Opened:
        """With nothing else in it."""
        return Opened(Plan(self.units, self.skipped), self.read)

    def holds(self, path: str) -> bool:
        """Never: it is in no file."""
        return False

    def __reduce__(self) -> tuple[Any, ...]:
        paths = [path for unit in self.units for path in unit.paths]
        tensors = {path: self.read(path).clone() for path in paths}  # a view would send its whole
        return Portion, (self.units, tensors.__getitem__, self.skipped)


Place: TypeAlias = File | Memory


def place(source: Source) -> Place:
    """Where a model is that was named or handed over.

    >>> str(place(nn.Linear(2, 2)))
    'Linear'
    """
    if isinstance(source, str | Path):
        return File.at(source)
    given: object = source
    if not isinstance(given, nn.Module | Mapping):
        wanted = "a path, an nn.Module or a mapping from names to tensors"
        raise TypeError(f"expected {wanted}, got {type(given).__name__}")
    return Memory(source)
