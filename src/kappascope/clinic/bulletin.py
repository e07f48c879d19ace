"""A diagnosis on the terminal: a table, the worst first, then a line for every kind of finding."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kappascope.clinic import glance
from kappascope.clinic.diagnosis import Diagnosis
from kappascope.clinic.facts import kappa
from kappascope.clinic.findings import Finding
from kappascope.clinic.glance import Row
from kappascope.prose import Record, clean, number

ROWS = 24  # of the table: what a screen holds
WIDEST = 60  # characters of a name
HEADS = "matrix", "shape", "κ", "× chance", "rank", "stable", "gap", "α", "finding"
OPTIONAL = 7, 6, 5, 1  # columns that make room for names, the first to go first
SPARE = 4, 3  # those that go where a name has not even the room to be told from others
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
    rows = glance.ranked(_told(diagnosis))[:ROWS]
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
    return drawn


def trajectory(found: Sequence[Diagnosis]) -> RenderableType:
    """One row a step: what kappa is and how far log kappa and the matrix have gone since the last.

    Changes are medians over the matrices that both steps have.
    """
    heads = "step", "matrices", "median κ", "largest κ", "Δ log κ", "Δ matrix", "findings"
    drawn = Table(*heads, box=SIMPLE_HEAD, pad_edge=False)
    drawn.columns[0].min_width = NARROWEST // 2
    for column in drawn.columns[1:]:
        column.justify = "right"
    names = [Path(one.source).name for one in found]
    names = names if len(set(names)) == len(names) else [one.source for one in found]
    for name, one in zip(names, found, strict=True):
        kappas = [row.condition_number for row in one.analysed if row.condition_number is not None]
        cells = (
            str(len(one.analysed)),
            number(median(kappas) if kappas else None),
            number(max(kappas, default=None)),
            number(_moved(one, "log_condition_number")),
            number(_moved(one, "overall_matrix")),
            str(len(one.findings)),
        )
        drawn.add_row(Text(plain(name, NARROWEST)), *cells)
    return drawn


def _moved(diagnosis: Diagnosis, component: str) -> float | None:
    """The middle change of a component since the reference."""
    changes = [row.errors[component] for row in diagnosis.analysed if row.errors]
    known = [change for change in changes if change is not None]
    return median(known) if known else None


def _kept(widths: Sequence[int], width: int) -> list[int]:
    """The columns that fit, or cannot be done without."""
    kept = list(range(len(widths)))
    short = [min(widths[0], NARROWEST), *widths[1:]]
    for sizes, columns in ((widths, OPTIONAL), (short, SPARE)):
        for one in columns:
            if sum(sizes[i] + GAP for i in kept) > width:
                kept.remove(one)
    return kept


def _told(diagnosis: Diagnosis) -> Iterator[Record]:
    """The matrices as the page has them, without what is not looked at here."""
    own: dict[str, list[Record]] = {}
    for one in diagnosis.findings:
        own.setdefault(one.subject, []).append(vars(one))
    for row in diagnosis.matrices:
        yield {**vars(row), "findings": own.get(row.name, ())}


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
    for sentence in (*diagnosis.notes, *diagnosis.verdict):
        yield Text(plain(sentence))
    for name, reason in _failed(diagnosis):
        yield Text(f"failed: {plain(name, WIDEST)}: {plain(reason)}", COLOURS["critical"])
    yield from _moves(diagnosis)
    for group in _groups(diagnosis.findings):
        yield _paragraph(group)
        if group[0].snippet and group[0].severity != "info":
            code = textwrap.indent(group[0].snippet.rstrip(), "    ")
            yield Text(code, "cyan", no_wrap=True, overflow="ignore")


def _failed(diagnosis: Diagnosis, most: int = 8) -> Iterator[tuple[str, str]]:
    for one in diagnosis.failed[:most]:
        yield one.name, one.reason.removeprefix("failed: ")
    if len(diagnosis.failed) > most:
        yield "…", f"{len(diagnosis.failed) - most} more, all in --json"


def _moves(diagnosis: Diagnosis) -> Iterator[Text]:
    """How far each component is from that of the reference: in the middle, and at most."""
    compared = [(row.errors, row.name) for row in diagnosis.matrices if row.errors]
    if not diagnosis.reference:
        return
    if not compared:
        told = "nothing there has the name and shape of a matrix here"
        yield Text(f"Against {plain(diagnosis.reference)}: {told}.")
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


def _groups(findings: Sequence[Finding]) -> list[list[Finding]]:
    found: dict[tuple[str, ...], list[Finding]] = {}
    for one in findings:  # what is advised for one holds for all of its group
        found.setdefault((one.severity, one.rule, one.advice), []).append(one)
    return list(found.values())


def _paragraph(group: Sequence[Finding]) -> Text:
    first = group[0]
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    text = Text(f"{first.severity}: {first.rule}", COLOURS[first.severity])
    text.append(f" in {plain(first.subject, WIDEST)}{more}: {plain(first.evidence)}.", "default")
    if first.advice:
        advice = plain(first.advice)
        text.append(f" {advice[:1].upper()}{advice[1:]}.", "default")
    return text
