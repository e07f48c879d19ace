"""The paper's figures and sentences, and what measurement says of them.

Two questions are kept apart. A :class:`Printed` figure asks whether the recovered protocol gives
the number the paper prints (:func:`check`); a :class:`Claim` asks whether a sentence is true
(:func:`judge`), by a measure and an expectation that are fixed before the rows are seen, or marked
as :class:`Mended`. A sentence that quotes a mean which does not exist gets both answers: what the
printed number is worth, and what medians say of the sentence.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from decimal import Decimal
from string import Formatter
from typing import Any, Literal, final

import numpy as np

from kappascope.lab.statistics import LEVEL, TAIL, Ends, Estimate, tail_index
from kappascope.lab.table import Table

Outcome = Literal["holds", "fails", "undecided", "ill-posed"]
STRENGTH: tuple[Outcome, ...] = ("fails", "undecided", "holds")  # one that fails outweighs the rest
Measure = Callable[[Table], Estimate]
Interval = tuple[float | None, float | None]

ERROR_RATE = 1 - LEVEL
SMALLEST_P = 1e-12  # below it p is not told apart: no interval here is that exact
LEAST_SEEDS = 8  # of trained networks: with fewer, no interval without a distribution decides

CLOSE = 0.001  # rounding alone moves an extreme kappa by this much (13,167 against 13,170)
TO_ITS_DIGITS, NEARLY = "to its digits", "within 0.1 %"


class Expectation(ABC):
    """Where a claim says its quantity lies.

    The claim **holds** if the 95 % interval of the measured quantity lies wholly where it is
    expected, **fails** if it lies wholly elsewhere, and is **undecided** if it straddles a bound
    or does not exist (too few trials). The point estimate decides nothing.
    """

    def decide(self, estimate: Estimate, parts: int = 1) -> Outcome:
        """Decide by the interval alone.

        Of a claim with several ``parts``, each fails by an interval that is wider for their number
        (Bonferroni's), since one that fails is enough.

        >>> Above(1).decide(Estimate(3.0, 1.2, 9.0, 30, "ratio"))
        'holds'
        >>> Above(1).decide(Estimate(3.0, 0.8, 9.0, 30, "ratio"))
        'undecided'
        >>> near = Estimate(0.7, 0.5, 0.9, 30, "ratio")
        >>> Above(1).decide(near), Above(1).decide(near, parts=20)
        ('fails', 'undecided')
        """
        if estimate.interval is None:
            return "undecided"
        if self.encloses(*estimate.interval):
            return "holds"
        wider = estimate.interval if parts == 1 else estimate.interval_at(1 - ERROR_RATE / parts)
        return "undecided" if wider is None or self.meets(*wider) else "fails"

    def p_values(self, estimate: Estimate) -> tuple[float, float]:
        """Return the least error rates, one minus the level, at which it would hold and fail.

        >>> holds, fails = Above(1).p_values(Estimate(3.0, 1.2, 9.0, 30, "ratio"))
        >>> holds < 0.05, fails
        (True, 1.0)
        """
        return (
            _least_error_rate(estimate, lambda ends: self.encloses(*ends)),
            _least_error_rate(estimate, lambda ends: not self.meets(*ends)),
        )

    @abstractmethod
    def encloses(self, low: float, high: float) -> bool:
        """Tell whether all of the interval is as expected."""

    @abstractmethod
    def meets(self, low: float, high: float) -> bool:
        """Tell whether some of the interval is as expected."""


def _least_error_rate(estimate: Estimate, decided: Callable[[Ends], bool]) -> float:
    """Find, to a thousandth of itself, the least error rate whose interval is decided."""

    def decides(rate: float) -> bool:
        ends = estimate.interval_at(1 - rate)
        return ends is not None and decided(ends)

    low, high = math.log(SMALLEST_P), math.log(0.999)
    if decides(SMALLEST_P):
        return SMALLEST_P
    if not decides(math.exp(high)):
        return 1.0
    while high - low > 1e-3:
        middle = (low + high) / 2
        low, high = (low, middle) if decides(math.exp(middle)) else (middle, high)
    return math.exp(high)


@final
@dataclass(frozen=True)
class Above(Expectation):
    """Expects a quantity strictly above a bound."""

    bound: float

    def encloses(self, low: float, high: float) -> bool:
        """Tell whether even the lower end is above."""
        return low > self.bound

    def meets(self, low: float, high: float) -> bool:
        """Tell whether the upper end is above."""
        return high > self.bound


@final
@dataclass(frozen=True)
class Below(Expectation):
    """Expects a quantity strictly below a bound."""

    bound: float

    def encloses(self, low: float, high: float) -> bool:
        """Tell whether even the upper end is below."""
        return high < self.bound

    def meets(self, low: float, high: float) -> bool:
        """Tell whether the lower end is below."""
        return low < self.bound


@final
@dataclass(frozen=True)
class Between(Expectation):
    """Expects a quantity from ``low`` to ``high``, ends included."""

    low: float
    high: float

    def __post_init__(self) -> None:
        if not self.low <= self.high:
            raise ValueError(f"expected low <= high, got Between({self.low}, {self.high})")

    def encloses(self, low: float, high: float) -> bool:
        """Tell whether neither end sticks out."""
        return self.low <= low and high <= self.high

    def meets(self, low: float, high: float) -> bool:
        """Tell whether the two ranges have a point in common."""
        return low <= self.high and high >= self.low


class Estimates(dict[Any, Estimate]):
    """The estimates of a family of measures, by key, as an explanation writes them.

    ``{gaps:.2g}`` lists every estimate with its key after it, ``{gaps.names_first:.2g}`` with its
    key before it, ``{gaps.span:.2g}`` gives the least and the greatest value, ``{gaps[64]:.2g}``
    one estimate, and ``{gaps.n}`` how many values the estimates are made of.

    >>> gaps = Estimates({
    ...     "at d = 32": Estimate(0.03, 0.02, 0.05, 7, "median"),
    ...     "at d = 64": Estimate(0.04, 0.03, 0.06, 9, "median"),
    ... })
    >>> "The medians are {gaps:.1g} (n = {gaps.n}).".format(gaps=gaps)
    'The medians are 0.03 [0.02, 0.05] at d = 32, 0.04 [0.03, 0.06] at d = 64 (n = 7 to 9).'
    >>> "{gaps.span:.1g}".format(gaps=gaps), "{gaps[at d = 64].value}".format(gaps=gaps)
    ('0.03 to 0.04', '0.04')
    """

    def __format__(self, spec: str) -> str:
        return ", ".join(f"{estimate:{spec}} {key}" for key, estimate in self.items())

    @property
    def names_first(self) -> _NamesFirst:
        """The list with every key before its estimate."""
        return _NamesFirst(self)

    @property
    def span(self) -> _Span:
        """The least and the greatest value, without intervals."""
        values = [estimate.value for estimate in self.values()]
        return _Span(min(values), max(values))

    @property
    def n(self) -> str:
        """The number of values behind each estimate, as a range where it differs."""
        counts = sorted({estimate.n for estimate in self.values()})
        return f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


@dataclass(frozen=True)
class _NamesFirst:
    """A list of estimates that is formatted with names before numbers."""

    estimates: Estimates

    def __format__(self, spec: str) -> str:
        return ", ".join(f"{key} {estimate:{spec}}" for key, estimate in self.estimates.items())


@dataclass(frozen=True)
class _Span:
    """A range that is formatted as one number if both ends read the same."""

    low: float
    high: float

    def __format__(self, spec: str) -> str:
        return " to ".join(dict.fromkeys(f"{end:{spec}}" for end in (self.low, self.high)))


@dataclass(frozen=True)
class Mended:
    """Marks a rule that was changed after its rows had been seen, with the verdict it gave before.

    Where a new control is part of the change, ``why`` says so: its own rule is older than its rows.
    A claim that was first put when part of its rows had been seen was "not asked" before.
    """

    before: Outcome | Literal["not asked"]
    why: str


@dataclass(frozen=True)
class QuotedMean:
    """Printed figures of a sentence that are means, or ratios of means, of what has no mean."""

    figures: tuple[str, ...]
    why: Callable[[Table], str | None]


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper with the formula that decides it.

    ``measures`` are named; each is a function of the rows that gives an estimate, or a family of
    such functions by key (``{"gaps": {32: ..., 64: ...}}``). ``expect`` says by name what decides:
    in a family, what is expected of every member. A measure of which nothing is expected is
    reported and decides nothing. A claim with several parts holds if all hold, fails if one fails,
    and is undecided otherwise. Its figures are those of the part that decides: in the order of
    ``expect``, the first that fails, else the first undecided, else the first. (All parts holding
    is as safe as one; of m parts, one fails by chance up to m times as often as a single claim, and
    therefore must do so at an m-th of the error rate.)

    ``explain`` is one sentence a reader can check: a format string in which ``{kappa:.2g}`` is the
    estimate of that name with its interval, ``{kappa.value:.2f}`` and ``{kappa.n}`` are its value
    and its number of values, and ``{verdict}`` is the outcome; families are written as
    :class:`Estimates` says. Where words depend on numbers it is a function that is called with the
    estimates and the ``verdict`` by name. ``presumes`` gives the reason why the quantity does not
    exist, if it does not; the claim is then ill-posed. ``quotes`` names the printed figures of a
    sentence that are means which do not exist (:func:`no_mean`): they are told about on their own,
    and the measures judge the sentence on medians. ``mended`` marks a rule that is younger than
    rows it was judged on. ``judged_on`` names the experiments or studies whose rows decide, if
    they are not those of the claim's own page.

    ``answers`` names the items of the review that the claim answers (``kappascope.paper.review``).

    >>> claim = Claim(
    ...     "e4.multipliers-norms", "Multipliers cut the norm error by two thirds.", "4.4",
    ...     measures={
    ...         "left": lambda rows: Estimate(0.33, 0.32, 0.34, 300, "median paired ratio"),
    ...         "plain": lambda rows: Estimate(0.134, 0.131, 0.137, 300, "median"),
    ...     },
    ...     expect={"left": Between(0.31, 0.35)},
    ...     explain="Of a norm error of {plain.value:.3f}, {left:.2f} is left (n = {left.n}).",
    ...     answers=("Section 3, components",),
    ... )
    >>> verdict = judge(claim, Table.of([]))
    >>> verdict.verdict, verdict.explanation
    ('holds', 'Of a norm error of 0.134, 0.33 [0.32, 0.34] is left (n = 300).')
    """

    id: str
    sentence: str
    source: str
    measures: Mapping[str, Measure | Mapping[Any, Measure]]
    expect: Mapping[str, Expectation]
    explain: str | Callable[..., str]
    presumes: Callable[[Table], str | None] | None = None
    quotes: QuotedMean | None = None
    mended: Mended | None = None
    judged_on: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.expect:
            raise ValueError(f"{self.id} expects nothing of its measures; say in expect= what")
        fields = Formatter().parse(self.explain) if isinstance(self.explain, str) else ()
        written = {re.split(r"[.\[]", name)[0] for _, name, _, _ in fields if name}
        if unknown := (written | set(self.expect)) - {*self.measures, "verdict"}:
            raise ValueError(
                f"{self.id} speaks of {', '.join(sorted(unknown))} and measures "
                f"{', '.join(self.measures)}"
            )

    @property
    def experiment(self) -> str:
        """The experiment the claim belongs to, the first part of its id."""
        return self.id.split(".")[0]


@dataclass(frozen=True)
class Verdict:
    """What became of a claim; ``asdict`` of it is strict JSON.

    An end of the interval that is ``None`` is open; a ``measured`` of ``None`` is explained.
    ``alone`` is the verdict without regard to other claims, ``p`` the least error rate at which it
    would be decided; ``p_page`` and ``p_all`` are Holm's, over the claims of its page, which decide
    ``verdict``, and over all of the run. ``printed_mean`` tells of means that are quoted and do not
    exist, ``mended`` of a rule that was changed after rows had been seen. ``estimates`` has every
    number that the claim measured, by name: value, low, high and n, of a family by key.
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
    alone: Outcome = "undecided"
    p: float | None = None
    p_page: float | None = None
    p_all: float | None = None
    printed_mean: Mapping[str, Any] | None = None
    mended: Mapping[str, str] | None = None
    estimates: Mapping[str, Any] = field(default_factory=dict)


def judge(claim: Claim, rows: Table, least: int = 0) -> Verdict:
    """Measure, compare with what is expected, explain.

    Fewer values than ``least`` decide nothing. The verdict is the one that the claim gets alone:
    :func:`kappascope.lab.verdicts.corrected` takes its company into account.
    """
    estimates: dict[str, Estimate | Estimates] = {}
    for name in dict.fromkeys((*claim.expect, *claim.measures)):  # those that decide come first
        measure = claim.measures[name]
        if isinstance(measure, Mapping):
            estimates[name] = Estimates({key: member(rows) for key, member in measure.items()})
        else:
            estimates[name] = measure(rows)
    expected = []
    for name, expectation in claim.expect.items():
        family = estimates[name]
        members = family.values() if isinstance(family, Estimates) else [family]
        expected += [(expectation, estimate) for estimate in members]
    few = [estimate for _, estimate in expected if estimate.n < least]
    parts = [
        (
            "undecided" if estimate.n < least else expectation.decide(estimate, len(expected)),
            estimate,
        )
        for expectation, estimate in expected
    ]
    nonexistence = claim.presumes(rows) if claim.presumes else None
    weakest, deciding = min(parts, key=lambda part: STRENGTH.index(part[0]))
    verdict: Outcome = "ill-posed" if nonexistence else weakest
    chances = [expectation.p_values(estimate) for expectation, estimate in expected]
    p_holds = max(holds for holds, _ in chances)
    p_fails = min(1.0, len(chances) * min(fails for _, fails in chances))
    p = {"holds": p_holds, "fails": p_fails}.get(weakest, min(p_holds, p_fails))
    if isinstance(claim.explain, str):
        explanation = claim.explain.format(**estimates, verdict=verdict)
    else:
        explanation = claim.explain(**estimates, verdict=verdict)
    sentences = [nonexistence, explanation]
    if few:
        sentences.append(f"Fewer than {least} seeds decide nothing.")
    for _, estimate in parts:
        if verdict == "undecided" and estimate.interval is None:
            sentences.append(f"No interval for the {estimate.what}: {estimate.reason}.")
        if estimate.missing:
            missing = f"{estimate.missing} missing value{'s' * (estimate.missing > 1)}"
            sentences.append(f"The {estimate.what} leaves out {missing}.")
    low, high = deciding.interval or (math.nan, math.nan)
    return Verdict(
        claim.id,
        claim.experiment,
        claim.sentence,
        claim.source,
        verdict,
        _number(deciding.value),
        deciding.interval and (_number(low), _number(high)),
        deciding.n,
        " ".join(dict.fromkeys(filter(None, sentences))),  # each said once
        verdict,
        p,
        printed_mean=_quoted(claim.quotes, rows) if claim.quotes else None,
        mended=asdict(claim.mended) if claim.mended else None,
        estimates={name: _numbers(estimate) for name, estimate in estimates.items()},
    )


def _numbers(estimate: Estimate | Estimates) -> dict[str, Any]:
    """Write an estimate, or a family of them, as plain numbers."""
    if isinstance(estimate, Estimates):
        return {str(key): _numbers(member) for key, member in estimate.items()}
    low, high = estimate.interval or (math.nan, math.nan)
    return {
        "value": _number(estimate.value), "low": _number(low), "high": _number(high),
        "n": estimate.n,
    }  # fmt: skip


def _quoted(quotes: QuotedMean, rows: Table) -> dict[str, Any] | None:
    """Tell why the means that a sentence quotes do not exist, unless the rows contradict."""
    try:
        why = quotes.why(rows)
    except LookupError:  # too small a run has no trials that could contradict
        why = WITHOUT_MEAN
    return {"why": why, "figures": list(quotes.figures)} if why else None


WITHOUT_MEAN = (
    "The smallest singular value that is learned has a positive density at 0, so the share of "
    "trials in which kappa is off by more than x times falls like 1/x, and no mean of it exists."
)


def no_mean(*figures: str, column: str = "error", **where: Any) -> QuotedMean:
    """Say, for ``quotes``, that these printed figures are means of what has none: kappa's error.

    Theory says it (``WITHOUT_MEAN``); the rows that ``where`` selects may only contradict, if there
    are at least 500 of them and the interval of their tail index lies above 1. An index that does
    not contradict is consistent with the theory and no evidence by itself.

    >>> heavy = Table.of({"seed": k, "error": 1000 / (k + 0.5)} for k in range(1000))
    >>> no_mean("e1/condition_number/d=512/mean").why(heavy).split(". ")[1]
    'A tail index of 0.998 [0.762, 1.6] (n = 1000) is consistent with it; a mean needs more than 1.'
    >>> no_mean().why(heavy.where(seed=range(400))) == WITHOUT_MEAN
    True
    """

    def why(table: Table) -> str | None:
        index = tail_index(table.where(**where).values(column))
        if index.n < TAIL or index.low is None:
            return WITHOUT_MEAN
        if index.low > 1:
            return None
        consistent = f"A tail index of {index:.3g} (n = {index.n}) is consistent with it"
        return f"{WITHOUT_MEAN} {consistent}; a mean needs more than 1."

    return QuotedMean(figures, why)


Basis = Literal["protocol", "conjecture", "fitted", "repeated"]
CATEGORIES: Mapping[Basis, str] = {  # of a figure that comes out as printed
    "protocol": "matched",
    "conjecture": "matched by conjecture",
    "fitted": "fitted",
    "repeated": "repeated",
}
NOT_MATCHED = "not matched"


@dataclass(frozen=True)
class Printed:
    """A figure as the paper prints it, and how to measure it.

    ``measure`` gives the number in the printed unit (66.8 for "67 %", 653.2 for "653x"), for a
    range such as "0.03-0.13" all its numbers, of which the least and the greatest count. ``basis``
    says what a match is worth: the ``protocol`` gave it without being asked to; it needs a
    ``conjecture`` about what the paper left out; the conjecture was chosen because it gives this
    figure (``fitted``); or the number follows from others that are counted already (``repeated``).
    """

    id: str
    what: str
    printed: str
    measure: Callable[[Table], Any]
    basis: Basis = "protocol"

    def __post_init__(self) -> None:
        printed_numbers(self.printed)

    @property
    def experiment(self) -> str:
        """The experiment the figure belongs to, the first part of its id."""
        return self.id.split("/")[0]


_NUMBER = r"[-−]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:e[-+]?\d+|\s*[×x]\s*10\^\{?[-−]?\d+\}?)?"
_PRINTED = re.compile(rf"[~≈]?\s*({_NUMBER})(?:\s*[-–]\s*({_NUMBER}))?\s*[%×x]?")


@dataclass(frozen=True)
class Digits:
    """A printed number and half a unit of its last digit."""

    value: float
    half: float

    def matches(self, measured: float) -> str | None:
        """Tell how a measured number agrees with the printed one, if it does.

        "To its digits": it rounds to the printed number (a tie may go either way). "Within
        0.1 %": it does not, but rounding errors at an extreme kappa explain the difference.
        """
        distance = abs(measured - self.value)
        # 0.275 is a tie in print and a little more in binary
        if distance <= self.half * (1 + 1e-9) + math.ulp(self.value):
            return TO_ITS_DIGITS
        return NEARLY if distance <= CLOSE * abs(self.value) else None


def printed_numbers(printed: str) -> tuple[Digits, ...]:
    """Read the number that a printed string shows, or both ends of its range.

    A unit (%, x) is not part of the number, and "~" excuses nothing: who prints ~0.13 has seen
    0.125 to 0.135.

    >>> [printed_numbers(text)[0].value for text in ("~0.13", "4.8e6", "6.6×10^{-5}", "67 %")]
    [0.13, 4800000.0, 6.6e-05, 67.0]
    >>> printed_numbers("1,000–1,600")
    (Digits(value=1000.0, half=0.5), Digits(value=1600.0, half=0.5))
    """
    match = _PRINTED.fullmatch(printed.strip())
    if not match:
        raise ValueError(
            f'expected one number as printed, such as "~0.13", "4.8e6", "67 %" or a range such as '
            f'"0.03-0.13"; got {printed!r} (mean and deviation are two figures)'
        )
    numbers = []
    for number in filter(None, match.groups()):
        plain = re.sub(r"\s*[×x]\s*10\^\{?([-−]?\d+)\}?", r"e\1", number)
        exact = Decimal(plain.replace(",", "").replace("−", "-"))
        last = int(exact.as_tuple().exponent)
        numbers.append(Digits(float(exact), float(Decimal(5).scaleb(last - 1))))
    return tuple(numbers)


def check(printed: Printed, table: Table) -> dict[str, Any]:
    """Compare a printed figure with the measured one; the record ``verdicts.json`` keeps.

    ``measured`` is a number, a list of two for a range, or ``None`` where nothing finite was
    measured; ``agreement`` says how it agrees, or why not, ``category`` what the match is worth.
    """
    expected, measurement = printed_numbers(printed.printed), printed.measure(table)
    numbers = np.ravel(measurement.value if isinstance(measurement, Estimate) else measurement)
    count = len(expected)
    if count == 2 and numbers.size > 1:  # of a range, the least and the greatest
        numbers = np.array([numbers.min(), numbers.max()])
    if numbers.size != count:
        raise ValueError(f"expected {count} measured for {count} printed, got {numbers.size}")
    measured = [_number(x) for x in numbers]
    matches = [m if m is None else e.matches(m) for e, m in zip(expected, measured, strict=True)]
    if None in matches:
        agreement = "not measured" if None in measured else "differs"
    else:  # as the end that agrees least
        agreement = TO_ITS_DIGITS if set(matches) == {TO_ITS_DIGITS} else NEARLY
    return {
        "id": printed.id,
        "experiment": printed.experiment,
        "what": printed.what,
        "printed": printed.printed,
        "measured": measured if len(measured) > 1 else measured[0],
        "matches": agreement in (TO_ITS_DIGITS, NEARLY),
        "agreement": agreement,
        "category": CATEGORIES[printed.basis] if None not in matches else NOT_MATCHED,
    }


def _number(x: float) -> float | None:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return float(x) if math.isfinite(x) else None
