"""Does gradient flow predict the condition number of a product of layers? Depth 1-4, 20,000 steps.

The paper's setting (targets, starts, batches, label noise; learning rate 0.01 at depth 1, else
0.005) at size 20, the largest that 20,000 steps allow here. Beside SGD stand two predictions that
see no batch: `flow`, the gradient flow from the same layers, and `modes`, the mode equations for
aligned and balanced layers (Saxe, Arora) with the start's strength along the target's directions.

    OMP_NUM_THREADS=1 python benchmarks/depth.py [--trials N] [--out FILE]

About two minutes of one core.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kappascope.lab.statistics import median, paired_difference
from kappascope.lab.tasks import Own, Regression, heterogeneous, start
from kappascope.lab.training import DeepLinear, descend
from kappascope.matrix.components import Components
from kappascope.theory import flow, learning_time, mode_kappa, product

LOOKS = (0, 100, 300, 1000, 3000, 10_000, 20_000)
SIZE = 20

Array = NDArray[np.float64]


def log_kappa(weight: Tensor | Array) -> Array:
    """Compute log kappa of every matrix of a stack."""
    return Components(torch.as_tensor(weight)).log_condition_number.numpy()


def sgd(streams: Own, target: Tensor, layers: list[Tensor], rate: float) -> Array:
    """Train, and return log kappa of the product, (looks, trials)."""
    batches = Regression(target).batches(streams.random(8))
    steps = descend(DeepLinear(layers), batches, rate, steps=LOOKS[-1])
    return np.stack([log_kappa(step.weight) for step in steps if step.index in LOOKS])


def by_flow(target: Tensor, layers: list[Tensor], rate: float) -> Array:
    """Return log kappa of the product along the gradient flow, (looks, trials)."""
    times = rate * np.array(LOOKS)
    trials = zip(target.numpy(), *(layer.numpy() for layer in layers), strict=True)
    paths = [flow(begin, goal, times) for goal, *begin in trials]
    return np.stack([log_kappa(np.stack([product(w) for w in path])) for path in paths], -1)


def by_modes(target: Tensor, layers: list[Tensor], rate: float) -> tuple[Array, Array]:
    """Return log kappa by the mode equations, and the steps until the weakest mode is learned."""
    u, s, vt = (part.numpy() for part in torch.linalg.svd(target))
    begin = DeepLinear(layers)().detach().numpy()
    starts = np.abs(np.einsum("koi,koj,kij->ki", u, begin, vt))
    times, depth = rate * np.array(LOOKS), len(layers)
    kappas = [mode_kappa(goal, s0, depth, times) for goal, s0 in zip(s, starts, strict=True)]
    weakest = zip(s[:, -1], np.minimum(starts[:, -1], 0.5 * s[:, -1]), strict=True)
    waits = [learning_time(goal, s0, depth) / rate for goal, s0 in weakest]
    return np.log(np.stack(kappas, -1)), np.array(waits)


def measure(depth: int, trials: int) -> list[dict[str, Any]]:
    """Compare SGD with both predictions at one depth, a row a look."""
    streams = Own(range(trials), f"depth {depth}")
    target, random = heterogeneous(streams.random(), SIZE), streams.random(7)
    layers = [start(random, SIZE, scale=0.1 ** (1 / depth)) for _ in range(depth)]
    rate = 0.01 if depth == 1 else 0.005
    wanted = log_kappa(target)
    measured, flowed = sgd(streams, target, layers, rate), by_flow(target, layers, rate)
    aligned, waits = by_modes(target, layers, rate)
    rows = []
    for i, step in enumerate(LOOKS):
        ours, error = median(measured[i]), median(np.abs(measured[i] - wanted))
        rows.append({
            "depth": depth, "step": step, "n": trials, "target": float(np.median(wanted)),
            "sgd": ours.value, "sgd_interval": ours.interval,
            "flow": float(np.median(flowed[i])), "modes": float(np.median(aligned[i])),
            "error_sgd": error.value, "error_sgd_interval": error.interval,
            "error_flow": float(np.median(np.abs(flowed[i] - wanted))),
            "error_modes": float(np.median(np.abs(aligned[i] - wanted))),
            "flow_minus_sgd_interval": paired_difference(flowed[i], measured[i]).interval,
            "trial_by_trial": float(np.median(np.abs(measured[i] - flowed[i]))),
            "weakest_mode_steps": float(np.median(waits)),
        })  # fmt: skip
    return rows


def main() -> None:
    """Measure every depth, print the rows and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=24)
    default = Path(__file__).parent / "results" / "depth.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for depth in (1, 2, 3, 4):
        for row in measure(depth, options.trials):
            rows.append(row)
            print(
                f"depth {depth}, step {row['step']}: log kappa {row['sgd']:.2f}, flow "
                f"{row['flow']:.2f} (trial by trial {row['trial_by_trial']:.2f}), modes "
                f"{row['modes']:.2f}, target {row['target']:.2f}",
                flush=True,
            )
    kept = {"what": __doc__.splitlines()[0], "size": SIZE, "rows": rows}
    options.out.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
