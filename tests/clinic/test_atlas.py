"""The atlas: what is told of trained matrices, with their number and never beyond it."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from kappascope.clinic.atlas import (
    MIN_TRAINED,
    PROBABILITIES,
    QUANTITIES,
    Atlas,
    TrainedRange,
    atlas_of,
    shape_class,
)
from kappascope.clinic.examine import examine
from kappascope.refusal import Refusal
from kappascope.system.files import strict


@pytest.mark.parametrize("n", [1, 2, 3, 10, 99, 100, 1000])
def test_no_percentile_is_told_beyond_what_n_values_tell(n: int) -> None:
    found = TrainedRange.of({"model": [float(k) for k in range(n)]})
    told = [float(p) for p in found.quantiles]
    assert all(1 / n <= p <= 1 - 1 / n for p in told)
    assert set(told) == {p for p in PROBABILITIES if 1 / n <= p <= 1 - 1 / n}
    assert (found.n, found.smallest, found.largest) == (n, 0.0, n - 1.0)


def test_an_atlas_comes_back_from_its_file(tmp_path: Path) -> None:
    rows = [examine(f"{k}.weight", torch.randn(12, 8)) for k in range(MIN_TRAINED)]
    made = atlas_of(
        [("a", rows[:3], ()), ("b", rows[3:5], ()), ("c", rows[5:], ())],
        [{"name": "a"}],
        {"torch": "x"},
    )
    (tmp_path / "atlas.json").write_bytes(strict(made.document()))
    read = Atlas.read(tmp_path / "atlas.json")
    assert read == made
    known = read.range("other", (12, 8), "entry_kurtosis")
    assert known is not None and (known.n, known.models) == (MIN_TRAINED, 3)


def test_few_matrices_are_no_range() -> None:
    rows = [examine(f"{k}.weight", torch.randn(12, 8)) for k in range(MIN_TRAINED - 1)]
    models = [(f"{k}", [row], ()) for k, row in enumerate(rows)]
    assert atlas_of(models).range("other", (12, 8), "entry_kurtosis") is None
    one = atlas_of([("a", [*rows, *rows], ())])  # of one model
    assert one.range("other", (12, 8), "entry_kurtosis") is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "other/1"}', "1e", '{"schema": 3}'])
def test_what_is_no_atlas_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "atlas.json").write_text(text)
    with pytest.raises(Refusal, match="survey --atlas"):
        Atlas.read(tmp_path / "atlas.json")
    with pytest.raises(Refusal, match="No such file"):
        Atlas.read(tmp_path / "nowhere.json")


def test_the_packaged_atlas_says_where_it_comes_from() -> None:
    packaged = Atlas.packaged()
    assert packaged.ranges and len(packaged.sources) >= 4
    for source in packaged.sources:
        assert source["licence"] and source["package"] and source["matrices"]
        assert all(len(file["sha256"]) == 64 for file in source["files"])
    assert {quantity for _, _, quantity in packaged.ranges} >= set(QUANTITIES) - {"alpha"}
    text = json.dumps(packaged.document())
    assert "/tmp" not in text and "/root" not in text


@pytest.mark.parametrize("scale", [5e-324, 1e-200, 1e200])
def test_every_quantity_is_finite_or_absent_at_any_scale(scale: float) -> None:
    row = examine("w", torch.randn(20, 10, dtype=torch.float64) * scale)
    for quantity, measure in QUANTITIES.items():
        value = measure(row)
        assert value is None or abs(value) < float("inf"), quantity


def test_shapes_have_three_classes() -> None:
    shapes = [(3, 3), (3, 2), (4, 2), (2, 4), (1, 1)]
    assert [shape_class(s) for s in shapes] == ["square", "square", "tall", "wide", "square"]


def test_one_more_model_of_the_same_kind_is_rarely_beyond_the_limit() -> None:
    """A tenth of healthy models exceeded the largest of three by each of its quantities."""
    random = np.random.default_rng(0)
    beyond = larger = 0
    for _ in range(2000):
        first, *others = random.lognormal(sigma=0.5, size=6)
        found = TrainedRange.of({str(k): [value] for k, value in enumerate(others)})
        beyond += first > found.limit(0.01)
        larger += first > found.largest
    assert larger / 2000 == pytest.approx(1 / 6, abs=0.03)  # of six, each is the largest as often
    assert beyond / 2000 == pytest.approx(0.01, abs=0.007)  # three standard deviations


def test_an_atlas_without_the_largest_of_models_has_no_limit() -> None:
    assert TrainedRange(9, 3, 1.0, 4.0).limit(0.001) == math.inf
