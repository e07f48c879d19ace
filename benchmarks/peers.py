"""What neighbours do with the same files and the same training run: the README's table, measured.

Every program gets a checkpoint without the code of its model, the same weights in other formats,
a pickle that carries a command, and a training run of three steps. What it gives back, and whether
the command ran, is written down.

    python benchmarks/peers.py [--out benchmarks/results/peers.json]

The peers and the writers of files come with ``pip install netron wandb weightwatcher onnx gguf``.
A peer that is missing is said to be. Speed and alpha have benchmarks of their own: vitals.py,
diagnose.py, alpha.py.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import pickle
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

SECONDS = 240  # for one program to start on a busy machine and look at three small matrices

KAPPASCOPE = """
import json, sys, kappascope
found = kappascope.diagnose(sys.argv[1])
row = found.document()["matrices"][0]
print(json.dumps([key for key in row if row[key] is not None]))
"""
WEIGHTWATCHER = """
import json, logging, sys, weightwatcher
logging.disable(logging.CRITICAL)
details = weightwatcher.WeightWatcher().analyze(model=sys.argv[1])
print(json.dumps([str(name) for name in details.columns]))
"""
NETRON = """
import json, sys, netron
from playwright.sync_api import sync_playwright
host, port = netron.start(sys.argv[1], address=("127.0.0.1", 0), browse=False)
with sync_playwright() as driver:
    browser = driver.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    page = browser.new_page()
    page.goto(f"http://{host}:{port}")
    page.get_by_text("Accept").click()
    page.wait_for_timeout(8000)
    print(json.dumps(page.inner_text("body").split()[:60]))
    browser.close()
netron.stop()
"""
WANDB = """
import json, os, sys
os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=sys.argv[1])
import torch, wandb
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters())
with wandb.init(project="peers") as run:
    run.watch(model, log="all", log_freq=1)
    for _ in range(3):
        loss = model(torch.randn(16, 32)).square().mean()
        loss.backward()
        optimizer.step()
        run.log({"loss": float(loss)})
    print(json.dumps(sorted(key for key in run.summary.keys() if "/" in key)))
"""
MONITOR = """
import json, sys, torch, kappascope
model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 8))
optimizer = torch.optim.AdamW(model.parameters())
with kappascope.Monitor(sys.argv[1], every=1).attach(model, optimizer) as monitor:
    for _ in range(3):
        model(torch.randn(16, 32)).square().mean().backward()
        optimizer.step()
print(json.dumps(sorted({key.split("/")[-1] for key in monitor.last})))
"""


class Command:
    """An object whose pickle, where it is loaded as Python loads it, writes a file."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.mark}",)


def answer(code: str, given: Path) -> dict[str, Any]:
    """Run a program in a process of its own; what it found, or the last line of its error."""
    command = [sys.executable, "-c", code, str(given)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer in {SECONDS} seconds"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("[")]
    if done.returncode or not lines:
        said = (done.stderr.strip().splitlines() or ["nothing was printed"])[-1]
        return {"error": said.replace(str(given), given.name)[:200]}
    return {"found": json.loads(lines[-1])}


def probe(program: str, code: str, folder: Path) -> dict[str, Any]:
    """Give one program the plain checkpoint and the pickle that carries a command."""
    import torch
    from safetensors.torch import save_file

    plain, hostile = folder / program / "plain", folder / program / "hostile"
    mark = folder / program / "the command ran"
    for place in (plain, hostile):
        place.mkdir(parents=True)
        (place / "config.json").write_text("{}")
    weights = {f"layers.{i}.weight": torch.randn(96, 64) for i in range(3)}
    save_file(weights, plain / "model.safetensors")
    torch.save(
        weights | {"other": Command(mark)}, hostile / "pytorch_model.bin", pickle_module=pickle
    )
    one_file = program == "Netron"
    first = answer(code, plain / "model.safetensors" if one_file else plain)
    second = answer(code, hostile / "pytorch_model.bin" if one_file else hostile)
    return {"checkpoint": first, "hostile pickle": second, "its command ran": mark.exists()}


def write_formats(folder: Path) -> dict[str, Path]:
    """Write three matrices in every format, each into a folder of its own."""
    import gguf
    import numpy as np
    import onnx
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    weights = {f"layers.{i}.weight": torch.randn(96, 64) for i in range(3)}
    arrays = {name: weight.numpy() for name, weight in weights.items()}
    names = {
        "safetensors": "model.safetensors",
        "shards of safetensors": "model.safetensors.index.json",
        "PyTorch": "pytorch_model.bin",
        "GGUF": "model.gguf",
        "GGUF, Q8_0": "model.gguf",
        "ONNX": "model.onnx",
        "NumPy": "model.npz",
        "torch.distributed.checkpoint": ".metadata",
    }
    files = {kind: folder / kind / name for kind, name in names.items()}
    for file in files.values():
        file.parent.mkdir(parents=True)
        (file.parent / "config.json").write_text("{}")
    save_file(weights, files["safetensors"])
    shards = {name: f"model-{i}-of-3.safetensors" for i, name in enumerate(weights, 1)}
    index = files["shards of safetensors"]
    for name, shard in shards.items():
        save_file({name: weights[name]}, index.parent / shard)
    index.write_text(json.dumps({"weight_map": shards}))
    torch.save(weights, files["PyTorch"])
    for kind, code in (
        ("GGUF", gguf.GGMLQuantizationType.F32),
        ("GGUF, Q8_0", gguf.GGMLQuantizationType.Q8_0),
    ):
        writer = gguf.GGUFWriter(str(files[kind]), "llama")
        for name, array in arrays.items():
            writer.add_tensor(name, gguf.quants.quantize(array, code), raw_dtype=code)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    steps = [
        onnx.helper.make_node("Gemm", [f"x{i}", name], [f"x{i + 1}"], transB=i % 2)
        for i, name in enumerate(arrays)
    ]
    kind = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        steps,
        "three layers",
        [onnx.helper.make_tensor_value_info("x0", kind, [1, 96])],
        [onnx.helper.make_tensor_value_info("x3", kind, [1, 64])],
        [onnx.numpy_helper.from_array(array, name) for name, array in arrays.items()],
    )
    onnx.save(onnx.helper.make_model(graph), files["ONNX"])
    np.savez(files["NumPy"], **arrays)
    dcp.save(weights, checkpoint_id=files["torch.distributed.checkpoint"].parent)
    return files


def formats_read(program: str, code: str, files: dict[str, Path]) -> dict[str, Any]:
    """Give one program the same weights in every format: the file, or else the folder around it."""
    read = {}
    for kind, file in files.items():
        found = answer(code, file)
        if program != "Netron" and "error" in found:
            found = answer(code, file.parent)
        # a program that opens a file and shows no shape of its matrices has not read it
        drawn = {"96×64", "64×96"} & {*re.findall(r"\d+×\d+", str(found))}
        shows = drawn if program == "Netron" else found.get("found")
        read[kind] = "yes" if shows else f"no: {found.get('error', found.get('found'))}"[:200]
    return read


def main() -> None:
    """Probe what is installed and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/peers.json"))
    out = parser.parse_args().out
    installed: dict[str, str] = {}
    for package in ("kappascope", "weightwatcher", "netron", "wandb", "torch"):
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            installed[package] = "not installed"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {"kappascope": KAPPASCOPE, "WeightWatcher": WEIGHTWATCHER, "Netron": NETRON}
        runs = {"kappascope.Monitor": MONITOR, "wandb.watch": WANDB}
        written = write_formats(folder / "formats")
        results = {
            "what": __doc__.splitlines()[0],
            "versions": installed,
            "files": {program: probe(program, code, folder) for program, code in files.items()},
            "formats": {
                program: formats_read(program, code, written) for program, code in files.items()
            },
            "training": {
                program: answer(code, folder / program.partition(".")[0] / "run")
                for program, code in runs.items()
            },
        }
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
