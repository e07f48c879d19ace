"""Where a training run was when it was last seen, so that it goes on from there to the last bit.

A loop over the steps of a bookmark is a plain loop that survives a kill:

>>> from tempfile import TemporaryDirectory
>>> def draw(bookmark, stop=4):
...     data, log = torch.Generator().manual_seed(0), []
...     for step in bookmark.steps(4, log, data=data):
...         if step == stop:
...             return log
...         log.append({"step": step, "value": torch.rand((), generator=data).item()})
...     return log
>>> with TemporaryDirectory() as folder:
...     killed = draw(Bookmark(Path(folder) / "trial", every=0.0), stop=2)
...     resumed = draw(Bookmark(Path(folder) / "trial", every=0.0))
>>> [row["step"] for row in resumed], resumed == draw(Bookmark())
([0, 1, 2, 3], True)
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from kappascope import store

SECONDS = 10.0  # between two saved states: what a kill costs at most


class Stateful(Protocol):
    """A model, an optimizer, the handle of a correction."""

    def state_dict(self) -> Any:
        """Everything that a later step depends on."""

    def load_state_dict(self, state: Any, /) -> Any:
        """Take over what the other had."""


@dataclass
class Bookmark:
    """The place of one training run in a file, or nowhere."""

    path: Path | None = None
    every: float = SECONDS

    def steps(
        self, total: int, log: list[Any], **parts: Stateful | torch.Generator
    ) -> Iterator[int]:
        """The steps that are left of ``total``, with ``log`` and ``parts`` as they were before.

        Whatever later steps depend on must be among the parts, and what is logged be plain.
        """
        first = self._resumed(log, parts)
        saved = time.monotonic()
        for step in range(first, total):
            if self.path and step > first and time.monotonic() - saved >= self.every:
                self._save({"step": step, "log": log, "parts": _states(parts)})
                saved = time.monotonic()
            yield step

    def forget(self) -> None:
        """Begin at the first step the next time: for when the results are kept."""
        if self.path:
            self.path.unlink(missing_ok=True)

    def _resumed(self, log: list[Any], parts: dict[str, Any]) -> int:
        """Take up what was saved; the step to begin with."""
        state = self._saved()
        if not state or state["parts"].keys() != parts.keys():
            return 0
        for name, part in parts.items():
            load = part.set_state if isinstance(part, torch.Generator) else part.load_state_dict
            load(state["parts"][name])
        log[:] = state["log"]
        return int(state["step"])

    def _saved(self) -> dict[str, Any] | None:
        """The state in the file, if it is all there; only tensors and plain values are read."""
        if not self.path or not self.path.is_file():
            return None
        seal, _, body = self.path.read_bytes().partition(b"\n")
        if hashlib.sha256(body).hexdigest().encode() != seal:
            return None
        found: dict[str, Any] = torch.load(io.BytesIO(body), weights_only=True)
        return found

    def _save(self, state: dict[str, Any]) -> None:
        buffer = io.BytesIO()
        torch.save(state, buffer)
        body = buffer.getvalue()
        if self.path:
            store.write(self.path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


def _states(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        name: part.get_state() if isinstance(part, torch.Generator) else part.state_dict()
        for name, part in parts.items()
    }
