"""The images, the networks that learn them, and what is measured of a trained network."""

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from kappascope.lab.experiment import Rows
from kappascope.lab.optimizers import Muon
from kappascope.lab.tasks import generator
from kappascope.matrix.components import Components
from kappascope.studies.quantization import quantized

TRAIN = 900  # of 1,797 images; the other 897 put the standard error of an accuracy of 97 % at 0.6 %
TRAIN_LOSS = 0.01  # cross-entropy at which a network is done, as in Jiang et al. 2020
BIAS_RATE = 0.001  # Adam's learning rate for biases beside Muon
NOISE, DRAWS = 0.25, 8  # sd in pixels from 0 to 1; draws of all test images, the same for all
BINS = 15  # of confidence, of equal width: the custom since Guo et al. 2017
BITS = (8, 4, 3)  # of quantized weights
OUTCOMES = ("error", "cross_entropy", "calibration", "brier", "noise", *(f"int{b}" for b in BITS))


@cache
def images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Load pixels from 0 to 1 and labels of the training images, then of the test images."""
    with (files("kappascope.lab") / "data" / "digits.npz").open("rb") as file:
        stored = np.load(file)
        pixels = torch.from_numpy(stored["pixels"].astype(np.float32)) / 16
        labels = torch.from_numpy(stored["labels"].astype(np.int64))
    order = torch.randperm(len(labels), generator=generator("digits split"))
    train, test = order[:TRAIN], order[TRAIN:]
    return pixels[train], labels[train], pixels[test], labels[test]


def network(width: int, depth: int, start: float, random: torch.Generator) -> nn.Sequential:
    """Build a plain ReLU network whose biases begin at zero."""
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
    """Build one optimizer for all, or Muon for the matrices and Adam for the biases."""
    if name == "muon":
        adam = torch.optim.Adam(biases, lr=BIAS_RATE, fused=True)
        return {"muon": Muon(matrices, lr=rate, weight_decay=0.0), "adam": adam}
    if name == "adam":
        return {"adam": torch.optim.Adam([*matrices, *biases], lr=rate, fused=True)}
    return {"sgd": torch.optim.SGD([*matrices, *biases], lr=rate, momentum=0.9, fused=True)}


def log_kappa(matrix: Tensor) -> float:
    """Return the natural logarithm of the condition number."""
    return Components(matrix.detach()).log_condition_number.item()


def component_rows(matrices: list[Tensor]) -> Iterator[Rows]:
    """Yield logarithms of the components: of every matrix, their mean and their maximum.

    Kappa of the first matrix is also given without the pixels that no training image writes on.
    """
    components = [Components(matrix) for matrix in matrices]
    row_norms = [each.row_norms for each in components]
    names = (
        "condition_number", "frobenius_norm", "stable_rank", "effective_rank", "spectral_gap"
    )  # fmt: skip
    values = {
        **{name: [getattr(each, name) for each in components] for name in names},
        "spectral_norm": [each.singular_values[0] for each in components],
        "row_dispersion": [norms.std() / norms.mean() for norms in row_norms],
    }
    for name, each in values.items():
        logs = torch.stack(each).log()
        numbered = {str(layer): log for layer, log in enumerate(logs)}
        for matrix, log in {**numbered, "mean": logs.mean(), "max": logs.max()}.items():
            yield {"component": name, "matrix": matrix, "value": log.item()}
    written = images()[0].amax(0) > 0
    kappa = log_kappa(matrices[0][:, written])
    yield {"component": "condition_number", "matrix": "written", "value": kappa}


@torch.no_grad()
def outcomes(model: nn.Sequential) -> dict[str, float]:
    """Measure :data:`OUTCOMES` on images the network has not seen; of all, less is better."""
    *_, pixels, labels = images()
    scores = model(pixels)
    loss, error = cross_entropy(scores, labels).item(), error_rate(scores, labels)
    random = generator("digits noise")
    noisy = [pixels + NOISE * torch.randn(pixels.shape, generator=random) for _ in range(DRAWS)]
    measured = {
        "error": error,
        "cross_entropy": loss,
        "calibration": calibration(scores.softmax(1), labels),
        "brier": (scores.softmax(1) - one_hot(labels, 10)).square().sum(1).mean().item(),
        "noise": sum(error_rate(model(batch), labels) for batch in noisy) / DRAWS - error,
    }
    exact = {name: p.clone() for name, p in model.named_parameters()}
    for bits in BITS:
        rounded = {name: quantized(p, bits) if p.ndim == 2 else p for name, p in exact.items()}
        coarse = torch.func.functional_call(model, rounded, (pixels,))
        measured[f"int{bits}"] = cross_entropy(coarse, labels).item() - loss
    return measured


def error_rate(scores: Tensor, labels: Tensor) -> float:
    """Return the share of images that are taken for another digit."""
    return (scores.argmax(1) != labels).double().mean().item()


def calibration(probabilities: Tensor, labels: Tensor) -> float:
    """Compute the expected calibration error: how far confidence is from accuracy, by bins.

    >>> calibration(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1]))
    0.0
    """
    confidence, answer = probabilities.double().max(1)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gap = confidence - (answer == labels).double()
    return (torch.zeros(BINS).double().index_add_(0, bins, gap).abs().sum() / len(gap)).item()
