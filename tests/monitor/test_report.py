"""The page of a run: one file, whatever is in the record, with every number to be read."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.test_report import HOSTILE, Elements, Visit, browser

from kappascope.monitor import report
from kappascope.monitor.record import Run
from kappascope.monitor.report import envelope, run_document, run_page, write_run_page
from kappascope.refusal import Refusal
from monitored_runs import MATRICES, reading, write_example, written

__all__ = ["browser"]  # a fixture


def started(**more: Any) -> dict[str, Any]:
    return {"kind": "start", "model": "GPT", "matrices": MATRICES, "time": 1.7e9, **more}


# --- thinning -------------------------------------------------------------------------------------


VALUES = st.lists(st.floats(width=32), max_size=400)


@given(VALUES, st.integers(6, 300))
def test_thinning_keeps_the_ends_the_extremes_and_a_gap(values: list[float], most: int) -> None:
    kept = envelope(values, most)
    assert kept == sorted(set(kept)) and len(kept) <= max(most, 0)
    assert len(values) > most or kept == list(range(len(values)))
    shown = [values[k] for k in kept]
    if values:
        assert kept[0] == 0 and kept[-1] == len(values) - 1
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert max(finite) in shown
        if len(finite) == len(values):
            assert min(finite) in shown
    assert any(not math.isfinite(value) for value in shown) == (len(finite) < len(values))


# --- the document ---------------------------------------------------------------------------------


def test_every_series_comes_back_from_the_document(tmp_path: Path) -> None:
    run = Run.read(write_example(tmp_path))
    document = run_document(run)
    for matrix in document["matrices"]:
        assert matrix["detailed"]
        for quantity, (place, values) in matrix["series"].items():
            pairs = list(zip(document["steps"][place], values, strict=True))
            original = run.series(matrix["name"], quantity)
            assert [step for step, _ in pairs] == [step for step, _ in original]
            assert values == pytest.approx([value for _, value in original], rel=5e-4)
        for quantity, lines in matrix["vectors"].items():
            for index, place, values in lines:
                original = run.series(matrix["name"], quantity, index)
                assert values == pytest.approx([value for _, value in original], rel=5e-4)
                assert document["steps"][place] == [step for step, _ in original]
    shown = {q for chart in document["charts"] for q in chart["quantities"]}
    intervals = {"condition_number_low", "condition_number_high"}
    scalars = {quantity for _, quantity, index in run.columns if index is None} - {"overhead"}
    assert shown == scalars - intervals
    assert {*document["vectors"]} == {quantity for _, quantity, index in run.columns if index}
    json.dumps(document, allow_nan=False)


def test_a_quantity_that_nobody_foresaw_gets_a_chart_of_its_own(tmp_path: Path) -> None:
    rows = {"w": {"moon_phase": 0.3}}
    document = run_document(written(tmp_path, {"kind": "reading", "rows": rows}))
    assert document["charts"] == [{"title": "Moon phase", "note": "", "quantities": ["moon_phase"]}]


def test_what_is_not_finite_is_told_as_such(tmp_path: Path) -> None:
    rows = [{"w": {"condition_number": math.inf}}, {"w": {"non_finite": 2.0}}]
    run = written(
        tmp_path, *({"kind": "reading", "step": k, "rows": row} for k, row in enumerate(rows))
    )
    (matrix,) = run_document(run)["matrices"]
    assert matrix["series"]["condition_number"][1] == ["inf", "nan"]
    assert matrix["kappa"] == "–"


def test_a_large_run_makes_a_small_page_on_which_spikes_and_the_needy_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "NUMBERS", 4000)
    names = [f"h.{k}.fc.weight" for k in range(40)]
    facts = {name: {"kind": "up", "depth": k} for k, name in enumerate(names)}
    entries: list[dict[str, Any]] = [{"kind": "start", "matrices": facts}]
    for step in range(400):
        rows: dict[str, Any] = {name: reading(step, 0) for name in names}
        if step == 200:
            rows["h.7.fc.weight"]["condition_number"] = 1e9
        entries.append({"kind": "reading", "step": step, "rows": rows})
    alert = {"name": "dead-row", "matrix": "h.31.fc.weight", "text": "row 3 is dead"}
    run = written(tmp_path, *entries, {"kind": "alert", "step": 9, **alert})
    document = run_document(run)
    numbers = sum(
        len(values) for one in document["matrices"] for _, values in one["series"].values()
    )
    assert numbers < 20_000 and len(document["matrices"]) == 40
    first, *others = document["matrices"]
    assert first["name"] == "h.31.fc.weight" and first["detailed"] and first["vectors"]
    assert not others[-1]["detailed"] and not others[-1]["vectors"]
    (spiked,) = (one for one in document["matrices"] if one["name"] == "h.7.fc.weight")
    assert 1e9 in spiked["series"]["condition_number"][1]


# --- the page without a browser -------------------------------------------------------------------


def test_the_page_is_one_file_that_begins_with_the_verdict(tmp_path: Path) -> None:
    path = write_run_page(write_example(tmp_path / "run"), tmp_path / "run.html")
    page = path.read_text()
    told = Elements(page)
    assert "Run of GPT" in told.text and "1 alert, at step 60" in told.text
    assert not [tag for tag, _ in told.tags if tag in ("link", "img", "iframe", "object")]
    assert not [a for _, a in told.tags if {"src", "onload", "onclick", "style"} & {*a}]
    assert "connect-src &#39;none&#39;" in page and "default-src &#39;none&#39;" in page
    assert run_page(Run.read(tmp_path / "run")) == page


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_no_text_of_a_record_is_markup(text: str, tmp_path: Path) -> None:
    facts = {text: {"kind": text, "depth": 0, "shape": [2, 2], "dtype": text}}
    run = written(
        tmp_path,
        started(model=text, matrices=facts, skipped={text: text}, options={text: text}),
        {"kind": "reading", "rows": {text: {text: 1.0, "condition_number": 2.0}}},
        {"kind": "log", "values": {text: 1.0}},
        {"kind": "alert", "name": text, "matrix": text, "text": text},
        {"kind": "ring", "text": text},
        started(step=1, cut=text),
    )
    page = run_page(run)
    page.encode()
    plain = re.sub(r"<(style|script)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert text not in plain or "<" not in text
    assert all(c.isprintable() or c.isspace() for c in page)


def test_a_folder_without_a_record_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="holds no record of a run"):
        write_run_page(tmp_path, tmp_path / "run.html")


def test_records_and_pages_are_read_without_torch() -> None:
    code = (
        "import sys, kappascope.monitor.record, kappascope.monitor.report\n"
        "import kappascope.monitor.terminal, kappascope.monitor.serving\n"
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# --- the page in a browser ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run with two layers, an alert, a matrix with NaN for a while, and a second session."""
    folder = tmp_path_factory.mktemp("page")
    write_example(folder / "run", closed=False)
    written(folder / "run", started(step=200, cut="the record before was cut", resumed=True))
    rows: dict[str, Any] = {name: reading(240, 0) for name in MATRICES}
    rows["h.0.mlp.fc1.weight"] = {"non_finite": 3.0}
    written(folder / "run", {"kind": "reading", "step": 220, "rows": rows})
    rows = {name: reading(240, 0) for name in MATRICES}
    written(folder / "run", {"kind": "reading", "step": 240, "rows": rows})
    return write_run_page(folder / "run", folder / "run.html").as_uri()


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Visit]:
    found = Visit(browser, address)
    yield found
    assert found.complaints == []
    found.context.close()


def test_a_browser_draws_all_without_complaint_or_request(visit: Visit, address: str) -> None:
    assert visit.requests == [address[:80]]
    assert visit.page.locator("#logs svg").count() == 1
    titles = visit.page.locator("#kinds svg").evaluate_all("s => s.map(x => x.ariaLabel)")
    assert titles == ["query (2)", "output (2)", "up (2)"]
    assert visit.page.locator("#matrix svg .band").count() == 1
    assert visit.page.locator("#signal path.cell").count() >= 2
    assert visit.page.locator("#matrices tbody tr").count() == 6


def test_small_charts_have_the_same_axes(visit: Visit) -> None:
    texts = "s => s.map(x => [...x.querySelectorAll('text:not(.heading)')].map(t => t.textContent))"
    first, *others = visit.page.locator("#kinds svg").evaluate_all(texts)
    assert first and all([t for t in each if t != "×"] == first for each in others)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_it_fits_every_screen(browser: Any, address: str, width: int, scheme: str) -> None:
    visit = Visit(browser, address, width, color_scheme=scheme)
    wide = visit.page.evaluate("document.documentElement.scrollWidth")
    sizes = visit.page.locator("svg:not(.spark)").evaluate_all(
        "s => s.map(x => [x.getBoundingClientRect().width, x.viewBox.baseVal.width])"
    )
    assert wide <= width and visit.complaints == []
    assert all(200 < shown <= width and abs(shown - drawn) < 2 for shown, drawn in sizes)
    visit.context.close()


def test_the_pointer_reads_the_interval_of_kappa(visit: Visit) -> None:
    picture = visit.page.locator("#matrix svg").first
    picture.hover(position={"x": 60, "y": 130})
    told = visit.page.locator("#matrix output").first.inner_text()
    assert re.fullmatch(r"step 0: κ 11 \[10.9, 11.1\]", told)


def test_arrows_read_every_point_and_a_gap_has_its_reason(visit: Visit) -> None:
    visit.page.locator("[data-choice=matrix]").select_option(label="h.0.mlp.fc1.weight")
    picture = visit.page.locator("#matrix svg").first
    picture.focus()
    told = []
    for _ in range(13):
        picture.press("ArrowRight")
        told.append(visit.page.locator("#matrix output").first.inner_text())
    assert told[0].startswith("step 0: κ 10 [") and told[-1].startswith("step 240: κ 34 [")
    assert told[11] == "step 220: κ no number: entries are not finite"
    assert visit.page.locator("#matrix svg .gap").count() > 0


def test_a_cell_of_the_heat_map_is_read_by_pointer_and_keys(visit: Visit) -> None:
    picture = visit.page.locator("#signal svg")
    picture.focus()
    picture.press("ArrowRight")
    told = visit.page.locator("#signal output")
    assert told.inner_text() == "Singular value largest, step 0: signal u′Gv -0.01"
    picture.press("ArrowDown")
    assert "Singular value at 25 %, step 0" in told.inner_text()
    picture.hover(position={"x": 640, "y": 30})
    assert re.match(r"Singular value largest, step 1\d0: signal", told.inner_text())


def test_alerts_lead_to_their_matrix_and_the_table_sorts(visit: Visit) -> None:
    visit.page.locator("[data-choice=matrix]").select_option(label="h.0.mlp.fc1.weight")
    visit.page.locator("ol.alerts .link").click()
    chosen = visit.page.locator("[data-choice=matrix] option:checked").inner_text()
    assert chosen == "h.1.mlp.fc1.weight"
    assert visit.page.locator("#logs svg .alert").count() == 1
    assert visit.page.locator("#logs svg .cut").count() >= 1
    visit.page.locator("#matrices th button", has_text="Name").click()
    names = visit.page.locator("#matrices tbody td:first-child").all_inner_texts()
    assert names == sorted(MATRICES)
    visit.page.locator("[data-choice=text]").fill("fc1")
    assert visit.page.locator("#matrices tbody tr:visible").count() == 2


def test_another_quantity_redraws_the_small_charts(visit: Visit) -> None:
    before = visit.page.locator("#kinds svg .curve").first.get_attribute("d")
    visit.page.locator("[data-choice=quantity]").select_option("swallowed")
    assert visit.page.locator("#kinds svg .curve").first.get_attribute("d") != before
    assert visit.page.locator("#kinds svg .band").count() == 0


@pytest.mark.parametrize(
    "entries", [[], [{"kind": "alert", "name": "a", "matrix": "", "text": "b"}]]
)
def test_a_run_without_readings_has_a_page(
    browser: Any, tmp_path: Path, entries: list[dict[str, Any]]
) -> None:
    written(tmp_path / "run", started(), *entries)
    page = write_run_page(tmp_path / "run", tmp_path / "run.html")
    visit = Visit(browser, page.as_uri())
    assert visit.complaints == []
    assert "No matrix was read yet" in visit.page.locator("#kinds").inner_text()
    visit.context.close()


@pytest.mark.parametrize("text", ["</script><script>alert(1)</script>", "{{ 1 }}", "a\u202eb"])
def test_hostile_names_are_text_in_a_browser(browser: Any, tmp_path: Path, text: str) -> None:
    facts = {text: {"kind": text, "depth": 0, "shape": [2, 2], "dtype": "float32"}}
    rows = {text: {"condition_number": 2.0, text: [[0.0, 1.0], [1.0, 0.5]]}}
    written(
        tmp_path / "run",
        started(model=text, matrices=facts),
        {"kind": "reading", "rows": rows},
        {"kind": "log", "values": {text: 1.0}},
        {"kind": "alert", "name": text, "matrix": text, "text": text},
    )
    page = write_run_page(tmp_path / "run", tmp_path / "run.html")
    visit = Visit(browser, page.as_uri())
    assert visit.complaints == []
    assert visit.page.locator("#kinds svg").count() == 1
    visit.context.close()
