"""Lines in another order are found again, and the orders that programs use are named."""

import pytest
import torch
from torch import Tensor

from kappascope.matrix.arrangements import (
    Arrangement,
    arrangement,
    assembly,
    pairs_of_halves,
    same_singular_values,
)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def order(count: int, seed: int = 3) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


CASES = {
    "nothing": Arrangement(),
    "turned": Arrangement(transposed=True),
    "rows": Arrangement(rows=order(32)),
    "columns": Arrangement(columns=order(32)),
    "both": Arrangement(rows=order(32), columns=order(32, 4)),
    "turned and rows": Arrangement(transposed=True, rows=order(32)),
}


@pytest.mark.parametrize("made", CASES.values(), ids=CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_order_is_found_again_after_rounding(made: Arrangement, dtype: torch.dtype) -> None:
    before = normal(32, 32)
    after = made.applied(before).to(dtype)
    found = arrangement(before, after)
    assert found is not None
    torch.testing.assert_close(found.applied(before).to(dtype), after)


def test_an_order_is_found_after_training() -> None:
    before = normal(32, 48)
    after = before[order(32)] + 0.2 * normal(32, 48, seed=1)
    found = arrangement(before, after)
    assert found is not None
    assert torch.equal(found.rows, order(32))


def test_an_unrelated_matrix_is_no_arrangement() -> None:
    assert arrangement(normal(32, 48), normal(32, 48, seed=1)) is None


@pytest.mark.parametrize("size", [8, 16, 32])
def test_both_orders_of_a_rotary_embedding_are_named(size: int) -> None:
    halves = pairs_of_halves(32, size)
    assert Arrangement(rows=halves).text == f"halves of heads of {size} rows put into pairs"
    back = Arrangement(rows=halves.argsort())
    assert back.text == f"pairs of heads of {size} rows put into halves"


def test_a_rotation_keeps_singular_values_and_another_matrix_does_not() -> None:
    weight, turn = normal(32, 48), torch.linalg.qr(normal(32, 32, seed=1)).Q
    assert same_singular_values(weight, turn @ weight)
    assert not same_singular_values(weight, normal(32, 48, seed=2))
    assert not same_singular_values(weight.bfloat16(), normal(32, 48, seed=2).bfloat16())
    assert not same_singular_values(turn, torch.linalg.qr(normal(32, 32, seed=5)).Q)


@pytest.mark.parametrize("by_head", [False, True])
def test_a_joined_matrix_is_taken_apart(by_head: bool) -> None:
    three = [normal(16, 24, seed=seed) for seed in range(3)]
    whole = torch.cat(three)
    if by_head:
        whole = torch.stack([each.view(4, 4, 24) for each in three], 1).flatten(0, 2)
    found = assembly(three, whole.bfloat16())
    assert found is not None
    assert (found.sources, found.interleaved) == ((0, 1, 2), by_head)
    assert torch.equal(torch.cat(three)[found.rows], whole)


def test_a_part_is_found_in_its_whole_and_a_stranger_is_not() -> None:
    whole = normal(48, 24)
    found = assembly([whole], whole[16:32])
    assert found is not None
    assert found.rows.tolist() == list(range(16, 32))
    assert assembly([whole], normal(16, 24, seed=9)) is None
