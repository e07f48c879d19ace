"""What a trial depends on, as a digest: rewording leaves it as it is, other numbers change it.

A trial depends on its own function, on every definition in ``lab``, ``paper`` and ``studies`` that
this function reaches by name, directly or through others, and on the whole of each library folder
(``matrix``, ``corrections``, ...) that one of them uses. Docstrings, comments, annotations of
functions and the texts of errors do not count. Claims, captions, plots and the number of trials are
not reached from a trial, so that changing them leaves stored trials usable.
"""

from __future__ import annotations

import ast
import hashlib
import symtable
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kappascope.system.files import digest

PACKAGE = Path(__file__).parents[1]
# Folders that are covered as a whole if anything in them is used. Of the others `lab`, `paper` and
# `studies` are covered by name; no number of a trial comes from the rest (text, files, pages).
LIBRARY = ("matrix", "model", "theory", "corrections", "monitor", "checkpoints", "clinic")
BY_NAME = ("lab", "paper", "studies")
EFFECTS = ""  # the name under which the statements of a module stand that define no name


@cache
def trial_digest(trials: Callable[..., Any], *others: str) -> str:
    """Digest all that a function of trials depends on.

    ``others`` name further definitions that make its rows, as ``lab.tasks:Own``.

    >>> from kappascope.paper.e01_components import trials
    >>> trial_digest(trials) == trial_digest(trials) != trial_digest(trials, "lab.tasks:Own")
    True
    """
    tree = SourceTree(PACKAGE)
    page = Path(str(sys.modules[trials.__module__].__file__))
    named = [tuple(other.split(":")) for other in others]
    roots = [(tree.file(module), name) for module, name in named]
    return digest(tree.dependencies((page, trials.__name__), *roots))


@dataclass(frozen=True)
class SourceTree:
    """The source of the package in a folder: this one, or an edited copy of it."""

    root: Path

    def file(self, module: str) -> Path:
        """Return the file of a module, which is named from the package on: ``lab.tasks``."""
        path = self.root.joinpath(*module.split("."))
        return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")

    def dependencies(self, *roots: tuple[Path, str]) -> dict[str, str]:
        """Digest all definitions and folders that the roots reach, by their place.

        >>> places = SourceTree(PACKAGE).dependencies((PACKAGE / "lab" / "tasks.py", "start"))
        >>> list(places)
        ['lab/tasks.py start']
        """
        reached: dict[str, str] = {}
        todo: list[tuple[Path, str]] = list(roots)
        while todo:
            path, name = todo.pop()
            place = self._place(path, name)
            if place in reached:
                continue
            if path.is_dir():
                files = sorted(path.rglob("*.py"))
                reached[place] = digest([[self._place(f), source_file(f).digest] for f in files])
                modules = {module for file in files for module, _ in source_file(file).imported}
                todo += [used for module in modules for used in self._folder(module)]
            else:
                statements = source_file(path).statements(name)
                reached[place] = digest([ast.dump(statement) for statement in statements])
                todo += [(path, EFFECTS)] if source_file(path).statements(EFFECTS) else []
                for statement in statements:
                    todo += self._used(path, statement)
        return dict(sorted(reached.items()))

    def _place(self, path: Path, name: str = "") -> str:
        """Name a file or a definition without regard to where the package lies."""
        inside = path.is_relative_to(self.root)
        file = path.relative_to(self.root).as_posix() if inside else path.name
        return f"{file} {name}".strip()

    def _used(self, path: Path, statement: ast.stmt) -> Iterator[tuple[Path, str]]:
        """Yield the definitions and folders that a statement uses."""
        imports = source_file(path).imports
        attributes = _attributes(statement)
        for name in _global_names(statement):
            if name in imports:
                yield from self._resolved(*imports[name], attributes.get(name, ()))
            elif source_file(path).statements(name):
                yield path, name
        for local, (module, name) in _imports(ast.walk(statement)).items():  # inside functions
            yield from self._resolved(module, name, attributes.get(local, ()))

    def _resolved(
        self, module: str, name: str, attributes: Iterable[str]
    ) -> Iterator[tuple[Path, str]]:
        """Yield what ``from module import name`` uses, of which attributes are read."""
        whole = f"{module}.{name}".strip(".")
        room = whole.partition(".")[0]
        if room not in BY_NAME:
            yield from self._folder(whole)
        elif self.file(whole).is_file():  # a module, of which attributes are used
            yield from ((self.file(whole), attribute) for attribute in attributes)
        else:
            yield self.file(module), name

    def _folder(self, module: str) -> Iterator[tuple[Path, str]]:
        """Yield the library folder of a module; all of them, if it is a name of the package."""
        room = module.partition(".")[0]
        if room in LIBRARY:
            yield self.root / room, ""
        elif not (self.root / room).is_dir() and not self.file(room).is_file():
            yield from ((self.root / room, "") for room in LIBRARY if (self.root / room).is_dir())


@dataclass(frozen=True)
class SourceFile:
    """A file as it counts for a trial: its statements without words for the reader."""

    digest: str
    definitions: dict[str, list[ast.stmt]]
    imports: dict[str, tuple[str, str]]  # of the module's own names: from where, and what
    imported: frozenset[tuple[str, str]]  # everywhere in the file

    def statements(self, name: str) -> list[ast.stmt]:
        """Return the statements that define a name of the module."""
        return self.definitions.get(name, [])


@cache
def source_file(path: Path) -> SourceFile:
    """Read a file of the package once."""
    tree = _without_words(ast.parse(path.read_bytes()))
    definitions: dict[str, list[ast.stmt]] = {}
    outer = list(_statements(tree.body))
    for statement in outer:
        for name in _defined(statement):
            definitions.setdefault(name, []).append(statement)
    return SourceFile(
        hashlib.sha256(ast.dump(tree).encode()).hexdigest(),
        definitions,
        _imports(outer),
        frozenset(_imports(ast.walk(tree)).values()),
    )


def _without_words(tree: ast.Module) -> ast.Module:
    """Take out what no number depends on: docstrings, annotations of functions, texts of errors."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                node.returns = None
            case ast.arg():
                node.annotation = None
            case ast.Raise(exc=ast.Call() as call):
                call.args, call.keywords = [], []
        body = getattr(node, "body", None)
        if isinstance(body, list):
            kept = [part for part in body if not _is_text(part)]
            body[:] = kept or [ast.Pass()]
    return tree


def _is_text(node: ast.AST) -> bool:
    match node:
        case ast.Expr(value=ast.Constant(value=str())):
            return True
    return False


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under an ``if`` or in a ``with`` one by one."""
    for statement in body:
        inner = [part for name in ("body", "orelse", "handlers", "finalbody")
                 for part in getattr(statement, name, ())]  # fmt: skip
        if inner and not isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.For):
            yield from _statements(inner)
        else:
            yield statement


def _defined(statement: ast.stmt) -> set[str]:
    """Return the names that a statement of a module defines or changes."""
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
        return set()
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {statement.name}
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    inner = [node for target in targets if target for node in ast.walk(target)]
    return {node.id for node in inner if isinstance(node, ast.Name)} or {EFFECTS}


def _imports(nodes: Iterable[ast.AST]) -> dict[str, tuple[str, str]]:
    """List the names that are imported from the package: from which module, and which name."""
    return {
        alias.asname or alias.name: (module.partition(".")[2], alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for module in [node.module or ""]
        if module.partition(".")[0] == "kappascope"
        for alias in node.names
    }


def _global_names(statement: ast.stmt) -> set[str]:
    """Return the names of its module that a statement uses, inside functions too."""
    todo = [symtable.symtable(ast.unparse(statement), "<source>", "exec")]
    names: set[str] = set()
    while todo:
        table = todo.pop()
        todo += table.get_children()
        outer = table.get_type() == "module"
        names |= {s.get_name() for s in table.get_symbols() if outer or s.is_global()}
    return names


def _attributes(statement: ast.stmt) -> dict[str, set[str]]:
    """Return the attributes that a statement reads of names."""
    attributes: dict[str, set[str]] = {}
    for node in ast.walk(statement):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            attributes.setdefault(node.value.id, set()).add(node.attr)
    return attributes
