"""A recorded run as a trajectory: readings are its steps, judged by the rules for checkpoints.

A record holds what a monitor measured while the model was trained. What only the weights
themselves would tell (entries, tails, dead rows, the whole list of singular values) is ``None``
with that reason, and rules that need it are silent. What was measured less often than the reading
of a step is taken from the last reading before it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from kappascope.clinic.diagnose import UNCHOSEN, Selection
from kappascope.clinic.diagnosis import Diagnosis
from kappascope.clinic.examination import Examination, Spread
from kappascope.clinic.examine import SINGULAR
from kappascope.model.skipped import Reason, ReasonKind, Skipped, acts_beside, no_weight
from kappascope.monitor.record import Run
from kappascope.refusal import Refusal
from kappascope.text import plural
from kappascope.theory import GaussianNull

MOST_STEPS = 12  # of a trajectory: what a screen holds; the page of the run itself has them all
NOT_RECORDED = "the record of a run does not have it"
NUMBERS = (
    "sigma_max", "sigma_2", "sigma_min", "condition_number", "condition_number_low",
    "condition_number_high", "stable_rank", "spectral_gap", "frobenius_norm",
)  # fmt: skip
COMPARED = ("condition_number", "effective_rank", "spectral_gap", "frobenius_norm")
HEAD_PRODUCTS = ("QK", "OV")  # kinds of matrices that no file holds


def recorded(folder: str | Path, selection: Selection) -> list[Diagnosis]:
    """The steps of a run, the first and the last reading among them.

    >>> from tempfile import TemporaryDirectory
    >>> from kappascope.monitor.record import Recorder
    >>> facts = {"w": {"kind": "up", "depth": 0, "shape": [2, 2], "dtype": "float32"}}
    >>> with TemporaryDirectory() as folder:
    ...     recorder = Recorder(Path(folder))
    ...     recorder.write({"kind": "start", "step": 0, "matrices": facts})
    ...     for step in (0, 50):
    ...         rows = {"w": {"frobenius_norm": 1.0 + step}}
    ...         recorder.write({"kind": "reading", "step": step, "rows": rows})
    ...     [one.matrices[0].frobenius_norm for one in recorded(folder, Selection())]
    [1.0, 51.0]
    """
    run = Run.read(folder)
    steps = sorted({reading.step for reading in run.readings})
    if not steps:
        raise Refusal(2, str(folder), "its record holds no reading yet", "try again later")
    last = len(steps) - 1
    many = min(len(steps), MOST_STEPS)
    chosen = [steps[round(k * last / max(1, many - 1))] for k in range(many)]
    examined: list[dict[str, Examination]] = []
    for step in chosen:
        earlier = examined[-1] if examined else {}
        examined.append(_examined(run, step, earlier, selection))
    names = [f"{folder} step {step}" for step in chosen]
    return [
        Diagnosis(
            source=name,
            matrices=tuple(rows.values()),
            skipped=tuple(_skipped(run, selection)),
            notes=(f"read from the record of a monitor, at step {step:,}", *_told(run, step)),
            reference=earlier,
            settings={"options": dict(run.sessions[-1].options) if run.sessions else {}},
        ).judged()
        for name, earlier, step, rows in zip(
            names, [None, *names[:-1]], chosen, examined, strict=True
        )
    ]


def _told(run: Run, step: int) -> Iterator[str]:
    """Yield how many alerts the monitor told by a step: rules do not repeat them."""
    told = [alert for alert in run.alerts if alert.step <= step]
    if told:
        first = f"at step {told[0].step:,} {told[0].name} in {told[0].matrix or 'the run'}"
        page = "kappascope watch shows them"
        yield f"the monitor told {plural(len(told), 'alert')} by then, first {first}; {page}"


def _is_matrix(facts: Mapping[str, Any]) -> bool:
    return len(facts.get("shape") or ()) == 2 and facts.get("kind") not in HEAD_PRODUCTS


def _skipped(run: Run, selection: Selection) -> list[Skipped]:
    skipped = [Skipped(name, acts_beside(why)) for name, why in run.skipped.items()]
    known = {skip.name for skip in skipped}
    for name, facts in run.matrices.items():
        if facts.get("kind") in HEAD_PRODUCTS:
            skipped.append(Skipped(name, no_weight("a product of a head; see the page of the run")))
        elif _is_matrix(facts) and not selection.takes(name):
            skipped.append(Skipped(name, UNCHOSEN))
        elif not _is_matrix(facts) and name not in known:
            skipped.append(Skipped(name, acts_beside("one-dimensional")))
    return skipped


def _examined(
    run: Run, step: int, earlier: Mapping[str, Examination], selection: Selection
) -> dict[str, Examination]:
    """Every chosen matrix that had been read by a step."""
    rows = {}
    for name, facts in run.matrices.items():
        if _is_matrix(facts) and selection.takes(name):
            row = _row(run, name, facts, step, earlier.get(name))
            if row is not None:
                rows[name] = row
    return rows


def _row(
    run: Run, name: str, facts: Mapping[str, Any], step: int, earlier: Examination | None
) -> Examination | None:
    def known(quantity: str, index: float | None = None) -> tuple[int, float] | None:
        column = run.columns.get((name, quantity, index))
        place = bisect_right(column.steps, step) if column else 0
        return (column.steps[place - 1], column.values[place - 1]) if column and place else None

    shape, dtype = (int(facts["shape"][0]), int(facts["shape"][1])), str(facts.get("dtype", ""))
    ill, norm = known("non_finite"), known("frobenius_norm")
    if ill and ill[1] and (norm is None or norm[0] < ill[0]):
        text = f"non-finite ({ill[1]:.0f} of {shape[0] * shape[1]})"
        return Examination.failed(name, shape, dtype, Reason(ReasonKind.NON_FINITE, text))
    values = {quantity: entry[1] for quantity in NUMBERS if (entry := known(quantity))}
    if not values:
        return None
    rank = known("effective_rank")
    numbers: dict[str, Any] = {q: v for q, v in values.items() if math.isfinite(v)}
    numbers |= {"effective_rank": int(rank[1])} if rank else {}
    for vector in ("row_norms", "column_norms"):
        norms = [entry[1] for index in (1.0, 0.5, 0.0) if (entry := known(vector, index))]
        if len(norms) == 3:
            smallest, middle, largest = norms
            numbers[vector] = Spread(smallest, middle, largest, None)
    low, high = values.get("condition_number_low"), values.get("condition_number_high")
    is_singular = values.get("condition_number") == math.inf
    numbers |= _against_chance(shape, numbers.get("condition_number"))
    reasons = {field.name: NOT_RECORDED for field in fields(Examination) if field.default is None}
    reasons |= {q: SINGULAR.reason for q, value in values.items() if value == math.inf}
    optional = {"depth", "part_of", "errors", "failure", "uncompared", *numbers}
    return Examination(
        name=name,
        shape=shape,
        dtype=dtype,
        status="ok: as recorded by a monitor",
        kind=str(facts.get("kind", "other")),
        depth=facts.get("depth"),
        storage=dtype,
        method="recorded",
        resolved=low is not None and high is not None and high <= 2 * low,
        errors=_moves(numbers, earlier),
        reasons={field: reason for field, reason in reasons.items() if field not in optional},
        is_singular=is_singular,
        **numbers,
    )


def _against_chance(shape: tuple[int, int], kappa: float | None) -> dict[str, float]:
    if kappa is None or min(shape) < 2:
        return {}
    null = GaussianNull(*shape)
    return {
        "null_condition_number": math.exp(null.log_condition_number),
        "null_z": float(null.z(kappa)),
        "null_tail": float(null.tail(kappa)),
    }


def _moves(
    numbers: Mapping[str, Any], earlier: Examination | None
) -> dict[str, float | None] | None:
    """Relative changes since the step before, and that of log kappa, which is a difference."""
    if earlier is None or earlier.failure is not None:
        return None
    moves: dict[str, float | None] = {}
    for name in COMPARED:
        now, before = numbers.get(name), getattr(earlier, name)
        moves[name] = abs(now - before) / abs(before) if now is not None and before else None
    now, before = numbers.get("condition_number"), earlier.condition_number
    moves["log_condition_number"] = abs(math.log(now / before)) if now and before else None
    return moves
