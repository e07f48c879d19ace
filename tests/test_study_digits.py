"""Digits: the data are what they say, the measures are right, and the claims can tell."""

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kappascope import training
from kappascope.bookmarks import Bookmark
from kappascope.claims import judge
from kappascope.figures import NOTHING
from kappascope.lab import Setting
from kappascope.statistics import Estimate, Table
from kappascope.studies import digits, digits_claims
from kappascope.studies.digits import STUDY
from kappascope.studies.digits_model import Muon, images, network
from kappascope.studies.digits_outcomes import calibration, described, outcomes, quantized
from kappascope.tasks import generator

SMALL: Setting = {
    "draw": 0, "optimizer": "momentum", "width": 32, "depth": 2, "decay": 0.0001, "scale": 1.0,
    "batch": 32, "rate": 0.06,
}  # fmt: skip


def model() -> nn.Sequential:
    return network(32, 2, 1.0, generator("a test"))


def lasting(rows: Any) -> list[Any]:
    return [row for row in rows if row["component"] != "seconds"]


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
    @settings(max_examples=50)
    @given(st.integers(0, 10_000), st.integers(2, 8))
    def test_takes_the_nearest_level(self, seed: int, bits: int) -> None:
        matrix = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).double()
        top = 2 ** (bits - 1) - 1
        levels = [float(matrix.abs().max()) * k / top for k in range(-top, top + 1)]
        for ours, exact in zip(quantized(matrix, bits).ravel(), matrix.ravel(), strict=True):
            assert ours == pytest.approx(min(levels, key=lambda level: abs(level - exact)))

    def test_leaves_zeros_alone(self) -> None:
        assert quantized(torch.zeros(2, 2), 4).equal(torch.zeros(2, 2))

    def test_is_of_a_copy(self) -> None:
        one = model()
        before = [p.clone() for p in one.parameters()]
        outcomes(one)
        assert all(p.equal(was) for p, was in zip(one.parameters(), before, strict=True))

    def test_of_a_trained_network_grows_with_what_is_taken_away(self) -> None:
        rows = {row["component"]: row["value"] for row in digits.trials(0, Bookmark(), **SMALL)}
        assert abs(rows["int8"]) < abs(rows["int4"]) < rows["int3"]
        assert 0 < rows["noise"] < 0.5
        assert rows["error"] < 0.1
        assert rows["train_loss"] <= digits_claims.LEVEL


class TestTraining:
    def test_muon_takes_the_steps_of_the_packages_own(self) -> None:
        ours, theirs = (nn.Linear(6, 9, bias=False) for _ in range(2))
        theirs.load_state_dict(ours.state_dict())
        movers = Muon([ours.weight], lr=0.1, weight_decay=0.0), training.Muon(theirs, 0.1)
        for step in range(3):
            gradient = torch.randn(9, 6, generator=torch.Generator().manual_seed(step))
            for layer, mover in zip((ours, theirs), movers, strict=True):
                layer.weight.grad = gradient.clone()
                mover.step()
        torch.testing.assert_close(ours.weight, theirs.weight)

    def test_weights_of_blank_pixels_only_decay(self, monkeypatch: pytest.MonkeyPatch) -> None:
        kept: list[list[torch.Tensor]] = []
        monkeypatch.setattr(digits, "PATIENCE", 41)
        monkeypatch.setattr(digits, "described", lambda matrices: kept.append(matrices) or ())
        list(digits.trials(0, Bookmark(), **{**SMALL, "decay": 0.001}))
        start = network(32, 2, 1.0, generator("digits weights", 0, 0))[0].weight
        blank = images()[0].amax(0) == 0
        expected = start[:, blank] * (1 - 0.001) ** 41
        torch.testing.assert_close(kept[0][0][:, blank], expected.detach())

    @pytest.mark.parametrize(
        ("optimizer", "rate"), [("momentum", 0.03), ("adam", 0.003), ("muon", 0.01)]
    )
    def test_goes_on_to_the_last_bit_where_it_was_killed(
        self, optimizer: str, rate: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(digits, "PATIENCE", 60)
        setting = {**SMALL, "optimizer": optimizer, "rate": rate}
        whole = lasting(digits.trials(1, Bookmark(), **setting))
        bookmark = Bookmark(tmp_path / "one", every=0.0)
        with monkeypatch.context() as patch:
            patch.setattr(digits, "cross_entropy", failing_after(35, digits.cross_entropy))
            with pytest.raises(KeyboardInterrupt):
                list(digits.trials(1, bookmark, **setting))
        assert bookmark.path and bookmark.path.exists()
        assert lasting(digits.trials(1, bookmark, **setting)) == whole

    def test_settings_and_seeds_start_apart(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(digits, "PATIENCE", 1)
        starts = {
            next(row["value"] for row in digits.trials(seed, Bookmark(), **{**SMALL, "draw": draw})
                 if row.get("matrix") == "start")
            for seed in (0, 1) for draw in (0, 1)
        }  # fmt: skip
        assert len(starts) == 4


def failing_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    left = iter(range(calls))

    def one(*args: Any) -> Any:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*args)

    return one


def test_components_are_logarithms_of_every_matrix_their_mean_and_maximum() -> None:
    matrices = [p.detach() for p in model().parameters() if p.ndim == 2]
    found = {(r["component"], r["matrix"]): r["value"] for r in described(matrices)}
    values = [np.linalg.svd(one.double().numpy(), compute_uv=False) for one in matrices]
    kappas = [math.log(s[0] / s[-1]) for s in values]
    assert [found["condition_number", str(k)] for k in range(3)] == pytest.approx(kappas)
    assert found["condition_number", "mean"] == pytest.approx(np.mean(kappas))
    assert found["condition_number", "max"] == pytest.approx(max(kappas))
    assert found["spectral_norm", "0"] == pytest.approx(math.log(values[0][0]))
    two = 2 * (found["frobenius_norm", "mean"] - found["spectral_norm", "mean"])
    assert found["stable_rank", "mean"] == pytest.approx(two)  # the norms tell it


def made(error: Callable[..., Any], count: int = 80, seeds: int = 6) -> Table:
    """Rows of networks whose error is a function of log kappa, log norm and noise."""
    random = np.random.default_rng(7)
    rows = []
    names = [*digits_claims.NORMS, *digits_claims.OTHERS, "stable_rank"]
    for setting in digits.drawn(count):
        kappa, norm = random.standard_normal(2)
        norm += 0.5 * kappa  # kappa is a shadow of the norm
        for seed in range(seeds):
            k, s = kappa + random.standard_normal(), norm + random.standard_normal()
            s += 0.5 * k
            values = {("condition_number", "mean"): k, ("condition_number", "max"): k}
            values |= {(name, "mean"): random.standard_normal() for name in names}
            values |= {("spectral_norm", "mean"): s, ("train_loss", ""): 0.009}
            values |= {("condition_number", where): k for where in ("0", "start", "written")}
            for outcome in digits_claims.OUTCOMES:
                values[outcome, ""] = error(k, s, 0.5 * random.standard_normal())
            if seed == 0 and setting["draw"] == 0:
                values["train_loss", ""] = 0.5
            rows += [
                {"seed": seed, **setting, "component": c, "matrix": m or None, "value": float(v)}
                for (c, m), v in values.items()
            ]
    return Table.of(rows)


@pytest.fixture(scope="module")
def kappa_tells() -> Table:
    return made(lambda k, s, noise: k + noise)


class TestClaims:
    WORDS = ("accuracy", "calibration", "noise", "quantization")

    def verdict(self, word: str, rows: Table) -> str:
        [claim] = [claim for claim in STUDY.claims if claim.id == f"digits.{word}"]
        return judge(claim, rows).verdict

    def test_hold_where_kappa_tells_more_than_the_norms(self, kappa_tells: Table) -> None:
        assert {self.verdict(f"kappa-{word}", kappa_tells) for word in self.WORDS} == {"holds"}
        assert self.verdict("norms-first", kappa_tells) == "fails"

    def test_fail_where_kappa_is_the_norms_shadow(self) -> None:
        rows = made(lambda k, s, noise: s + noise)
        alone = digits_claims.across("condition_number", "error", given=())(rows)
        assert alone.low and alone.low > 0.3  # it does go with the error
        assert {self.verdict(f"kappa-{word}", rows) for word in self.WORDS} == {"fails"}
        assert self.verdict("norms-first", rows) == "holds"

    def test_no_other_component_is_made_to_tell(self, kappa_tells: Table) -> None:
        assert self.verdict("others", kappa_tells) != "holds"

    def test_the_first_matrix_that_stays_as_it_began_is_not_learned(
        self, kappa_tells: Table
    ) -> None:
        assert self.verdict("first-layer", kappa_tells) == "undecided"  # in full: no interval

    def test_networks_that_did_not_arrive_are_left_out(self, kappa_tells: Table) -> None:
        assert len(digits_claims.arrived(kappa_tells).draw) == 80 * 6 - 1

    def test_the_largest_correlation_is_large_on_either_side(self) -> None:
        ends = [(-0.5, -0.4), (-0.1, 0.2)]
        parts = [
            lambda rows, low=low, high=high: Estimate((low + high) / 2, low, high, 9, "")
            for low, high in ends
        ]
        found = digits_claims.largest(parts, "largest")(NOTHING)
        assert (found.value, found.interval) == (0.45, (0.4, 0.5))


class TestPresentation:
    def test_every_table_is_full(self, kappa_tells: Table) -> None:
        assert STUDY.exhibits
        tables = list(STUDY.exhibits(kappa_tells))
        assert all(len(row) == len(t.columns) for t in tables for row in t.rows)
        assert tables[-1].rows[0][:2] == ("all", "479 of 480")
        assert tables[0].rows[0][1].endswith("*")

    def test_a_setting_of_which_no_network_arrived_is_told(self, kappa_tells: Table) -> None:
        lost = kappa_tells.where(draw=0, seed=0)
        assert digits.exhibits(lost)
        assert all("–" in row for row in list(digits.exhibits(lost))[-1].rows)

    @pytest.mark.parametrize("empty", [True, False])
    def test_the_figure_is_drawn_whatever_was_run(self, kappa_tells: Table, empty: bool) -> None:
        assert STUDY.plot
        figure = STUDY.plot(NOTHING if empty else kappa_tells, NOTHING)
        assert len(figure.axes) == 6

    def test_a_quick_run_is_a_part_of_the_whole(self) -> None:
        assert all(setting in STUDY.grid for setting in STUDY.quickly().grid)
