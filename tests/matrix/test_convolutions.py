"""Norms of convolutions against the matrix that one is, written out entry by entry."""

import math

import pytest
import torch
from torch import Tensor

from kappascope.matrix.convolutions import operator_norm


def toeplitz(kernel: Tensor, stride: int, size: int, padding: int, groups: int = 1) -> Tensor:
    """The matrix of a convolution of one dimension, from its definition alone."""
    outputs, inputs, taps = kernel.shape
    length = (size + 2 * padding - taps) // stride + 1
    matrix = torch.zeros(outputs, length, inputs * groups, size, dtype=torch.float64)
    for out in range(outputs):
        group = out * groups // outputs
        for place in range(length):
            for tap in range(taps):
                at = place * stride + tap - padding
                if 0 <= at < size:
                    channels = slice(group * inputs, (group + 1) * inputs)
                    matrix[out, place, channels, at] = kernel[out, :, tap]
    return matrix.reshape(outputs * length, inputs * groups * size)


def drawn(*shape: int) -> Tensor:
    random = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64)


@pytest.mark.parametrize(
    ("shape", "stride", "groups"),
    [((4, 3, 3), 1, 1), ((4, 3, 5), 2, 1), ((3, 2, 4), 3, 1), ((4, 2, 3), 1, 2), ((6, 1, 3), 1, 6)],
)
@pytest.mark.parametrize("padding", [0, 2])
def test_the_norm_is_that_of_the_matrix_of_a_long_signal(
    shape: tuple[int, int, int], stride: int, groups: int, padding: int
) -> None:
    kernel = drawn(*shape)
    found = operator_norm(kernel, stride, groups)
    short, long = (
        float(torch.linalg.matrix_norm(toeplitz(kernel, stride, size, padding, groups), 2))
        for size in (12, 60)
    )
    assert short <= long <= found.high
    assert found.low == pytest.approx(long, rel=0.02) and found.high <= 1.03 * found.low


def test_two_dimensions_against_the_map_of_every_unit_image() -> None:
    kernel = drawn(3, 2, 3, 3)
    images = torch.eye(2 * 12 * 12, dtype=torch.float64).view(-1, 2, 12, 12)
    matrix = torch.conv2d(images, kernel, padding=2).flatten(1)
    found = operator_norm(kernel)
    norm = float(torch.linalg.matrix_norm(matrix, 2))
    assert norm <= found.high and found.low == pytest.approx(norm, rel=0.05)


@pytest.mark.parametrize("taps", [2, 3, 4, 7])
def test_no_frequency_between_those_of_the_grid_is_above_the_upper_end(taps: int) -> None:
    kernel = drawn(2, 3, taps)
    angles = torch.linspace(0, 2 * math.pi, 3001, dtype=torch.float64)
    waves = torch.polar(torch.ones(()).double(), -angles[:, None] * torch.arange(taps))
    norms = torch.linalg.matrix_norm(torch.einsum("oit,ft->foi", kernel.to(waves.dtype), waves), 2)
    found = operator_norm(kernel)
    assert found.low <= float(norms.max()) * (1 + 1e-12) and float(norms.max()) <= found.high


@pytest.mark.parametrize("scale", [1e-300, 1e300])
def test_the_norm_scales_with_the_kernel(scale: float) -> None:
    kernel = drawn(2, 2, 3)
    one, other = operator_norm(kernel), operator_norm(kernel * scale)
    assert other.high / scale == pytest.approx(one.high, rel=1e-12)


def test_what_would_take_too_long_is_left_out() -> None:
    assert operator_norm(torch.zeros(8, 8, 3, 3), most_operations=10.0) is None
