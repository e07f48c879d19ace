"""Keep the rows of what was examined: a diagnosis that was stopped goes on where it was.

Rows are kept as JSON of typed records, which is read without running anything. What they depend on
(the files as they were, the task, the code, the processor) is in the name of their file, so that
rows of something else are never taken for these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any, TypeVar, final

from kappascope.clinic.examination import Examination, Finding, Spread
from kappascope.clinic.moments import SwallowedStep
from kappascope.matrix.deltas import Delta
from kappascope.matrix.fingerprints import Fingerprints
from kappascope.matrix.rounding import Int8Errors
from kappascope.matrix.status import Outcome, Status
from kappascope.model.attention import Product
from kappascope.model.chains import Chain
from kappascope.model.logits import LogitBound
from kappascope.model.skipped import Reason, ReasonKind
from kappascope.system.files import FileDigest
from kappascope.system.store import Store
from kappascope.system.workers import Done, Engine
from kappascope.theory.beyond import PartComparison

T = TypeVar("T")
RECORDS: dict[str, Callable[..., Any]] = {
    record.__name__: record
    for record in (Examination, Product, Chain, LogitBound, SwallowedStep, FileDigest, Spread,
                   Finding, Int8Errors, Fingerprints, PartComparison, Delta)
}  # fmt: skip


def rows_bytes(rows: Sequence[Any]) -> bytes:
    """Return rows as they are kept.

    >>> rows_bytes([Spread(1.0, 2.0, 3.0, None)])
    b'[{"Spread": {"min": 1.0, "median": 2.0, "max": 3.0, "cv": null}}]'
    """
    return json.dumps([_plain(row) for row in rows]).encode()


def kept_rows_of(body: bytes) -> list[Any]:
    """Return the rows that :func:`rows_bytes` was given; a ValueError for anything else.

    >>> kept_rows_of(rows_bytes([Spread(1.0, 2.0, 3.0, None)]))
    [Spread(min=1.0, median=2.0, max=3.0, cv=None)]
    """
    try:
        kept = json.loads(body)
        if not isinstance(kept, list):
            raise ValueError("no list of rows")
        return [_whole(row) for row in kept]
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"no rows: {error}") from error


def _plain(value: Any) -> Any:
    """Return a value in the types of JSON; an object of one name says what the type was."""
    kind, held = type(value).__name__, value
    match value:
        case Status():
            held = [value.outcome.name, value.detail]
        case Reason():
            held = [value.kind.name, value.text]
        case Mapping():
            kind, held = "map", [[name, _plain(item)] for name, item in value.items()]
        case tuple() | list():
            held = [_plain(item) for item in value]
        case None | bool() | int() | float() | str():
            return value
        case _ if kind in RECORDS:
            held = {each.name: _plain(getattr(value, each.name)) for each in fields(value)}
        case _:
            raise TypeError(f"a row holds a {kind}, which is not kept")
    return {kind: held}


def _whole(value: Any) -> Any:
    """Return the value that :func:`_plain` was given."""
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    match kind:
        case "Status":
            whole: Any = Status(Outcome[held[0]], held[1])
        case "Reason":
            whole = Reason(ReasonKind[held[0]], held[1])
        case "map":
            whole = {name: _whole(item) for name, item in held}
        case "tuple" | "list":
            items = [_whole(item) for item in held]
            whole = tuple(items) if kind == "tuple" else items
        case _:
            whole = RECORDS[kind](**{name: _whole(item) for name, item in held.items()})
    return whole


@final
@dataclass(frozen=True)
class Keeping:
    """An engine that keeps what its items gave, and gives what was kept without doing it again.

    ``name`` is that of an item's file; ``tell`` takes a line about what could not be used.
    """

    engine: Engine
    store: Store
    name: Callable[[Any], str]
    tell: Callable[[str], None]

    def run(self, work: Callable[[T], object], items: Sequence[T]) -> Generator[Done[T]]:
        """Yield every item once: first those that were done before."""
        todo = []
        for item in items:
            rows = self._kept(self.name(item))
            if rows is None:
                todo.append(item)
            else:
                yield Done(item, result=rows)
        with closing(self.engine.run(work, todo)) as ended:
            for done in ended:
                if not done.failure:
                    self.store.put(self.name(done.item), rows_bytes(done.result))
                yield done

    def _kept(self, name: str) -> list[Any] | None:
        """Return the rows that are kept under a name; a file without rows is told of."""
        body = self.store.take(name)
        try:
            return None if body is None else kept_rows_of(body)
        except ValueError:  # sealed, and yet not ours
            self.tell(f"{self.store}: {name} holds no rows and is done again")
            return None
