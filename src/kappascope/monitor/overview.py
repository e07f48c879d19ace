"""What a record amounts to: how every matrix stands, who needs attention first, and a verdict.

Page and terminal tell the same; neither needs torch, nor a model.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from kappascope.monitor.record import Alert, Column, Run
from kappascope.text import bracketed, number, plural

SWALLOWED_FROM = 0.01  # share of the entries: rounding loses fewer now and then in any dtype
VECTOR = "vector"  # the kind of a gain or a bias, of which only what is swallowed is known
SILENT_SECONDS = 60.0  # without a reading, after which a run may have been killed
MOVED_FROM = 1.05  # factor between two condition numbers that is worth a sentence


@dataclass(frozen=True)
class Standing:
    """How one matrix stands at its last reading; what was not measured is None.

    >>> Standing("w", "query", 0, (4, 4), "float32", first=10.0, kappa=20.0).growth
    0.693...
    """

    name: str
    kind: str
    depth: int | None
    shape: tuple[int, ...]
    dtype: str
    first: float | None = None
    kappa: float | None = None
    low: float | None = None
    high: float | None = None
    update_size: float | None = None
    swallowed: float | None = None
    alerts: tuple[Alert, ...] = ()

    @property
    def kappa_text(self) -> str:
        """The condition number with its interval, as a reader wants it."""
        ends = None if self.low is None and self.high is None else (self.low, self.high)
        return f"{number(self.kappa)} {bracketed(ends)}".rstrip()

    @property
    def growth(self) -> float:
        """The change of log kappa since the first reading; infinite where kappa is no number."""
        if self.kappa is None or not self.first or not math.isfinite(self.first):
            return 0.0
        return math.log(self.kappa / self.first) if 0 < self.kappa < math.inf else math.inf

    @property
    def attention(self) -> tuple[bool, bool, float, float]:
        """The key that sorts by alerts, then numbers that are not finite, swallowed, growth."""
        return (
            bool(self.alerts),
            self.kappa is not None and not math.isfinite(self.kappa),
            (self.swallowed or 0.0) if self.loses_updates else 0.0,
            abs(self.growth),
        )

    @property
    def loses_updates(self) -> bool:
        """Whether it swallows more than any dtype does; one entry of a short gain is chance."""
        lost = self.swallowed or 0.0
        return lost >= SWALLOWED_FROM and lost * math.prod(self.shape) > 1.5


def standings(run: Run) -> list[Standing]:
    """Every matrix, and every other parameter with a number, in the order of the model."""
    named = dict.fromkeys([*run.matrices, *(matrix for matrix, _, _ in run.columns if matrix)])
    by_matrix: dict[str, list[Alert]] = {}
    for alert in run.alerts:
        for matrix in (alert.matrix, *alert.others):
            by_matrix.setdefault(matrix, []).append(alert)
    return [_standing(run, name, tuple(by_matrix.get(name, ()))) for name in named]


def _standing(run: Run, name: str, alerts: tuple[Alert, ...]) -> Standing:
    facts: dict[str, Any] = run.matrices.get(name, {"kind": VECTOR})

    def last(quantity: str) -> float | None:
        column = run.columns.get((name, quantity, None))
        return column.values[-1] if column else None

    kappas = gapped(run, name, "condition_number")
    return Standing(
        name=name,
        kind=str(facts.get("kind") or "other"),
        depth=facts.get("depth"),
        shape=tuple(facts.get("shape") or ()),
        dtype=str(facts.get("dtype", "")),
        first=kappas.values[0] if kappas else None,
        kappa=(kappa := kappas.values[-1] if kappas else None),
        low=None if kappa is None or math.isnan(kappa) else last("condition_number_low"),
        high=None if kappa is None or math.isnan(kappa) else last("condition_number_high"),
        update_size=last("update_size"),
        swallowed=last("swallowed"),
        alerts=alerts,
    )


def gapped(run: Run, name: str, quantity: str, index: float | None = None) -> Column:
    """A series with NaN where the matrix was read but had entries that are not finite."""
    column = run.columns.get((name, quantity, index), Column())
    ill = run.columns.get((name, "non_finite", None), ())
    missing = {step: math.nan for step, count in ill if count}
    if not missing or quantity == "non_finite":
        return column
    whole = Column()
    for step, value in sorted((missing | dict(column)).items()):
        whole.add(step, value)
    return whole


def neediest(every: list[Standing]) -> list[Standing]:
    """Sort matrices by what needs attention, in the order of the model among equals.

    >>> calm, grown = Standing("a", "up", 0, (), "", 1.0, 1.0), Standing("b", "", 0, (), "", 1, 9)
    >>> [one.name for one in neediest([calm, grown])]
    ['b', 'a']
    """
    return sorted(every, key=lambda standing: standing.attention, reverse=True)


def extent(run: Run, silence: float = math.inf) -> str:
    """How far the run has come, and whether it ended; ``silence`` is in seconds, where known."""
    readings = plural(len({reading.step for reading in run.readings}), "reading")
    kinds = [facts.get("kind") for facts in run.matrices.values()]
    of = plural(sum(kind != VECTOR for kind in kinds), "matrix", "matrices")
    overhead = run.columns.get(("", "overhead", None))
    cost = f" Readings took {percent(overhead.values[-1])} of the time." if overhead else ""
    return f"Step {run.step:,}; {readings} of {of}; {state(run, silence)}.{cost}"


def seconds_of_silence(run: Run) -> float:
    """The seconds since the last reading, as the clock of this machine has it."""
    latest = max((reading.time for reading in run.readings), default=0.0)
    return time.time() - latest if latest > 0 else 0.0


def state(run: Run, silence: float) -> str:
    """Whether the last session was closed, as far as a record can tell."""
    if run.is_closed:
        return "closed"
    if silence < SILENT_SECONDS:
        return "running"
    latest = max((reading.time for reading in run.readings), default=0.0)
    since = f" since {datetime.fromtimestamp(latest, UTC):%Y-%m-%d %H:%M} UTC" if latest else ""
    return f"no end was written{since}: the run goes on, or was killed"


def verdict_of(run: Run, every: list[Standing]) -> list[str]:
    """The run in a few sentences, those that ask for something first."""
    sentences = (
        _alerted(run),
        *(sentence_of(ring["text"]) for ring in run.rings[-1:] if ring.get("text")),
        _lost(every),
        _cut(run),
        _moved(every),
        _learned(run),
        _damage(run),
    )
    return [sentence[:1].upper() + sentence[1:] for sentence in sentences if sentence]


def _alerted(run: Run) -> str:
    if not run.alerts:
        readings = {reading.step for reading in run.readings}
        return f"No alert in {plural(len(readings), 'reading')}."
    first, names = run.alerts[0], Counter(alert.name for alert in run.alerts)
    beginning = plural(len(run.alerts), "alert")
    if len(run.alerts) == 1:
        return f"{beginning}, at step {first.step:,}: {sentence_of(first.sentence)}"
    kinds = ", ".join(f"{name} {many:,}" for name, many in names.most_common())
    return f"{beginning} ({kinds}), the first at step {first.step:,}: {sentence_of(first.sentence)}"


def sentence_of(text: str) -> str:
    """The same with a full stop at its end.

    >>> sentence_of("row 3 is zero"), sentence_of("why?")
    ('row 3 is zero.', 'why?')
    """
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _lost(every: list[Standing]) -> str:
    known = [(each.swallowed, each.name) for each in every if each.swallowed is not None]
    if not known:
        return ""
    losers = [(each.swallowed or 0.0, each.name) for each in every if each.loses_updates]
    many = len(losers)
    if not many:
        few = [lost for lost, _ in known if lost < SWALLOWED_FROM]
        share = f"{percent(max(few, default=0.0))} of the entries at most"
        aside = ", single entries of short gains and biases aside" if len(few) < len(known) else ""
        return f"Hardly an update was swallowed: {share}{aside}."
    most, name = max(losers)
    among = f"{many:,} of {len(known):,} lose more than {percent(SWALLOWED_FROM)}"
    return f"Swallowed at the last reading: {percent(most)} of the entries of {name}; {among}."


def percent(share: float) -> str:
    """Write a share in per cent.

    >>> percent(0.314), percent(0.01), percent(0.00012), percent(0.0)
    ('31 %', '1 %', '0.012 %', '0 %')
    """
    return f"{100 * share:.2g} %" if share < 0.995 else f"{100 * share:.0f} %"


def _moved(every: list[Standing]) -> str:
    moved = max(every, key=lambda standing: abs(standing.growth), default=None)
    if moved is None or moved.kappa is None or abs(moved.growth) < math.log(MOVED_FROM):
        return ""
    path = f"κ from {number(moved.first)} to {number(moved.kappa)}"
    return f"Most moved since the first reading: {moved.name}, {path}."


def loss_name(run: Run) -> str:
    """The name under which a loss was logged, or else the first that was, or nothing."""
    names = list(run.logs)
    named = [name for name in names if "loss" in name.lower()]
    return "loss" if "loss" in names else next(iter(named or names), "")


def _learned(run: Run) -> str:
    pairs = run.logs.get(name := loss_name(run), [])
    if len(pairs) < 2:
        return ""
    (_, first), (_, last) = pairs[0], pairs[-1]
    return f"The logged {name} went from {number(first)} to {number(last)}."


def _cut(run: Run) -> str:
    """Where the run was taken up again: the last time, for a preempted one has hundreds."""
    if len(run.sessions) < 2:
        return ""
    session, many = run.sessions[-1], len(run.sessions) - 1
    times = "" if many == 1 else f" {many:,} times, last"
    return (
        f"Taken up again{times} at step {session.step:,}: {sentence_of(session.cut or 'resumed')}"
    )


def _damage(run: Run) -> str:
    if not run.damaged:
        return ""
    return f"{plural(run.damaged, 'line')} of the record did not fit the digest and is left out."
