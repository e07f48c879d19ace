"""Rules for a model as a whole: vectors, copies, products, chains, and what 16 bits hide."""

import math
from dataclasses import replace

import pytest
import torch

from ill_matrices import findings, gaussian, severities, trained, with_values
from kappascope.clinic.atlas import Atlas, TrainedRange
from kappascope.clinic.examine import examine
from kappascope.clinic.judgement import Judgement, judgement
from kappascope.clinic.symptoms import Measurements
from kappascope.matrix.status import OK
from kappascope.model.attention import Product
from kappascope.model.chains import Chain, chain
from kappascope.model.skipped import Reason, ReasonKind, Skipped, unreadable


def test_what_16_bits_leave_open_is_told_once() -> None:
    rows = [examine(f"{i}.weight", gaussian(200, 200, seed=i).bfloat16()) for i in range(3)]
    (found,) = [one for one in findings(rows) if one.rule == "unresolved"]
    assert found.evidence == "the digits of bfloat16 do not determine kappa for 3 of 3"
    assert found.concern == "observation"


def test_a_vector_that_is_not_finite_is_critical_and_one_that_is_lost_is_no_finding() -> None:
    bad = Skipped("ln.bias", Reason(ReasonKind.NON_FINITE, "non-finite (1 of 8), first at [2]"))
    (found,) = findings(
        [], unsound=[bad, Skipped("ln.weight", unreadable("cannot be read: truncated"))]
    )
    assert (found.rule, found.severity, found.subject) == ("non-finite", "critical", "ln.bias")
    assert found.evidence == str(bad.reason)


def test_equal_matrices_are_told_once() -> None:
    rows = [examine(f"layers.{i}.weight", trained()) for i in range(5)]
    (one,) = findings(rows)
    assert (one.rule, one.severity, one.subject) == ("duplicates", "warning", "layers.0.weight")
    assert one.evidence.endswith("layers.1.weight, layers.2.weight, layers.3.weight and 1 more")
    assert f"{4 * 96 * 64:,} parameters" in one.advice


def test_a_matrix_stored_again_transposed_is_a_duplicate() -> None:
    table = replace(examine("wte.weight", trained(96, 64)), kind="embedding")
    head = replace(examine("lm_head.weight", trained(96, 64).T), kind="head")
    (one,) = findings([table, head])
    assert (one.rule, one.severity) == ("duplicates", "info")
    assert "(transposed)" in one.evidence and "saves 6,144 parameters" in one.advice


def head(kappa: float, size: int = 16) -> Product:
    values = (1.0,) * (size - 1) + (1 / kappa,)
    return Product("attn", "QK", None, (64, 64), values, kappa, OK, head=0)


def test_a_product_is_told_beyond_random_factors_and_trained_heads() -> None:
    assert not findings([], [head(100.0)])
    assert [one.severity for one in findings([], [head(1e5)])] == ["info"]
    assert [one.severity for one in findings([], [head(math.inf)])] == ["info"]
    known = TrainedRange(24, 3, 1.0, 30.0, {}, (29.0, 29.5, 30.0))
    atlas = Atlas({("QK", "square", "kappa_over_random_factors"): known})
    (one,) = judgement(Measurements((), (head(1e3),), given_atlas=atlas)).findings
    assert one.rule == "stretched-product" and one.null == "trained"
    assert "larger than in all 24 trained matrices of kind QK in 3 models" in one.evidence


def test_nothing_is_prescribed_for_a_stretched_product() -> None:
    names = ("attn.q_proj.weight", "attn.k_proj.weight", "attn.v_proj.weight")
    kinds = ("query", "key", "value")
    rows = [
        replace(examine(n, trained(64 + i)), kind=k)
        for i, (n, k) in enumerate(zip(names, kinds, strict=True))
    ]
    (one,) = findings(rows, [head(1e5)])
    assert (one.subject, one.correction) == ("attn[qk.0]", None)


def chained(*digits: float) -> dict[str, str]:
    """What is said of layers of these kappas (as powers of ten), narrow in the middle."""
    first, second = (torch.logspace(0, -d, 32, dtype=torch.float64) for d in digits)
    layers = [("0.weight", with_values(first, 32, 200)), ("1.weight", with_values(second, 200, 32))]
    return severities(findings([examine(*layer) for layer in layers], (), [chain(layers)]))


def test_a_chain_is_stretched_where_each_of_its_layers_passes() -> None:
    assert "stretched-product" not in chained(0.3, 0.3)
    assert chained(1.8, 1.8)["stretched-product"] == "info"


def test_a_chain_with_a_singular_member_is_not_told_again() -> None:
    flat = [("0.weight", trained(64, 96)), ("1.weight", gaussian(40, 1) @ gaussian(1, 64))]
    found = findings([examine(*layer) for layer in flat], (), [chain(flat)])
    assert "rank-deficient" in severities(found)
    assert "stretched-product" not in severities(found)


@pytest.mark.parametrize("layers", [130, 1000])
def test_a_chain_of_many_layers_is_judged(layers: int) -> None:
    widths = (400,) * (layers + 1)
    long = Chain("a > z", ("a", "z"), widths, None, True, math.inf, OK)
    assert judgement(Measurements((), chains=(long,))) == Judgement((), ())
