"""What corrections cost: against a full SVD, a training step of a small GPT, and geotorch.

CPU time on one thread, both sides in turn in one process; of a training step the median ratio to
the plain step just before it, since the machine's speed changes by a third. The trajectory of the
first part is a Gaussian matrix that moves by a stated fraction of its norm in random directions at
every step: 2e-4, as a slow optimizer moves a layer, and 1e-3, at which the smallest singular
vectors turn so fast that most steps need a factorization of their own.

    OMP_NUM_THREADS=1 python benchmarks/corrections.py [pairs] [gpt] [small] [bound] [--out FILE]

geotorch is compared where it is installed (pip install --no-deps geotorch).
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measuring import cpu_seconds, environment
from torch import Tensor, nn

from kappascope.corrections import (
    Hybrid,
    Multipliers,
    NormPin,
    SingularValueBound,
    SpectralCap,
    SpectralPenalty,
)
from kappascope.matrix import tracking

Result = dict[str, Any]


# --- the penalty's step against a full SVD --------------------------------------------------------


def walk(size: int, speed: float, count: int) -> Iterator[Tensor]:
    """A matrix that changes by ``speed`` of its norm at every step."""
    random = torch.Generator().manual_seed(1)
    weight = torch.randn(size, size, generator=random) / size**0.5
    for _ in range(count):
        yield weight
        noise = torch.randn(size, size, generator=random)
        weight = weight + speed * weight.norm() / noise.norm() * noise


def exact(weight: Tensor) -> tracking.ExtremeTriplets:
    """The extreme triplets from a full SVD."""
    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
    return tracking.ExtremeTriplets(u[:, [0, -1]], s[[0, -1]], vt.mT[:, [0, -1]])


def gradient(found: tracking.ExtremeTriplets) -> Tensor:
    """The gradient of log kappa with respect to the matrix."""
    slopes = torch.stack([1 / found.values[0], -1 / found.values[1]])
    return found.combined(slopes)


def misalignment(a: Tensor, b: Tensor) -> float:
    """1 - cos between two gradients."""
    a, b = a.double().flatten(), b.double().flatten()
    return 1 - float(a @ b / (a.norm() * b.norm()))


def penalty_step(size: int, speed: float, count: int) -> Result:
    """CPU time of the penalty's gradient, tracked and from the SVD, and the angle between them."""
    memory: dict[str, Any] = {}
    times, ratios, angles, tops, fresh = [], [], [], [], 0
    for step, weight in enumerate(walk(size, speed, count + 1)):
        out: dict[str, Any] = {}
        before = memory.get("factor")
        # called at once, before the variables of the loop change
        ours = cpu_seconds(lambda: out.update(ours=tracking.extreme_triplets(weight, memory)))  # noqa: B023
        ours += cpu_seconds(lambda: out.update(a=gradient(out["ours"])))  # noqa: B023
        theirs = cpu_seconds(lambda: out.update(b=gradient(exact(weight))))  # noqa: B023
        if step == 0:
            continue  # from random vectors: paid once
        fresh += memory["factor"] is not before
        times.append((ours, theirs))
        angles.append(misalignment(out["a"], out["b"]))
        tops.append(float(out["ours"].values[0]))
    ratios = [theirs / ours for ours, theirs in times]
    return {
        "size": size,
        "speed": speed,
        "steps": count,
        "tracked_ms": 1e3 * statistics.mean(t[0] for t in times),
        "svd_ms": 1e3 * statistics.mean(t[1] for t in times),
        "ratio": sum(t[1] for t in times) / sum(t[0] for t in times),
        "median_ratio": statistics.median(ratios),
        "misalignment": statistics.median(angles),
        "largest_misalignment": max(angles),
        "factorizations_per_step": fresh / count,
    }


# --- a small GPT ----------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.c_attn, self.o_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.c_fc, self.down_proj = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The next state of the stream."""
        parts = self.c_attn(self.ln_1(x)).chunk(3, dim=-1)
        q, k, v = (p.unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in parts)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(mixed.transpose(1, 2).flatten(2))
        return x + self.down_proj(nn.functional.gelu(self.c_fc(self.ln_2(x))))


class GPT(nn.Module):
    """Tokens in, logits out; head and embedding are one."""

    def __init__(self, width: int = 256, depth: int = 4, tokens: int = 512, length: int = 128):
        super().__init__()
        self.token, self.place = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, width // 64) for _ in range(depth)))
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, tokens, bias=False)
        self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next token."""
        hidden = self.token(x) + self.place.weight[: x.shape[1]]
        return self.head(self.ln_f(self.blocks(hidden)))


def training(model: nn.Module, correction: Any, batch: int) -> Callable[[], None]:
    """One step of training after another, on random tokens."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    if correction is not None:
        correction.attach(model, optimizer)
    random = torch.Generator().manual_seed(0)

    def step() -> None:
        tokens = torch.randint(512, (batch, 129), generator=random)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


def gpt(rounds: int, batch: int = 16) -> Iterator[Result]:
    """The share of a training step that a correction adds, over whole cadences of steps."""
    torch.manual_seed(0)
    plain = GPT()
    arms = {"plain": None, "Multipliers": Multipliers(), "Hybrid": Hybrid()}
    arms["SpectralPenalty"] = SpectralPenalty(every=Hybrid().penalties.every)
    runs = {name: training(copy.deepcopy(plain), c, batch) for name, c in arms.items()}
    every = Hybrid().penalties.every
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds * every):
        for name, run in runs.items():
            times[name].append(cpu_seconds(run))
    for name in list(runs)[1:]:
        ratios = [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        # of each step of the cadence, in one of which the penalty acts
        shares = [statistics.median(ratios[step::every]) - 1 for step in range(every)]
        yield {
            "correction": name,
            "every": 1 if name == "Multipliers" else every,
            "step_ms": 1e3 * statistics.median(times["plain"]),
            "share": statistics.mean(shares),
            "largest_share": max(shares),
            "parameters": sum(p.numel() for p in plain.parameters()),
            "tokens": batch * 128,
        }


def small(rounds: int) -> Iterator[Result]:
    """The share of a step of 512 tokens that pins, penalties and the bound add, step by step."""
    torch.manual_seed(0)
    plain = GPT()
    arms: dict[str, Any] = {"plain": None, "NormPin": NormPin()}
    arms |= {"SpectralPenalty": SpectralPenalty(every=5), "SpectralCap": SpectralCap()}
    arms["SingularValueBound"] = SingularValueBound()
    runs = {name: training(copy.deepcopy(plain), c, batch=4) for name, c in arms.items()}
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds * 5):
        for name, run in runs.items():
            times[name].append(cpu_seconds(run))
    for name in list(runs)[1:]:
        ratios = [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        shares = [statistics.median(ratios[step::5]) - 1 for step in range(5)]
        yield {
            "correction": name,
            "step_ms": 1e3 * statistics.median(times["plain"]),
            "share": statistics.mean(shares),
            "largest_share": max(shares),
            "tokens": 4 * 128,
        }


# --- a hard bound ---------------------------------------------------------------------------------


def layer_training(layer: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Learn a Gaussian matrix, whose kappa is far beyond the bound: it is pushed against."""
    random = torch.Generator().manual_seed(0)
    size = layer.in_features
    target = torch.randn(size, size, generator=random) / size**0.5

    def step() -> None:
        x = torch.randn(64, size, generator=random)
        optimizer.zero_grad()
        (layer(x) - x @ target.T).square().sum(-1).mean().backward()
        optimizer.step()

    return step


def bound(size: int, rounds: int) -> Iterator[Result]:
    """A step of training one layer under a hard bound on kappa."""
    runs: dict[str, Callable[[], None]] = {}
    names = ("plain", "ours, from orthogonal", "ours", "geotorch")
    layers = {name: nn.Linear(size, size, bias=False) for name in names}
    for name, layer in layers.items():
        start = nn.init.normal_ if name == "ours" else nn.init.orthogonal_  # geotorch sets its own
        layer.weight.data = start(torch.empty(size, size)) / (size**0.5 if name == "ours" else 1.0)
        try:
            if name == "geotorch":
                import geotorch

                geotorch.almost_orthogonal(layer, "weight", lam=0.8)  # kappa at most 9
        except ImportError:
            continue
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
        if name.startswith("ours"):
            SingularValueBound(9.0).attach(layer, optimizer)
        runs[name] = layer_training(layer, optimizer)
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    kappas = {}
    for _ in range(rounds):
        for name, run in runs.items():
            times[name].append(cpu_seconds(run))
    for name in runs:
        values = torch.linalg.svdvals(layers[name].weight.detach())
        kappas[name] = float(values[0] / values[-1])
    means = {name: statistics.mean(its) for name, its in times.items()}
    for name in runs:
        result = {"size": size, "layer": name, "step_ms": 1e3 * means[name]}
        yield result | {"kappa": kappas[name], "ratio": means[name] / means["ours"]}


# --- putting together -----------------------------------------------------------------------------


def shown(result: Result) -> str:
    """A result on one line."""
    parts = (f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in result.items())
    return ", ".join(parts)


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", default=["pairs", "gpt", "small", "bound"])
    default = Path(__file__).parent / "results" / "corrections.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    walks = ((512, 2e-4, 40), (512, 1e-3, 40), (2048, 2e-4, 6), (2048, 1e-3, 6))
    parts: dict[str, Callable[[], Iterator[Result]]] = {
        "pairs": lambda: (penalty_step(*setting) for setting in walks),
        "gpt": lambda: gpt(rounds=16),
        "small": lambda: small(rounds=6),
        "bound": lambda: bound(1024, rounds=12),
    }
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    kept |= {"what": __doc__.splitlines()[0], "environment": environment()}
    for name in options.parts:
        kept[name] = []
        for result in parts[name]():
            print(shown(result), flush=True)
            kept[name].append(result)
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
