"""Training on the digits: resumed to the last bit, with settings and seeds apart."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kappascope.lab.experiment import Setting
from kappascope.lab.resume import ResumePoint
from kappascope.lab.tasks import generator
from kappascope.studies.digits import study
from kappascope.studies.digits.model import (
    images,
    network,
)

SMALL: Setting = {
    "draw": 0, "optimizer": "momentum", "width": 32, "depth": 2, "decay": 0.0001, "scale": 1.0,
    "batch": 32, "rate": 0.06,
}  # fmt: skip


def lasting(rows: Any) -> list[Any]:
    return [row for row in rows if row["component"] != "seconds"]


class TestTraining:
    def test_weights_of_blank_pixels_only_decay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept: list[list[torch.Tensor]] = []
        monkeypatch.setattr(study, "MAX_STEPS", 41)
        monkeypatch.setattr(study, "component_rows", lambda matrices: kept.append(matrices) or ())
        list(study.trials(0, ResumePoint(), **{**SMALL, "decay": 0.001}))
        start = network(32, 2, 1.0, generator("digits weights", 0, 0))[0].weight
        blank = images()[0].amax(0) == 0
        expected = start[:, blank] * (1 - 0.001) ** 41
        torch.testing.assert_close(kept[0][0][:, blank], expected.detach())

    @pytest.mark.parametrize(
        ("optimizer", "rate"), [("momentum", 0.03), ("adam", 0.003), ("muon", 0.01)]
    )
    def test_goes_on_to_the_last_bit_where_it_was_killed(
        self, optimizer: str, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(study, "MAX_STEPS", 60)
        setting = {**SMALL, "optimizer": optimizer, "rate": rate}
        whole = lasting(study.trials(1, ResumePoint(), **setting))
        resume_point = ResumePoint(tmp_path / "one", every=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(study, "cross_entropy", failing_after(35, study.cross_entropy))
            with pytest.raises(KeyboardInterrupt):
                list(study.trials(1, resume_point, **setting))
        assert resume_point.path and resume_point.path.exists()
        assert lasting(study.trials(1, resume_point, **setting)) == whole

    def test_settings_and_seeds_start_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(study, "MAX_STEPS", 1)
        starts = {
            next(
                row["value"]
                for row in study.trials(seed, ResumePoint(), **{**SMALL, "draw": draw})
                if row.get("matrix") == "start"
            )
            for seed in (0, 1) for draw in (0, 1)
        }  # fmt: skip
        assert len(starts) == 4


def failing_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    left = iter(range(calls))

    def one(*args: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*args)

    return one
