"""A survey: a row for each checkpoint, and ranges of what was trained alone."""

import torch

from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.surveys import Surveyed


def model(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(5, 64, 64, generator=random)
    state = {f"layers.{i}.up.weight": w * torch.linspace(2, 0.1, 64) for i, w in enumerate(drawn)}
    return state | {"pooler.weight": 0.02 * torch.randn(64, 64, generator=random)}


def test_what_was_never_trained_is_left_out_of_the_ranges() -> None:
    found = Surveyed.of([diagnose(model(0)), diagnose(model(1))])
    known = found.atlas.ranges["up", "square", "kappa_over_chance"]
    assert (known.n, known.models) == (10, 2) and found.left_out == 2
    assert all(kind != "other" for kind, _, _ in found.atlas.ranges)
    assert any("2 matrices were left out" in line for line in found.lines())


def test_the_page_needs_no_network_and_names_every_model() -> None:
    html = Surveyed.of([diagnose(model(0)), diagnose(model(1))]).html()
    assert "default-src 'none'" in html and "Survey of 2 checkpoints" in html
    assert "http" not in html.replace("http-equiv", "")
