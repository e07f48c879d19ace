"""What torchao writes, without torchao: the wrapper that torch.save sees, and its safetensors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import checkpoint_files

RANDOM = torch.Generator().manual_seed(31)


class Int8Tensor(Tensor):
    """What torch.save sees of a subclass: a wrapper with attributes, and the name of its class."""

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], **attributes: Any) -> Int8Tensor:
        it = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)  # type: ignore
        vars(it).update(attributes)
        return it  # type: ignore[no-any-return]

    def __init__(self, *given: Any, **attributes: Any) -> None:
        pass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0]


def saved(folder: Path, name: str, shape: tuple[int, ...], **parts: Any) -> Path:
    """A PyTorch file with a bias and one weight of a class of torchao."""
    kind = type(name, (Int8Tensor,), {"__module__": "torchao.quantization"})
    module = ModuleType("torchao.quantization")
    setattr(module, name, kind)
    fakes = {"torchao": ModuleType("torchao"), "torchao.quantization": module}
    with mock.patch.dict(sys.modules, fakes):
        torch.save({"fc.weight": kind(shape, **parts), "fc.bias": torch.ones(2)}, folder / "x.pt")
    return folder / "x.pt"


def flat(folder: Path, name: str, parts: dict[str, Tensor], **facts: Any) -> Path:
    """The same as torchao puts it into safetensors."""
    tensors = {f"fc._weight_{end}": part for end, part in parts.items()}
    metadata = {
        "tensor_names": json.dumps(["fc.weight", "fc.bias"]),
        "fc.weight": json.dumps({"_type": name, "_data": facts}),
        "fc.bias": json.dumps({"_type": "Tensor"}),
    }
    header, data = checkpoint_files.entries({**tensors, "fc.bias": torch.ones(2)})
    path = folder / "x.safetensors"
    path.write_bytes(checkpoint_files.raw({"__metadata__": metadata, **header}, data))
    return path


def eight_bits() -> tuple[dict[str, Tensor], Tensor]:
    """Integers in blocks of 1 x 8 with zero points, and what they stand for."""
    parts = {
        "qdata": torch.randint(-128, 128, (6, 24), generator=RANDOM).char(),
        "scale": torch.rand(6, 3, generator=RANDOM).bfloat16(),
        "zero_point": torch.randint(-9, 9, (6, 3), generator=RANDOM).char(),
    }
    expected = torch.empty(6, 24)
    for i in range(6):
        for j in range(24):
            code = int(parts["qdata"][i, j]) - int(parts["zero_point"][i, j // 8])
            expected[i, j] = code * float(parts["scale"][i, j // 8])
    return parts, expected
