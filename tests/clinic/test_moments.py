"""Adam's moments beside the weights: the prediction is what the next step does."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.moments import moments


def trained(dtype: torch.dtype, lr: float) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), nn.LayerNorm(48), nn.Linear(48, 16)).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(8, 32).to(dtype)).float().square().mean().backward()
        optimizer.step()
    return model, optimizer


def kept(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def test_the_moments_of_every_weight_are_found_by_shape_and_order() -> None:
    model, optimizer = trained(torch.float32, 1e-3)
    found = moments(kept(model, optimizer))
    assert sorted(one.name for one in found) == sorted(model.state_dict())


def test_weights_that_cannot_be_told_apart_have_no_moments() -> None:
    model, optimizer = trained(torch.float32, 1e-3)
    state = kept(model, optimizer)
    state["model"] = dict(state["model"]) | {"ema.weight": torch.ones(48, 32)}
    assert "0.weight" not in {one.name for one in moments(state)}


@pytest.mark.parametrize(
    ("dtype", "lr", "swallows"), [(torch.bfloat16, 1e-5, True), (torch.float32, 1e-3, False)]
)
def test_what_16_bits_will_swallow_is_told_from_the_file(
    dtype: torch.dtype, lr: float, swallows: bool, tmp_path: Path
) -> None:
    model, optimizer = trained(dtype, lr)
    torch.save(kept(model, optimizer), tmp_path / "step.pt")
    found = diagnose(tmp_path / "step.pt")
    assert len(found.swallowed) == len(list(model.parameters()))
    (gain,) = [step for step in found.swallowed if step.name == "1.weight"]
    told = [one for one in found.findings if one.rule == "swallowed-steps"]
    assert bool(told) is swallows
    if swallows:
        assert gain.update == 1.0 and gain.decay == 1.0 and gain.needed == "float32"
        assert told[0].severity == "warning" and told[0].concern == "harm"
        assert "bfloat16 will swallow 100% of the next update" in told[0].evidence


def test_the_predicted_share_is_what_a_step_with_these_moments_does() -> None:
    model, optimizer = trained(torch.bfloat16, 1e-4)
    (one,) = [m for m in moments(kept(model, optimizer)) if m.name == "0.weight"]
    contents = kept(model, optimizer)

    def read(path: tuple[object, ...]) -> torch.Tensor:
        value: object = contents
        for key in path:
            value = value[key]  # type: ignore[index]
        return value  # type: ignore[return-value]

    found = one.swallowed(read)
    state, before = optimizer.state[model[0].weight], model[0].weight.detach().clone()
    mean = state["exp_avg"].double() / (1 - 0.9 ** float(state["step"]))
    size = (state["exp_avg_sq"].double() / (1 - 0.999 ** float(state["step"]))).sqrt() + 1e-8
    decayed = (before.double() * (1 - 1e-5)).bfloat16()
    after = (decayed.double() - 1e-4 * mean / size).bfloat16()
    asked = state["exp_avg"] != 0
    still = ((after == before) & asked).sum() / asked.sum()
    assert found.entries == pytest.approx(float(still))
