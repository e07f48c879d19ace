"""Which weights are meant: names, patterns, regular expressions, or tests of a name and its module.

A *name* is meant literally: it has to exist, and what cannot be done to it is an error. A *pattern*
(``"blocks.*.weight"``, a compiled regular expression, a test) means whatever fits: what cannot be
corrected is skipped, with the reason.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from kappascope.model.weights import LiveWeight

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
        found = tuple(
            (name, module, attribute)
            for name, module, attribute in weight.uses
            if name in self.names or any(test(name, module) for test in self.tests)
        )
        return LiveWeight(found) if found else None

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
