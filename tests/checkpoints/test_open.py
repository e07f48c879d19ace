"""Checkpoints nobody vouches for are opened: whole layouts, shards, indexes and what is refused."""

import json
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import broken_files
import checkpoint_files
import every_format
from broken_files import refused
from checkpoint_files import SOUND, TWO, everything, put, saved
from kappascope.checkpoints import locations, open, safetensors
from kappascope.checkpoints.formats import quoted
from kappascope.checkpoints.open import Checkpoint
from kappascope.clinic.diagnose import diagnose
from kappascope.model.matrices import matrices
from kappascope.model.skipped import Reason
from kappascope.refusal import Refusal
from small_checkpoints import differences, falling


@pytest.mark.parametrize("name", checkpoint_files.BENIGN)
def test_a11_a21_a25_a_sound_layout_is_accepted(name: str, tmp_path: Path) -> None:
    layout, count = checkpoint_files.BENIGN[name]
    path = layout(tmp_path)
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    assert broken_files.examine(path) == count
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == before


def test_a21_tied_weights_share_a_meta_storage(tmp_path: Path) -> None:
    contents = open.open(checkpoint_files.tied_weights(tmp_path)).contents
    embed, head = contents["embed.weight"], contents["head.weight"]
    assert embed.is_meta
    assert embed.untyped_storage()._cdata == head.untyped_storage()._cdata
    other = open.open(put(tmp_path, SOUND)).contents
    assert other["a"].untyped_storage()._cdata != other["b"].untyped_storage()._cdata


def test_a21_optimizer_state_is_where_it_was(tmp_path: Path) -> None:
    checkpoint = open.open(checkpoint_files.with_an_optimizer(tmp_path))
    assert "param_groups" in checkpoint.contents["optimizer"]
    read = {key: checkpoint.read(("model", key)) for key in checkpoint.contents["model"]}
    assert [name for name, _ in matrices(read)] == ["0.weight", "2.weight"]


def test_a24_a_shard_that_is_a_circle_of_links_is_named(tmp_path: Path) -> None:
    shard = checkpoint_files.sharded(tmp_path) / "model-00002-of-00003.safetensors"
    shard.unlink()
    shard.symlink_to(shard.name)
    (fault,) = open.open(tmp_path).faults
    assert fault.name == shard.name and "symbolic links" in str(fault.reason)


def _with_shard(folder: Path, data: bytes | None) -> Checkpoint:
    shard = checkpoint_files.sharded(folder) / "model-00002-of-00003.safetensors"
    if data is None:
        shard.unlink()
    else:
        shard.write_bytes(data)
    return open.open(folder)


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
    assert any(word in str(fault.reason) for fault in checkpoint.faults)
    assert any("00002" in f"{fault.name}{fault.reason}" for fault in checkpoint.faults)


def test_a26_a_folder_without_a_single_shard_is_refused(tmp_path: Path) -> None:
    for shard in checkpoint_files.sharded(tmp_path).glob("*.safetensors"):
        shard.unlink()
    refused(tmp_path, "no shard can be read")


@pytest.mark.parametrize(
    "index", [b"", b"{", b"[]", b"{}", b'{"weight_map": []}', b'{"weight_map": {}}', b"\xff",
              b"[" * 200_000, b'{"weight_map": {"a": "x", "a": "y"}}']
)  # fmt: skip
def test_a27_an_index_that_is_none(index: bytes, tmp_path: Path) -> None:
    (checkpoint_files.sharded(tmp_path) / "model.safetensors.index.json").write_bytes(index)
    refused(tmp_path)


def test_a27_an_index_of_a_gigabyte_is_not_read(tmp_path: Path) -> None:
    with (checkpoint_files.sharded(tmp_path) / "model.safetensors.index.json").open("r+b") as file:
        file.truncate(1 << 30)
    refused(tmp_path, "index of 1073741824 bytes")


# What the contract asks of every one of them


def test_a_checkpoint_goes_to_another_process(tmp_path: Path) -> None:
    checkpoint = open.open(checkpoint_files.sharded(tmp_path))
    assert checkpoint.contents
    data = pickle.dumps(checkpoint)
    code = (
        "import pickle, sys; c = pickle.loads(sys.stdin.buffer.read());"
        "print(sum(c.read((n,)).sum().item() for n in c.contents))"
    )
    out = subprocess.run([sys.executable, "-c", code], input=data, capture_output=True, check=True)
    expected = sum(tensor.sum().item() for tensor in everything(checkpoint).values())
    assert float(out.stdout) == pytest.approx(expected)


def test_a_path_that_leads_to_no_tensor_is_a_key_error(tmp_path: Path) -> None:
    checkpoint = open.open(put(tmp_path, saved({"a": torch.eye(2), "n": 3}), "x.pt"))
    for path in (("b",), ("n",), ("a", "b"), ()):
        with pytest.raises(KeyError):
            checkpoint.read(path)


def test_too_little_memory_is_told_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open.open(put(tmp_path, SOUND))

    def full(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr(locations.torch, "empty", full)
    with pytest.raises(Refusal, match="not enough memory") as refusal:
        checkpoint.read(("a",))
    assert refusal.value.code == 5


def test_more_tensors_than_can_be_examined_are_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = {str(i): torch.ones(1, 1) for i in range(300)}
    monkeypatch.setattr(safetensors, "MOST_TENSORS", 299)
    refused(put(tmp_path, checkpoint_files.safetensors(few)), "300 tensors, more than 299")
    places = json.dumps({"weight_map": dict.fromkeys(few, "x.safetensors")}).encode()
    refused(put(tmp_path / "a", places, "model.safetensors.index.json"), "300 tensors")
    halves = [dict(list(few.items())[half]) for half in (slice(150), slice(150, 300))]
    refused(_two_shards(tmp_path / "b", *halves), "300 tensors, more than 299")


# One name in two shards

NAMED = [f"m-0000{i}-of-00002.safetensors" for i in (1, 2)]


def _two_shards(folder: Path, *shards: dict[str, Tensor]) -> Path:
    for name, shard in zip(NAMED, shards, strict=True):
        put(folder, checkpoint_files.safetensors(shard), name)
    return folder


@pytest.mark.parametrize("listed", [{}, {"a": 0}, {"b": 0}, {"a": 1, "b": 0, "c": 1}])
def test_a_name_in_two_shards_with_different_values_is_lost(
    tmp_path: Path, listed: dict[str, int]
) -> None:
    one, two = {"a": torch.eye(2), "b": torch.eye(3)}, {"a": 2 * torch.eye(2), "c": torch.eye(4)}
    folder = _two_shards(tmp_path, one, two)
    if listed:
        places = {name: NAMED[at] for name, at in {**listed, "c": 1}.items()}
        put(folder, json.dumps({"weight_map": places}).encode(), "model.safetensors.index.json")
    checkpoint = open.open(folder)
    assert sorted(everything(checkpoint)) == ["b", "c"]
    reason = checkpoint.contents["a"]
    assert isinstance(reason, Reason)
    assert reason.is_loss
    assert str(reason).startswith("with different values in ")
    assert all(quoted(name) in str(reason) for name in NAMED)


def test_shapes_and_dtypes_of_one_name_may_differ_too(tmp_path: Path) -> None:
    for other in (torch.eye(3), torch.eye(2).half()):
        folder = _two_shards(tmp_path, {"a": torch.eye(2)}, {"a": other})
        assert "of different shapes or dtypes" in str(open.open(folder).contents["a"])


def test_a_name_in_two_shards_with_the_same_values_is_read_once_and_noted(tmp_path: Path) -> None:
    same = torch.tensor([[1.0, float("nan")]])
    folder = _two_shards(tmp_path, {"a": same, "b": torch.eye(3)}, {"a": same})
    checkpoint = open.open(folder)
    assert sorted(everything(checkpoint)) == ["a", "b"]
    assert checkpoint.notes == ("in several shards with the same values, read once: 'a'",)


def test_nested_shards_are_united_name_by_name(tmp_path: Path) -> None:
    for i, names in enumerate(("ab", "bc"), 1):
        inner = {name: i * torch.eye(2) for name in names}
        put(tmp_path, saved({"state_dict": inner, "epoch": i}), f"m-0000{i}-of-00002.bin")
    found = everything(checkpoint := open.open(tmp_path))
    assert sorted(found) == ["state_dict.a", "state_dict.c"]
    assert "different values" in str(checkpoint.contents["state_dict"]["b"])


def test_a_shard_in_a_circle_of_links_is_a_fault(tmp_path: Path) -> None:
    put(tmp_path, SOUND, NAMED[0])
    (tmp_path / NAMED[1]).symlink_to(NAMED[1])
    (fault,) = open.open(tmp_path).faults
    assert fault.name == NAMED[1]
    assert "Too many levels of symbolic links" in str(fault.reason)


def test_a_config_that_cannot_be_read_is_left_aside(tmp_path: Path) -> None:
    for config in (b"{", b"[]", b"\xff", b"[" * 100_000):
        path = put(tmp_path, SOUND)
        put(tmp_path, config, "config.json")
        checkpoint = open.open(path)
        assert checkpoint.config == {}
        assert "config.json" in checkpoint.notes[0]
    (tmp_path / "config.json").unlink()
    for target in ("config.json", "nowhere", "/etc/hostname"):  # a circle, a hole, a way out
        (tmp_path / "config.json").symlink_to(target)
        assert "config.json" in open.open(path).notes[0]
        (tmp_path / "config.json").unlink()
    put(tmp_path, b'{"eps": Infinity}', "config.json")  # as transformers writes it
    assert open.open(path).config == {"eps": float("inf")}


def test_the_oldest_pickles_are_read(tmp_path: Path) -> None:
    old = saved({"w": torch.eye(2)}, pickle_protocol=1, _use_new_zipfile_serialization=False)
    checkpoint = open.open(put(tmp_path, old, "x.pt"))
    assert checkpoint.format == "PyTorch, before 1.6"
    assert torch.equal(checkpoint.read(("w",)), torch.eye(2))


def test_mutated_indexes_are_refused_or_read(tmp_path: Path) -> None:
    files = broken_files.indexes(1000, seed=13)
    assert broken_files.sound(
        broken_files.run("indexes", files, broken_files.shards(tmp_path / "shards"))
    )


def test_the_same_weights_give_the_same_rows_in_every_format(tmp_path: Path) -> None:
    """As many rows as digits of float32 and a change of the order in which entries lie allow."""
    weights = {f"net.{k}.weight": falling(24 - 4 * k, 16, seed=k) for k in range(3)}
    weights["net.0.bias"] = torch.ones(24)
    expected = diagnose(dict(weights)).document()["matrices"]
    assert len(expected) == 3
    formats = set()
    for name, write in every_format.FORMATS.items():
        (tmp_path / name).mkdir()
        path = write(tmp_path / name, weights)
        formats.add(open.open(path).format)
        found = diagnose(path, jobs=1).document()["matrices"]
        by_name = sorted(found, key=lambda row: str(row["name"]))
        assert not list(differences(expected, by_name, tolerance=1e-5)), name
    assert formats == set(open._FORMATS.values())
