"""Which matrices a model holds: their names and values, and what is left out and why."""

import gc
import pickle
import warnings
import weakref
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fresh_models import MODULES, Conv1D, reasons, shapes
from kappascope.model.attention import attention
from kappascope.model.matrices import Plan, matrices, plan, reader
from kappascope.model.skipped import Skipped, no_weight, unreadable
from sharded_models import read_sharded


class Attention(nn.Module):
    def __init__(self, name: str, fused: nn.Module, out: str = "o_proj", inputs: int = 8) -> None:
        super().__init__()
        self.add_module(name, fused)
        self.add_module(out, nn.Linear(inputs, 8, bias=False))


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


class TestSkipped:
    def test_skipped_does_not_depend_on_what_was_iterated(self) -> None:
        found = matrices(nn.TransformerEncoderLayer(8, 2, 16))
        expected = matrices(nn.TransformerEncoderLayer(8, 2, 16)).skipped
        next(iter(found))
        assert found.skipped == expected
        assert list(found)
        assert found.skipped == expected


class TestCheckpoints:
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
        assert reasons(found) == {"b": "tied to a"}
        assert list(parts(found)) == ["a", "c"]

    def test_what_cannot_be_read_is_skipped_with_its_reason(self) -> None:
        reason = unreadable("layout torch.sparse_coo")
        found = plan({"x": reason, "w": blank(2, 2)})
        assert found.skipped == (Skipped("x", reason),)

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
        told = Skipped("mlp.experts.w[0:1000000]", no_weight("too many to be examined one by one"))
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
    made = {why for why in reasons(found).values() if why.startswith("read as")}
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


NEIGHBOURS = (
    *("q_proj", "k_proj", "o_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "kv_proj"),
    *("in_proj", "out_proj", "x_proj", "dt_proj", "in_proj_qkv", "in_proj_qkvz", "in_proj_ba"),
    *("conv1d", "experts.input_linear", "lora_A", "lora_B"),
)
VECTORS = ("q_norm.weight", "q_bias", "dt_bias", "A_log", "x_proj_weight")


@settings(max_examples=300)
@given(
    st.fixed_dictionaries(
        {},
        optional={f"h.{name}.weight": st.tuples(*[st.integers(0, 12)] * 2) for name in NEIGHBOURS}
        | {f"h.{name}": st.tuples(st.integers(0, 4)) for name in VECTORS}
        | {"h.A_log": st.tuples(*[st.integers(1, 3)] * 2)},
    ),
    st.integers(0, 3),
)
def test_whatever_stands_beside_a_layer_its_parts_are_pieces_of_it(shapes, groups) -> None:
    source = {name: torch.ones(shape) for name, shape in shapes.items()}
    config = {"linear_num_key_heads": groups, "num_attention_heads": 2, "head_dim": 2}
    for unit in plan(source, config).units:
        sizes = [matrix.numel() for _, matrix in unit.matrices(reader(source))]
        assert sizes[0] == sum(sizes[1:]) or len(sizes) == 1
        rows = [row for label, _ in unit.layout.parts for row in unit.layout.rows(label)]
        assert not rows or sorted(rows) == list(range(unit.parts[0].shape[0]))
    attention(plan(source, config))


class TestAdapters:
    """LoRA: the layer beneath keeps its kind, and what is added to it is one matrix."""

    @pytest.fixture
    def adapted(self) -> nn.Module:
        library = pytest.importorskip("tiny_transformers", reason="transformers is not installed")
        peft = pytest.importorskip("peft")
        layers = ["q_proj", "down_proj"]
        settings = peft.LoraConfig(r=2, target_modules=layers, init_lora_weights=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft about the library it adapts
            return peft.get_peft_model(library.tiny("qwen3"), settings)

    def test_layers_beneath_have_their_kinds(self, adapted) -> None:
        found = kinds(plan(adapted))
        stem = "base_model.model.model.layers.0"
        assert found[f"{stem}.self_attn.q_proj.base_layer.weight"] == "query"
        assert found[f"{stem}.mlp.down_proj.base_layer.weight"] == "down"
        assert found[f"{stem}.mlp.down_proj.lora_BA.default.weight"] == "adapter"

    def test_the_product_is_what_merging_adds(self, adapted) -> None:
        name = "base_model.model.model.layers.0.self_attn.q_proj"
        for source in (adapted, adapted.state_dict()):
            found = dict(matrices(source))
            product = found[f"{name}.lora_BA.default.weight"]
            before = found[f"{name}.base_layer.weight"].clone()
            a, b = (found[f"{name}.lora_{letter}.default.weight"] for letter in "AB")
            assert torch.equal(product, b @ a)
        scale = adapted.get_submodule(name).scaling["default"]
        merged = dict(matrices(adapted.merge_and_unload()))[
            "model.layers.0.self_attn.q_proj.weight"
        ]
        torch.testing.assert_close(merged, before + scale * product)

    def test_half_precision_is_multiplied_in_single(self) -> None:
        b, a = torch.randn(6, 2).bfloat16(), torch.randn(2, 4).bfloat16()
        found = read_all({"fc.lora_A.weight": a, "fc.lora_B.weight": b})
        assert torch.equal(found["fc.lora_BA.weight"], b.float() @ a.float())

    def test_factors_that_do_not_fit_have_no_product(self) -> None:
        for a, b in ((blank(2, 4), blank(6, 3)), (blank(2, 4, 1), blank(6, 2, 1, 1))):
            found = parts(plan({"fc.lora_A.weight": a, "fc.lora_B.weight": b}))
            assert "fc.lora_BA.weight" not in found

    def test_a_fused_layer_beneath_is_cut(self) -> None:
        source = {"attn.qkv.base_layer.weight": blank(12, 4), "attn.proj.weight": blank(4, 4)}
        assert "attn.qkv.base_layer.weight[k]" in parts(plan(source))


def test_a_sharded_model_is_read_one_matrix_at_a_time_or_refused_without_values(tmp_path) -> None:
    torch.multiprocessing.spawn(read_sharded, (str(tmp_path / "store"),), nprocs=2)


def test_a_notebook_lists_names_and_shapes_and_escapes_them() -> None:
    shown = matrices({"<b>.weight": torch.zeros(3, 2), "steps": torch.tensor(7)})._repr_html_()
    assert "&lt;b&gt;.weight" in shown and "3 × 2" in shown and "1 matrix, 1 skipped" in shown
