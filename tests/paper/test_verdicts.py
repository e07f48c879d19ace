"""Every verdict has a line, failures first; mended rules and unmatched figures are listed."""

from typing import Any

from kappascope.paper.verdicts import verdicts_page


def claim(name: str, verdict: str, **more: Any) -> dict[str, Any]:
    return {
        "id": name, "experiment": name.partition(".")[0], "sentence": f"The sentence of {name}.",
        "source": "P 4.1", "verdict": verdict, "alone": verdict, "measured": 0.5,
        "interval": (0.25, 0.75), "n": 9, "explanation": "So it is.", "p": 1e-9, "p_page": 1e-9,
        "p_all": 1e-9, "printed_mean": None, "mended": None, **more,
    }  # fmt: skip


def figure(name: str, category: str) -> dict[str, Any]:
    return {"id": name, "what": "a mean", "printed": "1.5", "measured": 1.5, "category": category}


def test_failures_come_first_and_controls_are_our_own() -> None:
    page = verdicts_page(
        [claim("e1.a", "holds"), claim("e1.b", "fails"), claim("e2.c", "holds", source="control")],
        [],
    )
    paper, own = page.split("## Our own")
    assert paper.index("`e1.b`") < paper.index("`e1.a`")
    assert "`e2.c`" in own and "| `e2.c` |" not in paper
    assert "Of the paper's 2 claims, 1 holds, 1 fails" in page


def test_mended_rules_are_listed_with_the_verdict_before() -> None:
    mended = {"before": "holds", "why": "The test was not the sentence."}
    page = verdicts_page([claim("e1.a", "fails", mended=mended)], [])
    assert "| `e1.a` | holds | fails | The test was not the sentence. |" in page


def test_a_verdict_that_does_not_survive_is_named() -> None:
    lost = claim("e1.a", "undecided", alone="fails", p_page=0.2)
    shaky = claim("e1.b", "holds", p_all=0.06)
    page = verdicts_page([lost, shaky], [])
    assert "over their page: `e1.a`." in page
    assert "over all 2 claims: `e1.b`." in page


def test_figures_that_the_protocol_does_not_give_are_listed() -> None:
    page = verdicts_page([], [figure("e1/x", "matched"), figure("e6/y", "fitted")])
    assert "`e6/y`" in page and "`e1/x`" not in page
    assert "1 matched, 1 fitted" in page
