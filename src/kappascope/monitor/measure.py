"""The numbers of one reading, from tensors in the memory of the host: pure functions, no model."""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.matrix import spectra
from kappascope.matrix.ends import Ends
from kappascope.matrix.status import Outcome
from kappascope.model.weights import precise
from kappascope.monitor.signal import signals

Quantities = dict[str, Any]
"""Numbers by quantity, or lists of pairs of index and number."""

QUANTILES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of row and column norms, largest first
SPECTRUM_POINTS = 65  # of a whole spectrum, and of the signals along it, at equal distances
MIN_SIGNAL_ACCURACY = 0.25  # an end whose vector may be off by more has no signal


def components(matrix: Float[Tensor, "out in"], vitals: spectra.Vitals) -> Quantities:
    """The components of a matrix with these vitals.

    >>> weight = torch.diag(torch.tensor([4.0, 2.0, 1.0]))
    >>> found = components(weight, spectra.vitals(weight))
    >>> found["condition_number"], found["stable_rank"], found["row_norms"][0]
    (4.0, 1.3125, (0.0, 4.0))
    """
    names = (
        "frobenius_norm", "sigma_max", "sigma_2", "sigma_min", "condition_number",
        "condition_number_low", "condition_number_high", "effective_rank", "spectral_gap",
    )  # fmt: skip
    numbers = {name: getattr(vitals, name) for name in names}
    numbers = {name: float(value) for name, value in numbers.items() if value is not None}
    if numbers.get("sigma_max"):
        numbers["stable_rank"] = (numbers["frobenius_norm"] / numbers["sigma_max"]) ** 2
    quantities: Quantities = dict(numbers)
    for name, norms in (("row_norms", vitals.row_norms), ("column_norms", vitals.column_norms)):
        if norms is not None:
            quantities[name] = at_quantiles(norms.sort(descending=True).values, QUANTILES)
    if vitals.status.outcome is Outcome.FAILED and (count := _non_finite(matrix)):
        quantities["non_finite"] = float(count)
    return quantities


def _non_finite(matrix: Tensor) -> int:
    """Count the entries that are NaN or infinite."""
    return int((~torch.isfinite(matrix.double())).sum())


def at_quantiles(values: Tensor, quantiles: tuple[float, ...]) -> list[tuple[float, float]]:
    """Entries of a sorted vector at some quantiles of its length, each with its own.

    >>> at_quantiles(torch.tensor([3.0, 2.0, 1.0]), (0.0, 1.0))
    [(0.0, 3.0), (1.0, 1.0)]
    """
    last = len(values) - 1
    places = [round(q * last) for q in quantiles]
    return list(zip(quantiles, values[places].tolist(), strict=True))


def places_along(size: int) -> tuple[list[int], list[float]]:
    """Indices of singular values at equal distances, and their quantiles, the ends among them.

    >>> places_along(3)
    ([0, 1, 2], [0.0, 0.5, 1.0])
    """
    count = min(size, SPECTRUM_POINTS)
    last = max(size - 1, 1)
    places = sorted({round(i * (size - 1) / max(count - 1, 1)) for i in range(count)})
    return places, [place / last for place in places]


def whole_spectrum(
    matrix: Float[Tensor, "out in"], gradient: Float[Tensor, "out in"] | None
) -> Quantities:
    """Singular values at points along the whole spectrum, and the signals there.

    >>> whole_spectrum(torch.diag(torch.tensor([3.0, 1.0])), torch.ones(2, 2))
    {'singular_values': [(0.0, 3.0), (1.0, 1.0)], 'signal': [(0.0, 1.0), (1.0, 1.0)],
     'signal_relative': [(0.0, 0.333...), (1.0, 1.0)]}
    """
    values = spectra.singular_values(matrix)
    if values.isnan().any():
        return {}
    places, quantiles = places_along(len(values))
    quantities: Quantities = {
        "singular_values": list(zip(quantiles, values[places].tolist(), strict=True))
    }
    if gradient is not None and gradient.isfinite().all():
        u, _, vt = spectra.decomposition(precise(matrix))
        flow = signals(precise(gradient), u[:, places], vt[places].mT)
        quantities |= signal_rows(flow.double(), values[places], quantiles)
    return quantities


def ends_signal(gradient: Float[Tensor, "out in"], ends: Ends) -> Quantities:
    """The signals at both ends of the spectrum, where the vectors there are known well enough.

    >>> from kappascope.matrix.tracking import ends
    >>> ends_signal(torch.ones(2, 2), ends(torch.diag(torch.tensor([2.0, 1.0])), {}))["signal"]
    [(0.0, 1.0), (1.0, 1.0)]
    """
    outer = [i for i in (0, -1) if float(ends.errors[i]) <= MIN_SIGNAL_ACCURACY]
    flow = signals(precise(gradient), ends.left[:, outer], ends.right[:, outer])
    if not flow.isfinite().all():
        return {}
    quantiles = [0.0 if i == 0 else 1.0 for i in outer]
    return signal_rows(flow.double(), ends.values[outer].double(), quantiles)


def signal_rows(flow: Tensor, values: Tensor, quantiles: list[float]) -> Quantities:
    """Signals as such and relative to their singular values, where these are not zero."""
    quantities: Quantities = {"signal": list(zip(quantiles, flow.tolist(), strict=True))}
    pairs = zip(quantiles, flow.tolist(), values.tolist(), strict=True)
    quantities["signal_relative"] = [(q, g / s) for q, g, s in pairs if s > 0]
    return quantities


def product_quantities(values: Float[Tensor, " rank"]) -> Quantities:
    """The components of the product of a head, by its singular values, as many as a head has rows.

    >>> product_quantities(torch.tensor([3.0, 1.0]))["frobenius_norm"]
    3.16...
    """
    if not values.isfinite().all():
        return {"non_finite": 1.0}
    sigma = values.tolist()
    quantities: Quantities = {
        "sigma_max": sigma[0],
        "sigma_min": sigma[-1],
        "frobenius_norm": math.hypot(*sigma),
    }
    if len(sigma) > 1:
        quantities["sigma_2"] = sigma[1]
    if sigma[0] > 0:
        quantities["condition_number"] = sigma[0] / sigma[-1] if sigma[-1] > 0 else math.inf
        quantities["stable_rank"] = (quantities["frobenius_norm"] / sigma[0]) ** 2
        quantities["effective_rank"] = float(sum(value > 0.01 * sigma[0] for value in sigma))
        quantities["spectral_gap"] = (sigma[0] - sigma[1]) / sigma[0] if len(sigma) > 1 else 1.0
    return quantities
