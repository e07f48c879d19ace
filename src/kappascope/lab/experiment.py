"""What an experiment is, how experiments are discovered, and how their claims are judged.

A module of :mod:`kappascope.paper` defines one ``EXPERIMENT``, a folder of
:mod:`kappascope.studies` one ``STUDY``; nothing else has to be changed to add one.
"""

from __future__ import annotations

import math
import pkgutil
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pyarrow as pa

from kappascope.lab.claims import (
    LEAST_SEEDS,
    Claim,
    Printed,
    Verdict,
    check,
    judge,
    printed_numbers,
)
from kappascope.lab.table import Table
from kappascope.lab.verdicts import corrected, with_printed_means

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Setting = Mapping[str, str | int | float | bool | None]
"""The columns in which trials differ, with their values: ``{"size": 64, "optimizer": "sgd"}``."""

Rows = Mapping[str, Any]
"""Rows of a block of trials, by column: one value a trial (a vector, ordered as the seeds) or one
value for all. With ``values`` of shape ``(trials, n)`` and ``which`` they are spectra instead."""

Count = int | Mapping[int, int] | Callable[[Setting], int]
"""How many trials every setting has: a number, one for each size, or a rule."""

PAPER, STUDIES = "kappascope.paper", "kappascope.studies"
NINE = 9  # experiments of the paper; those after them ask what its review and slides ask
OF_ALL = tuple(f"e{number}" for number in range(1, NINE + 1))  # what a claim about all is judged on
CHEAP = 128  # up to this size as many trials are run as the user asks for


def grid(**values: Iterable[Any]) -> tuple[Setting, ...]:
    """Combine the values in every way, the last one varying fastest.

    >>> grid(size=(32, 64), optimizer=("sgd",))
    ({'size': 32, 'optimizer': 'sgd'}, {'size': 64, 'optimizer': 'sgd'})
    """
    return tuple(dict(zip(values, point, strict=True)) for point in product(*values.values()))


@dataclass(frozen=True)
class Experiment:
    """A question, the trials that answer it, and the sentences they are to decide.

    ``trials(streams, **setting)`` trains the block of trials that ``streams`` stands for and
    yields :data:`Rows`: what it yields depends on the streams and the setting alone.

    >>> toy = Experiment(1, "Toy", "4.1", "?", grid(size=(64, 256)), grid, own={64: 100, 256: 10})
    >>> [toy.count(setting, "own", asked=1000) for setting in toy.grid]
    [1000, 10]
    """

    number: int
    title: str
    section: str  # of the paper: "4.1"; beyond it, who asks: "review W2"
    question: str
    grid: tuple[Setting, ...]
    trials: Callable[..., Iterable[Rows]]
    paper: Count = 0  # trials on the paper's streams, seeds 0, 1, ...
    own: Count = 0  # trials on streams of our own, in the default run
    # seconds of one trial, in those of 200 plain steps at its size
    effort: float | Callable[[Setting], float] = 1.0
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
        """The title with the number, or the name, before it."""
        return f"{self.number} {self.title}"

    @property
    def beyond(self) -> bool:
        """Whether the experiment asks what the paper did not."""
        return self.number > NINE

    @property
    def page(self) -> Path:
        """The file that the experiment is written in."""
        return Path(str(sys.modules[self.trials.__module__].__file__))

    def quickly(self) -> Self:
        """Return the experiment with the fewer trials of a quick run."""
        return replace(self, **self.quick)

    def count(self, setting: Setting, stream: str, asked: int | None = None) -> int:
        """Count the trials of a setting; ``asked`` replaces their number on own streams.

        It can only lower it above size 128, where trials are too dear for the asking.
        """
        rule = self.paper if stream == "paper" else self.own
        if isinstance(rule, Mapping):
            count = rule.get(size_of(setting), 0)
        else:
            count = rule if isinstance(rule, int) else rule(setting)
        if stream == "paper" or asked is None or not count:
            return count
        return asked if size_of(setting) <= CHEAP else min(asked, count)


@dataclass(frozen=True)
class Exhibit:
    """A table to be shown: what stands in it is text, rounded already."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Study(Experiment):
    """A question asked of networks, each trained alone and resumed in the middle if need be.

    ``trials(seed, resume_point, **setting)`` trains one network over the steps of the resume point
    and yields rows of plain values. Those of the component ``seconds`` are kept apart, since no two
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
    finding: str = ""  # the answer in a few sentences, as a template of kappascope.lab.article
    downloads: tuple[str, ...] = ()  # what must be fetched, as kappascope.lab.downloads names it

    @property
    def id(self) -> str:
        """The name of the study in tables and verdicts."""
        return self.name

    @property
    def heading(self) -> str:
        """The title with the name before it."""
        return f"{self.name}: {self.title}"

    def continued(self, rows: Table) -> Study:
        """Add the settings that the first rows of the study lead to."""
        further = tuple(self.then(rows)) if self.then else ()
        return replace(self, grid=(*self.grid, *further), then=None)

    def on(self, text: str) -> Study:
        """Ask the same of another text, where the study is one of texts."""
        usual = {setting.get("text") for setting in self.grid} - {None}
        if not usual:
            return self
        return replace(
            self,
            grid=tuple(
                {**setting, "text": text} if "text" in setting else setting for setting in self.grid
            ),
            downloads=tuple(name for name in self.downloads if name not in usual),
        )


def size_of(setting: Setting) -> int:
    """Read the size of a setting's matrices; 64, the paper's own, where it names none."""
    return int(setting.get("size") or 64)


class Pages(Mapping[int, Experiment]):
    """The experiments of the paper by number; a page is loaded when it is asked for.

    >>> list(Pages())[:3], Pages()[2].title
    ([1, 2, 3], 'SGD against Adam')
    """

    def __init__(self) -> None:
        names = (file.name for file in pkgutil.iter_modules(import_module(PAPER).__path__))
        self.names = {int(name[1:3]): name for name in names if re.match(r"e\d\d_", name)}

    def __getitem__(self, number: int) -> Experiment:
        page: Experiment = import_module(f"{PAPER}.{self.names[number]}").EXPERIMENT
        return page

    def __iter__(self) -> Iterator[int]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def discover() -> Mapping[int, Experiment]:
    """Find the experiments by number: every file ``e01_...`` has an ``EXPERIMENT``."""
    return Pages()


def studies() -> dict[str, Study]:
    """Find the studies by name, in their order: every folder has a ``STUDY``."""
    files = pkgutil.iter_modules(import_module(STUDIES).__path__)
    folders = [file.name for file in files if file.ispkg]
    members: list[Study] = [import_module(f"{STUDIES}.{name}.study").STUDY for name in folders]
    return {study.name: study for study in sorted(members, key=lambda study: study.number)}


def verdicts(
    experiments: Iterable[Experiment], rows: Table, elsewhere: Mapping[str, Table] | None = None
) -> dict[str, list[dict[str, Any]]]:
    """Compare every printed figure and judge every claim, as ``verdicts.json`` keeps them.

    A figure or claim is measured on the rows of its own experiment; a claim about ``all`` of them
    on all rows. What cannot be measured, because its trials were not run, says so. The claims of a
    page are decided together (:func:`kappascope.lab.verdicts.corrected`). ``elsewhere`` has rows of
    further experiments by name, for claims that are judged on them.
    """
    figures: list[dict[str, Any]] = []
    pages: list[list[dict[str, Any]]] = []
    for experiment in experiments:
        own = rows.where(experiment=experiment.id)
        figures += [_checked(figure, own) for figure in experiment.figures]
        least = LEAST_SEEDS if isinstance(experiment, Study) else 0
        page = []
        for claim in experiment.claims:
            try:
                verdict = judge(claim, _rows_of(claim, rows, own, elsewhere or {}), least)
            except Exception as error:
                about = claim.id, claim.experiment, claim.sentence, claim.source
                why = f"Not measured: {_reason(error)}"
                verdict = Verdict(*about, "undecided", None, None, 0, why)
            page.append(asdict(verdict))
        pages.append(page)
    return {"figures": figures, "claims": with_printed_means(corrected(pages), figures)}


def _rows_of(claim: Claim, rows: Table, own: Table, elsewhere: Mapping[str, Table]) -> Table:
    """Select the rows that decide a claim: its page's, those of the experiment it names, or all."""
    if not claim.judged_on and claim.experiment != "all":
        return own
    wanted = set(claim.judged_on or OF_ALL)
    here = wanted & set(rows.rows["experiment"].unique().to_pylist())
    further = [elsewhere[name].rows for name in sorted(wanted & set(elsewhere) - here)]
    tables = [rows.where(experiment=sorted(here)).rows, *further]
    chosen = Table.of(pa.concat_tables(tables, promote_options="permissive"))
    if claim.judged_on and not len(chosen):
        names = " and ".join(claim.judged_on)
        raise LookupError(f"it is judged on the trials of {names}, which this run does not have")
    return chosen


def _checked(figure: Printed, rows: Table) -> dict[str, Any]:
    try:
        return check(figure, rows)
    except Exception as error:  # whatever a measure does when there is nothing to measure
        unknown = [math.nan] * len(printed_numbers(figure.printed))
        record = check(replace(figure, measure=lambda _: unknown), rows)
        return record | {"agreement": f"{record['agreement']}: {_reason(error)}"}


def _reason(error: Exception) -> str:
    """Say what a measure says of rows that are not there, or what went wrong in it."""
    return str(error) if type(error) is LookupError else f"{type(error).__name__}: {error}"
