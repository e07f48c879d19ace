"""How many directions a change of a matrix has that neither chance nor rounding explains.

Two matrices that were stored differ by what training did and by the rounding of both. A random
change has Marchenko and Pastur's spectrum, which ends at an edge; so has rounding, with an edge of
its own. Singular values above both are directions in which something was learned.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from kappascope.matrix import precision, spectra
from kappascope.matrix.status import Outcome

ENERGY = 0.99  # of a product of two factors, that the directions worth keeping hold together
MARGIN = 1.02  # above the edge: the largest of a random matrix of 100 rows exceeds it by 1 %


@dataclass(frozen=True)
class Delta:
    """What a change is made of: ``rank`` directions beyond chance and rounding, and their share.

    ``spikes`` are the singular values above ``chance_edge``, which is that of a random change with
    entries of the same size as those that the directions leave; ``rounding_edge`` is what rounding
    of both sides alone gives. ``limit`` is the rank that two factors allow.

    >>> Delta(rank=2, spikes=3, energy=0.9, chance_edge=0.1, rounding_edge=0.2).limit
    """

    rank: int
    spikes: int
    energy: float  # the share of the squared norm in these directions
    chance_edge: float | None  # none where float64 cannot hold it
    rounding_edge: float | None = None
    limit: int | None = None


def delta_between(
    before: Shaped[Tensor, "out in"], after: Shaped[Tensor, "out in"]
) -> Delta | None:
    """Return what became of one matrix until another, or nothing where that has no spectrum.

    >>> generator = torch.Generator().manual_seed(0)
    >>> start = torch.randn(64, 48, generator=generator, dtype=torch.float64)
    >>> noise = torch.randn(64, 48, generator=generator, dtype=torch.float64) / 100
    >>> push = torch.outer(torch.ones(64), torch.ones(48)).double() / 10
    >>> delta_between(start, start + noise).rank, delta_between(start, start + noise + push).rank
    (0, 1)
    """
    both, exponents = spectra.scaled_to_one(torch.cat([before.double(), after.double()], dim=1))
    exponent = int(exponents)  # so that no square leaves float64's range
    old, new = both.split(before.shape[1], dim=1)
    change = new - old
    if not change.any():
        return None
    found = spectra.spectrum(change)
    if found.status.outcome is Outcome.FAILED:
        return None
    squares = torch.zeros_like(change)
    for matrix, scaled in ((before, old), (after, new)):
        dtype = precision.storage_dtype(matrix)
        squares += precision.half_ulps(scaled.contiguous(), dtype, exponent).square()
    rounding = precision.rounding_norm(squares.sum(1).sqrt(), squares.sum(0).sqrt())
    values = found.values
    edge = bulk_edge(values, (change.shape[0], change.shape[1]))
    spikes = int((values > edge).sum())
    rank = int((values > max(edge, rounding)).sum())
    return Delta(
        rank,
        spikes,
        _share(values, rank),
        chance_edge=spectra.unscaled(edge, exponent),
        rounding_edge=spectra.unscaled(rounding, exponent),
    )


def bulk_edge(values: Float[Tensor, " count"], shape: tuple[int, int]) -> float:
    """Return the edge of the random part of a spectrum, whose size is told by what lies below it.

    What stands out is taken away, and the edge of the rest found anew, until nothing stands out.

    >>> values = torch.linalg.svdvals(torch.eye(8, dtype=torch.float64))
    >>> bulk_edge(values, (8, 8)) > 1
    True
    """
    rows, columns = shape
    scale = float(values[0]) or 1.0
    squares, above = (values / scale).square(), 0
    while above < len(values):
        rest = max(1, (rows - above) * (columns - above))
        deviation = math.sqrt(float(squares[above:].sum()) / rest)
        edge = MARGIN * deviation * (math.sqrt(rows) + math.sqrt(columns))
        found = int((squares.sqrt() > edge).sum())
        if found <= above:
            break
        above = found
    return edge * scale


def delta_of_product(values: Float[Tensor, " count"], shape: tuple[int, int], limit: int) -> Delta:
    """Return what a product of two factors of inner size ``limit`` changes.

    Its rank is the number of directions that hold ENERGY of it. Random factors share their energy
    almost equally among all; what is above the edge of such a product stands out.

    >>> delta_of_product(torch.tensor([3.0, 0.1, 0.0]), (3, 3), limit=2).rank
    1
    """
    scale = float(values[0]) or 1.0
    squares = (values.double() / scale).square()
    held = squares.cumsum(0)
    rank = int((held < ENERGY * held[-1]).sum()) + 1 if float(values[0]) else 0
    rows, columns = shape
    spread = (1 + math.sqrt(limit / rows)) * (1 + math.sqrt(limit / columns))
    edge = MARGIN * scale * math.sqrt(float(held[-1]) / max(1, limit)) * spread
    return Delta(rank, int((values > edge).sum()), _share(values, rank), edge, limit=limit)


def _share(values: Tensor, rank: int) -> float:
    relative = (values.double() / (float(values[0]) or 1.0)).square()
    return float(relative[:rank].sum() / relative.sum()) if rank else 0.0
