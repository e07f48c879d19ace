"""Pictures of every page, on a desk and on a phone, by day and by night.

The pictures go to the folder that KAPPASCOPE_SCREENSHOTS names, for somebody to look at; else they
are thrown away. A browser finds here what an eye would see at once: an empty page, a page that is
wider than its screen, a page that complains or asks the network for something.
"""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import kappascope
import small_checkpoints
from kappascope.clinic.surveys import Surveyed
from kappascope.lab import experiment, report
from kappascope.monitor.record import Run
from kappascope.monitor.report import run_page
from monitored_runs import write_example
from tiny_experiments import TOY
from tiny_runs import complete

ROOT = Path(__file__).parents[1]
CHROMIUM = Path("/usr/bin/chromium")
SCREENS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
SITE = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
FLAGS = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking"
LEAST_COLOURS = 30  # of a page with text; an empty one has a few


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    if not CHROMIUM.exists():
        pytest.skip("needs Debian's chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def pages(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Make every page that kappascope writes, from small things."""
    folder = tmp_path_factory.mktemp("pages")
    results = complete(TOY, folder / "toy")
    verdicts = experiment.verdicts([TOY], results.rows)
    ill = kappascope.diagnose(small_checkpoints.dead_and_outlying())
    llama = kappascope.diagnose(small_checkpoints.llama())
    written = {
        "report": dict(report.files([TOY], results, verdicts))["report.html"],
        "diagnosis": ill.html().encode(),
        "survey": Surveyed.of([ill, llama]).html().encode(),
        "run": run_page(Run.read(write_example(folder / "run"))).encode(),
    }
    for name, data in written.items():
        (folder / f"{name}.html").write_bytes(data)
    return {name: folder / f"{name}.html" for name in written}


@pytest.fixture(scope="module")
def site(browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the documentation."""
    pytest.importorskip("zensical", reason="needs kappascope[docs]")
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "zensical.toml", folder)
    build = [sys.executable, "-m", "zensical", "build"]
    subprocess.run(build, cwd=folder, capture_output=True, check=True)
    return folder / "site"


def photographed(browser: Any, page: Path, folder: Path) -> None:
    """Take a picture of a page on every screen, and fail where something is wrong with it."""
    wrong: list[str] = []
    for width, scheme in SCREENS:
        context = browser.new_context(viewport={"width": width, "height": 844}, color_scheme=scheme)
        tab = context.new_page()
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("request", lambda asked: wrong.extend([asked.url] * asked.url.startswith("http")))
        tab.goto(page.as_uri())
        tab.wait_for_timeout(300)  # charts are drawn when the page has been laid out
        name = folder / f"{page.stem}-{width}-{scheme}.png"
        shot = Image.open(io.BytesIO(tab.screenshot(path=name)))
        assert wrong == [], name.name
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, name.name
        assert len(shot.convert("RGB").getcolors(maxcolors=2**24)) > LEAST_COLOURS, name.name
        context.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of the pictures."""
    chosen = Path(os.environ.get("KAPPASCOPE_SCREENSHOTS") or tmp_path)
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


@pytest.mark.parametrize("name", ["report", "diagnosis", "survey", "run"])
def test_every_page_that_is_written_fits_every_screen(browser, pages, folder, name) -> None:
    photographed(browser, pages[name], folder)


@pytest.mark.parametrize("name", SITE)
def test_the_documentation_fits_every_screen(browser, site, folder, name) -> None:
    photographed(browser, site / f"{name}.html", folder)
