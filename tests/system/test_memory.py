"""Sizes as people write them, and how much memory is left."""

import mmap
import subprocess
import sys
from pathlib import Path

import pytest

from kappascope.system import memory


@pytest.mark.parametrize(
    ("given", "size"),
    [(5, 5), ("5", 5), ("1K", 1024), ("2.5g", 5 * 2**29), ("8GB", 2**33), (" 1 TiB ", 2**40)],
)
def test_a_size_is_bytes_or_a_number_with_its_unit(given, size) -> None:
    assert memory.bytes_of(given) == size


@pytest.mark.parametrize("given", ["", "G", "-1", "1e9", "8X", "nan", 0, -3, "9" * 400])
def test_what_is_no_size_is_refused(given) -> None:
    with pytest.raises(ValueError, match="expected a size in bytes or like 8G"):
        memory.bytes_of(given)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\nOdd\n")
    return tmp_path


def test_the_machine_tells_what_is_free(machine: Path) -> None:
    assert memory.available_bytes() == 8000 * 1024
    (machine / "memory.max").write_text("max\n")
    (machine / "memory.current").write_text("5\n")
    assert memory.available_bytes() == 8000 * 1024


@pytest.mark.parametrize(
    ("most", "now"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
)
def test_a_container_leaves_less(machine: Path, most: str, now: str) -> None:
    (machine / most).parent.mkdir(exist_ok=True)
    (machine / most).write_text("1000000\n")
    (machine / now).write_text("900000\n")
    assert memory.available_bytes() == 100_000
    (machine / most).with_name("memory.stat").write_text("anon 3\ninactive_file 50000\n")
    assert memory.available_bytes() == 150_000


def test_nothing_to_read_is_no_error(machine: Path) -> None:
    (machine / "meminfo").write_bytes(b"\xff\xfe")
    assert memory.available_bytes() is None or memory.available_bytes() > 0


def test_what_a_process_holds_is_counted() -> None:
    before = memory.held_bytes()
    # a mapping of its own: a bytearray may take pages that the allocator had kept from others
    with mmap.mmap(-1, 1 << 26, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        assert memory.held_bytes() >= before + len(block) // 2 or not before


def test_room_is_what_the_limit_of_data_leaves() -> None:
    """The limit is tried in a process of its own: it could not be raised again here."""
    program = """
import resource
from kappascope.system.memory import has_room
limit = 200 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
print(has_room(2**30, 100 * 2**20), has_room(2**30, limit), has_room(2**20, limit))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout == b"True False False\n"
