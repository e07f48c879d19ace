"""A sink for Weights & Biases: it hands over a step and flat numbers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from kappascope.integrations.wandb import WandbSink

VALUES = {"condition_number/query": 12.0}


class Run:
    """The rows of a run: one that is logged at an explicit step ends those before it."""

    def __init__(self) -> None:
        self.step = 0
        self.rows: list[dict[str, Any]] = [{}]

    def log(
        self, values: dict[str, Any], step: int | None = None, commit: bool | None = None
    ) -> None:
        if step is not None and step < self.step:
            return  # as the library does, with a warning
        if step is not None and step > self.step:
            self.rows.append({})
            self.step = step
        self.rows[-1] |= values
        if commit or (commit is None and step is None):
            self.rows.append({})
            self.step += 1

    def all_of(self, name: str) -> list[Any]:
        return [row[name] for row in self.rows if name in row]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    run = Run()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run, Histogram=tuple))
    return run


def test_a_reading_is_logged_with_its_step(run: Run) -> None:
    sink = WandbSink()
    for step in (50, 100):
        sink(step, VALUES)
        sink.histograms(step, {"singular_values/query": [2.0, 1.0]})
    reading = VALUES | {"singular_values/query": (2.0, 1.0)}
    assert run.rows == [reading | {"kappascope_step": step} for step in (50, 100)]


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("is_explicit", [True, False])
def test_no_row_that_a_user_logs_is_dropped(run: Run, every: int, is_explicit: bool) -> None:
    sink = WandbSink()
    for step in range(1, 10):
        if step % every == 0:
            run.log({"rate": step}, step=step if is_explicit else None)
        sink(step, VALUES)
        sink.histograms(step, {"singular_values/query": [2.0, 1.0]})
        if step % every == 0:
            run.log({"loss": step}, step=step if is_explicit else None)
    assert run.all_of("loss") == run.all_of("rate") == list(range(every, 10, every))
    assert run.all_of("kappascope_step") == list(range(1, 10))
    assert len(run.all_of("singular_values/query")) == 9


def test_a_sink_wants_a_run_that_is_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=None))
    with pytest.raises(ValueError, match=r"wandb\.init"):
        WandbSink()
