"""What watching a training run costs, and how right the numbers are: ratios within one run.

    OMP_NUM_THREADS=1 python benchmarks/monitor.py cost       # share of the time of training
    OMP_NUM_THREADS=1 python benchmarks/monitor.py accuracy   # against a float64 SVD, along a run
    OMP_NUM_THREADS=1 python benchmarks/monitor.py swallowed  # predicted against observed shares
    OMP_NUM_THREADS=1 python benchmarks/monitor.py failures   # six kinds of induced failures

A GPT of width d with 4 layers and heads of 64 learns random text, 2,048 tokens a step. Steps of
training and readings of the monitor are timed in turn in one process, in CPU time: a reading is
what ``Monitor`` does in its hooks at a step that is due, and the hooks of the other steps are
counted, too. The results go to ``benchmarks/results/monitor.json``.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import environment
from torch import Tensor, nn

from kappascope import Monitor

RESULTS = Path(__file__).parent / "results" / "monitor.json"
TOKENS, CONTEXT, VOCABULARY = 2048, 128, 256
EVERY, SPECTRA_EVERY = 20, 500


class Attention(nn.Module):
    """Causal attention with heads of 64 rows."""

    def __init__(self, width: int, head: int = 64) -> None:
        super().__init__()
        self.head = min(head, width // 2)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.num_heads = width // self.head

    def forward(self, x: Tensor) -> Tensor:
        """Let every position read from those up to it."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        read = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(read.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.RMSNorm(width), Attention(width)
        self.norm2 = nn.RMSNorm(width)
        self.up_proj = nn.Linear(width, 4 * width, bias=False)
        self.down_proj = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Add what attention and perceptron write."""
        x = x + self.attn(self.norm1(x))
        return x + self.down_proj(nn.functional.gelu(self.up_proj(self.norm2(x))))


class GPT(nn.Module):
    """A small GPT."""

    def __init__(self, width: int, layers: int = 4, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Embedding(CONTEXT, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 * math.sqrt(768 / width))

    def forward(self, text: Tensor) -> Tensor:
        """Give the logits of the next token."""
        x = self.embed(text) + self.position_embedding.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))

    def loss(self, text: Tensor) -> Tensor:
        """Give the mean cross-entropy."""
        logits = self(text[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def texts(
    vocabulary: int = VOCABULARY, length: int = CONTEXT, tokens: int = TOKENS
) -> Iterator[Tensor]:
    """Text in which the next token mostly follows from the last: something to learn."""
    random = torch.Generator().manual_seed(1)
    follows = torch.randint(vocabulary, (vocabulary,), generator=random)
    while True:
        rows = [torch.randint(vocabulary, (tokens // length,), generator=random)]
        for _ in range(length):
            noise = torch.randint(vocabulary, rows[-1].shape, generator=random)
            keep = torch.rand(rows[-1].shape, generator=random) < 0.8
            rows.append(torch.where(keep, follows[rows[-1]], noise))
        yield torch.stack(rows, 1)


def trained(model: GPT, optimizer: torch.optim.Optimizer, data: Iterator[Tensor]) -> float:
    """CPU seconds of one step of training, without the text."""
    text = next(data)
    began = time.process_time()
    optimizer.zero_grad()
    model.loss(text).backward()
    optimizer.step()
    return time.process_time() - began


def cost(width: int, rounds: int) -> dict[str, Any]:
    """The shares of training time, from steps that are due and steps that are not, in turn."""
    torch.manual_seed(0)
    model = GPT(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    data = texts()
    for _ in range(3):
        trained(model, optimizer, data)
    kinds: dict[str, dict[str, Any]] = {
        "components": {"quantities": ()},
        "components, signal, update, swallowed": {"quantities": ("signal", "update", "swallowed")},
        "whole spectra too": {"spectra_every": 2},
    }
    times: dict[str, list[float]] = {name: [] for name in (*kinds, "plain", "svdvals")}
    quiet: dict[str, list[float]] = {name: [] for name in kinds}
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(rounds):
            times["plain"].append(trained(model, optimizer, data))
            for i, (name, options) in enumerate(kinds.items()):
                path = Path(folder) / f"{i}"
                monitor = Monitor(path, every=2, strict=True, **options)
                monitor = _warm(
                    monitor, model, optimizer, turn, kept=KEPT.setdefault((width, name), [])
                )
                quiet[name].append(trained(model, optimizer, data))
                times[name].append(trained(model, optimizer, data))
                _sleep(monitor)
            began = time.process_time()
            for matrix in matrices:
                torch.linalg.svdvals(matrix.detach())
            times["svdvals"].append(time.process_time() - began)
        for kept in KEPT.values():
            for monitor in kept:
                monitor.close()
        KEPT.clear()
    plain = min(times["plain"])
    idle = {name: statistics.median(quiet[name]) for name in kinds}
    usual = statistics.median(times["plain"])
    reading = {name: statistics.median(times[name][1:]) - usual for name in kinds}
    hooks = {name: max(idle[name] - usual, 0.0) for name in kinds}
    both = reading["components, signal, update, swallowed"]
    spectra = max(reading["whole spectra too"] - both, 0.0)
    share = {
        "components every 20 steps": reading["components"] / EVERY / usual,
        "components every 10 steps": reading["components"] / (EVERY / 2) / usual,
        "with signal, update, swallowed every 20 and whole spectra every 500": (
            both / EVERY + spectra / SPECTRA_EVERY
        )
        / usual,
        "hooks of the other steps": hooks["components"] / usual,
    }
    svdvals = statistics.median(times["svdvals"])
    return {
        "width": width,
        "matrices": len(matrices),
        "step, ms": 1e3 * usual,
        "fastest step, ms": 1e3 * plain,
        "reading, ms": {name: 1e3 * value for name, value in reading.items()},
        "svdvals of every matrix, ms": 1e3 * svdvals,
        "share of training time": share,
        "svdvals over components": svdvals / reading["components"],
    }


KEPT: dict[tuple[int, str], list[Monitor]] = {}


def _warm(
    monitor: Monitor, model: GPT, optimizer: torch.optim.Optimizer, turn: int, kept: list[Monitor]
) -> Monitor:
    """One monitor of a kind, attached once and asleep while others are timed."""
    if not kept:
        kept.append(monitor.attach(model, optimizer))
    kept[0]._is_paused = False
    return kept[0]


def _sleep(monitor: Monitor) -> None:
    monitor._is_paused = True


def main() -> None:
    """Measure what the command line names, and keep it with the rest."""
    parts: dict[str, Callable[[], Any]] = {
        "cost": lambda: [cost(256, rounds=6), cost(512, rounds=4)],
    }
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or parts:
        found[name] = parts[name]()
        print(name, json.dumps(found[name], indent=1))
    RESULTS.write_text(json.dumps(found | {"environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
