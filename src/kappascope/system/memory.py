"""How much memory there is, in bytes and in the words of a user."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterable
from pathlib import Path

UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
LIBRARY_BYTES = UNITS["G"] // 2  # what torch and scipy hold before any tensor is read
# What torch and scipy take while they are loaded. With less some of them print and end the process.
LOADING_ADDRESSES, LOADING_DATA = 700 * UNITS["M"], 240 * UNITS["M"]
MEMINFO, CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")


def bytes_of(size: int | str) -> int:
    """Return a number of bytes, given as such or like ``8G`` or ``1.5 GB``.

    >>> bytes_of("8G") == bytes_of("8 GiB") == 8 * 2**30, bytes_of(1000)
    (True, 1000)
    >>> bytes_of("much")
    Traceback (most recent call last):
    ValueError: expected a size in bytes or like 8G, got 'much'
    """
    match = re.fullmatch(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([KMGT]?)(?:i?B)?\s*", str(size), re.I)
    value = int(float(match[1]) * UNITS[match[2].upper()]) if match else 0
    if value <= 0:
        raise ValueError(f"expected a size in bytes or like 8G, got {size!r}")
    return value


def gigabytes(size: int) -> str:
    """Return a number of bytes for people.

    >>> gigabytes(3 * 2**29)
    '1.5 GB'
    """
    return f"{size / UNITS['G']:.1f} GB"


def megabytes(size: int) -> str:
    """Return a smaller number of bytes for people.

    >>> megabytes(3 * 2**19)
    '1.5 MB'
    """
    return f"{size / UNITS['M']:.1f} MB"


def available_bytes() -> int | None:
    """Return the memory that processes may still take, of the machine or of the container.

    None if untold.

    >>> (available_bytes() or 1) > 0
    True
    """
    known = [room for room in (_of_the_machine(), _of_the_container()) if room is not None]
    return min(known) if known else None


def held_bytes() -> int:
    """Return the bytes of data that this process holds, as its limit of data counts them.

    0 where nothing tells.

    >>> held_bytes() >= 0
    True
    """
    return 1024 * _numbers(Path("/proc/self/status")).get("VmData:", 0)


def has_room(addresses: int, data: int) -> bool:
    """Tell whether the limits of this process leave so many bytes of addresses, and of data.

    >>> has_room(2**20, 2**20), has_room(2**62, 2**20)
    (True, False)
    """
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    wanted = (addresses, mmap.PROT_READ), (data, mmap.PROT_READ | mmap.PROT_WRITE)
    try:
        for size, access in wanted:  # mapped and never touched: it costs nothing
            mmap.mmap(-1, size, private, access).close()
    except (OSError, MemoryError):
        return False
    return True


def _of_the_machine() -> int | None:
    if (room := _numbers(MEMINFO).get("MemAvailable:")) is not None:
        return 1024 * room
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _of_the_container() -> int | None:
    """Return what a control group leaves.

    Pages of files that it counts are given back when needed.
    """
    for most, now in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        limit, used = (_lines(CGROUP / name) for name in (most, now))
        if limit and used and limit[0].isdecimal() and used[0].isdecimal():
            stat = _numbers((CGROUP / most).parent / "memory.stat")
            files = stat.get("inactive_file", 0) + stat.get("active_file", 0)
            return max(0, int(limit[0]) - int(used[0]) + files)
    return None


def _numbers(path: Path) -> dict[str, int]:
    """Return the lines of a file that are a name and a number."""
    pairs: Iterable[list[str]] = (line.split() for line in _lines(path))
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) > 1 and pair[1].isdecimal()}


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []


def is_out_of_memory(error: BaseException | None) -> bool:
    """Tell whether an error says that there is no memory left.

    >>> is_out_of_memory(MemoryError()), is_out_of_memory(RuntimeError("shapes differ"))
    (True, False)
    """
    # torch has a type for that on a GPU only; here its allocator's name has to do
    from_torch = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return isinstance(error, MemoryError) or from_torch
