"""A run in the terminal: how far it is, the latest alerts, and the matrices that need attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kappascope.monitor.overview import (
    SILENT_SECONDS,
    SWALLOWED_FROM,
    Standing,
    extent,
    gapped,
    loss_name,
    neediest,
    percent,
    standings,
    verdict_of,
)
from kappascope.monitor.record import Run
from kappascope.monitor.report import envelope
from kappascope.text import clean, number

BARS = "▁▂▃▄▅▆▇█"
SPARK_POINTS = 16  # characters of a small curve
WIDE_SPARK = 40  # characters of the curve of the loss
LATEST_ALERTS = 3
LINES = 3  # of a sentence at most, since the advice comes last, ...
ROOMY = 20  # ... on a terminal of so many lines
SHORTEST_NAME = 16  # characters that still tell a name from others
HEADS = ("matrix", "κ", "κ over time", "× first", "update/weight", "swallowed", "alert")
WIDTHS = (0, 9, SPARK_POINTS, 8, 13, 9, 14)  # of the columns after the name
DROPPED_FIRST = (3, 6, 4, 2, 5)  # columns that make room on a narrow terminal
GAP = 3  # characters between columns, of which rich adds one
SPEED_READINGS = 8  # over which the speed is told: the latest


def spark(values: Sequence[float], most: int) -> str:
    """Draw numbers as a line of small bars, on a logarithmic scale where all are positive.

    >>> spark([1.0, 10.0, 100.0, math.nan], 8)
    '▁▄█×'
    """
    kept = [values[k] for k in envelope(values, most)][-most:]
    finite = [value for value in kept if math.isfinite(value)]
    if not finite:
        return "×" * len(kept)
    height = math.log if min(finite) > 0 else float
    low, high = height(min(finite)), height(max(finite))
    step = (high - low) / (len(BARS) - 1) or 1.0
    return "".join(
        BARS[int((height(value) - low) / step + 1e-9)] if math.isfinite(value) else "×"
        for value in kept
    )


def run_screen(run: Run, width: int, height: int, silence: float = 0.0) -> RenderableType:
    """All of a run that fits a terminal; ``silence`` is how many seconds ago it was last written.

    >>> from pathlib import Path
    >>> run_screen(Run(Path("nowhere")), 60, 24).renderables[0].plain
    'a run  Step 0; 0 readings of 0 matrices; running.'
    """
    every = standings(run)
    head = [_heading(run, silence), *_progress(run, silence)]
    head += [Text(clean(sentence)) for sentence in verdict_of(run, every)[1:4]]
    for alert in reversed(run.alerts[-LATEST_ALERTS:]):
        label = Text(f"! step {alert.step:,} {clean(alert.name)}: ", "bold red")
        head.append(label.append(clean(alert.sentence), "default"))
    most = LINES if height >= ROOMY else 1
    lines = [line for text in head for line in _wrapped(text, width, most)]
    room = max(1, height - len(lines) - 4)  # the head of the table, its rule, and a last line
    ranked = neediest(
        [
            standing
            for standing in every
            if standing.kappa is not None or standing.swallowed is not None
        ]
    )
    if not ranked:
        return Group(*lines, Text("No reading yet.", "dim"))
    hidden = len(ranked) - room
    more = [Text(f"{hidden:,} more", "dim")] if hidden > 0 else []
    return Group(*lines, _table(run, ranked[:room], width), *more)


def _wrapped(text: Text, width: int, most: int) -> list[Text]:
    """A text on so many lines of the terminal; a longer one ends with an ellipsis."""
    lines: list[Text] = []
    rest = text
    while rest.cell_len > width and len(lines) < most - 1:
        end = max(rest.plain.rfind(" ", 0, width + 1), 0) or width
        line, rest = rest.divide([end])
        lines.append(line)
        rest = rest[1:] if rest.plain.startswith(" ") else rest
    for line in (*lines, rest):  # a line of wide characters is longer than it has characters
        line.truncate(max(1, width), overflow="ellipsis")
    return [*lines, rest]


def _heading(run: Run, silence: float) -> Text:
    text = Text(clean(run.model or "a run"), "bold")
    return text.append(f"  {extent(run, silence)}", "not bold")


def _progress(run: Run, silence: float) -> list[Text]:
    """The loss and the speed, as far as they are known."""
    parts = []
    name = loss_name(run)
    if pairs := run.logs.get(name):
        values = [value for _, value in pairs]
        parts.append(f"{clean(name)} {number(values[-1])} {spark(values, WIDE_SPARK)}")
    if speed := steps_per_second(run):
        parts.append(f"{number(speed)} steps/s")
    if silence >= SILENT_SECONDS and not run.is_closed:
        parts.append(f"silent for {silence / 60:.0f} min")
    return [Text("  ".join(parts), "cyan")] if parts else []


def steps_per_second(run: Run) -> float | None:
    """The speed between the latest readings of the last session, or None before there are two."""
    since = run.sessions[-1].time if run.sessions else 0.0
    readings = [reading for reading in run.readings if reading.time >= since][-SPEED_READINGS:]
    seconds = [
        (later.step - earlier.step, later.time - earlier.time)
        for earlier, later in pairwise(readings)
    ]
    steps, time = (sum(column) for column in zip(*seconds, strict=True)) if seconds else (0, 0.0)
    return steps / time if steps > 0 and time > 0 else None


def _table(run: Run, ranked: Sequence[Standing], width: int) -> Table:
    kept = list(range(len(HEADS)))
    longest = max(len(_short(standing.name, width)) for standing in ranked)
    for wanted, dropped in ((min(longest, 40), DROPPED_FIRST[:2]), (SHORTEST_NAME, DROPPED_FIRST)):
        for column in dropped:
            if column in kept and wanted + sum(WIDTHS[k] + GAP for k in kept if k) > width:
                kept.remove(column)
    room = max(SHORTEST_NAME // 2, width - sum(WIDTHS[k] + GAP for k in kept if k) - 1)
    drawn = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, GAP - 1, 0, 0), show_edge=False)
    for k in kept:
        justify = "left" if k in (0, 2, 6) else "right"
        drawn.add_column(HEADS[k], justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for standing in ranked:
        cells = _cells(run, standing, room)
        drawn.add_row(*(cells[k] for k in kept))
    return drawn


def _cells(run: Run, standing: Standing, room: int) -> list[Text]:
    lost = standing.swallowed
    grown = "" if standing.growth in (0.0, math.inf) else number(math.exp(standing.growth))
    return [
        Text(_short(standing.name, room), "bold" if standing.alerts else ""),
        Text(number(standing.kappa)),
        Text(spark(gapped(run, standing.name, "condition_number").values, SPARK_POINTS), "cyan"),
        Text(grown),
        Text(number(standing.update_size, 2)),
        Text(
            "–" if lost is None else percent(lost),
            "yellow" if lost is not None and lost >= SWALLOWED_FROM else "",
        ),
        Text(clean(standing.alerts[-1].name)[: WIDTHS[6]] if standing.alerts else "", "red"),
    ]


def _short(name: str, most: int) -> str:
    """A name without what all have, and without its beginning where it is long."""
    whole = clean(name.replace(".weight", ""))
    return whole if len(whole) <= most else f"…{whole[-(most - 1) :]}"
