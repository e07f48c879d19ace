"""The rank of a change: what was planted is found, and neither noise nor rounding is."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kappascope.matrix.deltas import bulk_edge, delta_between, delta_of_product


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(rank: int, rows: int, columns: int, size: float) -> Tensor:
    """A change of equal singular values ``size`` in random directions."""
    u, v = (torch.linalg.qr(draw(seed, side, rank))[0] for seed, side in ((1, rows), (2, columns)))
    return size * u @ v.mT


@settings(deadline=None, max_examples=20)
@given(st.integers(1, 8), st.sampled_from([(96, 64), (64, 96), (80, 80)]))
def test_planted_directions_are_counted_in_noise(rank: int, shape: tuple[int, int]) -> None:
    noise = 0.01 * draw(3, *shape)
    edge = 0.01 * (shape[0] ** 0.5 + shape[1] ** 0.5)
    start = draw(4, *shape)
    found = delta_between(start, start + noise + planted(rank, *shape, 3 * edge))
    assert found is not None and found.rank == found.spikes == rank
    assert found.chance_edge == pytest.approx(edge, rel=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_alone_has_no_rank(dtype: torch.dtype) -> None:
    start = draw(5, 96, 64) / 8
    found = delta_between(start.float(), start.to(dtype))
    assert found is not None and found.rank == 0
    assert found.rounding_edge is not None and found.rounding_edge > 0


def test_directions_below_the_rounding_of_both_sides_are_not_counted() -> None:
    start = (draw(6, 96, 64) / 8).bfloat16()
    norm = float(torch.linalg.matrix_norm(start.double() - (start.double() * 1.0), 2))
    assert norm == 0
    rounding = delta_between(start, (start.double() + planted(2, 96, 64, 1.0)).bfloat16())
    assert rounding is not None and rounding.rank == 2 and rounding.rounding_edge < 1.0
    small = delta_between(
        start, (start.double() + planted(2, 96, 64, 0.2 * rounding.rounding_edge)).bfloat16()
    )
    assert small is None or small.rank == 0


def test_nothing_changed_is_no_change() -> None:
    assert delta_between(torch.eye(3), torch.eye(3)) is None


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1.0, 1e150, 1e300])
def test_edges_and_ranks_do_not_depend_on_the_scale(scale: float) -> None:
    values = torch.linalg.svdvals(0.01 * draw(7, 60, 40) + planted(3, 60, 40, 1.0))
    edge = bulk_edge(values, (60, 40))
    assert bulk_edge(values * scale, (60, 40)) == pytest.approx(edge * scale, rel=1e-9)
    product = delta_of_product(values * scale, (60, 40), limit=40)
    assert product.rank == delta_of_product(values, (60, 40), limit=40).rank


def test_random_factors_have_no_spikes_and_a_strong_direction_is_one() -> None:
    b, a = draw(8, 200, 8), draw(9, 8, 150)
    values = torch.linalg.svdvals(b @ a)
    assert delta_of_product(values, (200, 150), limit=8).spikes == 0
    b[:, 0] *= 10
    found = delta_of_product(torch.linalg.svdvals(b @ a), (200, 150), limit=8)
    assert found.spikes == 1 and found.rank < 8


@pytest.mark.parametrize("scale", [1e-310, 1e-200, 1e-20, 1.0, 1e200, 1e305])
def test_a_change_has_the_same_rank_at_every_scale(scale: float) -> None:
    start = draw(10, 60, 40)
    tuned = start + 0.01 * draw(11, 60, 40) + planted(3, 60, 40, 1.0)
    found = delta_between(scale * start, scale * tuned)
    assert found is not None and found.rank == (3 if scale > 1e-309 else found.rank)
    if found.chance_edge is not None:
        one = delta_between(start, tuned)
        assert one is not None and found.chance_edge == pytest.approx(
            one.chance_edge * scale, rel=1e-2
        )
