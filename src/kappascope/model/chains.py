"""Layers that follow one another, multiplied as if nothing stood between them.

The product of the layers' condition numbers bounds the condition number of their product as long
as the widths only fall and then only rise. Past a layer that is wider than both its sides (the
inside of a transformer's perceptron) there is no such bound: what one layer writes, the next may
not read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from kappascope.matrix import spectra
from kappascope.matrix.status import Outcome, Status
from kappascope.model import names as roles
from kappascope.model.attention import Member, Places, judged, values
from kappascope.model.matrices import Logical, Plan, Unit
from kappascope.model.tensors import Read

EPS = torch.finfo(torch.float64).eps
LARGEST = 2048  # a product of this size takes seconds, of twice this size a minute
ENTRIES = 2**26  # of all layers together, which are held at once: half a gigabyte in float64
Ends: TypeAlias = tuple[float | None, float | None]  # largest singular value, condition number


@dataclass(frozen=True)
class Chain:
    """Kappa of a product of layers, beside the product of their kappas.

    ``bound`` is that product, infinite or None if one of them is, and None where float64 cannot
    hold it; it ``binds`` only where it is a bound. ``condition_number`` is over as many singular
    values as the narrowest layer has, infinite where float64 cannot tell the last from zero and
    None where the product was not formed; then ``status`` says why.

    >>> Chain("a > b", ("a", "b"), (4, 4, 4), 6.0, True, 5.0, Status(Outcome.OK)).bound
    6.0
    """

    name: str
    members: tuple[str, ...]
    widths: tuple[int, ...]
    bound: float | None
    binds: bool
    condition_number: float | None
    status: Status


@dataclass(frozen=True)
class Links:
    """Layers that follow one another, the first to act first. It can be pickled."""

    members: tuple[Logical, ...]
    units: tuple[Unit, ...]

    @property
    def widths(self) -> tuple[int, ...]:
        """Inputs of the first layer, then the outputs of each."""
        return (self.members[0].shape[1], *(each.shape[0] for each in self.members))

    def chain(self, read: Read, known: Mapping[str, Ends] = MappingProxyType({})) -> Chain:
        """Multiply the layers by :func:`chain`.

        Nothing is read if all are ``known`` and the product is too large.

        >>> import torch
        >>> from kappascope.model.matrices import plan, reader
        >>> source = {"0.weight": torch.eye(3), "2.weight": torch.eye(2, 3)}
        >>> links(plan(source))[0].chain(reader(source)).condition_number
        1.0
        """
        names = [each.name for each in self.members]
        if (reason := obstacle(self.widths)) and all(name in known for name in names):
            ends = [known[name] for name in names]
            return _chain(names, self.widths, ends, None, Status(Outcome.SKIPPED, reason))
        return chain(zip(names, values(self.units, self.members, read), strict=True), known)


def chain(
    matrices: Iterable[tuple[str, Tensor]], known: Mapping[str, Ends] = MappingProxyType({})
) -> Chain:
    """Names and matrices in the order in which they act, multiplied.

    ``known`` has the largest singular value and kappa of matrices that were measured before.

    >>> import torch
    >>> found = chain([("a", torch.diag(torch.tensor([2.0, 1.0]))), ("b", 3 * torch.eye(2))])
    >>> found.name, found.bound, found.condition_number, found.status
    ('a > b', 2.0, 2.0, 'ok')
    """
    pairs = list(matrices)
    names, layers = [name for name, _ in pairs], [matrix for _, matrix in pairs]
    if len(pairs) < 2 or any(a.shape[0] != b.shape[1] for a, b in pairwise(layers)):
        shapes = [tuple(each.shape) for each in layers]
        raise ValueError(
            f"expected two or more layers, each with as many columns as the one before has rows; "
            f"got {shapes}; pass them in the order in which they act"
        )
    widths = (layers[0].shape[1], *(each.shape[0] for each in layers))
    ends = [known[name] if name in known else _ends(matrix) for name, matrix in pairs]
    if reason := obstacle(widths):
        return _chain(names, widths, ends, None, Status(Outcome.SKIPPED, reason))
    if any(both == (None, None) for both in ends):
        failed = Status(Outcome.FAILED, "a layer could not be measured")
        return _chain(names, widths, ends, None, failed)
    sigma, floor = _product(layers, [largest for largest, _ in ends])
    return _chain(names, widths, ends, *judged(sigma[: min(widths)], floor)[1:])


def obstacle(widths: Sequence[int]) -> str:
    """Why a product of layers with these widths is not formed, or nothing.

    >>> obstacle((784, 128, 10)), obstacle((4096, 11008, 4096))
    ('', 'a width of 11008 is more than 2048')
    """
    if 0 in widths:
        return "a layer is empty"
    inside = max(widths[1:-1])
    between = inside if len(widths) == 3 else max(widths)  # two thin factors may be as long as any
    if between > LARGEST:
        return f"a width of {between} is more than {LARGEST}"
    entries = sum(a * b for a, b in pairwise(widths))
    return f"{entries} numbers are more than {ENTRIES}" if entries > ENTRIES else ""


def _chain(
    names: Sequence[str], widths: tuple[int, ...], ends: Sequence[Ends], kappa: float | None,
    status: Status,
) -> Chain:  # fmt: skip
    kappas = [each for _, each in ends if each is not None]
    bound = math.prod(kappas) if len(kappas) == len(ends) else None
    if bound == math.inf and math.inf not in kappas:
        bound = None
    name = f"{names[0]} > {names[-1]}"
    return Chain(name, tuple(names), widths, bound, _is_valley(widths), kappa, status)


def _ends(matrix: Tensor) -> Ends:
    vitals = spectra.vitals(matrix)
    return vitals.sigma_max, vitals.condition_number


def _is_valley(widths: Sequence[int]) -> bool:
    """Whether widths fall, then rise: no layer writes what the next cannot read."""
    rising = [b > a for a, b in pairwise(widths) if a != b]
    return rising == sorted(rising)


def _product(layers: Sequence[Tensor], norms: Sequence[float | None]) -> tuple[Tensor, float]:
    """Singular values of the product up to a factor, and what float64 cannot tell from zero.

    Every layer is scaled: the product of two may be outside of what float64 holds, and so may one
    layer's norm, which is None then.
    """
    if len(layers) == 2:
        first, second = (spectra.scaled_to_one(layer)[0] for layer in layers)
        sigma, floor = spectra.product_singular_values(second, first)
        return sigma, float(floor)
    (product, _), error = spectra.scaled_to_one(layers[0]), 0.0
    for layer, norm in zip(layers[1:], norms[1:], strict=True):
        a, exponent = spectra.scaled_to_one(layer)
        rounding = a.shape[1] * EPS * float(torch.linalg.matrix_norm(product))
        product, shift = spectra.scaled_to_one(a @ product)
        size = spectra.singular_values(a)[0] if norm is None else _times(norm, -int(exponent))
        error = _times(float(size) * (error + rounding), -int(shift))
    sigma = spectra.singular_values(product)
    return sigma, error + float(spectra.resolution(product.shape, sigma[0]))


def _times(number: float, exponent: int) -> float:
    """``number * 2**exponent``, infinite where Python would raise an error."""
    try:
        return math.ldexp(number, exponent)
    except OverflowError:
        return math.inf


# --- finding them ---------------------------------------------------------------------------------

_LAYER = "fc|linear|lin|dense|layer|hidden|l"  # names that are numbered, as in fc1, fc2, fc3
_APART = {"embedding", "expert", "adapter", "convolution", "depthwise", "recurrent", "state"}


def links(plan: Plan) -> tuple[Links, ...]:
    """Layers that follow one another by their names and fit by their shapes.

    These are layers numbered in one place (``net.0``, ``net.2`` or ``fc1``, ``fc2``), and up and
    down of one perceptron.

    >>> import torch
    >>> from kappascope.model.matrices import plan
    >>> blank = {name: torch.empty(4, 4, device="meta") for name in ("fc1.weight", "fc2.weight")}
    >>> [[each.name for each in found.members] for found in links(plan(blank))]
    [['fc1.weight', 'fc2.weight']]
    """
    numbered = [*_numbered(plan)]
    taken = {part.name for members in numbered for _, part in members}
    pairs = [pair for pair in _perceptrons(plan) if not taken >= {part.name for _, part in pair}]
    return tuple(_linked(members) for members in [*numbered, *pairs])


def _linked(members: Sequence[Member]) -> Links:
    units = {unit.paths: unit for unit, _ in members}
    return Links(tuple(part for _, part in members), tuple(units.values()))


def _numbered(plan: Plan) -> Iterator[list[Member]]:
    places: dict[str, list[tuple[int, Member]]] = {}
    for unit in plan.units:
        whole = unit.parts[0]
        match = re.fullmatch(rf"(|.*\.)({_LAYER}|)_?(\d{{1,6}})", roles.layer(whole.name))
        if match and len(unit.parts) == 1 and whole.kind not in _APART:
            places.setdefault(match[1] + match[2], []).append((int(match[3]), (unit, whole)))
    for numbered in places.values():
        yield from _runs([member for _, member in sorted(numbered, key=lambda each: each[0])])


def _runs(members: Sequence[Member]) -> Iterator[list[Member]]:
    """The longest stretches in which each layer takes what the one before gives."""
    run: list[Member] = []
    for member in members:
        if run and run[-1][1].shape[0] != member[1].shape[1]:
            yield from [run] if len(run) > 1 else []
            run = []
        run.append(member)
    yield from [run] if len(run) > 1 else []


def _perceptrons(plan: Plan) -> Iterator[list[Member]]:
    """Up and down in one place, or in two places beside one another that have no other."""
    places = Places.of(plan)
    for place, kinds in places.here.items():
        if len(kinds.get("up", [])) == 1 == len(downs := places.near(place, "down")):
            yield from _runs([*kinds["up"], *downs])
