"""Whether a matrix looks as it was initialised, by its spectrum: little training shows there."""

from __future__ import annotations

import math

from kappascope.clinic.examination import Examination

ENOUGH = 32  # singular values from which a spectrum tells a fresh matrix from another
EXACT = 1e-2  # by which kappa of an orthogonal matrix in bfloat16 misses 1


def is_fresh(row: Examination) -> bool:
    """Whether a spectrum is Marchenko and Pastur's as closely as a random matrix's, or orthogonal.

    Singular values of a random matrix repel each other: their distance from the law is of order
    log(n) / n, not 1/sqrt(n), so that very little training shows.

    >>> import torch
    >>> from kappascope.clinic.examination import examine
    >>> is_fresh(examine("w", torch.eye(40))), is_fresh(examine("w", torch.ones(40, 40)))
    (True, False)
    """
    if row.null_distance is None:
        return False
    return is_orthogonal(row) or (not row.outliers and row.null_distance < usual_distance(row))


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
