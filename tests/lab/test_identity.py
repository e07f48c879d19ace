"""Rewording retrains nothing; changing the trial, its settings, the numerics or the training does.

Every test edits a copy of the real package and compares what the real experiments depend on.
"""

import ast
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from kappascope.lab import identity, runs
from kappascope.lab.experiment import Experiment, discover, studies
from kappascope.lab.identity import PACKAGE, SourceTree, trial_digest
from tiny_experiments import TOY, trials

EVERY: dict[str, Experiment] = {e.id: e for e in (*discover().values(), *studies().values())}
JUDGING = {"Claim", "Printed", "printed", "figure", "sheet", "Experiment", "Study", "Exhibit"}


def dependencies(root: Path = PACKAGE) -> dict[str, dict[str, str]]:
    """What the trials of every experiment and study of a copy of the package depend on."""
    tree = SourceTree(root)
    pages = {name: root / e.page.relative_to(PACKAGE) for name, e in EVERY.items()}
    makers = [(tree.file(m), n) for m, n in (maker.split(":") for maker in runs.STACKED)]
    return {
        name: tree.dependencies((page, EVERY[name].trials.__name__), *makers)
        for name, page in pages.items()
    }


@pytest.fixture(scope="module")
def before() -> dict[str, dict[str, str]]:
    return dependencies()


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(PACKAGE, tmp_path / "kappascope", ignore=shutil.ignore_patterns("*.pyc"))
    return tmp_path / "kappascope"


def edit(path: Path, change: Callable[[ast.Module], object]) -> None:
    """Change a file as a syntax tree; its comments and its layout go."""
    tree = ast.parse(path.read_text())
    change(tree)
    path.write_text(ast.unparse(ast.fix_missing_locations(tree)))


def changed(before: dict[str, dict[str, str]], root: Path) -> set[str]:
    """The experiments whose stored trials a changed copy of the package would not use."""
    after = dependencies(root)
    return {name for name in before if before[name] != after[name]}


def test_all_docstrings_comments_and_annotations_may_be_rewritten(before, copy: Path) -> None:
    def reword(tree: ast.Module) -> None:
        for node in ast.walk(tree):
            match node:
                case ast.FunctionDef() | ast.ClassDef() | ast.Module():
                    if ast.get_docstring(node) is not None:
                        del node.body[0]
                    node.body.insert(0, ast.Expr(ast.Constant("Said in another way.")))
            if isinstance(node, ast.FunctionDef):
                node.returns = ast.Name("object")

    for path in copy.rglob("*.py"):
        text = path.read_text()
        if "from __future__ import" in text or "\nfrom kappascope" in text:
            edit(path, reword)
    assert changed(before, copy) == set()


def test_claims_captions_plots_and_numbers_of_trials_may_be_changed(before, copy: Path) -> None:
    class Reword(ast.NodeTransformer):
        """Change every text and number in what judges, shows and describes trials."""

        inside = 0

        def visit_Call(self, node: ast.Call) -> ast.AST:
            judging = isinstance(node.func, ast.Name) and node.func.id in JUDGING
            self.inside += judging
            self.generic_visit(node)
            self.inside -= judging
            return node

        def visit_Constant(self, node: ast.Constant) -> ast.AST:
            if self.inside and isinstance(node.value, str | int | float):
                return ast.copy_location(ast.Constant(2 * node.value), node)
            return node

        def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
            return node

    texts = {
        path: path.read_text()
        for room in ("paper", "studies")
        for path in (copy / room).rglob("*.py")
    }
    for path in texts:
        edit(path, Reword().visit)
    assert (
        sum(ast.unparse(ast.parse(text)) != path.read_text() for path, text in texts.items()) > 19
    )
    assert changed(before, copy) == set()


def test_the_texts_of_errors_may_be_changed(before, copy: Path) -> None:
    path = copy / "lab" / "optimizers.py"
    text = path.read_text()
    assert "expected a gradient, found none" in text
    path.write_text(text.replace("expected a gradient, found none", "there is no gradient"))
    assert changed(before, copy) == set()


@pytest.mark.parametrize("name", ["e1", "e9", "e14", "gpt", "digits"])
def test_a_changed_trial_is_another_one_and_the_only_one(name: str, before, copy: Path) -> None:
    def longer(tree: ast.Module) -> None:
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name == "trials":
                node.body.append(ast.parse("0").body[0])

    edit(copy / EVERY[name].page.relative_to(PACKAGE), longer)
    assert changed(before, copy) == {name}


def test_a_changed_setting_is_another_trial(before, copy: Path) -> None:
    path = copy / EVERY["gpt"].page.relative_to(PACKAGE)
    text = path.read_text()
    path.write_text(text.replace("\nCLIP = 1.0", "\nCLIP = 2.0"))
    assert text != path.read_text()
    assert changed(before, copy) == {"gpt"}


def with_a_statement(path: Path) -> None:
    path.write_text(path.read_text() + "\nANOTHER = 1\n")


@pytest.mark.parametrize(
    ("file", "some", "others"),
    [
        ("matrix/components.py", {"e1", "e14", "e19", "gpt", "pretrained"}, set()),
        ("corrections/correction.py", {"e4", "e14", "gpt"}, {"e1", "e2", "e19", "digits"}),
        ("theory/nulls.py", {"e19", "pretrained"}, {"e1", "e2", "e14", "digits"}),
    ],
)
def test_changed_numerics_change_the_trials_that_use_them(
    file: str, some: set[str], others: set[str], before, copy: Path
) -> None:
    assert (copy / file).is_file()
    with_a_statement(copy / file)
    found = changed(before, copy)
    assert found >= some and not found & others


def test_changed_training_is_other_training(before, copy: Path) -> None:
    path = copy / "lab" / "training.py"
    path.write_text(path.read_text().replace("STEPS = 200", "STEPS = 201"))
    assert changed(before, copy) >= {"e1", "e2", "e14", "e19"}
    assert not changed(before, copy) & {"gpt", "digits", "teacher"}


def test_changed_streams_and_rows_are_other_ones(before, copy: Path) -> None:
    path = copy / "lab" / "tasks.py"
    path.write_text(path.read_text().replace("42 + 100 * k", "43 + 100 * k"))
    assert changed(before, copy) == set(EVERY)  # all are compared as stacked trials here


def test_experiment_1_covers_neither_theory_nor_corrections(before) -> None:
    folders = {place.partition("/")[0].split()[0] for place in before["e1"]}
    assert folders == {"paper", "lab", "matrix"}


def test_no_trial_reaches_what_judges_or_draws(before) -> None:
    files = {place.split()[0] for places in before.values() for place in places}
    assert not files & {f"lab/{name}.py" for name in ("claims", "measures", "figures", "report")}


def test_every_experiment_reaches_its_own_trial_and_the_numerics(before) -> None:
    for name, places in before.items():
        page = EVERY[name].page.relative_to(PACKAGE).as_posix()
        assert f"{page} trials" in places and "matrix" in places


def test_a_name_inside_a_function_is_not_the_modules(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(
        "caption = 'a'\nRATE = 1\nTABLE = {}\nTABLE['x'] = 2\n"
        "def trials():\n    caption = RATE\n    return caption, TABLE\n"
    )
    places = SourceTree(PACKAGE).dependencies((page, "trials"))
    assert list(places) == ["page.py RATE", "page.py TABLE", "page.py trials"]


def test_imports_inside_functions_and_of_modules_are_followed(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text(
        "import torch\nfrom kappascope.lab import tasks\n"
        "def trials():\n"
        "    from kappascope.matrix import spectra\n"
        "    return tasks.start, spectra\n"
    )
    places = SourceTree(PACKAGE).dependencies((page, "trials"))
    assert list(places) == ["lab/tasks.py start", "matrix", "page.py trials"]


def test_statements_that_define_nothing_count(tmp_path: Path) -> None:
    page = tmp_path / "page.py"
    page.write_text("import torch\ntorch.set_flush_denormal(True)\ndef trials():\n    pass\n")
    assert len(SourceTree(PACKAGE).dependencies((page, "trials"))) == 2


def test_the_digest_is_the_same_wherever_the_package_is_installed(before, copy: Path) -> None:
    assert dependencies(copy) == before


def test_a_changed_file_is_noticed_by_the_next_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    was = trial_digest(trials)
    changed = tmp_path / "tiny_experiments.py"
    changed.write_text(Path(TOY.page).read_text().replace("(1, 2)", "(1, 2, 3)"))
    trial_digest.cache_clear()
    monkeypatch.setattr("tiny_experiments.__file__", str(changed))
    assert trial_digest(trials) != was
    trial_digest.cache_clear()
    identity.source_file.cache_clear()
