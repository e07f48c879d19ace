"""A few small runs of the study, shared by its tests."""

import pytest

from kappascope.lab.table import Table
from kappascope.studies.gpt.model import Corpus
from kappascope.studies.unlearned import study
from kappascope.theory import noise
from odd_text import TEXT
from short_runs import run


@pytest.fixture(autouse=True)
def own_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a text that needs no download."""
    monkeypatch.setattr(study, "corpus", lambda text: Corpus.of(TEXT))


@pytest.fixture(scope="session")
def small_rows() -> Table:
    """Three seeds of each optimizer with decay, and arms that hold the norm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "corpus", lambda text: Corpus.of(TEXT))
        for draws in ("WHITE_DRAWS", "MUON_DRAWS", "SHAPED_DRAWS"):
            patch.setattr(study, draws, 5)
        patch.setattr(noise, "ADAM_SAMPLES", 2**16)
        patch.setattr(study, "HELD_FROM", 3)
        cells = [study.cell(o, study.DECAYS[o][2], steps=24) for o in study.OPTIMIZERS]
        cells += [
            study.cell("AdamW", 0.5, stage="matter", steps=6, held="norm", level=level)
            for level in study.LEVELS
        ]
        return Table.of(row for cell in cells for seed in range(3) for row in run(seed, **cell))
