"""What DeepSpeed's ZeRO writes, without DeepSpeed: groups laid flat, filled up, cut by process."""

from __future__ import annotations

import math
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GROUPS = (("emb.weight", "fc.weight"), ("fc.bias", "norm.weight"))
SHAPES = {"emb.weight": (11, 7), "fc.weight": (5, 7), "fc.bias": (5,), "norm.weight": (7,)}


def weights(seed: int = 0) -> dict[str, Tensor]:
    """The parameters of a small model."""
    random = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=random) for name, shape in SHAPES.items()}


def save_zero(folder: Path, stage: int, processes: int = 3, **more: Any) -> Path:
    """Save the weights above as that many processes do."""
    folder.mkdir(exist_ok=True)
    full, frozen = weights(), torch.arange(10.0).reshape(2, 5)
    shapes = [OrderedDict((n, torch.Size(SHAPES[n])) for n in group) for group in GROUPS]
    cuts = cut(frozen.flatten(), processes) if stage == 3 else [frozen] * processes
    for rank in range(processes):
        whole = stage < 3
        module = {name: it.bfloat16() if whole else torch.empty(0) for name, it in full.items()}
        model = {
            "module": {**module, "pos": torch.arange(4.0)},
            "buffer_names": ["pos"],
            "param_shapes": shapes,
            "frozen_param_shapes": {"frozen": torch.Size((2, 5))},
            "frozen_param_fragments": {"frozen": cuts[rank]},
            "shared_params": {"head.weight": "emb.weight"},
            "ds_version": "0.19.8",
        }
        state: dict[str, Any] = {"zero_stage": stage, "partition_count": processes}
        if whole:
            flat = [torch.cat([full[n].flatten() for n in group]) for group in GROUPS]
            state["single_partition_of_fp32_groups"] = [cut(row, processes)[rank] for row in flat]
        else:
            flat = [torch.cat([cut(full[n].flatten(), processes)[rank] for n in group])
                    for group in GROUPS]  # fmt: skip
            state["fp32_flat_groups"] = flat
        state["optimizer_state_dict"] = {"state": {0: {"exp_avg": torch.ones(3)}}}
        each = {"optimizer_state_dict": state | more, "ds_config": {}, "ds_version": "0.19.8"}
        name = f"zero_pp_rank_{rank}_mp_rank_00"
        torch.save(each, folder / f"{name}_optim_states.pt")
        if whole and rank == 0:
            torch.save(model, folder / "mp_rank_00_model_states.pt")
        elif not whole:
            torch.save(model, folder / f"{name}_model_states.pt")
    return folder


def cut(row: Tensor, processes: int) -> list[Tensor]:
    """A row filled up with zeros and cut into equal parts, each a storage of its own."""
    size = math.ceil(len(row) / processes)
    filled = torch.cat([row, torch.zeros(size * processes - len(row))])
    return [part.clone() for part in filled.split(size)]
