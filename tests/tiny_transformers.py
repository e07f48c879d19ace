"""Tiny models of the transformers library, and what each row of a projection does in them.

Nothing is taken from the library's sources but the models themselves: a row is moved, and what
moves with it tells what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM

transformers.logging.set_verbosity_error()

COMMON = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1}
DENSE = COMMON | {"num_attention_heads": 4, "intermediate_size": 24}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 3,
    "linear_value_head_dim": 5, "head_dim": 8, "num_key_value_heads": 2,
}  # fmt: skip
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 10, "qk_rope_head_dim": 2, "qk_nope_head_dim": 4,
    "v_head_dim": 5, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "moe_intermediate_size": 12, "first_k_dense_replace": 0,
}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 8}
STATE = COMMON | {"state_size": 3}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt_neox": ("GPTNeoX", DENSE),
    "bloom": ("Bloom", {"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 4}),
    "codegen": ("CodeGen", GPT2 | {"rotary_dim": 4}),
    "phi3": ("Phi3", DENSE | {"num_key_value_heads": 2, "pad_token_id": 0}),
    "falcon grouped": ("Falcon", DENSE | {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "falcon one key": ("Falcon", DENSE | {"multi_query": True}),
    "falcon": ("Falcon", DENSE | {"multi_query": False}),
    "bigcode one key": ("GPTBigCode", GPT2),
    "bigcode": ("GPTBigCode", GPT2 | {"multi_query": False}),
    "qwen3": ("Qwen3", DENSE | {"num_key_value_heads": 2, "head_dim": 8}),
    "qwen3 next": ("Qwen3Next", DENSE | EXPERTS | LINEAR | {"layer_types": ["full_attention"]}),
    "qwen3 next linear": (
        "Qwen3Next",
        DENSE | EXPERTS | LINEAR | {"layer_types": ["linear_attention"]},
    ),
    "qwen3.5 linear": ("Qwen3_5Text", DENSE | LINEAR | {"layer_types": ["linear_attention"]}),
    "deepseek v2": ("DeepseekV2", DENSE | LATENT | {"q_lora_rank": None}),
    "deepseek v3": ("DeepseekV3", DENSE | LATENT | {"q_lora_rank": 6}),
    "deberta": ("Deberta", DENSE | {"max_position_embeddings": 8}),
    "deberta with positions": (
        "Deberta",
        DENSE
        | {"max_position_embeddings": 8, "relative_attention": True, "pos_att_type": "c2p|p2c"},
    ),
    "bert": ("Bert", DENSE),
    "jetmoe": (
        "JetMoe",
        COMMON
        | {"num_key_value_heads": 2, "kv_channels": 4, "intermediate_size": 12}
        | {"num_local_experts": 3, "num_experts_per_tok": 2},
    ),
    "mixtral": ("Mixtral", DENSE | {"num_key_value_heads": 2, "num_local_experts": 3}),
    "gpt oss": (
        "GptOss",
        DENSE
        | {"num_key_value_heads": 2, "head_dim": 4, "num_local_experts": 3}
        | {"num_experts_per_tok": 2},
    ),
    "mamba": ("Mamba", STATE),
    "zamba": (
        "Zamba",
        DENSE
        | {"num_hidden_layers": 4, "layer_types": ["mamba", "hybrid"] * 2, "n_mamba_heads": 2}
        | {"num_key_value_heads": 4, "mamba_d_state": 3, "mamba_dt_rank": 3},
    ),
    "bamba": (
        "Bamba",
        DENSE
        | {"num_key_value_heads": 2, "mamba_n_heads": 4, "mamba_d_head": 8}
        | {"mamba_d_state": 3, "mamba_n_groups": 2},
    ),
    "mamba2": ("Mamba2", STATE | {"num_heads": 4, "head_dim": 8, "n_groups": 2}),
}


def tiny(name: str) -> nn.Module:
    """A model of one layer in float64, with weights large enough that everything is felt."""
    family, settings = CONFIGS[name]
    config = getattr(transformers, f"{family}Config")(**settings)
    masked = family in ("Bert", "Deberta")
    make: Callable[[Any], nn.Module] = (
        AutoModelForMaskedLM if masked else AutoModelForCausalLM
    ).from_config
    torch.manual_seed(0)
    model = make(config).double().eval()
    model.config.use_cache = False
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.3)
            if key.endswith("conv1d.weight"):  # which passes each token on as it is
                parameter.zero_()[..., -1] = 1
            if key.endswith("A_log"):  # so that a state is remembered
                parameter.fill_(-3)
    return model


def moved(model: nn.Module, projection: str, observed: str, *, tokens: int, at: int) -> Tensor:
    """Which inputs of a module move, token by token, with each row of a projection.

    Row i of the projection is moved at the token ``at`` in the text i of a batch. The result is
    (rows, tokens, channels of what is observed).
    """
    rows = int(model.get_submodule(projection)(probe(model, projection)).shape[-1])

    def move(_: nn.Module, __: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output.view(rows + 1, tokens, rows)[range(rows), at, range(rows)] += 0.7
        return output

    def observe(_: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise ObservedError(inputs[0].detach())

    text = torch.arange(3, 3 + tokens).expand(rows + 1, tokens)
    moving = model.get_submodule(projection).register_forward_hook(move)
    observing = model.get_submodule(observed).register_forward_pre_hook(observe)
    try:
        with torch.no_grad():
            model(text)
    except ObservedError as observation:
        channels = observation.args[0].reshape(rows + 1, tokens, -1)
        return (channels[:-1] - channels[-1]).abs() > 1e-9
    finally:
        moving.remove()
        observing.remove()
    raise AssertionError(f"{observed} was not called")


class ObservedError(Exception):
    """Ends a forward pass at what it was run for."""


def probe(model: nn.Module, projection: str) -> Tensor:
    """An input that fits a projection."""
    weight = model.get_submodule(projection).weight
    transposed = type(model.get_submodule(projection)).__name__ == "Conv1D"
    return torch.zeros(1, weight.shape[0 if transposed else 1], dtype=torch.float64)


# Where a fused projection stands, and where what it makes of a text is observed.
FUSED = {
    "gpt2": ("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"),
    "gpt_neox": (
        "gpt_neox.layers.0.attention.query_key_value",
        "gpt_neox.layers.0.attention.dense",
    ),
    "codegen": ("transformer.h.0.attn.qkv_proj", "transformer.h.0.attn.out_proj"),
    "phi3": ("model.layers.0.self_attn.qkv_proj", "model.layers.0.self_attn.o_proj"),
    "qwen3 next": ("model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"),
    **dict.fromkeys(
        ("bloom", "falcon", "falcon grouped", "falcon one key"),
        ("transformer.h.0.self_attention.query_key_value", "transformer.h.0.self_attention.dense"),
    ),
    **dict.fromkeys(
        ("bigcode", "bigcode one key"),
        ("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj"),
    ),
    **dict.fromkeys(
        ("deepseek v2", "deepseek v3"),
        ("model.layers.0.self_attn.kv_b_proj", "model.layers.0.self_attn.o_proj"),
    ),
    **dict.fromkeys(
        ("deberta", "deberta with positions"),
        (
            "deberta.encoder.layer.0.attention.self.in_proj",
            "deberta.encoder.layer.0.attention.output.dense",
        ),
    ),
}


def attention_rows(model: nn.Module, projection: str, observed: str) -> dict[str, list[int]]:
    """The rows of queries, keys, values and gates, by what moves when they do.

    Keys and values of one token reach another. Of a text of one token the weights of attention are
    one whatever queries and keys are: only values and gates are felt.
    """
    across = moved(model, projection, observed, tokens=2, at=0)[:, 1].any(-1)
    alone = moved(model, projection, observed, tokens=1, at=0)[:, 0].any(-1)
    last = moved(model, projection, observed, tokens=2, at=1)[:, 1].any(-1)
    roles = {
        "q": ~across & ~alone & last,
        "k": across & ~alone,
        "v": across & alone,
        "gate": ~across & alone,
    }
    return {
        label: where.nonzero().flatten().tolist() for label, where in roles.items() if where.any()
    }
