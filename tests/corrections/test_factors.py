"""Factors follow the learning rate of their weight, and can be left out of clips."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from correction_examples import EXAMPLES, MERGED, attached, inputs, perceptron, steps
from kappascope.corrections import Hybrid, Multipliers, SingularValueMultipliers
from kappascope.corrections._factors import (
    FactorRow,
    Factors,
    RowColumnFactors,
    SingularValueFactors,
    TrainedFactors,
)
from kappascope.corrections.gauge import FreeSides
from kappascope.model.layouts import Layout


@pytest.mark.parametrize("make", [Multipliers, Hybrid])
def test_multipliers_can_be_left_out_of_a_clip(make) -> None:
    free, clipped = perceptron(), perceptron()
    clipped.load_state_dict(free.state_dict())
    first, second = SGD(free.parameters(), lr=0.05), SGD(clipped.parameters(), lr=0.05)
    other = make().attach(free, first)
    handle = make().attach(clipped, second)
    for model in (free, clipped):
        model(100 * inputs(model)).square().mean().backward()
    with handle.unclipped():
        norm = nn.utils.clip_grad_norm_(clipped.parameters(), 0.1)
    assert norm > 1
    first.step()
    second.step()
    rows = [rows_of(other), rows_of(handle)]
    torch.testing.assert_close(*rows)
    assert not torch.equal(rows[0], torch.ones_like(rows[0]))
    assert not torch.allclose(free[0].weight, clipped[0].weight)


def rows_of(handle) -> Tensor:
    """The factors of rows of the first weight."""
    return next(t for t in handle.treatments if isinstance(t, TrainedFactors)).module.rows


def after_clips(*clips: Callable[[nn.Module], object], together: bool) -> Tensor:
    """Factors of rows after a step for which gradients were clipped."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = Multipliers(rate=1.0).attach(model, optimizer)
    (100 * model(inputs(model)).square().mean()).backward()
    for some in [clips] if together else [(clip,) for clip in clips]:
        with handle.unclipped():
            for clip in some:
                clip(model)
    optimizer.step()
    return rows_of(handle).detach()


def test_multipliers_are_left_out_of_every_clip() -> None:
    clips = (
        lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.5),
        lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    )
    free = after_clips(together=True)
    torch.testing.assert_close(after_clips(*clips, together=True), free)
    torch.testing.assert_close(after_clips(*clips, together=False), free)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_what_a_clip_took_is_forgotten_with_its_gradient(set_to_none) -> None:
    model = nn.Linear(4, 3)
    optimizer = SGD(model.parameters(), lr=0.1)
    handle = Multipliers(rate=1.0, weight_decay=0.0).attach(model, optimizer)
    (100 * model(inputs(model)).square().mean()).backward()
    with handle.unclipped():
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.zero_grad(set_to_none)  # the step is given up
    model(torch.zeros(2, 4)).sum().backward()
    optimizer.step()
    assert torch.equal(rows_of(handle), torch.ones(3))


def test_gradients_may_come_and_go_while_unclipped() -> None:
    model = perceptron()
    handle = Multipliers().attach(model, optimizer := SGD(model.parameters()))
    with handle.unclipped():
        model(inputs(model)).sum().backward()
    with handle.unclipped():
        optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_factors_count_in_no_norm() -> None:
    for correction in (Multipliers(), SingularValueMultipliers()):
        model, _ = attached(correction)
        before = [(name, id(p)) for name, p in perceptron().named_parameters()]
        assert [name for name, _ in before] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (SGD, {"momentum": 0.9}),
        (SGD, {"momentum": 0.9, "nesterov": True}),
        (AdamW, {"betas": (0.5, 0.6)}),
    ],
)
def test_factors_move_as_the_group_of_their_weight(kind, settings) -> None:
    moved = []
    for by_group in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(4, 3, bias=False)
        group = {"params": [model.weight], **(settings if by_group else {})}
        optimizer = kind([group], lr=0.1, **({} if by_group else settings))
        handle = Multipliers(rate=1.0).attach(model, optimizer)
        steps(model, optimizer, 5)
        moved.append(rows_of(handle))
    torch.testing.assert_close(*moved, rtol=0, atol=0)


def test_factors_follow_the_users_learning_rate() -> None:
    model, moved = perceptron(), []
    optimizer = SGD(model.parameters(), lr=0.1)
    with Multipliers(weight_decay=0.0).attach(model, optimizer) as handle:
        rows = rows_of(handle)
        for rate in (0.1, 0.0, 0.2):
            optimizer.param_groups[0]["lr"] = rate
            before = rows.clone()
            steps(model, optimizer)
            moved.append(float((rows - before).abs().max()))
    assert moved[0] > 0 and moved[1] == 0 and moved[2] > 0


@pytest.mark.parametrize("kind", [SGD, AdamW])
def test_factors_follow_their_weight_into_another_group(kind) -> None:
    trained = []
    for is_moved in (False, True):
        torch.manual_seed(0)
        model = perceptron()
        first, last = model[0].parameters(), model[2].parameters()
        groups = [{"params": first, "lr": 0.1}, {"params": last, "lr": 0.02}]
        optimizer = kind([{"params": model.parameters()}] if is_moved else groups, lr=0.1)
        Multipliers().attach(model, optimizer)
        if is_moved:
            optimizer.param_groups[0]["params"] = list(model[0].parameters())
            optimizer.add_param_group({"params": model[2].parameters(), "lr": 0.02})
        steps(model, optimizer, 3)
        trained.append(model.state_dict())
    torch.testing.assert_close(*trained, rtol=0, atol=0)


def test_a_weight_in_the_memory_of_two_parameters_has_no_factors() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 3))
    model[2].weight = nn.Parameter(model[0].weight.data)  # two parameters, both stepped
    with Multipliers().attach(model, SGD(model.parameters(), lr=0.1)) as handle:
        assert "several parameters share its memory" in handle.left_out["0.weight"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [SGD, AdamW])
@pytest.mark.parametrize("correction", [c for c in EXAMPLES if isinstance(c, MERGED)], ids=repr)
def test_a_corrected_model_may_change_its_type(correction, kind, dtype) -> None:
    torch.manual_seed(0)
    model = perceptron()
    fitting = {"eps": 1e-4} if kind is AdamW else {}  # torch's own is 0 in float16
    handle = correction.attach(model, optimizer := kind(model.parameters(), lr=0.05, **fitting))
    steps(model, optimizer, 2)
    factors = [t for t in handle.treatments if isinstance(t, TrainedFactors)]
    before, merged = [copy.deepcopy(t.module.factors) for t in factors], model[0].weight.to(dtype)
    model.to(dtype)
    for state in optimizer.state.values():  # which are the user's to convert
        state |= {k: v.to(dtype) for k, v in state.items() if k != "step"}
    assert torch.equal(model[0].weight, merged)
    model.zero_grad()
    optimizer.step()
    for treatment, old in zip(factors, before, strict=True):
        for new, value in zip(treatment.module.factors, old, strict=True):
            assert new.dtype in (torch.float32, torch.float64)
            if not isinstance(correction, SingularValueMultipliers):  # which merges its own
                torch.testing.assert_close(new.to(value), value, rtol=0.1, atol=0.01)
    steps(model, optimizer, 2)
    trained = model(inputs(model))
    handle.close()
    assert torch.equal(model(inputs(model)), trained) and model[0].weight.dtype == dtype


def test_a_factor_that_is_no_number_is_refused_beside_a_weight_that_is_one() -> None:
    layer = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    handle = Multipliers().attach(layer, optimizer)
    leaf = layer.weight
    leaf.grad = torch.full_like(leaf, 1.0)
    leaf.grad[0, 0] = torch.inf
    with handle.unclipped():  # the leaf's gradient is mended, that of its factors is not
        nn.utils.clip_grad_value_(layer.parameters(), 1.0)
    with pytest.warns(RuntimeWarning, match="would not be finite"):
        optimizer.step()
    assert layer.weight.isfinite().all() and handle.refused == {"weight": 1}


def test_gradients_of_factors_side_by_side_are_those_of_autograd() -> None:
    torch.manual_seed(0)
    modules: list[Factors] = []
    directions = [torch.randn(shape, dtype=torch.float64) for shape in [(4, 3), (2, 3, 5), (3, 3)]]
    for direction, scalar in zip(directions, (False, False, True), strict=True):
        layout = Layout.plain(tuple(direction.shape))
        modules.append(RowColumnFactors(direction, layout, FreeSides(), scalar=scalar))
    directions.append(torch.randn(3, 6, dtype=torch.float64))
    modules.append(SingularValueFactors(directions[-1], Layout.plain((3, 6)), every=9))
    sums, expected = [], []
    for module, direction in zip(modules, directions, strict=True):
        for factor in module.factors:
            factor.data = 0.5 + torch.rand_like(factor)
        slope = torch.randn_like(direction)
        sums += module.sums(direction, module.pulled_back(direction, slope))
        with torch.enable_grad():
            own = [factor.detach().clone().requires_grad_() for factor in module.factors]
            product = scaled_by(module, own, direction)
        expected.append(list(torch.autograd.grad((slope * product).sum(), own)))
    torch.testing.assert_close(FactorRow(modules).gradients(sums), expected)


def scaled_by(module: Factors, own: list[Tensor], direction: Tensor) -> Tensor:
    """The product by its definition, of which autograd knows the factors."""
    if isinstance(module, SingularValueFactors):
        return module.basis @ (own[0][..., None] * (module.basis.mT @ direction))
    product = own[0][..., None] * direction
    return product if len(own) == 1 else product * own[1][..., None, :]


def test_factors_move_as_if_each_weight_were_alone_whoever_else_has_a_gradient() -> None:
    torch.manual_seed(0)
    together = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(2, 5, bias=False))
    alone = copy.deepcopy(together)
    optimizer = AdamW(together.parameters(), lr=0.1)
    others = [AdamW(layer.parameters(), lr=0.1) for layer in alone]
    Multipliers(gauge=True).attach(together, optimizer)
    for layer, other in zip(alone, others, strict=True):
        Multipliers(gauge=True).attach(layer, other)
    for step in range(6):
        for i, (layer, twin) in enumerate(zip(together, alone, strict=True)):
            has_gradient = (step + i) % 3 > 0
            gradient = torch.randn_like(layer.weight)
            for each in (layer, twin):
                each.weight.grad = gradient.clone() if has_gradient else None
        optimizer.step()
        for other in others:
            other.step()
    for layer, twin in zip(together, alone, strict=True):
        assert torch.equal(layer.weight, twin.weight)


def test_only_the_step_that_is_not_finite_is_taken_back() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = SGD(model.parameters(), lr=1.0)
    handle = Multipliers(gauge=True, rate=1e30, weight_decay=0.0).attach(model, optimizer)
    model[0].weight.grad = torch.full((3, 3), 1e10)  # factors of 1e40, which float32 has not
    model[1].weight.grad = torch.full((3, 3), 1e-31)
    factors = [t.module for t in handle.treatments if isinstance(t, TrainedFactors)]
    with pytest.warns(RuntimeWarning, match="would not be finite"):
        optimizer.step()
    assert handle.refused == {"0.weight": 1}
    assert all(torch.equal(factor, torch.ones_like(factor)) for factor in factors[0].factors)
    assert all(not torch.equal(factor, torch.ones_like(factor)) for factor in factors[1].factors)
    assert model[0].weight.isfinite().all()
