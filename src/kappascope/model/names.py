"""What a weight does, and how deep it stands, by its name: the names that models in use give.

One table. What a name alone does not tell (``dense`` of BERT, ``wo`` of T5 and of Llama) its
surroundings do, and what they do not tell either is "other".
"""

from __future__ import annotations

import re

ROLES = {
    "query": "q_proj|query|wq|q|to_q|q_lin|linear_q|query_proj|q_proj_weight|q_b_proj|q_attn|"
    "attn_q",
    "key": "k_proj|key|wk|k|to_k|k_lin|linear_k|key_proj|k_proj_weight|attn_k",
    "value": "v_proj|value|wv|v|to_v|v_lin|linear_v|value_proj|v_proj_weight|attn_v",
    "joined": "c_attn|qkv|qkv_proj|in_proj|in_proj_weight|Wqkv|W_pack|query_key_value|att_proj|"
    "attn_qkv",
    "up": "up_proj|w3|fc1|c_fc|linear1|dense_h_to_4h|fc_in|wi|wi_1|up|lin1|ffn|Wi|ff_proj|ffn_up",
    "gate": "gate_proj|w1|wi_0|gate|in_proj_z|ffn_gate",
    "down": "down_proj|w2|fc2|linear2|dense_4h_to_h|fc_out|down|lin2|ffn_output|ff_out|"
    "output_linear|ffn_down",
    "out": "o_proj|out_proj|wo|to_out|out_lin|proj|dense|o|out|output|Wo|attn_out|to_add_out|"
    "attn_output",
    "writer": "c_proj",  # of GPT-2, in attention and in the perceptron
}
# A role is what a kind is called, but for these.
_KINDS = {"joined": "fused", "out": "output"}

# Matched at the end of a path, before its last name alone is looked at.
_ENDS = {
    # of LoRA and its kin, and of what else the peft library puts beside a layer
    "adapter": r"(^|\.)((de|g|gra|tiny|uni|vb|rand|poly_|supertuning_)?lora|hada|lokr|b?oft|psoft|"
    r"hira|hra|miss|adamss|peanut|p?vera|c3a|fourierft|waveft|shira|ia3|lily|deft)_\w+(\.\w+)?",
    "router": r"(^|\.)(router|shared_expert_gate|ffn_gate_inp)(\.\w+)?|"
    r"(moe|mlp|feed_forward|ffn)\.gate(\.wg)?",
    "expert": r"(^|\.)((local_)?experts|expert_\w+)(\.\w+)*|(^|\.)ffn_\w+_exps",
    "recurrent": r"(^|\.)weight_(ih|hh|hr)\w*",
    "state": r"(^|\.)(A_log|x_proj|dt_proj|x_dt_proj|in_proj_(ba|[ab]))",
    "latent": r"(^|\.)q_a_proj",
    "head": r"lm_head|embed_out|qa_outputs|output_projection|(^|\.)predictions\.decoder|"
    r"seq_relationship|vocab_projector|to_logits|(^|\.)(score|logits|heads?(\.head)?)|"
    r"^(model\.)?(fc|output|classifier(\.\w+)?)",
    "embedding": r"(^|\.)(wte|wpe|shared|(token|position)_embd|class_token|cls_token|"
    r"(\w+_)?(embed|embeddings?|emb)|embed_\w+|relative_attention_bias|\w*position_bias_table|rel_pos_[hw])",
    "output": r"attention\.output\.dense",
    "up": r"intermediate\.dense|(ffn|feed_forward)\.key|ff\.net\.0\.proj|(^|\.)mlp\.0",
    "down": r"output\.dense|(ffn|feed_forward)\.value|ff\.net\.2|(^|\.)mlp\.2|"
    r"(^|\.)(mlp|ffn?|feed_forward|DenseReluDense)\.([wW]o|c_proj)",
    "fused": r"(^|\.)(gate_up_proj|w12|weights_in|gated_layers|wqkv|kv_a_proj_with_mqa|kv_b_proj)",
    "other": r"pooler\.dense|(^|\.)transform\.dense|predictions\.dense",
}
_SURROUNDINGS = {kind: re.compile(f"({pattern})$") for kind, pattern in _ENDS.items()}


def role(path: str) -> str | None:
    """What a layer does in a transformer, by the last part of its name that says so.

    >>> role("model.layers.0.self_attn.k_proj"), role("h.0.mlp.c_fc"), role("features.3")
    ('key', 'up', None)
    """
    parts = [part for part in path.split(".") if not part.isdigit()]
    last = parts[-1] if parts else ""
    return next((name for name, names in ROLES.items() if re.fullmatch(names, last)), None)


def kind(name: str) -> str:
    """One word for what the matrix ``name`` does, the column of a table of layers and kinds.

    >>> kind("h.0.attn.c_proj.weight"), kind("h.0.mlp.c_proj.weight"), kind("wte.weight")
    ('output', 'down', 'embedding')
    >>> kind("encoder.layer.3.intermediate.dense.weight"), kind("features.3.weight")
    ('up', 'other')
    """
    path = layer(name)
    for its_kind, pattern in _SURROUNDINGS.items():
        if pattern.search(path):
            return its_kind
    its_role = role(path) or "other"
    return "output" if its_role == "writer" else _KINDS.get(its_role, its_role)


def is_mask(name: str) -> bool:
    """Whether what has this name is added to logits, and may be minus infinity for that.

    >>> is_mask("attn.causal_mask"), is_mask("mask_decoder.mlp.bias")
    (True, False)
    """
    return re.search(r"(^|[._])(masks?|masked_bias)$", stored(name)) is not None


# What models hold beside maps: masks, positions, filters, tokens, rates.
_TABLES = re.compile(
    r"(^|[._])mask(s|ed_bias|_tokens?)?(\.|$)|(^|[._])tokens?$|(^|\.)A_log$|"
    r"(^|[._])(pe|pos|position|positions|positional|rope|rotary|tril|window|stft|mel|fbank|basis|"
    r"anchors?|anchor_grid|inv_freq|freqs?(_cis)?|(cos|sin)_cached|bias)([._]|$)"
)


def is_table(name: str) -> bool:
    """Whether what has this name is looked up or added, not multiplied as a map is.

    The last two parts of the name tell; what is an embedding by its kind is not asked for here.

    >>> is_table("h.0.attn.bias"), is_table("pos_table"), is_table("fc.weight")
    (True, True, False)
    """
    return _TABLES.search(".".join(stored(name).split(".")[-2:])) is not None


def depth(name: str) -> int | None:
    """The number of the layer in which a weight stands, the first in its name.

    >>> depth("model.layers.12.mlp.experts.3.w1.weight"), depth("lm_head.weight")
    (12, None)
    """
    numbers = re.findall(r"(?<![^.])\d{1,6}(?![^.])", name)
    return int(numbers[0]) if numbers else None


# What peft adds to the name of a layer to which it adds an adapter, or of which it keeps a copy.
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+)(?=\.|$)")


def layer(name: str) -> str:
    """The path of the layer whose weight ``name`` is, without what an adapter wraps it in.

    >>> layer("h.0.attn.c_attn.weight[q]"), layer("attn.in_proj_weight")
    ('h.0.attn.c_attn', 'attn.in_proj_weight')
    >>> layer("attn.q_proj.base_layer.weight")
    'attn.q_proj'
    """
    return _WRAPPED.sub("", stored(name).removesuffix(".weight"))


def family(name: str) -> str:
    """Where the layer of a weight stands: the path without its own name.

    >>> family("h.0.attn.c_attn.weight[q]"), family("attn1.to_out.0.weight")
    ('h.0.attn', 'attn1')
    """
    parts = layer(name).split(".")
    while len(parts) > 1 and parts[-1].isdigit():
        parts.pop()
    return ".".join(parts[:-1])


def stored(name: str) -> str:
    """The name of the tensor that holds the matrix ``name``.

    >>> stored("attn.in_proj_weight[q]"), stored("attn.in_proj_weight")
    ('attn.in_proj_weight', 'attn.in_proj_weight')
    """
    plain = name.rstrip("'")  # which tell apart what would have the same name
    return plain.rpartition("[")[0].rstrip("'") if plain.endswith("]") else plain
