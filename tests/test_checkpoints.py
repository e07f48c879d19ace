"""Checkpoints nobody vouches for: the cases A01 to A35 of the fault contract, and the real ones."""

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mutants
import specimens
from kappascope import checkpoints
from kappascope.checkpoints import Checkpoint, Unreadable
from kappascope.files import archives, folders, headers, pieces, trees
from kappascope.files.formats import quoted
from kappascope.files.pieces import Piece
from kappascope.matrices import matrices
from kappascope.refusals import Refusal
from specimens import archive, entries, legacy, raw, saved

TWO = {"a": torch.eye(2), "b": torch.ones(3)}
HEADER, DATA = entries(TWO)
SOUND = raw(HEADER, DATA)


def put(folder: Path, data: bytes, name: str = "x.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data)
    return folder / name


def refused(path: Path, *words: str) -> str:
    """The line with which a path is refused, once it has these words and keeps the contract."""
    with pytest.raises(Refusal) as refusal:
        mutants.examine(path)
    code, given, wrong, advice = refusal.value.args
    assert code == 2
    assert given
    assert wrong
    assert advice
    line = str(refusal.value)
    assert line.isprintable()
    assert len(line.replace(str(path), "")) < 200
    for word in words:
        assert word in line
    return line


def everything(
    checkpoint: Checkpoint, node: Any = None, at: tuple[str, ...] = ()
) -> dict[str, Tensor]:
    """All tensors by the path to them."""
    found: dict[str, Tensor] = {}
    for key, value in (checkpoint.contents if node is None else node).items():
        if isinstance(value, dict):
            found |= everything(checkpoint, value, (*at, key))
        elif isinstance(value, Tensor):
            found[".".join((*at, key))] = checkpoint.read((*at, key))
    return found


def changed(**entry: Any) -> bytes:
    """A sound file but for what its header says of one tensor."""
    return raw({**HEADER, "b": {**HEADER["b"], **entry}}, DATA)


# 4.1 safetensors


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
    monkeypatch.setattr(headers, "_MOST_BRACKETS", 100)
    refused(put(tmp_path, raw(b'{"a": [' + b"[]," * 200 + b"0]}")), "million tensors")


@pytest.mark.parametrize("second", [HEADER["a"], HEADER["b"]], ids=["identical", "different"])
def test_a04_a_name_twice(second: Any, tmp_path: Path) -> None:
    text = f'{{"a": {json.dumps(HEADER["a"])}, "a": {json.dumps(second)}}}'
    refused(put(tmp_path, raw(text.encode(), DATA)), "duplicate tensor name", "'a'")


def test_a04_what_is_no_name_of_a_tensor_is_not_called_one(tmp_path: Path) -> None:
    twice = b'{"a": {"dtype": "F32", "dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    refused(put(tmp_path, raw(twice, bytes(4))), ": duplicate name 'dtype'")
    index = specimens.sharded(tmp_path / "x") / "model.safetensors.index.json"
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
    checkpoint = checkpoints.open(put(tmp_path, raw(header, DATA + bytes(10))))
    assert "F4" in checkpoint.contents["c"].reason
    assert checkpoint.read(("d",)).dtype == torch.float8_e8m0fnu


@pytest.mark.parametrize("metadata", [{"a": 1}, {"a": None}, {"a": {}}, [], "text", None])
def test_a09_metadata_that_is_no_text(metadata: Any, tmp_path: Path) -> None:
    refused(put(tmp_path, specimens.described(metadata)), "__metadata__")


def test_a09_much_metadata_is_read_over(tmp_path: Path) -> None:
    path = put(tmp_path, specimens.described({"text": "x" * 5_000_000}))
    assert [*checkpoints.open(path).contents] == ["w"]


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
    checkpoint = checkpoints.open(put(tmp_path, raw(header, bytes(99_999) + b"\7")))
    assert len(checkpoint.tree) == 100_000
    assert checkpoint.read(("layers.99999",)).item() == 7


NOT_SAFETENSORS = {
    "Git LFS": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
    "HTML": b"<!DOCTYPE html><html>404</html>",
    "XML": b"<?xml version='1.0'?><Error/>",
    "gzip": b"\x1f\x8b\x08" + bytes(40),
    "zip archive": saved(TWO),
    "pickle": pickle.dumps({"size": 3}, 2),
    "GGUF": b"GGUF\3\0\0\0" + bytes(60),
    "ONNX": b"\x08\x08\x12\x07pytorch\x1a\x042.13:\x02" + bytes(9),
    "HDF5": b"\x89HDF\r\n\x1a\n" + bytes(40),
    "NumPy": b"\x93NUMPY\1\0" + bytes(40),
    "tar": bytes(257) + b"ustar\x0000" + bytes(300),
    "TensorFlow Lite": b"\x1c\0\0\0TFL3" + bytes(40),
    "JSON": b'{"error": "Entry not found"}',
    "zeros": bytes(1000),
    "PDF": b"%PDF-1.7\n",
    "image": b"\x89PNG\r\n",
}


@pytest.mark.parametrize("what", NOT_SAFETENSORS)
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x"])
def test_a12_what_a_file_really_is(what: str, name: str, tmp_path: Path) -> None:
    if what == "zip archive" and not name.endswith("safetensors"):
        assert checkpoints.open(put(tmp_path, NOT_SAFETENSORS[what], name)).format == "PyTorch"
    else:
        refused(put(tmp_path, NOT_SAFETENSORS[what], name), what)


# 4.2 .pt, .bin, .ckpt


def test_a13_and_a22_hostile_pickles_are_refused_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    mutants.warm_up()
    tally = mutants.run("hostile", specimens.hostile(400, seed=5), tmp_path / "x.pt")
    assert (tally.count, tally.refused, tally.crashes, tally.executions) == (400, 400, [], [])
    assert [path.name for path in tmp_path.iterdir()] == ["x.pt"]


def test_a13_the_global_is_named(tmp_path: Path) -> None:
    hostile = b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x04true\x85R."
    for data in (
        hostile,
        archive(hostile),
        archive(b"cposix\nsystem\n(S'true'\ntR."),
        b"cposix\nsystem\n.",
    ):
        refused(put(tmp_path, data, "x.pt"), "asks for 'posix.system'")


def test_a14_a_whole_module_gives_its_tensors_and_names_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2))
    checkpoint = checkpoints.open(put(tmp_path, saved(model), "x.pt"))
    found = everything(checkpoint)
    state = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    named = {fault.name for fault in checkpoint.faults}
    assert "torch.nn.modules.container.Sequential" in named
    assert "state_dict" in checkpoint.faults[0].reason


def test_a14_objects_beside_the_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    checkpoint = checkpoints.open(specimens.objects_beside_the_tensors(tmp_path))
    beside = checkpoint.contents["hyper_parameters"]
    name = "argparse.Namespace"
    assert beside["args"] == Unreadable(f"object of class {name}", foreign=name)
    assert isinstance(beside["score"], Unreadable)
    assert "argparse.Namespace" in checkpoint.notes[0]
    assert len(everything(checkpoint)) == 4


def test_a14_an_object_without_tensors_is_refused_by_name(tmp_path: Path) -> None:
    data = pickle.dumps(__import__("argparse").Namespace(lr=1), 2)
    refused(put(tmp_path, archive(data), "x.bin"), "no tensors", "argparse.Namespace", "state_dict")


def test_a14_a_dict_of_a_foreign_class_is_looked_into(tmp_path: Path) -> None:
    tensors = specimens.members(saved({"w": torch.eye(2)}))
    pickled = tensors["data.pkl"].replace(b"\x80\x02}", b"\x80\x02ceasydict\nEasyDict\n)\x81")
    checkpoint = checkpoints.open(put(tmp_path, archive(pickled, {"0": tensors["data/0"]}), "x.pt"))
    assert torch.equal(checkpoint.read(("w",)), torch.eye(2))
    assert checkpoint.faults[0].name == "easydict.EasyDict"


def test_a15_torchscript_tar_and_plain_pickles(tmp_path: Path) -> None:
    script = archive(b"\x80\x02}.", members={"code/__torch__.py": b"x", "constants.pkl": b")."})
    refused(put(tmp_path, script, "x.pt"), "TorchScript")
    refused(put(tmp_path, NOT_SAFETENSORS["tar"], "x.pt"), "tar")
    refused(put(tmp_path, pickle.dumps({"a": 1}, 2), "x.pt"), "torch.save did not write")
    checkpoint = checkpoints.open(put(tmp_path, legacy(TWO), "x.pt"))
    assert all(torch.equal(found, TWO[name]) for name, found in everything(checkpoint).items())


@pytest.mark.parametrize("write", [saved, legacy], ids=["zip", "plain"])
def test_a16_a_truncated_file(write: Callable[[Any], bytes], tmp_path: Path) -> None:
    data = write(TWO)
    for cut in range(1, len(data), max(1, len(data) // 50)):
        refused(put(tmp_path, data[:cut], "x.pt"))
    refused(put(tmp_path, b"", "x.pt"), "is empty")


def test_a16_flipped_bits_in_the_numbers_are_noticed(tmp_path: Path) -> None:
    data = bytearray(saved({"w": torch.full((4, 4), 7.0)}))
    at = data.index(torch.full((4, 4), 7.0).numpy().tobytes())
    data[at + 5] ^= 4
    refused(put(tmp_path, bytes(data), "x.pt"), "checksum")


def test_a16_a_storage_that_is_missing_or_of_another_size_costs_its_tensor_only(
    tmp_path: Path,
) -> None:
    members = specimens.members(saved(TWO))
    storages = {"0": members["data/0"], "1": members["data/1"]}
    for other, word in (
        ({}, "missing"),
        ({"0": b"short"}, "5 bytes"),
        ({"0": bytes(99)}, "99 bytes"),
    ):
        data = archive(members["data.pkl"], {"1": storages["1"], **other})
        checkpoint = checkpoints.open(put(tmp_path, data, "x.pt"))
        assert word in checkpoint.contents["a"].reason
        assert torch.equal(checkpoint.read(("b",)), TWO["b"])


def test_a17_zip_archives_made_to_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_BOMB_SIZE", 1 << 20)
    path = tmp_path / "x.pt"
    bomb = {"data.pkl": specimens.members(saved(TWO))["data.pkl"], "data/0": bytes(1 << 22)}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, data in bomb.items():
            file.writestr(f"archive/{name}", data)
    refused(path, "zip bomb")
    inner = {"archive/x.pt": saved(TWO)}
    for name, word in (
        ("../x", "'../x'"),
        ("/x", "'/x'"),
        ("a/../../b", "'a/../../b'"),
        ("a\\b", "a\\\\b"),
    ):
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("archive/data.pkl", b"N.")
            file.writestr(zipfile.ZipInfo(name), b"")
        refused(path, word)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/x.pt", inner["archive/x.pt"])
    refused(path, "zip archive of files")
    assert {path.name for path in tmp_path.iterdir()} == {"x.pt"}


def test_a17_too_many_members(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "_MOST_MEMBERS", 4)
    refused(put(tmp_path, saved(TWO), "x.pt"), "members")
    monkeypatch.setattr(archives, "_LONGEST_DIRECTORY", 100)
    refused(put(tmp_path, saved(TWO), "x.pt"), "directory")


def _flagged(data: bytes, bits: int) -> bytes:
    """A zip archive with flags set in every header."""
    new = bytearray(data)
    for sign, place in ((b"PK\3\4", 6), (b"PK\1\2", 8)):
        at = -1
        while (at := data.find(sign, at + 1)) >= 0:
            new[at + place] |= bits
    return bytes(new)


def test_a17_and_a19_encrypted_archives_and_wrong_directories(tmp_path: Path) -> None:
    data = saved(TWO)
    refused(put(tmp_path, _flagged(data, 1), "x.pt"), "encrypted")
    refused(put(tmp_path, data.replace(b"PK\1\2", b"PK\1\3"), "x.pt"), "damaged zip archive")
    first = data.index(b"data/1")
    swapped = data[:first] + b"data/9" + data[first + 6 :]
    refused(put(tmp_path, swapped, "x.pt"), "data/1' is not where it should be")
    twice = archive(b"N.", members={})
    refused(put(tmp_path, twice + twice, "x.pt"))


def test_a18_sizes_far_beyond_the_file(tmp_path: Path) -> None:
    def tensor(
        count: int, shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0
    ) -> bytes:
        number = pickle.dumps
        kind = b"ctorch\nFloatStorage\n"
        parts = [number(value, 2)[2:-1] for value in (offset, shape, stride)]
        pid = (
            b"(X\7\0\0\0storage"
            + kind
            + b"X\1\0\0\0000X\3\0\0\0cpu"
            + number(count, 2)[2:-1]
            + b"tQ"
        )
        view = b"ctorch._utils\n_rebuild_tensor_v2\n(" + pid + b"".join(parts) + b"\x89}tR"
        return b"\x80\x02}X\1\0\0\0w" + view + b"s."

    cases = [
        (4, (10**6, 10**6), (0, 0)),
        (4, (2**62, 2**62), (0, 0)),
        (4, (5,), (1,)),
        (4, (2,), (2**62,)),
        (4, (2**70,), (0,)),
        (4, (-1,), (1,)),
        (4, (2, 2), (1,)),
        (4, (1,) * 65, (1,) * 65),
        (2**62, (2,), (1,)),
    ]
    for case in cases:
        path = put(tmp_path, archive(tensor(*case), {"0": bytes(16)}), "x.pt")
        assert isinstance(checkpoints.open(path).contents["w"], Unreadable), case
    good = put(tmp_path, archive(tensor(4, (3, 2), (0, 1), 1), {"0": bytes(16)}), "x.pt")
    assert checkpoints.open(good).read(("w",)).shape == (3, 2)
    array = b"cbuiltins\nbytearray\n(J\xff\xff\xff\x7ftR."
    refused(put(tmp_path, archive(array), "x.pt"), "no tensors")
    refused(put(tmp_path, archive(b"X\xff\xff\xff\xffa."), "x.pt"), "truncated")


def _quantized(tensor: Tensor) -> Tensor:
    with warnings.catch_warnings(action="ignore"):  # to be removed from torch, but not from files
        return torch.quantize_per_tensor(tensor, 0.1, 0, torch.qint8)


def test_a20_tensors_without_numbers_side_by_side(tmp_path: Path) -> None:
    whole = torch.eye(3)
    value = {
        "sparse": whole.to_sparse(),
        "quantized": _quantized(whole),
        "meta": torch.empty(2, 2, device="meta"),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "complex": torch.ones(2, dtype=torch.complex64),
        "w": whole,
    }
    contents = checkpoints.open(put(tmp_path, saved(value), "x.pt")).contents
    reasons = {k: v.reason for k, v in contents.items() if isinstance(v, Unreadable)}
    assert "torch.sparse_coo" in reasons["sparse"]
    assert "quantized" in reasons["quantized"]
    assert "meta" in reasons["meta"]
    assert "conjugate" in reasons["conjugate"]
    assert [*contents][-2:] == ["complex", "w"]
    assert contents["complex"].dtype == torch.complex64


class Marked(Tensor):
    """A tensor of a class of its own."""


def test_a20_a_tensor_of_another_class_is_named(tmp_path: Path) -> None:
    value = {"w": torch.eye(2).as_subclass(Marked), "v": torch.eye(2)}
    contents = checkpoints.open(put(tmp_path, saved(value), "x.pt")).contents
    assert "Marked" in contents["w"].reason
    attributed = torch.eye(2)
    attributed.note = "kept in Python"  # type: ignore[attr-defined]
    checkpoint = checkpoints.open(put(tmp_path, saved({"w": attributed}), "x.pt"))
    assert torch.equal(checkpoint.read(("w",)), torch.eye(2))


@pytest.mark.parametrize("name", specimens.BENIGN)
def test_a11_a21_a25_a_sound_layout_is_accepted(name: str, tmp_path: Path) -> None:
    layout, count = specimens.BENIGN[name]
    path = layout(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert mutants.examine(path) == count
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a21_the_numbers_are_those_that_were_saved(tmp_path: Path) -> None:
    torch.manual_seed(3)
    state = {
        str(dtype): (100 * torch.randn(5, 7)).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int8)
    }
    state["turned"] = torch.randn(4, 6).T
    state["part"] = torch.randn(6, 6)[1:4, ::2]
    state["scalar"] = torch.tensor(3.5)
    state["empty"] = torch.ones(0, 3)
    for write in (saved, legacy, lambda value: specimens.deflated(saved(value))):
        found = everything(checkpoints.open(put(tmp_path, write(state), "x.pt")))
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor)
            assert found[name].stride() == tensor.stride()
            assert found[name].dtype == tensor.dtype


def test_a21_tied_weights_share_a_meta_storage(tmp_path: Path) -> None:
    contents = checkpoints.open(specimens.tied_weights(tmp_path)).contents
    embed, head = contents["embed.weight"], contents["head.weight"]
    assert embed.is_meta
    assert embed.untyped_storage()._cdata == head.untyped_storage()._cdata
    other = checkpoints.open(put(tmp_path, SOUND)).contents
    assert other["a"].untyped_storage()._cdata != other["b"].untyped_storage()._cdata


def test_a21_optimizer_state_is_where_it_was(tmp_path: Path) -> None:
    checkpoint = checkpoints.open(specimens.with_an_optimizer(tmp_path))
    assert "param_groups" in checkpoint.contents["optimizer"]
    read = {key: checkpoint.read(("model", key)) for key in checkpoint.contents["model"]}
    assert [name for name, _ in matrices(read)] == ["0.weight", "2.weight"]


# 4.3 Folders and shards

BAD_NAMES = ["../x", "/etc/hostname", "a/../../b", "..\\x", "C:\\x", "~", "a\0b", "x" * 5000, ""]
BAD_NAMES += ["..", 3, None, "a\nb", "\ud800", "sub/x.safetensors"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:20])
def test_a23_a_shard_name_that_is_no_plain_file_name(name: Any, tmp_path: Path) -> None:
    specimens.sharded(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    places = json.loads(index.read_text())["weight_map"] | {"fc.bias": name}
    index.write_text(json.dumps({"weight_map": places}))
    opened: list[str] = []
    real = os.open

    def spy(path: Any, *more: Any, **options: Any) -> int:
        opened.append(str(path))
        return real(path, *more, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", spy)
        refused(tmp_path, "shard name is not a plain file name")
    assert {Path(path).name for path in opened} <= {index.name}


def test_a24_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    secret = put(tmp_path / "elsewhere", SOUND)
    folder = specimens.sharded(tmp_path / "model")
    shard = folder / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to(secret)
    refused(folder, "link out of the folder")
    (tmp_path / "single").mkdir()
    (tmp_path / "single" / "model.safetensors").symlink_to(secret)
    refused(tmp_path / "single", "link out of the folder")
    (tmp_path / "circle.pt").symlink_to("circle.pt")
    refused(tmp_path / "circle.pt")
    (tmp_path / "single" / "model.safetensors").unlink()
    (tmp_path / "single" / "model.safetensors").symlink_to("model.safetensors")
    refused(tmp_path / "single")


def test_a24_a_shard_that_is_a_circle_of_links_is_named(tmp_path: Path) -> None:
    shard = specimens.sharded(tmp_path) / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to(shard.name)
    (fault,) = checkpoints.open(tmp_path).faults
    assert fault.name == shard.name and "symbolic links" in fault.reason


def _with_shard(folder: Path, data: bytes | None) -> Checkpoint:
    shard = specimens.sharded(folder) / "model-00002-of-00003.safetensors"
    if data is None:
        shard.unlink()
    else:
        shard.write_bytes(data)
    return checkpoints.open(folder)


@pytest.mark.parametrize(
    ("data", "word"),
    [(None, "No such file"), (b"", "empty"), (SOUND[:-1], "truncated"), (saved(TWO), "zip"),
     (SOUND, "where the index has it")],
    ids=["missing", "empty", "cut", "zip", "another"],
)  # fmt: skip
def test_a26_a_shard_that_cannot_be_read_is_named_and_the_rest_is_there(
    data: bytes | None, word: str, tmp_path: Path
) -> None:
    checkpoint = _with_shard(tmp_path, data)
    assert {"embed.weight", "fc.bias"} <= everything(checkpoint).keys()
    assert any(word in fault.reason for fault in checkpoint.faults)
    assert any("00002" in fault.name + fault.reason for fault in checkpoint.faults)


def test_a26_a_folder_without_a_single_shard_is_refused(tmp_path: Path) -> None:
    for shard in specimens.sharded(tmp_path).glob("*.safetensors"):
        shard.unlink()
    refused(tmp_path, "no shard can be read")


def test_a26_shards_without_an_index_are_counted(tmp_path: Path) -> None:
    folder = specimens.shards_without_an_index(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    checkpoint = checkpoints.open(folder)
    assert [fault.name for fault in checkpoint.faults] == ["model-00002-of-00003.safetensors"]


@pytest.mark.parametrize(
    "index", [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"\xff",
              b"[" * 200_000, b'{"weight_map": {"a": "x", "a": "y"}}']
)  # fmt: skip
def test_a27_an_index_that_is_none(index: bytes, tmp_path: Path) -> None:
    (specimens.sharded(tmp_path) / "model.safetensors.index.json").write_bytes(index)
    refused(tmp_path)


def test_a27_an_index_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    with (specimens.sharded(tmp_path) / "model.safetensors.index.json").open("r+b") as file:
        file.truncate(1 << 30)
    refused(tmp_path, "index of 1073741824 bytes")


def test_a28_folders_without_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(tmp_path, "no checkpoint")
    refused(put(tmp_path, b"{}", "tokenizer.json").parent, "no checkpoint")
    refused(tmp_path / "nowhere", "No such file")
    refused(tmp_path / "tokenizer.json" / "x", "Not a directory")
    refused(Path("a\0b"))
    os.mkfifo(tmp_path / "pipe.pt")
    refused(tmp_path / "pipe.pt", "not a regular file")
    refused(Path("/dev/null"), "not a regular file")
    path = put(tmp_path, SOUND)

    def denied(*_: Any, **__: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", denied)  # root may read everything
    refused(path, "Permission denied")


def test_a28_other_folders_are_said_to_be_what_they_are(tmp_path: Path) -> None:
    put(tmp_path / "dcp", b"x", "__0_0.distcp")
    refused(tmp_path / "dcp", "distributed checkpoint")
    put(tmp_path / "gguf", b"GGUF", "model.gguf")
    refused(tmp_path / "gguf", "model.gguf")
    put(tmp_path / "pipe" / "unet", SOUND, "diffusion_pytorch_model.safetensors")
    put(tmp_path / "pipe" / "vae", SOUND, "diffusion_pytorch_model.safetensors")
    refused(tmp_path / "pipe", "unet, vae")
    put(tmp_path / "two", SOUND, "a.safetensors")
    put(tmp_path / "two", SOUND, "b.safetensors")
    refused(tmp_path / "two", "several checkpoints: a.safetensors, b.safetensors")


def test_a29_of_two_formats_one_is_read_and_it_is_said(tmp_path: Path) -> None:
    checkpoint = checkpoints.open(specimens.two_formats(tmp_path))
    assert "other" not in checkpoint.contents
    assert checkpoint.notes == ("read model.safetensors, left aside pytorch_model.bin",)
    assert checkpoint.config == {"hidden_size": 4}


def test_a29_of_shards_those_are_left_aside_that_the_index_does_not_list(tmp_path: Path) -> None:
    folder = specimens.sharded(tmp_path)
    assert not checkpoints.open(folder).notes
    more = put(folder, SOUND, "model-00004-of-00004.safetensors")
    aside = f"read model.safetensors.index.json, left aside {more.name}"
    assert checkpoints.open(folder).notes == (aside,)


@pytest.mark.parametrize(
    ("index", "shard"),
    [
        ("diffusion_pytorch_model.safetensors.index.fp16.json",
         "diffusion_pytorch_model.fp16-00001-of-00001.safetensors"),
        ("model.safetensors.index.fp16.json", "model-00001-of-00001.fp16.safetensors"),
        ("model.safetensors.index.json", "weights.safetensors"),
    ],
)  # fmt: skip
def test_a29_what_an_index_lists_is_not_left_aside(index: str, shard: str, tmp_path: Path) -> None:
    put(tmp_path, SOUND, shard)
    put(tmp_path, json.dumps({"weight_map": {"a": shard, "b": shard}}).encode(), index)
    for path in (tmp_path, tmp_path / index):
        assert checkpoints.open(path).notes == ()
    assert len(checkpoints.open(tmp_path).contents) == 2
    assert bool(checkpoints.open(tmp_path / shard).notes) == ("-of-" in shard)


def test_a29_an_adapter_is_said_to_be_one(tmp_path: Path) -> None:
    assert "adapter" in checkpoints.open(specimens.an_adapter(tmp_path)).notes[0]


# 4.4 GGUF and ONNX: known and refused


@pytest.mark.parametrize("name", ["model.gguf", "model.bin", "model.onnx", "model.safetensors"])
def test_a31_to_a35_gguf_and_onnx_are_recognised_and_refused(name: str, tmp_path: Path) -> None:
    huge = b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63) + bytes(64)
    refused(put(tmp_path, huge, name), "a GGUF file")
    refused(put(tmp_path, NOT_SAFETENSORS["ONNX"], name), "an ONNX model")


# What the contract asks of every one of them


def test_a_checkpoint_goes_to_another_process(tmp_path: Path) -> None:
    checkpoint = checkpoints.open(specimens.sharded(tmp_path))
    assert checkpoint.contents
    data = pickle.dumps(checkpoint)
    code = (
        "import pickle, sys; c = pickle.loads(sys.stdin.buffer.read());"
        "print(sum(c.read((n,)).sum().item() for n in c.contents))"
    )
    out = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    expected = sum(tensor.sum().item() for tensor in everything(checkpoint).values())
    assert float(out.stdout) == pytest.approx(expected)


def test_a_file_that_changed_is_not_read(tmp_path: Path) -> None:
    path = put(tmp_path, SOUND)
    checkpoint = checkpoints.open(path)
    path.write_bytes(SOUND + b"more")
    with pytest.raises(Refusal, match="changed while it was read"):
        checkpoint.read(("a",))
    path.unlink()
    path.symlink_to(put(tmp_path, SOUND, "y"))
    with pytest.raises(Refusal):
        checkpoint.read(("a",))


def test_a_path_that_leads_to_no_tensor_is_a_key_error(tmp_path: Path) -> None:
    checkpoint = checkpoints.open(put(tmp_path, saved({"a": torch.eye(2), "n": 3}), "x.pt"))
    for path in (("b",), ("n",), ("a", "b"), ()):
        with pytest.raises(KeyError):
            checkpoint.read(path)


def test_a_tensor_is_read_alone(tmp_path: Path) -> None:
    """Four gigabytes of which nothing but the last bytes exists, and only those are read."""
    count = 1 << 32
    header = {
        "big": {"dtype": "U8", "shape": [count], "data_offsets": [0, count]},
        "small": {"dtype": "F32", "shape": [2], "data_offsets": [count, count + 8]},
    }
    path = put(tmp_path, raw(header))
    with path.open("r+b") as file:
        file.seek(path.stat().st_size + count)
        file.write(np.float32([1, 2]).tobytes())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert checkpoints.open(path).read(("small",)).tolist() == [1, 2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


def test_too_little_memory_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = checkpoints.open(put(tmp_path, SOUND))

    def full(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(pieces.torch, "empty", full)
    with pytest.raises(Refusal, match="not enough memory") as refusal:
        checkpoint.read(("a",))
    assert refusal.value.code == 5


def test_a_checkpoint_that_contains_itself_comes_to_an_end(tmp_path: Path) -> None:
    circle: dict[str, Any] = {"w": torch.eye(2)}
    circle["self"] = circle
    assert checkpoints.open(put(tmp_path, saved(circle), "x.pt")).contents["self"]["self"]


def test_a_tree_that_doubles_at_every_level_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "_MOST_NODES", 10_000)
    value: list[Any] = [torch.eye(2)]
    for _ in range(30):
        value = [value, value]
    refused(put(tmp_path, saved(value), "x.pt"), "more than 10000 values")


def test_a_config_that_cannot_be_read_is_left_aside(tmp_path: Path) -> None:
    for config in (b"{", b"[]", b"\xff", b"[" * 100_000):
        path = put(tmp_path, SOUND)
        put(tmp_path, config, "config.json")
        checkpoint = checkpoints.open(path)
        assert checkpoint.config == {}
        assert "config.json" in checkpoint.notes[0]
    put(tmp_path, b'{"eps": Infinity}', "config.json")  # as transformers writes it
    assert checkpoints.open(path).config == {"eps": float("inf")}


def test_the_choice_of_a_folder_never_depends_on_the_order_of_its_files(tmp_path: Path) -> None:
    for name in reversed(["model.safetensors", "pytorch_model.bin", "a.ckpt", "optimizer.pt"]):
        put(tmp_path, SOUND, name)
    choice = folders.choose(tmp_path)
    assert choice.files == ("model.safetensors",)
    notes = ["read model.safetensors, left aside a.ckpt, pytorch_model.bin"]
    assert list(choice.notes(choice.all)) == notes


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_damage_is_noticed_in_a_storage_that_several_tensors_share(
    compression: int, tmp_path: Path
) -> None:
    both = torch.arange(4096.0).reshape(2, 2048)
    views = {"a": both[:1], "b": both[1:], "alone": torch.ones(3)}
    inside = zipfile.ZipFile(io.BytesIO(saved(views)))
    with zipfile.ZipFile(tmp_path / "x.pt", "w", compression) as archive:
        for name in inside.namelist():
            archive.writestr(name, inside.read(name))
    sound = everything(checkpoints.open(tmp_path / "x.pt"))
    assert torch.equal(torch.cat([sound["a"], sound["b"]]), both)
    data = (tmp_path / "x.pt").read_bytes()
    crc = zlib.crc32(both.numpy().tobytes()).to_bytes(4, "little")
    (tmp_path / "x.pt").write_bytes(data.replace(crc, b"none"))
    checkpoint = checkpoints.open(tmp_path / "x.pt")
    for name in "ab":
        with pytest.raises(Refusal, match="checksum"):
            checkpoint.read((name,))
    assert checkpoint.read(("alone",)).sum() == 3


def test_what_a_sentence_names_is_text_or_has_a_type() -> None:
    assert quoted("x") == "'x'" and quoted(3) == "(of type int)"


def test_of_too_many_dimensions_it_is_said_how_many_there_may_be() -> None:
    room = pieces.Room(pieces.File.at(Path(__file__)), 0, 4)
    fault = Piece(room, torch.float32, (1,) * 70, (1,) * 70).fault()
    assert fault == "70 dimensions, more than 64"


def test_the_oldest_pickles_are_read(tmp_path: Path) -> None:
    old = saved({"w": torch.eye(2)}, pickle_protocol=1, _use_new_zipfile_serialization=False)
    checkpoint = checkpoints.open(put(tmp_path, old, "x.pt"))
    assert checkpoint.format == "PyTorch, before 1.6"
    assert torch.equal(checkpoint.read(("w",)), torch.eye(2))


def test_leaves_are_pieces_of_their_files(tmp_path: Path) -> None:
    leaf = checkpoints.open(put(tmp_path, SOUND)).tree["b"]
    assert isinstance(leaf, Piece)
    assert (leaf.shape, leaf.stride, leaf.room.size) == ((3,), (1,), 12)


# The short form of benchmarks/fuzz.py


@pytest.fixture(scope="module", autouse=True)
def _warm() -> None:
    mutants.warm_up()


def _sound(tally: mutants.Tally) -> bool:
    assert not tally.crashes
    assert not tally.executions
    return tally.refused > 0 < tally.accepted


def test_mutated_safetensors_are_refused_or_read(tmp_path: Path) -> None:
    files = mutants.tensor_files(2000, seed=11)
    assert _sound(mutants.run("safetensors", files, tmp_path / "x.safetensors"))


def test_mutated_torch_files_are_refused_or_read(tmp_path: Path) -> None:
    files = mutants.torch_files(2000, seed=12)
    assert _sound(mutants.run("torch", files, tmp_path / "x.pt"))


def test_mutated_indexes_are_refused_or_read(tmp_path: Path) -> None:
    files = mutants.indexes(1000, seed=13)
    assert _sound(mutants.run("indexes", files, mutants.shards(tmp_path / "shards")))
