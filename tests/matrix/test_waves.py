"""Waves: fixed bases are known, and trained or random matrices are not taken for them."""

import math

import torch

from kappascope.matrix.waves import is_sinusoidal


def fourier(size: int, window: torch.Tensor) -> torch.Tensor:
    angles = 2 * math.pi * torch.outer(torch.arange(size // 2 + 1.0), torch.arange(size)) / size
    return torch.cat([angles.cos(), angles.sin()]) * window


def test_a_short_time_fourier_basis_is_known_with_any_window() -> None:
    for window in (torch.ones(64), torch.hann_window(64), torch.hamming_window(64)):
        assert is_sinusoidal(fourier(64, window))


def test_sinusoidal_positions_are_known_either_way_round() -> None:
    angles = torch.outer(torch.arange(128.0), 10_000 ** (-torch.arange(32) / 32))
    table = torch.cat([angles.sin(), angles.cos()], 1)
    assert is_sinusoidal(table) and is_sinusoidal(table.T)


def test_random_smooth_and_constant_matrices_are_none() -> None:
    random = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    assert not is_sinusoidal(random)
    assert not is_sinusoidal(torch.ones(64, 64)) and not is_sinusoidal(torch.zeros(64, 64))
    assert not is_sinusoidal(torch.ones(4, 3))
    assert not is_sinusoidal(torch.outer(torch.randn(64), torch.linspace(0, 1, 64)))


def test_the_scale_does_not_matter() -> None:
    basis = fourier(32, torch.ones(32)).double()
    assert is_sinusoidal(basis * 1e300) and is_sinusoidal(basis * 1e-300)
