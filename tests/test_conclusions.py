"""A lesson is told if, and only if, the verdicts it stands on are there."""

import pytest

from kappascope.conclusions import DO, NETWORKS, WHY, Lesson, page
from kappascope.lab import discover, studies
from kappascope.prose import OUTCOMES

CLAIMS = {
    claim.id: claim for one in (*discover().values(), *studies().values()) for claim in one.claims
}
LESSONS = (*WHY, *DO, *NETWORKS)


def record(name: str, verdict: str) -> dict[str, object]:
    return {
        "id": name, "experiment": name.partition(".")[0], "sentence": f"What |{name}| says.",
        "source": "R", "verdict": verdict, "measured": 0.25, "interval": (0.2, 0.3), "n": 64,
        "explanation": f"As |{name}| tells.",
    }  # fmt: skip


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.text[:40])
def test_every_lesson_stands_on_claims_that_exist(lesson: Lesson) -> None:
    assert lesson.because and set(lesson.because) <= set(CLAIMS)
    assert set(lesson.because.values()) <= set(OUTCOMES)


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.text[:40])
def test_a_lesson_is_told_with_its_evidence_or_listed_as_not_borne_out(lesson: Lesson) -> None:
    found = [record(name, verdict) for name, verdict in lesson.because.items()]
    borne_out = page(found, {"trials": 1234})
    assert f"**{lesson.text}**" in borne_out and "1,234 trials" in borne_out
    assert all(f"As |{name}| tells." in borne_out for name in lesson.because)
    other = "fails" if found[0]["verdict"] == "undecided" else "undecided"
    against = page([{**found[0], "verdict": other}, *found[1:]], {})
    assert f"**{lesson.text}**" not in against and f"- {lesson.text} (" in against


def test_a_page_of_nothing_says_so() -> None:
    assert page([], {}).count("None.") == 5


def test_claims_stand_under_their_verdict_and_beyond_apart() -> None:
    text = page([record("e1.norms-flat", "fails"), record("e12.floor", "holds")], {})
    before, after = text.split("## Sentences that do not\n")
    assert "| `e1.norms-flat` |" not in before and "| `e1.norms-flat` |" in after
    assert "| `e12.floor` |" in text.split("## Beyond the paper")[1]
    assert "\\|e12.floor\\|" in text
