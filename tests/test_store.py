"""The store: files are whole or absent, what is damaged is not there, one writer at a time."""

import errno
import json
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kappascope import store
from kappascope.refusals import Refusal
from kappascope.store import Store

ROWS = pa.table({"seed": [0, 1], "error": [0.5, float("nan")]})


OPEN = Path.open


class Faults:
    """Let the n-th of the calls that change a disk fail, as a full disk would make it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
        self.left = number
        for owner, name in (Path, "open"), (os, "fsync"), (Path, "replace"), (os, "open"):
            monkeypatch.setattr(owner, name, self.failing(getattr(owner, name)))

    def failing(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            mode = [*args[1:2], kwargs.get("mode", "r")][0]
            reads = call is OPEN and mode.startswith("r")
            self.left -= not reads
            if self.left == 0 and not reads:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return call(*args, **kwargs)

        return wrapped


@pytest.mark.parametrize("number", range(1, 6))
def test_a_fault_at_any_call_leaves_the_old_file_or_the_new(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    store.write(path, b"old")
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="No space left") as refused:
        Faults(patch, number)
        store.write(path, b"new")
    assert refused.value.code == 5
    assert path.read_bytes() in (b"old", b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_writing_makes_exactly_five_such_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        faults = Faults(patch, 100)
        store.write(tmp_path / "file", b"new")
    assert 100 - faults.left == 5  # open, fsync, replace, open the folder, fsync it


def test_a_disk_that_fills_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    store.write(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(Refusal, match="too large") as refused:
            store.write(path, b"new and longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.code == 5
    assert path.read_bytes() == b"old"


def test_a_link_stays_one_and_leads_to_the_new_file(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)
    store.write(link, b"new")
    assert link.is_symlink() and path.read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    store.write(pipe, b"new")
    assert os.read(reader, 9) == b"new" and pipe.is_fifo()
    os.close(reader)


def test_a_pipe_that_nobody_reads_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refusal):
        store.write(tmp_path / "pipe", b"new")


def test_reading_a_unit_leaves_no_thread_that_could_outlive_the_program(tmp_path: Path) -> None:
    """Such threads of Arrow's ended one program in two with an abort."""
    Store(tmp_path).units.mkdir()
    Store(tmp_path).put("a.unit", {}, ROWS)
    here, program = Path(store.__file__).parents[1], "from kappascope.store import Store, Path;"
    program += f"import torch; assert Store(Path({str(tmp_path)!r})).take('a.unit')"
    for _ in range(4):
        ended = subprocess.run([sys.executable, "-c", program], cwd=here, check=False)
        assert ended.returncode == 0


def test_what_is_put_is_what_is_taken(tmp_path: Path) -> None:
    kept = Store(tmp_path)
    kept.units.mkdir()
    kept.put("a.unit", {"seeds": [0, 2]}, ROWS)
    header, rows = kept.take("a.unit") or ({}, None)
    assert header == {"seeds": [0, 2]}
    assert store.parquet(rows) == store.parquet(ROWS)
    assert kept.names() == ["a.unit"]


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_unit_is_not_there(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int, cut: bool
) -> None:
    kept = Store(tmp_path_factory.mktemp("store"))
    kept.units.mkdir()
    kept.put("a.unit", {"seeds": [0, 2]}, ROWS)
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


def test_a_refusal_travels_between_processes() -> None:
    refusal = pickle.loads(pickle.dumps(Refusal(5, "disk", "full", "make room")))
    assert (refusal.code, str(refusal)) == (5, "disk: full (make room)")


def test_the_environment_names_what_bits_depend_on() -> None:
    names = {"kappascope", "python", "torch", "numpy", "scipy", "pyarrow", "cpu", "threads"}
    assert store.environment().keys() >= names | {"dtype"}


def test_code_is_the_page_and_all_it_imports_to_make_rows(tmp_path: Path) -> None:
    def imports(text: str) -> set[str]:
        page = tmp_path / f"{abs(hash(text))}.py"
        page.write_text(text)
        return {path.stem for path in store._source(page)[1]}

    assert imports("import torch") == set()
    assert imports("from kappascope.training import train") == {"training"}
    assert imports("def f():\n    from kappascope import spectra, claims") == {"spectra"}


def test_changed_code_is_other_code(tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "page.py", tmp_path / "two" / "page.py"
    for page, text in (one, "a = 1"), (two, "a = 2"):
        page.parent.mkdir()
        page.write_text(text)
    assert store.code(one) == store.code(one, one) != store.code(two)


@pytest.mark.parametrize("page", ["experiments/e19_bound.py", "studies/gpt.py"])
def test_code_reaches_into_packages(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(path: Path) -> bytes:
        return path.read_text().encode() + b"#" * (path == store.PACKAGE / "theory/relaxation.py")

    before = store.code(store.PACKAGE / page)
    store._source.cache_clear()
    monkeypatch.setattr(Path, "read_bytes", changed)
    after = store.code(store.PACKAGE / page)
    store._source.cache_clear()
    assert after != before


def test_code_of_two_pages_of_one_name_is_that_of_both(tmp_path: Path) -> None:
    pages = [tmp_path / folder / "page.py" for folder in "ab"]
    for page in pages:
        page.parent.mkdir()
        page.write_text(f"name = {page.parent.name!r}")
    assert store.code(*pages) not in {store.code(page) for page in pages}


def test_code_is_the_same_wherever_the_package_is_installed() -> None:
    assert store._place(store.PACKAGE / "theory" / "inputs.py") == "theory/inputs.py"


def test_chunks_do_not_show_in_the_bytes() -> None:
    assert store.parquet(pa.concat_tables([ROWS[:1], ROWS[1:]])) == store.parquet(ROWS)


def test_strict_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        store.strict({"n": float("nan")})
