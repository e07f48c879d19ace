"""What the examination of a model gives: rows, findings, and the forms in which they are told."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, TypeAlias

import pyarrow as pa

from kappascope import store
from kappascope.chains import Chain
from kappascope.clinic import SEVERITIES, findings, glance
from kappascope.clinic.examination import Examination
from kappascope.clinic.findings import Finding
from kappascope.clinic.status import Status
from kappascope.matrices import Skipped
from kappascope.products import Product
from kappascope.prose import number, plural
from kappascope.weights.reasons import Unlike

Row: TypeAlias = Examination | Product | Chain
SCHEMA = "kappascope.diagnosis/1"
UNLIKE = "nothing there has the name and shape of a matrix here"  # to be compared with
LEADING = "=+-@\t\r"  # a spreadsheet takes what begins so for a formula


@dataclass(frozen=True, repr=False)
class Diagnosis:
    """Every matrix of one model, and what was found of it.

    ``faults`` are the parts of a checkpoint that could not be opened, ``unsound`` the biases and
    other vectors that are not finite, ``failed`` all that should have been examined and could not
    be.
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

    def __repr__(self) -> str:
        """The summary in a few lines, where all that is known would fill pages.

        >>> Diagnosis("toy.pt")
        Diagnosis of toy.pt
        Nothing could be examined.
        """
        return "\n".join((f"Diagnosis of {self.source}", *self.notes, *self.verdict))

    @cached_property
    def findings(self) -> tuple[Finding, ...]:
        """What the rules say, worst first, of equally grave ones in the order of the table."""
        rows = {row.name: place for place, row in enumerate(self.ranked)}
        grave = {severity: -place for place, severity in enumerate(SEVERITIES)}
        last = len(rows)
        return tuple(
            sorted(self._found, key=lambda f: (grave[f.severity], rows.get(f.subject, last)))
        )

    @cached_property
    def _found(self) -> tuple[Finding, ...]:
        return findings.findings(self.matrices, self.products, self.chains, self.unsound)

    @cached_property
    def ranked(self) -> tuple[glance.Row, ...]:
        """The matrices as a table has them, worst first, each with its findings."""
        own = _by_subject(self._found)
        told = ({**vars(row), "findings": own.get(row.name, ())} for row in self.matrices)
        return tuple(glance.ranked(told))

    @cached_property
    def failed(self) -> tuple[Skipped, ...]:
        """What should have been examined and could not be, and why."""
        rows: tuple[Row, ...] = (*self.matrices, *self.products, *self.chains)
        told = [(one.name, Status(one.status)) for one in rows]
        failures = [Skipped(name, status.reason) for name, status in told if status.failed]
        lost = (one for one in self.skipped if one.lost)
        return (*self.faults, *failures, *self.unsound, *lost)

    @property
    def unbuilt(self) -> tuple[Skipped, ...]:
        """Those of ``failed`` that are objects of foreign classes, of which tensors alone are read.

        >>> Diagnosis("x", faults=(Skipped("a.B", "its file is lost"),)).unbuilt
        ()
        """
        return tuple(one for one in self.failed if one.unbuilt)

    @property
    def analysed(self) -> tuple[Examination, ...]:
        """The rows with numbers in them."""
        return tuple(row for row in self.matrices if not row.failed)

    @property
    def uncompared(self) -> tuple[Skipped, ...]:
        """The matrices that have no errors against the reference, and why.

        >>> Diagnosis("toy.pt").uncompared
        ()
        """
        rows = (row for row in self.matrices if self.reference and not row.errors)
        return tuple(Skipped(row.name, row.reasons.get("errors") or row.status) for row in rows)

    @property
    def incomparable(self) -> str:
        """Why nothing could be compared with the reference; nothing if something was.

        >>> row = Examination("w", (1, 1), "float32", "ok", reasons={"errors": "zero"})
        >>> Diagnosis("toy.pt", (row,), reference="other.pt").incomparable
        'no matrix could be compared'
        """
        if not self.reference or any(row.errors for row in self.matrices):
            return ""
        alike = any(not isinstance(one.reason, Unlike) for one in self.uncompared)
        return "no matrix could be compared" if alike else UNLIKE

    def above(self, severity: str) -> tuple[Finding, ...]:
        """The findings of this severity or a worse one.

        >>> Diagnosis("nothing").above("info")
        ()
        """
        least = SEVERITIES.index(severity)
        return tuple(one for one in self.findings if SEVERITIES.index(one.severity) >= least)

    @property
    def verdict(self) -> tuple[str, ...]:
        """Three plain sentences: what was examined, what is wrong, what kappa can be trusted.

        >>> Diagnosis("nothing").verdict
        ('Nothing could be examined.',)
        """
        if not self.analysed:
            return ("Nothing could be examined.",)
        return self._extent, self._health, self._trust

    @property
    def _extent(self) -> str:
        tensors = sum(row.part_of is None for row in self.analysed)
        parts = len(self.analysed) - tensors
        split = f" and {plural(parts, 'part')} of them" if parts else ""
        lost = len(self.failed) - len(self.unbuilt)
        failed = f"; {lost} could not be examined" if lost else ""
        if many := len(self.unbuilt):
            objects = plural(many, "object of another class was", "objects of other classes were")
            failed += f"; {objects} not built"
        were = "was" if tensors == 1 and not parts else "were"
        return f"{plural(tensors, 'matrix', 'matrices')}{split} {were} examined{failed}."

    @property
    def _health(self) -> str:
        if not self.above("warning"):
            return f"No rule found anything wrong{f' ({self.tally})' if self.findings else ''}."
        return f"Findings: {self.ills}"

    @property
    def ills(self) -> str:
        """How much was found, and the worst of it.

        >>> from kappascope.weights.reasons import NonFinite
        >>> bad = Skipped("b", NonFinite("non-finite (1 of 2)"))
        >>> Diagnosis("toy.pt", unsound=(bad,)).ills
        '1 critical; the worst is non-finite in b.'
        """
        if not self.findings:
            return "none."
        worst = self.findings[0]
        return f"{self.tally}; the worst is {worst.rule} in {worst.subject}."

    @property
    def tally(self) -> str:
        """Findings by severity, in words."""
        return glance.tally(Counter(one.severity for one in self.findings))

    @property
    def _trust(self) -> str:
        known = [row for row in self.analysed if row.resolved]
        without = sum(row.condition_number_low is None for row in self.analysed if not row.resolved)
        bounded = len(self.analysed) - len(known) - without
        text = f"The storage precision resolves κ of {len(known)} of {len(self.analysed)}"
        if not known:
            return f"{text}."
        worst = max(known, key=lambda row: row.condition_number or 0.0)
        largest = f"the largest of these is {number(worst.condition_number)} ({worst.name})"
        less = {"only bounds of it": bounded, "none": without}
        have = "matrix has", "matrices have"
        rest = [f"{plural(many, *have)} {what}." for what, many in less.items() if many]
        return " ".join((f"{text}; {largest}.", *rest))

    def document(self, plots: bool = False) -> dict[str, Any]:
        """All of it as strict JSON values; infinite or unknown is ``None`` with a reason beside it.

        >>> Diagnosis("nothing").document()["summary"]["analysed"]
        0
        """
        own = _by_subject(self.findings)
        return {
            "schema": SCHEMA,
            "source": self.source,
            "reference": self.reference,
            "matrices": [
                _row(row, plots) | {"findings": own.get(row.name, [])} for row in self.matrices
            ],
            "products": [_product(one) for one in self.products],
            "chains": [_chain(one) for one in self.chains],
            "findings": [asdict(one) for one in self.findings],
            "skipped": [{"name": one.name, "reason": one.reason} for one in self.skipped],
            "failed": [{"name": one.name, "reason": one.reason} for one in self.failed],
            "summary": self.summary,
            "provenance": {
                **store.environment(),
                "dtype": "float64",  # whatever the matrices are stored in
                **self.settings,
                "notes": list(self.notes),
            },
        }

    @property
    def summary(self) -> dict[str, Any]:
        """Counts and the verdict."""
        counts = Counter(one.severity for one in self.findings)
        return {
            "matrices": len(self.matrices),
            "analysed": len(self.analysed),
            "failed": len(self.failed),
            "skipped": len(self.skipped),
            "by_severity": {severity: counts[severity] for severity in SEVERITIES},
            "verdict": "\n".join(self.verdict),
        }

    def html(self) -> str:
        """The page that ``kappascope diagnose --html`` writes.

        >>> Diagnosis("nothing").html().splitlines()[0]
        '<!doctype html>'
        """
        from kappascope.clinic.page import page  # and with it the templates, seldom wanted

        return page(self.document(plots=True))

    def table(self) -> pa.Table:
        """One row per matrix, one column per number, for Parquet or CSV.

        >>> Diagnosis("nothing").table().num_rows
        0
        """
        own = {row.matrix["name"]: _told(row) for row in self.ranked}
        rows = [_flat(_row(row, plots=False)) | own[row.name] for row in self.matrices]
        names = list(dict.fromkeys(name for row in rows for name in row)) or ["name"]
        return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _told(row: glance.Row) -> dict[str, Any]:
    """The gravest severity and the rules that spoke, as a table has them."""
    rules = (one["rule"] for one in row.matrix["findings"])
    return {"severity": row.severity or None, "findings": "; ".join(rules)}


def finite(value: Any) -> Any:
    """The same with ``None`` for what JSON cannot say.

    >>> finite({"kappa": math.inf, "values": (1.0, math.nan)})
    {'kappa': None, 'values': [1.0, None]}
    """
    if isinstance(value, Mapping):
        return {str(name): finite(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _by_subject(found: Iterable[Finding]) -> dict[str, list[dict[str, Any]]]:
    own: dict[str, list[dict[str, Any]]] = {}
    for one in found:
        own.setdefault(one.subject, []).append(asdict(one))
    return own


def _row(row: Examination, plots: bool) -> dict[str, Any]:
    told = asdict(row)
    if not plots:
        del told["plot"]
    if row.errors is None and "errors" not in row.reasons:
        del told["errors"]
    plain: dict[str, Any] = finite(told)
    return plain


def _product(one: Product) -> dict[str, Any]:
    """Without the list of its values; what follows from it instead."""
    told: dict[str, Any] = finite({"name": one.name} | asdict(one) | {"reasons": {}})
    values = told.pop("values")
    del told["layer"]
    told |= {"sigma_max": None, "sigma_min": None, "stable_rank": None}
    if values:
        told |= {"sigma_max": values[0], "sigma_min": values[-1]}
    if values and values[0]:
        told["stable_rank"] = sum((value / values[0]) ** 2 for value in values)
    derived = "condition_number", "sigma_max", "sigma_min", "stable_rank"
    why = Status(one.status).reason
    told["reasons"] = {name: why for name in derived if told[name] is None}
    return told


def _chain(one: Chain) -> dict[str, Any]:
    reasons = {}
    if one.condition_number is None or math.isinf(one.condition_number):
        reasons["condition_number"] = Status(one.status).reason
    if one.bound is None or math.isinf(one.bound):
        reasons["bound"] = "kappa of a layer is not finite"
    told: dict[str, Any] = finite(asdict(one) | {"reasons": reasons})
    return told


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """Without nests: ``row_norms.cv`` for a number in one, text for a list."""
    flat: dict[str, Any] = {}
    for name, value in row.items():
        if name in ("row_norms", "column_norms", "effective_ranks", "errors"):
            flat |= {f"{name}.{key}": one for key, one in (value or {}).items()}
        elif name == "reasons":
            flat[name] = "; ".join(f"{key}: {why}" for key, why in value.items())
        elif name == "shape":
            flat["rows"], flat["columns"] = value
        else:
            flat[name] = value
    return flat


def spreadsheet(table: pa.Table) -> bytes:
    """CSV in which no name is taken for a formula.

    >>> print(spreadsheet(pa.table({"name": ["=1+1"]})).decode().splitlines()[1])
    "'=1+1"
    """
    from pyarrow import csv

    columns = {}
    for name in table.column_names:
        column = table[name]
        if pa.types.is_string(column.type):
            safe = [
                v if v is None or not v.startswith(tuple(LEADING)) else f"'{v}"
                for v in column.to_pylist()
            ]
            column = pa.array(safe, pa.string())
        columns[name] = column
    sink = pa.BufferOutputStream()
    csv.write_csv(pa.table(columns), sink)
    return bytes(sink.getvalue())


def document(found: Sequence[Diagnosis], plots: bool = False) -> dict[str, Any]:
    """The document of one diagnosis, or of the last of several with the way that led to it.

    >>> document([Diagnosis("a"), Diagnosis("b")])["trajectory"][0]["source"]
    'a'
    """
    last = found[-1].document(plots)
    if len(found) > 1:
        last["trajectory"] = [_step(one) for one in found]
        last["summary"]["verdict"] = "\n".join((*found[-1].verdict, *before(found)))
    return last


def before(found: Sequence[Diagnosis]) -> Iterator[str]:
    """What is wrong with the steps before the last, which the verdict on that does not tell.

    >>> from kappascope.weights.reasons import NonFinite
    >>> bad = Skipped("fc.bias", NonFinite("non-finite (1 of 2), first at [0]"))
    >>> list(before([Diagnosis("1.pt", unsound=(bad,)), Diagnosis("2.pt")]))
    ['Before the last, in 1.pt: 1 critical; the worst is non-finite in fc.bias.']
    """
    for one in found[:-1]:
        if one.above("warning"):
            yield f"Before the last, in {one.source}: {one.ills}"


def _step(one: Diagnosis) -> dict[str, Any]:
    whole = one.document()
    told = ("source", "reference", "matrices", "findings", "failed", "summary")
    return {name: whole[name] for name in told}


def joined(found: Sequence[Diagnosis]) -> pa.Table:
    """The tables of several diagnoses, each row with its source.

    >>> joined([Diagnosis("a")]).column_names
    ['source', 'name']
    """
    tables = [
        one.table().add_column(0, "source", pa.array([one.source] * len(one.matrices), pa.string()))
        for one in found
    ]
    return pa.concat_tables(tables, promote_options="permissive")
