"""The card at the top of a page: how a model is, and a few facts in plain words."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kappascope.clinic.diagnosis import Diagnosis
from kappascope.clinic.examination import Examination
from kappascope.clinic.judgement import urgency
from kappascope.text import number, plural

FEWEST_FACTS = 3
MOST_FACTS = 5  # a reader takes in at a glance
FINDINGS_FIRST = 3  # facts that findings may take before what is known of the model itself
WIDE, HIGH = 132, 44  # pixels of a small spectrum


@dataclass(frozen=True)
class Fact:
    """One sentence of the card, and the matrix that it is about."""

    text: str
    row: Examination | None = None
    severity: str = ""


@dataclass(frozen=True)
class Card:
    """The state of a model in a word and a sentence, and the facts behind it."""

    status: str
    severity: str
    sentence: str
    facts: tuple[Fact, ...]

    @classmethod
    def of(cls, diagnosis: Diagnosis) -> Card:
        """Return the card of a diagnosis.

        >>> Card.of(Diagnosis("nothing")).status
        'Not examined'
        """
        status, severity, sentence = _state(diagnosis)
        facts: list[Fact] = []
        spare: list[Fact] = []
        for fact in (*list(_from_findings(diagnosis))[:FINDINGS_FIRST], *_known(diagnosis)):
            again = sum(told.row is fact.row is not None for told in facts)
            (facts if again < 2 else spare).append(fact)  # two about one matrix are enough
        facts += spare[: max(0, FEWEST_FACTS - len(facts))]
        facts = facts[:MOST_FACTS]
        return cls(status, severity, sentence, tuple(facts))


def _state(diagnosis: Diagnosis) -> tuple[str, str, str]:
    """Return the state in a word, its severity, and a sentence about it."""
    if not diagnosis.analysed:
        return "Not examined", "critical", "No matrix in it could be read."
    critical, warnings = diagnosis.above("critical"), diagnosis.above("warning")
    acted = [one for one in diagnosis.findings if one.concern != "observation"]
    if critical:
        return "Broken", "critical", f"{plural(len(critical), 'critical finding')}."
    if warnings:
        return "Needs a look", "warning", f"{plural(len(warnings), 'warning')}."
    if acted:
        things = plural(len(acted), "thing")
        return "Sound", "info", f"{things} to know before you quantize, prune, merge or train on."
    return "Sound", "", "No rule found anything to act on."


def _from_findings(diagnosis: Diagnosis) -> Iterator[Fact]:
    """Yield a fact for each rule that found something to act on, the gravest first."""
    rows = {row.name: row for row in diagnosis.matrices}
    groups: dict[str, list[str]] = {}
    for one in sorted(diagnosis.findings, key=urgency):
        if one.concern != "observation" or one.severity != "info":
            groups.setdefault(one.rule, []).append(one.subject)
    for rule, subjects in groups.items():
        first = next(one for one in diagnosis.findings if one.rule == rule)
        more = f" The same in {len(subjects) - 1} more." if len(subjects) > 1 else ""
        evidence = first.evidence[:1].upper() + first.evidence[1:]
        text = f"{rule.replace('-', ' ').capitalize()}: {evidence}.{more}"
        yield Fact(text, rows.get(first.subject), first.severity)


def _known(diagnosis: Diagnosis) -> Iterator[Fact]:
    """Yield what is known of the model itself: what moved, kappa, directions, what is open."""
    moved = [row for row in diagnosis.matrices if row.moved]
    if moved:
        row = max(moved, key=lambda row: row.moved or 0.0)
        yield Fact(
            f"It moved most since the reference: by {number(row.moved, 2)} of its size.", row
        )
    rows = diagnosis.analysed
    resolved = [row for row in rows if row.ratio is not None and not row.is_bounded]
    if resolved:
        row = max(resolved, key=lambda row: row.ratio or 0.0)
        times = f"{number(row.ratio, 2)} times that of a random matrix of its shape"
        place = "farthest above chance" if (row.ratio or 0.0) > 1 else "nearest to chance"
        yield Fact(f"The condition number {place} is {number(row.kappa)}, {times}.", row)
    ranked = [
        row
        for row in rows
        if row.effective_rank is not None and row.effective_rank < min(row.shape)
    ]
    if ranked:
        row = min(ranked, key=lambda row: (row.effective_rank or 0) / min(row.shape))
        used = f"{row.effective_rank} of {min(row.shape)}"
        yield Fact(
            f"The fewest directions used: {used} singular values exceed 1 % of the largest one.",
            row,
        )
    elif rows:
        yield Fact("In every matrix all singular values exceed 1 % of the largest.", rows[0])
    heavy = [row for row in rows if row.outliers]
    if heavy:
        row = max(heavy, key=lambda row: row.outliers or 0)
        count = plural(row.outliers or 0, "singular value")
        yield Fact(f"The most learned directions: {count} larger than any of a random matrix.", row)
    unknown = [row for row in rows if row.is_unresolved]
    if unknown:
        types = sorted({row.storage or row.dtype for row in unknown})
        many = f"{len(unknown)} of {len(rows)}"
        yield Fact(
            f"The stored digits ({', '.join(types)}) do not determine κ of {many}.",
            unknown[0],
        )
    wide = [row for row in rows if row.stable_rank is not None]
    if wide:
        row = min(wide, key=lambda row: row.stable_rank or 0.0)
        yield Fact(f"The lowest stable rank is {number(row.stable_rank)}.", row)


def spark_paths(row: Examination | None) -> tuple[str, str] | None:
    """Return the paths of a small drawing of a spectrum, and of chance beside it.

    >>> spark_paths(None)
    """
    points = _positive(row.plot.get("spectrum")) if row is not None else []
    if row is None or len(points) < 2:
        return None
    chance = _positive(row.plot.get("null"))
    heights = [math.log(value) for _, value in (*points, *chance)]
    low, high, last = min(heights), max(heights), points[-1][0]

    def path(line: list[tuple[int, float]]) -> str:
        places = []
        for index, value in line:
            x = 1 + (WIDE - 2) * (index - 1) / max(1, last - 1)
            y = HIGH - 2 - (HIGH - 4) * (math.log(value) - low) / ((high - low) or 1.0)
            places.append(f"{x:.1f} {y:.1f}")
        return "M" + "L".join(places) if places else ""

    return path(points), path(chance)


def _positive(points: object) -> list[tuple[int, float]]:
    pairs = points if isinstance(points, list | tuple) else ()
    return [(i, v) for i, v in pairs if isinstance(v, float) and 0 < v < math.inf]
