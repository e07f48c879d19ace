"""``kappascope diff`` on files: exit codes, the table, and one strict JSON document."""

import json
from pathlib import Path

import pytest
import torch

from kappascope.cli.app import run


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    weights = {
        f"layers.{i}.fc.weight": torch.randn(24, 24, generator=torch.Generator().manual_seed(i))
        for i in range(2)
    }
    torch.save(weights, tmp_path / "a.pt")
    broken = {f"model.{name}": it.bfloat16() for name, it in weights.items()}
    broken["model.layers.1.fc.weight"][2, 3] = torch.inf
    torch.save(broken, tmp_path / "b.pt")
    return str(tmp_path / "a.pt"), str(tmp_path / "b.pt")


def test_the_table_has_the_gravest_layer_first(pair: tuple[str, str], capfd) -> None:
    assert run(["diff", *pair, "--jobs", "1"]) == 0
    shown = capfd.readouterr().out
    assert shown.index("damaged") < shown.index("rounding")
    assert "2 layers: 1 damaged, 1 rounding." in shown
    assert "'model.' stripped here" in shown


def test_damage_fails_where_the_user_says_so(pair: tuple[str, str], capfd) -> None:
    assert run(["diff", *pair, "--jobs", "1", "--fail-on", "damaged"]) == 1
    assert "not finite" in capfd.readouterr().err


def test_the_document_is_one_and_strict(pair: tuple[str, str], capfd) -> None:
    assert run(["diff", *pair, "--jobs", "1", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["summary"]["by_verdict"]["damaged"] == 1


@pytest.mark.parametrize(
    ("arguments", "code"), [(["nowhere.pt", "no.pt"], 2), (["a", "b", "--rename", "x"], 4), ([], 4)]
)
def test_what_fails_is_a_document_too(arguments: list[str], code: int, capfd) -> None:
    assert run(["diff", *arguments, "--json"]) == code
    assert json.loads(capfd.readouterr().out)["error"]["code"] == code
