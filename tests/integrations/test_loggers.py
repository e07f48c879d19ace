"""Sinks for loggers that the tests do not install: each hands over a step and flat numbers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kappascope.integrations.mlflow import MLflowSink
from kappascope.integrations.trackio import TrackioSink
from kappascope.integrations.wandb import WandbSink

VALUES = {"condition_number/query": 12.0}


def test_wandb(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    run = SimpleNamespace(log=logged.append)
    library = SimpleNamespace(run=run, Histogram=tuple)
    monkeypatch.setitem(sys.modules, "wandb", library)
    sink = WandbSink()
    sink(50, VALUES)
    sink.histograms(50, {"singular_values/query": [2.0, 1.0]})
    assert logged == [
        VALUES | {"kappascope_step": 50},
        {"singular_values/query": (2.0, 1.0), "kappascope_step": 50},
    ]
    library.run = None
    with pytest.raises(ValueError, match=r"wandb\.init"):
        WandbSink()


def test_trackio(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(log=logged.append))
    TrackioSink()(50, VALUES)
    assert logged == [VALUES | {"kappascope_step": 50}]


def test_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[Any] = []
    library = SimpleNamespace(log_metrics=lambda *given, **more: logged.append((given, more)))
    monkeypatch.setitem(sys.modules, "mlflow", library)
    MLflowSink("abc")(50, VALUES)
    assert logged == [((VALUES,), {"step": 50, "run_id": "abc"})]
