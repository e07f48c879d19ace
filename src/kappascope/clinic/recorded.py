"""The record of a training run as a trajectory of diagnoses, one for each of some readings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kappascope.clinic.diagnosis import Diagnosis
from kappascope.clinic.row import Examination, Spread
from kappascope.model.skipped import Skipped, no_weight, unreadable
from kappascope.monitor.record import Run
from kappascope.refusal import Refusal

MOST_STEPS = 24  # of a table: of more readings some are taken, the first and the last among them
NUMBERS = (
    "sigma_max", "sigma_2", "sigma_min", "condition_number", "condition_number_low",
    "condition_number_high", "stable_rank", "spectral_gap", "frobenius_norm",
)  # fmt: skip
RECORDED = "ok: recorded by a monitor"
NOT_RECORDED = "a monitor does not record it"


def recorded_diagnoses(folder: str | Path, most: int = MOST_STEPS) -> list[Diagnosis]:
    """Judge the matrices of a run as they were at its readings, by what the record has of them.

    What was not measured at a reading, because it had not changed, is as it was before.
    """
    run = Run.read(folder)
    readings = _readings(run)
    if not readings:
        raise Refusal(2, str(folder), "has no reading of a matrix", "let the run take a step")
    steps = list(readings)
    last = len(steps) - 1
    count = min(most, len(steps))
    places = sorted({round(i * last / max(count - 1, 1)) for i in range(count)})
    found: list[Diagnosis] = []
    before: dict[str, dict[str, Any]] = {}
    skipped = tuple(Skipped(name, no_weight(reason)) for name, reason in run.skipped.items())
    for place in places:
        known = readings[steps[place]]
        rows = tuple(
            _examination(name, run.matrices[name], quantities, before.get(name))
            for name, quantities in known.items()
        )
        source = f"{folder}/step {steps[place]}"
        found.append(Diagnosis(source, matrices=rows, skipped=skipped).judged())
        before = known
    return found


def _readings(run: Run) -> dict[int, dict[str, dict[str, Any]]]:
    """By step, all that is known of each stored matrix then."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    known: dict[str, dict[str, Any]] = {}
    for row in sorted(run.rows, key=lambda row: row.step):
        kind = run.matrices.get(row.matrix, {}).get("kind", "vector")
        if kind in ("vector", "QK", "OV"):
            continue
        if row.step not in found:
            known = found[row.step] = {name: dict(each) for name, each in known.items()}
        quantities = known.setdefault(row.matrix, {})
        if row.quantity == "non_finite":
            quantities.clear()
        if row.index is None:
            quantities[row.quantity] = row.value
        else:
            quantities.setdefault(row.quantity, {})[row.index] = row.value
    return {step: each for step, each in found.items() if any(map(_is_whole, each.values()))}


def _is_whole(quantities: Mapping[str, Any]) -> bool:
    """Whether a reading has more than a norm."""
    return "sigma_max" in quantities or "non_finite" in quantities


def _examination(
    name: str,
    facts: Mapping[str, Any],
    quantities: Mapping[str, Any],
    before: Mapping[str, Any] | None,
) -> Examination:
    """The row of one matrix at one reading."""
    shape = (int(facts["shape"][0]), int(facts["shape"][-1]))
    if quantities.get("non_finite"):
        count = int(quantities["non_finite"])
        failure = unreadable(f"non-finite ({count} of {math.prod(shape)})")
        return Examination.failed(name, shape, facts["dtype"], failure)
    numbers = {key: quantities.get(key) for key in NUMBERS}
    kappa = numbers["condition_number"]
    is_singular = kappa is not None and math.isinf(kappa)
    low, high = numbers["condition_number_low"], numbers["condition_number_high"]
    rank = quantities.get("effective_rank")
    fields: dict[str, Any] = {key: value for key, value in numbers.items() if value is not None}
    fields |= {key: None for key, value in numbers.items() if value is None or math.isinf(value)}
    for key in ("row_norms", "column_norms"):
        fields[key] = _spread(quantities.get(key))
    return Examination(
        name,
        shape,
        facts["dtype"],
        RECORDED,
        kind=facts["kind"],
        depth=facts["depth"],
        resolved=low is not None and high is not None and high <= 2 * low,
        effective_rank=None if rank is None else int(rank),
        is_singular=is_singular,
        errors=_errors(kappa, before),
        reasons={key: NOT_RECORDED for key, value in fields.items() if value is None},
        **fields,
    )


def _spread(norms: Mapping[float, float] | None) -> Spread | None:
    """The smallest, middle and largest norm, of which the record has quantiles."""
    if norms is None or not {0.0, 0.5, 1.0} <= norms.keys():
        return None
    return Spread(norms[1.0], norms[0.5], norms[0.0], cv=None)


def _errors(
    kappa: float | None, before: Mapping[str, Any] | None
) -> Mapping[str, float | None] | None:
    """The change of the condition number since the reading before."""
    old = None if before is None else before.get("condition_number")
    if kappa is None or old is None or not (0 < old < math.inf and 0 < kappa < math.inf):
        return None
    log = abs(math.log(kappa / old))
    return {"condition_number": abs(kappa / old - 1), "log_condition_number": log}
