"""The numbers of one reading: against the whole decomposition, and signals against differences."""

import math

import pytest
import torch

from kappascope.matrix.components import Components
from kappascope.matrix.spectra import vitals
from kappascope.matrix.tracking import ends
from kappascope.monitor.measure import (
    components,
    ends_signal,
    product_quantities,
    whole_spectrum,
)


@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (300, 260)], ids=str)
def test_components_are_those_of_the_whole_decomposition(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    quantities = components(matrix, vitals(matrix))
    whole = Components(matrix.double())
    for name in ("condition_number", "frobenius_norm", "spectral_gap", "effective_rank"):
        assert quantities[name] == pytest.approx(float(getattr(whole, name)), rel=1e-4)
    stable = float((whole.frobenius_norm / whole.singular_values[0]) ** 2)
    assert quantities["stable_rank"] == pytest.approx(stable, rel=1e-4)
    norms = whole.row_norms.sort(descending=True).values
    assert dict(quantities["row_norms"])[0.0] == pytest.approx(float(norms[0]), rel=1e-5)
    assert dict(quantities["row_norms"])[1.0] == pytest.approx(float(norms[-1]), rel=1e-5)


def test_entries_that_are_not_finite_are_counted_and_nothing_else_is_measured() -> None:
    matrix = torch.eye(4)
    matrix[0, 1], matrix[2, 2] = float("nan"), float("inf")
    quantities = components(matrix, vitals(matrix))
    assert quantities["non_finite"] == 2.0 and "condition_number" not in quantities


def test_a_zero_matrix_has_no_ratios() -> None:
    quantities = components(torch.zeros(3, 4), vitals(torch.zeros(3, 4)))
    assert not {"stable_rank", "condition_number", "non_finite"} & quantities.keys()


def test_the_quantities_of_a_product_are_those_of_the_matrix_with_its_values() -> None:
    values = torch.tensor([5.0, 2.0, 0.5, 0.01])
    quantities, whole = product_quantities(values), Components(torch.diag(values))
    for name in ("condition_number", "frobenius_norm", "spectral_gap", "effective_rank"):
        assert quantities[name] == pytest.approx(float(getattr(whole, name)), rel=1e-5)
    assert product_quantities(torch.tensor([1.0, 0.0]))["condition_number"] == math.inf
    assert "condition_number" not in product_quantities(torch.zeros(2))
    assert product_quantities(torch.tensor([float("nan"), 1.0])) == {"non_finite": 1.0}


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
