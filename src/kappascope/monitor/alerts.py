"""What a user should be told, in words and once: rules from a matrix's readings to an alert.

A rule compares a matrix with its own first readings: what was so from the start is a choice of
whoever built the model, and what changed is news.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from kappascope.monitor.record import Alert
from kappascope.monitor.swallowed import HEARD_BELOW
from kappascope.text import first_few, number, plural

Readings = Mapping[str, Any]

RUNAWAY_FACTOR = 10.0  # over the first readings, ...
RUNAWAY_RATIO = 1.5  # ... and by this much from each of the last two readings to the next
COLLAPSED_SHARE = 0.5  # of the first effective rank
RANK_ONE_BELOW = 1.5  # stable rank, of a matrix that began with four or more
DEAD_BELOW = 1e-6  # of the median row norm
UNRESOLVED_FACTOR = 10.0  # over the first κ: in 16 bits many a matrix is near the limit
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
    >>> list(watch.reading(0, {"w": {"frobenius_norm": 1.0}, "v": {}}))
    []
    >>> [alert.text for alert in watch.reading(50, {"w": {"non_finite": 3.0}, "v": {}})]
    ['w: 3 entries are NaN or infinite (step 50)']
    """

    told: set[tuple[str, str]] = field(default_factory=set)
    _past: dict[str, _Past] = field(default_factory=dict)

    def once(self, step: int, name: str, matrix: str, text: str) -> Iterator[Alert]:
        """The alert, unless it has been given before."""
        if (name, matrix) not in self.told:
            self.told.add((name, matrix))
            yield Alert(step, name, matrix, text)

    def reading(self, step: int, rows: Mapping[str, Readings]) -> Iterator[Alert]:
        """What a reading has to tell that was not told before: one alert for each kind of trouble.

        It names the matrices, and is about the first of them.
        """
        new: dict[str, list[Alert]] = {}
        for matrix, found in rows.items():
            past = self._past.setdefault(matrix, _Past())
            for name, text in _symptoms(found, past):
                for alert in self.once(step, name, matrix, text):
                    new.setdefault(name, []).append(alert)
            _remember(found, past)
        for alerts in new.values():
            first = alerts[0]
            names = first_few([alert.matrix for alert in alerts])
            yield replace(first, text=f"{names}: {first.text} (step {step:,})")


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
        yield "non-finite", f"{found['non_finite']:,.0f} entries are NaN or infinite"
        return
    first = past.first
    began, low = first.get("condition_number", 0.0), found.get("condition_number_low", 0.0)
    if first.get("resolved") and low > UNRESOLVED_FACTOR * began and not _is_resolved(found):
        told = f"κ rose from {number(began)} to {number(low)} or more"
        yield "unresolved", f"{told}, beyond what its dtype resolves"
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
            told = f"{share:.0%} of its entries did not move, two readings in a row"
            finer = found.get("swallowed_in_float32")
            hears = finer is not None and finer < HEARD_BELOW
            yield "swallowed", told + (": float32 weights would hear it" if hears else "")


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
