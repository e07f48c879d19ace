"""Diagnosis of a block of a 7B model against WeightWatcher; one process against two; memory.

The weights are made up, in bfloat16: four of 4096 x 4096 and three of 11008 x 4096 (``--scale 2``
halves every side). Both programs get the same tensors and one BLAS thread; times are CPU seconds,
which is what a shared machine can tell, and wall seconds for one process against two.

    python benchmarks/diagnose.py [--scale 1] [--out benchmarks/results/diagnose.json]

WeightWatcher comes with ``pip install -c constraints.txt -e ".[benchmark]"``; without it the
comparison is left out and said to be.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

os.environ.update(
    dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
)

TICKS = os.sysconf("SC_CLK_TCK")  # of a CPU second
ATTENTION, WIDE = (4096, 4096), (11008, 4096)


def block(folder: Path, scale: int) -> Path:
    """A checkpoint with one transformer block."""
    import torch

    generator = torch.Generator().manual_seed(0)
    shapes = {f"model.layers.0.self_attn.{n}_proj.weight": ATTENTION for n in "qkvo"}
    shapes |= {f"model.layers.0.mlp.{n}_proj.weight": WIDE for n in ("gate", "up")}
    shapes["model.layers.0.mlp.down_proj.weight"] = WIDE[::-1]
    weights = {
        name: (0.02 * torch.randn(*(n // scale for n in shape), generator=generator)).bfloat16()
        for name, shape in shapes.items()
    }
    path = folder / "block.pt"
    torch.save(weights, path)
    return path


def diagnosed(path: Path, spectrum: str, jobs: int) -> dict[str, float]:
    """CPU and wall seconds and the largest resident set of the command, its workers included."""
    command = [sys.executable, "-m", "kappascope", "diagnose", str(path), "--json"]
    command += ["--spectrum", spectrum, "--jobs", str(jobs)]
    start = time.perf_counter()
    running = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    cpu: dict[int, float] = {}
    memory: dict[int, int] = {}
    while running.poll() is None:
        for process, seconds, peak in session(running.pid):
            cpu[process], memory[process] = seconds, peak
        time.sleep(0.05)
    wall = time.perf_counter() - start
    if running.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {running.returncode}")
    return {"wall": wall, "cpu": sum(cpu.values()), "memory": max(memory.values())}


def session(leader: int) -> Iterator[tuple[int, float, int]]:
    """CPU seconds and largest resident set of every process of a session."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            if int(fields[3]) == leader:
                ticks = int(fields[11]) + int(fields[12])
                status = (entry / "status").read_text().split("VmHWM:")[1]
                yield int(entry.name), ticks / TICKS, int(status.split()[0]) * 1024


def examined(path: Path, spectrum: str) -> float:
    """CPU seconds of the same in this process, weights in memory, as WeightWatcher has them."""
    import torch

    from kappascope import diagnose

    torch.set_num_threads(1)
    weights = torch.load(path, weights_only=True)
    start = time.process_time()
    diagnose(weights, spectrum=spectrum)
    return time.process_time() - start


def watched(path: Path) -> float | None:
    """CPU seconds of WeightWatcher's analysis of the same weights, as linear layers."""
    try:
        import weightwatcher
    except ImportError:
        return None
    import logging

    import torch
    from torch import nn

    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    model = nn.ModuleDict()
    for name, weight in torch.load(path, weights_only=True).items():
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        layer.weight.data = weight.float()
        model[name.replace(".", "_")] = layer
    start = time.process_time()
    weightwatcher.WeightWatcher(model=model).analyze()
    return time.process_time() - start


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scale", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = block(Path(folder), options.scale)
        found = {"scale": options.scale, "bytes": path.stat().st_size}
        for spectrum in ("none", "full"):
            found[spectrum] = diagnosed(path, spectrum, jobs=1)
        found["two processes"] = diagnosed(path, "full", jobs=2)
        found["in memory"] = {one: examined(path, one) for one in ("none", "full")}
        found["weightwatcher"] = watched(path)
    peer = found["weightwatcher"]
    found["ratios"] = {
        "none": peer and peer / found["in memory"]["none"],
        "full": peer and peer / found["in memory"]["full"],
        "none, the command with its start": peer and peer / found["none"]["cpu"],
        "full, the command with its start": peer and peer / found["full"]["cpu"],
        "two processes": found["full"]["wall"] / found["two processes"]["wall"],
    }
    found["environment"] = environment()
    print(json.dumps(found, indent=1))
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")


def environment() -> dict[str, object]:
    """What the numbers depend on."""
    from kappascope.system import files

    load = Path("/proc/loadavg")
    return {**files.environment(), "load": load.read_text().split()[0] if load.exists() else None}


if __name__ == "__main__":
    main()
