"""One layout says how a tensor is a matrix, whether it is stored, live or saved."""

import pickle

import pytest
import torch
from torch import nn

from kappascope.model._heads import Config
from kappascope.model.layouts import Layout, Surroundings, live_layout, stored_layout

LAYERS = [
    nn.Linear(4, 3),
    nn.Conv2d(4, 6, 3),
    nn.Conv2d(4, 6, 3, groups=2),
    nn.Conv2d(4, 4, 3, groups=4),
    nn.ConvTranspose2d(4, 6, 3),
    nn.ConvTranspose2d(4, 6, 3, groups=2),
    nn.ConvTranspose1d(4, 8, 3, groups=4),
    nn.ConvTranspose1d(4, 4, 3, groups=4),
]


class Conv1D(nn.Module):
    """A layer that stores its matrix (in, out), as GPT-2's does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 12))


@pytest.mark.parametrize("layer", [*LAYERS, Conv1D()], ids=str)
class TestLiveLayout:
    def test_the_tensor_of_a_matrix_is_its_inverse(self, layer) -> None:
        layout = live_layout(layer, tuple(layer.weight.shape))
        matrix = layout.matrix(layer.weight)
        assert layout.shape == tuple(matrix.shape)
        assert torch.equal(layout.tensor(matrix), layer.weight)
        assert layout.tensor(matrix).shape == layer.weight.shape

    def test_it_is_the_layout_of_the_stored_weight(self, layer) -> None:
        shape = tuple(layer.weight.shape)
        stored = stored_layout(Surroundings("layer.weight", shape, owner=layer))
        whole, *parts = (matrix for _, matrix in stored.cut(layer.weight))
        live = live_layout(layer, shape).matrix(layer.weight)
        assert torch.equal(live.flatten(0, -2), whole)
        assert not parts or torch.equal(live, torch.stack(parts))

    def test_it_can_be_sent_to_another_process(self, layer) -> None:
        layout = live_layout(layer, tuple(layer.weight.shape))
        assert pickle.loads(pickle.dumps(layout)) == layout


def test_a_stack_of_trials_is_taken_as_it_is() -> None:
    trials = torch.randn(5, 3, 4)
    assert Layout.plain((5, 3, 4)).matrix(trials) is trials
    assert Layout.plain((5, 3, 4)).tensor(trials) is trials


def test_an_empty_projection_tells_nothing_of_its_neighbours() -> None:
    for empty in ((0, 12), (12, 0), (0, 0)):
        near = {"attn.c_attn.weight": empty}.get
        assert stored_layout(Surroundings("attn.c_proj.weight", (4, 5), near)).order == (0, 1)


def test_heads_that_fit_a_matrix_turned_round_are_not_cut_out_of_it() -> None:
    config = Config({"model_type": "gpt_bigcode", "n_head": 4, "head_dim": 1})
    near = {"attn.c_attn.weight": (4, 12)}.get
    found = stored_layout(Surroundings("attn.c_attn.weight", (4, 12), near, config=config))
    assert all(piece.shape[1] == 4 for _, piece in found.cut(torch.empty(4, 12)))
