"""The networks of the teacher study: their architectures, starts and optimizers."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, Adam, Optimizer

from kappascope.lab.optimizers import Muon

OUTER, WIDTH = 24, 8  # inputs and outputs; hidden units: so few that some students find them all
KAPPA = 5.0  # of every teacher's matrix: the weakest direction is weak, yet carries loss
BIAS = 0.5  # moves the kinks off the origin, where a unit and its mirror image look alike
LEVELS = (0.1, 0.01, 0.001)  # held-out losses, in the variance of the teacher's answers
OPTIMIZERS = ("sgd", "adam", "muon")
NEAR = 0.5  # relative error of every matrix at a start in the teacher's basin
ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "gelu": functional.gelu,
}


@dataclass(frozen=True)
class Architecture:
    """An architecture is a depth, an activation, and ``plain``, ``layernorm`` or ``residual``.

    LayerNorm stands before the activation and has no gain or offset of its own. A residual skips
    each layer between hidden ones; a 2-layer network has none, and a skip around the whole of it
    would cancel between teacher and student.
    """

    depth: int
    activation: str
    variant: str

    def __str__(self) -> str:
        variant = {"plain": "", "layernorm": " LayerNorm", "residual": " residual"}[self.variant]
        return f"{self.depth} {self.activation.upper().replace('RELU', 'ReLU')}{variant}"

    @property
    def matrices(self) -> tuple[str, ...]:
        """The names of the weight matrices, from the input on."""
        return ("first", *("middle",) * (self.depth - 2), "last")


ARCHITECTURES = tuple(
    Architecture(depth, activation, variant)
    for depth in (2, 3)
    for activation in ACTIVATIONS
    for variant in ("plain", "layernorm", "residual")[:depth]
)  # a 2-layer network has no residual


class Network(nn.Module):
    """A multilayer perceptron of some architecture."""

    def __init__(self, architecture: Architecture) -> None:
        super().__init__()
        widths = (OUTER, *(WIDTH,) * (architecture.depth - 1), OUTER)
        linear = (nn.utils.skip_init(nn.Linear, *pair) for pair in pairwise(widths))
        self.layers = nn.ModuleList(linear)
        self.architecture = architecture
        self.activation = ACTIVATIONS[architecture.activation]

    def forward(self, x: Tensor) -> Tensor:
        """Answer a batch of inputs."""
        *hidden, last = self.layers
        for place, layer in enumerate(hidden):
            z = layer(x)
            if self.architecture.variant == "layernorm":
                z = functional.layer_norm(z, z.shape[-1:], eps=1e-12)  # its scale is free: no eps
            skip = self.architecture.variant == "residual" and place
            x = x + self.activation(z) if skip else self.activation(z)
        answers: Tensor = last(x)
        return answers

    @property
    def linear(self) -> list[nn.Linear]:
        """The linear layers, from the input on."""
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """The weight of every layer with its bias as the last column, in float64."""
        pairs = ((layer.weight, layer.bias) for layer in self.linear)
        return tuple(torch.cat([w, b[:, None]], 1).detach().double() for w, b in pairs)


@torch.no_grad()
def teacher(architecture: Architecture, random: torch.Generator) -> Network:
    """Draw a teacher whose matrices have random directions and a condition number of KAPPA.

    Singular values fall from 1 to 1/KAPPA in equal ratios; the overall scale is He's.
    """
    network = Network(architecture)
    for layer in network.linear:
        rows, columns = layer.weight.shape
        rank = min(rows, columns)
        u = nn.init.orthogonal_(torch.empty(rows, rank), generator=random)
        vt = nn.init.orthogonal_(torch.empty(rank, columns), generator=random)
        s = torch.logspace(0, -math.log10(KAPPA), rank)
        layer.weight.copy_(u * (s * math.sqrt(2 * rows) / s.norm()) @ vt)
        layer.bias.normal_(0, BIAS, generator=random)
    return network.requires_grad_(False)


@torch.no_grad()
def student(of: Network, start: str, random: torch.Generator) -> Network:
    """Start a network of the teacher's architecture afresh (He's start) or near the teacher."""
    network = Network(of.architecture)
    for layer, known in zip(network.linear, of.linear, strict=True):
        if start == "fresh":
            nn.init.kaiming_normal_(layer.weight, generator=random)
            layer.bias.zero_()
        else:
            for ours, theirs in zip(layer.parameters(), known.parameters(), strict=True):
                noise = torch.randn(theirs.shape, generator=random)
                ours.copy_(theirs + NEAR * theirs.square().mean().sqrt() * noise)
    return network


def optimizers(name: str, network: Network, rate: float) -> dict[str, Optimizer]:
    """Build SGD with momentum, Adam, or Muon on every matrix with Adam on the biases."""
    if name == "sgd":
        return {"sgd": SGD(network.parameters(), lr=rate, momentum=0.9)}
    if name == "adam":
        return {"adam": Adam(network.parameters(), lr=rate, fused=True)}
    matrices = [p for p in network.parameters() if p.ndim == 2]
    biases = [p for p in network.parameters() if p.ndim == 1]
    muon = Muon(matrices, lr=rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    return {"muon": muon, "biases": Adam(biases, lr=rate, fused=True)}
