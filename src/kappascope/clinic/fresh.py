"""Whether a matrix looks as it was drawn: the law of its entries, its spectrum, and its scale.

Training that leaves the bulk of spectrum and entries as it was stays hidden, the more so in small
matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from kappascope.clinic.examination import Examination

TELLING_SIZE = 32  # singular values from which a spectrum tells a fresh matrix from another
MOVED_FROM = 1e-3  # of its norm, from the reference: what even bfloat16 would show
# Excess kurtosis, and the variance of that of n entries, times n (from moments up to the eighth).
LAWS = {"normal": (0.0, 24.0), "truncated normal": (-0.634, 3.85), "uniform": (-1.2, 1.32)}
LAW_DEVIATIONS = 4.0  # from the kurtosis of a law
ORTHOGONAL_KAPPA = 1.01  # what rounding to bfloat16 leaves of 1
# Gains over the root of a fan: of LeCun, of He for a ReLU, of torch's layers, for a tanh; and
# deviations that libraries fix: of GPT-2 and BERT, of others, and of torch's tables.
FAN_GAINS = (1.0, math.sqrt(2), math.sqrt(1 / 3), 5 / 3, math.sqrt(2 / 5), 0.5)
FIXED_SCALES = (0.02, 0.01, 0.006, 0.05, 0.1, 0.001, 1.0)
ORTHOGONAL_GAINS = (1.0, math.sqrt(2), 5 / 3, 0.1, 0.01)
TRUNCATION = 0.87962566  # the deviation of a normal law cut at two of its deviations
SCALE_DEVIATIONS = 5.0  # of the deviation of n entries, and a percent for rounding and variants


def is_random(row: Examination) -> bool:
    """Tell whether a spectrum is as near to Marchenko and Pastur's as chance, or orthogonal.

    Singular values of a random matrix repel each other: their distance from the law is of order
    log(n) / n, not 1/sqrt(n), so that little training shows. The entries must be of a law that
    layers are drawn from, too, and not have moved from those of a reference.

    >>> import torch
    >>> from kappascope.clinic.examine import examine
    >>> is_random(examine("w", torch.eye(40))), is_random(examine("w", torch.ones(40, 40)))
    (True, False)
    """
    if row.null_distance is None or moved_by(row) > MOVED_FROM:
        return False
    if is_orthogonal(row):
        return True
    within_chance = not row.outliers and row.null_distance < usual_distance(row)
    return within_chance and law(row) is not None


def is_fresh(row: Examination, layers: int = 0) -> bool:
    """Tell whether a matrix is random and of a scale with which layers begin.

    >>> import torch
    >>> from kappascope.clinic.examine import examine
    >>> drawn = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    >>> is_fresh(examine("w", drawn / 8)), is_fresh(examine("w", 0.37 * drawn))
    (True, False)
    """
    return is_random(row) and starting_scale(row, layers) is not None


def moved_by(row: Examination) -> float:
    """Return the distance from the reference, relative to it; 0 without one."""
    return (row.errors or {}).get("overall_matrix") or 0.0


def starting_scale(row: Examination, layers: int = 0) -> str | None:
    """Name the initialisation whose scale a matrix has, of a model of so many layers.

    >>> starting_scale(Examination("w", (64, 48), "", "ok", entry_std=0.02))
    'a deviation of 0.02'
    """
    if is_orthogonal(row):
        near = (g for g in ORTHOGONAL_GAINS if row.sigma_max and _is_near(row.sigma_max, g, 0.0))
        return next((f"orthogonal with gain {gain:.3g}" for gain in near), None)
    if not row.entry_std:
        return None
    excess = row.entry_kurtosis or 0.0
    error = SCALE_DEVIATIONS * math.sqrt((excess + 2) / 4 / max(1, row.parameters))
    for scale, name in _starting_scales(row, layers):
        if _is_near(row.entry_std, scale, error):
            return name
    return None


def _is_near(value: float, target: float, error: float) -> bool:
    return abs(value / target - 1) < 0.01 + error


def _starting_scales(row: Examination, layers: int) -> Iterator[tuple[float, str]]:
    outputs, inputs = row.shape
    fans = {"inputs": inputs, "outputs": outputs, "their mean": (inputs + outputs) / 2}
    if row.taps:
        fans["outputs"] = outputs * math.prod(row.taps)
        fans["their mean"] = (inputs + fans["outputs"]) / 2
    for what, fan in fans.items():
        for gain in FAN_GAINS:
            yield gain / math.sqrt(fan), f"{gain:.3g} over the root of {what}"
    depth_scaled = [0.02 / math.sqrt(2 * layers)] if layers else []
    for scale in (*FIXED_SCALES, *depth_scaled):
        yield scale, f"a deviation of {scale:.3g}"
        yield scale * TRUNCATION, f"a deviation of {scale:.3g}, cut at two"


def law(row: Examination) -> str | None:
    """Return the law of initial entries whose kurtosis a matrix has, within chance.

    >>> law(Examination("w", (40, 40), "float32", "ok", entry_kurtosis=-1.17))
    'uniform'
    >>> law(Examination("w", (40, 40), "float32", "ok", entry_kurtosis=-0.9))
    """
    kurtosis = row.entry_kurtosis or 0.0
    distances = {
        name: abs(kurtosis - excess) / math.sqrt(variance / row.parameters)
        for name, (excess, variance) in LAWS.items()
    }
    nearest = min(distances, key=lambda name: distances[name])
    return nearest if distances[nearest] < LAW_DEVIATIONS else None


def can_tell(row: Examination) -> bool:
    """Tell whether there are enough singular values for a fresh matrix to be told from another.

    >>> can_tell(Examination("w", (40, 31), "float32", "ok", null_distance=0.1))
    False
    """
    return row.null_distance is not None and min(row.shape) >= TELLING_SIZE


def usual_distance(row: Examination) -> float:
    """Return the distance that 999 of 1000 fresh matrices stay below.

    Fitted to simulated quantiles of 32 to 1024 singular values, checked with other random numbers.

    >>> round(usual_distance(Examination("w", (512, 2048), "float32", "ok")), 4)
    0.0084
    """
    n = min(row.shape)
    return (1.3 + 0.48 * math.log(n)) / n


def is_orthogonal(row: Examination) -> bool:
    """Tell whether all singular values are equal.

    >>> is_orthogonal(Examination("w", (8, 8), "float32", "ok", condition_number=1.0002))
    True
    """
    return row.condition_number is not None and row.condition_number < ORTHOGONAL_KAPPA
