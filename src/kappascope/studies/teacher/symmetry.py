"""Which networks are the same: the symmetries of a perceptron, and what they leave to compare.

A matrix here carries its bias as the last column. Hidden units that can only be permuted (and,
under ReLU, scaled) together are a *group*; ``None`` is a side that nothing permutes: the inputs
and the outputs. Under a residual all hidden layers are one group, for the stream ties them.
"""

from collections.abc import Mapping

import numpy as np
import torch
from scipy.linalg import helmert
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from kappascope.matrix.components import errors
from kappascope.studies.teacher.model import Architecture

Matrices = tuple[Tensor, ...]
Orders = Mapping[int | None, Tensor]
SPECTRAL = (
    "singular_values", "condition_number", "log_condition_number", "effective_rank", "spectral_gap"
)  # fmt: skip


def rows_of(architecture: Architecture) -> tuple[int | None, ...]:
    """Return the group of each matrix's rows."""
    hidden = range(architecture.depth - 1)
    return (*(0 if architecture.variant == "residual" else place for place in hidden), None)


def columns_of(architecture: Architecture) -> tuple[int | None, ...]:
    """Return the group of each matrix's columns."""
    return (None, *rows_of(architecture)[:-1])


def groups_of(architecture: Architecture) -> tuple[int, ...]:
    """Return all groups, from the input on."""
    return tuple(dict.fromkeys(g for g in rows_of(architecture) if g is not None))


def permuted(architecture: Architecture, matrices: Matrices, orders: Orders) -> Matrices:
    """Put the units of each group into another order, which leaves the function as it is."""
    sides = zip(matrices, rows_of(architecture), columns_of(architecture), strict=True)
    return tuple(_columns(_rows(w, orders, row), orders, column) for w, row, column in sides)


def _rows(matrix: Tensor, orders: Orders, group: int | None) -> Tensor:
    return matrix[orders[group]] if group in orders else matrix


def _columns(matrix: Tensor, orders: Orders, group: int | None) -> Tensor:
    """Columns in their order; the bias stays the last."""
    if group not in orders:
        return matrix
    return torch.cat([matrix[:, :-1][:, orders[group]], matrix[:, -1:]], 1)


def rescaled(
    architecture: Architecture, matrices: Matrices, scales: Mapping[int | None, Tensor]
) -> Matrices:
    """Multiply each ReLU unit by its positive scale, which leaves the function as it is."""
    scaled = []
    sides = zip(matrices, rows_of(architecture), columns_of(architecture), strict=True)
    for matrix, row, column in sides:
        unit = matrix.new_ones(1)
        below = matrix.new_ones(matrix.shape[1])  # the bias has no unit below it
        below[:-1] = scales.get(column, unit)
        scaled.append(matrix * scales.get(row, unit)[:, None] / below)
    return tuple(scaled)


def canonical(architecture: Architecture, matrices: Matrices) -> Matrices:
    """Represent all networks with this function by one, but for the order of units.

    ReLU: the first matrix into a group has rows of length one. LayerNorm sees neither what all
    rows share nor the scale: the mean row is subtracted, the norm is one; and since it couples
    the units, ReLU's scaling of single ones is gone. GELU has no scaling.
    """
    if architecture.variant == "layernorm":
        centred = [matrix - matrix.mean(0) for matrix in matrices[:-1]]
        return (*(matrix / matrix[:, :-1].norm() for matrix in centred), matrices[-1])
    if architecture.activation == "relu":
        for group in groups_of(architecture):
            first = matrices[rows_of(architecture).index(group)]
            scales = 1 / first[:, :-1].norm(dim=1)
            matrices = rescaled(architecture, matrices, {group: scales})
    return matrices


def matched(architecture: Architecture, learned: Matrices, target: Matrices) -> Matrices:
    """Put the learned units into the order that brings their matrices nearest to the target.

    One group at a time is assigned exactly, by incoming and outgoing weights, until nothing gains:
    exact for one group between fixed sides; for more, the better of two ascents, from the input
    and from the output (as Ainsworth et al. 2022 match weights). Every matrix counts in units of
    its target's norm.
    """
    weighed = tuple(t / t.square().sum() for t in target)
    rows, columns = rows_of(architecture), columns_of(architecture)

    def agrees(orders: Orders) -> float:
        return agreement(architecture, learned, weighed, orders)

    def assigned(group: int, orders: Orders) -> Orders:
        """Order one group best, the others given; sides not yet ordered do not count."""
        known = {None, *orders}
        alike: Tensor | float = 0.0
        for ours, theirs, row, column in zip(learned, weighed, rows, columns, strict=True):
            if row == group and column in known:
                alike = alike + theirs @ _columns(ours, orders, column).mT
            if column == group and row in known:
                alike = alike + (theirs.mT @ _rows(ours, orders, row))[:-1, :-1]
        _, order = linear_sum_assignment(np.asarray(alike), maximize=True)
        return {**orders, group: torch.from_numpy(order)}

    def ascent(groups: tuple[int, ...]) -> Orders:
        orders: Orders = {}
        for group in groups:
            orders = assigned(group, orders)
        reached, gained = agrees(orders), True
        while gained:
            gained = False
            for group in groups:
                better = assigned(group, orders)
                if agrees(better) > reached * (1 + 1e-12):  # more than rounding
                    orders, reached, gained = better, agrees(better), True
        return orders

    groups = groups_of(architecture)
    return permuted(architecture, learned, max(map(ascent, (groups, groups[::-1])), key=agrees))


def agreement(
    architecture: Architecture, learned: Matrices, weighed: Matrices, orders: Orders
) -> float:
    """Inner product of learned and target weights: the largest where their distance is least."""
    pairs = zip(permuted(architecture, learned, orders), weighed, strict=True)
    return sum(float((a * b).sum()) for a, b in pairs)


def gauge(architecture: Architecture, matrix: str) -> dict[str, str]:
    """Components that the symmetries leave without meaning, each with the reason."""
    if matrix == "last":
        return {}
    if architecture.variant == "layernorm":
        return {"frobenius_norm": "LayerNorm divides the scale out"}
    tied = architecture.variant == "residual" and matrix == "middle"
    if architecture.activation != "relu" or tied:
        return {}
    unit = "ReLU lets every row have length one"
    return {"row_norms": unit, "frobenius_norm": unit}


def recovery(
    architecture: Architecture, learned: Matrices, target: Matrices
) -> dict[tuple[str, str], float]:
    """Measure the errors of a network's matrices that mean something, by matrix and component.

    Under LayerNorm the singular values are those across the mean row, whose own is zero.
    """
    target = canonical(architecture, target)
    learned = matched(architecture, canonical(architecture, learned), target)
    recovered: dict[tuple[str, str], float] = {}
    for name, ours, theirs in zip(architecture.matrices, learned, target, strict=True):
        a, b = ours[:, :-1], theirs[:, :-1]
        measured = dict(errors(a, b))
        if architecture.variant == "layernorm" and name != "last":
            across = torch.from_numpy(helmert(len(a)))
            reduced = errors(across @ a, across @ b)
            measured |= {component: reduced[component] for component in SPECTRAL}
        free = gauge(architecture, name)
        recovered |= {(name, c): float(e) for c, e in measured.items() if c not in free}
    return recovered
