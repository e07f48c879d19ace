"""Figures: what is drawn, that it is always the same, and the paper's nine."""

from __future__ import annotations

import re
import subprocess
import sys
from itertools import product
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from kappascope.lab import drawing, figures
from kappascope.lab.drawing import COLOURS
from kappascope.lab.figures import (
    arms,
    error_lines,
    gallery,
    paths,
    sheet,
    spectrum_lines,
    strips,
    tail,
)
from kappascope.lab.table import Table

MAIN = ("condition_number", "row_norms", "spectral_gap", "overall_matrix")
EIGHT = tuple(COLOURS)[:8]
STRATEGIES = ("standard", "multipliers", "spectral", "svd_correction", "hybrid")
E1_PRINTED = {"condition_number": {32: 0.27, 512: 34.9}}

PLOTS = {
    "e1": sheet(
        error_lines(*MAIN, by="size", stream="paper", printed=E1_PRINTED),
        error_lines("singular_values", "column_norms", "frobenius_norm", "effective_rank",
               by="size", stream="paper", title="The other components"),
        tail("condition_number", by="size", stream="own"),
        spectrum_lines("Singular values, size 128", size=128),
    ),
    "e2": sheet(arms(*EIGHT, by="optimizer", optimizer=("sgd", "adam"), stream="paper")),
    "e3": sheet(
        paths("gradient", column="value", split="index", title="Gradient per singular value"),
        paths("singular_value", column="value", split="index", title="Singular values"),
    ),
    "e4": sheet(
        strips("row_norms", "condition_number", by="strategy", strategy=STRATEGIES, stream="paper",
               printed={"condition_number": {"standard": 1.23, "spectral": 0.29}}),
        tail("condition_number", by="strategy", stream="own"),
    ),
    "e5": sheet(paths(*MAIN, stream="paper")),
    "e6": sheet(
        *(arms(*EIGHT, by="strategy", structure=structure, stream="paper", title=structure)
          for structure in ("low_rank", "block_diagonal", "heterogeneous"))
    ),
    "e7": sheet(
        error_lines("condition_number", "overall_matrix", by="depth", stream="paper",
               printed={"condition_number": {1: 0.24, 2: 653, 3: 13167}}),
        tail("condition_number", by="depth", stream="own"),
    ),
    "e8": sheet(
        error_lines("condition_number", "row_norms", by="learning_rate", stream="paper"),
        error_lines("condition_number / row_norms", by="learning_rate", stream="paper",
               printed={"condition_number / row_norms": {0.001: 1.0, 0.01: 9.2, 0.05: 440}}),
        error_lines("condition_number", "row_norms", by="weight_decay", stream="paper"),
    ),
    "e9": sheet(
        paths("condition_number", "row_norms", stream="paper"),
        paths("condition_number / row_norms", stream="paper", title="Ratio of the two errors"),
    ),
}  # fmt: skip

GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "e1": {"size": (32, 64, 128, 256, 512)},
    "e2": {"optimizer": ("adam", "sgd")},
    "e3": {"index": (0, 64, 127), "epoch": tuple(range(0, 200, 5))},
    "e4": {"strategy": STRATEGIES},
    "e5": {"epoch": tuple(range(10, 210, 10))},
    "e6": {"structure": ("block_diagonal", "heterogeneous", "low_rank"),
           "strategy": ("standard", "multipliers")},
    "e7": {"depth": (1, 2, 3)},
    "e8": {"learning_rate": (0.001, 0.005, 0.01, 0.05), "weight_decay": (None, 0.0, 1e-4, 1e-2)},
    "e9": {"epoch": tuple(range(50, 1050, 50))},
}  # fmt: skip


def settings(experiment: str) -> list[dict[str, Any]]:
    grid = GRIDS[experiment]
    found = [dict(zip(grid, point, strict=True)) for point in product(*grid.values())]
    if experiment == "e8":  # two sweeps, one setting each
        swept = [s for s in found if s["weight_decay"] is None]
        return swept + [{"learning_rate": None, "weight_decay": d} for d in (0.0, 1e-4, 1e-2)]
    return found


def trials(experiment: str, many: int = 400) -> Table:
    """Rows shaped as the experiment's: errors near 0.13, kappa's with tail index 1."""
    random = np.random.default_rng(int(experiment[1:]))
    components = ("gradient", "singular_value") if experiment == "e3" else (*EIGHT,)
    rows = []
    for setting, (stream, count) in product(settings(experiment), (("paper", 10), ("own", many))):
        if stream == "own" and experiment not in ("e1", "e4", "e7"):
            continue
        fall = np.exp(-setting.get("epoch", 0) / 100)
        for component in components:
            error = 0.13 * np.exp(random.normal(0, 0.1, count)) * fall
            if component == "condition_number":
                error = 0.3 * setting.get("depth", 1) ** 4 * (1 / random.uniform(size=count) - 1)
            if component == "effective_rank":
                error = random.choice([0.0, 0.0, 1 / 64], count)
            rows += [
                {"experiment": experiment, **setting, "stream": stream, "seed": seed,
                 "component": component, "error": float(e), "value": float(e), "target": 1.0}
                for seed, e in enumerate(error)
            ]  # fmt: skip
    return Table.of(rows)


def spectra(experiment: str) -> Table:
    random = np.random.default_rng(int(experiment[1:]))
    kept = [s for s in settings(experiment) if s.get("epoch", 0) in (0, 195, 200, 1000)]
    return Table.of(
        {"experiment": experiment, **setting, "stream": "paper", "seed": seed, "which": which,
         "values": np.linalg.svd(random.normal(size=(d, d)) / d**0.5, compute_uv=False).tolist()}
        for setting, seed, which in product(kept, range(3), ("target", "learned"))
        for d in [setting.get("size", 64)]
    )  # fmt: skip


def row(seed: int, error: float, **more: Any) -> dict[str, Any]:
    return {"seed": seed, "component": "row_norms", "error": error, "size": 32, **more}


NOTHING = Table.of([])


@pytest.fixture(scope="module", params=PLOTS)
def drawn(request: pytest.FixtureRequest) -> Any:
    name = request.param
    return PLOTS[name](trials(name, many=40), spectra(name))


class TestEveryFigureOfThePaper:
    def test_shows_something_in_every_panel(self, drawn: Any) -> None:
        assert all(axes.has_data() for axes in drawn.axes)
        assert not any(text.get_text() == "no trials" for a in drawn.axes for text in a.texts)

    def test_says_how_many_trials_it_shows(self, drawn: Any) -> None:
        assert "n = 10" in drawn.get_supxlabel()

    def test_stays_within_its_cell(self, drawn: Any) -> None:
        drawing.svg(drawn)
        columns = round(drawn.get_figwidth() / drawing.WIDTH)
        for place, axes in enumerate(drawn.axes):
            row, column = divmod(place, columns)
            box = axes.get_tightbbox().transformed(drawn.dpi_scale_trans.inverted())
            top = drawn.get_figheight() - row * drawing.HEIGHT
            assert column * drawing.WIDTH <= box.x0 + 0.03
            assert box.x1 <= (column + 1) * drawing.WIDTH + 0.03
            assert top - drawing.HEIGHT <= box.y0
            assert box.y1 <= top

    def test_is_well_formed_and_the_same_every_time(self, drawn: Any) -> None:
        document = drawing.svg(drawn)
        ElementTree.fromstring(document)
        assert drawing.svg(drawn) == document
        assert "date" not in document.lower()

    def test_has_a_small_picture_of_each_panel(self, drawn: Any) -> None:
        cells = drawing.cells(drawn, drawing.svg(drawn))
        assert len(cells) == len(drawn.axes)
        assert len(set(cells)) == len(cells)
        assert all(len(cell) < 150_000 for cell in cells)
        assert drawing.cells(drawn, drawing.svg(drawn)) == cells

    def test_a_panel_has_all_that_it_refers_to_and_nothing_of_the_others(self, drawn: Any) -> None:
        for cell in drawing.cells(drawn, drawing.svg(drawn)):
            names = [one.get("id") for one in ElementTree.fromstring(cell).iter() if one.get("id")]
            assert set(re.findall(r"(?:url\(|href=\")#([\w.-]+)", cell)) <= set(names)
            assert len(set(names)) == len(names)
            assert sum(name.startswith("axes_") for name in names) == 1


def test_the_same_rows_give_the_same_bytes() -> None:
    first, second = (PLOTS["e4"](trials("e4", 300), spectra("e4")) for _ in range(2))
    assert drawing.svg(first) == drawing.svg(second)
    assert drawing.png(first) == drawing.png(second)
    assert drawing.png(first).startswith(b"\x89PNG")
    assert drawing.cells(first, drawing.svg(first)) == drawing.cells(second, drawing.svg(second))


def test_every_trial_is_a_point_and_the_line_is_the_median() -> None:
    values = [3.0, 0.5, 40.0, 0.25, 1.0]
    rows = Table.of(row(k, v, size=size) for size in (32, 64) for k, v in enumerate(values))
    [axes] = sheet(error_lines("row_norms", by="size"))(rows, NOTHING).axes
    points = [o[1] for cloud in axes.collections[:2] for o in cloud.get_offsets()]
    assert sorted(points) == sorted(2 * values)
    lines = {line.get_marker(): list(line.get_ydata()) for line in axes.lines}
    assert lines["None"] == [1.0, 1.0]
    assert lines["D"] == pytest.approx(2 * [np.mean(values)])


def test_the_printed_mean_is_a_star() -> None:
    rows = Table.of(row(k, 1.0 + k) for k in range(4))
    [axes] = sheet(error_lines("row_norms", by="size", printed={"row_norms": {32: 9.5, 64: 1.0}}))(
        rows, NOTHING
    ).axes
    [star] = [line for line in axes.lines if line.get_marker() == "*"]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([0], [9.5])


def test_zeros_stand_at_a_mark_of_their_own() -> None:
    rows = Table.of(row(k, e) for k, e in enumerate([0.0, 0.0, 0.03]))
    figure = sheet(error_lines("row_norms", by="size"))(rows, NOTHING)
    drawing.svg(figure)
    [axes] = figure.axes
    assert axes.collections[0].get_offsets()[0][1] == 0.01
    assert "0" in [label.get_text() for label in axes.get_yticklabels()]


def test_a_component_that_is_nowhere_finite_says_so() -> None:
    rows = Table.of(
        row(k, e, component=name, strategy="a")
        for k in range(3)
        for name, e in (("row_norms", 1.0), ("condition_number", np.nan))
    )
    [axes] = sheet(arms("row_norms", "condition_number", by="strategy"))(rows, NOTHING).axes
    assert "not finite" in [text.get_text() for text in axes.texts]


@pytest.mark.parametrize("name", PLOTS)
def test_a_run_without_trials_gives_a_figure_that_says_so(name: str) -> None:
    figure = PLOTS[name](NOTHING, NOTHING)
    drawing.svg(figure)
    texts = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert "no trials" in texts


def test_rows_that_mix_trials_are_refused() -> None:
    rows = Table.of(row(0, 1.0, stream="own", optimizer=name) for name in ("sgd", "adam"))
    with pytest.raises(ValueError, match="where"):
        sheet(error_lines("row_norms", by="size"))(rows, NOTHING)


@pytest.mark.parametrize("name", GRIDS)
def test_the_gallery_has_a_panel_for_each_setting(name: str) -> None:
    table = spectra(name)
    named = {n for n in GRIDS[name] if n in table.rows.column_names}
    settings_drawn = {tuple(r[n] for n in sorted(named)) for r in table.rows.to_pylist()}
    figure = gallery(table)
    assert len(figure.axes) == len(settings_drawn)
    assert all(len(axes.lines) == 6 for axes in figure.axes)  # three targets, three learned


def test_a_singular_target_has_a_gallery_too() -> None:
    lines = [{"seed": 0, "which": w, "values": [2.0, 1.0, 0.0]} for w in ("target", "learned")]
    figure = gallery(Table.of(lines))
    assert len(figure.axes) == 1 and len(figure.axes[0].lines) == 2
    assert drawing.svg(figure)


def test_errors_that_are_all_zero_are_drawn() -> None:
    figure = sheet(error_lines("row_norms", by="size"))(Table.of([row(0, 0.0)]), NOTHING)
    assert drawing.svg(figure)


def test_matplotlib_waits_until_something_is_drawn_and_pyplot_for_ever() -> None:
    code = """
import sys
from kappascope.lab.drawing import png, svg
from kappascope.lab.figures import error_lines, sheet
from kappascope.lab.table import Table
assert "matplotlib" not in sys.modules
figure = sheet(error_lines("x", by="size"))(Table.of([]), Table.of([]))
svg(figure), png(figure)
assert "matplotlib.pyplot" not in sys.modules
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_figure_can_be_sent_to_another_process_and_drawn_there() -> None:
    import pickle

    rows = Table.of(
        {"size": n, "stream": "own", "seed": k, "component": "row_norms", "error": 10.0**k}
        for n in (8, 16)
        for k in range(5)
    )
    figure = figures.sheet(figures.error_lines("row_norms", by="size"))(rows, figures.NOTHING)
    assert drawing.svg(pickle.loads(pickle.dumps(figure))) == drawing.svg(figure)


def test_a_setting_of_which_no_trial_was_run_leaves_its_panel_empty() -> None:
    rows = Table.of(
        [{"size": 8, "stream": "own", "seed": 0, "component": "row_norms", "error": 1.0}]
    )
    panel = figures.error_lines("row_norms", by="size", level=3)
    assert drawing.svg(figures.sheet(panel)(rows, figures.NOTHING))


@pytest.mark.parametrize(
    ("panel", "title", "x", "y"),
    [
        (error_lines("row_norms", by="size"), "Error by size", "size", "relative error"),
        (paths("gradient", column="value"), "Gradient over training", "epoch", "gradient"),
        (strips("row_norms", by="strategy"), "Error by strategy", "relative error", ""),
        (arms("row_norms", by="optimizer"), "Error by optimizer", "relative error", ""),
        (
            tail("condition_number", by="size"),
            "Tail of the κ error",
            "relative error x",
            "share of trials above x",
        ),
        (
            spectrum_lines(size=64),
            "Singular values",
            "place from the smallest",
            "singular value",
        ),
    ],
)
def test_a_panel_says_what_it_shows(panel: figures.Panel, title: str, x: str, y: str) -> None:
    [axes] = sheet(panel)(NOTHING, NOTHING).axes
    assert (axes.get_title(loc="left"), axes.get_xlabel(), axes.get_ylabel()) == (title, x, y)


def test_a_gallery_has_a_panel_for_every_setting() -> None:
    one = {"seed": 0, "which": "target", "values": [2.0, 1.0]}
    assert len(gallery(Table.of([{"size": 2, **one}, {"size": 3, **one}])).axes) == 2
