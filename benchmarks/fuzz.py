"""Files gone wrong and models that are odd: what is refused, accepted, crashed, executed.

Mutants of sound checkpoints, made with fixed seeds byte by byte and with knowledge of the formats;
pickles that ask for something to be run; layouts that must be accepted. Every tensor of what is
accepted is read. A crash is any end but a refusal in one line, or none within 10 seconds; an
execution is anything that Python's audit events report as run, imported or written meanwhile.

Then models that are odd but valid (empty dimensions, hundreds of equal layers, every scale of
float64, shared storages, wrong configs, weird names), diagnosed in memory and from files: a crash
is any end but an answer or a refusal in one line, a document that is no strict JSON, or a matrix
that failed with an error of Python's.

    OMP_NUM_THREADS=1 python benchmarks/fuzz.py [--share 0.02] [--only KIND] [--keep FOLDER]
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measuring import environment

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
checkpoint_files, broken_files, broken_formats, odd_models = map(
    importlib.import_module, ("checkpoint_files", "broken_files", "broken_formats", "odd_models")
)

HEADINGS = ("count", "refused", "accepted", "crashes", "executed")

# What is opened: the figure to reach, the files of it, and where they are put in a folder.
Files = Callable[[int], Iterator[bytes]]
Place = str | Callable[[Path], Path]
KINDS: dict[str, tuple[int, Files, Place]] = {
    "mutated safetensors": (
        100_000,
        lambda n: broken_files.tensor_files(n, seed=1),
        "x.safetensors",
    ),
    "mutated .pt": (100_000, lambda n: broken_files.torch_files(n, seed=2), "x.pt"),
    "mutated indexes": (
        20_000,
        lambda n: broken_files.indexes(n, seed=3),
        lambda folder: broken_files.shards(folder / "shards"),
    ),
    "hostile pickles": (1_000, lambda n: checkpoint_files.hostile(n, seed=4), "y.pt"),
    "mutated GGUF": (100_000, lambda n: broken_formats.gguf_files(n, seed=6), "x.gguf"),
    "mutated .npz": (100_000, lambda n: broken_formats.numpy_files(n, seed=7), "x.npz"),
    "mutated ONNX": (100_000, lambda n: broken_formats.onnx_files(n, seed=8), "x.onnx"),
    "mutated .metadata": (
        50_000,
        lambda n: broken_formats.metadata_files(n, seed=9),
        broken_formats.distributed_folder,
    ),
    "mutated .distcp": (
        50_000,
        lambda n: broken_formats.chunk_files(n, seed=10),
        lambda folder: broken_formats.distributed_folder(folder).with_name("__0_0.distcp"),
    ),
    "mutated codes": (
        100_000,
        lambda n: broken_formats.quantized_files(n, seed=11),
        "x.safetensors",
    ),
    "mutated ZeRO": (
        100_000,
        lambda n: broken_formats.zero_files(n, seed=13, stage=3),
        lambda folder: broken_formats.zero_folder(folder / "x", 3),
    ),
    "mutated Flax": (100_000, lambda n: broken_formats.flax_files(n, seed=14), "x.msgpack"),
    "mutated torchao": (100_000, lambda n: broken_formats.torchao_files(n, seed=12), "x.bin"),
}
ODD_MODELS = 10_000


def diagnose(share: float) -> Any:
    """Diagnose the odd models."""
    models = odd_models.odd_models(max(1, round(ODD_MODELS * share)), seed=5)
    with tempfile.TemporaryDirectory() as folder:
        return odd_models.run("odd models", models, Path(folder))


def examine(kind: str, share: float, keep: Path | None) -> Any:
    """Open all files of one kind."""
    count, files, name = KINDS[kind]

    def kept(i: int, data: bytes) -> None:
        if keep:
            (keep / f"{kind} {i}".replace(" ", "-")).write_bytes(data)

    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / name if isinstance(name, str) else name(Path(folder))
        tally = broken_files.run(kind, files(max(1, round(count * share))), place, kept)
        tally.executions += [str(path) for path in Path(folder).rglob(checkpoint_files.MARK)]
    return tally


def row(tally: Any, seconds: float, share: float) -> dict[str, Any]:
    """The figures of one kind."""
    return {
        "share": share,
        "environment": environment(),
        "what": tally.what,
        "count": tally.count,
        "refused": tally.refused,
        "accepted": tally.accepted,
        "crashes": len(tally.crashes),
        "executions": len(tally.executions),
        "slowest_seconds": round(tally.slowest, 3),
        "seconds": round(seconds, 1),
        "examples": [*tally.crashes[:5], *tally.executions[:5]],
    }


def merged(rows: list[dict[str, Any]], out: Path) -> list[dict[str, Any]]:
    """These rows in the place of earlier ones of their kinds; each says where it was measured."""
    earlier = json.loads(out.read_text()) if out.exists() else {"results": []}
    place = {name: earlier[name] for name in ("share", "environment") if name in earlier}
    kept = {each["what"]: place | each for each in earlier["results"]}
    return list((kept | {each["what"]: each for each in rows}).values())


def main() -> None:
    """Open everything, print a table, keep it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--share", type=float, default=1.0, help="part of the files to open")
    parser.add_argument("--only", choices=("benign layouts", *KINDS, "odd models"))
    parser.add_argument("--keep", type=Path, help="folder for files that crash or execute")
    default = Path(__file__).parent / "results" / "fuzz.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    broken_files.warm_up()
    rows = []
    print(" " * 20, *(f"{name:>8}" for name in HEADINGS), " slowest")
    tasks: dict[str, Callable[[], Any]] = {"benign layouts": broken_files.layouts}
    tasks |= {kind: partial(examine, kind, options.share, options.keep) for kind in KINDS}
    tasks["odd models"] = partial(diagnose, options.share)
    for kind in [options.only] if options.only else tasks:
        began = time.perf_counter()
        tally = tasks[kind]()
        rows.append(row(tally, time.perf_counter() - began, options.share))
        print(
            "{what:20} {count:8} {refused:8} {accepted:8} {crashes:8} {executions:8}"
            "  {slowest_seconds:.3f} s".format(**rows[-1])
        )
    report = {"what": __doc__.splitlines()[0], "results": merged(rows, options.out)}
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(any(r["crashes"] or r["executions"] for r in rows))


if __name__ == "__main__":
    main()
