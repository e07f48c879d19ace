"""Texts that differ in what there is to learn."""

from pathlib import Path

import pytest
import torch

from kappascope.lab import downloads
from kappascope.lab.tasks import generator
from kappascope.studies.unlearned.texts import ORDER, corpus, markov, programs


def test_a_markov_text_has_only_transitions_of_its_source() -> None:
    source = "to be or not to be, that is the question; " * 30
    known = {source[k : k + ORDER + 1] for k in range(len(source))}
    known |= {source[-ORDER:] + source[0]}
    written = markov(source, 500)
    assert len(written) == 500
    assert {written[k : k + ORDER + 1] for k in range(500 - ORDER)} <= known


def test_a_markov_text_is_no_copy() -> None:
    lots = torch.randint(4, (3000,), generator=generator("letters")).tolist()
    letters = "".join("abcd"[lot] for lot in lots)
    written = markov(letters, 1000)
    assert written[:100] not in letters
    assert set(written) == set("abcd")


@pytest.mark.parametrize("length", [100, 5000])
def test_programs_have_the_length_that_is_asked_for(length: int) -> None:
    assert len(programs(length)) == length


def test_the_users_own_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.txt"
    file.write_text("abcdefg hijklm\n" * 2000)
    monkeypatch.setenv(downloads.TEXT, str(file))
    assert corpus(downloads.label_of(file)).vocabulary == 17  # 15 letters and one unknown, odd


def test_programs_can_be_compiled() -> None:
    whole = programs(20_000)
    compile(whole[: whole.rindex("\ndef ")], "programs", "exec")
