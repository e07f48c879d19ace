"""Tables and figure of the digits, whatever was run."""

import pytest

from kappascope.lab.figures import NOTHING
from kappascope.lab.table import Table
from kappascope.studies.digits import study
from kappascope.studies.digits.study import STUDY


class TestPresentation:
    def test_every_table_is_full(self, kappa_tells: Table) -> None:
        assert STUDY.exhibits
        tables = list(STUDY.exhibits(kappa_tells))
        assert all(len(row) == len(t.columns) for t in tables for row in t.rows)
        assert tables[-1].rows[0][:2] == ("all", "479 of 480")
        assert tables[0].rows[0][1].endswith("*")

    def test_a_setting_of_which_no_network_arrived_is_told(self, kappa_tells: Table) -> None:
        lost = kappa_tells.where(draw=0, seed=0)
        assert study.exhibits(lost)
        assert all("–" in row for row in list(study.exhibits(lost))[-1].rows)

    @pytest.mark.parametrize("empty", [True, False])
    def test_the_figure_is_drawn_whatever_was_run(self, kappa_tells: Table, empty: bool) -> None:
        assert STUDY.plot
        figure = STUDY.plot(NOTHING if empty else kappa_tells, NOTHING)
        assert len(figure.axes) == 6

    def test_a_quick_run_is_a_part_of_the_whole(self) -> None:
        assert all(setting in STUDY.grid for setting in STUDY.quickly().grid)
