"""What a weight matrix consists of, and how far a learned one is from its target."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from kappascope.matrix import spectra
from kappascope.text import html_table, number

SIGMA_FLOOR = 1e-10  # the paper's guard against a vanishing singular value; it shows in its digits


class component(cached_property[Tensor]):  # noqa: N801 - reads as the decorator it is
    """Make a method of :class:`Components` one of its components, with an error of its own.

    >>> Components.names[:3]
    ('row_norms', 'column_norms', 'singular_values')
    """

    def __init__(self, method: Callable[[Components], Tensor]) -> None:
        super().__init__(method)

    def __set_name__(self, owner: type[Components], name: str) -> None:
        super().__set_name__(owner, name)
        owner.names = (*owner.names, name)


@dataclass(frozen=True, eq=False, repr=False)
class Components:
    """The components of one weight matrix, or of each matrix of a stack ``(..., out, in)``.

    Each is computed when first asked for, in float64 whatever the storage type, from at most one
    factorization. A matrix that is not finite has NaN for its singular values and all that comes of
    them. ``names`` lists the paper's components; the others are summaries beyond the paper.

    >>> weight = torch.diag(torch.tensor([4.0, 2.0, 1.0]))
    >>> Components(weight).condition_number
    tensor(4., dtype=torch.float64)
    >>> Components.names[:3]
    ('row_norms', 'column_norms', 'singular_values')
    """

    matrix: Shaped[Tensor, "*stack out in"]
    threshold: float = 0.01

    names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "matrix", spectra.as_tensor(self.matrix))
        spectra.check_threshold(self.threshold)
        if given := spectra.unsupported(self.matrix):
            raise ValueError(f"expected dense real matrices, got {given}; convert first")
        if self.matrix.ndim < 2:
            given = f"shape {tuple(self.matrix.shape)}"
            raise ValueError(f"expected matrices (..., out, in), got {given}; reshape first")

    def __repr__(self) -> str:
        """The shape and type of the matrix, without computing anything.

        >>> Components(torch.zeros(5, 4, 3))
        Components(5 x 4 x 3 float32, threshold=0.01)
        """
        shape = " x ".join(map(str, self.matrix.shape))
        dtype = str(self.matrix.dtype).removeprefix("torch.")
        return f"Components({shape} {dtype}, threshold={self.threshold})"

    def _repr_html_(self) -> str:
        """Return a table of the components; lists as their smallest, median and largest."""
        rows = []
        for name in (*self.names, "stable_rank", "entropy_rank"):
            values = getattr(self, name).flatten()
            known = values[values.isfinite()]
            if not known.numel():
                text = "infinite" if values.isinf().any() else "undefined"
            elif len(values) == 1:
                text = number(float(known[0]), 4)
            else:
                ends = known.min(), known.median(), known.max()
                text = " · ".join(number(float(value), 4) for value in ends)
                text += f" (smallest, median, largest of {len(values):,})"
            rows.append((name.replace("_", " "), text))
        return html_table(repr(self), rows)

    @component
    def row_norms(self) -> Float[Tensor, "*stack out"]:
        """Euclidean norm of every row.

        >>> Components(torch.tensor([[3.0, 4.0], [0.0, 1.0]])).row_norms
        tensor([5., 1.], dtype=torch.float64)
        """
        return self._norms(-1, self.matrix)

    @component
    def column_norms(self) -> Float[Tensor, "*stack in"]:
        """Euclidean norm of every column.

        >>> Components(torch.tensor([[3.0, 0.0], [4.0, 1.0]])).column_norms
        tensor([5., 1.], dtype=torch.float64)
        """
        return self._norms(-2, self.matrix.mT)

    @component
    def singular_values(self) -> Float[Tensor, "*stack rank"]:
        """Singular values, largest first.

        >>> Components(torch.tensor([[0.0, 2.0], [1.0, 0.0]])).singular_values
        tensor([2., 1.], dtype=torch.float64)
        """
        return spectra.ldexp(self._values, self._scaled[1][..., None])

    @component
    def condition_number(self) -> Float[Tensor, "*stack"]:
        """Largest singular value over the smallest; infinite where the smallest is rounding.

        >>> Components(torch.ones(3, 3)).condition_number
        tensor(inf, dtype=torch.float64)
        """
        largest, smallest = self._sigma(0), self._sigma(-1)
        negligible = smallest <= spectra.resolution(self.matrix.shape, largest)
        return torch.where(negligible, torch.inf, largest / smallest)

    @component
    def effective_rank(self) -> Float[Tensor, "*stack"]:
        """How many singular values exceed ``threshold`` times the largest, and rounding.

        >>> Components(torch.diag(torch.tensor([1.0, 0.1, 0.001]))).effective_rank
        tensor(2., dtype=torch.float64)
        """
        s, largest = self._values, self._sigma(0)
        rounding = spectra.resolution(self.matrix.shape, largest)
        cut = torch.maximum(self.threshold * largest, rounding)
        count = (s > cut[..., None]).sum(-1).to(s.dtype)
        return torch.where(largest.isnan(), torch.nan, count)

    @component
    def spectral_gap(self) -> Float[Tensor, "*stack"]:
        """Relative distance of the second singular value from the first; 1 where there is none.

        >>> Components(torch.diag(torch.tensor([4.0, 3.0]))).spectral_gap
        tensor(0.2500, dtype=torch.float64)
        """
        return (self._sigma(0) - self._sigma(1)) / self._sigma(0)

    @component
    def frobenius_norm(self) -> Float[Tensor, "*stack"]:
        """Root of the sum of the squared entries.

        >>> Components(torch.tensor([[3.0, 4.0]])).frobenius_norm
        tensor(5., dtype=torch.float64)
        """
        entries, exponent = self._scaled
        return spectra.ldexp(torch.linalg.matrix_norm(entries), exponent)

    @cached_property
    def log_condition_number(self) -> Float[Tensor, "*stack"]:
        """Natural logarithm of the condition number: the scale on which kappa is comparable.

        >>> Components(torch.eye(5)).log_condition_number
        tensor(0., dtype=torch.float64)
        """
        return self.condition_number.log()

    @cached_property
    def stable_rank(self) -> Float[Tensor, "*stack"]:
        """Squared Frobenius norm over the squared spectral norm.

        >>> Components(torch.eye(7)).stable_rank
        tensor(7., dtype=torch.float64)
        """
        return (self._relative**2).sum(-1)

    @cached_property
    def entropy_rank(self) -> Float[Tensor, "*stack"]:
        """Exponential of the entropy of the normalised singular values (Roy and Vetterli 2007).

        >>> Components(torch.eye(7)).entropy_rank
        tensor(7.0000, dtype=torch.float64)
        """
        p = self._relative / self._relative.sum(-1, keepdim=True)
        return torch.special.entr(p).sum(-1).exp()

    @cached_property
    def nuclear_norm(self) -> Float[Tensor, "*stack"]:
        """Sum of the singular values.

        >>> Components(torch.diag(torch.tensor([2.0, 1.0]))).nuclear_norm
        tensor(3., dtype=torch.float64)
        """
        return self.singular_values.sum(-1)

    @cached_property
    def _relative(self) -> Float[Tensor, "*stack rank"]:
        """Singular values as fractions of the largest."""
        return self._values / self._sigma(0)[..., None]

    def _sigma(self, index: int) -> Float[Tensor, "*stack"]:
        """Return a singular value of the scaled matrix; zero where there is no such value."""
        s = self._values
        exists = -s.shape[-1] <= index < s.shape[-1]
        return s[..., index] if exists else s.new_zeros(s.shape[:-1])

    @property
    def _entries(self) -> Float[Tensor, "*stack entries"]:
        return self.matrix.detach().double().flatten(-2)

    @property
    def _broken(self) -> Bool[Tensor, "*stack"]:
        """Whether a matrix is not finite."""
        return self._values.isnan().any(-1)

    @cached_property
    def _scaled(self) -> tuple[Tensor, Tensor]:
        return spectra.scaled_to_one(self.matrix)

    @cached_property
    def _values(self) -> Float[Tensor, "*stack rank"]:
        """Singular values of the scaled matrix: their ratios are right at the ends of float64."""
        return spectra.singular_values(self._scaled[0])

    def _norms(self, dim: int, vectors: Shaped[Tensor, "*stack count entries"]) -> Tensor:
        """Return norms along a dimension of the scaled entries, scaled back.

        ``vectors`` are as given.
        """
        entries, exponent = self._scaled
        norms = torch.linalg.vector_norm(entries, dim=dim)
        return spectra.norms_restored(norms, vectors.detach(), exponent[..., None])


def floored_condition_number(
    singular_values: Float[Tensor, "*stack rank"],
) -> Float[Tensor, "*stack"]:
    """Return the paper's kappa: the smallest singular value is raised by 1e-10.

    >>> floored_condition_number(torch.tensor([2.0, 0.0], dtype=torch.float64))
    tensor(2.0000e+10, dtype=torch.float64)
    """
    return singular_values[..., 0] / (singular_values[..., -1] + SIGMA_FLOOR)


class Errors(dict[str, Tensor]):
    """Errors by component. NaN marks an error that does not exist; ``absent`` says why.

    >>> errors(torch.eye(3), torch.ones(3, 3)).absent["condition_number"]
    "the target's condition_number is infinite (1 of 1)"
    """

    absent: dict[str, str]

    def __init__(self, found: dict[str, Tensor], absent: dict[str, str]) -> None:
        super().__init__(found)
        self.absent = absent


def errors(learned: Tensor | Components, target: Tensor | Components) -> Errors:
    """Return the relative error of every component of ``learned``, and of the matrix itself.

    Either side may be matrices ``(..., out, in)`` or the :class:`Components` of some, which then
    are not computed again. Vectors are compared as a whole, ``|a - a*| / |a*|``, as the paper does;
    ``overall_matrix`` is that of the entries. ``log_condition_number`` is
    ``|log kappa - log kappa*|``, the error whose mean exists. Where a target's value is zero or
    infinite a relative error has no meaning and is NaN, with the reason in ``absent``.

    >>> found = errors(torch.eye(2) * 1.5, torch.eye(2))
    >>> found["row_norms"], found["condition_number"]
    (tensor(0.5000, dtype=torch.float64), tensor(0., dtype=torch.float64))
    """
    ours = learned if isinstance(learned, Components) else Components(learned)
    theirs = target if isinstance(target, Components) else Components(target)
    _check_shapes(ours.matrix, theirs.matrix)
    pairs = {name: (getattr(ours, name), getattr(theirs, name)) for name in Components.names}
    pairs["overall_matrix"] = (ours._entries, theirs._entries)
    broken = ours._broken | theirs._broken
    measured, absent = {}, {}
    for name, (a, b) in pairs.items():
        vector = b.ndim > theirs.matrix.ndim - 2
        measured[name] = _relative_error(a, b, vector)
        if measured[name].isnan().any():
            absent[name] = _explained(measured[name], broken, _reasons(name, a, b, vector))
    log = (ours.log_condition_number - theirs.log_condition_number).abs()
    measured["log_condition_number"] = torch.where(
        measured["condition_number"].isnan(), torch.nan, log
    )
    if "condition_number" in absent:
        absent["log_condition_number"] = absent["condition_number"]
    return Errors(measured, absent)


def _relative_error(a: Tensor, b: Tensor, vector: bool) -> Tensor:
    """``|a - b| / |b|``, NaN where that is no number."""
    difference, size = (a - b).abs(), b.abs()
    if vector:
        if size.shape[-1]:
            largest = size.amax(-1, keepdim=True).clamp(min=torch.finfo(size.dtype).tiny)
            difference, size = difference / largest, size / largest
        difference, size = (torch.linalg.vector_norm(each, dim=-1) for each in (difference, size))
    exists = (size > 0) & size.isfinite() & difference.isfinite()
    return torch.where(exists, difference / size, torch.nan)


def _check_shapes(a: Tensor, b: Tensor) -> None:
    try:
        np.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # torch's would load sympy for this
        fits = a.shape[-2:] == b.shape[-2:]
    except ValueError:
        fits = False
    if not fits:
        given = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ValueError(f"expected two matrices, or stacks, of one shape; got {given}")


def _explained(error: Tensor, broken: Tensor, reasons: Iterator[tuple[str, Tensor]]) -> str:
    """Return the reasons why errors are absent, each once, and how many it explains."""
    left, sentences = error.isnan(), []
    for reason, applies in (("a matrix is not finite", broken), *reasons):
        here = left & applies
        if here.any():
            sentences.append(f"{reason} ({int(here.sum())} of {error.numel()})")
            left = left & ~here
    return "; ".join(sentences)


def _reasons(name: str, a: Tensor, b: Tensor, vector: bool) -> Iterator[tuple[str, Tensor]]:
    """Say which finite matrices have no relative error of a component, and why."""

    def any_of(holds: Tensor) -> Tensor:
        return holds.any(-1) if vector else holds

    for whose, values in (("target's", b), ("learned", a)):
        yield f"the {whose} {name} is infinite", any_of(values.isinf())
        yield f"the {whose} {name} is undefined", any_of(values.isnan())
    yield f"the error of {name} is outside float64's range", any_of((a - b).isinf())
    yield f"the target's {name} is zero", torch.ones((), dtype=torch.bool, device=b.device)
