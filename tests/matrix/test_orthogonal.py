"""Newton and Schulz's iteration against the decomposition, and against torch's Muon."""

import pytest
import torch

from kappascope.matrix.orthogonal import MUON, newton_schulz, orthogonalized


def drawn(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def test_newton_and_schulz_keep_singular_vectors() -> None:
    matrix = drawn(4, 6, 9)
    u, _, vt = torch.linalg.svd(matrix, full_matrices=False)
    turned = u.mT @ orthogonalized(matrix) @ vt.mT
    values = turned.diagonal(dim1=-2, dim2=-1)
    assert values.min() > 0.6 and values.max() < 1.3
    torch.testing.assert_close(turned, torch.diag_embed(values), atol=1e-10, rtol=0)


@pytest.mark.parametrize("steps", [0, 1, 5, 9])
@pytest.mark.parametrize("shape", [(7, 7), (12, 5), (3, 5, 12)])
def test_a_matrix_and_its_singular_values_take_the_same_steps(shape, steps) -> None:
    matrix = drawn(*shape)
    u, s, vt = torch.linalg.svd(matrix, full_matrices=False)
    expected = newton_schulz(s / torch.linalg.vector_norm(s, dim=-1, keepdim=True), steps)
    torch.testing.assert_close(
        orthogonalized(matrix, (MUON,) * steps), (u * expected[..., None, :]) @ vt
    )


@pytest.mark.parametrize("shape", [(8, 8), (12, 5), (5, 12)])
def test_the_steps_are_those_of_torch(shape) -> None:
    weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.float64))
    weight.grad = drawn(*shape)
    torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0).step()
    expected = -orthogonalized(weight.grad) * max(1.0, shape[0] / shape[1]) ** 0.5
    # torch iterates in bfloat16, of three digits
    assert (weight.detach() - expected).norm() < 0.02 * expected.norm()


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not orthogonalized(torch.zeros(2, 3, 4)).any()
