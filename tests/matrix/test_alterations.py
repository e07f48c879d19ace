"""What became of a matrix is told from its entries: each rounding, training and damage by name."""

import pytest
import torch
from torch import Tensor

from kappascope.matrix.alterations import alteration
from kappascope.matrix.precision import Rounding


def weight(rows: int = 64, columns: int = 48, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def noise(size: float, seed: int = 1) -> Tensor:
    return size * weight(seed=seed)


def test_equal_values_are_the_same_in_whatever_type() -> None:
    coarse = weight().bfloat16()
    assert alteration(coarse, coarse.double()).kind == "same"


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
)
def test_every_rounding_is_named(dtype: torch.dtype) -> None:
    exact = weight().double() * (1 + 2**-30)
    found = alteration(exact, exact.to(dtype).double())
    assert (found.kind, found.text.split(";")[0]) == (
        "rounding",
        f"rounded to {str(dtype).removeprefix('torch.')}",
    )


def test_cutting_digits_off_is_a_rounding_and_moving_within_one_step_is_not() -> None:
    exact = weight()
    cut = (exact.view(torch.int32) & ~0xFFFF).view(torch.float32)
    assert alteration(exact, cut).text == "cut off to bfloat16"
    nearby = exact.bfloat16() * (1 + 2**-7)
    assert alteration(exact, nearby).kind == "trained"


def test_codes_round_by_a_step_at_the_most() -> None:
    exact = weight()
    code = Rounding("Q8_0", torch.full(exact.shape, 0.01))
    assert alteration(exact, exact + 0.009, (None, code)).text == "rounded to Q8_0"
    assert alteration(exact, exact + 0.05 * noise(1), (None, code)).kind == "trained"


@pytest.mark.parametrize("levels", [127, 7])
def test_whole_numbers_with_a_scale_are_a_rounding(levels: int) -> None:
    exact = weight()
    step = exact.abs().amax(1, True) / levels
    assert "with a scale for each row" in alteration(exact, (exact / step).round() * step).text


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("size", [1e-4, 0.01, 0.3, 3.0])
def test_noise_all_over_is_training_at_every_scale(scale: float, size: float) -> None:
    before = scale * weight().double()
    found = alteration(before, before + scale * noise(size).double())
    assert found.kind == "trained"
    assert found.distance == pytest.approx(size, rel=0.1)


def test_decay_alone_is_training_and_a_lost_scale_is_not() -> None:
    assert "decay without a gradient" in alteration(weight(), 0.97 * weight()).text
    assert alteration(weight(), 16 * weight()).kind == "scaled"
    rows = torch.linspace(0.5, 2, 64)[:, None]
    found = alteration(weight(), rows * weight())
    assert found.axis == 0
    torch.testing.assert_close(found.factors, rows.flatten().double())


def test_updates_that_bfloat16_swallowed_are_training() -> None:
    before = weight().bfloat16()
    after = before.clone()
    after.view(-1)[::37] *= 1 + 2**-7
    assert "a step or two of bfloat16" in alteration(before, after).text


def test_rows_of_a_table_are_trained_alone_and_those_of_a_map_are_not() -> None:
    after = weight()
    after[5] += 1
    assert alteration(weight(), after, is_table=True).kind == "trained"
    assert alteration(weight(), after).kind == "damaged"


def test_the_smallest_entries_are_pruned_and_others_are_lost() -> None:
    small = weight().abs() < 0.3
    assert alteration(weight(), weight().masked_fill(small, 0)).text.startswith("pruned")
    large = weight().abs() > 2
    assert alteration(weight(), weight().masked_fill(large, 0)).kind == "damaged"


@pytest.mark.parametrize("trained", [0.0, 0.01])
@pytest.mark.parametrize(
    "text", ["not finite", "zero now", "entries", "overwritten", "shifted", "reversed", "order"]
)
def test_each_damage_is_named(text: str, trained: float) -> None:
    before = weight()
    after = before + noise(trained)
    flat = after.view(-1)
    if text == "not finite":
        flat[7] = torch.nan
    elif text == "zero now":
        flat[100:300] = 0
    elif text == "entries":
        flat[11] = 2.0**100
    elif text == "overwritten":
        flat[640:1600] = weight(seed=5).view(-1)[:960]
        text = "overwritten" if trained else "entries"
    elif trained:
        return  # the others are exact
    elif text == "shifted":
        after = flat.roll(3).view_as(after)
    elif text == "reversed":
        after = after.view(torch.uint8).view(-1, 4).flip(1).contiguous().view(torch.float32)
        after = after.view_as(before)
    else:
        after = flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(2))]
        after = after.view_as(before)
    found = alteration(before, after)
    assert (found.kind, text in found.text or "changed by more" in found.text) == ("damaged", True)


def test_of_an_unrelated_matrix_nothing_is_left() -> None:
    assert alteration(weight(), weight(seed=9)).kind == "replaced"


def test_zero_matrices_have_a_word_of_their_own() -> None:
    zero = torch.zeros(64, 48)
    assert alteration(weight(), zero).text == "all zero now"
    assert alteration(zero, weight()).text == "all zero before"
