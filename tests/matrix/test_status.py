"""A status is text for people that carries what code needs beside it."""

import copy
import json
import pickle

import pytest

from kappascope.matrix.status import OK, Outcome, Status

EXAMPLES = [OK, Status(Outcome.FAILED, "a: b: c"), Status(Outcome.SKIPPED, "too wide")]


@pytest.mark.parametrize("status", EXAMPLES)
@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda s: pickle.loads(pickle.dumps(s))]
)
def test_a_copy_in_another_process_has_the_same_outcome_and_detail(status, copied) -> None:
    other = copied(status)
    assert (other, other.outcome, other.detail) == (status, status.outcome, status.detail)


def test_the_text_is_a_string_like_any_other() -> None:
    assert json.dumps({"status": EXAMPLES[1]}) == '{"status": "failed: a: b: c"}'
    assert OK == "ok" and EXAMPLES[2] == "skipped: too wide"


def test_the_reason_is_the_detail_or_the_outcome() -> None:
    assert [status.reason for status in EXAMPLES] == ["ok", "a: b: c", "too wide"]
