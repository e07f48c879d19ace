"""Which files of a folder are the model: the cases A23 to A29 of the fault contract."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

import checkpoint_files
from broken_files import refused
from checkpoint_files import SOUND, put
from kappascope.checkpoints import folders, open

BAD_NAMES = ["../x", "/etc/hostname", "a/../../b", "..\\x", "C:\\x", "~", "a\0b", "x" * 5000, ""]
BAD_NAMES += ["..", 3, None, "a\nb", "\ud800", "sub/x.safetensors"]


@pytest.mark.parametrize("name", BAD_NAMES, ids=lambda name: repr(name)[:20])
def test_a23_a_shard_name_that_is_no_plain_file_name(name: Any, tmp_path: Path) -> None:
    checkpoint_files.sharded(tmp_path)
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
    folder = checkpoint_files.sharded(tmp_path / "model")
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


def test_a26_shards_without_an_index_are_counted(tmp_path: Path) -> None:
    folder = checkpoint_files.shards_without_an_index(tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    checkpoint = open.open(folder)
    assert [fault.name for fault in checkpoint.faults] == ["model-00002-of-00003.safetensors"]


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
    refused(tmp_path / "gguf", "truncated")
    put(tmp_path / "keras", b"x", "model.h5")
    refused(tmp_path / "keras", "model.h5")
    put(tmp_path / "pipe" / "unet", SOUND, "diffusion_pytorch_model.safetensors")
    put(tmp_path / "pipe" / "vae", SOUND, "diffusion_pytorch_model.safetensors")
    refused(tmp_path / "pipe", "unet, vae")
    put(tmp_path / "two", SOUND, "a.safetensors")
    put(tmp_path / "two", SOUND, "b.safetensors")
    refused(tmp_path / "two", "several checkpoints: a.safetensors, b.safetensors")


def test_a29_of_two_formats_one_is_read_and_it_is_said(tmp_path: Path) -> None:
    checkpoint = open.open(checkpoint_files.two_formats(tmp_path))
    assert "other" not in checkpoint.contents
    assert checkpoint.notes == ("read model.safetensors, left aside pytorch_model.bin",)
    assert checkpoint.config == {"hidden_size": 4}


def test_a29_of_shards_those_are_left_aside_that_the_index_does_not_list(tmp_path: Path) -> None:
    folder = checkpoint_files.sharded(tmp_path)
    assert not open.open(folder).notes
    more = put(folder, SOUND, "model-00004-of-00004.safetensors")
    aside = f"read model.safetensors.index.json, left aside {more.name}"
    assert open.open(folder).notes == (aside,)


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
        assert open.open(path).notes == ()
    assert len(open.open(tmp_path).contents) == 2
    assert bool(open.open(tmp_path / shard).notes) == ("-of-" in shard)


def test_a29_an_adapter_is_said_to_be_one(tmp_path: Path) -> None:
    assert "adapter" in open.open(checkpoint_files.an_adapter(tmp_path)).notes[0]


def test_a_circle_of_links_is_refused_in_one_line(tmp_path: Path) -> None:
    circle = tmp_path / "circle"
    circle.symlink_to("circle")
    for path in (circle, circle / "x.pt", circle / "model.safetensors.index.json"):
        refused(path, "Too many levels of symbolic links")
    for name in ("model.safetensors", "model.safetensors.index.json", "x.pt"):
        folder = tmp_path / f"folder {name}"
        folder.mkdir()
        (folder / name).symlink_to(name)
        refused(folder, "Too many levels of symbolic links")
        refused(folder / name, "Too many levels of symbolic links")


def test_the_choice_of_a_folder_never_depends_on_the_order_of_its_files(tmp_path: Path) -> None:
    for name in reversed(["model.safetensors", "pytorch_model.bin", "a.ckpt", "optimizer.pt"]):
        put(tmp_path, SOUND, name)
    choice = folders.choose_files(tmp_path)
    assert choice.files == ("model.safetensors",)
    notes = ["read model.safetensors, left aside a.ckpt, pytorch_model.bin"]
    assert list(choice.notes(choice.all)) == notes


def test_a_folder_too_large_to_look_through_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model may be any of those that were not looked at."""
    monkeypatch.setattr(folders, "_MOST_ENTRIES", 3)
    for name in ("a", "b", "c", "model.safetensors"):
        put(tmp_path / "model", SOUND, name)
    refused(tmp_path / "model", "a folder of more than 3 files")
    refused(tmp_path, "no checkpoint in it")


def test_a_folder_inside_that_may_not_be_read_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lost+found").mkdir()
    real = os.scandir

    def scandir(path: Path) -> Any:
        if Path(path).name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return real(path)

    monkeypatch.setattr(folders.os, "scandir", scandir)
    refused(tmp_path, "no checkpoint in it")
