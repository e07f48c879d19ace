"""One thread of OpenBLAS while a small matrix is factorized, and as many as before afterwards."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterator

import pytest
import torch

from kappascope.matrix import spectra
from kappascope.matrix.threads import _HELD, MOST_COLUMNS, OneThread, _allow, _libraries, steady


def counts() -> list[int]:
    return [library.get_num_threads() for library in _libraries()]


@pytest.fixture(autouse=True)
def two() -> Iterator[list[int]]:
    """Two threads of every OpenBLAS; a processor without OpenBLAS has nothing to ask."""
    before = counts()
    if not before:
        pytest.skip("numpy and scipy use no OpenBLAS here")
    for library in _libraries():
        _allow(library, 2)
    yield counts()
    for library, count in zip(_libraries(), before, strict=True):
        _allow(library, count)


@steady
def seen(matrix: torch.Tensor) -> list[int]:
    return counts()


def test_numpy_and_scipy_have_a_library_each() -> None:
    assert len(_libraries()) >= 2


def test_a_small_matrix_has_one_thread_and_a_large_one_all(two: list[int]) -> None:
    assert set(seen(torch.empty(8, 8))) == {1}
    assert seen(torch.empty(MOST_COLUMNS + 1, MOST_COLUMNS + 1, device="meta")) == two
    assert set(seen(torch.empty(MOST_COLUMNS + 1, 8, device="meta"))) == {1}
    assert counts() == two


def test_a_matrix_may_be_given_by_name() -> None:
    assert set(seen(matrix=torch.empty(8, 8))) == {1}
    assert spectra.vitals(matrix=torch.eye(3)).condition_number == 1


def test_the_count_comes_back_after_nested_calls_and_errors(two: list[int]) -> None:
    held = OneThread()
    with pytest.raises(ZeroDivisionError), held:
        with held:
            assert set(counts()) == {1}
        assert set(counts()) == {1}
        raise ZeroDivisionError
    assert counts() == two


def test_the_last_of_several_threads_of_python_brings_the_count_back(two: list[int]) -> None:
    held, entered, leave = OneThread(), threading.Event(), threading.Event()

    def stay() -> None:
        with held:
            entered.set()
            leave.wait(30)

    other = threading.Thread(target=stay)
    other.start()
    assert entered.wait(30)
    with held:
        pass
    assert set(counts()) == {1}
    leave.set()
    other.join(30)
    assert counts() == two


def test_the_bits_of_a_spectrum_do_not_depend_on_the_number_of_threads() -> None:
    matrix = torch.randn(300, 200, generator=torch.Generator().manual_seed(0))
    found = []
    for count in (1, 2):
        for library in _libraries():
            _allow(library, count)
        found.append((spectra.singular_values(matrix), spectra.vitals(matrix)))
    assert torch.equal(found[0][0], found[1][0])
    assert repr(found[0][1]) == repr(found[1][1])


def _report(pipe: multiprocessing.connection.Connection) -> None:
    pipe.send((counts(), _HELD.inside))


def test_a_child_forked_inside_begins_anew(two: list[int]) -> None:
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    with _HELD:
        child = fork.Process(target=_report, args=(there,))
        child.start()
    assert here.poll(30)
    assert here.recv() == (two, 0)
    child.join(30)
