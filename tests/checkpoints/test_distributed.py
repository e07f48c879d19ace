"""Distributed checkpoints: tensors put together from the chunks that processes wrote."""

from __future__ import annotations

import pickle
import shutil
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

import broken_files
import broken_formats
from broken_files import refused
from checkpoint_files import MARK, everything, put
from kappascope.checkpoints import distributed
from kappascope.checkpoints.distributed import ChunkedLocation
from kappascope.checkpoints.open import open as open_checkpoint
from kappascope.clinic.diagnose import diagnose
from kappascope.refusal import Refusal
from sharded_models import save_sharded


def written(folder: Path, state: dict[str, Any]) -> Path:
    """A checkpoint as one process saves it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no group of processes
        dcp.save(state, checkpoint_id=folder)
    return folder


def told(folder: Path, change: Callable[[Any], None]) -> Path:
    """The same folder with other metadata."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))
    return folder


WEIGHT = torch.arange(12.0).reshape(4, 3)
STATE = {
    "model": {
        "fc.weight": WEIGHT,
        "tied.weight": WEIGHT,
        "half": torch.randn(5, 4).bfloat16(),
        "view": torch.randn(3, 6).T,
        "scalar": torch.tensor(2.5),
        "empty": torch.ones(0, 4),
    },
    "optim": {"state": {0: {"exp_avg": torch.ones(4, 3)}}, "param_groups": [{"lr": 0.1}]},
    "list": [torch.eye(2), 5],
    "epoch": 3,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "x", STATE)


def test_a_nested_state_dict_of_one_process(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.format == "PyTorch, distributed"
    assert not checkpoint.notes
    found = everything(checkpoint)
    model: dict[str, Tensor] = STATE["model"]  # type: ignore[assignment]
    for name, tensor in model.items():
        assert found[f"model.{name}"].dtype == tensor.dtype
        assert torch.equal(found[f"model.{name}"], tensor)
    assert torch.equal(found["optim.state.0.exp_avg"], torch.ones(4, 3))
    assert torch.equal(found["list.0"], torch.eye(2))
    assert everything(open_checkpoint(folder / ".metadata")).keys() == found.keys()


def test_shards_of_two_processes_are_put_together(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    given = (str(tmp_path / "store"), str(folder))
    torch.multiprocessing.spawn(save_sharded, given, nprocs=2)
    assert len(list(folder.glob("*.distcp"))) == 2
    checkpoint = open_checkpoint(folder)
    location = checkpoint.tree["by_columns"]
    assert isinstance(location, ChunkedLocation)
    assert len(location.chunks) == 2
    assert torch.equal(location.read(), torch.arange(35.0).reshape(5, 7))
    whole = torch.load(tmp_path / "x.pt")
    for name, tensor in whole.items():
        assert torch.equal(checkpoint.read(("model", name)), tensor)
    rows = {row.name: row for row in diagnose(folder, exclude="by_columns").matrices}
    assert rows == {row.name: row for row in diagnose(tmp_path / "x.pt").matrices}
    next(folder.glob("__1_*.distcp")).unlink()
    lost = everything(open_checkpoint(folder))
    assert "by_columns" not in lost
    assert "No such file" in str(open_checkpoint(folder).contents["by_columns"])


def test_no_chunk_is_looked_into_before_its_tensor_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    read = distributed.zipped
    monkeypatch.setattr(distributed, "zipped", lambda at: (opened.append(at), read(at))[1])
    checkpoint = open_checkpoint(folder)
    assert checkpoint.contents
    assert not opened
    checkpoint.read(("list", "0"))
    assert len(opened) == 1


def chunk_of(metadata: Any, name: str = "model.fc.weight") -> Any:
    return metadata.state_dict_metadata[name]


def place_of(metadata: Any, name: str = "model.fc.weight", **changes: Any) -> None:
    for key, entry in metadata.storage_data.items():
        if key.fqn == name:
            metadata.storage_data[key] = replace(entry, **changes)


def halves(metadata: Any, second: tuple[int, int] = (2, 0)) -> None:
    """The weight in two chunks, the second of which has no archive of its own."""
    tensor = chunk_of(metadata)
    sizes = torch.Size((2, 3))
    tensor.chunks = [ChunkStorageMetadata(torch.Size(at), sizes) for at in ((0, 0), second)]


def elsewhere(metadata: Any) -> None:
    """The weight in two chunks at the same place."""
    tensor = chunk_of(metadata)
    tensor.chunks = [ChunkStorageMetadata(torch.Size((0, 0)), torch.Size((2, 3)))] * 2


LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "a missing chunk": (halves, "its chunk at [2, 0] is missing"),
    "beyond the tensor": (lambda m: setattr(chunk_of(m), "size", torch.Size((3, 3))), "beyond"),
    "a hole": (lambda m: setattr(chunk_of(m), "size", torch.Size((5, 3))), "its shape is [5, 3]"),
    "no chunk": (lambda m: setattr(chunk_of(m), "chunks", []), "no list of 1 to"),
    "other dimensions": (lambda m: setattr(chunk_of(m), "size", torch.Size((12,))), "dimensions"),
    "a huge shape": (
        lambda m: setattr(chunk_of(m), "size", torch.Size((1 << 61, 9))),
        "cannot be",
    ),
    "an unknown dtype": (
        lambda m: setattr(chunk_of(m).properties, "dtype", torch.quint4x2),
        "dtype 'torch.quint4x2'",
    ),
    "a lost file": (lambda m: place_of(m, relative_path="__9_9.distcp"), "No such file"),
    "another folder": (lambda m: place_of(m, relative_path="../x.distcp"), "not a plain file name"),
    "beyond the file": (lambda m: place_of(m, offset=1 << 40), "truncated"),
    "too short": (lambda m: place_of(m, length=20), "in 20 bytes"),
    "no number": (lambda m: place_of(m, offset="x"), "cannot be understood"),
    "packed": (lambda m: place_of(m, transform_descriptors=["zstd"]), "packed by an extension"),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_that_lies_costs_its_tensor_only(folder: Path, lie: str) -> None:
    change, word = LIES[lie]
    checkpoint = open_checkpoint(told(folder, change))
    assert word in str(checkpoint.contents["model"]["fc.weight"])
    assert torch.equal(checkpoint.read(("list", "0")), torch.eye(2))


LATER_LIES: dict[str, tuple[Callable[[Any], None], str]] = {
    "another archive": (lambda m: place_of(m, offset=1), "zip archive"),
    "another dtype": (
        lambda m: setattr(chunk_of(m).properties, "dtype", torch.float16),
        "a chunk is torch.float32",
    ),
    "chunks that overlap": (elsewhere, "overlaps another"),
}


@pytest.mark.parametrize("lie", LATER_LIES)
def test_lies_that_only_the_chunk_can_tell_refuse_the_reading(folder: Path, lie: str) -> None:
    change, word = LATER_LIES[lie]
    checkpoint = open_checkpoint(told(folder, change))
    with pytest.raises(Refusal) as refusal:
        checkpoint.read(("model", "fc.weight"))
    assert word in str(refusal.value)
    assert torch.equal(checkpoint.read(("list", "0")), torch.eye(2))


def test_chunks_in_the_same_bytes_cannot_swell(folder: Path) -> None:
    """A few bytes that stand for thousands of chunks are larger than their file."""

    def swollen(metadata: Any) -> None:
        tensor = chunk_of(metadata)
        count = 1 + (folder / "__0_0.distcp").stat().st_size // WEIGHT.nbytes
        tensor.size = torch.Size((4 * count, 3))
        places = [torch.Size((4 * i, 0)) for i in range(count)]
        tensor.chunks = [ChunkStorageMetadata(place, torch.Size((4, 3))) for place in places]
        data = metadata.storage_data
        index, entry = next((k, v) for k, v in data.items() if k.fqn == "model.fc.weight")
        data |= {replace_offset(index, place): entry for place in places}

    def replace_offset(index: Any, place: Any) -> Any:
        return type(index)(index.fqn, place)

    assert "larger than its files" in str(
        open_checkpoint(told(folder, swollen)).contents["model"]["fc.weight"]
    )


def test_damaged_chunks_and_metadata(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "y")
    chunks = folder / "__0_0.distcp"
    data = bytearray(chunks.read_bytes())
    at = data.index(WEIGHT.numpy().tobytes())
    data[at] ^= 1
    chunks.write_bytes(data)
    with pytest.raises(Refusal, match="checksum"):
        open_checkpoint(folder).read(("model", "fc.weight"))
    refused(chunks, "one file of a distributed checkpoint", "give its folder")
    whole = (tmp_path / "y" / ".metadata").read_bytes()
    for cut in range(0, len(whole), max(1, len(whole) // 40)):
        refused(put(tmp_path / "y", whole[:cut], ".metadata").parent)


def test_nothing_in_the_metadata_is_run(folder: Path) -> None:
    hostile = b"cos\nsystem\n(S'touch " + MARK.encode() + b"'\ntR."
    refused(put(folder, hostile, ".metadata").parent, "os.system")
    refused(put(folder, pickle.dumps({"a": 1}), ".metadata").parent, "no metadata of a distributed")
    assert not Path(MARK).exists()


def test_a_folder_with_a_model_beside_the_shards_is_that_model(folder: Path) -> None:
    torch.save({"a": torch.eye(2)}, folder / "pytorch_model.bin")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.notes == ("read pytorch_model.bin, left aside .metadata",)


def test_mutated_metadata_and_chunks_are_refused_or_read(tmp_path: Path) -> None:
    path = broken_formats.distributed_folder(tmp_path)
    whole = path.read_bytes()
    files = broken_formats.metadata_files(300, seed=24)
    assert broken_files.sound(broken_files.run("metadata", files, path))
    path.write_bytes(whole)
    files = broken_formats.chunk_files(300, seed=25)
    assert broken_files.sound(broken_files.run("chunks", files, path.with_name("__0_0.distcp")))
