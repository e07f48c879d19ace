"""Tensors in codes: what decodes them is asked once, and half steps follow from the same codes."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kappascope.checkpoints.codes import Code, CodedLocation
from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.locations import CheckpointFile, StorageLocation, TensorLocation
from kappascope.matrix.precision import Rounding
from kappascope.matrix.spectra import vitals


@dataclass(frozen=True)
class Eighths(Code):
    """Whole numbers that stand for eighths."""

    @property
    def name(self) -> str:
        return "eighths"

    def decode(self, *stored: Tensor) -> Tensor:
        return stored[0].float() / 8

    def half_steps(self, *stored: Tensor) -> Tensor:
        return torch.full(stored[0].shape, 1 / 16)


@pytest.fixture
def codes(tmp_path: Path) -> TensorLocation:
    path = tmp_path / "codes"
    path.write_bytes(bytes(range(6)))
    return TensorLocation(
        StorageLocation(CheckpointFile.at(path), 0, 6), torch.uint8, (2, 3), (3, 1)
    )


def test_numbers_are_decoded_when_read_and_take_their_stated_shape(codes: TensorLocation) -> None:
    location = CodedLocation((codes,), Eighths(), (3, 2))
    assert torch.equal(location.read(), torch.arange(6).reshape(3, 2) / 8)
    assert torch.equal(location.half_steps(), torch.full((3, 2), 1 / 16))
    assert location.bytes == 24


def test_codes_of_another_count_than_stated_are_refused(codes: TensorLocation) -> None:
    with pytest.raises(Malformed, match="eighths codes of shape"):
        CodedLocation((codes,), Eighths(), (2, 2)).read()


def test_the_interval_of_kappa_holds_what_was_rounded() -> None:
    """Weights rounded to a coarse code: the interval from its half steps covers their kappa."""
    random = torch.Generator().manual_seed(0)
    covered = 0
    for _ in range(40):
        weight = torch.randn(24, 16, generator=random, dtype=torch.float64)
        step = 0.02
        stored = (weight / step).round() * step
        known = vitals(stored, rounding=Rounding("steps", torch.full((24, 16), step / 2)))
        assert known.storage == "steps"
        low, high = known.condition_number_low, known.condition_number_high
        kappa = float(torch.linalg.cond(weight))
        assert low is not None and high is not None
        covered += low <= kappa <= high
    assert covered == 40


def test_half_steps_of_zero_leave_what_computing_leaves() -> None:
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    known = vitals(weight, rounding=Rounding("exact", torch.zeros(8, 8)))
    assert known.resolved
    assert known.condition_number_low == pytest.approx(known.condition_number, rel=1e-9)
