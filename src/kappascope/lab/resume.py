"""Save the state of a training run from time to time, to resume it exactly after a kill.

A loop over the steps of a resume point is a plain loop that survives a kill:

>>> from tempfile import TemporaryDirectory
>>> def draw(resume_point, stop=4):
...     data, log = torch.Generator().manual_seed(0), []
...     for step in resume_point.steps(4, log, data=data):
...         if step == stop:
...             return log
...         log.append({"step": step, "value": torch.rand((), generator=data).item()})
...     return log
>>> with TemporaryDirectory() as folder:
...     killed = draw(ResumePoint(Path(folder) / "trial", every=0.0), stop=2)
...     resumed = draw(ResumePoint(Path(folder) / "trial", every=0.0))
>>> [row["step"] for row in resumed], resumed == draw(ResumePoint())
([0, 1, 2, 3], True)
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kappascope.system.files import read_sealed, write_sealed

SAVE_EVERY = 10.0  # seconds between two saved states: what a kill costs at most


class Stateful(Protocol):
    """What has a state: a model, an optimizer, the handle of a correction."""

    def state_dict(self) -> Any:
        """Return everything that a later step depends on."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over the state that another one had."""


@dataclass
class ResumePoint:
    """The file from which one training run is resumed; without a path nothing is saved."""

    path: Path | None = None
    every: float = SAVE_EVERY

    def steps(
        self, total: int, log: list[Any], **parts: Stateful | torch.Generator
    ) -> Iterator[int]:
        """Yield the steps left of ``total``, with ``log`` and ``parts`` as they were saved.

        Everything that later steps depend on must be among the parts; the log holds plain values.
        """
        first = self._resumed(log, parts)
        saved = time.monotonic()
        for step in range(first, total):
            if self.path and step > first and time.monotonic() - saved >= self.every:
                self._save(self.path, {"step": step, "log": log, "parts": _states(parts)})
                saved = time.monotonic()
            yield step

    def forget(self) -> None:
        """Remove the saved state, once the results are stored."""
        if self.path:
            self.path.unlink(missing_ok=True)

    def _resumed(self, log: list[Any], parts: dict[str, Any]) -> int:
        """Load the saved state, if it is one of the same parts; gives the step to begin with."""
        state = self._saved()
        if not state:
            return 0
        before = copy.deepcopy(_states(parts))
        try:
            if state["parts"].keys() != parts.keys():
                return 0
            _load(parts, state["parts"])
            log[:], step = list(state["log"]), int(state["step"])
        except Exception:  # sealed, and yet no state of these parts: the run begins anew
            _load(parts, before)
            log.clear()
            return 0
        return step

    def _saved(self) -> dict[str, Any] | None:
        """Read the state in the file, if it is whole: only tensors and plain values."""
        body = read_sealed(self.path) if self.path else None
        if body is None:
            return None
        try:
            state = torch.load(io.BytesIO(body), weights_only=True)
        except Exception:  # sealed, and yet no such file
            return None
        return state if isinstance(state, dict) else None

    def _save(self, path: Path, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        write_sealed(path, buffer.getvalue())


def _load(parts: dict[str, Any], states: dict[str, Any]) -> None:
    for name, part in parts.items():
        load = part.set_state if isinstance(part, torch.Generator) else part.load_state_dict
        load(states[name])


def _states(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        name: part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
        for name, part in parts.items()
    }
