"""A few small runs of the study, shared by its tests."""

import pytest
import torch

from kappascope.lab.table import Table
from kappascope.studies.gpt.model import Corpus
from kappascope.studies.unlearned import study
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
        patch.setattr(study, "WHITE_DRAWS", 19)
        patch.setattr(study, "SHAPED_DRAWS", 9)
        patch.setattr(study, "HELD_FROM", 3)
        torch.manual_seed(0)
        cells = [study.cell(o, study.DECAYS[o][2], steps=24) for o in study.OPTIMIZERS]
        about = {"stage": "matter", "steps": 6}
        cells += [study.cell("AdamW", 0.5, held="norm", level=x, **about) for x in study.LEVELS]
        return Table.of(row for cell in cells for seed in range(3) for row in run(seed, **cell))
