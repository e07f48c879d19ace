"""Corrections do what their formulas say, attach in one line and go without a trace."""

from __future__ import annotations

import copy
import io
import os
import pickle
import runpy
import warnings
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim import SGD, AdamW, Optimizer

from kappascope import spectra
from kappascope.attachments import Rounds
from kappascope.components import Components, errors
from kappascope.corrections import (
    Correction,
    Hybrid,
    Multipliers,
    NormPin,
    OrthogonalPenalty,
    SingularValueBound,
    SingularValueMultipliers,
    SpectralDecay,
    SpectralPenalty,
    SVDCorrection,
    banded,
    condition_penalty,
    floored_condition_number,
    scaled,
    toward_spectrum,
)
from kappascope.networks import Matrix
from kappascope.tasks import Paper, Regression, heterogeneous, start
from kappascope.training import last, train


def matrices(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_factors_of_one_change_nothing() -> None:
    weight = matrices(3, 4, 5)
    assert torch.equal(scaled(weight, torch.ones(3, 4), torch.ones(3, 5)), weight)


def test_scaling_is_the_product_with_two_diagonals() -> None:
    weight, rows, columns = matrices(2, 4, 5), matrices(2, 4, seed=1), matrices(2, 5, seed=2)
    expected = torch.diag_embed(rows) @ weight @ torch.diag_embed(columns)
    torch.testing.assert_close(scaled(weight, rows, columns), expected)


def test_the_gradients_of_the_factors_are_the_protocols() -> None:
    weight, upstream = matrices(2, 4, 5), matrices(2, 4, 5, seed=3)
    rows, columns = matrices(2, 4, seed=1).requires_grad_(), matrices(2, 5, seed=2).requires_grad_()
    scaled(weight, rows, columns).backward(upstream)
    r, c = rows.detach(), columns.detach()
    torch.testing.assert_close(rows.grad, (upstream * weight * c[:, None, :]).sum(-1))
    torch.testing.assert_close(columns.grad, (upstream * weight * r[:, :, None]).sum(-2))


@given(st.integers(0, 1000), st.sampled_from([(3, 3), (4, 6), (6, 4)]))
def test_the_penaltys_gradient_is_that_of_its_formula(seed: int, shape: tuple[int, int]) -> None:
    weight = matrices(*shape, seed=seed).requires_grad_()
    goal = torch.tensor(5.0, dtype=torch.float64)
    kappa = floored_condition_number(torch.linalg.svdvals(weight))
    penalty = 0.005 * ((kappa + 1).log() - (goal + 1).log()) ** 2
    (expected,) = torch.autograd.grad(penalty, weight)
    found = condition_penalty(weight.detach(), goal, clip=float("inf"))
    torch.testing.assert_close(found, expected)


def test_the_penaltys_gradient_is_clipped_per_matrix() -> None:
    small = torch.diag(torch.tensor([1.0, 1e-6], dtype=torch.float64))
    stack = torch.stack([small, torch.eye(2, dtype=torch.float64)])
    norms = torch.linalg.matrix_norm(condition_penalty(stack, torch.tensor([2.0, 1.0])))
    assert norms.tolist() == pytest.approx([1.0, 0.0], abs=1e-10)


def test_moving_all_the_way_gives_the_other_spectrum_and_keeps_the_vectors() -> None:
    weight, goal = matrices(2, 4, 6), torch.tensor([4.0, 3.0, 2.0, 1.0], dtype=torch.float64)
    moved = toward_spectrum(weight, goal, step=1.0)
    torch.testing.assert_close(torch.linalg.svdvals(moved), goal.expand(2, 4))
    # the same left and right vectors: both products are symmetric
    for product in (moved @ weight.mT, weight.mT @ moved):
        torch.testing.assert_close(product, product.mT)


def test_a_singular_value_is_never_moved_below_the_floor() -> None:
    moved = toward_spectrum(torch.eye(2, dtype=torch.float64), torch.tensor([1.0, -50.0]))
    assert torch.linalg.svdvals(moved)[1].item() == pytest.approx(1e-10, rel=1e-3)


@given(st.integers(0, 1000), st.floats(1.0, 50.0))
def test_the_nearest_spectrum_within_a_bound_is_nearer_than_any_other_band(seed, kappa) -> None:
    values = matrices(6, seed=seed).abs().sort(descending=True).values
    found = banded(values, kappa)
    assert found[0] <= kappa * found[-1] * (1 + 1e-9)
    lows = torch.linspace(0, 1, 500, dtype=torch.float64)[:, None] * values[0]
    others = torch.minimum(torch.maximum(values, lows), kappa * lows)
    best = (others - values).square().sum(-1).min()
    assert (found - values).square().sum() <= best + 1e-12


# --- the contract ---------------------------------------------------------------------------------

EXAMPLES: list[Correction] = [
    Multipliers(),
    Multipliers(rows=False, columns=False),
    SpectralPenalty(0.1, target=1.5),
    SVDCorrection(every=2),
    SingularValueMultipliers(every=3),
    OrthogonalPenalty(),
    OrthogonalPenalty(spectral=True),
    SpectralDecay(every=2),
    SingularValueBound(2.0),
    Hybrid(penalties=SpectralPenalty(0.1, target=1.5, every=2)),
    NormPin(),
]
every = pytest.mark.parametrize("correction", EXAMPLES, ids=lambda c: type(c).__name__)
MERGED = Multipliers, SingularValueMultipliers, Hybrid  # they put factors into the model
PENALTIES = SpectralPenalty, OrthogonalPenalty  # they reach a weight through what makes it


def test_every_correction_has_an_example() -> None:
    assert {type(e) for e in EXAMPLES} == set(Correction.__subclasses__())


@pytest.mark.parametrize("kind", Correction.__subclasses__(), ids=lambda kind: kind.__name__)
def test_every_correction_is_usable_with_its_defaults(kind: type[Correction]) -> None:
    model = perceptron()
    optimizer = AdamW(model.parameters())
    with kind().attach(model, optimizer) as handle:
        steps(model, optimizer, 3)
    assert handle.weights == ("0.weight", "2.weight") and not handle.refused


class Tied(nn.Module):
    """One weight in two layers, and an embedding that is the head."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(5, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)
        self.head = nn.Linear(4, 5, bias=False)
        self.second.weight, self.head.weight = self.first.weight, self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.token(x.argmax(-1)) + x
        return self.head(self.second(self.first(hidden).relu()))


def perceptron(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6, bias), nn.ReLU(), nn.Linear(6, 3, bias))


def convolution() -> nn.Module:
    layers = nn.Conv1d(1, 4, 2), nn.Conv1d(4, 4, 2, groups=2), nn.ConvTranspose1d(4, 2, 2)
    return nn.Sequential(nn.Unflatten(-1, (1, 4)), layers[0], nn.Tanh(), *layers[1:])


def frozen() -> nn.Module:
    model = perceptron()
    model[0].weight.requires_grad_(False)
    return model


def parametrized() -> nn.Module:
    model = perceptron()
    parametrizations.weight_norm(model[0])
    return model


def orthogonal() -> nn.Module:
    """Trained away from the base that the parametrization keeps; a square and a long one."""
    layers = [parametrizations.orthogonal(nn.Linear(*sides)) for sides in ((4, 4), (4, 6))]
    model = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.Tanh(), nn.Linear(6, 3))
    steps(model, SGD(model.parameters(), lr=0.5), 20)
    return model


def spectral_norm() -> nn.Module:
    model = perceptron()
    parametrizations.spectral_norm(model[0])
    return model


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bias": perceptron,
    "no bias": lambda: perceptron(bias=False),
    "conv": convolution,
    "tied": Tied,
    "frozen": frozen,
    "bf16": lambda: perceptron().bfloat16(),
    "one layer": lambda: nn.Linear(4, 3),
    "parametrized": parametrized,
    "orthogonal": orthogonal,
    "spectral norm": spectral_norm,
}
MADE = {  # weights that something makes, and whether it has an inverse
    "parametrized": ({"0.weight"}, True),
    "orthogonal": ({"0.weight", "2.weight"}, False),
    "spectral norm": ({"0.weight"}, False),
}


def inputs(model: nn.Module) -> Tensor:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    return x.to(next(model.parameters()).dtype)


def steps(model: nn.Module, optimizer: Optimizer, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(inputs(model)).square().mean().backward()
        optimizer.step()


def answers(model: nn.Module) -> Tensor:
    """What it computes; in training mode spectral_norm moves its vectors."""
    found = model.eval()(inputs(model))
    model.train()
    return found


def named(model: nn.Module) -> list[tuple[str, int]]:
    return [(name, id(p)) for name, p in model.named_parameters()]


@every
@pytest.mark.parametrize("shape", MODELS)
class TestEveryCorrection:
    """What holds for each correction, the next one included."""

    @pytest.fixture
    def model(self, shape: str) -> nn.Module:
        torch.manual_seed(0)
        return MODELS[shape]()

    @pytest.fixture
    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.05)

    def test_attaching_changes_no_output(self, correction, model, optimizer) -> None:
        before = answers(model)
        with correction.attach(model, optimizer):
            assert torch.equal(answers(model), before)

    def test_attaching_moves_no_tensor_and_draws_no_number(
        self, correction, model, optimizer
    ) -> None:
        before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        correction.attach(model, optimizer).close()
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
        assert torch.equal(torch.get_rng_state(), stream)

    def test_closing_leaves_the_trained_function(self, correction, model, optimizer) -> None:
        with correction.attach(model, optimizer) as handle:
            steps(model, optimizer, 4)
            trained = answers(model)
        assert torch.equal(answers(model), trained)
        assert handle.difference == 0.0

    def test_closing_leaves_the_model_and_the_optimizer_as_they_were(
        self, correction, model, optimizer
    ) -> None:
        before, kinds = named(model), [type(m) for m in model.modules()]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        with correction.attach(model, optimizer):
            steps(model, optimizer, 2)
        assert named(model) == before
        assert [type(m) for m in model.modules()] == kinds
        assert set(optimizer.state) <= set(model.parameters())
        after = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        assert after == groups
        assert [id(p) for g in optimizer.param_groups for p in g["params"]] == [
            i for _, i in before
        ]
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks

    def test_after_closing_training_is_as_without_it(self, correction, model, optimizer) -> None:
        correction.attach(model, optimizer).close()
        twin = copy.deepcopy(model)
        steps(model, optimizer)
        steps(twin, AdamW(twin.parameters(), lr=0.05))
        torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)

    def test_attaching_twice_is_an_error(self, correction, model, optimizer) -> None:
        with correction.attach(model, optimizer) as handle:
            before = named(model)
            with pytest.raises(ValueError):
                correction.attach(model, optimizer, where=handle.weights)
            assert named(model) == before

    def test_frozen_and_made_weights_are_left_out_with_a_reason(
        self, correction, model, optimizer, shape
    ) -> None:
        with correction.attach(model, optimizer) as handle:
            assert all(handle.left_out.values())
        left = {"frozen": {"0.weight"}, "tied": {"token.weight"}}.get(shape, set())
        made, invertible = MADE.get(shape, (set(), True))
        if isinstance(correction, MERGED) or not (invertible or isinstance(correction, PENALTIES)):
            left = left | made
        assert set(handle.left_out) == left

    def test_it_goes_on_from_a_checkpoint_to_the_bit(
        self, correction, model, optimizer, shape
    ) -> None:
        handle = correction.attach(model, optimizer)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        steps(model, optimizer, 3)
        scheduler.step()
        file = io.BytesIO()
        parts = {"m": model, "o": optimizer, "s": scheduler, "h": handle}
        torch.save({key: part.state_dict() for key, part in parts.items()}, file)
        steps(model, optimizer, 4)

        torch.manual_seed(5)
        other = MODELS[shape]()
        fresh = AdamW(other.parameters(), lr=0.05)
        again = {"m": other, "o": fresh, "h": correction.attach(other, fresh)}
        again["s"] = torch.optim.lr_scheduler.ExponentialLR(fresh, 0.9)
        file.seek(0)
        for key, state in torch.load(file, weights_only=True).items():
            again[key].load_state_dict(state)
        steps(other, fresh, 4)
        torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=0, atol=0)

    def test_state_dicts_are_converted_only_on_request(
        self, correction, model, optimizer, shape
    ) -> None:
        torch.manual_seed(3)
        plain = MODELS[shape]().state_dict()
        handle = correction.attach(model, optimizer)
        if set(model.state_dict()) != set(plain):
            with pytest.raises(RuntimeError, match="parametrizations"):
                model.load_state_dict(plain)
        model.load_state_dict(handle.corrected(plain))
        torch.testing.assert_close(handle.plain(model.state_dict()), plain, rtol=0, atol=0)
        steps(model, optimizer, 2)
        merged = handle.plain(model.state_dict())
        handle.close()
        torch.testing.assert_close(dict(model.state_dict()), merged, rtol=0, atol=0)

    def test_a_copy_is_independent(self, correction, model, optimizer) -> None:
        with correction.attach(model, optimizer):
            steps(model, optimizer)
            twin = copy.deepcopy(model)
            before = answers(twin)
            assert torch.equal(before, answers(model))
            steps(model, optimizer)
            assert torch.equal(answers(twin), before)
            assert not torch.equal(answers(model), before)


# --- each does what its name says -----------------------------------------------------------------


def kappa_of(weight: Tensor) -> Tensor:
    return Components(weight.detach()).condition_number


def ill_conditioned(rows: int = 6, columns: int = 6, seed: int = 0) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False).double()
    u, s, vt = torch.linalg.svd(matrices(rows, columns, seed=seed), full_matrices=False)
    values = torch.logspace(0, -3, len(s), dtype=torch.float64)
    layer.weight.data = (u * values) @ vt
    return layer


def idle(layer: nn.Module, correction: Correction, count: int, rate: float = 0.1) -> nn.Module:
    """Steps with no gradient from any data."""
    optimizer = SGD(layer.parameters(), lr=rate)
    with correction.attach(layer, optimizer):
        for _ in range(count):
            optimizer.zero_grad(set_to_none=False)
            for p in layer.parameters():
                p.grad = torch.zeros_like(p)
            optimizer.step()
    return layer


def test_multipliers_take_the_steps_of_the_chain_rule() -> None:
    layer, x = nn.Linear(3, 2, bias=False).double(), matrices(5, 3)
    weight = layer.weight.detach().clone().requires_grad_()
    r, c = torch.ones(2).double().requires_grad_(), torch.ones(3).double().requires_grad_()
    optimizer = SGD(layer.parameters(), lr=0.1)
    with Multipliers(rate=0.5, weight_decay=0.0).attach(layer, optimizer):
        for _ in range(5):
            optimizer.zero_grad()
            (x @ layer.weight.T).square().sum().backward()
            optimizer.step()
            loss = (x @ scaled(weight, r, c).T).square().sum()
            grads = torch.autograd.grad(loss, (weight, r, c))
            with torch.no_grad():
                for value, gradient, rate in zip(
                    (weight, r, c), grads, (0.1, 0.05, 0.05), strict=True
                ):
                    value.sub_(rate * gradient)
        torch.testing.assert_close(layer.weight, scaled(weight, r, c))


def test_factors_of_singular_values_take_the_steps_of_the_chain_rule() -> None:
    for shape in ((3, 5), (5, 3)):
        layer, x = nn.Linear(shape[1], shape[0], bias=False).double(), matrices(7, shape[1])
        weight = layer.weight.detach().clone().requires_grad_()
        wide = weight.detach() if shape[0] < shape[1] else weight.detach().T
        u = torch.linalg.svd(wide, full_matrices=False)[0]
        m = torch.ones(3).double().requires_grad_()
        optimizer = SGD(layer.parameters(), lr=0.01)
        with SingularValueMultipliers(weight_decay=0.0).attach(layer, optimizer):
            for _ in range(5):
                optimizer.zero_grad()
                (x @ layer.weight.T).square().sum().backward()
                optimizer.step()
                turn = u @ torch.diag(m) @ u.T
                made = turn @ weight if shape[0] < shape[1] else weight @ turn
                grads = torch.autograd.grad((x @ made.T).square().sum(), (weight, m))
                with torch.no_grad():
                    for value, gradient in zip((weight, m), grads, strict=True):
                        value.sub_(0.01 * gradient)
            turn = u @ torch.diag(m) @ u.T
            made = turn @ weight if shape[0] < shape[1] else weight @ turn
            torch.testing.assert_close(layer.weight, made)


def test_merging_factors_of_singular_values_midway_keeps_the_function() -> None:
    layer, x = nn.Linear(4, 4, bias=False).double(), matrices(7, 4)
    optimizer = SGD(layer.parameters(), lr=1e-9)
    with SingularValueMultipliers(every=2, rate=1e7).attach(layer, optimizer):
        steps_on(layer, optimizer, x)
        factors = layer.parametrizations.weight[0].values
        assert (factors - 1).abs().max() > 1e-3
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        optimizer.step()
        torch.testing.assert_close(layer.weight.detach(), before)
        assert torch.equal(factors, torch.ones_like(factors))


def steps_on(layer: nn.Module, optimizer: Optimizer, x: Tensor, count: int = 1) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("target", [10.0, None, lambda weight: torch.tensor([3.0, 2.0, 1.0])])
def test_the_penalty_lowers_the_distance_from_its_limits(target) -> None:
    penalty = SpectralPenalty(0.1, target=target)
    layer = ill_conditioned(3, 3)
    before = penalty.penalty(layer.weight).item()
    after = penalty.penalty(idle(layer, penalty, 300).weight).item()
    assert before > 0 and after < 0.05 * before


def test_within_its_band_the_penalty_changes_nothing() -> None:
    layer = ill_conditioned()
    before = layer.weight.detach().clone()
    penalty = SpectralPenalty(1.0, target=spectra.singular_values)  # the initial spectrum
    assert torch.equal(idle(layer, penalty, 5).weight, before)


def test_the_penaltys_backward_is_the_clipped_closed_gradient() -> None:
    weight = matrices(3, 4, 5).requires_grad_()
    known = torch.tensor([2.0, 1.5, 1.2, 1.0], dtype=torch.float64)
    penalty = SpectralPenalty(0.005, target=lambda _: known, band=0.0)
    penalty.penalty(weight).sum().backward()
    goal = floored_condition_number(known)
    torch.testing.assert_close(weight.grad, condition_penalty(weight.detach(), goal))


@pytest.mark.parametrize("spectral", [True, False])
@pytest.mark.parametrize("shape", [(4, 4), (3, 5), (2, 5, 3)])
def test_the_orthogonal_penaltys_gradient_is_that_of_its_formula(spectral, shape) -> None:
    weight = matrices(*shape).requires_grad_()
    found = OrthogonalPenalty(1e-3, spectral=spectral, clip=float("inf")).penalty(weight)
    (gradient,) = torch.autograd.grad(found.sum(), weight)
    tall = weight if shape[-2] >= shape[-1] else weight.mT
    rest = tall.mT @ tall - torch.eye(tall.shape[-1])
    square = rest.square().sum((-2, -1))
    formula = 1e-3 * (torch.linalg.matrix_norm(rest, 2) if spectral else square)
    (expected,) = torch.autograd.grad(formula.sum(), weight)
    torch.testing.assert_close(found, formula)
    torch.testing.assert_close(gradient, expected)


def test_the_orthogonal_penalty_leads_to_orthogonal_matrices() -> None:
    for correction in (OrthogonalPenalty(0.1), OrthogonalPenalty(0.1, spectral=True)):
        layer = idle(ill_conditioned(3, 3), correction, 1000)
        assert kappa_of(layer.weight) < 1.3


def test_the_svd_correction_moves_by_its_rate_when_it_is_time() -> None:
    known = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    layer = ill_conditioned(3, 3)
    before = torch.linalg.svdvals(layer.weight.detach())
    idle(layer, SVDCorrection(every=4, rate=0.25, target=lambda _: known), 11)  # at 4 and at 8
    expected = known + 0.75**2 * (before - known)
    torch.testing.assert_close(torch.linalg.svdvals(layer.weight.detach()), expected)


def test_the_svd_correction_returns_to_the_initial_spectrum() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4, bias=False).double(), matrices(9, 4)
    initial, optimizer = torch.linalg.svdvals(layer.weight.detach()), SGD(layer.parameters(), 0.1)
    with SVDCorrection(every=1, rate=1.0).attach(layer, optimizer):
        steps_on(layer, optimizer, x, 5)
    torch.testing.assert_close(torch.linalg.svdvals(layer.weight.detach()), initial)


def test_a_reference_may_be_a_state_dict() -> None:
    reference = ill_conditioned(seed=3).state_dict()
    layer = nn.Linear(6, 6, bias=False).double()
    idle(layer, SVDCorrection(every=1, rate=1.0, target=reference), 1)
    values = torch.linalg.svdvals(layer.weight.detach())
    torch.testing.assert_close(values, torch.linalg.svdvals(reference["weight"]))
    model = nn.Sequential(layer)
    with pytest.raises(ValueError, match=r"no 0\.weight; it has weight"):
        SpectralPenalty(target=reference).attach(model, SGD(model.parameters()))


@pytest.mark.parametrize("part", [slice(1), slice(1, None), slice(-2, None), slice(2, 4)])
def test_the_decay_shrinks_its_part_and_nothing_else(part: slice) -> None:
    layer = ill_conditioned()
    u, s, vt = torch.linalg.svd(layer.weight.detach())
    idle(layer, SpectralDecay(strength=0.5, part=part, every=2), 4)
    expected = s.clone()
    expected[part] *= (1 - 0.1 * 0.5 * 2) ** 2
    torch.testing.assert_close(u.T @ layer.weight.detach() @ vt.T, torch.diag(expected))


@pytest.mark.parametrize("shape", [(6, 6), (4, 9), (9, 4), (150, 150), (120, 300)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_bound_holds_after_one_step(shape, dtype) -> None:
    layer = ill_conditioned(*shape).to(dtype)
    idle(layer, SingularValueBound(7.0), 1)
    assert kappa_of(layer.weight) <= 7.0


def test_the_bound_holds_at_every_step_of_training_a_large_layer() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(150, 150, bias=False), torch.randn(64, 150)
    optimizer = AdamW(layer.parameters(), lr=1e-3)
    with SingularValueBound(20.0).attach(layer, optimizer):
        for _ in range(20):
            steps_on(layer, optimizer, x)
            assert kappa_of(layer.weight) <= 20.0


@pytest.mark.parametrize(
    ("dtype", "size", "kappa", "decades"),
    [
        (torch.bfloat16, 256, 100.0, 0),
        (torch.bfloat16, 512, 300.0, 0),
        (torch.float16, 512, 1000.0, 0),
        (torch.bfloat16, 24, 1.02, 0),
        (torch.float32, 130, 1e6, 5),
    ],
)
def test_the_bound_holds_of_what_is_stored(dtype, size, kappa, decades) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False)
    layer.weight.data *= torch.logspace(0, -decades, size)
    idle(layer.to(dtype), SingularValueBound(kappa), 1)
    values = torch.linalg.svdvals(layer.weight.detach().double())
    assert values[0] <= kappa * values[-1]


def test_a_bound_of_one_is_held_to_rounding() -> None:
    for dtype, nearest in (
        (torch.bfloat16, 1.01),
        (torch.float16, 1.001),
        (torch.float32, 1.000001),
    ):
        layer = idle(ill_conditioned(100, 100).to(dtype), SingularValueBound(1.0), 1)
        assert torch.linalg.cond(layer.weight.detach().double()) < nearest


def test_the_bound_is_the_nearest_matrix_that_has_it() -> None:
    weight = matrices(5, 4)
    found = SingularValueBound(2.0).corrected(weight)
    for seed in range(20):
        other = SingularValueBound(2.0).corrected(weight + 0.1 * matrices(5, 4, seed=seed))
        assert (found - weight).norm() <= (other - weight).norm() + 1e-12


@pytest.mark.parametrize("shape", ["bias", "conv", "parametrized"])
def test_the_pin_holds_the_norm(shape) -> None:
    model = MODELS[shape]()
    optimizer = AdamW(model.parameters(), lr=0.05)
    layers = [m for m in model if hasattr(m, "weight")]
    before = [m.weight.detach().norm() for m in layers]
    twin = copy.deepcopy(model)
    steps(twin, AdamW(twin.parameters(), lr=0.05), 5)
    with NormPin().attach(model, optimizer):
        steps(model, optimizer, 5)
    after = [m.weight.detach().norm() for m in layers]
    torch.testing.assert_close(after, before, rtol=1e-5, atol=0)
    free = [m.weight.detach().norm() for m in twin if hasattr(m, "weight")]
    assert any(abs(a - b) > 1e-3 for a, b in zip(free, before, strict=True))


def test_pinning_one_matrix_of_a_stack_leaves_the_others_scale_to_them() -> None:
    stack = Matrix(matrices(3, 4, 4))
    norms = torch.linalg.matrix_norm(stack.weight.detach())
    with NormPin().attach(stack, optimizer := SGD(stack.parameters(), lr=0.1)):
        stack().square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(torch.linalg.matrix_norm(stack.weight.detach()), norms)


def test_the_hybrid_moves_factors_and_lowers_kappa() -> None:
    layer = ill_conditioned(4, 4)
    x = matrices(16, 4)
    optimizer = SGD(layer.parameters(), lr=0.05)
    before = kappa_of(layer.weight)
    with Hybrid(penalties=SpectralPenalty(0.1, target=3.0)).attach(layer, optimizer):
        for _ in range(100):
            optimizer.zero_grad()
            (layer(x) - x).square().mean().backward()
            optimizer.step()
        factors = layer.parametrizations.weight[0]
        assert (factors.rows - 1).abs().max() > 1e-3 and (factors.columns - 1).abs().max() > 1e-3
    assert kappa_of(layer.weight) < 0.1 * before


@every
def test_maximizing_the_negative_is_minimizing(correction) -> None:
    torch.manual_seed(0)
    falling, rising = perceptron(), perceptron()
    rising.load_state_dict(falling.state_dict())
    down, up = SGD(falling.parameters(), 0.05), SGD(rising.parameters(), 0.05, maximize=True)
    with correction.attach(falling, down), correction.attach(rising, up):
        for _ in range(5):
            steps(falling, down)
            up.zero_grad()
            (-rising(inputs(rising)).square().mean()).backward()
            up.step()
    torch.testing.assert_close(rising.state_dict(), falling.state_dict())


# --- arguments ------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [2, np.float32(2), np.int64(2), torch.tensor(2.0)], ids=repr)
def test_whatever_is_a_number_bounds_kappa(number) -> None:
    weight = ill_conditioned().weight.detach()
    for found, plain in (
        (SpectralPenalty(1.0, number).penalty(weight), SpectralPenalty(1.0, 2.0).penalty(weight)),
        (
            SVDCorrection(target=number).corrected(weight),
            SVDCorrection(target=2.0).corrected(weight),
        ),
    ):
        assert torch.equal(found, plain)


def test_a_tensor_of_singular_values_is_a_target() -> None:
    known = torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64)
    for target in (known, lambda _: known):
        layer = idle(ill_conditioned(3, 3), SVDCorrection(every=1, rate=1.0, target=target), 1)
        torch.testing.assert_close(torch.linalg.svdvals(layer.weight.detach()), known)
    weight = ill_conditioned(3, 3).weight
    both = [SpectralPenalty(1.0, target).penalty(weight) for target in (known, lambda _: known)]
    assert both[0] == both[1] > 0
    model = perceptron()
    with pytest.raises(ValueError, match=r"0\.weight has 4 singular values, the target 3"):
        SVDCorrection(target=known).attach(model, SGD(model.parameters()))


@pytest.mark.parametrize("target", ["2", [2.0], nn.Linear(2, 2)], ids=["text", "list", "module"])
@pytest.mark.parametrize("kind", [SpectralPenalty, SVDCorrection])
def test_what_is_no_target_is_an_error(kind, target) -> None:
    with pytest.raises(TypeError, match="expected the target to be a number, a tensor"):
        kind(target=target)


def test_a_function_may_give_singular_values_as_an_array() -> None:
    weight = ill_conditioned(3, 3).weight.detach()
    for array in (np.array([3.0, 2.0, 1.0]), [3.0, 2.0, 1.0]):
        found = SVDCorrection(rate=1.0, target=lambda _, array=array: array).corrected(weight)
        values = torch.linalg.svdvals(found)
        torch.testing.assert_close(values, torch.tensor([3.0, 2.0, 1.0], dtype=torch.float64))


@pytest.mark.parametrize("kind", [SpectralPenalty, SVDCorrection])
@pytest.mark.parametrize(
    "values", [[], [1.0, 2.0, 3.0], [2.0, torch.nan, 1.0], [torch.inf, 1.0, 1.0]], ids=repr
)
def test_values_that_are_no_spectrum_are_an_error(kind, values) -> None:
    told = "expected the target's singular values to be finite numbers, the largest first; got"
    layer = ill_conditioned(3, 3)
    with pytest.raises(ValueError, match=told):
        kind(target=torch.tensor(values))
    with pytest.raises(ValueError, match=told):
        kind(target=lambda _: values).attach(layer, SGD(layer.parameters()))


@pytest.mark.parametrize("kind", [SpectralPenalty, SVDCorrection])
def test_a_function_that_gives_no_spectrum_is_an_error(kind) -> None:
    layer = ill_conditioned(3, 3)
    with pytest.raises(TypeError, match="singular values from the target's function; got NoneType"):
        kind(target=lambda _: None).attach(layer, SGD(layer.parameters()))
    with pytest.raises(ValueError, match=r"the largest first; got 3\.0"):
        kind(target=lambda _: 3.0).attach(layer, SGD(layer.parameters()))
    with pytest.raises(ValueError, match=r"to fit weight of shape \(3, 3\); got \(2, 3\)"):
        kind(target=torch.ones(2, 3)).attach(layer, SGD(layer.parameters()))
    reference = {"weight": torch.full((3, 3), torch.nan)}
    with pytest.raises(ValueError, match="to be finite numbers"):
        kind(target=reference).attach(layer, SGD(layer.parameters()))


def test_what_cannot_be_attached_to_is_an_error_in_one_line() -> None:
    model = perceptron()
    optimizer = SGD(model.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for wrong, came in (
        (None, "NoneType"),
        (scheduler, "ConstantLR"),
        (model.parameters(), "generator"),
        ([], "list of nothing"),
        ([optimizer, scheduler], "list of SGD, ConstantLR"),
        ({"a": optimizer}, "dict"),
    ):
        with pytest.raises(TypeError, match=f"expected an optimizer or a list of some; got {came}"):
            NormPin().attach(model, wrong)
    with pytest.raises(TypeError, match="expected a module to correct; got OrderedDict"):
        NormPin().attach(model.state_dict(), optimizer)
    for where in (5, [5], b"0.weight", model[0], model[0].weight):
        with pytest.raises(TypeError, match="expected where= to be a name or pattern"):
            NormPin().attach(model, optimizer, where=where)


WRONG = {
    "every": (0, -1, 1.5, None),
    "kappa": (0.5, float("nan"), float("inf"), None),
    "norm": (-1.0, 0.0, float("nan")),
    "target": (0.5, float("nan"), float("inf")),
    "part": (0, None, slice(None, None, -1), slice(None, None, 0), slice(0.5), slice("a")),
    "clip": (0.0, -1.0, float("nan")),
    "multipliers": (0.1, SpectralPenalty()),
    "penalties": (0.1, Multipliers()),
    **dict.fromkeys(("strength", "rate", "weight_decay", "band", "slack"), (-1.0, "1", None)),
}


@pytest.mark.parametrize("kind", Correction.__subclasses__(), ids=lambda kind: kind.__name__)
def test_an_argument_that_makes_no_sense_is_an_error_at_once(kind: type[Correction]) -> None:
    switches = {"rows", "columns", "gauge", "spectral"}
    for name in set(vars(kind())) - switches:
        for value in WRONG[name]:
            with pytest.raises(ValueError, match=f"{kind.__name__} expected {name} to be "):
                kind(**{name: value})


@every
def test_a_correction_is_a_value(correction) -> None:
    assert hash(correction) == hash(copy.deepcopy(correction))
    assert correction == copy.deepcopy(correction)


# --- pure forms -----------------------------------------------------------------------------------


def pure(correction: Correction, weight: Tensor) -> list[Tensor]:
    forms = [getattr(correction, name, None) for name in ("penalty", "corrected")]
    return [form(weight) for form in forms if form is not None]


@every
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pure_forms_of_half_precision_are_those_of_single_rounded(correction, dtype) -> None:
    weight = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    for half, single in zip(
        pure(correction, weight), pure(correction, weight.float()), strict=True
    ):
        assert half.dtype == dtype and torch.equal(half, single.to(dtype))


@every
def test_autocast_changes_no_pure_form(correction) -> None:
    weight = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))
    expected = pure(correction, weight)
    with torch.autocast("cpu", torch.float16):
        found = pure(correction, weight)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_pinned_norm_has_all_digits_of_the_weight() -> None:
    assert abs(NormPin(0.1).corrected(matrices(3, 3)).norm() - 0.1) < 1e-16


# --- choosing weights -----------------------------------------------------------------------------


def test_where_takes_names_patterns_and_tests() -> None:
    for where in ("0.weight", ["0.*"], lambda name: name.startswith("0")):
        model = perceptron()
        with NormPin().attach(model, SGD(model.parameters()), where=where) as handle:
            assert handle.weights == ("0.weight",)
            assert handle.left_out == {"2.weight": "not selected"}


@pytest.mark.parametrize("where", ["head.weight", "head.*", lambda name: name.startswith("head")])
def test_a_tied_weight_is_known_by_all_its_names(where) -> None:
    model = Tied()
    with NormPin().attach(model, SGD(model.parameters()), where=where) as handle:
        assert handle.weights == ("token.weight",)


def test_what_cannot_be_corrected_is_an_error_with_the_reason() -> None:
    model = frozen()
    optimizer = SGD(model.parameters())
    with pytest.raises(ValueError, match=r"no weight is called '7\.weight'; there are 0"):
        NormPin().attach(model, optimizer, where="7.weight")
    with pytest.raises(ValueError, match="cannot be corrected: it is frozen"):
        NormPin().attach(model, optimizer, where="0.weight")
    with pytest.raises(ValueError, match="no optimizer has it"):
        NormPin().attach(perceptron(), optimizer)
    with pytest.raises(ValueError, match="no weight to correct"):
        NormPin().attach(nn.LayerNorm(3), optimizer)
    model = parametrizations.spectral_norm(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="no inverse"):
        NormPin().attach(model, SGD(model.parameters()), where="weight")
    with pytest.raises(ValueError, match="made of other tensors"):
        Multipliers().attach(model, SGD(model.parameters()))
    with pytest.raises(ValueError, match="recurrent"):
        Multipliers().attach(rnn := nn.LSTM(2, 2), SGD(rnn.parameters()))


class Vision(nn.Module):
    """What has the shape of a matrix, or of a stack of them, and is no map; and three maps."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {"pos_embed": (1, 16, 8), "positions": (16, 8), "cls_token": (1, 1, 8)}
        shapes |= {"register_tokens": (1, 4, 8), "layer_scale": (1, 8, 1, 1), "A_log": (8, 4)}
        shapes |= {"experts_bias": (3, 8), "mixing": (8, 8)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape)))
        self.norm, self.embed, self.value = nn.LayerNorm((4, 8)), nn.Linear(4, 8), nn.Linear(8, 1)


def test_what_is_no_map_is_left_out_unless_it_is_named() -> None:
    model = Vision()
    optimizer = SGD(model.parameters())
    with NormPin().attach(model, optimizer) as handle:
        assert handle.weights == ("mixing", "embed.weight", "value.weight")
    assert handle.left_out == {
        **dict.fromkeys(
            ("pos_embed", "positions", "cls_token", "register_tokens", "A_log"),
            "a table is looked up or added, not multiplied",
        ),
        "layer_scale": "one row or column is a vector, not a map",
        "experts_bias": "a bias is added, not multiplied",
        "norm.weight": "a norm layer scales entry by entry",
        "norm.bias": "a bias is added, not multiplied",
    }
    with NormPin().attach(model, optimizer, where=[*handle.left_out]) as named_:
        assert set(named_.weights) == set(handle.left_out)


@every
def test_a_parametrized_buffer_is_no_weight(correction) -> None:
    model = perceptron()
    model.register_buffer("mask", torch.ones(3, 3))
    parametrize.register_parametrization(model, "mask", nn.Identity())
    with correction.attach(model, SGD(model.parameters())) as handle:
        assert handle.weights == ("0.weight", "2.weight") and not handle.left_out


def test_a_penalty_reaches_a_weight_through_what_makes_it() -> None:
    torch.manual_seed(0)
    layer = parametrizations.spectral_norm(nn.Linear(4, 4))
    vector = layer.parametrizations.weight[0]._u.clone()
    idle(layer, SpectralPenalty(0.1, target=1.5), 100)
    assert torch.equal(layer.parametrizations.weight[0]._u, vector)  # reading it moves nothing
    assert kappa_of(layer.weight) < 3


class Product(nn.Module):
    """A weight of two factors of rank three."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (a @ b).reshape(self.shape)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        u, s, vt = torch.linalg.svd(weight.flatten(1), full_matrices=False)
        return u[:, :3] * s[:3], vt[:3]


class Diagonal(nn.Module):
    """A weight of a vector."""

    def forward(self, vector: Tensor) -> Tensor:
        return torch.diag(vector)

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.diagonal()


@pytest.mark.parametrize(
    "layer", [nn.Linear(6, 8), nn.Conv1d(2, 8, 3), nn.ConvTranspose1d(8, 2, 3)], ids=repr
)
def test_the_shape_of_a_made_weight_is_that_of_what_is_made(layer) -> None:
    layer = copy.deepcopy(layer)
    parametrize.register_parametrization(layer, "weight", Product(layer.weight.shape), unsafe=True)
    optimizer, before = SGD(layer.parameters(), lr=0.1), layer.weight.detach().clone()
    with OrthogonalPenalty().attach(layer, optimizer):
        optimizer.step()
    assert not torch.equal(layer.weight, before)
    with pytest.raises(ValueError, match="its making has no inverse for every matrix"):
        SingularValueBound().attach(layer, optimizer)


def test_a_matrix_made_of_a_vector_is_a_weight() -> None:
    layer = nn.Linear(4, 4)
    parametrize.register_parametrization(layer, "weight", Diagonal(), unsafe=True)
    with SpectralPenalty().attach(layer, SGD(layer.parameters())) as handle:
        assert handle.weights == ("weight",)


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
    with Multipliers(gauge=gauge).attach(handle_of, SGD(handle_of.parameters())):
        keys = [k.split(".parametrizations.weight.0.") for k in handle_of.state_dict()]
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
    with Multipliers(weight_decay=0.0).attach(model, optimizer):
        model["c_attn"](torch.ones(1, 2)).square().sum().backward()
        optimizer.step()
        rows = model["c_attn"].parametrizations.weight[0].rows
        assert ((rows == 1) == torch.tensor([False, False, True, True, False, False])).all()


# --- training as people train ---------------------------------------------------------------------

ROBUST = [Multipliers(), SpectralPenalty(0.1, target=1.5), NormPin(), SingularValueMultipliers()]
robust = pytest.mark.parametrize("correction", ROBUST, ids=lambda c: type(c).__name__)


def attached(correction: Correction, rate: float = 0.05) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = perceptron()
    optimizer = SGD(model.parameters(), lr=rate)
    correction.attach(model, optimizer)
    return model, optimizer


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
def test_copies_outlive_the_handle_and_it_them(correction) -> None:
    model = perceptron()
    handle = correction.attach(model, optimizer := SGD(model.parameters(), lr=0.05))
    steps(model, optimizer, 2)
    average, twin = torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(model)
    third, expected = copy.deepcopy(twin), answers(model)
    for layer in twin:
        if parametrize.is_parametrized(layer):
            parametrize.remove_parametrizations(layer, "weight")
    handle.close()
    for each in (model, average, twin, third, copy.deepcopy(third)):
        torch.testing.assert_close(answers(each), expected)
    for plain in (model, twin):
        assert torch.equal(answers(pickle.loads(pickle.dumps(plain))), answers(plain))
    with correction.attach(twin, other := SGD(twin.parameters(), lr=0.05)):
        steps(twin, other)
    torch.testing.assert_close(answers(third), expected)


@pytest.mark.parametrize("make", [Multipliers, Hybrid])
def test_multipliers_can_be_left_out_of_a_clip(make) -> None:
    free, clipped = perceptron(), perceptron()
    clipped.load_state_dict(free.state_dict())
    first, second = SGD(free.parameters(), lr=0.05), SGD(clipped.parameters(), lr=0.05)
    make().attach(free, first)
    handle = make().attach(clipped, second)
    for model in (free, clipped):
        model(100 * inputs(model)).square().mean().backward()
    with handle.unclipped():
        norm = nn.utils.clip_grad_norm_(clipped.parameters(), 0.1)
    assert norm > 1
    first.step()
    second.step()
    rows = [m[0].parametrizations.weight[0].rows for m in (free, clipped)]
    torch.testing.assert_close(*rows)
    assert not torch.equal(rows[0], torch.ones_like(rows[0]))
    weights = [m[0].parametrizations.weight.original for m in (free, clipped)]
    assert not torch.allclose(*weights)


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
    return model.parametrizations.weight[0].rows.detach()


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
    rows = model.parametrizations.weight[0].rows
    assert torch.equal(rows, torch.ones_like(rows))


def test_gradients_may_come_and_go_while_unclipped() -> None:
    model = perceptron()
    handle = Multipliers().attach(model, optimizer := SGD(model.parameters()))
    with handle.unclipped():
        model(inputs(model)).sum().backward()
    with handle.unclipped():
        optimizer.zero_grad()


def test_factors_count_in_no_norm_even_if_all_gradients_are_required() -> None:
    for correction in (Multipliers(), SingularValueMultipliers()):
        model, _ = attached(correction)
        model.requires_grad_(True)
        model(inputs(model)).square().mean().backward()
        factors = model[0].parametrizations.weight[0].parameters()
        assert all(factor.grad is None for factor in factors)


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
        Multipliers(rate=1.0).attach(model, optimizer)
        steps(model, optimizer, 5)
        moved.append(model.parametrizations.weight[0].rows.detach())
    torch.testing.assert_close(*moved, rtol=0, atol=0)


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


def test_factors_follow_the_users_learning_rate() -> None:
    model, moved = perceptron(), []
    optimizer = SGD(model.parameters(), lr=0.1)
    with Multipliers(weight_decay=0.0).attach(model, optimizer):
        rows = model[0].parametrizations.weight[0].rows
        for rate in (0.1, 0.0, 0.2):
            optimizer.param_groups[0]["lr"] = rate
            before = rows.clone()
            steps(model, optimizer)
            moved.append(float((rows - before).abs().max()))
    assert moved[0] > 0 and moved[1] == 0 and moved[2] > 0


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("correction", [c for c in EXAMPLES if isinstance(c, MERGED)], ids=repr)
def test_a_corrected_model_may_change_its_type(correction, dtype) -> None:
    model, optimizer = attached(correction)
    handle = Rounds.of(optimizer).handles[0]
    steps(model, optimizer, 2)
    merged = handle.plain(model.state_dict())["0.weight"]
    model.to(dtype)
    factors = model[0].parametrizations.weight[0].parameters()
    assert all(factor.dtype in (torch.float32, torch.float64) for factor in factors)
    torch.testing.assert_close(model[0].weight.detach(), merged.to(dtype), rtol=0.02, atol=0.01)
    steps(model, optimizer, 2)
    trained = model(inputs(model))
    handle.close()
    assert torch.equal(model(inputs(model)), trained) and model[0].weight.dtype == dtype


def test_what_cannot_be_merged_is_not_lost() -> None:
    model, optimizer = attached(SingularValueMultipliers())
    handle = Rounds.of(optimizer).handles[0]
    steps(model, optimizer, 2)
    trained, factors = model(inputs(model)), model[2].parametrizations.weight[0]
    basis, factors.basis = factors.basis, torch.ones(2, 2)
    with pytest.raises(RuntimeError):
        handle.close()
    factors.basis = basis
    assert handle.difference is None and torch.equal(model(inputs(model)), trained)
    handle.close()
    assert handle.difference == 0.0 and torch.equal(model(inputs(model)), trained)


def test_closing_leaves_what_others_parametrized_meanwhile() -> None:
    model = nn.Linear(4, 3)
    handle = Multipliers().attach(model, SGD(model.parameters()))
    parametrize.register_parametrization(model, "bias", nn.Tanh())
    twin, expected = copy.deepcopy(model), model(inputs(model))
    handle.close()
    assert dict(model.named_parameters()).keys() == {"weight", "parametrizations.bias.original"}
    assert torch.equal(model(inputs(model)), expected)
    assert torch.equal(twin(inputs(twin)), expected)
    again = Multipliers().attach(model, SGD(model.parameters()))
    assert torch.equal(twin(inputs(twin)), expected)
    again.close()
    assert torch.equal(model(inputs(model)), expected)


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


def test_a_closure_is_refused() -> None:
    model, optimizer = attached(SpectralPenalty(0.1, target=1.5))
    with pytest.raises(ValueError, match="closure"):
        optimizer.step(lambda: model(inputs(model)).sum())


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


def tensors(value: object) -> list[Tensor]:
    if isinstance(value, dict):
        return [found for inner in value.values() for found in tensors(inner)]
    return [value] if isinstance(value, Tensor) else []


@pytest.mark.parametrize(
    "correction", [NormPin(), SpectralPenalty(0.1, 1.5), SVDCorrection(every=1)], ids=repr
)
def test_what_is_remembered_follows_the_weight_to_its_device(correction) -> None:
    layer = nn.Linear(100, 100)
    optimizer = SGD(layer.parameters(), lr=0.1)
    handle = correction.attach(layer, optimizer)
    steps_on(layer, optimizer, torch.ones(2, 100), 2)
    (treatment,) = handle.treatments[optimizer]
    assert {t.device.type for t in tensors(treatment.memory)} == {"cpu"}
    state = handle.state_dict()
    treatment.leaf = layer.weight.to("meta")  # as a model's weights move
    assert {t.device.type for t in tensors(treatment.memory)} == {"meta"}
    handle.load_state_dict(state)
    assert {t.device.type for t in tensors(treatment.memory)} == {"meta"}


# --- compiled, and in several processes -----------------------------------------------------------


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


def rank(number: int, place: str) -> None:
    """One of two processes; the corrections are attached before and after DDP wraps the model."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=number, world_size=2)
    for correction in EXAMPLES:
        for early, unused in ((True, False), (False, True)):
            torch.manual_seed(number)  # DDP broadcasts the first process's weights
            model = perceptron()
            optimizer = AdamW(model.parameters(), lr=0.05)
            if early:
                torch.manual_seed(7)
                model.load_state_dict(perceptron().state_dict())
                correction.attach(model, optimizer)
            parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=unused)
            if not early:
                correction.attach(parallel, optimizer)
            generator = torch.Generator().manual_seed(number)
            for _ in range(20):
                optimizer.zero_grad()
                parallel(torch.randn(8, 4, generator=generator)).square().mean().backward()
                optimizer.step()
            state = torch.cat([v.double().flatten() for v in model.state_dict().values()])
            both = [torch.zeros_like(state) for _ in range(2)]
            dist.all_gather(both, state)
            if not torch.equal(*both):
                raise AssertionError(f"{correction} differs, attached early: {early}")
    dist.barrier()
    os._exit(0)  # one in thirty is aborted by gloo's threads if it ends as usual


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes_stay_equal(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(rank, args=(str(tmp_path / "meeting"),), nprocs=2)


# --- weights at the edge --------------------------------------------------------------------------

EDGES: dict[str, Tensor] = {
    "zero": torch.zeros(3, 3),
    "identity": torch.eye(3),
    "orthogonal": torch.linalg.qr(matrices(4, 3).float())[0],
    "rank 1": torch.outer(torch.arange(1.0, 4.0), torch.ones(4)),
    "equal pairs": torch.diag(torch.tensor([2.0, 2.0, 1.0, 1.0])),
    "1x1": torch.tensor([[2.0]]),
    "1xn": torch.arange(1.0, 5.0)[None],
    "tiny": 1e-20 * matrices(3, 3).float(),
}


@pytest.mark.parametrize(
    "correction",
    [*EXAMPLES, SpectralPenalty(1.0, lambda w: w.diagonal().sort(descending=True)[0] + 5, 0)],
    ids=lambda correction: f"{type(correction).__name__} {getattr(correction, 'strength', '')}",
)
@pytest.mark.parametrize("edge", EDGES)
def test_degenerate_weights_stay_finite(correction, edge) -> None:
    weight = EDGES[edge].clone()
    if hasattr(correction, "penalty"):
        leaf = weight.clone().requires_grad_()
        value = correction.penalty(leaf)
        value.backward()
        assert value.isfinite() and leaf.grad.isfinite().all()
    if hasattr(correction, "corrected"):
        assert correction.corrected(weight).isfinite().all()
    layer = nn.Linear(weight.shape[1], weight.shape[0])
    layer.weight.data = weight
    optimizer = AdamW(layer.parameters(), lr=0.01)
    x = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0))
    with correction.attach(layer, optimizer) as handle:
        steps_on(layer, optimizer, x, 100)
    assert layer.weight.isfinite().all() and not handle.refused


@pytest.mark.parametrize("correction", [SpectralPenalty(0.0), SVDCorrection(rate=0.0)])
@pytest.mark.parametrize("more", [OrthogonalPenalty(0.0), SpectralDecay(0.0)])
def test_strength_zero_is_an_exact_no_op(correction, more) -> None:
    torch.manual_seed(0)
    model = perceptron()
    twin = copy.deepcopy(model)
    optimizer, other = (AdamW(m.parameters(), lr=0.05) for m in (model, twin))
    with correction.attach(model, optimizer), more.attach(model, optimizer):
        steps(model, optimizer, 5)
    steps(twin, other, 5)
    torch.testing.assert_close(model.state_dict(), twin.state_dict(), rtol=0, atol=0)


HUGE = 3e38  # near the end of float32


@pytest.mark.parametrize(
    "correction",
    [
        NormPin(norm=1e39),
        SVDCorrection(
            every=1, rate=1.0, target=lambda w: torch.full((3,), 1e39, dtype=torch.float64)
        ),
        OrthogonalPenalty(1.0, clip=float("inf")),
        Multipliers(rate=1e30),
        SingularValueMultipliers(rate=1e30),
    ],
    ids=lambda c: type(c).__name__,
)
def test_a_step_that_would_not_be_finite_is_refused(correction) -> None:
    layer = nn.Linear(3, 3, bias=False)
    layer.weight.data = torch.diag(torch.tensor([HUGE / 1e3, 1.0, 2.0]))
    optimizer = SGD(layer.parameters(), lr=1.0)
    handle = correction.attach(layer, optimizer)
    before = layer.weight.detach().clone()
    leaf = next(p for p in layer.parameters() if p.requires_grad)
    leaf.grad = torch.full_like(leaf, 1e-35)
    with pytest.warns(RuntimeWarning, match=r"was refused: weight would not be finite"):
        optimizer.step()
    assert handle.refused == {"weight": 1}
    torch.testing.assert_close(layer.weight.detach(), before)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # told once
        leaf.grad = torch.full_like(leaf, 1e-35)
        optimizer.step()
    assert handle.refused == {"weight": 2}


@every
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", ["bias", "parametrized", "tied"])
def test_a_gradient_that_is_not_finite_leaves_the_weight_unchanged(correction, shape, bad) -> None:
    torch.manual_seed(0)
    model = MODELS[shape]()
    optimizer = AdamW(model.parameters(), lr=0.05)
    handle = correction.attach(model, optimizer)
    steps(model, optimizer)
    optimizer.zero_grad()
    model(inputs(model)).square().mean().backward()
    treatment = handle.treatments[optimizer][0]
    treatment.leaf.grad[0, 0] = bad
    before = copy.deepcopy((treatment.slot.matrix(), optimizer.state[treatment.leaf]))
    with pytest.warns(RuntimeWarning, match="would not be finite"):
        optimizer.step()
    after = treatment.slot.matrix(), optimizer.state[treatment.leaf]
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert handle.refused == {treatment.slot.name: 1}
    assert not treatment.leaf.grad.isfinite().all()  # is there still to be looked at
    steps(model, optimizer, 3)
    assert not torch.equal(treatment.slot.matrix(), before[0])
    assert handle.refused == {treatment.slot.name: 1}


def test_a_factor_that_is_no_number_is_refused_beside_a_weight_that_is_one() -> None:
    layer = nn.Linear(3, 3, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    handle = Multipliers().attach(layer, optimizer)
    leaf = layer.parametrizations.weight.original
    leaf.grad = torch.full_like(leaf, 1.0)
    leaf.grad[0, 0] = torch.inf
    with handle.unclipped():  # the leaf's gradient is mended, that of its factors is not
        nn.utils.clip_grad_value_(layer.parameters(), 1.0)
    with pytest.warns(RuntimeWarning, match="would not be finite"):
        optimizer.step()
    assert layer.weight.isfinite().all() and handle.refused == {"weight": 1}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [8, 200])  # by an SVD, and tracked
@pytest.mark.parametrize(
    "correction",
    [
        SpectralPenalty(target=2.0, every=2),
        SingularValueBound(2.0),
        Hybrid(),
        OrthogonalPenalty(1e-3),
    ],
    ids=lambda c: type(c).__name__,
)
def test_a_weight_that_is_not_finite_is_left_alone_until_it_is(correction, size, bad) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(size, size, bias=False)
    twin = copy.deepcopy(layer)
    optimizer, other = (SGD(m.parameters(), lr=0.1) for m in (layer, twin))
    handle = correction.attach(layer, optimizer)
    leaf = next(p for p in layer.parameters() if p.shape == (size, size))
    good = leaf.detach().clone()
    leaf.data[0, 0] = bad
    with pytest.warns(RuntimeWarning, match="was refused"):
        for _ in range(3):
            leaf.grad = torch.zeros_like(leaf)
            optimizer.step()
    assert handle.refused["weight"] >= 3
    leaf.data.copy_(good)
    with correction.attach(twin, other):
        for model, its in ((layer, optimizer), (twin, other)):
            weight = next(p for p in model.parameters() if p.shape == (size, size))
            weight.grad = torch.zeros_like(weight)
            its.step()
        handle.close()
    torch.testing.assert_close(layer.weight, twin.weight)
    assert not torch.equal(layer.weight, good)


def test_factors_of_singular_values_need_finite_weights() -> None:
    layer = nn.Linear(3, 3)
    layer.weight.data[0, 0] = torch.inf
    with pytest.raises(ValueError, match="weight: a matrix that is not finite has no"):
        SingularValueMultipliers().attach(layer, SGD(layer.parameters(), lr=1.0))


# --- the paper's fourth experiment, through these classes -----------------------------------------


@pytest.fixture(scope="module")
def fourth() -> dict[str, dict[str, Tensor]]:
    """Errors by strategy, of the paper's ten trials."""
    streams = Paper(range(10))
    target, random = heterogeneous(streams.random(), 64), streams.random(7)
    origin, known = start(random, 64), Components(target).singular_values
    arms = {
        "standard": None,
        "multipliers": Multipliers(rate=0.1, weight_decay=0.0),
        "spectral": SpectralPenalty(0.005, target=lambda _: known, band=0.0),
        "svd": SVDCorrection(every=20, rate=0.1, target=lambda _: known),
    }
    batches = list(islice(Regression(target).batches(random), 200))
    found = {}
    for name, correction in arms.items():
        model = Matrix(origin)
        optimizer = SGD(model.parameters(), lr=0.01)
        handle = correction and correction.attach(model, optimizer)
        step = last(train(model, optimizer, batches))
        if handle:
            handle.close()
        found[name] = {k: v.mean() for k, v in errors(step.weight, target).items()}
    return found


def test_the_papers_multipliers_are_reproduced(fourth) -> None:
    assert f"{fourth['standard']['row_norms']:.3f}" == "0.134"
    assert f"{fourth['standard']['condition_number']:.2f}" == "1.23"
    assert f"{fourth['multipliers']['row_norms']:.4f}" == "0.0443"
    assert f"{fourth['multipliers']['condition_number']:.3f}" == "1.108"


def test_the_papers_spectral_penalty_is_reproduced(fourth) -> None:
    assert f"{fourth['spectral']['condition_number']:.2f}" == "0.29"
    assert f"{fourth['spectral']['row_norms']:.4f}" == "0.1337"


def test_the_papers_svd_correction_is_reproduced(fourth) -> None:
    gains = {key: 1 - fourth["svd"][key] / fourth["standard"][key] for key in fourth["svd"]}
    assert 100 * gains["row_norms"] == pytest.approx(64.2, abs=0.06)
    assert 100 * gains["condition_number"] == pytest.approx(32.2, abs=0.06)


def test_a_bound_on_kappa_takes_one_decomposition(monkeypatch) -> None:
    taken, original = [], spectra.decomposition
    monkeypatch.setattr(spectra, "decomposition", lambda a: taken.append(1) or original(a))
    found = SVDCorrection(rate=1.0, target=2.0).corrected(torch.diag(torch.tensor([4.0, 1.0])))
    assert len(taken) == 1
    assert torch.linalg.cond(found) == pytest.approx(2.0)


SCRIPTS = sorted((Path(__file__).parents[1] / "examples").glob("*.py"))


@pytest.mark.parametrize("example", SCRIPTS, ids=lambda path: path.stem)
def test_the_examples_run(example) -> None:
    runpy.run_path(str(example))
