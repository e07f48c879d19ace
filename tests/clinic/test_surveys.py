"""A survey: a row for each checkpoint, and ranges of what was trained alone."""

from dataclasses import replace

import torch

from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.surveys import Surveyed


def model(seed: int) -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(5, 64, 64, generator=random)
    state = {f"layers.{i}.up.weight": w * torch.linspace(2, 0.1, 64) for i, w in enumerate(drawn)}
    return state | {"pooler.weight": 0.02 * torch.randn(64, 64, generator=random)}


def surveyed() -> Surveyed:
    named = enumerate(("a.safetensors", "b.safetensors"))
    return Surveyed.of([replace(diagnose(model(k)), source=source) for k, source in named])


def test_what_was_never_trained_is_left_out_of_the_ranges() -> None:
    found = surveyed()
    known = found.atlas.ranges["up", "square", "kappa_over_chance"]
    assert (known.n, known.models) == (10, 2) and found.left_out == 2
    assert all(kind != "other" for kind, _, _ in found.atlas.ranges)
    assert any("2 matrices were left out" in line for line in found.lines())


def test_the_page_needs_no_network_and_names_every_model() -> None:
    html = surveyed().html()
    assert "default-src &#39;none&#39;" in html and "Survey of 2 checkpoints" in html
    assert "a.safetensors" in html and "b.safetensors" in html
    assert "http" not in html.replace("http-equiv", "")
