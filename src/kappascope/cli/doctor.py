"""``kappascope doctor``: what is installed, what works, and what is missing for what."""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING

from kappascope.cli._options import Debug
from kappascope.cli._terminal import draw, loading, tell
from kappascope.refusal import Refusal
from kappascope.system.extras import PLUGINS, offered
from kappascope.system.memory import available_bytes
from kappascope.system.workers import CORES, ONE_THREAD
from kappascope.text import ruled_table

if TYPE_CHECKING:  # the command starts without it
    from rich.table import Table

KNOWN = [[0.0, 2.0], [3.0, 0.0]]  # a matrix whose singular values are 3 and 2
TOLERANCE = 1e-12  # a few roundings of float64
MOST_NAMED = 4  # missing packages of one extra; more of them are counted
PURPOSES = {
    "lab": "kappascope reproduce, study, findings, verify; tables in Parquet",
    "notebook": "a diagnosis as frames of pandas and as figures",
    "transformers": "callbacks for the Trainer of Hugging Face",
    "lightning": "callbacks for the Trainer of Lightning",
    "tensorboard": "monitor: curves in TensorBoard",
    "gguf": "diagnose: quantized tensors of GGUF files",
    "remote": "diagnose: checkpoints of a Hub or an object store",
    "ray": "--engine ray: work on many machines",
    "docs": "the pages of the documentation as a site",
    "test": "make test",
    "benchmark": "benchmarks/",
}
"""What each optional extra is for."""


def doctor(debug: Debug = False) -> None:
    """Show versions, BLAS, threads, memory and extras, and say what is missing for what.

    Paste the output into a report of a problem.

    For example:
      kappascope doctor
    """
    with loading():
        import torch

        from kappascope.matrix import spectra

    draw(_table("this machine", _machine(), heading="value"))
    draw(_table("library", _libraries(), heading="version"))
    draw(_table("extra", _extras(), heading="state", last="what it is for"))
    if found := list(_plugins()):
        draw(_table("plug-in", iter(found), heading="kind", last="where it is"))
    expected = [3.0, 2.0]
    measured = [float(value) for value in spectra.singular_values(torch.tensor(KNOWN))]
    if any(abs(m - e) > TOLERANCE for m, e in zip(measured, expected, strict=True)):
        wrong = f"singular values of a known matrix are {measured}, expected {expected}"
        raise Refusal(1, "BLAS", wrong, "install torch and scipy anew")
    tell("Singular values of a known matrix come out right.")


def _machine() -> Iterator[tuple[str, str]]:
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    yield "Python", f"{platform.python_version()} at {sys.executable}"
    yield "cores", str(CORES)
    free = available_bytes()
    yield "memory that is free", "unknown" if free is None else f"{free / 2**30:.1f} GiB"
    yield "threads of BLAS", ", ".join(f"{key}={os.environ.get(key, '')}" for key in ONE_THREAD)


def _libraries() -> Iterator[tuple[str, str]]:
    import torch

    for name in ("kappascope", *_required("")):
        yield name, _installed(name) or "missing"
    found = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    yield "BLAS of torch", found.group(1) if found else "unknown"
    yield "BLAS of scipy", _blas_of_scipy()
    devices = [f"{torch.cuda.device_count()} CUDA"] if torch.cuda.is_available() else []
    devices += ["MPS"] if torch.backends.mps.is_available() else []
    yield "devices beside the CPU", ", ".join(devices) or "none"


def _blas_of_scipy() -> str:
    from scipy.__config__ import show

    found = show(mode="dicts")["Build Dependencies"]["blas"]
    return f"{found.get('name', 'unknown')} {found.get('version', '')}".strip()


def _extras() -> Iterator[tuple[str, str, str]]:
    for extra, purpose in PURPOSES.items():
        missing = [name for name in _required(extra) if not _installed(name)]
        named = ", ".join(missing) if len(missing) <= MOST_NAMED else f"{len(missing)} packages"
        state = f"missing: {named}" if missing else "installed"
        yield f"kappascope[{extra}]", state, purpose


def _plugins() -> Iterator[tuple[str, str, str]]:
    for group, kind in PLUGINS.items():
        for name, place in offered(group):
            yield name, kind, place


def _required(extra: str) -> list[str]:
    """List the packages that an extra asks for; the empty extra is the library itself."""
    wanted = f"extra == '{extra}'" if extra else ""
    names = []
    for line in requires("kappascope") or ():
        condition = line.partition(";")[2].strip().replace('"', "'")
        if condition == wanted:
            names.append(re.match(r"[\w.-]+", line).group(0))  # type: ignore[union-attr]
    return [name for name in names if name != "kappascope"]


def _installed(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _table(title: str, rows: Iterator[tuple[str, ...]], heading: str, last: str = "") -> Table:
    from rich.text import Text  # brackets in a name of an extra are no markup

    table = ruled_table(title, heading, *([last] if last else []))
    table.columns[0].no_wrap = True
    for row in rows:
        table.add_row(*map(Text, row))
    return table
