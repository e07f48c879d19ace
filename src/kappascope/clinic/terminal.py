"""A diagnosis on the terminal: a table, the worst first, then a line for every kind of finding.

Findings stand in the order of what can be done about them; observations fold to one line.
"""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from kappascope.clinic import Order
from kappascope.clinic.diagnosis import Diagnosis, before, trajectory_steps
from kappascope.clinic.examination import Examination, Finding
from kappascope.model.attention import HEADLESS
from kappascope.model.skipped import ReasonKind
from kappascope.text import clean, error_text, first_few, number, plural

TABLE_ROWS = 24  # what a screen holds
LONGEST_NAME = 60  # characters
SHORTEST_NAME = 20  # characters that still tell a name from others
DROPPED_FIRST = (
    "α",
    "gap",
    "stable",
    "shape",
    "p",
)  # columns that make room for long names, in order
DROPPED_LAST = "σ>1%", "× chance"  # columns that go where even a short name has no room
LEAST_TAIL = 1e-9  # a probability below this says no more than that it is small
MOVED_ROWS = 8  # matrices whose change is told
LOST_ROWS = 8  # of what could not be examined; --json has the others
STEP_HEADS = "step", "matrices", "median κ", "largest κ", "Δ log κ", "Δ matrix", "findings"
STEP_COLUMNS_DROPPED = "largest κ", "matrices", "Δ log κ", "median κ"
COLUMN_GAP = 3  # characters between columns
COLOURS = {"critical": "bold red", "warning": "yellow", "info": "dim"}


def plain(text: str, most: int = 10_000) -> str:
    r"""Return text that moves no cursor and hides nothing; the end of it if it is long.

    >>> plain("a\x1b[31mb"), plain("layers.0.self_attn.q_proj.weight", most=16)
    ('a?[31mb', '…n.q_proj.weight')
    """
    cleaned = clean(text)
    return cleaned if len(cleaned) <= most else f"…{cleaned[-(most - 1) :]}"


def matrix_table(
    diagnosis: Diagnosis, width: int, most: int = TABLE_ROWS, order: Order | None = None
) -> RenderableType:
    """Return the matrices in some order, as many as a screen of this width holds.

    Names get the room they need, at the cost of some columns.
    """
    heads = _heads(diagnosis)
    rows = diagnosis.ordered(order)[:most]
    cells = [_guarded_cells(row, heads) for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    width -= 2  # at its edges
    kept = _fitting(heads, [min(widths[0], LONGEST_NAME), *widths[1:]], DROPPED_FIRST, width)
    kept = _fitting(kept, [min(widths[0], SHORTEST_NAME), *widths[1:]], DROPPED_LAST, width, heads)
    places = [heads.index(head) for head in kept]
    others = sum(widths[i] + COLUMN_GAP for i in places if i)
    room = max(SHORTEST_NAME // 2, width - COLUMN_GAP - others)
    drawn = Table(*kept, box=SIMPLE_HEAD, pad_edge=False)
    for column, head in zip(drawn.columns, kept, strict=True):
        column.no_wrap = True
        column.justify = "left" if head in ("matrix", "finding") else "right"
    for name, *rest in cells:
        row = [Text(plain(name.plain.removesuffix(".weight"), room)), *rest]
        drawn.add_row(*(row[i] for i in places))
    if "× chance" not in kept and order is None and not diagnosis.reference:
        drawn.caption, drawn.caption_justify = "worst first: by finding, then κ over chance", "left"
    return drawn


def _heads(diagnosis: Diagnosis) -> list[str]:
    """Return the heads of the columns: what moved, then what the stored digits resolve."""
    kappa, others = ["κ", "× chance", "p"], ["σ>1%", "stable", "gap", "α"]
    unknown = sum(row.is_unresolved for row in diagnosis.analysed)
    numbers = [*kappa, *others] if 2 * unknown <= len(diagnosis.analysed) else [*others, *kappa]
    moved = ["moved"] if diagnosis.reference and not diagnosis.incomparable else []
    return ["matrix", "shape", *moved, *numbers, "finding"]


def _guarded_cells(row: Examination, heads: Sequence[str]) -> list[Text]:
    """Return the cells of one row, or its name and why there are no others."""
    try:
        return [CELLS[head](row) for head in heads]
    except Exception as error:
        empty = [Text("–") for _ in heads[2:]]
        return [Text(plain(row.name)), *empty, Text(error_text(error), COLOURS["critical"])]


def _ratio_cell(row: Examination) -> Text:
    ratio = row.ratio
    return Text("–" if ratio is None else f"{ratio:.2g}" if ratio < 99.5 else f"{ratio:,.0f}")


def _tail_cell(row: Examination) -> Text:
    """How likely a random matrix of this shape has a kappa as large; open where kappa is."""
    tail = None if row.is_bounded else row.null_tail
    return Text(
        "–" if tail is None else f"<{LEAST_TAIL:.0e}" if tail < LEAST_TAIL else f"{tail:.1g}"
    )


def _rank_cell(row: Examination) -> Text:
    rank = row.effective_rank
    return Text("–" if rank is None else f"{rank}/{min(row.shape)}")


def _finding_cell(row: Examination) -> Text:
    worst = next((finding for finding in row.findings if finding.severity == row.severity), None)
    if worst is not None:
        return Text(worst.rule, COLOURS[worst.severity])
    return Text("failed", COLOURS["critical"]) if row.failure is not None else Text("")


CELLS: dict[str, Callable[[Examination], Text]] = {
    "matrix": lambda row: Text(plain(row.name)),
    "shape": lambda row: Text("×".join(map(str, row.shape))),
    "moved": lambda row: Text(number(row.moved, 2)),
    "κ": lambda row: Text("–" if row.failure is not None else row.kappa_text),
    "× chance": _ratio_cell,
    "p": _tail_cell,
    "σ>1%": _rank_cell,
    "stable": lambda row: Text(number(row.stable_rank)),
    "gap": lambda row: Text(number(row.spectral_gap, 2)),
    "α": lambda row: Text(number(row.alpha)),
    "finding": _finding_cell,
}


def _fitting(
    columns: Sequence[str],
    widths: Sequence[int],
    dropped: Sequence[str],
    width: int,
    every: Sequence[str] = (),
) -> list[str]:
    """Drop optional columns until the table fits the terminal; ``widths`` are of ``every`` one."""
    kept, room = list(columns), dict(zip(every or columns, widths, strict=True))
    for column in dropped:
        if column in kept and sum(room[head] + COLUMN_GAP for head in kept) > width:
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
    kept = _fitting(STEP_HEADS, widths, STEP_COLUMNS_DROPPED, width - 2)
    drawn = Table(*kept, box=SIMPLE_HEAD, pad_edge=False)
    for column in drawn.columns:
        column.no_wrap, column.justify = True, "right"
    drawn.columns[0].justify = "left"
    for row in cells:
        drawn.add_row(*(Text(row[STEP_HEADS.index(head)]) for head in kept))
    return drawn


def earlier(diagnoses: Sequence[Diagnosis]) -> Iterator[Text]:
    """Yield a line for every step before the last with something wrong."""
    for sentence in before(diagnoses):
        yield Text(plain(sentence), COLOURS["warning"])


def lines(diagnosis: Diagnosis, verbose: bool = False, most: int = TABLE_ROWS) -> Iterator[Text]:
    """Yield what was left out, the verdict, and a paragraph for every rule that found something.

    Observations are counted in one line, unless ``verbose``.
    """
    hidden = len(diagnosis.matrices) - most
    if hidden > 0:
        more = plural(hidden, "more matrix", "more matrices")
        yield Text(f"{more}; --top, --html or --table shows them.", "dim")
    for part in (_moves, _ranks, _summary, _failures, _paragraphs, _seen if verbose else _folded):
        yield from _guarded(part, diagnosis)


def urgent(diagnosis: Diagnosis) -> Iterator[Text]:
    """Yield what failed and what can be acted on; nothing where all is well."""
    for part in (_failures, _paragraphs):
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
    """Yield a paragraph for every rule that found something to act on, with what to run."""
    yield from _told([f for f in diagnosis.findings if f.concern != "observation"])


def _seen(diagnosis: Diagnosis) -> Iterator[Text]:
    """Yield a paragraph for every kind of observation."""
    yield from _told([f for f in diagnosis.findings if f.concern == "observation"])


def _folded(diagnosis: Diagnosis) -> Iterator[Text]:
    """Yield one line that counts the observations by kind."""
    kinds = Counter(f.rule for f in diagnosis.findings if f.concern == "observation")
    if kinds:
        many = sum(kinds.values())
        needs = "none needs action" if many > 1 else "it needs no action"
        rules = ", ".join(f"{count} {rule}" for rule, count in kinds.most_common())
        text = f"{plural(many, 'observation')}, {needs}: {rules} (-v shows them)."
        yield Text(text, COLOURS["info"])


def _told(findings: Sequence[Finding]) -> Iterator[Text]:
    """Yield a paragraph for every group of findings that are alike, with what to run."""
    shown: set[str] = set()
    groups: dict[tuple[str, ...], list[Finding]] = {}
    for finding in findings:  # what is advised for one is much the same for all of its group
        key = finding.severity, finding.rule, finding.concern, finding.training_advice
        groups.setdefault(key, []).append(finding)
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


def _failed(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    """Yield what was lost; objects of foreign classes are no matrices, and in the notes.

    What is not finite is told by its finding.
    """
    told = {finding.subject for finding in diagnosis.findings if finding.rule == "non-finite"}
    lost = [item for item in diagnosis.failed if not item.unbuilt and item.name not in told]
    yield from ((item.name, str(item.reason)) for item in lost[:LOST_ROWS])
    if len(lost) > LOST_ROWS:
        yield "…", f"{len(lost) - LOST_ROWS} more, all in --json"


def _moves(diagnosis: Diagnosis) -> Iterator[Text]:
    """Tell how far each component is from the reference."""
    compared = [(row.errors, row.name) for row in diagnosis.matrices if row.errors]
    if not diagnosis.reference:
        return
    if diagnosis.incomparable:
        yield Text(f"Against {plain(diagnosis.reference)}: {diagnosis.incomparable}.")
        yield from _uncompared(diagnosis)
        return
    extent = f"{len(compared)} of {len(diagnosis.matrices)} matrices"
    yield Text(f"Compared with {plain(diagnosis.reference)}: {extent}.")
    yield Text("Relative change of each component: in the median, and where it is largest:")
    widest = max(map(len, compared[0][0]), default=0)
    for component in compared[0][0]:
        known = [
            (error, name) for errors, name in compared if (error := errors[component]) is not None
        ]
        if known:
            middle, (most, name) = median(error for error, _ in known), max(known)
            where = f"  {plain(name, LONGEST_NAME)}" if most else ""
            told = (
                f"{component.replace('_', ' '):<{widest}}  {number(middle):>8}  {number(most):>8}"
            )
            yield Text(f"    {told}{where}")
    yield from _uncompared(diagnosis)
    yield from _unlearned(diagnosis)


def _ranks(diagnosis: Diagnosis) -> Iterator[Text]:
    """Tell the ranks of changes, of adapters or since the reference, in words that peft takes."""
    changes = [(row, row.delta) for row in diagnosis.ordered("moved") if row.delta is not None]
    if not changes:
        return
    made_of_factors = [(row, delta) for row, delta in changes if delta.limit is not None]
    if made_of_factors:
        yield Text("Directions that hold 99 % of each change, of those that its factors allow:")
    else:
        yield Text(
            "Directions of each change beyond chance and rounding, and their share of its energy:"
        )
    for row, delta in changes[:MOVED_ROWS]:
        of = f" of {delta.limit}" if delta.limit is not None else ""
        told = f"{delta.spikes} above random factors" if made_of_factors else f"{delta.energy:.0%}"
        yield Text(f"    {f'{delta.rank}{of}':>8}, {told:<4}  {plain(row.name, LONGEST_NAME)}")
    if len(changes) > MOVED_ROWS:
        yield Text(f"    {len(changes) - MOVED_ROWS} more; --csv or --json has all of them.")
    if pattern := diagnosis.rank_pattern:
        yield Text("For peft's LoraConfig:")
        yield Text(
            f"    rank_pattern={plain(repr(pattern))}", "cyan", no_wrap=True, overflow="ignore"
        )


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
    text = Text()  # only the head has the colour: what is found is to be read
    text.append(f"{first.severity}: {first.rule}", COLOURS[first.severity])
    text.append(
        f" in {plain(first.subject, LONGEST_NAME)}: {plain(first.evidence)}{more}.", "default"
    )
    for advice in map(plain, (first.advice, first.training_advice)):
        if advice:
            text.append(f" {advice[:1].upper()}{advice[1:]}.", "default")
    return text
