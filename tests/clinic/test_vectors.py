"""Gains, biases and statistics: what never moved, and two conventions of a norm."""

import pytest
import torch

from kappascope.clinic.atlas import Atlas
from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.examination import Finding
from kappascope.clinic.vectors import Vector


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """Two layers that are clearly trained."""
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(2, 64, 64, generator=random)
    return {f"layers.{i}.up.weight": w * torch.linspace(2, 0.1, 64) for i, w in enumerate(drawn)}


def told(state: dict[str, torch.Tensor], **more: object) -> list[Finding]:
    found = diagnose(state, atlas=Atlas({}), **more).findings
    return [one for one in found if one.rule in ("unmoved", "differs-by-one")]


@pytest.mark.parametrize(
    ("dtype", "severity"), [(torch.bfloat16, "warning"), (torch.float32, "info")]
)
def test_gains_that_are_exactly_one_are_found_and_graver_in_16_bits(
    dtype: torch.dtype, severity: str
) -> None:
    gains = {f"layers.{i}.norm.weight": torch.ones(64, dtype=dtype) for i in range(2)}
    (found,) = told(weights() | gains)
    assert (found.rule, found.severity, found.concern) == ("unmoved", severity, "defect")
    assert "2 of 2 gains are exactly 1 in every entry" in found.evidence


def test_gains_that_moved_are_not_told() -> None:
    moved = torch.ones(64)
    moved[3] = 1 + 2**-7
    assert told(weights() | {"norm.weight": moved}) == []


def test_biases_of_zero_are_told_only_where_others_moved() -> None:
    zero, moved = {"a.bias": torch.zeros(8)}, {"b.bias": torch.ones(8)}
    assert told(weights() | zero) == []
    (found,) = told(weights() | zero | moved)
    assert "1 of 2 biases is exactly 0" in found.evidence and found.subject == "a.bias"


def test_a_fresh_model_has_gains_of_one() -> None:
    layer = torch.nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    assert told(dict(layer.state_dict())) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_conventions_of_a_norm_are_told_apart(dtype: torch.dtype) -> None:
    gains = 0.3 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    ours = weights() | {"norm.weight": (1 + gains).to(dtype)}
    theirs = weights() | {"norm.weight": gains.to(dtype)}
    (found,) = told(ours, reference=theirs)
    assert (found.rule, found.severity) == ("differs-by-one", "warning")
    assert told(ours, reference=ours) == []


def test_roles_are_told_by_names() -> None:
    names = {"ln.weight": "gain", "q_proj.bias": "bias", "bn.running_var": "variance",
             "bn.running_mean": "mean", "in_proj_bias": "bias", "inv_freq": "other"}  # fmt: skip
    assert {name: Vector.of(name, torch.ones(2)).role for name in names} == names
