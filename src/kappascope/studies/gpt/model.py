"""A small character GPT, its optimizers, and the text it learns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

from kappascope.lab.optimizers import Muon
from kappascope.refusal import Refusal

CONTEXT = 63  # characters a model sees; with the next ones, windows of 64
HEAD = 16  # rows of a head, at every width: four heads at width 64
WINDOWS = 512  # of the validation text at the end of training, and 64 of them on the way
MIN_CHARACTERS = 20_000  # below, a tenth of them validates nothing


class Attention(nn.Module):
    """Causal attention with query, key, value and output apart, as the corrections see them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Let every position read from those up to it."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, HEAD)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        read = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output(read.transpose(1, 2).flatten(2))


class Perceptron(nn.Module):
    """A perceptron with one hidden layer of four times the width, and GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Transform each position by itself."""
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """A block has attention and perceptron, each behind a norm and beside a residual path."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(width), Attention(width)
        self.perceptron_norm, self.perceptron = nn.RMSNorm(width), Perceptron(width)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and perceptron write to the stream."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.perceptron(self.perceptron_norm(x))


class GPT(nn.Module):
    """A GPT gives the logits of the next character, for every position."""

    def __init__(self, vocabulary: int, layers: int, width: int, random: torch.Generator) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(CONTEXT, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:  # GPT-2's 0.02 at its width of 768, the same gain at ours
                std = 0.02 * math.sqrt(768 / parameter.shape[1])
                nn.init.normal_(parameter, std=std, generator=random)

    def forward(self, text: Tensor) -> Tensor:
        """Give logits of shape ``(batch, length, vocabulary)``."""
        x = self.token_embedding(text) + self.position_embedding.weight[: text.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, windows: Tensor) -> Tensor:
        """Average the cross-entropy, in nats a character, of windows one longer than a context."""
        logits = self(windows[:, :-1])
        return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


def optimizers(model: GPT, name: str) -> dict[str, Optimizer]:
    """Build AdamW for all; or Muon for the matrices of the blocks, and AdamW for the rest."""
    hidden = [p for p in model.blocks.parameters() if p.ndim == 2] if name == "Muon" else []
    hidden_ids = {id(p) for p in hidden}
    rest = [p for p in model.parameters() if id(p) not in hidden_ids]
    # the second beta of GPT-3 and Llama; a decay of 0.1 is theirs and Muon's own default
    built: dict[str, Optimizer] = {
        "adamw": AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    }
    if hidden:
        # its step is then as large as AdamW's, and one learning rate serves both
        built["muon"] = Muon(hidden, lr=0.0, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    return built


def schedule(step: int, steps: int, warmup: int, decay: bool = True) -> float:
    """Return the share of the learning rate at a step: a linear rise, then a cosine to a tenth.

    Without ``decay`` the rate stays where the rise ends.

    >>> [round(schedule(step, 110, 10), 2) for step in (0, 9, 10, 60, 110)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    if step < warmup:
        return (step + 1) / warmup
    if not decay:
        return 1.0
    return 0.55 + 0.45 * math.cos(math.pi * (step - warmup) / (steps - warmup))


@dataclass(frozen=True)
class Corpus:
    """A text as numbers: the part to learn from, and the last tenth, which validates.

    >>> corpus = Corpus.of("the user's own text. " * 1000 + "ö")
    >>> corpus.vocabulary, corpus.validation[-1] == 13
    (15, tensor(True))
    """

    train: Tensor
    validation: Tensor
    # The characters of what is learned, and one for all others. Odd: a head is told by having as
    # many rows as an embedding, and no layer has an odd number of them.
    vocabulary: int

    @classmethod
    def of(cls, text: str) -> Corpus:
        """Split a text; a character that only the last tenth has becomes the unknown one."""
        if len(text) < MIN_CHARACTERS:
            wrong = f"has {len(text):,} characters"
            raise Refusal(2, "the text", wrong, f"give one of {MIN_CHARACTERS:,} or more")
        cut = len(text) * 9 // 10
        known = {character: place for place, character in enumerate(sorted(set(text[:cut])))}
        whole = torch.tensor([known.get(character, len(known)) for character in text])
        return cls(whole[:cut], whole[cut:], (len(known) + 1) | 1)

    def batch(self, count: int, random: torch.Generator) -> Tensor:
        """Draw windows from anywhere in the training text."""
        starts = torch.randint(len(self.train) - CONTEXT, (count, 1), generator=random)
        return self.train[starts + torch.arange(CONTEXT + 1)]

    def held_out(self, count: int = WINDOWS) -> Tensor:
        """Take windows of the validation text, spread evenly, the same for every model."""
        starts = torch.arange(count) * (len(self.validation) - CONTEXT - 1) // (count - 1)
        return self.validation[starts[:, None] + torch.arange(CONTEXT + 1)]

    @cached_property
    def frequency_loss(self) -> float:
        """The loss of a model that knows how frequent every character is, and nothing else."""
        share = torch.bincount(self.train).double() / len(self.train)
        return float(-torch.special.xlogy(share, share).sum())


@torch.no_grad()
def validation(model: GPT, windows: Tensor) -> float:
    """Return the mean loss of held-out windows, computed in parts."""
    return float(torch.stack([model.loss(part) for part in windows.split(64)]).double().mean())
