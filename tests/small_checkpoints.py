"""Small checkpoints of many sorts, healthy and ill, and the documents of their diagnoses.

``python tests/small_checkpoints.py FILE`` writes the documents that ``tests/clinic`` compares with.
Their numbers and texts are part of the interface: write them again only where a change is meant.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import kappascope

Weights = dict[str, Tensor]
MODELS: dict[str, Callable[[], Weights]] = {}


def model(make: Callable[[], Weights]) -> Callable[[], Weights]:
    MODELS[make.__name__] = make
    return make


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Normal entries from NumPy, whose random numbers are the same on every processor."""
    drawn = np.random.default_rng((seed, *shape)).standard_normal(shape)
    return torch.from_numpy(scale * drawn).float()


def falling(rows: int, columns: int, seed: int = 0, last: float = 0.2) -> Tensor:
    """A matrix as trained ones are: singular values that fall evenly from 3."""
    u, _, v = np.linalg.svd(normal(rows, columns, seed=seed).double().numpy(), full_matrices=False)
    return torch.from_numpy((u * np.linspace(3, last, min(rows, columns))) @ v).float()


@model
def linear_stack() -> Weights:
    layers = {"0": (24, 16), "2": (20, 24), "4": (6, 20)}
    weights = {f"net.{k}.weight": falling(*s, seed=int(k)) for k, s in layers.items()}
    return weights | {f"net.{k}.bias": torch.zeros(s[0]) for k, s in layers.items()}


@model
def fresh_stack() -> Weights:
    return {f"fc{k}.weight": normal(40, 40, seed=k, scale=0.1) for k in (1, 2, 3)}


@model
def gpt2() -> Weights:
    """Conv1D stores (in, out); the causal mask is a buffer beside the weights."""
    weights = {"wte.weight": falling(30, 12), "wpe.weight": normal(16, 12, scale=0.02)}
    for k in range(2):
        weights |= {
            f"h.{k}.ln_1.weight": torch.ones(12),
            f"h.{k}.attn.bias": torch.ones(16, 16).tril()[None, None],
            f"h.{k}.attn.c_attn.weight": falling(12, 36, seed=k),
            f"h.{k}.attn.c_attn.bias": torch.zeros(36),
            f"h.{k}.attn.c_proj.weight": falling(12, 12, seed=k + 5),
            f"h.{k}.mlp.c_fc.weight": falling(12, 48, seed=k + 7),
            f"h.{k}.mlp.c_proj.weight": falling(48, 12, seed=k + 9),
        }
    return weights


@model
def fused_attention() -> Weights:
    return {"attn.in_proj_weight": falling(48, 16), "attn.in_proj_bias": torch.zeros(48),
            "attn.out_proj.weight": falling(16, 16, seed=2)}  # fmt: skip


@model
def bert() -> Weights:
    weights = {"bert.embeddings.word_embeddings.weight": falling(40, 16)}
    weights["bert.embeddings.word_embeddings.weight"][0] = 0
    place = "bert.encoder.layer.0"
    for k, name in enumerate(("query", "key", "value")):
        weights[f"{place}.attention.self.{name}.weight"] = falling(16, 16, seed=k)
    weights[f"{place}.attention.output.dense.weight"] = falling(16, 16, seed=5)
    weights[f"{place}.intermediate.dense.weight"] = falling(64, 16, seed=6)
    weights[f"{place}.output.dense.weight"] = falling(16, 64, seed=7)
    return weights


@model
def llama() -> Weights:
    weights = {"model.embed_tokens.weight": falling(50, 16), "lm_head.weight": falling(50, 16, 1)}
    shapes = {"self_attn.q": (16, 16), "self_attn.k": (8, 16), "self_attn.v": (8, 16),
              "self_attn.o": (16, 16), "mlp.gate": (40, 16), "mlp.up": (40, 16),
              "mlp.down": (16, 40)}  # fmt: skip
    for layer in range(2):
        for k, (name, shape) in enumerate(shapes.items()):
            stored = falling(*shape, seed=10 * layer + k).bfloat16()
            weights[f"model.layers.{layer}.{name}_proj.weight"] = stored
    return weights


@model
def convolutions() -> Weights:
    return {"conv1.weight": normal(12, 3, 3, 3), "bn1.running_var": torch.ones(12),
            "conv2.weight": normal(16, 12, 3, 3, seed=1), "fc.weight": falling(10, 16)}  # fmt: skip


@model
def lstm() -> Weights:
    return {"rnn.weight_ih_l0": normal(48, 10), "rnn.weight_hh_l0": normal(48, 12, seed=1),
            "rnn.bias_ih_l0": torch.zeros(48), "fc.weight": falling(4, 12)}  # fmt: skip


@model
def half_precision() -> Weights:
    return {"a.weight": normal(40, 40).half(), "b.weight": normal(48, 48, seed=1).bfloat16(),
            "c.weight": normal(24, 24, seed=2).bfloat16().float(),
            "d.weight": normal(32, 32, seed=3).to(torch.float8_e4m3fn)}  # fmt: skip


@model
def not_finite() -> Weights:
    bad, worse = falling(8, 8), falling(9, 9)
    bad[2, 3], worse[0, 0], worse[8, 8] = math.nan, math.inf, -math.inf
    mask = torch.zeros(6, 6).masked_fill(torch.ones(6, 6).triu(1) > 0, -math.inf)
    bias = torch.tensor([1.0, math.nan])
    return {"fc1.weight": bad, "fc2.weight": worse, "attn.causal_mask": mask, "fc1.bias": bias,
            "up.weight": mask.clone(), "fine.weight": falling(8, 6)}  # fmt: skip


@model
def dead_and_outlying() -> Weights:
    rows, columns, long, wide = (falling(30, 20, seed=k) for k in range(4))
    rows[3:6], columns[:, 7] = 0, 0
    long[4] *= 30
    wide[:, 2] *= 30
    uneven = falling(40, 20) * torch.from_numpy(np.geomspace(0.01, 10, 40)).float()[:, None]
    return {"rows.weight": rows, "columns.weight": columns, "long.weight": long,
            "wide.weight": wide, "uneven.weight": uneven}  # fmt: skip


@model
def degenerate() -> Weights:
    flat = torch.outer(torch.arange(1.0, 25), normal(16))
    ill = falling(20, 80).double()
    u, s, v = torch.linalg.svd(ill, full_matrices=False)
    s[-1] = 1e-6
    return {"zero.weight": torch.zeros(6, 4), "ones.weight": torch.ones(5, 4),
            "flat.weight": flat, "low.weight": normal(30, 3) @ normal(3, 20),
            "eye.weight": torch.eye(36), "row.weight": normal(1, 9),
            "empty.weight": torch.ones(0, 4), "one.weight": torch.full((1, 1), 2.0),
            "ill.weight": (u * s) @ v,
            "tiny.weight": 1e-300 * torch.eye(3).double(),
            "huge.weight": 1e300 * torch.eye(3).double()}  # fmt: skip


@model
def copies() -> Weights:
    return {f"layers.{k}.up.weight": falling(18, 14) for k in range(5)}


@model
def tied() -> Weights:
    shared = falling(30, 12)
    return {"wte.weight": shared, "lm_head.weight": shared, "fc.weight": falling(12, 12)}


@model
def adapter() -> Weights:
    return {"q_proj.weight": falling(24, 24), "q_proj.lora_A.weight": normal(4, 24),
            "q_proj.lora_B.weight": torch.zeros(24, 4)}  # fmt: skip


@model
def quantized() -> Weights:
    codes = torch.arange(64).reshape(8, 8).to(torch.int8)
    return {"up.qweight": codes, "up.scales": torch.ones(1, 8), "down.weight": falling(8, 8),
            "mlp.weight": normal(8, 8).to(torch.float8_e4m3fn), "mlp.weight_scale": torch.ones(1),
            "position_ids": torch.arange(4)[None], "steps": torch.tensor(7)}  # fmt: skip


@model
def experts() -> Weights:
    return {"moe.experts.gate_up": normal(3, 16, 8), "moe.gate.weight": falling(3, 8),
            "moe.experts.down": normal(3, 8, 8, seed=1)}  # fmt: skip


@model
def strange_names() -> Weights:
    names = ("a\u202eb.weight", "two\nlines", "", "=1+1", "x[0]", "w" * 150)
    return {name: falling(7, 5, seed=k) for k, name in enumerate(names)}


@model
def ill_chain() -> Weights:
    steep = torch.from_numpy(np.geomspace(1, 1e-2, 16))

    def layer(rows: int, columns: int) -> Tensor:
        u, _, v = torch.linalg.svd(normal(rows, columns).double(), full_matrices=False)
        return (u * steep) @ v

    huge = 1e307 * normal(4, 4).double()
    return {"net.0.weight": layer(16, 100), "net.1.weight": layer(100, 16), "fc1.weight": huge,
            "fc2.weight": huge.clone()}  # fmt: skip


HEADS = {"hidden_size": 16, "num_attention_heads": 2}


def moved(weights: Weights, step: int) -> Weights:
    """The same after some training: every matrix moved, one lost, one reshaped, one broken."""
    later = {name: w + 0.03 * step * normal(*w.shape, seed=step) for name, w in weights.items()}
    names = [name for name, w in weights.items() if w.ndim == 2]
    if step > 1 and len(names) > 2:
        del later[names[0]]
        later[names[1]] = later[names[1]].repeat(2, 1)
        later[names[2]] = later[names[2]] * math.nan
    return later


def files(folder: Path) -> Iterator[Path]:
    """The same weights in several formats, some with a config beside them."""
    from checkpoint_files import BENIGN, safetensors, saved

    for name in ("a plain state dict", "sharded", "before 1.6", "prefixes", "sharded_pickles"):
        layout, _ = BENIGN[name]
        (folder / name).mkdir()
        yield layout(folder / name)
    (folder / "bert").mkdir()
    (folder / "bert" / "model.safetensors").write_bytes(safetensors(bert()))
    (folder / "bert" / "config.json").write_text(json.dumps(HEADS))
    yield folder / "bert"
    (folder / "gpt2.pt").write_bytes(saved({"model": gpt2(), "epoch": 3}))
    yield folder / "gpt2.pt"


def documents(wanted: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """The documents of these names, or all: in memory, with a reference, of files, of a way."""
    from kappascope.clinic.diagnosis import document

    def diagnosed(name: str, *given: Any, **options: Any) -> Iterator[tuple[str, dict[str, Any]]]:
        if not wanted or name in wanted:
            yield name, kappascope.diagnose(*given, **options).document()

    for name, make in MODELS.items():
        yield from diagnosed(name, make())
    yield from diagnosed("module", _module())
    for name in ("linear_stack", "gpt2", "degenerate", "not_finite"):
        weights = MODELS[name]()
        for step in (1, 2):
            yield from diagnosed(f"{name} against {step}", weights, moved(weights, step))
    yield from diagnosed("unlike", gpt2(), bert())
    yield from diagnosed("chosen", gpt2(), include="attn", exclude="*c_proj*")
    yield from diagnosed("ends", linear_stack(), spectrum="none")
    if not wanted:
        yield "drawn", kappascope.diagnose(linear_stack()).document(plots=True)
    steps = [moved(linear_stack(), step) for step in (0, 1, 1, 2)]
    pairs = zip(steps, [None, *steps[:-1]], strict=True)
    way = [kappascope.diagnose(weights, reference=other) for weights, other in pairs]
    yield "trajectory", document(way)
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        for path in files(Path()):
            yield from diagnosed(f"file {path}", path, jobs=1)
        yield from diagnosed("files", "gpt2.pt", "gpt2.pt", jobs=1)


def _module() -> nn.Module:
    layer = nn.MultiheadAttention(16, 2)
    layer.in_proj_weight.data, layer.out_proj.weight.data = falling(48, 16), falling(16, 16)
    return nn.Sequential(layer)


KEPT = ("fused_attention", "not_finite", "dead_and_outlying", "degenerate", "quantized", "tied",
        "strange_names", "ill_chain", "linear_stack against 2", "trajectory", "file bert",
        "file sharded")  # fmt: skip
"""The documents that every test run compares: of each kind of finding, reason and source, one."""


def comparable(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document without what tells of the machine and not of the model."""
    options = ("dtype", "include", "exclude", "spectrum", "notes")
    provenance = {name: document["provenance"][name] for name in options}
    kept = {name: value for name, value in document.items() if name != "files"}
    return {**kept, "provenance": provenance}


def differences(old: Any, new: Any, tolerance: float, path: str = "") -> Iterator[str]:
    """Where two documents differ in fields, their order, texts, or numbers beyond a tolerance."""
    if isinstance(old, dict) and isinstance(new, dict):
        if list(old) != list(new):
            yield f"{path}: fields {list(old)} became {list(new)}"
        if path.endswith(".fingerprints"):
            return  # hashes: the last bit of one entry, which machines disagree on, changes them
        for name in old.keys() & new.keys():
            yield from differences(old[name], new[name], tolerance, f"{path}.{name}")
    elif isinstance(old, list) and isinstance(new, list):
        if len(old) != len(new):
            yield f"{path}: {len(old)} items became {len(new)}"
        for k, (a, b) in enumerate(zip(old, new, strict=False)):
            yield from differences(a, b, tolerance, f"{path}[{k}]")
    elif isinstance(old, float) and isinstance(new, float | int):
        if not math.isclose(old, new, rel_tol=tolerance, abs_tol=1e-3 * tolerance):
            yield f"{path}: {old!r} became {new!r}"
    elif old != new or type(old) is not type(new):
        yield f"{path}: {old!r} became {new!r}"


def rounded(value: Any) -> Any:
    """The same with nine digits of every number: more than is compared."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


if __name__ == "__main__":
    whole = "--all" in sys.argv  # every digit of every document, to compare two versions
    told = {name: comparable(one) for name, one in documents(() if whole else KEPT)}
    lines = (f"{json.dumps(n)}: {json.dumps(v if whole else rounded(v))}" for n, v in told.items())
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
