"""Rules: what is ill is found and named, what is fresh is left in peace, and snippets run."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

from fresh_models import FAMILIES, examined, multiplied
from ill_matrices import (
    TRAINED,
    changed,
    findings,
    gaussian,
    severities,
    sick,
    taught,
    trained,
    with_values,
)
from kappascope.clinic import CONCERNS, SEVERITIES, model_rules
from kappascope.clinic.atlas import Atlas
from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.examination import Examination, Spread
from kappascope.clinic.examine import Kernel, examine
from kappascope.clinic.fresh import is_fresh
from kappascope.clinic.judgement import judgement
from kappascope.clinic.prescriptions import LEFT_ALONE, is_left_alone
from kappascope.clinic.symptoms import MODEL_RULES, RULES, ClinicRule, Measurements, Symptom
from kappascope.clinic.vectors import Vector
from kappascope.matrix.status import OK
from kappascope.model.attention import Product

HEADS = {"hidden_size": 64, "num_attention_heads": 4}


def ill_square() -> Tensor:
    values = torch.ones(64, dtype=torch.float64)
    values[-1] = 1e-11
    return with_values(values, 64, 64)


def few_directions() -> Tensor:
    values = torch.full((64,), 0.05, dtype=torch.float64)
    values[:8] = 3.0
    return with_values(values, 96, 64)


def with_reference(change: Callable[[Tensor], Tensor]) -> Examination:
    before = trained().bfloat16()
    return examine("ill.weight", change(before), reference=before)


def half_moved(before: Tensor) -> Tensor:
    after = before.clone()
    after[:60] += 0.01 * gaussian(60, 64, seed=5).bfloat16()
    return after


# Of each rule for a matrix, one that it is about, and what it must say.
ILL: dict[str, tuple[Callable[[], Tensor | Examination], str]] = {
    "non-finite": (lambda: changed(lambda w: w[3, 4].fill_(math.nan)), "critical"),
    "zero": (lambda: torch.zeros(40, 30), "warning"),
    "one-code": (lambda: replace(examine("ill.weight", trained()), one_code=True), "critical"),
    "dead-rows": (lambda: changed(lambda w: w[2:5].zero_()), "warning"),
    "dead-columns": (lambda: changed(lambda w: w[:, 7].zero_()), "warning"),
    "outlier-rows": (lambda: changed(lambda w: w[7].mul_(30)), "info"),
    "outlier-columns": (lambda: changed(lambda w: w[:, 7].mul_(30)), "warning"),
    "uneven-norms": (lambda: trained() * (1.5 * gaussian(96, 1)).exp(), "info"),
    "ill-conditioned": (ill_square, "warning"),
    "rank-deficient": (lambda: gaussian(60, 5) @ gaussian(5, 40), "warning"),
    "low-rank": (few_directions, "info"),
    "untrained": (lambda: gaussian(100, 64) / 8, "info"),
    "stalled-entries": (lambda: with_reference(half_moved), "warning"),
    "rearranged": (lambda: with_reference(lambda w: w.flip(0)), "warning"),
}


def test_every_rule_has_an_example() -> None:
    assert set(ILL) == set(RULES)
    assert set(MODEL_RULES) == {
        "non-finite", "duplicates", "stretched-product", "unresolved", "unmoved",
        "differs-by-one", "swallowed-steps",
    }  # fmt: skip


@pytest.mark.parametrize("rule", ILL)
def test_what_is_ill_is_found(rule: str) -> None:
    matrix, severity = ILL[rule]
    found = {one.rule: one for one in sick(matrix())}
    assert found[rule].severity == severity
    assert found[rule].evidence and found[rule].advice


@pytest.mark.parametrize("rule", [*RULES.values(), *MODEL_RULES.values()])
def test_every_rule_tells_its_reason(rule: ClinicRule[Any]) -> None:
    assert rule.judge.__doc__


def test_a_healthy_trained_matrix_has_no_findings() -> None:
    assert not sick(trained())


def test_what_can_be_acted_on_comes_first_and_the_worst_of_it_before_the_rest() -> None:
    made = [(name, make()) for name, (make, _) in ILL.items()]
    rows = [it if isinstance(it, Examination) else examine(name, it) for name, it in made]
    found = findings([replace(row, name=f"{k}", kind="up") for k, row in enumerate(rows)])
    order = [(CONCERNS.index(f.concern), -SEVERITIES.index(f.severity)) for f in found]
    assert order == sorted(order) and order[0] == (0, -2) and order[-1][0] == 2
    assert all(f.severity == "info" for f in found if f.concern == "observation")


def test_no_matrices_have_no_findings() -> None:
    assert findings([]) == ()


def test_what_moved_from_the_reference_is_not_untrained() -> None:
    drawn, other = gaussian(64, 64) / 8, gaussian(64, 64, seed=1) / 8
    assert is_fresh(examine("w", drawn))
    assert not is_fresh(examine("w", drawn, reference=other))


def test_a_random_spectrum_of_no_starting_scale_is_not_called_untrained() -> None:
    assert "untrained" in severities(sick(0.02 * gaussian(100, 64)))
    assert "untrained" not in severities(sick(0.0137 * gaussian(100, 64)))


def test_a_decayed_layer_with_a_bias_of_zero_is_untrained() -> None:
    healthy = [examine(f"{i}.weight", trained(80 + i)) for i in range(3)]
    row = examine("pooler.weight", 0.0137 * gaussian(100, 64))
    for bias, told in ((torch.zeros(100), True), (torch.full((100,), 0.1), False)):
        vectors = (Vector.of("pooler.bias", bias),)
        found = judgement(Measurements((*healthy, row), vectors=vectors)).findings
        assert ("untrained" in {one.rule for one in found}) is told


def test_what_is_untrained_and_unmoved_is_a_warning_and_stands_first() -> None:
    base = {f"{i}.weight": trained(80 + i) for i in range(3)} | {
        "pooler.weight": gaussian(64, 64) / 8
    }
    tuned = {name: w + (0.1 * gaussian(*w.shape, seed=9) if name != "pooler.weight" else 0)
             for name, w in base.items()}  # fmt: skip
    first = diagnose(tuned, reference=base).findings[0]
    assert (first.rule, first.severity, first.subject) == ("untrained", "warning", "pooler.weight")
    assert "never received a gradient" in first.evidence


def test_a_layer_of_zeros_is_a_warning_once_the_others_are_trained() -> None:
    for steps, severity in ((0, "info"), (20, "warning")):
        model = taught(steps)
        model[2].weight.data.zero_()
        told = {
            one.rule: one.severity for one in findings(examined(model)) if one.subject == "2.weight"
        }
        assert told["zero"] == severity


# --- false alarms ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("form", ["module", "state dict"])
def test_a_fresh_model_is_not_ill(name: str, form: str) -> None:
    torch.manual_seed(20)
    model = FAMILIES[name]()
    source = model if form == "module" else dict(model.state_dict())
    found = findings(examined(source), *multiplied(source, HEADS))
    assert [one for one in found if one.severity != "info"] == []


@pytest.mark.parametrize(
    ("count", "dtype"), [(1000, torch.float32), (300, torch.bfloat16), (300, torch.float16)]
)
def test_a_fresh_model_of_many_matrices_is_not_ill(count: int, dtype: torch.dtype) -> None:
    # the shapes whose kappa, norms and ranks vary most
    shapes = [(2, 2), (3, 3), (1, 9), (500, 1), (400, 2), (8, 8), (16, 16), (24, 25), (5, 40)]
    rows = []
    for i in range(count):
        height, width = shapes[i % len(shapes)]
        matrix = torch.empty(height, width)
        make = nn.init.normal_ if i % 2 else nn.init.uniform_
        random = torch.Generator().manual_seed(i)
        rows.append(examine(f"{i}.weight", make(matrix, -0.5, 0.5, generator=random).to(dtype)))
    assert [one for one in findings(rows) if one.severity != "info"] == []


@pytest.mark.parametrize("shape", [(5, 1), (9, 1), (6, 2), (1, 5)])
def test_a_short_median_of_few_norms_is_no_outlier(shape: tuple[int, int]) -> None:
    # of five normal numbers the largest is ten times the median in one of a hundred matrices
    drawn = [examine(f"{i}.weight", gaussian(*shape, seed=i)) for i in range(400)]
    assert [one for one in findings(drawn) if one.severity != "info"] == []


# --- what is expected in one place and not in another ---------------------------------------------


@pytest.mark.parametrize("rule", sorted(set(ILL) - {"non-finite", "one-code"}))  # damage anywhere
def test_what_is_left_alone_alarms_nobody(rule: str) -> None:
    for kind in LEFT_ALONE:
        found = sick(ILL[rule][0](), kind=kind)
        assert {one.severity for one in found} <= {"info"} or rule in ("rearranged",)
        assert all(one.correction is None and not one.snippet for one in found)


def test_a_mask_may_be_infinite_and_a_weight_may_not() -> None:
    mask = torch.zeros(4, 4).masked_fill(torch.ones(4, 4).triu(1) > 0, -math.inf)
    assert severities(sick(mask, name="attn.causal_mask")) == {"non-finite": "info"}
    assert severities(sick(mask)) == {"non-finite": "critical"}
    for name in ("mask_decoder.weight", "mask_embed", "unmask"):
        assert severities(sick(mask, name=name)) == {"non-finite": "critical"}
    mask[0, 0] = math.nan
    assert severities(sick(mask, name="attn.causal_mask")) == {"non-finite": "critical"}


def test_a_triangle_of_ones_is_a_table() -> None:
    found = sick(torch.ones(256, 256).tril(), kind="other")
    assert {one.severity for one in found} <= {"info"}


def test_a_padding_row_is_expected_in_a_table_of_unknown_name() -> None:
    table = changed(lambda w: w[0].zero_(), trained(200, 32))
    assert severities(sick(table, kind="other")) == {}
    assert severities(sick(table, kind="up")) == {"dead-rows": "warning"}


def test_dead_lines_are_named_with_what_they_cost() -> None:
    (found,) = sick(changed(lambda w: w[3:18:14].zero_()))
    assert found.evidence == "2 of 96 rows are dead (3, 17)"
    assert "128 parameters" in found.advice and found.harm == 2 / 96


def test_equal_rows_are_a_table_only_where_the_name_tells_nothing() -> None:
    rates = torch.arange(1.0, 17).repeat(96, 1)
    assert "rank-deficient" not in severities(sick(rates, kind="other"))
    assert severities(sick(rates, kind="up"))["rank-deficient"] == "warning"


def test_a_zero_matrix_is_expected_among_fresh_ones() -> None:
    fresh = [examine(f"{i}.weight", gaussian(64, 64, seed=i)) for i in range(3)]
    found = findings([*fresh, examine("zero", torch.zeros(64, 64))])
    assert {one.severity for one in found if one.rule == "zero"} == {"info"}


def test_dead_rows_are_not_told_again_as_rank_or_dispersion() -> None:
    half = changed(lambda w: w[:40].zero_(), trained(64, 64))
    assert severities(sick(half)) == {"dead-rows": "warning"}


def test_what_is_told_of_kappa_and_of_rank_is_one_story() -> None:
    values = torch.logspace(0, -12, 64, dtype=torch.float64)
    found = {one.rule: one for one in sick(with_values(values, 64, 64).float())}
    assert found["rank-deficient"].snippet == found["ill-conditioned"].snippet
    assert "kappa, at least" in found["ill-conditioned"].evidence


def test_a_kappa_that_repeats_a_low_rank_is_told_once() -> None:
    values = torch.cat([torch.ones(24), torch.full((72,), 1e-3)]).double()
    values[-1] = 2e-4
    found = severities(sick(with_values(values, 96, 192)))
    assert "rank-deficient" in found and "ill-conditioned" not in found


def test_corrections_stand_behind_training_on_and_none_is_prescribed_for_kappa() -> None:
    found = {one.rule: one for one in sick(ill_square())}["ill-conditioned"]
    assert found.correction is None and found.snippet == ""
    assert found.training_advice.startswith("if you train on: no correction of kappa")
    found = {one.rule: one for one in sick(changed(lambda w: w[:, 7].mul_(30)))}["outlier-columns"]
    assert found.training_advice.startswith("if you train on: try Multipliers")
    assert "Multipliers" not in found.advice


def test_a_square_matrix_needs_far_more_kappa_than_a_wide_one() -> None:
    def judged(rows: int, columns: int) -> dict[str, str]:
        values = torch.linspace(1, 0.9, 64, dtype=torch.float64)
        values[-1] = 1e-4
        return severities(sick(with_values(values, rows, columns)))

    assert judged(64, 400)["ill-conditioned"] == "info"
    assert "ill-conditioned" not in judged(64, 64)  # kappa 1e4, as chance gives in 1 of 100


def test_nothing_known_is_nothing_found() -> None:
    assert (
        findings([Examination("w", (30, 20), "float32", "failed: outside float64's range")]) == ()
    )
    bare = Examination("w", (30, 20), "float32", "ok", row_norms=Spread(0.0, 0.0, 0.0, None))
    assert findings([bare]) == ()


def test_without_a_full_spectrum_rules_still_work() -> None:
    row = examine("w", ill_square(), spectrum="none")
    assert severities(findings([row]))["ill-conditioned"] == "warning"


def test_large_numbers_are_written_as_a_reader_writes_them() -> None:
    weight = torch.diag(torch.logspace(0, -7, 64, dtype=torch.float64))
    (found,) = [
        one for one in findings([examine("up.weight", weight)]) if one.rule == "ill-conditioned"
    ]
    assert "kappa 1.00×10⁷ is beyond chance: at least " in found.evidence
    assert "e+" not in found.evidence


# --- rules that fail ------------------------------------------------------------------------------


def broken(*args: object) -> NoReturn:
    raise OverflowError("math range error")


def test_a_rule_that_fails_costs_only_what_it_would_have_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def on_one(row: Examination, model: Measurements) -> Symptom | None:
        return broken() if row.name == "b" else None

    rows = tuple(examine(name, changed(lambda w: w[2:5].zero_())) for name in "abc")
    whole = findings(rows)
    monkeypatch.setitem(RULES, "fragile", ClinicRule(on_one, "defect", "none"))
    found = judgement(Measurements(rows, given_atlas=TRAINED))
    assert found.findings == whole and len(whole) >= 3
    reason = "the rule fragile failed: OverflowError: math range error"
    assert [(one.name, str(one.reason)) for one in found.failed] == [("b", reason)]


@pytest.mark.parametrize("ask", [broken, lambda model: map(broken, [model])])
def test_a_rule_of_the_model_that_fails_costs_only_what_it_would_have_said(
    ask: Callable[..., Iterator[Symptom]], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = (examine("a", torch.zeros(40, 30)), examine("b", trained()))
    whole = findings(rows)
    monkeypatch.setitem(MODEL_RULES, "fragile", ClinicRule(ask, "defect", "none"))
    found = judgement(Measurements(rows, given_atlas=TRAINED))
    assert found.findings == whole != ()
    assert [one.name for one in found.failed] == ["model"]


def test_a_product_that_cannot_be_judged_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stretched = model_rules._stretched

    def fragile(it: Product, *args: Any) -> Symptom | None:
        return broken() if it.head == 0 else stretched(it, *args)

    shape = (64, 64)
    products = tuple(
        Product("attn", "QK", 0, shape, tuple(1e-6**k for k in (0, 1)), 1e9, OK, head=head)
        for head in range(3)
    )
    monkeypatch.setattr(model_rules, "_stretched", fragile)
    found = judgement(Measurements((), products))
    assert [one.subject for one in found.findings] == ["attn[qk.1]", "attn[qk.2]"]
    assert [one.name for one in found.failed] == ["attn[qk.0]"]


@pytest.mark.parametrize("scale", [5e-324, 1e-300, 1e-160, 1e154, 1e300])
def test_a_matrix_of_any_scale_is_judged(scale: float) -> None:
    weight = changed(lambda w: w[2:5].zero_()).double() * scale
    row = examine("w", weight)
    assert not judgement(Measurements((row,))).failed
    assert not is_left_alone(row)


# --- false alarms that were raised once -----------------------------------------------------------


def told(state: dict[str, Tensor]) -> dict[str, set[str]]:
    """The rules that speak of each tensor of a made-up file among trained layers."""
    others = {f"{i}.weight": trained(80 + i, 64) for i in range(3)}
    found: dict[str, set[str]] = {}
    for one in diagnose(others | state, atlas=Atlas({})).findings:
        found.setdefault(one.subject, set()).add(one.rule)
    return found


def test_a_linear_layer_called_an_embedding_is_not_looked_up() -> None:
    dead = changed(lambda w: w[0].zero_(), trained(128, 64))
    named = {"time_embedding.weight": dead, "time_embedding.bias": torch.ones(128)}
    assert told(named)["time_embedding.weight"] == {"dead-rows"}
    model = nn.ModuleDict({"patch_embedding": nn.Linear(48, 64)})
    (row,) = diagnose(model).matrices
    assert row.kind == "other"
    table = diagnose({"wte.weight": trained(128, 64), "up.weight": trained(256, 64)}).matrices[0]
    assert table.kind == "embedding"


def test_a_fixed_basis_of_waves_has_rows_that_are_not_pruned() -> None:
    n = torch.arange(64.0)
    angles = 2 * math.pi * torch.outer(torch.arange(33.0), n) / 64
    window = torch.hann_window(64)
    basis = torch.cat([angles.cos() * window, -angles.sin() * window])[:, None]
    assert basis[33].abs().max() == 0
    assert told({"stft_conv.weight": basis}) == {}
    positions = torch.outer(torch.arange(200.0), 10000 ** (-torch.arange(32) / 32))
    table = torch.cat([positions.sin(), positions.cos()], 1)
    assert told({"table.weight": table}) == {}


def test_a_centre_tap_is_no_outlier_and_a_masked_tap_is_not_dead() -> None:
    kernel = 0.01 * gaussian(64, 32, 3, 3)
    kernel[:, :, 1, 1] *= 60
    kernel[:, :, 2] = 0
    assert told({"conv.weight": kernel}).get("conv.weight", set()) <= {"low-rank"}
    dead = kernel.clone()
    dead[:, 5] = 0
    assert "dead-columns" in told({"conv.weight": dead})["conv.weight"]


def test_a_depthwise_kernel_has_no_kappa() -> None:
    state = {"expand.weight": trained(96, 64)[..., None, None], "dw.weight": gaussian(96, 1, 3, 3)}
    rows = {row.name: row for row in diagnose(state).matrices}
    row = rows["dw.weight"]
    assert row.kind == "depthwise" and row.condition_number is None and row.sigma_max is None
    assert "filter for each channel" in row.reasons["condition_number"]
    first = diagnose({"conv.weight": gaussian(96, 1, 3, 3)}).matrices[0]
    assert first.kind == "convolution" and first.condition_number is not None


def test_the_norm_of_a_convolution_as_a_map_stands_beside_that_of_its_matrix() -> None:
    (row,) = diagnose({"conv.weight": torch.ones(1, 1, 3)}).matrices
    assert row.operator_norm["low"] == pytest.approx(3) and row.sigma_max == pytest.approx(3**0.5)
    assert "stride 1 assumed" in row.operator_norm["assumed"]
    (row,) = diagnose(nn.Conv1d(2, 3, 4, stride=2)).matrices
    assert "stride as in the module" in row.operator_norm["assumed"]


def test_grouped_convolutions_act_on_their_own_inputs() -> None:
    layer = nn.Conv1d(4, 6, 3, groups=2)
    rows = {row.name: row for row in diagnose(layer).matrices}
    parts = [rows[f"weight[{k}]"].operator_norm["low"] for k in range(2)]
    assert rows["weight"].operator_norm["low"] == pytest.approx(max(parts))


def test_kernel_is_what_the_columns_are() -> None:
    weight = gaussian(8, 4 * 9)
    flat, kernel = examine("w", weight), examine("w", weight, kernel=Kernel((3, 3)))
    by_channel = weight.view(8, 4, 9).square().sum((0, 2)).sqrt()
    assert kernel.column_norms.max == pytest.approx(float(by_channel.max()))
    assert flat.sigma_max == kernel.sigma_max


# --- false alarms that published files gave -------------------------------------------------------


def test_a_zero_that_is_an_entry_like_others_is_no_dead_line() -> None:
    """One of 256 weights of a single row was rounded to zero, and called a dead input."""
    row = gaussian(1, 256)
    row[0, 83] = 0.0
    assert "dead-columns" not in severities(sick(row))
    ramp = torch.arange(16.0)[None]  # a fixed projection onto 0, 1, 2, ...
    assert "dead-columns" not in severities(sick(ramp))
    sparse = gaussian(4, 600, seed=2) * (torch.rand(4, 600) < 0.2)
    assert "dead-columns" not in severities(sick(sparse))
    dead = gaussian(64, 48)
    dead[:, 5] = 0.0
    assert severities(sick(dead))["dead-columns"] == "warning"


def test_equal_rows_of_coordinates_are_no_copies() -> None:
    ramp = torch.linspace(-1, 1, 64)[:, None]
    healthy = [examine(f"{i}.weight", trained(80 + i)) for i in range(3)]
    rows = [*healthy, examine("down.coords", ramp), examine("up.coords", ramp.clone())]
    assert "duplicates" not in {one.rule for one in findings(rows)}


def test_a_finding_of_a_part_is_not_told_again_of_its_whole() -> None:
    """A recurrent layer of two directions was called untrained three times."""
    dead = gaussian(64, 48)
    dead[5:7] = 0.0
    whole = examine("w", torch.cat([dead, gaussian(64, 48, seed=3)]))
    part = replace(examine("w[0]", dead), part_of="w")
    told = [one.subject for one in findings([whole, part]) if one.rule == "dead-rows"]
    assert told == ["w"]


def test_entries_of_a_single_row_are_no_outlying_columns() -> None:
    """Of one row with few large weights all others were said to lose their bits, as they may."""
    row = gaussian(1, 128).abs() * 1e-5
    row[0, :9] = 1.0
    assert "outlier-columns" not in severities(sick(row))
