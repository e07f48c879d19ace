"""Numbers, names and verdicts in the words of a reader."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Record = Mapping[str, Any]
"""A claim or a printed figure as ``verdicts.json`` keeps it."""

VERBS = {
    "holds": ("holds", "hold"),
    "fails": ("fails", "fail"),
    "undecided": ("is undecided", "are undecided"),
    "ill-posed": ("is ill-posed", "are ill-posed"),
}
OUTCOMES = tuple(VERBS)
PROPER = {"frobenius": "Frobenius", "sgd": "SGD", "adam": "Adam", "svd": "SVD", "relu": "ReLU"}
PROPER |= {"adamw": "AdamW", "muon": "Muon"}
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def words(value: object) -> str:
    """A name or a number as a reader wants it.

    >>> words("condition_number"), words("frobenius_norm"), words(32), words(0.01), words(2e-6)
    ('κ', 'Frobenius norm', '32', '0.01', '2×10⁻⁶')
    """
    if not isinstance(value, float):
        known = (PROPER.get(word, word) for word in str(value).split("_"))
        return " ".join(known).replace("condition number", "κ")
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    power = "10" + str(int(exponent)).translate(RAISED)
    return power if float(mantissa) == 1 else f"{float(mantissa):g}×{power}"


def number(value: float | None, digits: int = 3) -> str:
    """A number with that many digits, as a reader writes it.

    >>> [number(x) for x in (0.13, 2.0, 13166.75, 6.62e-5, 4.8e6, math.inf, None)]
    ['0.130', '2.00', '13,167', '6.62×10⁻⁵', '4.80×10⁶', '∞', '–']
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    text = f"{value:.{digits - 1}e}"
    exponent = int(text.partition("e")[2])
    if value == 0:
        text = "0"
    elif -3 <= exponent < 6:
        text = f"{value:,.{max(0, digits - 1 - exponent)}f}"
    else:
        text = f"{text.partition('e')[0]}×10{str(exponent).translate(RAISED)}"
    return text.replace("-", "−")


def plural(count: int, one: str, more: str = "") -> str:
    """So many of something.

    >>> plural(1, "matrix", "matrices"), plural(1200, "item")
    ('1 matrix', '1,200 items')
    """
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def listed(names: Sequence[str], most: int = 3, mark: str = ", ") -> str:
    """The first of them, and how many more there are.

    >>> listed("abcde"), listed(["a", "b"], mark="; ")
    ('a, b, c and 2 more', 'a; b')
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return mark.join(names[:most]) + more


def clean(text: str) -> str:
    r"""Text without the characters that would move a cursor or hide what follows.

    >>> clean("red \x1b[31m")
    'red ?[31m'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def cell(text: str) -> str:
    r"""Text for one cell of a Markdown table.

    >>> print(cell("|log kappa|"))
    \|log kappa\|
    """
    return " ".join(text.split()).replace("|", "\\|")


def interval(ends: Sequence[float | None] | None) -> str:
    """An interval in brackets; an open end is a missing one.

    >>> interval((0.1, 0.2)), interval((0.7, None)), interval(None)
    ('[0.100, 0.200]', '[0.700, ∞)', '')
    """
    if ends is None:
        return ""
    low, high = ends
    left = "(−∞" if low is None or math.isinf(low) else f"[{number(low)}"
    return f"{left}, ∞)" if high is None or math.isinf(high) else f"{left}, {number(high)}]"


def measured(record: Record, digits: int = 3) -> str:
    """The measured number of a record, or the two ends of a range."""
    found = record["measured"]
    several = found if isinstance(found, Sequence) else [found]
    return " to ".join(number(one, digits) for one in several)


def verdict(claims: Sequence[Record], figures: Sequence[Record]) -> tuple[str, str, str]:
    """What came out, in three sentences: the claims, the most prominent of them, the figures.

    >>> claim = {"verdict": "fails", "sentence": "κ plateaus.", "id": "e9.x", "source": "abstract"}
    >>> for sentence in verdict([claim], []):
    ...     print(sentence)
    Of 1 claim, 0 hold, 1 fails, 0 are undecided and 0 are ill-posed.
    The most prominent of those that fail: “κ plateaus” (e9.x).
    No printed figure was compared.
    """
    return tally(claims), _prominent(claims), _matched(figures)


def tally(claims: Sequence[Record]) -> str:
    """How many claims have which verdict.

    >>> tally([{"verdict": "holds"}])
    'Of 1 claim, 1 holds, 0 fail, 0 are undecided and 0 are ill-posed.'
    >>> tally([{"verdict": "undecided", "explanation": "Not measured: no rows"}])[-52:]
    'ill-posed; 1 of the undecided was not measured here.'
    """
    if not claims:
        return "In this run no claim was judged."
    found = [claim["verdict"] for claim in claims]
    counts = [plural(found.count(outcome), *VERBS[outcome]) for outcome in OUTCOMES]
    many = plural(len(claims), "claim")
    absent = sum(map(unmeasured, claims))
    left = f"; {plural(absent, 'of the undecided was', 'of the undecided were')} not measured here"
    return f"Of {many}, {', '.join(counts[:-1])} and {counts[-1]}{left if absent else ''}."


def _prominent(claims: Sequence[Record]) -> str:
    """Of each verdict, the claim with most sources, those of the abstract first."""
    ranked = sorted(claims, key=lambda c: ("abstract" not in c["source"], -c["source"].count(",")))
    first = {claim["verdict"]: claim for claim in reversed(ranked)}
    told = [
        f"{VERBS[outcome][1]}: “{first[outcome]['sentence'].rstrip('.')}” ({first[outcome]['id']})"
        for outcome in OUTCOMES
        if outcome in first
    ]
    return f"The most prominent of those that {'; that '.join(told)}." if told else ""


def _matched(printed: Sequence[Record]) -> str:
    if not printed:
        return "No printed figure was compared."
    absent, matched = sum(map(unmeasured, printed)), sum(bool(one["matches"]) for one in printed)
    missed = len(printed) - matched - absent
    left = f"; {plural(missed, 'differs', 'differ')}" if missed else ""
    left += f"; {plural(absent, 'was', 'were')} not measured here" if absent else ""
    many = plural(len(printed), "figure")
    return f"Of {many} that the paper prints, {matched} come out as printed{left}."


def unmeasured(record: Record) -> bool:
    """Whether the trials that a claim or figure speaks of were not run.

    >>> unmeasured({"agreement": "not measured: this run has no trials with size 512"})
    True
    """
    told = record.get("agreement") or record.get("explanation") or ""
    return str(told).lower().startswith("not measured")
