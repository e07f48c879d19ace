"""Verdicts, numbers and figures as one page that needs nothing but itself.

>>> page = report_page(Report(sections=(), claims=(), figures=(), provenance={}))
>>> page.splitlines()[0], "no claim was judged" in page
('<!doctype html>', True)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from markupsafe import Markup

from kappascope.lab import drawing, figures
from kappascope.lab import experiment as lab
from kappascope.lab.article import Article, as_html
from kappascope.lab.claims import Printed, check, printed_numbers
from kappascope.lab.experiment import Exhibit, Experiment, Study
from kappascope.lab.runs import Results, published
from kappascope.lab.statistics import Estimate, SampleSummary, summary, tail_index
from kappascope.lab.table import MEASURED, Table
from kappascope.lab.verdicts import (
    OUTCOMES,
    conclusion,
    failures_first,
    is_control,
    measured,
    printed_mean,
    survives_all,
    unmeasured,
    verdict_counts,
)
from kappascope.pages import rendering
from kappascope.system.files import strict
from kappascope.system.workers import Engine, Here
from kappascope.text import Record, number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Counted: TypeAlias = Callable[[str, Iterable[Any], int], Iterable[Any]]
"""Passes items on, and may show under a name how many of how many are done."""


def uncounted(work: str, items: Iterable[Any], number: int) -> Iterable[Any]:
    """Pass items on and show nothing.

    >>> list(uncounted("drawn", "abc", 3))
    ['a', 'b', 'c']
    """
    return items


NOT_SETTINGS = ("experiment", "seed", *MEASURED)  # every other column tells groups apart
MIN_REPETITIONS = 5  # of the paper's experiment, to show where a printed figure falls


@dataclass(frozen=True)
class TrialGroup:
    """Trials that differ in nothing but their seed, and what one component's errors say."""

    setting: Mapping[str, Any]
    component: str
    summary: SampleSummary
    tail: Estimate


@dataclass(frozen=True)
class Picture:
    """A figure as it is written and shown; galleries of spectra have no PNG."""

    name: str
    svg: str
    png: bytes | None
    cells: tuple[str, ...]  # SVG documents, one a panel
    caption: str
    seen: tuple[str, ...] = ()  # what each panel shows, in words


@dataclass(frozen=True)
class Section:
    """One experiment on the page, with its pictures and the numbers of its trials."""

    experiment: Experiment
    figure: Picture | None = None
    spectra: Picture | None = None
    groups: tuple[TrialGroup, ...] = ()
    exhibits: tuple[Exhibit, ...] = ()

    @property
    def label(self) -> str:
        """Experiments are counted by number, studies go by name."""
        experiment = self.experiment
        return experiment.id if isinstance(experiment, Study) else str(experiment.number)

    @property
    def place(self) -> str:
        """Where the paper has the experiment, or who asks for it."""
        experiment = self.experiment
        return (
            experiment.section
            if experiment.beyond
            else f"Section {experiment.section} of the paper"
        )


@dataclass(frozen=True)
class OpeningArticle:
    """The article with which a report opens, and why paragraphs of it are left out."""

    html: Markup
    left_out: tuple[str, ...] = ()

    @property
    def title(self) -> Markup:
        """The heading of the article."""
        return Markup(str(self.html).partition("</h1>")[0] + "</h1>")

    @property
    def lead(self) -> Markup:
        """Question and answer with the first figure: all before the first heading."""
        return Markup(str(self.html).partition("<h2>")[0].partition("</h1>")[2])

    @property
    def body(self) -> Markup:
        """The rest of the article."""
        return Markup("".join(str(self.html).partition("<h2>")[1:]))


@dataclass(frozen=True)
class Report:
    """Everything on the page; ``incomplete`` lists what is missing, and is its first line."""

    sections: Sequence[Section]
    claims: Sequence[Record]
    figures: Sequence[Record]
    provenance: Mapping[str, Any]
    incomplete: Sequence[str] = ()
    opening: OpeningArticle | None = None

    @property
    def networks(self) -> bool:
        """Whether the report is of studies alone, and compares nothing with the paper's figures."""
        kinds = [isinstance(section.experiment, Study) for section in self.sections]
        return bool(kinds) and all(kinds)

    @property
    def title(self) -> str:
        """The title says what the report is of."""
        if self.networks:
            return "Real networks: does any of it matter outside the toy?"
        return "Condition Number as a Non-Learned Matrix Property: the paper, reproduced"


@dataclass(frozen=True)
class Publication:
    """The published results of a folder, judged anew."""

    folder: Path
    experiments: Sequence[Experiment]
    results: Results
    verdicts: Mapping[str, Sequence[Record]]

    @property
    def claims(self) -> Sequence[Record]:
        """The verdicts on all claims."""
        return self.verdicts["claims"]

    @property
    def studies(self) -> list[Study]:
        """The experiments that are studies of real networks."""
        return [each for each in self.experiments if isinstance(each, Study)]

    def claims_of(self, experiment: Experiment) -> list[Record]:
        """Return the verdicts on the claims of one experiment."""
        return [claim for claim in self.claims if claim["experiment"] == experiment.id]

    def files(
        self, engine: Engine, article: Article | None, counted: Counted = uncounted
    ) -> Iterator[tuple[str, bytes]]:
        """Make all that is derived from the trials anew: verdicts, figures, report."""
        yield "verdicts.json", strict({**self.verdicts, "provenance": self.results.provenance})
        yield from files(
            self.experiments, self.results, self.verdicts, engine, article, counted=counted
        )


def publications_of(
    folders: Iterable[Path], every: Iterable[Experiment], counted: Counted = uncounted
) -> list[Publication]:
    """Read folders and judge them together; ``every`` are the experiments that they may be of.

    A claim of one folder may be judged on the rows of another.
    """
    known = list(every)
    read = {folder: published(folder) for folder in folders}
    rows = {
        name: part
        for results in read.values()
        for name, part in results.rows.by("experiment").items()
    }
    found = []
    for folder, results in read.items():
        there = set(results.rows.rows["experiment"].unique().to_pylist())
        experiments = [experiment for experiment in known if experiment.id in there]
        judged = counted(f"judged in {folder.name}", experiments, len(experiments))
        verdicts = lab.verdicts(judged, results.rows, rows)
        found.append(Publication(folder, experiments, results, verdicts))
    return found


def all_rows(publications: Iterable[Publication]) -> Table:
    """Put the rows of all folders into one table; a column that is text in one is text in all."""
    tables = [each.results.everything.rows for each in publications]
    fields = [field for table in tables for field in table.schema]
    texts = {field.name for field in fields if pa.types.is_string(field.type)}

    def alike(table: pa.Table) -> pa.Table:
        names = [name for name in table.column_names if name in texts]
        for name in names:
            place = table.column_names.index(name)
            table = table.set_column(place, name, table[name].cast(pa.string()))
        return table.replace_schema_metadata(None)

    return Table.of(pa.concat_tables(map(alike, tables), promote_options="permissive"))


def files(
    experiments: Iterable[Experiment],
    results: Results,
    verdicts: Mapping[str, Sequence[Record]],
    engine: Engine | None = None,
    article: Article | None = None,
    *,
    counted: Counted = uncounted,
) -> Iterator[tuple[str, bytes]]:
    """Yield the report and its figures: paths below the folder of results, and their bytes.

    The report opens with the article, if there is one, as far as this run bears it out. What takes
    long goes through ``counted``, which may show how far it has come.
    """
    experiments = list(experiments)
    failed = results.provenance.get("failed", ())
    missing = [f"{block['trials']}: {block['reason']}" for block in failed]
    drawn: dict[str, Figure] = {}
    for experiment in counted("drawn", experiments, len(experiments)):
        spectra = results.spectra.where(experiment=experiment.id)
        rows = results.everything.where(experiment=experiment.id)
        study = isinstance(experiment, Study)
        name = f"study {experiment.id}" if study else f"experiment {experiment.number}"
        if not len(rows):
            missing.append(f"no trial of {name} was run")
        elif experiment.plot:
            try:
                drawn[experiment.id] = experiment.plot(rows, spectra)
            except Exception as error:  # a report is worth more than a figure
                wrong = f"{type(error).__name__}: {error}"
                missing.append(f"the figure of {name} was not drawn: {wrong}")
        if len(spectra):
            drawn[f"{experiment.id}-spectra"] = figures.gallery(spectra)
    pictures = {picture.name: picture for picture in rendered(drawn, engine or Here(), counted)}
    for picture in pictures.values():
        yield f"figures/{picture.name}.svg", picture.svg.encode()
        if picture.png:
            yield f"figures/{picture.name}.png", picture.png
    printed: list[Record] = []
    sections = []
    for experiment in experiments:
        rows = results.everything.where(experiment=experiment.id)
        sections.append(section(experiment, rows, pictures))
        own = [figure for figure in verdicts["figures"] if figure["experiment"] == experiment.id]
        printed += [_placed(record, experiment.figures, rows) for record in own]
    opening = None
    if article and not all(isinstance(experiment, Study) for experiment in experiments):
        opening = opened(article, results, verdicts)
    page = Report(sections, verdicts["claims"], printed, results.provenance, missing, opening)
    yield "report.html", report_page(page).encode()


def opened(
    article: Article, results: Results, verdicts: Mapping[str, Sequence[Record]]
) -> OpeningArticle:
    """Write the article as far as a run bears it out, every claim a link to its row."""
    figures = article.drawn(results.everything)

    def cite(names: Sequence[str]) -> str:
        return f"({', '.join(f'[{name}](#claim-{name})' for name in names)})"

    written = article.written(
        verdicts["claims"], verdicts["figures"], results.provenance, figures, cite=cite
    )
    pictures = {name: drawing.svg(figure) for name, figure in figures.items()}
    return OpeningArticle(as_html(written.text, pictures), written.left_out)


def rendered(
    drawn: Mapping[str, Figure], engine: Engine, counted: Counted = uncounted
) -> list[Picture]:
    """Write the figures down, which takes longer than drawing them, and keep their order."""
    written = counted("written", engine.run(_render, list(drawn.items())), len(drawn))
    done = {each.item[0]: each for each in written}
    # A worker that died has lost a figure that we still have.
    return [done[name].result or _render((name, figure)) for name, figure in drawn.items()]


def _render(item: tuple[str, Figure]) -> Picture:
    name, figure = item
    caption = " ".join(figure.get_supxlabel().split())
    png = None if name.endswith("-spectra") else drawing.png(figure)
    svg = drawing.svg(figure)
    seen = tuple(drawing.alt_text(axes) for axes in figure.axes)
    return Picture(name, svg, png, drawing.cells(figure, svg), caption, seen)


def section(experiment: Experiment, rows: Table, pictures: Mapping[str, Picture]) -> Section:
    """Put an experiment together with its pictures and the numbers of its trials."""
    return Section(
        experiment,
        pictures.get(experiment.id),
        pictures.get(f"{experiment.id}-spectra"),
        () if isinstance(experiment, Study) else tuple(trial_groups(rows)),
        tuple(exhibits(experiment, rows)),
    )


def exhibits(experiment: Experiment, rows: Table) -> Iterator[Exhibit]:
    """Yield the tables of a study; one that cannot be made says why."""
    if not isinstance(experiment, Study) or not experiment.exhibits:
        return
    try:
        yield from experiment.exhibits(rows)
    except Exception as error:  # a report is worth more than a table
        yield Exhibit("Not shown", (), (), f"{type(error).__name__}: {error}")


def trial_groups(rows: Table) -> Iterator[TrialGroup]:
    """Group the trials by setting, stream and component, at the end of training.

    >>> rows = Table.of(
    ...     {"size": 8, "stream": "own", "seed": k, "component": "row_norms", "error": k / 10}
    ...     for k in range(9)
    ... )
    >>> [(g.setting, g.component, g.summary.median.value) for g in trial_groups(rows)]
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
    names = [
        n for n in table.column_names if n not in NOT_SETTINGS and table[n].null_count < len(table)
    ]
    groups: dict[tuple[Any, ...], list[float]] = {}
    columns = [table[name].to_pylist() for name in (*names, "error")]
    for *key, error in zip(*columns, strict=True):
        groups.setdefault(tuple(key), []).append(error)
    for setting, values in groups.items():
        known = {n: v for n, v in zip(names, setting, strict=True) if v is not None}
        component = str(known.pop("component"))
        yield TrialGroup(known, component, summary(values), tail_index(values))


def repetitions(printed: Printed, rows: Table) -> list[float]:
    """Measure what the paper would have printed with other seeds, on each set of own trials.

    The trials on own streams are cut into sets as large as the paper's; only figures that are one
    number, with trials of every setting they need, can be repeated.
    """
    count = 1 + int(pc.max(rows.where(stream="paper").rows["seed"]).as_py() or 0)
    own = rows.where(stream="own")
    sets = 1 + int(pc.max(own.rows["seed"]).as_py() or 0) if len(own) else 0
    values = []
    for first in range(0, sets - count + 1, count):
        part = own.where(seed=range(first, first + count)).rows
        columns = {name: part[name] for name in part.column_names}
        columns["stream"] = pa.repeat("paper", part.num_rows)
        columns["seed"] = pc.subtract(part["seed"], first)  # the paper's begin at 0
        with suppress(LookupError):  # a setting has fewer trials than others
            values.append(check(printed, Table.of(pa.table(columns)))["measured"])
    return [value for value in values if isinstance(value, float)]


def _placed(record: Record, printed: Iterable[Printed], rows: Table) -> Record:
    """Place a printed figure that differs in the distribution over other seeds."""
    figure = next((each for each in printed if each.id == record["id"]), None)
    if record["matches"] or not figure or not isinstance(record["measured"], float):
        return record
    repeated = np.array(repetitions(figure, rows))
    if len(repeated) < MIN_REPETITIONS:
        return {**record, "where": "too few other trials to say where the printed one falls"}
    value = printed_numbers(figure.printed)[0].value
    low, middle, high = np.quantile(repeated, (0.05, 0.5, 0.95))
    where = (
        f"in {len(repeated)} repetitions with other seeds the median is {number(middle)} and 90 % "
        f"lie in [{number(low)}, {number(high)}]; {(repeated < value).mean():.0%} fall below the "
        "print"
    )
    return {**record, "where": where}


def picture(svg: str) -> Markup:
    """Write an SVG document as the address of an image, a sixth shorter than in base 64.

    What could end the attribute it stands in is escaped or gone.

    >>> print(picture('<svg width="1"/>'))
    data:image/svg+xml;charset=utf-8,%3Csvg width='1'/%3E
    """
    return Markup(
        "data:image/svg+xml;charset=utf-8," + quote(svg.replace('"', "'"), " /:;=,'()+*!")
    )


def inline(svg: str, prefix: str) -> Markup:
    """Draw an SVG document of ours in the page itself, so that its marks tell their numbers."""
    return Markup(drawing.inlined(svg, prefix))


def paragraphs(text: str) -> list[str]:
    """Split a page's docstring: the question it asks, then the rest, without marks of code.

    >>> paragraphs("What does ``depth`` do? Layers learn together.")
    ['What does depth do?', 'Layers learn together.']
    """
    pieces = re.split(r"\n\n|\n- ", text.replace("``", "").strip())
    parts = [" ".join(piece.split()).removeprefix("- ") for piece in pieces]
    if len(parts) > 1 and parts[0].startswith(("Experiment", "Study")):
        del parts[0]
    question, mark, rest = parts[0].partition("? ")
    return [part for part in (question + mark.strip(), rest, *parts[1:]) if part]


def report_page(report: Report) -> str:
    """Write one HTML page that asks the network for nothing; every name in it is text."""
    further = {each.experiment.id for each in report.sections if each.experiment.beyond}
    beyond = [
        claim for claim in report.claims if claim["experiment"] in further or is_control(claim)
    ]
    paper = [claim for claim in report.claims if claim not in beyond]
    sentences = list(conclusion(paper, report.figures) if paper or not beyond else ())
    if report.opening:  # which has said the rest
        sentences = []
    if beyond:
        counts = verdict_counts(beyond)
        sentences.append(f"Beyond the paper: {counts[0].lower()}{counts[1:]}")
    if any(map(unmeasured, (*report.claims, *report.figures))):
        sentences.append(
            "What was not measured needs trials that this run, small or partial, left out."
        )
    return rendering.fill(
        "report",
        filters=(measured, unmeasured, picture, inline, paragraphs, printed_mean, survives_all),
        report=report,
        claims=failures_first(report.claims),
        verdict=sentences,
        outcomes=OUTCOMES,
    )
