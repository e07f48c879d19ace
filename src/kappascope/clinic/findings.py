"""What is wrong with the matrices of a model, in plain words, and what to try.

Findings are what the rules (`rules.py`, `model_rules.py`) say, with the correction that treats it
where `prescriptions.py` has one for this kind of layer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kappascope.chains import Chain
from kappascope.clinic import SEVERITIES, Severity, model_rules  # noqa: F401 - registers rules
from kappascope.clinic.examination import Examination
from kappascope.clinic.prescriptions import Prescription, is_left_alone, prescribe
from kappascope.clinic.rules import MODEL_RULES, RULES, Model, Symptom
from kappascope.matrices import Skipped
from kappascope.products import Product


@dataclass(frozen=True)
class Finding:
    """What one rule says of one matrix, of a product, or of the model.

    >>> Finding("zero", "info", "fc.weight", "all entries are zero", "check that it is trained")
    Finding(rule='zero', severity='info', subject='fc.weight', evidence='all entries are zero', ...)
    """

    rule: str
    severity: Severity
    subject: str
    evidence: str
    advice: str
    correction: str | None = None
    snippet: str = ""


def findings(
    rows: Iterable[Examination],
    products: Iterable[Product] = (),
    chains: Iterable[Chain] = (),
    unsound: Iterable[Skipped] = (),
) -> tuple[Finding, ...]:
    """What all rules say, worst first.

    >>> import torch
    >>> from kappascope.clinic.examination import examine
    >>> found = findings([examine("fc.weight", torch.tensor([[1.0, float("inf")]]))])
    >>> [(one.rule, one.severity) for one in found]
    [('non-finite', 'critical')]
    """
    model = Model(tuple(rows), tuple(products), tuple(chains), tuple(unsound))
    found = [_finding(*case) for case in _cases(model)]
    return tuple(sorted(found, key=lambda one: -SEVERITIES.index(one.severity)))


def _cases(model: Model) -> Iterator[tuple[str, Symptom, str, tuple[Examination, ...]]]:
    """Rule, symptom, its subject, and the matrices that it is about."""
    for row in model.rows:
        for name, judge in RULES.items():
            symptom = judge(row, model)
            if symptom is not None:
                yield name, symptom, row.name, (row,)
    for name, ask in MODEL_RULES.items():
        for symptom in ask(model):
            yield name, symptom, symptom.subject or "model", symptom.about


def _finding(rule: str, symptom: Symptom, subject: str, about: tuple[Examination, ...]) -> Finding:
    treated = Prescription(None, "", symptom.advice)
    severity = symptom.severity
    if symptom.flaw is not None and about:
        treated = prescribe(symptom.flaw, *about)
        # where nothing is to be done about it, nobody is to be alarmed
        severity = "info" if all(map(is_left_alone, about)) else severity
    calm = "no need to act; if the layer trains badly, "
    mild = severity == "info" and treated.correction
    advice = f"{calm if mild else ''}{treated.advice}"
    return Finding(
        rule, severity, subject, symptom.evidence, advice, treated.correction, treated.snippet
    )
