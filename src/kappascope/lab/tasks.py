"""What is to be learned: random streams, hidden target matrices, and the batches that show them.

Everything is stacked: the first dimension of a tensor counts trials, and a trial's numbers are
the same to the last bit whichever trials ride along.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

ENTROPY = 2601_04890  # the arXiv number of the paper whose open question is asked here
AHEAD = 2**14  # numbers a trial draws at once: enough to hide the call, few enough to stay in cache

Pair = tuple[Tensor, Tensor]
"""Standard normal inputs and label noise of one batch, each ``(trials, rows, size)``."""


class Random(ABC):
    """A stack of random sources, one a trial."""

    @abstractmethod
    def normal(self, *shape: int) -> Float[Tensor, "trials ..."]:
        """Draw independent standard normal numbers, ``shape`` of them for every trial."""

    def pairs(self, rows: int, size: int) -> Iterator[Pair]:
        """Yield inputs and label noise of one batch after another, without end."""
        ahead = max(1, AHEAD // (2 * rows * size))
        while True:
            block = self.normal(ahead, 2, rows, size)
            for step in range(ahead):
                yield block[:, step, 0], block[:, step, 1]

    def condensed(self, rows: int, size: int) -> Iterator[Pair]:
        """Give :meth:`pairs`, or fewer rows with the same law of a linear model's gradients."""
        return self.pairs(rows, size)


@final
@dataclass(frozen=True)
class Legacy(Random):
    """NumPy's legacy generators, in float64: the numbers the paper drew."""

    sources: tuple[np.random.RandomState, ...]

    def normal(self, *shape: int) -> Float[Tensor, "trials ..."]:  # noqa: D102 - as in Random
        return torch.from_numpy(
            np.stack([source.standard_normal(shape) for source in self.sources])
        )


@final
@dataclass(frozen=True)
class Generators(Random):
    """Torch's generators; the numbers have single precision, whatever type carries them."""

    sources: tuple[torch.Generator, ...]
    dtype: torch.dtype

    def normal(self, *shape: int) -> Float[Tensor, "trials ..."]:  # noqa: D102 - as in Random
        drawn = torch.empty(len(self.sources), *shape)
        for source, numbers in zip(self.sources, drawn, strict=True):
            numbers.normal_(generator=source)
        return drawn.to(self.dtype)

    def condensed(self, rows: int, size: int) -> Iterator[Pair]:
        """Yield the triangle R of X = QR, and Q'E, where that has fewer rows than X.

        A gradient needs X'X = R'R and X'E = R'Q'E alone. R is Bartlett's: normal above the
        diagonal, chi with ``rows``, ``rows - 1``, ... degrees on it; Q'E is normal again.
        """
        if size > rows:
            yield from self.pairs(rows, size)
        ahead = max(1, AHEAD // (3 * size * size))
        degrees = torch.arange(rows, rows - size, -1.0)
        halves = torch.stack([degrees, degrees.flip(0)]).expand(ahead, 2, size) / 2
        upper = torch.ones(size, size, dtype=self.dtype).triu()
        while True:
            square, noise = self.normal(ahead, size, size), self.normal(ahead, 2, size, size)
            chi = (2 * self._gamma(halves)).sqrt_()
            # both triangles serve: with columns in reverse order, X = QL has a lower one
            for half, triangle in enumerate((square * upper, square * upper.mT)):
                triangle.diagonal(dim1=-2, dim2=-1).copy_(chi[:, :, half])
                for step in range(ahead):
                    yield triangle[:, step], noise[:, step, half]

    def _gamma(self, shapes: Tensor) -> Float[Tensor, "trials ..."]:
        drawn = [torch._standard_gamma(shapes, generator=source) for source in self.sources]
        return torch.stack(drawn).to(self.dtype)


class Streams(ABC):
    """Where the trials of a block take their randomness from."""

    name: ClassVar[str]
    seeds: Sequence[int]

    @abstractmethod
    def random(self, offset: int = 0, dtype: torch.dtype = torch.float64) -> Random:
        """Return a fresh source for every trial; another ``offset`` gives independent ones."""


@final
@dataclass(frozen=True)
class Paper(Streams):
    """The paper's streams: trial k draws from ``RandomState(42 + 100 k + offset)``, in float64.

    >>> Paper([0]).random().normal(2)
    tensor([[ 0.4967, -0.1383]], dtype=torch.float64)
    """

    seeds: Sequence[int]
    name: ClassVar[str] = "paper"

    def random(self, offset: int = 0, dtype: torch.dtype = torch.float64) -> Legacy:  # noqa: D102 - as in Streams
        return Legacy(tuple(np.random.RandomState(42 + 100 * k + offset) for k in self.seeds))


@final
@dataclass(frozen=True)
class Own(Streams):
    """Streams of our own, keyed by what is asked (``key``) and by the trial's seed.

    >>> together, alone = Own([3, 8], key="e1 size=64"), Own([8], key="e1 size=64")
    >>> torch.equal(together.random().normal(2)[1:], alone.random().normal(2))
    True
    """

    seeds: Sequence[int]
    key: str
    name: ClassVar[str] = "own"

    def random(self, offset: int = 0, dtype: torch.dtype = torch.float64) -> Generators:  # noqa: D102 - as in Streams
        of = (generator(self.key, seed, offset) for seed in self.seeds)
        return Generators(tuple(of), dtype)


def generator(*key: str | int) -> torch.Generator:
    """Seed a Mersenne twister with its whole state from the key: a seed would keep 32 bits.

    >>> draws = [torch.rand((), generator=generator("data", seed)).item() for seed in (0, 0, 1)]
    >>> draws[0] == draws[1], draws[0] == draws[2]
    (True, False)
    """
    mixed = tuple(word for part in key for word in _words(part))
    words = np.random.SeedSequence(ENTROPY, spawn_key=mixed).generate_state(624)
    twister = torch.Generator().manual_seed(0)  # sets all but the words: nothing drawn so far
    state = twister.get_state()
    state[24 : 24 + 624 * 8] = torch.from_numpy(words.astype("<u8").view(np.uint8))
    return twister.set_state(state)


def _words(part: str | int) -> list[int]:
    if isinstance(part, int):
        return [part]
    digest = hashlib.sha256(part.encode()).digest()
    return [int(word) for word in np.frombuffer(digest, dtype="<u4")]


Structure = Callable[[Random, int], Tensor]


def heterogeneous(random: Random, size: int) -> Float[Tensor, "trials size size"]:
    """Draw Gaussian matrices with log-normal row scales: the paper's targets."""
    entries, scales = random.normal(size, size), random.normal(size)
    return (2 / size) ** 0.5 * (0.5 * scales).exp()[..., None] * entries


def low_rank(random: Random, size: int) -> Float[Tensor, "trials size size"]:
    """Multiply two Gaussian factors of rank ``size / 4``; the condition number is infinite."""
    left, right = random.normal(size, size // 4), random.normal(size // 4, size)
    return 2 / size * left @ right


def block_diagonal(random: Random, size: int) -> Float[Tensor, "trials size size"]:
    """Draw four Gaussian blocks, each with a log-normal scale.

    The paper does not say what its blocks are; this is one of several that print its 93 %.
    """
    b = size // 4
    blocks = [(0.5 * random.normal(1, 1)).exp() * random.normal(b, b) for _ in range(4)]
    return torch.stack([torch.block_diag(*trial) for trial in zip(*blocks, strict=True)])


STRUCTURES: dict[str, Structure] = {
    "low-rank": low_rank,
    "block-diagonal": block_diagonal,
    "heterogeneous": heterogeneous,
}


def start(random: Random, size: int, scale: float = 0.1) -> Float[Tensor, "trials size size"]:
    """Draw the random matrix from which training starts."""
    return scale * (2 / size) ** 0.5 * random.normal(size, size)


class Batch(ABC):
    """What one step of training sees."""

    @abstractmethod
    def backward(self, model: nn.Module) -> None:
        """Leave the gradient of half the mean squared error in the model's parameters."""


@final
@dataclass(frozen=True)
class LinearBatch(Batch):
    """A batch for a model that is a matrix; ``model()`` gives it."""

    inputs: Float[Tensor, "trials rows in"]
    noise: Float[Tensor, "trials rows out"]
    task: Regression

    def residual(self, weight: Tensor) -> Float[Tensor, "trials rows out"]:
        """Return the answers of ``weight`` minus the noisy ones that are to be learned."""
        # X (W - T)' and not XW' - XT': one product less
        answer = torch.bmm(self.inputs, (weight - self.task.target).mT)
        return answer.sub_(self.noise, alpha=self.task.noise)

    def gradient(self, weight: Tensor) -> Float[Tensor, "trials out in"]:
        """Return the gradient of the loss at ``weight``."""
        return torch.bmm(self.residual(weight.detach()).div_(self.task.rows).mT, self.inputs)

    def loss(self, weight: Tensor) -> Float[Tensor, " trials"]:
        """Return half the mean squared error at ``weight``, one number a trial."""
        return self.residual(weight).square().sum((-2, -1)) / (2 * self.task.rows)

    def backward(self, model: nn.Module) -> None:  # noqa: D102 - as in Batch
        weight = model()
        weight.backward(self.gradient(weight))


@dataclass(frozen=True)
class Regression:
    """Learn ``target`` from ``y = Wx + noise``, Gaussian ``x``, fresh rows in every batch."""

    target: Float[Tensor, "trials out in"]
    rows: int = 64
    noise: float = 0.01

    def batches(self, random: Random) -> Iterator[LinearBatch]:
        """Yield batches of fresh rows without end."""
        size = self.target.shape[-1]
        return (LinearBatch(x, e, self) for x, e in random.condensed(self.rows, size))


@final
@dataclass(frozen=True)
class TeacherBatch(Batch):
    """A batch for a network; ``model(inputs)`` gives its answers."""

    inputs: Float[Tensor, "trials rows in"]
    answers: Float[Tensor, "trials rows out"]

    def backward(self, model: nn.Module) -> None:  # noqa: D102 - as in Batch
        error = model(self.inputs) - self.answers
        (error.square().sum() / (2 * self.inputs.shape[-2])).backward()


@dataclass(frozen=True)
class Teacher:
    """Learn to answer as ``network`` does, up to label noise."""

    network: Callable[[Tensor], Tensor]
    size: int
    rows: int = 64
    noise: float = 0.01

    @torch.no_grad()
    def _batch(self, x: Tensor, e: Tensor) -> TeacherBatch:
        return TeacherBatch(x, self.network(x) + self.noise * e)

    def batches(self, random: Random) -> Iterator[TeacherBatch]:
        """Yield batches of fresh rows without end."""
        return (self._batch(x, e) for x, e in random.pairs(self.rows, self.size))


def noiseless(batches: Iterator[LinearBatch]) -> Iterator[LinearBatch]:
    """Yield the same inputs, answered without label noise."""
    return (replace(batch, task=replace(batch.task, noise=0.0)) for batch in batches)
