"""The studies of real networks on one page of the documentation: tables, figures, verdicts.

>>> print(page([]).splitlines()[0])
# Real networks
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from kappascope import lab, report, store, study
from kappascope.engines import Engine
from kappascope.lab import Exhibit, Experiment, Study
from kappascope.prose import Record, cell, tally
from kappascope.statistics import Table


@dataclass(frozen=True)
class Room:
    """One study: its tables, the verdicts on its claims, and where its figure is."""

    study: Study
    exhibits: Sequence[Exhibit]
    claims: Sequence[Record]
    figure: str
    provenance: Mapping[str, Any]


@dataclass(frozen=True)
class Publication:
    """A folder of results, read back and judged."""

    folder: Path
    experiments: Sequence[Experiment]
    rows: Table
    verdicts: Mapping[str, Sequence[Record]]
    provenance: Mapping[str, Any]

    @classmethod
    def of(cls, folder: Path, every: Iterable[Experiment]) -> Publication:
        """What is in a folder of the experiments and studies that there are."""
        rows, provenance = study.published(folder)
        there = set(rows.rows["experiment"].unique().to_pylist())
        experiments = [one for one in every if one.id in there]
        return cls(folder, experiments, rows, lab.verdicts(experiments, rows), provenance)

    @property
    def claims(self) -> Sequence[Record]:
        """The verdicts on claims."""
        return self.verdicts["claims"]

    @cached_property
    def everything(self) -> Table:
        """The rows, and how long they took."""
        return study.with_times(self.folder, self.rows)

    @cached_property
    def spectra(self) -> Table:
        """Singular values of representative trials."""
        return Table.of(store.table(self.folder / "spectra.parquet"))

    def files(self, engine: Engine) -> Iterator[tuple[str, bytes]]:
        """All that is derived from the trials, made anew: verdicts, figures, report."""
        whole = {**self.verdicts, "provenance": self.provenance}
        yield "verdicts.json", store.strict(whole)
        yield from report.files(self.experiments, self, self.verdicts, engine)

    @property
    def studies(self) -> list[Study]:
        """Those of the experiments that are of real networks."""
        return [one for one in self.experiments if isinstance(one, Study)]

    def rooms(self, docs: Path) -> list[Room]:
        """The studies, for a page in ``docs``."""
        return [self._room(one, docs) for one in self.studies]

    def _room(self, one: Study, docs: Path) -> Room:
        every = self.everything.where(experiment=one.id)
        picture = self.folder / "figures" / f"{one.id}.png"
        return Room(
            one,
            tuple(report.exhibits(one, every)),
            [claim for claim in self.claims if claim["experiment"] == one.id],
            os.path.relpath(picture, docs) if picture.is_file() else "",
            self.provenance,
        )


def page(rooms: Sequence[Room]) -> str:
    """All studies, as Markdown."""
    return "\n".join((*_entrance(rooms), *(line for one in rooms for line in _room(one))))


def _entrance(rooms: Sequence[Room]) -> Iterator[str]:
    yield from ("# Real networks", "")
    yield (
        "Written by `kappascope findings` from the trials of `kappascope study`. In brackets 95 % "
        "intervals; a claim is judged by its interval and a rule fixed before these trials. Where "
        "pilots on other trials, or a later reading, shaped a rule its page says so."
    )
    every = [claim for one in rooms for claim in one.claims]
    yield from ("", tally(every) if every else "No claim was judged.", "")


def _made(one: Room) -> str:
    """Where the trials come from."""
    what = one.provenance
    known = [f"{what[name]}" for name in ("cpu",) if name in what]
    known += [f"{name} {what[name]}" for name in ("torch", "kappascope") if name in what]
    trials = f"{what.get('trials', 0):,} trials"
    return f"`kappascope study {one.study.name}`: {trials} ({', '.join(known)})."


def _room(one: Room) -> Iterator[str]:
    yield from (f"## {one.study.title}", "", _made(one), "")
    parts = one.study.question.replace("``", "`").strip().split("\n\n")
    for part in parts[1:] or parts:
        yield from (" ".join(part.split()), "")
    for exhibit in one.exhibits:
        yield from _exhibit(exhibit)
    if one.figure:
        yield from (f"![The figure of the study {one.study.name}]({one.figure})", "")
    for claim in one.claims:
        yield f"- **{claim['verdict']}**: {claim['sentence']} (`{claim['id']}`, {claim['source']})"
        yield f"  {claim['explanation']}"
    yield ""


def _exhibit(one: Exhibit) -> Iterator[str]:
    yield from (f"### {one.title}", "")
    if one.rows:
        yield f"| {' | '.join(map(cell, one.columns))} |"
        yield "|" + "---|" * len(one.columns)
        yield from (f"| {' | '.join(map(cell, row))} |" for row in one.rows)
        yield ""
    if one.note:
        yield from (one.note, "")
