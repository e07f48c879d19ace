"""A sink for MLflow: it hands over a step and flat numbers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kappascope.integrations.mlflow import MLflowSink

VALUES = {"condition_number/query": 12.0}


def test_a_reading_is_logged_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    library = SimpleNamespace(log_metrics=lambda *given, **more: logged.append((given, more)))
    monkeypatch.setitem(sys.modules, "mlflow", library)
    MLflowSink("abc")(50, VALUES)
    assert logged == [((VALUES,), {"step": 50, "run_id": "abc"})]
