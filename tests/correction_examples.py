"""Examples of every correction, models of many kinds to attach them to, and how to train these."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import SGD, Optimizer

from kappascope.corrections import (
    ColumnNormPin,
    Correction,
    Hybrid,
    MagnitudeDirection,
    Multipliers,
    NormPin,
    OrthogonalPenalty,
    PaperPenalty,
    QKClip,
    RowNormPin,
    SigmaMaxPenalty,
    SingularValueBand,
    SingularValueBound,
    SingularValueMultipliers,
    SpectralCap,
    SpectralDecay,
    SpectralNormalization,
    SpectralPenalty,
    SVDCorrection,
)
from kappascope.matrix.components import Components


def matrices(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EXAMPLES: list[Correction] = [
    Multipliers(),
    Multipliers(rows=False, columns=False),
    SpectralPenalty(0.1, target=1.5),
    PaperPenalty(0.1, target=1.5),
    SigmaMaxPenalty(0.5, every=2),
    SVDCorrection(every=2),
    SingularValueMultipliers(every=3),
    OrthogonalPenalty(),
    OrthogonalPenalty(spectral=True),
    SpectralDecay(every=2),
    SingularValueBound(2.0),
    Hybrid(penalties=SpectralPenalty(0.1, target=1.5, every=2)),
    NormPin(),
    RowNormPin(),
    ColumnNormPin(),
    MagnitudeDirection(),
    SpectralNormalization(),
    SpectralCap(),
    SpectralCap(0.5, soft=True),
    SingularValueBand(0.3, 0.9, every=2),
]
FOR_ATTENTION: list[Correction] = [QKClip(tau=0.1, heads=2)]  # they act on queries and keys alone


every = pytest.mark.parametrize("correction", EXAMPLES, ids=lambda c: type(c).__name__)


MERGED = (  # they put factors into the model
    Multipliers,
    SingularValueMultipliers,
    Hybrid,
    MagnitudeDirection,
    SpectralNormalization,
)


PENALTIES = (
    SpectralPenalty,
    PaperPenalty,
    OrthogonalPenalty,
    SigmaMaxPenalty,
)  # they reach a weight through what makes it


def wide() -> nn.Module:
    """Large enough for penalties and bounds to track singular vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 100), nn.Linear(100, 120))


class Tied(nn.Module):
    """One weight in two layers, and an embedding that is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(5, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.second.weight, self.head.weight = self.first.weight, self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.token(x.argmax(-1)) + x
        return self.head(self.second(self.first(hidden).relu()))


class Attentive(nn.Module):
    """Attention with queries, keys and values in one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, num_heads=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(x, x, x)[0]


def perceptron(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias), nn.ReLU(), nn.Linear(6, 3, bias))


def convolution() -> nn.Module:
    layers = nn.Conv1d(1, 4, 2), nn.Conv1d(4, 4, 2, groups=2), nn.ConvTranspose1d(4, 2, 2)
    return nn.Sequential(nn.Unflatten(-1, (1, 4)), layers[0], nn.Tanh(), *layers[1:])


def frozen() -> nn.Module:
    model = perceptron()
    model[0].weight.requires_grad_(False)
    return model


def parametrized() -> nn.Module:
    model = perceptron()
    parametrizations.weight_norm(model[0])
    return model


def orthogonal() -> nn.Module:
    """Trained away from the base that the parametrization keeps; a square and a long one."""
    layers = [parametrizations.orthogonal(nn.Linear(*sides)) for sides in ((4, 4), (4, 6))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.Tanh(), nn.Linear(6, 3))
    steps(model, SGD(model.parameters(), lr=0.5), 20)
    return model


def spectral_norm() -> nn.Module:
    model = perceptron()
    parametrizations.spectral_norm(model[0])
    return model


class Conv1D(nn.Module):
    """A layer that stores its weight (in, out), as GPT-2's does."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.zeros(nf))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Recurrent(nn.Module):
    """A recurrent layer, whose weights it keeps references to."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


class LanguageModel(nn.Module):
    """An embedding, a hidden layer behind a norm, and a head of as many outputs as tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.norm = nn.Embedding(5, 4), nn.LayerNorm(4)
        self.hidden, self.lm_head = nn.Linear(4, 4), nn.Linear(4, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.hidden(self.norm(self.token(x.argmax(-1)) + x)).tanh())


class Experts(nn.Module):
    """Three experts in one weight, each used for all inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.Parameter(torch.randn(3, 4, 4) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("eoi,bi->beo", self.experts, x)


def transposed_convolution() -> nn.Module:
    layers = nn.ConvTranspose1d(1, 4, 2), nn.Tanh(), nn.ConvTranspose1d(4, 2, 2, groups=2)
    return nn.Sequential(nn.Unflatten(-1, (1, 4)), *layers)


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bias": perceptron,
    "no bias": lambda: perceptron(bias=False),
    "conv": convolution,
    "tied": Tied,
    "frozen": frozen,
    "bf16": lambda: perceptron().bfloat16(),
    "one layer": lambda: nn.Linear(4, 3),
    "parametrized": parametrized,
    "orthogonal": orthogonal,
    "spectral norm": spectral_norm,
    "transposed conv": transposed_convolution,
    "fp16": lambda: perceptron().half(),
    "language model": LanguageModel,
    "GPT-2": lambda: nn.Sequential(Conv1D(6, 4), nn.Tanh(), Conv1D(3, 6)),
    "recurrent": Recurrent,
    "attention": Attentive,
    "experts": Experts,
    "batch norm": normalised,
    "one row": lambda: nn.Sequential(nn.Linear(4, 1), nn.Tanh(), nn.Linear(1, 4)),
}


MADE = {  # weights that something makes, and whether it has an inverse
    "parametrized": ({"0.weight"}, True),
    "orthogonal": ({"0.weight", "2.weight"}, False),
    "spectral norm": ({"0.weight"}, False),
}


def inputs(model: nn.Module) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return x.to(next(model.parameters()).dtype)


def steps(model: nn.Module, optimizer: Optimizer, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(inputs(model)).square().mean().backward()
        optimizer.step()


def answers(model: nn.Module) -> Tensor:
    """What it computes; in training mode spectral_norm moves its vectors."""
    found = model.eval()(inputs(model))
    model.train()
    return found


def named(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(p)) for name, p in model.named_parameters()]


def kappa_of(weight: Tensor) -> Tensor:
    return Components(weight.detach()).condition_number


def ill_conditioned(rows: int = 6, columns: int = 6, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False).double()
    u, s, vt = torch.linalg.svd(matrices(rows, columns, seed=seed), full_matrices=False)
    values = torch.logspace(0, -3, len(s), dtype=torch.float64)
    layer.weight.data = (u * values) @ vt
    return layer


def idle(layer: nn.Module, correction: Correction, count: int, rate: float = 0.1) -> nn.Module:
    """Steps with no gradient from any data."""
    optimizer = SGD(layer.parameters(), lr=rate)
    with correction.attach(layer, optimizer):
        for _ in range(count):
            optimizer.zero_grad(set_to_none=False)
            for p in layer.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
    return layer


def steps_on(layer: nn.Module, optimizer: Optimizer, x: Tensor, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()


def attached(correction: Correction, rate: float = 0.05) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=rate)
    correction.attach(model, optimizer)
    return model, optimizer
