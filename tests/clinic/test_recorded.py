"""A recorded run as a trajectory: its last step is what the final model would be diagnosed with."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from kappascope.clinic import recorded as page
from kappascope.clinic.diagnose import Selection, diagnose
from kappascope.clinic.diagnosis import document
from kappascope.clinic.html import diagnosis_page
from kappascope.clinic.recorded import recorded
from kappascope.monitor.monitor import Monitor
from kappascope.monitor.record import Recorder
from kappascope.refusal import Refusal
from monitored_runs import MATRICES, reading, write_example


def test_the_last_step_is_the_diagnosis_of_the_final_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 40), nn.ReLU(), nn.Linear(40, 12)).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with Monitor(tmp_path, every=2).attach(model, optimizer):
        for _ in range(4):
            model(torch.randn(8, 12).bfloat16()).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    steps = recorded(tmp_path, Selection())
    assert [one.source for one in steps] == [f"{tmp_path} step {k}" for k in (0, 2, 4)]
    for row, own in zip(steps[-1].matrices, diagnose(model).matrices, strict=True):
        assert (row.name, row.shape, row.dtype, row.kind) == (
            own.name,
            own.shape,
            own.dtype,
            own.kind,
        )
        assert (row.resolved, row.effective_rank) == (own.resolved, own.effective_rank)
        for name in (*page.NUMBERS, "null_condition_number", "null_z", "null_tail"):
            here, there = getattr(row, name), getattr(own, name)
            assert here == (there if there is None else pytest.approx(there, rel=1e-6)), name
            assert row.reasons.get(name) == own.reasons.get(name)
        assert row.row_norms and own.row_norms
        assert row.row_norms.max == pytest.approx(own.row_norms.max, rel=1e-6)
        assert row.reasons["entry_std"] == page.NOT_RECORDED and "sigma_max" not in row.reasons


def test_a_trajectory_becomes_a_document_and_a_page(tmp_path: Path) -> None:
    steps = recorded(write_example(tmp_path), Selection())
    told = document(steps)
    json.dumps(told, allow_nan=False)
    assert len(told["trajectory"]) == 11 and told["summary"]["analysed"] == len(MATRICES)
    last = steps[-1].matrices[0]
    assert last.errors and last.errors["log_condition_number"] == pytest.approx(math.log(30 / 28))
    assert "Trajectory" in diagnosis_page(steps)
    assert [one.name for one in steps[-1].skipped] == ["wte.weight"]


def test_a_long_run_is_cut_down_to_a_few_steps_with_both_ends(tmp_path: Path) -> None:
    steps = recorded(write_example(tmp_path, steps=400, every=5), Selection())
    numbers = [int(one.source.rpartition(" ")[2]) for one in steps]
    assert len(numbers) == page.MOST_STEPS and numbers[0] == 0 and numbers[-1] == 400
    assert numbers == sorted(set(numbers))


def test_names_are_chosen_as_in_a_checkpoint(tmp_path: Path) -> None:
    (*_, last) = recorded(write_example(tmp_path), Selection(include=("fc1",)))
    assert [row.name for row in last.matrices] == ["h.0.mlp.fc1.weight", "h.1.mlp.fc1.weight"]
    assert sum(str(one.reason) == "not chosen" for one in last.skipped) == 4


def test_what_is_not_finite_has_failed_and_is_critical(tmp_path: Path) -> None:
    write_example(tmp_path, steps=40, closed=False)
    recorder = Recorder(tmp_path)
    rows = {"h.0.mlp.fc1.weight": {"non_finite": 3.0}}
    recorder.write({"kind": "reading", "step": 60, "rows": rows})
    (*before, last) = recorded(tmp_path, Selection())
    assert not any(one.failed for one in before)
    assert [str(one.reason) for one in last.failed] == ["non-finite (3 of 1024)"]
    assert [(one.severity, one.rule) for one in last.findings[:1]] == [("critical", "non-finite")]


def test_a_singular_matrix_is_told_as_such(tmp_path: Path) -> None:
    rows = {"w": {**reading(0, 0), "condition_number": math.inf, "sigma_min": 0.0}}
    rows["w"] |= {"condition_number_low": 1e9, "condition_number_high": math.inf}
    recorder = Recorder(tmp_path)
    facts = {"w": {"kind": "up", "depth": 0, "shape": [16, 16], "dtype": "float32"}}
    recorder.write({"kind": "start", "step": 0, "matrices": facts})
    recorder.write({"kind": "reading", "step": 0, "rows": rows})
    (row,) = recorded(tmp_path, Selection())[0].matrices
    assert row.is_singular and row.condition_number is None and not row.resolved
    assert row.reasons["condition_number"].startswith("infinite")


def test_a_run_without_a_reading_is_refused(tmp_path: Path) -> None:
    Recorder(tmp_path).write({"kind": "start", "step": 0})
    with pytest.raises(Refusal, match="holds no reading yet"):
        recorded(tmp_path, Selection())


def test_what_the_monitor_told_is_not_lost(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.write({"kind": "start", "step": 0, "matrices": MATRICES})
    name = next(iter(MATRICES))
    for step in (0, 50, 100):
        recorder.write({"kind": "reading", "step": step, "rows": {name: reading(step, 0)}})
        if step:
            text = f"{name}: row 3 is zero"
            told = {"kind": "alert", "step": step, "name": "dead-row", "matrix": name, "text": text}
            recorder.write(told)
    notes = [" ".join(one.notes) for one in recorded(tmp_path, Selection())]
    assert "alert" not in notes[0]
    assert f"told 1 alert by then, first at step 50 dead-row in {name}" in notes[1]
    assert "told 2 alerts by then, first at step 50" in notes[2]
