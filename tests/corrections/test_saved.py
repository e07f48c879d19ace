"""Weights saved in parts by older versions are read as the layers used them."""

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from correction_examples import EXAMPLES, MERGED, MODELS, steps
from kappascope.corrections.saved import merged
from kappascope.model.tensors import reader

FACTORED = [correction for correction in EXAMPLES if isinstance(correction, MERGED)]


@pytest.mark.parametrize("shape", ["bias", "one layer", "bf16"])
@pytest.mark.parametrize("correction", FACTORED, ids=repr)
def test_what_is_read_is_what_the_handle_merges(correction, shape) -> None:
    torch.manual_seed(0)
    model = MODELS[shape]()
    optimizer = SGD(model.parameters(), lr=0.05)
    handle = correction.attach(model, optimizer)
    steps(model, optimizer, 2)
    state = handle.split(model.state_dict())
    assert any("parametrizations" in key for key in state)
    found = merged(state, reader(state))
    assert handle.merged(state).keys() == model.state_dict().keys()
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(found.read((name,)), weight)
        assert torch.equal(handle.merged(state)[name], weight)


def test_what_no_correction_has_touched_is_the_same() -> None:
    state = MODELS["bias"]().state_dict()
    assert merged(state, reader(state)).contents is state


def test_a_factor_that_fits_both_sides_of_a_stored_transpose_is_not_applied() -> None:
    state: dict[str, Tensor] = {
        "h.c_proj.parametrizations.weight.original": torch.ones(2, 2),
        "h.c_proj.parametrizations.weight.0.rows": torch.tensor([1.0, 2.0]),
    }
    found = merged(state, reader(state))
    assert torch.equal(found.read(("h.c_proj.weight",)), torch.ones(2, 2))
    reason = found.contents["h.c_proj.parametrizations.weight.0.rows"]
    assert "shapes do not tell to which side it belongs" in reason.text
