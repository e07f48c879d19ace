"""Files are whole or absent, a damaged one is recognized, and the environment is named."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from failing_disk import Faults
from kappascope.refusal import Refusal
from kappascope.system import files


@pytest.mark.parametrize("number", range(1, 6))
def test_a_fault_at_any_call_leaves_the_old_file_or_the_new(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    files.write(path, b"old")
    with monkeypatch.context() as patch, pytest.raises(Refusal, match="No space left") as refused:
        Faults(patch, number)
        files.write(path, b"new")
    assert refused.value.code == 5
    assert path.read_bytes() in (b"old", b"new")
    assert list(tmp_path.iterdir()) == [path]


def test_writing_makes_exactly_five_such_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        faults = Faults(patch, 100)
        files.write(tmp_path / "file", b"new")
    assert 100 - faults.left == 5  # open, fsync, replace, open the folder, fsync it


def test_a_disk_that_fills_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, b"old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5, limits[1]))
    try:
        with pytest.raises(Refusal, match="too large") as refused:
            files.write(path, b"new and longer")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert refused.value.code == 5
    assert path.read_bytes() == b"old"


def test_a_link_stays_one_and_leads_to_the_new_file(tmp_path: Path) -> None:
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(b"old")
    link.symlink_to(path)
    files.write(link, b"new")
    assert link.is_symlink() and path.read_bytes() == b"new"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    files.write(pipe, b"new")
    assert os.read(reader, 9) == b"new" and pipe.is_fifo()
    os.close(reader)


def test_a_pipe_that_nobody_reads_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(Refusal):
        files.write(tmp_path / "pipe", b"new")


@given(place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7), cut=st.booleans())
def test_a_damaged_sealed_file_is_not_read(
    tmp_path_factory: pytest.TempPathFactory, place: float, bit: int, cut: bool
) -> None:
    path = tmp_path_factory.mktemp("sealed") / "file"
    files.write_sealed(path, b"what was written")
    data = bytearray(path.read_bytes())
    where = int(place * len(data))
    data[where] ^= 1 << bit
    path.write_bytes(data[:where] if cut else data)
    assert files.read_sealed(path) is None


def test_a_sealed_file_that_is_absent_is_not_read(tmp_path: Path) -> None:
    assert files.read_sealed(tmp_path / "none") is None
    assert files.read_sealed(tmp_path) is None


def test_the_environment_names_what_bits_depend_on() -> None:
    names = {"kappascope", "python", "torch", "numpy", "scipy", "pyarrow", "cpu", "threads"}
    assert files.environment().keys() >= names | {"dtype"}


def test_strict_json_has_no_nan() -> None:
    with pytest.raises(ValueError, match="JSON"):
        files.strict({"n": float("nan")})


def test_the_environment_names_the_instructions_that_are_used() -> None:
    program = "from kappascope.system.files import environment as e; print(e()['cpu capability'])"
    told = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "ATEN_CPU_CAPABILITY": "default"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout != "" and told.stdout.strip().lower() in {"default", "no avx"}


def test_a_library_that_is_not_installed_costs_no_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(files, "LIBRARIES", ("no-such-library",))
    assert files.unloaded_environment()["no-such-library"] == "absent"
