"""An audit catches optimizers that are not what they say, accuses no other, and leaves no trace."""

import copy
import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytorch_optimizer
import torch
from accelerate import Accelerator
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor, nn
from transformers.optimization import Adafactor

import kappascope
from kappascope import corrections
from kappascope.matrix.orthogonal import orthogonalized
from kappascope.monitor.audit import Auditor, audit
from kappascope.monitor.promises import promises
from optimizer_zoo import (
    HONEST,
    SABOTAGED,
    HandAdam,
    HandMuonWithAdam,
    Specimen,
    conv,
    gpt,
    matrices,
    mlp,
    named,
    others_than,
)


def passed(specimen: Specimen, seed: int = 1) -> bool:
    torch.manual_seed(seed)
    return audit(specimen.model, specimen.optimizer, specimen.closure).passed


@pytest.mark.parametrize("make", HONEST.values(), ids=HONEST)
def test_an_honest_optimizer_passes(make: Callable[[], Specimen]) -> None:
    specimen = make()
    torch.manual_seed(1)
    result = audit(specimen.model, specimen.optimizer, specimen.closure)
    assert result.passed, result


@pytest.mark.parametrize("make", SABOTAGED.values(), ids=SABOTAGED)
def test_a_sabotaged_optimizer_is_caught(make: Callable[[], Specimen]) -> None:
    specimen = make()
    torch.manual_seed(1)
    result = audit(specimen.model, specimen.optimizer, specimen.closure)
    assert not result.passed
    assert result.steps == 5
    for row in result.failed:
        assert row.matrix and row.expected and row.came
        assert str(row) in str(result)


def test_the_zoo_is_large_enough() -> None:
    assert len(HONEST) >= 30 and len(SABOTAGED) >= 15


def test_every_optimizer_of_torch_that_has_a_formula_is_known() -> None:
    kinds = vars(torch.optim).values()
    known = {k.__name__ for k in kinds if isinstance(k, type) and k is not torch.optim.Optimizer}
    assert known - set(promises()) == {"LBFGS"}  # whose step is a line search


# Their steps need more than parameters and gradients, or groups of their own.
NEED_MORE = """adahessian adalomo adammini alig bsam demo distributedmuon lbfgs lomo lorarite
    sophiah spectralsphere ranger21 muon adamuon adago normuon muonclip"""
OTHERS = sorted({*pytorch_optimizer.get_supported_optimizers()} - {*NEED_MORE.split()})


@pytest.mark.parametrize("name", OTHERS[::2])
def test_no_optimizer_of_others_is_accused_or_changed(name: str) -> None:
    model, closure = mlp()
    optimizer = pytorch_optimizer.load_optimizer(name)(model.parameters())
    if hasattr(optimizer, "train"):
        optimizer.train()
    closure()
    optimizer.step()
    before = trace(model, optimizer)
    assert audit(model, optimizer, closure).passed
    assert same(before, trace(model, optimizer))


@pytest.mark.parametrize("steps_before", [0, 3])
@pytest.mark.parametrize("bits", [32, 8])
@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Lion"])
def test_the_names_that_bitsandbytes_shares_with_torch_are_not_accused(
    kind: str, bits: int, steps_before: int
) -> None:
    library = pytest.importorskip("bitsandbytes", minversion="0.50", reason="it has a CPU since")
    torch.manual_seed(0)
    model = nn.Linear(64, 80)  # so large that it is kept in eight bits
    momentum = {"momentum": 0.9} if kind == "SGD" else {}
    make = getattr(library.optim, kind)
    optimizer = make(model.parameters(), lr=1e-2, optim_bits=bits, **momentum)

    def closure() -> None:
        model(torch.randn(8, 64)).square().mean().backward()

    for _ in range(steps_before):
        closure()
        optimizer.step()
        optimizer.zero_grad()
    result = audit(model, optimizer, closure)
    assert result.passed, result
    is_known = bits == 32 and not steps_before  # its state has names of its own
    assert all(row.is_checked == is_known for row in result.rows)
    assert ("2 of 2 parameters" if is_known else "no formula is known") in str(result)


def test_what_float16_cannot_hold_is_no_sabotage() -> None:
    model, closure = mlp(torch.float16)
    assert audit(model, torch.optim.RAdam(model.parameters(), foreach=True), closure).passed


def test_the_model_may_be_wrapped() -> None:
    model, optimizer, closure = HONEST["muon_of_fused_parts"]()
    compiled = nn.Module()
    compiled._orig_mod = model  # as torch.compile keeps it
    result = audit(compiled, optimizer, closure)
    assert result.passed and result.rows[0].matrix == "h.0.attn.c_attn.weight"


# --- everything as before -------------------------------------------------------------------------


def trace(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """All that an audit might change, as a copy."""
    return copy.deepcopy(
        {
            "weights": [p.detach() for p in model.parameters()],
            "buffers": list(model.buffers()),
            "gradients": [p.grad for p in model.parameters()],
            "state": optimizer.state_dict(),
            "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()),  # noqa: NPY002
        }
    )


def same(a: Any, b: Any) -> bool:
    """Whether two values are equal to the bit, through containers and objects."""
    if isinstance(a, Tensor):
        bits = [x.detach().contiguous().view(-1).view(torch.uint8) for x in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)
    if isinstance(a, np.ndarray):
        return a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dict__") and not callable(a):
        return same(vars(a), vars(b))
    return repr(a) == repr(b)  # so that NaN is itself


@pytest.mark.parametrize(
    "name", ["adamw", "adam_amsgrad", "adamw_bf16_gpt", "muon", "in_the_middle_of_a_run",
             "clipped_and_scheduled", "schedule_free", "pytorch_optimizer_soap", "adagrad"]
)  # fmt: skip
def test_everything_is_as_before(name: str) -> None:
    model, optimizer, closure = HONEST[name]()
    optimizer.zero_grad()
    closure()
    before, tensors = trace(model, optimizer), [p.data_ptr() for p in model.parameters()]
    attributes = dict(vars(optimizer))
    audit(model, optimizer, closure)
    assert same(before, trace(model, optimizer))
    assert tensors == [p.data_ptr() for p in model.parameters()]
    assert attributes.keys() == vars(optimizer).keys()


@pytest.mark.parametrize("model", [gpt, conv], ids=["dropout", "batch norm"])
def test_training_goes_on_as_if_nothing_had_been(model: Any) -> None:
    ends = []
    for is_audited in (False, True):
        network, closure = model()
        optimizer = torch.optim.AdamW(network.parameters())
        for step in range(4):
            if is_audited and step == 2:
                assert audit(network, optimizer, closure).passed
            optimizer.zero_grad()
            closure()
            optimizer.step()
        ends.append(trace(network, optimizer))
    assert same(*ends)


def test_everything_is_as_before_if_the_closure_raises() -> None:
    model, closure = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    before, calls = trace(model, optimizer), []

    def failing() -> Tensor:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return closure()

    with pytest.raises(KeyboardInterrupt):
        audit(model, optimizer, failing)
    assert same(before, trace(model, optimizer))
    assert not any(p._backward_hooks for p in model.parameters())


def test_random_generators_that_the_closure_names_are_put_back() -> None:
    model = nn.Linear(4, 3)
    draws, numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def closure() -> Tensor:
        x = torch.randn(8, 4, generator=draws) * numbers.standard_normal()
        return model(x).square().mean()

    before = draws.get_state(), numbers.bit_generator.state
    audit(model, torch.optim.SGD(model.parameters(), lr=0.1), closure)
    assert torch.equal(before[0], draws.get_state())
    assert before[1] == numbers.bit_generator.state


# --- closures -------------------------------------------------------------------------------------


def test_a_closure_may_only_return_the_loss() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    result = audit(model, optimizer, lambda: model(torch.randn(8, 4)).square().mean())
    assert result.passed and all(row.is_checked for row in result.rows)


def test_a_closure_without_gradient_is_refused() -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.Adam(model.parameters())
    with pytest.raises(ValueError, match="calls backward or returns the loss, got NoneType"):
        audit(model, optimizer, lambda: None)


def test_what_is_no_optimizer_is_refused() -> None:
    with pytest.raises(TypeError, match="expected an optimizer with step and param_groups"):
        audit(nn.Linear(1, 1), nn.Linear(1, 1), lambda: None)


def test_no_step_is_refused() -> None:
    model, closure = mlp()
    with pytest.raises(ValueError, match="at least one step, got 0"):
        audit(model, torch.optim.SGD(model.parameters()), closure, steps=0)


def test_an_optimizer_that_needs_a_closure_gets_it() -> None:
    model, closure = mlp()
    assert audit(model, torch.optim.LBFGS(model.parameters()), closure).passed
    sam = pytorch_optimizer.SAM(model.parameters(), base_optimizer=torch.optim.SGD, lr=0.1)
    assert audit(model, sam, closure).passed


# --- what is said ---------------------------------------------------------------------------------


def test_an_unknown_optimizer_is_not_accused_and_the_result_says_so() -> None:
    model, closure = mlp()
    kind = named("Neverheard", HandAdam, has_bias_correction=False)
    result = audit(model, kind(model.parameters()), closure)
    assert result.passed and not any(row.is_checked for row in result.rows)
    assert "only invariants were checked (Neverheard is no optimizer that is known here)" in str(
        result
    )


@pytest.mark.parametrize("betas", [{}, {"betas": (0.9, 0.99, 0.999)}, {"betas": 0.9}])
def test_a_name_with_settings_of_another_kind_is_not_accused(betas: dict[str, Any]) -> None:
    model, closure = mlp()

    class Lion(torch.optim.SGD):
        pass

    optimizer = Lion([{"params": list(model.parameters()), **betas}], lr=1e-3)
    result = audit(model, optimizer, closure)
    assert result.passed and not any(row.is_checked for row in result.rows)
    assert "its settings are not those of Lion" in str(result)


def test_the_result_can_be_read() -> None:
    model, closure = mlp()
    result = kappascope.audit(model, torch.optim.AdamW(model.parameters()), closure)
    assert repr(result) == (
        "audit of AdamW: passed, 6 of 6 parameters moved as promised in 5 steps"
    )
    assert [row.matrix for row in result.rows] == [name for name, _ in model.named_parameters()]


@pytest.mark.parametrize(
    ("name", "came"),
    [
        ("adamw_with_ten_times_the_rate", "10.0 times that step"),
        ("adamw_without_decay", "no decay, not by 1.00×10⁻⁵"),
        ("adamw_that_decays_twice", "decay by 2.00×10⁻⁵ of the weight, not by 1.00×10⁻⁵"),
        ("muon_that_runs_as_sgd", "along the gradient, as SGD's; singular values"),
        ("muon_that_runs_as_adamw", "all entries of one size, as Adam's first"),
        ("a_layer_that_nobody_steps", "a gradient, and no optimizer that has it"),
        ("two_optimizers_for_one_weight", "one each of AdamW and SGD"),
        ("adamw_that_moves_what_is_frozen", "a move"),
        ("adamw_that_forgets_a_layer", "no move"),
    ],
)
def test_what_came_is_told_in_words(name: str, came: str) -> None:
    model, optimizer, closure = SABOTAGED[name]()
    assert came in str(audit(model, optimizer, closure))


# --- names, wrappers and groups -------------------------------------------------------------------


def test_a_subclass_promises_what_torchs_class_does() -> None:
    class Mine(torch.optim.AdamW):
        pass

    class Twice(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step()
            super().step()

    model, closure = mlp()
    assert all(row.is_checked for row in audit(model, Mine(model.parameters()), closure).rows)
    assert not audit(model, Twice(model.parameters(), lr=0.1), closure).passed


def test_wrappers_of_trainers_are_looked_through() -> None:
    model, closure = mlp()
    honest = torch.optim.AdamW(model.parameters())
    false = named("AdamW", torch.optim.SGD)(model.parameters(), lr=0.1)
    for wrap in (Accelerator(cpu=True).prepare_optimizer, LightningOptimizer):
        result = audit(model, wrap(honest), closure)
        assert result.passed and all(row.is_checked for row in result.rows)
        assert not audit(model, wrap(false), closure).passed


def test_a_step_that_was_replaced_is_looked_at() -> None:
    model, closure = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    own = optimizer.step
    optimizer.step = lambda: (own(), own())  # type: ignore[method-assign]
    assert not audit(model, optimizer, closure).passed


@pytest.mark.parametrize(
    "correction",
    [corrections.Multipliers(), corrections.SpectralPenalty(), corrections.SpectralDecay()],
)
def test_a_correction_is_not_taken_for_the_optimizer(correction: Any) -> None:
    model, closure = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    with correction.attach(model, optimizer):
        result = audit(model, optimizer, closure)
    assert result.passed, result


def test_other_hooks_of_the_optimizer_are_not_taken_for_it() -> None:
    model, closure = mlp()
    optimizer = torch.optim.AdamW(model.parameters())

    @torch.no_grad()
    def shrink(*_: Any) -> None:
        for p in model.parameters():
            p.mul_(0.9)

    def clip(*_: Any) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)

    optimizer.register_step_post_hook(shrink)
    optimizer.register_step_pre_hook(clip)
    assert audit(model, optimizer, closure).passed
    assert (
        len(optimizer._optimizer_step_post_hooks) == len(optimizer._optimizer_step_pre_hooks) == 1
    )


def test_a_muon_that_lost_its_flags_is_caught() -> None:
    model, closure = gpt()
    hidden = matrices(model)
    settings = {"betas": (0.9, 0.95), "eps": 1e-8, "use_muon": False}
    groups = [{"params": hidden, **settings}, {"params": others_than(model, hidden), **settings}]
    result = audit(model, named("MuonWithAuxAdam", HandMuonWithAdam)(groups), closure)
    assert {row.matrix for row in result.failed} == {
        name for name, p in model.named_parameters() if any(p is q for q in hidden)
    }


def test_a_gradient_made_orthogonal_before_muon_is_caught() -> None:
    model, closure = gpt()
    hidden = matrices(model)
    for p in hidden:
        p.register_hook(orthogonalized)
    result = audit(model, torch.optim.Muon(hidden), lambda: sum(closure() for _ in range(2)))
    assert not result.passed
    assert "one that was made orthogonal before, as by micro-batch" in str(result)


def test_a_masked_gradient_is_no_orthogonal_one() -> None:
    model, closure = gpt()
    hidden = matrices(model)
    for p in hidden:
        p.register_hook(lambda gradient: gradient * (torch.arange(len(gradient)) % 2)[:, None])
    assert audit(model, torch.optim.Muon(hidden), closure).passed


def test_the_first_layers_may_be_left_as_they_are() -> None:
    model, closure = mlp()
    result = audit(model, torch.optim.SGD(model[4].parameters(), lr=0.1), closure)
    assert result.passed
    assert "0.weight, 0.bias, 2.weight and 1 more: no optimizer that was passed steps it" in str(
        result
    )


@pytest.mark.parametrize("kind", [torch.optim.AdamW, pytorch_optimizer.SOAP])
def test_an_optimizer_of_another_copy_of_the_model_is_caught(kind: Any) -> None:
    model, closure = mlp()
    result = audit(model, kind(copy.deepcopy(model).parameters()), closure)
    assert len(result.failed) == 6
    assert "before the model was copied or made anew" in str(result)


@pytest.mark.parametrize("is_within", [False, True])
def test_copies_in_more_digits_may_be_stepped_in_the_models_place(is_within: bool) -> None:
    model, closure = mlp(dtype=torch.bfloat16)
    ours = list(model.parameters())
    copies = [p.detach().float().requires_grad_() for p in ours]

    def hand_over() -> None:
        for mine, p in zip(copies, ours, strict=True):
            mine.grad = p.grad.float()

    class AdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            hand_over()
            super().step()

    def with_gradients() -> torch.Tensor:
        with torch.no_grad():
            for mine, p in zip(copies, ours, strict=True):
                p.copy_(mine)
        model.zero_grad()
        loss = closure()
        hand_over()
        return loss

    if is_within:
        result = audit(model, AdamW(copies), closure)
        assert "its gradient is made within the step" in str(result)
    else:
        result = audit(model, torch.optim.AdamW(copies), with_gradients)
        assert sum(row.is_checked for row in result.rows) == 6
    assert result.passed


def test_a_rate_that_is_none_promises_nothing() -> None:
    model, closure = mlp()
    result = audit(model, Adafactor(model.parameters()), closure)  # which makes its own rate
    assert result.passed and "its settings have no lr" in str(result)


def test_a_lost_l2_decay_is_told_in_words() -> None:
    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["weight_decay"] = 0.0
            super().step()
            self.param_groups[0]["weight_decay"] = 0.1

    model, closure = mlp()
    result = audit(model, SGD(model.parameters(), lr=0.1, weight_decay=0.1), closure)
    assert "0.0100 of the weight less decay" in str(result)


def test_a_parameter_without_gradient_is_not_accused() -> None:
    model, closure = mlp()
    spare = nn.Linear(3, 3)
    model.register_module("spare", spare)
    model.forward = partial(nn.Sequential.forward, nn.Sequential(*list(model)[:5]))
    assert audit(model, torch.optim.AdamW(model.parameters()), closure).passed


def test_the_auditor_follows_a_users_own_loop() -> None:
    model, closure = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    auditor = Auditor(model, [optimizer])
    for _ in range(3):
        optimizer.zero_grad()
        closure()
        auditor.before(optimizer)
        optimizer.step()
        auditor.after(optimizer)
    assert auditor.result().passed and auditor.steps == 3
