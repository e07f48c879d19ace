"""Code goes by the kind of a reason; its text is for people."""

import pickle

import pytest

from kappascope.model.skipped import Reason, ReasonKind, Skipped

HARMLESS = {"NOT_A_WEIGHT", "ACTS_BESIDE", "OPTIMIZER_STATE", "TIED", "NOT_CHOSEN", "HEADS_UNKNOWN"}


@pytest.mark.parametrize("kind", ReasonKind, ids=lambda kind: kind.name)
def test_only_a_kind_that_is_known_to_be_harmless_is_no_loss(kind: ReasonKind) -> None:
    assert Skipped("x", Reason(kind, "any words")).lost is (kind.name not in HARMLESS)


def test_a_reason_shows_its_text_and_survives_another_process() -> None:
    reason = Reason(ReasonKind.TIED, "tied to a")
    assert (str(reason), f"{reason}", repr(reason)) == ("tied to a", "tied to a", "'tied to a'")
    assert pickle.loads(pickle.dumps(reason)) == reason


def test_the_same_words_for_two_kinds_are_two_reasons() -> None:
    assert Reason(ReasonKind.TIED, "x") != Reason(ReasonKind.UNREADABLE, "x")
