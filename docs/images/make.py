"""Make the pictures of the documentation: real pages, opened in a real browser.

    python docs/images/make.py

It needs Debian's chromium and ``pip install '.[test]'``; the checkpoints are fetched with pip once.
"""

import io
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

import kappascope
from kappascope.lab import downloads

HERE = Path(__file__).parent
CHROMIUM = Path("/usr/bin/chromium")
WIDTH, HEIGHT = 820, 860  # as wide as a README is shown
MODEL = "all-MiniLM-L6-v2"
COLOURS = 128  # a page of text and lines has few; a quarter of the bytes


@contextmanager
def browser() -> Iterator[Any]:
    """Start a browser without a window."""
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=flags)
        yield chromium
        chromium.close()


def photograph(page: Path, picture: Path) -> None:
    """Take a picture of what a reader of the page sees first."""
    with browser() as chromium:
        tab = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        tab.goto(page.as_uri())
        tab.wait_for_timeout(500)  # charts are drawn when the page has been laid out
        shot = Image.open(io.BytesIO(tab.screenshot()))
    shot.convert("RGB").quantize(COLOURS).save(picture, optimize=True)


def main() -> None:
    """Diagnose the sentence encoder of the README and take a picture of its page."""
    if not CHROMIUM.exists():
        sys.exit(f"{CHROMIUM} is missing: install Debian's chromium")
    with TemporaryDirectory() as folder, chdir(folder):
        Path(MODEL).symlink_to(downloads.fetch("minilm"))  # the page names what was diagnosed
        page = Path(folder) / "report.html"
        page.write_text(kappascope.diagnose(MODEL).html(), encoding="utf-8")
        photograph(page, HERE / "diagnosis.png")


if __name__ == "__main__":
    main()
