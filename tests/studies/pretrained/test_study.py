"""Changes of a small network are measured, resumed and counted."""

from itertools import islice

import pytest
import torch

from kappascope.lab import downloads
from kappascope.lab.resume import ResumePoint
from kappascope.studies.pretrained import study
from kappascope.studies.pretrained.changes import (
    Change,
    smallest,
)
from kappascope.studies.pretrained.study import LAYERS, STUDY, LlamaEvaluation, trials


def test_a_change_is_measured_as_loops_would(toy) -> None:
    reader = LlamaEvaluation(seed=0, tokens=8)
    change = Change("smallest", 0.1, LAYERS)
    with torch.no_grad():
        rows = list(reader.rows(change, "whole"))
        names = [n for n in reader.factors if "embed" not in n]
        altered = reader.llama.altered({n: change(reader.factors[n], 0) for n in names})
        p, q = (net(reader.texts["own"]).softmax(-1).double() for net in (reader.llama, altered))
    total = 0.0
    for text in range(2):
        for place in range(8):
            total += sum(
                float(a * (a / b).log())
                for a, b in zip(p[text, place], q[text, place], strict=True)
            )
    found = {(r.get("text"), r["component"]): r for r in rows}
    assert found["own", "divergence"]["value"] == pytest.approx(total / 16, rel=1e-3)
    was = found["own", "loss"]["target"]
    assert found["own", "rise"]["value"] == pytest.approx(total / 16 / was, rel=1e-3)
    assert found["own", "energy_spoken"]["value"] == 0.0
    taken = sum(float(smallest(reader.factors[n].s, 0.1).square().sum()) for n in names)
    whole = sum(float(reader.factors[n].s.square().sum()) for n in names)
    assert found[None, "energy"]["value"] == pytest.approx(taken / whole, rel=1e-4)


class KillError(Exception):
    """A kill in the middle."""


class Stopping(ResumePoint):
    """Is killed before its fifth step."""

    def steps(self, *args, **parts):
        yield from islice(super().steps(*args, **parts), 4)
        raise KillError


def test_a_killed_trial_goes_on_to_the_same_rows(toy, tmp_path) -> None:
    setting = {"model": "stories15m", "part": "kinds", "tokens": 6}
    with pytest.raises(KillError):
        list(trials(1, Stopping(tmp_path / "mark", every=0.0), **setting))
    resumed = list(trials(1, ResumePoint(tmp_path / "mark", every=0.0), **setting))
    whole = list(trials(1, ResumePoint(), **setting))
    assert (tmp_path / "mark").exists() and resumed == whole
    assert len({(r["scope"], r["change"]) for r in whole}) == 7 * 4


def test_what_the_forms_need_is_known() -> None:
    for form in (STUDY, STUDY.quickly()):
        assert set(form.downloads) <= set(downloads.DOWNLOADS)
        needed = {str(setting["model"]).split()[0] for setting in form.grid}
        assert needed <= set(form.downloads) and all(form.count(s, "own") for s in form.grid)
        assert all(study.seconds(setting) > 0 for setting in form.grid)
