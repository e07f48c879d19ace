"""Whether a matrix looks as it was initialised, by its spectrum and its entries.

Training that leaves the bulk of both as it was stays hidden, the more so in small matrices.
"""

from __future__ import annotations

import math

from kappascope.clinic.examination import Examination

ENOUGH = 32  # singular values from which a spectrum tells a fresh matrix from another
MOVED = 1e-3  # of its norm, from the reference: what even bfloat16 would show
# Excess kurtosis, and the variance of that of n entries, times n (from moments up to the eighth).
LAWS = {"normal": (0.0, 24.0), "truncated normal": (-0.634, 3.85), "uniform": (-1.2, 1.32)}
FAR = 4.0  # standard deviations
EXACT = 1e-2  # by which kappa of an orthogonal matrix in bfloat16 misses 1


def is_fresh(row: Examination) -> bool:
    """Whether a spectrum is Marchenko and Pastur's as closely as a random matrix's, or orthogonal.

    Singular values of a random matrix repel each other: their distance from the law is of order
    log(n) / n, not 1/sqrt(n), so that little training shows. The entries must be of a law that
    layers are drawn from, too, and not have moved from those of a reference.

    >>> import torch
    >>> from kappascope.clinic.examination import examine
    >>> is_fresh(examine("w", torch.eye(40))), is_fresh(examine("w", torch.ones(40, 40)))
    (True, False)
    """
    if row.null_distance is None or _has_moved(row):
        return False
    if is_orthogonal(row):
        return True
    within_chance = not row.outliers and row.null_distance < usual_distance(row)
    return within_chance and law(row) is not None


def law(row: Examination) -> str | None:
    """The law of initial entries whose kurtosis a matrix has, within chance.

    >>> law(Examination("w", (40, 40), "float32", "ok", entry_kurtosis=-1.17))
    'uniform'
    >>> law(Examination("w", (40, 40), "float32", "ok", entry_kurtosis=-0.9))
    """
    entries, found = row.shape[0] * row.shape[1], row.entry_kurtosis or 0.0
    distances = {
        name: abs(found - excess) / math.sqrt(variance / entries)
        for name, (excess, variance) in LAWS.items()
    }
    nearest = min(distances, key=lambda name: distances[name])
    return nearest if distances[nearest] < FAR else None


def _has_moved(row: Examination) -> bool:
    return ((row.errors or {}).get("overall_matrix") or 0.0) > MOVED


def can_tell(row: Examination) -> bool:
    """Whether there are enough singular values for a fresh matrix to be told from another.

    >>> can_tell(Examination("w", (40, 31), "float32", "ok", null_distance=0.1))
    False
    """
    return row.null_distance is not None and min(row.shape) >= ENOUGH


def usual_distance(row: Examination) -> float:
    """The distance that 999 of 1000 fresh matrices stay below.

    Fitted to simulated quantiles of 32 to 1024 singular values, checked with other random numbers.

    >>> round(usual_distance(Examination("w", (512, 2048), "float32", "ok")), 4)
    0.0084
    """
    n = min(row.shape)
    return (1.3 + 0.48 * math.log(n)) / n


def is_orthogonal(row: Examination) -> bool:
    """Whether all singular values are equal.

    >>> is_orthogonal(Examination("w", (8, 8), "float32", "ok", condition_number=1.0002))
    True
    """
    return row.condition_number is not None and row.condition_number < 1 + EXACT
