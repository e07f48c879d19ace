"""How far a reader walks through the package to follow one call: functions, modules, changes.

A function counts once, by its name. Bodies of modules do not count, and lambdas and comprehensions
belong to the function they stand in. A change is a call in another module than the call before it,
the first call included. Every walk begins in a new process, and what the command would give to
worker processes is done in that process instead.

    python benchmarks/walks.py [--source src] [--keep after]

``--source`` names the sources to walk through, those of an older version too. ``--keep`` writes the
figures under that name into benchmarks/results/walks.json, beside what it holds already.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "walks.json"
NAMELESS = ("<module>", "<lambda>", "<genexpr>", "<listcomp>", "<setcomp>", "<dictcomp>")

Work = Callable[[], object]


# --- what is walked -------------------------------------------------------------------------------


def vitals(size: int) -> Work:
    """The extreme singular values of a random square matrix."""
    import torch

    from kappascope import spectra

    matrix = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    return lambda: spectra.vitals(matrix)


def attach() -> Work:
    """The default correction on a network of two layers."""
    import torch
    from torch import nn

    from kappascope.corrections import Hybrid

    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    return lambda: Hybrid().attach(model, optimizer)


def diagnose(folder: Path) -> Work:
    """A page about a transformer of two blocks."""
    import torch

    from kappascope import diagnose  # noqa: F401 - loads the modules that a diagnosis needs

    generator = torch.Generator().manual_seed(0)
    shapes = {"embed_tokens.weight": (100, 32)}
    for block in ("layers.0", "layers.1"):
        shapes |= {f"{block}.self_attn.{name}_proj.weight": (32, 32) for name in "qkvo"}
        shapes |= {f"{block}.mlp.{name}_proj.weight": (128, 32) for name in ("gate", "up")}
        shapes[f"{block}.mlp.down_proj.weight"] = (32, 128)
    file, header, data = folder / "model.safetensors", {}, b""
    for name, shape in shapes.items():
        entries = torch.randn(shape, generator=generator).div(6).numpy().tobytes()
        offsets = [len(data), len(data) + len(entries)]
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": offsets}
        data += entries
    head = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(head)) + head + data)
    heads = {"model_type": "llama", "num_attention_heads": 4, "hidden_size": 32}
    (folder / "config.json").write_text(json.dumps(heads))
    return command("diagnose", str(file), "--html", str(folder / "page.html"))


def reproduce(folder: Path) -> Work:
    """The paper's second experiment in its short form."""
    return command("reproduce", "2", "--quick", "--jobs", "0", "--out", str(folder / "report"))


def command(*arguments: str) -> Work:
    """The command in this process: nothing is done by a worker that the profiler does not see."""
    app = module("kappascope.cli.app", "kappascope.cli")
    workers: Any = module("kappascope.system.workers", "kappascope.engines")
    workers.Processes.run = lambda self, work, items: workers.Here().run(work, items)
    workers.Processes.warm = lambda self: None

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            if code := app.run(arguments):
                raise SystemExit(f"{' '.join(arguments)} ended with exit code {code}")

    return run


def module(*names: str) -> ModuleType:
    """The first of these modules that there is: it has moved since."""
    for name in names[:-1]:
        with contextlib.suppress(ImportError):
            return importlib.import_module(name)
    return importlib.import_module(names[-1])


WALKS: dict[str, Callable[[Path], Work]] = {
    "diagnose --html": diagnose,
    "reproduce 2 --quick": reproduce,
    "Hybrid().attach": lambda folder: attach(),
    "vitals 64": lambda folder: vitals(64),
    "vitals 400": lambda folder: vitals(400),
    "vitals 1500": lambda folder: vitals(1500),
}


# --- how it is counted ----------------------------------------------------------------------------


def walk(work: Work) -> dict[str, int]:
    """Count the functions and modules of the package that the work goes through."""
    import kappascope

    root = str(Path(kappascope.__file__).parent)
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(root) and code.co_name not in NAMELESS:
            calls.append(code)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    modules = [code.co_filename for code in calls]
    return {
        "functions": len({(code.co_filename, code.co_qualname) for code in calls}),
        "modules": len(set(modules)),
        "changes": 1 + sum(one != other for one, other in pairwise(modules)),
    }


def main() -> None:
    """Walk every way in a process of its own; print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--source", type=Path, default=HERE.parent / "src")
    parser.add_argument("--keep", metavar="NAME", help="name of these figures in the results")
    parser.add_argument("--only", choices=WALKS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(walk(WALKS[options.only](Path(folder)))))
        return
    place = {"PYTHONPATH": str(options.source.resolve()), "OMP_NUM_THREADS": "1"}
    found: dict[str, dict[str, int]] = {}
    print(f"{'':20s} functions  modules  changes of module")
    for name in WALKS:
        again = [sys.executable, __file__, "--only", name]
        answer = subprocess.check_output(again, env=os.environ | place, text=True)
        found[name] = json.loads(answer.splitlines()[-1])
        print("{:20s} {functions:9,d} {modules:8,d} {changes:8,d}".format(name, **found[name]))
    if options.keep:
        kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        kept = {"what": (__doc__ or "").splitlines()[0]} | kept | {options.keep: found}
        RESULTS.write_text(json.dumps(kept, indent=2) + "\n")


if __name__ == "__main__":
    main()
