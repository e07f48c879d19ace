"""What names say: the kind and the depth of matrices of models in use."""

import pytest

from kappascope.model.names import depth, kind, layer, stored

KINDS = {
    "query": ["model.layers.0.self_attn.q_proj.weight", "bert.encoder.layer.0.attention.self.query",
              "layers.3.attention.wq.weight", "block.0.layer.0.SelfAttention.q.weight"],
    "key": ["attn1.to_k.weight", "attention.k_lin.weight"],
    "value": ["encoder.layers.0.self_attn.v_proj.weight", "layers.3.attention.wv.weight"],
    "output": ["layer.0.attention.output.dense.weight", "attn1.to_out.0.weight", "c_proj.weight",
               "layers.0.attention.wo.weight", "SelfAttention.o.weight", "attn.proj.weight"],
    "up": ["layer.0.intermediate.dense.weight", "mlp.up_proj.weight", "feed_forward.w3.weight",
           "mlp.dense_h_to_4h.weight", "albert_layers.0.ffn.weight", "ffn.lin1.weight"],
    "gate": ["mlp.gate_proj.weight", "feed_forward.w1.weight", "DenseReluDense.wi_0.weight"],
    "down": ["layer.0.output.dense.weight", "mlp.c_proj.weight", "DenseReluDense.wo.weight",
             "mlp.Wo.weight", "feed_forward.w2.weight", "ffn_output.weight"],
    "embedding": ["wte.weight", "model.embed_tokens.weight", "tok_embeddings.weight",
                  "embeddings.word_embeddings.weight", "pos_embed", "positional_embedding",
                  "shared.weight", "SelfAttention.relative_attention_bias.weight"],
    "head": ["lm_head.weight", "embed_out.weight", "output.weight", "fc.weight", "head.weight",
             "cls.predictions.decoder.weight", "score.weight", "classifier.6.weight"],
    "fused": ["attn.qkv.weight", "attn.in_proj_weight", "attention.query_key_value.weight",
              "mlp.gate_up_proj.weight"],
    "expert": ["mlp.experts.gate_up_proj", "block_sparse_moe.experts.3.w1.weight"],
    "router": ["block_sparse_moe.gate.weight", "mlp.router.weight", "mlp.gate.weight"],
    "recurrent": ["rnn.weight_ih_l0_reverse", "weight_hh"],
    "state": ["mixer.A_log", "mixer.x_proj.weight"],
    "adapter": [
        *("self_attn.q_proj.lora_A.weight", "q_proj.lora_B.default.weight"),
        *("q_proj.oft_R.default.weight", "fc.boft_s.default", "fc.hra_u.default"),
    ],
    "other": ["pooler.dense.weight", "features.3.weight", "", "0.weight",
              "visual_projection.weight"],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "expected"), [(n, k) for k, names in KINDS.items() for n in names]
)
def test_names_in_use_have_their_kind(name: str, expected: str) -> None:
    assert kind(name) == expected


def test_a_shared_expert_is_a_perceptron_like_any_other() -> None:
    assert kind("mlp.shared_experts.down_proj.weight") == "down"


def test_depth_is_the_first_number_that_stands_alone() -> None:
    assert depth("encoder.block.3.layer.0.SelfAttention.q.weight") == 3
    assert depth("0.weight") == 0
    assert depth("fc1.weight") is depth("lm_head.weight") is None
    assert depth("layers." + "9" * 5000 + ".weight") is None


@pytest.mark.parametrize("name", ["a.weight", "a.weight[q]", "a.weight[3.gate]", "a.weight[q]'"])
def test_a_part_belongs_to_what_is_stored(name: str) -> None:
    assert (stored(name), layer(name)) == ("a.weight", "a")


@pytest.mark.parametrize("letter", ["'", "[", "]", ".", "a_", "experts.", "module."])
def test_no_name_takes_long(letter: str) -> None:
    name = letter * 20_000 + "x"
    assert kind(name) in KINDS
    assert layer(name)
