"""The result of a diagnosis: rows, findings, and the forms in which they are told."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from pathlib import PurePath
from statistics import median_high, median_low
from typing import TYPE_CHECKING, Any, TypeVar

from kappascope.clinic import CONCERNS, SCHEMA, SEVERITIES, Order
from kappascope.clinic.atlas import Atlas
from kappascope.clinic.examination import Examination, Finding, json_value
from kappascope.clinic.judgement import judgement, urgency
from kappascope.clinic.moments import SwallowedStep
from kappascope.clinic.symptoms import Measurements
from kappascope.clinic.vectors import Vector
from kappascope.matrix import spectra
from kappascope.matrix.status import Outcome
from kappascope.model.adapters import adapted_layer
from kappascope.model.attention import Product
from kappascope.model.chains import Chain
from kappascope.model.logits import LogitBound
from kappascope.model.skipped import ReasonKind, Skipped, unreadable
from kappascope.system import files
from kappascope.system.extras import optional
from kappascope.text import error_text, first_few, html_escaped, number, plural

if TYPE_CHECKING:  # a table is made where somebody asks for one
    import pyarrow as pa
    from matplotlib.axes import Axes
    from pandas import DataFrame

RANGE = "outside float64's range"
# A spreadsheet takes what begins so for a formula; the last four are the full-width forms.
FORMULA_SIGNS = "=+-@\uff1d\uff0b\uff0d\uff20"

# Fields of a matrix that have fields of their own.
NESTS = (
    "row_norms", "column_norms", "lines", "int8", "effective_ranks", "energy_ranks",
    "operator_norm", "errors", "unchanged", "fingerprints", "delta",
)  # fmt: skip


# The keys that sort matrices; None for what a matrix does not have.
ORDERS: dict[Order, Callable[[Examination], Any]] = {
    "kappa": lambda row: None if row.kappa is None else -row.kappa,
    "chance": lambda row: None if row.ratio is None else -row.ratio,
    "rank": lambda row: (
        None if row.effective_rank is None else row.effective_rank / max(1, min(row.shape))
    ),
    "stable": lambda row: row.stable_rank,
    "alpha": lambda row: row.alpha,
    "moved": lambda row: None if row.moved is None else -row.moved,
    "size": lambda row: -row.parameters,
    "name": lambda row: row.name,
}


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Every matrix of one model, each with its findings, and all findings, worst first.

    ``faults`` are the parts of a checkpoint that could not be opened, ``unsound`` the biases and
    other vectors that are not finite, ``unjudged`` the rules that failed and on what, ``failed``
    all that should have been examined or judged and could not be.
    """

    source: str
    matrices: tuple[Examination, ...] = ()
    products: tuple[Product, ...] = ()
    chains: tuple[Chain, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    faults: tuple[Skipped, ...] = ()
    unsound: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()
    reference: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    unjudged: tuple[Skipped, ...] = ()
    vectors: tuple[Vector, ...] = field(default=(), repr=False)
    reference_vectors: tuple[Vector, ...] = field(default=(), repr=False)
    logits: tuple[LogitBound, ...] = ()
    swallowed: tuple[SwallowedStep, ...] = ()
    files: tuple[files.FileDigest, ...] = ()
    atlas: Atlas | None = None

    def judged(self) -> Diagnosis:
        """Add what the rules find; of equally urgent findings those of worse rows come first.

        >>> from kappascope.model.skipped import Reason
        >>> bad = Skipped("b", Reason(ReasonKind.NON_FINITE, "non-finite (1 of 2)"))
        >>> [one.rule for one in Diagnosis("toy.pt", unsound=(bad,)).judged().findings]
        ['non-finite']
        """
        said = judgement(
            Measurements(
                self.matrices,
                self.products,
                self.chains,
                self.unsound,
                self.vectors,
                self.reference_vectors,
                self.swallowed,
                self.atlas,
            )
        )
        findings = said.findings
        own: dict[str, tuple[Finding, ...]] = {}
        for finding in findings:
            own[finding.subject] = (*own.get(finding.subject, ()), finding)
        rows = tuple(replace(row, findings=own.get(row.name, ())) for row in self.matrices)
        judged = replace(self, matrices=rows, unjudged=said.failed)
        place = {row.name: k for k, row in enumerate(judged.ranked)}
        order = sorted(findings, key=lambda f: (*urgency(f), place.get(f.subject, len(place))))
        return replace(judged, findings=tuple(order))

    def __repr__(self) -> str:
        """The summary in a few lines, where all that is known would fill pages.

        >>> Diagnosis("toy.pt")
        Diagnosis of toy.pt
        Nothing could be examined.
        """
        return "\n".join((f"Diagnosis of {self.source}", *self.notes, *self.verdict))

    @cached_property
    def ranked(self) -> tuple[Examination, ...]:
        """The matrices as a table has them, the worst first."""
        return tuple(sorted(self.matrices, key=lambda row: row.badness, reverse=True))

    def ordered(self, by: Order | None = None) -> tuple[Examination, ...]:
        """Return the matrices in an order; by default what moved most or else what is worst first.

        What has no such number comes last.

        >>> rows = tuple(Examination(name, (2, 2), "", "ok", alpha=9.0) for name in "wv")
        >>> [row.name for row in Diagnosis("toy.pt", rows).ordered("name")]
        ['v', 'w']
        """
        moved = self.reference and not self.incomparable
        key = ORDERS.get(by or ("moved" if moved else "findings"))
        if key is None:
            return self.ranked
        broken = [row for row in self.ranked if by is None and row.failure is not None]
        rest = self.ranked[len(broken) :]
        known = [row for row in rest if key(row) is not None]
        return (*broken, *sorted(known, key=key), *(row for row in rest if key(row) is None))

    @cached_property
    def failed(self) -> tuple[Skipped, ...]:
        """What should have been examined or judged and could not be, and why."""
        rows = [Skipped(row.name, row.failure) for row in self.matrices if row.failure is not None]
        rows += [Skipped(row.name, unreadable(why)) for row in self.matrices for why in row.faults]
        multiplied: tuple[Product | Chain, ...] = (*self.products, *self.chains)
        rows += [
            Skipped(product.name, unreadable(product.status.reason))
            for product in multiplied
            if product.status.outcome is Outcome.FAILED
        ]
        lost = (item for item in self.skipped if item.lost)
        return (*self.faults, *rows, *self.unsound, *lost, *self.unjudged)

    @property
    def unbuilt(self) -> tuple[Skipped, ...]:
        """What failed because it is an object of a foreign class: its tensors alone are read.

        >>> Diagnosis("x", faults=(Skipped("a.B", unreadable("its file is lost")),)).unbuilt
        ()
        """
        return tuple(item for item in self.failed if item.unbuilt)

    @property
    def analysed(self) -> tuple[Examination, ...]:
        """The rows with numbers in them."""
        return tuple(row for row in self.matrices if row.failure is None)

    @property
    def uncompared(self) -> tuple[Skipped, ...]:
        """The matrices that have no errors against the reference, and why.

        >>> Diagnosis("toy.pt").uncompared
        ()
        """
        rows = (row for row in self.matrices if self.reference and not row.errors)
        return tuple(Skipped(row.name, row.uncompared or unreadable(row.status)) for row in rows)

    @property
    def incomparable(self) -> str:
        """Why nothing could be compared with the reference; nothing if something was.

        >>> row = Examination("w", (1, 1), "float32", "ok", uncompared=unreadable("zero"))
        >>> Diagnosis("toy.pt", (row,), reference="other.pt").incomparable
        'no matrix could be compared'
        """
        if not self.reference or any(row.errors for row in self.matrices):
            return ""
        if all(item.reason.kind is ReasonKind.NO_COUNTERPART for item in self.uncompared):
            return "nothing there has the name and shape of a matrix here"
        return "no matrix could be compared"

    @property
    def rank_pattern(self) -> dict[str, int]:
        """The ranks that hold what a change learned, by layers, as peft's ``LoraConfig`` has them.

        >>> Diagnosis("toy.pt").rank_pattern
        {}
        """
        rows = [row for row in self.matrices if row.delta is not None and row.part_of is None]
        return {
            adapted_layer(row.name): row.delta.rank for row in rows if row.delta and row.delta.rank
        }

    def above(self, severity: str) -> tuple[Finding, ...]:
        """Return the findings of this severity or a worse one.

        >>> Diagnosis("nothing").above("info")
        ()
        """
        least = SEVERITIES.index(severity)
        return tuple(
            finding for finding in self.findings if SEVERITIES.index(finding.severity) >= least
        )

    @property
    def verdict(self) -> tuple[str, ...]:
        """Three plain sentences: what was examined, what is wrong, what kappa can be trusted.

        >>> Diagnosis("nothing").verdict
        ('Nothing could be examined.',)
        """
        if not self.analysed:
            return ("Nothing could be examined.",)
        health = f"Findings: {self.ills}"
        can_act = any(finding.concern != "observation" for finding in self.findings)
        if not can_act and not self.above("warning"):
            notes = f" ({severity_counts(self.findings)})" if self.findings else ""
            health = f"No rule found anything wrong{notes}."
        return tuple(filter(None, (self._extent, health, self._trust)))

    @property
    def ills(self) -> str:
        """How much was found, and the worst of it.

        >>> Diagnosis("toy.pt").ills
        'none.'
        """
        if not self.findings:
            return "none."
        worst = self.findings[0]
        return f"{severity_counts(self.findings)}; the worst is {worst.rule} in {worst.subject}."

    @property
    def _extent(self) -> str:
        """The sentence on how much was examined."""
        tensors = sum(row.part_of is None for row in self.analysed)
        parts = len(self.analysed) - tensors
        split = f" and {plural(parts, 'part')} of them" if parts else ""
        lost = len(self.failed) - len(self.unbuilt) - len(self.unjudged)
        failed = f"; {lost} could not be examined" if lost else ""
        if many := len(self.unbuilt):
            objects = plural(many, "object of another class was", "objects of other classes were")
            failed += f"; {objects} not built"
        if self.unjudged:
            failed += f"; {plural(len(self.unjudged), 'judgement')} failed"
        were = "was" if tensors == 1 and not parts else "were"
        return f"{plural(tensors, 'matrix', 'matrices')}{split} {were} examined{failed}."

    @property
    def _trust(self) -> str:
        """The sentence on how many condition numbers the stored digits resolve."""
        products = [row for row in self.analysed if row.delta and row.delta.limit is not None]
        if len(products) == len(self.analysed):
            return ""  # of low rank by design: nobody asks for their kappa
        known = [row for row in self.analysed if row.resolved]
        unknown = [row for row in self.analysed if not row.resolved]
        bounded = [row for row in unknown if row.condition_number_low is not None]
        text = f"The storage precision resolves κ of {len(known)} of {len(self.analysed)}"
        if known:
            worst = max(known, key=lambda row: row.condition_number or 0.0)
            text += f"; the largest of these is {number(worst.condition_number)} ({worst.name})"
        said = [f"{text}."]
        if bounded:
            types = first_few(sorted({row.storage or row.dtype for row in bounded}))
            many = f"{len(bounded)} of {len(self.analysed)}"
            said.append(f"For {many} the stored digits ({types}) do not determine it.")
        if known and len(unknown) > len(bounded):
            without = plural(len(unknown) - len(bounded), "matrix has", "matrices have")
            said.append(f"{without} none.")
        return " ".join(said)

    def document(self, plots: bool = False) -> dict[str, Any]:
        """Return all of it as strict JSON values.

        Infinite or unknown is ``None`` with a reason beside it.

        >>> Diagnosis("nothing").document()["summary"]["analysed"]
        0
        """
        untold: list[Skipped] = []
        rows = _each_told(self.matrices, lambda row: row.document(plots), untold)
        products = _each_told(self.products, product_document, untold)
        chains = _each_told(self.chains, chain_document, untold)
        failed = (*self.failed, *untold)
        return {
            "schema": SCHEMA,
            "source": self.source,
            "reference": self.reference,
            "matrices": rows,
            "products": products,
            "chains": chains,
            "findings": [asdict(each) for each in self.findings],
            "logits": [asdict(each) for each in self.logits],
            "swallowed": [asdict(each) for each in self.swallowed],
            "files": [asdict(each) for each in self.files],
            "skipped": [{"name": each.name, "reason": str(each.reason)} for each in self.skipped],
            "failed": [{"name": each.name, "reason": str(each.reason)} for each in failed],
            "summary": self.summary,
            "provenance": self.provenance,
        }

    @property
    def summary(self) -> dict[str, Any]:
        """Counts and the verdict."""
        counts = Counter(finding.severity for finding in self.findings)
        return {
            "matrices": len(self.matrices),
            "analysed": len(self.analysed),
            "failed": len(self.failed),
            "skipped": len(self.skipped),
            "by_severity": {severity: counts[severity] for severity in SEVERITIES},
            "by_concern": {
                concern: sum(finding.concern == concern for finding in self.findings)
                for concern in CONCERNS
            },
            "verdict": "\n".join(self.verdict),
        }

    @property
    def provenance(self) -> dict[str, Any]:
        """What the numbers depend on beside the model: versions, options, and notes on reading."""
        computing = {"dtype": "float64"}  # whatever the matrices are stored in
        notes = {"notes": list(self.notes)}
        return {**files.environment(), **computing, **self.settings, **notes}

    def html(self) -> str:
        """Return the page that ``kappascope diagnose --html`` writes.

        >>> Diagnosis("nothing").html().splitlines()[0]
        '<!doctype html>'
        """
        from kappascope.clinic.html import diagnosis_page

        return diagnosis_page([self])

    def _repr_html_(self) -> str:
        """Return the page in a frame of its own, whose script and style reach nothing around it.

        >>> Diagnosis("nothing")._repr_html_()[:31]
        '<iframe sandbox="allow-scripts"'
        """
        title = html_escaped(f"Diagnosis of {self.source}")
        style = "width: 100%; height: 42rem; border: 1px solid #8886; border-radius: 4px"
        page = html_escaped(self.html())
        frame = f'<iframe sandbox="allow-scripts" title="{title}" style="{style}"'
        return f'{frame} srcdoc="{page}"></iframe>'

    def __getitem__(self, name: str) -> Examination:
        """Return the row of a matrix by its name, or say which names are like it.

        >>> Diagnosis("toy.pt", (Examination("fc.weight", (2, 2), "", "ok"),))["fc"].name
        'fc.weight'
        """
        rows = {row.name: row for row in self.matrices}
        if found := rows.get(name) or rows.get(f"{name}.weight"):
            return found
        near = get_close_matches(str(name), rows, n=3)
        raise KeyError(f"no matrix is called {name!r}; {first_few(near or list(rows))} are there")

    def __iter__(self) -> Iterator[Examination]:
        return iter(self.matrices)

    def plot_map(self, metric: str = "chance", axes: Axes | None = None) -> Axes:
        """Draw the map of the model and return matplotlib's axes; ``metric`` as on the page.

        >>> Diagnosis("toy.pt", (Examination("w", (2, 2), "", "ok"),)).plot_map("alpha").get_title()
        'tail exponent α'
        """
        from kappascope.clinic import metrics, plots

        return plots.map_axes(self.matrices, metrics.metric(metric), axes)

    def plot_spectrum(self, name: str, axes: Axes | None = None) -> Axes:
        """Draw the singular values of one matrix and return matplotlib's axes."""
        from kappascope.clinic import plots

        return plots.spectrum_axes(self[name], axes)

    def to_pandas(self) -> DataFrame:
        """Return one row per matrix, one column per number, as a frame of pandas."""
        optional("pandas", "notebook")
        return self.table().to_pandas()

    def __arrow_c_stream__(self, requested_schema: object = None) -> object:
        """Hand the table over as an Arrow stream, to whatever reads these without a copy."""
        return self.table().__arrow_c_stream__(requested_schema)

    def table(self) -> pa.Table:
        """Return one row per matrix, one column per number, for Parquet or CSV.

        >>> Diagnosis("nothing").table().num_rows
        0
        """
        pa = optional("pyarrow", "lab")
        rows = [_flat(row) for row in self.matrices]
        names = list(dict.fromkeys(name for row in rows for name in row)) or ["name"]
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


Told = TypeVar("Told", Examination, Product, Chain)


def _each_told(
    rows: Iterable[Told], tell: Callable[[Told], dict[str, Any]], untold: list[Skipped]
) -> list[dict[str, Any]]:
    """Return the documents of rows.

    One that cannot be told is named with why, and costs no other.
    """
    documents = []
    for row in rows:
        try:
            documents.append(tell(row))
        except Exception as error:
            reason = f"cannot be told: {error_text(error)}"
            untold.append(Skipped(row.name, unreadable(reason)))
            documents.append({"name": row.name, "status": f"failed: {reason}"})
    return documents


def _flat(row: Examination) -> dict[str, Any]:
    """Return the row without nests: ``row_norms.cv`` for a number in one, text for a list."""
    flat: dict[str, Any] = {}
    for name, value in row.document().items():
        if name in NESTS:
            flat |= {f"{name}.{key}": _listed(entry) for key, entry in (value or {}).items()}
        elif name == "unlearned":
            for found in row.unlearned or ():
                flat |= {f"unlearned.{found.part}": found.answer}
                flat |= {f"unlearned.{found.part}.p": found.adjusted}
        elif name == "reasons":
            flat[name] = "; ".join(f"{key}: {why}" for key, why in value.items())
        elif name == "shape":
            flat["rows"], flat["columns"] = value
        elif name == "findings":
            flat["severity"] = row.severity or None
            flat["findings"] = "; ".join(finding.rule for finding in row.findings)
        else:
            flat[name] = _listed(value)
    return flat


def _listed(value: Any) -> Any:
    """Return a list as one text, and anything else as it is."""
    return ", ".join(map(str, value)) if isinstance(value, list) else value


def product_document(product: Product) -> dict[str, Any]:
    """Return the product as strict JSON values, without the list of its singular values.

    >>> from kappascope.matrix.status import OK
        >>> product_document(Product("attn", "QK", 0, (8, 8), (3.0, 1.0), 3.0, OK))["sigma_min"]
        1.0
    """
    document: dict[str, Any] = json_value(
        {"name": product.name} | asdict(product) | {"reasons": {}}
    )
    values, exponent = document.pop("values"), document.pop("exponent")
    del document["layer"]
    document |= {"sigma_max": None, "sigma_min": None, "stable_rank": None}
    if values:
        ends = {"sigma_max": values[0], "sigma_min": values[-1]}
        document |= {name: spectra.unscaled(value, exponent) for name, value in ends.items()}
    if values and values[0]:
        document["stable_rank"] = sum((value / values[0]) ** 2 for value in values)
    derived = "condition_number", "sigma_max", "sigma_min", "stable_rank"
    document["reasons"] = {
        name: product.status.reason for name in derived if document[name] is None
    }
    if values:
        beyond = {name: RANGE for name in ("sigma_max", "sigma_min") if document[name] is None}
        document["reasons"] |= beyond
    return document


def chain_document(chain: Chain) -> dict[str, Any]:
    """Return the chain as strict JSON values, with reasons for what is infinite or unknown.

    >>> from kappascope.matrix.status import OK
        >>> both = Chain("a > b", ("a", "b"), (4, 4, 4), math.inf, True, 5.0, OK)
        >>> chain_document(both)["reasons"]
        {'bound': 'kappa of a layer is not finite'}
    """
    reasons = {}
    if chain.condition_number is None or math.isinf(chain.condition_number):
        reasons["condition_number"] = chain.status.reason
    if chain.bound is None:
        failed = chain.status.outcome is Outcome.FAILED
        reasons["bound"] = chain.status.reason if failed else RANGE
    elif math.isinf(chain.bound):
        reasons["bound"] = "kappa of a layer is not finite"
    document: dict[str, Any] = json_value(asdict(chain) | {"reasons": reasons})
    return document


def severity_counts(findings: Iterable[Finding]) -> str:
    """Tell how many findings there are of each severity, the gravest first.

    >>> severity_counts([Finding("zero", "info", "w", "all entries are zero", "")])
    '1 note'
    """
    counts = Counter(finding.severity for finding in findings)
    words = {"critical": ("critical",) * 2, "warning": ("warning", "warnings")}
    words["info"] = ("note", "notes")
    known = [(counts[severity], words[severity]) for severity in reversed(SEVERITIES)]
    return ", ".join(f"{many} {word[many != 1]}" for many, word in known if many)


def spreadsheet(table: pa.Table) -> bytes:
    """Return CSV in which no name is taken for a formula or has a control character in it.

    >>> import pyarrow as pa
    >>> print(spreadsheet(pa.table({"name": ["=1+1"]})).decode().splitlines()[1])
    "'=1+1"
    """
    pa, csv = optional("pyarrow", "lab"), optional("pyarrow.csv", "lab")
    columns = {}
    for name in table.column_names:
        column = table[name]
        if pa.types.is_string(column.type):
            safe = [None if text is None else _cell(text) for text in column.to_pylist()]
            column = pa.array(safe, pa.string())
        columns[name] = column
    sink = pa.BufferOutputStream()
    csv.write_csv(pa.table(columns), sink)
    return bytes(sink.getvalue())


def _cell(text: str) -> str:
    """Return text on one line, with escapes for what cannot be printed, that begins no formula."""
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return f"'{shown}" if shown.lstrip().startswith(tuple(FORMULA_SIGNS)) else shown


# --- several checkpoints of one model -------------------------------------------------------------


def document(steps: Sequence[Diagnosis], plots: bool = False) -> dict[str, Any]:
    """Return the document of one diagnosis, or of the last of several with the way that led to it.

    >>> document([Diagnosis("a"), Diagnosis("b")])["trajectory"][0]["source"]
    'a'
    """
    last = steps[-1].document(plots)
    if len(steps) > 1:
        names = ("source", "reference", "matrices", "findings", "failed", "summary")
        documents = [each.document() for each in steps]
        last["trajectory"] = [{name: each[name] for name in names} for each in documents]
        last["summary"]["verdict"] = "\n".join((*steps[-1].verdict, *before(steps)))
    return last


def before(steps: Sequence[Diagnosis]) -> Iterator[str]:
    """Yield what is wrong with the steps before the last, which the verdict on that does not tell.

    >>> from kappascope.model.skipped import Reason
    >>> reason = Reason(ReasonKind.NON_FINITE, "non-finite (1 of 2), first at [0]")
    >>> bad = Skipped("fc.bias", reason)
    >>> list(before([Diagnosis("1.pt", unsound=(bad,)).judged(), Diagnosis("2.pt")]))
    ['Before the last, in 1.pt: 1 critical; the worst is non-finite in fc.bias.']
    """
    for step in steps[:-1]:
        if step.above("warning"):
            yield f"Before the last, in {step.source}: {step.ills}"


@dataclass(frozen=True)
class TrajectoryStep:
    """A checkpoint of a trajectory: its condition numbers, and how far it is from the last.

    Numbers are medians over the matrices, but for ``largest``.
    """

    name: str
    matrices: int
    median: float | None
    largest: float | None
    log_change: float | None  # of the condition number
    change: float | None  # of the matrix
    findings: str  # the gravest, counted


def trajectory_steps(steps: Sequence[Diagnosis]) -> list[TrajectoryStep]:
    """Return what there is to say of each checkpoint of a trajectory.

    >>> trajectory_steps([Diagnosis("run/1.pt")])[0].name
    '1.pt'
    """
    return [_step(name, step) for name, step in zip(short_sources(steps), steps, strict=True)]


def _step(name: str, diagnosis: Diagnosis) -> TrajectoryStep:
    kappas = [row.kappa for row in diagnosis.analysed]
    errors = [row.errors or {} for row in diagnosis.analysed]
    return TrajectoryStep(
        name,
        len(diagnosis.analysed),
        known_median(kappas),
        max((kappa for kappa in kappas if kappa is not None), default=None),
        known_median(each.get("log_condition_number") for each in errors),
        known_median(each.get("overall_matrix") for each in errors),
        severity_counts(
            f for f in diagnosis.findings if f.severity == diagnosis.findings[0].severity
        )
        or "none",
    )


def short_sources(steps: Sequence[Diagnosis]) -> tuple[str, ...]:
    """Return the sources without their folders, where that tells them apart.

    >>> short_sources([Diagnosis("run/1.pt"), Diagnosis("run/2.pt")])
    ('1.pt', '2.pt')
    """
    sources = tuple(step.source or str(place) for place, step in enumerate(steps, 1))
    last = tuple(PurePath(name).name or name for name in sources)
    return last if len(set(last)) == len(last) else sources


def known_median(values: Iterable[float | None]) -> float | None:
    """Return the median of those values that are known.

    >>> known_median([3.0, None, 1.0]), known_median([None])
    (2.0, None)
    """
    known = [value for value in values if value is not None]
    if not known:
        return None
    return median_low(known) / 2 + median_high(known) / 2  # halves, whose sum does not overflow


def joined(steps: Sequence[Diagnosis]) -> pa.Table:
    """Return the tables of several diagnoses, each row with its source.

    >>> joined([Diagnosis("a")]).column_names
    ['source', 'name']
    """
    pa = optional("pyarrow", "lab")
    tables = [
        step.table().add_column(
            0, "source", pa.array([step.source] * len(step.matrices), pa.string())
        )
        for step in steps
    ]
    return pa.concat_tables(tables, promote_options="permissive")
