"""A loop that was stopped goes on where it was, or from the start: never from a half."""

import io
from pathlib import Path

import pytest
import torch

from kappascope.lab.resume import ResumePoint
from kappascope.system.files import write_sealed
from tiny_experiments import lessons

SETTING = {"stage": "tune", "rate": 0.1, "pause": 0.0}


def rows(resume_point: ResumePoint) -> list[object]:
    return [row for row in lessons(3, resume_point, **SETTING) if row.get("component") == "loss"]


def stopped(path: Path, after: int) -> None:
    """Train until a state of that many steps is saved, and no further."""

    class Short(ResumePoint):
        def steps(self, *given, **parts):
            for step in super().steps(*given, **parts):
                if step == after:
                    raise InterruptedError
                yield step

    with pytest.raises(InterruptedError):
        rows(Short(path))


@pytest.mark.parametrize("after", [1, 7, 19])
def test_the_end_is_the_same_bits_wherever_it_was_stopped(after: int, tmp_path: Path) -> None:
    stopped(tmp_path / "b", after)
    assert len(ResumePoint(tmp_path / "b")._saved()["log"]) == after
    assert rows(ResumePoint(tmp_path / "b")) == rows(ResumePoint())


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b[:99] + b"\0" * 99])
def test_a_damaged_resume_point_counts_as_none(damage, tmp_path: Path) -> None:
    stopped(tmp_path / "b", 5)
    (tmp_path / "b").write_bytes(damage((tmp_path / "b").read_bytes()))
    assert ResumePoint(tmp_path / "b")._saved() is None
    assert rows(ResumePoint(tmp_path / "b")) == rows(ResumePoint())


def test_a_resume_point_of_other_parts_is_not_taken_up(tmp_path: Path) -> None:
    one, other = torch.Generator(), torch.Generator()
    marked = ResumePoint(tmp_path / "b", every=0.0)
    for step in marked.steps(5, [], one=one):
        if step == 3:
            break
    assert next(ResumePoint(tmp_path / "b").steps(5, [], one=one)) == 3
    assert next(ResumePoint(tmp_path / "b").steps(5, [], other=other)) == 0


@pytest.mark.parametrize(
    "state", [None, [], {}, {"parts": 1}, {"parts": {"a": {}}, "log": [], "step": 1}]
)
def test_a_sealed_file_that_is_no_state_begins_anew(state: object, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    for body in (buffer.getvalue(), b"no archive"):
        write_sealed(tmp_path / "trial", body)
        assert list(ResumePoint(tmp_path / "trial").steps(2, [], a=torch.Generator())) == [0, 1]


def test_parts_are_as_before_if_one_of_them_cannot_be_loaded(tmp_path: Path) -> None:
    first, second, log = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), [1]
    other = torch.nn.Linear(2, 2).state_dict()
    state = {"parts": {"a": other, "b": {}}, "log": [], "step": 1}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_sealed(tmp_path / "trial", buffer.getvalue())
    before = first.weight.clone()
    assert list(ResumePoint(tmp_path / "trial").steps(2, log, a=first, b=second)) == [0, 1]
    assert torch.equal(first.weight, before)
