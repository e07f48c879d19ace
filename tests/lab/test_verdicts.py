"""The sentences that say what came out."""

from typing import Any

from kappascope.lab.verdicts import (
    conclusion,
    corrected,
    printed_mean,
    survives_all,
    verdict_counts,
    with_printed_means,
)


def claim(place: int, verdict: str, source: str = "P 4.1") -> dict[str, Any]:
    sentence = f"claim number {place}"
    return {"id": f"e1.claim-{place}", "verdict": verdict, "sentence": sentence, "source": source}


def test_the_abstract_speaks_first_for_its_verdict() -> None:
    many = [
        claim(1, "fails"),
        claim(2, "fails", source="P abstract, 4.1"),
        claim(3, "holds"),
    ]
    second = conclusion(many, [])[1]
    assert "e1.claim-2" in second
    assert "e1.claim-3" in second
    assert "e1.claim-1" not in second


def test_nothing_judged_is_said_so() -> None:
    assert verdict_counts([]) == "In this run no claim was judged."


def test_figures_that_were_not_measured_are_no_figures_that_differ() -> None:
    figures = [
        {"category": "matched"},
        {"category": "not matched", "agreement": "not measured: no rows"},
    ]
    last = conclusion([], figures)[-1]
    assert last.endswith("1 matched; 1 was not measured here.")


def judged(p: float | None, alone: str = "holds") -> dict[str, Any]:
    return {"id": "e1.x", "verdict": alone, "alone": alone, "p": p, "explanation": "So."}


def test_a_page_decides_by_itself_and_the_whole_is_shown() -> None:
    pages = [[judged(0.02), judged(0.9, "undecided")], [judged(0.02)]]
    claims = corrected(pages)
    assert [claim["verdict"] for claim in claims] == ["holds", "undecided", "holds"]
    assert [claim["p_page"] for claim in claims] == [0.04, 0.9, 0.02]
    assert [round(claim["p_all"], 2) for claim in claims] == [0.06, 0.9, 0.06]
    assert [survives_all(claim) for claim in claims] == [False, False, False]


def test_what_does_not_survive_says_so() -> None:
    [lost, _] = corrected([[judged(0.03, "fails"), judged(0.04)]])
    assert lost["verdict"] == "undecided"
    assert lost["alone"] == "fails"
    assert "does not survive Holm's correction" in lost["explanation"]


def test_what_was_not_measured_or_is_ill_posed_is_left_alone() -> None:
    claims = corrected([[judged(None, "undecided"), judged(0.6, "ill-posed")]])
    assert [claim["verdict"] for claim in claims] == ["undecided", "ill-posed"]


def test_a_quoted_mean_tells_what_became_of_its_figures() -> None:
    figures = [
        {"id": "e1/a", "printed": "1.5", "measured": 1.5, "matches": True},
        {"id": "e1/b", "printed": "2.5", "measured": 9.0, "matches": False},
    ]
    quoting = {"printed_mean": {"why": "So.", "figures": ["e1/a", "e1/b"]}}
    [told] = with_printed_means([quoting], figures)
    assert told["printed_mean"]["exists"] is False
    assert told["printed_mean"]["matches"] is False
    assert printed_mean(told).endswith("as numbers, these differ here: 2.5 as 9.00.")
    assert printed_mean({"printed_mean": None}) == ""
