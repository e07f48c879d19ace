"""A handle saves, converts and closes what is attached, and refuses what would clash."""

from __future__ import annotations

import copy
import io
import math
import pickle
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from correction_examples import (
    EXAMPLES,
    MERGED,
    answers,
    attached,
    convolution,
    every,
    inputs,
    kappa_of,
    named,
    perceptron,
    steps,
    wide,
)
from kappascope.corrections import (
    Hybrid,
    MagnitudeDirection,
    Multipliers,
    NormPin,
    OrthogonalPenalty,
    PaperPenalty,
    SigmaMaxPenalty,
    SingularValueBound,
    SingularValueMultipliers,
    SpectralDecay,
    SpectralNormalization,
    SpectralPenalty,
    SVDCorrection,
)
from kappascope.corrections._stepping import StepHooks


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


BOUNDING = [SVDCorrection(), SpectralDecay(), SingularValueBound()]
FACTORED = [Multipliers(), SingularValueMultipliers(), Hybrid()]


@pytest.mark.parametrize("rewriting", BOUNDING, ids=lambda c: type(c).__name__)
@pytest.mark.parametrize("factors", FACTORED, ids=lambda c: type(c).__name__)
def test_a_weight_is_either_rewritten_as_a_whole_or_made_of_factors(rewriting, factors) -> None:
    for first, second in ((rewriting, factors), (factors, rewriting)):
        model = perceptron()
        optimizer, before = SGD(model.parameters(), lr=0.1), named(model)
        with first.attach(model, optimizer):
            with pytest.raises(
                ValueError, match=r"rewrites 0\.weight as a whole.*; close \w+ first"
            ):
                second.attach(model, optimizer)
            assert named(model) == before
            steps(model, optimizer)


@pytest.mark.parametrize("pin_first", [False, True])
def test_a_pin_holds_the_norm_of_what_factors_multiply(pin_first) -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    order = [NormPin(), Multipliers(rate=1.0)]
    factors = order[1].attach(model, optimizer) if not pin_first else None
    if factors is not None:
        steps(model, optimizer, 3)
    norm, before = model[0].weight.detach().norm(), answers(model)
    pin = order[0].attach(model, optimizer)
    factors = factors or order[1].attach(model, optimizer)
    assert torch.equal(answers(model), before)
    steps(model, optimizer, 5)
    direction = factors.treatments[0].direction
    torch.testing.assert_close(direction.norm(), norm)
    assert abs(model[0].weight.detach().norm() - norm) > 1e-4
    pin.close()
    steps(model, optimizer, 1)
    assert abs(factors.treatments[0].direction.norm() - norm) > 1e-6


def test_two_kinds_of_factors_are_refused() -> None:
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    with Multipliers().attach(model, optimizer):
        with pytest.raises(ValueError, match=r"0\.weight has factors of Multipliers \(close it"):
            SingularValueMultipliers().attach(model, optimizer)
        with pytest.raises(ValueError, match=r"already attached \(close it first\)"):
            Multipliers().attach(model, optimizer)


@pytest.mark.parametrize("correction", FACTORED, ids=lambda c: type(c).__name__)
def test_merging_goes_on_with_factors_at_one(correction) -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = correction.attach(model, optimizer)
    steps(model, optimizer, 3)
    twin, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    handle.merge()
    torch.testing.assert_close(dict(model.state_dict()), dict(before), rtol=0, atol=0)
    other = SGD(twin.parameters(), lr=0.1)
    fresh = correction.attach(twin, other)
    steps(model, optimizer)
    steps(twin, other)
    if not isinstance(correction, Hybrid):  # whose penalty is reused
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)
    assert fresh.treatments[0].weight.name == "0.weight"
    handle.close()
    with pytest.raises(ValueError, match="closed"):
        handle.merge()


class TestWritesByOthers:
    """A weight that somebody else has written is never overwritten by what was there before."""

    @pytest.fixture
    def run(self):
        torch.manual_seed(0)
        model = perceptron()
        optimizer = SGD(model.parameters(), lr=0.0)
        handle = Multipliers(rate=1.0).attach(model, optimizer)
        optimizer.param_groups[0]["lr"] = 0.1
        steps(model, optimizer, 3)
        optimizer.param_groups[0]["lr"] = 0.0  # what comes next changes nothing by itself
        return model, optimizer, handle.treatments[0]

    def test_the_same_bits_are_nothing_new(self, run) -> None:
        model, optimizer, treatment = run
        kept, direction = copy.deepcopy(model.state_dict()), treatment.direction.clone()
        with torch.no_grad():
            model[0].weight.zero_()
        model.load_state_dict(kept)
        steps(model, optimizer)
        assert torch.equal(treatment.direction, direction)
        assert not torch.equal(treatment.module.rows, torch.ones(6))

    def test_what_is_loaded_starts_with_factors_of_one(self, run) -> None:
        model, optimizer, treatment = run
        new = perceptron().state_dict()
        model.load_state_dict(new)
        assert torch.equal(model[0].weight, new["0.weight"])
        steps(model, optimizer)
        assert torch.equal(treatment.direction, new["0.weight"])
        assert torch.equal(treatment.module.rows, torch.ones(6))
        assert torch.equal(model[0].weight, new["0.weight"])

    @pytest.mark.parametrize("by", ["data", "copy", "item"])
    def test_what_is_written_keeps_its_factors(self, run, by) -> None:
        model, optimizer, treatment = run
        rows, new = treatment.module.rows.clone(), 0.9 * model[0].weight.detach()
        if by == "item":
            new = model[0].weight.detach().clone()
            new[1, 1] = 7.0
            model[0].weight.data[1, 1] = 7.0
        elif by == "data":
            model[0].weight.data.mul_(0.9)
        else:
            with torch.no_grad():
                model[0].weight.copy_(new)
        assert torch.equal(model[0].weight, new)
        steps(model, optimizer)
        assert torch.equal(treatment.module.rows, rows)
        torch.testing.assert_close(model[0].weight.detach(), new)

    def test_a_factor_of_zero_keeps_what_it_silences(self, run) -> None:
        model, optimizer, treatment = run
        with torch.no_grad():
            treatment.module.rows[0] = 0.0
            treatment.write()
        direction = treatment.direction.clone()
        model[0].weight.data[1:] *= 2
        steps(model, optimizer)
        torch.testing.assert_close(treatment.direction[0], direction[0], rtol=0, atol=0)
        torch.testing.assert_close(treatment.direction[1:], 2 * direction[1:])


def test_a_corrected_model_is_copied_and_pickled_as_any_other() -> None:
    model, optimizer = attached(Multipliers())
    steps(model, optimizer)
    file = io.BytesIO()
    torch.save(model, file)
    assert b"kappascope" not in file.getvalue()
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(answers(twin), answers(model))
        twin.load_state_dict(perceptron().state_dict())
        other = SGD(twin.parameters(), lr=0.1)
        with Multipliers().attach(twin, other):
            steps(twin, other)
    before = answers(model)
    optimizer.zero_grad()
    optimizer.step()
    torch.testing.assert_close(answers(model), before)


@every
def test_copies_outlive_the_handle_and_it_them(correction) -> None:
    model = perceptron()
    handle = correction.attach(model, optimizer := SGD(model.parameters(), lr=0.05))
    steps(model, optimizer, 2)
    average, twin = torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(model)
    expected = answers(model)
    steps(model, optimizer)
    handle.close()
    for each in (average, twin, copy.deepcopy(twin)):
        assert torch.equal(answers(each), expected)
    with correction.attach(twin, other := SGD(twin.parameters(), lr=0.05)):
        steps(twin, other)
    assert torch.equal(answers(average), expected)


def test_closing_leaves_what_others_parametrized_meanwhile() -> None:
    model = nn.Linear(4, 3)
    handle = Multipliers().attach(model, SGD(model.parameters()))
    nn.utils.parametrize.register_parametrization(model, "bias", nn.Tanh())
    expected = model(inputs(model))
    handle.close()
    assert dict(model.named_parameters()).keys() == {"weight", "parametrizations.bias.original"}
    assert torch.equal(model(inputs(model)), expected)


def test_a_handle_cannot_be_copied() -> None:
    model = perceptron()
    handle = NormPin().attach(model, optimizer := SGD(model.parameters()))
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="a handle cannot be copied or pickled"):
            copied((model, optimizer, handle) if copied is copy.deepcopy else handle)


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
    other.load_state_dict(handle.merged(handle.split(model.state_dict())))
    torch.testing.assert_close(answers(other), answers(model), rtol=0, atol=0)
    handle.close()


def test_a_state_dict_without_factors_is_an_error() -> None:
    model = perceptron()
    handle = Multipliers().attach(model, SGD(model.parameters()))
    parts = handle.split(model.state_dict())
    state = {key: v for key, v in parts.items() if not key.endswith("rows")}
    with pytest.raises(ValueError, match=r"0\.\S+\.original comes without its factors rows"):
        handle.merged(state)


@pytest.mark.parametrize("correction", [c for c in EXAMPLES if isinstance(c, MERGED)], ids=repr)
@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_state_dicts_of_wrapped_models_are_converted_too(correction, prefix) -> None:
    model = perceptron()
    plain = {prefix + key: value for key, value in model.state_dict().items()}
    handle = correction.attach(model, SGD(model.parameters()))
    parts = handle.split(plain)
    assert all(key.startswith(prefix) for key in parts) and parts.keys() != plain.keys()
    torch.testing.assert_close(handle.merged(parts), plain, rtol=0, atol=0)
    torch.testing.assert_close(handle.merged(plain), plain, rtol=0, atol=0)


def test_a_state_dict_of_something_else_is_an_error() -> None:
    model = perceptron()
    handle = Multipliers().attach(model, SGD(model.parameters()))
    with pytest.raises(ValueError, match=r"such as 0\.weight, got other"):
        handle.split({"other": torch.ones(2)})
    other = {key: v + 1 for key, v in model.state_dict().items()}
    parts = handle.split(other)
    assert torch.equal(parts["0.parametrizations.weight.original"], other["0.weight"])
    assert torch.equal(parts["0.parametrizations.weight.0.rows"], torch.ones(6))


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
            # an old state lacks two keys, and in it what was not looked at yet had no vectors
            newer = {"shape", "looked_at"}
            if inner.keys() <= {"wait", "penalty"}:  # what nothing follows from but a metric
                newer |= {"penalty"}
            for key in inner.keys() - newer - ({"top"} if len(inner) == 1 else set()):
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


# --- what the optimizer's state carries -----------------------------------------------------------


ORDERS = ["model, optimizer", "optimizer, model"]


@every
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("make", [perceptron, convolution])
@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)], ids=["AdamW", "SGD"])
def test_the_optimizers_state_resumes_to_the_last_bit(correction, kind, make, order) -> None:
    torch.manual_seed(0)
    model, optimizer, handle = trained(correction, make(), kind)
    saved = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
    steps(model, optimizer, 3)
    saved.seek(0)
    states = torch.load(saved, weights_only=True)
    again, other, resumed = trained(correction, make(), kind, count=2)
    parts = {"model": again, "optimizer": other}
    for name in order.split(", "):
        parts[name].load_state_dict(states[name])
    steps(again, other, 3)
    assert_same(whole(again, resumed), whole(model, handle))


@every
def test_attached_after_loading_a_handle_takes_the_state_that_the_optimizer_carries(
    correction,
) -> None:
    torch.manual_seed(0)
    model, optimizer, handle = trained(correction, perceptron())
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    steps(model, optimizer, 3)
    again = perceptron()
    other = AdamW(again.parameters(), lr=0.05)
    again.load_state_dict(states[0])
    other.load_state_dict(states[1])  # where nothing is attached: ignored
    assert set(other.state_dict()) == {"state", "param_groups"}
    resumed = correction.attach(again, other)
    resumed.load_state_dict(states[1]["kappascope"][0])
    steps(again, other, 3)
    assert_same(whole(again, resumed), whole(model, handle))


@every
def test_a_plain_optimizers_state_loads_where_a_correction_is_attached(correction) -> None:
    plain = perceptron()
    other = AdamW(plain.parameters(), lr=0.05)
    steps(plain, other, 2)
    model, optimizer, _ = trained(correction, perceptron(), count=2)
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(other.state_dict())
    steps(model, optimizer, 2)


def test_a_state_of_another_correction_in_the_optimizer_is_named_and_left() -> None:
    _, optimizer, _ = trained(NormPin(), perceptron())
    model, other, handle = trained(Multipliers(), perceptron())
    before = whole(model, handle)
    with pytest.warns(
        RuntimeWarning, match=r"has none of this Multipliers, which goes on as it is"
    ):
        other.load_state_dict(optimizer.state_dict())
    assert_same(whole(model, handle), before)


@every
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_hold_the_plain_optimizer(correction, flat) -> None:
    from torch.distributed.checkpoint import state_dict as dcp

    options = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, optimizer, _ = trained(correction, perceptron())
    plain = perceptron()
    other = AdamW(plain.parameters(), lr=0.05)
    steps(plain, other)
    found = dcp.get_optimizer_state_dict(model, optimizer, options=options)
    expected = dcp.get_optimizer_state_dict(plain, other, options=options)
    assert found.keys() == expected.keys()
    dcp.set_optimizer_state_dict(plain, other, found, options=options)
    dcp.set_optimizer_state_dict(model, optimizer, expected, options=options)
    steps(model, optimizer)


@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)], ids=["AdamW", "SGD"])
@pytest.mark.parametrize(
    "correction",
    [
        Multipliers(),
        SpectralPenalty(0.1, target=1.5),
        PaperPenalty(0.1, target=1.5),
        SigmaMaxPenalty(0.5),
        SingularValueMultipliers(every=3),
        SingularValueBound(2.0),
        SpectralDecay(every=2),
        SpectralNormalization(),
    ],
    ids=lambda c: type(c).__name__,
)
@pytest.mark.filterwarnings("ignore")  # that there is one process, and of DCP's own
def test_a_distributed_checkpoint_fills_the_state_of_a_handle_that_has_not_stepped(
    correction, kind, tmp_path: Path
) -> None:
    from torch.distributed import checkpoint

    model, optimizer, handle = trained(correction, wide(), kind)
    again, other, fresh = trained(correction, wide(), kind, count=0)
    again.load_state_dict(model.state_dict())
    plain = {key: value for key, value in optimizer.state_dict().items() if key != "kappascope"}
    other.load_state_dict(copy.deepcopy(plain))
    checkpoint.save({"handle": handle}, checkpoint_id=tmp_path)
    checkpoint.load({"handle": fresh}, checkpoint_id=tmp_path)  # it fills only what it is shown
    steps(model, optimizer, 3)
    steps(again, other, 3)
    assert_same(whole(again, fresh), whole(model, handle))


@every
@pytest.mark.parametrize("kind", [AdamW, partial(SGD, momentum=0.9)], ids=["AdamW", "SGD"])
def test_a_state_that_was_saved_before_the_first_step_changes_nothing(correction, kind) -> None:
    ends = []
    for saved in (False, True):
        model, optimizer, handle = trained(correction, wide(), kind, count=0)
        if saved:
            handle.load_state_dict(handle.state_dict())
        steps(model, optimizer, 3)
        ends.append(whole(model, handle))
    assert_same(*ends)


# --- metrics --------------------------------------------------------------------------------------


@every
def test_metrics_are_numbers_by_name(correction) -> None:
    _, _, handle = trained(correction, perceptron())
    found = handle.metrics()
    assert all(type(value) is float and math.isfinite(value) for value in found.values())
    assert found["steps"] == 3 and found["refused"] == 0 and found["seconds"] > 0
    assert {name.partition("/")[2] for name in found if "/" in name} == {"0.weight", "2.weight"}


def test_metrics_tell_what_is_happening() -> None:
    model, optimizer, handle = trained(
        Hybrid(Multipliers(rate=5.0), PaperPenalty(0.1, target=1.5, every=1)), perceptron()
    )
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    model(inputs(model)).square().mean().backward()
    gradient, kappa = model[0].weight.grad.clone(), kappa_of(before)
    optimizer.step()
    found = handle.metrics()
    penalty = PaperPenalty(0.1, target=1.5)
    leaf = before.clone().requires_grad_()
    penalty.penalty(leaf).backward()
    share = leaf.grad.norm() / (leaf.grad.norm() + gradient.norm())
    assert found["kappa/0.weight"] == pytest.approx(float(kappa), rel=1e-4)
    assert found["penalty/0.weight"] == pytest.approx(float(penalty.penalty(before)), rel=1e-4)
    assert found["gradient_share/0.weight"] == pytest.approx(float(share), rel=1e-4)
    module = handle.treatments[-2].module
    spreads = [float(f.max() / f.min()) for f in module.factors]
    assert found["spread/0.weight"] == pytest.approx(max(spreads)) and max(spreads) > 1.001


def test_metrics_of_a_penalty_that_steps_on_its_own_are_of_the_weight_it_moved() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(6, 6, bias=False)
    optimizer = SGD(layer.parameters(), lr=0.0)
    penalty = SpectralPenalty(0.1, target=1.5)
    handle = penalty.attach(layer, optimizer)
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    found = handle.metrics()
    assert found["kappa/weight"] == pytest.approx(float(kappa_of(layer.weight)), rel=1e-4)
    expected = float(penalty.penalty(layer.weight.detach()))
    assert found["penalty/weight"] == pytest.approx(expected, rel=1e-4)
    assert found["gradient_share/weight"] == 0.0  # at a learning rate of zero it takes no step
    optimizer.param_groups[0]["lr"] = 1e-6
    optimizer.step()
    assert 0.0 < handle.metrics()["gradient_share/weight"] < 1.0


def test_metrics_count_rewrites() -> None:
    _, _, handle = trained(SVDCorrection(every=2), perceptron(), count=5)
    assert handle.metrics()["rewrites/2.weight"] == 2


@pytest.mark.parametrize("correction", [SigmaMaxPenalty(0.5), OrthogonalPenalty(0.5)], ids=repr)
def test_metrics_have_the_penalty_of_the_weight_that_was_looked_at(correction) -> None:
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.diag(torch.tensor([3.0, 1.0]))
    optimizer = SGD(layer.parameters(), lr=0.0)
    handle = correction.attach(layer, optimizer)
    assert "penalty/weight" not in handle.metrics()  # not looked at yet
    layer.weight.grad = torch.zeros(2, 2)
    optimizer.step()
    expected = {"SigmaMaxPenalty": 0.5 / 2 * 9, "OrthogonalPenalty": 0.5 * (9 - 1) ** 2}
    assert handle.metrics()["penalty/weight"] == pytest.approx(expected[type(correction).__name__])


@pytest.mark.parametrize("correction", [SpectralNormalization(), Multipliers(False, False)])
def test_metrics_of_a_single_factor_are_the_factor(correction) -> None:
    model, optimizer = attached(correction)
    handle_of = StepHooks.of(optimizer).attachments[0].factored
    steps(model, optimizer, 3)
    for treatment in handle_of:
        assert treatment.metrics() == {"gain": treatment.module.rows.abs().amax()}


def test_what_is_shown_of_a_handle_fits_on_a_line_whatever_the_model() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(100)))
    handle = MagnitudeDirection().attach(
        model, SGD(model.parameters(), lr=0.1), exclude=["0.*", "1.*"]
    )
    shown = "98 weights, 2 left out, 0 steps refused"
    assert repr(handle) == f"<Handle: NormPin, Multipliers; {shown}>"
    handle.close()
    assert repr(handle) == f"<Handle: closed; {shown}>"
