"""Several processes that train one model: who measures what, and how it comes together."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")

JOIN_SECONDS = 20  # for all processes to attach a monitor; those that wait in vain work alone


@dataclass(frozen=True)
class Ranks:
    """A process among those that watch together; alone it is the first of one.

    >>> Ranks().gathered("rows")
    ['rows']
    """

    rank: int = 0
    count: int = 1

    @classmethod
    def joined(cls, number: int) -> Ranks:
        """Meet the other processes, if each of them attaches its ``number``-th monitor, too.

        A monitor on one process alone is no error: nobody waits for the others in a collective.
        """
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        rank, count = dist.get_rank(), dist.get_world_size()
        store = dist.distributed_c10d._get_default_store()
        keys = [f"kappascope/monitor/{number}/{other}" for other in range(count)]
        store.set(keys[rank], "here")
        with contextlib.suppress(Exception):  # each backend raises its own when time is up
            store.wait(keys, timedelta(seconds=JOIN_SECONDS))
            return cls(rank, count)
        return cls()

    @property
    def is_first(self) -> bool:
        """Whether this process writes the record."""
        return self.rank == 0

    def owns(self, index: int) -> bool:
        """Whether a piece of work is this process's: they are dealt round."""
        return index % self.count == self.rank

    def told(self, value: T) -> T:
        """What the first process has, for all of them."""
        if self.count == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values)
        return values[0]

    def gathered(self, value: Any) -> Sequence[Any] | None:
        """What every process has, for the first of them; None for the others."""
        if self.count == 1:
            return [value]
        values: list[Any] | None = [None] * self.count if self.is_first else None
        dist.gather_object(value, values)
        return values
