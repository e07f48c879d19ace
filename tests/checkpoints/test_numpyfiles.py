"""NumPy's files: arrays as NumPy wrote them, pickles left alone, headers that lie refused."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

import broken_files
import broken_formats
from broken_files import refused
from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.locations import CheckpointFile, TensorLocation
from kappascope.checkpoints.numpyfiles import read_npy, read_npz
from kappascope.checkpoints.open import open as open_checkpoint
from kappascope.clinic.diagnose import diagnose
from kappascope.model.skipped import Reason


@settings(max_examples=50, deadline=None)
@given(
    array=arrays.arrays(
        st.sampled_from([np.float16, np.float32, np.float64, np.int8, np.int64, np.bool_]),
        arrays.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=4),
        elements=st.integers(0, 1),
    ),
    fortran=st.booleans(),
)
def test_an_array_comes_back_as_it_was(
    tmp_path_factory: Any, array: np.ndarray[Any, Any], fortran: bool
) -> None:
    path = tmp_path_factory.mktemp("array") / "w.npy"
    array = np.asfortranarray(array) if fortran else array
    np.save(path, array)
    location = read_npy(CheckpointFile.at(path)).tree["w"]
    assert isinstance(location, TensorLocation)
    assert torch.equal(location.read(), torch.from_numpy(array))


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_archive_is_its_arrays_by_name(tmp_path: Path, save: Any) -> None:
    kept = {"fc.weight": np.random.default_rng(0).normal(size=(6, 4)), "fc.bias": np.ones(6)}
    save(tmp_path / "x.npz", **kept)
    checkpoint = open_checkpoint(tmp_path / "x.npz")
    assert checkpoint.format == "NumPy"
    for name, array in kept.items():
        assert torch.equal(checkpoint.read((name,)), torch.from_numpy(array))
    torch.save({name: torch.from_numpy(array) for name, array in kept.items()}, tmp_path / "x.pt")
    (row,), (other,) = (diagnose(tmp_path / f"x.{end}").matrices for end in ("npz", "pt"))
    assert row == other


def test_numbers_may_begin_between_two_of_their_size(tmp_path: Path) -> None:
    array = np.arange(12, dtype="<f4").reshape(3, 4)
    header = b"{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }"
    npy = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + array.tobytes()
    assert (10 + len(header)) % 4  # as MLX writes
    (tmp_path / "x.npy").write_bytes(npy)
    assert np.array_equal(open_checkpoint(tmp_path / "x.npy").read(("x",)).numpy(), array)
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", npy)
    assert np.array_equal(open_checkpoint(tmp_path / "x.npz").read(("x",)).numpy(), array)


def test_arrays_of_objects_are_pickles_and_cost_only_themselves(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", good=np.eye(2), bad=np.array([{}, None], dtype=object))
    tree = read_npz(CheckpointFile.at(tmp_path / "x.npz")).tree
    assert str(tree["bad"]) == "an array of objects, which are pickled"
    assert torch.equal(tree["good"].read(), torch.eye(2, dtype=torch.float64))


@pytest.mark.parametrize("dtype", [">f4", "<U3", "<M8[s]", [("a", "<f4")]])
def test_what_is_no_little_endian_number_says_so(tmp_path: Path, dtype: Any) -> None:
    np.save(tmp_path / "x.npy", np.zeros(3, dtype=dtype))
    assert isinstance(read_npy(CheckpointFile.at(tmp_path / "x.npy")).tree["x"], Reason)


HEADER = "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), }"
LIES = {
    "a call": "__import__('os').system('touch executed')",
    "no dictionary": "[1, 2]",
    "no shape": "{'descr': '<f4', 'fortran_order': False}",
    "a negative size": HEADER.replace("(2, 2)", "(-2, 2)"),
    "a size that is no number": HEADER.replace("(2, 2)", "('2', 2)"),
    "an order that is no truth": HEADER.replace("False", "7"),
    "deep brackets": "(" * 5000,
    "blanks without an end": "{'descr': 1" + " " * 60_000 + "x",
}


def npy(header: str, data: bytes = bytes(16), version: int = 1) -> bytes:
    wide = 2 if version == 1 else 4
    text = header.encode() + b" " * (-(len(header) + 9 + wide) % 64) + b"\n"
    length = len(text).to_bytes(wide, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text + data


@pytest.mark.parametrize("lie", sorted(LIES))
def test_a_header_that_lies_is_refused(tmp_path: Path, lie: str) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(npy(LIES[lie]))
    refused(path)
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    "shape", ["(4, 4)", "(9223372036854775807, 2)", "(4294967296, 4294967296)"]
)
def test_more_numbers_than_there_are_cost_the_array(tmp_path: Path, shape: str) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(npy(HEADER.replace("(2, 2)", shape)))
    assert isinstance(read_npy(CheckpointFile.at(path)).tree["x"], Reason)


def test_versions_and_cuts(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    for version in (1, 2, 3):
        path.write_bytes(npy(HEADER, version=version))
        assert read_npy(CheckpointFile.at(path)).tree["x"].read().tolist() == [[0, 0], [0, 0]]
    path.write_bytes(npy(HEADER, version=9))
    with pytest.raises(Malformed, match="version 9"):
        read_npy(CheckpointFile.at(path))
    whole = npy(HEADER)
    for length in range(6, 100, 5):
        path.write_bytes(whole[:length])
        refused(path)


def test_mutated_arrays_are_refused_or_read(tmp_path: Path) -> None:
    """Nothing is compiled meanwhile: a header is matched, not evaluated."""
    files = broken_formats.numpy_files(400, seed=22)
    assert broken_files.sound(broken_files.run("npz", files, tmp_path / "x.npz"))
