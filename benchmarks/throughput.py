"""Trials of experiment 1 per second: stacked on our own streams, against one NumPy loop a trial.

Both sides do whole trials (target, start, 200 steps, singular values of both matrices) on one
core, take turns in one process, and count CPU time; the best round of each counts.

    OMP_NUM_THREADS=1 python benchmarks/throughput.py [--rounds 5] [--out FILE]
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from measuring import cpu_seconds, environment

from kappascope.lab.runs import STACK
from kappascope.lab.tasks import Own
from kappascope.paper.e01_components import trials

SIZES = (32, 64, 128, 256, 512)


def straightforward(size: int, seed: int) -> np.ndarray:
    """Run a trial as anybody would write it: NumPy, float64, a loop."""
    random = np.random.default_rng(seed)
    entries = random.standard_normal((size, size))
    scales = np.exp(0.5 * random.standard_normal((size, 1)))
    target = np.sqrt(2 / size) * scales * entries
    weight = 0.1 * np.sqrt(2 / size) * random.standard_normal((size, size))
    for _ in range(200):
        x = random.standard_normal((64, size))
        y = x @ target.T + 0.01 * random.standard_normal((64, size))
        weight -= 0.01 * (x @ weight.T - y).T @ x / 64
    learned, wanted = (np.linalg.svd(m, compute_uv=False) for m in (weight, target))
    return np.abs(learned - wanted)


def compare(size: int, rounds: int) -> dict[str, float]:
    """Measure CPU milliseconds per trial, either way."""
    stack, few = min(64, max(1, STACK // size**2)), max(1, 512 // size)
    ours, theirs = [], []
    for turn in range(rounds):
        seeds = range(turn * stack, (turn + 1) * stack)
        theirs.append(cpu_seconds(lambda: [straightforward(size, k) for k in range(few)]) / few)
        ours.append(
            cpu_seconds(lambda seeds=seeds: list(trials(Own(seeds, "bench"), size))) / stack
        )
    best = {"numpy_ms": 1e3 * min(theirs), "stacked_ms": 1e3 * min(ours)}
    return {"size": size, "stack": stack, **best, "ratio": min(theirs) / min(ours)}


def main() -> None:
    """Measure every size, print the rows and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    default = Path(__file__).parent / "results" / "throughput.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    compare(32, rounds=1)  # the first optimizer of a process takes a second to load
    results = []
    for size in SIZES:
        results.append(compare(size, options.rounds))
        print(
            "d = {size:3d}: {numpy_ms:7.2f} ms, {stacked_ms:7.2f} ms, {ratio:.2f}x".format(
                **results[-1]
            )
        )
    report = {"what": __doc__.splitlines()[0], "rounds": options.rounds}
    report |= {"environment": environment(), "results": results}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
