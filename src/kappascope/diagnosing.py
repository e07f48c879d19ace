"""Examine all matrices of a model or a checkpoint.

A checkpoint's bytes are parsed and its matrices factorized in other processes with limits of time
and memory; here only rows of numbers and text arrive. A model in memory is examined in place.

>>> from torch import nn
>>> found = diagnose(nn.Linear(3, 2))
>>> [(row.name, row.shape) for row in found.matrices], found.skipped
([('weight', (2, 3))], (Skipped(name='bias', reason='one-dimensional'),))
"""

from __future__ import annotations

import fnmatch
import math
import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from torch import nn

from kappascope import checkpoints
from kappascope.diagnosis import Diagnosis
from kappascope.engines import Done, Engine, Here, Processes
from kappascope.examination import Depth, Examination, examine
from kappascope.inventory import Read
from kappascope.matrices import Plan, Skipped, Unit, plan, reader
from kappascope.products import Attention, Product, attention
from kappascope.store import Refusal

Model: TypeAlias = nn.Module | Mapping[Any, Any]
Task: TypeAlias = Unit | Attention
Row: TypeAlias = Examination | Product

GIGABYTE = 2**30
LIBRARIES = GIGABYTE // 2  # what torch and scipy hold before any tensor is read
MODULES = ("torch", "scipy.optimize", "kappascope.diagnosing")  # what a worker needs
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class Choice:
    """Which matrices are examined, and how much of their spectra is taken.

    A pattern is a part of the name, or a shell pattern for all of it.

    >>> Choice(include=("*.mlp.*",), exclude=("embed",)).takes("layers.0.mlp.up_proj.weight")
    True
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    spectrum: Depth = "auto"

    def takes(self, name: str) -> bool:
        """Whether a matrix of this name is wanted."""
        wanted = not self.include or any(_matches(name, one) for one in self.include)
        return wanted and not any(_matches(name, one) for one in self.exclude)


def _matches(name: str, pattern: str) -> bool:
    return pattern in name or fnmatch.fnmatchcase(name, pattern)


@dataclass(frozen=True)
class Opened:
    """A model that can be read: what is in it, and how to get at a tensor."""

    source: str
    plan: Plan
    read: Read
    config: Mapping[str, Any] | None = None
    faults: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def matrix(self, name: str) -> Any:
        """The matrix of this name, or None."""
        unit = self._units().get(name)
        found = unit.matrices(self.read) if unit else ()
        return next((matrix for logical, matrix in found if logical.name == name), None)

    def _units(self) -> dict[str, Unit]:
        return {part.name: unit for unit in self.plan.units for part in unit.parts}


@cache
def _opened(path: str, stamp: int) -> Opened:
    """A checkpoint on disk, opened once by each process."""
    found = checkpoints.open(Path(path))
    faults = tuple(Skipped(*fault) for fault in found.faults)
    planned = plan(found.contents, found.config)
    return Opened(found.source, planned, found.read, found.config, faults, found.notes)


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
        """Parsed; to be called where a hostile file does no harm."""
        return _opened(self.path, self.stamp)

    @property
    def patience(self) -> float:
        """Seconds it may take to parse: half a minute, and a minute for every gigabyte."""
        path = Path(self.path)
        files = path.iterdir() if path.is_dir() else [path]
        size = sum(one.stat().st_size for one in files if one.is_file())
        return 30 + 60 * size / GIGABYTE


@dataclass(frozen=True)
class Memory:
    """A model in memory."""

    model: Model

    def __str__(self) -> str:
        return type(self.model).__name__

    def opened(self) -> Opened:
        """As it is."""
        return Opened(str(self), plan(self.model), reader(self.model))


Place: TypeAlias = File | Memory


@dataclass(frozen=True)
class Summary:
    """What can be said of a checkpoint without a look at its numbers."""

    source: str
    plan: Plan
    attention: tuple[Attention, ...]
    skipped: tuple[Skipped, ...]
    faults: tuple[Skipped, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Case:
    """A model to be examined: the tasks, the largest first, and where they are done."""

    place: Place
    reference: Place | None
    choice: Choice
    summary: Summary
    tasks: tuple[Task, ...]
    engine: Engine

    def examine(self) -> Generator[Done[Task]]:
        """Each task as it ends; its ``result`` is the rows of its matrices or products."""
        work = partial(_work, self.place, self.reference, self.choice)
        with closing(self.engine.run(work, self.tasks)) as ended:
            for done in ended:
                rows = self._failures(done) if done.failure else done.result
                yield replace(done, result=rows)

    def _failures(self, done: Done[Task]) -> list[Row]:
        """Rows that say why there are no others."""
        reason = done.failure.removeprefix("Refusal: ")
        if isinstance(done.error, MemoryError) or "not enough memory" in reason:
            reason = "more memory needed than a worker may use"
        item, status = done.item, f"failed: {reason}"
        if isinstance(item, Attention):
            shape = (item.query.shape[1], item.key.shape[1])
            return [Product(f"{item.name}[qk]", "QK", item.depth, shape, (), None, status)]
        wanted = (part for part in item.parts if self.choice.takes(part.name))
        return [_told(Examination("", (0, 0), "", status), part) for part in wanted]

    def concluded(self, rows: Iterable[Row]) -> Diagnosis:
        """The diagnosis, with the rows in the order of the model."""
        rows = list(rows)
        layers = {one.name: place for place, one in enumerate(self.summary.attention)}
        names = [part.name for unit in self.summary.plan.units for part in unit.parts]
        order = {name: place for place, name in enumerate(names)}
        passed = [Skipped(name, "not chosen") for name in names if not self.choice.takes(name)]
        return Diagnosis(
            source=self.summary.source,
            matrices=tuple(
                sorted(
                    (row for row in rows if isinstance(row, Examination)),
                    key=lambda row: order[row.name],
                )
            ),
            products=tuple(
                sorted(
                    (row for row in rows if isinstance(row, Product)),
                    key=lambda row: layers[row.name.rpartition("[")[0]],
                )
            ),
            skipped=(*self.summary.skipped, *passed),
            faults=self.summary.faults,
            notes=self.summary.notes,
            reference=str(self.reference) if self.reference else None,
            settings={
                "spectrum": self.choice.spectrum,
                "include": list(self.choice.include),
                "exclude": list(self.choice.exclude),
            },
        )


def case(
    source: str | Path | Model,
    reference: str | Path | Model | None = None,
    choice: Choice | None = None,
    jobs: int = CORES,
) -> Case:
    """Look at what there is to examine; a `Refusal` says why there is nothing."""
    choice = choice or Choice()
    place, other = _place(source), None if reference is None else _place(reference)
    summary = _summary(place)
    if isinstance(other, File):
        _summary(other)
    units = [u for u in summary.plan.units if any(choice.takes(part.name) for part in u.parts)]
    layers = [
        a for a in summary.attention if choice.takes(a.query.name) and choice.takes(a.key.name)
    ]
    tasks: list[Task] = [*units, *layers]
    tasks.sort(key=effort, reverse=True)
    engine: Engine = Here()
    if isinstance(place, File):
        largest = max((_bytes(unit) for unit in units), default=0)
        room = max(GIGABYTE, 3 * largest) * (1 if other is None else 2)
        slowest = max(map(effort, tasks), default=0.0)
        engine = Processes(jobs, limit=slowest, retries=0, memory=LIBRARIES + room, loaded=MODULES)
    return Case(place, other, choice, summary, tuple(tasks), engine)


def diagnose(
    source: str | Path | Model,
    reference: str | Path | Model | None = None,
    *,
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
    spectrum: Depth = "auto",
    jobs: int = CORES,
) -> Diagnosis:
    """Examine every matrix of a checkpoint, a model or a state dict, and apply all rules.

    With a ``reference`` each matrix also gets the errors of its components against the matrix of
    that name there. ``jobs`` processes read a checkpoint; a model in memory is examined here.

    >>> import torch
    >>> found = diagnose({"a.weight": 2 * torch.eye(3)}, reference={"a.weight": torch.eye(3)})
    >>> found.matrices[0].errors["frobenius_norm"], found.matrices[0].errors["condition_number"]
    (1.0, 0.0)
    """
    taken = case(source, reference, Choice(tuple(include), tuple(exclude), spectrum), jobs)
    return taken.concluded(row for done in taken.examine() for row in done.result)


def _place(source: str | Path | Model) -> Place:
    return File.at(source) if isinstance(source, str | Path) else Memory(source)


def _summary(place: Place) -> Summary:
    if isinstance(place, Memory):
        return _summarized(place)
    memory = LIBRARIES + GIGABYTE
    engine = Processes(1, limit=place.patience, retries=0, memory=memory, loaded=MODULES)
    (done,) = engine.run(_summarized, [place])
    if not done.failure:
        return done.result
    if isinstance(done.error, Refusal):
        raise done.error
    if isinstance(done.error, TimeoutError):
        wrong = f"takes more than {place.patience:.0f} s to open"
        raise Refusal(5, place.path, wrong, "see whether the file is whole")
    wrong = "needs too much memory to open" if "emory" in done.failure else done.failure
    raise Refusal(2, place.path, wrong, "see whether the file is whole")


def _summarized(place: Place) -> Summary:
    found = place.opened()
    layers, without = attention(found.plan, found.config)
    skipped = (*found.plan.skipped, *without)
    return Summary(found.source, found.plan, layers, skipped, found.faults, found.notes)


def _work(place: Place, reference: Place | None, choice: Choice, task: Task) -> list[Row]:
    """The rows of one task."""
    if isinstance(task, Attention):
        return list(task.products(place.opened().read))
    other = reference.opened() if reference else None
    rows: list[Row] = []
    for logical, matrix in task.matrices(place.opened().read):
        if choice.takes(logical.name):
            twin = other.matrix(logical.name) if other else None
            row = _told(examine(logical.name, matrix, choice.spectrum, twin), logical)
            if other and twin is None:
                row = replace(row, reasons={**row.reasons, "errors": "not in the reference"})
            rows.append(row)
    return rows


def _told(row: Examination, logical: Any) -> Examination:
    """The row with what is known of its matrix from outside."""
    rows, columns = logical.shape
    return replace(
        row,
        name=logical.name,
        shape=(rows, columns),
        dtype=str(logical.dtype).removeprefix("torch."),
        kind=logical.kind,
        depth=logical.depth,
        part_of=logical.whole,
    )


def _bytes(unit: Unit) -> int:
    return math.prod(unit.parts[0].shape) * unit.parts[0].dtype.itemsize


def effort(task: Task) -> float:
    """Seconds that are more than enough for all its matrices: a full SVD at two gigaflops.

    >>> import torch
    >>> (unit,) = plan({"weight": torch.empty(1000, 1000, device="meta")}).units
    >>> effort(unit)
    64.0
    """
    if isinstance(task, Attention):
        return sum(map(effort, task.units))
    shapes = [sorted(part.shape) for part in task.parts]
    return 60 + sum(8 * long * short * short for short, long in shapes) / 2e9
