"""The record of a run as a trajectory of diagnoses."""

import math
from pathlib import Path

import pytest
import torch

from kappascope import Monitor, Refusal
from kappascope.clinic.diagnosis import document, trajectory_steps
from kappascope.clinic.recorded import recorded_diagnoses
from kappascope.monitor.record import Recorder
from kappascope.system.files import strict
from monitored_runs import write_example
from monitored_training import texts, train, transformer


def test_every_reading_is_a_step_of_the_trajectory(tmp_path: Path) -> None:
    found = recorded_diagnoses(write_example(tmp_path))
    steps = trajectory_steps(found)
    assert len(steps) == 11 and steps[-1].matrices == 6
    assert steps[0].median == pytest.approx(10.5) and steps[-1].largest == pytest.approx(31.0)
    assert steps[1].log_change == pytest.approx(math.log(12.5 / 10.5), rel=0.02)


def test_many_readings_are_thinned_to_those_a_table_can_show(tmp_path: Path) -> None:
    found = recorded_diagnoses(write_example(tmp_path, steps=2000), most=5)
    assert [one.source.rpartition(" ")[2] for one in found] == ["0", "500", "1000", "1500", "2000"]


def test_the_numbers_are_those_of_the_weights(tmp_path: Path) -> None:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Monitor(tmp_path, every=2, strict=True).attach(model, optimizer):
        train(model, optimizer, texts(4))
    last = recorded_diagnoses(tmp_path)[-1]
    rows = {row.name: row for row in last.matrices}
    values = torch.linalg.svdvals(model[1].fc1.weight.detach().double())
    assert rows["1.fc1.weight"].condition_number == pytest.approx(
        float(values[0] / values[-1]), rel=1e-8
    )
    assert rows["1.fc1.weight"].kind == "up" and last.findings is not None
    strict(document([last]))  # raises where a number is not finite


def test_a_matrix_that_is_not_finite_is_a_finding(tmp_path: Path) -> None:
    write_example(tmp_path, steps=40)
    recorder = Recorder(tmp_path)
    rows = {"h.0.mlp.fc1.weight": {"non_finite": 3.0}}
    recorder.write({"kind": "reading", "step": 60, "rows": rows})
    last = recorded_diagnoses(tmp_path)[-1]
    assert any("h.0.mlp.fc1.weight" in one.subject for one in last.findings) or any(
        row.failure for row in last.matrices
    )


def test_a_record_without_a_reading_is_refused(tmp_path: Path) -> None:
    Recorder(tmp_path).write({"kind": "end", "step": 0})
    with pytest.raises(Refusal, match="has no reading"):
        recorded_diagnoses(tmp_path)
