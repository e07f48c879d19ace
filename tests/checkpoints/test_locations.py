"""A tensor is read from its file alone, and damage or a change meanwhile is noticed."""

import io
import os
import pickle
import resource
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint_files
from broken_files import refused
from checkpoint_files import SOUND, TWO, archive, everything, legacy, put, raw, saved
from kappascope.checkpoints import locations, open
from kappascope.checkpoints.locations import TensorLocation
from kappascope.model.skipped import Reason
from kappascope.refusal import Refusal


def test_a16_flipped_bits_in_the_numbers_are_noticed(tmp_path: Path) -> None:
    data = bytearray(saved({"w": torch.full((4, 4), 7.0)}))
    at = data.index(torch.full((4, 4), 7.0).numpy().tobytes())
    data[at + 5] ^= 4
    refused(put(tmp_path, bytes(data), "x.pt"), "checksum")


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
        assert isinstance(open.open(path).contents["w"], Reason), case
    good = put(tmp_path, archive(tensor(4, (3, 2), (0, 1), 1), {"0": bytes(16)}), "x.pt")
    assert open.open(good).read(("w",)).shape == (3, 2)
    array = b"cbuiltins\nbytearray\n(J\xff\xff\xff\x7ftR."
    refused(put(tmp_path, archive(array), "x.pt"), "no tensors")
    refused(put(tmp_path, archive(b"X\xff\xff\xff\xffa."), "x.pt"), "truncated")


def test_a_file_that_changed_is_not_read(tmp_path: Path) -> None:
    path = put(tmp_path, SOUND)
    checkpoint = open.open(path)
    path.write_bytes(SOUND + b"more")
    with pytest.raises(Refusal, match="changed while it was read"):
        checkpoint.read(("a",))
    path.unlink()
    path.symlink_to(put(tmp_path, SOUND, "y"))
    with pytest.raises(Refusal):
        checkpoint.read(("a",))


@pytest.mark.parametrize("write", [checkpoint_files.safetensors, saved, legacy])
def test_a_file_rewritten_while_a_tensor_is_read_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[Any], bytes]
) -> None:
    path = put(tmp_path, write(TWO), "x")
    checkpoint, other = open.open(path), write({**TWO, "a": 2 * TWO["a"]})
    times = path.stat()
    fill = locations._fill

    def rewritten(*given: Any) -> None:
        fill(*given)
        with path.open("r+b") as file:  # the same file, and as long as before
            file.write(other)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # and as old

    monkeypatch.setattr(locations, "_fill", rewritten)
    with pytest.raises(Refusal, match="changed while it was read"):
        checkpoint.read(("a",))


def test_a_file_cut_off_while_it_is_read_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = put(tmp_path, SOUND)
    checkpoint, preadv = open.open(path), os.preadv

    def cut(*given: Any) -> int:
        os.truncate(path, 40)
        return preadv(*given)

    monkeypatch.setattr(locations.os, "preadv", cut)
    with pytest.raises(Refusal, match="changed while it was read"):
        checkpoint.read(("a",))


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
    assert open.open(path).read(("small",)).tolist() == [1, 2]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000  # kB


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
    sound = everything(open.open(tmp_path / "x.pt"))
    assert torch.equal(torch.cat([sound["a"], sound["b"]]), both)
    data = (tmp_path / "x.pt").read_bytes()
    crc = zlib.crc32(both.numpy().tobytes()).to_bytes(4, "little")
    (tmp_path / "x.pt").write_bytes(data.replace(crc, b"none"))
    checkpoint = open.open(tmp_path / "x.pt")
    for name in "ab":
        with pytest.raises(Refusal, match="checksum"):
            checkpoint.read((name,))
    assert checkpoint.read(("alone",)).sum() == 3


def test_of_too_many_dimensions_it_is_said_how_many_there_may_be() -> None:
    storage = locations.StorageLocation(locations.CheckpointFile.at(Path(__file__)), 0, 4)
    fault = TensorLocation(storage, torch.float32, (1,) * 70, (1,) * 70).fault()
    assert fault == "70 dimensions, more than 64"
