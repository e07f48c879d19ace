"""The digits, the networks that learn them, and what moves those."""

from functools import cache
from importlib.resources import files
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn

from kappascope.studies.muon import Muon
from kappascope.tasks import generator

TRAIN = 900  # of 1,797 images; the other 897 put the standard error of an accuracy of 97 % at 0.6 %
BIASES = 0.001  # Adam's rate beside Muon


@cache
def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Pixels from 0 to 1 and labels of the training images, then of the others."""
    with (files("kappascope") / "data" / "digits.npz").open("rb") as file:
        stored = np.load(file)
        pixels = torch.from_numpy(stored["pixels"].astype(np.float32)) / 16
        labels = torch.from_numpy(stored["labels"].astype(np.int64))
    order = torch.randperm(len(labels), generator=generator("digits split"))
    train, test = order[:TRAIN], order[TRAIN:]
    return pixels[train], labels[train], pixels[test], labels[test]


def network(width: int, depth: int, start: float, random: torch.Generator) -> nn.Sequential:
    """A plain ReLU network; biases begin at zero."""
    sizes = (64, *[width] * depth)
    hidden = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*hidden, nn.Linear(width, 10))
    for p in model.parameters():
        std = start * (2 / p.shape[1]) ** 0.5 if p.ndim == 2 else 0.0
        nn.init.normal_(p, std=std, generator=random)
    return model


def optimizers(
    name: str, matrices: list[Tensor], biases: list[Tensor], rate: float
) -> dict[str, torch.optim.Optimizer]:
    """One for all, or Muon for the matrices alone: it cannot take biases."""
    if name == "muon":
        adam = torch.optim.Adam(biases, lr=BIASES, fused=True)
        return {"muon": Muon(matrices, lr=rate, weight_decay=0.0), "adam": adam}
    if name == "adam":
        return {"adam": torch.optim.Adam([*matrices, *biases], lr=rate, fused=True)}
    return {"sgd": torch.optim.SGD([*matrices, *biases], lr=rate, momentum=0.9, fused=True)}
