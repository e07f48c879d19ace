"""Tables and figure of the study, on short runs."""

import numpy as np
import pytest

from kappascope.lab.table import Table
from kappascope.studies.unlearned.exhibits import beyond_ghosts, exhibits, learned_share, plot


def test_there_is_a_table_of_everything_that_ran(small_rows: Table) -> None:
    tables = list(exhibits(small_rows))
    shown = {table.title.split(":")[0].split(",")[0] for table in tables}
    assert {"How far parts end from their ghosts", "Three laws", "Does it matter"} <= shown
    assert not {"Which knob sets which part", "Public checkpoints"} & shown  # which did not run
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)


def test_nothing_is_shown_where_nothing_ran() -> None:
    assert list(exhibits(Table.of([]))) == []


def test_what_is_far_from_its_ghosts_is_beyond_them() -> None:
    rows = Table.of(
        {"value": value, "ghost": 0.0, "ghost_spread": 0.01} for value in (5.0, 0.02, 0.0, -3.0)
    )
    assert beyond_ghosts(rows).tolist() == [1.0, 0.0, 0.0, 1.0]


def test_a_share_lies_between_none_and_all(small_rows: Table) -> None:
    share = learned_share("AdamW", "log_norm", "up")(small_rows).value
    assert 0.0 <= share <= 1.0


@pytest.mark.parametrize("is_empty", [True, False])
def test_the_figure_is_drawn_of_whatever_there_is(small_rows: Table, is_empty: bool) -> None:
    figure = plot(Table.of([]) if is_empty else small_rows, Table.of([]))
    drawn = [np.asarray(line.get_ydata()) for axes in figure.axes for line in axes.get_lines()]
    assert (len(drawn) > 2) != is_empty
