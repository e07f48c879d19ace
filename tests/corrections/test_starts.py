"""An orthogonal start gives every map a kappa of one, and touches nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from correction_examples import Tied, convolution, kappa_of, perceptron
from kappascope.corrections import orthogonal_start
from kappascope.model.weights import live_weights
from kappascope.refusal import Refusal


@pytest.mark.parametrize("make", [perceptron, convolution, Tied])
def test_every_map_has_a_condition_number_of_one(make) -> None:
    model = make()
    biases = {n: p.detach().clone() for n, p in model.named_parameters() if p.ndim < 2}
    names = orthogonal_start(model)
    assert names
    weights = {weight.name: weight for weight in live_weights(model)}
    for name in names:
        assert (kappa_of(weights[name].matrix()) < 1 + 1e-5).all()
    for name, bias in biases.items():
        assert torch.equal(dict(model.named_parameters())[name], bias)


def test_the_gain_is_the_size_of_every_singular_value() -> None:
    model = perceptron()
    orthogonal_start(model, gain=3.0)
    values = torch.linalg.svdvals(model[0].weight.detach())
    torch.testing.assert_close(values, torch.full_like(values, 3.0))


def test_without_a_gain_norms_are_kept() -> None:
    model = perceptron()
    before = model[0].weight.detach().norm()
    orthogonal_start(model, gain=None)
    torch.testing.assert_close(model[0].weight.detach().norm(), before)


def test_it_selects_as_corrections_do() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    assert orthogonal_start(model) == ("1.weight", "2.weight")
    assert orthogonal_start(model, where="*", exclude="2.*") == ("1.weight",)
    assert orthogonal_start(model, where="0.weight") == ("0.weight",)
    parametrizations.spectral_norm(model[1])
    assert orthogonal_start(model) == ("2.weight",)
    with pytest.raises(ValueError, match=r"1\.weight cannot be set"):
        orthogonal_start(model, where="1.weight")
    with pytest.raises(Refusal, match="no weight that could be orthogonal"):
        orthogonal_start(nn.LayerNorm(3))


def test_a_generator_draws_alone() -> None:
    one, other = perceptron(), perceptron()
    stream = torch.get_rng_state()
    for model in (one, other):
        orthogonal_start(model, generator=torch.Generator().manual_seed(3))
    assert torch.equal(one[0].weight, other[0].weight)
    assert torch.equal(torch.get_rng_state(), stream)
