"""All rules together: at every scale, and in the forms in which they are told."""

import json
import math

import jsonschema
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kappascope.clinic import blank_document, schema
from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.diagnosis import Diagnosis, document
from kappascope.clinic.surveys import Surveyed
from kappascope.clinic.training import Trainings
from kappascope.system.files import strict

RANDOM = torch.Generator().manual_seed(0)
DRAWN = {
    "layers.0.input_layernorm.weight": torch.rand(16, generator=RANDOM, dtype=torch.float64) + 0.5,
    **{
        f"layers.0.self_attn.{part}_proj.weight": torch.randn(
            16, 16, generator=RANDOM, dtype=torch.float64
        )
        for part in "qkvo"
    },
    "conv.weight": torch.randn(6, 4, 3, generator=RANDOM, dtype=torch.float64),
    "up.weight": torch.randn(40, 36, generator=RANDOM, dtype=torch.float64),
}


def scaled(power: int) -> dict[str, torch.Tensor]:
    """The matrices times a power of two, held within what float64 has."""
    half = power // 2
    most = torch.finfo(torch.float64).max
    made = {
        name: (tensor * 2.0**half * 2.0 ** (power - half)).clamp(-most, most)
        for name, tensor in DRAWN.items()
    }
    made["up.weight"][3] = 0  # a dead row
    return made


@settings(max_examples=12, deadline=None)
@given(st.one_of(st.integers(-1074, 1023), st.sampled_from([-1074, -1073, 1022, 1023, 664])))
def test_every_number_is_right_or_absent_with_a_reason_at_every_scale(power: int) -> None:
    found = diagnose(scaled(power))
    assert not [item for item in found.failed if "Error" in str(item.reason)]
    told = json.loads(strict(found.document()))
    jsonschema.validate(told, schema())
    assert "<!doctype html>" in found.html() and Surveyed.of([found]).atlas.ranges is not None
    for row, plain in zip(found.matrices, diagnose(scaled(0)).matrices, strict=True):
        if -900 < power < 900:  # no entry is rounded
            assert row.condition_number == pytest.approx(plain.condition_number, rel=1e-6)
            assert row.effective_rank == plain.effective_rank


def test_a_matrix_of_1e200_costs_no_other_and_is_no_bug() -> None:
    state = {"a.weight": torch.full((8, 8), 1e200, dtype=torch.float64), **scaled(0)}
    found = diagnose(state)
    assert not found.failed
    row = next(row for row in found.matrices if row.name == "a.weight")
    assert row.sigma_max == pytest.approx(8e200)


def test_documents_follow_the_published_schema() -> None:
    first, second = diagnose(scaled(0)), diagnose(scaled(1), reference=scaled(0))
    known = Trainings.of("AdamW lr=0.001", None, 5)
    third = diagnose(scaled(1), reference=scaled(0), trainings=known)
    for told in (blank_document("x.pt"), document([first]), document([first, second, third])):
        jsonschema.validate(json.loads(strict(told)), schema())
    broken = document([first]) | {"findings": [{"rule": "zero"}]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(broken, schema())


def test_the_fields_of_the_first_schema_keep_their_names() -> None:
    (finding, *_) = diagnose(scaled(0)).document()["findings"]
    assert {"rule", "severity", "subject", "evidence", "advice", "correction"} <= set(finding)
    told = document([diagnose(scaled(0)), diagnose(scaled(0))])
    assert [step["source"] for step in told["trajectory"]] == ["dict", "dict"]


def test_what_was_not_asked_for_is_not_judged() -> None:
    assert Diagnosis("nothing").judged().findings == ()
    assert math.isfinite(diagnose(scaled(0)).findings[0].harm or 0.0)
