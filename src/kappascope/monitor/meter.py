"""The meter: all quantities of the matrices of an item, with what it remembers of each."""

from __future__ import annotations

import itertools
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kappascope.matrix import spectra, tracking
from kappascope.model.matrices import Logical
from kappascope.model.weights import precise
from kappascope.monitor import measure, swallowed, updates
from kappascope.monitor.signal import signal_to_noise
from kappascope.monitor.source import AroundStep, StepTensors
from kappascope.monitor.survey import Item

NOISE_READINGS = 8  # over which a signal's spread is told where there are no micro-batches
DEAD_READINGS = 3  # in a row without a gradient: a batch without some feature is no death

Measured = dict[str, dict[str, Any]]
"""Quantities by matrix."""


@dataclass
class MatrixMemory:
    """What is remembered of one matrix between readings."""

    warm: tracking.State = field(default_factory=dict)
    ends: tracking.Ends | None = None
    values: tuple[float, float] | None = None
    step: Tensor | None = None
    signals: dict[float, deque[float]] = field(default_factory=dict)
    microbatches: list[Tensor] = field(default_factory=list)
    silent: Tensor | None = None  # readings in a row without a gradient, by row; -1 before any


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

    def measured(self, item: Item, source: StepTensors, step: int) -> Measured:
        """All quantities of the matrices of one item; none where nothing has changed."""
        if item.layer is not None:
            if not self._has_changed(item, source):
                return {}
            names = {logical.name for logical in item.wanted}
            products = item.layer.products(source.read)
            return {p.name: measure.product_quantities(p) for p in products if p.name in names}
        assert item.unit is not None
        before, gradients, momenta = (
            source.cut(item, what) for what in ("before", "gradient", "momentum")
        )
        if not gradients and not self._has_changed(item, source):
            return {}
        found: Measured = {}
        # what the optimizer stepped, where that is a copy in more digits of what the model has
        after = source.cut(item, "after") or {
            part.name: matrix for part, matrix in item.unit.matrices(source.read)
        }
        for logical in item.wanted:
            name = logical.name
            here = AroundStep(after[name], before.get(name), gradients.get(name), momenta.get(name))
            memory = self.memory.setdefault(name, MatrixMemory())
            found[name] = self._quantities(here, memory, source.decay(item.name), step)
            found[name] |= _dead_rows(here.gradient, memory)
            if "swallowed" in self.quantities:
                found[name] |= _swallowed(source, item.name, logical)
        return found

    def of_vector(self, name: str, source: StepTensors) -> dict[str, float]:
        """What of the last step a gain or a bias did not hear."""
        return _swallowed(source, name, None) if "swallowed" in self.quantities else {}

    def _quantities(
        self, here: AroundStep, memory: MatrixMemory, decay: float | None, step: int
    ) -> dict[str, Any]:
        """The components of a matrix, what the gradient asks of it, and what the step did."""
        quantities, vitals = measure.components(here.after)
        if (
            quantities.get("non_finite")
            or not vitals.sigma_max
            or not vitals.status.startswith("ok")
        ):
            return quantities
        is_whole = "spectra" in self.quantities and step % self.spectra_every == 0
        ends = None
        if self.quantities & {"signal", "update"}:
            ends = tracking.ends(precise(here.after), memory.warm)
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
        self, here: AroundStep, memory: MatrixMemory, ends: tracking.Ends, vitals: spectra.Vitals
    ) -> dict[str, Any]:
        """How the ends of the spectrum moved since the last reading, and what was expected."""
        found: dict[str, Any] = {}
        assert vitals.sigma_max is not None and vitals.sigma_min is not None
        values, old = (vitals.sigma_max, vitals.sigma_min), memory.ends
        if old is not None and memory.values is not None and "update" in self.quantities:
            outer = [0, -1]
            held = precise(here.after)
            now = (old.left[:, outer] * (held @ old.right[:, outer])).sum(0).tolist()
            pairs = list(zip((0.0, 1.0), values, memory.values, now, strict=True))
            found["sigma_change"] = [(q, new - last) for q, new, last, _ in pairs]
            found["sigma_change_predicted"] = [(q, first - last) for q, _, last, first in pairs]
            found["turn_top"] = updates.turn(old.right[:, :1], ends.right[:, :1])
            found["turn_bottom"] = updates.turn(old.right[:, -1:], ends.right[:, -1:])
        memory.ends, memory.values = ends, values
        return found

    def _update(
        self,
        here: AroundStep,
        memory: MatrixMemory,
        ends: tracking.Ends | None,
        decay: float | None,
        is_whole: bool,
    ) -> dict[str, Any]:
        """What the step did, and what momentum would do."""
        assert here.before is not None
        found: dict[str, Any]
        found, moved = updates.update_quantities(
            here.before, here.after, here.gradient, memory.step, decay
        )
        memory.step = moved
        if ends is not None:
            found |= updates.along_ends(moved, ends)
        if here.momentum is not None:
            if here.gradient is not None:
                aligned = updates.cosine(here.momentum, here.gradient)
                found |= {} if aligned is None else {"momentum_alignment_gradient": aligned}
            if ends is not None:
                shares = updates.along_ends(here.momentum, ends)
                found |= {
                    f"momentum_{name.removeprefix('update_')}": v for name, v in shares.items()
                }
        if is_whole and moved.any():
            vitals = spectra.vitals(moved)
            if vitals.sigma_max and vitals.frobenius_norm:
                found["update_stable_rank"] = (vitals.frobenius_norm / vitals.sigma_max) ** 2
                if vitals.condition_number is not None:
                    found["update_condition_number"] = vitals.condition_number
        return found

    def _has_changed(self, item: Item, source: StepTensors) -> bool:
        """Whether the tensors of an item differ from those last measured."""
        digest = 0
        for path in item.paths:
            tensor = source.read(path).contiguous()
            digest = zlib.crc32(tensor.view(torch.uint8).numpy().data, digest)
        known = self._fingerprints.get(item.name)
        self._fingerprints[item.name] = digest
        return known != digest


def _noise(quantities: Mapping[str, Any], memory: MatrixMemory) -> dict[str, Any]:
    """The signal-to-noise ratio over micro-batches where there are some, else over readings."""
    found = []
    sums = [torch.zeros(2), *(t.cpu().float() for t in memory.microbatches)]
    steps = [(b - a).tolist() for a, b in itertools.pairwise(sums)]
    for q, value in quantities.get("signal", ()):
        kept = memory.signals.setdefault(q, deque(maxlen=NOISE_READINGS))
        kept.append(value)
        samples = list(kept)
        if len(steps) > 1:
            samples = [pair[0 if q == 0.0 else 1] for pair in steps]
        ratio = signal_to_noise(samples)
        if ratio is not None:
            found.append((q, ratio))
    return {"signal_to_noise": found} if found else {}


def _swallowed(source: StepTensors, name: str, logical: Logical | None) -> dict[str, float]:
    """The share of a parameter's entries that did not move, and what rounding took of the step.

    With a ``logical`` matrix it is that of this part of the parameter.
    """
    before, after, gradient = (source.around(name, w) for w in ("before", "after", "gradient"))
    if before is None or after is None or gradient is None or not gradient.isfinite().all():
        return {}
    step, decay = source.intended(name), source.decay(name) or 0.0
    parts = [before, after, gradient, *([] if step is None else [step])]
    unit = source.unit_of(name)
    if logical is not None and unit is not None:
        place = [part.name for part in unit.parts].index(logical.name)
        parts = [list(unit.layout.cut(part))[place][1] for part in parts]
    before, after, gradient = parts[:3]
    found = swallowed.observed(before, after, gradient)
    if not found or step is None:
        return found
    wanted = parts[3]
    for quantity, dtype in (("predicted", before.dtype), ("in_float32", torch.float32)):
        share = swallowed.predicted(before, wanted, decay, gradient, dtype)
        if share is not None and (quantity == "predicted" or before.dtype.itemsize <= 2):
            found[f"swallowed_{quantity}"] = share
    return found | (
        swallowed.lost(before, after, wanted, decay) if before.dtype.itemsize <= 2 else {}
    )


def _dead_rows(gradient: Tensor | None, memory: MatrixMemory) -> dict[str, float]:
    """The number of rows that had a gradient once and have had none for some readings."""
    if gradient is None or gradient.ndim != 2 or not gradient.any():
        return {}
    silent = ~gradient.ne(0).any(1)
    if memory.silent is None or len(memory.silent) != len(silent):
        memory.silent = torch.full((len(silent),), -1)
    counted = torch.where(memory.silent >= 0, memory.silent + 1, -1)
    memory.silent = torch.where(silent, counted, 0)
    return {"dead_rows": float((memory.silent >= DEAD_READINGS).sum())}
