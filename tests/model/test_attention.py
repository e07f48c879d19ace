"""Spectra of a head's products, against the products themselves."""

import math
import pickle
import warnings
from types import ModuleType

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from kappascope.matrix.spectra import product_singular_values
from kappascope.model._heads import Heads
from kappascope.model.attention import attention, judged, values
from kappascope.model.matrices import plan, reader
from kappascope.model.skipped import Reason, ReasonKind, Skipped


def exact(left: Tensor, right: Tensor) -> list[float]:
    """Singular values of the product in 60 digits."""
    with mpmath.workdps(60):
        product = mpmath.matrix(left.tolist()) * mpmath.matrix(right.tolist())
        return [float(value) for value in mpmath.svd_r(product, compute_uv=False)]


def layer(width: int, queries: int, keys: int, size: int, seed: int = 0) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    rows = {"q": queries * size, "k": keys * size, "v": keys * size}
    weights = {n: torch.randn(r, width, generator=random) for n, r in rows.items()}
    weights["o"] = torch.randn(width, queries * size, generator=random)
    return {f"layers.0.self_attn.{name}_proj.weight": value for name, value in weights.items()}


def config(width: int, queries: int, keys: int, size: int) -> dict[str, int]:
    return {
        "hidden_size": width, "num_attention_heads": queries, "num_key_value_heads": keys,
        "head_dim": size,
    }  # fmt: skip


def products(source, settings=None):
    found, _ = attention(plan(source, settings), settings)
    return {p.name: p for each in found for p in each.products(reader(source))}


class TestProductSingularValues:
    @pytest.mark.parametrize("shape", [(9, 3, 7), (3, 3, 3), (2, 4, 5), (5, 1, 6)])
    @pytest.mark.parametrize("spread", [0, 6, 14])
    def test_every_value_is_as_close_as_it_says(self, shape, spread: int) -> None:
        m, r, n = shape
        random = torch.Generator().manual_seed(1)
        left, right = torch.randn(m, r, generator=random).double(), torch.randn(r, n).double()
        left *= torch.logspace(0, -spread, r, dtype=torch.float64)
        values, floor = product_singular_values(left, right)
        rank = min(shape)
        expected = torch.tensor(exact(left, right)[:rank], dtype=torch.float64)
        assert values.shape == (rank,)
        assert (values - expected).abs().max() <= floor
        assert floor <= 1e-13 * float((left.norm(dim=0) * right.norm(dim=1)).sum())

    def test_rows_that_are_large_in_one_factor_and_small_in_the_other_lose_nothing(self) -> None:
        left, right = torch.randn(8, 4).double(), torch.randn(4, 8).double()
        scale = torch.logspace(-12, 12, 4, dtype=torch.float64)
        values, _ = product_singular_values(left * scale, right / scale[:, None])
        expected = torch.tensor(exact(left, right)[:4], dtype=torch.float64)
        torch.testing.assert_close(values, expected, rtol=1e-13, atol=0)

    def test_values_beyond_float64s_squares_are_held(self) -> None:
        values, _ = product_singular_values(
            1e200 * torch.eye(3, dtype=torch.float64), 1e-250 * torch.eye(3, dtype=torch.float64)
        )
        torch.testing.assert_close(values, torch.full((3,), 1e-50, dtype=torch.float64))

    def test_one_factor_may_serve_a_stack(self) -> None:
        left, right = torch.randn(5, 6, 2), torch.randn(1, 2, 6)
        values, floor = product_singular_values(left, right)
        each = torch.stack([product_singular_values(a, right[0])[0] for a in left])
        assert floor.shape == (5,)
        torch.testing.assert_close(values, each)

    def test_what_is_not_finite_is_not_a_number_and_spoils_no_other(self) -> None:
        left = torch.randn(2, 4, 2)
        left[0, 0, 0] = math.nan
        values, _ = product_singular_values(left, torch.randn(2, 2, 4))
        assert values[0].isnan().all()
        assert values[1].isfinite().all()


class TestAttention:
    @settings(max_examples=20)
    @given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 4), st.integers(5, 12))
    def test_products_are_those_formed_in_full(self, keys, shared, size, width) -> None:
        queries = keys * shared
        source, told = (f(width, queries, keys, size) for f in (layer, config))
        q, k, v, o = (value.double() for value in source.values())
        found = products(source, told)
        for h in range(queries):
            mine, its = slice(h * size, (h + 1) * size), h // shared
            shared_rows = slice(its * size, (its + 1) * size)
            for kind, full in {
                "qk": q[mine].T @ k[shared_rows],
                "ov": o[:, mine] @ v[shared_rows],
            }.items():
                product = found[f"layers.0.self_attn[{kind}.{h}]"]
                expected = torch.linalg.svdvals(full)[: min(size, width)]
                assert product.shape == (width, width)
                torch.testing.assert_close(
                    torch.tensor(product.values, dtype=torch.float64), expected, rtol=1e-9, atol=0
                )
                assert product.condition_number == pytest.approx(
                    float(expected[0] / expected[-1]), rel=1e-9
                )

    def test_heads_of_torchs_own_attention_are_known(self) -> None:
        model = nn.MultiheadAttention(6, num_heads=3)
        found = products(model)
        q, k, _ = model.in_proj_weight.detach().double().chunk(3)
        expected = torch.linalg.svdvals(q[2:4].T @ k[2:4])[:2]
        assert found["attention[qk.1]"].values == pytest.approx(expected.tolist())
        assert len(found) == 6

    def test_a_module_that_tells_its_heads_is_believed(self) -> None:
        attn = nn.ModuleDict({f"{name}_proj": nn.Linear(8, 8) for name in "qkvo"})
        attn.num_heads = 2
        (found,), _ = attention(plan(nn.ModuleDict({"attn": attn})))
        assert found.heads == Heads(2, 2, 4)

    def test_interleaved_heads_give_the_products_of_separate_ones(self) -> None:
        source, told = layer(12, 3, 3, 4), config(12, 3, 3, 4)
        q, k, v, o = source.values()
        joined = torch.stack([w.view(3, 4, 12) for w in (q, k, v)], 1).reshape(36, 12)
        fused = {
            "layers.0.self_attn.query_key_value.weight": joined,
            "layers.0.self_attn.dense.weight": o,
        }
        assert products(fused, told) == products(source, told)

    def test_gpt2_is_read_the_right_way_round(self) -> None:
        source, told = layer(8, 2, 2, 4), {"n_embd": 8, "n_head": 2, "model_type": "gpt2"}
        q, k, v, o = source.values()
        turned = {"h.0.attn.c_attn.weight": torch.cat([q, k, v]).T, "h.0.attn.c_proj.weight": o.T}
        expected = [p.values for p in products(source, config(8, 2, 2, 4)).values()]
        torch.testing.assert_close([p.values for p in products(turned, told).values()], expected)

    def test_gpt2_that_attends_to_another_text_has_its_q_apart(self) -> None:
        source, told = layer(8, 2, 2, 4), {"n_embd": 8, "n_head": 2, "model_type": "gpt2"}
        q, k, v, o = source.values()
        names = (f"h.0.crossattention.{name}.weight" for name in ("c_attn", "q_attn", "c_proj"))
        turned = dict(zip(names, (torch.cat([k, v]).T, q.T, o.T), strict=True))
        expected = [p.values for p in products(source, config(8, 2, 2, 4)).values()]
        torch.testing.assert_close([p.values for p in products(turned, told).values()], expected)

    def test_the_output_of_bert_stands_beside_its_attention(self) -> None:
        names = ("self.query", "self.key", "self.value", "output.dense")
        source = {f"layer.0.attention.{name}.weight": torch.randn(8, 8) for name in names}
        source["layer.0.output.dense.weight"] = torch.randn(8, 32)
        (found,), skipped = attention(plan(source), {"hidden_size": 8, "num_attention_heads": 2})
        assert found.output is not None
        assert found.output.name == "layer.0.attention.output.dense.weight"
        assert skipped == ()

    def test_values_may_be_wider_than_queries(self) -> None:
        shapes = {"q": (4, 8), "k": (4, 8), "v": (12, 8), "o": (8, 12)}
        source = {f"attn.{n}_proj.weight": torch.randn(s) for n, s in shapes.items()}
        found = products(source, {"num_attention_heads": 2, "head_dim": 2})
        assert len(found["attn[qk.0]"].values) == 2
        assert len(found["attn[ov.0]"].values) == 6

    def test_t5_tells_its_heads_once_for_all_layers(self) -> None:
        source = {
            f"block.{i}.SelfAttention.{name}.weight": torch.randn(8, 8)
            for i in (0, 1)
            for name in "qkvo"
        }
        source["block.0.SelfAttention.relative_attention_bias.weight"] = torch.randn(32, 2)
        found, _ = attention(plan(source))
        assert [each.heads.queries for each in found] == [2, 2]

    def test_without_a_number_of_heads_there_is_a_reason_and_no_product(self) -> None:
        source = layer(8, 2, 2, 4)
        for told, why in (({}, "there is no config"), ({"n_head": 3}, "no config fits its shapes")):
            found, (skipped,) = attention(plan(source, told), told)
            assert found == ()
            text = f"number of heads unknown: {why} and nothing beside it tells"
            reason = Reason(ReasonKind.HEADS_UNKNOWN, text)
            assert skipped == Skipped("layers.0.self_attn[qk]", reason)

    def test_outputs_that_do_not_fit_leave_the_queries_and_keys(self) -> None:
        source = layer(8, 2, 2, 4)
        source["layers.0.self_attn.o_proj.weight"] = torch.randn(8, 6)
        (found,), skipped = attention(plan(source), config(8, 2, 2, 4))
        assert [p.kind for p in found.products(reader(source))] == ["QK", "QK"]
        assert [each.name for each in skipped] == ["layers.0.self_attn[ov]"]

    def test_a_dead_row_makes_a_product_singular_and_a_zero_one_undefined(self) -> None:
        source = layer(8, 2, 2, 4)
        source["layers.0.self_attn.q_proj.weight"][1] = 0
        source["layers.0.self_attn.k_proj.weight"][4:] = 0
        source["layers.0.self_attn.v_proj.weight"][0, 0] = math.nan
        found = products(source, config(8, 2, 2, 4))
        assert found["layers.0.self_attn[qk.0]"].condition_number == math.inf
        assert "numerically singular" in found["layers.0.self_attn[qk.0]"].status
        assert found["layers.0.self_attn[qk.1]"].condition_number is None
        assert found["layers.0.self_attn[qk.1]"].status.startswith("degenerate")
        assert found["layers.0.self_attn[ov.0]"].status == "failed: non-finite"
        assert found["layers.0.self_attn[ov.0]"].values == ()
        assert found["layers.0.self_attn[ov.1]"].status == "ok"

    def test_half_precision_is_read_without_loss(self) -> None:
        for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
            source = {name: value.to(dtype) for name, value in layer(8, 2, 1, 4).items()}
            wide = {name: value.double() for name, value in source.items()}
            told = config(8, 2, 1, 4)
            assert products(source, told) == products(wide, told)

    def test_the_config_of_the_plan_is_the_one_that_counts(self) -> None:
        found = plan(layer(8, 2, 2, 4), config(8, 2, 2, 4))
        assert attention(found)[0][0].heads == Heads(2, 2, 4)

    def test_a_layer_can_be_sent_to_another_process(self) -> None:
        (found,), _ = attention(plan(layer(8, 2, 2, 4)), config(8, 2, 2, 4))
        assert pickle.loads(pickle.dumps(found)) == found

    def test_convolutions_and_lone_keys_are_no_attention(self) -> None:
        source = {"q.weight": torch.randn(4, 4, 1, 1), "att.key.weight": torch.randn(4, 4)}
        assert attention(plan(source)) == ((), ())


def test_a_product_below_the_range_of_float64_is_no_error() -> None:
    sigma = torch.tensor([5e-324, 0.0], dtype=torch.float64)
    _, kappa, status = judged(sigma, 0.0)
    assert kappa == math.inf and status.endswith("condition number at least 1")


class TestRealModels:
    """Layers of the transformers library, whose heads are cut out by hand here."""

    @pytest.fixture
    def library(self) -> ModuleType:
        return pytest.importorskip("tiny_transformers", reason="transformers is not installed")

    @staticmethod
    def expect(model: nn.Module, pairs: dict[str, tuple[Tensor, Tensor]]) -> None:
        found = products(model)
        assert {name.rpartition("[")[2] for name in found} == set(pairs)
        for name, (left, right) in pairs.items():
            (product,) = (each for key, each in found.items() if key.endswith(f"[{name}"))
            values = torch.linalg.svdvals(left @ right)[: len(product.values)]
            assert product.values == pytest.approx(values.tolist(), rel=1e-9)
            assert product.shape == (left.shape[0], right.shape[1])

    @pytest.mark.parametrize("name", ["deepseek v2", "deepseek v3"])
    def test_heads_of_latent_attention_compare_what_is_not_rotated(self, library, name) -> None:
        model = library.tiny(name)
        layer = model.model.layers[0].self_attn
        queries = layer.q_b_proj if name == "deepseek v3" else layer.q_proj
        q = queries.weight.detach().view(4, 6, -1)[:, :4]
        k, v = layer.kv_b_proj.weight.detach().view(4, 9, 10).split([4, 5], dim=1)
        o = layer.o_proj.weight.detach().view(16, 4, 5)
        pairs = {f"qk.{h}]": (q[h].T, k[h]) for h in range(4)}
        self.expect(model, pairs | {f"ov.{h}]": (o[:, h], v[h]) for h in range(4)})

    def test_what_one_token_writes_in_latent_attention_is_the_sum_of_its_heads(
        self, library
    ) -> None:
        model = library.tiny("deepseek v3")
        layer = model.model.layers[0].self_attn
        (found,), _ = attention(plan(model))
        o, v = values(found.units, (found.output, found.value), reader(model))
        latent = torch.randn(1, 10, dtype=torch.float64)
        summed = sum(
            left @ (right @ latent[0])
            for left, right in zip(o.T.unflatten(0, (4, 5)).mT, v.unflatten(0, (4, 5)), strict=True)
        )
        _, states = layer.expand_kv(latent[None, None], torch.zeros(1, 1, 1, 2).double())
        torch.testing.assert_close(layer.o_proj(states.flatten()).detach(), summed)

    def test_the_gates_of_queries_are_no_part_of_a_product(self, library) -> None:
        model = library.tiny("qwen3 next")
        layer = model.model.layers[0].self_attn
        q = layer.q_proj.weight.detach().view(4, 2, 8, 16)[:, 0]
        k, v = (each.weight.detach().view(2, 8, 16) for each in (layer.k_proj, layer.v_proj))
        o = layer.o_proj.weight.detach().view(16, 4, 8)
        pairs = {f"qk.{h}]": (q[h].T, k[h // 2]) for h in range(4)}
        self.expect(model, pairs | {f"ov.{h}]": (o[:, h], v[h // 2]) for h in range(4)})

    def test_interleaved_heads_of_deberta(self, library) -> None:
        model = library.tiny("deberta")
        layer = model.deberta.encoder.layer[0].attention
        q, k, v = layer.self.in_proj.weight.detach().view(4, 3, 4, 16).unbind(1)
        o = layer.output.dense.weight.detach().view(16, 4, 4)
        pairs = {f"qk.{h}]": (q[h].T, k[h]) for h in range(4)}
        self.expect(model, pairs | {f"ov.{h}]": (o[:, h], v[h]) for h in range(4)})

    @pytest.mark.parametrize(
        ("name", "reason"),
        [
            ("qwen3 next linear", "a convolution stands between queries and keys"),
            ("qwen3.5 linear", "a convolution stands between queries and keys"),
            ("jetmoe", "its queries come from experts"),
        ],
    )
    def test_what_does_not_simply_meet_has_no_product_but_a_reason(
        self, library, name: str, reason: str
    ) -> None:
        found, (skipped,) = attention(plan(library.tiny(name)))
        assert found == ()
        assert str(skipped.reason) == reason

    def test_state_spaces_have_neither(self, library) -> None:
        for name in ("mamba", "mamba2"):
            assert attention(plan(library.tiny(name))) == ((), ())

    def test_adapted_layers_have_products_once_the_adapters_are_merged(self, library) -> None:
        peft = pytest.importorskip("peft")
        settings = peft.LoraConfig(r=2, target_modules=["v_proj"], init_lora_weights=False)
        model = library.tiny("qwen3")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of peft about the library it adapts
            adapted = peft.get_peft_model(model, settings)
        found, (skipped,) = attention(plan(adapted, model.config.to_dict()))
        assert found == ()
        assert str(skipped.reason) == "adapters add to its matrices: merge them first"
        merged = adapted.merge_and_unload()
        (found,), skipped = attention(plan(merged, model.config.to_dict()))
        assert (found.heads, skipped) == (Heads(4, 2, 8), ())
