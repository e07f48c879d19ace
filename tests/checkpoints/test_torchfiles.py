"""What torch.save writes, as an archive or a plain pickle: A15 to A21 of the fault contract."""

import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import broken_files
import checkpoint_files
from broken_files import refused
from checkpoint_files import NOT_SAFETENSORS, TWO, archive, everything, legacy, put, saved
from kappascope.checkpoints import open, zips


def test_a15_torchscript_without_its_code(tmp_path: Path) -> None:
    script = archive(b"\x80\x02}.", members={"code/__torch__.py": b"x", "constants.pkl": b")."})
    refused(put(tmp_path, script, "x.pt"), "no tensors")


class Scripted(nn.Module):
    """Lists, numbers and texts beside the tensors, as TorchScript pickles them."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes, self.scales, self.flags = [1, 2], [0.5], [True]
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))
        self.layers[2].weight = nn.Parameter(self.layers[0].weight.detach().T.contiguous())
        self.kept = [torch.ones(2), torch.zeros(3)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.scales[0] + self.kept[0].sum() + self.sizes[0]


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a15_torchscript_is_its_tensors(frozen: bool, tmp_path: Path) -> None:
    model = Scripted().eval()
    scripted = torch.jit.script(model)
    (torch.jit.freeze(scripted) if frozen else scripted).save(tmp_path / "x.pt")
    checkpoint = open.open(tmp_path / "x.pt")
    assert checkpoint.notes == ("a TorchScript archive: its tensors are read, its code is not",)
    assert not checkpoint.faults
    found = everything(checkpoint)
    if frozen:
        weights = [tensor for tensor in found.values() if tensor.ndim == 2]
        assert any(torch.equal(weight, model.layers[0].weight) for weight in weights)
    else:
        for name, tensor in model.state_dict().items():
            assert torch.equal(found[name], tensor)


def test_a15_tar_and_plain_pickles(tmp_path: Path) -> None:
    refused(put(tmp_path, NOT_SAFETENSORS["tar"], "x.pt"), "tar")
    refused(put(tmp_path, pickle.dumps({"a": 1}, 2), "x.pt"), "torch.save did not write")
    checkpoint = open.open(put(tmp_path, legacy(TWO), "x.pt"))
    assert all(torch.equal(found, TWO[name]) for name, found in everything(checkpoint).items())


@pytest.mark.parametrize("write", [saved, legacy], ids=["zip", "plain"])
def test_a16_a_truncated_file(write: Callable[[Any], bytes], tmp_path: Path) -> None:
    data = write(TWO)
    for cut in range(1, len(data), max(1, len(data) // 50)):
        refused(put(tmp_path, data[:cut], "x.pt"))
    refused(put(tmp_path, b"", "x.pt"), "is empty")


def test_a16_a_storage_that_is_missing_or_of_another_size_costs_its_tensor_only(
    tmp_path: Path,
) -> None:
    members = checkpoint_files.members(saved(TWO))
    storages = {"0": members["data/0"], "1": members["data/1"]}
    for other, word in (
        ({}, "missing"),
        ({"0": b"short"}, "5 bytes"),
        ({"0": bytes(99)}, "99 bytes"),
    ):
        data = archive(members["data.pkl"], {"1": storages["1"], **other})
        checkpoint = open.open(put(tmp_path, data, "x.pt"))
        assert word in str(checkpoint.contents["a"])
        assert torch.equal(checkpoint.read(("b",)), TWO["b"])


def test_a17_zip_archives_made_to_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zips, "_BOMB_SIZE", 1 << 20)
    path = tmp_path / "x.pt"
    bomb = {"data.pkl": checkpoint_files.members(saved(TWO))["data.pkl"], "data/0": bytes(1 << 22)}
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
    monkeypatch.setattr(zips, "_MOST_MEMBERS", 4)
    refused(put(tmp_path, saved(TWO), "x.pt"), "members")
    monkeypatch.setattr(zips, "_LONGEST_DIRECTORY", 100)
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
    for write in (saved, legacy, lambda value: checkpoint_files.deflated(saved(value))):
        found = everything(open.open(put(tmp_path, write(state), "x.pt")))
        for name, tensor in state.items():
            assert torch.equal(found[name], tensor)
            assert found[name].stride() == tensor.stride()
            assert found[name].dtype == tensor.dtype


def test_numbers_of_another_byte_order_are_refused(tmp_path: Path) -> None:
    for order in (b"big", b"BIG", b"middle", b"", b"x" * 100):
        members = checkpoint_files.members(saved(TWO)) | {"byteorder": order}
        data = archive(members.pop("data.pkl"), members=members)
        refused(put(tmp_path, data, "x.pt"), "big-endian" if order == b"big" else "is unknown")
    old = legacy(TWO)
    told = old.index(b"little_endian")
    true = old.index(b"\x88", told)
    refused(put(tmp_path, old[:true] + b"\x89" + old[true + 1 :], "x.pt"), "big-endian")


def test_mutated_torch_files_are_refused_or_read(tmp_path: Path) -> None:
    files = broken_files.torch_files(2000, seed=12)
    assert broken_files.sound(broken_files.run("torch", files, tmp_path / "x.pt"))
