"""Learning rates and output scales follow the width, so that changes of features do not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from kappascope.corrections import mup


def network(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(4, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 3)
    )


class TiedModel(nn.Module):
    """Tokens in and out of one table."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token, self.hidden = nn.Embedding(7, width), nn.Linear(width, width)
        self.head = nn.Linear(width, 7, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.token(x)))


def test_every_parameter_has_its_kind_and_rate() -> None:
    found = mup.growths(network(32), network(8))
    assert {name: growth.kind for name, growth in found.items()} == {
        "0.weight": "input",
        "0.bias": "input",
        "2.weight": "hidden",
        "2.bias": "input",
        "4.weight": "output",
        "4.bias": "fixed",
    }
    adam = {name: growth.rate(AdamW) for name, growth in found.items()}
    assert adam == {**dict.fromkeys(found, 1.0), "2.weight": 0.25}
    sgd = {name: growth.rate(SGD) for name, growth in found.items()}
    assert sgd["0.weight"] == sgd["0.bias"] == sgd["4.weight"] == 4.0
    assert sgd["2.weight"] == sgd["4.bias"] == 1.0


def test_groups_hold_every_parameter_once() -> None:
    model = network(32)
    groups = mup.parameter_groups(model, network(8), lr=0.1)
    rates = {id(p): group["lr"] for group in groups for p in group["params"]}
    assert len(rates) == len(list(model.parameters()))
    assert rates[id(model[2].weight)] == pytest.approx(0.025)
    shapes = {name: p.shape for name, p in network(8).named_parameters()}
    assert [g["lr"] for g in mup.parameter_groups(model, shapes, lr=0.1)] == [
        g["lr"] for g in groups
    ]


def test_the_base_itself_is_as_it_was() -> None:
    model = network(8)
    (group,) = mup.parameter_groups(model, network(8), lr=0.1)
    assert group["lr"] == 0.1 and mup.output_scales(model, network(8)) == {}


def test_outputs_are_scaled_until_closed() -> None:
    model, x = network(32), torch.randn(5, 4)
    plain = model(x)
    with mup.scale_outputs(model, network(8)):
        scaled = model(x)
    torch.testing.assert_close(scaled - model[4].bias, (plain - model[4].bias) / 4)
    assert torch.equal(model(x), plain)


def test_a_tied_table_is_an_input_that_is_scaled_as_an_output() -> None:
    model, x = TiedModel(32), torch.arange(7)
    plain = model(x)
    assert mup.growths(model, TiedModel(8))["token.weight"].kind == "input"
    with mup.scale_outputs(model, TiedModel(8)):
        torch.testing.assert_close(model(x), plain / 4)


def test_another_architecture_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"expected the base to have 4\.weight"):
        mup.growths(network(8), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))


def test_changes_of_features_do_not_grow_with_the_width_under_mup() -> None:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    y = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))

    def loss(model: nn.Module) -> Tensor:
        return (model(x) - y).square().mean()

    stream = torch.get_rng_state()
    widths = [32, 64, 128, 256, 512]
    rows = mup.coordinate_check(network, widths, loss, lr=0.02)
    assert torch.equal(torch.get_rng_state(), stream)
    exponents = mup.growth_exponents(rows)
    assert all(power < 0.15 for power in exponents.values())
    plain = []
    for width in widths:
        torch.manual_seed(0)
        model = network(width)
        optimizer = AdamW(model.parameters(), lr=0.02, weight_decay=0.0)
        plain += mup._watched(model, width, loss, optimizer, 3)
    without = mup.growth_exponents(plain)
    assert without["2"] > exponents["2"] + 0.3 and without["4"] > exponents["4"] + 0.3


class OwnParameters(nn.Module):
    """Positions, experts and their biases as parameters of one module, as many models have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.token = nn.Linear(3, width)
        self.pos, self.cls_token = (nn.Parameter(torch.randn(*n, width)) for n in ((5,), (1, 1)))
        self.experts = nn.Parameter(torch.randn(3, width, width) / width**0.5)
        self.experts_bias = nn.Parameter(torch.zeros(3, width))
        self.inside, self.head = nn.Identity(), nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.token(x) + self.pos + self.cls_token
        written = torch.einsum("eoi,bti->bto", self.experts, hidden) + self.experts_bias.sum(0)
        return self.head(self.inside(written.relu()))


class TestParametersThatAreNoLayersWeight:
    def test_tables_and_biases_are_inputs_and_stacks_are_hidden(self) -> None:
        found = mup.growths(OwnParameters(32), OwnParameters(8))
        kinds = {name: growth.kind for name, growth in found.items()}
        assert {name for name, kind in kinds.items() if kind == "output"} == {"head.weight"}
        assert {name for name, kind in kinds.items() if kind == "hidden"} == {"experts"}
        added = ("pos", "cls_token", "experts_bias")
        assert all(found[name] == mup.Growth(4.0, 1.0) for name in added)

    def test_the_head_alone_is_scaled(self) -> None:
        model, base, x = OwnParameters(32), OwnParameters(8), torch.randn(2, 5, 3)
        plain, bias = model(x), model.head.bias
        with mup.scale_outputs(model, base):
            torch.testing.assert_close(model(x), (plain - bias) / 4 + bias)

    def test_changes_of_features_do_not_grow_with_the_width(self) -> None:
        draws = torch.Generator().manual_seed(0)
        x, y = (torch.randn(16, 5, n, generator=draws) for n in (3, 2))
        rows = mup.coordinate_check(
            OwnParameters, [32, 64, 128, 256], lambda model: (model(x) - y).square().mean()
        )
        exponents = mup.growth_exponents(rows)
        assert exponents["inside"] < 0.15 and exponents["head"] < 0.15

    def test_a_gain_beside_a_weight_is_no_matrix(self) -> None:
        wide, narrow = (nn.utils.parametrizations.weight_norm(nn.Linear(n, 3)) for n in (8, 4))
        found = mup.growths(wide, narrow)
        assert found["parametrizations.weight.original0"].kind == "fixed"
        assert found["parametrizations.weight.original1"].kind == "output"
        assert mup.output_scales(wide, narrow) == {"weight": 0.5}

    def test_an_output_weight_beside_others_is_refused(self) -> None:
        class Both(nn.Module):
            def __init__(self, width: int) -> None:
                super().__init__()
                self.inner, self.outer = nn.Linear(3, width), nn.Parameter(torch.ones(2, width))

        with pytest.raises(ValueError, match="outer is an output weight, and Both holds more"):
            mup.scale_outputs(Both(8), Both(4))


def test_a_tied_head_is_scaled_whichever_comes_first() -> None:
    class HeadFirst(TiedModel):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            head = self._modules.pop("head")
            self._modules = {"head": head, **self._modules}

    for kind in (TiedModel, HeadFirst):
        assert mup.output_scales(kind(32), kind(8)) == {"head.weight": 0.25}
