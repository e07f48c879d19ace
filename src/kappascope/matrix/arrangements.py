"""How the lines of one matrix stand in another: turned round, in another order, joined, rotated.

Rows are known again by their direction, whatever their order, also after some rounding or training;
where rows and columns are both in another order, first by their sorted entries. The order itself is
named where it is one that programs use: the halves of a rotary embedding put into pairs. What is no
order of lines but has the same singular values is the same map in another basis.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kappascope.matrix.precision import FloatGrid, storage_dtype

ALIKE = 0.5  # cosine of two lines that are one: unrelated ones of 64 entries have 0 +- 1/8
MOST_LINES = 16384  # of a side: a table of all their cosines has 2 gigabytes
MOST_ASSIGNED = 1024  # lines for which a best assignment takes less than a second
MOST_VALUES = 4096  # singular values that are compared


@dataclass(frozen=True)
class Arrangement:
    """An order of lines in which one matrix is to be read to stand like another.

    >>> Arrangement(transposed=True).applied(torch.tensor([[1, 2]]))
    tensor([[1],
            [2]])
    """

    transposed: bool = False
    rows: Tensor | None = None  # the lines to take, one after another
    columns: Tensor | None = None

    def applied(self, matrix: Tensor) -> Tensor:
        """Return the matrix in this arrangement."""
        turned = matrix.mT if self.transposed else matrix
        turned = turned if self.rows is None else turned[self.rows]
        return turned if self.columns is None else turned[:, self.columns]

    @property
    def is_rotary(self) -> bool:
        """Whether the order of rows is that of a rotary embedding, of which there are two.

        >>> Arrangement(rows=torch.tensor([0, 2, 1, 3])).is_rotary
        True
        """
        return self.rows is not None and bool(_rotary(self.rows, "rows"))

    @property
    def text(self) -> str:
        """The arrangement in words; nothing where it changes nothing.

        >>> Arrangement(rows=torch.tensor([0, 2, 1, 3])).text
        'halves of heads of 4 rows put into pairs'
        """
        orders = ((self.rows, "rows"), (self.columns, "columns"))
        said = ["transposed"] if self.transposed else []
        return ", ".join(
            [*said, *(_order(order, what) for order, what in orders if order is not None)]
        )


def _order(order: Tensor, what: str) -> str:
    return _rotary(order, what) or f"{what} in another order"


def _rotary(order: Tensor, what: str) -> str:
    for size in head_sizes(len(order)):
        halves = pairs_of_halves(len(order), size)
        if torch.equal(order, halves):
            return f"halves of heads of {size} {what} put into pairs"
        if torch.equal(order, halves.argsort()):
            return f"pairs of heads of {size} {what} put into halves"
    return ""


def head_sizes(length: int) -> Iterator[int]:
    """Yield the sizes of heads into which so many lines can be cut, the smallest first.

    >>> list(head_sizes(12))
    [4, 6, 12]
    """
    yield from (size for size in range(4, min(length, 512) + 1, 2) if length % size == 0)


def pairs_of_halves(length: int, size: int) -> Tensor:
    """Return the order in which the halves of every head of a size alternate.

    >>> pairs_of_halves(4, 4).tolist()
    [0, 2, 1, 3]
    """
    return torch.arange(length).view(-1, 2, size // 2).transpose(1, 2).flatten()


def arrangement(before: Tensor, after: Tensor) -> Arrangement | None:
    """Find the order of lines in which ``before`` is most like ``after``; None where none is.

    >>> weight = torch.randn(16, 24, generator=torch.Generator().manual_seed(0))
    >>> arrangement(weight, weight.T.flip(0)).text
    'transposed, rows in another order'
    """
    a, b = _normal(before), _normal(after)
    turned = [flip for flip in (False, True) if (a.mT if flip else a).shape == b.shape]
    for flip in turned:
        if float(((a.mT if flip else a) * b).sum()) > ALIKE:
            return Arrangement(flip)
    if max(b.shape) > MOST_LINES:
        return None
    for flip in turned:
        x = a.mT if flip else a
        for found in _ordered(x, b):
            arranged = Arrangement(flip, *found)
            if float((arranged.applied(a) * b).sum()) > ALIKE:
                return arranged
    return None


def _normal(matrix: Tensor) -> Tensor:
    """Return a matrix in float64 whose Frobenius norm is one."""
    exact = matrix.double()
    largest = exact.abs().max()
    scaled = exact / largest if largest > 0 else exact
    return scaled / scaled.norm() if largest > 0 else scaled


def _ordered(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor | None, Tensor | None]]:
    """Yield orders of rows, of columns and of both that may lead from one matrix to the other."""
    yield matched_rows(a, b), None
    yield None, matched_rows(a.mT, b.mT)
    rows = matched_rows(a.sort(1).values, b.sort(1).values, centred=True)
    if rows is not None:
        yield rows, matched_rows(a[rows].mT, b.mT)


def matched_rows(pool: Tensor, wanted: Tensor, *, centred: bool = False) -> Tensor | None:
    """Return the row of ``pool`` that is most like each wanted one, all different; None if not so.

    >>> matched_rows(torch.eye(3).double(), torch.eye(3).double()[[2, 0]]).tolist()
    [2, 0]
    """
    if centred:  # sorted rows are all alike but for what is their own
        pool, wanted = pool - pool.mean(0), wanted - pool.mean(0)
    one, other = (torch.nn.functional.normalize(side, dim=1) for side in (wanted, pool))
    cosines = one @ other.mT
    best, found = cosines.max(1)
    if len(found.unique()) < len(found):
        if max(cosines.shape) > MOST_ASSIGNED:
            return None
        from scipy.optimize import linear_sum_assignment

        found = torch.from_numpy(linear_sum_assignment(-cosines.numpy())[1])
        best = cosines.gather(1, found[:, None]).flatten()
    return found if float(best.median()) > ALIKE else None


def same_singular_values(before: Tensor, after: Tensor) -> bool:
    """Tell whether two matrices are the same map in other bases, as far as their types can tell.

    Unrelated matrices of n singular values have spectra that differ by about 1/n of the largest: in
    a type that rounds by as much, spectra tell nothing.

    >>> weight = torch.diag(torch.arange(3.0))
    >>> same_singular_values(weight, torch.linalg.qr(torch.ones(3, 3) + torch.eye(3)).Q @ weight)
    True
    """
    if sorted(before.shape) != sorted(after.shape) or min(after.shape) > MOST_VALUES:
        return False
    eps = max(FloatGrid.of(storage_dtype(matrix)).eps for matrix in (before, after))
    if 10 * eps * min(after.shape) > 1:
        return False
    room = 4 * eps  # of the largest: rounding moves no value by more than its own spectral norm
    one, other = (torch.linalg.svdvals(matrix.double()) for matrix in (before, after))
    is_telling = float(one[0] - one[-1]) > 0.01 * float(one[0])  # as an orthogonal matrix is not
    return is_telling and float((one - other).abs().max()) <= room * float(one[0])


@dataclass(frozen=True)
class Assembly:
    """The lines of several matrices of which one is made: fused, split, or interleaved by head.

    >>> assembly([torch.eye(4).double()], torch.eye(4)[1:3]).rows.tolist()
    [1, 2]
    """

    sources: tuple[int, ...]  # indices of those it is made of
    rows: Tensor  # of all of them below one another
    interleaved: bool


def assembly(pool: Sequence[Tensor], whole: Tensor) -> Assembly | None:
    """Find the rows of other matrices of which a matrix is made; None unless all are found.

    >>> q, k = torch.eye(6).double().split(3)
    >>> assembly([q, k], torch.cat([k, q])).sources
    (1, 0)
    """
    rows = torch.cat([matrix.double() for matrix in pool])
    if max(len(rows), len(whole)) > MOST_LINES or len(whole) > len(rows):
        return None
    found = matched_rows(rows, whole.double())
    if found is None:
        return None
    ends = torch.tensor([len(matrix) for matrix in pool]).cumsum(0)
    owner = torch.bucketize(found, ends, right=True)
    steps = (found[1:] != found[:-1] + 1).sum() + 1  # runs of rows that stood one after another
    sources = tuple(dict.fromkeys(owner.tolist()))
    return Assembly(sources, found, bool(steps > len(sources)))
