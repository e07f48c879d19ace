"""Logits of a head are clipped by its queries and keys, and no other head is touched."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from correction_examples import Attentive
from kappascope.corrections import QKClip
from kappascope.refusal import Refusal


class Grouped(nn.Module):
    """Four queries, two keys of size three; widths of eight."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(8, 12, bias), nn.Linear(8, 6, bias)
        self.v_proj, self.o_proj = nn.Linear(8, 6, bias), nn.Linear(12, 8, bias)

    def logits(self, x: Tensor) -> Tensor:
        q = self.q_proj(x).unflatten(-1, (4, 3)).transpose(0, 1)
        k = self.k_proj(x).unflatten(-1, (2, 3)).transpose(0, 1).repeat_interleave(2, 0)
        return q @ k.mT / math.sqrt(3)


class Block(nn.Module):
    """Attention within a model, under a config as transformers have."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.attn = Grouped(bias)


def idle_step(model: nn.Module) -> SGD:
    return SGD(model.parameters(), lr=0.0)


@pytest.mark.parametrize("bias", [True, False])
def test_measured_logits_are_brought_to_tau_head_by_head(bias) -> None:
    torch.manual_seed(0)
    model, x = Block(bias), torch.randn(20, 8)
    model.config = type("Config", (), {"to_dict": lambda self: CONFIG})()
    before = model.attn.logits(x).detach()
    largest = before.abs().amax((1, 2))
    tau = float(largest.median())
    seen = []

    def measured(name: str) -> Tensor:
        seen.append(name)
        return model.attn.logits(x).detach().abs().amax((1, 2))

    optimizer = idle_step(model)
    with QKClip(tau, measured=measured).attach(model, optimizer) as handle:
        assert handle.weights == ("attn.q_proj.weight", "attn.k_proj.weight")
        optimizer.step()
    after = model.attn.logits(x).detach()
    expected = before * (tau / largest.clamp(min=tau))[:, None, None]
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-6)
    assert seen == ["attn"]  # asked once, before either weight was scaled


CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 8, "head_dim": 3}


def test_the_bound_of_the_weights_alone_holds_for_inputs_of_size_one() -> None:
    torch.manual_seed(0)
    model = Attentive()
    model.attention.in_proj_weight.data *= 20
    nn.init.zeros_(model.attention.in_proj_bias)
    value = model.attention.in_proj_weight.detach()[8:].clone()
    optimizer = idle_step(model)
    with QKClip(tau=3.0).attach(model, optimizer):
        optimizer.step()
    q, k, v = model.attention.in_proj_weight.detach().chunk(3)
    assert torch.equal(v, value)
    x = torch.randn(4000, 4)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    for head in (slice(0, 2), slice(2, 4)):
        product = q[head].T @ k[head]
        assert (x @ product @ x.T / math.sqrt(2)).abs().max() <= 3.0
        assert torch.linalg.matrix_norm(product, 2) * 4 / math.sqrt(2) == pytest.approx(3.0)


def test_a_head_within_tau_is_left_to_the_bit() -> None:
    torch.manual_seed(0)
    model = Attentive()
    model.attention.in_proj_weight.data[:2] *= 1e4
    before = model.attention.in_proj_weight.detach().clone()
    optimizer = idle_step(model)
    with QKClip(tau=50.0).attach(model, optimizer):
        optimizer.step()
    after = model.attention.in_proj_weight.detach()
    assert torch.equal(after[2:4], before[2:4]) and torch.equal(after[6:], before[6:])
    assert not torch.allclose(after[:2], before[:2])


def test_where_there_are_no_heads_it_refuses() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(Refusal, match="no query or key of an attention layer"):
        QKClip().attach(model, idle_step(model))


def test_the_number_of_heads_may_be_given() -> None:
    torch.manual_seed(0)
    model = nn.Module()
    model.attn = nn.ModuleDict({f"{n}_proj": nn.Linear(8, 8) for n in "qkvo"})
    optimizer = idle_step(model)
    with pytest.raises(Refusal, match="heads="):
        QKClip().attach(model, optimizer)
    with QKClip(tau=1e-3, heads=2).attach(model, optimizer) as handle:
        assert handle.weights == ("attn.q_proj.weight", "attn.k_proj.weight")
        optimizer.step()
    q, k = (model.attn[f"{n}_proj"].weight.detach() for n in "qk")
    bound = torch.linalg.matrix_norm(q[:4].T @ k[:4], 2) * 8 / 2
    assert float(bound) == pytest.approx(1e-3, rel=1e-4)


def test_logits_of_another_number_of_heads_are_an_error() -> None:
    model = Attentive()
    optimizer = idle_step(model)
    handle = QKClip(measured=lambda name: torch.ones(3)).attach(model, optimizer)
    with handle, pytest.raises(ValueError, match="expected 2 largest logits of attention"):
        optimizer.step()
