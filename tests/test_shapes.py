"""The shapes in signatures are checked while testing; tests/conftest.py says how and where."""

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from kappascope import corrections
from kappascope.lab.tasks import TeacherBatch
from kappascope.matrix import _gram
from kappascope.matrix.components import Components
from kappascope.model.layouts import Layout

pytestmark = pytest.mark.skipif(jaxtyping.config.jaxtyping_disable, reason="shapes are not checked")
VECTOR, MATRIX = torch.ones(2), torch.ones(2, 3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: _gram.gram(VECTOR),
        lambda: corrections.scaled(MATRIX, rows=torch.ones(1), columns=torch.ones(3)),
        lambda: Layout.plain((2,)).matrix(VECTOR),
        lambda: TeacherBatch(MATRIX, MATRIX),
    ],
    ids=["an argument", "two that disagree", "a result", "a field"],
)
def test_what_is_not_as_declared_is_refused(wrong) -> None:
    with pytest.raises(BeartypeCallHintViolation):
        wrong()


def test_a_function_refuses_in_its_own_words_first() -> None:
    with pytest.raises(ValueError, match="expected matrices"):
        Components(VECTOR)


def test_an_object_is_judged_by_what_it_holds() -> None:
    assert Components(MATRIX.tolist()).matrix.shape == MATRIX.shape
