"""One of each pair of factors that undo one another is left out."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from kappascope.corrections import Multipliers
from kappascope.corrections.gauge import FreeSides, free_sides
from kappascope.model.weights import live_weights, why_no_map


class Block(nn.Module):
    """A transformer's block, by the names that are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        parts = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.attention = nn.ModuleDict({name: nn.Linear(4, 4) for name in parts})
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(4, 8), "down_proj": nn.Linear(8, 4)})


class Language(nn.Module):
    def __init__(self, head: str = "lm_head", tokens: int = 9, outputs: int = 9) -> None:
        super().__init__()
        self.token = nn.Embedding(tokens, 4)
        self.add_module(head, nn.Linear(4, outputs, bias=False))
        self.blocks = nn.ModuleList([Block(), Block()])


TEXT = torch.arange(3, 8)[None]


def placed(model: nn.Module) -> dict[str, FreeSides]:
    """The sides of every weight of a model."""
    weights = live_weights(model)
    bound = free_sides(model, weights)
    return {weight.name: bound.get(weight.name, FreeSides()) for weight in weights}


def sides(model: nn.Module) -> dict[str, set[str]]:
    """The sides on which the maps of a model get factors, by the last part of their names."""
    maps = {weight.name for weight in live_weights(model) if why_no_map(weight) is None}
    free = {
        name.removesuffix(".weight").rpartition(".")[2]: {
            side for side in ("rows", "columns") if getattr(its, side)
        }
        for name, its in placed(model).items()
        if name in maps
    }
    return {name: its for name, its in free.items() if its}


def test_one_of_each_pair_that_undoes_itself_is_kept() -> None:
    kept = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    assert sides(Language()) == {name: {"rows"} for name in kept}


def test_with_gauge_everything_gets_factors() -> None:
    model = Language()
    with Multipliers(gauge=True).attach(model, SGD(model.parameters())) as handle:
        assert len(handle.weights) == 13


class TestHeads:
    @pytest.mark.parametrize(
        "name", ["lm_head", "head", "output", "proj", "fc_out", "out", "decoder", "to_logits", "w"]
    )
    def test_a_head_is_left_alone_whatever_it_is_called(self, name: str) -> None:
        model = Language(name)
        with Multipliers().attach(model, SGD(model.parameters())) as handle:
            assert f"{name}.weight" in handle.left_out
            assert len(handle.weights) == 10

    @pytest.mark.parametrize(
        ("tokens", "outputs"),
        [(50257, 50304), (50304, 50257), (65, 128), (100, 104), (32000, 32000)],
    )
    def test_a_head_may_be_padded_and_so_may_the_table(self, tokens: int, outputs: int) -> None:
        assert placed(Language("proj", tokens, outputs))["proj.weight"] == FreeSides(False, False)

    def test_a_layer_of_another_size_is_no_head(self) -> None:
        assert placed(Language("proj", 50257, 4))["proj.weight"].rows
        assert placed(Language("output", 9, 1))["output.weight"].rows

    def test_the_last_layer_of_a_sequence_may_be_one(self) -> None:
        model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        assert set(sides(model)) == {"1"}

    def test_as_many_tokens_as_a_block_has_outputs_make_no_layer_of_it_a_head(self) -> None:
        model = Language("score", tokens=4, outputs=1)  # of bytes, say, with one output
        assert set(sides(model)) > {"q_proj", "v_proj", "o_proj", "up_proj", "down_proj"}
        model = Language()
        model.positions = nn.Embedding(4, 4)
        assert sides(model) == sides(Language())

    def test_a_classifier_is_no_head_of_a_language_model(self) -> None:
        model = nn.ModuleDict({"body": nn.Linear(8, 8), "classifier": nn.Linear(8, 3)})
        assert sides(model)["classifier"] == {"rows", "columns"}


class Experts(nn.Module):
    """A mixture of experts of one's own, with a router of some name."""

    def __init__(self, router: str) -> None:
        super().__init__()
        self.add_module(router, nn.Linear(4, 3))
        pair = {"up": (4, 8), "down": (8, 4)}
        self.experts = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*size) for name, size in pair.items()}) for _ in range(3)
        )


class TestWhatIsLeftAlone:
    @pytest.mark.parametrize("router", ["router", "gate", "w_gating", "switch"])
    def test_a_router_is_known_by_the_experts_beside_it(self, router: str) -> None:
        model = nn.ModuleDict({"block": Experts(router)})
        with Multipliers().attach(model, SGD(model.parameters())) as handle:
            assert "router" in handle.left_out[f"block.{router}.weight"]
            assert len(handle.weights) == 6
        stacked = nn.Module()
        stacked.add_module(router, nn.Linear(4, 3, bias=False))
        stacked.experts_up = nn.Parameter(torch.randn(3, 8, 4))
        reasons = {w.name: why_no_map(w) for w in live_weights(nn.ModuleDict({"moe": stacked}))}
        assert "router" in str(reasons[f"moe.{router}.weight"])
        assert reasons["moe.experts_up"] is None

    def test_the_gate_of_a_perceptron_is_no_router(self) -> None:
        layers = {"gate": nn.Linear(4, 8), "up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}
        model = nn.ModuleDict({"mlp": nn.ModuleDict(layers)})
        assert sides(model) == {
            "gate": {"rows", "columns"},
            "up": {"rows", "columns"},
            "down": {"rows"},
        }

    def test_adapters_are_left_alone_and_named_ones_keep_one_of_a_pair(self) -> None:
        layers = {"lora_A": nn.Linear(8, 2, bias=False), "lora_B": nn.Linear(2, 8, bias=False)}
        model = nn.ModuleDict({"base_layer": nn.Linear(8, 8), **layers})
        with Multipliers().attach(model, SGD(model.parameters())) as handle:
            assert set(handle.weights) == {"base_layer.weight"}
            assert "adapter" in handle.left_out["lora_A.weight"]
        assert placed(model)["lora_A.weight"] == FreeSides()
        assert placed(model)["lora_B.weight"] == FreeSides(columns=False)


class TestRowsOfKeys:
    def test_the_keys_of_a_joined_projection_get_no_factors(self) -> None:
        model = nn.ModuleDict({"c_attn": nn.Linear(2, 6), "norm": nn.LayerNorm(2)})
        optimizer = SGD(model.parameters(), lr=0.1)
        with Multipliers(weight_decay=0.0).attach(model, optimizer) as handle:
            model["c_attn"](torch.ones(1, 2)).square().sum().backward()
            optimizer.step()
            rows = handle.treatments[0].module.rows
            assert ((rows == 1) == torch.tensor([False, False, True, True, False, False])).all()

    def test_rows_in_an_order_that_nothing_tells_get_no_factors(self) -> None:
        model = nn.ModuleDict({"query_key_value": nn.Linear(8, 24), "dense": nn.Linear(8, 8)})
        assert not placed(model)["query_key_value.weight"].rows

    @pytest.fixture
    def library(self) -> ModuleType:
        return pytest.importorskip("tiny_transformers", reason="transformers is not installed")

    def test_they_are_those_that_act_as_keys_in_real_models(self, library) -> None:
        for name, (projection, output) in library.FUSED.items():
            model = library.tiny(name)
            rows = library.attention_rows(model, projection, output)
            # the queries of Qwen3-Next are normalised, and its keys are a layer of their own
            undone = rows["q"] if name == "qwen3 next" else rows["k"]
            assert placed(model)[f"{projection}.weight"].undone == tuple(undone), name

    def test_state_spaces_have_none(self, library) -> None:
        for name in ("mamba", "mamba2"):
            layers = placed(library.tiny(name))
            assert layers["backbone.layers.0.mixer.in_proj.weight"] == FreeSides(columns=False)
            # what follows scales the channels that the projection writes
            assert layers["backbone.layers.0.mixer.conv1d.weight"] == FreeSides(rows=False)

    def test_what_mamba_writes_a_state_with_is_undone_by_what_reads_it(self, library) -> None:
        model, place = library.tiny("mamba"), "backbone.layers.0.mixer"
        before, mixer = model(TEXT).logits, model.get_submodule(place)
        with torch.no_grad():
            mixer.x_proj.weight[1:4] *= 3  # B
            mixer.x_proj.weight[4:] /= 3  # C
            mixer.x_proj.weight[:1] *= 2  # dt
            mixer.dt_proj.weight /= 2
        torch.testing.assert_close(model(TEXT).logits, before)
        assert placed(model)[f"{place}.x_proj.weight"].undone == (4, 5, 6)
        assert not placed(model)[f"{place}.dt_proj.weight"].columns

    def test_what_a_norm_undoes_gets_no_factors(self, library) -> None:
        attention = "model.layers.0.self_attn"
        normalised = placed(library.tiny("qwen3"))
        assert not normalised[f"{attention}.q_proj.weight"].rows
        assert not normalised[f"{attention}.k_proj.weight"].rows
        assert normalised[f"{attention}.v_proj.weight"].rows
        latent = placed(library.tiny("deepseek v3"))
        assert not latent[f"{attention}.q_a_proj.weight"].rows
        assert not latent[f"{attention}.kv_a_proj_with_mqa.weight"].rows
        assert not latent[f"{attention}.q_b_proj.weight"].columns


class TestColumns:
    @pytest.mark.parametrize(
        ("name", "writer"),
        [
            ("mixtral", "model.layers.0.mlp.experts.down_proj"),
            ("gpt oss", "model.layers.0.mlp.experts.down_proj"),
            ("jetmoe", "model.layers.0.mlp.output_linear.weight"),
            ("bert", "bert.encoder.layer.0.attention.output.dense.weight"),
            ("bert", "bert.encoder.layer.0.output.dense.weight"),
            ("deberta", "deberta.encoder.layer.0.attention.output.dense.weight"),
            ("mamba2", "backbone.layers.0.mixer.out_proj.weight"),
        ],
    )
    def test_what_reads_another_layer_gets_none(self, name: str, writer: str) -> None:
        library = pytest.importorskip("tiny_transformers", reason="transformers is not installed")
        assert placed(library.tiny(name))[writer] == FreeSides(columns=False)

    def test_scaling_one_side_and_the_other_changes_nothing(self) -> None:
        """So is it with experts, for whom it was not believed."""
        library = pytest.importorskip("tiny_transformers", reason="transformers is not installed")
        model = library.tiny("jetmoe").model.layers[0].mlp
        x = torch.randn(1, 5, 16, dtype=torch.float64)
        before: Tensor = model(x)
        with torch.no_grad():
            factors = torch.rand(12, dtype=torch.float64) + 0.5
            model.input_linear.weight[:, 12:] *= factors[:, None]  # up, behind the gate
            model.output_linear.weight /= factors
        torch.testing.assert_close(model(x), before)


class Encoder(nn.Module):
    """Blocks, a norm layer that may stand in the last of them, and what reads it."""

    def __init__(self, *between: nn.Module, width: int = 4) -> None:
        super().__init__()
        layers = {"up_proj": nn.Linear(4, 6), "down_proj": nn.Linear(6, 4), "norm": nn.LayerNorm(4)}
        self.blocks = nn.ModuleList([nn.ModuleDict(layers)])
        for number, module in enumerate(between):
            self.add_module(f"between{number}", module)
        self.classifier = nn.Linear(width, 3)


class TestHeadsBehindBlocks:
    def test_the_last_norm_undoes_the_columns_of_what_reads_it(self) -> None:
        library = pytest.importorskip("tiny_transformers", reason="transformers is not installed")
        model, path = library.tiny("bert"), "cls.predictions.transform.dense"
        norm = model.bert.encoder.layer[0].output.LayerNorm
        assert placed(model)[f"{path}.weight"] == FreeSides(columns=False)
        with torch.no_grad():
            factors, shift = torch.rand(2, 16, dtype=torch.float64) + 0.5
            norm.bias.copy_(shift)
            before = model(TEXT).logits
            model.get_submodule(path).weight *= factors
            norm.weight /= factors
            norm.bias /= factors
        torch.testing.assert_close(model(TEXT).logits, before)

    @pytest.mark.parametrize(
        ("model", "is_bound"),
        [
            (Encoder(), True),
            (Encoder(nn.Dropout(), nn.AdaptiveAvgPool1d(1)), True),
            (Encoder(nn.LayerNorm(4)), True),
            (Encoder(nn.GELU()), False),  # through which no scale passes
            (Encoder(nn.Linear(4, 4)), False),
            (Encoder(width=8), False),
        ],
    )
    def test_nothing_else_may_stand_between(self, model, is_bound) -> None:
        assert placed(model)["classifier.weight"].columns is not is_bound

    def test_a_second_head_keeps_factors_that_the_gains_cannot_undo(self) -> None:
        model = Encoder()
        model.other = nn.Linear(4, 2)
        assert placed(model)["other.weight"].columns

    def test_a_module_of_a_norm_and_a_matrix_that_reads_it_is_told_by_widths(self) -> None:
        merging = nn.ModuleDict({"reduction": nn.Linear(8, 4), "norm": nn.LayerNorm(8)})
        writing = nn.ModuleDict({"project": nn.Linear(8, 4), "norm": nn.LayerNorm(4)})
        sides = placed(nn.ModuleDict({"merging": merging, "writing": writing}))
        assert not sides["merging.reduction.weight"].columns
        assert sides["writing.project.weight"] == FreeSides()


class Residual(nn.Module):
    """Convolutions and batch norms as attributes, as in ResNets, in one order or another."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            layer = nn.BatchNorm2d(4) if name.startswith("bn") else nn.Conv2d(4, 4, 3)
            self.add_module(name, layer)


class TestBatchNorm:
    @pytest.mark.parametrize(
        ("names", "undone"),
        [
            (("conv1", "bn1", "conv2", "bn2"), {"conv1", "conv2"}),
            (("conv1", "conv2", "bn1", "bn2"), {"conv1", "conv2"}),
            (("bn1", "conv1", "bn2", "conv2"), {"conv1"}),  # the norm comes first
            (("conv", "bn"), {"conv"}),
            (("conv1", "conv2"), set()),
        ],
    )
    def test_it_undoes_the_rows_of_the_layer_before_it(self, names, undone) -> None:
        model = nn.ModuleDict({"block": Residual(*names)})
        found = {name.split(".")[1] for name, its in placed(model).items() if not its.rows}
        assert found == undone

    def test_one_of_another_width_does_not(self) -> None:
        model = nn.ModuleDict({"conv": nn.Conv2d(4, 6, 3), "bn": nn.BatchNorm2d(4)})
        assert placed(model)["conv.weight"].rows


# --- the function itself is asked: which changes of factors does it not feel? ---------------------


def unfelt(model: nn.Module, text: Tensor, correction: Multipliers) -> int:
    """In how many ways factors can change and the function does not, gains of norms making up.

    A matrix, or a part of a fused one, that changes as a whole does not count: its scale is that
    of its neighbours as well, in the plain model too.
    """
    entries: list[tuple[Tensor, int, object, object]] = []
    for t in correction.attach(model, SGD(model.parameters(), lr=0.1)).treatments:
        for side, factor in enumerate(t.module.factors):
            mask, length = t.module.mask, factor.shape[-1]
            for i in range(factor.numel()):
                if side or mask is None or mask[i % length]:
                    parts = [label for label, _ in t.weight.layout.parts or ()]
                    its = [p for p in parts if not side and i % length in t.weight.layout.rows(p)]
                    entries.append((factor, i, t, (id(factor), i // length, *its)))
    for module in model.modules():
        gains = module._parameters.get("weight") if "Norm" in type(module).__name__ else None
        entries += [(gains, i, None, None) for i in range(0 if gains is None else gains.numel())]

    def computed(entry: Tensor, i: int, t, change: float) -> Tensor:
        flat = entry.data.view(-1)
        kept, weight = flat[i].clone(), None if t is None else t.leaf.detach().clone()
        flat[i] += change
        if t is not None:
            t.leaf.data.copy_(t.module(t.direction))
        found = model(text).logits.flatten()
        flat[i] = kept
        if t is not None:
            t.leaf.data.copy_(weight)
        return found

    with torch.no_grad():
        felt = torch.stack([
            (computed(e, i, t, 1e-5) - computed(e, i, t, -1e-5)) / 2e-5 for e, i, t, _ in entries
        ], 1)  # fmt: skip
    sizes = felt.norm(dim=0)
    values, vectors = torch.linalg.svd(felt / sizes.clamp(min=1e-9), full_matrices=False)[1:]
    is_factor = torch.tensor([group is not None for *_, group in entries])
    nothing = (vectors[values < 1e-6 * values[0]] / sizes.clamp(min=1e-9))[:, is_factor]
    nothing = nothing / nothing.norm(dim=1, keepdim=True).clamp(min=1e-3 / sizes.min())
    groups = [group for *_, group in entries if group is not None]
    wholes = torch.stack([
        torch.tensor([g == group for g in groups]).double() for group in dict.fromkeys(groups)
    ])  # fmt: skip
    wholes = wholes / wholes.norm(dim=1, keepdim=True)
    rest = nothing - nothing @ wholes.T @ wholes
    return int((torch.linalg.svdvals(rest) > 1e-3).sum())


KNOWN = ["gpt2", "gpt_neox", "bloom", "phi3", "falcon grouped", "bigcode", "qwen3", "deepseek v3"]
KNOWN += ["jetmoe", "mixtral"]


@pytest.mark.parametrize("name", KNOWN)
def test_no_factors_can_change_unfelt_but_those_of_a_matrix_as_a_whole(
    name, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers = pytest.importorskip("tiny_transformers")
    text = torch.randint(3, 40, (6, 8), generator=torch.Generator().manual_seed(0))

    def model() -> nn.Module:
        made = transformers.tiny(name)
        made.config._experts_implementation = "eager"  # others know no float64
        return made

    plain, all_sides = model(), model()
    # norm layers ask for float32, in which differences would drown
    monkeypatch.setattr(torch, "float32", torch.float64)
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    assert unfelt(plain, text, Multipliers()) == 0
    assert unfelt(all_sides, text, Multipliers(gauge=True)) > 0  # and this would tell
