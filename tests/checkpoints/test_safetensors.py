"""Headers of safetensors files: the cases A01 to A11 of the fault contract, and odd shapes."""

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

import broken_files
import checkpoint_files
from broken_files import refused
from checkpoint_files import DATA, HEADER, SOUND, TWO, everything, put, raw
from kappascope.checkpoints import open, safetensors
from kappascope.checkpoints.locations import TensorLocation
from kappascope.model.skipped import Reason


def changed(**entry: Any) -> bytes:
    """A sound file but for what its header says of one tensor."""
    return raw({**HEADER, "b": {**HEADER["b"], **entry}}, DATA)


@pytest.mark.parametrize("data", [b"", *(b"\x10" * n for n in range(1, 8)), bytes(8), bytes(80)])
def test_a01_too_short_for_a_header(data: bytes, tmp_path: Path) -> None:
    refused(put(tmp_path, data), "" if len(data) in (0, 80) else "not a safetensors file")


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 101_000_000, 100_000_000, len(SOUND)])
def test_a02_a_header_longer_than_the_file_is_not_allocated(length: int, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(put(tmp_path, raw(HEADER, DATA, length)), str(length)[:6])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


@pytest.mark.parametrize(
    "header",
    [b"{\xff}", b"{", b"{nonsense}", b"[]", b"null", b'{"a":' * 100_000, b'{"a":' + b"[" * 100_000,
     b'{"a": NaN}', b'{"a": Infinity}', b'{"a": 1}', b'{"a": ' + b"9" * 5000 + b"}", b'{"a": []}',
     b'{"\\ud800": {"dtype":"F32","shape":[],"data_offsets":[0,4]}}'],
    ids=lambda header: repr(header[:12]),
)  # fmt: skip
def test_a03_a_header_that_is_no_json_object_of_tensors(header: bytes, tmp_path: Path) -> None:
    refused(put(tmp_path, raw(header, bytes(4))))


def test_a03_brackets_without_end_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors, "_MOST_BRACKETS", 100)
    refused(put(tmp_path, raw(b'{"a": [' + b"[]," * 200 + b"0]}")), "million tensors")


@pytest.mark.parametrize("second", [HEADER["a"], HEADER["b"]], ids=["identical", "different"])
def test_a04_a_name_twice(second: Any, tmp_path: Path) -> None:
    text = f'{{"a": {json.dumps(HEADER["a"])}, "a": {json.dumps(second)}}}'
    refused(put(tmp_path, raw(text.encode(), DATA)), "duplicate tensor name", "'a'")


def test_a04_what_is_no_name_of_a_tensor_is_not_called_one(tmp_path: Path) -> None:
    twice = b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    refused(put(tmp_path, raw(twice, bytes(4))), ": duplicate name 'dtype'")
    index = checkpoint_files.sharded(tmp_path / "x") / "model.safetensors.index.json"
    index.write_text('{"weight_map": {}, "weight_map": {}}')
    refused(index, ": duplicate name 'weight_map'")
    index.write_text('{"weight_map": {"a": "x", "a": "x"}}')
    refused(index, ": duplicate tensor name 'a'")


@pytest.mark.parametrize(
    ("data", "word"),
    [(changed(data_offsets=[12, 24]), "overlaps"), (changed(data_offsets=[20, 32]), "hole"),
     (SOUND + b"PK\3\4", "4 bytes too many after 'b'"), (raw({}, b"x"), "too many")],
)  # fmt: skip
def test_a05_overlap_hole_and_bytes_too_many(data: bytes, word: str, tmp_path: Path) -> None:
    refused(put(tmp_path, data), word)


@pytest.mark.parametrize(
    "offsets",
    [[-4, 8], [16.0, 28.0], ["16", "28"], [28, 16], [16, 2**63], [16, 2**70], [16], [16, 28, 40],
     None, "ab", [True, 28], {}],
)  # fmt: skip
def test_a06_offsets_that_are_none(offsets: Any, tmp_path: Path) -> None:
    refused(put(tmp_path, changed(data_offsets=offsets)), "'b'")


@pytest.mark.parametrize(
    "shape",
    [[4], [3, 2], [], [-3], [3.0], ["3"], [True, 3], 3, None, [4194305, 4194305, 211106198978564],
     [2**63, 2, 0], [2**62, 2**62, 3]],
)  # fmt: skip
def test_a07_a_shape_that_is_not_of_its_bytes(shape: Any, tmp_path: Path) -> None:
    refused(put(tmp_path, changed(shape=shape)), "'b'")


def test_a08_an_unknown_dtype_is_refused_and_one_without_numbers_left_out(tmp_path: Path) -> None:
    for dtype in ("F33", "f32", "", 32, None, [["F32"]]):
        refused(put(tmp_path, changed(dtype=dtype)), "unknown dtype")
    header = {**HEADER, "c": {"dtype": "F4", "shape": [4, 4], "data_offsets": [28, 36]}}
    header["d"] = {"dtype": "F8_E8M0", "shape": [2], "data_offsets": [36, 38]}
    checkpoint = open.open(put(tmp_path, raw(header, DATA + bytes(10))))
    assert "F4" in str(checkpoint.contents["c"])
    assert checkpoint.read(("d",)).dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": None}, {"a": {}}, [], "text", False])
def test_a09_metadata_that_is_no_text(metadata: Any, tmp_path: Path) -> None:
    refused(put(tmp_path, checkpoint_files.described(metadata)), "__metadata__")


def test_a09_metadata_may_be_null(tmp_path: Path) -> None:
    """The format's own library takes it for none, and MLX writes it where it is given none."""
    checkpoint = open.open(put(tmp_path, checkpoint_files.described(None)))
    assert torch.equal(checkpoint.read(("w",)), torch.eye(2))


def test_a09_much_metadata_is_read_over(tmp_path: Path) -> None:
    path = put(tmp_path, checkpoint_files.described({"text": "x" * 5_000_000}))
    assert [*open.open(path).contents] == ["w"]


@pytest.mark.parametrize("cut", [*range(1, len(SOUND), len(SOUND) // 50)])
def test_a10_a_truncated_file(cut: int, tmp_path: Path) -> None:
    line = refused(put(tmp_path, SOUND[:cut]), "truncated: need", f"have {cut}")
    if cut > 8 + len(json.dumps(HEADER)):
        assert f"need {len(SOUND)}" in line


def test_a11_100_000_tensors(tmp_path: Path) -> None:
    header = {
        f"layers.{i}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(100_000)
    }
    checkpoint = open.open(put(tmp_path, raw(header, bytes(99_999) + b"\7")))
    assert len(checkpoint.tree) == 100_000
    assert checkpoint.read(("layers.99999",)).item() == 7


def test_more_tensors_than_can_be_examined_are_refused_in_one_line(tmp_path: Path) -> None:
    header = {
        f"layers.{i}.bias": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        for i in range(300_000)
    }
    refused(put(tmp_path, raw(header), "x.safetensors"), "300000 tensors, more than 250000")


@pytest.mark.parametrize(
    "shape", [[2**63, 0], [0, 2**63], [2**64, 0], [2**62, 4, 0], [0, 2**62, 2**62], [0] * 70]
)
def test_a_shape_that_overflows_but_for_a_zero_costs_its_tensor_alone(
    tmp_path: Path, shape: list[int]
) -> None:
    empty = {"dtype": "F32", "shape": shape, "data_offsets": [len(DATA), len(DATA)]}
    checkpoint = open.open(put(tmp_path, raw({**HEADER, "empty": empty}, DATA)))
    assert everything(checkpoint).keys() == TWO.keys()
    assert isinstance(checkpoint.contents["empty"], Reason)


def test_a_million_sizes_take_no_time(tmp_path: Path) -> None:
    empty = {"dtype": "F32", "shape": [2**63] * 10**6 + [0], "data_offsets": [0, 0]}
    checkpoint = open.open(put(tmp_path, raw({"empty": empty})))
    assert str(checkpoint.contents["empty"]) == "1000001 dimensions, more than 64"


def test_leaves_are_pieces_of_their_files(tmp_path: Path) -> None:
    leaf = open.open(put(tmp_path, SOUND)).tree["b"]
    assert isinstance(leaf, TensorLocation)
    assert (leaf.shape, leaf.stride, leaf.storage.size) == ((3,), (1,), 12)


def test_mutated_safetensors_are_refused_or_read(tmp_path: Path) -> None:
    files = broken_files.tensor_files(2000, seed=11)
    assert broken_files.sound(broken_files.run("safetensors", files, tmp_path / "x.safetensors"))
