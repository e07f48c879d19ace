"""A diagnosis on the terminal: a table, the worst first, then a line for every kind of finding."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kappascope.clinic.diagnosis import Diagnosis, before, trajectory_steps
from kappascope.clinic.examination import Examination, Finding
from kappascope.model.attention import HEADLESS
from kappascope.model.skipped import ReasonKind
from kappascope.text import clean, error_text, first_few, number

TABLE_ROWS = 24  # what a screen holds
LONGEST_NAME = 60  # characters
SHORTEST_NAME = 20  # characters that still tell a name from others
HEADS = "matrix", "shape", "κ", "× chance", "rank", "stable", "gap", "α", "finding"
DROPPED_FIRST = 7, 6, 5, 1  # columns that make room for long names, the first to go first
DROPPED_LAST = 4, 3  # columns that go where even a short name has no room
STEP_HEADS = "step", "matrices", "median κ", "largest κ", "Δ log κ", "Δ matrix", "findings"
STEP_COLUMNS_DROPPED = 3, 1, 4, 2
COLUMN_GAP = 3  # characters between columns
COLOURS = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def plain(text: str, most: int = 10_000) -> str:
    r"""Return text that moves no cursor and hides nothing; the end of it if it is long.

    >>> plain("a\x1b[31mb"), plain("layers.0.self_attn.q_proj.weight", most=16)
    ('a?[31mb', '…n.q_proj.weight')
    """
    cleaned = clean(text)
    return cleaned if len(cleaned) <= most else f"…{cleaned[-(most - 1) :]}"


def matrix_table(diagnosis: Diagnosis, width: int) -> RenderableType:
    """Return the matrices, worst first, as many as a screen of this width holds.

    Names get the room they need, at the cost of some columns.
    """
    cells = [_guarded_cells(row) for row in diagnosis.ranked[:TABLE_ROWS]]
    widths = [max(map(len, column)) for column in zip(HEADS, *cells, strict=True)]
    width -= 2  # at its edges
    every = range(len(HEADS))
    kept = _fitting(every, [min(widths[0], LONGEST_NAME), *widths[1:]], DROPPED_FIRST, width)
    kept = _fitting(kept, [min(widths[0], SHORTEST_NAME), *widths[1:]], DROPPED_LAST, width)
    others = sum(widths[i] + COLUMN_GAP for i in kept if i)
    room = max(SHORTEST_NAME // 2, width - COLUMN_GAP - others)
    drawn = Table(*(HEADS[i] for i in kept), box=SIMPLE_HEAD, pad_edge=False)
    for column, i in zip(drawn.columns, kept, strict=True):
        column.no_wrap, column.justify = True, "left" if i in (0, len(HEADS) - 1) else "right"
    for name, *rest in cells:
        row = [Text(plain(name.plain.removesuffix(".weight"), room)), *rest]
        drawn.add_row(*(row[i] for i in kept))
    if HEADS.index("× chance") not in kept:
        drawn.caption, drawn.caption_justify = "worst first: by finding, then κ over chance", "left"
    return drawn


def _guarded_cells(row: Examination) -> list[Text]:
    """Return the cells of one row, or its name and why there are no others."""
    try:
        return list(_cells(row))
    except Exception as error:
        empty = [Text("–") for _ in HEADS[2:]]
        return [Text(plain(row.name)), *empty, Text(error_text(error), COLOURS["critical"])]


def _cells(row: Examination) -> Iterator[Text]:
    """Yield the cells of one row, in the order of HEADS."""
    yield Text(plain(row.name))
    yield Text("×".join(map(str, row.shape)))
    if row.failure is not None:
        yield from (Text("–") for _ in range(5))
        yield Text("failed", COLOURS["critical"])
    else:
        yield Text(row.kappa_text)
        ratio, rank = row.ratio, row.effective_rank
        yield Text("–" if ratio is None else f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:,.0f}")
        yield Text("–" if rank is None else f"{rank}/{min(row.shape)}")
        yield Text(number(row.stable_rank))
        yield Text(number(row.spectral_gap, 2))
        yield Text(number(row.alpha))
    worst = next((finding for finding in row.findings if finding.severity == row.severity), None)
    yield Text(worst.rule, COLOURS[worst.severity]) if worst else Text("")


def _fitting(
    columns: Sequence[int], widths: Sequence[int], dropped: Sequence[int], width: int
) -> list[int]:
    """Drop optional columns until the table fits the terminal."""
    kept = list(columns)
    for column in dropped:
        if sum(widths[i] + COLUMN_GAP for i in kept) > width:
            kept.remove(column)
    return kept


def trajectory_table(diagnoses: Sequence[Diagnosis], width: int) -> RenderableType:
    """Show one row a step: kappa, and how far log kappa and the matrix moved since the last.

    Changes are medians over the matrices that both steps have.
    """
    cells = [
        [
            plain(step.name, SHORTEST_NAME),
            str(step.matrices),
            *(number(value) for value in (step.median, step.largest, step.log_change, step.change)),
            step.findings,
        ]
        for step in trajectory_steps(diagnoses)
    ]
    widths = [max(map(len, column)) for column in zip(STEP_HEADS, *cells, strict=True)]
    kept = _fitting(range(len(STEP_HEADS)), widths, STEP_COLUMNS_DROPPED, width - 2)
    drawn = Table(*(STEP_HEADS[i] for i in kept), box=SIMPLE_HEAD, pad_edge=False)
    for column in drawn.columns:
        column.no_wrap, column.justify = True, "right"
    drawn.columns[0].justify = "left"
    for row in cells:
        drawn.add_row(*(Text(row[i]) for i in kept))
    return drawn


def earlier(diagnoses: Sequence[Diagnosis]) -> Iterator[Text]:
    """Yield a line for every step before the last with something wrong."""
    for sentence in before(diagnoses):
        yield Text(plain(sentence), COLOURS["warning"])


def lines(diagnosis: Diagnosis) -> Iterator[Text]:
    """Yield what was left out, the verdict, and a paragraph for every rule that found something."""
    hidden = len(diagnosis.matrices) - TABLE_ROWS
    if hidden > 0:
        yield Text(f"{hidden} more matrices; --html or --table shows all of them.", "dim")
    for part in (_summary, _failures, _moves, _paragraphs):
        yield from _guarded(part, diagnosis)


def _guarded(part: Callable[[Diagnosis], Iterator[Text]], diagnosis: Diagnosis) -> Iterator[Text]:
    """Yield the lines of one part.

    Where one cannot be made, a line says why and other parts go on.
    """
    try:
        yield from part(diagnosis)
    except Exception as error:
        text = f"failed: {part.__name__.strip('_')} could not be shown: {error_text(error)}"
        yield Text(text, COLOURS["critical"])


def _summary(diagnosis: Diagnosis) -> Iterator[Text]:
    """Notes on reading, and the verdict."""
    for sentence in (*diagnosis.notes, *diagnosis.verdict, *_without_products(diagnosis)):
        yield Text(plain(sentence))


def _failures(diagnosis: Diagnosis) -> Iterator[Text]:
    """Yield a line for what was lost."""
    for name, reason in _failed(diagnosis):
        yield Text(f"failed: {plain(name, LONGEST_NAME)}: {plain(reason)}", COLOURS["critical"])


def _paragraphs(diagnosis: Diagnosis) -> Iterator[Text]:
    """Yield a paragraph for every rule that found something, with what to run."""
    shown: set[str] = set()
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in diagnosis.findings:  # what is advised for one holds for all of its group
        groups.setdefault((finding.severity, finding.rule, finding.advice), []).append(finding)
    for group in groups.values():
        yield _paragraph(group)
        snippet = group[0].snippet
        if snippet and snippet not in shown and group[0].severity != "info":
            shown.add(snippet)  # several rules may find what one correction treats
            code = textwrap.indent(snippet.rstrip(), "    ")
            yield Text(code, "cyan", no_wrap=True, overflow="ignore")


def _without_products(diagnosis: Diagnosis) -> Iterator[str]:
    """Say why attention has no products, where a word about its heads would give them."""
    unknown = [item for item in diagnosis.skipped if item.reason.kind is ReasonKind.HEADS_UNKNOWN]
    if unknown:
        layers = [plain(item.name.rpartition("[")[0], LONGEST_NAME) for item in unknown]
        advice = "a config.json beside the file, or the model in memory, tells them"
        yield f"No QK and OV products: {HEADLESS} ({first_few(layers)}); {advice}."


def _failed(diagnosis: Diagnosis, most: int = 8) -> Iterator[tuple[str, str]]:
    """Yield what was lost; objects of foreign classes are no matrices, and in the notes."""
    lost = [item for item in diagnosis.failed if not item.unbuilt]
    yield from ((item.name, str(item.reason)) for item in lost[:most])
    if len(lost) > most:
        yield "…", f"{len(lost) - most} more, all in --json"


def _moves(diagnosis: Diagnosis) -> Iterator[Text]:
    """Tell how far each component is from that of the reference: in the middle, and at most."""
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
            where = f" ({plain(name, LONGEST_NAME)})" if most else ""
            moved = f"{number(middle)}, {number(most)}{where}"
            yield Text(f"    {component.replace('_', ' ')} {moved}")
    yield from _uncompared(diagnosis)
    yield from _unlearned(diagnosis)


def _unlearned(diagnosis: Diagnosis) -> Iterator[Text]:
    """Tell of every part in how many matrices it is beyond noise, or what noise would have done."""
    compared = [found for row in diagnosis.matrices for found in row.unlearned or ()]
    if compared:
        yield Text(f"Against {compared[0].null} from the reference on:")
    for part in dict.fromkeys(found.part for found in compared):
        answers = Counter(found.answer for found in compared if found.part == part)
        told = ", ".join(f"{count} {answer}" for answer, count in answers.most_common())
        yield Text(f"    {part.replace('_', ' ')}: {told}")


def _uncompared(diagnosis: Diagnosis) -> Iterator[Text]:
    """Which matrices have no twin in the reference, by the reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in diagnosis.uncompared:
        reasons.setdefault(str(why), []).append(plain(name, LONGEST_NAME))
    for reason, names in reasons.items():
        yield Text(f"    not compared: {first_few(names)}: {plain(reason)}", COLOURS["warning"])


def _paragraph(group: Sequence[Finding]) -> Text:
    first = group[0]
    more = f"; likewise in {len(group) - 1} more" if len(group) > 1 else ""
    text = Text(f"{first.severity}: {first.rule}", COLOURS[first.severity])
    text.append(
        f" in {plain(first.subject, LONGEST_NAME)}: {plain(first.evidence)}{more}.", "default"
    )
    if first.advice:
        advice = plain(first.advice)
        text.append(f" {advice[:1].upper()}{advice[1:]}.", "default")
    return text
