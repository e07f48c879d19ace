"""A few short runs of the study, shared by its tests."""

import pytest

from kappascope.lab.table import Table
from kappascope.studies.unlearned import study
from short_runs import run, shorten


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make every run of a test a short one."""
    shorten(monkeypatch)


@pytest.fixture(scope="session")
def small_rows() -> Table:
    """Three seeds of each optimizer with decay, and arms that hold the norm."""
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch)
        cells = [study.cell(o, study.DECAYS[o][2], steps=24) for o in study.OPTIMIZERS]
        cells += [
            study.cell("AdamW", 0.5, stage="matter", steps=5, held="norm", level=level)
            for level in study.LEVELS
        ]
        return Table.of(row for cell in cells for seed in range(3) for row in run(seed, **cell))
