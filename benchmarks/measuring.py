"""What the benchmarks share: CPU time, and what their figures depend on."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ONE_THREAD = {f"{pool}_NUM_THREADS": "1" for pool in ("OMP", "OPENBLAS", "MKL")}
PACKAGES = ("torch", "numpy", "scipy", "weightwatcher", "geotorch")


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU time of one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def environment() -> dict[str, Any]:
    """Processor, versions of what is installed, threads of BLAS."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    found = {"cpu": models[0] if models else platform.processor(), "cores": os.cpu_count()}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    threads = os.environ.get("OMP_NUM_THREADS", "all")
    return found | {"python": platform.python_version(), "threads": threads}
