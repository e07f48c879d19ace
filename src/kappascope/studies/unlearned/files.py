"""Public checkpoints beside the nulls that a file alone allows.

There are no ghosts and no gradients in a file. Three nulls are left: the **start**, where its size
is published; noise that has the matrix's own **row and column norms** and nothing else (`shaped`);
and the closed law of noise and **decay** (`white`), where rates, decay and steps are published, as
they are for stories15m: the defaults of llama2.c's ``train.py``, whose steps its author may have
changed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from kappascope.lab import downloads
from kappascope.lab.tasks import generator
from kappascope.matrix.parts import matrix_parts
from kappascope.model.names import kind as kind_of
from kappascope.studies.gpt.model import schedule
from kappascope.studies.pretrained.model import llama2c, stored
from kappascope.studies.pretrained.spectra import used
from kappascope.theory.noise import NoiseLaw, noise_law

CHECKPOINTS = ("stories15m", "minilm", "albert")
DRAWS = 19  # of matrices of hundreds of rows, whose parts hardly differ from draw to draw
START = 0.02  # the deviation of normal starts, of BERT as of GPT-2
LAYERS = 6  # of stories15m, whose start depends on them
KINDS = ("query", "key", "value", "output", "gate", "up", "down")
STEPS, WARMUP, RATE = 100_000, 1_000, 5e-4
SETTINGS = {"betas": (0.9, 0.95), "weight_decay": 0.1}


def file_rows(model: str) -> Iterator[dict[str, Any]]:
    """Yield every part of the matrices of a checkpoint's layers, beside their nulls."""
    state = weights(model)
    for name in used(state):
        kind = kind_of(name)
        if kind in KINDS and state[name].ndim == 2:
            yield from _rows(model, name, kind, state[name].float())


def weights(model: str) -> Mapping[str, Tensor]:
    """Read the state dict of a checkpoint."""
    if model == "stories15m":
        return llama2c(downloads.path(model).read_bytes())[0].state
    return stored(downloads.path(model))[0]


def start_deviation(model: str, kind: str) -> float:
    """Return the deviation of a matrix's entries before training.

    llama2.c starts what writes to the stream smaller, and takes the gated factor for one of these.
    """
    is_small = model == "stories15m" and kind in ("output", "up")
    return START / math.sqrt(2 * LAYERS) if is_small else START


def published_law(shape: tuple[int, int]) -> NoiseLaw:
    """Return the law of noise for the published training of stories15m."""
    cosine = (schedule(step, STEPS, WARMUP) for step in range(STEPS))
    # the schedule of this house ends at a tenth of the rate, theirs at nothing
    shares = (share if k < WARMUP else (share - 0.1) / 0.9 for k, share in enumerate(cosine))
    return noise_law("AdamW", SETTINGS, [RATE * share for share in shares], shape)


def with_norms_of(weight: Tensor, draws: int, random: torch.Generator) -> Tensor:
    """Draw random matrices with the row and column norms of a matrix, on average.

    >>> weight = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    >>> drawn = with_norms_of(weight, 4000, torch.Generator().manual_seed(0))
    >>> [round(float(x), 1) for x in drawn.square().mean(0).sum(1).sqrt()]
    [3.0, 4.0]
    """
    square = weight.square()
    rows, columns = square.sum(1).sqrt(), square.sum(0).sqrt()
    noise = torch.randn((draws, *weight.shape), generator=random)
    return rows[:, None] * noise * columns / square.sum().sqrt()


def _rows(model: str, name: str, kind: str, weight: Tensor) -> Iterator[dict[str, Any]]:
    random = generator("unlearned file", model, name)
    start = start_deviation(model, kind) * torch.randn((DRAWS, *weight.shape), generator=random)
    stacks = {"start": start, "shaped": with_norms_of(weight, DRAWS, random)}
    if model == "stories15m":
        law = published_law((weight.shape[0], weight.shape[1]))
        noise = torch.randn((DRAWS, *weight.shape), generator=random)
        stacks["white"] = law.kept * start + law.spread * noise
    nulls = {label: matrix_parts(stack) for label, stack in stacks.items()}
    for part, value in matrix_parts(weight).items():
        row: dict[str, Any] = {"component": part, "matrix": name, "kind": kind}
        row["value"] = float(value)
        for label, parts in nulls.items():
            row[label] = float(parts[part].mean())
            row[f"{label}_spread"] = float(parts[part].std())
        yield row
