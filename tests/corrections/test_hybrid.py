"""The hybrid corrects scale and shape together."""

from __future__ import annotations

from torch.optim import SGD

from correction_examples import ill_conditioned, kappa_of, matrices
from kappascope.corrections import (
    Hybrid,
    SpectralPenalty,
)


def test_the_hybrid_moves_factors_and_lowers_kappa() -> None:
    layer = ill_conditioned(4, 4)
    x = matrices(16, 4)
    optimizer = SGD(layer.parameters(), lr=0.05)
    before = kappa_of(layer.weight)
    with Hybrid(penalties=SpectralPenalty(0.1, target=3.0)).attach(layer, optimizer) as handle:
        for _ in range(100):
            optimizer.zero_grad()
            (layer(x) - x).square().mean().backward()
            optimizer.step()
        factors = handle.treatments[-1].module
        assert (factors.rows - 1).abs().max() > 1e-3 and (factors.columns - 1).abs().max() > 1e-3
    assert kappa_of(layer.weight) < 0.1 * before
