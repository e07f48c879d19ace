"""Hashes by which equal matrices are known, also transposed or with their lines in another order.

Every entry is hashed by its value, so that the dtype in which it is stored does not matter. Sums of
hashes modulo 2**64 forget an order, and sums with a weight for every place remember it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

PANEL_ENTRIES = 2**18  # hashed together: two megabytes stay in the cache
Words = np.ndarray[Any, np.dtype[np.uint64]]


@dataclass(frozen=True)
class Fingerprints:
    """The hashes of a matrix in its order, transposed, and without the order of its lines.

    >>> import torch
    >>> found = fingerprints(torch.eye(3))
    >>> found.ordered == found.transposed
    True
    """

    ordered: str
    transposed: str
    rows: str  # whatever the order of the rows
    columns: str
    entries: str  # whatever the place of an entry


def fingerprints(matrix: Tensor) -> Fingerprints:
    """Hash a matrix of finite numbers.

    >>> import torch
    >>> one = torch.arange(6.0).view(2, 3)
    >>> fingerprints(one).transposed == fingerprints(one.T.bfloat16()).ordered
    True
    >>> fingerprints(one).rows == fingerprints(one.flip(0)).rows
    True
    """
    rows, columns = matrix.shape
    along, down = _weights(columns), _weights(rows)
    of_rows, of_columns = np.zeros(rows, np.uint64), np.zeros(columns, np.uint64)
    entries = np.uint64(0)
    height = max(1, PANEL_ENTRIES // max(1, columns))
    with np.errstate(over="ignore"):  # modulo 2**64 is meant
        for top in range(0, rows, height):
            exact = matrix[top : top + height].detach().double() + 0.0  # no zero keeps a sign
            hashes = _mixed(exact.numpy(force=True).view(np.uint64))
            of_rows[top : top + height] = (hashes * along).sum(1)
            of_columns += (hashes * down[top : top + height, None]).sum(0)
            entries = entries + hashes.sum()
        of_rows, of_columns = _mixed(of_rows), _mixed(of_columns)
        sums = (of_rows * down).sum(), (of_columns * along).sum(), of_rows.sum(), of_columns.sum()
    return Fingerprints(*(f"{int(word):016x}" for word in (*sums, entries)))


def _weights(count: int) -> Words:
    """Return an odd number for every place, the first of one sequence."""
    with np.errstate(over="ignore"):
        return _mixed(np.arange(count, dtype=np.uint64)) | np.uint64(1)


def _mixed(words: Words) -> Words:
    """Mix all bits of each word (splitmix64 of Steele, Lea and Flood 2014)."""
    x: Words = words + np.uint64(0x9E3779B97F4A7C15)
    x ^= x >> np.uint64(30)
    x *= np.uint64(0xBF58476D1CE4E5B9)
    x ^= x >> np.uint64(27)
    x *= np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x


def likeness(one: Fingerprints, other: Fingerprints) -> str:
    """Say in which order one matrix has the numbers of another, or nothing where it has not.

    >>> import torch
    >>> one = fingerprints(torch.arange(6.0).view(2, 3))
    >>> likeness(one, one), likeness(one, fingerprints(torch.arange(6.0).view(2, 3).T))
    ('equal', 'transposed')
    """
    if one.entries != other.entries:
        return ""
    orders = {
        "equal": one.ordered == other.ordered,
        "transposed": one.ordered == other.transposed,
        "equal up to the order of its rows": one.rows == other.rows,
        "equal up to the order of its columns": one.columns == other.columns,
        "transposed up to the order of its lines": one.rows == other.columns
        or one.columns == other.rows,
    }
    return next((order for order, holds in orders.items() if holds), "equal but for the order")
