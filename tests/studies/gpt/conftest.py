"""The text that models of these tests learn."""

from collections.abc import Iterator

import pytest

from kappascope.lab import downloads
from kappascope.studies.gpt import study as gpt
from odd_text import TEXT


@pytest.fixture(autouse=True)
def own_text(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(downloads, "text", lambda label: TEXT)
    gpt.read.cache_clear()
    yield
    gpt.read.cache_clear()
