"""What is measured of a trained network: the components of its weights, and what it is worth."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, one_hot

from kappascope.components import Components
from kappascope.lab import Batch
from kappascope.studies.digits_claims import BITS
from kappascope.studies.digits_model import images
from kappascope.tasks import generator

NOISE, DRAWS = 0.25, 8  # sd in pixels from 0 to 1; draws of all test images, the same for all
BINS = 15  # of confidence, of equal width: the custom since Guo et al. 2017


def log_kappa(matrix: Tensor) -> float:
    """Natural logarithm of the condition number."""
    return Components(matrix.detach()).log_condition_number.item()


def described(matrices: list[Tensor]) -> Iterator[Batch]:
    """Logarithms of the components: of every matrix, their mean and their maximum.

    Kappa also of the first matrix without the pixels that no training image writes on.
    """
    parts = [Components(matrix) for matrix in matrices]
    for name in (
        "condition_number",
        "frobenius_norm",
        "stable_rank",
        "effective_rank",
        "spectral_gap",
    ):
        yield from _levels(name, torch.stack([getattr(one, name) for one in parts]))
    yield from _levels("spectral_norm", torch.stack([one.singular_values[0] for one in parts]))
    rows = [one.row_norms for one in parts]
    yield from _levels(
        "row_dispersion", torch.stack([norms.std() / norms.mean() for norms in rows])
    )
    written = images()[0].amax(0) > 0
    kappa = log_kappa(matrices[0][:, written])
    yield {"component": "condition_number", "matrix": "written", "value": kappa}


def _levels(name: str, values: Tensor) -> Iterator[Batch]:
    logs = values.log()
    named = {str(place): one for place, one in enumerate(logs)}
    for matrix, value in {**named, "mean": logs.mean(), "max": logs.max()}.items():
        yield {"component": name, "matrix": matrix, "value": value.item()}


@torch.no_grad()
def outcomes(model: nn.Sequential) -> dict[str, float]:
    """What the network is worth on images it has not seen; of everything, less is better."""
    *_, pixels, labels = images()
    scores = model(pixels)
    loss, error = cross_entropy(scores, labels).item(), misses(scores, labels)
    random = generator("digits noise")
    noisy = [pixels + NOISE * torch.randn(pixels.shape, generator=random) for _ in range(DRAWS)]
    found = {
        "error": error,
        "cross_entropy": loss,
        "calibration": calibration(scores.softmax(1), labels),
        "brier": (scores.softmax(1) - one_hot(labels, 10)).square().sum(1).mean().item(),
        "noise": sum(misses(model(one), labels) for one in noisy) / DRAWS - error,
    }
    exact = {name: p.clone() for name, p in model.named_parameters()}
    for bits in BITS:
        rounded = {name: quantized(p, bits) if p.ndim == 2 else p for name, p in exact.items()}
        coarse = torch.func.functional_call(model, rounded, (pixels,))
        found[f"int{bits}"] = cross_entropy(coarse, labels).item() - loss
    return found


def misses(scores: Tensor, labels: Tensor) -> float:
    """The share of images taken for another digit."""
    return (scores.argmax(1) != labels).double().mean().item()


def calibration(shares: Tensor, labels: Tensor) -> float:
    """Expected calibration error: how far confidence is from accuracy, bin by bin.

    >>> calibration(torch.tensor([[0.75, 0.25]] * 4), torch.tensor([0, 0, 0, 1]))
    0.0
    """
    confidence, answer = shares.double().max(1)
    bins = (confidence * BINS).long().clamp(max=BINS - 1)
    gap = confidence - (answer == labels).double()
    return (torch.zeros(BINS).double().index_add_(0, bins, gap).abs().sum() / len(gap)).item()


def quantized(matrix: Tensor, bits: int) -> Tensor:
    """The nearest of evenly spaced levels, zero among them, that reach as far on both sides.

    >>> quantized(torch.tensor([[-1.0, 0.4, 0.6]]), bits=2)
    tensor([[-1.,  0.,  1.]])
    """
    step = matrix.abs().max() / (2 ** (bits - 1) - 1)
    return matrix if step == 0 else (matrix / step).round() * step
