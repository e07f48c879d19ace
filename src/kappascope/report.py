"""Verdicts, numbers and figures as one page that needs nothing but itself.

>>> page = render(Report(sections=(), claims=(), figures=(), provenance={}))
>>> page.splitlines()[0], "no claim was judged" in page
('<!doctype html>', True)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from kappascope import figures, pages
from kappascope.claims import Printed, check, ends
from kappascope.engines import Engine, Here
from kappascope.lab import Exhibit, Experiment, Study
from kappascope.prose import OUTCOMES, Record, measured, number, tally, unmeasured, verdict
from kappascope.statistics import MEASURED, Estimate, Summary, Table, summary, tail_index

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TOLD = ("experiment", "seed", *MEASURED)  # every other column tells groups apart
FEWEST = 5  # repetitions of the paper's experiment that show where a figure falls


class Results(Protocol):
    """What a run leaves."""

    @property
    def rows(self) -> Table:
        """Every trial."""

    @property
    def everything(self) -> Table:
        """The rows, and how long they took."""

    @property
    def spectra(self) -> Table:
        """Singular values of representative trials."""

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Code, libraries, machine, and what failed."""


@dataclass(frozen=True)
class Group:
    """Trials that differ in nothing but their seed, and what one component's errors say."""

    setting: Mapping[str, Any]
    component: str
    summary: Summary
    tail: Estimate


@dataclass(frozen=True)
class Section:
    """One experiment on the page."""

    id: str
    number: int
    title: str
    place: str  # in the paper, or who asks
    question: str
    pictures: tuple[str, ...] = ()  # SVG documents
    caption: str = ""
    spectra: tuple[str, ...] = ()
    groups: tuple[Group, ...] = ()
    beyond: bool = False  # the paper
    exhibits: tuple[Exhibit, ...] = ()

    @property
    def label(self) -> str:
        """How it is counted: the experiments by number, the studies by name."""
        return self.id if self.id != f"e{self.number}" else str(self.number)


@dataclass(frozen=True)
class Report:
    """Everything on the page; ``incomplete`` lists what is missing, and is its first line."""

    sections: Sequence[Section]
    claims: Sequence[Record]
    figures: Sequence[Record]
    provenance: Mapping[str, Any]
    incomplete: Sequence[str] = ()

    @property
    def networks(self) -> bool:
        """Whether it is of studies alone, and compares nothing with the paper's figures."""
        return bool(self.sections) and not any(one.label.isdigit() for one in self.sections)

    @property
    def title(self) -> str:
        """What it is a report of."""
        if self.networks:
            return "Real networks: does any of it matter outside the toy?"
        return "Condition Number as a Non-Learned Matrix Property: the paper, reproduced"


def files(
    experiments: Iterable[Experiment],
    results: Results,
    verdicts: Mapping[str, Sequence[Record]],
    engine: Engine | None = None,
) -> Iterator[tuple[str, bytes]]:
    """The report and its figures: paths below the folder of results, and what to write there."""
    experiments, missing = list(experiments), _failed(results.provenance)
    drawn: dict[str, Figure] = {}
    for experiment in experiments:
        spectra = results.spectra.where(experiment=experiment.id)
        rows = results.everything.where(experiment=experiment.id)
        figure, why = _drawn(experiment, rows, spectra)
        missing += why
        if figure:
            drawn[experiment.id] = figure
        if len(spectra):
            drawn[f"{experiment.id}-spectra"] = figures.gallery(spectra)
    pictures = {one.name: one for one in rendered(drawn, engine or Here())}
    for one in pictures.values():
        yield f"figures/{one.name}.svg", one.svg.encode()
        if one.png:
            yield f"figures/{one.name}.png", one.png
    printed: list[Record] = []
    sections = []
    for experiment in experiments:
        rows = results.everything.where(experiment=experiment.id)
        sections.append(section(experiment, rows, pictures))
        own = [one for one in verdicts["figures"] if one["experiment"] == experiment.id]
        printed += [_placed(one, experiment.figures, rows) for one in own]
    page = Report(sections, verdicts["claims"], printed, results.provenance, missing)
    yield "report.html", render(page).encode()


@dataclass(frozen=True)
class Picture:
    """A figure as it is written and shown; galleries of spectra have no PNG."""

    name: str
    svg: str
    png: bytes | None
    cells: tuple[str, ...]
    caption: str


def rendered(drawn: Mapping[str, Figure], engine: Engine) -> list[Picture]:
    """The figures, which take longer to write down than to draw, in the order they came in."""
    done = {one.item[0]: one for one in engine.run(_render, list(drawn.items()))}
    # A worker that died has lost a figure that we still have.
    return [done[name].result or _render((name, figure)) for name, figure in drawn.items()]


def _render(item: tuple[str, Figure]) -> Picture:
    name, figure = item
    caption = " ".join(figure.get_supxlabel().split())
    png = None if name.endswith("-spectra") else figures.png(figure)
    svg = figures.svg(figure)
    return Picture(name, svg, png, figures.cells(figure, svg), caption)


def _failed(provenance: Mapping[str, Any]) -> list[str]:
    return [f"{one['trials']}: {one['reason']}" for one in provenance.get("failed", ())]


def _drawn(
    experiment: Experiment, rows: Table, spectra: Table
) -> tuple[Figure | None, Sequence[str]]:
    """The figure of an experiment, or why there is none: a report is worth more than a figure."""
    if not len(rows):
        return None, [f"no trial of {_spoken(experiment)} was run"]
    try:
        return experiment.plot(rows, spectra) if experiment.plot else None, ()
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}"
        return None, [f"the figure of {_spoken(experiment)} was not drawn: {wrong}"]


def _spoken(experiment: Experiment) -> str:
    named = isinstance(experiment, Study)
    return f"study {experiment.id}" if named else f"experiment {experiment.number}"


def section(experiment: Experiment, rows: Table, pictures: Mapping[str, Picture]) -> Section:
    """An experiment with its pictures and the numbers of its trials."""
    drawn, spectra = pictures.get(experiment.id), pictures.get(f"{experiment.id}-spectra")
    return Section(
        experiment.id,
        experiment.number,
        experiment.title,
        experiment.section if experiment.beyond else f"Section {experiment.section} of the paper",
        experiment.question,
        drawn.cells if drawn else (),
        drawn.caption if drawn else "",
        spectra.cells if spectra else (),
        () if isinstance(experiment, Study) else tuple(groups(rows)),
        experiment.beyond,
        tuple(exhibits(experiment, rows)),
    )


def exhibits(experiment: Experiment, rows: Table) -> Iterator[Exhibit]:
    """The tables of a study; what cannot be made of its rows is left out with the reason."""
    if not isinstance(experiment, Study) or not experiment.exhibits:
        return
    try:
        yield from experiment.exhibits(rows)
    except Exception as error:  # a report is worth more than a table
        yield Exhibit("Not shown", (), (), f"{type(error).__name__}: {error}")


def groups(rows: Table) -> Iterator[Group]:
    """The trials by setting, stream and component, at the end of training.

    >>> rows = Table.of(
    ...     {"size": 8, "stream": "own", "seed": k, "component": "row_norms", "error": k / 10}
    ...     for k in range(9)
    ... )
    >>> [(g.setting, g.component, g.summary.median.value) for g in groups(rows)]
    [({'size': 8, 'stream': 'own'}, 'row_norms', 0.4)]
    """
    table = rows.rows
    if not len(rows):
        return
    table = table.filter(pc.is_valid(table["error"]))
    if "epoch" in table.column_names:  # what was reached, not the way there
        ended = table["epoch"].null_count > 0
        last = None if ended else pc.max(table["epoch"]).as_py()
        table = Table.of(table).where(epoch=last).rows
    names = [n for n in table.column_names if n not in TOLD and table[n].null_count < len(table)]
    found: dict[tuple[Any, ...], list[float]] = {}
    columns = [table[name].to_pylist() for name in (*names, "error")]
    for *key, error in zip(*columns, strict=True):
        found.setdefault(tuple(key), []).append(error)
    for setting, values in found.items():
        known = {n: v for n, v in zip(names, setting, strict=True) if v is not None}
        component = str(known.pop("component"))
        yield Group(known, component, summary(values), tail_index(values))


def repetitions(printed: Printed, rows: Table) -> list[float]:
    """What the paper would have printed with other seeds: its figure on each set of own trials.

    The trials on own streams are cut into sets as large as the paper's; only figures that are one
    number, with trials of every setting they need, can be repeated.
    """
    count = 1 + int(pc.max(rows.where(stream="paper").rows["seed"]).as_py() or 0)
    own = rows.where(stream="own")
    sets = 1 + int(pc.max(own.rows["seed"]).as_py() or 0) if len(own) else 0
    found = []
    for first in range(0, sets - count + 1, count):
        again = _as_paper(own.where(seed=range(first, first + count)), first)
        with suppress(LookupError):  # a setting has fewer trials than others
            found.append(check(printed, again)["measured"])
    return [one for one in found if isinstance(one, float)]


def _as_paper(own: Table, first: int) -> Table:
    """Own trials under the names of the paper's, whose seeds begin at 0."""
    rows = own.rows
    changed = {
        "stream": pa.repeat("paper", rows.num_rows),
        "seed": pc.subtract(rows["seed"], first),
    }
    return Table.of(pa.table({name: changed.get(name, rows[name]) for name in rows.column_names}))


def _placed(record: Record, printed: Iterable[Printed], rows: Table) -> Record:
    """A figure that differs from the printed one, with the distribution in which that one falls."""
    figure = next((one for one in printed if one.id == record["id"]), None)
    if record["matches"] or not figure or not isinstance(record["measured"], float):
        return record
    found = np.array(repetitions(figure, rows))
    if len(found) < FEWEST:
        return {**record, "where": "too few other trials to say where the printed one falls"}
    value = ends(figure.printed)[0].value
    low, middle, high = np.quantile(found, (0.05, 0.5, 0.95))
    where = (
        f"in {len(found)} repetitions with other seeds the median is {number(middle)} and 90 % "
        f"lie in [{number(low)}, {number(high)}]; {(found < value).mean():.0%} fall below the print"
    )
    return {**record, "where": where}


def picture(svg: str) -> Markup:
    """An SVG document as the address of an image, a sixth shorter than in base 64.

    What could end the attribute it stands in is escaped or gone.

    >>> print(picture('<svg width="1"/>'))
    data:image/svg+xml;charset=utf-8,%3Csvg width='1'/%3E
    """
    return Markup(
        "data:image/svg+xml;charset=utf-8," + quote(svg.replace('"', "'"), " /:;=,'()+*!")
    )


def paragraphs(text: str) -> list[str]:
    """The question a page's docstring asks, then the rest of it: no title, no marks of code.

    >>> paragraphs("What does ``depth`` do? Layers learn together.")
    ['What does depth do?', 'Layers learn together.']
    """
    parts = [" ".join(part.split()) for part in text.replace("``", "").strip().split("\n\n")]
    if len(parts) > 1 and parts[0].startswith("Experiment"):
        del parts[0]
    question, mark, rest = parts[0].partition("? ")
    return [part for part in (question + mark.strip(), rest, *parts[1:]) if part]


def _opening(report: Report) -> Sequence[str]:
    """The verdict on the paper in three sentences, one on the questions beyond it, one on gaps."""
    further = {one.id for one in report.sections if one.beyond}
    beyond = [claim for claim in report.claims if claim["experiment"] in further]
    paper = [claim for claim in report.claims if claim["experiment"] not in further]
    told = verdict(paper, report.figures) if paper or not beyond else ()
    gaps = any(map(unmeasured, (*report.claims, *report.figures)))
    more = {
        f"Beyond the paper: {tally(beyond)}": bool(beyond),
        "What was not measured needs trials that this run, small or partial, left out.": gaps,
    }
    return (*told, *(sentence for sentence, applies in more.items() if applies))


def render(report: Report) -> str:
    """One HTML page that asks the network for nothing; every name in it is shown as text."""
    return pages.render(
        "report",
        filters=(measured, unmeasured, picture, paragraphs),
        report=report,
        verdict=_opening(report),
        outcomes=OUTCOMES,
    )
