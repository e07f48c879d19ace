"""A small Llama in the place of the real one, and the rows of a study of it alone."""

from pathlib import Path

import pytest

from kappascope.lab import downloads
from kappascope.lab.resume import ResumePoint
from kappascope.lab.table import Table
from kappascope.studies.pretrained.study import trials
from small_llama import written


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small Llama in the place of the real one, and a text."""
    place = tmp_path / "llama2.data"
    place.write_bytes(written()[0])
    monkeypatch.setattr(downloads, "path", lambda name: place)
    monkeypatch.setattr(downloads, "text", lambda label: "then the theft\nof the tea\n" * 40)


@pytest.fixture
def partial_run(toy: None) -> Table:
    """The rows of the small Llama; no other network was run, and no kind by itself."""
    return Table.of(
        {"experiment": "pretrained", "stream": "own", "seed": seed, **setting, **row}
        for part, seeds in (("spectra", 1), ("whole", 6), ("single", 1))
        for seed in range(seeds)
        for setting in ({"model": "stories15m", "part": part},)
        for row in trials(seed, ResumePoint(), **setting, tokens=6)
        if "values" not in row
    )
