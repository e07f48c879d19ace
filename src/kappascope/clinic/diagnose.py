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
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from kappascope.checkpoints.remote import Fetching, FetchingThere
from kappascope.clinic import MODULES, Extent
from kappascope.clinic.atlas import Atlas
from kappascope.clinic.diagnosis import Diagnosis
from kappascope.clinic.examination import Examination
from kappascope.clinic.examine import AUTO_LIMIT
from kappascope.clinic.keeping import Keeping
from kappascope.clinic.moments import Moments, SwallowedStep
from kappascope.clinic.source import (
    GIGABYTE,
    InMemory,
    Location,
    Mirrored,
    OnDisk,
    Readable,
    Reference,
    Source,
    located,
)
from kappascope.clinic.tasks import (
    AttentionTask,
    ChainTask,
    DigestTask,
    MomentsTask,
    Row,
    Task,
    TensorTask,
)
from kappascope.clinic.training import Trainings
from kappascope.clinic.vectors import Vector
from kappascope.model.attention import Attention, Product, attention
from kappascope.model.chains import Chain, Ends, Links, links
from kappascope.model.counterparts import Counterparts, Renames, counterparts
from kappascope.model.logits import LogitBound, Tables
from kappascope.model.matrices import Logical, Plan
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

log = logging.getLogger(__name__)
MIN_WORKER_BYTES = LIBRARY_BYTES + GIGABYTE  # to parse any file that people make
NO_COUNTERPARTS = Counterparts({})
UNCHOSEN = Reason(ReasonKind.NOT_CHOSEN, "not chosen")
# of which code the numbers of a row depend on
SOURCES = ("matrix", "model", "theory", "corrections", "checkpoints", "clinic")
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
    workers = replace(WORKER, jobs=jobs)  # refused if there is none, before anything is opened
    if base is not None and reference is None:
        reference = base
    model, other = located(source, base), None if reference is None else located(reference)
    inventory = _inventory(model, memory)
    # refused now if it cannot be opened, not once for each matrix
    compared = _inventory(other, memory) if other else None
    sides = [side for side in (model, other) if side is not None]
    tasks = _tasks(inventory, selection, trainings, sides)
    on_disk = [side for side in sides if isinstance(side, OnDisk)]
    # what is sent from memory is held as sent, too; what stays where it is takes nothing more
    copies = 2 * len(sides) - len(on_disk) if on_disk else 0
    free = cluster.node_bytes if cluster and on_disk else available_bytes()
    room = Room(memory or free, copies, limited=memory is not None)
    engine = _engine(tasks, room, sides, workers, cluster) if on_disk else Here()
    reference_vectors: tuple[Vector, ...] = ()
    matched = NO_COUNTERPARTS
    if compared:
        here, there = (_parts(side.plan) for side in (inventory, compared))
        matched = counterparts(here, there, renames)
        named = {matched.there(vector.name): vector.name for vector in inventory.vectors}
        reference_vectors = tuple(
            replace(vector, name=named.get(vector.name, vector.name)) for vector in compared.vectors
        )
    if store and len(on_disk) == len(sides):
        files = [side.identity for side in on_disk]
        made_of = [source_digest(*SOURCES), dict(environment()), selection.spectrum, files]
        engine = Keeping(engine, store, partial(_kept_name, made_of), tell)
    return Case(
        model=model,
        reference=other,
        selection=selection,
        inventory=inventory,
        tasks=tasks,
        engine=engine,
        room=room,
        reference_vectors=reference_vectors,
        atlas=atlas,
        compared=compared,
        counterparts=matched,
    )


def _tasks(
    inventory: Inventory,
    selection: Selection,
    trainings: Trainings | None,
    sides: Sequence[Location],
) -> tuple[Task, ...]:
    """List what is to be measured of the first of the sides, in the order in which to begin."""
    model, *others = sides
    takes = selection.takes
    tasks: list[Task] = [
        TensorTask(unit, chosen, trainings.of_matrix(unit.parts[0].name) if trainings else None)
        for unit in inventory.plan.units
        if (chosen := frozenset(p.name for p in unit.parts if takes(p.name)))
    ]
    tables = Tables.of(inventory.plan)
    tasks += [
        AttentionTask(layer, tables if layer.depth == 0 else None)
        for layer in inventory.attention
        if takes(layer.query.name) and takes(layer.key.name)
    ]
    if isinstance(model, OnDisk) or not others:  # else only matrices are sent where work is done
        tasks += [MomentsTask(one) for one in inventory.moments if takes(one.name)]
    if isinstance(model, OnDisk) and not isinstance(model, Mirrored):  # which has holes
        tasks += [DigestTask(path, Path(path).stat().st_size) for path in inventory.files]
    # No long task is left for the end, but a short one comes first: its row can be shown soon.
    tensors = [task for task in tasks if isinstance(task, TensorTask)]
    shortest = min(tensors, key=lambda task: task.effort, default=None)
    return tuple(sorted(tasks, key=lambda task: (task is shortest, task.effort), reverse=True))


def _engine(
    tasks: Sequence[Task],
    room: Room,
    sides: Sequence[Location],
    workers: Processes,
    cluster: Cluster | None,
) -> Engine:
    """Return the processes that read files, here or on a cluster, with limits that suit the tasks.

    Without a limit of the user's a process may use what the largest task needs, if that is free.
    """
    most = max((task.memory.at_most(room.copies) for task in tasks), default=GIGABYTE * room.copies)
    least = LIBRARY_BYTES + max((task.memory.at_least(room.copies) for task in tasks), default=0)
    allowed, jobs = LIBRARY_BYTES + most, workers.jobs
    if room.limited and room.memory is not None:
        allowed = room.memory
    elif room.memory is not None:
        allowed = min(allowed, max(room.memory, MIN_WORKER_BYTES))
        jobs = max(1, min(jobs, room.memory // least))
    slowest = max((task.effort for task in tasks), default=0.0)
    workers = replace(workers, jobs=jobs, limit=slowest, memory=allowed)
    if cluster is None:
        return _fetching(workers, sides)
    there = _fetching_there(replace(workers, jobs=1), sides)
    reserved = allowed if room.limited else least
    return replace(cluster, worker=workers, engine=there, reserved=reserved)


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
