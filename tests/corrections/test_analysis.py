"""The weights that make sense are corrected, the others are left out with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD

from correction_examples import Tied, every, frozen, perceptron
from kappascope.corrections import (
    Multipliers,
    NormPin,
    OrthogonalPenalty,
    SingularValueBound,
    SpectralPenalty,
)


def test_where_takes_names_patterns_and_tests() -> None:
    for where in ("0.weight", ["0.*"], lambda name: name.startswith("0")):
        model = perceptron()
        with NormPin().attach(model, SGD(model.parameters()), where=where) as handle:
            assert handle.weights == ("0.weight",)
            assert handle.left_out == {"2.weight": "not selected"}


@pytest.mark.parametrize("where", ["head.weight", "head.*", lambda name: name.startswith("head")])
def test_a_tied_weight_is_known_by_all_its_names(where) -> None:
    model = Tied()
    with NormPin().attach(model, SGD(model.parameters()), where=where) as handle:
        assert handle.weights == ("token.weight",)


def test_what_cannot_be_corrected_is_an_error_with_the_reason() -> None:
    model = frozen()
    optimizer = SGD(model.parameters())
    with pytest.raises(ValueError, match=r"no weight is called '7\.weight'; there are 0"):
        NormPin().attach(model, optimizer, where="7.weight")
    with pytest.raises(ValueError, match="cannot be corrected: it is frozen"):
        NormPin().attach(model, optimizer, where="0.weight")
    with pytest.raises(ValueError, match="no optimizer has it"):
        NormPin().attach(perceptron(), optimizer)
    with pytest.raises(ValueError, match="no weight to correct"):
        NormPin().attach(nn.LayerNorm(3), optimizer)
    model = parametrizations.spectral_norm(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no inverse"):
        NormPin().attach(model, SGD(model.parameters()), where="weight")
    with pytest.raises(ValueError, match="made of other tensors"):
        Multipliers().attach(model, SGD(model.parameters()))
    with pytest.raises(ValueError, match="recurrent"):
        Multipliers().attach(rnn := nn.LSTM(2, 2), SGD(rnn.parameters()))


class Vision(nn.Module):
    """What has the shape of a matrix, or of a stack of them, and is no map; and three maps."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"pos_embed": (1, 16, 8), "positions": (16, 8), "cls_token": (1, 1, 8)}
        shapes |= {"register_tokens": (1, 4, 8), "layer_scale": (1, 8, 1, 1), "A_log": (8, 4)}
        shapes |= {"experts_bias": (3, 8), "mixing": (8, 8)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.norm, self.embed, self.value = nn.LayerNorm((4, 8)), nn.Linear(4, 8), nn.Linear(8, 1)


def test_what_is_no_map_is_left_out_unless_it_is_named() -> None:
    model = Vision()
    optimizer = SGD(model.parameters())
    with NormPin().attach(model, optimizer) as handle:
        assert handle.weights == ("mixing", "embed.weight", "value.weight")
    assert handle.left_out == {
        **dict.fromkeys(
            ("pos_embed", "positions", "cls_token", "register_tokens", "A_log"),
            "a table is looked up or added, not multiplied",
        ),
        "layer_scale": "one row or column is a vector, not a map",
        "experts_bias": "a bias is added, not multiplied",
        "norm.weight": "a norm layer scales entry by entry",
        "norm.bias": "a bias is added, not multiplied",
    }
    with NormPin().attach(model, optimizer, where=[*handle.left_out]) as named_:
        assert set(named_.weights) == set(handle.left_out)


@every
def test_a_parametrized_buffer_is_no_weight(correction) -> None:
    model = perceptron()
    model.register_buffer("mask", torch.ones(3, 3))
    parametrize.register_parametrization(model, "mask", nn.Identity())
    with correction.attach(model, SGD(model.parameters())) as handle:
        assert handle.weights == ("0.weight", "2.weight") and not handle.left_out


class Product(nn.Module):
    """A weight of two factors of rank three."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).reshape(self.shape)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        u, s, vt = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        return u[:, :3] * s[:3], vt[:3]


class Diagonal(nn.Module):
    """A weight of a vector."""

    def forward(self, vector: Tensor) -> Tensor:
        return torch.diag(vector)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.diagonal()


@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 8), nn.Conv1d(2, 8, 3), nn.ConvTranspose1d(8, 2, 3)], ids=repr
)
def test_the_shape_of_a_made_weight_is_that_of_what_is_made(layer) -> None:
    layer = copy.deepcopy(layer)
    parametrize.register_parametrization(layer, "weight", Product(layer.weight.shape), unsafe=True)
    optimizer, before = SGD(layer.parameters(), lr=0.1), layer.weight.detach().clone()
    with OrthogonalPenalty().attach(layer, optimizer):
        optimizer.step()
    assert not torch.equal(layer.weight, before)
    with pytest.raises(ValueError, match="its making has no inverse for every matrix"):
        SingularValueBound().attach(layer, optimizer)


def test_a_matrix_made_of_a_vector_is_a_weight() -> None:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Diagonal(), unsafe=True)
    with SpectralPenalty().attach(layer, SGD(layer.parameters())) as handle:
        assert handle.weights == ("weight",)
