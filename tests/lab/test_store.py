"""The results folder: what is damaged is not there, and there is one writer at a time."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappascope.lab import store
from kappascope.lab.store import Store, parquet_bytes, unit_bytes
from kappascope.refusal import Refusal
from kappascope.system.files import write_sealed

ROWS = pa.table({"seed": [0, 1], "error": [0.5, float("nan")]})


def test_reading_a_unit_leaves_no_thread_that_could_outlive_the_program(tmp_path: Path) -> None:
    """Such threads of Arrow's ended one program in two with an abort."""
    Store(tmp_path).units.mkdir()
    Store(tmp_path).put("a.unit", unit_bytes({}, ROWS))
    here = Path(store.__file__).parents[2]
    program = "from kappascope.lab.store import Store, Path;"
    program += f"import torch; assert Store(Path({str(tmp_path)!r})).take('a.unit')"
    for _ in range(4):
        ended = subprocess.run([sys.executable, "-c", program], cwd=here, check=False)
        assert ended.returncode == 0


def test_what_is_put_is_what_is_taken(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    kept.units.mkdir()
    kept.put("a.unit", unit_bytes({"seeds": [0, 2]}, ROWS))
    header, rows = kept.take("a.unit") or ({}, None)
    assert header == {"seeds": [0, 2]}
    assert parquet_bytes(rows) == parquet_bytes(ROWS)
    assert kept.names() == ["a.unit"]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_unit_is_not_there(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int, cut: bool
) -> None:
    kept = Store(tmp_path_factory.mktemp("store"))
    kept.units.mkdir()
    kept.put("a.unit", unit_bytes({"seeds": [0, 2]}, ROWS))
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


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff"])
def test_a_torn_study_is_begun_anew(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "study.json").write_bytes(data)
    Store(tmp_path).begin({"torch": "2.10"})
    assert json.loads((tmp_path / "study.json").read_bytes()) == {"torch": "2.10"}


def test_chunks_do_not_show_in_the_bytes() -> None:
    assert parquet_bytes(pa.concat_tables([ROWS[:1], ROWS[1:]])) == parquet_bytes(ROWS)


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
        for use in (lambda: kept.begin({}), lambda: kept.put("a.unit", unit_bytes({}, ROWS))):
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


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]\nPAR1", b"\xff\n", b"{}\nPAR1PAR1", b"[" * 10**5 + b"\n"]
)
def test_a_sealed_file_that_is_no_unit_is_not_one(body: bytes, tmp_path: Path) -> None:
    (kept := Store(tmp_path)).units.mkdir()
    write_sealed(kept.units / "a.unit", body)
    assert kept.take("a.unit") is None


def test_a_lock_that_is_no_text_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "lock").write_bytes(b"\xff\xfe")
    with Store(tmp_path).lock() as notice:
        assert "ended early" in notice
