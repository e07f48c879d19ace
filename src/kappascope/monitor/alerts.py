"""What a user should be told, in words and once: rules from a matrix's readings to an alert.

A rule compares a matrix with its own first readings: what was so from the start is a choice of
whoever built the model, and what changed is news.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from kappascope.monitor.record import Alert
from kappascope.text import number, plural

Readings = Mapping[str, Any]

RUNAWAY_FACTOR = 10.0  # over the first readings, ...
RUNAWAY_RATIO = 1.5  # ... and by this much from each of the last two readings to the next
COLLAPSED_SHARE = 0.5  # of the first effective rank
RANK_ONE_BELOW = 1.5  # stable rank, of a matrix that began with four or more
DEAD_BELOW = 1e-6  # of the median row norm
SWALLOWED_ABOVE = 0.5  # of the entries, at two readings in a row


@dataclass
class _Past:
    """What rules remember of a matrix."""

    first: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    swallowed: int = 0
    readings: int = 0


@dataclass
class Watch:
    """The rules with their memory; each tells of a matrix once.

    >>> watch = Watch()
    >>> list(watch.reading(0, "w", {"frobenius_norm": 1.0, "row_norms": [(0.0, 1.0), (1.0, 0.5)]}))
    []
    >>> [alert.name for alert in watch.reading(50, "w", {"non_finite": 3.0})]
    ['non-finite']
    """

    told: set[tuple[str, str]] = field(default_factory=set)
    _past: dict[str, _Past] = field(default_factory=dict)

    def once(self, step: int, name: str, matrix: str, text: str) -> Iterator[Alert]:
        """The alert, unless it has been given before."""
        if (name, matrix) not in self.told:
            self.told.add((name, matrix))
            yield Alert(step, name, matrix, text)

    def reading(self, step: int, matrix: str, found: Readings) -> Iterator[Alert]:
        """What a reading of a matrix has to tell that was not told before."""
        past = self._past.setdefault(matrix, _Past())
        for name, text in _symptoms(found, past):
            yield from self.once(step, name, matrix, f"{matrix}: {text} (step {step:,})")
        _remember(found, past)


def _remember(found: Readings, past: _Past) -> None:
    for name, value in found.items():
        if isinstance(value, float):
            past.first.setdefault(name, value)
    if "row_norms" in found:
        past.first.setdefault("least_row", _least_row(found))
    if "condition_number_high" in found:
        past.first.setdefault("resolved", float(_is_resolved(found)))
    if "frobenius_norm" in found:
        past.norms = [*past.norms[:3], *past.norms[3:][-2:], found["frobenius_norm"]]
    past.readings += 1


def _symptoms(found: Readings, past: _Past) -> Iterator[tuple[str, str]]:
    if found.get("non_finite"):
        yield "non-finite", f"{number(found['non_finite'])} entries are NaN or infinite"
        return
    first = past.first
    if first.get("resolved") and "condition_number_high" in found and not _is_resolved(found):
        low = number(found["condition_number_low"])
        yield "unresolved", f"κ is beyond what its dtype resolves: {low} or more"
    if first.get("least_row", 0.0) > DEAD_BELOW >= _least_row(found):
        yield "dead-row", "a row has become zero: look at what feeds it, and at its decay"
    if found.get("dead_rows"):
        told = plural(int(found["dead_rows"]), "row")
        yield "dead-row", f"no gradient has reached {told} for some readings: look at its inputs"
    yield from _collapse(found, first)
    yield from _runaway(found, past)
    share = found.get("swallowed")
    if share is not None:
        past.swallowed = past.swallowed + 1 if share > SWALLOWED_ABOVE else 0
        if past.swallowed >= 2:
            yield "swallowed", f"{share:.0%} of its entries did not move, two readings in a row"


def _least_row(found: Readings) -> float:
    """The smallest row norm in parts of the median."""
    norms = dict(found.get("row_norms", ()))
    middle = norms.get(0.5, 0.0)
    return norms[1.0] / middle if middle > 0 else 1.0


def _is_resolved(found: Readings) -> bool:
    return bool(found["condition_number_high"] <= 2 * found["condition_number_low"])


def _collapse(found: Readings, first: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    rank, began = found.get("effective_rank"), first.get("effective_rank", 0.0)
    if rank is not None and rank < COLLAPSED_SHARE * began:
        yield "rank-collapse", f"its effective rank fell from {began:.0f} to {rank:.0f}"
    stable, began = found.get("stable_rank"), first.get("stable_rank", 0.0)
    if stable is not None and stable < RANK_ONE_BELOW and began >= 4:
        told = f"its stable rank fell from {number(began)} to {number(stable)}"
        yield "rank-collapse", f"{told}: one direction is all that is left"


def _runaway(found: Readings, past: _Past) -> Iterator[tuple[str, str]]:
    now, norms = found.get("frobenius_norm"), past.norms
    if now is None or len(norms) < 4:
        return
    began = max(norms[:3])
    latest = [*norms[-2:], now]
    grows = all(b > RUNAWAY_RATIO * a for a, b in pairwise(latest))
    if 0 < began * RUNAWAY_FACTOR < now and grows:
        told = f"its norm is {number(now / began)} times that of its first readings"
        yield "norm-runaway", f"{told} and still growing: look at the learning rate"
