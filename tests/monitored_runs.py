"""A small record of a run, as a monitor would write it, for tests of what reads records."""

import math
from pathlib import Path
from typing import Any

from kappascope.monitor.record import VERSION, Recorder, Run

MATRICES = {
    f"h.{depth}.{name}.weight": {"kind": kind, "depth": depth, "shape": shape, "dtype": "float32"}
    for depth in (0, 1)
    for name, kind, shape in [
        ("attn.q_proj", "query", [16, 16]),
        ("attn.o_proj", "output", [16, 16]),
        ("mlp.fc1", "up", [64, 16]),
    ]
}
INDICES = (0.0, 0.25, 0.5, 0.75, 1.0)


def written(folder: Path, *entries: dict[str, Any]) -> Run:
    """A record of these entries, at step 0 unless they say another."""
    recorder = Recorder(folder)
    for entry in entries:
        recorder.write({"step": 0, **entry})
    recorder.close()
    return Run.read(folder)


def reading(step: int, depth: int) -> dict[str, object]:
    """Rows of one matrix: plain numbers, and vectors by index."""
    kappa = 10.0 + step / 10 + depth
    return {
        "frobenius_norm": 4.0 + step / 100,
        "row_norms": [[0.0, 1.5], [0.5, 1.0], [1.0, 0.5]],
        "column_norms": [[0.0, 1.5], [0.5, 1.0], [1.0, 0.5]],
        "sigma_max": 2.0,
        "sigma_2": 1.9,
        "sigma_min": 2.0 / kappa,
        "condition_number": kappa,
        "condition_number_low": kappa * 0.99,
        "condition_number_high": kappa * 1.01,
        "effective_rank": 16.0,
        "spectral_gap": 0.05,
        "stable_rank": 6.0,
        "signal": [[0.0, -1e-2], [1.0, 1e-5]],
        "signal_relative": [[0.0, -5e-3], [1.0, 5e-5]],
        "signal_to_noise": [[0.0, 3.0], [1.0, 0.2]],
        "update_size": 1e-3,
        "update_decay": 1e-5,
        "update_stable_rank": 3.0,
        "update_share_top": 0.3,
        "update_share_bottom": 0.01,
        "update_alignment_gradient": -0.8,
        "update_alignment_last": 0.6,
        "swallowed": 0.1 * depth,
    }


def write_example(folder: Path, steps: int = 200, every: int = 20, closed: bool = True) -> Path:
    """Write a run of two layers with a loss, an alert, whole spectra and a ring."""
    recorder = Recorder(folder)
    recorder.write(
        {
            "kind": "start",
            "step": 0,
            "version": VERSION,
            "time": 1.7e9,
            "model": "GPT",
            "every": every,
            "options": {"spectra_every": 100},
            "matrices": MATRICES,
            "skipped": {"wte.weight": "an embedding is looked up, not multiplied"},
            "optimizers": ["AdamW"],
            "resumed": False,
            "cut": "",
        }
    )
    group = {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 0.1}
    recorder.write({"kind": "settings", "step": 0, "optimizer": 0, "groups": [group]})
    for step in range(0, steps + 1, every):
        rows = {name: reading(step, int(facts["depth"])) for name, facts in MATRICES.items()}
        if step % 100 == 0:
            for each in rows.values():
                each["singular_values"] = [[i, 2.0 * math.exp(-2.5 * i)] for i in INDICES]
                each["signal"] = [[i, -1e-2 * math.exp(-4 * i)] for i in INDICES]
        rows[""] = {"overhead": 0.008}
        entry = {"kind": "reading", "step": step, "time": 1.7e9 + step, "seconds": 0.01}
        recorder.write(entry | {"rows": rows})
        recorder.write({"kind": "log", "step": step, "values": {"loss": 3.0 - step / 200}})
    told = "h.1.mlp.fc1.weight: 31 % of its entries did not move; weights in float32 would move"
    alert = {"name": "swallowed", "matrix": "h.1.mlp.fc1.weight", "text": told}
    recorder.write({"kind": "alert", "step": min(60, steps), **alert})
    norms = {name: [4.0, 4.1, 9.9] for name in MATRICES}
    ring = {"steps": [steps - 2, steps - 1, steps], "norms": norms, "gradients": norms}
    told = "the gradient of h.1.mlp.fc1.weight left its usual size first: 40 steps before the loss"
    recorder.write({"kind": "ring", "step": steps, **ring, "text": told})
    if closed:
        recorder.write({"kind": "end", "step": steps})
    recorder.close()
    return folder
