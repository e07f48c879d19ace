"""What one correction does to one optimizer: its state, and the steps it does not take."""

import warnings

import pytest
import torch
from torch import nn
from torch.optim import SGD

from kappascope.corrections._attachment import Attachment, check_state, load_state, state_of
from kappascope.corrections._treatments import Treatment
from kappascope.model.weights import live_weights


def attachment(columns: int = 3) -> Attachment:
    model = nn.Sequential(nn.Linear(columns, 2), nn.Linear(2, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    treatments = [
        Treatment(nn.Linear, weight, {"norm": torch.ones(2)}) for weight in live_weights(model)
    ]
    return Attachment(optimizer, optimizer, treatments)


def test_a_state_is_taken_up_by_a_like_attachment_and_shares_nothing_with_it() -> None:
    one, other = attachment(), attachment()
    one.steps = 7
    one.treatments[1].memory["norm"].fill_(5.0)
    state = state_of([one])
    check_state([other], state)
    load_state([other], state)
    assert other.steps == 7 and other.treatments[1].memory["norm"].tolist() == [5.0, 5.0]
    one.treatments[1].memory["norm"].zero_()
    assert other.treatments[1].memory["norm"].tolist() == [5.0, 5.0]


def test_a_state_of_other_shapes_or_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"0\.weight of shape \(2, 3\)"):
        check_state([attachment()], state_of([attachment(columns=4)]))
    with pytest.raises(ValueError, match="a list of 2, got a list of 1"):
        check_state([attachment(), attachment()], state_of([attachment()]))


def test_of_the_steps_not_taken_the_first_of_each_weight_is_warned_of() -> None:
    own = attachment()
    with pytest.warns(RuntimeWarning, match=r"Linear was refused: 0\.weight would not be finite"):
        own.refuse(own.treatments[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own.refuse(own.treatments[0])
    assert own.refused == {"0.weight": 2}
