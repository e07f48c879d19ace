"""The network of the study: who trains what, and what the network sees."""

import pytest
import torch

from kappascope.lab.tasks import generator
from kappascope.matrix.parts import StartFrame
from kappascope.studies.gpt.model import GPT
from kappascope.studies.unlearned.model import (
    GradientNoise,
    every_part,
    fed_by,
    gains,
    hidden,
    seen,
    steppers,
)


@pytest.fixture
def model() -> GPT:
    return GPT(11, 2, 32, generator("a model", 0))


@pytest.mark.parametrize("optimizer", ["AdamW", "Muon", "SGD"])
def test_every_parameter_is_stepped_once(model: GPT, optimizer: str) -> None:
    groups = [g for s in steppers(model, optimizer, 0.1).values() for g in s.param_groups]
    ids = [id(p) for group in groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    assert len(hidden(model)) == 12


def test_width_lowers_the_rate_of_the_head_and_raises_decay(model: GPT) -> None:
    plain, wide = (steppers(model, "AdamW", 0.1, growth) for growth in (1.0, 4.0))
    assert wide["rest"].param_groups[1]["lr"] == plain["rest"].param_groups[1]["lr"] / 4
    assert wide["hidden"].param_groups[0]["weight_decay"] == 0.4


@torch.no_grad()
def test_a_gain_and_the_matrix_behind_it_are_one(model: GPT) -> None:
    text = torch.randint(11, (3, 20), generator=generator("text", 0))
    for name, gain in gains(model).items():
        gain.copy_(1 + torch.rand(gain.shape, generator=generator(name)))
    before = model(text)
    folded = seen({name: p.detach() for name, p in hidden(model).items()}, gains(model))
    for name, p in hidden(model).items():
        p.copy_(folded[name])
    for gain in gains(model).values():
        gain.fill_(1.0)
    torch.testing.assert_close(model(text), before)


def test_products_are_what_heads_compare_and_write(model: GPT) -> None:
    weights = {name: p.detach().double() for name, p in hidden(model).items()}
    frames = {name: StartFrame(w) for name, w in weights.items()}
    found = {name: (kind, parts) for name, kind, parts in every_part(weights, frames)}
    assert len(found) == 12 + 2 * 2 * 2
    q, k = (weights[f"blocks.0.attention.{n}.weight"][16:] for n in ("query", "key"))
    kind, parts = found["blocks.0.attention[qk.1]"]
    assert kind == "QK"
    expected = torch.linalg.svdvals(q.mT @ k)
    torch.testing.assert_close(parts["log_sigma_1"], expected[0].log())
    torch.testing.assert_close(parts["log_sigma_min"], expected[15].log())


def test_covariances_are_those_of_what_was_fed() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, 2))
    noise = GradientNoise({"w": weight}, share=1.0)
    fed = torch.randn(5000, 3, 2, generator=generator("fed", 0)) * torch.tensor([1.0, 3.0])
    for each in fed:
        noise.add("w", each, each, steps=4)
    columns = noise.state["w"]["columns"] / (3 * 5000)
    torch.testing.assert_close(columns, torch.diag(torch.tensor([1.0, 9.0])), rtol=0.05, atol=0.1)
    assert noise.deviation("w") == pytest.approx(5**0.5, rel=0.05)


def test_adam_feeds_gradients_of_one_size() -> None:
    weight = torch.nn.Parameter(torch.zeros(4, 4))
    optimizer = torch.optim.AdamW([weight], lr=0.1, betas=(0.9, 0.95))
    weight.grad = torch.full((4, 4), -7.0)
    optimizer.step()
    torch.testing.assert_close(fed_by(optimizer, weight), -torch.ones(4, 4))
