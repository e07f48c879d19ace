"""The page on theory names what exists, and its tables are the results'."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from kappascope import theory

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "theory.md").read_text()
TESTS = "".join(path.read_text() for path in (ROOT / "tests" / "theory").glob("test_*.py"))


def results(name: str) -> Any:
    return json.loads((ROOT / "benchmarks" / "results" / f"{name}.json").read_text())


def rows(start: str) -> list[list[str]]:
    """The cells of the table rows that begin so."""
    lines = [line for line in PAGE.splitlines() if line.startswith(start)]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("name", theory.__all__)
def test_every_public_name_is_on_the_page(name: str) -> None:
    assert f"`{name}" in PAGE


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`(test_\w+)`", PAGE))))
def test_every_test_it_names_exists(name: str) -> None:
    assert f"def {name}(" in TESTS


@pytest.mark.parametrize("size", [32, 64, 128, 256, 512])
def test_its_predictions_are_those_of_the_results(size: int) -> None:
    cells = [c for c in results("prediction")["cells"] if c["size"] == size]
    said = [f"{c['measured']['median']:.3g} / {c['predicted']['median']:.3g}" for c in cells]
    assert rows(f"| {size} |")[0] == [str(size), str(cells[0]["n"]), *said]


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_its_depths_are_those_of_the_results(depth: int) -> None:
    looks = [row for row in results("depth")["rows"] if row["depth"] == depth]
    said = [f"{row['sgd']:.1f} / {row['flow']:.1f} / {row['modes']:.1f}" for row in looks]
    assert [str(depth), *said] in rows(f"| {depth} |")


def test_the_results_keep_what_the_page_promises() -> None:
    grid = results("prediction")["grid"]
    assert grid["cells"] == grid["within_10_percent"] == 25
    assert grid["smallest_sign_p_holm"] > 0.05
