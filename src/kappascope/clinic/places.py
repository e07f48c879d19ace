"""Where a model is, on disk or in memory, and how to get at its matrices there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeAlias

from torch import Tensor, nn

from kappascope import checkpoints
from kappascope.matrices import Plan, Skipped, Unit, plan, reader
from kappascope.store import Refusal
from kappascope.weights.inventory import Read

Model: TypeAlias = nn.Module | Mapping[Any, Any]
Source: TypeAlias = str | Path | Model

GIGABYTE = 2**30


@dataclass(frozen=True, eq=False)
class Opened:
    """A model that can be read: what is in it, and how to get at a tensor.

    >>> import torch
    >>> Memory({"fc.weight": torch.eye(2)}).opened().matrix("fc.weight")
    tensor([[1., 0.],
            [0., 1.]])
    """

    plan: Plan
    read: Read
    config: Mapping[str, Any] | None = None
    faults: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def matrix(self, name: str) -> Tensor | None:
        """The matrix of this name, if there is one."""
        unit = self._holders.get(name)
        found = unit.matrices(self.read) if unit else iter(())
        return next((matrix for logical, matrix in found if logical.name == name), None)

    def units(self, names: Iterable[str]) -> tuple[Unit, ...]:
        """Those that hold the matrices of these names, as far as there are any."""
        holders = (self._holders[name] for name in names if name in self._holders)
        return tuple({unit.paths: unit for unit in holders}.values())

    @cached_property
    def _holders(self) -> dict[str, Unit]:
        return {part.name: unit for unit in self.plan.units for part in unit.parts}


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
    planned = plan(found.contents, found.config)
    return Opened(planned, found.read, found.config, faults, found.notes)


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
        # where every dtype can be computed with: some devices have no float64
        return Opened(plan(self.model), lambda path: read(path).detach().cpu())

    def portion(self, names: Iterable[str]) -> Portion:
        """What of it is needed for the matrices of these names."""
        opened = self.opened()
        return Portion(opened.units(names), opened.read)


@dataclass(frozen=True, eq=False)
class Portion:
    """Some tensors of a model in memory; they are copied when they are sent to another process."""

    units: tuple[Unit, ...]
    read: Read

    def opened(self) -> Opened:
        """With nothing else in it."""
        return Opened(Plan(self.units, ()), self.read)

    def __reduce__(self) -> tuple[Any, ...]:
        paths = [path for unit in self.units for path in unit.paths]
        tensors = {path: self.read(path).clone() for path in paths}  # a view would send its whole
        return Portion, (self.units, tensors.__getitem__)


Place: TypeAlias = File | Memory


def place(source: Source) -> Place:
    """Where a model is that was named or handed over.

    >>> str(place(nn.Linear(2, 2)))
    'Linear'
    """
    return File.at(source) if isinstance(source, str | Path) else Memory(source)
