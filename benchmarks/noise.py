"""Nulls of noise: how uniform their p-values are, and how small a signal they find.

A thousand matrices for each optimizer and setting are trained by the optimizer itself on white
gradients, from one start. Every part of every matrix gets its place among the draws of the closed
law; a Kolmogorov-Smirnov test asks whether places are uniform, and allows for the draws, which all
matrices share, being a sample, too. Then a planted signal: gradients get a constant direction of
rank one, of a strength in deviations of the noise, and the share of matrices that are found at 5 %
is counted for the parts that may show it.

    OMP_NUM_THREADS=1 python benchmarks/noise.py [--count 1000]
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from measuring import environment
from torch import Tensor, nn

from kappascope.lab.optimizers import Muon
from kappascope.matrix.parts import StartFrame, matrix_parts
from kappascope.theory.beyond import drawn_parts, place
from kappascope.theory.noise import noise_law

HERE = Path(__file__).parent
SHAPE = (12, 16)
DRAWS = 4999  # the draws are shared by a thousand matrices: few would be one mistake for all
CLASSES = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW, "Muon": Muon}
CASES: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "SGD, momentum 0.9": ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, [0.01] * 300),
    "AdamW, many steps": ("AdamW", {"betas": (0.9, 0.95), "weight_decay": 0.5}, [0.01] * 300),
    "AdamW, 30 steps": ("AdamW", {"betas": (0.9, 0.95), "weight_decay": 0.5}, [0.01] * 30),
    "AdamW, 10 steps": ("AdamW", {"betas": (0.9, 0.95), "weight_decay": 0.5}, [0.01] * 10),
    "Muon, short memory": ("Muon", {"weight_decay": 0.5}, [0.01] * 300),
    "Muon, longer memory": ("Muon", {"weight_decay": 0.1}, [0.01] * 600),
    "Muon, long memory": ("Muon", {"weight_decay": 0.0}, [0.01] * 2000),
}
STRENGTHS = (0.0, 0.0125, 0.025, 0.05, 0.1, 0.4)
SHOWN = ("log_norm", "log_sigma_1", "log_sigma_50", "log_kappa", "log_stable_rank")


def trained(
    kind: str,
    settings: dict[str, Any],
    rates: Sequence[float],
    start: Tensor,
    count: int,
    *,
    signal: Tensor | None = None,
) -> Tensor:
    """Train copies of a start on white gradients, and a constant one if there is a signal."""
    random = torch.Generator().manual_seed(31)
    weights = nn.Parameter(start.expand(count, *start.shape).clone())
    optimizer = CLASSES[kind]([weights], lr=0.1, **settings)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        weights.grad = torch.randn(weights.shape, generator=random)
        if signal is not None:
            weights.grad += signal
        optimizer.step()
    return weights.detach()


def places(weights: Tensor, drawn: dict[str, Any], frame: StartFrame) -> dict[str, Any]:
    """Place every part of every matrix among its draws."""
    lots = np.random.default_rng(2)
    return {
        part: np.array([place(float(value), drawn[part], lots) for value in values])
        for part, values in matrix_parts(weights, frame).items()
    }


def uniform(found: Any, draws: int) -> float:
    """Return the p-value of places among draws, whose own chance counts."""
    distance = scipy.stats.kstest(found, "uniform").statistic
    size = len(found) * draws / (len(found) + draws)
    return float(scipy.stats.kstwobign.sf(distance * math.sqrt(size)))


def measured(name: str, count: int) -> dict[str, Any]:
    """Measure uniformity and power for one optimizer."""
    kind, settings, rates = CASES[name]
    random = torch.Generator().manual_seed(0)
    start = 0.1 * torch.randn(SHAPE, generator=random)
    frame = StartFrame(start)
    law = noise_law(kind, settings, rates, SHAPE, gradient=1.0)
    drawn = drawn_parts(law, start, DRAWS, seed=3, frame=frame)
    found = places(trained(kind, settings, rates, start, count), drawn, frame)
    ks = {part: uniform(u, DRAWS) for part, u in found.items()}
    row: dict[str, Any] = {"case": name, "matrices": count, "kept": law.kept, "spread": law.spread}
    row |= {"ks_p": ks, "ks_p_least": min(ks.values()), "parts": len(ks)}
    row["ks_p_holm"] = min(1.0, min(ks.values()) * len(ks))
    if len(rates) < 100:
        return row
    u, v = (torch.randn(size, generator=random) for size in SHAPE)
    direction = math.sqrt(math.prod(SHAPE)) * torch.outer(u / u.norm(), v / v.norm())
    row["power"] = {}
    for strength in STRENGTHS:
        many = trained(kind, settings, rates, start, count // 5, signal=strength * direction)
        found = places(many, drawn, frame)
        row["power"][f"{strength:g}"] = {
            part: float((2 * np.minimum(found[part], 1 - found[part]) <= 0.05).mean())
            for part in SHOWN
        }
    return row


def main() -> None:
    """Measure every case, print and keep the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "noise.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in CASES:
        rows.append(measured(name, options.count))
        row = rows[-1]
        print(f"{name}: least KS p {row['ks_p_least']:.4f} of {row['parts']}", flush=True)
        for strength, power in row.get("power", {}).items():
            told = ", ".join(f"{part} {share:.2f}" for part, share in power.items())
            print(f"    signal {strength}: {told}", flush=True)
    report = {"what": (__doc__ or "").splitlines()[0], "environment": environment(), "rows": rows}
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
