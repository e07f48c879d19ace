"""The documentation as a site: built strictly, with every page in its menu and a full reference."""

import importlib.util
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import kappascope
from kappascope import corrections

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "zensical.toml").read_text())["project"]


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_page_is_in_the_menu() -> None:
    listed = {page for entry in SETTINGS["nav"] for page in entry.values()}
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")}


def test_the_reference_is_written_from_the_docstrings_of_every_public_name() -> None:
    names = [f"kappascope.{name}" for name in kappascope.__all__]
    names += [f"corrections.{each.__name__}" for each in corrections.Correction.__subclasses__()]
    page = script("reference").page()
    assert [name for name in names if f"### `{name}`" not in page] == []
    assert (ROOT / "docs" / "reference.md").read_text() == page, "run python docs/reference.py"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("zensical", reason="needs kappascope[docs]")
    shutil.copytree(ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", tmp_path)
    (tmp_path / "docs" / "reference.md").write_text(script("reference").page())
    build = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(build, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    built = {path.stem for path in (tmp_path / "site").glob("*.html")}
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= built
