"""Weights that are made of other tensors are read as their layer uses them."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from fresh_models import MODULES, Doubled, old_style, reasons, shapes
from kappascope.model.matrices import matrices


class TestMadeWeights:
    """Weights that a layer makes of other tensors are read as it uses them in evaluation."""

    @pytest.mark.parametrize(
        "name",
        [
            "parametrized",
            "spectral norm",
            "orthogonal",
            "weight norm",
            "old spectral norm",
            "old weight norm",
            "pruned",
        ],
    )
    def test_the_effective_weight_is_read(self, name: str) -> None:
        module = MODULES[name]()
        module.eval()
        if hooks := list(module._forward_pre_hooks.values()):
            hooks[0](module, None)
        expected = module.weight.detach()
        if isinstance(module, nn.ConvTranspose2d):
            expected = expected.transpose(0, 1)
        found = dict(matrices(module.train()))
        torch.testing.assert_close(found["weight"], expected.flatten(1))
        assert list(found) == ["weight"]
        assert "read as weight" in reasons(matrices(module)).values()

    def test_reading_moves_no_vector_of_a_spectral_norm_in_training(self) -> None:
        for layer in (
            parametrizations.spectral_norm(nn.Linear(9, 9)),
            nn.utils.spectral_norm(nn.Linear(9, 9)),
        ):
            before = {name: buffer.clone() for name, buffer in layer.named_buffers()}
            for _ in range(3):
                list(matrices(layer))
            assert len(before) == 2
            for name, buffer in layer.named_buffers():
                assert torch.equal(buffer, before[name])

    def test_a_random_parametrization_draws_no_number_of_the_callers(self) -> None:
        class Noisy(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return weight + torch.randn_like(weight)

        layer = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Noisy())
        before = torch.get_rng_state()
        list(matrices(layer))
        assert torch.equal(torch.get_rng_state(), before)

    def test_a_cache_of_parametrizations_is_neither_read_nor_filled(self) -> None:
        layer = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Doubled())
        with parametrize.cached():
            list(matrices(layer))
            assert layer.weight.requires_grad

    def test_a_parametrization_that_fails_is_named_and_the_rest_is_read(self) -> None:
        class Broken(nn.Module):
            broken = False

            def forward(self, weight: Tensor) -> Tensor:
                if self.broken:
                    raise ValueError("no luck")
                return weight

        step = Broken()
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        parametrize.register_parametrization(model[0], "weight", step)
        step.broken = True
        found = matrices(model)
        assert list(shapes(found)) == ["1.weight"]
        assert reasons(found)["0.weight"] == "could not be made: no luck"
        original = "0.parametrizations.weight.original"
        assert reasons(found)[original] == "a part of 0.weight, which could not be made"
        assert [one.name for one in found.skipped if one.lost] == ["0.weight"]

    def test_halves_of_a_weight_that_goes_through_another_step_make_none(self) -> None:
        layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False))
        nn.utils.parametrizations.spectral_norm(layer)
        assert list(shapes(matrices(layer))) == ["weight"]
        halves = [f"parametrizations.weight.original{i}" for i in range(2)]
        assert list(shapes(matrices(layer.state_dict()))) == halves
        other = {f"other.{name}": tensor for name, tensor in layer.state_dict().items()}
        plain = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4, bias=False)).state_dict()
        assert "weight" in shapes(matrices(plain | other))

    def test_parameters_of_a_parametrization_are_matrices_of_their_own(self) -> None:
        class LowRank(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up = nn.Parameter(torch.randn(4, 2))

            def forward(self, weight: Tensor) -> Tensor:
                return weight + self.up @ self.up.T

        layer = parametrize.register_parametrization(nn.Linear(4, 4), "weight", LowRank())
        assert list(shapes(matrices(layer))) == ["weight", "parametrizations.weight.0.up"]

    @pytest.mark.parametrize(
        "module",
        [
            parametrizations.weight_norm(nn.Linear(3, 4)),
            parametrizations.weight_norm(nn.Linear(3, 4), dim=1),
            parametrizations.weight_norm(nn.Linear(3, 4), dim=None),
            parametrizations.weight_norm(nn.Linear(1, 4)),
            parametrizations.weight_norm(nn.Linear(3, 1), dim=1),
            parametrizations.weight_norm(nn.Conv2d(3, 4, 3)),
            parametrizations.weight_norm(nn.Linear(3, 4).bfloat16()),
            old_style(nn.utils.weight_norm, nn.Conv1d(3, 4, 5)),
            prune.l1_unstructured(nn.Linear(3, 4), "weight", amount=5),
        ],
        ids=str,
    )
    def test_a_state_dict_determines_normalized_and_pruned_weights(self, module) -> None:
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)
        inside = nn.Sequential(module)
        found = matrices(inside.state_dict())
        expected = dict(matrices(inside))["0.weight"]
        torch.testing.assert_close(dict(found), {"0.weight": expected})
        assert sorted(reasons(found).values()) == ["one-dimensional", *["read as 0.weight"] * 2]

    def test_gates_are_known_even_if_the_layer_makes_its_other_weight(self) -> None:
        found = shapes(matrices(MODULES["parametrized lstm"]()))
        assert found["weight_ih_l0[i]"] == (4, 3)
        assert found["weight_hh_l0[o]"] == (4, 4)

    def test_other_originals_in_a_state_dict_keep_their_names(self) -> None:
        layer = parametrizations.spectral_norm(nn.Linear(3, 4))
        assert list(shapes(matrices(layer.state_dict()))) == ["parametrizations.weight.original"]

    def test_what_only_looks_like_weight_normalization_stays(self) -> None:
        pair = {"weight_g": torch.randn(4, 4), "weight_v": torch.randn(4, 4)}
        assert list(shapes(matrices(pair))) == ["weight_g", "weight_v"]
        mixing = {"time_maa_g": torch.ones(1, 1, 4), "time_maa_v": torch.ones(1, 1, 4)}  # RWKV
        assert list(shapes(matrices(mixing))) == list(mixing)
        eight = torch.ones(2, 2).to(torch.float8_e5m2)  # has no product
        assert list(shapes(matrices({"weight_orig": eight}))) == ["weight_orig"]
        assert len(dict(matrices({"weight_orig": eight, "weight_mask": torch.ones(2, 2)}))) == 2
        whole = {"weight": torch.eye(2), "weight_g": torch.ones(2, 1), "weight_v": torch.ones(2, 2)}
        assert list(shapes(matrices(whole))) == list(whole)
