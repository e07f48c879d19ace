"""Rounding to int8 against a quantizer written out by hand, and what 16 bits leave in place."""

import math

import pytest
import torch

from kappascope.matrix.rounding import int8_errors, unchanged_share


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64)


def none(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.bool)


def by_hand(weight: torch.Tensor) -> float:
    """The error of one scale a row, number by number."""
    error = 0.0
    for row in weight.tolist():
        step = max(map(abs, row)) / 127
        error += sum((x - round(x / step) * step) ** 2 for x in row)
    return math.sqrt(error) / float(weight.norm())


def test_the_error_is_that_of_a_quantizer_written_by_hand() -> None:
    weight = normal(9, 17)
    found = int8_errors(weight, none(9), none(17))
    assert found.row_scale == pytest.approx(by_hand(weight), rel=1e-9)


def test_an_outlying_column_takes_bits_that_keeping_it_apart_gives_back() -> None:
    weight = normal(128, 128)
    weight[:, 5] *= 64
    apart = none(128)
    apart[5] = True
    found = int8_errors(weight, none(128), apart)
    rest = weight[:, ~apart]
    assert found.row_scale_apart == pytest.approx(by_hand(rest), rel=1e-9)
    assert 3 < found.bits_lost_by_rows < 6


@pytest.mark.parametrize("scale", [1e-300, 1e-30, 1e30, 1e300])
def test_errors_do_not_depend_on_the_scale(scale: float) -> None:
    weight = normal(20, 30)
    one, other = (int8_errors(w, none(20), none(30)) for w in (weight, weight * scale))
    assert one.row_scale == pytest.approx(other.row_scale, rel=1e-6)
    assert one.tensor_scale == pytest.approx(other.tensor_scale, rel=1e-6)


def test_nothing_is_measured_where_nothing_is_left() -> None:
    assert int8_errors(torch.zeros(3, 3), none(3), none(3)) is None
    assert int8_errors(torch.ones(3, 3), ~none(3), none(3)) is None


@pytest.mark.parametrize("step", [1e-6, 1e-5, 1e-4, 1e-3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_share_that_a_step_leaves_is_predicted(step: float, dtype: torch.dtype) -> None:
    before = 0.02 * normal(300, 300)
    after = before + step * normal(300, 300, seed=1)
    found, expected = unchanged_share(before.to(dtype), after.to(dtype), dtype)
    assert found == pytest.approx(expected, abs=0.02)


def test_a_frozen_half_is_more_than_a_step_leaves() -> None:
    before = 0.02 * normal(200, 200)
    after = before.clone()
    after[:100] += 0.001 * normal(100, 200, seed=1)
    found, expected = unchanged_share(before.bfloat16(), after.bfloat16(), torch.bfloat16)
    assert found > 0.5 and expected < 0.2


def test_without_a_change_there_is_no_share() -> None:
    assert unchanged_share(torch.ones(3, 3), torch.ones(3, 3), torch.float32) is None
    assert unchanged_share(torch.zeros(3, 3), torch.zeros(3, 3), torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
@pytest.mark.parametrize("factor", [1.2, 1.05, 1.01, 0.97, 1.002])
def test_a_scaling_of_all_entries_stalls_none(dtype: torch.dtype, factor: float) -> None:
    random = torch.Generator().manual_seed(0)
    normal = torch.randn(200, 150, generator=random)
    heavy = normal * torch.randn(200, 150, generator=random).exp()
    for weight in (normal, heavy):
        found = unchanged_share(weight.to(dtype), (factor * weight).to(dtype), dtype)
        if found is not None:
            assert found[0] - found[1] < 0.1


def test_a_frozen_half_is_still_seen() -> None:
    random = torch.Generator().manual_seed(0)
    before = torch.randn(200, 150, generator=random)
    after = before + 0.05 * torch.randn(200, 150, generator=random)
    after[:100] = before[:100]
    for dtype in (torch.bfloat16, torch.float16):
        share, expected = unchanged_share(before.to(dtype), after.to(dtype), dtype) or (0, 0)
        assert share - expected > 0.35


@pytest.mark.parametrize("exponent", [-1070, -1040, -1000, -500, 0, 500, 1015])
def test_the_share_is_told_at_every_scale_of_float64(exponent: int) -> None:
    random = torch.Generator().manual_seed(0)
    before = torch.randn(40, 30, generator=random, dtype=torch.float64)
    scale = torch.tensor(2.0, dtype=torch.float64)
    pair = (torch.ldexp(each, torch.tensor(exponent)) for each in (before, 1.01 * before))
    old, new = (each.nan_to_num(0.0) * scale / scale for each in pair)
    share, expected = unchanged_share(old, new, torch.float64) or (0.0, 0.0)
    assert 0 <= expected <= 1 and share - expected < 0.25
