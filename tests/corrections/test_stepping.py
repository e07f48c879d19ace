"""Corrections take part in training as people train: scaled, accumulated, compiled, distributed."""

from __future__ import annotations

import copy
from contextlib import suppress

import pytest
import torch
from torch.optim import SGD, AdamW, Optimizer

from correction_examples import (
    MERGED,
    attached,
    every,
    ill_conditioned,
    inputs,
    matrices,
    parametrized,
    perceptron,
    steps,
    steps_on,
    wide,
)
from kappascope.corrections import (
    Hybrid,
    Multipliers,
    NormPin,
    SingularValueMultipliers,
    SpectralPenalty,
)
from kappascope.corrections._stepping import StepHooks

ROBUST = [Multipliers(), SpectralPenalty(0.1, target=1.5), NormPin(), SingularValueMultipliers()]


robust = pytest.mark.parametrize("correction", ROBUST, ids=lambda c: type(c).__name__)


@robust
def test_accumulated_gradients_are_those_of_the_whole_batch(correction) -> None:
    (whole, first), (parts, second) = attached(correction), attached(correction)
    for _ in range(3):
        x = inputs(whole)
        first.zero_grad()
        whole(x).square().mean().backward()
        first.step()
        second.zero_grad()
        for half in x.chunk(2):
            (parts(half).square().mean() / 2).backward()
        second.step()
    torch.testing.assert_close(whole.state_dict(), parts.state_dict())


@robust
def test_two_forwards_before_one_backward_and_evaluation_between_steps(correction) -> None:
    (one, first), (two, second) = attached(correction), attached(correction)
    for _ in range(3):
        x = inputs(one)
        first.zero_grad()
        (2 * one(x).square().mean()).backward()
        first.step()
        second.zero_grad()
        losses = [two(x).square().mean() for _ in range(2)]
        with torch.no_grad():
            two.eval()(x)
            two.train()
        sum(losses).backward()
        second.step()
    torch.testing.assert_close(one.state_dict(), two.state_dict())


@robust
def test_gradient_checkpointing_changes_nothing(correction) -> None:
    from torch.utils.checkpoint import checkpoint

    (plain, first), (saving, second) = attached(correction), attached(correction)
    for _ in range(3):
        steps(plain, first)
        second.zero_grad()
        checkpoint(saving, inputs(saving), use_reentrant=False).square().mean().backward()
        second.step()
    torch.testing.assert_close(plain.state_dict(), saving.state_dict())


@robust
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_it_is_done_in_full_precision(correction, dtype) -> None:
    (full, first), (mixed, second) = attached(correction), attached(correction)
    for _ in range(3):
        steps(full, first)
        second.zero_grad()
        with torch.autocast("cpu", dtype):
            mixed(inputs(mixed)).float().square().mean().backward()
            second.step()
    assert all(v.dtype != dtype for v in mixed.state_dict().values())
    torch.testing.assert_close(full.state_dict(), mixed.state_dict(), rtol=0.02, atol=0.01)


@robust
@pytest.mark.parametrize("fused", [False, True])
def test_a_step_that_a_scaler_skips_is_skipped(correction, fused) -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.05, fused=fused)
    plain, other = attached(correction)
    handle = correction.attach(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)

    def scaled_step(poison: float) -> None:
        optimizer.zero_grad()
        scaler.scale(model(inputs(model)).square().mean() * poison).backward()
        scaler.step(optimizer)
        scaler.update()

    scaled_step(1.0)
    steps(plain, other)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    before = copy.deepcopy((model.state_dict(), handle.state_dict()["steps"]))
    scaled_step(float("inf"))
    after = model.state_dict(), handle.state_dict()["steps"]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    scaled_step(1.0)
    steps(plain, other)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


@robust
def test_a_moving_average_of_the_model_is_one_of_what_it_computes(correction) -> None:
    model, optimizer = attached(correction)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        steps(model, optimizer)
        average.update_parameters(model)
    for name, p in model.named_parameters():
        assert name in dict(average.module.named_parameters())
        assert not torch.equal(p, dict(average.module.named_parameters())[name]) or "0.bias" in name


@every
def test_a_weight_may_change_its_group_or_leave(correction) -> None:
    model = perceptron()
    optimizer = SGD([{"params": layer.parameters(), "lr": 0.1} for layer in (model[0], model[2])])
    with correction.attach(model, optimizer):
        steps(model, optimizer)
        last = optimizer.param_groups.pop()
        optimizer.param_groups[0]["params"] += last["params"]
        steps(model, optimizer)
        optimizer.param_groups[0]["params"] = optimizer.param_groups[0]["params"][:2]
        before = model[2].weight.detach().clone()
        steps(model, optimizer, 3)
        assert torch.equal(model[2].weight, before)


class Unready(SGD):
    """An optimizer whose step fails before it has done anything."""

    def step(self, closure=None) -> None:
        raise RuntimeError("no step today")


@pytest.mark.parametrize("kind", [SGD, Unready])
@pytest.mark.parametrize("make", [perceptron, parametrized])
@every
def test_a_step_that_was_taken_or_failed_leaves_the_gradients_of_the_loss(
    correction, make, kind
) -> None:
    model = make()
    optimizer = kind(model.parameters(), lr=0.05)
    with correction.attach(model, optimizer):
        model(inputs(model)).square().mean().backward()
        gradients = {p: p.grad.clone() for p in model.parameters() if p.grad is not None}
        with suppress(RuntimeError):
            optimizer.step()
        assert all(torch.equal(p.grad, gradient) for p, gradient in gradients.items())


@every
def test_what_others_do_after_a_step_finds_the_weights(correction) -> None:
    model = perceptron()
    optimizer, found = SGD(model.parameters(), lr=0.05), []
    optimizer.register_step_post_hook(
        lambda *_: found.append([p.detach().clone() for p in model.parameters()])
    )
    with correction.attach(model, optimizer):
        for count in range(1, 4):
            steps(model, optimizer)
            assert len(found) == count
            assert all(map(torch.equal, found[-1], model.parameters()))


class Logged(SGD):
    """A step that calls the one above it, and may fail."""

    fails = False

    def step(self, closure=None) -> None:
        super().step(closure)
        if self.fails:
            raise RuntimeError("after half of it")


@every
def test_a_step_within_a_step_is_one(correction) -> None:
    trained = []
    for kind in (SGD, Logged):
        torch.manual_seed(0)
        model = perceptron()
        optimizer = kind(model.parameters(), lr=0.05)
        handle = correction.attach(model, optimizer)
        steps(model, optimizer, 4)
        trained.append((model.state_dict(), handle.state_dict()["steps"]))
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_after_a_step_that_failed_the_next_is_corrected() -> None:
    model = perceptron()
    optimizer = Logged(model.parameters(), lr=0.1)
    handle = NormPin().attach(model, optimizer)
    norm, optimizer.fails = model[0].weight.detach().norm(), True
    with pytest.raises(RuntimeError, match="after half of it"):
        steps(model, optimizer)
    optimizer.fails = False
    steps(model, optimizer)
    torch.testing.assert_close(model[0].weight.detach().norm(), norm)
    assert handle.state_dict()["steps"] == [1]


class Failing(Optimizer):
    """A step that calls no other, and may fail."""

    fails = False

    def __init__(self, parameters, **defaults) -> None:
        super().__init__(parameters, defaults)

    def step(self, closure=None) -> None:
        if self.fails:
            raise RuntimeError("before it")
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=0.1)


class Overriding(SGD):
    """A step that overrides another and does not call it, and may fail."""

    fails = False
    step = Failing.step


@pytest.mark.parametrize("kind", [Failing, Logged, Overriding])
def test_a_traceback_that_is_kept_does_not_end_the_correction(kind) -> None:
    model = perceptron()
    SGD(model.parameters(), lr=0.1)  # torch puts hooks around a class's step with its first object
    optimizer = kind(model.parameters(), lr=0.1)
    NormPin().attach(model, optimizer)
    norm, optimizer.fails = model[0].weight.detach().norm(), True
    with pytest.raises(RuntimeError) as kept:  # as by a notebook, for as long as this lives
        steps(model, optimizer)
    optimizer.fails = False
    for _ in range(3):
        steps(model, optimizer)
        torch.testing.assert_close(model[0].weight.detach().norm(), norm)
    assert kept.value.__traceback__ is not None


@every
@pytest.mark.parametrize("first", [False, True])
def test_a_hook_that_replaces_the_arguments_makes_no_step_of_a_part_of_one(
    correction, first
) -> None:
    def replacing(optimizer, args, kwargs):
        return tuple(args), dict(kwargs)

    trained = []
    for kind in (SGD, Logged):
        torch.manual_seed(0)
        model = perceptron()
        optimizer = kind(model.parameters(), lr=0.05)
        if first:
            optimizer.register_step_pre_hook(replacing)
        handle = correction.attach(model, optimizer)
        if not first:
            optimizer.register_step_pre_hook(replacing)
        steps(model, optimizer, 4)
        trained.append((model.state_dict(), handle.state_dict()["steps"]))
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_a_step_of_another_optimizer_within_a_step_is_its_own() -> None:
    class Outer(Failing):
        """A step that takes one of another optimizer."""

        def step(self, closure=None) -> None:
            self.inner.step()

    model, other = perceptron(), perceptron()
    outer, outer_inner = Outer(other.parameters()), SGD(model.parameters(), lr=0.1)
    outer.inner = outer_inner
    handles = [NormPin().attach(other, outer), NormPin().attach(model, outer_inner)]
    steps(model, outer, 2)
    assert [handle.state_dict()["steps"] for handle in handles] == [[2], [2]]


@every
def test_a_layer_that_is_frozen_for_a_while_stays_as_it_is(correction) -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=0.1)
    with correction.attach(model, optimizer):
        steps(model, optimizer)
        for leaf in (p for p in model[0].parameters() if p.requires_grad):
            leaf.requires_grad_(False)
        before, other = (model[i].weight.detach().clone() for i in (0, 2))
        steps(model, optimizer, 4)
        assert torch.equal(model[0].weight, before) and not torch.equal(model[2].weight, other)


def test_penalties_and_factors_may_be_attached_in_any_order() -> None:
    parts = Multipliers(rate=1.0), SpectralPenalty(1.0, target=2.0)
    trained = []
    for corrections in ([Hybrid(*parts)], parts, parts[::-1]):
        layer = ill_conditioned()
        optimizer = SGD(layer.parameters(), lr=0.01)
        for correction in corrections:
            correction.attach(layer, optimizer)
        steps_on(layer, optimizer, matrices(8, 6), 5)
        trained.append(layer.state_dict())
    torch.testing.assert_close(trained[1], trained[0], rtol=0, atol=0)
    torch.testing.assert_close(trained[2], trained[0], rtol=0, atol=0)


@every
def test_several_optimizers_and_schedulers_made_before(correction) -> None:
    model = perceptron()
    matrices_ = [p for p in model.parameters() if p.ndim == 2]
    muon = torch.optim.Muon(matrices_, lr=0.02)
    adam = AdamW([p for p in model.parameters() if p.ndim == 1], lr=0.01)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(muon, lambda epoch: 0.9**epoch),
        torch.optim.lr_scheduler.OneCycleLR(adam, max_lr=0.01, total_steps=10),
    ]
    with correction.attach(model, [muon, adam]) as handle:
        for _ in range(4):
            model.zero_grad()
            model(inputs(model)).square().mean().backward()
            for part in (muon, adam, *schedulers):
                part.step()
        trained = model(inputs(model))
    assert handle.weights == ("0.weight", "2.weight")
    assert torch.equal(model(inputs(model)), trained)
    assert len(muon.param_groups) == len(adam.param_groups) == 1


@every
@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_is_evaluated_once_before_the_step(correction, keyword) -> None:
    (plain, first), (model, second) = attached(correction), attached(correction)
    for _ in range(4):
        losses = []

        def closure():
            second.zero_grad()
            losses.append(model(inputs(model)).square().mean())  # noqa: B023  # called at once
            losses[-1].backward()  # noqa: B023
            return losses[-1]  # noqa: B023

        steps(plain, first)
        value = second.step(closure=closure) if keyword else second.step(closure)
        assert [value] == losses
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=0, atol=0)


class Sharp(SGD):
    """A step that asks for the loss where it has moved the weights, as SAM does."""

    def step(self, closure=None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.add_(0.1)
        closure()
        super().step()


@every
@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Sharp])
def test_an_optimizer_that_needs_the_closure_elsewhere_raises_in_one_line(correction, kind) -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = kind(model.parameters(), lr=0.1)
    if kind is Sharp:
        SGD(model.parameters(), lr=0.1)
    correction.attach(model, optimizer)
    before = copy.deepcopy({k: model.state_dict()[k] for k in ("0.weight", "2.weight")})
    gradients = []

    def closure():
        optimizer.zero_grad()
        loss = model(inputs(model)).square().mean()
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
        return loss

    with pytest.raises(RuntimeError, match=r"closure (a second time|after a weight).*once") as told:
        optimizer.step(closure)
    assert "\n" not in str(told.value) and len(gradients) == 1
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients[0], strict=True))
    if isinstance(correction, MERGED):
        for name, weight in before.items():
            assert torch.equal(model.state_dict()[name], weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@every
def test_compiled_it_is_the_same_and_compiled_once(correction) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    (plain, first), (fast, second) = attached(correction), attached(correction)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fast, backend=counter, fullgraph=True)
    for _ in range(100):
        steps(plain, first)
        steps(compiled, second)
    torch.testing.assert_close(fast.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-5)
    assert counter.frame_count <= 2


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_model_may_change_its_type_between_steps(correction, dtype) -> None:
    model = wide()
    optimizer = SGD(model.parameters(), lr=0.01)
    with correction.attach(model, optimizer) as handle:
        steps(model, optimizer, 3)
        model.to(dtype)
        steps(model, optimizer, 3)
    assert not handle.refused and all(p.isfinite().all() for p in model.parameters())
    assert {p.dtype for p in model.parameters()} == {dtype}


@every  # what was tracked in another type is told and tracked anew
@pytest.mark.filterwarnings("ignore:the optimizer's state has none of this")
def test_a_state_may_be_loaded_after_the_model_has_changed_its_type(correction) -> None:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = AdamW(model.parameters(), lr=0.01)
    with correction.attach(model, optimizer) as handle:
        steps(model, optimizer, 2)
        state = optimizer.state_dict()
        model.double()
        optimizer.load_state_dict(state)  # as AdamW itself needs it, whose moments stay in float32
        steps(model, optimizer, 2)
        factors = [f for t in handle._factored for f in t.module.factors]
    assert not handle.refused and {p.dtype for p in [*model.parameters(), *factors]} == {
        torch.float64
    }


def test_a_schedule_free_optimizer_averages_directions() -> None:
    schedulefree = pytest.importorskip("schedulefree")
    torch.manual_seed(0)
    model = perceptron()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    optimizer.train()
    handle = Multipliers(rate=1.0).attach(model, optimizer)
    steps(model, optimizer, 5)
    treatment = handle.treatments[0]
    y, z = treatment.direction.clone(), optimizer.state[treatment.leaf]["z"]
    trained = model[0].weight.detach().clone()
    optimizer.eval()
    x = y.lerp(z, 1 - 1 / 0.9)
    torch.testing.assert_close(treatment.direction, x)
    assert torch.equal(model[0].weight, treatment.module(treatment.direction))
    assert not torch.allclose(model[0].weight, trained)
    optimizer.train()
    torch.testing.assert_close(model[0].weight.detach(), trained)
    steps(model, optimizer, 2)
    handle.close()
    assert "eval" not in vars(optimizer) and "step" not in vars(optimizer)


@every
def test_a_schedule_free_optimizer_is_corrected_where_it_trains(correction) -> None:
    schedulefree = pytest.importorskip("schedulefree")
    model = perceptron()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    optimizer.train()
    norm = model[0].weight.detach().norm()
    with correction.attach(model, optimizer) as handle:
        steps(model, optimizer, 4)
        if isinstance(correction, NormPin):
            torch.testing.assert_close(model[0].weight.detach().norm(), norm)
        optimizer.eval()
        optimizer.train()
        steps(model, optimizer, 2)
    assert not handle.refused


def free_of_schedule(correction) -> tuple[torch.nn.Module, Optimizer]:
    schedulefree = pytest.importorskip("schedulefree")
    torch.manual_seed(0)
    model = perceptron()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters(), lr=0.05)
    optimizer.train()
    correction.attach(model, optimizer)
    return model, optimizer


@every
def test_a_schedule_free_optimizer_goes_on_from_what_it_saved_in_eval_mode(correction) -> None:
    model, optimizer = free_of_schedule(correction)
    steps(model, optimizer, 4)
    optimizer.eval()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    again = free_of_schedule(correction)
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    for each in ((model, optimizer), again):
        each[1].train()
        steps(*each, 4)
    for a, b in zip(model.parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)


def test_weights_loaded_before_a_schedule_free_optimizer_changes_its_mode_are_kept() -> None:
    model, optimizer = free_of_schedule(Multipliers())
    other = torch.randn(6, 4)
    with torch.no_grad():
        model[0].weight.copy_(other)
    optimizer.eval()  # before the first step there is nothing to move
    assert torch.equal(model[0].weight, other)


def test_a_load_that_leaves_a_weight_out_is_none_of_that_weight() -> None:
    model, optimizer = attached(Hybrid(penalties=SpectralPenalty(0.1, target=1.5)))
    steps(model, optimizer, 2)
    factors = StepHooks.of(optimizer).attachments[0].factored
    model.load_state_dict({"0.bias": torch.zeros(6)}, strict=False)
    steps(model, optimizer, 1)
    assert all((f != 1).any() for t in factors for f in t.module.factors)


class LoadsByItself(AdamW):
    """An optimizer with a way of its own to save and load, as those of bitsandbytes have."""

    def state_dict(self) -> dict:
        return {"state": dict(enumerate(self.state.values()))}

    def load_state_dict(self, state_dict: dict) -> None:
        assert set(state_dict) == {"state"}
        parameters = self.param_groups[0]["params"]
        self.state.update(zip(parameters, state_dict["state"].values(), strict=True))


@every
def test_an_optimizer_that_saves_and_loads_by_itself_carries_the_correction(correction) -> None:
    def started() -> tuple[torch.nn.Module, Optimizer]:
        torch.manual_seed(0)
        model = perceptron()
        optimizer = LoadsByItself(model.parameters(), lr=0.05)
        correction.attach(model, optimizer)
        return model, optimizer

    first, again = started(), started()
    steps(*first, 4)
    saved = copy.deepcopy((first[0].state_dict(), first[1].state_dict()))
    for part, state in zip(again, saved, strict=True):
        part.load_state_dict(state)
    for each in (first, again):
        steps(*each, 4)
    for a, b in zip(first[0].parameters(), again[0].parameters(), strict=True):
        assert torch.equal(a, b)
