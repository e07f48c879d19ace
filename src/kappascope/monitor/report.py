"""The page of a run: one file with the loss, every matrix over time, signal and what was swallowed.

A page holds at most so many numbers: series are thinned to the least and the greatest value of
every stretch of readings, so that no spike is lost, and details of matrices that need no attention
make room for the others.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from kappascope.monitor.overview import (
    Standing,
    extent,
    gapped,
    loss_name,
    neediest,
    percent,
    seconds_of_silence,
    standings,
    verdict_of,
)
from kappascope.monitor.record import Column, Run
from kappascope.pages.rendering import fill, legible
from kappascope.system.files import write
from kappascope.text import words

POINTS = 300  # of a series: more cannot be told apart on a screen
DETAIL_POINTS = (300, 150, 75)  # of a series of one matrix alone: the most with which all fit
FEWEST_POINTS = 24  # of a series, however many there are: a shape can still be seen
NUMBERS = 200_000  # on a page in the series of all matrices, and as many in details: 3 MB together
LOG_POINTS = 600  # of what was logged, whose chart is as wide as the page
OVERVIEW = (
    "condition_number", "condition_number_low", "condition_number_high", "update_size", "swallowed",
    "frobenius_norm", "sigma_max", "sigma_min", "stable_rank",
)  # fmt: skip
"""What is shown of every matrix, however many there are."""
Columns: TypeAlias = dict[tuple[str, float | None], Column]
"""The series of one matrix by quantity and index."""


@dataclass(frozen=True)
class Chart:
    """Quantities that share a chart, by patterns of their names, and what a reader should know."""

    title: str
    patterns: tuple[str, ...]
    note: str = ""


CHARTS = (
    Chart("Condition number", ("condition_number",),
          "κ = largest σ / smallest σ; the band is what rounding to the stored dtype leaves open."),
    Chart("Ends of the spectrum", ("sigma_*",), "The largest, second and smallest singular value."),
    Chart("Update over weight", ("update_size", "update_step", "update_decay"),
          "Frobenius norm of what one step changed, relative to the weight: all of it, the step"
          " without decay, and decay alone."),
    Chart("Swallowed", ("swallowed*",),
          "Shares that did not move although they should: of entries with a gradient, seen and as"
          " predicted for this dtype and finer ones; of rows, of the intended update, of decay."),
    Chart("Frobenius norm", ("frobenius_norm",)),
    Chart("Gradient norm", ("gradient_norm",), "Of the gradient that the optimizer used."),
    Chart("Ranks", ("effective_rank", "stable_rank", "entropy_rank"),
          "Singular values above 0.01 of the largest; squared Frobenius norm over σ₁ squared."),
    Chart("Where the update lies", ("update_share_*",),
          "Share of the squared update in the weight's leading and trailing singular subspaces."),
    Chart("Alignment of the update", ("update_alignment_*",),
          "Cosines: with minus the gradient, and with the update of the reading before."),
    Chart("Turn of the singular vectors", ("turn_*",),
          "Radians by which the first and the last right singular vector turned since the last"
          " reading."),
    Chart("Growth by the update", ("update_radial",),
          "Change of the weight along itself in one step: negative where it shrinks."),
    Chart("Rank of the update", ("update_stable_rank", "momentum_stable_rank"),
          "Stable rank of what one step changed, and of the momentum; with the whole spectra."),
    Chart("Condition of the update", ("update_condition_number", "momentum_condition_number"),
          "κ of what one step changed, and of the momentum; with the whole spectra."),
    Chart("Where the momentum lies", ("momentum_share_*",)),
    Chart("Alignment of the momentum", ("momentum_alignment_*",), "Cosine with the gradient."),
    Chart("Spectral gap", ("spectral_gap",), "(σ₁ − σ₂) / σ₁"),
    Chart("Entries and rows without use", ("non_finite", "dead_rows"),
          "Entries that are NaN or infinite; rows that no gradient has reached."),
)  # fmt: skip
INTERVAL = ("condition_number_low", "condition_number_high")  # drawn as a band, not as curves
LABELS = {
    "condition_number": "κ", "sigma_max": "largest σ", "sigma_2": "second σ",
    "sigma_min": "smallest σ", "update_size": "update / weight", "update_step": "step / weight",
    "update_decay": "decay / weight", "swallowed": "entries swallowed",
    "swallowed_rows": "rows", "swallowed_predicted": "entries, predicted",
    "swallowed_in_float16": "entries, if float16", "swallowed_in_float32": "entries, if float32",
    "update_stable_rank": "update", "momentum_stable_rank": "momentum",
    "update_condition_number": "update", "momentum_condition_number": "momentum",
    "momentum_alignment_gradient": "gradient", "swallowed_update": "update",
    "swallowed_decay": "decay", "update_share_top": "leading", "update_share_bottom": "trailing",
    "momentum_share_top": "leading", "momentum_share_bottom": "trailing",
    "update_alignment_gradient": "minus gradient", "update_alignment_last": "last update",
    "turn_top": "of the largest σ", "turn_bottom": "of the smallest σ",
    "sigma_change": "change of σ", "sigma_change_predicted": "change of σ, first order",
    "signal": "signal u′Gv",
    "signal_relative": "signal over σ", "signal_to_noise": "signal over its noise",
}  # fmt: skip


def write_run_page(folder: str | Path, path: str | Path) -> Path:
    """Write the page of the run that a folder records, whole or not at all.

    >>> from tempfile import TemporaryDirectory
    >>> from kappascope.monitor.record import Recorder
    >>> with TemporaryDirectory() as folder:
    ...     Recorder(Path(folder) / "run").write({"kind": "start", "step": 0, "model": "<GPT>"})
    ...     page = write_run_page(Path(folder) / "run", Path(folder) / "run.html")
    ...     "&lt;GPT&gt;" in page.read_text(), "<GPT>" in page.read_text()
    (True, False)
    """
    write(Path(path), run_page(Run.read(folder)).encode())
    return Path(path)


def run_page(run: Run, connects: str = "'none'", seconds: float = 0.0) -> str:
    """The page of a run; one that follows it asks for the document again every so many seconds."""
    document = run_document(run, seconds_of_silence(run) if seconds else math.inf)
    return fill(
        "run",
        connects=connects,
        poll=round(1000 * seconds),
        data=document,
        provenance=_provenance(run),
        skipped={name: why for name, why in run.skipped.items() if name not in run.matrices},
    )


def run_document(run: Run, silence: float = math.inf) -> dict[str, Any]:
    """All that the page of a run shows, as values of strict JSON.

    ``silence`` is in seconds, where a page follows the run.
    """
    every = standings(run)
    shared = _Steps()
    by_matrix: dict[str, Columns] = defaultdict(dict)
    for matrix, quantity, index in run.columns:
        by_matrix[matrix][quantity, index] = gapped(run, matrix, quantity, index)
    ranked = neediest(every)
    shown, detailed, most = _fitting_page([standing.name for standing in ranked], by_matrix)
    place = {standing.name: k for k, standing in enumerate(ranked)}
    quantities = dict.fromkeys(q for those in shown.values() for q, index in those if index is None)
    return {
        "title": legible(run.model or "a run"),
        "folder": legible(str(run.folder)),
        "extent": extent(run, silence),
        "verdict": [legible(sentence) for sentence in verdict_of(run, every)],
        "step": run.step,
        "closed": run.is_closed,
        "alerts": [
            [
                alert.step,
                legible(alert.name),
                [place[name] for name in (alert.matrix, *alert.others) if name in place],
                legible(alert.sentence),
            ]
            for alert in run.alerts
        ],
        "cuts": [[s.step, legible(s.cut or "resumed")] for s in run.sessions[1:]],
        "loss": legible(loss_name(run)),
        "logs": {
            legible(name): shared.series(_column(pairs), LOG_POINTS)
            for name, pairs in run.logs.items()
            if pairs
        },
        "charts": list(_charts(quantities)),
        "overview": [name for name in OVERVIEW if name in quantities and name not in INTERVAL],
        "labels": {name: label(name) for name in (*quantities, *_vectors(shown))},
        "vectors": list(_vectors(shown)),
        "matrices": [_matrix(s, shown[s.name], detailed, shared, most) for s in ranked],
        "order": [place[s.name] for s in every],  # of the model; matrices come by attention
        "steps": shared.lists,
    }


def label(quantity: str) -> str:
    """The name of a quantity in a sentence.

    >>> label("sigma_min"), label("stable_rank")
    ('smallest σ', 'stable rank')
    """
    return LABELS.get(quantity) or legible(words(quantity))


def _fitting_page(
    ranked: Sequence[str], by_matrix: Mapping[str, Columns]
) -> tuple[dict[str, Columns], set[str], Callable[[str], int]]:
    """Choose what fits on the page: series by matrix, matrices with all of theirs, and points."""

    def size(name: str, points: int) -> int:
        return sum(min(len(column), points) for column in by_matrix[name].values())

    points = next(
        (p for p in DETAIL_POINTS if sum(size(name, p) for name in ranked) <= NUMBERS),
        DETAIL_POINTS[-1],
    )
    room, detailed = NUMBERS, set(ranked[:1])
    for name in ranked:
        room -= size(name, points)
        if room < 0:
            break
        detailed.add(name)
    shown = {
        name: {
            (quantity, index): column
            for (quantity, index), column in by_matrix[name].items()
            if name in detailed or quantity in OVERVIEW
        }
        for name in ranked
    }
    curves = sum(quantity in OVERVIEW for those in shown.values() for quantity, _ in those)
    common = max(FEWEST_POINTS, min(POINTS, NUMBERS // max(1, curves)))
    return shown, detailed, lambda quantity: common if quantity in OVERVIEW else points


def _vectors(shown: Mapping[str, Columns]) -> dict[str, None]:
    """Quantities with an index, signals first, in the order in which they were recorded."""
    quantities = (q for those in shown.values() for q, index in those if index is not None)
    return dict.fromkeys(
        sorted(dict.fromkeys(quantities), key=lambda q: not q.startswith("signal"))
    )


def _charts(quantities: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The charts of one matrix: those that are known, then one for each quantity that is not."""
    left = [name for name in quantities if name not in INTERVAL]
    for chart in CHARTS:
        own = [q for q in left if any(fnmatchcase(q, pattern) for pattern in chart.patterns)]
        left = [name for name in left if name not in own]
        if own:
            yield {"title": chart.title, "note": chart.note, "quantities": own}
    for name in left:
        yield {"title": capital(label(name)), "note": "", "quantities": [name]}


def capital(text: str) -> str:
    """The same with a capital letter at its beginning, the others as they are.

    >>> capital("kappa of W")
    'Kappa of W'
    """
    return text[:1].upper() + text[1:]


def _matrix(
    standing: Standing,
    columns: Columns,
    detailed: set[str],
    shared: _Steps,
    most: Callable[[str], int],
) -> dict[str, Any]:
    """One matrix with its series; those of a vector go by the index of the entry."""
    series: dict[str, Any] = {}
    vectors: dict[str, list[Any]] = defaultdict(list)
    middle = columns.get(("condition_number", None))
    for (quantity, index), column in columns.items():
        points = most(quantity)
        if index is not None:
            vectors[quantity].append([_digits(index), *shared.series(column, points)])
        elif quantity in INTERVAL and middle is not None and len(middle) == len(column):
            series[quantity] = shared.series(column, points, like=middle)
        else:
            series[quantity] = shared.series(column, points)
    return {
        "name": legible(standing.name).replace("\n", "\\n") or "(no name)",
        "kind": legible(standing.kind),
        "depth": standing.depth if isinstance(standing.depth, int) else None,
        "shape": " × ".join(f"{size:,}" for size in standing.shape),
        "dtype": legible(standing.dtype),
        "kappa": standing.kappa_text,
        "swallowed": "–" if standing.swallowed is None else percent(standing.swallowed),
        "detailed": standing.name in detailed,
        "series": series,
        "vectors": {name: sorted(those) for name, those in vectors.items()},
    }


# --- series that fit a page -----------------------------------------------------------------------


def envelope(values: Sequence[float], most: int) -> list[int]:
    """The indices of at most ``most`` values that look like all of them when they are drawn.

    The first and the last are kept, and of every stretch between them the least and the greatest;
    one that is not finite takes the place of the least, so that no gap is lost either.

    >>> envelope([0.0, 0.0, 9.0, 0.0, 0.0, 0.0, 0.0, -5.0, 0.0, 1.0], 6)
    [0, 1, 2, 5, 7, 9]
    """
    count = len(values)
    if count <= most:
        return list(range(count))
    stretches = max(1, (most - 2) // 2)
    ends = [1 + (count - 2) * k // stretches for k in range(stretches + 1)]
    kept = {0, count - 1}
    for start, end in pairwise(ends):
        own = values[start:end]
        if math.isfinite(sum(own)):
            kept |= {start + own.index(min(own)), start + own.index(max(own))}
            continue
        finite = [value for value in own if math.isfinite(value)]
        kept |= {start + own.index(max(finite))} if finite else set()
        kept |= {start + next((k for k, v in enumerate(own) if not math.isfinite(v)), 0)}
    return sorted(kept)


@dataclass(frozen=True)
class _Steps:
    """Lists of steps, each stored once: most series have the same."""

    lists: list[list[int]] = field(default_factory=list)
    known: dict[tuple[int, ...], int] = field(default_factory=dict)

    def series(self, column: Column, most: int, like: Column | None = None) -> list[Any]:
        """The place of its steps, and values; thinned at the steps at which another one is."""
        kept = envelope((like or column).values, most)
        steps = tuple(column.steps[k] for k in kept)
        if steps not in self.known:
            self.known[steps] = len(self.lists)
            self.lists.append(list(steps))
        return [self.known[steps], [_digits(column.values[k]) for k in kept]]


def _column(pairs: Iterable[tuple[int, float]]) -> Column:
    column = Column()
    for step, value in pairs:
        column.add(step, value)
    return column


def _digits(value: float) -> float | str:
    """A number with the four digits that can be seen, or the word for what is not finite."""
    rounded = float(f"{value:.4g}")
    if not math.isfinite(rounded):
        return str(rounded)
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e6 else rounded


# --- what the record itself tells -----------------------------------------------------------------


def _provenance(run: Run) -> dict[str, Any]:
    began = [
        datetime.fromtimestamp(session.time, UTC) for session in run.sessions if session.time > 0
    ]
    options = run.sessions[-1].options if run.sessions else {}
    groups = run.settings[-1].get("groups", []) if run.settings else []
    return {
        "record": str(run.folder),
        "model": run.model,
        "sessions": [f"{when:%Y-%m-%d %H:%M:%S} UTC" for when in began],
        "options": {
            name: ", ".join(map(str, value)) if isinstance(value, list) else value
            for name, value in options.items()
            if value is not None
        },
        "optimizer": [", ".join(f"{k} {v}" for k, v in group.items()) for group in groups],
        "seconds of reading": f"{sum(reading.seconds for reading in run.readings):.3g}",
        "lines left out": run.damaged,
        "kappascope": version("kappascope"),
    }
