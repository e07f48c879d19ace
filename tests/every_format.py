"""The same weights in every format that is read, as the package of each format writes them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import checkpoint_files

Weights: TypeAlias = Mapping[str, Tensor]
FORMATS: dict[str, Callable[[Path, Weights], Path]] = {}


def writer(write: Callable[[Path, Weights], Path]) -> Callable[[Path, Weights], Path]:
    FORMATS[write.__name__] = write
    return write


@writer
def safetensors(folder: Path, weights: Weights) -> Path:
    return checkpoint_files.put(folder, checkpoint_files.safetensors(weights), "x.safetensors")


@writer
def zipped(folder: Path, weights: Weights) -> Path:
    return checkpoint_files.put(folder, checkpoint_files.saved(dict(weights)), "x.pt")


@writer
def before_1_6(folder: Path, weights: Weights) -> Path:
    return checkpoint_files.put(folder, checkpoint_files.legacy(dict(weights)), "x.pt")


@writer
def npz(folder: Path, weights: Weights) -> Path:
    arrays: dict[str, Any] = {name: tensor.numpy() for name, tensor in weights.items()}
    np.savez(folder / "x.npz", **arrays)
    return folder / "x.npz"


@writer
def gguf(folder: Path, weights: Weights) -> Path:
    from gguf import GGUFWriter

    written = GGUFWriter(folder / "x.gguf", "other")
    for name, tensor in weights.items():
        written.add_tensor(name, tensor.numpy())
    written.write_header_to_file()
    written.write_kv_data_to_file()
    written.write_tensors_to_file()
    written.close()
    return folder / "x.gguf"


@writer
def distributed(folder: Path, weights: Weights) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no group of processes
        dcp.save(dict(weights), checkpoint_id=folder / "x")
    return folder / "x"


def onnx_model(weights: Weights) -> Any:
    from onnx import helper, numpy_helper

    arrays = [numpy_helper.from_array(tensor.numpy(), name) for name, tensor in weights.items()]
    return helper.make_model(helper.make_graph([], "g", [], [], arrays), producer_name="x")


@writer
def onnx(folder: Path, weights: Weights) -> Path:
    return checkpoint_files.put(folder, onnx_model(weights).SerializeToString(), "x.onnx")


@writer
def onnx_outside(folder: Path, weights: Weights) -> Path:
    import onnx as package

    options = {"save_as_external_data": True, "location": "x.data", "size_threshold": 0}
    package.save(onnx_model(weights), folder / "x.onnx", **options)
    return folder / "x.onnx"


class Holder(nn.Module):
    """Modules as the names of weights tell, which do nothing."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        inner: dict[str, dict[str, Tensor]] = {}
        for name, tensor in weights.items():
            first, _, rest = name.partition(".")
            if rest:
                inner.setdefault(first, {})[rest] = tensor
            else:
                self.register_buffer(name, tensor)
        for name, below in inner.items():
            self.add_module(name, Holder(below))

    def forward(self, x: Tensor) -> Tensor:
        return x


@writer
def torchscript(folder: Path, weights: Weights) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is deprecated
        torch.jit.trace(Holder(weights), torch.ones(1)).save(str(folder / "x.pt"))
    return folder / "x.pt"


@writer
def zero(folder: Path, weights: Weights) -> Path:
    """As one process of DeepSpeed saves them."""
    folder = folder / "x"
    folder.mkdir()
    shapes = [{name: tensor.shape for name, tensor in weights.items()}]
    flat = torch.cat([tensor.float().flatten() for tensor in weights.values()])
    state = {"partition_count": 1, "single_partition_of_fp32_groups": [flat]}
    module = {name: tensor.bfloat16() for name, tensor in weights.items()}
    model = {"module": module, "buffer_names": [], "param_shapes": shapes, "shared_params": {}}
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    name = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": state}, folder / name)
    return folder


def flax_bytes(tree: Mapping[str, Any]) -> bytes:
    """What flax.serialization.to_bytes writes of arrays nested in mappings."""
    import msgpack

    def array(it: Any) -> Any:
        parts = (it.shape, it.dtype.name, it.tobytes("C"))
        return msgpack.ExtType(1, msgpack.packb(parts, use_bin_type=True))

    return bytes(msgpack.packb(tree, default=array, strict_types=True))


@writer
def flax(folder: Path, weights: Weights) -> Path:
    """Kernels as Flax has them: (in, out)."""
    tree: dict[str, Any] = {}
    for name, tensor in weights.items():
        *outer, last = name.split(".")
        node = tree
        for part in outer:
            node = node.setdefault(part, {})
        is_kernel = last == "weight" and tensor.ndim == 2
        node["kernel" if is_kernel else last] = np.ascontiguousarray(tensor.mT.numpy()) if (
            is_kernel) else tensor.numpy()  # fmt: skip
    return checkpoint_files.put(folder, flax_bytes(tree), "flax_model.msgpack")
