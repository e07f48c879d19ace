"""The rules for a model as a whole: what concerns vectors, products, or several matrices."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from kappascope.clinic import Null
from kappascope.clinic.atlas import PRODUCT_QUANTITY, beyond_trained
from kappascope.clinic.examination import Examination
from kappascope.clinic.fresh import can_tell, is_random
from kappascope.clinic.prescriptions import NO_MAPS, Flaw, is_left_alone, kind_of
from kappascope.clinic.rules import DIVERGED, KAPPA_SIZE, NOTHING
from kappascope.clinic.symptoms import (
    FALSE_ALARM_RATE,
    Measurements,
    Symptom,
    model_rule,
    warning_if,
)
from kappascope.matrix.fingerprints import likeness
from kappascope.model.attention import Product
from kappascope.model.chains import Chain
from kappascope.model.skipped import Reason, ReasonKind, Skipped
from kappascope.text import error_text, first_few, number, plural
from kappascope.theory import GaussianNull

SWALLOWED_SIZE, SWALLOWED_WARNING = 0.1, 0.5  # of the update: worth a word, and most of it
SIXTEEN_BITS = ("bfloat16", "float16")


@model_rule("defect", rule_id="non-finite")
def non_finite_vectors(model: Measurements) -> Iterator[Symptom]:
    """A bias, a gain or another vector has NaN or infinite entries.

    They spread as those of a matrix do.
    """
    for vector in model.unsound:
        if vector.reason.is_non_finite:
            yield Symptom("critical", str(vector.reason), DIVERGED, subject=vector.name)


@model_rule("defect", "start")
def unmoved(model: Measurements) -> Iterator[Symptom]:
    """In a trained model a gain is exactly one everywhere, or a bias exactly zero.

    No gradient leaves a gain at one to the last bit. So the gain was frozen, or is not used, or its
    dtype swallowed every update. In 16 bits the last is likely, because the numbers next to one are
    0.4 % away (bfloat16) or 0.05 % (float16). The finding is a warning if at least half of the
    gains are so and some of these are in 16 bits. Biases of zero count if other biases moved.
    Running variances of one have seen no batch.
    """
    if model.is_fresh:
        return
    for role, word, at in (
        ("gain", "gains", "exactly 1"),
        ("bias", "biases", "exactly 0"),
        ("variance", "running variances", "exactly 1"),
    ):
        every = [vector for vector in model.vectors if vector.role == role and vector.count > 1]
        still = [vector for vector in every if vector.is_at_start]
        if not still or (role == "bias" and len(still) == len(every)):
            continue  # a model whose biases are all zero has none
        coarse = [vector for vector in still if vector.dtype in SIXTEEN_BITS]
        most = 2 * len(still) >= len(every)
        are = "is" if len(still) == 1 else "are"
        evidence = f"{len(still)} of {len(every)} {word} {are} {at} in every entry:"
        evidence += f" {first_few([vector.name for vector in still])}"
        if coarse and role == "gain":
            away = {"bfloat16": "0.4", "float16": "0.05"}[coarse[0].dtype]
            evidence += f"; the number next to 1 in {coarse[0].dtype} is {away} % away"
        advice = "they were frozen, are not used, or the dtype swallowed every update:"
        advice += " train them in float32" if coarse else " see whether the optimizer has them"
        grave = role == "gain" and bool(coarse) and most
        share = len(still) / len(every)
        yield Symptom(warning_if(grave), evidence, advice, subject=still[0].name, harm=share)


@model_rule("defect", "none")
def differs_by_one(model: Measurements) -> Iterator[Symptom]:
    """Gains differ from the reference's by one: two conventions of a norm layer.

    Some libraries store a gain, others its distance from one. Loading one for the other gives
    another function and no error.
    """
    others = {vector.name: vector for vector in model.reference_vectors}
    apart = [
        vector
        for vector in model.vectors
        if vector.name in others and vector.differs_by_one(others[vector.name])
    ]
    if apart:
        names = first_few([vector.name for vector in apart])
        evidence = f"{plural(len(apart), 'vector')} differ from the reference by exactly 1: {names}"
        advice = "one file stores gains, the other gains minus 1: add or subtract 1"
        yield Symptom("warning", evidence, advice, subject=apart[0].name, harm=1.0)


@model_rule("defect", "none")
def duplicates(model: Measurements) -> Iterator[Symptom]:
    """Matrices with the same numbers are stored twice, also transposed or permuted.

    In a trained model one of them is a copy that was not trained, or one that need not be stored.
    In a fresh model they are clones.
    """
    groups: dict[str, list[Examination]] = {}
    for row in model.rows:
        if row.sigma_max and row.entry_std and row.part_of is None and row.fingerprints:
            groups.setdefault(row.fingerprints.entries, []).append(row)
    for first, *others in groups.values():
        if not others or first.fingerprints is None or min(first.shape) < 2:
            continue  # one row is a vector: coordinates and the like may well repeat
        orders = [likeness(first.fingerprints, each.fingerprints) for each in others
                  if each.fingerprints]  # fmt: skip
        odd = sorted(set(orders) - {"equal"})
        names = first_few([each.name for each in others])
        more = plural(len(others), "more matrix is", "more matrices are")
        evidence = f"{more} equal to it{f' ({odd[0]})' if odd else ''}: {names}"
        tied = {first.kind, *(each.kind for each in others)} <= {"embedding", "head"}
        saved = sum(each.parameters for each in others)
        advice = f"store it once, which saves {saved:,} parameters"
        if not tied:
            advice += "; if they should differ, one was not loaded or not trained"
        grave = not tied and not model.is_fresh and not is_left_alone(first)
        fresh = model.is_fresh or (can_tell(first) and is_random(first))
        yield Symptom(
            warning_if(grave and not fresh),
            evidence,
            "this is normal among cloned fresh layers" if fresh else advice,
            subject=first.name,
            harm=len(others) / (len(others) + 1),
            concern="observation" if fresh else None,
        )


@model_rule("harm", "none")
def swallowed_steps(model: Measurements) -> Iterator[Symptom]:
    """The storage dtype would round away part of the next step, by the moments of Adam in the file.

    Weights and moments are taken as the file has them. The rule speaks from a tenth of the update
    of a weight on, and warns from half on.
    """
    hit = [step for step in model.swallowed if step.update >= SWALLOWED_SIZE]
    if not hit:
        return
    worst = max(hit, key=lambda step: step.update)
    evidence = f"{worst.dtype} will swallow {worst.update:.0%} of the next update"
    if worst.decay is not None:
        evidence += f" and the weight decay of {worst.decay:.0%} of the entries"
    evidence += f"; at least {SWALLOWED_SIZE:.0%} in {len(hit)} of {len(model.swallowed)} weights"
    advice = f"if you train on, keep the weights in {worst.needed or 'float64'} or round"
    advice += " stochastically"
    severity = warning_if(worst.update >= SWALLOWED_WARNING)
    yield Symptom(severity, evidence, advice, subject=worst.name, harm=worst.update)


@model_rule("observation", "none")
def unresolved(model: Measurements) -> Iterator[Symptom]:
    """The stored dtype leaves kappa of some matrices open by more than a factor of two.

    One finding counts the matrices of each dtype. Large square matrices in 16 bits are usual.
    Tables of constants are left out, because nobody asks for their kappa.
    """
    known = [row for row in model.rows if row.failure is None]
    types: dict[str, list[Examination]] = {}
    for row in known:
        is_map = kind_of(row) not in NO_MAPS
        is_open = is_map and not row.resolved and row.condition_number is not None
        if is_open and row.condition_number_low is not None and min(row.shape) >= 2:
            types.setdefault(row.storage, []).append(row)
    for storage, rows in types.items():
        evidence = f"the digits of {storage} do not determine kappa for {len(rows)} of {len(known)}"
        advice = "do not act on kappa there; examine a checkpoint with more digits"
        yield Symptom("info", evidence, advice, subject=rows[0].name)


@model_rule("observation", "trained")
def stretched_product(model: Measurements) -> Iterator[Symptom | Skipped]:
    """Kappa of a head's QK or OV, or of a chain of layers, is beyond that of random factors.

    A product of rank r sends r directions through each factor, which acts on them as a random
    matrix with r columns would. Kappas multiply at most. So one of n factors has to be beyond the
    quantile that leaves it an n-th of the chance. Trained heads compare along few directions, so
    their products are usually stretched. The rule therefore speaks only of what exceeds all trained
    heads or, where none are known, a hundred times the usual kappa.
    """
    asked = [(product.name, partial(_stretched_head, product, model)) for product in model.products]
    asked += [(links.name, partial(_stretched_chain, links, model)) for links in model.chains]
    for subject, stretched in asked:
        try:
            symptom = stretched()
        except Exception as error:
            text = f"the rule stretched-product failed: {error_text(error)}"
            yield Skipped(subject, Reason(ReasonKind.RULE_FAILED, text))
            continue
        if symptom:
            yield symptom


def _stretched_head(product: Product, model: Measurements) -> Symptom | None:
    if not product.values or product.values[0] <= 0:
        return None
    widths = (product.shape[1], len(product.values), product.shape[0])
    known = model.atlas.range(product.kind, product.shape, PRODUCT_QUANTITY)
    limit = min(known.limit(FALSE_ALARM_RATE), KAPPA_SIZE) if known else 0.0
    least = max(known.largest, limit) if known else None
    symptom = _stretched(product, widths, model, least)
    if symptom is None:
        return None
    if known:
        evidence = f"{symptom.evidence}: {beyond_trained(known, product.kind)}"
        symptom = replace(symptom, evidence=f"{evidence} (at most {number(known.largest)})")
    return replace(symptom, about=_factors(product, model))


def _stretched_chain(layers: Chain, model: Measurements) -> Symptom | None:
    members = tuple(row for row in model.rows if row.name in layers.members)
    if any(row.condition_number is None for row in members):  # which is told of the member
        return None
    symptom = _stretched(layers, layers.widths, model, None)
    return symptom and replace(symptom, about=members)


def _stretched(
    it: Product | Chain, widths: tuple[int, ...], model: Measurements, trained: float | None
) -> Symptom | None:
    if it.condition_number is None or min(widths) < 2:
        return None
    # float64 cannot tell more; the product of many fresh layers is beyond that
    kappa = min(it.condition_number, 1 / (sys.float_info.epsilon * max(widths)))
    least = KAPPA_SIZE if trained is None else trained
    times = _times_random_factors(kappa, widths, model.chance, least)
    if times <= least:
        return None
    value = f"{'' if kappa == it.condition_number else 'of at least '}{number(kappa)}"
    evidence = f"kappa {value} of the product is at least {times:,.0f} times"
    evidence += " that of random factors"
    null: Null = "chance" if trained is None else "trained"
    return Symptom("info", evidence, NOTHING, Flaw.SHAPE, it.name, null=null)


def _times_random_factors(
    kappa: float, widths: tuple[int, ...], chance: float, least: float
) -> float:
    """Return the ratio of kappa to the usual kappas of all factors.

    0 if it is not beyond chance.
    """
    narrowest = widths.index(min(widths))
    others = [*widths[:narrowest], *widths[narrowest + 1 :]]
    nulls = [GaussianNull(widths[narrowest], width) for width in others]
    # in logarithms, for the usual kappa of hundreds of factors is beyond float64's range
    log_usual = sum(null.log_condition_number for null in nulls)
    if math.log(kappa) < math.log(least) + log_usual:
        return 0.0
    usual = math.exp(log_usual)
    limit = math.prod(float(null.quantile(1 - chance / len(nulls))) for null in nulls)
    return kappa / usual if kappa > limit else 0.0


def _factors(product: Product, model: Measurements) -> tuple[Examination, ...]:
    """Return the matrices whose heads a product multiplies: by kind, in the same layer."""
    kinds = {"QK": ("query", "key"), "OV": ("output", "value")}.get(product.kind, ())
    near = [row for row in model.rows if row.depth == product.depth and row.kind in kinds]
    inside = [row for row in near if row.name.startswith(product.layer)]
    return tuple(inside or near)
