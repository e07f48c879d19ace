"""How a model was trained, and what noise would have made of its matrices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kappascope.clinic.training import Training, Trainings
from kappascope.refusal import Refusal


def test_settings_are_read_as_a_command_line_has_them() -> None:
    told = "Muon lr=0.02 weight_decay=0.1 nesterov=False adjust_lr_fn=match_rms_adamw"
    training = Training.told(told, steps=3)
    assert training.rates == (0.02, 0.02, 0.02)
    assert training.settings["nesterov"] is False
    assert training.settings["adjust_lr_fn"] == "match_rms_adamw"


@pytest.mark.parametrize(
    ("text", "steps", "wrong"),
    [
        ("Lion lr=0.1", 3, "expected one of SGD"),
        ("AdamW", 3, "no learning rate"),
        ("AdamW 0.1", 3, "is no setting"),
        ("AdamW lr=fast", 3, "no learning rate"),
        ("AdamW lr=0.1", 0, "number of steps"),
        ("", 3, "expected one of"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, steps: int, wrong: str) -> None:
    with pytest.raises(Refusal, match=wrong):
        Training.told(text, steps=steps)


def test_every_matrix_has_the_settings_of_its_group() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    groups = [
        {"params": model[0].parameters(), "weight_decay": 0.5},
        {"params": model[1].parameters(), "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1)
    found = Trainings.of(optimizer, model, steps=2)
    first, second = found.of_matrix("0.weight"), found.of_matrix("1.weight")
    assert first is not None and second is not None
    assert (first.settings["weight_decay"], second.settings["weight_decay"]) == (0.5, 0.0)
    assert found.of_matrix("elsewhere") is None


def test_groups_without_a_model_are_refused() -> None:
    weights = [nn.Parameter(torch.eye(2)) for _ in range(2)]
    optimizer = torch.optim.AdamW([{"params": [w]} for w in weights], lr=0.1)
    with pytest.raises(Refusal, match="several groups"):
        Trainings.of(optimizer, {"w": weights[0]}, steps=2)


@pytest.mark.parametrize(
    ("before", "after", "wrong"),
    [
        (torch.eye(3), torch.eye(4), "another shape"),
        (torch.eye(3), torch.full((3, 3), torch.nan), "not finite"),
        (torch.zeros(600, 600), torch.zeros(600, 600), "too large"),
    ],
)
def test_what_cannot_be_compared_says_why(
    before: torch.Tensor, after: torch.Tensor, wrong: str
) -> None:
    with pytest.raises(ValueError, match=wrong):
        Training("AdamW", (0.1,)).compared(after, before)
