"""The studies of real networks on one page of the documentation: tables, figures, verdicts.

>>> print(studies_page([]).splitlines()[0])
# Real networks
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set

from kappascope.lab import report
from kappascope.lab.article import fill_article
from kappascope.lab.experiment import Study
from kappascope.lab.report import Publication
from kappascope.lab.verdicts import verdict_counts
from kappascope.text import markdown_table


def study_pictures(publications: Sequence[Publication]) -> Iterator[tuple[str, bytes]]:
    """Read the figure of each published study; yield it with its address beside the page.

    >>> list(study_pictures([]))
    []
    """
    for publication in publications:
        for study in publication.studies:
            figure = publication.folder / "figures" / f"{study.id}.png"
            if figure.is_file():
                yield f"figures/{study.id}.png", figure.read_bytes()


def studies_page(publications: Sequence[Publication]) -> str:
    """Write all published studies as a Markdown page, beside which their figures stand."""
    studies = [
        (publication, study) for publication in publications for study in publication.studies
    ]
    claims = [claim for publication, study in studies for claim in publication.claims_of(study)]
    lines = [
        "# Real networks",
        "",
        "The paper trains one linear layer, or a few. Does what it says of kappa, the condition "
        "number κ, matter in networks that do something? Each study asks one question of such "
        "networks.",
        "",
        verdict_counts(claims) if claims else "No claim was judged.",
        "",
    ]
    if studies:
        lines += ["## What was asked, and what was found", ""]
    for publication, study in studies:
        lines += _answer(publication, study)
    lines += [
        "## How to read this page",
        "",
        "Every study has its question, its tables, its figure, and its claims. A claim stands "
        "with its verdict, its name, who made it (P: the paper, S: the slides, R: the review), and "
        "what was measured. Brackets hold 95 % intervals. A claim is judged by its interval, with "
        "Holm's correction over the claims of its study. Fewer than eight seeds decide nothing. A "
        "rule is older than the trials that it is judged on, unless the claim says that the rule "
        "was mended. Where a pilot on other trials shaped a rule, the study says so.",
        "",
        "`kappascope findings` writes this page from the trials of `kappascope study`.",
        "",
    ]
    drawn = {address for address, _ in study_pictures(publications)}
    for publication, study in studies:
        lines += _section(publication, study, drawn)
    return "\n".join(lines)


def _answer(publication: Publication, study: Study) -> Iterator[str]:
    """Write the first question of a study, and what it found or why that cannot be told."""
    asked, *_ = report.paragraphs(study.question)
    place = re.sub(r"[^a-z0-9]+", "-", study.title.lower()).strip("-")
    found = fill_article(study.finding, publication.claims_of(study))
    yield f"**[{study.title}](#{place}).** *{asked}*"
    yield " ".join([found.text, *(f"Not told: {why}." for why in found.left_out)]).strip()
    yield ""


def _section(publication: Publication, study: Study, drawn: Set[str]) -> Iterator[str]:
    """Write a study with its origin, question, tables, figure and claims."""
    provenance = publication.results.provenance
    machine = [f"{provenance['cpu']}"] if "cpu" in provenance else []
    machine += [
        f"{name} {provenance[name]}" for name in ("torch", "kappascope") if name in provenance
    ]
    trials = f"{provenance.get('trials', 0):,} trials"
    yield from (f"## {study.title}", "")
    yield from (f"`kappascope study {study.name}`: {trials} ({', '.join(machine)}).", "")
    parts = study.question.replace("``", "`").strip().split("\n\n")
    for part in parts[1:] or parts:
        yield from (" ".join(item.split()) for item in re.split(r"\n(?=- )", part))
        yield ""
    for exhibit in report.exhibits(
        study, publication.results.everything.where(experiment=study.id)
    ):
        yield from (f"### {exhibit.title}", "")
        if exhibit.rows:
            yield from (*markdown_table(exhibit.columns, exhibit.rows), "")
        if exhibit.note:
            yield from (exhibit.note, "")
    if (address := f"figures/{study.id}.png") in drawn:
        yield from (f"![The figure of the study {study.name}]({address})", "")
    for claim in publication.claims_of(study):
        source = claim["source"].replace("(", r"\(")  # or a site makes a sign of copyright of W1(c)
        yield f"- **{claim['verdict']}**: {claim['sentence']} (`{claim['id']}`, {source})"
        yield f"  {claim['explanation']}"
        if mended := claim.get("mended"):
            yield f"  *Mended; before: {mended['before']}.* {mended['why']}"
    yield ""
