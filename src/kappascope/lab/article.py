"""An article whose numbers are substituted from rows, so that its text cannot drift from them.

A template is Markdown with two kinds of marks. ``{{e4.hybrid rows|.0f}}`` is a number that a claim
measured, by the names of claim and measure; ``{{e9.law trained/at d = 64|.2f}}`` one of a family,
and ``|interval`` after the digits adds its interval. ``[[e4.hybrid holds]]`` names the claim that a
sentence stands on, with the verdict that it needs. A paragraph whose numbers are missing, or whose
claims came out otherwise, is not told, and is reported.

>>> claim = {"id": "e4.x", "verdict": "holds", "estimates": {"rows": {"value": 67.3, "n": 9}}}
>>> written = fill_article("It takes {{e4.x rows|.0f}} % [[e4.x holds]].", [claim])
>>> written.text
'It takes 67 % (`e4.x`).'
>>> fill_article("It takes little [[e4.x fails]].", [claim]).left_out
('e4.x holds, and the article says that it fails',)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from markdown_it import MarkdownIt
from markupsafe import Markup, escape

from kappascope.lab import drawing
from kappascope.lab.table import Table
from kappascope.lab.verdicts import unmeasured
from kappascope.text import Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBER = re.compile(r"\{\{([\w.-]+) ([^{}|]+)\|([^{}|]*?)(\|interval)?\}\}")
MARK = re.compile(r"\[\[([^\[\]]+)\]\]")
WORD = re.compile(r"\{\{(\w+)\}\}")
PICTURE = re.compile(r"!\[([^\]]*)\]\((\w+)\)")


class UntoldError(Exception):
    """A paragraph says what rows do not."""


Words = Callable[[Sequence[Record], Sequence[Record], Mapping[str, Any]], Mapping[str, str]]
"""From claims, printed figures and provenance to what stands for ``{{word}}``."""


@dataclass(frozen=True)
class Article:
    """A template, the figures that it shows, each drawn from all rows, and its further words."""

    template: str
    plots: Mapping[str, Callable[[Table], Figure]]
    words: Words = lambda claims, figures, provenance: {}

    def drawn(self, rows: Table) -> dict[str, Figure]:
        """Draw the figures whose rows are there."""
        figures = {}
        for name, plot in self.plots.items():
            try:
                figures[name] = plot(rows)
            except (LookupError, ValueError):  # too small a run; what it lacks is told
                continue
        return figures

    def written(
        self,
        claims: Sequence[Record],
        figures: Sequence[Record],
        provenance: Mapping[str, Any],
        pictures: Mapping[str, Figure],
        **style: Any,
    ) -> Written:
        """Write the article, with pictures that say what is seen in them."""
        seen = {
            f"alt_{name}": " ".join(map(drawing.alt_text, figure.axes))
            for name, figure in pictures.items()
        }
        words = {**self.words(claims, figures, provenance), **seen}
        return fill_article(self.template, claims, words, pictures, **style)


@dataclass(frozen=True)
class Written:
    """An article with its numbers, and the reasons why paragraphs of it were left out."""

    text: str
    left_out: tuple[str, ...] = ()


def cited(names: Sequence[str]) -> str:
    """Write the claims that a sentence stands on, as plain Markdown does."""
    return f"({', '.join(f'`{name}`' for name in names)})"


def fill_article(
    template: str,
    claims: Iterable[Record],
    words: Mapping[str, str] | None = None,
    pictures: Iterable[str] = (),
    *,
    cite: Callable[[Sequence[str]], str] = cited,
    address: str = "{}",
) -> Written:
    """Substitute numbers and words, and check every verdict that the text needs.

    ``words`` are further substitutions, ``pictures`` the names of the figures that were drawn,
    which are found at their ``address``.
    """
    judged = {claim["id"]: claim for claim in claims}
    known, drawn = words or {}, set(pictures)

    def word(found: re.Match[str]) -> str:
        if found[1] not in known:
            raise UntoldError(f"nothing is known of {found[1]}")
        return known[found[1]]

    def citation(found: re.Match[str]) -> str:
        needed = [mark.rsplit(" ", 1) for mark in found[1].split(", ")]
        for name, verdict in needed:
            came = _judged(judged, name)["verdict"]
            if came != verdict:
                raise UntoldError(
                    f"{name} {_is(came)}, and the article says that it {_is(verdict)}"
                )
        return cite([name for name, _ in needed])

    told, left_out = [], []
    for paragraph in re.split(r"\n{2,}", template.strip()):
        try:
            for picture in PICTURE.finditer(paragraph):
                if picture[2] not in drawn:
                    raise UntoldError(f"the figure {picture[2]} was not drawn")
            placed = PICTURE.sub(lambda p: f"![{p[1]}]({address.format(p[2])})", paragraph)
            text = NUMBER.sub(lambda found: _number(judged, found), placed)
            told.append(MARK.sub(citation, WORD.sub(word, text)))
        except UntoldError as reason:
            left_out.append(str(reason))
    return Written("\n\n".join(told), tuple(dict.fromkeys(left_out)))


def as_html(text: str, pictures: Mapping[str, str]) -> Markup:
    r"""Turn an article into HTML, its pictures, SVG documents, drawn in place.

    >>> print(as_html("![a dot](x)\n*It is **one**.*", {"x": "<svg/>"}))
    <figure id="figure-x"><div class="drawn" role="img" aria-label="a dot"><svg/></div>
    <figcaption>It is <strong>one</strong>.</figcaption></figure>
    <BLANKLINE>
    """
    html = MarkdownIt("commonmark", {"html": False}).render(text)
    html = re.sub(r"10\^(−?\d+)", r"10<sup>\1</sup>", html)
    html = re.sub(r'<a href="verdicts\.md">', '<a href="#claims">', html)
    html = re.sub(r'<a href="\w+\.md">(.*?)</a>', r"\1", html)  # pages that a report has not

    def drawn(found: re.Match[str]) -> str:
        name, alt, caption = found.groups()
        svg = drawing.inlined(pictures[name], name)
        return (
            f'<figure id="figure-{escape(name)}"><div class="drawn" role="img" '
            f'aria-label="{alt}">{svg}</div>\n<figcaption>{caption}</figcaption></figure>'
        )

    image = r'<p><img src="(\w+)" alt="([^"]*)"\s*/?>\s*<em>(.*?)</em></p>'
    return Markup(re.sub(image, drawn, html, flags=re.DOTALL))  # we wrote it: names are escaped


def _judged(judged: Mapping[str, Record], name: str) -> Record:
    if name not in judged:
        raise UntoldError(f"{name} was not judged")
    if unmeasured(judged[name]):
        raise UntoldError(f"{name} was not measured")
    return judged[name]


def _is(verdict: str) -> str:
    return verdict if verdict in ("holds", "fails") else f"is {verdict}"


def _number(judged: Mapping[str, Record], found: re.Match[str]) -> str:
    """Write a number that a claim measured."""
    name, path, digits, interval = found.groups()
    estimate: Any = _judged(judged, name).get("estimates", {})
    for key in path.split("/"):
        if key not in estimate:
            raise UntoldError(f"{name} does not measure {path}")
        estimate = estimate[key]
    if estimate.get("value") is None:
        raise UntoldError(f"{path} of {name} has no value")
    if digits == "n":
        return f"{estimate['n']:,}"
    if not interval or estimate.get("low") is None:
        return _written(estimate["value"], digits)
    ends = (_written(estimate[end], digits) for end in ("low", "high"))
    return f"{_written(estimate['value'], digits)} [{', '.join(ends)}]"


def _written(value: float | None, digits: str) -> str:
    """Write a number plainly: no exponents that Markdown readers stumble over."""
    if value is None:
        return "∞"
    text = f"{value:{digits}}"
    mantissa, _, exponent = text.partition("e")
    if not exponent:
        return text.replace("-", "−")
    return f"{mantissa} × 10^{int(exponent)}".replace("-", "−")
