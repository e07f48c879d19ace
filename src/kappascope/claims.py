"""The paper's figures and sentences, and what measurement says of them.

Two questions are kept apart. A :class:`Printed` figure asks whether the recovered protocol gives
the number the paper prints (:func:`check`); a :class:`Claim` asks whether a sentence is true
(:func:`judge`), by a measure and an expectation that are fixed before the rows are seen.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from decimal import Decimal
from typing import Any, Literal, final

import numpy as np

from kappascope.statistics import TAIL, Estimate, Table, tail_index

Outcome = Literal["holds", "fails", "undecided", "ill-posed"]
Measure = Callable[[Table], Estimate]
Interval = tuple[float | None, float | None]

CLOSE = 0.001  # rounding alone moves an extreme kappa by this much (13,167 against 13,170)
TO_ITS_DIGITS, NEARLY = "to its digits", "within 0.1 %"


class Expectation(ABC):
    """Where a claim says its quantity lies.

    The claim **holds** if the 95 % interval of the measured quantity lies wholly where it is
    expected, **fails** if it lies wholly elsewhere, and is **undecided** if it straddles a bound
    or does not exist (too few trials). The point estimate decides nothing.
    """

    def decide(self, estimate: Estimate) -> Outcome:
        """What the interval says.

        >>> Above(1).decide(Estimate(3.0, 1.2, 9.0, 30, "ratio"))
        'holds'
        >>> Above(1).decide(Estimate(3.0, 0.8, 9.0, 30, "ratio"))
        'undecided'
        """
        if estimate.interval is None:
            return "undecided"
        if self.encloses(*estimate.interval):
            return "holds"
        return "undecided" if self.meets(*estimate.interval) else "fails"

    @abstractmethod
    def encloses(self, low: float, high: float) -> bool:
        """Whether all of the interval is as expected."""

    @abstractmethod
    def meets(self, low: float, high: float) -> bool:
        """Whether some of the interval is as expected."""


@final
@dataclass(frozen=True)
class Above(Expectation):
    """Strictly above a bound.

    >>> Above(0.5).encloses(0.6, 0.9), Above(0.5).meets(0.1, 0.5)
    (True, False)
    """

    bound: float

    def encloses(self, low: float, high: float) -> bool:
        """Whether even the lower end is above."""
        return low > self.bound

    def meets(self, low: float, high: float) -> bool:
        """Whether the upper end is above."""
        return high > self.bound


@final
@dataclass(frozen=True)
class Below(Expectation):
    """Strictly below a bound.

    >>> Below(0.5).encloses(0.1, 0.4), Below(0.5).meets(0.5, 0.9)
    (True, False)
    """

    bound: float

    def encloses(self, low: float, high: float) -> bool:
        """Whether even the upper end is below."""
        return high < self.bound

    def meets(self, low: float, high: float) -> bool:
        """Whether the lower end is below."""
        return low < self.bound


@final
@dataclass(frozen=True)
class Between(Expectation):
    """From ``low`` to ``high``, ends included.

    >>> Between(0.12, 0.14).encloses(0.131, 0.135), Between(0.12, 0.14).meets(0.14, 0.2)
    (True, True)
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"expected low <= high, got Between({self.low}, {self.high})")

    def encloses(self, low: float, high: float) -> bool:
        """Whether neither end sticks out."""
        return self.low <= low and high <= self.high

    def meets(self, low: float, high: float) -> bool:
        """Whether the two ranges have a point in common."""
        return low <= self.high and high >= self.low


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper with the formula that decides it.

    Several measures, each with its expectation, make a compound claim: it holds if all parts
    hold, fails if one fails, and is undecided otherwise. Its figures are those of the part that
    decides: the first that fails, else the first undecided, else the first. (All parts holding is
    as safe as one; of m parts, one fails by chance up to m times as often as a single claim.)

    ``explain`` is one sentence a reader can check: a format string in which ``{0}``, ``{1}``, ...
    are the estimates (``{0:.2g}`` with interval, ``{0.value:.2f}``, ``{0.n}``) and ``{verdict}``
    the outcome, or a function of the estimates and the outcome. The measures of ``also`` follow
    the others there; they are told and decide nothing. ``presumes`` gives the reason why the
    quantity does not exist, if it does not; the claim is then ill-posed.

    >>> claim = Claim(
    ...     "e4.multipliers-norms", "multipliers cut the norm error by two thirds", "4.4",
    ...     measure=lambda table: Estimate(0.33, 0.32, 0.34, 300, "median paired ratio"),
    ...     expect=Between(0.31, 0.35), explain="Of the norm error {0:.2f} is left.",
    ... )
    >>> judge(claim, Table.of([])).verdict
    'holds'
    """

    id: str
    sentence: str
    source: str
    measure: Measure | tuple[Measure, ...]
    expect: Expectation | tuple[Expectation, ...]
    explain: str | Callable[..., str]
    presumes: Callable[[Table], str | None] | None = None
    also: tuple[Measure, ...] = ()

    def __post_init__(self) -> None:
        if len(_tuple(self.measure)) != len(_tuple(self.expect)):
            raise ValueError(
                f"{self.id} has {len(_tuple(self.measure))} measures and "
                f"{len(_tuple(self.expect))} expectations; give every measure its own"
            )

    @property
    def experiment(self) -> str:
        """The experiment the claim belongs to, the first part of its id."""
        return self.id.split(".")[0]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim; ``asdict`` of it is strict JSON.

    An end of the interval that is ``None`` is open; a ``measured`` of ``None`` is explained.

    >>> Verdict("e1.x", "e1", "x", "4.1", "holds", 0.1, (0.1, None), 9, "So it is.").record["n"]
    9
    """

    id: str
    experiment: str
    sentence: str
    source: str
    verdict: Outcome
    measured: float | None
    interval: Interval | None
    n: int
    explanation: str

    @property
    def record(self) -> dict[str, Any]:
        """The verdict as ``verdicts.json`` keeps it."""
        return asdict(self)


def judge(claim: Claim, table: Table) -> Verdict:
    """Measure, compare with what is expected, explain.

    >>> from kappascope.statistics import median
    >>> rows = Table.of({"seed": k, "error": 0.13 + k / 10_000} for k in range(15))
    >>> verdict = judge(
    ...     Claim("e1.norms-flat", "norm errors are about 0.13", "4.1",
    ...           lambda table: median(table.values()), Between(0.12, 0.14),
    ...           "The median is {0:.4f}, n = {0.n}."),
    ...     rows,
    ... )
    >>> verdict.verdict, verdict.explanation
    ('holds', 'The median is 0.1307 [0.1303, 0.1311], n = 15.')
    """
    estimates = tuple(measure(table) for measure in _tuple(claim.measure))
    pairs = zip(_tuple(claim.expect), estimates, strict=True)
    outcomes: list[Outcome] = [expect.decide(estimate) for expect, estimate in pairs]
    weakest: Outcome = min(outcomes, key=("fails", "undecided", "holds").index)
    deciding = estimates[outcomes.index(weakest)]
    absent = claim.presumes(table) if claim.presumes else None
    verdict: Outcome = "ill-posed" if absent else weakest
    told = (*estimates, *(measure(table) for measure in claim.also))
    return Verdict(
        claim.id,
        claim.experiment,
        claim.sentence,
        claim.source,
        verdict,
        _number(deciding.value),
        _ends(deciding.interval),
        deciding.n,
        " ".join(dict.fromkeys(_sentences(claim, told, verdict, absent))),  # each said once
    )


def _sentences(
    claim: Claim, estimates: tuple[Estimate, ...], verdict: Outcome, absent: str | None
) -> Iterable[str]:
    """The reason why there is nothing to measure, the explanation, and what it left out."""
    if absent:
        yield absent
    if isinstance(claim.explain, str):
        yield claim.explain.format(*estimates, verdict=verdict)
    else:
        yield claim.explain(*estimates, verdict)
    for estimate in estimates[: len(_tuple(claim.measure))]:
        if verdict == "undecided" and estimate.interval is None:
            yield f"No interval for the {estimate.what}: {estimate.reason}."
        if estimate.missing:
            missing = f"{estimate.missing} missing value{'s' * (estimate.missing > 1)}"
            yield f"The {estimate.what} leaves out {missing}."


def no_mean(theory: str, column: str = "error", **where: Any) -> Callable[[Table], str | None]:
    """For ``presumes``: the rows ``where`` selects have no mean, ``theory`` says why.

    Theory decides, the rows may only contradict: the reason is given if there are at least 500
    of them and the interval of their tail index admits 1 or less. With fewer, or if the interval
    lies above 1, nothing is said and the claim is judged by its measure.

    >>> heavy = Table.of({"seed": k, "error": 1000 / (k + 0.5)} for k in range(1000))
    >>> no_mean("sigma_min has a positive density at 0.")(heavy)
    'sigma_min has a positive density at 0. The tail index is 0.998 [0.762, 1.6] (n = 1000); a mean needs more than 1.'
    >>> no_mean("sigma_min has a positive density at 0.")(heavy.where(seed=range(400)))
    """  # noqa: E501 - one sentence is one line of output

    def presumes(table: Table) -> str | None:
        index = tail_index(table.where(**where).values(column))
        if index.n < TAIL or index.low is None or index.low > 1:
            return None
        return f"{theory} The tail index is {index:.3g} (n = {index.n}); a mean needs more than 1."

    return presumes


@dataclass(frozen=True)
class Printed:
    """A figure as the paper prints it, and how to measure it.

    ``measure`` gives the number in the printed unit (66.8 for "67 %", 653.2 for "653x"), for a
    range such as "0.03-0.13" all its numbers, of which the least and the greatest count.

    >>> Printed("e7/ratio", "depth 2", "653x", lambda table: 653.2).experiment
    'e7'
    """

    id: str
    what: str
    printed: str
    measure: Callable[[Table], Any]

    def __post_init__(self) -> None:
        ends(self.printed)

    @property
    def experiment(self) -> str:
        """The experiment the figure belongs to, the first part of its id."""
        return self.id.split("/")[0]


_NUMBER = r"[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+|\s*[×x]\s*10\^\{?[-−]?\d+\}?)?"
_PRINTED = re.compile(rf"[~≈]?\s*({_NUMBER})(?:\s*[-–]\s*({_NUMBER}))?\s*[%×x]?")


@dataclass(frozen=True)
class Digits:
    """A printed number and half a unit of its last digit.

    >>> ends("6.6e-5")[0].matches(6.62e-5), ends("13,167")[0].matches(13_170.2)
    ('to its digits', 'within 0.1 %')
    """

    value: float
    half: float

    def matches(self, measured: float) -> str | None:
        """How a measured number agrees with the printed one, if it does.

        "To its digits": it rounds to the printed number (a tie may go either way). "Within
        0.1 %": it does not, but rounding errors at an extreme kappa explain the difference.
        """
        distance = abs(measured - self.value)
        # 0.275 is a tie in print and a little more in binary
        if distance <= self.half * (1 + 1e-9) + math.ulp(self.value):
            return TO_ITS_DIGITS
        return NEARLY if distance <= CLOSE * abs(self.value) else None


def ends(printed: str) -> tuple[Digits, ...]:
    """The number a printed string shows, or both ends of its range.

    A unit (%, x) is not part of the number, and "~" excuses nothing: who prints ~0.13 has seen
    0.125 to 0.135.

    >>> [end.value for text in ("~0.13", "4.8e6", "6.6×10^{-5}", "67 %") for end in ends(text)]
    [0.13, 4800000.0, 6.6e-05, 67.0]
    >>> ends("1,000–1,600")
    (Digits(value=1000.0, half=0.5), Digits(value=1600.0, half=0.5))
    """
    match = _PRINTED.fullmatch(printed.strip())
    if not match:
        raise ValueError(
            f'expected one number as printed, such as "~0.13", "4.8e6", "67 %" or a range such as '
            f'"0.03-0.13"; got {printed!r} (mean and deviation are two figures)'
        )
    return tuple(_digits(number) for number in match.groups() if number)


def _digits(number: str) -> Digits:
    plain = re.sub(r"\s*[×x]\s*10\^\{?([-−]?\d+)\}?", r"e\1", number)
    exact = Decimal(plain.replace(",", "").replace("−", "-"))
    exponent = exact.as_tuple().exponent
    return Digits(float(exact), float(Decimal(5).scaleb(int(exponent) - 1)))


def check(printed: Printed, table: Table) -> dict[str, Any]:
    """Compare a printed figure with the measured one; the record ``verdicts.json`` keeps.

    ``measured`` is a number, a list of two for a range, or ``None`` where nothing finite was
    measured; ``agreement`` says how it agrees, or why not.

    >>> printed = Printed("e7/depth=3", "kappa error", "13,167", lambda table: 13166.75)
    >>> row = check(printed, Table.of([]))
    >>> row["measured"], row["matches"], row["agreement"]
    (13166.75, True, 'to its digits')
    """
    expected = ends(printed.printed)
    measured = _measured(printed.measure(table), len(expected))
    agreement = _agreement(expected, measured)
    return {
        "id": printed.id,
        "experiment": printed.experiment,
        "what": printed.what,
        "printed": printed.printed,
        "measured": measured if len(measured) > 1 else measured[0],
        "matches": agreement in (TO_ITS_DIGITS, NEARLY),
        "agreement": agreement,
    }


def _measured(found: Any, count: int) -> list[float | None]:
    """One number, or the least and the greatest of several where a range is printed."""
    numbers = np.ravel(found.value if isinstance(found, Estimate) else found)
    if count == 2 and numbers.size > 1:
        numbers = np.array([numbers.min(), numbers.max()])
    if numbers.size != count:
        raise ValueError(f"expected {count} measured for {count} printed, got {numbers.size}")
    return [_number(x) for x in numbers]


def _agreement(expected: tuple[Digits, ...], measured: list[float | None]) -> str:
    """How the end that agrees least agrees."""
    found = [m if m is None else e.matches(m) for e, m in zip(expected, measured, strict=True)]
    if None in measured:
        return "not measured"
    if None in found:
        return "differs"
    return TO_ITS_DIGITS if set(found) == {TO_ITS_DIGITS} else NEARLY


def _tuple(one_or_more: Any) -> tuple[Any, ...]:
    return one_or_more if isinstance(one_or_more, tuple) else (one_or_more,)


def _number(x: float) -> float | None:
    """JSON has no NaN and no infinity."""
    return float(x) if math.isfinite(x) else None


def _ends(interval: tuple[float, float] | None) -> Interval | None:
    return interval and (_number(interval[0]), _number(interval[1]))
