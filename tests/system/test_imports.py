"""No process that we start imports a stranger's file, wherever it lies and however it is called."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kappascope.system.imports import HOME, trusted, trusted_environment
from tiny_runs import COMMAND

SHADOWS = (  # modules that a worker loads sooner or later, of Python and of others
    "torch", "numpy", "scipy", "heapq", "random", "pickle", "struct", "socket", "select",
    "selectors", "signal", "json", "zipfile", "hashlib", "dataclasses", "functools", "typing",
    "inspect", "fnmatch", "ctypes", "pyarrow", "matplotlib", "multiprocessing", "sitecustomize",
    "kappascope",
)  # fmt: skip
SCRIPT = """
import sys
here = sys.path.pop(0)
import kappascope, torch, numpy, scipy.linalg, pyarrow, matplotlib, multiprocessing, random, heapq
import json, zipfile, hashlib, inspect, fnmatch, selectors
import kappascope.clinic.diagnose
sys.path.insert(0, here)
if __name__ == "__main__":
    print(len(kappascope.diagnose("pytorch_model.bin").matrices))
"""


def strange_folder(folder: Path, names: Sequence[str]) -> Path:
    """A model, and files beside it that leave a mark when they are run."""
    folder.mkdir()
    mark = "import os; open(os.path.join(os.path.dirname(__file__), f'{__name__}.mark'), 'w')"
    for name in names:
        (folder / f"{name}.py").write_text(mark)
    torch.save({"weight": torch.randn(8, 8)}, folder / "pytorch_model.bin")
    return folder


def marks(folder: Path) -> list[str]:
    return sorted(path.stem for path in folder.rglob("*.mark"))


def run(folder: Path, *command: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (HOME, path)))}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.fixture
def command(tmp_path: Path) -> tuple[str, str]:
    """The command as it is installed: a script in a folder of its own."""
    script = tmp_path / "bin" / "kappascope"
    script.parent.mkdir()
    script.write_text("from kappascope.__main__ import main\nmain()\n")
    return sys.executable, str(script)


def test_a_folder_of_25_shadows_runs_none_of_them(tmp_path: Path, command: tuple[str, str]) -> None:
    folder = strange_folder(tmp_path / "model", SHADOWS)
    done = run(folder, *command, "diagnose", ".")
    assert (done.returncode, done.stderr) == (0, "") and marks(folder) == []


def test_a_relative_or_empty_entry_of_the_path_is_not_passed_on(
    tmp_path: Path, command: tuple[str, str]
) -> None:
    # these come to the main process before any line of ours is run
    early = {"sitecustomize", "typing", "functools", "inspect", "dataclasses", "random", "json"}
    early |= {"struct", "signal", "fnmatch", "zipfile", "ctypes", "kappascope"}
    folder = strange_folder(tmp_path / "model", sorted({*SHADOWS} - early))
    path = os.pathsep.join(("", ".", str(folder)))
    done = run(folder, *command, "diagnose", "pytorch_model.bin", path=path)
    assert (done.returncode, done.stderr) == (0, "") and marks(folder) == []


def test_the_interpreters_own_option_for_modules_is_made_safe(tmp_path: Path) -> None:
    folder = strange_folder(tmp_path / "model", ("torch", "numpy", "scipy", "random", "typer"))
    done = run(folder, sys.executable, "-m", "kappascope", "diagnose", ".")
    assert (done.returncode, done.stderr) == (0, "") and marks(folder) == []


def test_workers_of_a_script_import_nothing_from_beside_it(tmp_path: Path) -> None:
    folder = strange_folder(tmp_path / "model", [name for name in SHADOWS if name != "kappascope"])
    (folder / "script.py").write_text(SCRIPT)
    done = run(folder, sys.executable, "script.py")
    assert done.stdout == "1\n", done.stderr
    assert marks(folder) == []


def test_trials_import_nothing_from_the_current_folder(tmp_path: Path) -> None:
    folder = strange_folder(tmp_path / "model", SHADOWS)
    done = run(folder, *COMMAND, "reproduce", "1", "--quick", "--out", str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert marks(folder) == [] and list(tmp_path.glob("out/units/*.unit"))


def test_the_folders_of_python_and_of_packages_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """A notebook's kernel is a file among the packages, a profiler one among Python's own."""
    for file in (pytest.__file__, os.__file__):
        main = type(sys)("__main__")
        main.__file__ = str(Path(file).parent / "kernel.py")
        monkeypatch.setitem(sys.modules, "__main__", main)
        folder = str(Path(os.__file__).parent)
        assert trusted([folder]) == [folder]


def test_a_relative_folder_is_dropped_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("", "lib", str(Path.cwd()), "/opt/lib")))
    assert trusted_environment()["PYTHONPATH"] == "/opt/lib"
    monkeypatch.setenv("PYTHONPATH", "")
    assert "PYTHONPATH" not in trusted_environment()
