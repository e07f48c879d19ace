"""What is committed in docs/ and README is what the committed rows say: a stale sentence fails."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kappascope.lab import experiment as lab
from kappascope.lab.article import fill_article
from kappascope.lab.report import publications_of
from kappascope.paper.article import ARTICLE, SUMMARY
from kappascope.paper.docs import all_compared, all_judged, pages
from kappascope.paper.review import BEGIN, END, all_claims, table
from kappascope.paper.verdicts import verdicts_page
from tiny_experiments import TOY
from tiny_runs import complete

ROOT = Path(__file__).parents[2]
ROWS = ROOT / "results" / "reproduce"
with_rows = pytest.mark.skipif(
    not ROWS.exists(), reason="the rows of the nineteen experiments are not committed"
)
FOLDERS = sorted(file.parent for file in (ROOT / "results").rglob("verdicts.json"))


@pytest.fixture(scope="module")
def judged() -> dict[str, Any]:
    """The claims and figures in the verdicts that are committed beside their rows."""
    files = [json.loads((folder / "verdicts.json").read_bytes()) for folder in FOLDERS]
    claims = all_judged(files)
    return {
        "claims": claims,
        "figures": all_compared(files),
        "trials": {"trials": sum(f["provenance"]["trials"] for f in files if f["figures"])},
    }


def without_pictures(text: str) -> str:
    """Leave out what pictures show in words, which drawing them would tell."""
    return re.sub(r"!\[.*\]\(.*?\)", "", text)


@with_rows
def test_the_article_is_told_in_full_and_is_the_one_committed(judged: dict[str, Any]) -> None:
    words = ARTICLE.words(judged["claims"], judged["figures"], judged["trials"])
    seen = {f"alt_{name}": "" for name in ARTICLE.plots}
    written = fill_article(
        ARTICLE.template, judged["claims"], {**words, **seen}, ARTICLE.plots,
        address="figures/{}.svg",
    )  # fmt: skip
    stale = [reason for reason in written.left_out if not reason.endswith("was not judged")]
    assert not stale  # what has no rows is left out, and said to be missing
    assert bool(written.left_out) == bool(words["missing"])
    committed = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    assert without_pictures(written.text) in without_pictures(committed)


@with_rows
def test_the_summary_in_the_readme_is_what_rows_say(judged: dict[str, Any]) -> None:
    written = SUMMARY.written(judged["claims"], judged["figures"], judged["trials"], {})
    assert written.left_out == ()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.partition(BEGIN)[2].partition(END)[0].strip() == written.text


@with_rows
def test_the_verdicts_and_the_review_are_those_of_the_rows(judged: dict[str, Any]) -> None:
    committed = (ROOT / "docs" / "verdicts.md").read_text(encoding="utf-8")
    assert committed == verdicts_page(judged["claims"], judged["figures"])
    answers = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    assert table(judged["claims"]) in answers


@with_rows
def test_every_claim_is_judged(judged: dict[str, Any]) -> None:
    there = {claim["experiment"] for claim in judged["claims"]}
    expected = {claim.id for claim in all_claims() if claim.experiment in there}
    assert {claim["id"] for claim in judged["claims"]} == expected


@with_rows
@pytest.mark.parametrize("number", [5, 13])
def test_rows_that_are_committed_give_the_verdicts_beside_them(
    number: int, judged: dict[str, Any]
) -> None:
    page = lab.discover()[number]
    found = publications_of([folder for folder in FOLDERS if "studies" not in folder.parts], [page])
    told = {claim["id"]: claim for claim in judged["claims"]}
    for claim in (claim for results in found for claim in results.claims):
        assert claim["verdict"] == told[claim["id"]]["verdict"]
        assert claim["estimates"] == told[claim["id"]]["estimates"]


def test_only_what_runs_lead_to_is_written(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (docs / "paper.md").write_text(f"{BEGIN}{END}")
    results = tmp_path / "results"
    complete(TOY, results)
    written, pictures, left_out = pages(publications_of([results], [TOY]), docs)
    assert {path.name for path in written} == {"paper.md", "findings.md", "verdicts.md"}
    assert not pictures
    assert "e1.norms-flat was not judged" in left_out
