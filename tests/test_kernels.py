"""Both libraries do the same, whatever the shape and the order of entries."""

from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import zoo
from kappascope import kernels, spectra

TYPES = [torch.float32, torch.float64]


@pytest.fixture(params=[True, False], ids=["OpenBLAS", "MKL"], autouse=True)
def library(request) -> Iterator[None]:
    with mock.patch.object(kernels, "OPENBLAS", request.param):
        yield


def drawn(*shape: int, dtype: torch.dtype = torch.float64, across: bool = False) -> Tensor:
    entries = torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)
    return entries.mT.contiguous().mT if across else entries


@pytest.mark.parametrize("height", [1, 7, 10**6])
@pytest.mark.parametrize("across", [False, True])
@given(st.integers(1, 40), st.integers(1, 30), st.integers(1, 20))
def test_products(height: int, across: bool, rows: int, columns: int, vectors: int) -> None:
    a, x = drawn(rows, columns, across=across), drawn(columns, vectors)
    limits = {"UNCOPIED": height * columns * vectors, "NARROW": 1}
    with mock.patch.multiple(kernels, **limits):
        for each in (x, x.mT.contiguous().mT):
            torch.testing.assert_close(kernels.times(a, each), a @ each)
            torch.testing.assert_close(kernels.square_times(a, each), a.mT @ (a @ each))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("height", [1, 5, 64])
@given(size=st.integers(1, 40), vectors=st.integers(1, 20))
def test_a_factorization_solves(transposed: bool, height: int, size: int, vectors: int) -> None:
    a, x = drawn(size, size) + 8 * torch.eye(size), drawn(size, vectors)
    limits = {"UNCOPIED": height * size * kernels.VECTORS, "NARROW": 1}
    with mock.patch.multiple(kernels, **limits):
        found = kernels.LU.of(a).solve(x, transposed)
    torch.testing.assert_close((a.mT if transposed else a) @ found, x)


@pytest.mark.parametrize("height", [1, 5, 64])
@given(size=st.integers(1, 40), vectors=st.integers(1, 20), shift=st.sampled_from([0.0, 0.5]))
def test_symmetric_factorizations_solve(height: int, size: int, vectors: int, shift: float) -> None:
    """From the lower triangle alone; one definite, one not."""
    half, x = drawn(size, size), drawn(size, vectors)
    definite, other = half @ half.mT + torch.eye(size), half + half.mT
    less = shift * torch.eye(size).double()
    with mock.patch.multiple(kernels, UNCOPIED=height * size * kernels.VECTORS, NARROW=1):
        cholesky = kernels.Cholesky.of(definite.tril(), shift)
        ldl = kernels.LDL.of(other.tril(), shift)
        torch.testing.assert_close((definite - less) @ cholesky.solve(x), x)
    assert not cholesky.indefinite and not ldl.singular
    assert kernels.Cholesky.of(-definite).indefinite
    values = torch.linalg.eigvalsh(other - less)
    assert ldl.negative == int((values < 0).sum())
    accuracy = 1e-13 * size * float(values.abs().max() / values.abs().min())
    torch.testing.assert_close((other - less) @ ldl.solve(x), x, rtol=0, atol=max(accuracy, 1e-12))


@pytest.mark.parametrize("dtype", TYPES)
def test_rows_that_were_swapped_are_put_back(dtype) -> None:
    a, x = drawn(1000, 1000, dtype=dtype), drawn(1000, 16, dtype=dtype)
    lu = kernels.LU.of(a)
    for matrix, transposed in ((a, False), (a.mT, True)):
        found = lu.solve(x, transposed)
        error = (matrix.double() @ found.double() - x.double()).norm() / found.norm()
        assert error < 1e3 * torch.finfo(dtype).eps * x.norm()


@pytest.mark.parametrize("dtype", TYPES)
def test_what_has_no_inverse_is_told(dtype) -> None:
    assert kernels.LU.of(torch.zeros(3, 3, dtype=dtype)).singular
    assert not kernels.LU.of(torch.eye(3, dtype=dtype)).singular


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("shape", [(30, 30), (50, 20)])
def test_singular_values(shape, across) -> None:
    a = drawn(*shape, across=across)
    torch.testing.assert_close(kernels.svdvals(a), torch.linalg.svdvals(a))


@pytest.mark.parametrize("shape", [(4, 3), (2, 4, 3), (1, 3), (3, 1), (0, 3)])
def test_memory_is_laid_out_like_what_will_fill_it(shape) -> None:
    for like in (torch.empty(shape), torch.empty(shape).mT):
        found = kernels.memory(like, torch.float64)
        assert (found.shape, found.dtype) == (like.shape, torch.float64)
        assert found.mT.is_contiguous() == like.mT.is_contiguous()


@pytest.mark.parametrize("name", ["gaussian", "spiked", "power_law"])
@pytest.mark.parametrize("transposed", [False, True])
def test_vitals_do_not_depend_on_the_library(name, transposed) -> None:
    matrix = getattr(zoo, name)(400).float()
    matrix = matrix.mT if transposed else matrix
    wanted = np.linalg.svd(matrix.double().numpy(), compute_uv=False)
    with mock.patch.multiple(spectra, BISECTION_UP_TO=32, SVD_UP_TO=32):
        found = spectra.vitals(matrix)
    np.testing.assert_allclose(
        [found.sigma_max, found.sigma_2, found.sigma_min], wanted[[0, 1, -1]], rtol=1e-8
    )
    assert found.effective_rank == int((wanted > 0.01 * wanted[0]).sum())
