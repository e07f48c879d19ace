"""Tables and figure of the pretrained checkpoints stand on what was run."""

from kappascope.lab.figures import NOTHING
from kappascope.lab.table import Table
from kappascope.studies.pretrained.study import STUDY


def test_tables_and_panels_stand_on_what_was_run(partial_run: Table) -> None:
    tables = {one.title: one for one in STUDY.exhibits(partial_run)}
    assert len(tables) == 4
    assert all(len(r) == len(one.columns) for one in tables.values() for r in one.rows)
    drawn, empty = STUDY.plot(partial_run, NOTHING), STUDY.plot(NOTHING, NOTHING)
    assert len(drawn.axes) == len(empty.axes) == 6
    assert list(STUDY.exhibits(NOTHING)) == []
