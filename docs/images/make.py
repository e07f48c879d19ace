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

import torch
from matplotlib.figure import Figure
from PIL import Image
from playwright.sync_api import sync_playwright

import kappascope
from kappascope.lab import downloads

HERE = Path(__file__).parent
CHROMIUM = Path("/usr/bin/chromium")
WIDTH, HEIGHT = 1000, 860  # as wide as a README is shown
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


def draw_components() -> None:
    """Draw, for the glossary, one small picture of each component of one matrix."""
    torch.manual_seed(0)
    weight = torch.randn(12, 8) * torch.linspace(0.4, 1.6, 8)
    c = kappascope.Components(weight)
    values = c.singular_values
    pictures = {
        "row_norms": ("norm of each row", c.row_norms, ()),
        "column_norms": ("norm of each column", c.column_norms, ()),
        "singular_values": ("singular values", values, ()),
        "condition_number": (f"kappa = {c.condition_number:.1f}", values, (0, len(values) - 1)),
        "effective_rank": (f"{c.effective_rank:.0f} above 0.01 of the first", values, range(8)),
        "spectral_gap": (f"(s1 - s2) / s1 = {c.spectral_gap:.2f}", values, (0, 1)),
        "frobenius_norm": (f"root of the sum of squares = {c.frobenius_norm:.1f}", values, ()),
    }
    for name, (title, heights, marked) in pictures.items():
        figure = Figure(figsize=(3.0, 1.8), dpi=100, layout="constrained")
        axes = figure.add_subplot()
        colours = ["#1f4e79" if k in marked else "#9db3c8" for k in range(len(heights))]
        axes.bar(range(1, len(heights) + 1), heights.tolist(), color=colours)
        axes.set_title(title, fontsize=9)
        axes.tick_params(labelsize=7)
        figure.savefig(HERE / f"{name}.png", metadata={"Software": None})
    figure = Figure(figsize=(3.0, 3.4), dpi=100, layout="constrained")
    axes = figure.add_subplot(xlabel="column", ylabel="row")
    axes.imshow(weight.numpy(), cmap="RdBu", vmin=-3, vmax=3, extent=(0.5, 8.5, 12.5, 0.5))
    axes.set_title("the entries of the matrix", fontsize=9)
    axes.tick_params(labelsize=7)
    figure.savefig(HERE / "matrix.png", metadata={"Software": None})


def main() -> None:
    """Draw the components; diagnose the README's encoder and take a picture of its page."""
    draw_components()
    if not CHROMIUM.exists():
        sys.exit(f"{CHROMIUM} is missing: install Debian's chromium")
    with TemporaryDirectory() as folder, chdir(folder):
        Path(MODEL).symlink_to(downloads.fetch("minilm"))  # the page names what was diagnosed
        page = Path(folder) / "report.html"
        page.write_text(kappascope.diagnose(MODEL).html(), encoding="utf-8")
        photograph(page, HERE / "diagnosis.png")


if __name__ == "__main__":
    main()
