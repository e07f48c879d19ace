"""What a model or a checkpoint stores: names, ties, and why a tensor is no matrix."""

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from fresh_models import Tied, reasons, shapes
from kappascope.model.matrices import matrices, plan
from kappascope.refusal import Refusal

HARMLESS = ("one-dimensional", "scalar", "empty", "torch.int8", "torch.bool", "not a tensor",
            "optimizer state")  # fmt: skip


class TestNames:
    @pytest.mark.parametrize(
        "key",
        [
            "module.fc.weight",
            "_orig_mod.fc.weight",
            "module._orig_mod.fc.weight",
            "_orig_mod.module.fc.weight",
            "module.module.fc.weight",
            "_orig_mod._orig_mod.fc.weight",
            "fc._orig_mod.weight",
            "_fsdp_wrapped_module.fc._checkpoint_wrapped_module.weight",
        ],
    )
    def test_wrappers_leave_no_trace(self, key: str) -> None:
        assert list(shapes(matrices({key: torch.eye(2)}))) == ["fc.weight"]

    @pytest.mark.parametrize("key", ["encoder.module.weight", "my_orig_mod.weight", "submodule.w"])
    def test_what_only_looks_like_a_wrapper_stays(self, key: str) -> None:
        assert list(shapes(matrices({key: torch.eye(2)}))) == [key]

    def test_a_wrapped_module_has_the_names_of_the_module_inside(self) -> None:
        model = nn.Sequential(nn.Linear(3, 2), parametrizations.spectral_norm(nn.Linear(2, 2)))
        plain = matrices(model)
        wrapped = matrices(nn.DataParallel(nn.DataParallel(model)))
        assert list(shapes(wrapped)) == list(shapes(plain))
        assert wrapped.skipped == plain.skipped

    @pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
    def test_a_compiled_module_has_the_names_of_the_module_inside(self) -> None:
        model = parametrizations.spectral_norm(nn.Linear(3, 3))
        compiled = torch.compile(model)
        assert list(shapes(matrices(compiled))) == ["weight"]
        assert matrices(compiled).skipped == matrices(model).skipped

    @pytest.mark.parametrize("order", [1, -1])
    def test_names_that_meet_when_stripped_are_kept_apart(self, order: int) -> None:
        keys = ["module.a.weight", "a.weight", "_orig_mod.b", "module.b"][::order]
        found = dict(matrices({key: torch.full((2, 2), float(i)) for i, key in enumerate(keys)}))
        assert len(found) == 4
        assert found["a.weight"][0, 0] == keys.index("a.weight")
        assert found["module.a.weight"][0, 0] == keys.index("module.a.weight")

    def test_a_tensor_named_like_a_part_is_not_lost(self) -> None:
        clash = {"in_proj_weight[q]": torch.eye(2), "in_proj_weight": torch.ones(6, 2)}
        for source in (clash, dict(reversed(clash.items()))):
            assert len(dict(matrices(source))) == 5


class TestTies:
    def test_tied_weights_appear_once(self) -> None:
        for source in (Tied(), Tied().state_dict()):
            found = matrices(source)
            assert shapes(found) == {"embedding.weight": (7, 3)}
            assert reasons(found) == {"head.weight": "tied to embedding.weight"}

    def test_a_layer_used_twice_appears_once_parametrized_or_not(self) -> None:
        for layer in (nn.Linear(3, 3), parametrizations.spectral_norm(nn.Linear(3, 3))):
            found = matrices(nn.Sequential(layer, layer))
            assert list(shapes(found)) == ["0.weight"]
            assert reasons(found)["1.weight"] == "tied to 0.weight"

    def test_other_views_of_the_same_memory_are_not_tied(self) -> None:
        whole = torch.randn(4, 4)
        views = {"a": whole, "b": whole.T, "c": whole[:2], "d": whole[2:], "e": whole.clone()}
        assert list(shapes(matrices(views))) == list(views)

    def test_memory_that_is_used_again_is_no_tie(self) -> None:
        class Reader(Mapping[str, Tensor]):
            def __iter__(self) -> Iterator[str]:
                return iter("abcdefgh")

            def __len__(self) -> int:
                return 8

            def __getitem__(self, key: str) -> Tensor:
                return torch.full((64, 64), float(ord(key)))

        found = matrices(Reader())
        values = [float(matrix[0, 0]) for _, matrix in found]
        assert values == [float(ord(key)) for key in "abcdefgh"]
        assert found.skipped == ()


@pytest.mark.filterwarnings("ignore:.*quantiz:UserWarning", "ignore:.*nested:UserWarning")
class TestSkipped:
    @pytest.mark.parametrize(
        ("make", "reason"),
        [
            (lambda: torch.ones(3), "one-dimensional"),
            (lambda: torch.tensor(1.0), "scalar"),
            (lambda: torch.ones(0, 3), "empty"),
            (lambda: torch.ones(3, 0, 2), "empty"),
            (lambda: torch.ones(2, 2, dtype=torch.int8), "torch.int8"),
            (lambda: torch.ones(2, 2, dtype=torch.bool), "torch.bool"),
            (lambda: torch.ones(2, 2, dtype=torch.complex64), "torch.complex64"),
            (lambda: torch.ones(2, 2, device="meta"), "on the meta device, without values"),
            (lambda: torch.ones(2, 2).to_sparse(), "layout torch.sparse_coo"),
            (lambda: torch.ones(2, 2).to_mkldnn(), "layout torch._mkldnn"),
            (
                lambda: torch.zeros(2, 2, dtype=torch.uint8).view(torch.float8_e8m0fnu),
                "torch.float8_e8m0fnu",
            ),
            (
                lambda: torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
                "torch.float4_e2m1fn_x2",
            ),
            (
                lambda: torch.quantize_per_tensor(torch.ones(2, 2), 0.1, 0, torch.qint8),
                "quantized (torch.qint8)",
            ),
            (lambda: torch.nested.nested_tensor([torch.ones(2, 2)]), "nested"),
            (
                lambda: torch.nested.nested_tensor([torch.ones(2, 2)], layout=torch.jagged),
                "nested",
            ),
            (nn.UninitializedParameter, "not initialized yet"),
            (lambda: "0.4.1", "not a tensor (str)"),
            (lambda: None, "not a tensor (NoneType)"),
            (lambda: [torch.ones(2, 2), None], "not a tensor (list)"),
            (lambda: {}, "empty"),
            (lambda: {"state": {}, "param_groups": []}, "optimizer state"),
        ],
    )
    def test_what_is_no_matrix_is_named_with_the_reason(self, make, reason: str) -> None:
        found = matrices({"x": make(), "w": torch.eye(2)})
        assert reasons(found) == {"x": reason}
        assert list(shapes(found)) == ["w"]
        assert found.skipped[0].lost is not reason.startswith(HARMLESS)

    @pytest.mark.parametrize(
        ("name", "dtype", "beside"),
        [
            ("up.qweight", torch.int32, "up.scales"),  # GPTQ, AWQ
            ("up.q_weight", torch.int32, "up.q_scale"),  # ExLlama
            ("up.weight", torch.int8, "up.SCB"),  # bitsandbytes
            ("up.weight", torch.uint8, "up.weight_scale"),  # BitNet
            ("up.weight_packed", torch.int32, "up.weight_scale"),  # compressed-tensors
            ("experts.up_blocks", torch.uint8, "experts.up_scales"),  # MXFP4
            ("up.W_q", torch.uint8, "up.scale"),  # HQQ
            ("module.up.codes", torch.int16, "module.up.scales"),  # AQLM
            ("up.table", torch.int8, "up.table_scale"),
            ("up.weight._data", torch.int8, "up.weight._scale"),  # quanto
            ("up.weight._data._data", torch.uint8, "up.weight._scale"),  # its four bits
        ],
    )
    def test_codes_of_a_quantized_weight_are_lost_and_their_scales_no_matrix(
        self, name: str, dtype: torch.dtype, beside: str
    ) -> None:
        source = {name: torch.ones(4, 4, dtype=dtype), beside: torch.ones(4, 2)}
        codes, *others = matrices(source).skipped
        assert codes.lost and str(codes.reason) == f"quantized codes ({dtype})"
        assert all(not one.lost and str(one.reason).startswith("a buffer") for one in others)
        assert len(others) == 1

    @pytest.mark.parametrize(
        "name",
        [
            "position_ids",
            "attn.bias",
            "attn.mask",
            "relative_position_index",
            "up.qzeros",
            "bn.num_batches_tracked",
            "up.g_idx",
            "up.weight_shape",
            "up.weight.absmax",
        ],
    )
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
    def test_whole_numbers_that_count_point_or_mask_are_harmless(
        self, name: str, dtype: torch.dtype
    ) -> None:
        source = {name: torch.ones(2, 2, dtype=dtype), "up.scales": torch.ones(2, 2)}
        (skipped,) = matrices(source).skipped
        assert (skipped.name, str(skipped.reason)) == (name, str(dtype)) and not skipped.lost

    def test_a_scale_beside_a_weight_of_floats_is_a_matrix(self) -> None:
        source = {"up.weight": torch.eye(2), "up.weight_scale": torch.ones(2, 2)}
        assert list(shapes(matrices(source))) == list(source)

    def test_an_optimizer_alone_is_no_model(self) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        found = matrices(optimizer.state_dict())
        assert not dict(found) and set(reasons(found).values()) == {"optimizer state"}

    def test_a_huge_sparse_tensor_is_never_made_dense(self) -> None:
        huge = torch.sparse_coo_tensor(
            torch.tensor([[0], [0]]), torch.ones(1), (10**9, 10**9), check_invariants=True
        )
        assert reasons(matrices({"x": huge})) == {"x": "layout torch.sparse_coo"}

    def test_a_subclass_that_computes_in_its_own_way_is_named(self) -> None:
        from torch.testing._internal.two_tensor import TwoTensor

        twin = TwoTensor(torch.ones(2, 2), torch.ones(2, 2))
        assert reasons(matrices({"x": twin})) == {"x": "tensor subclass TwoTensor"}

    def test_a_subclass_in_name_only_is_read_as_a_tensor(self) -> None:
        class Named(Tensor):
            pass

        ((_, matrix),) = matrices({"x": torch.ones(2, 2).as_subclass(Named)})
        assert type(matrix) is Tensor

    def test_buffers_of_a_module_are_no_matrices(self) -> None:
        layer = nn.Linear(3, 2, bias=False)
        layer.register_buffer("table", torch.ones(4, 4))
        assert reasons(matrices(layer)) == {"table": "a buffer, not a parameter"}

    def test_float8_that_waits_for_its_scales_is_not_taken_for_the_weight(self) -> None:
        eight = torch.ones(4, 4).to(torch.float8_e4m3fn)
        scales = {"fc.weight": ("weight_scale_inv", "weight_scale", "scale", "scale_weight"),
                  "fc.weight._data": ("weight._scale",)}  # fmt: skip
        for codes, key in [(codes, f"fc.{key}") for codes, keys in scales.items() for key in keys]:
            found = matrices({codes: eight, key: torch.ones(2, 2)})
            assert reasons(found) == {
                codes: f"to be scaled by {key}",
                key: f"a buffer, the scales of {codes}",
            }
            assert [one.lost for one in found.skipped] == [True, False]

    def test_an_array_of_another_library_may_be_a_weight(self) -> None:
        found = matrices({"w": np.eye(3), "b": np.ones(3), "t": np.float64(1)}).skipped
        assert [one.lost for one in found] == [True, False, False]
        assert str(found[0].reason) == "not a tensor (ndarray)"

    def test_packed_weights_of_a_quantized_layer_are_not_passed_over(self) -> None:
        from torch.ao.nn.quantized import Conv2d, Linear

        assert reasons(matrices(nn.Sequential(Linear(3, 2), Conv2d(3, 2, 1)))) == {
            "0._packed_params._packed_params": "quantized and packed",
            "1._packed_params": "quantized and packed",
        }


class TestCheckpoints:
    @pytest.mark.parametrize(
        "key", ["state_dict", "model_state_dict", "model_state", "model", "module"]
    )
    def test_the_model_is_found_among_what_training_keeps(self, key: str) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        found = matrices(
            {
                "epoch": 3,
                "optimizer_state_dict": optimizer.state_dict(),
                "optimizer_states": [optimizer.state_dict()],
                "opt": optimizer.state_dict(),
                "optimizer": {"momentum": torch.ones(2, 3)},
                "hyper_parameters": {"lr": 0.1},
                key: {f"module.{name}": tensor for name, tensor in model.state_dict().items()},
            }
        )
        assert shapes(found) == {"weight": (2, 3)}
        assert reasons(found) == {
            "epoch": "not a tensor (int)",
            "optimizer_state_dict": "optimizer state",
            "optimizer_states": "not a tensor (list)",
            "opt": "optimizer state",
            "optimizer": "optimizer state",
            "hyper_parameters.lr": "not a tensor (float)",
            "bias": "one-dimensional",
        }

    def test_several_models_keep_their_names(self) -> None:
        found = matrices({"generator": {"w": torch.eye(2)}, "ema": {"module.w": torch.eye(3)}})
        assert shapes(found) == {"generator.w": (2, 2), "ema.w": (3, 3)}

    def test_no_tensor_is_lost_if_two_wrappers_hold_the_same_name(self) -> None:
        found = matrices({"model": {"w": torch.eye(2)}, "state_dict": {"w": torch.eye(3)}})
        assert sorted(shapes(found).values()) == [(2, 2), (3, 3)]

    def test_a_module_inside_a_checkpoint_is_read_as_a_module(self) -> None:
        found = matrices({"model": nn.ConvTranspose1d(2, 3, 4, bias=False)})
        assert shapes(found) == {"weight": (3, 8)}

    def test_a_tensor_and_a_list_of_tensors_are_numbered(self) -> None:
        assert shapes(matrices(torch.ones(2, 3))) == {"0": (2, 3)}
        assert shapes(matrices([torch.ones(2, 3), torch.ones(4, 5)])) == {"0": (2, 3), "1": (4, 5)}
        assert shapes(matrices({"layers": [torch.ones(2, 3)]})) == {"layers.0": (2, 3)}

    def test_a_checkpoint_that_contains_itself_comes_to_an_end(self) -> None:
        endless: dict[str, object] = {"w": torch.eye(2)}
        endless["again"] = endless
        found = matrices(endless)
        assert list(shapes(found)) == ["w"]
        assert reasons(found) == {"again": "leads back to what is read elsewhere"}
        ring: list[dict[str, object]] = [{"w": torch.eye(2 + i)} for i in range(12)]
        for i, each in enumerate(ring):
            each |= {f"to {j}": other for j, other in enumerate(ring) if j != i}
        assert len(shapes(matrices(ring[0]))) == 12


@pytest.mark.parametrize("count", [1, 2])
def test_a_module_on_the_meta_device_is_refused_and_its_plan_is_not(count) -> None:
    layers = [nn.Linear(3, 3, device="meta" if i < count else "cpu") for i in range(2)]
    model = nn.Sequential(*layers)
    told = rf"Sequential: {2 * count} of 4 parameters are on the meta device.* 0\.weight \(load the"
    with pytest.raises(Refusal, match=told) as caught:
        matrices(model)
    assert "\n" not in str(caught.value)
    assert len(plan(model).units) == 2
