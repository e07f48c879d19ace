"""Which matrices a model holds: their names and values, and what is left out and why."""

import gc
import pickle
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from kappascope.matrices import Matrices, Plan, Skipped, matrices, plan, reader


def shapes(found: Matrices) -> dict[str, tuple[int, ...]]:
    return {name: tuple(matrix.shape) for name, matrix in found}


HARMLESS = ("one-dimensional", "scalar", "empty", "torch.int8", "torch.bool", "not a tensor",
            "optimizer state")  # fmt: skip


def reasons(found: Matrices) -> dict[str, str]:
    return dict(found.skipped)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


class Conv1D(nn.Module):
    """As in GPT-2: a linear layer that stores (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


class Attention(nn.Module):
    def __init__(self, name: str, fused: nn.Module, out: str = "o_proj", inputs: int = 8) -> None:
        super().__init__()
        self.add_module(name, fused)
        self.add_module(out, nn.Linear(inputs, 8, bias=False))


def old_style(norm: Callable[..., nn.Module], layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them deprecated; models still use them
        return norm(layer)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 2),
    "frozen": lambda: nn.Linear(3, 2).requires_grad_(False),
    "bfloat16": lambda: nn.Linear(3, 2).bfloat16(),
    "embedding": lambda: nn.Embedding(5, 3, padding_idx=0),
    "embedding bag": lambda: nn.EmbeddingBag(5, 3),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "conv1d": lambda: nn.Conv1d(3, 4, 5),
    "conv2d": lambda: nn.Conv2d(4, 6, (2, 3), groups=2),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
    "channels last": lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "transposed1d": lambda: nn.ConvTranspose1d(4, 6, 3),
    "transposed2d": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
    "transposed3d": lambda: nn.ConvTranspose3d(2, 3, 2),
    "attention": lambda: nn.MultiheadAttention(6, 2, add_bias_kv=True),
    "cross attention": lambda: nn.MultiheadAttention(6, 2, kdim=4, vdim=5),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "projected lstm": lambda: nn.LSTM(3, 4, proj_size=2),
    "gru": lambda: nn.GRU(3, 4),
    "rnn": lambda: nn.RNN(3, 4),
    "cells": lambda: nn.ModuleList([nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4)]),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "decoder layer": lambda: nn.TransformerDecoderLayer(8, 2, 16),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "lazy": lambda: nn.LazyLinear(3),
    "meta": lambda: nn.Linear(3, 2, device="meta"),
    "tied": Tied,
    "shared layer": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2),
    "Conv1D": lambda: Conv1D(6, 4),
    "data parallel": lambda: nn.DataParallel(nn.Linear(3, 2)),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(3, 2)),
    "parametrized": lambda: parametrize.register_parametrization(
        nn.Linear(3, 2), "weight", Doubled()
    ),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "parametrized lstm": lambda: parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0"),
    "shared and parametrized": lambda: nn.Sequential(
        *[parametrizations.spectral_norm(nn.Linear(3, 3))] * 2
    ),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.ConvTranspose2d(3, 4, 3)),
    "old weight norm": lambda: old_style(nn.utils.weight_norm, nn.Conv1d(3, 4, 5)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", amount=5),
    "empty": nn.ReLU,
}


@pytest.fixture(params=MODULES, ids=lambda name: name.replace(" ", "-"))
def module(request: pytest.FixtureRequest) -> nn.Module:
    torch.manual_seed(0)
    return MODULES[request.param]()


def state(module: nn.Module) -> list[tuple[str, object]]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [
        *((name, (id(t), t._version, t.requires_grad, t.grad, t.is_leaf)) for name, t in tensors),
        *((name, (id(m), m.training, len(m._forward_hooks))) for name, m in module.named_modules()),
    ]


def bits(tensor: Tensor) -> list[object]:
    if isinstance(tensor, nn.UninitializedParameter) or tensor.is_meta:
        return []
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()


class TestEveryModule:
    """What holds for any module, the next one included."""

    def test_matrices_are_detached_dense_floating_and_two_dimensional(self, module) -> None:
        for _, matrix in matrices(module):
            assert type(matrix) is Tensor
            assert matrix.ndim == 2
            assert matrix.is_floating_point()
            assert not matrix.requires_grad

    def test_every_key_of_the_state_dict_appears_once(self, module) -> None:
        found = matrices(module)
        names = [name for name, _ in found if "[" not in name] + [name for name, _ in found.skipped]
        assert len(names) == len(set(names))
        assert {key.removeprefix("module.") for key in module.state_dict()} <= set(names)

    def test_the_module_is_left_as_it_was(self, module) -> None:
        values = {name: bits(tensor) for name, tensor in module.state_dict().items()}
        before, randomness = state(module), torch.get_rng_state()
        for _ in matrices(module):
            assert torch.is_grad_enabled()
        assert state(module) == before
        assert torch.equal(torch.get_rng_state(), randomness)
        assert {name: bits(tensor) for name, tensor in module.state_dict().items()} == values

    def test_no_graph_is_built(self, module) -> None:
        saved: list[Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(saved.append, lambda _: None):
            list(matrices(module))
        assert saved == []

    def test_training_and_evaluation_mode_agree(self, module) -> None:
        training = dict(matrices(module.train()))
        evaluation = dict(matrices(module.eval()))
        torch.testing.assert_close(training, evaluation, rtol=0, atol=0)

    def test_parts_fit_into_their_whole(self, module) -> None:
        found = shapes(matrices(module))
        for whole, shape in found.items():
            parts = [size for name, size in found.items() if name.startswith(f"{whole}[")]
            assert not parts or sum(rows for rows, _ in parts) == shape[0]
            assert all(columns == shape[1] for _, columns in parts)

    def test_its_state_dict_is_complete_as_well(self, module) -> None:
        stored = module.state_dict()
        found = matrices(stored)
        assert all(type(matrix) is Tensor and matrix.ndim == 2 for _, matrix in found)
        assert len([name for name, _ in found if "[" not in name]) + len(found.skipped) >= len(
            stored
        )


class TestLayers:
    def test_a_linear_layer_is_its_weight_and_shares_its_memory(self) -> None:
        layer = nn.Linear(3, 2)
        ((name, matrix),) = matrices(layer)
        assert name == "weight"
        assert matrix.data_ptr() == layer.weight.data_ptr()

    def test_the_storage_dtype_is_kept(self) -> None:
        for dtype in (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2):
            ((_, matrix),) = matrices({"w": torch.ones(2, 2).to(dtype)})
            assert matrix.dtype == dtype

    def test_a_convolution_applied_to_a_patch_is_its_matrix_times_the_patch(self) -> None:
        layer = nn.Conv2d(3, 5, (2, 4), bias=False)
        patch = torch.randn(3, 2, 4)
        ((_, matrix),) = matrices(layer)
        torch.testing.assert_close(matrix @ patch.flatten(), layer(patch).flatten())

    def test_groups_are_the_convolutions_they_are(self) -> None:
        layer = nn.Conv1d(4, 6, 3, groups=2, bias=False)
        found = dict(matrices(layer))
        assert list(found) == ["weight", "weight[0]", "weight[1]"]
        patch = torch.randn(4, 3)
        each = [found[f"weight[{i}]"] @ patch[2 * i : 2 * i + 2].flatten() for i in (0, 1)]
        torch.testing.assert_close(torch.cat(each), layer(patch).flatten())

    @pytest.mark.parametrize("groups", [1, 2])
    def test_a_transposed_convolution_has_its_outputs_in_rows(self, groups: int) -> None:
        layer = nn.ConvTranspose2d(4, 6, 3, groups=groups, bias=False)
        found = dict(matrices(layer))
        matrix = found["weight"]
        assert matrix.shape == (6, 4 // groups * 9)
        pixel = torch.randn(4, 1, 1)  # each output channel and offset: a row, a part of its columns
        inputs = pixel.view(groups, 4 // groups)
        rows = matrix.view(groups, 6 // groups, 4 // groups, 9)
        expected = torch.einsum("goik,gi->gok", rows, inputs).reshape(6, 3, 3)
        torch.testing.assert_close(layer(pixel), expected)
        assert len(found) == (1 if groups == 1 else 3)

    def test_depthwise_convolutions_have_no_parts(self) -> None:
        assert shapes(matrices(nn.Conv2d(4, 4, 3, groups=4))) == {"weight": (4, 9)}

    def test_conv1d_of_gpt2_is_transposed_in_a_module_and_left_alone_in_a_state_dict(self) -> None:
        layer = Conv1D(outputs=6, inputs=4)
        assert torch.equal(dict(matrices(layer))["weight"], layer.weight.T)
        assert torch.equal(dict(matrices(layer.state_dict()))["weight"], layer.weight)

    def test_an_embedding_with_very_many_rows_is_not_copied(self) -> None:
        table = nn.Embedding(250_000, 4)
        ((_, matrix),) = matrices(table)
        assert matrix.data_ptr() == table.weight.data_ptr()

    def test_gates_are_those_of_the_cell(self) -> None:
        cell = nn.LSTMCell(3, 4, bias=False)
        found, x, (h, c) = dict(matrices(cell)), torch.randn(3), torch.randn(2, 4)
        i, f, g, o = (
            found[f"weight_ih[{gate}]"] @ x + found[f"weight_hh[{gate}]"] @ h for gate in "ifgo"
        )
        memory = f.sigmoid() * c + i.sigmoid() * g.tanh()
        torch.testing.assert_close(cell(x, (h, c)), (o.sigmoid() * memory.tanh(), memory))

    def test_a_state_dict_tells_lstm_gru_and_rnn_apart_by_shape(self) -> None:
        for layer, labels in (
            (nn.LSTM(3, 4, bidirectional=True), "ifgo"),
            (nn.LSTM(3, 4, proj_size=2), "ifgo"),
            (nn.GRU(3, 4), "rzn"),
            (nn.RNN(3, 4), ""),
        ):
            found = shapes(matrices({f"rnn.{k}": v for k, v in layer.state_dict().items()}))
            inside = {name[4:]: shape for name, shape in found.items()}
            assert inside == shapes(matrices(layer))
            assert [n[-2] for n in inside if n.startswith("weight_ih_l0[")] == list(labels)

    def test_a_stack_of_experts_lies_below_one_another_and_follows_slice_by_slice(self) -> None:
        stack = torch.randn(3, 4, 5)
        for key in ("mlp.experts.down_proj", "experts.weight", "block_sparse_moe.input.weight"):
            found = dict(matrices({key: stack}))
            assert list(found) == [key, f"{key}[0]", f"{key}[1]", f"{key}[2]"]
            assert torch.equal(found[key], stack.reshape(12, 5))
            assert torch.equal(found[f"{key}[1]"], stack[1])

    def test_a_position_embedding_with_a_batch_dimension_is_its_table(self) -> None:
        assert shapes(matrices({"pos_embed": torch.ones(1, 7, 3)})) == {"pos_embed": (7, 3)}

    def test_a_kernel_in_a_state_dict_has_its_first_dimension_in_rows(self) -> None:
        kernels = {"a.weight": torch.ones(4, 3, 5), "b.weight": torch.ones(4, 3, 2, 2, 2)}
        assert shapes(matrices(kernels)) == {"a.weight": (4, 15), "b.weight": (4, 24)}


class TestFusedAttention:
    def test_in_proj_weight_holds_q_k_and_v_in_this_order(self) -> None:
        layer = nn.MultiheadAttention(6, 2)
        found = dict(matrices(layer))
        q, k, v = layer.in_proj_weight.detach().chunk(3)
        for label, part in {"q": q, "k": k, "v": v}.items():
            assert torch.equal(found[f"in_proj_weight[{label}]"], part)
        assert dict(matrices(layer.state_dict())).keys() == found.keys()

    @pytest.mark.parametrize("name", ["c_attn", "qkv", "Wqkv", "W_pack", "qkv_proj"])
    def test_known_layers_are_split(self, name: str) -> None:
        model = nn.ModuleDict({"attn": Attention(name, nn.Linear(8, 24))})
        for source in (model, model.state_dict()):
            found = shapes(matrices(source))
            assert found[f"attn.{name}.weight"] == (24, 8)
            assert all(found[f"attn.{name}.weight[{part}]"] == (8, 8) for part in "qkv")

    def test_grouped_queries_are_split_by_the_width_of_the_layer_that_follows(self) -> None:
        model = Attention("qkv_proj", nn.Linear(8, 12 + 2 * 6), inputs=12)
        parts = {"q": (12, 8), "k": (6, 8), "v": (6, 8)}  # 24 rows, and yet not three times 8
        for source in (model, model.state_dict()):
            found = shapes(matrices(source))
            assert {part: found[f"qkv_proj.weight[{part}]"] for part in "qkv"} == parts

    @pytest.mark.parametrize("form", [lambda model: model, nn.Module.state_dict])
    def test_attention_to_another_text_holds_k_and_v_beside_its_q(self, form) -> None:
        cross = {"c_attn": Conv1D(16, 8), "q_attn": Conv1D(8, 8), "c_proj": Conv1D(8, 8)}
        own = {"c_attn": Conv1D(24, 8), "c_proj": Conv1D(8, 8)}
        model = nn.ModuleDict({"attn": nn.ModuleDict(own), "cross": nn.ModuleDict(cross)})
        found = dict(matrices(form(model)))
        name = "cross.c_attn.weight"
        assert [key for key in found if key.startswith(name)] == [name, f"{name}[k]", f"{name}[v]"]
        k, v = cross["c_attn"].weight.detach().T.chunk(2)
        assert torch.equal(found[f"{name}[k]"], k) and torch.equal(found[f"{name}[v]"], v)

    def test_twice_the_width_is_cut_only_if_a_config_tells_of_shared_keys(self) -> None:
        source = {"attn.qkv.weight": blank(16, 8), "attn.proj.weight": blank(8, 8)}
        assert list(parts(plan(source))) == list(source)
        config = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
        assert parts(plan(source, config))["attn.qkv.weight[k]"] == (4, 8)

    def test_multi_query_attention_has_one_narrow_key_and_value(self) -> None:
        found = shapes(matrices(Attention("c_attn", nn.Linear(8, 12), out="c_proj")))
        assert found["c_attn.weight[k]"] == (2, 8)

    def test_gpt2_is_turned_round_and_split_also_in_a_state_dict(self) -> None:
        model = Attention("c_attn", Conv1D(24, 8), out="c_proj")
        from_module, from_state = dict(matrices(model)), dict(matrices(model.state_dict()))
        for part in "qkv":
            name = f"c_attn.weight[{part}]"
            assert torch.equal(from_module[name], from_state[name])
            assert torch.equal(from_state[name], model.c_attn.weight.T.chunk(3)["qkv".index(part)])

    @pytest.mark.parametrize(
        ("name", "rows", "out"),
        [
            ("query_key_value", 24, "dense"),  # GPT-NeoX, BLOOM: interleaved by head
            ("qkv_proj", 24, "out_proj"),  # CodeGen: shuffled
            ("qkv", 20, "other"),  # too short for three, and nothing tells how wide q is
            ("qkv", 13, "proj"),  # k and v would not be equal
            ("qkv", 18, "proj"),  # q is no multiple of k
            ("linear", 24, "o_proj"),
        ],
    )
    def test_what_is_not_certain_stays_whole(self, name: str, rows: int, out: str) -> None:
        model = Attention(name, nn.Linear(8, rows), out=out)
        assert list(shapes(matrices(model))) == [f"{name}.weight", f"{out}.weight"]


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
            assert found.skipped == (Skipped("head.weight", "tied to embedding.weight"),)

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
        assert found.skipped == (Skipped("x", reason),)
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
        assert codes.lost and codes.reason == f"quantized codes ({dtype})"
        assert all(not one.lost and one.reason.startswith("a buffer") for one in others)
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
        assert skipped == Skipped(name, str(dtype)) and not skipped.lost

    def test_a_scale_beside_a_weight_of_floats_is_a_matrix(self) -> None:
        source = {"up.weight": torch.eye(2), "up.weight_scale": torch.ones(2, 2)}
        assert list(shapes(matrices(source))) == list(source)

    def test_an_optimizer_alone_is_no_model(self) -> None:
        model = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        found = matrices(optimizer.state_dict())
        assert not dict(found) and {one.reason for one in found.skipped} == {"optimizer state"}

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
        assert found[0].reason == "not a tensor (ndarray)"

    def test_packed_weights_of_a_quantized_layer_are_not_passed_over(self) -> None:
        from torch.ao.nn.quantized import Conv2d, Linear

        assert reasons(matrices(nn.Sequential(Linear(3, 2), Conv2d(3, 2, 1)))) == {
            "0._packed_params._packed_params": "quantized and packed",
            "1._packed_params": "quantized and packed",
        }

    def test_skipped_does_not_depend_on_what_was_iterated(self) -> None:
        found = matrices(nn.TransformerEncoderLayer(8, 2, 16))
        expected = matrices(nn.TransformerEncoderLayer(8, 2, 16)).skipped
        next(iter(found))
        assert found.skipped == expected
        assert list(found)
        assert found.skipped == expected


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
        assert "nested more than 8 deep" in reasons(found).values()

    def test_anything_else_is_refused_with_what_to_do(self) -> None:
        with pytest.raises(TypeError, match=r"expected an nn\.Module.*got str; pass model"):
            matrices("model.safetensors")  # type: ignore[arg-type]

    def test_tensors_are_read_one_at_a_time_and_once(self) -> None:
        alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
        read, most = [], 0

        class Reader(Mapping[str, Tensor]):
            def __iter__(self) -> Iterator[str]:
                return iter([f"module.{i}.weight" for i in range(9)])

            def __len__(self) -> int:
                return 9

            def __getitem__(self, key: str) -> Tensor:
                nonlocal most
                read.append(key)
                tensor = torch.randn(4, 4)
                alive.add(tensor)
                most = max(most, len(alive))
                return tensor

        for name, matrix in matrices(Reader()):
            assert matrix.shape == (4, 4)
            assert len(read) == int(name[0]) + 1
        gc.collect()
        assert read == list(Reader())
        assert most <= 2  # the one at hand, and the next one while it is read


def blank(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def parts(found: Plan) -> dict[str, tuple[int, ...]]:
    return {part.name: part.shape for unit in found.units for part in unit.parts}


def kinds(found: Plan) -> dict[str, str]:
    return {part.name: part.kind for unit in found.units for part in unit.parts}


def read_all(source, config=None) -> dict[str, Tensor]:
    units = plan(source, config).units
    return {part.name: m for unit in units for part, m in unit.matrices(reader(source))}


class TestPlan:
    """What is known before a value is read, and that reading then agrees with it."""

    def test_a_state_dict_and_its_blank_image_have_the_same_plan(self, module) -> None:
        stored = {} if isinstance(module, nn.LazyLinear) else module.state_dict()
        images = {value.data_ptr(): value.to("meta") for value in stored.values()}  # ties stay tied
        image = {name: images[value.data_ptr()] for name, value in stored.items() if value.numel()}
        if not any(value.is_meta for value in stored.values()):
            assert plan(image) == plan({name: stored[name] for name in image})

    def test_reading_gives_what_was_planned_and_asks_once(self, module) -> None:
        for source in (module, module.state_dict()):
            for unit in plan(source).units:
                read = Mock(side_effect=reader(source))
                for part, matrix in unit.matrices(read):
                    assert (part.shape, part.dtype) == (tuple(matrix.shape), matrix.dtype)
                assert tuple(call.args[0] for call in read.mock_calls) == unit.paths

    def test_matrices_are_those_of_the_plan(self, module) -> None:
        if not any(tensor.is_meta for tensor in module.parameters()):
            for source in (module, module.state_dict()):
                torch.testing.assert_close(read_all(source), dict(matrices(source)), rtol=0, atol=0)
                assert plan(source).skipped == matrices(source).skipped

    def test_it_can_be_sent_to_another_process(self) -> None:
        source = {"a.qkv.weight": blank(6, 2), "mlp.experts.gate_up_proj": blank(2, 4, 2)}
        found = plan(source)
        assert pickle.loads(pickle.dumps(found)) == found

    def test_no_value_is_looked_at(self) -> None:
        source = {"model": {"fc.weight": blank(3, 2), "fc.weight_scale": blank(1)}}
        (unit,) = plan(source).units
        assert unit.paths == (("model", "fc.weight"),)
        assert [part.name for part in unit.parts] == ["fc.weight"]

    def test_blank_tensors_that_share_their_storage_are_tied(self) -> None:
        table = blank(12)
        source = {"a": table.view(3, 4), "b": table.view(3, 4), "c": table.view(4, 3)}
        found = plan(source)
        assert found.skipped == (Skipped("b", "tied to a"),)
        assert list(parts(found)) == ["a", "c"]

    def test_what_cannot_be_read_is_skipped_with_its_reason(self) -> None:
        found = plan({"x": SimpleNamespace(reason="layout torch.sparse_coo"), "w": blank(2, 2)})
        assert found.skipped == (Skipped("x", "layout torch.sparse_coo"),)

    def test_two_halves_of_a_weight_are_one_unit(self) -> None:
        source = {"fc.weight_g": torch.tensor([[10.0]]), "fc.weight_v": torch.tensor([[3.0, 4.0]])}
        (unit,) = plan(source).units
        assert unit.paths == (("fc.weight_v",), ("fc.weight_g",))
        assert torch.equal(read_all(source)["fc.weight"], torch.tensor([[6.0, 8.0]]))

    def test_halves_that_changed_since_are_refused(self) -> None:
        source = {"fc.weight_g": torch.ones(1, 1), "fc.weight_v": torch.ones(1, 2)}
        (unit,) = plan(source).units
        with pytest.raises(ValueError, match=r"expected two halves of a weight.*plan again"):
            list(unit.matrices(lambda path: torch.ones(3, 2)))

    def test_every_part_has_its_whole_its_depth_and_its_kind(self) -> None:
        (unit,) = plan({"h.7.attn.qkv.weight": blank(6, 2)}).units
        assert [(p.kind, p.depth, p.whole) for p in unit.parts] == [
            ("fused", 7, None),
            ("query", 7, "h.7.attn.qkv.weight"),
            ("key", 7, "h.7.attn.qkv.weight"),
            ("value", 7, "h.7.attn.qkv.weight"),
        ]

    def test_a_claim_of_very_many_slices_gets_no_parts(self) -> None:
        found = plan({"mlp.experts.w": blank(10**6, 2, 2)})
        assert list(parts(found)) == ["mlp.experts.w"]
        told = Skipped("mlp.experts.w[0:1000000]", "too many to be examined one by one")
        assert found.skipped == (told,) and not found.skipped[0].lost

    def test_stacks_that_could_not_be_parted_are_told_and_others_are_not(self) -> None:
        assert plan({"experts.w": blank(1025, 3, 2)}).skipped
        assert not plan({"experts.w": blank(1024, 3, 2)}).skipped
        for whole in ({"w": blank(5000, 2)}, {"w": blank(2000, 1, 9)}):  # no stack of matrices
            assert not plan(whole).skipped
        grouped = nn.Conv1d(2048, 2048, 3, groups=2048, bias=False)
        assert not plan(grouped).skipped

    def test_masks_rotations_and_biases_of_experts_are_no_matrices(self) -> None:
        found = plan(
            {
                "h.0.attn.bias": blank(1, 1, 8, 8),
                "rotary_emb.cos_cached": blank(8, 4),
                "mlp.experts.gate_up_proj_bias": blank(4, 8),
                "w": blank(2, 2),
            }
        )
        assert list(parts(found)) == ["w"]
        assert not any(skipped.lost for skipped in found.skipped)

    def test_what_transformers_keeps_in_a_module_is_its_config(self) -> None:
        model = nn.ModuleDict({"query_key_value": nn.Linear(4, 12, bias=False)})
        model.config = SimpleNamespace(to_dict=lambda: {"hidden_size": 4, "num_attention_heads": 2})
        assert len(parts(plan(model))) == 4


class TestStateDictsOfModelsInUse:
    """Names and shapes as the models have them, with values that tell where each row came from."""

    def test_interleaved_heads_are_gathered(self) -> None:
        heads, size, width = 3, 2, 6
        q, k, v = (torch.randn(heads, size, width) for _ in range(3))
        source = {"h.0.attention.query_key_value.weight": torch.stack([q, k, v], 1).reshape(-1, 6)}
        config = {"hidden_size": width, "num_attention_heads": heads}
        found = read_all(source, config)
        name = "h.0.attention.query_key_value.weight"
        for label, part in {"q": q, "k": k, "v": v}.items():
            assert torch.equal(found[f"{name}[{label}]"], part.reshape(-1, width))
        assert list(read_all(source)) == [name]

    @pytest.mark.parametrize(
        ("leaf", "more"),
        [
            ("query_key_value", {"new_decoder_architecture": True, "num_kv_heads": 2}),  # Falcon
            ("wqkv", {"num_key_value_heads": 2}),  # InternLM2
        ],
    )
    def test_groups_of_queries_stand_with_their_key_and_value(self, leaf: str, more) -> None:
        groups, shared, size, width = 2, 3, 4, 24
        grid = torch.randn(groups, shared + 2, size, width)
        config = {"hidden_size": width, "num_attention_heads": groups * shared, **more}
        found = read_all({f"attn.{leaf}.weight": grid.reshape(-1, width)}, config)
        assert torch.equal(found[f"attn.{leaf}.weight[q]"], grid[:, :shared].reshape(-1, width))
        assert torch.equal(found[f"attn.{leaf}.weight[k]"], grid[:, -2].reshape(-1, width))
        assert torch.equal(found[f"attn.{leaf}.weight[v]"], grid[:, -1].reshape(-1, width))

    def test_falcon_with_one_key_keeps_it_behind_all_queries(self) -> None:
        config = {
            "hidden_size": 8, "num_attention_heads": 4, "num_kv_heads": 4, "multi_query": True,
            "new_decoder_architecture": False,
        }  # fmt: skip
        weight = torch.randn(12, 8)
        found = read_all({"attn.query_key_value.weight": weight}, config)
        assert torch.equal(found["attn.query_key_value.weight[k]"], weight[8:10])

    def test_chatglm_keeps_each_in_one_piece(self) -> None:
        config = {
            "model_type": "chatglm", "hidden_size": 8, "num_attention_heads": 4,
            "multi_query_group_num": 2,
        }  # fmt: skip
        weight = torch.randn(16, 8)
        found = read_all({"attn.query_key_value.weight": weight}, config)
        assert torch.equal(found["attn.query_key_value.weight[v]"], weight[12:])

    def test_codegen_keeps_four_pieces_with_values_before_keys(self) -> None:
        grid = torch.randn(4, 3, 2, 8)
        found = read_all({"attn.qkv_proj.weight": grid.reshape(24, 8)}, {"model_type": "codegen"})
        assert torch.equal(found["attn.qkv_proj.weight[k]"], grid[:, 2].reshape(8, 8))

    @pytest.mark.parametrize(
        ("up", "down", "labels"),
        [
            ("mlp.gate_up_proj.weight", "mlp.down_proj.weight", "gate up"),  # Phi-3
            ("mlp.Wi.weight", "mlp.Wo.weight", "gate up"),  # ModernBERT
            ("mlp.dense_h_to_4h.weight", "mlp.dense_4h_to_h.weight", "gate up"),  # ChatGLM
            ("mlp.w12.weight", "mlp.w3.weight", "gate up"),  # DINOv2
            ("ff.net.0.proj.weight", "ff.net.2.weight", "up gate"),  # diffusers
            ("ff_proj.weight", "ff_out.weight", "up gate"),  # OLMo
        ],
    )
    def test_gate_and_up_are_told_by_the_width_of_what_follows(self, up, down, labels) -> None:
        weight = torch.randn(8, 3)
        found = read_all({up: weight, down: torch.randn(3, 4)})
        for label, half in zip(labels.split(), weight.chunk(2), strict=True):
            assert torch.equal(found[f"{up}[{label}]"], half)
        plain = parts(plan({up: blank(8, 3), down: blank(3, 8)}))
        assert list(plain) == [up, down]

    def test_fc1_is_gated_only_if_a_config_says_so(self) -> None:
        source = {"mlp.fc1.weight": blank(8, 3), "mlp.fc2.weight": blank(3, 4)}
        assert len(parts(plan(source))) == 2
        assert len(parts(plan(source, {"activation_function": "swiglu"}))) == 4

    @pytest.mark.parametrize("turned", [False, True])
    def test_experts_are_split_into_gate_and_up(self, turned: bool) -> None:
        experts, width, inner = 3, 4, 5
        gate, up = torch.randn(2, experts, inner, width)
        down = torch.randn(experts, width, inner)
        both = torch.cat([gate, up], 1)
        source = {"experts.gate_up_proj": both, "experts.down_proj": down}  # Mixtral, Qwen
        if turned:  # Llama 4
            source = {name: tensor.mT.contiguous() for name, tensor in source.items()}
        found = read_all(source)
        assert torch.equal(found["experts.gate_up_proj"], both.reshape(-1, width))
        for i in range(experts):
            assert torch.equal(found[f"experts.gate_up_proj[{i}.gate]"], gate[i])
            assert torch.equal(found[f"experts.gate_up_proj[{i}.up]"], up[i])
            assert torch.equal(found[f"experts.down_proj[{i}]"], down[i])
        assert "experts.gate_up_proj[0]" not in found

    def test_gpt_oss_has_gate_and_up_in_turn(self) -> None:
        both, down = torch.randn(2, 4, 10), torch.randn(2, 5, 4)
        stacks = {"experts.gate_up_proj": both, "experts.down_proj": down}
        for source, config in (
            (stacks, {"model_type": "gpt_oss"}),
            (stacks | {"experts.gate_up_proj_bias": torch.ones(2, 10)}, None),
        ):
            found = read_all(source, config)
            assert torch.equal(found["experts.gate_up_proj[1.gate]"], both[1, :, ::2].T)
            assert torch.equal(found["experts.gate_up_proj[1.up]"], both[1, :, 1::2].T)

    def test_experts_that_may_be_stored_either_way_are_not_split_further(self) -> None:
        assert list(parts(plan({"experts.gate_up_proj": blank(2, 4, 6)}))) == [
            "experts.gate_up_proj", "experts.gate_up_proj[0]", "experts.gate_up_proj[1]",
        ]  # fmt: skip

    def test_dbrx_keeps_experts_below_one_another(self) -> None:
        w1, w2 = torch.randn(2, 4, 5, 3)
        source = {"ffn.experts.mlp.w1": w1.reshape(20, 3), "ffn.experts.mlp.w2": w2.reshape(20, 3)}
        found = read_all(source, {"ffn_config": {"moe_num_experts": 4}})
        assert torch.equal(found["ffn.experts.mlp.w1[2]"], w1[2])
        assert torch.equal(found["ffn.experts.mlp.w2[2]"], w2[2].T)

    def test_all_layers_of_gpt2_are_turned_round(self) -> None:
        source = {
            "h.0.attn.c_attn.weight": torch.randn(4, 12),
            "h.0.attn.c_proj.weight": torch.randn(4, 4),
            "h.0.mlp.c_fc.weight": torch.randn(4, 16),
            "h.0.mlp.c_proj.weight": torch.randn(16, 4),
        }
        for name, matrix in read_all(source).items():
            assert "[" in name or torch.equal(matrix, source[name].T)

    def test_a_config_tells_of_conv1d_where_no_shape_does(self) -> None:
        source = {"mlp.c_fc.weight": blank(4, 16)}
        assert parts(plan(source)) == {"mlp.c_fc.weight": (4, 16)}
        assert parts(plan(source, {"model_type": "gpt2"})) == {"mlp.c_fc.weight": (16, 4)}

    def test_nanogpt_and_clip_store_the_same_names_the_usual_way(self) -> None:
        source = {
            "h.0.attn.c_attn.weight": blank(12, 4),
            "h.0.mlp.c_fc.weight": blank(16, 4),
            "visual.0.mlp.c_fc.weight": blank(16, 4),
        }
        found = parts(plan(source, {"model_type": "gpt2"}))
        assert found["h.0.attn.c_attn.weight"] == (12, 4)
        assert found["h.0.mlp.c_fc.weight"] == (16, 4)
        assert parts(plan(source))["visual.0.mlp.c_fc.weight"] == (16, 4)

    def test_xlnet_keeps_heads_apart(self) -> None:
        q, o = torch.randn(2, 6, 2, 3)
        source = {"layer.0.rel_attn.q": q, "layer.0.rel_attn.o": o}
        found = read_all(source)
        assert torch.equal(found["layer.0.rel_attn.q"], q.reshape(6, 6).T)
        assert torch.equal(found["layer.0.rel_attn.o"], o.reshape(6, 6))

    def test_positions_in_two_dimensions_are_one_table(self) -> None:
        assert parts(plan({"encoder.pos_embed": blank(1, 4, 5, 8)})) == {
            "encoder.pos_embed": (20, 8)
        }

    def test_kinds_are_known_of_layers_and_of_names(self) -> None:
        layers = nn.ModuleDict(
            {"a": nn.Embedding(5, 3), "b": nn.Conv2d(2, 3, 1), "c": nn.LSTM(2, 3)}
        )
        found = kinds(plan(layers))
        assert (found["a.weight"], found["b.weight"]) == ("embedding", "convolution")
        assert found["c.weight_ih_l0"] == found["c.weight_ih_l0[i]"] == "recurrent"
        assert kinds(plan({"moe.input_linear.weight": blank(2, 6, 2)}))[
            "moe.input_linear.weight"
        ] == ("expert")


def test_a_hostile_config_changes_nothing() -> None:
    endless: dict[str, object] = {"num_attention_heads": 10**30, "head_dim": True, "n_head": -3}
    endless["again"] = endless
    source = {"attn.query_key_value.weight": blank(12, 4)}
    for config in (endless, {"hidden_size": "4", "num_attention_heads": [2]}, {"n_head": None}):
        assert len(parts(plan(source, config))) == 1


TENSORS = st.builds(
    lambda shape, dtype: torch.ones(shape).to(dtype),
    st.lists(st.integers(0, 4), max_size=4),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64]),
)
WORDS = st.sampled_from(
    (
        *("module", "_orig_mod", "model", "experts", "weight", "weight_v", "weight_g", "bias", "0"),
        *("weight_orig", "weight_mask", "parametrizations", "original", "original0", "original1"),
        *("c_attn", "qkv", "in_proj_weight", "proj", "o_proj", "weight_ih_l0", "weight_hh_l0"),
        *("gate_up_proj", "down_proj", "q", "query_key_value", "c_fc", "rel_attn", "Wi", "Wo"),
    )
)
KEYS = st.lists(WORDS, min_size=1, max_size=4).map(".".join)


@settings(max_examples=300)
@given(st.dictionaries(KEYS, TENSORS, max_size=8))
def test_every_key_of_a_state_dict_is_a_matrix_or_skipped_and_no_name_comes_twice(source) -> None:
    found = matrices(source)
    pairs = list(found)
    names = [name for name, _ in pairs] + [name for name, _ in found.skipped]
    assert len(names) == len(set(names))
    made = {reason for _, reason in found.skipped if reason.startswith("read as")}
    wholes = [name for name in names if not name.endswith("]")]
    assert len(wholes) == len(source) + len(made)
    assert all(matrix.ndim == 2 and matrix.numel() > 0 for _, matrix in pairs)


@settings(max_examples=100)
@given(st.dictionaries(st.text(), TENSORS | st.none() | st.integers(), max_size=8))
def test_any_text_may_be_a_name(source) -> None:
    found = matrices(source)
    assert len(list(found)) + len(found.skipped) >= len(source)


@settings(max_examples=200)
@given(
    st.dictionaries(KEYS, TENSORS, max_size=8),
    st.dictionaries(
        st.sampled_from(["hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"]),
        st.integers(0, 4),
    ),
    st.sampled_from(["", "gpt2", "llama4", "gpt_oss", "codegen", "chatglm", "gpt_bigcode"]),
)
def test_with_any_config_every_part_is_a_piece_of_its_whole(source, numbers, family) -> None:
    config = {**numbers, "model_type": family}
    for unit in plan(source, config).units:
        pairs = [*unit.matrices(reader(source))]
        sizes = [matrix.numel() for _, matrix in pairs]
        assert sizes[0] == sum(sizes[1:]) or len(sizes) == 1
        assert all(part.shape == tuple(matrix.shape) for part, matrix in pairs)
