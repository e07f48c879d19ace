"""What the neighbours of a layer tell: heads by the vocabulary, routers by the experts."""

import pytest

from kappascope.model.kinds import Layer, kinds_by_neighbours, language_heads


def test_a_head_that_is_called_one_comes_before_what_only_fits() -> None:
    layers = [
        Layer("tok.weight", (100, 8), "embedding"),
        Layer("lm_head.weight", (100, 8), "head"),
        Layer("proj.weight", (100, 8), "output"),
    ]
    assert language_heads(layers) == ["lm_head.weight"]


def test_tables_of_positions_are_no_vocabularies() -> None:
    for name in ("wpe", "embed_positions", "token_type_embeddings", "rel_embeddings", "pos_embed"):
        layers = [
            Layer(f"{name}.weight", (64, 8), "embedding"),
            Layer("out.weight", (64, 8), "output"),
        ]
        assert language_heads(layers) == []
    composed = [Layer("composer.tok.weight", (64, 8), "embedding"), Layer("w", (64, 8), "other")]
    assert language_heads(composed) == ["w"]


@pytest.mark.parametrize(
    ("outputs", "fits"), [(50257, True), (50264, True), (50304, True), (50300, False)]
)
def test_padding_is_to_the_next_multiple_of_a_power_of_two(outputs: int, fits: bool) -> None:
    layers = [Layer("tok", (50257, 8), "embedding"), Layer("proj", (outputs, 8), "output")]
    assert bool(language_heads(layers)) == fits


def test_a_model_without_tokens_has_no_head() -> None:
    assert kinds_by_neighbours([Layer("fc.weight", (10, 8), "other")]) == {}
    assert kinds_by_neighbours([]) == {}


def test_a_layer_with_as_many_outputs_as_experts_is_their_router_only_beside_them() -> None:
    experts = [Layer(f"h.0.moe.experts.{i}.w1.weight", (8, 4), "expert") for i in range(3)]
    router = Layer("h.0.moe.choose.weight", (3, 4), "other")
    elsewhere = Layer("h.1.mlp.choose.weight", (3, 4), "other")
    assert kinds_by_neighbours([*experts, router, elsewhere]) == {router.name: "router"}
