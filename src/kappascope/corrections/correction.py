"""The type of all corrections: what they have in common, and how one is attached.

A correction is a frozen dataclass in :mod:`~kappascope.corrections.multipliers`,
:mod:`~kappascope.corrections.penalties`, :mod:`~kappascope.corrections.projections` or
:mod:`~kappascope.corrections.hybrid`. It has a pure form on ``(..., out, in)`` tensors
(``corrected`` or ``penalty``), and two methods of a weight and its model:
:meth:`Correction.objection` says why a weight cannot be corrected, and
:meth:`Correction.treatments` what happens to it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from numbers import Integral, Real
from typing import Any, ClassVar, TypeAlias, TypeVar, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope.corrections._selection import AnalysedModel, MeantWeights, Where
from kappascope.corrections._targets import understood_target
from kappascope.corrections._treatments import Treatment, is_surely_finite
from kappascope.corrections.handle import Handle
from kappascope.corrections.optimizers import understood_optimizers
from kappascope.matrix import spectra
from kappascope.model.weights import LiveWeight, live_weights, precise, unwrapped

Allowed: TypeAlias = Mapping[str, tuple[Callable[[Any], bool], str]]
"""What an argument may be, by its name: a test, and the words for it."""


def _number(low: float) -> Callable[[Any], bool]:
    return lambda x: isinstance(x, Real) and low <= float(x) < math.inf


def _is_index(part: Any) -> bool:
    """Whether tensors can be indexed by it."""
    bounds = (part.start, part.stop, part.step) if isinstance(part, slice) else ("",)
    whole = all(bound is None or isinstance(bound, Integral) for bound in bounds)
    return whole and (part.step is None or part.step > 0)


_LEAST = math.ulp(0.0)  # the least number above zero
_SIZES = "strength", "rate", "step", "weight_decay", "band", "slack"


class Correction(ABC):
    """A change to how weight matrices are learned.

    >>> from torch.optim import SGD
    >>> from kappascope.corrections import NormPin
    >>> model = nn.Linear(2, 2)
    >>> with NormPin().attach(model, SGD(model.parameters(), lr=0.1)) as handle:
    ...     handle.weights, handle.left_out
    (('weight',), {})
    """

    # What the arguments that several corrections have may be; a class may add its own.
    allowed: ClassVar[Allowed] = {
        **dict.fromkeys(_SIZES, (_number(0), "a number, at least 0")),
        "kappa": (_number(1), "a condition number, at least 1"),
        "target": (
            lambda x: not isinstance(x, float) or _number(1)(x),
            "at least 1, to bound kappa",
        ),
        "norm": (lambda x: x is None or _number(_LEAST)(x), "a number above 0, or None"),
        "clip": (lambda x: x == math.inf or _number(_LEAST)(x), "a number above 0"),
        "every": (
            lambda n: isinstance(n, Integral) and _number(1)(n),
            "a whole number, at least 1",
        ),
        "part": (_is_index, "a slice that goes up, as slice(1) for the largest"),
    }

    def __post_init__(self) -> None:
        if "target" in vars(self):
            object.__setattr__(self, "target", understood_target(vars(self)["target"]))
        for name, value in vars(self).items():
            is_allowed, expected = self.allowed.get(name, (lambda _: True, ""))
            if not is_allowed(value):
                kind = type(self).__name__
                raise ValueError(f"{kind} expected {name} to be {expected}; got {value!r}")

    @abstractmethod
    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """What happens to a weight of the model around every step."""

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why a weight cannot be corrected, beyond what holds for all corrections."""
        return None

    def prepare(
        self,
        model: nn.Module,
        where: Where | Settings | None = None,
        exclude: Where | None = None,
    ) -> PreparedCorrection:
        """Choose a model and its weights now; ``attach(optimizer)`` when it is sharded.

        A name that no weight has is an error at once.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"expected a module to correct; got {type(model).__name__}")
        inner = unwrapped(model)
        names = [name for weight in live_weights(inner) for name, *_ in weight.uses]
        for meant in where if isinstance(where, Mapping) else [where]:
            if meant is not None:
                MeantWeights.of(meant, names)
        if exclude is not None:
            MeantWeights.of(exclude, names, "exclude=")
        return PreparedCorrection(self, inner, where, exclude)

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer | Sequence[Optimizer],
        where: Where | Settings | None = None,
        exclude: Where | None = None,
    ) -> Handle:
        """Correct the weights that ``where`` selects, but not ``exclude``, until the handle closes.

        Both are a name or pattern (``"blocks.*.weight"``), a compiled regular expression, a test of
        a name or of (name, module), or several of these. A name has to be possible; a pattern skips
        what is not, and the handle's ``left_out`` has the reasons. By default it is every matrix
        that an optimizer trains, except what is no map: embeddings and other tables, norm layers,
        biases. A mapping, as in :func:`attach`, says what gets another correction than this one.

        >>> from torch.optim import SGD
        >>> from kappascope.corrections import NormPin
        >>> model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 2))
        >>> with NormPin().attach(model, SGD(model.parameters())) as handle:
        ...     handle.weights, handle.left_out
        (('1.weight',), {'0.weight': 'an embedding is looked up, not multiplied'})
        """
        settings = [*where.items(), (None, self)] if isinstance(where, Mapping) else [(where, self)]
        return _attached(model, optimizer, settings, exclude)


Settings: TypeAlias = Mapping[Any, Correction | None]
"""Corrections by what they are for: a pattern, or whatever else ``where=`` takes."""


def attach(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    settings: Settings,
    exclude: Where | None = None,
) -> Handle:
    """Attach several corrections at once, each to the weights that its pattern means: one handle.

    A weight gets the correction of the *first* pattern that fits it, or none if that is ``None``;
    what no pattern fits is left out. Patterns are whatever ``where=`` takes.

    >>> from torch.optim import SGD
    >>> from kappascope.corrections import NormPin, SpectralDecay
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    >>> settings = {"0.*": NormPin(), "*": SpectralDecay()}
    >>> with attach(model, SGD(model.parameters(), lr=0.1), settings) as handle:
    ...     [(t.weight.name, t.kind.__name__) for t in handle.treatments]
    [('0.weight', 'NormPin'), ('2.weight', 'SpectralDecay')]
    """
    if not isinstance(settings, Mapping) or not settings:
        expected = "corrections by pattern, as {'*.mlp.*': NormPin()}"
        came = "an empty one" if isinstance(settings, Mapping) else type(settings).__name__
        raise TypeError(f"expected {expected}; got {came}")
    return _attached(model, optimizer, list(settings.items()), exclude)


def attaching(
    correction: object, where: Where | Settings | None, exclude: Where | None
) -> Callable[[nn.Module, Any], Handle]:
    """Attach one correction, or several by pattern, to a model that is not there yet.

    >>> from torch.optim import SGD
    >>> from kappascope.corrections import NormPin
    >>> attach_to, model = attaching({"*": NormPin()}, None, None), nn.Linear(2, 2)
    >>> with attach_to(model, SGD(model.parameters(), lr=0.1)) as handle:
    ...     handle.weights
    ('weight',)
    """
    if isinstance(correction, Correction):
        return partial(correction.attach, where=where, exclude=exclude)
    if not isinstance(correction, Mapping):
        expected = "a correction, as NormPin(), or some by pattern, as {'*.mlp.*': NormPin()}"
        raise TypeError(f"expected {expected}; got {_described(correction)}")
    if where is not None:
        raise TypeError("expected where= beside one correction; patterns say where several act")
    return partial(attach, settings=correction, exclude=exclude)


def _described(thing: object) -> str:
    """What came in place of a correction.

    >>> _described([1]), _described(Correction)
    ('list', 'the class Correction, which is to be called')
    """
    kind = type(thing).__name__
    return f"the class {thing.__name__}, which is to be called" if isinstance(thing, type) else kind


def _attached(
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    settings: Sequence[tuple[Where | None, Correction | None]],
    exclude: Where | None,
) -> Handle:
    """Choose the weights, ask the corrections what happens to them, and install that."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected a module to correct; got {type(model).__name__}")
    optimizers = understood_optimizers(optimizer)
    for _, correction in settings:
        if not (correction is None or isinstance(correction, Correction)):
            raise TypeError(f"expected a correction, as NormPin(); got {_described(correction)}")
    analysed = AnalysedModel(model, optimizers)
    chosen, left_out = analysed.selected(
        [(where, each, None if each is None else each.objection) for where, each in settings],
        exclude,
    )
    for weight, _ in chosen:
        if not is_surely_finite(weight.read().detach()):
            raise ValueError(f"{weight.name} has entries that are not finite; repair it first")
    treatments = [
        treatment
        for weight, correction in chosen
        if correction is not None
        for treatment in correction.treatments(weight, analysed)
    ]
    names = tuple(weight.name for weight, _ in chosen)
    return Handle.attached(names, left_out, analysed, treatments)


@dataclass(frozen=True)
class PreparedCorrection:
    """A correction of a model that is yet to be sharded, wrapped or given an optimizer.

    >>> from torch.optim import SGD
    >>> from kappascope.corrections import NormPin
    >>> model = nn.Linear(2, 2)
    >>> prepared = NormPin().prepare(model)
    >>> with prepared.attach(SGD(model.parameters(), lr=0.1)) as handle:
    ...     handle.weights
    ('weight',)
    """

    correction: Correction
    model: nn.Module
    where: Where | Settings | None
    exclude: Where | None = None

    def attach(self, optimizer: Optimizer | Sequence[Optimizer]) -> Handle:
        """Correct the weights that were chosen, as the model has them now."""
        return self.correction.attach(self.model, optimizer, self.where, self.exclude)


def why_not_merged(weight: LiveWeight) -> str | None:
    """Why no factors can be merged into a weight, if that is so.

    >>> from kappascope.model.weights import live_weights
    >>> why_not_merged(live_weights(nn.GRU(2, 2))[0])
    'recurrent layers keep references to their weights'
    """
    if weight.parametrization is not None:
        return "it is made of other tensors, into which nothing can be merged"
    if any(isinstance(module, nn.RNNBase) for _, module, _ in weight.uses):
        return "recurrent layers keep references to their weights"
    if len({id(getattr(module, attribute)) for _, module, attribute in weight.uses}) > 1:
        return "several parameters share its memory, and the optimizer moves each by itself"
    return None


def why_not_written(weight: LiveWeight) -> str | None:
    """Why not every matrix can be written into a weight, if that is so.

    >>> from kappascope.model.weights import live_weights
    >>> why_not_written(live_weights(nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)))[0])
    'a parametrization makes it, which has no inverse for every matrix'
    """
    if weight.writable():
        return None
    return "a parametrization makes it, which has no inverse for every matrix"


def has_zero_matrix(weight: LiveWeight) -> bool:
    """Whether a matrix of the weight is zero, as some are initialised: it has no scale or spectrum.

    >>> from kappascope.model.weights import live_weights
    >>> layer = nn.Linear(2, 2)
    >>> has_zero_matrix(live_weights(layer)[0]), layer.weight.data.zero_().sum().item()
    (False, 0.0)
    >>> has_zero_matrix(live_weights(layer)[0])
    True
    """
    return bool((weight.matrix() == 0).all(-1).all(-1).any())


_Form = TypeVar("_Form", bound=Callable[..., Tensor])


def pure_form(form: _Form) -> _Form:
    """Run a pure form in float32 at least, inside autocast too; its result has the weight's type.

    >>> import torch
    >>> from kappascope.corrections import NormPin
    >>> NormPin(norm=1.0).corrected(torch.ones(1, 1, dtype=torch.bfloat16)).dtype
    torch.bfloat16
    """

    @wraps(form)
    def precisely(self: Correction, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        with spectra.without_autocast():
            return form(self, precise(weight), *args, **kwargs).to(weight.dtype)

    return cast(_Form, precisely)
