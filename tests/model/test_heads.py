"""How many heads a layer has: what configs say, and when they do not decide."""

import pytest

from kappascope.model._heads import Config, Heads, count_beside


def anything(_: Heads) -> bool:
    return True


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"hidden_size": 64, "num_attention_heads": 4}, Heads(4, 4, 16)),
        ({"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}, Heads(4, 2, 16)),
        ({"hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, Heads(4, 4, 32)),  # Gemma
        ({"n_embd": 64, "n_head": 4}, Heads(4, 4, 16)),  # GPT-2
        ({"d_model": 64, "num_heads": 4, "d_kv": 8}, Heads(4, 4, 8)),  # T5
        ({"dim": 64, "n_heads": 4, "n_kv_heads": 2}, Heads(4, 2, 16)),  # Llama's params.json
        ({"d_model": 64, "n_heads": 4, "attn_config": {"kv_n_heads": 2}}, Heads(4, 2, 16)),  # DBRX
        ({"n_embd": 64, "n_head": 4, "multi_query": True}, Heads(4, 1, 16)),  # StarCoder
        ({"text_config": {"hidden_size": 64, "num_attention_heads": 4}}, Heads(4, 4, 16)),
        ({"d_model": 64, "encoder_attention_heads": 4}, Heads(4, 4, 16)),  # BART
    ],
)
def test_configs_in_use_are_understood(config, expected: Heads) -> None:
    assert Config(config).heads("layer", anything) == expected


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_attention_heads": 4},
        {"hidden_size": 65, "num_attention_heads": 4},
        {"hidden_size": 64, "num_attention_heads": 0},
        {"hidden_size": 64, "num_attention_heads": True},
        {"hidden_size": 64, "num_attention_heads": [2, 4]},  # Swin
        {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 3},
        {"hidden_size": 2**40, "num_attention_heads": 4},
    ],
)
def test_what_makes_no_sense_says_nothing(config) -> None:
    assert Config(config).heads("layer", anything) is None


def test_of_two_sections_that_fit_the_name_decides() -> None:
    config = {
        "text_config": {"hidden_size": 64, "num_attention_heads": 4},
        "vision_config": {"hidden_size": 64, "num_attention_heads": 8},
    }
    assert Config(config).heads("text_model.layers.0", anything) == Heads(4, 4, 16)
    assert Config(config).heads("visual.layers.0", anything) == Heads(8, 8, 8)
    assert Config(config).heads("layers.0", anything) is None
    assert Config(config).heads("layers.0", lambda h: h.size == 8) == Heads(8, 8, 8)


def test_encoder_and_decoder_may_differ() -> None:
    config = {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 8}
    assert Config(config).heads("model.decoder.layers.0", anything) == Heads(8, 8, 8)


def test_tensors_beside_the_queries_give_the_number_away() -> None:
    for key, shape in {
        "attn.q_norm.weight": (16,),
        "attn.sinks": (4,),
        "attn.relative_position_bias_table": (169, 4),
    }.items():
        assert count_beside("attn.q_proj", 64, {key: shape}.get) == 4
    whole = {"attn.q_norm.weight": (64,)}  # OLMo 2 normalises all heads together
    assert count_beside("attn.q_proj", 64, whole.get) == 0


def test_a_config_that_contains_itself_comes_to_an_end() -> None:
    endless: dict[str, object] = {"model_type": "gpt2"}
    endless |= {str(i): endless for i in range(100)}
    assert len(Config(endless).sections) == 64
    assert Config(endless).types == {"gpt2"}
