"""Examine all matrices of a model or a checkpoint.

A checkpoint's bytes are parsed and its matrices factorized in other processes with limits of time
and memory; here only rows of numbers and text arrive. A model in memory is examined in place,
unless it is compared with a checkpoint: then its matrices go where that is read.

>>> from torch import nn
>>> found = diagnose(nn.Linear(3, 2))
>>> [(row.name, row.shape) for row in found.matrices], found.skipped
([('weight', (2, 3))], (Skipped(name='bias', reason='one-dimensional'),))
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Protocol, final, get_args

import torch

from kappascope.chains import Chain, Ends, Links, links, obstacle
from kappascope.clinic import MODULES, Extent
from kappascope.clinic.diagnosis import Diagnosis, Row
from kappascope.clinic.examination import Examination, examine
from kappascope.clinic.places import (
    GIGABYTE,
    File,
    Memory,
    Opened,
    Place,
    Portion,
    Source,
    place,
)
from kappascope.engines import CORES, Done, Engine, Here, Processes
from kappascope.matrices import Logical, Plan, Skipped, Unit
from kappascope.products import Attention, Product, attention
from kappascope.refusals import Refusal
from kappascope.weights.reasons import Harmless

LIBRARIES = GIGABYTE // 2  # what torch and scipy hold before any tensor is read
UNCHOSEN = Harmless("not chosen")  # why a matrix is skipped that the user did not ask for
SLOWEST = 2e9  # floating point operations a second: any machine does more
WORKER = Processes(1, retries=0, loaded=MODULES)  # what fails on a file will fail again


@dataclass(frozen=True)
class Choice:
    """Which matrices are examined, and how much of their spectra is taken.

    A pattern is a part of the name, or a shell pattern for all of it.

    >>> Choice(include=("*.mlp.*",), exclude=("embed",)).takes("layers.0.mlp.up_proj.weight")
    True
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    spectrum: Extent = "auto"

    def __post_init__(self) -> None:
        if self.spectrum not in get_args(Extent):
            told = ", ".join(get_args(Extent))
            raise ValueError(f"expected one of {told} for spectrum, got {self.spectrum!r}")

    def takes(self, name: str) -> bool:
        """Whether a matrix of this name is wanted."""
        wanted = not self.include or any(_matches(name, one) for one in self.include)
        return wanted and not any(_matches(name, one) for one in self.exclude)


def _matches(name: str, pattern: str) -> bool:
    return pattern in name or fnmatch.fnmatchcase(name, pattern)


# --- tasks ----------------------------------------------------------------------------------------


class Task(Protocol):
    """Something to be measured, in whichever process."""

    @property
    def effort(self) -> float:
        """Seconds that are more than enough for it."""

    @property
    def units(self) -> tuple[Unit, ...]:
        """The stored tensors that are read for it."""

    def rows(self, model: Opened, reference: Opened | None, spectrum: Extent) -> Iterator[Row]:
        """What is measured."""

    def failed(self, reason: str) -> Iterator[Row]:
        """Rows that say why there are no others."""


@final
@dataclass(frozen=True)
class Weight:
    """The matrices of one stored tensor that were chosen."""

    unit: Unit
    chosen: frozenset[str]

    @property
    def effort(self) -> float:
        """A full SVD of each."""
        return _effort(self.unit)

    @property
    def units(self) -> tuple[Unit, ...]:
        """One."""
        return (self.unit,)

    @property
    def bytes(self) -> int:
        """Of the tensor as stored."""
        whole = self.unit.parts[0]
        return math.prod(whole.shape) * whole.dtype.itemsize

    def rows(self, model: Opened, reference: Opened | None, spectrum: Extent) -> Iterator[Row]:
        """Their examinations."""
        wanted = [part.name for part in self.unit.parts if part.name in self.chosen]
        twins = reference.matrices(wanted) if reference else {}
        for logical, matrix in self.unit.matrices(model.read):
            if logical.name not in self.chosen:
                continue
            twin = twins.get(logical.name)
            row = examine(logical.name, matrix, spectrum, twin)
            if reference and row.errors is None:
                why = reference.absence(logical.name) if twin is None else row.status
                row = replace(row, reasons={"errors": why, **row.reasons})
            yield _placed(row, logical)

    def failed(self, reason: str) -> Iterator[Row]:
        """One row for each."""
        for part in self.unit.parts:
            if part.name in self.chosen:
                yield _placed(Examination(part.name, (0, 0), "", f"failed: {reason}"), part)


def _effort(unit: Unit) -> float:
    shapes = [sorted(part.shape) for part in unit.parts]
    return 60 + sum(8 * long * short * short for short, long in shapes) / SLOWEST


def _placed(row: Examination, logical: Logical) -> Examination:
    """The row with what is known of its matrix from outside."""
    rows, columns = logical.shape
    return replace(
        row,
        shape=(rows, columns),
        dtype=str(logical.dtype).removeprefix("torch."),
        kind=logical.kind,
        depth=logical.depth,
        part_of=logical.whole,
    )


@final
@dataclass(frozen=True)
class Heads:
    """The products of one attention layer."""

    layer: Attention

    @property
    def effort(self) -> float:
        """No more than that of its matrices."""
        return sum(map(_effort, self.units))

    @property
    def units(self) -> tuple[Unit, ...]:
        """Of its projections."""
        return self.layer.units

    def rows(self, model: Opened, reference: Opened | None, spectrum: Extent) -> Iterator[Row]:
        """Two for each head."""
        return self.layer.products(model.read)

    def failed(self, reason: str) -> Iterator[Row]:
        """One row for all."""
        layer = self.layer
        shape = (layer.query.shape[1], layer.key.shape[1])
        status = f"failed: {reason}"
        yield Product(layer.name, "QK", layer.depth, shape, (), None, status)


@final
@dataclass(frozen=True)
class Sequel:
    """The product of layers that follow one another, of which the ends are known."""

    layers: Links
    known: Mapping[str, Ends] = field(default_factory=dict)

    @property
    def effort(self) -> float:
        """Nothing where the product is not formed."""
        return 0.0 if obstacle(self.layers.widths) else sum(map(_effort, self.units))

    @property
    def units(self) -> tuple[Unit, ...]:
        """One for each layer, or fewer."""
        return self.layers.units

    def bound(self) -> Chain:
        """What is known where the product is not formed: nothing needs to be read for that."""
        return self.layers.chain(lambda path: torch.empty(0), self.known)

    def rows(self, model: Opened, reference: Opened | None, spectrum: Extent) -> Iterator[Row]:
        """One."""
        yield self.layers.chain(model.read, self.known)

    def failed(self, reason: str) -> Iterator[Row]:
        """One."""
        names = tuple(one.name for one in self.layers.members)
        name, status = f"{names[0]} > {names[-1]}", f"failed: {reason}"
        yield Chain(name, names, self.layers.widths, None, False, None, status)


# --- a case ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Summary:
    """What can be said of a model without a look at the numbers of its matrices."""

    plan: Plan
    attention: tuple[Attention, ...]
    links: tuple[Links, ...]
    skipped: tuple[Skipped, ...]
    faults: tuple[Skipped, ...]
    notes: tuple[str, ...]
    unsound: tuple[Skipped, ...]

    @classmethod
    def of(cls, model: Place) -> Summary:
        """What is there; for a file, where it can do no harm."""
        found = model.opened()
        layers, without = attention(found.plan, found.config)
        skipped = (*found.plan.skipped, *without)
        told = (skipped, found.faults, found.notes, tuple(found.unsound()))
        return cls(found.plan, layers, links(found.plan), *told)


@dataclass(frozen=True)
class Case:
    """A model to be examined: the tasks, the largest first, and where they are done."""

    model: Place
    reference: Place | None
    choice: Choice
    summary: Summary
    tasks: tuple[Task, ...]
    engine: Engine

    def examine(self) -> Generator[Done[Task]]:
        """Each task as it ends; its ``result`` is the rows of what it measured.

        Chains come last, when their layers are known.
        """
        known: dict[str, Ends] = {}
        for done in self._run(self.tasks):
            for row in done.result:
                if isinstance(row, Examination) and not row.failed:
                    kappa = row.condition_number if row.condition_number else math.inf
                    known[row.name] = row.sigma_max, kappa
            yield done
        sequels = tuple(self._sequels(known))
        for one in sequels:
            if not one.effort:
                yield Done(one, result=[one.bound()])
        yield from self._run(tuple(one for one in sequels if one.effort))

    def _sequels(self, known: Mapping[str, Ends]) -> Iterator[Sequel]:
        for one in self.summary.links:
            names = [member.name for member in one.members]
            if all(name in known for name in names):
                yield Sequel(one, {name: known[name] for name in names})

    def _run(self, tasks: tuple[Task, ...]) -> Generator[Done[Task]]:
        orders = [self._order(task) for task in tasks]
        with closing(self.engine.run(_Order.rows, orders)) as ended:
            for done in ended:
                task = done.item.task
                result = list(task.failed(_reason(done))) if done.failure else done.result
                yield Done(task, done.seconds, done.failure, done.error, result)

    def _order(self, task: Task) -> _Order:
        names = [part.name for unit in task.units for part in unit.parts]
        reference = self.reference.portion(names) if self.reference else None
        return _Order(task, self.model.portion(names), reference, self.choice.spectrum)

    def concluded(self, rows: Iterable[Row]) -> Diagnosis:
        """The diagnosis, with the rows in the order of the model."""
        every = list(rows)
        names = [part.name for unit in self.summary.plan.units for part in unit.parts]
        order = {name: place for place, name in enumerate(names)}
        layers = {one.name: place for place, one in enumerate(self.summary.attention)}
        products = [row for row in every if isinstance(row, Product)]
        matrices = [row for row in every if isinstance(row, Examination)]
        matrices.sort(key=lambda row: order[row.name])
        products.sort(key=lambda row: layers[row.layer])
        chained = [tuple(each.name for each in one.members) for one in self.summary.links]
        chains = [row for row in every if isinstance(row, Chain)]
        chains.sort(key=lambda row: chained.index(row.members))
        passed = [Skipped(name, UNCHOSEN) for name in names if not self.choice.takes(name)]
        return Diagnosis(
            source=str(self.model),
            matrices=tuple(matrices),
            products=tuple(products),
            chains=tuple(chains),
            skipped=(*self.summary.skipped, *passed),
            faults=self.summary.faults,
            unsound=tuple(one for one in self.summary.unsound if self.choice.takes(one.name)),
            notes=self.summary.notes,
            reference=str(self.reference) if self.reference else None,
            settings={name: _plain(value) for name, value in vars(self.choice).items()},
        )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class _Order:
    """A task with all that it takes, to be done in whichever process."""

    task: Task
    model: File | Portion
    reference: File | Portion | None
    spectrum: Extent

    def rows(self) -> list[Row]:
        other = self.reference.opened() if self.reference else None
        return list(self.task.rows(self.model.opened(), other, self.spectrum))


def _reason(done: Done[_Order]) -> str:
    """Why a task failed, in the words of a user."""
    if _starved(done.error):
        return "more memory needed than a worker may use"
    if not isinstance(done.error, Refusal):
        return done.failure
    given, wrong = done.error.given, done.error.wrong
    return wrong if done.item.model.holds(given) else f"{given}: {wrong}"


def _starved(error: BaseException | None) -> bool:
    """Whether it took more memory than there was."""
    # torch has a type for that on a GPU only; here its allocator's name has to do
    torchs = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError) or torchs


def case(
    source: Source,
    reference: Source | None = None,
    choice: Choice | None = None,
    jobs: int = CORES,
) -> Case:
    """Look at what there is to examine; a `Refusal` says why there is nothing.

    >>> import torch
    >>> [task.effort for task in case({"fc.weight": torch.eye(1000)}).tasks]
    [64.0]
    """
    choice, workers = choice or Choice(), replace(WORKER, jobs=jobs)
    model, other = place(source), None if reference is None else place(reference)
    summary = _summary(model)
    if other:
        _summary(other)  # refused now if it cannot be opened, not once for each matrix
    weights = list(_weights(summary.plan, choice))
    heads = [
        Heads(one)
        for one in summary.attention
        if choice.takes(one.query.name) and choice.takes(one.key.name)
    ]
    tasks: list[Task] = [*weights, *heads]
    tasks.sort(key=lambda task: task.effort, reverse=True)
    engine: Engine = Here()
    sides = [one for one in (model, other) if one is not None]
    if files := [one for one in sides if isinstance(one, File)]:
        largest = max((one.bytes for one in weights), default=0)
        held = 2 * len(sides) - len(files)  # what is sent from memory is held as sent, too
        slowest = max((task.effort for task in tasks), default=0.0)
        engine = _confined(workers, slowest, max(GIGABYTE, 3 * largest) * held)
    return Case(model, other, choice, summary, tuple(tasks), engine)


def _weights(plan: Plan, choice: Choice) -> Iterator[Weight]:
    for unit in plan.units:
        if chosen := frozenset(part.name for part in unit.parts if choice.takes(part.name)):
            yield Weight(unit, chosen)


def _confined(workers: Processes, limit: float, room: int) -> Processes:
    return replace(workers, limit=limit, memory=LIBRARIES + room)


def _summary(model: Place) -> Summary:
    if isinstance(model, Memory):
        return Summary.of(model)
    (done,) = _confined(WORKER, model.patience, GIGABYTE).run(Summary.of, [model])
    if not done.failure:
        return done.result
    if isinstance(done.error, Refusal):
        raise done.error
    if isinstance(done.error, TimeoutError):
        wrong = f"takes more than {model.patience:.0f} s to open"
        raise Refusal(5, str(model), wrong, "see whether the file is whole")
    wrong = "needs too much memory to open" if _starved(done.error) else done.failure
    raise Refusal(2, str(model), wrong, "see whether the file is whole")


def diagnose(
    source: Source,
    reference: Source | None = None,
    *,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    spectrum: Extent = "auto",
    jobs: int = CORES,
) -> Diagnosis:
    """Examine every matrix of a checkpoint, a model or a state dict, and apply all rules.

    With a ``reference`` each matrix also gets the errors of its components against the matrix of
    that name there. If either is a checkpoint, ``jobs`` processes read and examine; models in
    memory are examined here.

    >>> import torch
    >>> found = diagnose({"a.weight": 2 * torch.eye(3)}, reference={"a.weight": torch.eye(3)})
    >>> found.matrices[0].errors["frobenius_norm"], found.matrices[0].errors["condition_number"]
    (1.0, 0.0)
    """
    taken = case(source, reference, Choice(_patterns(include), _patterns(exclude), spectrum), jobs)
    return taken.concluded(row for done in taken.examine() for row in done.result)


def _patterns(given: str | Iterable[str]) -> tuple[str, ...]:
    return (given,) if isinstance(given, str) else tuple(given)
