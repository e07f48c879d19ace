"""What a user should be told, in words and once: rules from a matrix's readings to an alert.

A rule compares a matrix with its own first readings: what was so from the start is a choice of
whoever built the model, and what changed is news.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any

from kappascope.monitor.record import Alert
from kappascope.monitor.swallowed import heard_by
from kappascope.text import first_few, number, plural

Readings = Mapping[str, Any]
NONE: Mapping[str, Any] = {}

RUNAWAY_FACTOR = 4.0  # over the first readings, ...
RUNAWAY_RATIO = 1.1  # ... and by this much from each of the last three readings to the next
# A small start grows far before it is large: singular values of one in the mean are no runaway.
COLLAPSED_SHARE = 0.5  # of the first effective rank
FALLING_READINGS, FALLING_SHARE = 8, 0.7  # of the stable rank so many readings ago, once trained
RANK_ONE_BELOW = 1.5  # stable rank, of a matrix that began with four or more
# One direction that outgrows the others is learning; a rank collapses where the others fade, ...
FADED_SHARE = 0.5  # ... to this share of what they once were, all of them together, ...
FADING_SHARE = 0.9  # ... or to this in the readings in which the stable rank falls
DEAD_BELOW, ALIVE_ABOVE = 0.01, 0.1  # of the median row norm; it was the latter once
SILENT_SHARE = 0.2  # of the rows without a gradient: a tenth of the ReLUs of a healthy network
LARGE_UPDATE = 0.03  # of the weight in one step; early steps may be so large, ...
LARGE_UPDATE_FACTOR = 4.0  # ... but not so many times the median of the last eight readings
UNRESOLVED_FACTOR = 10.0  # over the first κ: in 16 bits many a matrix is near the limit
WHY_RANKS_FALL = "look at its decay and its learning rate"
SWALLOWED_ABOVE = 0.5  # of the entries, at two readings in a row


@dataclass
class _Past:
    """What rules remember of a matrix."""

    first: dict[str, float] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    updates: list[float] = field(default_factory=list)
    ranks: list[float] = field(default_factory=list)
    others: list[float] = field(default_factory=list)  # norm without the first singular value
    most_others: float = 0.0
    swallowed: int = 0
    readings: int = 0


@dataclass
class Watch:
    """The rules with their memory; each tells of a matrix once.

    >>> watch = Watch()
    >>> list(watch.reading(0, {"w": {"frobenius_norm": 1.0}, "v": {}}))
    []
    >>> [alert.text for alert in watch.reading(50, {"w": {"non_finite": 3.0}, "v": {}})]
    ['w: 3 entries are NaN or infinite: look at the last batches, ... and the scaling (step 50)']
    """

    told: set[tuple[str, str]] = field(default_factory=set)
    _past: dict[str, _Past] = field(default_factory=dict)

    def once(self, step: int, name: str, matrix: str, text: str) -> Iterator[Alert]:
        """The alert, unless it has been given before."""
        if (name, matrix) not in self.told:
            self.told.add((name, matrix))
            yield Alert(step, name, matrix, text)

    def reading(
        self, step: int, rows: Mapping[str, Readings], facts: Mapping[str, Mapping[str, Any]] = NONE
    ) -> Iterator[Alert]:
        """Yield the alerts that are new with a reading: one for each kind of trouble.

        It names the matrices, and is about the first of them. ``facts`` has their shapes.
        """
        new: dict[str, list[Alert]] = {}
        for matrix, readings in rows.items():
            past = self._past.setdefault(matrix, _Past())
            for name, text in _symptoms(readings, past, facts.get(matrix, NONE)):
                for alert in self.once(step, name, matrix, text):
                    new.setdefault(name, []).append(alert)
            _remember(readings, past)
        for alerts in new.values():
            first, *others = (alert.matrix for alert in alerts)
            text = f"{first_few([first, *others])}: {alerts[0].text} (step {step:,})"
            yield replace(alerts[0], text=text, others=tuple(others))


def _remember(readings: Readings, past: _Past) -> None:
    for name, value in readings.items():
        if isinstance(value, float):
            past.first.setdefault(name, value)
    if "row_norms" in readings:
        past.first.setdefault("least_row", _least_row(readings))
    if "condition_number_high" in readings:
        past.first.setdefault("resolved", float(_is_resolved(readings)))
    if "frobenius_norm" in readings:
        past.norms = [*past.norms[:3], *past.norms[3:][-2:], readings["frobenius_norm"]]
        past.norms = past.norms if past.norms[0] > 0 else []  # an adapter that begins at zero
    if "stable_rank" in readings:
        past.ranks = [*past.ranks[1 - FALLING_READINGS :], readings["stable_rank"]]
        past.others = [*past.others[1 - FALLING_READINGS :], _others(readings)]
        past.most_others = max(past.most_others, past.others[-1])
    if "update_size" in readings:
        past.updates = [*past.updates[-7:], readings["update_size"]]
    past.readings += 1


def _symptoms(
    readings: Readings, past: _Past, about: Mapping[str, Any]
) -> Iterator[tuple[str, str]]:
    if readings.get("non_finite"):
        text = f"{plural(int(readings['non_finite']), 'entry is', 'entries are')} NaN or infinite"
        yield "non-finite", f"{text}: look at the last batches, the learning rate and the scaling"
        return
    first = past.first
    began, low = first.get("condition_number", 0.0), readings.get("condition_number_low", 0.0)
    if first.get("resolved") and low > UNRESOLVED_FACTOR * began and not _is_resolved(readings):
        text = f"κ rose from {number(began)} to {number(low)} or more"
        yield (
            "unresolved",
            f"{text}, more than its dtype resolves: see which directions get a gradient",
        )
    least = _least_row(readings)
    if first.get("least_row", 0.0) > ALIVE_ABOVE and least < DEAD_BELOW:
        text = f"the norm of a row has fallen to {number(least)} of the median row's"
        yield "dead-row", f"{text}: look at the gradient that reaches it, and at its decay"
    row_count, *_ = about.get("shape") or [0]
    if readings.get("dead_rows", 0.0) > SILENT_SHARE * row_count:
        text = plural(int(readings["dead_rows"]), "row")
        yield "dead-row", f"no gradient has reached {text} for three readings: look at these units"
    yield from _collapse(readings, past)
    yield from _runaway(readings, past)
    yield from _too_large(readings, past)
    share = readings.get("swallowed")
    # a bias before a batch norm has a gradient of rounding errors alone, too small even for float32
    is_noise = about.get("kind") == "vector" and about.get("dtype") in ("float32", "float64")
    if share is not None and not is_noise:
        past.swallowed = past.swallowed + 1 if share > SWALLOWED_ABOVE else 0
        if past.swallowed >= 2:
            text = f"{share * 100:.0f} % of the entries did not move, two readings in a row"
            finer = heard_by(readings)
            advice = f"weights in {finer} would move" if finer else "look at the learning rate"
            yield "swallowed", f"{text}: {advice}"


def _least_row(readings: Readings) -> float:
    """The smallest row norm in parts of the median."""
    norms = dict(readings.get("row_norms", ()))
    middle = norms.get(0.5, 0.0)
    return norms[1.0] / middle if middle > 0 else 1.0


def _is_resolved(readings: Readings) -> bool:
    return bool(readings["condition_number_high"] <= 2 * readings["condition_number_low"])


def _collapse(readings: Readings, past: _Past) -> Iterator[tuple[str, str]]:
    rank, began = readings.get("effective_rank"), past.first.get("effective_rank", 0.0)
    if rank is not None and rank < COLLAPSED_SHARE * began:
        text = f"its effective rank fell from {began:.0f} to {rank:.0f}"
        yield "rank-collapse", f"{text}: {WHY_RANKS_FALL}"
    stable, began = readings.get("stable_rank"), past.first.get("stable_rank", 0.0)
    if stable is None or began < 4 or "row_norms" not in readings:
        return  # the product of a head that specializes has few directions, and is healthy
    text = f"its stable rank fell from {number(began)} to {number(stable)}"
    others = _others(readings)
    if stable < RANK_ONE_BELOW and others < FADED_SHARE * past.most_others:
        yield "rank-collapse", f"{text}, one direction is all that is left: {WHY_RANKS_FALL}"
    elif len(past.ranks) == FALLING_READINGS and past.readings > 2 * FALLING_READINGS:
        falls = stable < FALLING_SHARE * past.ranks[0] and stable < COLLAPSED_SHARE * began
        if falls and others < FADING_SHARE * past.others[0]:
            yield "rank-collapse", f"{text}, and it is still falling: {WHY_RANKS_FALL}"


def _others(readings: Readings) -> float:
    """The norm of a matrix without its first singular value."""
    norm, stable = readings.get("frobenius_norm", 0.0), readings["stable_rank"]
    return float(norm) * math.sqrt(max(0.0, 1 - 1 / stable)) if stable else 0.0


def _runaway(readings: Readings, past: _Past) -> Iterator[tuple[str, str]]:
    now, norms = readings.get("frobenius_norm"), past.norms
    if now is None or len(norms) < 6 or past.first["frobenius_norm"] == 0:
        return
    began = max(norms[:3])
    latest = [*norms[3:], now]
    grows = all(b > RUNAWAY_RATIO * a for a, b in pairwise(latest))
    is_large = now > math.sqrt(readings.get("effective_rank", 0.0))
    if 0 < began * RUNAWAY_FACTOR < now and grows and is_large:
        text = f"its norm is {number(now / began)} times that of its first readings"
        yield "norm-runaway", f"{text} and still growing: look at the learning rate"


def _too_large(readings: Readings, past: _Past) -> Iterator[tuple[str, str]]:
    """A step that changes much of a matrix, and much more than its steps have done."""
    now, usual = readings.get("update_size"), past.updates
    if now is None or len(usual) < 3 or now < LARGE_UPDATE:
        return
    middle = median(usual)
    if now > LARGE_UPDATE_FACTOR * middle:
        text = (
            f"a step changed it by {100 * now:.0f} %, {number(now / middle)} times as much as usual"
        )
        yield "large-update", f"{text}: look at the learning rate and at the last batches"
