"""The images, and what is measured of a trained network."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

from kappascope.lab.experiment import Setting
from kappascope.lab.resume import ResumePoint
from kappascope.lab.tasks import generator
from kappascope.studies.digits import study
from kappascope.studies.digits.model import (
    TRAIN_LOSS,
    calibration,
    component_rows,
    images,
    network,
    outcomes,
)

SMALL: Setting = {
    "draw": 0, "optimizer": "momentum", "width": 32, "depth": 2, "decay": 0.0001, "scale": 1.0,
    "batch": 32, "rate": 0.06,
}  # fmt: skip


def model() -> nn.Sequential:
    return network(32, 2, 1.0, generator("a test"))


class TestImages:
    def test_labels_are_those_of_the_source(self) -> None:
        counts = sum(labels.bincount() for labels in images()[1::2])
        assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]

    def test_labels_belong_to_their_pixels(self) -> None:
        pixels, labels, new, truth = images()
        centres = torch.stack([pixels[labels == digit].mean(0) for digit in range(10)])
        nearest = torch.cdist(new, centres).argmin(1)
        assert (nearest == truth).double().mean() > 0.85

    def test_no_image_is_on_both_sides(self) -> None:
        pixels, _, new, _ = images()
        assert (len(pixels), len(new)) == (900, 897)
        assert torch.cdist(pixels, new).min() > 0

    def test_three_pixels_are_never_written_on(self) -> None:
        assert (images()[0].amax(0) == 0).nonzero().ravel().tolist() == [0, 32, 39]


class TestCalibration:
    @pytest.mark.parametrize(
        ("confidence", "hits", "expected"),
        [
            ([1.0, 1.0], [True, True], 0.0),
            ([1.0, 1.0], [False, False], 1.0),
            ([0.9] * 10, [True] * 9 + [False], 0.0),
            ([0.7, 0.9], [True, True], 0.2),  # two bins, gaps of 0.3 and 0.1
            ([0.69, 0.71], [True, False], 0.2),  # one bin: the gaps cancel, 0.7 against 0.5
        ],
    )
    def test_of_cases_made_by_hand(
        self, confidence: list[float], hits: list[bool], expected: float
    ) -> None:
        shares = torch.tensor([[c, 1 - c] for c in confidence], dtype=torch.float64)
        labels = torch.tensor([0 if hit else 1 for hit in hits])
        assert calibration(shares, labels) == pytest.approx(expected)

    def test_agrees_with_a_slow_count(self) -> None:
        random = torch.Generator().manual_seed(3)
        shares = (3 * torch.randn(200, 10, generator=random)).softmax(1)
        labels = torch.randint(10, (200,), generator=random)
        total = 0.0
        for low, high in pairwise(np.linspace(0, 1, 16)):
            chosen = [
                (float(row.max()), float(row.argmax() == label))
                for row, label in zip(shares.double(), labels, strict=True)
                if low <= row.max() < high
            ]
            total += abs(sum(c for c, _ in chosen) - sum(hit for _, hit in chosen)) / 200
        assert calibration(shares, labels) == pytest.approx(total)


class TestQuantization:
    def test_is_of_a_copy(self) -> None:
        one = model()
        before = [p.clone() for p in one.parameters()]
        outcomes(one)
        assert all(p.equal(was) for p, was in zip(one.parameters(), before, strict=True))

    def test_of_a_trained_network_grows_with_what_is_taken_away(self) -> None:
        rows = {row["component"]: row["value"] for row in study.trials(0, ResumePoint(), **SMALL)}
        assert abs(rows["int8"]) < abs(rows["int4"]) < rows["int3"]
        assert 0 < rows["noise"] < 0.5
        assert rows["error"] < 0.1
        assert rows["train_loss"] <= TRAIN_LOSS


def test_components_are_logarithms_of_every_matrix_their_mean_and_maximum() -> None:
    matrices = [p.detach() for p in model().parameters() if p.ndim == 2]
    found = {(r["component"], r["matrix"]): r["value"] for r in component_rows(matrices)}
    values = [np.linalg.svd(one.double().numpy(), compute_uv=False) for one in matrices]
    kappas = [math.log(s[0] / s[-1]) for s in values]
    assert [found["condition_number", str(k)] for k in range(3)] == pytest.approx(kappas)
    assert found["condition_number", "mean"] == pytest.approx(np.mean(kappas))
    assert found["condition_number", "max"] == pytest.approx(max(kappas))
    assert found["spectral_norm", "0"] == pytest.approx(math.log(values[0][0]))
    two = 2 * (found["frobenius_norm", "mean"] - found["spectral_norm", "mean"])
    assert found["stable_rank", "mean"] == pytest.approx(two)  # the norms tell it
