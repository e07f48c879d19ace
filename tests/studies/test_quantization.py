"""Rounding to few bits takes the nearest multiple of its step."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kappascope.studies.quantization import quantized


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3), min_size=1),
       st.sampled_from([4, 8]), st.sampled_from([None, 1]))  # fmt: skip
def test_rounding_takes_the_nearest_multiple_of_a_step(entries, bits, dim) -> None:
    matrix = torch.tensor(entries, dtype=torch.float64)
    top = 2 ** (bits - 1) - 1
    for row, line in zip(quantized(matrix, bits, dim).tolist(), matrix.tolist(), strict=True):
        largest = max(map(abs, line if dim else matrix.ravel().tolist()))
        step = largest / top if largest else 1.0
        for after, before in zip(row, line, strict=True):
            assert abs(after - before) <= step / 2 * (1 + 1e-9)
            assert after == pytest.approx(round(after / step) * step)
            assert abs(after) <= largest * (1 + 1e-12)


def test_zeros_stay_zeros() -> None:
    assert quantized(torch.zeros(2, 2), 4).equal(torch.zeros(2, 2))
