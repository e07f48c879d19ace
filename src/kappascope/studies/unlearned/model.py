"""The network of the study, its optimizers, and its matrices as the network sees them.

The blocks' matrices are trained by the optimizer that is asked about; embeddings, head and gains
always by one and the same AdamW. So learning rate and decay act where they are asked about alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from kappascope.lab.optimizers import Muon
from kappascope.matrix import spectra
from kappascope.matrix.parts import StartFrame, matrix_parts, spectral_parts
from kappascope.model.names import kind as kind_of
from kappascope.studies.gpt.model import GPT, HEAD

LAYERS = 2
GHOSTS = 4  # beside every run
BASE_WIDTH = 32  # of the grid; a wider model is compared with it
REST_RATE = 0.005  # of embeddings, head and gains, without decay
MOMENTUM = 0.9  # of SGD
BETAS = (0.9, 0.95)  # of GPT-3 and Llama
RATE: Mapping[str, float] = {"AdamW": 0.005, "Muon": 0.005, "SGD": 0.1}
# the sum of rate times decay over a run: 0, 1, 5 and 30, momentum of SGD counted
DECAYS: Mapping[str, tuple[float, ...]] = {
    "AdamW": (0.0, 0.1, 0.5, 3.0),
    "Muon": (0.0, 0.1, 0.5, 3.0),
    "SGD": (0.0, 0.0005, 0.0025, 0.015),
}
OPTIMIZERS = tuple(RATE)
LIGHT, CENTRE = 1, 2  # the places of two of the decays
BEHIND_A_NORM = {"query": "attention", "key": "attention", "value": "attention", "up": "perceptron"}


def hidden(model: GPT) -> dict[str, nn.Parameter]:
    """Return the matrices of the blocks by name."""
    return {name: p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2}


def steppers(model: GPT, optimizer: str, decay: float, growth: float = 1.0) -> dict[str, Optimizer]:
    """Build the optimizer of the blocks' matrices, and that of the rest.

    With a ``growth`` of the width the head's rate falls, as muP has it for AdamW; the rate of the
    blocks' falls with the schedule, and their decay rises so that the product stays.
    """
    matrices = list(hidden(model).values())
    ids = {id(p) for p in (*matrices, model.head.weight)}
    rest = [p for p in model.parameters() if id(p) not in ids]
    groups: list[dict[str, Any]] = [{"params": rest}]
    groups.append({"params": [model.head.weight], "lr": REST_RATE / growth})
    decay = decay * growth
    asked: Optimizer
    if optimizer == "SGD":
        asked = SGD(matrices, lr=0.0, momentum=MOMENTUM, weight_decay=decay)
    elif optimizer == "Muon":  # its step is as large as AdamW's, and one rate serves both
        asked = Muon(matrices, lr=0.0, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    else:
        asked = AdamW(matrices, lr=0.0, betas=BETAS, weight_decay=decay, fused=True)
    return {
        "hidden": asked,
        "rest": AdamW(groups, lr=REST_RATE, betas=BETAS, weight_decay=0.0, fused=True),
    }


def forgetting(optimizer: str, rate: float, decay: float) -> float:
    """Return the share of a weight that decay takes in a step, once momentum has settled.

    >>> round(forgetting("SGD", 0.1, 0.01), 6), forgetting("AdamW", 0.1, 0.01)
    (0.01, 0.001)
    """
    return rate * decay / (1 - MOMENTUM) if optimizer == "SGD" else rate * decay


# --- matrices and products ------------------------------------------------------------------------


def gains(model: GPT) -> dict[str, Tensor]:
    """Return the gain of the norm before each matrix that is behind one, by the matrix's name."""
    found = {}
    for name in hidden(model):
        norm = BEHIND_A_NORM.get(kind_of(name))
        if norm:
            block = model.blocks[int(name.split(".")[1])]
            found[name] = getattr(block, f"{norm}_norm").weight.detach()
    return found


def seen(weights: Mapping[str, Tensor], gain: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fold the gain of a norm into the matrix behind it: the network knows their product alone."""
    return {name: w * gain[name] if name in gain else w for name, w in weights.items()}


def every_part(
    weights: Mapping[str, Tensor], frames: Mapping[str, StartFrame]
) -> Iterator[tuple[str, str, dict[str, Tensor]]]:
    """Yield name, kind and parts of each matrix, or stack, and of what heads compare and write."""
    for name, weight in weights.items():
        yield name, kind_of(name), matrix_parts(weight, frames[name])
    for name, query in weights.items():
        if kind_of(name) != "query":
            continue
        key, value, output = (
            weights[name.replace("query", other)] for other in ("key", "value", "output")
        )
        layer = name.split(".query")[0]
        for head in range(query.shape[-2] // HEAD):
            rows = slice(head * HEAD, (head + 1) * HEAD)
            products = {
                "QK": query[..., rows, :].mT.double() @ key[..., rows, :].double(),
                "OV": output[..., :, rows].double() @ value[..., rows, :].double(),
            }
            for label, product in products.items():
                values = spectra.singular_values(product)[..., :HEAD]
                norm = product.square().mean((-2, -1)).log() / 2
                found = {"log_norm": norm, **spectral_parts(values)}
                yield f"{layer}[{label.lower()}.{head}]", label, found


# --- what gradients are like ----------------------------------------------------------------------


class GradientNoise:
    """Covariances of what noise feeds to each matrix, weighed as the weight itself remembers it.

    For SGD that is the gradient, for AdamW the gradient over the root of its second moment; Muon
    makes the momentum orthogonal, and what it feeds is taken from a ghost's step.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], share: float) -> None:
        self.share = share  # of a covariance that is left after a step: squares of weights decay
        self.state: dict[str, dict[str, Tensor]] = {
            name: {
                "rows": torch.zeros(p.shape[0], p.shape[0]),
                "columns": torch.zeros(p.shape[1], p.shape[1]),
                "total": torch.zeros(()),
                "square": torch.zeros(()),
            }
            for name, p in parameters.items()
        }

    @torch.no_grad()
    def add(self, name: str, fed: Tensor, gradient: Tensor, steps: int) -> None:
        """Take what was fed, ``steps`` after the last time."""
        state, left = self.state[name], self.share**steps
        state["rows"].mul_(left).add_(fed @ fed.mT)
        state["columns"].mul_(left).add_(fed.mT @ fed)
        state["square"].mul_(left).add_(gradient.square().mean())
        state["total"].mul_(left).add_(1.0)

    def deviation(self, name: str) -> float:
        """Return the root mean square of a gradient's entries."""
        state = self.state[name]
        return float((state["square"] / state["total"].clamp(min=1e-30)).sqrt())

    def state_dict(self) -> dict[str, Any]:
        """Return the sums so far, by matrix."""
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the sums of an interrupted run."""
        self.state = state


def fed_by(optimizer: Optimizer, p: nn.Parameter) -> Tensor:
    """Return the gradient as the optimizer scales it, entry by entry, after its step."""
    assert p.grad is not None
    if not isinstance(optimizer, AdamW):
        return p.grad
    state = optimizer.state[p]
    corrected = state["exp_avg_sq"] / (1 - BETAS[1] ** float(state["step"]))
    return p.grad / (corrected.sqrt() + 1e-8)
