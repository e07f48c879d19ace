"""Names are meant literally, patterns mean whatever fits, the rest is left out with a reason."""

from __future__ import annotations

import copy
import re
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD

from correction_examples import Tied, every, frozen, perceptron, steps
from kappascope import corrections
from kappascope.corrections import (
    Multipliers,
    NormPin,
    OrthogonalPenalty,
    SingularValueBound,
    SpectralPenalty,
)
from kappascope.corrections._selection import MeantWeights
from kappascope.model.weights import live_weights
from kappascope.refusal import Refusal


def selected(where, model: nn.Module) -> list[str]:
    weights = live_weights(model)
    names = [name for weight in weights for name, *_ in weight.uses]
    found = MeantWeights.of(where, names)
    return [weight.name for weight in weights if found.uses(weight) is not None]


@pytest.mark.parametrize(
    "where",
    [
        "0.weight",
        "0.*",
        re.compile("^0"),
        lambda name: name[0] == "0",
        lambda name, module: module.in_features == 4,
        lambda name, start="0": name.startswith(start),
        partial(lambda start, name: name.startswith(start), "0"),
        "0.weight".__eq__,
        ["0.weight", re.compile("never|0")],
        {"0.weight"},
    ],
)
def test_every_way_to_mean_a_weight(where) -> None:
    assert selected(where, perceptron()) == ["0.weight"]


def test_a_name_is_told_from_a_pattern() -> None:
    model = perceptron()
    weight = live_weights(model)[0]
    names = ["0.weight", "2.weight"]
    assert MeantWeights.of("0.weight", names).names_it(weight)
    assert not MeantWeights.of("0.*", names).names_it(weight)


def test_a_tied_weight_comes_with_the_uses_that_are_meant() -> None:
    weights = live_weights(Tied())
    names = [name for weight in weights for name, *_ in weight.uses]
    found = [MeantWeights.of("head.*", names).uses(weight) for weight in weights]
    assert [each.name for each in found if each is not None] == ["head.weight"]


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
    with pytest.raises(ValueError, match="no weight to correct") as caught:
        NormPin().attach(nn.LayerNorm(3), optimizer)
    assert isinstance(caught.value, Refusal)
    model = parametrizations.spectral_norm(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no inverse"):
        NormPin().attach(model, SGD(model.parameters()), where="weight")
    with pytest.raises(ValueError, match="made of other tensors"):
        Multipliers().attach(model, SGD(model.parameters()))
    with pytest.raises(ValueError, match="recurrent"):
        Multipliers().attach(rnn := nn.LSTM(2, 2), SGD(rnn.parameters()))


@every
def test_a_correction_that_finds_nothing_to_act_on_refuses(correction) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4))
    with pytest.raises(Refusal, match=r"no weight to correct .*an embedding is looked up"):
        correction.attach(model, SGD(model.parameters(), lr=0.1))


def test_errors_of_models_of_many_weights_are_short() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(300)))
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"called '7.wieght'; there are 7.weight, .* and 292 more$"
    ):
        NormPin().attach(model, optimizer, where="7.wieght")
    model.requires_grad_(False)
    with pytest.raises(Refusal, match=r"\(0.weight and 299 more: it is frozen\)"):
        NormPin().attach(model, optimizer)


def test_a_pattern_skips_what_a_name_may_not() -> None:
    model = frozen()
    optimizer = SGD(model.parameters(), lr=0.1)
    for where in ("*.weight", re.compile(r"weight$"), lambda name: True, ["*"]):
        with NormPin().attach(model, optimizer, where=where) as handle:
            assert handle.weights == ("2.weight",)
            assert handle.left_out == {"0.weight": "it is frozen"}
    with pytest.raises(ValueError, match=r"0\.weight cannot be corrected: it is frozen"):
        NormPin().attach(model, optimizer, where=["*", "0.weight"])


def test_a_pattern_passes_over_what_is_no_map_and_a_name_takes_it() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    with NormPin().attach(model, optimizer, where="*") as handle:
        assert handle.weights == ("1.weight",) and "embedding" in handle.left_out["0.weight"]
    with NormPin().attach(model, optimizer, where="0.weight") as handle:
        assert handle.weights == ("0.weight",)


def test_what_is_excluded_is_left_out_whatever_selects_it() -> None:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    for exclude in ("0.weight", "0.*", re.compile("^0"), lambda name, module: name[0] == "0"):
        with NormPin().attach(model, optimizer, exclude=exclude) as handle:
            assert handle.weights == ("2.weight",) and handle.left_out == {"0.weight": "excluded"}
    with NormPin().attach(model, optimizer, where=["0.*", "2.*"], exclude="2.*") as handle:
        assert handle.weights == ("0.weight",)
    with pytest.raises(ValueError, match=r"no weight is called 'mlp\.\*'"):
        NormPin().attach(model, optimizer, exclude="mlp.*")
    with pytest.raises(TypeError, match="expected exclude= to be"):
        NormPin().attach(model, optimizer, exclude=3)


def test_settings_by_pattern_are_one_handle_and_the_first_that_fits_wins() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = SGD(model.parameters(), lr=0.1)
    norm, before = model[0].weight.detach().norm(), model(torch.ones(1, 4))
    settings = {
        "0.*": NormPin(),
        re.compile("^[02]"): Multipliers(),
        lambda name: name.startswith("3"): None,
    }
    handle = corrections.attach(model, optimizer, settings)
    assert [(t.weight.name, t.kind) for t in handle.treatments] == [
        ("0.weight", NormPin),
        ("2.weight", Multipliers),
    ]
    assert handle.weights == ("0.weight", "2.weight")
    assert handle.left_out == {"3.weight": "not selected"}
    assert torch.equal(model(torch.ones(1, 4)), before)
    steps(model, optimizer, 3)
    trained = model(torch.ones(1, 4))
    handle.close()
    assert torch.equal(model(torch.ones(1, 4)), trained) and handle.difference == 0.0
    assert set(model.state_dict()) == {f"{i}.{p}" for i in (0, 2, 3) for p in ("weight", "bias")}
    torch.testing.assert_close(model[0].weight.detach().norm(), norm)
    assert not optimizer._optimizer_step_pre_hooks


def test_settings_of_one_correction_say_what_gets_another() -> None:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    with NormPin().attach(model, optimizer, where={"0.*": Multipliers()}) as handle:
        assert [t.kind for t in handle.treatments] == [NormPin, Multipliers] or [
            t.kind for t in handle.treatments
        ] == [Multipliers, NormPin]


def test_settings_that_are_none_are_an_error_in_one_line() -> None:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    for wrong, match in (
        ({}, "expected corrections by pattern"),
        (NormPin(), "expected corrections by pattern"),
        ({"*": NormPin}, "got the class NormPin, which is to be called"),
        ({5: NormPin()}, "expected where= to be a name or pattern"),
    ):
        with pytest.raises(TypeError, match=match):
            corrections.attach(model, optimizer, wrong)
    with pytest.raises(ValueError, match=r"no weight is called '\*\.mlp\.\*'"):
        corrections.attach(model, optimizer, {"*.mlp.*": NormPin()})
    with pytest.raises(corrections._selection.NothingToCorrect):
        corrections.attach(model, optimizer, {"*": None})


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
        nn.init.ones_(self.norm.bias)


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
    with pytest.raises(ValueError, match="has no inverse for every matrix"):
        SingularValueBound().attach(layer, optimizer)


def test_a_matrix_made_of_a_vector_is_a_weight() -> None:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Diagonal(), unsafe=True)
    with SpectralPenalty().attach(layer, SGD(layer.parameters())) as handle:
        assert handle.weights == ("weight",)


def test_a_model_that_the_first_fsdp_has_flattened_is_refused_wherever_it_stands() -> None:
    class FullyShardedDataParallel(nn.Module):
        """As torch's, whose parameters are shards of one vector."""

        def __init__(self) -> None:
            super().__init__()
            self.flat = nn.Parameter(torch.ones(7))

    model = nn.Sequential(nn.Linear(4, 3), FullyShardedDataParallel())
    with pytest.raises(Refusal, match=r"^1: it joins weights .* \(shard by fully_shard \(FSDP2\)"):
        NormPin().attach(model, SGD(model.parameters(), lr=0.1))
