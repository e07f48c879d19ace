"""A loop that was stopped goes on where it was, or from the start: never from a half."""

from pathlib import Path

import pytest
import torch

from kappascope.bookmarks import Bookmark
from toys import lessons

SETTING = {"stage": "tune", "rate": 0.1, "pause": 0.0}


def rows(bookmark: Bookmark) -> list[object]:
    return [row for row in lessons(3, bookmark, **SETTING) if row.get("component") == "loss"]


def stopped(path: Path, after: int) -> None:
    """Train until a state of that many steps is saved, and no further."""

    class Short(Bookmark):
        def steps(self, *given, **parts):
            for step in super().steps(*given, **parts):
                if step == after:
                    raise InterruptedError
                yield step

    with pytest.raises(InterruptedError):
        rows(Short(path))


@pytest.mark.parametrize("after", [1, 7, 19])
def test_the_end_is_the_same_bits_wherever_it_was_stopped(after: int, tmp_path: Path) -> None:
    stopped(tmp_path / "b", after)
    assert len(Bookmark(tmp_path / "b")._saved()["log"]) == after
    assert rows(Bookmark(tmp_path / "b")) == rows(Bookmark())


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"", lambda b: b[:99] + b"\0" * 99])
def test_a_damaged_bookmark_counts_as_none(damage, tmp_path: Path) -> None:
    stopped(tmp_path / "b", 5)
    (tmp_path / "b").write_bytes(damage((tmp_path / "b").read_bytes()))
    assert Bookmark(tmp_path / "b")._saved() is None
    assert rows(Bookmark(tmp_path / "b")) == rows(Bookmark())


def test_a_bookmark_of_other_parts_is_not_taken_up(tmp_path: Path) -> None:
    one, other = torch.Generator(), torch.Generator()
    marked = Bookmark(tmp_path / "b", every=0.0)
    for step in marked.steps(5, [], one=one):
        if step == 3:
            break
    assert next(Bookmark(tmp_path / "b").steps(5, [], one=one)) == 3
    assert next(Bookmark(tmp_path / "b").steps(5, [], other=other)) == 0
