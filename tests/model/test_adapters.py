"""What an adapter changes is what peft itself adds to the weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from kappascope.clinic.source import located
from kappascope.model.adapters import adapted_layer, adapter_parts, with_deltas
from kappascope.refusal import Refusal

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")  # of peft, about versions of others


class Small(nn.Module):
    """Layers of each kind that peft adapts."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 24), nn.Linear(24, 24)
        self.conv = nn.Conv2d(4, 6, 3)
        self.point = nn.Conv2d(6, 8, 1)
        self.table = nn.Embedding(10, 16)
        self.score = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.score(self.fc2(self.fc1(self.table(x))))


LINEAR = ["fc1", "fc2"]
EVERY = [*LINEAR, "conv", "point"]
CONFIGS: dict[str, Any] = {
    "lora": lambda: peft.LoraConfig(r=4, lora_alpha=12, target_modules=[*EVERY, "table"]),
    "patterns": lambda: peft.LoraConfig(
        r=4,
        lora_alpha=12,
        target_modules=LINEAR,
        rank_pattern={"fc1": 2},
        alpha_pattern={"fc2": 3},
    ),
    "rslora": lambda: peft.LoraConfig(r=4, lora_alpha=12, target_modules=EVERY, use_rslora=True),
    "dora": lambda: peft.LoraConfig(r=4, lora_alpha=12, target_modules=EVERY, use_dora=True),
    "saved": lambda: peft.LoraConfig(r=4, target_modules=LINEAR, modules_to_save=["score"]),
    "loha": lambda: peft.LoHaConfig(r=4, alpha=6, target_modules=EVERY, alpha_pattern={"fc1": 2}),
    "loha, taps apart": lambda: peft.LoHaConfig(
        r=4, alpha=6, target_modules=EVERY, use_effective_conv2d=True
    ),
    "lokr": lambda: peft.LoKrConfig(r=2, alpha=6, target_modules=EVERY),
    "lokr, both in factors": lambda: peft.LoKrConfig(
        r=1, alpha=6, target_modules=EVERY, decompose_both=True, use_effective_conv2d=True
    ),
}


def trained(config: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model with an adapter of which nothing is zero, and the weights that it was made for."""
    torch.manual_seed(0)
    model = Small()
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    adapted = peft.get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return adapted, base


@pytest.mark.parametrize("name", CONFIGS)
def test_merged_weights_are_those_that_peft_merges(name: str, tmp_path: Path) -> None:
    adapted, base = trained(CONFIGS[name]())
    save_file(base, tmp_path / "base.safetensors")
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()
    opened = located(tmp_path / "adapter", tmp_path / "base.safetensors").opened()
    changed = 0
    for key in base:
        found = opened.read((key,))
        assert torch.allclose(found, expected[key], rtol=1e-5, atol=1e-6), key
        changed += not torch.equal(found, base[key])
    assert changed >= 2


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "dora"])
def test_an_adapter_alone_is_read_as_what_it_adds(name: str, tmp_path: Path) -> None:
    adapted, base = trained(CONFIGS[name]())
    adapted.save_pretrained(tmp_path)
    merged = adapted.merge_and_unload().state_dict()
    opened = located(tmp_path).opened()
    products = [part for unit in opened.plan.units for part in unit.parts if part.kind == "adapter"]
    targets = {adapted_layer(part.name) for part in products}
    assert targets == {key.removesuffix(".weight") for key in base if key.endswith(".weight")
                       and not torch.equal(merged[key], base[key])} - {"score"}  # fmt: skip
    for part in products:
        key = f"{adapted_layer(part.name)}.weight"
        added = (merged[key] - base[key]).flatten(1)
        found = opened.matrices([part.name])[part.name]
        assert torch.allclose(found, added, rtol=1e-4, atol=1e-6)


def test_a_layer_that_stores_inputs_first_is_merged_as_peft_merges_it(tmp_path: Path) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(0)
    model = nn.Sequential()
    model.add_module("c_attn", Conv1D(12, 12))
    base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(base, tmp_path / "base.safetensors")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(model, config)
    nn.init.normal_(adapted.base_model.model.c_attn.lora_B["default"].weight)
    adapted.save_pretrained(tmp_path / "adapter")
    expected = adapted.merge_and_unload().state_dict()["c_attn.weight"]
    opened = located(tmp_path / "adapter", tmp_path / "base.safetensors").opened()
    assert torch.allclose(opened.read(("c_attn.weight",)), expected, atol=1e-6)


def test_without_a_config_factors_are_read_as_they_are() -> None:
    tensors = {"fc.lora_A.weight": torch.ones(2, 3), "fc.lora_B.weight": torch.ones(4, 2)}
    assert with_deltas(tensors, {}, lambda path: tensors[path[0]]).contents is tensors


def test_a_pattern_that_is_no_expression_costs_nothing() -> None:
    tensors = {"fc.lora_A.weight": torch.ones(2, 3), "fc.lora_B.weight": torch.ones(4, 2)}
    wild = {"r": 2, "lora_alpha": 4, "alpha_pattern": {"(": 9, "fc": "nine"}}
    assert adapter_parts(tensors, wild)[0].scale == 2.0
    for config in ({"r": "two"}, {"lora_alpha": None, "r": 0}, {"alpha_pattern": 3}):
        assert adapter_parts(tensors, config)[0].scale == 1.0


def test_what_is_no_adapter_is_not_merged(tmp_path: Path) -> None:
    save_file({"fc.weight": torch.ones(2, 2)}, tmp_path / "base.safetensors")
    with pytest.raises(Refusal, match="no adapter"):
        located(tmp_path / "base.safetensors", tmp_path / "base.safetensors").opened()


def test_changes_without_a_weight_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    factors = {"fc.lora_A.weight": torch.ones(2, 3), "fc.lora_B.weight": torch.ones(4, 2)}
    save_file(factors, tmp_path / "a" / "adapter_model.safetensors")
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 2}))
    save_file({"other.weight": torch.ones(2, 2)}, tmp_path / "base.safetensors")
    notes = located(tmp_path / "a", tmp_path / "base.safetensors").opened().notes
    assert "0 of 1 change of the adapter merged" in notes
    assert "no single weight in the model for the adapter's fc" in notes


def test_adapters_with_names_of_their_own_lie_side_by_side() -> None:
    factors = {
        f"base_model.model.fc.lora_{side}.{name}.weight": torch.randn(shape)
        for name in ("default", "other")
        for side, shape in (("A", (2, 3)), ("B", (4, 2)))
    }
    parts = adapter_parts(factors, {"r": 2, "lora_alpha": 4})
    assert [(part.module, part.adapter, part.scale) for part in parts] == [
        ("fc", "default", 2.0),
        ("fc", "other", 2.0),
    ]
    assert [adapted_layer(part.name) for part in parts] == ["fc", "fc"]
    for part in parts:
        a, b = (factors[f"base_model.model.fc.lora_{side}.{part.adapter}.weight"] for side in "AB")
        assert torch.allclose(part.delta(lambda path: factors[path[0]]), 2 * b @ a)
