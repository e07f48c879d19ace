"""The CPU's way and torch's way agree, whatever the shape and the order of entries."""

from collections.abc import Iterator
from contextlib import AbstractContextManager
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import hard_matrices
from kappascope.matrix import _blas, spectra
from kappascope.matrix.spectra import Method
from method_limits import limits

TYPES = [torch.float32, torch.float64]


@pytest.fixture(params=[True, False], ids=["numpy and scipy", "torch"], autouse=True)
def library(request) -> Iterator[None]:
    """What the CPU uses, and what every other device does."""
    with mock.patch.object(_blas, "_on_cpu", lambda _: request.param):
        yield


def drawn(*shape: int, dtype: torch.dtype = torch.float64, across: bool = False) -> Tensor:
    entries = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return entries.mT.contiguous().mT if across else entries


def blocks_of(height: int, size: int) -> AbstractContextManager[object]:
    """Blocks of so many rows to solve with, for any number of vectors from 2 to 16."""
    return mock.patch.multiple(
        _blas,
        UNPACKED_MULTIPLICATIONS=height * size * 16,
        MIN_STRIP_ROWS=1,
        BLOCKED_VECTORS=range(2, 17),
    )


@pytest.mark.parametrize("height", [1, 7, 10**6])
@pytest.mark.parametrize("across", [False, True])
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 20))
def test_products(height: int, across: bool, rows: int, columns: int, vectors: int) -> None:
    a, x = drawn(rows, columns, across=across), drawn(columns, vectors)
    limits = {"UNPACKED_MULTIPLICATIONS": height * columns * vectors, "MIN_STRIP_ROWS": 1}
    with mock.patch.multiple(_blas, **limits):
        for each in (x, x.mT.contiguous().mT):
            torch.testing.assert_close(_blas.multiply(a, each), a @ each)
            torch.testing.assert_close(_blas.multiply_gram(a, each), a.mT @ (a @ each))


@pytest.mark.parametrize("across", [False, True])
@given(st.integers(1, 40), st.integers(1, 30))
def test_a_gram_matrix_is_added_up(across: bool, rows: int, columns: int) -> None:
    """In its lower triangle alone."""
    a, b = drawn(rows, columns, across=across), drawn(2 * rows, columns, across=across)
    total = _blas.add_gram(_blas.add_gram(None, a), b)
    torch.testing.assert_close(total, (a.mT @ a + b.mT @ b).tril())


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("height", [1, 5, 64])
@given(size=st.integers(1, 40), vectors=st.integers(1, 20))
def test_a_factorization_solves(transposed: bool, height: int, size: int, vectors: int) -> None:
    a, x = drawn(size, size) + 8 * torch.eye(size), drawn(size, vectors)
    with blocks_of(height, size):
        found = _blas.LU.of(a).solve(x, transposed)
    torch.testing.assert_close((a.mT if transposed else a) @ found, x)


@pytest.mark.parametrize("height", [1, 5, 64])
@given(size=st.integers(1, 40), vectors=st.integers(1, 20), shift=st.sampled_from([0.0, 0.5]))
def test_symmetric_factorizations_solve(height: int, size: int, vectors: int, shift: float) -> None:
    """From the lower triangle alone; one definite, one not."""
    half, x = drawn(size, size), drawn(size, vectors)
    definite, other = half @ half.mT + torch.eye(size), half + half.mT
    less = shift * torch.eye(size).double()
    with blocks_of(height, size):
        cholesky = _blas.Cholesky.of(definite.tril(), shift)
        ldl = _blas.LDL.of(other.tril(), shift)
        torch.testing.assert_close((definite - less) @ cholesky.solve(x), x)
    assert not cholesky.indefinite and not ldl.singular
    assert _blas.Cholesky.of(-definite).indefinite
    values = torch.linalg.eigvalsh(other - less)
    assert ldl.negative == int((values < 0).sum())
    accuracy = 1e-13 * size * float(values.abs().max() / values.abs().min())
    torch.testing.assert_close((other - less) @ ldl.solve(x), x, rtol=0, atol=max(accuracy, 1e-12))


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_that_were_swapped_are_put_back(dtype) -> None:
    a, x = drawn(1000, 1000, dtype=dtype), drawn(1000, 16, dtype=dtype)
    lu = _blas.LU.of(a)
    for matrix, transposed in ((a, False), (a.mT, True)):
        found = lu.solve(x, transposed)
        error = (matrix.double() @ found.double() - x.double()).norm() / found.norm()
        assert error < 1e3 * torch.finfo(dtype).eps * x.norm()


@pytest.mark.parametrize("dtype", TYPES)
def test_what_has_no_inverse_is_told(dtype) -> None:
    assert _blas.LU.of(torch.zeros(3, 3, dtype=dtype)).singular
    assert not _blas.LU.of(torch.eye(3, dtype=dtype)).singular


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shape", [(30, 30), (50, 20)])
def test_singular_values(shape, across) -> None:
    a = drawn(*shape, across=across)
    torch.testing.assert_close(_blas.svdvals(a), torch.linalg.svdvals(a))


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (1, 3), (3, 1), (0, 3)])
def test_an_empty_tensor_is_laid_out_like_what_will_fill_it(shape) -> None:
    for like in (torch.empty(shape), torch.empty(shape).mT):
        found = _blas.empty_like(like, torch.float64)
        assert (found.shape, found.dtype) == (like.shape, torch.float64)
        assert found.mT.is_contiguous() == like.mT.is_contiguous()


@pytest.mark.parametrize("name", ["gaussian", "spiked", "power_law"])
@pytest.mark.parametrize("transposed", [False, True])
def test_vitals_do_not_depend_on_the_library(name, transposed) -> None:
    matrix = getattr(hard_matrices, name)(400).float()
    matrix = matrix.mT if transposed else matrix
    wanted = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    with limits({Method.BISECTION: 32}):
        found = spectra.vitals(matrix)
    np.testing.assert_allclose(
        [found.sigma_max, found.sigma_2, found.sigma_min], wanted[[0, 1, -1]], rtol=1e-8
    )
    assert found.effective_rank == int((wanted > 0.01 * wanted[0]).sum())
