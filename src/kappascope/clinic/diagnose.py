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
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, final, get_args

import torch
from torch import Tensor

from kappascope.checkpoints.remote import Fetching, FetchingThere
from kappascope.clinic import MODULES, Extent
from kappascope.clinic.atlas import Atlas
from kappascope.clinic.diagnosis import Diagnosis
from kappascope.clinic.examination import AUTO_LIMIT, Examination, Kernel, examine
from kappascope.clinic.keeping import Keeping
from kappascope.clinic.moments import Moments, SwallowedStep
from kappascope.clinic.source import (
    GIGABYTE,
    InMemory,
    Location,
    Mirrored,
    OnDisk,
    Opened,
    Readable,
    Reference,
    Source,
    located,
)
from kappascope.clinic.training import Training, Trainings
from kappascope.clinic.vectors import Vector
from kappascope.matrix import spectra
from kappascope.matrix.precision import Rounding
from kappascope.matrix.status import Outcome, Status
from kappascope.model.attention import Attention, Product, attention
from kappascope.model.chains import Chain, Ends, Links, links, obstacle
from kappascope.model.counterparts import Counterparts, Renames, counterparts
from kappascope.model.logits import LogitBound, Tables, logit_bounds
from kappascope.model.matrices import Logical, Plan, Unit
from kappascope.model.skipped import Reason, ReasonKind, Skipped, unreadable
from kappascope.refusal import Refusal
from kappascope.system.cluster import Cluster
from kappascope.system.files import FileDigest, digest, environment, source_digest
from kappascope.system.memory import (
    LIBRARY_BYTES,
    available_bytes,
    bytes_of,
    gigabytes,
    is_out_of_memory,
    megabytes,
)
from kappascope.system.store import Store
from kappascope.system.workers import CORES, Done, Engine, Here, Processes
from kappascope.text import error_text
from kappascope.theory.beyond import answered

Row: TypeAlias = Examination | Product | Chain | LogitBound | SwallowedStep | FileDigest
log = logging.getLogger(__name__)
MIN_WORKER_BYTES = LIBRARY_BYTES + GIGABYTE  # to parse any file that people make
NO_COUNTERPARTS = Counterparts({})
UNCHOSEN = Reason(ReasonKind.NOT_CHOSEN, "not chosen")
# of which code the numbers of a row depend on
SOURCES = ("matrix", "model", "theory", "corrections", "checkpoints", "clinic")
LEAST_FLOPS = 2e9  # floating point operations a second: any machine does more
# Seconds of one core over long x short x short, for all singular values and for the ends of the
# spectrum (benchmarks/results/vitals.json, diagnose.json), and for whatever else a tensor takes.
ALL_VALUES_RATE, ENDS_RATE, EACH_TENSOR = 6e-11, 3e-11, 0.02
WORKER = Processes(1, retries=0, loaded=MODULES)  # what fails on a file will fail again


@dataclass(frozen=True)
class Selection:
    """Which matrices are examined, and how much of their spectra is taken.

    A pattern is a part of the name, or a shell pattern for all of it.

    >>> Selection(include=("*.mlp.*",), exclude=("embed",)).takes("layers.0.mlp.up_proj.weight")
    True
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    spectrum: Extent = "auto"

    def __post_init__(self) -> None:
        if self.spectrum not in get_args(Extent):
            known = ", ".join(get_args(Extent))
            raise ValueError(f"expected one of {known} for spectrum, got {self.spectrum!r}")

    def takes(self, name: str) -> bool:
        """Tell whether a matrix of this name is wanted."""

        def matches(pattern: str) -> bool:
            return pattern in name or fnmatch.fnmatchcase(name, pattern)

        wanted = not self.include or any(map(matches, self.include))
        return wanted and not any(map(matches, self.exclude))


# --- tasks ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Memory:
    """Bytes of the stored tensors of a task, and what measuring them takes on top of that."""

    stored: int
    usual: int = 0
    least: int = 0  # with the methods that need less, which are slower

    def at_most(self, copies: int) -> int:
        """Return the bytes of data that a process is allowed, with so many copies as stored."""
        return max(GIGABYTE, 3 * self.stored) * copies + self.usual

    def at_least(self, copies: int) -> int:
        """Return the bytes of data without which it is not worth a try."""
        return self.stored * copies + self.least


def _stored_bytes(units: Iterable[Unit]) -> int:
    tensors = [unit.parts[0] for unit in units]
    return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors)


class Task(ABC):
    """Something to be measured, in whichever process."""

    def __str__(self) -> str:
        """Name the matrices, for the log."""
        return ", ".join(part.name for unit in self.units for part in unit.parts)

    @property
    @abstractmethod
    def units(self) -> tuple[Unit, ...]:
        """The stored tensors that are read for it."""

    @property
    def effort(self) -> float:
        """Seconds that are more than enough to read its tensors and factorize their matrices."""
        seconds = 0.0
        for unit in self.units:
            shapes = [sorted(part.shape) for part in unit.parts]
            seconds += 60 + sum(8 * long * short * short for short, long in shapes) / LEAST_FLOPS
        return seconds

    @property
    def memory(self) -> Memory:
        """The memory that it takes: its tensors as stored, beside which its products are small."""
        return Memory(_stored_bytes(self.units))

    @property
    def key(self) -> list[Any]:
        """What tells it from the other tasks of a model, in the types of JSON."""
        return [type(self).__name__, [part.name for unit in self.units for part in unit.parts]]

    @abstractmethod
    def rows(self, model: Opened, reference: Reference | None, spectrum: Extent) -> Iterator[Row]:
        """Measure it and yield its rows."""

    @abstractmethod
    def failed(self, reason: Reason) -> Iterator[Row]:
        """Yield rows that say why there are no others."""


@final
@dataclass(frozen=True)
class TensorTask(Task):
    """The examination of those matrices of one stored tensor that were chosen."""

    unit: Unit
    chosen: frozenset[str]
    training: Training | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """The one tensor that is read."""
        return (self.unit,)

    @property
    def key(self) -> list[Any]:
        """The chosen matrices, and what noise they are compared with."""
        return [*super().key, sorted(self.chosen), repr(self.training)]

    @property
    def memory(self) -> Memory:
        """The tensor as stored, and what its largest matrix needs beside it."""
        parts = [part for part in self.unit.parts if part.name in self.chosen]
        shapes = [(part.shape[0], part.shape[1]) for part in parts]
        return Memory(
            stored=_stored_bytes(self.units),
            usual=max(map(spectra.bytes_needed, shapes)),
            least=max(map(spectra.least_bytes_needed, shapes)),
        )

    def rows(self, model: Opened, reference: Reference | None, spectrum: Extent) -> Iterator[Row]:
        """Examine each chosen matrix, and compare it with its counterpart if there is one."""
        wanted = [part.name for part in self.unit.parts if part.name in self.chosen]
        counterparts, fault = _counterparts(reference, wanted)
        roundings, one_code = model.roundings(self.unit), model.holds_one_code(self.unit)
        for logical, matrix in self.unit.matrices(model.read):
            if logical.name not in self.chosen:
                continue
            counterpart = counterparts.get(logical.name)
            other = counterpart if isinstance(counterpart, Tensor) else None
            kernel, rounding = kernel_of(self.unit, logical), roundings.get(logical.name)
            row = _examined(
                logical,
                matrix,
                spectrum,
                other,
                kernel=kernel,
                rounding=rounding,
                limit=model.ranks.get(logical.name),
            )
            if reference and row.errors is None:
                if isinstance(counterpart, Reason):
                    row = replace(row, uncompared=counterpart)
                elif row.failure is not None:
                    row = replace(row, uncompared=unreadable(row.status))
                row = replace(row, reasons={"errors": str(row.uncompared), **row.reasons})
            row = replace(row, faults=(*row.faults, *fault), one_code=one_code)
            if self.training is not None and row.failure is None:
                row = _against_noise(row, self.training, matrix, other)
            yield _described(row, logical, rounding.code if rounding else "")

    def failed(self, reason: Reason) -> Iterator[Row]:
        """Yield a row that says why for each chosen matrix."""
        for part in self.unit.parts:
            if part.name in self.chosen:
                yield _described(Examination.failed(part.name, (0, 0), "", reason), part)


def kernel_of(unit: Unit, logical: Logical) -> Kernel:
    """Return how the columns of a matrix of a stored tensor are the taps of a convolution.

    >>> unit = Inventory.of(InMemory(torch.nn.Conv2d(2, 4, 3))).plan.units[0]
    >>> kernel_of(unit, unit.parts[0])
    Kernel(taps=(3, 3), stride=(1, 1), groups=1, depthwise=False)
    """
    is_stack = logical.whole is None and unit.layout.stack
    groups = max(1, len(unit.layout.parts)) if is_stack else 1
    return Kernel(logical.taps, logical.stride, groups, logical.kind == "depthwise")


def _counterparts(
    reference: Reference | None, names: Sequence[str]
) -> tuple[Mapping[str, Tensor | Reason], tuple[str, ...]]:
    """Return the matrices of a reference by their names, or why one is not there.

    And what went wrong.
    """
    if reference is None:
        return {}, ()
    try:
        matrices = reference.matrices(names)
        absent = {name: reference.absence(name) for name in names if name not in matrices}
    except Exception as error:
        if is_out_of_memory(error):
            raise
        wrong = error.wrong if isinstance(error, Refusal) else error_text(error)
        text = f"the reference cannot be read: {wrong}"
        return dict.fromkeys(names, unreadable(text)), (f"not compared: {text}",)
    return matrices | absent, ()


def _examined(
    logical: Logical,
    matrix: Tensor,
    spectrum: Extent,
    counterpart: Tensor | None,
    *,
    kernel: Kernel,
    rounding: Rounding | None,
    limit: int | None,
) -> Examination:
    """Return the examination of a matrix.

    An error costs this one, not its neighbours in the tensor.
    """
    try:
        return examine(
            logical.name,
            matrix,
            spectrum,
            counterpart,
            rounding=rounding,
            kernel=kernel,
            limit=limit,
        )
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return Examination.failed(logical.name, (0, 0), "", unreadable(error_text(error)))


def _against_noise(
    row: Examination, training: Training, matrix: Tensor, start: Tensor | None
) -> Examination:
    """Return the row with what noise alone would have made of the start, or why that is open."""
    try:
        if start is None:
            raise ValueError("the reference has no such matrix")
        return replace(row, unlearned=tuple(training.compared(matrix, start)))
    except ValueError as error:
        return replace(row, reasons={**row.reasons, "unlearned": str(error)})


def _described(row: Examination, logical: Logical, code: str = "") -> Examination:
    """Return the row with what the model tells of its matrix; ``code`` is what it is stored in."""
    rows, columns = logical.shape
    return replace(
        row,
        shape=(rows, columns),
        dtype=code or str(logical.dtype).removeprefix("torch."),
        kind=logical.kind,
        depth=logical.depth,
        part_of=logical.whole,
    )


@final
@dataclass(frozen=True)
class AttentionTask(Task):
    """The products of the heads of one attention layer."""

    layer: Attention
    tables: Tables | None = None  # which the first layer reads

    def __str__(self) -> str:
        """Name the layer, for the log."""
        return f"heads of {self.layer.name}"

    @property
    def units(self) -> tuple[Unit, ...]:
        """The tensors of its projections, and the table that they read."""
        return (*self.layer.units, *(self.tables.units if self.tables else ()))

    def rows(self, model: Opened, reference: Reference | None, spectrum: Extent) -> Iterator[Row]:
        """Return two products for each head, and a bound of its logits."""
        yield from self.layer.products(model.read)
        config = model.config or model.plan.config
        yield from logit_bounds(self.layer, model.read, model.vectors, config, self.tables)

    def failed(self, reason: Reason) -> Iterator[Row]:
        """Yield one row for all products of the layer."""
        layer = self.layer
        shape = (layer.query.shape[1], layer.key.shape[1])
        yield Product(
            layer.name, "QK", layer.depth, shape, (), None, Status(Outcome.FAILED, str(reason))
        )


@final
@dataclass(frozen=True)
class ChainTask(Task):
    """The product of layers that follow one another, of which the ends are known."""

    layers: Links
    known: Mapping[str, Ends] = field(default_factory=dict)

    def __str__(self) -> str:
        """Name the layers, for the log."""
        return f"chain of {super().__str__()}"

    @property
    def effort(self) -> float:
        """Seconds for the product; nothing where it is not formed."""
        return 0.0 if obstacle(self.layers.widths) else super().effort

    @property
    def units(self) -> tuple[Unit, ...]:
        """The tensors of its layers."""
        return self.layers.units

    @property
    def key(self) -> list[Any]:
        """The layers, and what is known of them."""
        return [*super().key, repr(sorted(self.known.items()))]

    @property
    def memory(self) -> Memory:
        """The tensors of its layers, which are read one after the other."""
        return Memory(max(_stored_bytes([unit]) for unit in self.units))

    def bound(self) -> Chain:
        """Return what is known where the product is not formed, without reading anything."""
        return self.layers.chain(lambda path: torch.empty(0), self.known)

    def rows(self, model: Opened, reference: Reference | None, spectrum: Extent) -> Iterator[Row]:
        """Yield the one row of the chain."""
        yield self.layers.chain(model.read, self.known)

    def failed(self, reason: Reason) -> Iterator[Row]:
        """Yield the one row of the chain, without numbers."""
        names = tuple(member.name for member in self.layers.members)
        name, status = f"{names[0]} > {names[-1]}", Status(Outcome.FAILED, str(reason))
        yield Chain(name, names, self.layers.widths, None, False, None, status)


@final
@dataclass(frozen=True)
class MomentsTask(Task):
    """What the dtype of a weight will swallow of the step that Adam's moments ask for."""

    moments: Moments

    def __str__(self) -> str:
        """Name the weight, for the log."""
        return f"moments of {self.moments.name}"

    @property
    def units(self) -> tuple[Unit, ...]:
        """The tensors of matrices that it reads: none by their plan."""
        return ()

    @property
    def key(self) -> list[Any]:
        """The weight whose moments they are."""
        return [*super().key, self.moments.name]

    @property
    def effort(self) -> float:
        """Seconds that are more than enough to read three tensors and step once."""
        return 60 + math.prod(self.moments.shape) * 100 / LEAST_FLOPS

    @property
    def memory(self) -> Memory:
        """The weight, its moments, and the step in float64 with what it is made of."""
        return Memory(math.prod(self.moments.shape) * 8 * 6)

    def rows(self, model: Opened, reference: Reference | None, spectrum: Extent) -> Iterator[Row]:
        """Yield the one row, if the moments ask for a step."""
        if found := self.moments.swallowed(model.read):
            yield found

    def failed(self, reason: Reason) -> Iterator[Row]:
        """Yield nothing: the weight itself has a row that says what is wrong with the file."""
        yield from ()


@final
@dataclass(frozen=True)
class DigestTask(Task):
    """The digest of a file that was examined."""

    path: str
    size: int

    def __str__(self) -> str:
        """Name the file, for the log."""
        return f"digest of {Path(self.path).name}"

    @property
    def units(self) -> tuple[Unit, ...]:
        """The tensors that are read for it: none, but all bytes of the file."""
        return ()

    @property
    def key(self) -> list[Any]:
        """The file whose bytes are digested."""
        return [*super().key, self.path]

    @property
    def effort(self) -> float:
        """Seconds that are more than enough to read the file."""
        return 30 + 60 * self.size / GIGABYTE

    def rows(self, model: Opened, reference: Reference | None, spectrum: Extent) -> Iterator[Row]:
        """Yield the digest of the file."""
        yield FileDigest.of(self.path)

    def failed(self, reason: Reason) -> Iterator[Row]:
        """Yield the file without its digest."""
        yield FileDigest(self.path, self.size, None)


# --- a case ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inventory:
    """What is in a model, known without a look at the numbers of its matrices."""

    plan: Plan
    attention: tuple[Attention, ...]
    links: tuple[Links, ...]
    skipped: tuple[Skipped, ...]
    faults: tuple[Skipped, ...]
    notes: tuple[str, ...]
    unsound: tuple[Skipped, ...]
    vectors: tuple[Vector, ...] = ()
    moments: tuple[Moments, ...] = ()
    files: tuple[str, ...] = ()

    @classmethod
    def of(cls, model: Location) -> Inventory:
        """Open the model; for a file, this is to be called where it can do no harm.

        An error while attention or chains are looked for costs their products and no matrix.
        """
        opened = model.opened()
        layers: tuple[Attention, ...] = ()
        chains: tuple[Links, ...] = ()
        skipped = opened.plan.skipped
        try:
            layers, without = attention(opened.plan, opened.config)
            skipped += without
        except Exception as error:
            skipped += (Skipped("products of attention", _not_found(error)),)
        try:
            chains = links(opened.plan)
        except Exception as error:
            skipped += (Skipped("chains of layers", _not_found(error)),)
        beside = tuple(opened.examined_vectors())
        return cls(
            plan=opened.plan,
            attention=layers,
            links=chains,
            skipped=skipped,
            faults=opened.faults,
            notes=opened.notes,
            unsound=tuple(vector for vector in beside if isinstance(vector, Skipped)),
            vectors=tuple(vector for vector in beside if isinstance(vector, Vector)),
            moments=opened.moments,
            files=opened.files,
        )


def _not_found(error: Exception) -> Reason:
    """Say why layers that act together were not found.

    Without memory, nothing else is worth a try.
    """
    if is_out_of_memory(error):
        raise error
    return unreadable(f"not looked for: {error_text(error)}")


@dataclass(frozen=True)
class Case:
    """A model to be examined: tasks, one short and then the longest, and where they are done."""

    model: Location
    reference: Location | None
    selection: Selection
    inventory: Inventory
    tasks: tuple[Task, ...]
    engine: Engine
    room: Room
    reference_vectors: tuple[Vector, ...] = ()
    atlas: Atlas | None = None
    compared: Inventory | None = None  # what is in the reference
    counterparts: Counterparts = NO_COUNTERPARTS

    @property
    def parameters(self) -> int:
        """The number of entries of all stored tensors that are examined."""
        units = [task.unit for task in self.tasks if isinstance(task, TensorTask)]
        return sum(math.prod(unit.parts[0].shape) for unit in units)

    @property
    def seconds(self) -> float:
        """Seconds that an idle machine takes, about; 0 where others' machines do the work.

        >>> import torch
        >>> round(case({"a.weight": torch.empty(2000, 2000)}).seconds, 1)
        0.5
        """
        if not isinstance(self.engine, Processes | Here):
            return 0.0
        seconds = 0.0
        for part in (part for task in self.tasks for unit in task.units for part in unit.parts):
            short, long = sorted(part.shape)
            complete = self.selection.spectrum == "full" or (
                self.selection.spectrum == "auto" and short <= AUTO_LIMIT
            )
            rate = ALL_VALUES_RATE if complete else ENDS_RATE
            seconds += EACH_TENSOR + rate * long * short * short
        return seconds / (min(self.engine.jobs, CORES) if isinstance(self.engine, Processes) else 1)

    @property
    def fetched(self) -> str:
        """How much was fetched of checkpoints that lie elsewhere; nothing where none does."""
        sides = [side for side in (self.model, self.reference) if isinstance(side, Mirrored)]
        mirrors = [side.mirror for side in sides if side.mirror]
        if not mirrors:
            return ""
        here, there = (sum(getattr(m, name) for m in mirrors) for name in ("fetched", "size"))
        return f"{megabytes(here)} of {megabytes(there)} fetched"

    def examine(self) -> Generator[Done[Task]]:
        """Yield each task as it ends; its ``result`` is the rows of what it measured.

        Chains come last, when their layers are known.
        """
        known: dict[str, Ends] = {}
        log.debug("%d tasks; memory: %s", len(self.tasks), self.room)
        for done in self._run(self.tasks):
            log.debug("%s: %.2f s%s", done.item, done.seconds, done.failure and f", {done.failure}")
            for row in done.result:
                if isinstance(row, Examination) and row.failure is None:
                    kappa = row.condition_number if row.condition_number else math.inf
                    known[row.name] = row.sigma_max, kappa
            yield done
        chains = []
        for layers in self.inventory.links:
            names = [member.name for member in layers.members]
            if all(name in known for name in names):
                chains.append(ChainTask(layers, {name: known[name] for name in names}))
        for chain in chains:
            if not chain.effort:
                (done_here,) = Here().run(ChainTask.bound, [chain])
                failure = unreadable(done_here.failure)
                failed = list(chain.failed(failure))
                yield Done(chain, result=failed if done_here.failure else [done_here.result])
        yield from self._run(tuple(chain for chain in chains if chain.effort))

    def part(self, tasks: Iterable[Task]) -> Case:
        """Return the case with some of its tasks; chains, which need all layers, are left out."""
        inventory = replace(self.inventory, links=())
        return replace(self, tasks=tuple(tasks), inventory=inventory)

    def _run(self, tasks: tuple[Task, ...]) -> Generator[Done[Task]]:
        orders = []
        for task in tasks:
            if reason := self.room.refusal(task):
                yield Done(task, 0.0, str(reason), None, list(task.failed(reason)))
                continue
            names = [part.name for unit in task.units for part in unit.parts]
            reference = self._counterparts_of(names)
            model = self.model.portion(names)
            orders.append(_Order(task, model, reference, self.selection.spectrum))
        with closing(self.engine.run(_Order.rows, orders)) as ended:
            for done in ended:
                task = done.item.task
                result = done.result
                if done.failure:
                    result = list(task.failed(_reason(done, self.room)))
                yield Done(task, done.seconds, done.failure, done.error, result)

    def _counterparts_of(self, names: Sequence[str]) -> Reference | None:
        if self.reference is None:
            return None
        there = {name: self.counterparts.names.get(name, name) for name in names}
        matched = {name: there[name] for name in names if name in self.counterparts.names}
        return Reference(self.reference.portion(list(there.values())), matched)

    def concluded(self, rows: Iterable[Row]) -> Diagnosis:
        """Return the diagnosis, with the rows in the order of the model and what the rules find."""
        inventory, takes = self.inventory, self.selection.takes
        names = [part.name for unit in inventory.plan.units for part in unit.parts]
        layers = [layer.name for layer in inventory.attention]
        chains = [tuple(member.name for member in links.members) for links in inventory.links]
        place = {key: k for k, key in enumerate((*names, *chains))}
        layer_place = {name: k for k, name in enumerate(layers)}
        every = list(rows)
        matrices = [row for row in every if isinstance(row, Examination)]
        products = [row for row in every if isinstance(row, Product)]
        multiplied = [row for row in every if isinstance(row, Chain)]
        digests = {row.path: row for row in every if isinstance(row, FileDigest)}
        unchosen = [Skipped(name, UNCHOSEN) for name in names if not takes(name)]
        settings = vars(self.selection).items()
        return Diagnosis(
            source=str(self.model),
            matrices=_answered(sorted(matrices, key=lambda row: place[row.name])),
            products=tuple(sorted(products, key=lambda row: layer_place[row.layer])),
            chains=tuple(sorted(multiplied, key=lambda row: place[row.members])),
            skipped=(*inventory.skipped, *unchosen),
            faults=inventory.faults,
            unsound=tuple(vector for vector in inventory.unsound if takes(vector.name)),
            vectors=tuple(vector for vector in inventory.vectors if takes(vector.name)),
            reference_vectors=self.reference_vectors,
            logits=tuple(
                sorted(
                    (row for row in every if isinstance(row, LogitBound)),
                    key=lambda row: (layer_place[row.layer], row.head),
                )
            ),
            swallowed=tuple(row for row in every if isinstance(row, SwallowedStep)),
            files=tuple(digests[path] for path in inventory.files if path in digests),
            atlas=self.atlas,
            notes=(*inventory.notes, *self._matching, *filter(None, [self.fetched])),
            reference=str(self.reference) if self.reference else None,
            settings={name: list(it) if isinstance(it, tuple) else it for name, it in settings},
        ).judged()

    @property
    def _matching(self) -> tuple[str, ...]:
        """What was done to names so that they are those of the reference."""
        return tuple(f"names in the reference: {note}" for note in self.counterparts.notes)


def _answered(rows: Sequence[Examination]) -> tuple[Examination, ...]:
    """Return the rows with an answer to every part, with regard to all that were compared."""
    every = iter(answered(part for row in rows for part in row.unlearned or ()))
    return tuple(
        replace(row, unlearned=tuple(next(every) for _ in row.unlearned)) if row.unlearned else row
        for row in rows
    )


@dataclass(frozen=True)
class _Order:
    """A task with the tensors that it takes, to be done in whichever process."""

    task: Task
    model: Readable
    reference: Reference | None
    spectrum: Extent

    def rows(self) -> list[Row]:
        return list(self.task.rows(self.model.opened(), self.reference, self.spectrum))


def _reason(done: Done[_Order], room: Room) -> Reason:
    """Say why a task failed, in the words of a user."""
    if is_out_of_memory(done.error):
        return Reason(ReasonKind.NO_MEMORY, f"more memory needed than {room}")
    if not isinstance(done.error, Refusal):
        return unreadable(done.failure)
    given, wrong = done.error.given, done.error.wrong
    return unreadable(wrong if done.item.model.holds(given) else f"{given}: {wrong}")


@dataclass(frozen=True)
class Room:
    """The memory that one process may use, for so many copies of what is stored.

    >>> print(Room(2 * GIGABYTE, copies=1, limited=True))
    the 2.0 GB that a worker may use (--memory)
    """

    memory: int | None  # bytes, libraries and all; None where nothing tells
    copies: int
    limited: bool  # by the user, and not by the machine

    def refusal(self, task: Task) -> Reason | None:
        """Say why a task is not even tried, if so."""
        # the machine's free memory is what the libraries have left already
        needed = task.memory.at_least(self.copies) + (LIBRARY_BYTES if self.limited else 0)
        if self.memory is None or needed <= self.memory or not task.memory.least:
            return None
        return Reason(
            ReasonKind.NO_MEMORY, f"needs {gigabytes(needed)} of memory, more than {self}"
        )

    def __str__(self) -> str:
        if self.memory is None:
            return "there is"
        if self.limited:
            return f"the {gigabytes(self.memory)} that a worker may use (--memory)"
        return f"the {gigabytes(self.memory)} that are free (--memory allows more)"


def case(
    source: Source,
    reference: Source | None = None,
    selection: Selection | None = None,
    jobs: int = CORES,
    memory: int | None = None,
    *,
    atlas: Atlas | None = None,
    trainings: Trainings | None = None,
    renames: Renames = (),
    base: Source | None = None,
    cluster: Cluster | None = None,
    store: Store | None = None,
    tell: Callable[[str], None] = log.warning,
) -> Case:
    """Look at what there is to examine; a `Refusal` says why there is nothing.

    A worker may use ``memory`` bytes: by default what its tasks need, if the machine has that.
    ``renames`` say what names here have instead of what in the reference. With a ``cluster``
    matrices of files are examined there; with a ``store`` their rows are kept, and those that are
    kept are not made again. ``tell`` takes lines about either. An adapter is merged into its
    ``base`` and, without another reference, compared with that.

    >>> import torch
    >>> [task.effort for task in case({"fc.weight": torch.eye(1000)}).tasks]
    [64.0]
    """
    selection = selection or Selection()
    workers = replace(WORKER, jobs=jobs)
    if base is not None and reference is None:
        reference = base
    model, other = located(source, base), None if reference is None else located(reference)
    inventory = _inventory(model, memory)
    # refused now if it cannot be opened, not once for each matrix
    compared = _inventory(other, memory) if other else None
    weights = [
        TensorTask(unit, chosen, trainings.of_matrix(unit.parts[0].name) if trainings else None)
        for unit in inventory.plan.units
        if (chosen := frozenset(p.name for p in unit.parts if selection.takes(p.name)))
    ]
    tables = Tables.of(inventory.plan)
    heads = [
        AttentionTask(layer, tables if layer.depth == 0 else None)
        for layer in inventory.attention
        if selection.takes(layer.query.name) and selection.takes(layer.key.name)
    ]
    tasks: list[Task] = [*weights, *heads]
    if isinstance(model, OnDisk) or other is None:  # else only matrices are sent where work is done
        tasks += [MomentsTask(one) for one in inventory.moments if selection.takes(one.name)]
    if isinstance(model, OnDisk) and not isinstance(model, Mirrored):  # which has holes
        tasks += [DigestTask(path, Path(path).stat().st_size) for path in inventory.files]
    _put_in_order(tasks)
    engine: Engine = Here()
    sides = [side for side in (model, other) if side is not None]
    on_disk = [side for side in sides if isinstance(side, OnDisk)]
    # what is sent from memory is held as sent, too; what stays where it is takes nothing more
    copies = 2 * len(sides) - len(on_disk) if on_disk else 0
    free = cluster.node_bytes if cluster and on_disk else available_bytes()
    room = Room(memory or free, copies, limited=memory is not None)
    if on_disk:
        needed = [task.memory.at_most(copies) for task in tasks]
        most = LIBRARY_BYTES + max(needed, default=GIGABYTE * copies)
        slowest = max((task.effort for task in tasks), default=0.0)
        if memory is None and free is not None:
            most = min(most, max(free, MIN_WORKER_BYTES))
            least = max((task.memory.at_least(copies) for task in tasks), default=0)
            workers = replace(workers, jobs=max(1, min(jobs, free // (LIBRARY_BYTES + least))))
        workers = replace(workers, limit=slowest, memory=memory or most)
        if cluster:
            least = max((task.memory.at_least(copies) for task in tasks), default=0)
            reserved = memory or LIBRARY_BYTES + least
            there = _fetching_there(replace(workers, jobs=1), sides)
            engine = replace(cluster, worker=workers, engine=there, reserved=reserved)
        else:
            engine = _fetching(workers, sides)
    beside: tuple[Vector, ...] = ()
    matched = NO_COUNTERPARTS
    if compared:
        here, other_parts = (_parts(side.plan) for side in (inventory, compared))
        matched = counterparts(here, other_parts, renames)
        named = {matched.there(vector.name): vector.name for vector in inventory.vectors}
        beside = tuple(
            replace(vector, name=named.get(vector.name, vector.name)) for vector in compared.vectors
        )
    if store and len(on_disk) == len(sides):
        files = [side.identity for side in on_disk]
        made_of = [source_digest(*SOURCES), dict(environment()), selection.spectrum, files]
        engine = Keeping(engine, store, partial(_kept_name, made_of), tell)
    return Case(
        model,
        other,
        selection,
        inventory,
        tuple(tasks),
        engine,
        room,
        beside,
        atlas,
        compared,
        matched,
    )


def _put_in_order(tasks: list[Task]) -> None:
    """Leave no long task for the end, but begin with a short one: its row can be shown soon."""
    tensors = [task for task in tasks if isinstance(task, TensorTask)]
    shortest = min(tensors, key=lambda task: task.effort, default=None)
    tasks.sort(key=lambda task: (task is shortest, task.effort), reverse=True)


def _kept_name(made_of: list[Any], order: _Order) -> str:
    """Name the file in which the rows of a task are kept."""
    matched = sorted(order.reference.names.items()) if order.reference else None
    kind = type(order.task).__name__.lower()
    return f"{kind}-{digest([made_of, order.task.key, matched])[:32]}.unit"


def _parts(plan: Plan) -> list[Logical]:
    return [part for unit in plan.units for part in unit.parts]


def _fetching(engine: Engine, sides: Sequence[Location]) -> Engine:
    """Return an engine that fetches what its tasks miss of checkpoints that lie elsewhere."""
    mirrors = [side.mirror for side in sides if isinstance(side, Mirrored) and side.mirror]
    return Fetching(engine, tuple(mirrors)) if mirrors else engine


def _fetching_there(engine: Engine, sides: Sequence[Location]) -> Engine:
    """Return an engine that does the same on a node, which has no mirrors of ours."""
    mirrors = [side.mirror for side in sides if isinstance(side, Mirrored) and side.mirror]
    listed = tuple((each.url, str(each.folder), tuple(each.files.values())) for each in mirrors)
    return FetchingThere(engine, listed) if listed else engine


def _inventory(model: Location, memory: int | None) -> Inventory:
    """Return what is in the model; a file is opened in a process of its own, or refused."""
    if isinstance(model, InMemory):
        return Inventory.of(model)
    limit = model.parse_seconds
    allowed = max(MIN_WORKER_BYTES, memory or 0)
    engine = _fetching(replace(WORKER, limit=limit, memory=allowed), [model])
    (done,) = engine.run(Inventory.of, [model])
    if not done.failure:
        return done.result
    if isinstance(done.error, Refusal):
        raise done.error
    advice = "see whether the file is whole"
    if isinstance(done.error, TimeoutError):
        raise Refusal(5, str(model), f"takes more than {limit:.0f} s to open", advice)
    if not is_out_of_memory(done.error):
        raise Refusal(2, str(model), done.failure, advice)
    wrong = f"needs too much memory to open: more than {gigabytes(allowed)}"
    raise Refusal(2, str(model), wrong, f"{advice}, or allow more with --memory")


def diagnose(
    source: Source,
    reference: Source | None = None,
    *,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    spectrum: Extent = "auto",
    jobs: int = CORES,
    memory: int | str | None = None,
    atlas: Atlas | str | Path | None = None,
    trainings: Trainings | None = None,
    renames: Renames = (),
    base: Source | None = None,
) -> Diagnosis:
    """Examine every matrix of a checkpoint, a model or a state dict, and apply all rules.

    With a ``reference`` each matrix also gets the errors of its components against its counterpart
    there, by name but for prefixes and ``renames``, pairs of a text here and one there; and with
    ``trainings`` what noise alone would have made of that one (see `kappascope.unlearned`). If
    either is a checkpoint, ``jobs`` processes read and examine; models in memory are examined here.
    Each process may use ``memory`` (bytes, or like ``"8G"``): by default what its matrices need, if
    that is free. ``atlas`` is what trained matrices are like, by default that of the package. An
    adapter is merged into its ``base``, and compared with it.

    >>> import torch
    >>> found = diagnose({"a.weight": 2 * torch.eye(3)}, reference={"a.weight": torch.eye(3)})
    >>> found.matrices[0].errors["frobenius_norm"], found.matrices[0].errors["condition_number"]
    (1.0, 0.0)
    """
    include, exclude = (
        (given,) if isinstance(given, str) else tuple(given) for given in (include, exclude)
    )
    selection = Selection(include, exclude, spectrum)
    limit = None if memory is None else bytes_of(memory)
    known = Atlas.read(atlas) if isinstance(atlas, str | Path) else atlas
    prepared = case(
        source,
        reference,
        selection,
        jobs,
        limit,
        atlas=known,
        trainings=trainings,
        renames=renames,
        base=base,
    )
    return prepared.concluded(row for done in prepared.examine() for row in done.result)
