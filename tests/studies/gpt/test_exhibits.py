"""Tables and figure of the GPT study, complete or stopped early."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from kappascope.lab.experiment import verdicts
from kappascope.lab.resume import ResumePoint
from kappascope.lab.table import Table
from kappascope.studies.gpt import exhibits
from kappascope.studies.gpt import study as gpt


def test_steps_to_a_level_are_read_between_looks() -> None:
    steps, curve = np.array([0.0, 10, 20]), np.array([4.0, 3, 2])
    assert exhibits._crossing(steps, curve, 2.5) == 15
    assert math.isnan(exhibits._crossing(steps, curve, 1.0))


@cache
def small() -> Table:
    """The whole study, as small as it can be."""
    form = {"steps": 10, "warmup": 2, "layers": 1, "width": 32}
    study = replace(gpt.STUDY, grid=tuple({**s, **form} for s in gpt.STUDY.grid[::5]))
    rows = list(rows_of(study.grid))
    large, high = {**form, "width": 64}, {"steps": 40, "layers": 1, "width": 32}
    return Table.of(
        [*rows, *rows_of(tuple(gpt.later_settings(Table.of(rows), large=large, high=high)))]
    )


def rows_of(settings: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    about = {"experiment": "gpt", "stream": "own", "seed": 0}
    for setting in settings:
        yield from ({**about, **setting, **row} for row in gpt.trials(0, ResumePoint(), **setting))


def test_claims_exhibits_and_figure_bear_the_smallest_study() -> None:
    found = small()
    for claim in verdicts([gpt.STUDY], found)["claims"]:
        assert claim["verdict"] == "undecided"
        assert "Not measured" not in claim["explanation"], claim
    tables = list(exhibits.exhibits(found))
    assert [len(table.rows) for table in tables] == [10, 10, 4, 8]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert "Too few seeds" in tables[0].note
    assert len(gpt.STUDY.plot(found, Table.of([])).axes) == 6  # type: ignore[misc]


def test_a_study_that_was_stopped_early_shows_what_there_is() -> None:
    begun, nothing = small().where(stage="tune"), Table.of([])
    for found in (begun, nothing):
        assert list(exhibits.exhibits(found)) == []
        assert len(gpt.STUDY.plot(found, nothing).axes) == 6  # type: ignore[misc]
