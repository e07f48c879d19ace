"""What is measured of a model: a tensor, a layer of attention, a chain of layers, a file.

A :class:`Task` can be sent to another process, which opens the model there and measures; only its
rows come back. It tells beforehand how long that may take and how much memory it needs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from kappascope.clinic import Extent
from kappascope.clinic.examination import Examination
from kappascope.clinic.examine import Kernel, examine
from kappascope.clinic.moments import Moments, SwallowedStep
from kappascope.clinic.source import GIGABYTE, Opened, Reference
from kappascope.clinic.training import Training
from kappascope.matrix import spectra
from kappascope.matrix.status import Outcome, Status
from kappascope.model.attention import Attention, Product
from kappascope.model.chains import Chain, Ends, Links, obstacle
from kappascope.model.logits import LogitBound, Tables, logit_bounds
from kappascope.model.matrices import Logical, Unit
from kappascope.model.skipped import Reason, unreadable
from kappascope.refusal import Refusal
from kappascope.system.files import FileDigest
from kappascope.system.memory import is_out_of_memory
from kappascope.text import error_text

Row: TypeAlias = Examination | Product | Chain | LogitBound | SwallowedStep | FileDigest
LEAST_FLOPS = 2e9  # floating point operations a second: any machine does more


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
            rounding = roundings.get(logical.name)
            try:
                row = examine(
                    logical.name,
                    matrix,
                    spectrum,
                    other,
                    rounding=rounding,
                    kernel=kernel_of(self.unit, logical),
                    limit=model.ranks.get(logical.name),
                )
            except Exception as error:  # which costs this matrix, not its neighbours in the tensor
                if is_out_of_memory(error):
                    raise
                reason = unreadable(error_text(error))
                row = Examination.failed(logical.name, (0, 0), "", reason)
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

    >>> from kappascope.clinic.source import InMemory
    >>> unit = InMemory(torch.nn.Conv2d(2, 4, 3)).opened().plan.units[0]
    >>> kernel_of(unit, unit.parts[0])
    Kernel(taps=(3, 3), stride=(1, 1), groups=1, depthwise=False)
    """
    is_stack = logical.whole is None and unit.layout.stack
    groups = max(1, len(unit.layout.parts)) if is_stack else 1
    return Kernel(logical.taps, logical.stride, groups, logical.kind == "depthwise")


def _counterparts(
    reference: Reference | None, names: Sequence[str]
) -> tuple[Mapping[str, Tensor | Reason], tuple[str, ...]]:
    """Return the matrices of a reference or why one is absent, and what went wrong."""
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
