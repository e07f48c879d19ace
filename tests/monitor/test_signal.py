"""Signals against a central difference of the singular values themselves."""

import pytest
import torch

from kappascope.matrix.tracking import ends
from kappascope.monitor.measure import ends_signal, whole_spectrum
from kappascope.monitor.signal import signal_to_noise


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (130, 100), (100, 130), (1, 7), (7, 1)])
def test_a_signal_is_the_derivative_of_its_singular_value(shape: tuple[int, int]) -> None:
    random = torch.Generator().manual_seed(1)
    weight, gradient = (torch.randn(shape, generator=random, dtype=torch.float64) for _ in "ab")
    up, down = (torch.linalg.svdvals(weight + h * gradient) for h in (1e-6, -1e-6))
    slopes = (up - down) / 2e-6
    found = dict(ends_signal(gradient, ends(weight, {}))["signal"])
    assert found[0.0] == pytest.approx(float(slopes[0]), rel=0.02)
    assert found[1.0] == pytest.approx(float(slopes[-1]), rel=0.02)
    whole = whole_spectrum(weight, gradient)["signal"]
    assert len(whole) == min(len(slopes), 65)
    for index, value in whole:
        place = round(index * (len(slopes) - 1))
        assert value == pytest.approx(float(slopes[place]), rel=1e-3, abs=1e-4)


def test_a_gradient_that_is_not_finite_has_no_signal() -> None:
    gradient = torch.full((4, 4), float("nan"))
    assert ends_signal(gradient, ends(torch.eye(4), {})) == {}
    assert "signal" not in whole_spectrum(torch.eye(4), gradient)


def test_a_signal_without_noise_is_infinitely_clear() -> None:
    assert signal_to_noise([2.0, 2.0, 2.0]) == float("inf")
    assert signal_to_noise([0.0, 0.0, 0.0]) is None
    assert signal_to_noise([1.0, -1.0, 1.0, -1.0]) == 0.0
