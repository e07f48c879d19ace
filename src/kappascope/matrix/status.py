"""How a measurement ended: an outcome that code goes by, and text that people read."""

from __future__ import annotations

from enum import Enum
from typing import final


class Outcome(Enum):
    """The four ways in which a measurement can end.

    >>> Outcome.FAILED.value
    'failed'
    """

    OK = "ok"
    DEGENERATE = "degenerate"  # measured, but some numbers are undefined
    SKIPPED = "skipped"  # left out on purpose
    FAILED = "failed"


@final
class Status(str):
    """The text of an outcome and its detail; no code takes that text apart.

    >>> status = Status(Outcome.DEGENERATE, "zero matrix")
    >>> status, status.outcome.name, status.detail
    ('degenerate: zero matrix', 'DEGENERATE', 'zero matrix')
    """

    __slots__ = ("detail", "outcome")

    outcome: Outcome
    detail: str

    def __new__(cls, outcome: Outcome, detail: str = "") -> Status:
        """Join the two to one text."""
        status = super().__new__(cls, f"{outcome.value}: {detail}" if detail else outcome.value)
        status.outcome, status.detail = outcome, detail
        return status

    def __getnewargs__(self) -> tuple[Outcome, str]:  # type: ignore[override]
        return self.outcome, self.detail

    @property
    def reason(self) -> str:
        """Why something is absent: the detail, or the outcome where there is none.

        >>> Status(Outcome.OK).reason
        'ok'
        """
        return self.detail or self.outcome.value


OK = Status(Outcome.OK)
