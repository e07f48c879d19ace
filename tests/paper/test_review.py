"""Every item of the review is listed, and answered by claims that name it, or said not to be."""

import re

import pytest

from kappascope import theory
from kappascope.lab.claims import Claim
from kappascope.lab.experiment import discover, studies
from kappascope.paper import review
from kappascope.paper.review import ITEMS, Item, answer, inserted, table

EVERY = [*discover().values(), *studies().values()]
RECORD = {
    "id": "e12.plateau", "experiment": "e12", "sentence": "It |stays|.", "source": "R Q2",
    "verdict": "holds", "measured": 0.98, "interval": (0.7, 1.2), "n": 128,
    "explanation": "So it is.",
}  # fmt: skip


def test_every_weakness_and_question_is_there() -> None:
    found = {re.sub(r"\(.*", "", item.id) for item in ITEMS}
    assert found >= {f"W{k}" for k in range(1, 12)} | {f"Q{k}" for k in range(1, 8)}
    assert sum(item.id.startswith(("Section", "Code")) for item in ITEMS) == 11
    assert len({item.id for item in ITEMS}) == len(ITEMS)


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: item.id)
def test_every_item_is_answered_or_says_that_it_is_not(item: Item) -> None:
    assert item.claims or item.otherwise or item.lacking
    assert item.asks.endswith("?")


def test_every_formula_that_answers_exists() -> None:
    named = {name for item in ITEMS for name in re.findall(r"`theory\.(\w+)`", item.otherwise)}
    assert named and named <= set(theory.__all__)


@pytest.mark.parametrize("claim", review.all_claims(), ids=lambda claim: claim.id)
def test_every_claim_answers_items_that_exist(claim: Claim) -> None:
    assert set(claim.answers) <= {item.id for item in ITEMS}


def test_every_claim_that_names_the_review_is_an_answer() -> None:
    answers = {name for item in ITEMS for name in item.claims}
    beyond = {claim.id for one in EVERY if one.beyond for claim in one.claims}
    assert beyond - answers <= {"e16.delay", "e16.never", "e16.norms", "e15.start", "e18.rows",
                                "e18.values", "e18.matrix"}  # fmt: skip


def test_the_table_has_a_line_for_every_item_with_verdict_number_and_n() -> None:
    lines = table([RECORD]).splitlines()
    assert len(lines) == len(ITEMS) + 2
    assert all(re.sub(r"\\\|", "", line).count("|") == 5 for line in lines)
    [line] = [line for line in lines if line.startswith("| Q2 ")]
    assert "`e12.plateau`" in line and "**holds**: 0.980 [0.700, 1.20], n = 128." in line
    assert "`e12.floor`: not in this run." in line
    [line] = [line for line in lines if line.startswith("| Section 4, layer types ")]
    assert "| not |" in line and "**Missing**" in line


def test_a_claim_that_was_not_measured_shows_no_number() -> None:
    found = answer({**RECORD, "verdict": "undecided", "measured": None, "interval": None, "n": 0})
    assert found.endswith("**undecided**: not measured.")


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a page with"):
        inserted("nothing", "new")
    page = f"a\n{review.BEGIN}\nold\n{review.END}\nb"
    assert inserted(inserted(page, "new"), "new") == page.replace("old", "new")
