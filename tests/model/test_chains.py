"""Layers in a row: the kappa of their product and the product of their kappas."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kappascope.model.chains import Links, chain, links, obstacle
from kappascope.model.matrices import plan, reader


def layers(widths, seed: int = 0) -> list[tuple[str, Tensor]]:
    random = torch.Generator().manual_seed(seed)
    shapes = zip(widths[1:], widths[:-1], strict=True)
    return [(f"{i}.weight", torch.randn(s, generator=random)) for i, s in enumerate(shapes)]


def members(found: tuple[Links, ...]) -> list[list[str]]:
    return [[each.name for each in one.members] for one in found]


class TestChain:
    @settings(max_examples=40)
    @given(st.lists(st.integers(1, 9), min_size=3, max_size=6), st.integers(0, 9))
    def test_it_is_the_product_formed_in_full_and_bounded_where_it_binds(
        self, widths, seed
    ) -> None:
        pairs = layers(widths, seed)
        found = chain(pairs)
        full = pairs[0][1].double()
        for _, matrix in pairs[1:]:
            full = matrix.double() @ full
        sigma = torch.linalg.svdvals(full)[: min(widths)]
        kappa = float(sigma[0] / sigma[-1])
        if math.isfinite(found.condition_number or math.inf):
            assert found.condition_number == pytest.approx(kappa, rel=1e-6)
        else:
            assert kappa > 1e10
        assert found.widths == tuple(widths)
        if found.binds:
            assert found.condition_number <= found.bound * (1 + 1e-9)

    def test_widths_that_fall_and_then_rise_are_bounded_and_no_others(self) -> None:
        bounded = [(4, 4, 4), (8, 4, 2), (8, 2, 8), (2, 4, 8)]
        for widths in [*bounded, (4, 8, 4), (8, 2, 6, 4)]:
            assert chain(layers(widths)).binds is (widths in bounded)

    def test_behind_a_wide_layer_the_product_can_be_worse_than_any_bound(self) -> None:
        up = torch.cat([torch.eye(2), torch.zeros(2, 2)])
        down = torch.cat([torch.zeros(2, 2), torch.eye(2)], 1)
        down[:, 0] = 1.0
        found = chain([("up", up), ("down", down)])
        assert found.bound < 10
        assert found.condition_number == math.inf
        assert not found.binds

    def test_scales_do_not_matter(self) -> None:
        pairs = layers((5, 5, 5, 5, 5))
        expected = chain(pairs).condition_number
        for scale in (1e-60, 1e60):
            scaled = [(name, scale * matrix.double()) for name, matrix in pairs * 1]
            assert chain(scaled).condition_number == pytest.approx(expected)

    def test_fifty_layers_do_not_overflow(self) -> None:
        pairs = [(str(i), 1e30 * torch.eye(3, dtype=torch.float64)) for i in range(50)]
        found = chain(pairs)
        assert found.condition_number == pytest.approx(1)
        assert found.name == "0 > 49"

    def test_what_was_measured_before_is_not_measured_again(self) -> None:
        found = chain(layers((3, 3, 3)), known={"0.weight": (1.0, 7.0), "1.weight": (1.0, 3.0)})
        assert found.bound == 21

    def test_what_is_not_finite_fails(self) -> None:
        found = chain([("a", torch.full((2, 2), math.nan)), ("b", torch.eye(2))])
        assert found.bound is found.condition_number is None
        assert found.status == "failed: a layer could not be measured"

    def test_zero_layers_have_no_kappa(self) -> None:
        found = chain([("a", torch.zeros(2, 2)), ("b", torch.eye(2)), ("c", torch.eye(2))])
        assert found.condition_number is None
        assert found.status.startswith("degenerate")

    def test_layers_that_do_not_fit_are_refused(self) -> None:
        with pytest.raises(
            ValueError, match="each with as many columns as the one before has rows"
        ):
            chain([("a", torch.eye(2)), ("b", torch.eye(3))])


class TestObstacle:
    def test_two_thin_layers_may_be_as_long_as_any(self) -> None:
        assert obstacle((30_000, 64, 30_000)) == ""
        assert "more than 2048" in obstacle((30_000, 64, 64, 30_000))

    def test_very_many_layers_are_too_many(self) -> None:
        assert "numbers are more than" in obstacle((2048,) * 20)

    def test_nothing_is_read_for_what_is_too_large(self) -> None:
        source = {
            "mlp.up_proj.weight": torch.empty(4096, 64, device="meta"),
            "mlp.down_proj.weight": torch.empty(64, 4096, device="meta"),
        }
        (found,) = links(plan(source))
        told = found.chain(reader(source), dict.fromkeys(source, (1.0, 5.0)))
        assert told.bound == 25
        assert told.status == "skipped: a width of 4096 is more than 2048"


class TestLinks:
    def test_a_sequential_model_is_one_chain(self) -> None:
        model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
        (found,) = links(plan(model))
        assert members((found,)) == [["0.weight", "2.weight", "3.weight"]]
        sigma = torch.linalg.svdvals(
            model[3].weight.double() @ model[2].weight.double() @ model[0].weight.double()
        ).detach()
        kappa = found.chain(reader(model)).condition_number
        assert kappa == pytest.approx(float(sigma[0] / sigma[1]), rel=1e-9)

    @pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-200, 1.0, 1e154, 1.7e308])
    @pytest.mark.parametrize("count", [2, 3, 130])
    def test_layers_of_any_scale_and_number_have_a_kappa(self, scale: float, count: int) -> None:
        layer = scale * torch.eye(3, dtype=torch.float64)
        found = chain((str(i), layer) for i in range(count))
        assert found.condition_number == pytest.approx(1.0)

    def test_a_product_that_all_but_vanishes_is_no_error(self) -> None:
        one = torch.tensor([[1.0, 0.0], [0.0, 1e-310]], dtype=torch.float64)
        found = chain([("a", one), ("b", one.flip(0, 1)), ("c", torch.eye(2))])
        assert found.condition_number == math.inf and "at least 1" in found.status

    def test_empty_layers_are_left_out_with_a_reason(self) -> None:
        for widths in ((0, 0, 0), (3, 0, 3), (0, 3, 3, 3)):
            layers = [torch.empty(b, a) for a, b in pairwise(widths)]
            found = chain((str(i), layer) for i, layer in enumerate(layers))
            assert found.status == "skipped: a layer is empty" and found.bound is None

    def test_numbers_are_ordered_as_numbers(self) -> None:
        source = {f"net.{i}.weight": torch.empty(4, 4, device="meta") for i in (10, 2, 0)}
        assert members(links(plan(source))) == [["net.0.weight", "net.2.weight", "net.10.weight"]]

    def test_layers_called_by_a_number_follow_one_another(self) -> None:
        shapes = {"fc1.weight": (6, 8), "fc2.weight": (5, 6), "fc3.weight": (4, 5)}
        source = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
        assert members(links(plan(source))) == [list(shapes)]

    def test_up_and_down_of_a_perceptron_are_a_pair(self) -> None:
        for up, down in (("mlp.up_proj", "mlp.down_proj"), ("feed_forward.w3", "feed_forward.w2"),
                         ("layer.0.intermediate.dense", "layer.0.output.dense")):  # fmt: skip
            source = {
                f"{up}.weight": torch.empty(8, 4, device="meta"),
                f"{down}.weight": torch.empty(4, 8, device="meta"),
                "mlp.gate_proj.weight": torch.empty(8, 4, device="meta"),
            }
            assert members(links(plan(source))) == [[f"{up}.weight", f"{down}.weight"]]

    def test_a_fused_gate_leaves_the_up_part_to_the_pair(self) -> None:
        source = {
            "mlp.gate_up_proj.weight": torch.randn(8, 4),
            "mlp.down_proj.weight": torch.randn(4, 4),
        }
        (found,) = links(plan(source))
        assert members((found,)) == [["mlp.gate_up_proj.weight[up]", "mlp.down_proj.weight"]]
        assert found.chain(reader(source)).condition_number is not None

    def test_experts_convolutions_and_what_does_not_fit_are_no_chain(self) -> None:
        source = {
            "experts.0.weight": torch.empty(4, 4, device="meta"),
            "experts.1.weight": torch.empty(4, 4, device="meta"),
            "features.0.weight": torch.empty(4, 4, 3, 3, device="meta"),
            "features.1.weight": torch.empty(4, 4, 3, 3, device="meta"),
            "heads.0.weight": torch.empty(3, 8, device="meta"),
            "heads.1.weight": torch.empty(5, 8, device="meta"),
        }
        assert links(plan(source)) == ()
