"""A diagnosis as one page: the model at a glance, what ails it, and every matrix on demand.

>>> sick = {"name": "w", "shape": [3, 3], "condition_number": 9e5, "resolved": True}
>>> html = page({"schema": "kappascope.diagnosis/1", "source": "toy.pt", "matrices": [sick]})
>>> html.splitlines()[0], "900,000" in html
('<!doctype html>', True)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kappascope import pages
from kappascope.clinic import SEVERITIES, glance
from kappascope.clinic.facts import (
    breakable,
    columns,
    complete,
    facts,
    kappa,
    legible,
    short,
    shown,
    sortable,
)
from kappascope.clinic.glance import RANKS, Row
from kappascope.prose import Record, listed, plural
from kappascope.weights.reasons import TIED

PLOTTED = 1000  # spectra on one page: 2 kB each, and a page beyond 5 MB opens slowly
LISTED = 200  # findings of one rule: nobody reads more, and the table has them all
IN_VIEW = 13  # rows of a list with a scroll bar that are seen at once, by the style's height
ROWS = 100  # of the table that are laid out at once: a thousand take a phone a second
TOLD = ("severity", "rule", "evidence", "advice", "snippet")  # of a finding, beside its matrix
EMPTY: Mapping[str, Any] = {
    "source": "", "matrices": [], "products": [], "chains": [], "skipped": [], "failed": [],
    "findings": [], "summary": {}, "reference": None, "provenance": {},
    "trajectory": [],
}  # fmt: skip


def page(document: Mapping[str, Any]) -> str:
    """The document as HTML that asks the network for nothing; names from files stay text."""
    plots = [one.get("plot") for one in document.get("matrices") or ()]
    known = {**EMPTY, **legible(_bare(document))}
    rows = glance.ranked(known["matrices"])
    told = findings(known)
    return pages.render(
        "diagnosis",
        filters=(kappa, shown, short, sortable, breakable, columns, glance.moved),
        document=known,
        opening=opening(known, rows),
        verdict=str(known["summary"].get("verdict") or "").splitlines(),
        rows=rows,
        factors=glance.FACTORS,
        shifts=glance.MOVES,
        heat=glance.heat(rows),
        change=glance.change(rows),
        trajectory=glance.trajectory(known["trajectory"]),
        steps=glance.steps(known["trajectory"]),
        groups=groups(told),
        severities=SEVERITIES[::-1],
        listed=LISTED,
        in_view=IN_VIEW,
        at_once=ROWS,
        data=_data(rows, plots),
    )


def _bare(document: Mapping[str, Any]) -> dict[str, Any]:
    """Without plots, which are most of the document, and with each matrix's place in it."""
    bare = {name: value for name, value in document.items() if value is not None}
    matrices = [complete(one) | {"plot": None} for one in bare.get("matrices", ())]
    return {
        **bare,
        "matrices": [one | {"place": place} for place, one in enumerate(matrices)],
        "products": [complete(one) for one in bare.get("products", ())],
        "chains": [complete(one) for one in bare.get("chains", ())],
    }


@dataclass(frozen=True)
class Opening:
    """The first line of the page; what is incomplete must not look complete."""

    alarm: bool
    first: str
    rest: str


def opening(document: Record, rows: Sequence[Row]) -> Opening:
    """What was read and what was not.

    >>> bias = {"name": "b", "reason": "one-dimensional"}
    >>> opening({"skipped": [bias], "failed": [], "summary": {}}, []).first
    'Nothing could be analysed.'
    >>> good = Row({"name": "w", "status": "ok: all values"})
    >>> opening({"skipped": [bias], "failed": [], "summary": {}}, [good])
    Opening(alarm=False, first='1 matrix analysed.', rest='Skipped: 1 one-dimensional.')
    """
    failures = {row.name: row.status.reason for row in rows if row.failed}
    failures |= {one["name"]: one["reason"] for one in document["failed"]}
    failed = max(len(failures), int(document["summary"].get("failed") or 0))
    analysed = sum(not row.failed for row in rows)
    causes = [f"{name}: {reason}" for name, reason in failures.items()]
    rest = [_told(f"{failed:,} failed", causes)] if failed else []
    rest += [_told("Skipped", _reasons(document["skipped"]))] if document["skipped"] else []
    first = f"{plural(analysed, 'matrix', 'matrices')} analysed."
    if failed:
        first = f"This diagnosis is incomplete: {first}"
    if not analysed:
        first = "Nothing could be analysed."
    return Opening(bool(failed) or not analysed, first, " ".join(rest))


def _reasons(skipped: Sequence[Record]) -> list[str]:
    """How often each, most frequent first; ties to different names are one reason."""
    reasons = (str(one["reason"]) for one in skipped)
    kinds = (f"{TIED} another" if r.startswith(TIED) else r for r in reasons)
    return [f"{many:,} {reason}" for reason, many in Counter(kinds).most_common()]


def _told(what: str, parts: Sequence[str]) -> str:
    causes = listed([short(part, 160).rstrip(".") for part in parts], mark="; ")
    return f"{what}: {causes}." if parts else f"{what}."


# Findings


def findings(document: Record) -> list[Record]:
    """Those of the model and of its matrices, each once, with the place of its matrix.

    >>> one = {"rule": "dead-rows", "severity": "warning", "subject": "w", "evidence": "3 of 8"}
    >>> matrix = {"name": "w", "findings": [one], "place": 0}
    >>> [told["place"] for told in findings({"matrices": [matrix], "findings": [one]})]
    [0]
    """
    owned = [
        {**f, "place": m["place"]} for m in document["matrices"] for f in m.get("findings") or ()
    ]  # again, unless the document is of an older version
    places = {m.get("name"): m["place"] for m in document["matrices"]}
    model = [{**f, "place": places.get(f.get("subject"))} for f in document["findings"]]
    once = {
        tuple(one.get(k) for k in ("rule", "subject", "evidence")): one for one in model + owned
    }
    return list(once.values())


@dataclass(frozen=True)
class Group:
    """What one rule found, at one severity."""

    severity: str
    rule: str
    findings: Sequence[Record]

    @property
    def by_advice(self) -> dict[str, list[Record]]:
        """What to do, and for which of them.

        >>> told = [{"advice": one} for one in ("prune", "leave", "prune")]
        >>> [(what, len(those)) for what, those in Group("info", "x", told).by_advice.items()]
        [('prune', 2), ('leave', 1)]
        """
        found: dict[str, list[Record]] = {}
        for one in self.findings:
            found.setdefault(str(one.get("advice") or ""), []).append(one)
        return found


def groups(told: Iterable[Record]) -> list[Group]:
    """By severity, gravest first, then by rule.

    >>> dead = {"rule": "dead-rows", "severity": "warning"}
    >>> [(g.severity, len(g.findings)) for g in groups([dead, {**dead, "severity": "info"}, dead])]
    [('warning', 2), ('info', 1)]
    """
    found: dict[tuple[str, str], list[Record]] = {}
    for one in told:
        found.setdefault((str(one.get("severity")), str(one.get("rule"))), []).append(one)
    ordered = sorted(found.items(), key=lambda item: -RANKS.get(item[0][0], 0))
    return [Group(severity, rule, those) for (severity, rule), those in ordered]


# What the script draws from


@dataclass(frozen=True)
class _Shelf:
    """What many matrices share, told once: labels, reasons, places of values, random curves."""

    items: list[Any] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)

    def place(self, item: Any, key: Any = None) -> int:
        key = item if key is None else key
        if key not in self.known:
            self.known[key] = len(self.items)
            self.items.append(item)
        return self.known[key]


def _data(rows: Sequence[Row], plots: Sequence[Any]) -> dict[str, Any]:
    """Every matrix in the order of the document, and plots of the worst."""
    shelf = _Shelf()
    drawn = {row.place: _plot(row, plots[row.place], shelf) for row in rows[:PLOTTED]}
    matrices = [
        {
            "name": row.name,
            "facts": [
                [shelf.place(label), value, *([shelf.place(reason)] if reason else [])]
                for label, value, reason in facts(row)
            ],
            "findings": [
                [shelf.place(one.get(name) or "") for name in TOLD]
                for one in row.matrix["findings"]
            ],
            "plot": drawn.get(row.place),
        }
        for row in sorted(rows, key=lambda row: row.place)
    ]
    return {"shelf": shelf.items, "matrices": matrices, "plotted": PLOTTED, "rows": ROWS}


def _plot(row: Row, plot: Record | None, shelf: _Shelf) -> dict[str, Any] | None:
    """The plot with four digits, its places and its random curve on the shelf."""
    if not plot:
        return None
    histogram = plot.get("rows") or {}
    edges = histogram.get("edges") or [None]
    return {
        "spectrum": _curve(plot.get("spectrum"), shelf),
        "null": _scaled(row, plot.get("null"), shelf),
        "floor": _digits(plot.get("floor")),
        "ends": [_digits(edges[0]), _digits(edges[-1])],  # bars are equally wide
        "counts": list(histogram.get("counts") or ()),
    }


def _curve(points: Any, shelf: _Shelf) -> list[Any] | None:
    if not points:
        return None
    places = tuple(place for place, _ in points)
    return [shelf.place(places), [_digits(value) for _, value in points]]


def _scaled(row: Row, points: Any, shelf: _Shelf) -> list[Any] | None:
    """Places, shape of the curve, and the factor that makes it this matrix's."""
    if not points or not points[0][1]:
        return None
    places, values = zip(*points, strict=True)
    factor = values[0]
    key = (tuple(row.matrix.get("shape") or ()), places)
    curve = [_digits(value / factor) for value in values]
    return [shelf.place(places), shelf.place(curve, key), _digits(factor)]


def _digits(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.4g}")
