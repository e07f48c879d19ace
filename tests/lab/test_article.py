"""An article says what rows say, or leaves it out and reports why."""

from typing import Any

import pytest

from kappascope.lab.article import fill_article


def claim(name: str = "e4.x", verdict: str = "holds", **estimates: Any) -> dict[str, Any]:
    return {"id": name, "verdict": verdict, "explanation": "So.", "estimates": estimates}


def estimate(value: float | None, low: float | None = None, high: float | None = None) -> Any:
    return {"value": value, "low": low, "high": high, "n": 1234}


@pytest.mark.parametrize(
    ("mark", "written"),
    [
        ("{{e4.x rows|.0f}}", "67"),
        ("{{e4.x rows|.1f|interval}}", "67.3 [60.0, ∞]"),
        ("{{e4.x rows|n}}", "1,234"),
        ("{{e4.x small|.1e}}", "6.6 × 10^−5"),
        ("{{e4.x family/at d = 64|+.2f}}", "−0.50"),
        ("{{counts}}", "all of them"),
        ("[[e4.x holds]]", "(`e4.x`)"),
        ("[[e4.x holds, e4.y ill-posed]]", "(`e4.x`, `e4.y`)"),
        ("![what is seen](lottery)", "![what is seen](lottery)"),
    ],
)
def test_marks_become_text(mark: str, written: str) -> None:
    claims = [
        claim(
            rows=estimate(67.3, 60.0),
            small=estimate(6.6e-5),
            family={"at d = 64": estimate(-0.5)},
        ),
        claim("e4.y", "ill-posed"),
    ]
    found = fill_article(mark, claims, {"counts": "all of them"}, ["lottery"])
    assert found.text == written
    assert not found.left_out


@pytest.mark.parametrize(
    ("mark", "reason"),
    [
        ("[[e4.x fails]]", "e4.x holds, and the article says that it fails"),
        ("[[e4.z holds]]", "e4.z was not judged"),
        ("{{e4.x columns|.0f}}", "e4.x does not measure columns"),
        ("{{e4.x empty|.0f}}", "empty of e4.x has no value"),
        ("{{whatever}}", "nothing is known of whatever"),
        ("![seen](lost)", "the figure lost was not drawn"),
        ("[[e4.away holds]]", "e4.away was not measured"),
    ],
)
def test_a_paragraph_that_rows_do_not_bear_out_is_left_out(mark: str, reason: str) -> None:
    away = {**claim("e4.away"), "explanation": "Not measured: no rows"}
    claims = [claim(rows=estimate(1.0), empty=estimate(None)), away]
    found = fill_article(f"# Title\n\nBefore {mark} after.\n\nThe end.", claims)
    assert found.text == "# Title\n\nThe end."
    assert found.left_out == (reason,)
