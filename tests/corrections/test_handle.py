"""A handle saves, converts and closes what is attached, and refuses what would clash."""

from __future__ import annotations

import copy
import io
import pickle
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from correction_examples import (
    EXAMPLES,
    MERGED,
    Tied,
    answers,
    attached,
    convolution,
    every,
    inputs,
    named,
    perceptron,
    steps,
)
from kappascope.corrections import (
    Hybrid,
    Multipliers,
    NormPin,
    SingularValueMultipliers,
    SpectralDecay,
    SVDCorrection,
)


class Custom(Optimizer):
    """Gradient steps of an optimizer with fields of its own."""

    def __init__(self, parameters, **defaults) -> None:
        super().__init__(parameters, defaults)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.01)


@every
@pytest.mark.parametrize("fields", [{"lr": 0.1, "betas": (0.9, 0.99, 0.999)}, {"lr": None}, {}])
def test_an_optimizer_may_have_fields_of_its_own(correction, fields) -> None:
    model = perceptron()
    optimizer = Custom(model.parameters(), **fields)
    if fields.get("lr") is None and isinstance(correction, (*MERGED, SpectralDecay)):
        with pytest.raises(ValueError, match=r"follows the learning rate of 0\.weight, and Custom"):
            correction.attach(model, optimizer)
        assert named(model) == [(name, id(p)) for name, p in model.named_parameters()]
        return
    with correction.attach(model, optimizer) as handle:
        steps(model, optimizer, 4)
    assert handle.difference == 0.0


@pytest.mark.parametrize("rewriting", [NormPin(), SVDCorrection(), SpectralDecay()], ids=repr)
@pytest.mark.parametrize("factors", [Multipliers(), SingularValueMultipliers(), Hybrid()], ids=repr)
def test_a_weight_is_either_rewritten_or_made_of_factors(rewriting, factors) -> None:
    model = perceptron()
    optimizer, before = SGD(model.parameters(), lr=0.1), named(model)
    with rewriting.attach(model, optimizer):
        with pytest.raises(
            ValueError, match=r"rewrites 0\.weight, which \w+ would make of factors"
        ):
            factors.attach(model, optimizer)
        assert named(model) == before
        steps(model, optimizer)
    with factors.attach(model, optimizer), pytest.raises(ValueError, match="no inverse"):
        rewriting.attach(model, optimizer)


def test_a_corrected_model_is_saved_by_its_state_dict_alone() -> None:
    model, _ = attached(Multipliers())
    with pytest.raises(RuntimeError, match="state_dict"):
        torch.save(model, io.BytesIO())


def test_a_handle_cannot_be_copied() -> None:
    model = perceptron()
    handle = NormPin().attach(model, optimizer := SGD(model.parameters()))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a handle cannot be copied or pickled"):
            copied((model, optimizer, handle) if copied is copy.deepcopy else handle)


def test_what_cannot_be_merged_is_not_lost() -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.05)
    handle = SingularValueMultipliers().attach(model, optimizer)
    steps(model, optimizer, 2)
    trained, factors = model(inputs(model)), model[2].parametrizations.weight[0]
    basis, factors.basis = factors.basis, torch.ones(2, 2)
    with pytest.raises(RuntimeError):
        handle.close()
    factors.basis = basis
    assert handle.difference is None and torch.equal(model(inputs(model)), trained)
    handle.close()
    assert handle.difference == 0.0 and torch.equal(model(inputs(model)), trained)


class Twice(nn.Module):
    """One module under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.second = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.parametrize("correction", [c for c in EXAMPLES if isinstance(c, MERGED)], ids=repr)
def test_state_dicts_have_a_module_under_all_its_names(correction) -> None:
    model, other = Twice(), Twice()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = correction.attach(model, optimizer)
    steps(model, optimizer)
    other.load_state_dict(handle.plain(model.state_dict()))
    torch.testing.assert_close(answers(other), answers(model), rtol=0, atol=0)
    model.load_state_dict(handle.corrected(Twice().state_dict()))
    handle.close()


def test_a_state_dict_without_factors_is_an_error() -> None:
    model = perceptron()
    handle = Multipliers().attach(model, SGD(model.parameters()))
    state = {key: v for key, v in model.state_dict().items() if not key.endswith("rows")}
    with pytest.raises(ValueError, match=r"0\.\S+\.original comes without its factors rows"):
        handle.plain(state)


@pytest.mark.parametrize("correction", [c for c in EXAMPLES if isinstance(c, MERGED)], ids=repr)
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_state_dicts_of_wrapped_models_are_converted_too(correction, prefix) -> None:
    model = perceptron()
    plain = {prefix + key: value for key, value in model.state_dict().items()}
    handle = correction.attach(model, SGD(model.parameters()))
    wrapped = {prefix + key: value for key, value in model.state_dict().items()}
    torch.testing.assert_close(handle.plain(wrapped), plain, rtol=0, atol=0)
    torch.testing.assert_close(handle.corrected(plain), wrapped, rtol=0, atol=0)


def test_a_state_dict_of_something_else_is_an_error() -> None:
    model = perceptron()
    plain = model.state_dict()
    handle = Multipliers().attach(model, SGD(model.parameters()))
    with pytest.raises(
        ValueError, match=r"such as 0\.parametrizations\.weight\.original, got 0\.w"
    ):
        handle.plain(plain)
    with pytest.raises(ValueError, match=r"such as 0\.weight, got 0\.bias"):
        handle.corrected(model.state_dict())


def test_the_difference_tells_where_closing_changes_what_the_model_uses() -> None:
    model = Tied()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = Multipliers(gauge=True).attach(model, optimizer, where="first.weight")
    model.first.parametrizations.weight[0].rows.data.fill_(1.5)
    # tied no longer: where it was, nothing merges the factors into what is there now
    model.second.parametrizations.weight.original = nn.Parameter(torch.ones(4, 4))
    handle.close()
    assert handle.difference == pytest.approx(1 / 3)


# --- loading a state ------------------------------------------------------------------------------


def trained(correction, model: nn.Module, kind=AdamW, count: int = 3):
    """A handle that has taken steps, and everything that a refused state must leave alone."""
    optimizer = kind(model.parameters(), lr=0.05)
    handle = correction.attach(model, optimizer)
    steps(model, optimizer, count)
    return model, optimizer, handle


def whole(model: nn.Module, handle) -> list:
    return copy.deepcopy([model.state_dict(), handle.state_dict()])


def assert_same(found: object, expected: object) -> None:
    """That two nested states are the same to the last bit."""
    one, other = dict(leaves(found)), dict(leaves(expected))
    assert one.keys() == other.keys()
    for at, value in one.items():
        is_tensor = isinstance(value, Tensor)
        assert torch.equal(value, other[at]) if is_tensor else value == other[at], at


def wide() -> nn.Module:
    """Large enough for penalties and bounds to track singular vectors."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 100), nn.Linear(100, 120))


def leaves(value: object, at: tuple = ()):
    """Every value in a nested state, with the keys that lead to it."""
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in pairs:
            yield from leaves(inner, (*at, key))
    else:
        yield at, value


def put(state, at: tuple, value: object):
    """A copy of a nested state with another value at one place."""
    changed = inner = copy.deepcopy(state)
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return changed


def refused(handle, state: object) -> str:
    with pytest.raises(ValueError, match=r"expected .*; load the state of") as caught:
        handle.load_state_dict(state)
    assert "\n" not in str(caught.value)
    return str(caught.value)


OTHERS = {
    "other shapes": lambda: nn.Sequential(nn.Linear(4, 7), nn.ReLU(), nn.Linear(7, 3)),
    "other names": lambda: nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)),
    "fewer layers": lambda: nn.Sequential(nn.Linear(4, 6)),
    "more layers": lambda: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), *(nn.Linear(6, 6), nn.Tanh())),
}


@every
@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize("other", OTHERS)
def test_a_state_of_another_model_is_refused_and_changes_nothing(correction, kind, other) -> None:
    model, optimizer, handle = trained(correction, perceptron(), kind)
    *_, stranger = trained(correction, OTHERS[other](), kind)
    before = whole(model, handle)
    refused(handle, stranger.state_dict())
    assert_same(whole(model, handle), before)
    steps(model, optimizer, 2)


@every
def test_a_state_of_another_correction_or_none_is_refused(correction) -> None:
    model, _, handle = trained(correction, perceptron())
    before = whole(model, handle)
    for other in EXAMPLES:
        if type(other) is not type(correction):
            refused(handle, trained(other, perceptron())[2].state_dict())
    for garbage in ({}, None, [], 7, "state", {"steps": [1]}, {**before[1], "more": 1}, *before[1]):
        refused(handle, garbage)
    assert_same(whole(model, handle), before)


@every
@pytest.mark.parametrize("make", [perceptron, wide])
def test_every_value_of_a_state_is_checked(correction, make) -> None:
    model, _, handle = trained(correction, make())
    before = whole(model, handle)
    state = before[1]
    for at, value in leaves(state):
        if at[0] == "private" and "param_groups" in at:
            continue  # options are not taken from it
        refused(handle, put(state, at, None))
        refused(handle, put(state, at, [value]))
        if isinstance(value, Tensor):
            floating = value.is_floating_point()
            refused(handle, put(state, at, value.to("meta")))
            refused(handle, put(state, at, value[None]))
            refused(handle, put(state, at, value.to(torch.int64 if floating else torch.float64)))
            refused(handle, put(state, at, value * torch.nan if floating else value + 10**6))
        elif isinstance(value, int):
            refused(handle, put(state, at, -1))
            refused(handle, put(state, at, 1.5))
    for at in {path[:n] for path, _ in leaves(state) for n in range(len(path))}:
        inner = state
        for key in at:
            inner = inner[key]
        options_or_factors = at[:1] == ("private",) and (
            "param_groups" in at or at[2:] == ("state",)
        )
        if isinstance(inner, dict) and not options_or_factors:
            # an old state has no shapes, and what was not looked at yet has no vectors
            for key in inner.keys() - {"shape"} - ({"top"} if len(inner) == 1 else set()):
                lacking = {k: v for k, v in inner.items() if k != key}
                refused(handle, put({"": state}, ("", *at), lacking)[""])
            refused(handle, put({"": state}, ("", *at), {**inner, "more": 1})[""])
    assert_same(whole(model, handle), before)


@every
@pytest.mark.parametrize("make", [perceptron, wide, convolution])
@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)], ids=["AdamW", "SGD"])
def test_a_good_state_resumes_to_the_last_bit(correction, make, kind) -> None:
    torch.manual_seed(0)
    model, optimizer, handle = trained(correction, make(), kind)
    saved = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), handle.state_dict()), saved)
    steps(model, optimizer, 3)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    again, other, resumed = trained(correction, make(), kind, count=0)
    for part, state in zip((again, other, resumed), states, strict=True):
        part.load_state_dict(state)
    steps(again, other, 3)
    assert_same(whole(again, resumed), whole(model, handle))


def test_a_state_whose_tensors_share_one_number_is_copied_before_it_is_written() -> None:
    model, optimizer, handle = trained(Multipliers(), perceptron())
    state = handle.state_dict()
    for entry in state["private"][0]["state"].values():
        entry["exp_avg"] = torch.zeros(1).expand(entry["exp_avg"].shape)
    handle.load_state_dict(state)
    steps(model, optimizer, 2)
    kept = handle.state_dict()["private"][0]["state"]
    assert all(entry["exp_avg"].is_contiguous() for entry in kept.values())


def test_a_closed_handle_loads_nothing() -> None:
    _, _, handle = trained(NormPin(), perceptron())
    state = handle.state_dict()
    handle.close()
    with pytest.raises(ValueError, match="closed"):
        handle.load_state_dict(state)
