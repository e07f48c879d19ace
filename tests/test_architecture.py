"""The rooms of the package: who may use whom, what is called what, and docstrings that can be read.

A file uses only rooms above its own, and private files only of its own room. No public function or
class exists under one name in two modules. A docstring can be read alone.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOMS = [  # a file may use what stands before its own room
    "refusal", "text", "system", "matrix", "model", "theory", "pages", "corrections", "monitor",
    "checkpoints", "clinic", "lab", "paper", "studies", "integrations", "cli", "__main__",
]  # fmt: skip
SOURCE = Path(__file__).parents[1] / "src" / "kappascope"
PAGES = sorted(
    path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem != "__init__"
)
DEFINITIONS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
by_path = pytest.mark.parametrize(
    "path", PAGES, ids=lambda path: path.relative_to(SOURCE).as_posix()
)


def imported(path: Path) -> set[tuple[str, ...]]:
    """The modules of the package that a page imports, inside functions too."""
    modules: set[tuple[str, ...]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kappascope":
            home = str(node.module).split(".")[1:]
            modules |= {(*home, alias.name) for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            modules |= {tuple(parts[1:]) for parts in names if parts[0] == "kappascope"}
    return modules - {("__version__",)}


@by_path
def test_imports_point_up(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for room, *rest in imported(path):
        assert ROOMS.index(room) <= ROOMS.index(own), f"{own} may not import {room}"
        private = [part for part in rest if part.startswith("_") and part != "__init__"]
        assert room == own or not private, f"{path.name} imports {private} of {room}"


TESTS = Path(__file__).parent


def test_tests_have_the_tree_of_the_source() -> None:
    sources = {path.relative_to(SOURCE) for path in PAGES if not path.stem.startswith("__")}
    mirrored = {path.with_name(f"test_{path.stem.lstrip('_')}.py") for path in sources}
    tests = {path.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    assert not mirrored - tests
    # What concerns the whole package stands at the root; `test_every_...` is a folder's contract.
    others = {path for path in tests - mirrored if len(path.parts) > 1}
    assert not {path for path in others if not path.stem.startswith("test_every_")}


# Pages of experiments and studies, commands and adapters to other libraries may share names.
PAGES_OF_THEIR_OWN = ("paper", "studies", "integrations", "cli")


def test_no_public_name_exists_twice() -> None:
    homes: dict[str, list[str]] = {}
    for path in PAGES:
        where = path.relative_to(SOURCE)
        if where.parts[0] not in PAGES_OF_THEIR_OWN:
            for node in ast.parse(path.read_text()).body:
                if isinstance(node, DEFINITIONS) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(where.as_posix())
    assert not {name: files for name, files in homes.items() if len(files) > 1}


FRAGMENTS = {
    "Of",
    "As",
    "Those",
    "That",
    "Its",
    "Their",
}  # how a phrase begins that leans on others


@by_path
def test_docstrings_can_be_read_alone(path: Path) -> None:
    tree = ast.parse(path.read_text())
    documented = [n for n in ast.walk(tree) if isinstance(n, DEFINITIONS | ast.Module)]
    first = [(ast.get_docstring(node) or "").partition("\n\n")[0].split() for node in documented]
    weak = [
        " ".join(words) for words in first if words and (len(words) < 4 or words[0] in FRAGMENTS)
    ]
    assert not weak


SPEAKERS = {"print", "typer.echo", "Console", "sys.stdout.write", "sys.stderr.write"}


@by_path
def test_only_the_command_line_prints(path: Path) -> None:
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    speaks = [ast.unparse(c.func) for c in calls if ast.unparse(c.func) in SPEAKERS]
    assert path.parent.name == "cli" or not speaks


# Outside `matrix` nobody factorizes a weight: `nulls` takes eigenvalues of quadrature matrices,
# `inputs` (of the laboratory and of the theory) of covariances.
FACTORIZERS = ("nulls", "inputs")
SPECTRAL = re.compile(r"svd\w*|eig\w*|lu_\w+|ldl_\w+|cholesky\w*|matrix_rank|cond")


@by_path
def test_only_the_modules_for_it_factorize(path: Path) -> None:
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
    linear = [n.attr for n in nodes if isinstance(n.value, ast.Attribute)]
    found = [name for name in linear if SPECTRAL.fullmatch(name)]
    assert path.parent.name == "matrix" or path.stem in FACTORIZERS or not found


def test_the_library_does_not_load_the_laboratory() -> None:
    code = "import sys; from kappascope import *; sys.exit('kappascope.lab' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_does_not_load_torch() -> None:
    code = "import sys, kappascope.cli.app; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# The rooms whose public names are documented by an example that is checked.
SHOWN = ("matrix", "theory", "corrections")


@pytest.mark.parametrize(
    "path", [path for path in PAGES if path.parent.name in SHOWN], ids=lambda path: path.stem
)
def test_public_names_have_an_example_that_is_checked(path: Path) -> None:
    kinds = ast.FunctionDef | ast.ClassDef
    names = [n for n in ast.parse(path.read_text()).body if isinstance(n, kinds)]
    bare = [n.name for n in names if not n.name.startswith("_") and ">>>" not in _docstrings(n)]
    assert not bare


def _docstrings(node: ast.FunctionDef | ast.ClassDef) -> str:
    """All docstrings of a function, or of a class and its methods."""
    inner = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    return "".join(ast.get_docstring(n) or "" for n in (node, *inner))
