"""The pages of the documentation that are written from rows: article, verdicts, review, README."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kappascope.lab import drawing
from kappascope.lab.report import Publication, all_rows
from kappascope.lab.verdicts import over_all
from kappascope.paper.article import ARTICLE, SUMMARY
from kappascope.paper.review import BEGIN, all_claims, inserted, table
from kappascope.paper.verdicts import verdicts_page
from kappascope.text import Record

Pages = dict[Path, str]
Pictures = list[tuple[str, bytes]]

WRITTEN = (
    "<!-- Written by `kappascope findings`: the text is src/kappascope/paper/article.md, the "
    "numbers are those of the rows in results/. -->"
)


def all_judged(verdicts: Iterable[Mapping[str, Sequence[Record]]]) -> list[dict[str, Any]]:
    """Put the claims of several runs into the order of their pages, corrected over all of them."""
    order = [claim.id for claim in all_claims()]
    found = [claim for each in verdicts for claim in each["claims"]]
    known = sorted((c for c in found if c["id"] in order), key=lambda c: order.index(c["id"]))
    return over_all([*known, *(claim for claim in found if claim["id"] not in order)])


def all_compared(verdicts: Iterable[Mapping[str, Sequence[Record]]]) -> list[Record]:
    """Put the printed figures of several runs into the order of their experiments."""
    figures = [figure for each in verdicts for figure in each["figures"]]
    return sorted(figures, key=lambda figure: int(figure["experiment"][1:]))


def pages(
    publications: Sequence[Publication], docs: Path
) -> tuple[Pages, Pictures, tuple[str, ...]]:
    """Write the pages that the runs in some folders lead to, and name what could not be told.

    The article and the verdicts need the paper's experiments. The README, beside the folder of the
    documentation, has a summary between two marks.
    """
    claims = all_judged(each.verdicts for each in publications)
    figures = all_compared(each.verdicts for each in publications)
    review = docs / "paper.md"
    written: Pages = {review: inserted(review.read_text(encoding="utf-8"), table(claims))}
    paper = [each for each in publications if not each.studies]
    if not paper:
        return written, [], ()
    trials = {"trials": sum(each.results.provenance.get("trials", 0) for each in paper)}
    drawn = ARTICLE.drawn(all_rows(publications))
    article = ARTICLE.written(claims, figures, trials, drawn, address="figures/{}.svg")
    written[docs / "findings.md"] = f"{WRITTEN}\n\n{article.text}\n"
    written[docs / "verdicts.md"] = verdicts_page(claims, figures)
    left_out = article.left_out
    readme = docs.parent / "README.md"
    if readme.is_file() and BEGIN in (page := readme.read_text(encoding="utf-8")):
        summary = SUMMARY.written(claims, figures, trials, {})
        written[readme] = inserted(page, summary.text)
        left_out += summary.left_out
    pictures = [(f"figures/{name}.svg", drawing.svg(f).encode()) for name, f in drawn.items()]
    return written, pictures, left_out
