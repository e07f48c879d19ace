"""A sink for Weights & Biases: it hands over a step and flat numbers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kappascope.integrations.wandb import WandbSink

VALUES = {"condition_number/query": 12.0}


def test_a_reading_is_logged_with_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
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
