"""Remedies: every correction that is advised exists, and every snippet runs on its layer alone."""

import ast
import fnmatch

import pytest
import torch
from torch import nn

from fresh_models import examined
from kappascope import corrections
from kappascope.clinic.examination import Examination
from kappascope.clinic.examine import examine
from kappascope.clinic.judgement import judgement
from kappascope.clinic.prescriptions import LEFT_ALONE, MEASURED, Flaw, prescribe
from kappascope.clinic.symptoms import Measurements


class Small(nn.Module):
    """A layer of every sort that a correction may meet."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(8, 2)
        self.convs = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
        self.rnn = nn.LSTM(8, 4)
        self.mlp = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
        self.k_proj, self.q_proj = nn.Linear(8, 8), nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 8))
        self.odd = nn.ModuleDict({"a[0]*": nn.Linear(8, 8)})
        self.embedding = nn.Embedding(20, 8)


def _is_joined(row: Examination) -> bool:
    return row.part_of is not None and not row.name.startswith("experts[")


def test_nothing_is_prescribed_that_would_act_on_more_than_the_part_that_is_ill() -> None:
    part = Examination("attn.in_proj_weight[q]", (8, 8), "float32", "ok", part_of="attn.in_proj")
    told = prescribe(Flaw.RANK, part)
    assert (told.correction, told.snippet) == (None, "")
    assert "attn.in_proj as a whole: split it" in told.advice


@pytest.mark.parametrize("flaw", Flaw)
def test_every_snippet_runs_and_treats_its_layer_alone(flaw: Flaw) -> None:
    torch.manual_seed(0)
    model = Small()
    for row in examined(model):
        told = prescribe(flaw, row)
        if row.kind in LEFT_ALONE or _is_joined(row) or flaw is Flaw.SHAPE:
            assert (told.correction, told.snippet) == (None, "")
            continue
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        scope = {"model": model, "optimizer": optimizer}
        attach, _, close = told.snippet.partition("# train")
        exec(attach, scope)
        taken = set(dict(model.named_parameters())) - set(before)
        weights = [name for name in before if name not in scope["handle"].left_out]
        assert (row.part_of or row.name) in weights
        assert sum(value.ndim > 1 for name, value in before.items() if name in weights) == 1
        exec(close.partition("\n")[2], scope)
        assert list(model.state_dict()) == list(before), taken


def test_every_correction_advised_exists_and_says_what_was_measured() -> None:
    assert all(
        isinstance(getattr(corrections, name)(), corrections.Correction) for name in MEASURED
    )
    kinds = ("up", "recurrent")
    rows = [Examination("w", (8, 8), "float32", "ok", kind=kind) for kind in kinds]
    advised = {prescribe(flaw, row).correction for flaw in Flaw for row in rows}
    assert advised == {None, *MEASURED}
    assert {prescribe(Flaw.SHAPE, row).correction for row in rows} == {None}  # see docs/findings.md


def test_a_snippet_from_a_finding_trains() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
    model[0].weight.data = torch.outer(torch.randn(64), torch.randn(32))
    findings = judgement(Measurements(tuple(examined(model)))).findings
    (found,) = [finding for finding in findings if finding.rule == "rank-deficient"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attach, _, close = found.snippet.partition("# train")
    scope = {"model": model, "optimizer": optimizer}
    exec(attach, scope)
    model(torch.randn(16, 32)).square().mean().backward()
    optimizer.step()
    exec(close.partition("\n")[2], scope)
    assert examine("w", model[0].weight.detach()).condition_number < 20


@pytest.mark.parametrize("name", ["w[a]", "blocks[0].weight", "w[a][q]"])
def test_code_to_copy_names_the_weight_brackets_and_all(name: str) -> None:
    whole = Examination(name, (8, 8), "float32", "ok")
    part = Examination(f"{name}[3]", (4, 8), "float32", "ok", part_of=name)
    for row in (whole, part):
        call = prescribe(Flaw.SCALE, row).snippet.splitlines()[1]
        pattern = ast.parse(call.partition("where=")[2].rstrip(")"), mode="eval").body
        assert fnmatch.fnmatchcase(name, ast.literal_eval(pattern))
