"""Ask every rule about a model, and order what they say by what can be done about it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, TypeVar

from kappascope.clinic import CONCERNS, SEVERITIES
from kappascope.clinic import model_rules as _model_rules  # noqa: F401 - registers its rules
from kappascope.clinic import rules as _rules  # noqa: F401 - registers its rules
from kappascope.clinic.examination import Examination, Finding
from kappascope.clinic.prescriptions import NO_PRESCRIPTION, prescribe
from kappascope.clinic.symptoms import MODEL_RULES, RULES, ClinicRule, Measurements, Symptom
from kappascope.model.skipped import Reason, ReasonKind, Skipped
from kappascope.refusal import Refusal
from kappascope.system.extras import plugins
from kappascope.text import error_text

T = TypeVar("T")


@dataclass(frozen=True)
class Judgement:
    """What all rules say of a model, by what can be done, and which failed and why."""

    findings: tuple[Finding, ...]
    failed: tuple[Skipped, ...]


def judgement(model: Measurements) -> Judgement:
    """Ask every rule; one that fails on a matrix costs what it would have said there, no more.

    >>> judgement(Measurements(rows=()))
    Judgement(findings=(), failed=())
    """
    load_plugins()
    results: list[Finding | Skipped | None] = []
    for row in model.rows:
        for rule_id, rule in RULES.items():
            symptom = _attempt(rule_id, row.name, partial(rule.judge, row, model))
            results.append(_finding(rule_id, rule, symptom, row.name, (row,)))
    for rule_id, asked in MODEL_RULES.items():
        symptoms = chain.from_iterable(map(asked.judge, [model]))  # asked by the first next()
        while said := _attempt(rule_id, "model", partial(next, symptoms, None)):
            results.append(_finding(rule_id, asked, said, "model", ()))
    found = [result for result in results if isinstance(result, Finding)]
    wholes = {row.name: row.part_of for row in model.rows if row.part_of}
    told = {(each.rule, each.subject): SEVERITIES.index(each.severity) for each in found}
    found = [  # what is seen of a part and of its whole is told once, unless the part is worse
        finding
        for finding in found
        if SEVERITIES.index(finding.severity)
        > told.get((finding.rule, wholes.get(finding.subject) or ""), -1)
    ]
    failed = [result for result in results if isinstance(result, Skipped)]
    return Judgement(tuple(sorted(found, key=urgency)), tuple(failed))


def urgency(finding: Finding) -> tuple[int, int, float]:
    """Return the key that sorts findings: by what can be done, by severity, by the harm.

    >>> dead = Finding("dead-rows", "warning", "w", "", "", concern="defect")
    >>> seen = Finding("ill-conditioned", "info", "w", "", "")
    >>> urgency(dead) < urgency(seen)
    True
    """
    severity = -SEVERITIES.index(finding.severity)
    return CONCERNS.index(finding.concern), severity, -(finding.harm or 0.0)


def _attempt(rule_id: str, subject: str, judge: Callable[[], T]) -> T | Skipped:
    """Return what a rule says of its subject, or why it failed to say anything."""
    try:
        return judge()
    except Exception as error:
        text = f"the rule {rule_id} failed: {error_text(error)}"
        return Skipped(subject, Reason(ReasonKind.RULE_FAILED, text))


def _finding(
    rule_id: str,
    rule: ClinicRule[Any],
    symptom: Symptom | Skipped | None,
    subject: str,
    about: tuple[Examination, ...],
) -> Finding | Skipped | None:
    """Turn a symptom into a finding; what a rule could not judge stays as it is."""
    if not isinstance(symptom, Symptom):
        return symptom
    subject, about = symptom.subject or subject, symptom.about or about
    return _attempt(rule_id, subject, partial(_treated, rule_id, rule, symptom, subject, about))


def _treated(
    rule_id: str,
    rule: ClinicRule[Any],
    symptom: Symptom,
    subject: str,
    about: tuple[Examination, ...],
) -> Finding:
    """Add what to try if the model is trained on, where something was shown to help."""
    concern = symptom.concern or rule.concern
    treatment = NO_PRESCRIPTION
    if symptom.flaw is not None and about and concern != "observation":
        treatment = prescribe(symptom.flaw, *about)
    return Finding(
        rule_id,
        symptom.severity,
        subject,
        symptom.evidence,
        symptom.advice,
        treatment.correction,
        treatment.snippet,
        concern,
        symptom.harm,
        symptom.null or rule.null,
        f"if you train on: {treatment.advice}" if treatment.advice else "",
    )


def load_plugins() -> None:
    """Load the rules of other packages, which register themselves when they are loaded."""
    plugins("rules")


def rule_names() -> tuple[str, ...]:
    """Return the names of all rules, also those of plug-ins; those for one matrix come first.

    >>> rule_names()[0]
    'non-finite'
    """
    load_plugins()
    return tuple(dict.fromkeys((*RULES, *MODEL_RULES)))


def explanation(rule_id: str) -> str:
    """Explain a rule: its reasons, what it is concerned with, and what it compares with.

    >>> explanation("zero").splitlines()[0]
    'zero: a defect, compared with how training begins'
    """
    load_plugins()
    known: dict[str, ClinicRule[Any]] = {**MODEL_RULES, **RULES}
    if rule_id not in known:
        near = difflib.get_close_matches(rule_id, known, n=3, cutoff=0.5)
        advice = "`kappascope explain` lists them"
        if near:
            advice = f"near it: {', '.join(near)}; {advice}"
        raise Refusal(4, rule_id, "is no rule", advice)
    found = known[rule_id]
    of = {"defect": "a defect", "harm": "a harm", "observation": "an observation"}[found.concern]
    null = {
        "none": "compared with nothing but its own limits",
        "chance": "compared with random matrices",
        "trained": "compared with trained matrices of its kind",
        "start": "compared with how training begins",
    }[found.null]
    return f"{rule_id}: {of}, {null}\n\n{inspect.cleandoc(found.judge.__doc__ or '')}"
