"""Every example is run and asserts its result; so is every cell of the notebook."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
NEEDS = {"trainer": "transformers", "lightning_trainer": "lightning"}
APART = {**NEEDS, "new_experiment": "pyarrow"}  # in a process of their own: warnings, and workers


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_runs_and_asserts_its_result(path: Path, tmp_path, monkeypatch) -> None:
    assert "\nassert " in path.read_text() or "    assert " in path.read_text()
    if path.stem in NEEDS:
        pytest.importorskip(NEEDS[path.stem])
    monkeypatch.chdir(tmp_path)
    if path.stem not in APART:
        runpy.run_path(str(path))
        return
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_notebook_runs_from_top_to_bottom(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    cells = json.loads((EXAMPLES / "first_look.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []  # made by whoever runs it
            exec("".join(cell["source"]), names)
