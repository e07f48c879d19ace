"""Square roots of covariances."""

import pytest
import torch

from kappascope.matrix.covariance import covariance_root


@pytest.mark.parametrize("rank", [2, 5, 9])
def test_the_root_times_itself_is_the_covariance_of_mean_variance_one(rank: int) -> None:
    factor = torch.randn(5, rank, generator=torch.Generator().manual_seed(0)).double()
    covariance = factor @ factor.mT
    root = covariance_root(covariance)
    torch.testing.assert_close(root, root.mT)
    torch.testing.assert_close(root @ root, covariance * 5 / covariance.trace())


def test_nothing_has_a_root_of_nothing() -> None:
    assert not covariance_root(torch.zeros(3, 3)).any()
