"""A lesson is told if, and only if, the verdicts it stands on are there."""

import re
from pathlib import Path

import pytest

from kappascope.lab.claims import Claim
from kappascope.lab.verdicts import OUTCOMES
from kappascope.paper.lessons import DO, NETWORKS, WHY, evidence, page
from kappascope.paper.review import all_claims

LESSONS = {**WHY, **DO, **NETWORKS}


def record(name: str, verdict: str) -> dict[str, object]:
    return {
        "id": name, "experiment": name.partition(".")[0], "sentence": f"What |{name}| says.",
        "source": "R", "verdict": verdict, "measured": 0.25, "interval": (0.2, 0.3), "n": 64,
        "explanation": f"As |{name}| tells.",
    }  # fmt: skip


@pytest.mark.parametrize("lesson", LESSONS)
def test_every_lesson_stands_on_verdicts(lesson: str) -> None:
    assert evidence(lesson) and set(evidence(lesson).values()) <= set(OUTCOMES)


@pytest.mark.parametrize("claim", all_claims(), ids=lambda claim: claim.id)
def test_every_claim_teaches_lessons_that_exist(claim: Claim) -> None:
    assert set(claim.teaches) <= set(LESSONS)


def test_no_two_lessons_have_one_name() -> None:
    assert len(LESSONS) == len(WHY) + len(DO) + len(NETWORKS)


@pytest.mark.parametrize("lesson", LESSONS)
def test_a_lesson_is_told_with_its_evidence_or_listed_as_not_borne_out(lesson: str) -> None:
    text = LESSONS[lesson]
    records = [record(name, verdict) for name, verdict in evidence(lesson).items()]
    borne_out = page(records, {"trials": 1234})
    assert f"**{text}**" in borne_out and "1,234 trials" in borne_out
    assert all(f"As |{name}| tells." in borne_out for name in evidence(lesson))
    other = "fails" if records[0]["verdict"] == "undecided" else "undecided"
    against = page([{**records[0], "verdict": other}, *records[1:]], {})
    assert f"**{text}**" not in against and f"- {text} (" in against


def test_a_page_of_nothing_says_so() -> None:
    assert page([], {}).count("None.") == 5


def test_claims_stand_under_their_verdict_and_beyond_apart() -> None:
    text = page([record("e1.norms-flat", "fails"), record("e12.floor", "holds")], {})
    before, after = text.split("## Sentences that do not\n")
    assert "| `e1.norms-flat` |" not in before and "| `e1.norms-flat` |" in after
    assert "| `e12.floor` |" in text.split("## Beyond the paper")[1]
    assert "\\|e12.floor\\|" in text


def test_the_committed_findings_list_claims_in_the_order_of_the_pages() -> None:
    text = (Path(__file__).parents[2] / "docs" / "findings.md").read_text(encoding="utf-8")
    order = [claim.id for claim in all_claims()]
    listed = [re.findall(r"^\| `([^`]+)` \|", part, re.MULTILINE) for part in text.split("\n## ")]
    for names in listed:
        assert names == sorted(names, key=order.index)
    assert {name for names in listed for name in names} <= set(order)
