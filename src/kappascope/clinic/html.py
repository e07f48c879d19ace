"""The page of a diagnosis: the matrices by depth and kind, the findings, every matrix on demand.

>>> from kappascope.clinic.examination import Examination
>>> sick = Examination("w", (3, 3), "float32", "ok", condition_number=9e5, resolved=True)
>>> html = diagnosis_page([Diagnosis("toy.pt", (sick,))])
>>> html.splitlines()[0], "900,000" in html
('<!doctype html>', True)
"""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from markupsafe import Markup

from kappascope.clinic import SEVERITIES
from kappascope.clinic.card import Card, spark_paths
from kappascope.clinic.diagnosis import (
    Diagnosis,
    before,
    chain_document,
    known_median,
    product_document,
    short_sources,
    trajectory_steps,
)
from kappascope.clinic.examination import Examination, Finding, Spread
from kappascope.clinic.judgement import urgency
from kappascope.clinic.maps import HeatMap, flow_order, heat_map, matrix_label, one_line
from kappascope.clinic.metrics import ERROR_LEVELS, METRICS
from kappascope.clinic.trajectories import matrix_trajectories
from kappascope.matrix.components import Components
from kappascope.model.attention import Product
from kappascope.model.skipped import ReasonKind
from kappascope.pages.rendering import fill, legible
from kappascope.text import Record, bracketed, error_text, first_few, number, plural, words

PLOT_LIMIT = 1000  # spectra on one page: 2 kB each, and a page beyond 5 MB opens slowly
FINDING_LIMIT = 200  # of one rule: nobody reads more, and the table has them all
ROWS_IN_VIEW = 13  # rows of a list with a scroll bar that are seen at once, by the style's height
ROWS_AT_ONCE = 100  # of the table that are laid out at once: a thousand take a phone a second
KAPPA_LEVELS = (10, 100, 1000, 1e4)  # of a head's product
LABELS = {
    "status": "Status", "method": "Method", "shape": "Shape", "dtype": "Stored as",
    "storage": "Values lie on the grid of", "kind": "Kind", "depth": "Layer",
    "part_of": "Part of", "condition_number": "κ", "bound": "Product of their κ",
    "interval": "κ lies in",
    "resolved": "κ resolved by the dtype", "null_z": "z of log κ against chance",
    "null_tail": "Chance of a larger κ", "sigma_max": "σ₁, the largest", "sigma_2": "σ₂",
    "sigma_min": "σ, the smallest", "spectral_gap": "Spectral gap",
    "effective_rank": "Effective rank at 0.01", "effective_ranks": "Effective ranks at",
    "entropy_rank": "Entropy rank", "stable_rank": "Stable rank",
    "frobenius_norm": "Frobenius norm", "alpha": "Tail exponent α",
    "alpha_distance": "Distance of α’s fit", "alpha_count": "Eigenvalues in α’s fit",
    "alpha_xmin": "α’s tail begins at", "edge": "Marchenko–Pastur edge",
    "outliers": "σ above the edge", "null_distance": "Distance from Marchenko–Pastur",
    "entry_mean": "Mean entry", "entry_std": "Deviation of entries",
    "entry_kurtosis": "Kurtosis of entries", "row_norms": "Row norms",
    "column_norms": "Column norms", "dead_rows": "Dead rows", "dead_columns": "Dead columns",
    "outlier_rows": "Outlier rows", "outlier_columns": "Outlier columns",
    "errors": "Errors against the reference", "null_condition_number": "null κ",
}  # fmt: skip
"""The numbers of a matrix in the order of its own view, and those of products and chains."""


COLUMNS = {
    "name": ("Name", "The name that the file gives a matrix. Press it to see its spectrum."),
    "shape": ("Shape", "Outputs × inputs. A convolution has as many columns as inputs times taps."),
    "dtype": ("Dtype", "How the entries are stored."),
    "kappa": ("κ", "The condition number: the largest singular value divided by the smallest. ≥ "
              "means that rounding in the file hides how small the smallest one is."),
    "chance": ("× chance", "κ divided by the usual κ of a random matrix of this shape. The table "
               "is sorted by the worst finding, then by this number."),
    "rank": ("σ > 1 %", "How many singular values exceed 1 % of the largest."),
    "stable": ("Stable rank", "The sum of all squared singular values divided by the largest of "
               "them: roughly how many directions carry the matrix."),
    "alpha": ("α", "The exponent of the spectrum's tail (Martin and Mahoney). 2 to 6 is usual."),
    "gap": ("Gap", "The largest singular value minus the second, divided by the largest."),
    "rows": ("Row cv", "How much row norms vary: their standard deviation divided by their mean."),
    "columns": ("Col. cv", "How much column norms vary: their standard deviation divided by their "
                "mean."),
    "findings": ("Findings", "What the rules found. `kappascope explain RULE` explains a rule."),
}  # fmt: skip
"""The columns of the table of matrices, and what each says."""


def diagnosis_page(steps: Sequence[Diagnosis]) -> str:
    """Write the last diagnosis, with the steps before it, as HTML that needs no network."""
    last = steps[-1]
    rows, trajectory = last.ranked, steps if len(steps) > 1 else ()
    place = {row.name: k for k, row in enumerate(last.matrices)}
    filters: tuple[Callable[..., Any], ...] = (
        shown, short, sortable, breakable, one_line, quantity_columns, error_level, matrix_label,
        map_level, map_text, spark_paths, interval, last_name, kappa_level,
    )  # fmt: skip
    panels: dict[str, Callable[[], Any]] = {  # where it is shown: what fails costs one panel
        "card": lambda: Card.of(last),
        "heat": lambda: heat_map(last.matrices),
        "heads": lambda: head_maps(last.products),
        "path": lambda: path_map(trajectory),
        "change": lambda: change(rows),
        "products": lambda: [product_document(product) for product in last.products],
        "chains": lambda: [chain_document(chain) for chain in last.chains],
        "curves": lambda: curves(trajectory),
        "steps": lambda: trajectory_steps(trajectory),
        "groups": lambda: by_rule(last.findings),
    }
    return fill(
        "diagnosis",
        filters=filters,
        diagnosis=last,
        opening=opening(last),
        verdict=(*last.verdict, *before(steps)),
        rows=rows,
        place=place,
        metrics=[one for one in METRICS if any(one.of(row) is not None for row in rows)],
        columns=COLUMNS,
        deltas=any(row.delta for row in rows),
        error_levels=ERROR_LEVELS,
        made=panels,
        compared=any(row.errors for row in rows),
        trajectory=bool(trajectory),
        severities=SEVERITIES[::-1],
        finding_limit=FINDING_LIMIT,
        rows_in_view=ROWS_IN_VIEW,
        rows_at_once=ROWS_AT_ONCE,
        data=_data(last.matrices, rows),
    )


# --- numbers and names as the page writes them ----------------------------------------------------


def short(text: str, most: int = 100) -> str:
    """Return a long name without its middle, for its ends tell names apart.

    >>> short("abcdefghij", 5)
    'ab…ij'
    """
    text, half = text if text.isprintable() else legible(text), most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def last_name(source: str) -> str:
    """Return the name of what was examined, without the folders before it.

    >>> last_name("/models/tiny/model.pt"), last_name("hf://org/name/")
    ('model.pt', 'name')
    """
    return short(source.rstrip("/").rpartition("/")[2] or source, 60)


def kappa_level(kappa: float) -> int:
    """Tell how many of KAPPA_LEVELS a condition number exceeds.

    >>> kappa_level(3.0), kappa_level(math.inf)
    (0, 4)
    """
    return bisect_right(KAPPA_LEVELS, kappa)


def breakable(name: str) -> Markup:
    """Return a name that may go on in the next line after a dot or a slash.

    >>> breakable("a.<b>")
    Markup('a.<wbr>&lt;b&gt;')
    """
    return Markup("<wbr>").join(re.split(r"(?<=[./])(?=.)", name))


def shown(value: Any) -> str:
    """Return a number, a text or several of them as a reader wants them.

    >>> shown([3, 4]), shown(True), shown({"min": 0.5, "max": 2.0}), shown(None)
    ('3 × 4', 'yes', 'min: 0.500, max: 2.00', '–')
    """
    if value is None or isinstance(value, float):
        return number(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Spread):
        value = asdict(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{words(name)}: {shown(item)}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " × ".join(shown(item) for item in value)
    return str(value)


def sortable(value: float | None) -> str:
    """Return a number to sort by: six digits tell as much as can be seen.

    >>> sortable(1 / 3), sortable(None), sortable(math.inf)
    ('0.333333', '', 'Infinity')
    """
    if value is None or not math.isinf(value):
        return "" if value is None else f"{value:.6g}"
    return "Infinity"  # as scripts read it


def quantity_columns(products: Sequence[Record]) -> dict[str, str]:
    """Return the numbers that products or chains have, and their labels.

    >>> quantity_columns([{"name": "w[qk.0]", "head": 0, "condition_number": 7.0, "alpha": None}])
    {'head': 'Head', 'condition_number': 'κ'}
    """

    def is_number(value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool)

    known = {name for product in products for name, value in product.items() if is_number(value)}
    labels = {"depth": "Layer", "head": "Head"} | LABELS
    labels |= {name: words(name) for name in sorted(known - labels.keys())}
    return {name: label for name, label in labels.items() if name in known}


def facts(row: Examination) -> Iterator[tuple[str, str, str]]:
    """Label, value, and why there is none, for all that is known or known to be unknown.

    >>> row = Examination("w", (2, 2), "", "", depth=3, reasons={"alpha": "too few values"})
    >>> [fact for fact in facts(row) if fact[0] in ("Layer", "Tail exponent α")]
    [('Layer', '3', ''), ('Tail exponent α', '–', 'too few values')]
    """
    ends = (row.condition_number_low, row.condition_number_high)
    written = {
        "condition_number": row.kappa_text,
        "interval": bracketed(ends if any(ends) else None),
    }
    for name, label in LABELS.items():
        value = written[name] if name in written else getattr(row, name, None)
        reason = row.reasons.get(name, "")
        if value not in (None, "", {}) or reason:
            text = shown(value)
            yield label, text if text.isprintable() else legible(text), reason


# --- the first line -------------------------------------------------------------------------------


SKIPPED = {  # what reads well behind a number; ties to different names are one kind
    ReasonKind.TIED: "tied to another",
    ReasonKind.HEADS_UNKNOWN: "products of heads, whose number is unknown",
}


@dataclass(frozen=True)
class Opening:
    """The first line of the page; what is incomplete must not look complete."""

    alarm: bool
    first: str
    rest: str


def opening(diagnosis: Diagnosis) -> Opening:
    """Return what was read and what was not.

    >>> from kappascope.model.skipped import Skipped, acts_beside
    >>> bias = Skipped("b", acts_beside("one-dimensional"))
    >>> opening(Diagnosis("toy.pt", skipped=(bias,))).first
    'Nothing could be analysed.'
    >>> row = Examination("w", (2, 2), "float32", "ok")
    >>> opening(Diagnosis("toy.pt", (row,), skipped=(bias,)))
    Opening(alarm=False, first='1 matrix analysed.', rest='Skipped: 1 one-dimensional.')
    """
    failures = {one_line(row.name): row.failure for row in diagnosis.ranked if row.failure}
    failures |= {one_line(item.name): item.reason for item in diagnosis.failed}
    failed, analysed = len(diagnosis.failed), len(diagnosis.analysed)
    rest = []
    if failed:
        causes = [f"{name}: {reason}" for name, reason in failures.items()]
        rest.append(f"{failed:,} failed: {_listed(causes)}.")
    if diagnosis.skipped:
        kinds = Counter(
            SKIPPED.get(item.reason.kind, str(item.reason)) for item in diagnosis.skipped
        )
        causes = [f"{many:,} {reason}" for reason, many in kinds.most_common()]
        rest.append(f"Skipped: {_listed(causes)}.")
    first = f"{plural(analysed, 'matrix', 'matrices')} analysed."
    if failed:
        first = f"This diagnosis is incomplete: {first}"
    if not analysed:
        first = "Nothing could be analysed."
    return Opening(bool(failed) or not analysed, first, " ".join(rest))


def _listed(causes: Sequence[str]) -> str:
    return first_few([short(cause, 160).rstrip(".") for cause in causes], mark="; ")


# --- the map --------------------------------------------------------------------------------------


def map_level(row: Examination) -> str:
    """Return the level of a matrix on the map as it is first shown; nothing without a number.

    >>> map_level(Examination("w", (1, 9), "", "ok", condition_number=1.0, resolved=True))
    '0'
    """
    level = METRICS[0].level_of(row)
    return "" if level is None else str(level)


def map_text(row: Examination) -> str:
    """Return what the map writes of a matrix as it is first shown.

    >>> from kappascope.model.skipped import unreadable
    >>> map_text(Examination.failed("w", (1, 2), "float32", unreadable("NaN")))
    '✗'
    """
    return "✗" if row.failure is not None else METRICS[0].text(row)


def head_maps(products: Sequence[Product]) -> dict[str, HeatMap]:
    """Return layers by heads, a map for QK and one for OV, each cell a product.

    >>> head_maps([])
    {}
    """
    maps = {}
    for kind in dict.fromkeys(product.kind for product in products):
        own = [product for product in products if product.kind == kind]
        heads = sorted({product.head for product in own if product.head is not None})
        layers: dict[str, dict[int, Product]] = {}
        for product in own:
            if product.head is not None:
                layers.setdefault(product.layer, {})[product.head] = product
        if not heads:
            continue
        lines = [
            (
                str(next(iter(row.values())).depth) if _has_depth(row) else layer,
                tuple(row.get(head) for head in heads),
            )
            for layer, row in layers.items()
        ]
        maps[kind] = HeatMap(tuple(str(head) for head in heads), tuple(lines))
    return maps


def _has_depth(row: Mapping[int, Product]) -> bool:
    return next(iter(row.values())).depth is not None


def path_map(steps: Sequence[Diagnosis]) -> HeatMap:
    """Return layers by steps: how far the matrix of a layer that moved most went in each.

    >>> path_map([Diagnosis("1.pt"), Diagnosis("2.pt")]).columns
    ('2.pt',)
    """
    layers: dict[str, list[tuple[float | None, ...]]] = {}
    rows = matrix_trajectories(steps)
    depths = sorted({row.depth for row in rows if row.depth is not None})
    for depth in depths:
        layers[f"layer {depth}"] = [row.moves for row in rows if row.depth == depth]
    layers |= {
        one_line(row.name.removesuffix(".weight")): [row.moves] for row in rows if row.depth is None
    }
    lines = []
    for head, moves in layers.items():
        cells = [
            max((m for m in step if m is not None), default=None)
            for step in zip(*moves, strict=True)
        ]
        lines.append((head, tuple(cells[1:])))
    return HeatMap(short_sources(steps)[1:], tuple(lines))


def interval(row: Examination) -> str:
    """Return the interval of kappa where it says more than the number itself.

    >>> ends = {"condition_number_low": 8.0, "condition_number_high": 12.0, "resolved": True}
    >>> interval(Examination("w", (3, 3), "", "ok", condition_number=9.0, **ends))
    '[8.00, 12.0]'
    """
    low, high = row.condition_number_low, row.condition_number_high
    if row.is_bounded or low is None or high is None or high < 1.02 * low:
        return ""
    return bracketed((low, high))


# --- what moved since the reference ---------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """What moved since the reference: median errors of each component, by kind and by layer."""

    total: Mapping[str, float | None]
    by_kind: HeatMap
    by_depth: HeatMap

    @property
    def most_and_least(self) -> list[tuple[str, float]]:
        """The components that moved most and least, relative to their size; none if nothing did."""
        known = [(n, e) for n, e in self.total.items() if e is not None and n in Components.names]
        known.sort(key=lambda pair: pair[1], reverse=True)
        if not known or not known[0][1]:
            return []
        return [known[0], known[-1]] if len(known) > 1 else known


def change(rows: Sequence[Examination]) -> Change | None:
    """Return the errors against a reference, or None if there was none.

    >>> errors = {"row_norms": 0.5, "effective_rank": 0.0, "condition_number": None}
    >>> found = change([Examination("w", (2, 2), "", "ok", kind="up", depth=3, errors=errors)])
    >>> found.by_kind.lines
    (('up', (0.5, 0.0, None)),)
    >>> found.most_and_least
    [('row_norms', 0.5), ('effective_rank', 0.0)]
    """
    compared = [row for row in rows if row.errors]
    if not compared:
        return None
    columns = tuple(dict.fromkeys(name for row in compared for name in row.errors or ()))

    def medians(groups: Mapping[Any, Sequence[Examination]]) -> HeatMap:
        lines = (
            (head, tuple(known_median((row.errors or {}).get(c) for row in those) for c in columns))
            for head, those in groups.items()
        )
        return HeatMap(columns, tuple(lines))

    kinds = sorted({row.kind for row in compared}, key=flow_order)
    depths = sorted({row.depth for row in compared if row.depth is not None})
    [(_, total)] = medians({"all": compared}).lines
    return Change(
        dict(zip(columns, total, strict=True)),
        medians({kind: [row for row in compared if row.kind == kind] for kind in kinds}),
        medians({depth: [row for row in compared if row.depth == depth] for depth in depths}),
    )


def error_level(error: float) -> int:
    """Tell how many of ERROR_LEVELS an error exceeds.

    >>> [error_level(error) for error in (0.0, 0.02, 5.0)]
    [0, 2, 4]
    """
    return bisect_right(ERROR_LEVELS, error)


def curves(steps: Sequence[Diagnosis]) -> dict[str, HeatMap]:
    """Return the median kappa and norm of each kind, one column a checkpoint.

    >>> row = Examination("w", (2, 2), "", "ok", kind="up", frobenius_norm=2.0)
    >>> curves([Diagnosis("1.pt", (row,)), Diagnosis("2.pt", (row,))])["frobenius_norm"].lines
    (('up', (2.0, 2.0)),)
    """
    kinds = sorted({row.kind for step in steps for row in step.matrices}, key=flow_order)
    fields: dict[str, Callable[[Examination], float | None]] = {
        "condition_number": lambda row: row.kappa,
        "frobenius_norm": lambda row: row.frobenius_norm,
    }
    maps = {}
    for name, value in fields.items():
        lines = (
            (
                kind,
                tuple(known_median(value(r) for r in s.matrices if r.kind == kind) for s in steps),
            )
            for kind in kinds
        )
        maps[name] = HeatMap(short_sources(steps), tuple(lines))
    return maps


# --- findings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RuleFindings:
    """What one rule found, at one severity."""

    severity: str
    rule: str
    findings: Sequence[Finding]

    @property
    def by_advice(self) -> dict[str, list[Finding]]:
        """What to do, and for which of them.

        >>> found = [Finding("x", "info", "w", "", advice) for advice in ("prune", "go", "prune")]
        >>> [(what, len(those)) for what, those in by_rule(found)[0].by_advice.items()]
        [('prune', 2), ('go', 1)]
        """
        groups: dict[str, list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(finding.advice, []).append(finding)
        return groups


def by_rule(findings: Iterable[Finding]) -> list[RuleFindings]:
    """Return the findings by what can be done about them, gravest first, then by rule.

    >>> found = [Finding("dead-rows", severity, "w", "", "") for severity in ("info", "warning")]
    >>> [(group.severity, len(group.findings)) for group in by_rule(found)]
    [('warning', 1), ('info', 1)]
    """
    groups: dict[tuple[str, str], list[Finding]] = {}
    for finding in sorted(findings, key=urgency):
        groups.setdefault((finding.severity, finding.rule), []).append(finding)
    return [RuleFindings(severity, rule, those) for (severity, rule), those in groups.items()]


# --- what the script draws from -------------------------------------------------------------------


@dataclass(frozen=True)
class _Shared:
    """What many matrices share, stored once: labels, reasons, indices of values, random curves."""

    items: list[Any] = field(default_factory=list)
    known: dict[Any, int] = field(default_factory=dict)

    def index(self, item: Any, key: Any = None) -> int:
        key = item if key is None else key
        if key not in self.known:
            self.known[key] = len(self.items)
            self.items.append(item)
        return self.known[key]

    def text(self, text: str) -> int:
        return self.index(text if text.isprintable() else legible(text))


def _data(matrices: Sequence[Examination], ranked: Sequence[Examination]) -> dict[str, Any]:
    """Return every matrix in the order of the model, and plots of the worst."""
    shared = _Shared()
    plotted = {id(row) for row in ranked[:PLOT_LIMIT]}
    views = [_view(row, shared, id(row) in plotted) for row in matrices]
    order = {row.name: k for k, row in enumerate(matrices)}
    return {
        "shelf": shared.items,
        "matrices": views,
        "plotted": PLOT_LIMIT,
        "rows": ROWS_AT_ONCE,
        "keys": [[one.key, one.meaning] for one in METRICS],
        "worst": [order[row.name] for row in ranked[:PLOT_LIMIT]],
    }


def _view(row: Examination, shared: _Shared, plotted: bool) -> dict[str, Any]:
    """Return all that the page tells of one matrix, or why it cannot."""
    try:
        plot = _plot(row, shared) if plotted else None
        known = [
            [shared.index(label), value, *([shared.text(reason)] if reason else [])]
            for label, value, reason in facts(row)
        ]
    except Exception as error:
        known, plot = [[shared.index("Not shown"), error_text(error)]], None
    findings = [
        [shared.text(text) for text in (f.severity, f.rule, f.evidence, f.advice, f.snippet)]
        for f in row.findings
    ]
    shown = [part for one in METRICS for part in (one.text(row), one.level_of(row))]
    return {"name": one_line(row.name), "facts": known, "findings": findings, "plot": plot,
            "metrics": shown, "alarm": row.is_alarming}  # fmt: skip


def _plot(row: Examination, shared: _Shared) -> dict[str, Any] | None:
    """Return the plot with three or four digits; its indices and its random curve are shared."""
    if not row.plot:
        return None
    bars = []
    for side in ("rows", "columns"):
        histogram = row.plot.get(side) or {}
        edges = histogram.get("edges") or [None]
        ends = [_digits(edges[0]), _digits(edges[-1])]  # bars are equally wide
        bars.append([*ends, list(histogram.get("counts") or ())])
    plot: dict[str, Any] = {
        "spectrum": None,
        "null": None,
        "floor": _digits(row.plot.get("floor")),
        "bars": bars,
    }
    if points := row.plot.get("spectrum"):
        indices, values = zip(*points, strict=True)
        plot["spectrum"] = [shared.index(indices), [_digits(value, 3) for value in values]]
    points = row.plot.get("null")
    if points and points[0][1]:
        # the shape of the curve, and the factor that makes it this matrix's
        indices, values = zip(*points, strict=True)
        curve = [_digits(value / values[0]) for value in values]
        key = (tuple(row.shape), indices)
        plot["null"] = [shared.index(indices), shared.index(curve, key), _digits(values[0])]
    return plot


def _digits(value: float | None, digits: int = 4) -> float | None:
    # the largest may round to infinity
    rounded = math.inf if value is None else float(f"{value:.{digits}g}")
    return rounded if math.isfinite(rounded) else None
