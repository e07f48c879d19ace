"""Matrices are matched across wrappers, prefixes and conventions of names, and never by guess."""

from collections.abc import Iterable, Mapping

import pytest
import torch

from kappascope.model.counterparts import counterparts
from kappascope.model.matrices import Logical, plan

LLAMA = {
    "model.embed_tokens.weight": (32, 8),
    "lm_head.weight": (32, 8),
    **{
        f"model.layers.{layer}.{name}.weight": shape
        for layer in range(2)
        for name, shape in {
            "self_attn.q_proj": (8, 8),
            "self_attn.k_proj": (4, 8),
            "self_attn.v_proj": (4, 8),
            "self_attn.o_proj": (8, 8),
            "mlp.gate_proj": (12, 8),
            "mlp.up_proj": (12, 8),
            "mlp.down_proj": (8, 12),
        }.items()
    },
}
GGUF = {
    "model.embed_tokens": "token_embd",
    "lm_head": "output",
    "model.layers": "blk",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def parts(shapes: Mapping[str, tuple[int, ...]]) -> list[Logical]:
    contents = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    return [part for unit in plan(contents).units for part in unit.parts]


def renamed(name: str, pairs: Iterable[tuple[str, str]]) -> str:
    for old, new in pairs:
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize(
    "prefix", ["module.", "_orig_mod.", "model.", "base_model.model.", "bert.", "a.b.c."]
)
@pytest.mark.parametrize("wrapped_here", [True, False])
def test_any_prefix_is_seen_through_on_either_side(prefix: str, wrapped_here: bool) -> None:
    plain, wrapped = parts(LLAMA), parts({prefix + name: shape for name, shape in LLAMA.items()})
    here, there = (wrapped, plain) if wrapped_here else (plain, wrapped)
    expected = {one.name: other.name for one, other in zip(here, there, strict=True)}
    found = counterparts(here, there)
    assert dict(found.names) == expected
    if prefix not in ("module.", "_orig_mod."):  # which names are never shown with
        assert any("stripped" in note for note in found.notes)


def test_two_task_prefixes_are_one_module() -> None:
    here = parts({f"bert.encoder.layer.{i}.fc.weight": (2, 3) for i in range(3)})
    there = parts({f"roberta.encoder.layer.{i}.fc.weight": (2, 3) for i in range(3)})
    assert counterparts(here, there).notes == ("'bert.' here is 'roberta.' there (3 names)",)


def test_an_encoder_is_no_decoder() -> None:
    here = parts({f"encoder.layers.{i}.odd.weight": (2, 3) for i in range(3)})
    there = parts({f"decoder.layers.{i}.odd.weight": (2, 3) for i in range(3)})
    assert not counterparts(here, there).names


def test_between_two_equal_choices_none_is_taken() -> None:
    here = parts({"layers.0.odd.weight": (2, 3)})
    there = parts({"text.layers.0.odd.weight": (2, 3), "image.layers.0.odd.weight": (2, 3)})
    assert not counterparts(here, there).names


def test_shapes_decide_between_two_prefixes() -> None:
    here = parts({"layers.0.odd.weight": (2, 3)})
    there = parts({"text.layers.0.odd.weight": (2, 3), "image.layers.0.odd.weight": (4, 3)})
    assert dict(counterparts(here, there).names) == {
        "layers.0.odd.weight": "text.layers.0.odd.weight"
    }


def test_names_of_gguf_files_are_those_of_hugging_face() -> None:
    gguf = {renamed(name, GGUF.items()): shape for name, shape in LLAMA.items()}
    found = counterparts(parts(gguf), parts(LLAMA))
    assert dict(found.names) == {renamed(name, GGUF.items()): name for name in LLAMA}
    assert "matched by what they do" in found.notes[-1]


def test_stacked_experts_of_a_gguf_file_are_experts() -> None:
    experts = {
        f"model.layers.0.mlp.experts.{i}.{name}_proj.weight": (12, 8)
        for i in range(3)
        for name in ("gate", "up")
    }
    stacked = {f"blk.0.ffn_{name}_exps.weight": (3, 12, 8) for name in ("gate", "up")}
    found = counterparts(parts(stacked), parts(experts)).names
    assert found["blk.0.ffn_up_exps.weight[2]"] == "model.layers.0.mlp.experts.2.up_proj.weight"
    assert len(found) == 6


def test_parts_of_a_fused_projection_are_the_split_ones() -> None:
    fused = parts({"model.layers.0.attn.qkv.weight": (24, 8)})
    split = parts({f"layers.0.attention.w{x}.weight": (8, 8) for x in "qkv"})
    found = counterparts(fused, split).names
    assert found["model.layers.0.attn.qkv.weight[k]"] == "layers.0.attention.wk.weight"


def test_what_the_user_says_of_names_is_done_and_told() -> None:
    here, there = parts({"old.0.odd.weight": (2, 3)}), parts({"new.0.odd.weight": (2, 3)})
    found = counterparts(here, there, [("old.", "new.")])
    assert found.names == {"old.0.odd.weight": "new.0.odd.weight"}
    assert found.notes == ("'old.' here read as 'new.' there (1 name matched)",)


def test_other_shapes_are_no_match_unless_the_name_is_the_same() -> None:
    here, there = parts({"bert.fc.weight": (2, 3)}), parts({"fc.weight": (4, 5)})
    assert not counterparts(here, there).names
    assert counterparts(parts({"fc.weight": (2, 3)}), there).names == {"fc.weight": "fc.weight"}
