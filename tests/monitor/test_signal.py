"""Signals along singular triplets, and how clear they are."""

import pytest
import torch

from kappascope.monitor.signal import signal_to_noise, signals


@pytest.mark.parametrize("shape", [(5, 3), (3, 5)])
def test_signals_are_the_diagonal_of_the_gradient_in_singular_vectors(shape) -> None:
    random = torch.Generator().manual_seed(0)
    weight, gradient = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in "ab")
    u, _, vt = torch.linalg.svd(weight, full_matrices=False)
    expected = (u.mT @ gradient @ vt.mT).diagonal()
    torch.testing.assert_close(signals(gradient, u, vt.mT), expected)


def test_a_signal_without_noise_is_infinitely_clear() -> None:
    assert signal_to_noise([2.0, 2.0, 2.0]) == float("inf")
    assert signal_to_noise([0.0, 0.0, 0.0]) is None
    assert signal_to_noise([1.0, -1.0, 1.0, -1.0]) == 0.0
