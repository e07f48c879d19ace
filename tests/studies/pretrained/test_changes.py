"""Removals, noise and rounding change what they say and nothing else."""

import numpy as np
import pytest
import torch

from kappascope.lab.tasks import generator
from kappascope.studies.pretrained.changes import (
    FORMATS,
    REMOVALS,
    Factors,
    noise,
    smallest,
)


@pytest.fixture(scope="module")
def factors() -> Factors:
    return Factors.of("matrix", torch.randn(40, 30, generator=generator("matrix")))


@pytest.mark.parametrize("what", REMOVALS)
def test_a_removal_keeps_all_other_singular_values(what: str, factors: Factors) -> None:
    by = REMOVALS[what](factors.s, 0.1)
    found = np.linalg.svd(factors.lowered(by).double().numpy(), compute_uv=False)
    expected = np.sort((factors.s - by).numpy())[::-1]
    assert np.allclose(found, expected, atol=1e-5) and (by >= 0).all() and (by <= factors.s).all()


def test_what_is_removed_is_what_is_said(factors: Factors) -> None:
    moved = {what: REMOVALS[what](factors.s, 0.1).nonzero().ravel().tolist() for what in REMOVALS}
    assert moved["smallest"] == [27, 28, 29] and moved["largest"] == [0, 1, 2]
    assert moved["bulk"] == [13, 14, 15] and moved["largest at equal energy"] == [0]
    assert moved["bulk at equal energy"] == [14]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.4])
def test_equal_energies_are_equal(share: float, factors: Factors) -> None:
    energy = smallest(factors.s, share).square().sum()
    for what in ("bulk at equal energy", "largest at equal energy"):
        assert torch.allclose(REMOVALS[what](factors.s, share).square().sum(), energy)
    added = noise(factors, share, seed=0) - factors.matrix
    assert torch.allclose(added.double().square().sum(), energy, rtol=1e-4)


def test_bf16_keeps_eight_bits() -> None:
    values = torch.tensor([[1 + 2**-7, 1 + 2**-8, 1 + 3 * 2**-8, -3.0]])
    assert FORMATS["bf16"](values).tolist() == [[1 + 2**-7, 1.0, 1 + 2**-6, -3.0]]
