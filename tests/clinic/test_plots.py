"""Figures of a diagnosis: cells where rules object are red, whatever the metric."""

import torch

from kappascope.clinic.diagnose import diagnose


def test_the_colour_of_a_cell_says_what_the_rules_found() -> None:
    torch.manual_seed(0)
    dead = torch.randn(64, 64)
    dead[5:9] = 0
    found = diagnose(
        {"layers.0.up_proj.weight": dead, "layers.1.up_proj.weight": torch.randn(64, 64)}
    )
    sick, well = found.matrices
    assert sick.is_alarming and not well.is_alarming
    for key in ("chance", "alpha"):
        red, blue = (patch.get_facecolor()[:3] for patch in found.plot_map(key).patches)
        assert red[0] > red[2] and blue[2] > blue[0]
