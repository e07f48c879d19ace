"""How much memory the vitals of one large matrix take, at most, beside what is said beforehand.

Every matrix is made and measured in a process of its own. Another one looks at it every few
milliseconds: at its data (what a limit of a worker counts) and at its resident pages. What the
libraries hold before the matrix is made is taken off.

    python benchmarks/memory.py [--sizes 4096 8192] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from measuring import ONE_THREAD, environment

if TYPE_CHECKING:  # only the processes that are measured load it
    from torch import Tensor

HERE = Path(__file__).parent
SIZES = (4096, 6144, 8192, 10240, 16384)
DTYPES = ("bfloat16", "float32")
KINDS = ("random", "singular", "dead column", "tall with a dead column", "crowded")
LOOK_SECONDS = 0.004


def made(kind: str, size: int, dtype: str) -> Tensor:
    """A matrix of a kind, a few rows at a time so that nothing but itself is ever held."""
    import torch

    stored = getattr(torch, dtype)
    rows = 2 * size if kind.startswith("tall") else size
    torch.manual_seed(0)
    a = torch.empty(rows, size, dtype=stored)
    for panel in a.split(256):
        panel.copy_(torch.randn(len(panel), size))
    if kind == "singular":
        a[:, 1] = a[:, 0]
        a[7] = 2 * a[3]
    if kind.endswith("dead column"):
        a[:, 5] = 0
    if kind == "crowded":  # a diagonal whose smallest values lie close together
        for panel in a.split(256):
            panel.mul_(1e-3 / size**0.5)
        a.diagonal().add_(1 + 9 * torch.linspace(0, 1, size) ** 2)
    return a


def child(kind: str, size: int, dtype: str) -> None:
    """Make and measure one matrix; a line before and after tells the parent where we are."""
    import torch

    from kappascope.matrix import spectra

    torch.set_num_threads(1)
    spectra.vitals(torch.randn(1900, 1900), complete=False)  # the libraries' own buffers
    print("ready", flush=True)
    sys.stdin.readline()
    a = made(kind, size, dtype)
    began = time.process_time()
    found = spectra.vitals(a)
    seconds = time.process_time() - began
    rank, method = found.effective_rank, found.method
    needed = spectra.bytes_needed((a.shape[0], a.shape[1]))
    held = a.numel() * a.dtype.itemsize
    print(
        json.dumps(
            {"seconds": round(seconds, 1), "method": method, "rank": rank}
            | {"shape": list(a.shape), "said": held + needed, "float64": 8 * a.numel()}
        ),
        flush=True,
    )


def _looked_at(process: int) -> dict[str, int]:
    """Bytes of data and of resident pages of a process, now."""
    lines = dict(
        line.split(":", 1) for line in Path(f"/proc/{process}/status").read_text().splitlines()
    )
    names = {"data": "VmData", "resident": "VmRSS"}
    return {name: int(lines[key].split()[0]) * 1024 for name, key in names.items() if key in lines}


def measured(kind: str, size: int, dtype: str) -> dict[str, Any]:
    """The peak of one matrix, in a process of its own."""
    command = [sys.executable, __file__, "--child", kind, str(size), dtype]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | ONE_THREAD | {"OMP_WAIT_POLICY": "passive"},
    ) as process:
        assert process.stdin and process.stdout
        process.stdout.readline()
        before = _looked_at(process.pid)
        peak = dict(before)
        process.stdin.write("go\n")
        process.stdin.flush()
        while process.poll() is None:
            now = _looked_at(process.pid)
            peak = {name: max(most, now.get(name, 0)) for name, most in peak.items()}
            time.sleep(LOOK_SECONDS)
        found = json.loads(process.stdout.readline())
    copies = found["float64"]
    most = {name: round((peak[name] - before[name]) / copies, 2) for name in peak}
    return {
        "kind": kind,
        "dtype": dtype,
        **{name: found[name] for name in ("shape", "rank", "method", "seconds")},
        "libraries_bytes": before,
        "peak_bytes": peak,
        "peak_in_float64_copies": most,
        "said_in_float64_copies": round(found["said"] / copies, 2),
    }


def main(say: Callable[[str], None] = print) -> None:
    """Measure all sizes, or those named, and write what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs="*", default=SIZES)
    parser.add_argument("--dtypes", nargs="*", default=DTYPES)
    parser.add_argument("--kinds", nargs="*", default=KINDS)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "memory.json")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        kind, size, dtype = given.child
        return child(kind, int(size), dtype)
    earlier = json.loads(given.out.read_text())["matrices"] if given.out.exists() else []
    rows = {_key(row): row for row in earlier}
    for size in given.sizes:
        for kind in given.kinds:
            for dtype in given.dtypes:
                row = measured(kind, size, dtype)
                rows[_key(row)] = row
                most, said = row["peak_in_float64_copies"], row["said_in_float64_copies"]
                say(f"{size} {kind} {dtype}: {most}, said {said}; {row['seconds']} s")
                document = {
                    "environment": environment(),
                    "matrices": [rows[k] for k in sorted(rows)],
                }
                given.out.write_text(json.dumps(document, indent=1) + "\n")
    return None


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["shape"][1], row["shape"][0], row["kind"], row["dtype"]


if __name__ == "__main__":
    main()
