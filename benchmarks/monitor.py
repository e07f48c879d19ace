"""What watching a training run costs, and how right the numbers are: ratios within one run.

    OMP_NUM_THREADS=1 python benchmarks/monitor.py cost       # share of the time of training
    OMP_NUM_THREADS=1 python benchmarks/monitor.py accuracy   # against a float64 SVD, along a run
    OMP_NUM_THREADS=1 python benchmarks/monitor.py swallowed  # predicted against observed shares
    OMP_NUM_THREADS=1 python benchmarks/monitor.py failures   # six kinds of induced failures
    OMP_NUM_THREADS=1 python benchmarks/monitor.py memory     # over 10,000 steps

A GPT of width d with 4 layers and heads of 64 learns random text, 2,048 tokens a step. Monitors of
four kinds watch the same run, and what each does in its hooks is timed, in CPU time: at a step that
is due, and at the others, where it takes the norms of weights and gradients, which are part of
every share. A step of training is what is left. The results go to
``benchmarks/results/monitor.json``.
"""

from __future__ import annotations

import gc
import json
import logging
import math
import resource
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
from kappascope.monitor.record import Run

RESULTS = Path(__file__).parent / "results" / "monitor.json"
TOKENS, CONTEXT, VOCABULARY = 2048, 128, 256
EVERY, SPECTRA_EVERY = 20, 500
TIMED_EVERY = 4  # steps: what a reading takes hardly depends on how long ago the last one was


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


def is_product(name: str) -> bool:
    """Whether this is the product of two factors of a head."""
    return "[qk." in name or "[ov." in name


KINDS: dict[str, dict[str, Any]] = {
    "components": {"quantities": ()},
    "components, without products": {"quantities": (), "exclude": is_product},
    "components, signal, update, swallowed": {"quantities": ("signal", "update", "swallowed")},
    "whole spectra too": {"spectra_every": TIMED_EVERY},
}


class Timed:
    """A monitor whose hooks are timed: those of a step with a reading, and of one without."""

    def __init__(self, folder: Path, options: dict[str, Any]) -> None:
        self.monitor = Monitor(folder, every=TIMED_EVERY, strict=True, **options)
        for name in ("_before", "_gradients", "_after"):
            setattr(self.monitor, name, self._timed(getattr(self.monitor, name)))
        self.spent = 0.0

    def _timed(self, hook: Callable[..., None]) -> Callable[..., None]:
        def timed(*given: Any) -> None:
            began = time.process_time()
            hook(*given)
            self.spent += time.process_time() - began

        return timed

    def told(self) -> float:
        """The time since this was last asked."""
        spent, self.spent = self.spent, 0.0
        return spent


def cost(width: int, rounds: int) -> dict[str, Any]:
    """The shares of training time, each the least of some rounds, and from the medians."""
    torch.manual_seed(0)
    model = GPT(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1)
    data = texts()
    for _ in range(3):
        trained(model, optimizer, data)
    names = [
        *KINDS,
        *(f"{name}, between readings" for name in KINDS),
        "step",
        "svdvals",
        "products",
    ]
    times: dict[str, list[float]] = {name: [] for name in names}
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    with tempfile.TemporaryDirectory() as folder:
        timed = {name: Timed(Path(folder) / name, options) for name, options in KINDS.items()}
        for each in timed.values():
            each.monitor.attach(model, optimizer)
        for step in range(1, rounds * TIMED_EVERY + 1):
            whole = trained(model, optimizer, data)
            is_due = step % TIMED_EVERY == 0
            for name, each in timed.items():
                spent = each.told()
                whole -= spent
                times[name if is_due else f"{name}, between readings"].append(spent)
            times["step"].append(whole)
            if is_due:
                began = time.process_time()
                for matrix in matrices:
                    torch.linalg.svdvals(matrix.detach())
                times["svdvals"].append(time.process_time() - began)
            if step in (TIMED_EVERY, 2 * TIMED_EVERY):
                began = time.process_time()
                svdvals_of_products(model)
                times["products"].append(time.process_time() - began)
        for each in timed.values():
            each.monitor.close()
    least = {name: min(values) for name, values in times.items()}
    usual = {name: statistics.median(values) for name, values in times.items()}
    return {
        "width": width,
        "matrices": len(matrices),
        "readings": rounds,
        "least, ms": {name: 1e3 * value for name, value in least.items()},
        "median, ms": {name: 1e3 * value for name, value in usual.items()},
        "share of training time": shares(least),
        "share of training time, from medians": shares(usual),
        "svdvals over components, stored matrices": (
            least["svdvals"] / least["components, without products"]
        ),
        "svdvals over components, products too": (
            (least["svdvals"] + least["products"]) / least["components"]
        ),
    }


def shares(times: dict[str, float]) -> dict[str, float]:
    """What readings at the cadences of interest take of the time of training."""

    def share(name: str, every: int, more: float = 0.0) -> float:
        between = times[f"{name}, between readings"]
        each = (times[name] - between) / every + between + more / SPECTRA_EVERY
        return each / times["step"]

    both = "components, signal, update, swallowed"
    spectra = max(times["whole spectra too"] - times[both], 0.0)
    return {
        "components every 20 steps": share("components", EVERY),
        "components every 10 steps": share("components", EVERY // 2),
        "with signal, update, swallowed every 20 and whole spectra every 500": share(
            both, EVERY, spectra
        ),
        "of these, hooks of the steps between": times["components, between readings"]
        / times["step"],
    }


def svdvals_of_products(model: GPT) -> None:
    """All singular values of every head's products, as they are had without their factors."""
    for layer in model.layers:
        attn = layer.attn
        q, k, v, o = (
            each.weight.detach() for each in (attn.q_proj, attn.k_proj, attn.v_proj, attn.out_proj)
        )
        for h in range(attn.num_heads):
            rows = slice(h * attn.head, (h + 1) * attn.head)
            torch.linalg.svdvals(q[rows].mT @ k[rows])
            torch.linalg.svdvals(o[:, rows] @ v[rows])


# --- accuracy -------------------------------------------------------------------------------------


def accuracy(width: int = 384, steps: int = 40, every: int = 5) -> dict[str, Any]:
    """The largest relative error of each extreme against a float64 SVD, along a whole run."""
    torch.manual_seed(0)
    model = GPT(width, layers=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    data, expected = texts(tokens=512), {}
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(folder, every=every, strict=True).attach(model, optimizer)
        for step in range(1, steps + 1):
            trained(model, optimizer, data)
            if step % every == 0:
                expected |= {(step, *key): v for key, v in _reference(model).items()}
        monitor.close()
        rows = Run.read(folder).rows
    found: dict[str, list[float]] = {}
    for row in rows:
        if (true := expected.get((row.step, row.matrix, row.quantity))) is not None:
            kind = "products" if is_product(row.matrix) else "stored matrices"
            found.setdefault(f"{row.quantity}, {kind}", []).append(abs(row.value / true - 1))
    return {
        "width": width,
        "steps": steps,
        "largest relative error": {name: max(errors) for name, errors in found.items()},
        "values compared": sum(map(len, found.values())),
    }


def _reference(model: GPT) -> dict[tuple[str, str], float]:
    """The extremes of every watched matrix by a float64 SVD."""
    matrices = {
        name: p.detach().double()
        for name, p in model.named_parameters()
        if p.ndim == 2 and "embed" not in name
    }
    ranks = {name: min(matrix.shape) for name, matrix in matrices.items()}
    for i, layer in enumerate(model.layers):
        attn = layer.attn
        q, k, v, o = (
            each.weight.detach().double()
            for each in (attn.q_proj, attn.k_proj, attn.v_proj, attn.out_proj)
        )
        for h in range(attn.num_heads):
            rows = slice(h * attn.head, (h + 1) * attn.head)
            for label, matrix in (("qk", q[rows].mT @ k[rows]), ("ov", o[:, rows] @ v[rows])):
                matrices[name := f"layers.{i}.attn[{label}.{h}]"] = matrix
                ranks[name] = attn.head
    found = {}
    for name, matrix in matrices.items():
        s = torch.linalg.svdvals(matrix)[: ranks[name]].tolist()
        found[name, "sigma_max"], found[name, "sigma_2"], found[name, "sigma_min"] = (
            s[0],
            s[1],
            s[-1],
        )
        found[name, "condition_number"] = s[0] / s[-1]
    return found


# --- memory ---------------------------------------------------------------------------------------


def memory(steps: int = 10_000) -> dict[str, Any]:
    """What the process holds along a long run of a small model, all quantities recorded."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given, held = torch.randn(16, 32), {}
    with tempfile.TemporaryDirectory() as folder:
        with Monitor(folder, every=50, norms_every=10, strict=True).attach(
            model, optimizer
        ) as monitor:
            for step in range(1, steps + 1):
                optimizer.zero_grad()
                loss = model(given).square().mean()
                loss.backward()
                optimizer.step()
                monitor.log(loss=loss)
                if step % (steps // 5) == 0:
                    gc.collect()
                    pages = int(Path("/proc/self/statm").read_text().split()[1])
                    tensors = sum(issubclass(type(each), Tensor) for each in gc.get_objects())
                    megabytes = pages * resource.getpagesize() / 2**20
                    held[step] = {"resident, MB": megabytes, "tensors": tensors}
        record = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    return {"after step": held, "record, MB": record / 2**20}


# --- swallowed ------------------------------------------------------------------------------------


def swallowed_shares() -> dict[str, Any]:
    """The share of readings whose predicted swallowed share is right to two points."""
    found: dict[str, Any] = {}
    for kind in ("bfloat16", "bfloat16 with float32 masters", "float32"):
        near, seen_all = [], []
        for rate in (3e-3, 3e-4, 3e-5):
            seen, told = _swallowed_run(kind, rate)
            near += [abs(seen[key] - told[key]) <= 0.02 for key in seen if key in told]
            seen_all += list(seen.values())
        found[kind] = {
            "within two points": sum(near) / len(near),
            "readings": len(near),
            "mean observed share": statistics.mean(seen_all),
        }
    return found


def _swallowed_run(kind: str, rate: float) -> tuple[dict[Any, float], dict[Any, float]]:
    torch.manual_seed(0)
    model = GPT(64, layers=2)
    model = model if kind == "float32" else model.bfloat16()
    ours = list(model.parameters())
    has_masters = "masters" in kind
    theirs = [p.detach().float().requires_grad_() for p in ours] if has_masters else ours
    optimizer = torch.optim.AdamW(theirs, lr=rate, weight_decay=0.1)
    data = texts(tokens=512)
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(folder, every=10, strict=True, quantities=["swallowed"])
        with monitor.attach(model, optimizer):
            for _ in range(30):
                model.zero_grad()
                model.loss(next(data)).backward()
                for copy, parameter in zip(theirs, ours, strict=True) if has_masters else ():
                    copy.grad = parameter.grad.float()
                optimizer.step()
                with torch.no_grad():
                    for copy, parameter in zip(theirs, ours, strict=True) if has_masters else ():
                        parameter.copy_(copy)
        rows = Run.read(folder).rows
    seen = {(row.step, row.matrix): row.value for row in rows if row.quantity == "swallowed"}
    told = {(r.step, r.matrix): r.value for r in rows if r.quantity == "swallowed_predicted"}
    return seen, told


# --- induced failures -----------------------------------------------------------------------------

FAILURE_STEPS, INJECTED_AT, FAILURE_EVERY = 240, 120, 5
RUNS = {
    "none": 7, "lr too high": 7, "bad batch": 7, "dead rows": 7, "bf16 stall": 6, "QK growth": 7,
    "rank collapse": 6,
}  # fmt: skip


def two_back(seed: int) -> Iterator[Tensor]:
    """Text in which a token follows from the one before it, or from the one before that."""
    random = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(64, (64,), generator=random) for _ in range(2))
    while True:
        rows = [torch.randint(64, (16,), generator=random) for _ in range(2)]
        for _ in range(31):
            kind = torch.rand(16, generator=random)
            noise = torch.randint(64, (16,), generator=random)
            near = torch.where(kind < 0.4, first[rows[-1]], second[rows[-2]])
            rows.append(torch.where(kind < 0.9, near, noise))
        yield torch.stack(rows, 1)


class Failure:
    """What is done to a run from one step on, by kind."""

    def __init__(self, kind: str, model: GPT, optimizer: torch.optim.Optimizer) -> None:
        self.kind, self.model, self.optimizer = kind, model, optimizer
        self.gain = 1.0  # of the units that die
        if kind == "dead rows":
            for layer in model.layers:
                layer.up_proj.register_forward_hook(self._fade)

    def _fade(self, module: nn.Module, given: Any, output: Tensor) -> Tensor:
        """Let a quarter of the units fade, and die when little is left of them."""
        quarter = output.shape[-1] // 4
        gain = self.gain if self.gain > 0.3 else 0.0
        return torch.cat([output[..., :quarter] * gain, output[..., quarter:]], -1)

    @torch.no_grad()
    def before(self, step: int, text: Tensor) -> Tensor:
        """Change the batch or the settings before a step."""
        if self.kind == "bad batch" and step == INJECTED_AT:
            return torch.randint(64, (), generator=torch.Generator().manual_seed(step)).expand_as(
                text
            )
        if self.kind == "lr too high" and step >= INJECTED_AT:
            for group in self.optimizer.param_groups:
                group["lr"] *= 1.1
        return text

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Change the weights after a step."""
        if step < INJECTED_AT:
            return
        self.gain *= 0.97
        for layer in self.model.layers:
            if self.kind == "QK growth":
                layer.attn.q_proj.weight.mul_(1.03)
                layer.attn.k_proj.weight.mul_(1.03)
            if self.kind == "rank collapse":
                for weight in (layer.up_proj.weight, layer.attn.v_proj.weight):
                    u, s, vt = torch.linalg.svd(weight, full_matrices=False)
                    s[2:] *= 0.97
                    weight.copy_(u @ torch.diag(s) @ vt)


TWINS: dict[tuple[int, float], list[float]] = {}  # losses without a failure, by seed and rate
RATES = {"bf16 stall": 3e-4}  # the learning rate of a kind of run
SEED = 1000  # of the first run of a kind: others than those by which the rules were chosen
HEALTHY_STEPS = 5000  # of one more run to which nothing happens


def failure(kind: str, seed: int) -> dict[str, Any]:
    """One run with a failure: when the loss showed it, and when and with what an alert came."""
    losses, alerts = _failing_run(kind, seed)
    key = (seed, RATES.get(kind, 2e-3))
    if key not in TWINS:
        TWINS[key] = losses if kind == "none" else _failing_run("none", seed, rate=key[1])[0]
    twin = TWINS[key]
    began = 0 if kind == "bf16 stall" else INJECTED_AT
    told = [(alert.step, alert.name) for alert in alerts]
    later = [each for each in told if each[0] >= began and kind != "none"]
    noise = statistics.stdev(twin[-40:])
    gaps = [a - b for a, b in zip(losses, twin, strict=True)][began:]
    shown = next((i for i in range(len(gaps) - 5) if _is_bad(gaps[i : i + 5], noise)), None)
    return {
        "kind": kind,
        "seed": seed,
        "loss shows it after": shown,
        "first alert after": later[0][0] - began if later else None,
        "alerts": sorted({name for _, name in later}),
        "false alarms": [each for each in told if each not in later],
        "healthy steps": FAILURE_STEPS if kind == "none" else began,
    }


def _is_bad(values: list[float], limit: float) -> bool:
    return bool(values) and all(not math.isfinite(v) or v > limit for v in values)


def _failing_run(
    kind: str, seed: int, rate: float | None = None, steps: int = FAILURE_STEPS
) -> tuple[list[float], list[Any]]:
    torch.manual_seed(seed)
    model = GPT(32, layers=2, vocabulary=64)
    if kind == "bf16 stall":
        model = model.bfloat16()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate or RATES.get(kind, 2e-3), weight_decay=0.01
    )
    broken, data, losses = Failure(kind, model, optimizer), two_back(seed), []
    with tempfile.TemporaryDirectory() as folder:
        with Monitor(folder, every=FAILURE_EVERY, strict=True, spectra_every=10**6).attach(
            model, optimizer
        ) as monitor:
            for step in range(steps):
                text = broken.before(step, next(data))
                optimizer.zero_grad()
                loss = model.loss(text)
                is_bad = kind == "bad batch" and step == INJECTED_AT
                (loss * (100 if is_bad else 1)).backward()
                monitor.log(loss=loss)
                optimizer.step()
                broken.after(step)
                losses.append(float(loss.detach()))
        return losses, monitor.alerts


def failures() -> dict[str, Any]:
    """All runs: leads by kind, and false alarms by steps that were healthy."""
    runs = [
        failure(kind, seed) for kind, count in RUNS.items() for seed in range(SEED, SEED + count)
    ]
    by_kind = {}
    for kind in RUNS:
        mine = [run for run in runs if run["kind"] == kind]
        pairs = [(r["loss shows it after"], r["first alert after"]) for r in mine]
        leads = [shown - told for shown, told in pairs if shown is not None and told is not None]
        by_kind[kind] = {
            "runs": len(mine),
            "announced": sum(told is not None for _, told in pairs),
            "loss never showed it": sum(shown is None for shown, _ in pairs),
            "median lead, steps": statistics.median(leads) if leads else None,
            "alerts": sorted({name for run in mine for name in run["alerts"]}),
        }
    leads = [
        r["loss shows it after"] - r["first alert after"]
        for r in runs
        if r["kind"] != "none" and None not in (r["loss shows it after"], r["first alert after"])
    ]
    _, more = _failing_run("none", seed=SEED + 99, steps=HEALTHY_STEPS)
    steps = sum(run["healthy steps"] for run in runs) + HEALTHY_STEPS
    return {
        "by kind": by_kind,
        "median lead of all, steps": statistics.median(leads) if leads else None,
        "false alarms": sum(len(run["false alarms"]) for run in runs) + len(more),
        "alerts of the long healthy run": [alert.text for alert in more],
        "healthy steps": steps,
        "runs": runs,
    }


def main() -> None:
    """Measure what the command line names, and keep it with the rest."""
    logging.disable(logging.WARNING)  # alerts are counted here
    parts: dict[str, Callable[[], Any]] = {
        "cost": lambda: [cost(256, rounds=6), cost(512, rounds=3)],
        "accuracy": accuracy,
        "swallowed": swallowed_shares,
        "failures": failures,
        "memory": memory,
    }
    found = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in sys.argv[1:] or parts:
        found[name] = parts[name]()
        print(name, json.dumps(found[name], indent=1), flush=True)
        RESULTS.write_text(json.dumps(found | {"environment": environment()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
