"""Trials of the teacher study, and the rates that tuning chooses."""

from pathlib import Path

import pytest
import torch

from kappascope.lab.resume import ResumePoint
from kappascope.lab.table import Table
from kappascope.studies.teacher.model import LEVELS, Network
from kappascope.studies.teacher.study import best_rates, trials

SETTING = {
    "stage": "compare", "start": "near", "depth": 2, "activation": "relu", "variant": "plain",
    "optimizer": "adam", "learning_rate": 0.03, "steps": 150,
}  # fmt: skip


def kept(seed: int, resume_point: ResumePoint, **changes: object) -> list[dict]:
    rows = trials(seed, resume_point, **{**SETTING, **changes})
    return [{k: v.tolist() if k == "values" else v for k, v in row.items()} for row in rows]


class KilledError(Exception):
    """What happens to a process."""


class TestTrials:
    @pytest.mark.parametrize("optimizer", ["sgd", "adam", "muon"])
    def test_a_killed_trial_ends_as_if_nothing_had_happened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
    ):
        whole = kept(0, ResumePoint(), optimizer=optimizer, steps=40)
        calls, forward = [], Network.forward

        def mortal(self: Network, x: torch.Tensor) -> torch.Tensor:
            calls.append(x)
            if len(calls) == 60:  # in the middle of a step, after some twenty
                raise KilledError
            return forward(self, x)

        resume_point = ResumePoint(tmp_path / "trial", every=0.0)
        with monkeypatch.context() as patch, pytest.raises(KilledError):
            patch.setattr(Network, "forward", mortal)
            kept(0, resume_point, optimizer=optimizer, steps=40)
        assert (tmp_path / "trial").exists()
        assert kept(0, ResumePoint(tmp_path / "trial"), optimizer=optimizer, steps=40) == whole

    def test_levels_are_looked_at_in_order_and_once(self):
        rows = kept(1, ResumePoint())
        steps = {r["level"]: r["value"] for r in rows if r.get("component") == "steps"}
        assert list(steps) == list(LEVELS[: len(steps)])
        assert sorted(steps.values()) == list(steps.values())
        losses = {r["level"]: r["value"] for r in rows if r.get("component") == "loss"}
        assert all(0.5 * level < losses[level] < level for level in steps)

    def test_gauge_dependent_components_have_no_rows(self):
        rows = [r for r in kept(0, ResumePoint()) if r.get("matrix") == "first"]
        assert not {"row_norms", "frobenius_norm"} & {r.get("component") for r in rows}

    def test_a_student_that_diverges_says_so(self):
        rows = kept(0, ResumePoint(), optimizer="sgd", learning_rate=1e6)
        [distance] = [r["value"] for r in rows if r.get("component") == "distance"]
        assert distance == float("inf")

    def test_optimizers_share_teacher_start_and_data(self, monkeypatch: pytest.MonkeyPatch):
        seen: dict[str, list[torch.Tensor]] = {"sgd": [], "adam": [], "muon": []}
        forward = Network.forward
        for name, inputs in seen.items():
            with monkeypatch.context() as patch:
                patch.setattr(
                    Network,
                    "forward",
                    lambda self, x, kept=inputs: (kept.append(x), forward(self, x))[1],
                )
                kept(0, ResumePoint(), optimizer=name, steps=3)
        for a, b in (("sgd", "adam"), ("adam", "muon")):
            assert all(torch.equal(x, y) for x, y in zip(seen[a], seen[b], strict=True))


def row(rate: float, component: str, level: float, value: float) -> dict:
    names = {**SETTING, "stage": "tune", "learning_rate": rate, "seed": 0, "matrix": "all"}
    return {**names, "component": component, "level": level, "value": value}


class TestTuning:
    def test_more_levels_beat_fewer_then_fewer_steps(self):
        rows = [
            row(0.1, "steps", 0.1, 10.0),
            row(0.3, "steps", 0.1, 50.0), row(0.3, "steps", 0.01, 90.0),
            row(1.0, "steps", 0.1, 50.0), row(1.0, "steps", 0.01, 80.0),
            *(row(rate, "loss", 0.0, 0.5) for rate in (0.1, 0.3, 1.0)),
        ]  # fmt: skip
        [setting] = best_rates(Table.of(rows))
        assert setting == {**SETTING, "learning_rate": 1.0}

    def test_where_nobody_arrives_the_lowest_loss_wins(self):
        rows = [row(rate, "loss", 0.0, loss) for rate, loss in ((0.1, 0.4), (0.3, 0.2))]
        [setting] = best_rates(Table.of([*rows, row(1.0, "loss", 0.0, float("nan"))]))
        assert setting["learning_rate"] == 0.3
