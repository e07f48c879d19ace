"""The results folder: what is damaged is not there, and there is one writer at a time."""

import json
import os
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappascope.refusal import Refusal
from kappascope.system.files import seal
from kappascope.system.store import Shard, Store, join

BODY = b'{"seeds": [0, 2]}\n' + bytes(range(256))


def test_what_is_put_is_what_is_taken(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    kept.units.mkdir()
    kept.put("a.unit", BODY)
    assert kept.take("a.unit") == BODY
    assert kept.names() == ["a.unit"]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_unit_is_not_there(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int, cut: bool
) -> None:
    kept = Store(tmp_path_factory.mktemp("store"))
    kept.units.mkdir()
    kept.put("a.unit", BODY)
    data = bytearray((kept.units / "a.unit").read_bytes())
    where = int(place * len(data))
    data[where] ^= 1 << bit
    (kept.units / "a.unit").write_bytes(data[:where] if cut else data)
    assert kept.take("a.unit") is None


@pytest.mark.parametrize("data", [b"", b"\n", b"garbage", b"\x00" * 4096, b"PAR1\n{}\nPAR1"])
def test_garbage_is_not_a_unit(data: bytes, tmp_path: Path) -> None:
    kept = Store(tmp_path)
    kept.units.mkdir()
    (kept.units / "a.unit").write_bytes(data)
    assert kept.take("a.unit") is None


def test_a_folder_in_use_is_refused_with_process_and_host(tmp_path: Path) -> None:
    with Store(tmp_path).lock(), pytest.raises(Refusal) as refused, Store(tmp_path).lock():
        pass
    assert refused.value.code == 2
    assert f"process {os.getpid()} on {os.uname().nodename}" in str(refused.value)


def test_a_dead_writers_folder_is_taken_over_with_a_notice(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("process 4194305 on elsewhere")
    (tmp_path / "units").mkdir()
    leftovers = [tmp_path / "units" / ".a.unit.17.tmp", tmp_path / ".trials.parquet.17.tmp"]
    for leftover in leftovers:
        leftover.touch()
    with Store(tmp_path).lock() as notice:
        assert "process 4194305 on elsewhere" in notice
    assert not any(leftover.exists() for leftover in leftovers)
    with Store(tmp_path).lock() as notice:
        assert notice == ""


def test_the_lock_is_free_again_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Store(tmp_path).lock():
        1 / 0  # noqa: B018
    with Store(tmp_path).lock() as notice:
        assert notice == ""


@pytest.mark.parametrize(("path", "code"), [("file", 4), ("file/below", 4), ("/proc/none", 5)])
def test_a_folder_that_cannot_be_is_refused(path: str, code: int, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Refusal) as refused, Store(tmp_path / path).lock():
        pass
    assert refused.value.code == code


def test_a_changed_field_is_refused_by_name_and_a_new_one_is_not(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    with kept.lock():
        kept.begin({"torch": "2.10", "page of e1": "a"})
        kept.begin({"torch": "2.10", "page of e2": "b"})
        with pytest.raises(Refusal, match=r"torch was 2\.10 and is 2\.11") as refused:
            kept.begin({"torch": "2.11"})
        with pytest.raises(Refusal, match="page of e1"):
            kept.begin({"torch": "2.10", "page of e1": "c"})
        kept.forget()
        kept.begin({"torch": "2.11"})
    assert refused.value.code == 4


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("A=Haswell B=512", "A=Haswell B=512 C=AVX512F", r"was …B=512 and is …B=512 C=AVX512F$"),
        ("default", "NPY_DISABLE_CPU_FEATURES=A", "was default and is NPY_DISABLE_CPU_FEATURES=A$"),
        ("Intel(R) Xeon(R) Platinum 8480+", "Intel(R) Xeon(R) Platinum 8488C",
         r"was …8480\+ and is …8488C$"),
        ("a" * 500, "a" * 500 + "b", "is …a{24}b$"),
    ],
)  # fmt: skip
def test_a_refusal_shows_where_two_long_values_differ(
    before: str, now: str, told: str, tmp_path: Path
) -> None:
    kept = Store(tmp_path)
    kept.begin({"cpu modes": before})
    (difference,) = kept.differences({"cpu modes": now})
    assert re.search(told, difference)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff"])
def test_a_torn_study_is_begun_anew(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_bytes(data)
    Store(tmp_path).begin({"torch": "2.10"})
    assert json.loads((tmp_path / "study.json").read_bytes()) == {"torch": "2.10"}


@pytest.mark.parametrize(
    "name",
    ["lock", "study.json", "units", "resume", "report.html", "units/a.unit", "figures/a.svg"],
)
def test_a_link_in_the_folder_is_refused_and_never_followed(name: str, tmp_path: Path) -> None:
    kept, outside = Store(tmp_path / "out"), tmp_path / "outside"
    outside.write_text("somebody else's")
    (kept.folder / name).parent.mkdir(parents=True)
    (kept.folder / name).symlink_to(outside)
    with pytest.raises(Refusal, match="is a symbolic link") as refusal, kept.lock():
        pass
    assert refusal.value.code == 4 and outside.read_text() == "somebody else's"


def test_a_link_that_comes_later_is_refused_too(tmp_path: Path) -> None:
    kept, outside = Store(tmp_path / "out"), tmp_path / "outside"
    outside.write_bytes(b"somebody else's")
    with kept.lock():
        for name in ("study.json", "units/a.unit"):
            (kept.folder / name).symlink_to(outside)
        for use in (lambda: kept.begin({}), lambda: kept.put("a.unit", BODY)):
            with pytest.raises(Refusal, match="is a symbolic link"):
                use()
        with pytest.raises(Refusal, match="is a symbolic link"):
            kept.take("a.unit")
    assert outside.read_bytes() == b"somebody else's"


def test_the_folder_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with (kept := Store(tmp_path / "out")).lock():
        kept.begin({"a": 1})
    assert (tmp_path / "disk" / "study.json").is_file()


def test_a_pipe_in_the_folder_is_not_waited_for(tmp_path: Path) -> None:
    with (kept := Store(tmp_path)).lock():
        os.mkfifo(kept.units / "a.unit")
        os.mkfifo(tmp_path / "study.json")
        kept.begin({"a": 1})
        assert kept.take("a.unit") is None


def test_a_lock_that_is_no_text_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\xff\xfe")
    with Store(tmp_path).lock() as notice:
        assert "ended early" in notice


@pytest.mark.parametrize("text", ["", "3", "0/3", "4/3", "1/0", "-1/2", "1/2/3", "a/b", "1.5/2"])
def test_a_shard_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(Refusal, match="give it like 2/8"):
        Shard.of(text)


@given(count=st.integers(1, 9), items=st.integers(0, 40))
def test_every_item_is_in_one_shard(count: int, items: int) -> None:
    parts = [Shard(k + 1, count).part(range(items)) for k in range(count)]
    assert sorted(item for part in parts for item in part) == list(range(items))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def filled(folder: Path, units: dict[str, bytes], **study: str | int) -> Path:
    with (kept := Store(folder)).lock():
        kept.begin(study)
        for name, body in units.items():
            kept.put(name, body)
    return folder


def test_joined_folders_have_every_unit_once(tmp_path: Path) -> None:
    parts = [
        filled(tmp_path / "1", {"a.unit": b"a", "b.unit": b"b"}, cpu="x"),
        filled(tmp_path / "2", {"b.unit": b"b, later", "c.unit": b"c"}, cpu="x"),
    ]
    (parts[1] / "units" / "d.unit").write_bytes(b"torn")
    with (whole := Store(tmp_path / "whole")).lock():
        assert join(parts, whole) == [f"{parts[1]}: d.unit"]
        assert {name: whole.take(name) for name in whole.names()} == {
            "a.unit": b"a", "b.unit": b"b", "c.unit": b"c",
        }  # fmt: skip
        assert whole.study() == {"cpu": "x"}


def test_folders_that_would_mix_bits_are_not_joined(tmp_path: Path) -> None:
    parts = [filled(tmp_path / cpu, {f"{cpu}.unit": b""}, cpu=cpu) for cpu in ("old", "new")]
    with (whole := Store(tmp_path / "whole")).lock():
        with pytest.raises(Refusal, match="cpu was old and is new"):
            join(parts, whole)
        with pytest.raises(Refusal, match="no folder of results"):
            join([tmp_path / "nothing"], whole)


# --- in an object store ---------------------------------------------------------------------------


@pytest.fixture
def depot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty folder of a store that any process of this test sees, and a cache of its own."""
    fsspec = pytest.importorskip("fsspec", reason="kappascope[remote] is not installed")
    fsspec.filesystem("memory").store.clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return "memory://bucket/results"


def forget_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache of {name}"))
    monkeypatch.setattr("kappascope.system.store.socket.gethostname", lambda: name)


def test_what_is_kept_far_away_is_found_by_another_machine(
    depot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (kept := Store.at(depot)).lock():
        kept.begin({"cpu": "x"})
        kept.put("a.unit", BODY)
        kept.write("figures/a.svg", b"drawn")
    forget_this_machine(monkeypatch, tmp_path, "another")
    with (kept := Store.at(depot)).lock():
        assert kept.take("a.unit") == BODY and kept.study() == {"cpu": "x"}
        with pytest.raises(Refusal, match="memory://bucket/results: cpu was x and is y"):
            kept.begin({"cpu": "y"})
        kept.forget()
    forget_this_machine(monkeypatch, tmp_path, "a third")
    with (kept := Store.at(depot)).lock():
        assert kept.names() == []


def test_a_damaged_unit_far_away_is_not_there(depot: str) -> None:
    import fsspec

    files = fsspec.filesystem("memory")
    files.pipe_file("/bucket/results/units/a.unit", seal(BODY)[:-1])
    files.pipe_file("/bucket/results/units/b.unit", seal(BODY))
    files.pipe_file("/bucket/results/units/..%2f.unit", seal(BODY))
    with (kept := Store.at(depot)).lock():
        assert kept.names() == ["b.unit"]


def test_a_folder_far_away_has_one_writer_among_machines(
    depot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store.at(depot).lock():
        forget_this_machine(monkeypatch, tmp_path, "another")
        with pytest.raises(Refusal, match="in use by process"), Store.at(depot).lock():
            pass
        monkeypatch.setattr("kappascope.system.store.LOCK_SECONDS", -1.0)  # it is taken for dead
        with Store.at(depot).lock():
            pass


def test_a_store_that_cannot_be_reached_is_one_line(
    depot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fsspec

    def unreachable(*_: object, **__: object) -> None:
        raise TimeoutError("no answer\nfor a minute")

    monkeypatch.setattr(fsspec.get_filesystem_class("memory"), "pipe_file", unreachable)
    with pytest.raises(Refusal, match="cannot be reached: no answer for a minute"):
        Store.at(depot).lock().__enter__()
    with pytest.raises(Refusal, match="nothing://x"):
        Store.at("nothing://x")
