"""Values of pickles become trees of tensors: the cases A14 and A20 of the fault contract."""

import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import checkpoint_files
from broken_files import refused
from checkpoint_files import archive, everything, legacy, put, saved
from kappascope.checkpoints import open, rebuild
from kappascope.model.matrices import plan
from kappascope.model.skipped import Reason, ReasonKind
from kappascope.model.tensors import REPEATED


def test_a14_a_whole_module_gives_its_tensors_and_names_its_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.BatchNorm1d(2))
    checkpoint = open.open(put(tmp_path, saved(model), "x.pt"))
    found = everything(checkpoint)
    state = model.state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)
    named = {fault.name for fault in checkpoint.faults}
    assert "torch.nn.modules.container.Sequential" in named
    assert "state_dict" in str(checkpoint.faults[0].reason)


def test_a14_objects_beside_the_tensors_are_left_out_by_name(tmp_path: Path) -> None:
    checkpoint = open.open(checkpoint_files.objects_beside_the_tensors(tmp_path))
    beside = checkpoint.contents["hyper_parameters"]
    name = "argparse.Namespace"
    assert beside["args"] == Reason(ReasonKind.FOREIGN_OBJECT, f"object of class {name}")
    assert isinstance(beside["score"], Reason)
    assert "argparse.Namespace" in checkpoint.notes[0]
    assert len(everything(checkpoint)) == 4


def test_a14_an_object_without_tensors_is_refused_by_name(tmp_path: Path) -> None:
    data = pickle.dumps(__import__("argparse").Namespace(lr=1), 2)
    refused(put(tmp_path, archive(data), "x.bin"), "no tensors", "argparse.Namespace", "state_dict")


def test_a14_a_dict_of_a_foreign_class_is_looked_into(tmp_path: Path) -> None:
    members = checkpoint_files.members(saved({"w": torch.eye(2)}))
    pickled = members["data.pkl"].replace(b"\x80\x02}", b"\x80\x02ceasydict\nEasyDict\n)\x81")
    checkpoint = open.open(put(tmp_path, archive(pickled, {"0": members["data/0"]}), "x.pt"))
    assert torch.equal(checkpoint.read(("w",)), torch.eye(2))
    assert checkpoint.faults[0].name == "easydict.EasyDict"


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
    contents = open.open(put(tmp_path, saved(value), "x.pt")).contents
    reasons = {k: str(v) for k, v in contents.items() if isinstance(v, Reason)}
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
    contents = open.open(put(tmp_path, saved(value), "x.pt")).contents
    assert "Marked" in str(contents["w"])
    attributed = torch.eye(2)
    attributed.note = "kept in Python"  # type: ignore[attr-defined]
    checkpoint = open.open(put(tmp_path, saved({"w": attributed}), "x.pt"))
    assert torch.equal(checkpoint.read(("w",)), torch.eye(2))


def test_a_checkpoint_that_contains_itself_comes_to_an_end(tmp_path: Path) -> None:
    circle: dict[str, Any] = {"w": torch.eye(2)}
    circle["self"] = circle
    ring: list[Any] = [[torch.eye(3 + i)] for i in range(9)]
    for each in ring:
        each.extend(ring)  # every one leads to all, and to itself
    circle["ring"] = ring[0]
    for write in (saved, legacy):
        checkpoint = open.open(put(tmp_path, write(circle), "x.pt"))
        assert checkpoint.contents["self"] == REPEATED
        units = plan(checkpoint.contents).units
        assert sorted(unit.parts[0].shape[0] for unit in units) == list(range(2, 11))


def test_keys_that_are_written_alike_are_told_apart(tmp_path: Path) -> None:
    two = {7: torch.eye(2), "7": torch.eye(3), "7'": torch.eye(4), torch.float32: torch.eye(5)}
    for write in (saved, legacy):
        found = everything(open.open(put(tmp_path, write(two), "x.pt")))
        shapes = {name: len(tensor) for name, tensor in found.items()}
        assert shapes == {"7": 2, "7'": 3, "7''": 4, "torch.float32": 5}


class Shelf(dict[str, Any]):
    """A mapping with an attribute of the same name as one of its items."""


def test_no_attribute_of_an_object_hides_an_item(tmp_path: Path) -> None:
    shelf = Shelf(w=torch.eye(2))
    shelf.w = torch.eye(3)  # type: ignore[attr-defined]
    found = everything(open.open(put(tmp_path, saved(shelf), "x.pt")))
    assert sorted(map(len, found.values())) == [2, 3]


def test_a_tree_that_doubles_at_every_level_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "_MOST_NODES", 10_000)
    value: list[Any] = [torch.eye(2)]
    for _ in range(30):
        value = [value, value]
    refused(put(tmp_path, saved(value), "x.pt"), "more than 10000 values")
