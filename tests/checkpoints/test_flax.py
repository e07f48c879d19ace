"""Flax's MessagePack: arrays where they lie, with PyTorch's names and order of dimensions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import torch

import broken_files
import broken_formats
from broken_files import refused
from checkpoint_files import put
from every_format import flax_bytes
from kappascope.checkpoints.open import open as open_checkpoint
from kappascope.clinic.diagnose import diagnose

RANDOM = np.random.default_rng(51)


def drawn(*shape: int, dtype: str = "float32") -> Any:
    return RANDOM.standard_normal(shape).astype(dtype)


def test_kernels_have_their_outputs_first(tmp_path: Path) -> None:
    dense, conv, line = drawn(6, 4), drawn(3, 5, 2, 7), drawn(3, 2, 7)
    query, out = drawn(8, 2, 3), drawn(2, 3, 8)
    tree = {
        "fc": {"kernel": dense, "bias": drawn(4)},
        "conv": {"kernel": conv},
        "line": {"kernel": line},
        "query": {"kernel": query},
        "out": {"kernel": out},
        "norm": {"scale": drawn(4)},
        "embed": {"embedding": drawn(9, 4)},
    }
    checkpoint = open_checkpoint(put(tmp_path, flax_bytes(tree), "x.msgpack"))
    expected = {
        "fc": dense.T,
        "conv": conv.transpose(3, 2, 0, 1),
        "line": line.transpose(2, 1, 0),
        "query": query.reshape(8, 6).T,
        "out": out.reshape(6, 8).T,
        "norm": tree["norm"]["scale"],
        "embed": tree["embed"]["embedding"],
    }
    for name, array in expected.items():
        assert np.array_equal(checkpoint.read((name, "weight")).numpy(), array), name


def test_biases_of_heads_are_no_matrices(tmp_path: Path) -> None:
    bias = drawn(2, 3)
    tree = {"query": {"kernel": drawn(8, 2, 3), "bias": bias}}
    path = put(tmp_path, flax_bytes(tree), "x.msgpack")
    assert np.array_equal(open_checkpoint(path).read(("query", "bias")).numpy(), bias.ravel())
    assert [row.name for row in diagnose(path, jobs=1).matrices] == ["query.weight"]


def test_the_optimizer_of_a_train_state_is_not_taken_for_weights(tmp_path: Path) -> None:
    params = {"fc": {"kernel": drawn(6, 4)}}
    moments = {"0": {"count": np.zeros((), "int32"), "mu": params, "nu": params}, "1": {}}
    state = {"opt_state": moments, "params": params, "step": 3}
    path = put(tmp_path, flax_bytes(state), "x.msgpack")
    assert [row.name for row in diagnose(path, jobs=1).matrices] == ["params.fc.weight"]


@pytest.mark.parametrize("dtype", ["float16", "float64", "int8", "uint16", "int64", "bool"])
def test_dtypes_are_those_of_numpy(tmp_path: Path, dtype: str) -> None:
    array = drawn(5, 3, dtype=dtype)
    checkpoint = open_checkpoint(put(tmp_path, flax_bytes({"w": array}), "x.msgpack"))
    assert np.array_equal(checkpoint.read(("w",)).numpy(), array)


def test_bfloat16_has_a_name_of_its_own(tmp_path: Path) -> None:
    tensor = torch.randn(3, 4).bfloat16()
    data = tensor.view(torch.int16).numpy().tobytes()
    array = msgpack.ExtType(1, msgpack.packb(((3, 4), "bfloat16", data), use_bin_type=True))
    path = put(tmp_path, msgpack.packb({"w": array}), "x.msgpack")
    assert torch.equal(open_checkpoint(path).read(("w",)), tensor)


def test_arrays_that_flax_cut_are_whole(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(put(tmp_path, broken_formats.flax_seed(), "x.msgpack"))
    whole = torch.arange(24.0).reshape(4, 6)
    assert torch.equal(checkpoint.read(("params", "embed", "weight")), whole)
    assert torch.equal(checkpoint.read(("params", "fc", "weight")), whole.T)
    assert checkpoint.contents["step"] == 7


def test_shards_of_flax_are_one_model(tmp_path: Path) -> None:
    places = {}
    for i in (1, 2):
        name = f"flax_model-0000{i}-of-00002.msgpack"
        put(tmp_path, flax_bytes({"model": {f"fc{i}": {"kernel": drawn(3, 2)}}}), name)
        places[f"model/fc{i}/kernel"] = name
    import json

    index = {"metadata": {"total_size": 48}, "weight_map": places}
    (tmp_path / "flax_model.msgpack.index.json").write_text(json.dumps(index))
    checkpoint = open_checkpoint(tmp_path)
    assert set(checkpoint.tree["model"]) == {"fc1", "fc2"}
    assert checkpoint.faults == ()


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (flax_bytes({"w": drawn(3, 2)})[:-1], "truncated"),
        (flax_bytes({"w": drawn(3, 2)}) + b"\0", "1 bytes too many"),
        (b"\x81\xa1w\xdf\xff\xff\xff\xff", "truncated: 4294967295 values in 0 bytes"),
        (b"\x81\xa1w" + b"\x81\xa1w" * 5000 + b"\xc0", "nested too deep"),
        (b"\x82\xa1w\xc0\xa1w\xc0", "duplicate name 'w'"),
        (b"\x81\xa1w\xc9\xff\xff\xff\xff\x01", "truncated: need"),
        (b"\x81\xdb\xff\xff\xff\xff", "a text of 4294967295 bytes"),
        (b"\x81\xa1w\xc1", "no value begins with byte 193"),
        (b"\x81\xa1w\x01", "without arrays"),
    ],
)
def test_broken_files_are_refused_in_one_line(tmp_path: Path, data: bytes, words: str) -> None:
    refused(put(tmp_path, data, "x.msgpack"), words)


def test_what_an_array_says_is_held_to(tmp_path: Path) -> None:
    def array(*parts: Any) -> Any:
        return msgpack.ExtType(1, msgpack.packb(parts, use_bin_type=True))

    tree = {
        "good": array((2, 2), "float32", bytes(16)),
        "large": array((2**40, 2**40), "float32", bytes(16)),
        "short": array((2, 3), "float32", bytes(16)),
        "objects": array((2,), "object", bytes(16)),
        "negative": array((-2,), "float32", bytes(8)),
        "nothing": msgpack.ExtType(1, b"\xc0"),
        "inner": array({"a": 1}, "float32", bytes(4)),
    }
    checkpoint = open_checkpoint(put(tmp_path, msgpack.packb(tree), "x.msgpack"))
    assert torch.equal(checkpoint.read(("good",)), torch.zeros(2, 2))
    for name in tree.keys() - {"good", "inner"}:
        assert str(checkpoint.contents[name]), name
        assert not hasattr(checkpoint.contents[name], "shape"), name


def test_mutated_files_are_refused_or_read(tmp_path: Path) -> None:
    path = put(tmp_path, broken_formats.flax_seed(), "x.msgpack")
    assert broken_files.examine(path) == 3
    files = broken_formats.flax_files(500, seed=52)
    assert broken_files.sound(broken_files.run("flax", files, path))


def test_flax_itself_writes_the_same(tmp_path: Path) -> None:
    serialization = pytest.importorskip("flax.serialization", reason="flax is not installed")
    tree = {"params": {"fc": {"kernel": drawn(3, 4), "bias": drawn(4)}}}
    assert serialization.to_bytes(tree) == flax_bytes(tree)
