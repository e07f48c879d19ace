"""The package: a light core, a wheel that holds all it needs, and files that others' tools read."""

import ast
import os
import re
import runpy
import shlex
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from kappascope.cli import app

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kappascope"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LABORATORY = {"lab", "paper", "studies"}


def loaded_at_once(path: Path) -> set[str]:
    """The packages that a file imports when it is imported itself."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found


def test_the_light_core_loads_only_what_it_depends_on() -> None:
    needed = {re.match(r"[\w-]+", line).group(0) for line in PROJECT["dependencies"]}  # type: ignore[union-attr]
    allowed = needed | {"kappascope", *sys.stdlib_module_names}
    core = [
        path
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in LABORATORY | {"integrations"}
    ]
    extra = {str(path): more for path in core if (more := loaded_at_once(path) - allowed)}
    assert extra == {}
    assert not needed & {"pyarrow", "matplotlib"}


def test_the_hook_and_the_action_run_a_command_that_is_taken() -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    taken = ("a/model.safetensors", "pytorch_model-00001-of-00002.bin")
    assert all(re.search(hook["files"], name) for name in taken)
    assert not any(re.search(hook["files"], name) for name in ("a.py", "tokenizer.bin"))
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    *_, last = action["runs"]["steps"]
    assert "${{" not in last["run"]  # else a path could be code
    given = set(last["env"].values())
    assert given == {f"${{{{ inputs.{name} }}}}" for name in action["inputs"]}


def test_the_hook_diagnoses_each_of_several_files_by_itself(tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    (tmp_path / "kappascope").write_text('#!/bin/sh\necho "$@"\ntest "$2" != "b c.pt"\n')
    (tmp_path / "kappascope").chmod(0o755)
    command = [*shlex.split(hook["entry"]), "a.pt", "b c.pt", "d.pt"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines == [f"diagnose {name} --quiet --fail-on critical" for name in command[-3:]]
    assert done.returncode == 1
    assert app.run(shlex.split(f"diagnose {tmp_path}/none.pt --quiet --fail-on critical")) == 2


def test_the_citation_names_the_authors_of_the_package() -> None:
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["authors"] == PROJECT["authors"] and cited["title"] == PROJECT["name"]
    assert cited["license"] == PROJECT["license"]


def test_links_of_the_readme_work_where_it_stands_alone() -> None:
    pytest.importorskip("hatchling", reason="needs hatchling")
    alone = runpy.run_path(str(ROOT / "hatch_build.py"))["standing_alone"]
    readme = (ROOT / "README.md").read_text()
    files = re.findall(r"\]\(((?!https:)[^)]+)\)", readme)
    assert "docs/tutorial.md" in files
    unreleased = alone(readme)
    assert "](" not in unreleased.replace("](https://", "")
    pictures = {"docs/images/diagnosis.png"}
    assert [file for file in files if f"({file})" not in unreleased and file not in pictures] == [
        file for file in files if f"[{file}]" in readme
    ]
    released = alone(readme, "https://host/project/blob/v1")
    assert [file for file in files if f"/v1/{file})" not in released] == []


def test_a_wheel_holds_every_file_and_works_without_the_source(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="needs hatchling")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
        (described,) = [name for name in held if name.endswith(".dist-info/METADATA")]
        assert "(docs/tutorial.md)" in (said := archive.read(described).decode())
        assert "](docs/" not in said
        archive.extractall(tmp_path / "installed")
    files = [
        path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    ]
    wanted = {f"kappascope/{path.relative_to(SOURCE).as_posix()}" for path in files}
    assert wanted - held == set()
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path / "installed")!r})
import torch, kappascope
assert kappascope.__file__.startswith({str(tmp_path)!r})
assert kappascope.diagnose({{"fc.weight": torch.eye(8)}}).html()
from kappascope.cli import app
sys.exit(app.run(["doctor"]))
"""
    ran = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=False)
    assert ran.returncode == 0, ran.stderr.decode()
