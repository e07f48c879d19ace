"""What an experiment is, where they are found, and what their rows say of their claims.

A page of :mod:`kappascope.experiments` defines one ``EXPERIMENT``, one of
:mod:`kappascope.studies` one ``STUDY``; nothing else has to be touched to add one.
"""

from __future__ import annotations

import importlib
import math
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from kappascope.claims import Claim, Printed, Verdict, check, ends, judge
from kappascope.statistics import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Setting = Mapping[str, str | int | float | bool | None]
"""The columns in which trials differ, with their values: ``{"size": 64, "optimizer": "sgd"}``."""

Batch = Mapping[str, Any]
"""Rows of a block of trials, by column: one value a trial (a vector, ordered as the seeds) or one
value for all. With ``values`` of shape ``(trials, n)`` and ``which`` they are spectra instead."""

Count = int | Mapping[int, int] | Callable[[Setting], int]
"""How many trials every setting has: a number, one for each size, or a rule."""

NINE = 9  # experiments of the paper; those after them ask what its review and slides ask
CHEAP = 128  # up to this size as many trials are run as the user asks for


def grid(**values: Iterable[Any]) -> tuple[Setting, ...]:
    """Every combination of the values, the last one varying fastest.

    >>> grid(size=(32, 64), optimizer=("sgd",))
    ({'size': 32, 'optimizer': 'sgd'}, {'size': 64, 'optimizer': 'sgd'})
    """
    return tuple(dict(zip(values, point, strict=True)) for point in product(*values.values()))


@dataclass(frozen=True)
class Experiment:
    """A question, the trials that answer it, and the sentences they are to decide.

    ``trials(streams, **setting)`` trains the block of trials that ``streams`` stands for and
    yields :data:`Batch`: what it yields depends on the streams and the setting alone.

    >>> toy = Experiment(1, "Toy", "4.1", "?", grid(size=(64, 256)), grid, own={64: 100, 256: 10})
    >>> [toy.count(setting, "own", asked=1000) for setting in toy.grid]
    [1000, 10]
    """

    number: int
    title: str
    section: str  # of the paper: "4.1"; beyond it, who asks: "review W2"
    question: str
    grid: tuple[Setting, ...]
    trials: Callable[..., Iterable[Batch]]
    paper: Count = 0  # trials on the paper's streams, seeds 0, 1, ...
    own: Count = 0  # trials on streams of our own, in the default run
    effort: float = 1.0  # seconds of one trial, in those of 200 plain steps at its size
    figures: tuple[Printed, ...] = ()
    claims: tuple[Claim, ...] = ()
    plot: Callable[[Table, Table], Figure] | None = None  # of the rows and the spectra
    quick: Mapping[str, Any] = field(default_factory=dict)  # the fields that differ in a quick run

    def __post_init__(self) -> None:
        if not hasattr(self.trials, "__qualname__"):  # a partial would hide what rows depend on
            raise TypeError("trials must be a function of the page; what varies is a setting")

    @property
    def id(self) -> str:
        """The name in tables and verdicts: ``e1``."""
        return f"e{self.number}"

    @property
    def heading(self) -> str:
        """Number, or name, and title."""
        return f"{self.number} {self.title}"

    @property
    def beyond(self) -> bool:
        """Whether it asks what the paper did not."""
        return self.number > NINE

    @property
    def page(self) -> Path:
        """The file it is written in."""
        return page_of(self.trials)

    def quickly(self) -> Self:
        """The same question, asked of fewer trials."""
        return replace(self, **self.quick)

    def count(self, setting: Setting, stream: str, asked: int | None = None) -> int:
        """How many trials of a setting are run; ``asked`` replaces their number on own streams.

        It can only lower it above size 128, where trials are too dear for the asking.
        """
        count = _count(self.paper if stream == "paper" else self.own, setting)
        if stream == "paper" or asked is None or not count:
            return count
        return asked if size_of(setting) <= CHEAP else min(asked, count)


@dataclass(frozen=True)
class Exhibit:
    """A table to be shown: what stands in it is text, rounded already.

    >>> Exhibit("Losses", ("arm", "loss"), (("AdamW", "1.93 [1.92, 1.94]"),)).columns
    ('arm', 'loss')
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Study(Experiment):
    """A question asked of networks, each trained alone and taken up in the middle if need be.

    ``trials(seed, bookmark, **setting)`` trains one network over the steps of the bookmark and
    yields rows of plain values. Those of the component ``seconds`` are kept apart, since no two
    runs agree on them. ``then`` gives the settings that depend on the rows of the grid: tuning
    comes first, the comparison at what it found afterwards.

    >>> def best(rows):
    ...     return ({"stage": "compare", "rate": 0.1},)
    >>> toy = Study(22, "Toy", "W1", "?", grid(stage=("tune",)), grid, name="toy", then=best)
    >>> toy.id, [setting["stage"] for setting in toy.continued(Table.of([])).grid]
    ('toy', ['tune', 'compare'])
    """

    name: str = ""
    seconds: float | Callable[[Setting], float] = 1.0  # of one trial, about
    then: Callable[[Table], Iterable[Setting]] | None = None
    exhibits: Callable[[Table], Iterable[Exhibit]] | None = None
    materials: tuple[str, ...] = ()  # what must be fetched, as kappascope.materials names it

    @property
    def id(self) -> str:
        """Its name."""
        return self.name

    @property
    def heading(self) -> str:
        """Name and title."""
        return f"{self.name}: {self.title}"

    def continued(self, rows: Table) -> Study:
        """The study with the settings that its first rows lead to."""
        further = tuple(self.then(rows)) if self.then else ()
        return replace(self, grid=(*self.grid, *further), then=None)

    def on(self, text: str) -> Study:
        """The same study of another text, where it is one of texts."""
        usual = {setting.get("text") for setting in self.grid} - {None}
        if not usual:
            return self
        return replace(
            self,
            grid=tuple({**setting, "text": text} for setting in self.grid),
            materials=tuple(name for name in self.materials if name not in usual),
        )


def _count(rule: Count, setting: Setting) -> int:
    if isinstance(rule, Mapping):
        return rule.get(size_of(setting), 0)
    return rule if isinstance(rule, int) else rule(setting)


def page_of(trials: Callable[..., Any]) -> Path:
    """The file in which the trials of an experiment are written.

    >>> page_of(grid).name
    'lab.py'
    """
    return Path(str(sys.modules[trials.__module__].__file__))


def size_of(setting: Setting) -> int:
    """The size of a setting's matrices; 64, the paper's own, where it names none.

    >>> size_of({"size": 128}), size_of({"optimizer": "sgd"})
    (128, 64)
    """
    return int(setting.get("size") or 64)


def discover(package: str = "kappascope.experiments") -> dict[int, Experiment]:
    """The experiments of a package by number: every ``EXPERIMENT`` of its modules.

    >>> discover()[1].id
    'e1'
    """
    found = sorted(_members(package, "EXPERIMENT"), key=lambda one: one.number)
    return {one.number: one for one in found}


def _members(package: str, word: str) -> list[Experiment]:
    home = importlib.import_module(package)
    pages = [f"{package}.{page.name}" for page in pkgutil.iter_modules(home.__path__)]
    modules = [importlib.import_module(page) for page in pages]
    return [getattr(module, word) for module in modules if hasattr(module, word)]


def studies() -> dict[str, Study]:
    """The studies of real networks by name, in their order: every ``STUDY`` of its package.

    >>> list(studies())[:2]
    ['teacher', 'digits']
    """
    found = [one for one in _members("kappascope.studies", "STUDY") if isinstance(one, Study)]
    return {one.name: one for one in sorted(found, key=lambda one: one.number)}


def verdicts(experiments: Iterable[Experiment], rows: Table) -> dict[str, list[dict[str, Any]]]:
    """Every printed figure beside ours and every claim judged, as ``verdicts.json`` keeps them.

    A figure or claim is measured on the rows of its own experiment; a claim about ``all`` of them
    on all rows. What cannot be measured, because its trials were not run, says so.

    >>> figure = Printed("e1/mean", "mean error", "0.13", lambda rows: rows.values().mean())
    >>> toy = Experiment(1, "Toy", "4.1", "?", grid(size=(64,)), grid, figures=(figure,))
    >>> found = verdicts([toy], Table.of([{"experiment": "e1", "seed": 0, "error": 0.131}]))
    >>> found["figures"][0]["measured"], found["figures"][0]["matches"]
    (0.131, True)
    """
    found: dict[str, list[dict[str, Any]]] = {"figures": [], "claims": []}
    for experiment in experiments:
        own = rows.where(experiment=experiment.id)
        found["figures"] += [_checked(figure, own) for figure in experiment.figures]
        found["claims"] += [
            _judged(claim, rows if claim.experiment == "all" else own).record
            for claim in experiment.claims
        ]
    return found


def _checked(figure: Printed, rows: Table) -> dict[str, Any]:
    try:
        return check(figure, rows)
    except Exception as error:  # whatever a measure does when there is nothing to measure
        unknown = [math.nan] * len(ends(figure.printed))
        record = check(replace(figure, measure=lambda _: unknown), rows)
        return record | {"agreement": f"{record['agreement']}: {_reason(error)}"}


def _judged(claim: Claim, rows: Table) -> Verdict:
    try:
        return judge(claim, rows)
    except Exception as error:
        about = claim.id, claim.experiment, claim.sentence, claim.source
        why = f"Not measured: {_reason(error)}"
        return Verdict(*about, "undecided", None, None, 0, why)


def _reason(error: Exception) -> str:
    """What a measure says of rows that are not there, or what went wrong in it."""
    return str(error) if type(error) is LookupError else f"{type(error).__name__}: {error}"
