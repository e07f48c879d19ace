"""Checkpoints beside the nulls that a file alone allows."""

import math

import pytest
import torch

from kappascope.studies.unlearned import files

START = 0.02


def test_noise_with_the_norms_of_a_matrix_has_them_and_no_more() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = torch.rand(20, 1, generator=random), torch.rand(1, 30, generator=random)
    planted = torch.randn(20, 30, generator=random) * (0.5 + left) * (0.5 + right)
    drawn = files.with_norms_of(planted, 4000, random)
    for dim in (0, 1):
        found = drawn.square().mean(0).sum(dim)
        torch.testing.assert_close(found, planted.square().sum(dim), rtol=0.1, atol=0.0)
    assert (
        abs(float(torch.corrcoef(torch.stack([planted.flatten(), drawn[0].flatten()]))[0, 1])) < 0.2
    )


def test_the_published_rates_rise_and_fall_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    monkeypatch.setattr(files, "noise_law", lambda name, settings, rates, shape: seen.extend(rates))
    files.published_law((4, 4))
    assert len(seen) == 100_000
    assert max(seen) == pytest.approx(5e-4)
    assert seen[0] == pytest.approx(5e-7)
    assert seen[-1] < 1e-11
    # a cosine's mean is half its height
    assert sum(seen) * 0.1 == pytest.approx(2.5, rel=0.01)


def test_a_matrix_of_noise_is_what_its_nulls_say(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = START * torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    state = {"layers.0.self_attn.q_proj.weight": weight, "embed.weight": weight}
    monkeypatch.setattr(files, "weights", lambda model: state)
    rows = list(files.file_rows("minilm"))
    assert {row["kind"] for row in rows} == {"query"}
    by_part = {row["component"]: row for row in rows}
    for null in ("start", "shaped"):
        for part in ("log_norm", "log_sigma_1", "log_sigma_50"):
            assert by_part[part]["value"] == pytest.approx(by_part[part][null], abs=0.05)


def test_llama2c_starts_what_writes_to_the_stream_smaller() -> None:
    small = files.start_deviation("stories15m", "output")
    assert small == pytest.approx(START / math.sqrt(12))
    assert files.start_deviation("stories15m", "down") == files.start_deviation("minilm", "output")
