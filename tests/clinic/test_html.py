"""The page of a diagnosis: what was found first, names as text, and every matrix on demand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from tests.lab.test_report import HOSTILE, Elements, Visit, browser
from torch import nn

from kappascope import pages
from kappascope.clinic import html
from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.diagnosis import Diagnosis, trajectory_steps
from kappascope.clinic.examination import Examination, Finding, Spread
from kappascope.clinic.html import PLOT_LIMIT, by_rule, curves, diagnosis_page
from kappascope.clinic.maps import heat_map, matrix_label
from kappascope.clinic.metrics import ERROR_LEVELS, METRICS, RATIO_LEVELS, metric
from kappascope.matrix.components import Components
from kappascope.matrix.status import OK, Outcome, Status
from kappascope.model.attention import Product
from kappascope.model.chains import Chain
from kappascope.model.skipped import Reason, ReasonKind, Skipped, acts_beside, unreadable
from kappascope.pages.rendering import legible
from kappascope.theory import GaussianNull, MarchenkoPastur

__all__ = ["browser"]  # a fixture
TEMPLATES = Path(pages.__file__).parent / "templates"

SHAPES = {
    "query": (256, 256), "key": (64, 256), "value": (64, 256), "output": (256, 256),
    "gate": (688, 256), "up": (688, 256), "down": (256, 688),
}  # fmt: skip
PATHS = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "embedding": "embed_tokens", "head": "lm_head",
}  # fmt: skip
ERRORS = (*Components.names, "overall_matrix", "log_condition_number")


@cache
def chance(shape: tuple[int, int], points: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Places and singular values of a random matrix."""
    many = min(shape)
    places = np.unique(np.geomspace(1, many, points).round().astype(int))
    return places, MarchenkoPastur(*shape).quantile(1 - (places - 0.5) / many)


def matrix(name: str, kind: str, depth: int | None, random: Any, **more: Any) -> dict[str, Any]:
    """One as trained models have them: a few large values, a tail that falls."""
    shape = more.get("shape") or SHAPES.get(kind, (1024, 256))
    places, null = chance(tuple(shape))
    many, deviation = min(shape), 0.02 * random.uniform(0.6, 1.5)
    values = deviation * null * (1 + 6 * random.uniform() * places**-0.9)
    values = values * (1 + 1e-3 * random.normal(size=len(values)))
    values[-1] *= random.uniform(0.02, 1)
    kappa = values[0] / values[-1]
    rows = np.sort(deviation * math.sqrt(shape[1]) * random.lognormal(0, 0.15, shape[0]))
    counts, edges = np.histogram(rows, 32)
    cv = float(rows.std() / rows.mean())
    return {
        "name": name, "shape": list(shape), "dtype": "bfloat16", "storage": "bfloat16",
        "status": "ok: all singular values", "method": "svd", "kind": kind, "depth": depth,
        "part_of": None,
        "row_norms": {"min": rows[0], "median": float(np.median(rows)), "max": rows[-1], "cv": cv},
        "column_norms": {"min": 0.1, "median": 0.2, "max": 0.3, "cv": 0.1},
        "sigma_max": values[0], "sigma_2": values[1], "sigma_min": values[-1],
        "condition_number": kappa, "condition_number_low": kappa * 0.97,
        "condition_number_high": kappa * 1.03, "resolved": True,
        "effective_rank": int((values > 0.01 * values[0]).mean() * many),
        "effective_ranks": {"0.001": many, "0.01": many - 3, "0.1": many // 2},
        "stable_rank": many / 7.3, "entropy_rank": many * 0.71,
        "spectral_gap": values[0] - values[1],
        "frobenius_norm": deviation * math.sqrt(math.prod(shape)),
        "null_z": float(GaussianNull(*shape).z(kappa)), "null_tail": 1e-5, "entry_std": deviation,
        "entry_mean": 1e-5, "entry_kurtosis": 0.4, "alpha": random.uniform(2, 6),
        "alpha_xmin": 0.3, "alpha_distance": 0.05, "alpha_count": 99,
        "edge": deviation * (math.sqrt(shape[0]) + math.sqrt(shape[1])), "outliers": 4,
        "dead_rows": 0, "dead_columns": 0, "outlier_rows": 2, "outlier_columns": 0,
        "null_distance": 0.12, "errors": None, "reasons": {}, "findings": [],
        "plot": {
            "spectrum": [[int(i), float(s)] for i, s in zip(places, values, strict=True)],
            "null": [[int(i), float(s)] for i, s in zip(places, deviation * null, strict=True)],
            "floor": values[0] * 2.0**-9,
            "rows": {"edges": edges.tolist(), "counts": counts.tolist()},
        },
        **more,
    }  # fmt: skip


def finding(subject: str, rule: str = "dead-rows", **more: Any) -> dict[str, Any]:
    snippet = (
        "from kappascope.corrections import Multipliers\n\n"
        "handle = Multipliers().attach(model, optimizer)\n"
    )
    return {
        "rule": rule, "severity": "warning", "subject": subject,
        "evidence": "12 of 256 rows have less than a millionth of the median norm.",
        "advice": "Rows this small do not take part; prune them or let their norms grow.",
        "correction": "Multipliers", "snippet": snippet, **more,
    }  # fmt: skip


def spoiled(one: dict[str, Any], severity: str, rule: str, **more: Any) -> dict[str, Any]:
    """With a finding."""
    return {**one, "findings": [finding(one["name"], rule, severity=severity)], **more}


def trained(layers: int = 8, seed: int = 0, kinds: tuple[str, ...] = tuple(SHAPES)) -> list[Any]:
    """The matrices of a made-up language model."""
    random = np.random.default_rng(seed)
    many = [matrix("model.embed_tokens.weight", "embedding", None, random, shape=(1024, 256))]
    many += [
        matrix(f"model.layers.{depth}.{PATHS[kind]}.weight", kind, depth, random)
        for depth in range(layers)
        for kind in kinds
    ]
    return [*many, matrix("lm_head.weight", "head", None, random, shape=(1024, 256))]


def document(matrices: list[Any], **more: Any) -> dict[str, Any]:
    told = [one for m in matrices for one in m.get("findings") or ()]
    return {
        "schema": "kappascope.diagnosis/2", "source": "models/small-llama", "matrices": matrices,
        "products": [], "reference": None, "findings": told,
        "skipped": [{"name": f"layers.{k}.norm", "reason": "one-dimensional"} for k in range(9)],
        "summary": {
            "matrices": len(matrices), "analysed": len(matrices), "failed": 0, "skipped": 9,
            "by_severity": {"critical": 1},
            "verdict": "One matrix needs attention and 3 are worth a look.\n"
            "The κ of model.layers.3.self_attn.k_proj.weight cannot be told from infinity.\n"
            "All others are conditioned as random matrices of their shapes or somewhat worse.",
        },
        "provenance": {"kappascope": "0.1.0", "torch": "2.10", "threads": 2, "notes": ["a note"]},
        **more,
    }  # fmt: skip


def clinic() -> dict[str, Any]:
    """A model with a bit of everything."""
    many = trained()
    many[2] = spoiled(many[2], "warning", "dead-rows")
    many[5] = spoiled(many[5], "info", "like-initial")
    many[23] = spoiled(
        many[23], "critical", "unresolved-kappa", resolved=False, condition_number=None,
        condition_number_low=5000.0, condition_number_high=None, null_z=None,
        reasons={"condition_number": "infinite: its smallest value cannot be told from zero"},
    )  # fmt: skip
    many[23]["plot"]["floor"] = 2 * many[23]["sigma_min"]
    many[17]["plot"]["floor"] = 1e-6 * many[17]["sigma_min"]
    for k in range(30, 42):
        many[k] = spoiled(many[k], "warning", "norm-dispersion")
    many[17] = {
        **many[17],
        "alpha": None,
        "reasons": {"alpha": "needs all singular values: --spectrum full"},
    }
    products = [
        {"name": f"model.layers.{d}.self_attn[{k.lower()}.{h}]", "kind": k, "depth": d, "head": h,
         "sigma_max": 3.0 + h, "sigma_min": 0.01, "condition_number": 300.0 * (d + 1) + h,
         "effective_rank": 12 if h else None, "reasons": {"effective_rank": "not asked for"}}
        for d in range(8) for h in range(4) for k in ("QK", "OV")
    ]  # fmt: skip
    return document(many, products=products)


def compared() -> dict[str, Any]:
    random = np.random.default_rng(1)
    sizes = dict(zip(ERRORS, (0.2, 0.15, 0.02, 3.0, 0.0004, 0.4, 0.01, 0.6, 0.9), strict=True))
    many = [
        {
            **m,
            "errors": {
                name: float(size * random.lognormal(0, 0.5)) for name, size in sizes.items()
            },
        }
        for m in trained()
    ]
    many[3]["errors"]["condition_number"] = None
    return document(many, reference="models/small-llama-base")


def stepped() -> dict[str, Any]:
    steps = [
        {"source": f"step-{1000 * k}", "matrices": [
            {**m, "condition_number": m["condition_number"] * 1.3**k} for m in trained(4)]}
        for k in range(6)
    ]  # fmt: skip
    return document(trained(4), trajectory=steps)


def examination(told: Mapping[str, Any]) -> Examination:
    """The row that some fields of a document tell of."""
    names = {one.name for one in fields(Examination)}
    given = {name: it for name, it in told.items() if name in names and it is not None}
    given = {"name": "", "shape": (0, 0), "dtype": "", "status": "ok", "resolved": True} | given
    for name in ("row_norms", "column_norms"):
        if name in given:
            given[name] = Spread(**given[name])
    given["shape"] = tuple(given["shape"])
    given["findings"] = tuple(Finding(**{"advice": ""} | one) for one in given.get("findings", ()))
    if given["status"].startswith("failed: "):
        reason = given["status"].removeprefix("failed: ")
        given["failure"] = Reason(ReasonKind.NON_FINITE, reason)
    why = given.get("reasons", {}).get("condition_number", "")
    return Examination(**given, is_singular=why.startswith("infinite"))


def product(told: Mapping[str, Any]) -> Product:
    layer, kappa = told["name"].partition("[")[0], told.get("condition_number")
    values = (told.get("sigma_max", 1.0), told.get("sigma_min", 1.0))
    why = told.get("reasons", {}).get("condition_number", "ok")
    status = OK if kappa else Status(Outcome.DEGENERATE, why)
    numbers = (told.get("depth"), (8, 8), values, kappa, status, told.get("head"))
    return Product(layer, told["kind"], *numbers)


def diagnoses(told: Mapping[str, Any]) -> list[Diagnosis]:
    """What some fields of a document tell of: the steps, and last the diagnosis itself."""
    known = {name: it for name, it in told.items() if it is not None}
    rows = tuple(examination(one) for one in known.get("matrices", ()))
    model = [Finding(**{"advice": ""} | one) for one in known.get("findings", ())]
    found = dict.fromkeys((*model, *(one for row in rows for one in row.findings)))
    links = [
        Chain(
            c["name"],
            (c["name"],) * 2,
            (8, 8, 8),
            c["bound"],
            True,
            None,
            Status(Outcome(c["status"].partition(": ")[0]), c["status"].partition(": ")[2]),
        )
        for c in known.get("chains", ())
    ]
    skipped, failed = known.get("skipped", ()), known.get("failed", ())
    whole = Diagnosis(
        source=known.get("source", ""),
        matrices=rows,
        products=tuple(product(one) for one in known.get("products", ())),
        chains=tuple(links),
        skipped=tuple(Skipped(one["name"], acts_beside(one["reason"])) for one in skipped),
        faults=tuple(Skipped(one["name"], unreadable(one["reason"])) for one in failed),
        reference=known.get("reference"),
        settings=known.get("provenance", {}),
        findings=tuple(found),
    )
    steps = [step for one in known.get("trajectory", ()) for step in diagnoses(one)]
    return [*steps[:-1], replace(whole, source=steps[-1].source)] if steps else [whole]


def page(told: Mapping[str, Any]) -> str:
    return diagnosis_page(diagnoses(told))


def ranked(many: list[Any]) -> tuple[Examination, ...]:
    return diagnoses({"matrices": many})[-1].ranked


def text(html: str) -> str:
    """What is read, in order."""
    return " ".join(
        Elements(html[html.index("<body>") : html.index('<dialog id="matrix"')]).text.split()
    )


def embedded(html: str) -> Any:
    return json.loads(
        Elements(html[html.index('<script type="application/json"') :]).text.split("\n")[0]
    )


def failed(name: str) -> dict[str, Any]:
    return {
        "name": name, "shape": [4, 4], "dtype": "float32", "kind": "up", "depth": 0,
        "status": "failed: non-finite (1 of 16), first at [0, 0]", "findings": [],
    }  # fmt: skip


def test_the_verdict_comes_before_everything_else() -> None:
    read = text(page(clinic()))
    assert read.startswith("58 matrices analysed. Skipped: 9 one-dimensional.")
    assert 0 < read.index("Findings: 1 critical, 13 warnings") < read.index("Map Show")


def test_what_is_incomplete_says_so_first() -> None:
    many = [*trained(1), failed("w")]
    read = text(page(document(many)))
    assert read.startswith(
        "This diagnosis is incomplete: 9 matrices analysed. 1 failed: w: non-finite (1 of 16)"
    )
    lost = [{"name": "x", "reason": "its shard model-2.safetensors is missing"}]
    read = text(page(document(many, failed=lost)))
    assert "2 failed: w: non-finite" in read[:99]
    assert "; x: its shard model-2.safetensors is missing." in read[:250]
    assert text(page(document(many[:-1], failed=lost))).startswith("This diagnosis is incomplete")


@pytest.mark.parametrize("many", [[], [failed("a"), failed("b")]], ids=["none", "all failed"])
def test_nothing_analysed_is_the_first_line(many: list[Any]) -> None:
    html = page(document(many))
    assert text(html).startswith("Nothing could be analysed.")
    assert 'class="incomplete"' in html


def test_an_empty_document_is_a_page() -> None:
    read = text(page({}))
    assert "There is no matrix to show." in read
    assert "No findings: nothing was examined" in read


def test_a_bare_matrix_is_shown_with_dashes() -> None:
    read = text(page({"matrices": [{"name": "bare"}]}))
    assert "bare" in read


def test_any_field_may_be_null_or_missing() -> None:
    whole = compared()["matrices"][3]
    nulls = [{**whole, field: None, "reasons": {field: f"no {field}"}} for field in whole]
    bare = [{name: value for name, value in whole.items() if name != field} for field in whole]
    known = document([*nulls[1:], *bare[1:]])
    html = page(known)
    told = {title for _, a in Elements(html).tags if (title := a.get("title"))}
    assert {f"no {name}" for name in ("alpha", "stable_rank", "spectral_gap", "row_norms")} <= told
    for field in known:
        assert page({**known, field: None}).startswith("<!doctype html>")


def test_the_worst_come_first() -> None:
    many = [
        {"name": "fine", "shape": [4, 4], "condition_number": 9.0},
        {"name": "far", "shape": [4, 400], "condition_number": 9.0},
        {"name": "warned", "shape": [4, 4], "findings": [finding("warned")]},
        {"name": "infinite", "shape": [4, 4], "reasons": {"condition_number": "infinite: rank 3"}},
        failed("failed"),
    ]
    assert [row.name for row in ranked(many)] == ["failed", "warned", "infinite", "far", "fine"]


@pytest.mark.parametrize("side", [1, -1])
def test_colours_are_symmetric_about_chance(side: int) -> None:
    null = math.exp(GaussianNull(30, 300).log_condition_number)
    levels = [
        metric("chance").level_of(
            examination({"shape": [30, 300], "condition_number": null * times**side})
        )
        for times in (1.01, *(1.01 * factor for factor in RATIO_LEVELS))
    ]
    assert levels == [*range(6)]


def test_a_singular_matrix_has_the_strongest_colour() -> None:
    row = examination({"shape": [3, 3], "reasons": {"condition_number": "infinite: zero row"}})
    assert (row.kappa, metric("chance").level_of(row)) == (math.inf, 5)


def test_the_map_has_a_place_for_every_matrix() -> None:
    many = trained(3)
    grid = heat_map(ranked(many))
    assert grid.columns == ("embedding", *SHAPES, "head")
    assert [depth for depth, _ in grid.lines] == [0, 1, 2, None]
    shown = [row.name for _, cells in grid.lines for cell in cells if cell for row in cell.rows]
    assert sorted(shown) == sorted(one["name"] for one in many)


def test_a_cell_shows_every_matrix_and_what_it_stands_for() -> None:
    one = {"shape": [1, 9], "condition_number": 1.0, "null_z": 0.0, "kind": "query", "depth": 3}
    grid = heat_map(
        ranked([{**one, "name": "a"}, {**one, "name": "b", "findings": [finding("b")]}])
    )
    labels = [matrix_label(row) for row in grid.lines[0][1][0].shown]
    told = "κ 1.00, 1.0 × chance (z 0)"
    assert labels == [f"b; {told}; 1 finding", f"a; {told}"]


def test_findings_are_told_once_gravest_first() -> None:
    known = clinic()
    once = diagnoses(known)[-1].findings
    assert len(once) == len(known["findings"]) == 15
    assert {one.subject for one in once} <= {one["name"] for one in known["matrices"]}
    assert [(g.severity, g.rule) for g in by_rule(once)] == [
        ("critical", "unresolved-kappa"),
        ("warning", "dead-rows"),
        ("warning", "norm-dispersion"),
        ("info", "like-initial"),
    ]


def test_what_can_be_acted_on_stands_before_what_is_only_seen() -> None:
    seen = Finding("unresolved", "warning", "a", "", "")
    noted = Finding("untrained", "info", "b", "", "", concern="defect")
    assert [group.rule for group in by_rule([seen, noted])] == ["untrained", "unresolved"]


def test_long_lists_tell_how_long_they_are() -> None:
    products = [{"name": f"h.0.attn[qk.{k}]", "kind": "QK", "condition_number": 2.0} for k in "abc"]
    skipped = [{"name": f"{k}.bias", "reason": "one-dimensional"} for k in range(30)]
    told = text(page(document(trained(1), products=products, skipped=skipped)))
    assert "3 products." in told and "30 items, and why" in told


def test_the_table_has_the_column_by_which_it_is_sorted() -> None:
    kappas = {"a": 4.0, "b": 400.0, "c": 40.0}
    many = [{"name": n, "shape": [9, 9], "condition_number": k, "null_condition_number": 4.0,
             "resolved": True} for n, k in kappas.items()]  # fmt: skip
    cells = [a for _, a in Elements(page(document(many))).tags if a.get("data-label") == "× chance"]
    assert [cell["data-value"] for cell in cells] == ["100", "10", "1"]


def test_a_finding_of_the_model_needs_no_matrix() -> None:
    model = finding("model", "exploding-product", severity="critical", evidence="κ is 10¹².")
    assert "model κ is 10¹²." in text(page(document(trained(1), findings=[model])))


def test_an_unknown_number_is_a_dash_with_its_reason() -> None:
    html = page(clinic())
    titles = [a["title"] for tag, a in Elements(html).tags if tag == "abbr" and "title" in a]
    assert "needs all singular values: --spectrum full" in titles
    facts = [fact for m in embedded(html)["matrices"] for fact in m["facts"]]
    shelf = embedded(html)["shelf"]
    assert ["Tail exponent α", "–", "needs all singular values: --spectrum full"] in [
        [shelf[label], value, *(shelf[k] for k in reason)] for label, value, *reason in facts
    ]


def test_infinite_numbers_never_reach_the_script() -> None:
    strange = {
        "name": "w",
        "shape": [2, 2],
        "alpha": math.nan,
        "sigma_max": math.inf,
        "edge": -math.inf,
    }
    strange["plot"] = {
        "spectrum": [[1, math.inf], [2, math.nan]], "null": [[1, 0.0]], "floor": math.nan,
        "rows": {"edges": [math.nan, 1.0], "counts": [2]},
    }  # fmt: skip
    [told] = embedded(page({"matrices": [strange]}))["matrices"]
    assert told["plot"]["spectrum"][1] == [None, None]
    assert told["plot"]["floor"] is None


def test_matrices_of_one_shape_share_the_curve_of_chance() -> None:
    many = trained(30, kinds=("query", "output"))
    shelf = embedded(page(document(many)))["shelf"]
    curves = [one for one in shelf if isinstance(one, list)]
    assert len(curves) == 3  # the places of 256 values, and a curve for each of two shapes


def test_the_curve_of_chance_keeps_its_height() -> None:
    one = trained(1)[1]
    known = embedded(page(document([one])))
    places, curve, factor = known["matrices"][0]["plot"]["null"]
    drawn = np.array(known["shelf"][curve]) * factor
    assert known["shelf"][places] == [place for place, _ in one["plot"]["null"]]
    np.testing.assert_allclose(drawn, [value for _, value in one["plot"]["null"]], rtol=2e-3)


def test_a_comparison_names_what_moved_most_and_least() -> None:
    read = text(page(compared()))
    assert "compared with models/small-llama-base" in read
    assert re.search(r"Most moved: κ \(3\.\d\); least: effective rank \(", read)
    assert "What moved" not in text(page(clinic()))


def test_an_unknown_error_does_not_look_as_if_nothing_moved() -> None:
    lines = {"row_norms": 0.0, "condition_number": None}
    known = document([{**trained(1)[1], "errors": lines}], reference="base")
    html = page(known)
    assert '<td data-move="0">0</td><td>–</td>' in html


def heavy(many: int) -> dict[str, Any]:
    """As many matrices with everything the page can show, and 256 points each."""
    random = np.random.default_rng(2)
    whole = matrix("", "up", 0, random, shape=(2048, 2048))
    name = "model.layers.{}.block_sparse_moe.experts.{}.up_proj.weight"
    values = random.lognormal(size=(many, 256))
    matrices = [
        {**spoiled({**whole, "name": name.format(k // 8, k % 8)}, "warning", "dead-rows"),
         "depth": k // 8, "errors": {c: float(x) for c, x in zip(ERRORS, values[k], strict=False)},
         "plot": {**whole["plot"], "spectrum": list(enumerate(values[k].tolist(), 1)),
                  "null": [(i, 0.02 * (k + 1) / i) for i in range(1, 257)]}}
        for k in range(many)
    ]  # fmt: skip
    return document(matrices, reference="base")


def test_a_thousand_matrices_take_less_than_five_megabytes() -> None:
    html = page(heavy(1000))
    assert len(html.encode()) < 5_000_000
    assert all(one["plot"] for one in embedded(html)["matrices"])


def test_beyond_a_thousand_only_the_worst_have_plots() -> None:
    bare = {"shape": [2, 2], "plot": {"spectrum": [[1, 2.0], [2, 1.0]]}}
    many = [{**bare, "name": f"w{k}", "condition_number": k + 1.0} for k in range(PLOT_LIMIT + 50)]
    told = embedded(page({"matrices": many}))["matrices"]
    assert [one["plot"] is None for one in told] == [True] * 50 + [False] * PLOT_LIMIT


STRANGE = (*HOSTILE, "a\u202egnp.w", "nul\x00 esc\x1b[31m \u2028 \ud800", "עברית.weight")


def filled(name: str) -> dict[str, Any]:
    """A document in which everything that can be named is named so."""
    many = [
        spoiled(m, "critical", name, dtype=name, kind=name, part_of=name)
        for m in compared()["matrices"][:3]
    ]
    for one in many:
        one |= {
            "name": name,
            "status": f"degenerate: {name}",
            "reasons": {"alpha": name},
            "alpha": None,
        }
        one["findings"] = [
            finding(
                name,
                name,
                severity="critical",
                evidence=name,
                advice=name,
                snippet=name or "x",
                correction=name or "x",
            )
        ]
    chain = {"name": name, "bound": 9.0, "condition_number": None, "status": f"ok: {name}"}
    product = {
        "name": name,
        "kind": name,
        "depth": 1,
        "head": 2,
        "condition_number": None,
        "sigma_max": 1.0,
        "reasons": {"condition_number": name},
    }
    return document(
        many, source=name, products=[product, {**product, "condition_number": 3.0}], chains=[chain],
        reference=name or "x", skipped=[{"name": name, "reason": name}],
        failed=[{"name": name, "reason": name}],
        summary={"verdict": name.replace("\n", " ") or "x"},
        provenance={name: name, "nested": {name: [name]}},
        trajectory=[{"source": name, "matrices": many}] * 2,
    )  # fmt: skip


@pytest.mark.parametrize("name", STRANGE, ids=range(len(STRANGE)))
def test_every_name_is_shown_as_text(name: str) -> None:
    html = page(filled(name))
    html.encode()
    found, harmless = (
        [(tag, set(attributes)) for tag, attributes in Elements(one).tags if tag != "wbr"]
        for one in (html, page(filled("harmless")))
    )
    assert found == harmless
    assert len(re.findall("</script>", html)) == 2
    known = embedded(html)["matrices"][0]["name"]
    assert known == legible(name).replace("\n", "\\n")
    assert known.isprintable()


def test_an_empty_name_can_still_be_pressed() -> None:
    assert "(no name)" in text(page(filled("")))


def test_the_page_asks_for_nothing() -> None:
    for made in (clinic(), compared(), stepped()):
        tags = Elements(page(made)).tags
        addresses = [a[n] for _, a in tags for n in ("src", "href", "action", "srcset") if n in a]
        ids = {attributes["id"] for _, attributes in tags if "id" in attributes}
        assert {address.removeprefix("#") for address in addresses} <= ids
        assert not any("style" in attributes for _, attributes in tags)
        assert not any(name.startswith("on") for _, attributes in tags for name in attributes)


def test_the_script_never_reads_data_as_markup() -> None:
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b"
    assert [
        path.name for path in TEMPLATES.glob("*.js") if re.search(markup, path.read_text())
    ] == []


def test_the_same_document_gives_the_same_bytes() -> None:
    assert page(clinic()) == page(clinic())


class Ward(Visit):
    """The page in a browser."""

    def names(self) -> list[str]:
        """Of the matrices in view, in order."""
        return self.page.locator(".vitals tbody tr:visible td:first-child bdi").all_inner_texts()

    def column(self, number: int) -> list[float]:
        cells = self.page.locator(f".vitals tbody tr:visible td:nth-child({number})").all()
        return [float(cell.get_attribute("data-value") or "nan") for cell in cells]

    def dialog(self) -> str:
        """The name of the matrix that is open."""
        return self.page.locator("dialog[open] h2").inner_text()


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    folder, found = tmp_path_factory.mktemp("clinic"), {}
    for make in (clinic, compared, stepped):
        path = folder / f"{make.__name__}.html"
        path.write_text(page(make()), encoding="utf-8")
        found[make.__name__] = path.as_uri()
    return found


@pytest.fixture
def ward(browser: Any, addresses: Mapping[str, str]) -> Iterator[Ward]:
    found = Ward(browser, addresses["clinic"])
    yield found
    found.context.close()
    assert found.complaints == []
    assert found.requests == [addresses["clinic"][:80]]


def test_a_cell_opens_its_matrix_with_its_spectrum(ward: Ward) -> None:
    cell = ward.page.locator("#glance button[data-kind=key][data-depth='3']")
    cell.hover()
    assert "layers.3.self_attn.k_proj.weight" in ward.page.locator(".reading").inner_text()
    assert "not resolved" in ward.page.locator(".reading").inner_text()
    cell.click()
    assert ward.dialog() == "model.layers.3.self_attn.k_proj.weight"
    charts = ward.page.locator("dialog svg")
    assert charts.count() == 2  # a norm of columns was not kept for it
    assert all(charts.nth(k).bounding_box()["height"] > 150 for k in range(2))
    assert len(charts.first.locator(".curve").all()) == 2
    assert charts.first.locator(".floor").count() == 1
    assert charts.last.locator(".bar-of").count() == 32
    told = ward.page.locator("dialog").inner_text()
    assert "infinite: its smallest value cannot be told from zero" in told
    assert "Multipliers().attach(model, optimizer)" in told
    ward.page.keyboard.press("Escape")
    assert ward.page.locator("dialog[open]").count() == 0


def test_a_floor_far_below_is_told_and_not_drawn(ward: Ward) -> None:
    name = clinic()["matrices"][17]["name"]
    ward.page.locator(".vitals").get_by_role("button", name=name).click()
    assert ward.page.locator("dialog .floor").count() == 0
    assert "resolved down to" in ward.page.locator("dialog .keys").first.inner_text()


def test_a_spectrum_can_be_read_off(ward: Ward) -> None:
    ward.page.locator(".vitals .link").first.click()
    picture = ward.page.locator("dialog svg").first
    place = picture.bounding_box()
    ward.page.mouse.move(place["x"] + place["width"] - 2, place["y"] + place["height"] / 2)
    told = ward.page.locator("dialog figcaption output").first.inner_text()
    assert re.fullmatch(r"Number 64: σ = [\d.×⁻⁰-⁹¹²³]+", told)


def test_several_matrices_of_a_cell_are_shown_as_several(browser: Any, tmp_path: Path) -> None:
    random = np.random.default_rng(3)
    many = [matrix(f"layers.{k // 4}.experts.{k % 4}.up", "up", k // 4, random) for k in range(12)]
    (tmp_path / "page.html").write_text(page(document(many)), encoding="utf-8")
    ward = Ward(browser, (tmp_path / "page.html").as_uri())
    own = ward.page.locator("#glance button[data-depth='1']")
    assert own.count() == 4
    own.first.click()
    assert re.fullmatch(r"layers\.1\.experts\.\d\.up", ward.dialog())
    ward.context.close()
    assert ward.complaints == []


def test_a_switch_shows_another_number_and_colours_agree_with_findings(ward: Ward) -> None:
    cells = ward.page.locator("#glance .heat button")
    alarmed = {one["name"] for one in clinic()["matrices"] if one.get("findings")}

    def shown() -> list[tuple[str, str]]:
        script = "all => all.map((b) => [b.dataset.level, b.textContent])"
        return [tuple(pair) for pair in cells.evaluate_all(script)]

    reds = cells.evaluate_all("all => all.filter((b) => b.dataset.alarm).map((b) => b.title)")
    assert {title.partition(";")[0] for title in reds} <= alarmed and reds
    before = shown()
    ward.page.get_by_role("radio", name="stable rank").check()
    assert shown() != before
    places = cells.evaluate_all("all => all.map((b) => Number(b.dataset.open))")
    told = embedded(ward.page.content())["matrices"]
    k = 2 * [one.key for one in METRICS].index("stable")
    assert [text for _, text in shown()] == [told[at]["metrics"][k] for at in places]
    ward.page.get_by_role("radio", name="κ against chance").check()
    assert shown() == before


def test_a_link_opens_its_matrix_and_an_open_matrix_has_a_link(ward: Ward) -> None:
    name = "model.layers.2.mlp.up_proj.weight"
    ward.page.evaluate("(name) => { location.hash = `matrix=${name}`; }", name)
    ward.page.wait_for_selector("dialog[open]")
    assert ward.dialog() == name
    ward.page.keyboard.press("Escape")
    ward.page.locator(".vitals .link").first.click()
    assert ward.page.evaluate("decodeURIComponent(location.hash)") == f"#matrix={ward.dialog()}"


def test_spectra_are_small_multiples_on_shared_axes(ward: Ward) -> None:
    shown = ward.page.locator(".multiple")
    assert shown.count() == 12
    ticks = shown.evaluate_all(
        "all => all.map((b) => [...b.querySelectorAll('text')].map((t) => t.textContent).join())"
    )
    assert len(set(ticks)) == 1  # the axes of one are those of all
    curve = ".multiple .curve"
    first = ward.page.locator(curve).first.get_attribute("d")
    ward.page.get_by_label("from the smallest").check()
    assert ward.page.locator(curve).first.get_attribute("d") != first
    assert ward.page.locator(".multiple .band").count() >= 1
    shown.first.hover()
    assert "from the smallest is" in ward.page.locator(".spectra-told").inner_text()


def test_a_card_tells_three_to_five_facts_and_how_the_model_is() -> None:
    html = page(clinic())
    assert "<strong>Broken</strong>" in html and 3 <= html.count('class="spark"') <= 5
    torch.manual_seed(0)
    well = diagnose({f"layers.{k}.up_proj.weight": torch.randn(64, 32) for k in range(3)}).html()
    assert "<strong>Sound</strong>" in well and 3 <= well.count('class="spark"') <= 5


def test_heads_have_a_map_of_layers_by_heads() -> None:
    torch.manual_seed(0)
    model = nn.ModuleList([nn.MultiheadAttention(8, 4) for _ in range(3)])
    page = diagnose(model).html()
    heads = re.findall(r'<table class="heat moves heads">.*?</table>', page, re.DOTALL)
    assert len(heads) == 2  # QK and OV
    assert all(table.count("<tr>") == 4 and table.count("title=") == 12 for table in heads)


def test_every_column_explains_itself() -> None:
    page = diagnose({"w": torch.eye(3)}).html()
    linked = re.findall(r'class="about" href="#(about-\w+)"', page)
    assert len(linked) == 12 and all(f'id="{name}"' in page for name in linked)


def test_an_interval_that_says_nothing_is_not_printed() -> None:
    torch.manual_seed(0)
    table = diagnose({"w": torch.randn(8, 4)}).html().partition("<tbody>")[2]
    assert 'class="interval">[' not in table  # float32 leaves nothing open


def test_arrows_walk_about_the_map(ward: Ward) -> None:
    ward.page.locator("#glance button[data-kind=query][data-depth='0']").focus()
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "ArrowUp"):
        ward.page.keyboard.press(key)
    focus = "[document.activeElement.dataset.kind, document.activeElement.dataset.depth]"
    assert ward.page.evaluate(focus) == ["key", "1"]
    assert "layer 1, key" in ward.page.locator(".reading").inner_text()
    ward.page.keyboard.press("Enter")
    assert ward.dialog() == "model.layers.1.self_attn.k_proj.weight"


def test_the_table_sorts_both_ways_and_back(ward: Ward) -> None:
    before = ward.names()
    assert before[0] == "model.layers.3.self_attn.k_proj.weight"
    head = ward.page.locator(".vitals th", has_text="κ").get_by_role("button")
    head.click()
    assert ward.column(4) == sorted(ward.column(4))
    head.click()
    assert ward.column(4) == sorted(ward.column(4), reverse=True)
    head.click()
    assert ward.names() == before
    ward.page.locator(".vitals th", has_text="α").get_by_role("button").click()
    assert math.isnan(ward.column(8)[-1])  # unknown comes last


def test_the_table_is_filtered_by_severity_kind_layer_and_name(ward: Ward) -> None:
    page = ward.page
    assert len(ward.names()) == 58
    page.get_by_role("button", name="1 critical").click()
    assert ward.names() == ["model.layers.3.self_attn.k_proj.weight"]
    page.get_by_role("button", name="1 critical").click()
    page.locator("[data-filter=kind]").select_option("gate")
    assert len(ward.names()) == 8
    page.locator("[data-filter=depth]").select_option("5")
    assert ward.names() == ["model.layers.5.mlp.gate_proj.weight"]
    page.locator("[data-filter=kind]").select_option("")
    page.locator("[data-filter=depth]").select_option("none")
    assert sorted(ward.names()) == ["lm_head.weight", "model.embed_tokens.weight"]
    page.locator("[data-filter=depth]").select_option("")
    page.get_by_role("searchbox").fill("LM_head")
    assert ward.names() == ["lm_head.weight"]
    page.get_by_role("searchbox").fill("nothing like it")
    assert ward.names() == []


def test_an_open_matrix_leads_to_the_next_in_the_table(ward: Ward) -> None:
    order = ward.names()
    ward.page.locator(".vitals .link").first.click()
    ward.page.keyboard.press("ArrowRight")
    assert ward.dialog() == order[1]
    ward.page.get_by_label("Next matrix").click()
    assert ward.dialog() == order[2]
    ward.page.get_by_label("Previous matrix").click()
    assert ward.page.locator("dialog .note").inner_text() == "2 of 58"


def test_a_finding_opens_its_matrix_and_its_snippet_is_copied(ward: Ward) -> None:
    from playwright.sync_api import expect

    ward.page.locator(".rule .copy").first.click()
    # the clipboard answers when it likes
    expect(ward.page.locator(".rule .copy").first).to_have_text(re.compile("Copied|Selected"))
    ward.page.locator(".rule .link").first.click()
    assert ward.dialog() == "model.layers.3.self_attn.k_proj.weight"


def test_a_comparison_shows_errors_of_every_matrix(browser: Any, addresses: Any) -> None:
    ward = Ward(browser, addresses["compared"])
    maps = ward.page.locator("#change .heat")
    assert maps.count() == 2
    assert maps.first.locator("tbody tr").count() == 9
    assert maps.last.locator("tbody tr").count() == 8
    still = maps.first.locator("tbody tr").first.locator("td").nth(ERRORS.index("effective_rank"))
    assert still.get_attribute("data-move") == "0"
    ward.page.get_by_text("Every matrix").click()
    rows = ward.page.locator("#change .sortable tbody tr")
    assert rows.count() == 58
    ward.page.locator("#change .sortable th", has_text="row norms").get_by_role("button").click()
    values = [float(row.locator("td").nth(1).get_attribute("data-value")) for row in rows.all()[:9]]
    assert values == sorted(values)
    ward.context.close()
    assert ward.complaints == []


def test_a_trajectory_has_one_kappa_for_a_matrix_that_is_not_resolved() -> None:
    open_one = {"kind": "up", "condition_number": 900.0, "condition_number_low": 30.0}
    steps = [{"source": str(k), "matrices": [open_one | {"resolved": False}]} for k in range(2)]
    found = [diagnosis for step in steps for diagnosis in diagnoses(step)]
    assert curves(found)["condition_number"].lines == (("up", (30.0, 30.0)),)
    assert [step.median for step in trajectory_steps(found)] == [30.0, 30.0]


def test_a_trajectory_is_drawn(browser: Any, addresses: Any) -> None:
    ward = Ward(browser, addresses["stepped"])
    charts = ward.page.locator("#trajectory svg")
    assert [charts.nth(k).locator(".curve").count() for k in range(charts.count())] == [9, 9]
    assert charts.first.locator(".dot").count() == 9 * 6
    named = [name for name in charts.first.locator("text").all_text_contents() if "step" in name]
    assert len(named) == 3  # every other one of six
    assert ward.page.locator("#trajectory table").first.locator("tbody tr").count() == 6
    ward.context.close()
    assert ward.complaints == []


def test_no_width_needs_scrolling_sideways(browser: Any, addresses: Any) -> None:
    for address in addresses.values():
        ward = Ward(browser, address)
        for width in (1920, 1280, 1100, 961, 800, 600, 390, 320):
            ward.page.set_viewport_size({"width": width, "height": 844})
            assert ward.page.evaluate("document.documentElement.scrollWidth") <= width
        ward.page.emulate_media(media="print")
        ward.page.set_viewport_size({"width": 700, "height": 844})  # A4 between its margins
        assert ward.page.evaluate("document.documentElement.scrollWidth") <= 700
        assert not ward.page.locator(".controls").is_visible()
        ward.context.close()


COVERED = """() => [...document.querySelectorAll("pre")].filter((pre) => {
  const button = pre.querySelector(".copy").getBoundingClientRect(), lines = document.createRange();
  lines.selectNodeContents(pre.querySelector("code"));
  return [...lines.getClientRects()].some((line) => line.right > button.left + 1
    && line.bottom > button.top + 1 && line.top < button.bottom - 1);
}).length"""


def test_the_button_that_copies_covers_no_code(browser: Any, addresses: Any) -> None:
    ward = Ward(browser, addresses["clinic"])
    assert ward.page.locator("pre .copy").count()
    for width in (1280, 600, 375):
        ward.page.set_viewport_size({"width": width, "height": 844})
        assert ward.page.evaluate(COVERED) == 0
    ward.context.close()


def test_a_phone_opens_a_matrix_over_its_whole_screen(browser: Any, addresses: Any) -> None:
    ward = Ward(browser, addresses["clinic"], 390, is_mobile=True, has_touch=True)
    ward.page.locator("#glance button[data-kind=up][data-depth='2']").tap()
    assert ward.dialog() == "model.layers.2.mlp.up_proj.weight"
    assert ward.page.locator("dialog").bounding_box()["width"] == 390
    assert ward.page.evaluate("document.querySelector('dialog').scrollWidth") <= 390
    ward.page.get_by_label("Close").tap()
    ward.page.get_by_label("Sort by").select_option("κ")
    assert ward.column(4) == sorted(ward.column(4), reverse=True)
    ward.context.close()
    assert ward.complaints == []


def test_long_tables_are_laid_out_a_page_at_a_time(browser: Any, tmp_path: Path) -> None:
    many = [{"name": f"w{k}", "shape": [2, 2], "condition_number": k + 1.0} for k in range(250)]
    (tmp_path / "page.html").write_text(page({"matrices": many}), encoding="utf-8")
    ward = Ward(browser, (tmp_path / "page.html").as_uri())
    assert len(ward.names()) == 100
    ward.page.locator(".vitals th", has_text="κ").get_by_role("button").click()
    assert ward.names()[0] == "w0"
    assert len(ward.names()) == 100
    ward.page.get_by_role("button", name="Show more").click()
    assert len(ward.names()) == 250
    ward.context.close()
    assert ward.complaints == []


def test_nothing_hostile_runs_or_becomes_an_element(browser: Any, tmp_path: Path) -> None:
    counts = []
    for place, name in enumerate((" ".join(STRANGE[:6]) + STRANGE[8], "harmless")):
        path = tmp_path / f"{place}.html"
        path.write_text(page(filled(name)), encoding="utf-8")
        ward = Ward(browser, path.as_uri())
        ward.page.locator(".vitals .link").first.click()
        counts.append(ward.page.locator("*:not(wbr)").count())
        assert ward.complaints == []
        assert ward.page.locator("img, iframe, [onmouseover]").count() == 0
        ward.context.close()
    assert counts[0] == counts[1]


def test_strange_plots_are_drawn_without_complaint(browser: Any, tmp_path: Path) -> None:
    rows = {"edges": [1.0, 1.0], "counts": [3]}
    plots = [
        None,
        {"spectrum": [], "null": [], "floor": 0.1, "rows": None},
        {"spectrum": [[1, 2.0]], "null": [[1, 2.0]], "floor": None, "rows": rows},
        {"spectrum": [[1, 0.0], [2, 0.0]], "null": [], "floor": 0.0, "rows": {}},
        {
            "spectrum": [[1, 1e300], [2, 1e-300]],
            "null": [[1, 1e-300]],
            "floor": 1e-308,
            "rows": rows,
        },
    ]
    many = [{"name": f"w{k}", "shape": [2, 2], "plot": plot} for k, plot in enumerate(plots)]
    (tmp_path / "page.html").write_text(page({"matrices": many}), encoding="utf-8")
    ward = Ward(browser, (tmp_path / "page.html").as_uri())
    for link in range(len(plots)):
        ward.page.locator(".vitals .link").nth(link).click()
        assert "NaN" not in ward.page.locator("dialog").inner_html()
        ward.page.get_by_label("Close").click()
    ward.context.close()
    assert ward.complaints == []


def test_without_scripts_everything_is_there_but_the_plots(browser: Any, tmp_path: Path) -> None:
    many = [{"name": f"w{k}", "shape": [2, 2], "condition_number": k + 1.0} for k in range(150)]
    (tmp_path / "page.html").write_text(page({"matrices": many}), encoding="utf-8")
    ward = Ward(browser, (tmp_path / "page.html").as_uri(), java_script_enabled=False)
    assert len(ward.names()) == 150
    assert not ward.page.locator(".controls").is_visible()
    ward.context.close()


def test_the_legends_and_colours_are_those_of_the_levels() -> None:
    style = (TEMPLATES / "diagnosis.css").read_text()
    for name, limits in (("level", RATIO_LEVELS), ("move", ERROR_LEVELS)):
        coloured = set(re.findall(rf'data-{name}="(\d)"', style))
        assert coloured == {str(i + 1) for i in range(len(limits))}


@pytest.mark.parametrize("part", ["heat_map", "by_rule", "product_document", "chain_document",
                                  "change", "curves", "trajectory_steps", "facts", "_plot",
                                  "map_level", "sortable", "spark_paths", "head_maps",
                                  "path_map"])  # fmt: skip
def test_a_panel_that_cannot_be_made_costs_no_other(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: object) -> NoReturn:
        raise ZeroDivisionError("division by zero")

    fails.__name__ = part
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2), "fc1": nn.Linear(8, 8)})
    model["fc2"] = nn.Linear(8, 8)
    found = diagnose(model, reference=model)
    monkeypatch.setattr(html, part, fails)
    page = html.diagnosis_page([found, found])
    assert "ZeroDivisionError: division by zero" in page or part == "_plot"
    sections = "glance", "findings", "change", "matrices", "products", "chains", "trajectory"
    assert all(f'<section id="{name}">' in page for name in (*sections, "provenance"))
    assert page.count("could not be shown") <= 5 and "attn.in_proj_weight" in page
