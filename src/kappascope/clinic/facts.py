"""The facts of a diagnosis as a reader wants them: labels, numbers, and names that stay text."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kappascope.clinic.glance import Row
from kappascope.prose import Record, interval, number, words

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
    "errors": "Errors against the reference",
}  # fmt: skip
"""The facts about a matrix in the order of its own view; others come after, in plain words."""
ELSEWHERE = {
    "name", "findings", "plot", "reasons", "condition_number_low", "condition_number_high", "place",
}  # fmt: skip
BLANK: Mapping[str, Any] = {
    "name": "", "head": None, "condition_number_low": None, "condition_number_high": None,
    "findings": (), "reasons": {},
}  # fmt: skip


def legible(value: Any) -> Any:
    r"""The same with nothing a browser or JSON cannot show: escapes for what does not print.

    Direction marks could make one name look like another; infinite is no JSON.

    >>> legible({"a\u202eb": [1.0, math.inf, "two\nlines\x00"]})
    {'a\\u202eb': [1.0, None, 'two\nlines\\x00']}
    """
    if isinstance(value, str):
        return "".join(c if c.isprintable() or c == "\n" else _escaped(c) for c in value)
    if isinstance(value, Mapping):
        return {legible(str(name)): legible(one) for name, one in value.items()}
    if isinstance(value, Sequence):
        return [legible(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def complete(matrix: Record) -> dict[str, Any]:
    """A matrix with None for what it does not tell.

    >>> complete({"name": "w"})["alpha"] is None
    True
    """
    told = {name: value for name, value in matrix.items() if value is not None}
    return {**dict.fromkeys(LABELS), **BLANK, **told}


def short(text: str, most: int = 100) -> str:
    """A long name without its middle, for its ends tell names apart.

    >>> short("abcdefghij", 5)
    'ab…ij'
    """
    half = most // 2
    return text if len(text) <= most else f"{text[:half]}…{text[-half:]}"


def breakable(name: str) -> Markup:
    """A name that may go on in the next line after a dot or a slash.

    >>> breakable("a.<b>")
    Markup('a.<wbr>&lt;b&gt;')
    """
    return Markup("<wbr>").join(re.split(r"(?<=[./])(?=.)", name))


def kappa(row: Row) -> str:
    """The condition number, or the least that it can be.

    >>> kappa(Row({"condition_number": 12.0})), kappa(Row({"condition_number_low": 9.0}))
    ('12.0', '≥ 9.00')
    """
    least = row.bounded and row.kappa not in (None, math.inf)
    return f"≥ {number(row.kappa)}" if least else number(row.kappa)


def shown(value: Any) -> str:
    """A fact as a reader wants it.

    >>> shown([3, 4]), shown(True), shown({"min": 0.5, "max": 2.0}), shown(None)
    ('3 × 4', 'yes', 'min: 0.500, max: 2.00', '–')
    """
    if value is None or isinstance(value, float):
        return number(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{words(name)}: {shown(one)}" for name, one in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return " × ".join(shown(one) for one in value)
    return str(value)


def sortable(value: float | None) -> str:
    """A number to sort by: six digits tell as much as can be seen.

    >>> sortable(1 / 3), sortable(None), sortable(math.inf)
    ('0.333333', '', 'Infinity')
    """
    if value is None or not math.isinf(value):
        return "" if value is None else f"{value:.6g}"
    return "Infinity"  # as scripts read it


def columns(products: Sequence[Record]) -> dict[str, str]:
    """The numbers that products have, and their labels.

    >>> columns([{"name": "w[qk.0]", "head": 0, "condition_number": 7.0, "alpha": None}])
    {'head': 'Head', 'condition_number': 'κ'}
    """
    known = {name for one in products for name, value in one.items() if _is_number(value)}
    labels = {"depth": "Layer", "head": "Head"} | LABELS
    labels |= {name: words(name) for name in sorted(known - labels.keys())}
    return {name: label for name, label in labels.items() if name in known}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def facts(row: Row) -> Iterator[tuple[str, str, str]]:
    """Label, value, and why there is none, for all that is known or known to be unknown.

    >>> list(facts(Row({"depth": 3, "alpha": None, "reasons": {"alpha": "too few values"}})))
    [('Layer', '3', ''), ('κ', '–', ''), ('Tail exponent α', '–', 'too few values')]
    """
    matrix = row.matrix
    ends = (matrix.get("condition_number_low"), matrix.get("condition_number_high"))
    told = {
        **matrix,
        "condition_number": kappa(row),
        "interval": interval(ends if any(ends) else None),
    }
    reasons = matrix.get("reasons") or {}
    others = {name: words(name) for name in matrix if name not in LABELS.keys() | ELSEWHERE}
    for name, label in (LABELS | others).items():
        value, reason = told.get(name), str(reasons.get(name) or "")
        if value not in (None, "", {}) or reason:
            yield label, shown(value), reason
