"""Tables: rows are selected, grouped, paired and read, and copies are refused."""

import math

import numpy as np
import pyarrow as pa
import pytest

from kappascope.lab.statistics import median, paired_difference
from kappascope.lab.table import Table

ROWS = [
    {"experiment": "e1", "size": size, "stream": stream, "seed": seed, "component": component}
    | {"error": size + seed / 10 + (component == "row_norms")}
    for component in ("row_norms", "condition_number")
    for stream in ("paper", "own")
    for size in (64, 32)
    for seed in (2, 0, 1)
]


class TestTable:
    table = Table.of(ROWS)

    def test_values_come_in_the_order_of_seeds_however_rows_are_shuffled(self) -> None:
        random = np.random.default_rng(0)
        for _ in range(5):
            shuffled = Table.of([ROWS[i] for i in random.permutation(len(ROWS))])
            np.testing.assert_array_equal(shuffled.values(), self.table.values())
            one = shuffled.where(size=32, stream="own", component="condition_number")
            np.testing.assert_array_equal(one.values(), [32.0, 32.1, 32.2])

    def test_groups_come_in_rising_order_and_lose_no_row(self) -> None:
        groups = self.table.by("size")
        assert list(groups) == [32, 64]
        assert sum(map(len, groups.values())) == len(self.table)

    def test_rows_without_a_value_are_a_group_of_their_own(self) -> None:
        table = Table.of([{"depth": 2, "error": 1.0}, {"error": 2.0}])
        assert {k: t.values().tolist() for k, t in table.by("depth").items()} == {
            2: [1.0],
            None: [2.0],
        }
        assert len(table.where(depth=None)) == 1

    def test_an_unknown_column_is_named_with_those_there_are(self) -> None:
        with pytest.raises(KeyError, match=r"no column 'sise'; this table has .*'size'"):
            self.table.where(sise=32)

    def test_a_group_nobody_ran_is_empty_and_its_median_says_so(self) -> None:
        estimate = median(self.table.where(size=512).values())
        assert (estimate.n, estimate.reason) == (0, "there are no values")

    def test_failed_rows_stay_as_nan(self) -> None:
        table = Table.of([{"seed": 0, "error": None}, {"seed": 1, "error": 2.0}])
        np.testing.assert_array_equal(table.values(), [math.nan, 2.0])

    def test_a_duplicate_row_is_refused_and_named(self) -> None:
        table = Table.of([*ROWS, ROWS[0] | {"error": 7.0}])
        with pytest.raises(ValueError, match=r"1 duplicate rows, such as seed=2, .*size=64"):
            table.values()
        assert table.where(seed=0).values().size == 8

    def test_pairs_are_joined_on_seed_and_an_odd_trial_is_missing(self) -> None:
        own = self.table.where(stream="own", size=32)
        kappa = own.where(component="condition_number")
        rows = own.where(component="row_norms", seed=(0, 2))
        ours, theirs = kappa.paired(rows)
        np.testing.assert_array_equal(ours, [32.0, 32.1, 32.2])
        np.testing.assert_array_equal(theirs, [33.0, math.nan, 33.2])
        assert paired_difference(ours, theirs).missing == 1

    def test_the_same_seed_of_two_streams_is_two_trials(self) -> None:
        both = self.table.where(size=32, component="row_norms")
        ours, theirs = both.paired(both.where(stream="own"))
        assert (ours.size, int(np.isnan(theirs).sum())) == (6, 3)

    def test_an_ambiguous_pairing_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"occurs 2 times .* narrow the table with where"):
            self.table.where(component="row_norms").paired(self.table)

    def test_curves_follow_the_trials_along_a_column(self) -> None:
        table = self.table.where(component="row_norms", stream="own")
        expected = [[33.0, 65.0], [33.1, 65.1], [33.2, 65.2]]
        np.testing.assert_allclose(table.curves("size"), expected)

    def test_reads_an_arrow_table_with_lists_and_integers(self) -> None:
        columns = {"seed": [1, 0], "epoch": [5, 6], "values": [[1.0], [2.0]]}
        np.testing.assert_array_equal(Table.of(pa.table(columns)).values("epoch"), [6.0, 5.0])
