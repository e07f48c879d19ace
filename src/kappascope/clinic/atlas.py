"""What trained matrices are like: quantiles of each quantity by kind and shape, over checkpoints.

A clinic compares with healthy people, and not only with chance. An atlas is made by
``kappascope survey`` from any checkpoints; a small one, of openly licensed ones, is in the package
with where each came from. Of n matrices no percentile beyond 1 - 1/n is told.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files as resources
from pathlib import Path
from typing import Any

import numpy as np
from scipy.special import stdtrit

from kappascope.clinic.examination import Examination
from kappascope.model.attention import Product
from kappascope.refusal import Refusal
from kappascope.text import plural
from kappascope.theory import GaussianNull

ATLAS_SCHEMA = "kappascope.atlas/1"
PROBABILITIES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
# Matrices of a kind, and models that they come from: below that an atlas says what it has, and
# rules do not use it, for one model's layers are no population.
MIN_TRAINED, MIN_MODELS = 8, 3
SQUARE_UP_TO = 1.5  # times as many rows as columns, or columns as rows
MAX_ATLAS_BYTES = 2**26  # a table of numbers has far fewer


def _over_median(spread: Any) -> float | None:
    return spread.max / spread.median if spread is not None and spread.median else None


QUANTITIES: dict[str, Callable[[Examination], float | None]] = {
    "kappa_over_chance": lambda row: None if row.is_bounded else row.ratio,
    "longest_row_over_median": lambda row: _over_median(row.row_norms),
    "longest_column_over_median": lambda row: _over_median(row.column_norms),
    "row_norm_cv": lambda row: row.row_norms.cv if row.row_norms else None,
    "column_norm_cv": lambda row: row.column_norms.cv if row.column_norms else None,
    "stable_rank_share": lambda row: row.stable_rank and row.stable_rank / min(row.shape),
    "rank_share_at_0.99_energy": lambda row: (
        rank / min(row.shape) if (rank := row.energy_ranks.get("0.99")) else None
    ),
    "entry_kurtosis": lambda row: row.entry_kurtosis,
    "alpha": lambda row: row.alpha,
    "int8_error": lambda row: row.int8.row_scale if row.int8 else None,
    "bits_lost_to_columns": lambda row: row.int8.bits_lost_by_rows if row.int8 else None,
}
PRODUCT_QUANTITY = "kappa_over_random_factors"


def shape_class(shape: Sequence[int]) -> str:
    """Return whether a matrix is about square, tall or wide.

    >>> shape_class((384, 384)), shape_class((30522, 384)), shape_class((384, 1536))
    ('square', 'tall', 'wide')
    """
    rows, columns = shape
    if max(rows, columns) <= SQUARE_UP_TO * min(rows, columns):
        return "square"
    return "tall" if rows > columns else "wide"


@dataclass(frozen=True)
class TrainedRange:
    """The values that a quantity has in n trained matrices of some models."""

    n: int
    models: int
    smallest: float
    largest: float
    quantiles: Mapping[str, float] = field(default_factory=dict)
    largest_of_models: tuple[float, ...] = ()  # of each model its largest; older files lack them

    @property
    def is_telling(self) -> bool:
        """Whether there are enough matrices, of enough models, to be compared with."""
        return self.n >= MIN_TRAINED and self.models >= MIN_MODELS

    def limit(self, chance: float) -> float:
        """Return what the largest value of one more model exceeds with this chance.

        The matrices of one model are alike, so that models count and not matrices: of three, a
        fourth is the largest one time in four. The largest values of models are taken to have
        normal logarithms, of which Student's law tells where another lies. Without them there is
        none.

        >>> TrainedRange(9, 3, 1.0, 4.0, {}, (1.0, 2.0, 4.0)).limit(0.05)
        20.7...
        """
        logs = np.log([value for value in self.largest_of_models if value > 0])
        if len(logs) < 2:
            return math.inf
        spread = float(logs.std(ddof=1)) * math.sqrt(1 + 1 / len(logs))
        return math.exp(min(float(logs.mean() + stdtrit(len(logs) - 1, 1 - chance) * spread), 700))

    @classmethod
    def of(cls, by_model: Mapping[str, Sequence[float]]) -> TrainedRange:
        """Summarize the values of some models, with no percentile beyond what their number tells.

        >>> TrainedRange.of({"a": [1.0, 2.0], "b": [3.0, 4.0]}).quantiles
        {'0.25': 1.75, '0.5': 2.5, '0.75': 3.25}
        """
        values = [value for own in by_model.values() for value in own]
        n = len(values)
        known = [p for p in PROBABILITIES if 1 / n <= p <= 1 - 1 / n]
        quantiles = np.quantile(np.asarray(values), known).tolist() if known else []
        told = {str(p): float(q) for p, q in zip(known, quantiles, strict=True)}
        largest = tuple(sorted(max(own) for own in by_model.values()))
        return cls(n, len(by_model), min(values), max(values), told, largest)


@dataclass(frozen=True)
class Atlas:
    """Ranges by kind, shape and quantity, and the checkpoints that they come from."""

    ranges: Mapping[tuple[str, str, str], TrainedRange]
    sources: tuple[Mapping[str, Any], ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def range(self, kind: str, shape: Sequence[int], quantity: str) -> TrainedRange | None:
        """Return what trained matrices of a kind and shape have, if there are enough of them.

        >>> Atlas({}).range("key", (4, 4), "alpha") is None
        True
        """
        found = self.ranges.get((kind, shape_class(shape), quantity))
        return found if found is not None and found.is_telling else None

    def document(self) -> dict[str, Any]:
        """Return the atlas as strict JSON values.

        >>> Atlas({}).document()["ranges"]
        []
        """
        rows = [
            {"kind": kind, "shape": shape, "quantity": quantity, **asdict(found)}
            for (kind, shape, quantity), found in sorted(self.ranges.items())
        ]
        return {
            "schema": ATLAS_SCHEMA,
            "sources": [dict(source) for source in self.sources],
            "provenance": dict(self.provenance),
            "ranges": rows,
        }

    @classmethod
    def of_document(cls, document: Any, named: str) -> Atlas:
        """Read an atlas out of JSON values; a `Refusal` says what is wrong with them."""
        advice = "give a file that `kappascope survey --atlas` wrote"
        try:
            if document["schema"] != ATLAS_SCHEMA:
                raise Refusal(2, named, f"has schema {document['schema']!r}", advice)
            ranges = {
                (str(row["kind"]), str(row["shape"]), str(row["quantity"])): TrainedRange(
                    int(row["n"]),
                    int(row["models"]),
                    float(row["smallest"]),
                    float(row["largest"]),
                    {str(p): float(q) for p, q in row["quantiles"].items()},
                    tuple(float(value) for value in row.get("largest_of_models", ())),
                )
                for row in document["ranges"]
            }
            return cls(ranges, tuple(document["sources"]), dict(document["provenance"]))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refusal(2, named, f"is no atlas: {error}", advice) from error

    @classmethod
    def read(cls, path: str | Path) -> Atlas:
        """Read the atlas in a file."""
        advice = "give a file that `kappascope survey --atlas` wrote"
        try:
            with Path(path).open("rb") as file:
                data = file.read(MAX_ATLAS_BYTES + 1)
        except OSError as error:
            wrong = error.strerror or type(error).__name__
            raise Refusal(2, str(path), wrong, advice) from error
        if len(data) > MAX_ATLAS_BYTES:
            raise Refusal(2, str(path), "is too large for an atlas", advice)
        try:
            document = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise Refusal(2, str(path), f"is no JSON: {error}", advice) from error
        return cls.of_document(document, str(path))

    @classmethod
    def packaged(cls) -> Atlas:
        """Return the small atlas of the package."""
        return _packaged()


@cache
def _packaged() -> Atlas:
    text = resources("kappascope.clinic").joinpath("atlas.json").read_text(encoding="utf-8")
    return Atlas.of_document(json.loads(text), "the atlas of the package")


def atlas_of(
    models: Iterable[tuple[str, Sequence[Examination], Sequence[Product]]],
    sources: Sequence[Mapping[str, Any]] = (),
    provenance: Mapping[str, Any] | None = None,
) -> Atlas:
    """Gather the quantities of the matrices of several models, given by name.

    >>> rows = [Examination("w", (4, 4), "float32", "ok", entry_kurtosis=k) for k in (0.5, 1.5)]
    >>> found = atlas_of([("a", rows, ())])
    >>> found.ranges["other", "square", "entry_kurtosis"].largest
    1.5
    """
    values: dict[tuple[str, str, str], dict[str, list[float]]] = {}

    def add(name: str, kind: str, shape: Sequence[int], quantity: str, value: Any) -> None:
        if value is not None and math.isfinite(value):
            key = kind, shape_class(shape), quantity
            values.setdefault(key, {}).setdefault(name, []).append(float(value))

    for name, rows, products in models:
        for row in rows:
            for quantity, measure in QUANTITIES.items():
                add(name, row.kind, row.shape, quantity, measure(row))
        for product in products:
            times = times_random_factors(product)
            add(name, product.kind, product.shape, PRODUCT_QUANTITY, times)
    ranges = {key: TrainedRange.of(known) for key, known in values.items()}
    return Atlas(ranges, tuple(sources), provenance or {})


def times_random_factors(product: Product) -> float | None:
    """Return kappa of a head's product over the usual kappas of its two factors.

    None where kappa is not finite, or the head has no more than one row.
    """
    kappa, rank = product.condition_number, len(product.values)
    if kappa is None or math.isinf(kappa) or rank < 2:
        return None
    nulls = [GaussianNull(rank, width) for width in product.shape]
    return float(math.exp(math.log(kappa) - sum(null.log_condition_number for null in nulls)))


def beyond_trained(found: TrainedRange, kind: str) -> str:
    """Say that a value is larger than in all trained matrices, and how many those are.

    >>> beyond_trained(TrainedRange(24, 4, 0.0, 1.0), "key")
    'larger than in all 24 trained matrices of kind key in 4 models'
    """
    models = plural(found.models, "model")
    return f"larger than in all {found.n} trained matrices of kind {kind} in {models}"
