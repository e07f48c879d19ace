"""The tail exponent alpha against WeightWatcher's, on layers of many kinds.

Both take the float32 weights of the same linear layers. Where WeightWatcher calls its own fit good
(a distance below 0.1) the two should agree to 2 %; the others are reported, too. WeightWatcher runs
in a process of its own, with the Python that has it:

    python benchmarks/alpha.py [--peer PYTHON] [--checkpoint FILE.safetensors] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from kappascope.matrix import powerlaw, spectra

HERE = Path(__file__).parent
GOOD = 0.1  # WeightWatcher's distance below which the exponents are compared
AGREE = 0.02
SHAPES = ((12, 40), (64, 64), (96, 384), (300, 200), (512, 512), (768, 256))

Matrix = NDArray[np.float32]

PEER = """
import contextlib, io, json, sys, warnings
warnings.simplefilter("ignore")
import numpy, torch
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    import weightwatcher
    layers = {}
    for name, weight in numpy.load(sys.argv[1]).items():
        layers[name] = torch.nn.Linear(*weight.T.shape, bias=False)
        layers[name].weight.data = torch.from_numpy(weight)
    model = torch.nn.ModuleDict(layers)
    table = weightwatcher.WeightWatcher(model=model).analyze()
fits = table.set_index("name")[["alpha", "D", "xmin", "sigma"]].astype(float)
print(json.dumps({"version": weightwatcher.__version__, "fits": fits.to_dict("index")}))
"""


def families(rows: int, columns: int, random: np.random.Generator) -> Iterator[tuple[str, Any]]:
    """Yield layers as fresh, as trained, and as no training leaves them."""
    short = min(rows, columns)
    gauss = random.standard_normal((rows, columns)) / np.sqrt(columns)
    u, _, vt = np.linalg.svd(random.standard_normal((rows, columns)), full_matrices=False)
    spikes = (u[:, :8] * np.geomspace(20, 2, 8)) @ vt[:8]
    yield "gaussian", gauss
    yield "uniform", random.uniform(-1, 1, (rows, columns)) / np.sqrt(columns)
    yield "small", 0.02 * random.standard_normal((rows, columns))
    yield "spiked", gauss + spikes
    for freedom in (2, 3, 4):
        yield f"student {freedom}", random.standard_t(freedom, (rows, columns)) / np.sqrt(columns)
    for power in (0.3, 0.5, 1.0, 1.5):
        yield f"power {power}", (u * np.arange(1, short + 1.0) ** -power) @ vt
    for index in (1, 2, 4):
        yield f"pareto {index}", (u * np.sqrt(1 + random.pareto(index, short))) @ vt
    yield "lognormal", (u * random.lognormal(0, 1, short)) @ vt
    yield "product", gauss @ random.standard_normal((columns, columns)) / np.sqrt(columns)
    yield "rows", gauss * random.lognormal(0, 0.5, (rows, 1))
    yield "low rank", gauss[:, : short // 2] @ random.standard_normal((short // 2, columns))


def synthetic() -> Iterator[tuple[str, Matrix]]:
    """Yield every family in every shape, three of each."""
    for rows, columns in SHAPES:
        for seed in range(3):
            random = np.random.default_rng((rows, columns, seed))
            for family, weight in families(rows, columns, random):
                # no dot: it may not stand in the name of a module
                name = f"{family} {rows}x{columns} #{seed}".replace(".", ",")
                yield name, np.ascontiguousarray(weight, dtype=np.float32)


def stored(path: Path) -> Iterator[tuple[str, Matrix]]:
    """Yield the float32 matrices of a safetensors file: a header in JSON, then the numbers."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:start]).items():
        shape = entry.get("shape", ())
        # vocabularies take the peer minutes
        if entry.get("dtype") == "F32" and len(shape) == 2 and shape[0] <= 5000:
            first, last = entry["data_offsets"]
            tensor = (
                np.frombuffer(raw[start + first : start + last], np.float32).reshape(shape).copy()
            )
            yield f"{path.stem}: {name}".replace(".", ","), tensor


def theirs(matrices: dict[str, Matrix], python: str) -> dict[str, Any]:
    """Ask WeightWatcher for its fits, by name."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "matrices.npz"
        np.savez(file, **matrices)
        process = subprocess.run(
            [python, "-c", PEER, str(file)], check=True, capture_output=True, text=True
        )
    return json.loads(process.stdout.splitlines()[-1])


def compared(name: str, matrix: Matrix, fit: dict[str, float]) -> dict[str, Any]:
    """Compare both exponents of a matrix: how far apart they are."""
    values = spectra.singular_values(torch.from_numpy(matrix)).numpy()
    start = time.process_time()
    ours = powerlaw.power_law(values**2)
    seconds = time.process_time() - start
    row = {"name": name, "peer_alpha": fit["alpha"], "peer_distance": fit["D"], "seconds": seconds}
    if isinstance(ours, str):
        return row | {"alpha": None, "reason": ours, "difference": None}
    difference = abs(ours.alpha / fit["alpha"] - 1)
    return row | {"alpha": ours.alpha, "distance": ours.distance, "difference": difference}


def main() -> None:
    """Compare all matrices, print a summary and write the rows to a file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peer", default=sys.executable, help="the Python with weightwatcher")
    parser.add_argument("--checkpoint", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, default=HERE / "results" / "alpha.json")
    options = parser.parse_args()
    torch.set_num_threads(1)
    matrices = dict(synthetic())
    for path in options.checkpoint:
        matrices |= dict(stored(path))
    peer = theirs(matrices, options.peer)
    rows = [compared(name, matrices[name], fit) for name, fit in peer["fits"].items()]
    good = [row for row in rows if 0 <= row["peer_distance"] < GOOD]
    agree = [r for r in good if r["difference"] is not None and r["difference"] <= AGREE]
    summary = {
        "matrices": len(matrices),
        "fitted by both": sum(row["alpha"] is not None for row in rows),
        "good fits": len(good),
        "good fits that agree": len(agree),
        "largest difference, good fits": max(r["difference"] or 0.0 for r in good),
        "largest difference, all": max(r["difference"] or 0.0 for r in rows),
        "seconds, slowest fit": max(row["seconds"] for row in rows),
    }
    for what, value in summary.items():
        print(f"{what:32s}{value:.3g}")
    for row in [r for r in rows if r["difference"] is None or r["difference"] > AGREE]:
        print(row)
    environment = {"python": platform.python_version(), "weightwatcher": peer["version"]}
    report = {
        "what": (__doc__ or "").splitlines()[0],
        "environment": environment,
        "summary": summary,
        "rows": rows,
    }
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
