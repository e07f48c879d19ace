"""The one error that a caller is meant to catch."""

import pickle

from kappascope.refusal import Refusal


def test_a_refusal_keeps_its_parts() -> None:
    assert str(Refusal(2, "a", "b", "c")) == "a: b (c)"


def test_a_refusal_travels_between_processes() -> None:
    refusal = pickle.loads(pickle.dumps(Refusal(5, "disk", "full", "make room")))
    assert (refusal.code, str(refusal)) == (5, "disk: full (make room)")
