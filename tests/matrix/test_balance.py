"""The scale that balances two sets of vectors bounds products, as well as John's theorem says."""

import math

import pytest
import torch

from kappascope.matrix.balance import balanced


@pytest.mark.parametrize("size", [1, 2, 5, 16])
def test_the_bound_holds_and_is_within_the_root_of_the_size(size: int) -> None:
    random = torch.Generator().manual_seed(size)
    stretch = torch.logspace(-2, 2, size).double()
    q = torch.randn(300, size, generator=random, dtype=torch.float64) * stretch
    k = torch.randn(200, size, generator=random, dtype=torch.float64) / stretch
    root, inverse = balanced(q, k)
    bound = float((q @ root.T).norm(dim=1).max() * (k @ inverse.T).norm(dim=1).max())
    largest = float((q @ k.T).abs().max())
    assert largest <= bound * (1 + 1e-9)
    assert bound <= 1.05 * math.sqrt(size) * largest
    assert torch.allclose(root.T @ inverse, torch.eye(size).double(), atol=1e-6)
