"""A sink for trackio: it hands over a step and flat numbers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kappascope.integrations.trackio import TrackioSink

VALUES = {"condition_number/query": 12.0}


def test_a_reading_is_logged_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(log=logged.append))
    TrackioSink()(50, VALUES)
    assert logged == [VALUES | {"kappascope_step": 50}]
