"""Swallowed updates: what is predicted from the optimizer's state is what happens."""

from pathlib import Path

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from kappascope import Monitor
from kappascope.monitor.record import Run
from kappascope.monitor.swallowed import (
    heard_by,
    in_finer_dtypes,
    lost,
    observed,
    predicted,
    stepped_in,
)
from monitored_training import loss_of, texts, transformer

OPTIMIZERS = {
    "AdamW": lambda p, lr: AdamW(p, lr=lr, weight_decay=0.1),
    "Adam": lambda p, lr: Adam(p, lr=lr, amsgrad=True),
    "SGD": lambda p, lr: SGD(p, lr=30 * lr, momentum=0.9, nesterov=True),
}


@pytest.mark.parametrize("kind", ["bfloat16", "masters", "float32"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_predicted_share_is_the_observed_one(name: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformer(32)
    model = model if kind == "float32" else model.bfloat16()
    ours = list(model.parameters())
    theirs = [p.detach().float().requires_grad_() for p in ours] if kind == "masters" else ours
    optimizer: Optimizer = OPTIMIZERS[name](theirs, 3e-4)
    with Monitor(tmp_path, every=5, strict=True).attach(model, optimizer) as monitor:
        for given, target in texts(15):
            model.zero_grad()
            loss_of(model, given, target).backward()
            if kind == "masters":
                for copy, parameter in zip(theirs, ours, strict=True):
                    copy.grad = parameter.grad.float()
            optimizer.step()
            if kind == "masters":
                with torch.no_grad():
                    for copy, parameter in zip(theirs, ours, strict=True):
                        parameter.copy_(copy)
    rows = Run.read(tmp_path).rows
    seen = {(row.step, row.matrix): row.value for row in rows if row.quantity == "swallowed"}
    told = {(r.step, r.matrix): r.value for r in rows if r.quantity == "swallowed_predicted"}
    assert len(seen) > 70 and seen.keys() == told.keys()
    near = [abs(seen[key] - told[key]) <= 0.02 for key in seen]
    assert sum(near) >= 0.95 * len(near)
    loses = kind == "bfloat16"
    assert (sum(seen.values()) / len(seen) > 0.4) == loses
    assert any(alert.name == "swallowed" for alert in monitor.alerts) == loses


def test_a_gain_of_one_in_bfloat16_never_hears_a_small_learning_rate(tmp_path: Path) -> None:
    layer = torch.nn.LayerNorm(16).bfloat16()
    optimizer = AdamW(layer.parameters(), lr=1e-4, weight_decay=0.0)
    with Monitor(tmp_path, every=1, strict=True).attach(layer, optimizer) as monitor:
        for _ in range(3):
            optimizer.zero_grad()
            layer(torch.randn(4, 16).bfloat16()).square().sum().backward()
            optimizer.step()
    run = Run.read(tmp_path)
    assert [value for _, value in run.series("weight", "swallowed")] == [1.0] * 3
    assert [value for _, value in run.series("weight", "swallowed_in_float32")] == [0.0] * 3
    (alert,) = monitor.alerts
    assert alert.name == "swallowed" and "weights in float32 would move" in alert.text


def test_decay_below_half_an_ulp_is_lost() -> None:
    weight = torch.linspace(0.5, 2.0, 50).bfloat16()
    nothing = torch.zeros(50).double()
    after = stepped_in(weight, nothing, 1e-5, torch.bfloat16)
    assert torch.equal(after, weight)
    assert lost(weight, after, nothing, 1e-5) == {"swallowed_update": 1.0, "swallowed_decay": 1.0}


def test_what_has_no_gradient_is_not_swallowed() -> None:
    weight = torch.ones(3, 3)
    assert observed(weight, weight, torch.zeros(3, 3)) == {}
    assert predicted(weight, torch.zeros(3, 3), 0.0, torch.zeros(3, 3), torch.float32) is None


@pytest.mark.parametrize(("size", "dtype"), [(1e-3, "float16"), (1e-5, "float32"), (1e-9, "")])
def test_the_dtype_that_would_hear_a_step(size: float, dtype: str) -> None:
    weight, step = torch.ones(9).bfloat16(), torch.full((9,), size).double()
    assert heard_by(in_finer_dtypes(weight, step, 0.0, torch.ones(9))) == dtype


def test_what_float16_swallows_only_float32_hears() -> None:
    weight, step = torch.ones(9).half(), torch.full((9,), 1e-5).double()
    assert in_finer_dtypes(weight, step, 0.0, torch.ones(9)) == {"swallowed_in_float32": 0.0}
