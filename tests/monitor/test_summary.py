"""Curves for loggers: tens of them, whatever the size of the model."""

from kappascope.monitor.summary import BY_KIND, aggregated, histograms

KINDS = ("query", "key", "value", "output", "up", "down", "gate")


def test_a_large_model_has_as_many_keys_as_a_small_one_can_afford() -> None:
    facts = {f"{kind}.{i}": {"kind": kind, "depth": i} for i in range(96) for kind in KINDS}
    latest = {name: dict.fromkeys(BY_KIND, 1.0) for name in facts}
    found = aggregated(latest, facts)
    assert len(found) <= 200 and set(found.values()) == {1.0}
    assert "condition_number/gate" in found and "condition_number/layer_00" in found
    assert len(aggregated(latest, facts, most=10)) == 10


def test_what_is_not_finite_or_not_there_has_no_key() -> None:
    facts = {"a": {"kind": "up", "depth": 0}}
    assert aggregated({"a": {"condition_number": float("inf")}}, facts) == {}
    assert histograms({"a": {"sigma_max": 1.0}}, facts) == {}


def test_the_ends_of_a_vector_have_keys_of_their_own() -> None:
    latest = {"a": {"signal_relative": [(0.0, 1.0), (0.5, 7.0), (1.0, 3.0)]}}
    found = aggregated(latest, {"a": {"kind": "up", "depth": None}})
    assert found == {"signal_relative_first/up": 1.0, "signal_relative_last/up": 3.0}
