"""The layers of the package: a module imports only from the lines above its own."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import kappascope

LAYERS = """
    prose refusals kernels
    precision panels files weights
    lanczos tails
    squares
    krylov
    spectra
    components matrices statistics pairs
    placement slots claims series theory products
    factors chains
    attachments
    corrections
    measures tasks networks engines store drawing review
    training figures inputs conclusions checkpoints bookmarks materials pages
    lab clinic
    experiments studies
    study
    report terminal
    exhibition
    cli
    __main__
"""
SOURCE = Path(__file__).parents[1] / "src" / "kappascope"
DEPTH = {name: i for i, line in enumerate(LAYERS.splitlines()) for name in line.split()}
PAGES = sorted(path for path in SOURCE.rglob("*.py") if path.name != "__init__.py")


def imported(path: Path) -> set[str]:
    """The modules of the package that a page imports, inside functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kappascope":
            parts = (node.module or "").split(".")
            found |= {parts[1]} if len(parts) > 1 else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
            found |= {parts[1] for parts in names if parts[0] == "kappascope" and len(parts) > 1}
    return found - {"__version__"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_imports_point_up(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    wrong = {other for other in imported(path) if DEPTH[other] >= DEPTH[own] and other != own}
    assert not wrong, f"{own} may not import {wrong}"


SPEAKERS = {"print", "typer.echo", "Console", "sys.stdout.write", "sys.stderr.write"}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_only_the_command_line_prints(path: Path) -> None:
    calls = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Call)]
    speaks = [ast.unparse(c.func) for c in calls if ast.unparse(c.func) in SPEAKERS]
    assert path.stem in ("cli", "terminal") or not speaks


# `pairs` follows two values of a weight; the others take no weight's: `nulls` those of quadrature
# matrices, `inputs` (of the laboratory and of the theory) of covariances.
FACTORIZERS = ("spectra", "krylov", "squares", "lanczos", "kernels", "pairs", "nulls", "inputs")
SPECTRAL = re.compile(r"svd\w*|eig\w*|lu_\w+|ldl_\w+|cholesky\w*|matrix_rank|cond")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_only_the_modules_for_it_factorize(path: Path) -> None:
    nodes = [n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Attribute)]
    linear = [n.attr for n in nodes if isinstance(n.value, ast.Attribute)]
    found = [name for name in linear if SPECTRAL.fullmatch(name)]
    assert path.stem in FACTORIZERS or not found


def test_the_library_does_not_load_the_laboratory() -> None:
    code = "import sys; from kappascope import *; sys.exit('kappascope.lab' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_help_does_not_load_torch() -> None:
    code = "import sys, kappascope.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PUBLIC = {*kappascope._HOMES.values(), *kappascope.__all__}
WITHIN = """krylov squares lanczos kernels panels precision statistics tails products chains pairs
    checkpoints examination diagnosis"""


@pytest.mark.parametrize(
    "path",
    [path for path in PAGES if {path.stem, path.parent.name} & (PUBLIC | {*WITHIN.split()})],
    ids=lambda path: path.stem,
)
def test_public_names_have_an_example_that_is_checked(path: Path) -> None:
    kinds = ast.FunctionDef | ast.ClassDef
    names = [n for n in ast.parse(path.read_text()).body if isinstance(n, kinds)]
    bare = [n.name for n in names if not n.name.startswith("_") and ">>>" not in _told(n)]
    assert not bare


def _told(node: ast.FunctionDef | ast.ClassDef) -> str:
    """All docstrings of a function, or of a class and its methods."""
    inner = [n for n in node.body if isinstance(n, ast.FunctionDef)]
    return "".join(ast.get_docstring(n) or "" for n in (node, *inner))
