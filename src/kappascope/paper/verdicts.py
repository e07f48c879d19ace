"""Every verdict on one page: claims, failures first; rules that were mended; printed figures.

>>> print(verdicts_page([], []).splitlines()[0])
# Every verdict
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from kappascope.lab.claims import CATEGORIES
from kappascope.lab.verdicts import (
    failures_first,
    figure_counts,
    measured,
    printed_mean,
    survives_all,
    verdict_counts,
)
from kappascope.paper.review import of_paper
from kappascope.text import Record, bracketed, markdown_table, number

MENDED = (
    "Some sentences quote a mean that does not exist. Three of them used to be called ill-posed, "
    "and eight more were judged without a word about it. Now each has two answers: one on the "
    "printed number, and one on the sentence, in medians.",
    "A verdict used to stand by its own interval. Now Holm's correction over the claims of its "
    "page decides. A claim with m parts fails only if one part fails at an m-th of the error rate.",
    "Comparisons of trained networks with fewer than eight seeds now decide nothing, and Student's "
    "interval is kept for what is not skewed.",
    "A tail index used to be named as evidence. Now it is only said to be consistent with theory, "
    "or to contradict it.",
)


def verdicts_page(claims: Sequence[Record], figures: Sequence[Record]) -> str:
    """Write every verdict as a Markdown page."""
    paper = [claim for claim in claims if of_paper(claim)]
    own = [claim for claim in claims if not of_paper(claim)]
    lost = [claim["id"] for claim in claims if claim.get("alone") in ("holds", "fails")
            and claim["verdict"] == "undecided"]  # fmt: skip
    shaky = [claim["id"] for claim in claims if claim["verdict"] in ("holds", "fails")
             and not survives_all(claim)]  # fmt: skip
    return "\n".join(
        (
            "# Every verdict",
            "",
            "`kappascope findings` writes this page from the rows in `results/`. A claim holds or "
            "fails if its whole 95 % interval says so, also after Holm's correction over the "
            "claims of its page. The p-value is corrected in the same way. Rules were fixed before "
            "their rows were seen, unless the claim is listed among the mended ones. "
            "[Findings](findings.md) is the summary.",
            "",
            verdict_counts(paper).replace("Of", "Of the paper's", 1),
            verdict_counts(own).replace("Of", "Of our own", 1),
            "",
            f"Decided alone, and undecided after the correction over their page: {_listed(lost)}. "
            f"Decided on their page, and not after a correction over all {len(claims)} claims: "
            f"{_listed(shaky)}.",
            "",
            "## The paper's claims",
            "",
            *_rows(paper),
            "",
            "## Our own",
            "",
            "These are controls on the paper's pages, claims of the experiments that answer its "
            "review, and claims of the studies of networks.",
            "",
            *_rows(own),
            "",
            "## Rules mended after their rows were seen",
            "",
            *(f"- {rule}" for rule in MENDED),
            "",
            *_mended(claims),
            "",
            "## Printed figures",
            "",
            figure_counts(figures),
            "",
            *_figures(figures),
            "",
        )
    )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "none"


def _rows(claims: Iterable[Record]) -> list[str]:
    """Write a table of claims, failures first."""
    cells = [
        (
            f"`{claim['id']}`",
            " ".join(filter(None, (claim["sentence"], f"*{printed_mean(claim)}*" if
                                   claim.get("printed_mean") else ""))),
            f"**{claim['verdict']}**" + (" (mended)" if claim.get("mended") else ""),
            f"{measured(claim)} {bracketed(claim['interval'])}".strip(),
            str(claim["n"]),
            _chance(claim.get("p_page")),
        )
        for claim in failures_first(claims)
    ]  # fmt: skip
    columns = ("claim", "sentence", "verdict", "measured", "n", "p")
    return markdown_table(columns, cells) if cells else ["None."]


def _chance(p: float | None) -> str:
    if p is None:
        return "–"
    return "< 10⁻⁶" if p < 1e-6 else number(p, 2)


def _mended(claims: Iterable[Record]) -> Iterator[str]:
    """List the rules that were changed, with the verdicts before and after."""
    cells = [
        (f"`{claim['id']}`", claim["mended"]["before"], claim["verdict"], claim["mended"]["why"])
        for claim in claims
        if claim.get("mended")
    ]
    yield from markdown_table(("claim", "before", "now", "why"), cells) if cells else ["None."]


def _figures(figures: Iterable[Record]) -> Iterator[str]:
    """List the printed figures that the protocol alone does not give."""
    cells = [
        (f"`{one['id']}`", one["what"], one["printed"], measured(one, 4), one["category"])
        for one in figures
        if one["category"] != CATEGORIES["protocol"]
    ]
    columns = ("figure", "what", "printed", "measured", "category")
    yield from markdown_table(columns, cells) if cells else ["All matched."]
