"""Measure all quantities of a matrix, and remember what its next reading needs."""

from __future__ import annotations

import itertools
import math
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from kappascope.matrix import spectra, tracking
from kappascope.matrix.ends import Ends
from kappascope.matrix.status import Outcome
from kappascope.model.matrices import Logical
from kappascope.model.weights import precise
from kappascope.monitor import measure, swallowed, updates
from kappascope.monitor.signal import MIN_SAMPLES, signal_to_noise, signals
from kappascope.monitor.source import AroundStep, StepTensors
from kappascope.monitor.survey import Item

NOISE_READINGS = 8  # over which a signal's spread is told where there are no micro-batches
SAMPLED_ENTRIES = 65_536  # of a parameter, by which the share lost to rounding is predicted
DEAD_READINGS = 3  # in a row without a gradient: a batch without some feature is no death

Measured: TypeAlias = dict[str, dict[str, Any]]
"""Quantities by matrix."""


@dataclass
class MatrixMemory:
    """What is remembered of one matrix between readings."""

    warm: tracking.State = field(default_factory=dict)
    ends: Ends | None = None
    values: tuple[float, float] | None = None
    step: Tensor | None = None
    signals: dict[float, deque[float]] = field(default_factory=dict)
    microbatches: list[Tensor] = field(default_factory=list)
    silent: Tensor | None = None  # readings in a row without a gradient, by row; -1 before any
    longest: Tensor | None = None  # how many such readings there were at most before a gradient


@dataclass
class Meter:
    """Measure items after a step, each warm-started from its last reading.

    ``quantities`` says what is measured beside components, and ``spectra_every`` at which steps
    the whole spectra are.
    """

    quantities: frozenset[str]
    spectra_every: int
    memory: dict[str, MatrixMemory] = field(default_factory=dict)
    _fingerprints: dict[str, int] = field(default_factory=dict)

    def forget(self, names: Sequence[str]) -> None:
        """Drop what is remembered of matrices that are no longer what they were."""
        for name in names:
            self.memory.pop(name, None)

    def add_microbatch(self, item: Item, gradient: Tensor) -> None:
        """Keep how far the gradient has come along the ends of each matrix, where it is."""
        assert item.unit is not None
        for logical, (_, piece) in zip(
            item.unit.parts, item.unit.layout.cut(gradient), strict=True
        ):
            memory = self.memory.get(logical.name)
            if memory is not None and memory.ends is not None:
                left, right = (
                    side[:, [0, -1]].to(piece.device, non_blocking=True)
                    for side in (memory.ends.left, memory.ends.right)
                )
                memory.microbatches.append(signals(piece, left, right))

    def forget_microbatches(self, item: Item) -> None:
        """Drop those that were added to a gradient that nobody used."""
        for logical in item.wanted:
            if logical.name in self.memory:
                self.memory[logical.name].microbatches.clear()

    def microbatches(self) -> dict[tuple[str, int], Tensor]:
        """What was kept of them, by matrix and place."""
        return {
            (name, place): kept
            for name, memory in self.memory.items()
            for place, kept in enumerate(memory.microbatches)
        }

    def measured(self, item: Item, source: StepTensors, step: int) -> Measured:
        """All quantities of the matrices of one item; none where nothing has changed."""
        if not source.is_stepped(item) and not self._has_changed(item, source):
            return {}
        if item.layer is not None:
            return _products(item, source)
        assert item.unit is not None
        before, gradients, momenta = (
            source.cut(item, what) for what in ("before", "gradient", "momentum")
        )
        measured: Measured = {}
        # what the optimizer stepped, where that is a copy in more digits of what the model has
        after = source.cut(item, "after") or {
            part.name: matrix for part, matrix in item.unit.matrices(source.read)
        }
        for logical in item.wanted:
            name = logical.name
            here = AroundStep(after[name], before.get(name), gradients.get(name), momenta.get(name))
            memory = self.memory.setdefault(name, MatrixMemory())
            measured[name] = self._quantities(here, memory, source.decay(item.name), step)
            measured[name] |= _dead_rows(here.gradient, memory) if here.gradient is not None else {}
            if "swallowed" in self.quantities:
                measured[name] |= _swallowed(source, item.name, logical)
        return measured

    def of_vector(self, name: str, source: StepTensors) -> dict[str, float]:
        """What of the last step a gain or a bias did not hear."""
        return _swallowed(source, name, None) if "swallowed" in self.quantities else {}

    def _quantities(
        self, here: AroundStep, memory: MatrixMemory, decay: float | None, step: int
    ) -> dict[str, Any]:
        """The components of a matrix, what the gradient asks of it, and what the step did."""
        vitals, ends = spectra.quick_vitals(here.after)
        quantities = measure.components(here.after, vitals)
        if vitals.status.outcome is not Outcome.OK or not vitals.sigma_max:
            return quantities
        is_whole = "spectra" in self.quantities and step % self.spectra_every == 0
        if self.quantities & {"signal", "update"}:
            ends = ends or tracking.ends(precise(here.after), memory.warm)
            quantities |= self._since_last(here, memory, ends, vitals)
        if ends is not None and here.gradient is not None and "signal" in self.quantities:
            quantities |= measure.ends_signal(here.gradient, ends)
            quantities |= _noise(quantities, memory)
        if is_whole:
            gradient = here.gradient if "signal" in self.quantities else None
            quantities |= measure.whole_spectrum(here.after, gradient)
        if "update" in self.quantities and here.before is not None:
            quantities |= self._update(here, memory, ends, decay, is_whole)
        memory.microbatches.clear()
        return quantities

    def _since_last(
        self, here: AroundStep, memory: MatrixMemory, ends: Ends, vitals: spectra.Vitals
    ) -> dict[str, Any]:
        """How the ends of the spectrum moved since the last reading, and what was expected."""
        changes: dict[str, Any] = {}
        assert vitals.sigma_max is not None and vitals.sigma_min is not None
        values, old = (vitals.sigma_max, vitals.sigma_min), memory.ends
        if old is not None and memory.values is not None and "update" in self.quantities:
            outer = [0, -1]
            # a change that is far smaller than the value takes float64, and vectors of length one
            left, right = (
                nn.functional.normalize(side[:, outer].double(), dim=0)
                for side in (old.left, old.right)
            )
            now = (left * (here.after.double() @ right)).sum(0).tolist()
            pairs = list(zip((0.0, 1.0), values, memory.values, now, strict=True))
            changes["sigma_change"] = [(q, new - last) for q, new, last, _ in pairs]
            changes["sigma_change_predicted"] = [(q, first - last) for q, _, last, first in pairs]
            changes["turn_top"] = updates.turn(old.right[:, :1], ends.right[:, :1])
            changes["turn_bottom"] = updates.turn(old.right[:, -1:], ends.right[:, -1:])
        memory.ends, memory.values = ends, values
        return changes

    def _update(
        self,
        here: AroundStep,
        memory: MatrixMemory,
        ends: Ends | None,
        decay: float | None,
        is_whole: bool,
    ) -> dict[str, Any]:
        """What the step did, and what momentum would do."""
        assert here.before is not None
        quantities: dict[str, Any]
        quantities, moved = updates.update_quantities(
            here.before, here.after, here.gradient, memory.step, decay
        )
        memory.step = moved
        if ends is not None:
            quantities |= updates.along_ends(moved, ends)
        if here.momentum is not None:
            if here.gradient is not None:
                aligned = updates.alignment(here.momentum, here.gradient)
                quantities |= {} if aligned is None else {"momentum_alignment_gradient": aligned}
            if ends is not None:
                shares = updates.along_ends(here.momentum, ends)
                quantities |= {
                    f"momentum_{name.removeprefix('update_')}": v for name, v in shares.items()
                }
        for name, change in (("update", moved), ("momentum", here.momentum)):
            if is_whole and change is not None and change.any():
                quantities |= _spectrum_of(name, change)
        return quantities

    def _has_changed(self, item: Item, source: StepTensors) -> bool:
        """Whether the tensors of an item differ from those last measured."""
        digest = 0
        for path in item.paths:
            tensor = source.read(path).contiguous()
            digest = zlib.crc32(tensor.view(torch.uint8).numpy().data, digest)
        known = self._fingerprints.get(item.name)
        self._fingerprints[item.name] = digest
        return known != digest


def _spectrum_of(name: str, change: Tensor) -> dict[str, float]:
    """The stable rank and the condition number of an update or of a momentum."""
    vitals, quantities = spectra.vitals(change), dict[str, float]()
    if vitals.sigma_max and vitals.frobenius_norm:
        quantities[f"{name}_stable_rank"] = (vitals.frobenius_norm / vitals.sigma_max) ** 2
    if vitals.condition_number is not None:
        quantities[f"{name}_condition_number"] = vitals.condition_number
    return quantities


def _noise(quantities: Mapping[str, Any], memory: MatrixMemory) -> dict[str, Any]:
    """The signal-to-noise ratio over micro-batches where there are some, else over readings."""
    ratios = []
    sums = [[0.0, 0.0], *(t.tolist() for t in memory.microbatches)]
    steps = [[y - x for x, y in zip(a, b, strict=True)] for a, b in itertools.pairwise(sums)]
    # one that was told of twice adds nothing; one that a scaler threw away is no number
    steps = [pair for pair in steps if any(pair) and all(map(math.isfinite, pair))]
    for q, value in quantities.get("signal", ()):
        kept = memory.signals.setdefault(q, deque(maxlen=NOISE_READINGS))
        kept.append(value)
        samples = list(kept)
        if len(steps) >= MIN_SAMPLES:  # two have a spread, too, but hardly one to rely on
            samples = [pair[0 if q == 0.0 else 1] for pair in steps]
        ratio = signal_to_noise(samples)
        if ratio is not None:
            ratios.append((q, ratio))
    return {"signal_to_noise": ratios} if ratios else {}


def _swallowed(source: StepTensors, name: str, logical: Logical | None) -> dict[str, float]:
    """The share of a parameter's entries that did not move, and what rounding took of the step.

    With a ``logical`` matrix it is that of this part of the parameter.
    """
    unit = source.unit_of(name) if logical is not None else None

    def part(tensor: Tensor) -> Tensor:
        if unit is None or logical is None:
            return tensor
        place = [each.name for each in unit.parts].index(logical.name)
        return list(unit.layout.cut(tensor))[place][1]

    if source.is_at_rest(name):
        return {}
    around = [source.around(name, when) for when in ("before", "after", "gradient")]
    if any(tensor is None for tensor in around):
        return {}
    quantities = swallowed.observed(*(part(tensor) for tensor in around if tensor is not None))
    if not quantities:
        return quantities

    def sample(tensor: Tensor) -> Tensor:
        # a prediction needs no more entries than tell it to a fifth of a per cent
        flat = part(tensor).flatten()
        return flat[:: max(flat.numel() // SAMPLED_ENTRIES, 1)]

    before, after, gradient = (sample(tensor) for tensor in around if tensor is not None)
    step, decay = source.intended(name, sample), source.decay(name) or 0.0
    if step is None:
        return quantities
    is_short = before.dtype.itemsize <= 2
    share = swallowed.predicted(before, step, decay, gradient, before.dtype)
    quantities |= {} if share is None else {"swallowed_predicted": share}
    if is_short:
        quantities |= swallowed.in_finer_dtypes(before, step, decay, gradient)
        quantities |= swallowed.lost(before, after, step, decay)
    return quantities


def _dead_rows(gradient: Tensor, memory: MatrixMemory) -> dict[str, float]:
    """The number of rows that had a gradient once and have had none for some readings.

    A unit that is seldom active is often silent: it must be so for twice as long as ever before.
    """
    silent = gradient.abs().amax(1) == 0
    if silent.all():
        return {}
    if memory.silent is None or len(memory.silent) != len(silent):
        memory.silent = torch.full((len(silent),), -1)
        memory.longest = torch.zeros(len(silent), dtype=torch.long)
    counted = torch.where(memory.silent >= 0, memory.silent + 1, -1)
    assert memory.longest is not None
    memory.longest = torch.where(silent, memory.longest, memory.longest.maximum(memory.silent))
    memory.silent = torch.where(silent, counted, 0)
    dead = memory.silent >= (2 * memory.longest).clamp(min=DEAD_READINGS)
    return {"dead_rows": float(dead.sum())}


def _products(item: Item, source: StepTensors) -> Measured:
    """The components of the products of a layer's heads, as far as they are wanted."""
    assert item.layer is not None
    measured: Measured = {}
    names = {logical.name for logical in item.wanted}
    for kind, left, right in item.layer.factors(source.read):
        for head, values in enumerate(spectra.quick_product_singular_values(left, right)):
            name = f"{item.layer.name}[{kind.lower()}.{head}]"
            if name in names:
                measured[name] = measure.product_quantities(values)
    return measured
