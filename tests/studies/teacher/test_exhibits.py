"""Tables and figure of the teacher study are made of its rows."""

from kappascope.lab.table import Table
from kappascope.studies.teacher.study import STUDY


def test_tables_and_figure_are_made_of_its_rows(two_seeds: Table) -> None:
    tables = list(STUDY.exhibits(two_seeds))
    assert all(len(line) == len(t.columns) for t in tables for line in t.rows)
    assert any("gauge: " in cell for t in tables for line in t.rows for cell in line)
    assert len(STUDY.plot(two_seeds, Table.of([])).axes) == 6
