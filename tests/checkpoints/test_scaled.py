"""Numbers of a few bits times scales: blocks, steps, and the order of swizzled scales."""

from __future__ import annotations

import pytest
import torch

from kappascope.checkpoints.scaled import ScaledNumbers, block_of, unswizzled


@pytest.mark.parametrize(
    ("shape", "counts", "told", "expected"),
    [
        ((576, 7168), (5, 56), [(128, 128)], (128, 128)),
        ((576, 7168), (5, 56), [], (128, 128)),
        ((40, 24), (40, 1), [], (1, 24)),
        ((40, 24), (1, 1), [(128, 128)], (128, 128)),
        ((40, 24), (5, 3), [(128, 128)], None),
        ((40, 24), (41, 1), [], None),
        ((40, 24), (0, 1), [], None),
        ((96, 6), (1, 3), [], (96, 2)),
        ((72, 6), (3, 1), [], (32, 6)),
        ((7, 6), (5, 1), [], None),
    ],
)
def test_blocks_follow_from_numbers_of_scales(
    shape: tuple[int, int],
    counts: tuple[int, int],
    told: list[tuple[int, int]],
    expected: tuple[int, int] | None,
) -> None:
    assert block_of(shape, counts, told) == expected


def test_a_half_step_reaches_to_the_middle_of_the_farther_neighbour() -> None:
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76]], dtype=torch.uint8)
    one = torch.ones(1, 1)
    plain = ScaledNumbers("float4", (1, 8))
    assert plain.decode(codes, one).tolist() == [[0, 0.5, 1, 1.5, 2, 3, 4, 6]]
    steps = torch.tensor([[0.25, 0.25, 0.25, 0.25, 0.5, 0.5, 1, 1]])
    torch.testing.assert_close(plain.half_steps(codes, one).float(), steps, rtol=0.03, atol=0)
    # the power of two of eight is the next: what lies between is cut to six
    power = ScaledNumbers("float4", (1, 8), "power")
    exponent = torch.full((1, 1), 127, dtype=torch.uint8)
    assert float(power.half_steps(codes, exponent)[0, 7]) >= 2


def test_swizzled_scales_lie_in_tiles_of_128_rows_and_four_columns() -> None:
    rows, columns = 300, 9
    plain = torch.rand(rows, columns)
    stored = torch.zeros(3 * 128 * 3 * 4)
    for i in range(rows):
        for j in range(columns):
            tile = i // 128 * 3 + j // 4
            stored[tile * 512 + i % 32 * 16 + i % 128 // 32 * 4 + j % 4] = plain[i, j]
    assert torch.equal(unswizzled(stored, rows, columns), plain)
