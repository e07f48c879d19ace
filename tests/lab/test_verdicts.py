"""The sentences that say what came out."""

from typing import Any

from kappascope.lab.verdicts import conclusion, verdict_counts


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
    figures = [{"matches": True}, {"matches": False, "agreement": "not measured: no rows"}]
    last = conclusion([], figures)[-1]
    assert last.endswith("1 come out as printed; 1 was not measured here.")
