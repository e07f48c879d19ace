"""The weights of a module in memory: tied ones once, by the rule for stored ones."""

import torch
from torch import nn

from kappascope.model.matrices import matrices
from kappascope.model.tensors import tie_key
from kappascope.model.weights import live_weights


def test_tied_weights_are_one_by_the_same_rule_as_in_a_file() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight  # one parameter
    model[2].weight = nn.Parameter(model[0].weight.detach())  # two parameters in one memory
    (weight,) = live_weights(model)
    assert [name for name, *_ in weight.uses] == ["0.weight", "1.weight", "2.weight"]
    assert [name for name, _ in matrices(model)] == ["0.weight"]


def test_what_has_no_memory_to_share_is_not_tied() -> None:
    sparse = torch.eye(2).to_sparse()
    pairs = [
        (torch.empty(0, 3), torch.empty(0, 3)),
        (sparse, torch.eye(2).to_sparse()),
        (torch.empty(2, 2, device="meta"), torch.empty(2, 2, device="meta")),
    ]
    assert all(tie_key(a) == tie_key(a) != tie_key(b) for a, b in pairs)


def test_reading_a_parametrized_weight_moves_nothing() -> None:
    layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).train()
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    (weight,) = live_weights(layer)
    weight.read()
    assert all(torch.equal(before[key], value) for key, value in layer.state_dict().items())
    assert all(module.training for module in layer.modules())
