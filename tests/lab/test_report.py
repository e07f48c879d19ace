"""The report: one page that needs nothing, says what is missing, and shows every name as text."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.lab.test_figures import PLOTS, row, spectra, trials

from kappascope.lab import drawing, figures, report
from kappascope.lab.claims import Printed
from kappascope.lab.experiment import Experiment, Study
from kappascope.lab.report import (
    Picture,
    Report,
    Section,
    paragraphs,
    rendered,
    repetitions,
    report_page,
    section,
    trial_groups,
)
from kappascope.lab.store import parquet_bytes
from kappascope.lab.table import Table
from kappascope.lab.verdicts import OUTCOMES, conclusion
from kappascope.system.workers import Here

HOSTILE = (
    "</script><script>alert(1)</script>",
    '" onmouseover="alert(1)',
    "<img src=x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %}",
    "two\nlines &amp; more",
    r"$\frac{1}{$ %s 100% ]]> -->",
    "x" * 10_000,
)


def claim(place: int, outcome: str = "holds", **more: Any) -> dict[str, Any]:
    return {
        "id": f"e1.claim-{place}", "experiment": "e1", "sentence": f"claim number {place}",
        "source": "P 4.1", "verdict": outcome, "measured": float(place),
        "interval": (place - 0.5, place + 0.5), "n": 10 * place, "explanation": "So it is.", **more,
    }  # fmt: skip


def printed(place: int, **more: Any) -> dict[str, Any]:
    return {
        "id": f"e1/{place}/mean", "experiment": "e1", "what": f"figure {place}", "printed": "0.27",
        "measured": 0.273, "matches": True, "agreement": "to its digits",
        "category": "matched" if more.get("matches", True) else "not matched", **more,
    }  # fmt: skip


def experiment(name: str, **more: Any) -> Experiment:
    number = int(name[1:])
    question = "What is learned?\n\nOne matrix,\n200 steps."
    plain = Experiment(number, f"Experiment {name}", f"4.{number}", question, (), trials)
    return replace(plain, **{"plot": PLOTS.get(name), **more})


def drawn(name: str, many: int = 40) -> Section:
    rows, lines = trials(name, many), spectra(name)
    figure = {name: PLOTS[name](rows, lines), f"{name}-spectra": figures.gallery(lines)}
    pictures = {picture.name: picture for picture in rendered(figure, Here())}
    return section(experiment(name), rows, pictures)


CLAIMS = [claim(k, OUTCOMES[k % 4]) for k in range(1, 13)]
FIGURES = [printed(1), printed(2, measured=379.1, printed="440", matches=False, where="50 repeats")]
PROVENANCE = {"kappascope": "0.1.0", "trials": 12345, "failed": [], "notes": ["a note"]}


@pytest.fixture(scope="module")
def whole() -> str:
    """A report as large as the real one."""
    return report_page(
        Report([drawn(name, many=400) for name in PLOTS], CLAIMS, FIGURES, PROVENANCE)
    )


DRAWN = {  # what a drawing may consist of: nothing that runs
    "svg", "g", "defs", "path", "use", "clippath", "rect", "image", "title",
}  # fmt: skip


class Elements(HTMLParser):
    """The elements of a page, their attributes and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.drawn = 0
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.drawn += tag == "svg"
        if not self.drawn or tag == "svg":  # letters of a drawing are paths, as many as there are
            self.tags.append((tag, dict(attrs)))
        assert not self.drawn or tag in DRAWN

    def handle_endtag(self, tag: str) -> None:
        self.drawn -= tag == "svg"

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_opens_with_three_sentences_that_count() -> None:
    sentences = conclusion(CLAIMS, FIGURES)
    assert sentences[0] == "Of 12 claims, 3 hold, 3 fail, 3 are undecided and 3 are ill-posed."
    assert sentences[2] == "Of 2 figures that the paper prints, 1 matched, 1 not matched."
    page = Elements(report_page(Report([], CLAIMS, FIGURES, {}))).text
    assert all(sentence in page for sentence in sentences)


def test_what_is_beyond_the_paper_stands_and_is_counted_apart() -> None:
    paper, beyond = Section(experiment("e1")), Section(experiment("e10"))
    claims = [claim(1), claim(2, "fails", experiment="e10")]
    page = Elements(report_page(Report([paper, beyond], claims, [], {})))
    assert "Of 1 claim, 1 holds, 0 fail" in page.text
    assert "Beyond the paper: of 1 claim, 0 hold, 1 fails" in page.text
    order = [attributes.get("id") for tag, attributes in page.tags if tag == "section"]
    assert order.index("e1") < order.index("beyond") < order.index("e10")
    alone = Elements(report_page(Report([beyond], claims[1:], [], {}))).text
    assert "Beyond the paper: of 1 claim" in alone and "No printed figure was" not in alone[:900]


def test_all_verdicts_look_alike() -> None:
    tags = Elements(report_page(Report([], CLAIMS, [], {}))).tags
    badges = [attributes for tag, attributes in tags if attributes.get("class") == "badge"]
    assert {badge["data-outcome"] for badge in badges} == set(OUTCOMES)


def test_a_figure_that_was_not_measured_says_why() -> None:
    absent = printed(1, measured=None, matches=False, agreement="not measured: no rows of size 9")
    tags = Elements(page := report_page(Report([], [], [absent], {}))).tags
    badges = [attributes for _, attributes in tags if attributes.get("class") == "badge"]
    assert [badge["data-outcome"] for badge in badges] == ["undecided"]
    assert "not measured no rows of size 9" in Elements(page).text


def test_a_claim_that_was_not_measured_is_not_called_undecided() -> None:
    absent = claim(1, "undecided", explanation="Not measured: no trials of size 9")
    page = report_page(Report([], [absent, claim(2, "undecided")], [], {}))
    badges = re.findall(r'class="badge" data-outcome="undecided">([^<]*)<', page)
    assert badges == ["not measured", "undecided"]


def test_an_incomplete_run_says_so_before_anything_else() -> None:
    page = report_page(Report([], CLAIMS, [], {}, ["e4 own trials 0-63: time limit"]))
    body = Elements(page[page.index("<body>") :]).text.strip()
    assert body.startswith("This run is incomplete. 1 part is missing: e4 own trials 0-63")
    assert "incomplete." not in report_page(Report([], CLAIMS, [], {}))


def test_an_empty_report_says_what_is_not_there() -> None:
    text = Elements(report_page(Report([], [], [], {}))).text
    assert "In this run no claim was judged." in text
    assert "No printed figure was compared." in text


def filled(text: str) -> Report:
    """A report in which everything that can be named is named ``text``."""
    rows = Table.of(row(k, 1.0 + k, structure=text, stream=text, component=text) for k in range(3))
    both = [
        {"seed": 0, "structure": s, "which": "target", "values": [2.0, 1.0]} for s in (text, "")
    ]
    gallery = figures.gallery(Table.of(both))
    svg = drawing.svg(gallery)
    picture = Picture(text, svg, None, drawing.cells(gallery, svg), text)
    named = Study(21, text, text, text, (), trials, name=text)
    names = dict.fromkeys(("id", "sentence", "source", "explanation", "experiment"), text)
    return Report(
        [Section(named, picture, picture, tuple(trial_groups(rows)))],
        [claim(1, **names)],
        [printed(1, id=text, experiment=text, what=text, printed=text, where=text)],
        {text: text, "nested": {text: [text]}, "listed": [text, {"a": text}]},
        [text],
    )


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_every_name_is_shown_as_text(text: str) -> None:
    page, harmless = Elements(report_page(filled(text))), Elements(report_page(filled("harmless")))
    assert [tag for tag, _ in page.tags] == [tag for tag, _ in harmless.tags]
    assert [set(found) for _, found in page.tags] == [set(found) for _, found in harmless.tags]
    assert " ".join(text.split()) in " ".join(page.text.split())


def test_the_page_names_the_hash_of_all_that_may_run() -> None:
    page = report_page(Report([], CLAIMS, FIGURES, {}))
    policy = next(a["content"] for t, a in Elements(page).tags if t == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; img-src data:;")
    for kind in ("style", "script"):
        [body] = re.findall(rf"<{kind}>(.*?)</{kind}>", page, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy


def test_the_page_asks_for_nothing(whole: str) -> None:
    tags = Elements(whole).tags
    addresses = [a[n] for _, a in tags for n in ("src", "href", "action", "srcset") if n in a]
    assert addresses
    assert all(address.startswith(("data:image/svg+xml", "#")) for address in addresses)
    assert not [tag for tag, _ in tags if tag in ("link", "iframe", "object", "embed", "base")]
    assert not any("style" in attributes for _, attributes in tags)


def test_links_lead_to_something(whole: str) -> None:
    tags = Elements(whole).tags
    ids = {attributes["id"] for _, attributes in tags if "id" in attributes}
    assert {a["href"] for tag, a in tags if tag == "a"} <= {f"#{name}" for name in ids}


def test_a_section_opens_with_its_question() -> None:
    page = "Experiment 7: depth (Section 4.7).\n\nWhat does it do? Layers that\nlearn.\n\nMore."
    assert paragraphs(page) == ["What does it do?", "Layers that learn.", "More."]
    assert paragraphs("") == []


def test_the_page_is_light_enough(whole: str) -> None:
    assert len(whole.encode()) < 5_000_000


def test_the_same_report_gives_the_same_bytes() -> None:
    first, second = (
        report_page(Report([drawn("e7")], CLAIMS, FIGURES, PROVENANCE)) for _ in range(2)
    )
    assert first == second


def test_numbers_tell_the_end_of_training_only() -> None:
    way = [row(k, 9.0, epoch=e) for e in (1, 2) for k in range(3)]
    end = [row(k, 1.0, epoch=None) for k in range(3)]
    assert [g.summary.mean.value for g in trial_groups(Table.of(way + end))] == [1.0]
    assert [g.setting["epoch"] for g in trial_groups(Table.of(way))] == [2]


def test_numbers_count_what_is_not_finite() -> None:
    rows = Table.of(row(k, float("nan") if k else 1.0) for k in range(3))
    [group] = trial_groups(rows)
    assert (group.summary.median.n, group.summary.median.missing) == (1, 2)
    page = report_page(Report([Section(experiment("e1"), groups=(group,))], [], [], {}))
    assert "+2 not finite" in page


def test_one_trial_carrying_the_mean_is_told() -> None:
    rows = Table.of(row(k, 97.0 if k == 4 else 0.75) for k in range(5))
    page = report_page(
        Report([Section(experiment("e1"), groups=tuple(trial_groups(rows)))], [], [], {})
    )
    assert "97&nbsp;%" in page


def test_a_printed_figure_is_repeated_on_sets_as_large_as_the_papers() -> None:
    paper = [row(k, 5.0, stream="paper") for k in range(3)]
    own = [row(k, float(k // 3), stream="own") for k in range(8)]
    mean = Printed("e1/x/mean", "x", "1.0", lambda t: t.where(stream="paper").values().mean())
    assert repetitions(mean, Table.of(paper + own)) == [0.0, 1.0]


def test_a_figure_that_differs_is_shown_within_its_distribution() -> None:
    paper = [row(k, 9.0, stream="paper") for k in range(2)]
    own = [row(k, float(k // 2), stream="own") for k in range(20)]
    rows = Table.of({"experiment": "e1", **one} for one in paper + own)
    mean = Printed("e1/x/mean", "x", "4.5", lambda t: t.where(stream="paper").values().mean())
    lab = experiment("e1", figures=(mean,), plot=None)
    results = SimpleNamespace(
        rows=rows, everything=rows, spectra=rows.where(seed=-1), provenance={}
    )
    verdicts = {"claims": [], "figures": [printed(1, id=mean.id, matches=False, measured=9.0)]}
    page = dict(report.files([lab], results, verdicts))["report.html"].decode()
    assert "in 10 repetitions with other seeds the median is 4.50" in page
    assert "50% fall below the print" in page


def test_the_files_are_the_page_and_its_figures() -> None:
    lab = experiment("e5")
    rows = trials("e5")
    results = SimpleNamespace(
        rows=rows, everything=rows, spectra=spectra("e5"), provenance={"failed": []}
    )
    found = dict(report.files([lab], results, {"claims": CLAIMS, "figures": []}))
    drawn = {f"figures/e5{kind}" for kind in (".svg", ".png", "-spectra.svg")}
    assert set(found) == {"report.html", *drawn}


def test_an_experiment_without_trials_makes_the_run_incomplete() -> None:
    rows, lines = trials("e5"), spectra("e5")
    lab = [experiment("e5"), experiment("e9")]
    results = SimpleNamespace(rows=rows, everything=rows, spectra=lines, provenance={})
    page = dict(report.files(lab, results, {"claims": [], "figures": []}))["report.html"]
    assert b"no trial of experiment 9 was run" in page


def test_a_figure_that_cannot_be_drawn_costs_no_report() -> None:
    plot = figures.sheet(figures.error_lines("row_norms", by="no such column"))
    lab = experiment("e5", plot=plot)
    results = SimpleNamespace(
        rows=trials("e5"), everything=trials("e5"), spectra=spectra("e5"), provenance={}
    )
    page = dict(report.files([lab], results, {"claims": CLAIMS, "figures": []}))["report.html"]
    assert b"the figure of experiment 5 was not drawn" in page
    assert b"claim number 12" in page


FLAGS = (
    "--no-sandbox --disable-gpu --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not Path("/usr/bin/chromium").exists():
        pytest.skip("needs Debian's chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path="/usr/bin/chromium", args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def address(whole: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(whole, encoding="utf-8")
    return path.as_uri()


class Visit:
    """A page in a browser, with all it complains about or asks for."""

    def __init__(self, browser: Any, address: str, width: int = 1280, **more: Any) -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 844}, **more)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append("dialog"))
        self.page.on("request", lambda request: self.requests.append(request.url[:80]))
        self.page.goto(address)

    def shown(self) -> list[str]:
        """The claims in view, by the number in their sentence."""
        rows = self.page.locator("#claims tbody tr:visible td:nth-child(2)")
        return re.findall(r"claim number (\d+)", " ".join(rows.all_inner_texts()))


@pytest.fixture
def visit(browser: Any, address: str) -> Iterator[Visit]:
    found = Visit(browser, address)
    yield found
    found.context.close()


def test_a_browser_opens_it_without_complaint_or_request(visit: Visit, address: str) -> None:
    assert visit.complaints == []
    others = [url for url in visit.requests if not url.startswith("data:image/svg+xml")]
    assert others == [address[:80]]


def test_every_figure_is_visible_on_any_screen(visit: Visit) -> None:
    for width, scheme in ((1280, "light"), (1280, "dark"), (390, "light"), (390, "dark")):
        visit.page.set_viewport_size({"width": width, "height": 844})
        visit.page.emulate_media(color_scheme=scheme)
        sizes = visit.page.evaluate(
            "[...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().width,"
            " i.getBoundingClientRect().height])"
        )
        assert len(sizes) > 2 * len(PLOTS)
        assert all(natural > 0 and wide > 200 and high > 150 for natural, wide, high in sizes)
    assert visit.complaints == []


def test_claims_are_filtered_by_verdict_experiment_and_text(visit: Visit) -> None:
    page = visit.page
    assert len(visit.shown()) == len(CLAIMS)
    fails = [str(k) for k in range(1, 13) if OUTCOMES[k % 4] == "fails"]
    page.get_by_role("button", name="3 fails").click()
    assert visit.shown() == fails
    assert page.locator(".controls output").inner_text() == "3 of 12 claims"
    page.get_by_role("searchbox").fill("number 5")
    assert visit.shown() == ["5"]
    page.get_by_role("searchbox").fill("nothing like it")
    assert visit.shown() == []
    page.get_by_role("searchbox").fill("")
    page.get_by_role("button", name="3 fails").click()
    page.locator("[data-filter=experiment]").select_option("e1")
    assert len(visit.shown()) == len(CLAIMS)


def test_tables_sort_both_ways_and_back(visit: Visit) -> None:
    head = visit.page.locator("#claims th", has_text="Measured")
    before = visit.shown()
    for expected in (sorted(before, key=int), sorted(before, key=int, reverse=True), before):
        head.get_by_role("button").click()
        assert visit.shown() == expected
    visit.page.locator("#claims th", has_text="Verdict").get_by_role("button").click()
    assert [OUTCOMES[int(k) % 4] for k in visit.shown()] == sorted(
        (OUTCOMES[k % 4] for k in range(1, 13)), key=OUTCOMES.index
    )
    numbers = visit.page.locator("#e1 .numbers")
    visit.page.locator("#e1 summary").click()
    numbers.locator("th", has_text="Mean").get_by_role("button").click()
    cells = numbers.locator("tbody td:nth-child(7)")
    values = [float(cell.get_attribute("data-value")) for cell in cells.all()]
    assert values == sorted(values)


def test_no_width_needs_scrolling_sideways(visit: Visit) -> None:
    for width in (1920, 1280, 1100, 961, 800, 600, 390, 320):
        visit.page.set_viewport_size({"width": width, "height": 844})
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_sheet_of_paper_holds_its_whole_width(browser: Any, address: str) -> None:
    visit = Visit(browser, address, 700)  # A4 between its margins
    visit.page.emulate_media(media="print")
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 700
    assert not visit.page.locator(".controls").is_visible()
    visit.context.close()


def test_a_phone_shows_cards_it_can_sort(browser: Any, address: str) -> None:
    visit = Visit(browser, address, 390, is_mobile=True, has_touch=True)
    visit.page.get_by_label("Sort by").select_option("Measured")
    assert visit.shown() == [str(k) for k in range(1, 13)]
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    visit.context.close()


def test_nothing_hostile_runs(browser: Any, tmp_path: Path) -> None:
    text = " ".join(HOSTILE[:6])
    picture = Picture("e1", "", None, (f"<svg xmlns='{text}'>",), text)
    shown = Section(Experiment(1, text, text, text, (), trials), picture)
    page = Report([shown], [claim(1, sentence=text)], [printed(1, what=text)], {text: text}, [text])
    (tmp_path / "report.html").write_text(report_page(page), encoding="utf-8")
    visit = Visit(browser, (tmp_path / "report.html").as_uri())
    assert visit.complaints == []
    assert visit.page.locator("script").count() == 1
    visit.context.close()


def test_without_scripts_everything_is_there_but_the_controls(browser: Any, address: str) -> None:
    visit = Visit(browser, address, java_script_enabled=False)
    assert visit.page.locator("#claims tbody tr:visible").count() == len(CLAIMS)
    assert not visit.page.locator(".controls").is_visible()
    visit.context.close()


def test_rows_of_folders_that_mean_other_things_by_a_name_still_make_one_table(
    tmp_path: Path,
) -> None:
    folders = []
    for name, start in (("one", "near"), ("two", 0.5)):
        folder = tmp_path / name
        folder.mkdir()
        rows = [{"experiment": "e1", "start": start, "seed": 0, "error": 1.0}]
        for file in ("trials", "spectra"):
            table = Table.of(rows).rows.replace_schema_metadata({b"kappascope": b"{}"})
            (folder / f"{file}.parquet").write_bytes(parquet_bytes(table))
        folders.append(folder)
    whole = report.all_rows(report.publications_of(folders, []))
    assert sorted(whole.rows["start"].to_pylist()) == ["0.5", "near"]
