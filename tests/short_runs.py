"""Short runs of the study of what is not learned, on a text that needs no download."""

from typing import Any

import pytest
from torch import Tensor

from kappascope.lab.resume import ResumePoint
from kappascope.studies.gpt.model import GPT, Corpus, validation
from kappascope.studies.unlearned import study
from kappascope.theory import noise
from odd_text import TEXT

CORPUS = Corpus.of(TEXT)


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Read a text that needs no download, draw little, and validate on few windows."""
    patch.setattr(study, "corpus", lambda text: CORPUS)
    for draws in ("WHITE_DRAWS", "SHAPED_DRAWS"):
        patch.setattr(study, draws, 5)
    patch.setattr(noise, "ADAM_SAMPLES", 2**16)
    patch.setattr(noise, "MUON_ENTRIES", 2**14)
    patch.setattr(study, "validation", few_windows)


def few_windows(model: GPT, windows: Tensor) -> float:
    """Return the loss on the first windows alone."""
    return validation(model, windows[:8])


def run(seed: int = 0, resume_point: ResumePoint | None = None, **setting: Any) -> list[Any]:
    """Everything a short trial yields but its times."""
    about = {**study.cell("AdamW", 0.5, steps=24), **setting}
    rows = study.trials(seed, resume_point or ResumePoint(), **about)
    return [
        {"experiment": "unlearned", "stream": "own", **about, "seed": seed, **row}
        for row in rows
        if row["component"] != "seconds"
    ]
