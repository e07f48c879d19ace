"""One layout says how a tensor is a matrix, whether it is stored, live or saved."""

import pickle
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from kappascope.model._heads import Config
from kappascope.model.layouts import Layout, Surroundings, layout_of
from kappascope.model.matrices import matrices, plan
from kappascope.model.weights import live_weights

LAYERS = [
    nn.Linear(4, 3),
    nn.Conv2d(4, 6, 3),
    nn.Conv2d(4, 6, 3, groups=2),
    nn.Conv2d(4, 4, 3, groups=4),
    nn.ConvTranspose2d(4, 6, 3),
    nn.ConvTranspose2d(4, 6, 3, groups=2),
    nn.ConvTranspose1d(4, 8, 3, groups=4),
    nn.ConvTranspose1d(4, 4, 3, groups=4),
]


class Conv1D(nn.Module):
    """A layer that stores its matrix (in, out), as GPT-2's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 12))


@pytest.mark.parametrize("layer", [*LAYERS, Conv1D()], ids=str)
class TestWeightsOfModules:
    def test_the_tensor_of_a_matrix_is_its_inverse(self, layer) -> None:
        layout = layout_of(Surroundings("weight", tuple(layer.weight.shape), owner=layer))
        matrix = layout.matrix(layer.weight)
        assert layout.shape == tuple(matrix.shape)
        assert torch.equal(layout.tensor(matrix), layer.weight)
        assert layout.tensor(matrix).shape == layer.weight.shape

    def test_the_parts_of_a_stack_are_its_matrices(self, layer) -> None:
        layout = layout_of(Surroundings("weight", tuple(layer.weight.shape), owner=layer))
        whole, *parts = (matrix for _, matrix in layout.cut(layer.weight))
        matrix = layout.matrix(layer.weight)
        assert torch.equal(matrix.flatten(0, -2), whole)
        assert not parts or torch.equal(matrix, torch.stack(parts))

    def test_it_can_be_sent_to_another_process(self, layer) -> None:
        layout = layout_of(Surroundings("weight", tuple(layer.weight.shape), owner=layer))
        assert pickle.loads(pickle.dumps(layout)) == layout


def test_a_stack_of_trials_is_taken_as_it_is() -> None:
    trials = torch.randn(5, 3, 4)
    assert Layout.plain((5, 3, 4)).matrix(trials) is trials
    assert Layout.plain((5, 3, 4)).tensor(trials) is trials


def test_an_empty_projection_tells_nothing_of_its_neighbours() -> None:
    for empty in ((0, 12), (12, 0), (0, 0)):
        near = {"attn.c_attn.weight": empty}.get
        assert layout_of(Surroundings("attn.c_proj.weight", (4, 5), near)).order == (0, 1)


def test_heads_that_fit_a_matrix_turned_round_are_not_cut_out_of_it() -> None:
    config = Config({"model_type": "gpt_bigcode", "n_head": 4, "head_dim": 1})
    near = {"attn.c_attn.weight": (4, 12)}.get
    found = layout_of(Surroundings("attn.c_attn.weight", (4, 12), near, config=config))
    assert all(piece.shape[1] == 4 for _, piece in found.cut(torch.empty(4, 12)))


FUSED = [
    *("gpt2", "gpt_neox", "bloom", "codegen", "phi3", "falcon", "falcon grouped", "falcon one key"),
    *("bigcode", "bigcode one key", "qwen3 next", "deepseek v2", "deepseek v3", "deberta"),
    "deberta with positions",
]


def parts(model: nn.Module, name: str) -> dict[str, list[int]]:
    """The rows of each part of a layer's weight, as the plan of the model has them."""
    units = {unit.parts[0].name: unit for unit in plan(model).units}
    layout = units[f"{name}.weight"].layout
    return {label: sorted(layout.rows(label)) for label, _ in layout.parts}


def numbers(where: Tensor) -> list[int]:
    return where.nonzero().flatten().tolist()


class TestRowsOfRealModels:
    """Rows are moved one by one in models of the transformers library: what moves tells."""

    @pytest.fixture
    def library(self) -> ModuleType:
        return pytest.importorskip("tiny_transformers", reason="transformers is not installed")

    @pytest.mark.parametrize("name", FUSED)
    def test_fused_attention_is_cut_where_the_model_cuts_it(self, library, name: str) -> None:
        projection, output = library.FUSED[name]
        model = library.tiny(name)
        assert parts(model, projection) == library.attention_rows(model, projection, output)

    @pytest.mark.parametrize("name", ["gpt2", "qwen3 next", "deepseek v3"])
    def test_a_state_dict_without_a_config_is_cut_alike(self, library, name: str) -> None:
        model = library.tiny(name)
        projection, _ = library.FUSED[name]
        assert parts(model.state_dict(), projection) == parts(model, projection)

    def test_every_fused_model_is_tried(self, library) -> None:
        assert set(FUSED) == set(library.FUSED)

    @pytest.mark.parametrize("name", ["deepseek v2", "deepseek v3"])
    def test_rotated_rows_of_latent_attention_are_apart(self, library, name: str) -> None:
        model, place = library.tiny(name), "model.layers.0.self_attn"
        rows = library.attention_rows(model, f"{place}.kv_a_proj_with_mqa", f"{place}.o_proj")
        latent = parts(model, f"{place}.kv_a_proj_with_mqa")
        assert (latent["rope"], latent["latent"]) == (rows["k"], rows["v"])
        config, query = model.config, "q_b_proj" if name == "deepseek v3" else "q_proj"
        queries = parts(model, f"{place}.{query}")
        size = config.qk_nope_head_dim + config.qk_rope_head_dim
        assert all(row % size < config.qk_nope_head_dim for row in queries["nope"])
        assert len(queries["rope"]) == 4 * config.qk_rope_head_dim

    @pytest.mark.parametrize(
        ("name", "place"),
        [("mamba", "backbone.layers.0.mixer"), ("zamba", "model.layers.0.mamba")],
    )
    def test_the_inputs_and_gates_of_mamba_are_apart(self, library, name, place) -> None:
        model = library.tiny(name)
        felt = library.moved(model, f"{place}.in_proj", f"{place}.out_proj", tokens=2, at=0)
        later = felt[:, 1].any(-1)  # a gate acts on its own token only
        expected = {"x": numbers(later), "z": numbers(~later)}
        assert parts(model, f"{place}.in_proj") == expected

    def test_what_mamba_reads_the_state_with_is_apart(self, library) -> None:
        model, place = library.tiny("mamba"), "backbone.layers.0.mixer"
        felt = library.moved(model, f"{place}.x_proj", f"{place}.out_proj", tokens=2, at=0)
        assert parts(model, f"{place}.x_proj")["C"] == numbers(~felt[:, 1].any(-1))

    @pytest.mark.parametrize(
        ("name", "place"),
        [("mamba2", "backbone.layers.0.mixer"), ("bamba", "model.layers.0.mamba")],
    )
    def test_the_projection_of_mamba_2_is_cut_into_five(self, library, name, place) -> None:
        model = library.tiny(name)
        felt = library.moved(model, f"{place}.in_proj", f"{place}.norm", tokens=2, at=0)
        now, later = felt[:, 0].sum(-1), felt[:, 1].sum(-1)
        expected = {
            "z": now == 0,  # it acts behind what is observed
            "x": now == 1,
            "B": (now == 16) & (later == 16),  # all channels of a group
            "C": (now == 16) & (later == 0),  # which reads the state and does not write it
            "dt": now == 8,  # all channels of a head
        }
        assert parts(model, f"{place}.in_proj") == {k: numbers(v) for k, v in expected.items()}

    @pytest.mark.parametrize(
        ("name", "leaf"),
        [("qwen3 next linear", "in_proj_qkvz"), ("qwen3.5 linear", "in_proj_qkv")],
    )
    def test_linear_attention_is_cut_where_the_model_cuts_it(self, library, name, leaf) -> None:
        model, place = library.tiny(name), "model.layers.0.linear_attn"
        first, second = (
            library.moved(model, f"{place}.{leaf}", f"{place}.norm", tokens=2, at=at)[:, 1].sum(-1)
            for at in (0, 1)
        )
        expected = {
            "q": (second > 1) & (first == 0),
            "k": (second > 1) & (first > 1),
            "v": (second == 1) & (first == 1),
            "z": (second == 0) & (first == 0),
        }
        assert parts(model, f"{place}.{leaf}") == {
            label: numbers(rows) for label, rows in expected.items() if rows.any()
        }

    def test_rates_and_decays_of_linear_attention_are_apart(self, library) -> None:
        model, place = library.tiny("qwen3 next linear"), "model.layers.0.linear_attn"
        felt = library.moved(model, f"{place}.in_proj_ba", f"{place}.norm", tokens=2, at=0)
        wrote = felt[:, 1].any(-1)  # at the first token there is nothing to decay
        assert parts(model, f"{place}.in_proj_ba") == {"b": numbers(wrote), "a": numbers(~wrote)}

    def test_the_experts_of_jetmoe_are_gate_up_and_down(self, library) -> None:
        model = library.tiny("jetmoe")
        layer, found = model.model.layers[0].mlp, dict(matrices(model))
        x, place = torch.randn(5, 16, dtype=torch.float64), "model.layers.0.mlp"
        logits = x @ found[f"{place}.router.layer.weight"].T
        chosen = logits.topk(2).indices
        gates = logits.gather(1, chosen).softmax(-1)
        expected = layer.bias.detach().expand(5, 16).clone()
        for i, (experts, shares) in enumerate(zip(chosen.tolist(), gates, strict=True)):
            for expert, share in zip(experts, shares, strict=True):
                gate, up = (
                    found[f"{place}.input_linear.weight[{expert}.{label}]"] @ x[i]
                    for label in ("gate", "up")
                )
                down = found[f"{place}.output_linear.weight[{expert}]"]
                expected[i] += share * (down @ (nn.functional.silu(gate) * up))
        with torch.no_grad():
            torch.testing.assert_close(layer(x[None])[0], expected)

    def test_keys_and_values_of_jetmoe_are_halves(self, library) -> None:
        model, place = library.tiny("jetmoe"), "model.layers.0"
        projection = f"{place}.self_attention.kv_proj"
        rows = library.attention_rows(model, projection, f"{place}.post_attention_layernorm")
        assert parts(model, projection) == rows


class Kernel(nn.Module):
    """A convolution of a class of one's own."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape))


class StandardizedConv(Kernel):
    pass


class Trials(Kernel):
    pass


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (Kernel(6, 4, 3, 3), (6, 36)),
        (StandardizedConv(6, 4, 3), (6, 12)),
        (Trials(5, 3, 4), (5, 3, 4)),
    ],
)
def test_a_class_of_ones_own_is_seen_alike_by_corrections_and_matrices(layer, shape) -> None:
    (weight,) = live_weights(layer)
    whole, *slices = (matrix for _, matrix in matrices(layer))
    assert weight.matrix().shape == shape
    assert torch.equal(weight.matrix().flatten(0, -2), whole)
    assert not slices or torch.equal(weight.matrix(), torch.stack(slices))
    weight.write(2 * weight.matrix())
    assert torch.equal(next(iter(matrices(layer)))[1], weight.matrix().flatten(0, -2))
