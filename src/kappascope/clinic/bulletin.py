"""A diagnosis on the terminal: a table, the worst first, then a line for every kind of finding."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kappascope.clinic import glance
from kappascope.clinic.diagnosis import Diagnosis, before
from kappascope.clinic.facts import kappa
from kappascope.clinic.findings import Finding
from kappascope.clinic.glance import Row
from kappascope.products import HEADLESS
from kappascope.prose import clean, listed, number
from kappascope.weights.reasons import Headless

ROWS = 24  # of the table: what a screen holds
WIDEST = 60  # characters of a name
HEADS = "matrix", "shape", "κ", "× chance", "rank", "stable", "gap", "α", "finding"
OPTIONAL = 7, 6, 5, 1  # columns that make room for names, the first to go first
SPARE = 4, 3  # those that go where a name has not even the room to be told from others
STEPS = "step", "matrices", "median κ", "largest κ", "Δ log κ", "Δ matrix", "findings"
SPARE_STEPS = 3, 1, 4, 2
NARROWEST = 20  # characters that tell it
GAP = 3  # between columns
COLOURS = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def plain(text: str, most: int = 10_000) -> str:
    r"""Text that moves no cursor and hides nothing; the end of it if it is long.

    >>> plain("a\x1b[31mb"), plain("layers.0.self_attn.q_proj.weight", most=16)
    ('a?[31mb', '…n.q_proj.weight')
    """
    whole = clean(text)
    return whole if len(whole) <= most else f"…{whole[-(most - 1) :]}"


def table(diagnosis: Diagnosis, width: int) -> RenderableType:
    """The matrices, worst first, as many as a screen of this width holds.

    Names get the room they need, at the cost of some columns.
    """
    rows = diagnosis.ranked[:ROWS]
    cells = [[*_cells(row), _mark(row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(HEADS, *cells, strict=True)]
    width -= 2  # at its edges
    kept = _kept([min(widths[0], WIDEST), *widths[1:]], width)
    room = max(NARROWEST // 2, width - GAP - sum(widths[i] + GAP for i in kept if i))
    drawn = Table(*(HEADS[i] for i in kept), box=SIMPLE_HEAD, pad_edge=False)
    for column, i in zip(drawn.columns, kept, strict=True):
        column.no_wrap, column.justify = True, "left" if i in (0, len(HEADS) - 1) else "right"
    for name, *rest in cells:
        row = [Text(plain(name.plain.removesuffix(".weight"), room)), *rest]
        drawn.add_row(*(row[i] for i in kept))
    if HEADS.index("× chance") not in kept:
        drawn.caption, drawn.caption_justify = "worst first: by finding, then κ over chance", "left"
    return drawn


def trajectory(found: Sequence[Diagnosis], width: int) -> RenderableType:
    """One row a step: what kappa is and how far log kappa and the matrix have gone since the last.

    Changes are medians over the matrices that both steps have.
    """
    told = [
        {
            "source": one.source,
            "matrices": [vars(row) for row in one.matrices],
            "summary": one.summary,
        }
        for one in found
    ]
    cells = [
        [
            plain(one.name, NARROWEST),
            str(one.matrices),
            *(number(value) for value in (one.median, one.largest, one.log_change, one.change)),
            one.findings,
        ]
        for one in glance.steps(told)
    ]
    widths = [max(map(len, column)) for column in zip(STEPS, *cells, strict=True)]
    kept = _fitting(list(range(len(STEPS))), widths, SPARE_STEPS, width - 2)
    drawn = Table(*(STEPS[i] for i in kept), box=SIMPLE_HEAD, pad_edge=False)
    for column in drawn.columns:
        column.no_wrap, column.justify = True, "right"
    drawn.columns[0].justify = "left"
    for row in cells:
        drawn.add_row(*(Text(row[i]) for i in kept))
    return drawn


def earlier(found: Sequence[Diagnosis]) -> Iterator[Text]:
    """A line for every step before the last with something wrong."""
    for sentence in before(found):
        yield Text(plain(sentence), COLOURS["warning"])


def _kept(widths: Sequence[int], width: int) -> list[int]:
    """The columns that fit, or cannot be done without."""
    kept = _fitting(list(range(len(widths))), widths, OPTIONAL, width)
    return _fitting(kept, [min(widths[0], NARROWEST), *widths[1:]], SPARE, width)


def _fitting(
    kept: Sequence[int], widths: Sequence[int], spare: Sequence[int], width: int
) -> list[int]:
    """Those kept that are left when spare ones have gone until the rest fits."""
    left = list(kept)
    for one in spare:
        if sum(widths[i] + GAP for i in left) > width:
            left.remove(one)
    return left


def _cells(row: Row) -> Iterator[Text]:
    matrix = row.matrix
    yield Text(plain(matrix["name"]))
    yield Text("×".join(map(str, matrix["shape"])))
    if row.failed:
        yield from (Text("–") for _ in range(5))
        yield Text("failed", COLOURS["critical"])
        return
    yield Text(kappa(row))
    yield Text(_times(row.ratio))
    rank = matrix["effective_rank"]
    yield Text("–" if rank is None else f"{rank}/{min(matrix['shape'])}")
    yield Text(number(matrix["stable_rank"]))
    yield Text(number(matrix["spectral_gap"], 2))
    yield Text(number(matrix["alpha"]))


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:,.0f}"


def _mark(row: Row) -> Text:
    worst = next((one for one in row.matrix["findings"] if one["severity"] == row.severity), None)
    return Text(worst["rule"], COLOURS[row.severity]) if worst else Text("")


def lines(diagnosis: Diagnosis) -> Iterator[Text]:
    """What was left out, the verdict, and a paragraph for every rule that found something."""
    hidden = len(diagnosis.matrices) - ROWS
    if hidden > 0:
        yield Text(f"{hidden} more matrices; --html or --table shows all of them.", "dim")
    for sentence in (*diagnosis.notes, *diagnosis.verdict, *_without_products(diagnosis)):
        yield Text(plain(sentence))
    for name, reason in _failed(diagnosis):
        yield Text(f"failed: {plain(name, WIDEST)}: {plain(reason)}", COLOURS["critical"])
    yield from _moves(diagnosis)
    shown: set[str] = set()
    for group in _groups(diagnosis.findings):
        yield _paragraph(group)
        snippet = group[0].snippet
        if snippet and snippet not in shown and group[0].severity != "info":
            shown.add(snippet)  # several rules may find what one correction treats
            code = textwrap.indent(snippet.rstrip(), "    ")
            yield Text(code, "cyan", no_wrap=True, overflow="ignore")


def _without_products(diagnosis: Diagnosis) -> Iterator[str]:
    """Why attention has no products, where a word about its heads would give them."""
    unknown = [one for one in diagnosis.skipped if isinstance(one.reason, Headless)]
    if unknown:
        layers = [plain(one.name.rpartition("[")[0], WIDEST) for one in unknown]
        advice = "a config.json beside the file, or the model in memory, tells them"
        yield f"No QK and OV products: {HEADLESS} ({listed(layers)}); {advice}."


def _failed(diagnosis: Diagnosis, most: int = 8) -> Iterator[tuple[str, str]]:
    """What was to be examined; objects of foreign classes are none of it, and in the notes."""
    lost = [one for one in diagnosis.failed if not one.unbuilt]
    yield from lost[:most]
    if len(lost) > most:
        yield "…", f"{len(lost) - most} more, all in --json"


def _moves(diagnosis: Diagnosis) -> Iterator[Text]:
    """How far each component is from that of the reference: in the middle, and at most."""
    compared = [(row.errors, row.name) for row in diagnosis.matrices if row.errors]
    if not diagnosis.reference:
        return
    if diagnosis.incomparable:
        yield Text(f"Against {plain(diagnosis.reference)}: {diagnosis.incomparable}.")
        yield from _uncompared(diagnosis)
        return
    extent = f"{len(compared)} of {len(diagnosis.matrices)} matrices compared"
    yield Text(f"Against {plain(diagnosis.reference)}, {extent}; relative change, median and most:")
    for component in compared[0][0]:
        known = [
            (error, name) for errors, name in compared if (error := errors[component]) is not None
        ]
        if known:
            middle, (most, name) = median(error for error, _ in known), max(known)
            where = f" ({plain(name, WIDEST)})" if most else ""
            told = f"{component.replace('_', ' ')} {number(middle)}, {number(most)}{where}"
            yield Text(f"    {told}")
    yield from _uncompared(diagnosis)


def _uncompared(diagnosis: Diagnosis) -> Iterator[Text]:
    """Which matrices have no twin in the reference, by the reason."""
    reasons: dict[str, list[str]] = {}
    for name, reason in diagnosis.uncompared:
        reasons.setdefault(reason, []).append(plain(name, WIDEST))
    for reason, names in reasons.items():
        yield Text(f"    not compared: {listed(names)}: {plain(reason)}", COLOURS["warning"])


def _groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    found: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:  # what is advised for one holds for all of its group
        found.setdefault((one.severity, one.rule, one.advice), []).append(one)
    return list(found.values())


def _paragraph(group: Sequence[Finding]) -> Text:
    first = group[0]
    more = f"; likewise in {len(group) - 1} more" if len(group) > 1 else ""
    text = Text(f"{first.severity}: {first.rule}", COLOURS[first.severity])
    text.append(f" in {plain(first.subject, WIDEST)}: {plain(first.evidence)}{more}.", "default")
    if first.advice:
        advice = plain(first.advice)
        text.append(f" {advice[:1].upper()}{advice[1:]}.", "default")
    return text
