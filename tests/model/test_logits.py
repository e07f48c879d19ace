"""Bounds of attention logits: no input exceeds them, and the worst input comes near."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from kappascope.model.attention import attention
from kappascope.model.logits import LogitBound, Tables, _largest_pair, logit_bounds
from kappascope.model.matrices import plan, reader
from kappascope.model.tensors import vectors

WIDTH, HEADS, SIZE, PLACES = 24, 3, 8, 16
CONFIG: dict[str, Any] = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "max_position_embeddings": PLACES,
}  # fmt: skip


def drawn(*shape: int, seed: int = 0) -> Tensor:
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64)


def state(bias: bool) -> dict[str, Tensor]:
    made = {f"layers.1.self_attn.{part}_proj.weight": drawn(WIDTH, WIDTH, seed=k)
            for k, part in enumerate("qkvo")}  # fmt: skip
    made["layers.1.input_layernorm.weight"] = 1 + 0.3 * drawn(WIDTH)
    if bias:
        made["layers.1.input_layernorm.bias"] = 0.5 * drawn(WIDTH, seed=5)
        made |= {f"layers.1.self_attn.{p}_proj.bias": drawn(WIDTH, seed=6) for p in "qk"}
    return made


def bounded(made: dict[str, Tensor], config: dict[str, Any]) -> list[LogitBound]:
    (layer,), _ = attention(plan(made), config)
    return list(logit_bounds(layer, reader(made), vectors(made), config))


def turned(x: Tensor, places: Tensor) -> Tensor:
    """Rotary positions as Hugging Face has them, written out."""
    speeds = 10_000.0 ** (-torch.arange(0, SIZE, 2, dtype=torch.float64) / SIZE)
    angles = places[:, None] * speeds
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    half = torch.cat([-x[..., SIZE // 2 :], x[..., : SIZE // 2]], -1)
    return x * cos + half * sin


def logits(made: dict[str, Tensor], x: Tensor, rotary: bool) -> Tensor:
    """The largest logit of each head over all pairs of some tokens, as a network computes it."""
    gain = made["layers.1.input_layernorm.weight"]
    shift = made.get("layers.1.input_layernorm.bias")
    if shift is None:
        y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    else:
        y = torch.nn.functional.layer_norm(x, (WIDTH,), gain, shift)
    q, k = (
        y @ made[f"layers.1.self_attn.{part}_proj.weight"].T
        + made.get(f"layers.1.self_attn.{part}_proj.bias", 0.0)
        for part in "qk"
    )
    q, k = (z.unflatten(-1, (HEADS, SIZE)).transpose(0, 1) for z in (q, k))
    if rotary:
        places = torch.arange(len(x), dtype=torch.float64) % PLACES
        q, k = turned(q, places), turned(k, places)
    return (q @ k.mT).abs().amax((1, 2)) / math.sqrt(SIZE)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rotary", [False, True])
def test_no_token_exceeds_the_bound(bias: bool, rotary: bool) -> None:
    made, config = state(bias), CONFIG | ({} if rotary else {"model_type": "bert"})
    found = torch.tensor([one.bound for one in bounded(made, config)])
    largest = torch.zeros(HEADS).double()
    for seed in range(40):
        x = drawn(64, WIDTH, seed=seed) * (1 + 9 * (seed % 3))
        largest = torch.maximum(largest, logits(made, x, rotary))
    assert (largest <= found).all() and (found <= 8 * largest).all()


def test_without_bias_and_rotation_the_bound_is_reached() -> None:
    made, config = state(bias=False), CONFIG | {"model_type": "bert"}
    gain = made["layers.1.input_layernorm.weight"]
    q, k = (made[f"layers.1.self_attn.{p}_proj.weight"] * gain for p in "qk")
    for head, one in enumerate(bounded(made, config)):
        part = slice(head * SIZE, (head + 1) * SIZE)
        u, _, vt = torch.linalg.svd(q[part].T @ k[part])
        reached = logits(made, torch.stack([u[:, 0], vt[0]]), rotary=False)[head]
        assert one.bound == pytest.approx(float(reached), rel=1e-3)


def test_norms_of_queries_and_keys_bound_them_by_their_gains() -> None:
    made = state(bias=False)
    made |= {f"layers.1.self_attn.{part}_norm.weight": torch.full((SIZE,), 2.0) for part in "qk"}
    one = bounded(made, CONFIG)[0]
    assert one.bound == pytest.approx(4 * SIZE / math.sqrt(SIZE), rel=1e-3)


def test_a_table_of_tokens_bounds_the_first_layer_more_tightly() -> None:
    made = {name.replace("layers.1", "layers.0"): w for name, w in state(bias=False).items()}
    (layer,), _ = attention(plan(made), CONFIG)
    table = drawn(200, WIDTH)
    made["embed_tokens.weight"] = table
    given = (layer, reader(made), vectors(made), CONFIG)
    ball = list(logit_bounds(*given))
    tokens = list(logit_bounds(*given, Tables.of(plan(made))))
    pairs = torch.cat([table[torch.randperm(200)] for _ in range(5)])
    later = {name.replace("layers.0", "layers.1"): w for name, w in made.items()}
    seen = logits(later, pairs, rotary=True).tolist()
    for loose, tight, largest in zip(ball, tokens, seen, strict=True):
        assert largest <= tight.bound < loose.bound and tight.method == "every token of the table"


def test_the_largest_pair_is_found_without_looking_at_all() -> None:
    a, b = drawn(3000, 6) * drawn(3000, 1).exp(), drawn(2500, 6, seed=3)
    assert _largest_pair(a, b) == pytest.approx(float((a @ b.T).max()), rel=1e-12)


def test_without_a_norm_layer_there_is_no_bound() -> None:
    made = {name: w for name, w in state(bias=False).items() if "layernorm" not in name}
    assert bounded(made, CONFIG) == []


def test_numbers_beyond_float64_have_no_bound() -> None:
    assert bounded({name: w * 1e200 for name, w in state(bias=False).items()}, CONFIG) == []


# --- sums of tables, and maps between them and attention ------------------------------------------

ABSOLUTE = {**CONFIG, "position_embedding_type": "absolute", "model_type": "bert"}


def embedded(width: int, prefix: str = "") -> dict[str, Tensor]:
    rows = {"word_embeddings": 60, "position_embeddings": PLACES, "token_type_embeddings": 2}
    made = {f"{prefix}embeddings.{name}.weight": drawn(count, width, seed=count)
            for name, count in rows.items()}  # fmt: skip
    made[f"{prefix}embeddings.LayerNorm.weight"] = 1 + 0.3 * drawn(width, seed=1)
    made[f"{prefix}embeddings.LayerNorm.bias"] = 0.5 * drawn(width, seed=2)
    return made


def projections(stem: str) -> dict[str, Tensor]:
    made = {f"{stem}.{part}.weight": drawn(WIDTH, WIDTH, seed=k)
            for k, part in enumerate(("query", "key", "value"))}  # fmt: skip
    return made | {f"{stem}.{part}.bias": drawn(WIDTH, seed=9 + k)
                   for k, part in enumerate(("query", "key", "value"))}  # fmt: skip


def every_sum(made: dict[str, Tensor], prefix: str = "") -> Tensor:
    """The output of the norm layer for every token at every position with either type."""
    words, places, types = (
        made[f"{prefix}embeddings.{name}_embeddings.weight"]
        for name in ("word", "position", "token_type")
    )
    sums = (words[:, None, None] + places[:, None] + types).flatten(0, 2)
    gain, shift = (made[f"{prefix}embeddings.LayerNorm.{end}"] for end in ("weight", "bias"))
    return torch.nn.functional.layer_norm(sums, (sums.shape[1],), gain, shift, eps=1e-12)


def largest(made: dict[str, Tensor], stem: str, x: Tensor) -> Tensor:
    """The largest logit of each head over all pairs of some inputs of attention."""
    q, k = (
        (x @ made[f"{stem}.{part}.weight"].T + made[f"{stem}.{part}.bias"]).unflatten(1, (-1, SIZE))
        for part in ("query", "key")
    )
    return torch.einsum("ihd,jhd->hij", q, k).abs().amax((1, 2)) / math.sqrt(SIZE)


def test_every_sum_of_tables_is_bounded_within_the_root_of_the_heads_size() -> None:
    stem = "encoder.layer.0.attention.self"
    made = embedded(WIDTH) | projections(stem)
    (layer,), _ = attention(plan(made), ABSOLUTE)
    given = (layer, reader(made), vectors(made), ABSOLUTE)
    ball, sums = list(logit_bounds(*given)), list(logit_bounds(*given, Tables.of(plan(made))))
    seen = largest(made, stem, every_sum(made)).tolist()
    for loose, tight, reached in zip(ball, sums, seen, strict=True):
        assert reached <= tight.bound < loose.bound
        assert tight.bound <= 1.05 * math.sqrt(SIZE) * reached  # John's theorem, nearly attained
        assert tight.method == f"every token at {2 * PLACES} positions and types"


def test_a_layer_that_reads_its_own_output_and_a_map_of_the_tables() -> None:
    """ALBERT had no bound: its norm layer of 12 entries did not fit projections of 24."""
    prefix, block = "albert.", "albert.encoder.albert_layer_groups.0.albert_layers.0"
    stem = f"{block}.attention"
    made = embedded(WIDTH // 2, prefix) | projections(stem)
    made["albert.encoder.embedding_hidden_mapping_in.weight"] = drawn(WIDTH, WIDTH // 2)
    made["albert.encoder.embedding_hidden_mapping_in.bias"] = drawn(WIDTH, seed=4)
    made[f"{block}.full_layer_layer_norm.weight"] = 1 + 0.3 * drawn(WIDTH, seed=5)
    made[f"{block}.full_layer_layer_norm.bias"] = 0.2 * drawn(WIDTH, seed=6)
    config = {**ABSOLUTE, "model_type": "albert"}
    (layer,), _ = attention(plan(made), config)
    found = list(logit_bounds(layer, reader(made), vectors(made), config, Tables.of(plan(made))))
    first = every_sum(made, prefix) @ made["albert.encoder.embedding_hidden_mapping_in.weight"].T
    first = first + made["albert.encoder.embedding_hidden_mapping_in.bias"]
    gain, shift = (made[f"{block}.full_layer_layer_norm.{end}"] for end in ("weight", "bias"))
    later = torch.nn.functional.layer_norm(drawn(4000, WIDTH), (WIDTH,), gain, shift)
    assert len(found) == HEADS
    for x in (first, later):
        for one, reached in zip(found, largest(made, stem, x).tolist(), strict=True):
            assert reached <= one.bound


def test_tables_that_nobody_knows_how_to_add_are_not_read() -> None:
    made = {"wte.weight": drawn(9, 4), "other_embedding.weight": drawn(5, 4)}
    assert Tables.of(plan(made)) is None
