"""What engines cost, and what large work costs on them.

python benchmarks/engines.py overhead   # of Ray, on units of a second
python benchmarks/engines.py workers    # two local workers against one
python benchmarks/engines.py planned    # 100,000 trials: seconds until the first is done
python benchmarks/engines.py large      # a model of 70B shapes: plan, first row, memory
python benchmarks/engines.py hub        # 10,000 models below 1 B parameters, in core-hours
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import torch
from measuring import cpu_seconds, environment

from kappascope.clinic.diagnose import case
from kappascope.clinic.examine import examine
from kappascope.clinic.tasks import TensorTask
from kappascope.lab.experiment import Experiment, grid
from kappascope.lab.runs import plan_runs, run, survey
from kappascope.system.cluster import Cluster
from kappascope.system.store import Store
from kappascope.system.workers import Engine, Processes
from processes import descendants
from tiny_experiments import trials
from worker_tasks import computes, rests

RESULTS = Path(__file__).parent / "results" / "engines.json"
LAB = ("torch", "kappascope.lab.runs")


def elapsed(engine: Engine, work: Callable[[Any], object], items: list[Any]) -> float:
    """Seconds that an engine which is up takes for some items."""
    list(engine.run(work, items[:2]))  # whatever is loaded once is loaded
    began = time.perf_counter()
    ended = [done.failure for done in engine.run(work, items)]
    if any(ended):
        raise RuntimeError(next(filter(None, ended)))
    return time.perf_counter() - began


def overhead() -> dict[str, Any]:
    """Units that rest for a second: what is more than their seconds is the engine's."""
    units, jobs = 40, 2
    engines = {"local": Processes(jobs, loaded=LAB), "ray": Cluster(Processes(jobs, loaded=LAB))}
    taken = {name: elapsed(engine, rests, [1.0] * units) for name, engine in engines.items()}
    return {
        "units": units,
        "seconds of a unit": 1.0,
        **{f"overhead of {name}": seconds * jobs / units - 1 for name, seconds in taken.items()},
    }


def workers() -> dict[str, Any]:
    """The same units on one worker and on two, in turns: wall time, and CPU time of a unit."""
    engines = {jobs: Processes(jobs, loaded=LAB) for jobs in (1, 2)}
    walls: dict[int, list[float]] = {1: [], 2: []}
    for _ in range(4):
        for jobs, engine in engines.items():
            walls[jobs].append(elapsed(engine, computes, [1000] * 8))
    ratios = [one / two for one, two in zip(walls[1], walls[2], strict=True)]
    return {"rounds": len(ratios), "speed-up": sorted(ratios), "load": os.getloadavg()[0]}


def planned() -> dict[str, Any]:
    """Plan 100,000 trials and run until the first block of them is stored."""
    settings = grid(size=tuple(range(2, 66)), pause=(0.0,))
    each = math.ceil(100_000 / len(settings))
    many = Experiment(1, "Many", "0", "How many?", settings, trials, own=each)
    found: dict[str, Any] = {"trials": each * len(settings)}
    engines = {"local": Processes(2, loaded=LAB), "ray": Cluster(Processes(2, loaded=LAB))}
    for name, engine in engines.items():
        list(engine.run(rests, [0.0, 0.0]))
        with tempfile.TemporaryDirectory() as folder, (store := Store(Path(folder))).lock():
            began = time.perf_counter()
            plan = plan_runs([many])
            blocks = survey(plan, store)[0]
            found["blocks"] = len(blocks)
            with closing(run(blocks, store, engine)) as ended:
                next(ended)
                found[f"seconds to the first block, {name}"] = time.perf_counter() - began
    return found


# --- a model of 70B shapes ------------------------------------------------------------------------


def shapes_70b() -> Iterator[tuple[str, tuple[int, int]]]:
    """The matrices of a Llama of 70 B parameters."""
    yield "model.embed_tokens.weight", (128_256, 8192)
    for layer in range(80):
        name = f"model.layers.{layer}."
        for part, rows in (("q", 8192), ("k", 1024), ("v", 1024), ("o", 8192)):
            yield f"{name}self_attn.{part}_proj.weight", (rows, 8192)
        for part in ("gate", "up"):
            yield f"{name}mlp.{part}_proj.weight", (28_672, 8192)
        yield f"{name}mlp.down_proj.weight", (8192, 28_672)
    yield "lm_head.weight", (128_256, 8192)


# The first matrix, the largest that a layer has, and the largest of all.
FILLED = ("layers.0.self_attn.k_proj", "layers.0.mlp.gate_proj", "embed_tokens")


def sparse_file(path: Path) -> int:
    """Write a sparse file of these shapes with some tensors filled; returns its length."""
    header, at = {}, 0
    for name, (rows, columns) in shapes_70b():
        size = 2 * rows * columns
        header[name] = {"dtype": "BF16", "shape": [rows, columns], "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    random = torch.Generator().manual_seed(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        begin = file.tell()
        file.truncate(begin + at)
        for name, entry in header.items():
            if any(part in name for part in FILLED):
                file.seek(begin + entry["data_offsets"][0])
                rows, columns = entry["shape"]
                for first in range(0, rows, 1024):
                    some = torch.randn(min(1024, rows - first), columns, generator=random)
                    file.write(some.bfloat16().view(torch.int16).numpy().tobytes())
    return begin + at


def large(minutes: float = 60.0) -> dict[str, Any]:
    """Plan such a model, and examine the filled tensors, the largest of all among them."""
    found: dict[str, Any] = {"parameters": sum(math.prod(shape) for _, shape in shapes_70b())}
    with tempfile.TemporaryDirectory(dir=os.environ.get("LARGE_FOLDER")) as folder:
        path = Path(folder) / "model.safetensors"
        found["bytes"] = sparse_file(path)
        found["bytes on disk"] = path.stat().st_blocks * 512
        began = time.perf_counter()
        whole = case(str(path), jobs=1)
        found["seconds to plan"] = time.perf_counter() - began
        found["tasks"] = len(whole.tasks)
        with Peak() as peak, closing(whole.examine()) as ended:
            done = next(ended)
            found["seconds to the first row"] = time.perf_counter() - began
            found["first row"] = done.result[0].name
        for part in FILLED:
            tasks = [
                t for t in whole.tasks if isinstance(t, TensorTask) and part in t.unit.parts[0].name
            ]
            if time.perf_counter() - began > 60 * minutes:
                break
            begun = time.perf_counter()
            with Peak() as peak:
                rows = [row for one in whole.part(tasks[:1]).examine() for row in one.result]
            entries = rows[0].shape[0] * rows[0].shape[1]
            found[f"peak bytes, {part}"] = peak.bytes - peak.before
            found[f"memory over float32, {part}"] = (peak.bytes - peak.before) / (4 * entries)
            found[f"status, {part}"] = str(rows[0].status)
            found[f"seconds, {part}"] = time.perf_counter() - begun
    return found


class Peak:
    """The largest resident memory of the processes that descend from this one, meanwhile."""

    def __enter__(self) -> Peak:
        """Begin to look, every fiftieth of a second."""
        self.bytes, self.over = 0, threading.Event()
        self.before = 0
        self.looker = threading.Thread(target=self._look)
        self.looker.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Look no more."""
        self.over.set()
        self.looker.join()

    def _look(self) -> None:
        while not self.over.wait(0.02):
            for pid in descendants(os.getpid()) - {os.getpid()}:
                with suppress(OSError, LookupError, ValueError):  # it may be gone
                    status = Path(f"/proc/{pid}/status").read_text()
                    lines = dict(line.split(":", 1) for line in status.splitlines())
                    resident = 1024 * int(lines["RssAnon"].split()[0])
                    self.before = self.before or resident  # what the libraries hold
                    self.bytes = max(self.bytes, resident)


# --- many models of a Hub -------------------------------------------------------------------------

# Widths, layers and tables of well-known models by their parameters, in millions.
MODELS = {
    22: (384, 6, 30_522, 4),
    66: (768, 6, 30_522, 4),
    110: (768, 12, 30_522, 4),
    340: (1024, 24, 30_522, 4),
    500: (896, 24, 151_936, 5.43),
    770: (1280, 36, 50_257, 4),
}


def shapes_of(width: int, layers: int, words: int, inner: float) -> dict[tuple[int, int], int]:
    """The matrices of a transformer, and how many there are of each shape."""
    wide = round(width * inner)
    return {
        (words, width): 1,
        (width, width): 4 * layers,
        (wide, width): layers,
        (width, wide): layers,
    }


def hub() -> dict[str, Any]:
    """Measure a matrix of every shape once; what a model costs follows, and what many cost."""
    cost: dict[tuple[int, int], float] = {}
    random = torch.Generator().manual_seed(0)
    for model in MODELS.values():
        for rows, columns in shapes_of(*model):
            if (rows, columns) not in cost:
                weight = torch.randn(rows, columns, generator=random) / columns**0.5
                cost[rows, columns] = cpu_seconds(lambda w=weight: examine("w", w))
    seconds = {
        size: sum(cost[shape] * count for shape, count in shapes_of(*model).items())
        for size, model in MODELS.items()
    }
    mean = sum(seconds.values()) / len(seconds)
    return {
        "core-seconds of a model, by millions of parameters": seconds,
        "core-seconds of a matrix": {f"{r} x {c}": value for (r, c), value in cost.items()},
        "core-hours of 10,000 models, equal shares of these sizes": 10_000 * mean / 3600,
        "core-hours of 10,000 models, all of the largest": 10_000 * max(seconds.values()) / 3600,
    }


FIGURES: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each for each in (overhead, workers, planned, large, hub)
}


def main() -> None:
    """Measure what is asked for, print it, and keep it beside the other figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("what", nargs="+", choices=tuple(FIGURES))
    torch.set_num_threads(1)
    for what in parser.parse_args().what:
        load = os.getloadavg()[0]
        figures = FIGURES[what]() | {"load before": load, "environment": environment()}
        print(json.dumps({what: figures}, indent=1))
        before = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**before, what: figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
