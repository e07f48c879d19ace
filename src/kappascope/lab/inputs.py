"""What a layer is shown: white inputs, inputs with a power law, handwritten digits, words.

All have a mean square of one per entry, so that learning rates mean the same; they differ in how
it is spread over directions, which decides how fast each direction is learned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.resources import files

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.lab.tasks import LinearBatch, Random, Regression

WORDS = 4096  # in the vocabulary; the rarest is seen once in 36,000


@dataclass(frozen=True)
class Source:
    """Inputs without end, and their second moments.

    >>> target = torch.ones(1, 2, 2, dtype=torch.float64)
    >>> white(2).loss(target)(0 * target)
    tensor([1.], dtype=torch.float64)
    """

    moments: Float[Tensor, "size size"]
    draw: Callable[[Random, int], Tensor]

    def batches(self, task: Regression, random: Random) -> Iterator[LinearBatch]:
        """Yield batches of a task that shows these inputs."""
        while True:
            inputs = self.draw(random, task.rows)
            yield LinearBatch(inputs, random.normal(task.rows, task.target.shape[-2]), task)

    def loss(self, target: Tensor) -> Callable[[Tensor], Tensor]:
        """Return the expected squared error of a weight's answers, in units of the answers."""

        def squared(weight: Tensor) -> Float[Tensor, " trials"]:
            return (weight * (weight @ self.moments)).sum((-2, -1))

        whole = squared(target)
        return lambda weight: squared(weight - target) / whole

    def directions(self) -> tuple[Float[Tensor, " size"], Float[Tensor, "size size"]]:
        """Return the variances of the principal directions, largest first, and these as columns."""
        values, vectors = torch.linalg.eigh(self.moments)
        return values.flip(0).clamp(min=0), vectors.flip(1)


def white(size: int) -> Source:
    """Show independent standard normal entries, as the paper does.

    >>> white(3).directions()[0]
    tensor([1., 1., 1.], dtype=torch.float64)
    """
    return Source(
        torch.eye(size, dtype=torch.float64), lambda random, rows: random.normal(rows, size)
    )


def power_law_inputs(size: int, exponent: float = 1.0) -> Source:
    """Show normal inputs whose variances fall like k^-exponent along cosines.

    >>> values, _ = power_law_inputs(4).directions()
    >>> values / values[0]
    tensor([1.0000, 0.5000, 0.3333, 0.2500], dtype=torch.float64)
    """
    variances = torch.arange(1, size + 1, dtype=torch.float64) ** -exponent
    # cosines and not axes: an optimizer with a rate for every entry must not be favoured
    root = (variances / variances.mean()).sqrt()[:, None] * _cosines(size)

    def draw(random: Random, rows: int) -> Tensor:
        normal = random.normal(rows, size)
        # a product for each trial: one of all may round a trial's rows as their number bids
        return normal @ root.expand(len(normal), size, size)

    return Source(root.mT @ root, draw)


def _cosines(size: int) -> Tensor:
    """Return an orthogonal matrix whose rows are waves."""
    k = torch.arange(size, dtype=torch.float64)
    waves = torch.cos(torch.pi / size * k[:, None] * (k + 0.5))
    return waves / torch.linalg.vector_norm(waves, dim=1, keepdim=True)


def digits(size: int = 64) -> Source:
    """Show pixels of handwritten digits, centred; some pixels are never written on.

    >>> int((digits().directions()[0] < 1e-12).sum())
    3
    """
    if size != 64:
        raise ValueError(f"the digits have 64 pixels, not {size}; ask for size 64")
    return _listed(_pixels(), torch.full((1797,), 1 / 1797, dtype=torch.float64))


@cache
def _pixels() -> Tensor:
    with (files("kappascope.lab") / "data" / "digits.npz").open("rb") as file:
        pixels = torch.from_numpy(np.load(file)["pixels"].astype(np.float64))
    return pixels - pixels.mean(0)


def tokens(size: int) -> Source:
    """Show embeddings of words as a language model starts with them, in a text's frequencies.

    The k-th word has frequency ~ 1/k (Zipf) and an embedding of independent normal entries.

    >>> values, _ = tokens(16).directions()
    >>> bool(values[0] > 2 > 0.8 > values[-1])
    True
    """
    generator = torch.Generator().manual_seed(1949)  # the year of Zipf's book; same for all trials
    embeddings = torch.randn(WORDS, size, generator=generator).double()
    frequencies = torch.arange(1, WORDS + 1, dtype=torch.float64).reciprocal()
    return _listed(embeddings, frequencies / frequencies.sum())


def _listed(items: Tensor, shares: Tensor) -> Source:
    """Show rows of a list, each drawn with its share."""
    moments = items.mT @ (shares[:, None] * items)
    scale = moments.diagonal().mean().rsqrt()
    upto = shares.cumsum(0)

    def draw(random: Random, rows: int) -> Tensor:
        uniform = torch.special.ndtr(random.normal(rows).double())
        chosen = torch.searchsorted(upto, uniform.contiguous()).clamp(max=len(items) - 1)
        return scale * items[chosen]

    return Source(scale**2 * moments, draw)


INPUTS: dict[str, Callable[[int], Source]] = {
    "white": white,
    "power law": power_law_inputs,
    "steep power law": partial(power_law_inputs, exponent=2.0),
    "digits": digits,
    "tokens": tokens,
}
"""Inputs by name, each a function of their size."""
