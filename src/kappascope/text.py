"""Numbers and names as a reader wants them: on pages, in tables, in the terminal."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # it takes a tenth of a second to load
    from rich.table import Table

Record = Mapping[str, Any]
"""A JSON object: a matrix, a claim or a printed figure as a document keeps it."""

PROPER_NAMES = {
    "adam": "Adam",
    "adamw": "AdamW",
    "frobenius": "Frobenius",
    "muon": "Muon",
    "relu": "ReLU",
    "sgd": "SGD",
    "svd": "SVD",
}
LONGEST_ERROR = 300  # characters of what a library says of an error: the rest is seldom read
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def words(value: object) -> str:
    """Write a name, or a setting that may be a number, as in a sentence.

    >>> words("condition_number"), words("frobenius_norm"), words(32), words(0.01), words(2e-6)
    ('κ', 'Frobenius norm', '32', '0.01', '2×10⁻⁶')
    """
    if not isinstance(value, float):
        parts = (PROPER_NAMES.get(part, part) for part in str(value).split("_"))
        return " ".join(parts).replace("condition number", "κ")
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:g}"
    mantissa, exponent = f"{value:.3e}".split("e")
    power = "10" + str(int(exponent)).translate(SUPERSCRIPTS)
    return power if float(mantissa) == 1 else f"{float(mantissa):g}×{power}"


def number(value: float | None, digits: int = 3) -> str:
    """Write a number with so many significant digits.

    >>> [number(x) for x in (0.13, 2.0, 13166.75, 6.62e-5, 4.8e6, math.inf, None)]
    ['0.130', '2.00', '13,167', '6.62×10⁻⁵', '4.80×10⁶', '∞', '–']
    """
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    mantissa, _, power = f"{value:.{digits - 1}e}".partition("e")
    exponent = int(power)
    if value == 0:
        text = "0"
    elif -3 <= exponent < 6:
        text = f"{value:,.{max(0, digits - 1 - exponent)}f}"
    else:
        text = f"{mantissa}×10{str(exponent).translate(SUPERSCRIPTS)}"
    return text.replace("-", "−")


def bracketed(ends: Sequence[float | None] | None) -> str:
    """Write an interval in brackets; an end that is missing is infinite.

    >>> bracketed((0.1, 0.2)), bracketed((0.7, None)), bracketed(None)
    ('[0.100, 0.200]', '[0.700, ∞)', '')
    """
    if ends is None:
        return ""
    low, high = ends
    left = "(−∞" if low is None or math.isinf(low) else f"[{number(low)}"
    return f"{left}, ∞)" if high is None or math.isinf(high) else f"{left}, {number(high)}]"


def plural(count: int, one: str, more: str = "") -> str:
    """Write a count before the word for one thing or for several.

    >>> plural(1, "matrix", "matrices"), plural(1200, "item")
    ('1 matrix', '1,200 items')
    """
    return f"{count:,} {one if count == 1 else more or one + 's'}"


def first_few(names: Sequence[str], mark: str = ", ") -> str:
    """Name the first of several, and count the others.

    >>> first_few("abcde"), first_few(["a", "b"], mark="; ")
    ('a, b, c and 2 more', 'a; b')
    """
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return mark.join(names[:3]) + more


def clean(text: str) -> str:
    r"""Replace the characters that would move a cursor or hide what follows.

    >>> clean("red \x1b[31m")
    'red ?[31m'
    """
    return "".join(c if c.isprintable() else "?" for c in text)


def error_text(error: BaseException) -> str:
    """Write an unforeseen error on one line: its kind and what it says.

    >>> error_text(ZeroDivisionError("float division by zero")), error_text(KeyError())
    ('ZeroDivisionError: float division by zero', 'KeyError')
    """
    said = clean(" ".join(str(error).split()))[:LONGEST_ERROR]
    return f"{type(error).__name__}: {said}".removesuffix(": ")


def duration(seconds: float) -> str:
    """Write how long something takes, as exactly as an estimate deserves.

    >>> [duration(seconds) for seconds in (0.4, 29, 100, 800, 9000)]
    ['1 second', '29 seconds', '2 minutes', '13 minutes', '2.5 hours']
    """
    if seconds < 90:
        return plural(max(1, round(seconds)), "second")
    if seconds < 5400:
        return plural(round(seconds / 60), "minute")
    return f"{seconds / 3600:.1f} hours"


def ruled_table(*columns: str, numbers: Iterable[int] = ()) -> Table:
    """Begin a table for the terminal: a rule below its heads, nothing else drawn.

    ``numbers`` are the columns, counted from 0, whose cells end at the right.

    >>> table = ruled_table("claim", "n", numbers=(1,))
    >>> [column.justify for column in table.columns]
    ['left', 'right']
    """
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(*columns, box=SIMPLE_HEAD, pad_edge=False)
    for place in numbers:
        table.columns[place].justify = "right"
    return table


def markdown_cell(text: str) -> str:
    r"""Write text on one line, so that it fits a cell of a Markdown table.

    >>> print(markdown_cell("|log kappa|"))
    \|log kappa\|
    """
    return " ".join(text.split()).replace("|", "\\|")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Write the lines of a Markdown table.

    >>> markdown_table(("a", "b"), [("1", "2")])
    ['| a | b |', '|---|---|', '| 1 | 2 |']
    """
    head, *lines = (f"| {' | '.join(map(markdown_cell, cells))} |" for cells in (columns, *rows))
    return [head, "|" + "---|" * len(columns), *lines]


def html_escaped(text: str) -> str:
    """Return text that is text in HTML, too, between tags and in quoted attributes.

    >>> html_escaped('<a href="x">')
    '&lt;a href=&quot;x&quot;&gt;'
    """
    return html.escape(text, quote=True)


def html_table(caption: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a small table for a notebook, without a style of its own.

    >>> html_table("a < b", [("rank", "3")])
    '<table><caption>a &lt; b</caption><tr><th>rank</th><td>3</td></tr></table>'
    """
    lines = []
    for head, *cells in rows:
        data = "".join(f"<td>{html_escaped(clean(cell))}</td>" for cell in cells)
        lines.append(f"<tr><th>{html_escaped(clean(head))}</th>{data}</tr>")
    return f"<table><caption>{html_escaped(clean(caption))}</caption>{''.join(lines)}</table>"
