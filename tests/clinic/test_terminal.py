"""A diagnosis on the terminal: a table that fits, and every finding in words."""

from typing import NoReturn

import pytest
import torch
from rich.console import Console

from kappascope.clinic import terminal
from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.diagnosis import Diagnosis
from kappascope.clinic.metrics import metric
from kappascope.clinic.terminal import lines, matrix_table, plain, trajectory_table
from kappascope.model.skipped import Skipped, unreadable


def test_a_narrow_terminal_keeps_names_and_drops_columns() -> None:
    found = diagnose({f"model.layers.{i}.self_attn.q_proj.weight": torch.randn(9, 7) for i in "01"})
    wide, narrow = matrix_table(found, 200), matrix_table(found, 60)
    assert len(wide.columns) > len(narrow.columns) >= 4
    assert str(next(iter(narrow.columns[0].cells))).endswith("q_proj")


def test_terminal_and_page_agree_on_what_the_dtype_leaves_open() -> None:
    u, s, vt = torch.linalg.svd(torch.randn(256, 256, generator=torch.Generator().manual_seed(0)))
    s[-1] = s[0] / 2e5  # far below what bfloat16 tells from zero
    rounded, exact = ((u * s) @ vt).bfloat16(), torch.diag(torch.linspace(0.01, 1, 256))
    found = diagnose({"a.weight": rounded, "b.weight": exact, "c.weight": 3 * rounded})
    rows = found.ranked
    told = list(zip(*(column.cells for column in matrix_table(found, 200).columns), strict=True))
    assert [str(cells[0]) for cells in told] == [row.name.removesuffix(".weight") for row in rows]
    place = [column.header for column in matrix_table(found, 200).columns].index("κ")
    assert [str(cells[place]) for cells in told] == [row.kappa_text for row in rows]
    bounds = {row.name: row.condition_number_low for row in found.matrices if not row.resolved}
    assert {row.name: row.kappa for row in rows if row.is_bounded} == bounds
    assert bounds.keys() == {"a.weight", "c.weight"}
    assert {metric("chance").level_of(row) for row in rows if row.is_bounded} == {0}


def test_the_terminal_tells_every_failure_up_to_a_number() -> None:
    lost = tuple(Skipped(f"w{i}", unreadable("cut off")) for i in range(20))
    found = Diagnosis("toy.pt", faults=lost)
    told = [str(line) for line in lines(found)]
    assert sum(line.startswith("failed: ") for line in told) == 9
    assert any("12 more" in line for line in told)


def test_of_a_long_name_the_end_is_kept() -> None:
    assert plain("abcdefghij", 5) == "…ghij"
    assert plain("abc", 5) == "abc"


def test_advice_is_told_of_those_matrices_alone_that_it_holds_for() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[3] *= 100
    found = diagnose({"embed_tokens.weight": weight, "layers.0.up_proj.weight": weight + 0})
    told = [str(line) for line in lines(found) if str(line).startswith("info: outlier-rows")]
    assert len(told) == 2 and "looked up" in told[0] and "looked up" not in told[1]


def test_a_very_narrow_terminal_still_tells_numbers() -> None:
    found = diagnose({"model.layers.0.self_attn.q_proj.weight": 3 * torch.eye(9)})
    narrow = matrix_table(found, 40)
    assert [column.header for column in narrow.columns] == ["matrix", "κ", "finding"]
    assert "then κ over chance" in str(narrow.caption) and not matrix_table(found, 200).caption


def test_numbers_of_one_matrix_are_told_of_it_alone() -> None:
    torch.manual_seed(0)
    found = diagnose({f"{i}.weight": torch.randn(64, 64) for i in range(3)})
    (told,) = [str(line) for line in lines(found, verbose=True) if "untrained" in str(line)]
    first = found.findings[0]
    assert f"untrained in {first.subject}: {first.evidence}; likewise in 2 more." in told


def test_code_that_treats_two_findings_is_told_once() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    weight[:, 3] *= 30  # takes bits from a scale for each row
    weight[5] *= 1000  # and this one from a scale for all
    told = [str(line) for line in lines(diagnose({"up_proj.weight": weight}))]
    assert sum("If you train on: try Multipliers" in line for line in told) == 2
    assert sum("corrections.Multipliers" in line for line in told) == 1


def test_a_trajectory_fits_a_narrow_terminal() -> None:
    found = [diagnose({f"{k}.weight": torch.randn(9, 7) for k in "ab"}) for _ in range(3)]
    narrow, wide = trajectory_table(found, 60), trajectory_table(found, 200)
    assert Console(width=60).measure(narrow).minimum <= 60
    assert len(narrow.columns) < len(wide.columns) == 7


def test_a_part_that_cannot_be_shown_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> NoReturn:
        raise ZeroDivisionError("division by zero")

    dead = torch.randn(8, 8)
    dead[0] = 0
    found = diagnose({"a.weight": dead, "b.weight": torch.eye(8)})
    monkeypatch.setattr(terminal, "_paragraph", fails)
    told = [line.plain for line in terminal.lines(found)]
    assert "2 matrices were examined." in told
    assert "failed: paragraphs could not be shown: ZeroDivisionError: division by zero" in told
    monkeypatch.setitem(terminal.CELLS, "κ", fails)
    assert terminal.matrix_table(found, 80)


def rendered(table: object, width: int = 200) -> str:
    console = Console(width=width)
    with console.capture() as drawn:
        console.print(table)
    return drawn.get()


def test_the_rank_is_called_what_it_is_and_chance_has_its_probability() -> None:
    torch.manual_seed(0)
    weights = {"a.weight": torch.randn(16, 16), "b.weight": torch.diag(torch.logspace(0, -6, 16))}
    found = diagnose(weights)
    drawn = rendered(terminal.matrix_table(found, 200))
    head, *lines = [line.split() for line in drawn.splitlines() if line.strip(" ─")]
    assert "σ>1%" in head and "p" in head and "rank" not in head
    row = next(row for row in found.matrices if row.name == "b.weight")
    assert row.null_tail is not None and f"{row.null_tail:.1g}" in " ".join(lines[0])
    assert f"{row.effective_rank}/16" in lines[0]


def test_what_moved_most_stands_first_and_changes_are_no_errors() -> None:
    torch.manual_seed(0)
    start = {name: torch.randn(16, 16) for name in ("a.weight", "b.weight", "c.weight")}
    steps = {"a.weight": 1e-3, "b.weight": 1e-1, "c.weight": 1e-2}
    found = diagnose(
        {name: start[name] + size * torch.randn(16, 16) for name, size in steps.items()},
        reference=start,
    )
    assert [row.name for row in found.ordered()] == ["b.weight", "c.weight", "a.weight"]
    drawn = rendered(terminal.matrix_table(found, 200))
    places = [drawn.index(f"\n {name} ") for name in "bca"]
    assert places == sorted(places) and "moved" in drawn
    told = [line.plain for line in terminal.lines(found)]
    assert told[0].startswith("Compared with") and "3 of 3" in told[0]
    assert "error" not in " ".join(told)


def test_where_kappa_is_open_what_is_resolved_leads() -> None:
    torch.manual_seed(0)
    square = {f"{k}.weight": (torch.randn(256, 256) / 16).bfloat16() for k in range(3)}
    found = diagnose(square | {"long.weight": (torch.randn(64, 8) / 8).bfloat16()})
    assert sum(row.is_unresolved for row in found.matrices) > 2
    assert found.ranked[0].name == "long.weight" or found.ranked[0].findings
    drawn = rendered(terminal.matrix_table(found, 200))
    assert drawn.index("σ>1%") < drawn.index("κ")
    told = " ".join(line.plain for line in terminal.lines(found))
    assert told.count("(bfloat16)") == 1
