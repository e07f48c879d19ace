"""Which matrices are watched."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from kappascope.monitor.survey import masters, stepped_twice, watched
from monitored_training import odd_model, transformer


def names(model: nn.Module, **options: object) -> set[str]:
    found = watched(model, **options)  # type: ignore[arg-type]
    return {logical.name for item in found.items for logical in item.wanted}


def test_parts_and_products_are_watched_and_embeddings_are_not() -> None:
    found = names(transformer())
    assert "1.attn.in_proj_weight[q]" in found and "1.attn.in_proj_weight" not in found
    assert "2.attn[ov.3]" in found and "0.weight" not in found


def test_an_embedding_is_watched_where_it_is_named() -> None:
    assert names(transformer(), where="0.weight") == {"0.weight"}


def test_products_are_left_out_by_name_with_or_without_their_factors() -> None:
    found = names(transformer(), exclude=lambda name: "[qk." in name)
    assert "1.attn[ov.0]" in found and "1.attn[qk.0]" not in found
    assert "1.attn[qk.0]" not in names(transformer(), exclude="*in_proj*")


def test_a_tied_weight_is_watched_once_and_made_weights_as_they_are_used() -> None:
    found = names(odd_model())
    assert {"3.weight", "6.weight", "8.weight"} <= found and "5.weight" not in found


def test_float32_copies_are_found_by_shape_and_value() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).bfloat16()
    copies = [p.detach().float().requires_grad_() for p in model.parameters()]
    found = masters(watched(model), [SGD(copies, lr=0.1)])
    assert [found[name] is copy for name, copy in zip(found, copies, strict=True)] == [True] * 4


def test_parameters_in_two_optimizers_are_named() -> None:
    model = nn.Linear(3, 3)
    several = [SGD(model.parameters(), lr=0.1), SGD([model.bias], lr=0.1)]
    assert stepped_twice(watched(model), several) == ["bias"]


def test_a_lazy_layer_is_refused_until_it_has_weights() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"0\.weight.*: a lazy layer .*pass a batch"):
        watched(model)
    model(torch.ones(2, 5))
    assert len(watched(model).items) == 2
