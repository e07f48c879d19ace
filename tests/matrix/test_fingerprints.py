"""Fingerprints: equal matrices are known in every order, and others are not taken for them."""

import pytest
import torch

from kappascope.matrix.fingerprints import fingerprints, likeness


def matrix(rows: int = 40, columns: int = 30, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(40, 30), (30, 30), (1, 7), (2000, 300)])
def test_an_order_is_recognised(shape: tuple[int, int]) -> None:
    one = matrix(*shape)
    rows, columns = torch.randperm(shape[0]), torch.randperm(shape[1])
    found = fingerprints(one)
    assert likeness(fingerprints(one.clone()), found) == "equal"
    if min(shape) > 1:
        assert likeness(fingerprints(one.T), found) == "transposed"
        orders = {
            "equal up to the order of its rows": one[rows],
            "equal up to the order of its columns": one[:, columns],
            "transposed up to the order of its lines": one[rows].T,
            "equal but for the order": one[rows][:, columns],
        }
        assert {likeness(fingerprints(it), found) for it in orders.values()} == set(orders)


def test_one_bit_makes_another_matrix() -> None:
    one = matrix()
    other = one.clone()
    other[3, 4] = torch.nextafter(other[3, 4], torch.tensor(9.0))
    assert likeness(fingerprints(one), fingerprints(other)) == ""


def test_values_count_and_not_how_they_are_stored() -> None:
    one = matrix().bfloat16()
    one[0, 0] = 0.0
    other = one.double()
    other[0, 0] = -0.0
    assert fingerprints(one) == fingerprints(other)
