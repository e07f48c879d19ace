"""Texts that differ in what there is to learn."""

from collections import Counter

import pytest

from kappascope.lab.tasks import generator
from kappascope.studies.unlearned.texts import ORDER, markov, programs


def test_a_markov_text_has_only_transitions_of_its_source() -> None:
    source = "to be or not to be, that is the question; " * 30
    known = {source[k : k + ORDER + 1] for k in range(len(source))}
    known |= {source[-ORDER:] + source[0]}
    written = markov(source, 500)
    assert len(written) == 500
    assert {written[k : k + ORDER + 1] for k in range(500 - ORDER)} <= known


def test_a_markov_text_is_no_copy() -> None:
    letters = "".join("abcd"[int(k) % 4] for k in generator("letters").get_state()[:4000])
    written = markov(letters, 2000)
    assert written not in letters
    assert all(count > 300 for count in Counter(written).values()) or len(set(letters)) < 4


@pytest.mark.parametrize("length", [100, 5000])
def test_programs_have_the_length_that_is_asked_for(length: int) -> None:
    assert len(programs(length)) == length


def test_programs_can_be_compiled() -> None:
    whole = programs(20_000)
    compile(whole[: whole.rindex("\ndef ")], "programs", "exec")
