"""One of each pair of factors that undo one another is left out."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import SGD

from kappascope.corrections import (
    Multipliers,
)


class Block(nn.Module):
    """A transformer's block, by the names that are in use."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        parts = ("q_proj", "k_proj", "v_proj", "o_proj")
        self.attention = nn.ModuleDict({name: nn.Linear(4, 4) for name in parts})
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(4, 8), "down_proj": nn.Linear(8, 4)})


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.block = nn.Embedding(9, 4), Block()
        self.lm_head = nn.Linear(4, 9, bias=False)


def sides(handle_of: nn.Module, gauge: bool) -> dict[str, set[str]]:
    with Multipliers(gauge=gauge).attach(handle_of, SGD(handle_of.parameters())) as handle:
        parts = handle.split(handle_of.state_dict())
        keys = [k.split(".parametrizations.weight.0.") for k in parts]
        found: dict[str, set[str]] = {}
        for layer, side in (key for key in keys if len(key) == 2):
            found.setdefault(layer.rpartition(".")[2], set()).add(side)
        return found


def test_multipliers_keep_one_of_each_pair_that_undoes_itself() -> None:
    kept = ("q_proj", "v_proj", "o_proj", "up_proj", "down_proj")
    assert sides(Language(), gauge=False) == {name: {"rows"} for name in kept}
    everything = sides(Language(), gauge=True)
    assert len(everything) == 7 and all(len(its) == 2 for its in everything.values())


def test_as_many_positions_as_outputs_make_no_layer_a_head() -> None:
    model = Language()
    model.positions = nn.Embedding(4, 4)  # as many as the projections have outputs
    assert sides(model, gauge=False) == sides(Language(), gauge=False)
    plain = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    assert set(sides(plain, gauge=False)) == {"1"}


def test_the_keys_of_a_joined_projection_get_no_factors() -> None:
    model = nn.ModuleDict({"c_attn": nn.Linear(2, 6), "norm": nn.LayerNorm(2)})
    optimizer = SGD(model.parameters(), lr=0.1)
    with Multipliers(weight_decay=0.0).attach(model, optimizer) as handle:
        model["c_attn"](torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        rows = handle.treatments[0].module.rows
        assert ((rows == 1) == torch.tensor([False, False, True, True, False, False])).all()
