"""Rules for a model as a whole: matrices that are equal, and products of several."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kappascope.chains import Chain
from kappascope.clinic import Severity
from kappascope.clinic.examination import Examination
from kappascope.clinic.prescriptions import Flaw
from kappascope.clinic.rules import DIVERGED, GRAVE, NOTABLE, Model, Symptom, model_rule
from kappascope.products import Product
from kappascope.prose import listed, number
from kappascope.theory import GaussianNull
from kappascope.weights.reasons import NonFinite


@model_rule
def non_finite(model: Model) -> Iterator[Symptom]:
    """As of matrices, so of biases, gains and other vectors: what goes past them is lost."""
    for one in model.unsound:
        if isinstance(one.reason, NonFinite):
            yield Symptom("critical", one.reason, DIVERGED, subject=one.name)


@model_rule
def duplicates(model: Model) -> Iterator[Symptom]:
    """Matrices with all the same numbers, stored apart: clones that were not trained, or errors."""
    groups: dict[tuple[Any, ...], list[str]] = {}
    for row in model.rows:
        if row.sigma_max and row.entry_std and row.part_of is None:
            groups.setdefault(_fingerprint(row), []).append(row.name)
    for first, *others in groups.values():
        if others:
            evidence = f"{len(others)} more are equal to it: {listed(others)}"
            advice = "fine among cloned fresh layers; otherwise tie them, or check the loading"
            yield Symptom("info", evidence, advice, subject=first)


def _fingerprint(row: Examination) -> tuple[Any, ...]:
    """Numbers that no two different matrices share by accident."""
    extremes = (row.sigma_max, row.sigma_2, row.sigma_min, row.frobenius_norm)
    entries = (row.entry_mean, row.entry_kurtosis)
    return (row.shape, *extremes, *entries, row.row_norms, row.column_norms)


@model_rule
def exploding_product(model: Model) -> Iterator[Symptom]:
    """Kappa of a head's QK or OV, or of a chain of layers, beyond that of random factors.

    A product of rank r sends r directions through each factor, which sees them as a random matrix
    with r columns would. Kappas multiply at most, so that of n factors one has to be beyond the
    quantile that leaves it an n-th of the chance. Sizes as for one matrix; heads of trained models
    have up to 30 times the usual kappa.
    """
    for product in model.products:
        widths = (product.shape[1], len(product.values), product.shape[0])
        if product.values and product.values[0] > 0:
            for symptom in _explodes(product, widths, model):
                yield replace(symptom, about=_factors(product, model))
    for chain in model.chains:
        members = tuple(row for row in model.rows if row.name in chain.members)
        if all(row.condition_number is not None for row in members):  # else told of a member
            for symptom in _explodes(chain, chain.widths, model):
                yield replace(symptom, about=members)


def _explodes(it: Product | Chain, widths: tuple[int, ...], model: Model) -> Iterator[Symptom]:
    if it.condition_number is None or min(widths) < 2:
        return
    # float64 cannot tell more; the product of many fresh layers is beyond that
    kappa = min(it.condition_number, 1 / (sys.float_info.epsilon * max(widths)))
    times = _times_usual(kappa, widths, model.chance)
    if times >= NOTABLE:
        severity: Severity = "warning" if times >= GRAVE else "info"
        value = f"{'' if kappa == it.condition_number else 'of at least '}{number(kappa)}"
        evidence = f"kappa {value} of the product is at least {times:,.0f} times"
        said = f"{evidence} that of random factors"
        yield Symptom(severity, said, flaw=Flaw.SHAPE, subject=it.name)


def _times_usual(kappa: float, widths: tuple[int, ...], chance: float) -> float:
    """Kappa over the usual kappas of all factors; 0 if it is not beyond chance."""
    narrowest = widths.index(min(widths))
    others = [*widths[:narrowest], *widths[narrowest + 1 :]]
    nulls = [GaussianNull(widths[narrowest], width) for width in others]
    usual = math.exp(sum(null.log_condition_number for null in nulls))
    if kappa < NOTABLE * usual:
        return 0.0
    limit = math.prod(float(null.quantile(1 - chance / len(nulls))) for null in nulls)
    return kappa / usual if kappa > limit else 0.0


_FACTORS = {"QK": ("query", "key"), "OV": ("output", "value")}


def _factors(product: Product, model: Model) -> tuple[Examination, ...]:
    """The matrices whose heads a product multiplies: by kind, in the same layer."""
    kinds = _FACTORS.get(product.kind, ())
    near = [row for row in model.rows if row.depth == product.depth and row.kind in kinds]
    inside = [row for row in near if row.name.startswith(product.layer)]
    return tuple(inside or near)
