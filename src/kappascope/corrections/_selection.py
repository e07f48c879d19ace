"""Which weights of a model a correction acts on, and what it needs to know of them.

A *name* is meant literally: it has to exist, and what cannot be done to it is an error. A *pattern*
(``"blocks.*.weight"``, a compiled regular expression, a test) means whatever fits: what cannot be
corrected is skipped, with the reason. A model is analysed once per attach.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, TypeAlias, TypeVar

from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope.corrections.gauge import FreeSides, free_sides
from kappascope.model.tensors import refuse_meta
from kappascope.model.weights import LiveWeight, live_weights, unwrapped, why_no_map
from kappascope.refusal import Refusal

NameTest: TypeAlias = Callable[[str], bool] | Callable[[str, nn.Module], bool]
Where: TypeAlias = str | re.Pattern[str] | NameTest | Iterable[str | re.Pattern[str] | NameTest]
"""Names, patterns, regular expressions, tests of a name (and its module), or several of them."""

SHOWN_NAMES = 8  # in an error: more than that does not fit on a screen


@dataclass(frozen=True)
class MeantWeights:
    """Weights as ``where=`` or ``exclude=`` means them, in a model whose weights have some names.

    >>> chosen = MeantWeights.of(["0.weight", re.compile("^head")], ["0.weight", "head.weight"])
    >>> sorted(chosen.names), len(chosen.tests)
    (['0.weight'], 1)
    """

    names: frozenset[str]
    tests: tuple[Callable[[str, nn.Module], bool], ...]

    @classmethod
    def of(cls, where: Where, names: Sequence[str], argument: str = "where=") -> MeantWeights:
        """Understand what was passed; a name or pattern has to fit one of those there are."""
        several = isinstance(where, Iterable) and not isinstance(where, str | bytes | nn.Module)
        meant, tests = set(), []
        for each in where if several else [where]:  # type: ignore[union-attr]
            if isinstance(each, str) and (each in names or not re.search(r"[*?\[]", each)):
                meant.add(each)
                fits = each in names
            elif isinstance(each, str | re.Pattern):
                tests.append(test := _pattern_test(each))
                fits = any(test(name, None) for name in names)
            elif callable(each) and not isinstance(each, nn.Module):
                tests.append(_with_module(each))
                fits = True
            else:
                expected = "a name or pattern, a regular expression, a test of a name, or several"
                raise TypeError(f"expected {argument} to be {expected}; got {type(where).__name__}")
            if not fits:
                text = str(each.pattern if isinstance(each, re.Pattern) else each)
                raise ValueError(f"no weight is called {text!r}; there are {_listed(text, names)}")
        return cls(frozenset(meant), tuple(tests))

    def uses(self, weight: LiveWeight) -> LiveWeight | None:
        """The weight as it is used under the names that are meant, or ``None`` if none is."""
        uses = tuple(
            (name, module, attribute)
            for name, module, attribute in weight.uses
            if name in self.names or any(test(name, module) for test in self.tests)
        )
        return LiveWeight(uses) if uses else None

    def names_it(self, weight: LiveWeight) -> bool:
        """Whether the weight is meant by a name of its own, and not by a pattern."""
        return any(name in self.names for name, *_ in weight.uses)


def _listed(wanted: str, names: Sequence[str]) -> str:
    """The names that there are; of many, the most similar ones and how many more.

    >>> _listed("h.77.fc", [f"h.{i}.fc.weight" for i in range(100)])
    'h.77.fc.weight, ... and 92 more'
    """
    if len(names) <= SHOWN_NAMES:
        return ", ".join(names)
    near = get_close_matches(wanted, names, n=SHOWN_NAMES, cutoff=0.5)
    shown = list(dict.fromkeys([*near, *names]))[:SHOWN_NAMES]
    return f"{', '.join(shown)} and {len(names) - len(shown)} more"


def _pattern_test(pattern: str | re.Pattern[str]) -> Callable[[str, Any], bool]:
    """Shell patterns fit a whole name, regular expressions any part of it."""
    if isinstance(pattern, str):
        return lambda name, module: fnmatchcase(name, pattern)
    return lambda name, module: pattern.search(name) is not None


def _with_module(test: Callable[..., bool]) -> Callable[[str, nn.Module], bool]:
    """A test of a name and its module, from one of either kind.

    Parameters with defaults do not count: ``lambda name, start="h.": ...`` is a test of a name.
    """
    try:
        parameters = inspect.signature(test).parameters.values()
    except (TypeError, ValueError):  # some functions of C have none
        return lambda name, module: bool(test(name))
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [p for p in parameters if p.kind in positional and p.default is p.empty]
    if len(needed) >= 2:
        return lambda name, module: bool(test(name, module))
    return lambda name, module: bool(test(name))


def _refuse_flat(model: nn.Module) -> None:
    """Refuse what the first version of FSDP has wrapped: no process has a weight as a matrix.

    >>> class FullyShardedDataParallel(nn.Sequential):
    ...     pass
    >>> _refuse_flat(FullyShardedDataParallel(nn.Linear(2, 2)))
    Traceback (most recent call last):
    kappascope.refusal.Refusal: FullyShardedDataParallel: it joins weights to one vector and ...
    """
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":  # its import takes a second
            wrong = "it joins weights to one vector and cuts that, so no process has a matrix"
            raise Refusal(2, name or type(module).__name__, wrong, "shard by fully_shard (FSDP2)")


Chosen = TypeVar("Chosen")
Objection: TypeAlias = Callable[[LiveWeight, "AnalysedModel"], str | None]


class NothingToCorrect(Refusal, ValueError):  # noqa: N818 - it refuses, as its parent does
    """A model, or what was selected of it, has no weight that a correction could act on.

    >>> raise NothingToCorrect(2, "LayerNorm", "no weight to correct (no matrix)", "pass another")
    Traceback (most recent call last):
    kappascope.corrections._selection.NothingToCorrect: LayerNorm: no weight to correct (no ...
    """


class AnalysedModel:
    """The weights of a model, the optimizers that train them, and where factors are free.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> from torch.optim import SGD
    >>> analysed = AnalysedModel(model, [SGD(model.parameters())])
    >>> [weight.name for weight in analysed.weights]
    ['0.weight', '2.weight']
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
        refuse_meta(model)
        _refuse_flat(model)
        self.model, self.optimizers = unwrapped(model), optimizers
        self.weights = live_weights(self.model)
        self._owners = {
            id(parameter): optimizer
            for optimizer in reversed(optimizers)  # the first that has a parameter counts
            for group in optimizer.param_groups
            for parameter in group["params"]
        }

    @cached_property
    def free_sides(self) -> Mapping[str, FreeSides]:
        """The sides of weights that may have factors, by name, where that is not both."""
        return free_sides(self.model, self.weights)

    def owner(self, leaf: Tensor) -> Optimizer | None:
        """The optimizer that steps the parameter behind a weight, if one does."""
        return self._owners.get(id(leaf))

    def selected(
        self,
        settings: Sequence[tuple[Where | None, Chosen, Objection | None]],
        exclude: Where | None = None,
    ) -> tuple[list[tuple[LiveWeight, Chosen]], dict[str, str]]:
        """Choose for every weight the first setting that means it; or say why it is left out.

        A setting is what it means, what is chosen for that, and what may object to a weight
        (``None``: the weight is left alone). What is meant by its name must be possible; a pattern,
        and ``None``, which means everything, skip what is not.
        """
        names = [name for weight in self.weights for name, *_ in weight.uses]
        meant = [
            where if where is None else MeantWeights.of(where, names) for where, *_ in settings
        ]
        excluded = exclude if exclude is None else MeantWeights.of(exclude, names, "exclude=")
        chosen, left_out, unmapped = [], {}, False
        for weight in self.weights:
            uses = [weight if each is None else each.uses(weight) for each in meant]
            first = next((i for i, use in enumerate(uses) if use is not None), None)
            if excluded is not None and excluded.uses(weight) is not None:
                left_out[weight.name] = "excluded"
                continue
            if first is None or (objection := settings[first][2]) is None:
                left_out[weight.name] = "not selected"
                continue
            its_uses, where = uses[first], meant[first]
            named = where is not None and where.names_it(weight)
            reason = self._why_untrained(weight)
            if reason is None and not named and its_uses is not None:
                reason = why_no_map(its_uses)
                unmapped |= reason is not None
            reason = reason or objection(weight, self)
            if reason is None:
                chosen.append((weight, settings[first][1]))
            elif not named:
                left_out[weight.name] = reason
            else:
                refusal = f"{weight.name} cannot be corrected: {reason}"
                raise ValueError(f"{refusal}; leave it out of where=")
        if not chosen:
            why = _summary(left_out) or "no matrix"
            wrong, advice = f"no weight to correct ({why})", "choose others by where="
            if unmapped:
                advice += "; a weight that is no linear map is corrected only by its name"
            raise NothingToCorrect(2, type(self.model).__name__, wrong, advice)
        return chosen, left_out

    def _why_untrained(self, weight: LiveWeight) -> str | None:
        """Why no optimizer trains this weight, if none does."""
        _, module, attribute = weight.uses[0]
        leaves = weight.leaves
        hooked = attribute.endswith(("_orig", "_v", "_g")) and hasattr(module, attribute[:-2])
        if hooked or (attribute.endswith("_orig") and hasattr(module, attribute[:-5])):
            return "a hook makes the layer's weight out of it"
        if not leaves[-1].is_floating_point():
            return f"its type is {leaves[-1].dtype}"
        if not all(leaf.requires_grad for leaf in leaves):
            return "it is frozen"
        if leaves[-1].numel() == 0:
            return "it is empty"
        return "no optimizer has it" if self.owner(leaves[-1]) is None else None


def _summary(left_out: Mapping[str, str]) -> str:
    """Why weights were left out, each reason with the first that it holds for and how many more.

    >>> _summary({"a": "it is frozen", "b": "it is frozen", "c": "it is empty"})
    'a and 1 more: it is frozen; c: it is empty'
    """
    names: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        names.setdefault(reason, []).append(name)
    more = {reason: f" and {len(its) - 1} more" if its[1:] else "" for reason, its in names.items()}
    return "; ".join(f"{its[0]}{more[reason]}: {reason}" for reason, its in names.items())
