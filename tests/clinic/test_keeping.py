"""Kept rows: they come back as they were, and rows of something else are never taken for them."""

import math
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kappascope.clinic.diagnose import case, diagnose
from kappascope.clinic.examination import Examination
from kappascope.clinic.keeping import Keeping, kept_rows_of, rows_bytes
from kappascope.matrix.status import Outcome, Status
from kappascope.model.chains import Chain
from kappascope.model.skipped import unreadable
from kappascope.system.store import Store
from kappascope.system.workers import Done


@pytest.fixture
def store(tmp_path: Path) -> Store:
    (kept := Store(tmp_path / "rows")).units.mkdir(parents=True)
    return kept


def checkpoint(folder: Path, seed: int = 0) -> str:
    random = torch.Generator().manual_seed(seed)
    weights = {f"layers.{k}.weight": torch.randn(6, 6, generator=random) for k in range(4)}
    weights["layers.1.weight"][0, 0] = math.nan
    weights["conv.weight"] = torch.randn(4, 3, 3, 3, generator=random)
    torch.save(weights, folder / "model.pt")
    return str(folder / "model.pt")


class Counting:
    """An engine that counts what it is given."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.items = inner, 0

    def run(self, work: Callable[[Any], object], items: Sequence[Any]) -> Generator[Done[Any]]:
        self.items += len(items)
        yield from self.inner.run(work, items)


def examined(path: str, store: Store, **options: Any) -> tuple[dict[str, Any], int]:
    """A diagnosis with a store, and how many tasks had to be done for it."""
    prepared = case(path, store=store, jobs=1, **options)
    assert isinstance(prepared.engine, Keeping)
    counting = Counting(prepared.engine.engine)
    object.__setattr__(prepared.engine, "engine", counting)
    rows = [row for done in prepared.examine() for row in done.result]
    assert kept_rows_of(rows_bytes(rows)) == rows or any(_has_nan(row) for row in rows)
    return prepared.concluded(rows).document(), counting.items


def _has_nan(row: Any) -> bool:
    return "nan" in repr(row)


def test_what_was_examined_is_not_examined_again(tmp_path: Path, store: Store) -> None:
    path = checkpoint(tmp_path)
    first, done = examined(path, store)
    again, none = examined(path, store)
    assert done > 4 and none == 0
    assert first == again == diagnose(path, jobs=1).document()


def test_other_files_and_other_questions_are_asked_anew(tmp_path: Path, store: Store) -> None:
    path = checkpoint(tmp_path)
    _, done = examined(path, store)
    (other := tmp_path / "other").mkdir()
    compared, asked = examined(path, store, reference=checkpoint(other, seed=2))
    assert asked > 0 and any("delta" in row for row in compared["matrices"])
    checkpoint(tmp_path, seed=1)
    assert examined(path, store)[1] == done


def test_a_sealed_file_without_rows_is_told_of_and_done_again(tmp_path: Path, store: Store) -> None:
    path, told = checkpoint(tmp_path), []
    before, _ = examined(path, store)
    victim = store.names()[0]
    store.put(victim, b'[{"Examination": {"name": "w"}}]')
    assert examined(path, store, tell=told.append) == (before, 1)
    assert told == [f"{store}: {victim} holds no rows and is done again"]


numbers = st.floats() | st.none()
ROWS = st.builds(
    Examination,
    name=st.text(),
    shape=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    dtype=st.just("float32"),
    status=st.builds(Status, st.sampled_from(Outcome), st.text()),
    sigma_max=numbers,
    errors=st.dictionaries(st.text(), numbers),
    failure=st.none() | st.builds(unreadable, st.text()),
)


@given(st.lists(ROWS))
def test_rows_come_back_to_the_last_bit(rows: list[Examination]) -> None:
    back = kept_rows_of(rows_bytes(rows))
    assert repr(back) == repr(rows)
    assert [type(row.status) for row in back] == [type(row.status) for row in rows]


@given(st.binary() | st.sampled_from([b"{}", b"[1", b'[{"os.system": {}}]', b'[{"a": 1, "b": 2}]']))
def test_bytes_that_hold_no_rows_are_an_error_of_one_kind(body: bytes) -> None:
    with suppress(ValueError):
        assert isinstance(kept_rows_of(body), list)


def test_products_and_chains_are_kept_too(tmp_path: Path, store: Store) -> None:
    (folder := tmp_path / "attention").mkdir()
    (folder / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
    random = torch.Generator().manual_seed(0)
    names = [f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo"]
    weights = {name: torch.randn(8, 8, generator=random) for name in names}
    torch.save(weights, folder / "pytorch_model.bin")
    first, done = examined(str(folder), store)
    assert first["products"] and examined(str(folder), store) == (first, 0) and done
    with pytest.raises(TypeError, match="which is not kept"):
        rows_bytes([object()])
    assert kept_rows_of(
        rows_bytes([Chain("a", ("b",), (1,), None, False, None, Status(Outcome.OK))])
    )
