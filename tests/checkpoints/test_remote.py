"""Checkpoints elsewhere: rows of local ones, only the bytes that are needed, or one line."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint_files
from kappascope.checkpoints import remote
from kappascope.checkpoints.locations import MIRRORS, Absent, CheckpointFile
from kappascope.checkpoints.remote import Listing, Mirror, Place, in_hub_cache
from kappascope.clinic.diagnose import diagnose
from kappascope.refusal import Refusal
from range_server import serving

RANDOM = torch.Generator().manual_seed(3)
TENSORS = {f"layers.{i}.up.weight": torch.randn(96, 64, generator=RANDOM) for i in range(8)} | {
    "norm.bias": torch.zeros(64)
}


def rows(source: Any, **options: Any) -> Any:
    return diagnose(source, jobs=1, **options)


def written(path: Path) -> bytes:
    end = path.suffix
    if end == ".safetensors":
        path.write_bytes(checkpoint_files.safetensors(TENSORS))
    elif end == ".npz":
        np.savez_compressed(path, **{name: tensor.numpy() for name, tensor in TENSORS.items()})
    else:
        torch.save(TENSORS, path, _use_new_zipfile_serialization=path.stem != "old")
    return path.read_bytes()


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "old.bin", "x.npz"])
def test_rows_are_those_of_the_local_file(tmp_path: Path, name: str) -> None:
    data = written(tmp_path / name)
    with serving({f"/a/{name}": data, "/a/config.json": b'{"hidden_size": 64}'}) as served:
        found = rows(f"{served.url}/a/{name}?token=1")
    local = rows(tmp_path / name)
    assert found.matrices == local.matrices
    assert found.skipped == local.skipped
    assert found.source.startswith("http://127.0.0.1")


def test_only_headers_and_what_is_examined_travel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "BLOCK", 512)
    data = written(tmp_path / "x.safetensors")
    with serving({"/x.safetensors": data}) as served:
        found = rows(f"{served.url}/x.safetensors", include="layers.3.")
        assert [row.name for row in found.matrices] == ["layers.3.up.weight"]
        assert found.notes[-1].endswith("fetched")
        header, tensor = 2048, 96 * 64 * 4
        assert served.sent < header + tensor + 3 * 512 + 1024 < len(data) / 4


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("whole", "does not send parts"),
        ("short", "less was sent"),
        ("long", "more was sent"),
        ("other part", "another part"),
        ("no length", "length"),
        ("odd length", "length"),
        ("long number", "length"),
        ("huge", "a file of 1000000000000000000 bytes"),
        ("packed", "packs what it sends"),
        ("circle", "answers 302"),
        ("401", "answers 401 .download it first, or see whether you are logged in"),
        ("403", "answers 403 .download it first"),
        ("404", "answers 404 .see whether the address is right"),
        ("500", "answers 500"),
        ("503", "answers 503 .see whether it can be reached, or try later"),
        ("changing", "changed while it was read"),
        ("growing", "changed while it was read"),
    ],
)
def test_a_server_that_errs_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, said: str
) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    data = written(tmp_path / "x.safetensors")
    with (
        serving({"/x.safetensors": data}, fault) as served,
        pytest.raises(Refusal, match=said) as refusal,
    ):
        rows(f"{served.url}/x.safetensors")
    assert "\n" not in str(refusal.value)
    assert served.url in str(refusal.value)


def test_a_server_that_is_busy_when_the_config_is_asked_for_does_not_change_what_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    data = written(tmp_path / "x.safetensors")
    files = {"/x.safetensors": data, "/config.json": b"{}"}
    with serving(files, "busy config") as served:
        assert list(Mirror.of(f"{served.url}/x.safetensors").files) == [
            "x.safetensors",
            "config.json",
        ]


def test_a_slow_server_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.3)
    data = written(tmp_path / "x.safetensors")
    with serving({"/x.safetensors": data}, "slow") as served, pytest.raises(Refusal, match="timed"):
        rows(f"{served.url}/x.safetensors")


def test_a_server_that_sends_a_byte_now_and_then_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "STALL_SECONDS", 0.5)
    monkeypatch.setattr(remote, "SLOWEST", 10**9)
    data = written(tmp_path / "x.safetensors")
    with (
        serving({"/x.safetensors": data}, "dripping") as served,
        pytest.raises(Refusal, match="kB a second"),
    ):
        rows(f"{served.url}/x.safetensors")


def test_a_server_that_is_busy_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "PAUSE_SECONDS", 0.0)
    data = written(tmp_path / "x.safetensors")
    with serving({"/x.safetensors": data}, "busy") as served:
        assert len(rows(f"{served.url}/x.safetensors").matrices) == 8


def test_a_config_that_cannot_be_had_is_not_there(tmp_path: Path) -> None:
    data = written(tmp_path / "x.safetensors")
    with serving({"/x.safetensors": data, "/config.json": b"{}"}, "hangs up") as served:
        mirror = Mirror.of(f"{served.url}/x.safetensors")
    assert list(mirror.files) == ["x.safetensors"]


def test_a_broken_file_is_named_by_its_address() -> None:
    with serving({"/x.safetensors": b"no such thing" * 9}) as served, pytest.raises(Refusal) as no:
        rows(f"{served.url}/x.safetensors")
    assert no.value.given == f"{served.url}/x.safetensors"


def test_a_document_holds_no_signature_and_a_password_is_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "x.safetensors")
    with serving({"/x.safetensors": data}) as served:
        found = rows(f"{served.url}/x.safetensors?Signature=secret")
        assert "secret" not in str(found.document())
    with pytest.raises(Refusal, match=r"^https://example\.org/x\.pt: was given with a password"):
        rows("https://me:secret@example.org/x.pt")


def test_an_address_that_cannot_be_opened_says_what_to_do() -> None:
    pytest.importorskip("fsspec", reason="the extra kappascope[remote] is not installed")
    with pytest.raises(Refusal, match=r"names no model \(give it as hf://ORGANIZATION/NAME\)"):
        rows("hf://gpt2")
    with pytest.raises(Refusal, match="give https://, hf://"):
        rows("nosuchscheme://x")
    with pytest.raises(Refusal, match=r"see whether it can be reached") as refused:
        rows("ftp://127.0.0.1:9/x.pt")  # which connects as it is opened
    assert refused.value.code == 5 and "Errno" not in refused.value.wrong


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("gs", "gcsfs")])
def test_a_store_whose_package_is_missing_says_how_to_install_it(scheme, package) -> None:
    pytest.importorskip("fsspec", reason="the extra kappascope[remote] is not installed")
    if importlib.util.find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(Refusal, match=f"pip install {package}") as refused:
        rows(f"{scheme}://bucket/model.safetensors")
    assert refused.value.code == 5


def test_nobody_there_and_nothing_there_are_one_line() -> None:
    with pytest.raises(Refusal, match="see whether it can be reached"):
        rows("http://127.0.0.1:9/x.safetensors")
    with serving({}) as served, pytest.raises(Refusal, match="answers 404"):
        rows(f"{served.url}/x.safetensors")
    with serving({}) as served, pytest.raises(Refusal, match="names no file"):
        rows(f"{served.url}/")


@pytest.fixture
def memory_folder(tmp_path: Path) -> Any:
    fsspec = pytest.importorskip("fsspec", reason="the extra kappascope[remote] is not installed")
    system = fsspec.filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


def test_a_folder_of_shards_in_a_file_system(tmp_path: Path, memory_folder: Any) -> None:
    names = sorted(TENSORS)
    halves = {f"model-0000{i + 1}-of-00002.safetensors": names[i::2] for i in range(2)}
    for name, inside in halves.items():
        held = checkpoint_files.safetensors({each: TENSORS[each] for each in inside})
        memory_folder.pipe(f"/m/{name}", held)
        (tmp_path / name).write_bytes(held)
    index = json.dumps({"weight_map": {n: file for file, ns in halves.items() for n in ns}})
    memory_folder.pipe("/m/model.safetensors.index.json", index.encode())
    (tmp_path / "model.safetensors.index.json").write_text(index)
    memory_folder.pipe("/m/more/deep.bin", b"x")
    assert rows("memory://m").matrices == rows(tmp_path).matrices
    assert rows("memory://m/" + next(iter(halves))).matrices


def test_nothing_at_an_address_of_a_file_system_is_told_with_what_to_do(
    memory_folder: Any, tmp_path: Path
) -> None:
    for address in ("memory://m/nothing.bin", f"file://{tmp_path}/nothing.bin"):
        with pytest.raises(Refusal, match=r"No such file or directory .*address") as refusal:
            rows(address)
        assert refusal.value.code == 2


def test_a_file_that_may_not_be_read_in_a_file_system_is_told_with_what_to_do(
    memory_folder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: object, **options: object) -> None:
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(type(memory_folder), "info", refused)
    with pytest.raises(Refusal, match=r"Access Denied .*logged in"):
        rows("memory://m/x.bin")


def test_a_file_that_changes_in_a_file_system_is_refused(memory_folder: Any) -> None:
    memory_folder.pipe("/x.safetensors", checkpoint_files.safetensors(TENSORS))
    mirror = Mirror.of("memory://x.safetensors")
    memory_folder.pipe("/x.safetensors", bytes(len(checkpoint_files.safetensors(TENSORS))))
    with pytest.raises(Refusal, match="changed while it was read"):
        mirror.bring(Absent(str(mirror.path), 0, 8))


class Numbers(Place):
    """Bytes that tell where they are from."""

    def __init__(self, size: int) -> None:
        self.size, self.asked = size, list[tuple[int, int]]()

    def files(self) -> list[Listing]:
        return [Listing("x", self.size, "")]

    def fetch(self, file: Listing, begin: int, size: int) -> bytes:
        self.asked.append((begin, begin + size))
        return bytes(i % 251 for i in range(begin, begin + size))


def test_no_byte_is_fetched_twice_and_each_is_in_its_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(remote, "BLOCK", 10)
    monkeypatch.setattr(remote, "PIECE", 30)
    place = Numbers(995)
    monkeypatch.setattr(remote.FileSystem, "at", lambda url: place)
    mirror = Mirror.of("test://x")
    MIRRORS.add(str(mirror.path.parent))
    file = CheckpointFile.at(mirror.path)
    random = np.random.default_rng(0)
    for _ in range(60):
        begin = int(random.integers(0, 995))
        size = int(random.integers(1, 120))
        expected = bytes(i % 251 for i in range(begin, min(begin + size, 995)))
        try:
            assert file.read(begin, size) == expected
        except Absent as absent:
            mirror.bring(absent)
            assert file.read(begin, size) == expected
    covered = sum(end - begin for begin, end in place.asked)
    assert covered == mirror.fetched <= 995
    assert covered == len({i for begin, end in place.asked for i in range(begin, end)})


def test_a_folder_that_claims_to_be_a_mirror_is_none(tmp_path: Path) -> None:
    written(tmp_path / "x.safetensors")
    (tmp_path / ".fetched").write_text('{"x.safetensors": []}')
    assert len(rows(tmp_path / "x.safetensors").matrices) == 8


def test_what_the_cache_of_a_hub_keeps_is_not_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert in_hub_cache("hf://org/name") is None
    model = tmp_path / "models--org--name"
    (model / "snapshots" / "abc").mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "blobs").mkdir()
    (model / "refs" / "main").write_text("abc")
    assert in_hub_cache("hf://org/name") is None
    (model / "blobs" / "1").write_bytes(checkpoint_files.safetensors(TENSORS))
    (model / "snapshots" / "abc" / "model.safetensors").symlink_to("../../blobs/1")
    assert len(rows("hf://org/name").matrices) == 8
    assert in_hub_cache("hf://org/name@abc") == in_hub_cache("hf://org/name")
    assert in_hub_cache("hf://org/name@other") is None
