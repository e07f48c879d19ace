"""Optimizers that do what their names say, and optimizers that do not, each with a model to step.

Every entry makes a model, its optimizer (or several) and a closure that draws a new batch at every
call. The sabotaged ones are named after the class that they pretend to be; most of them were real
bugs somewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import pytorch_optimizer as others
import schedulefree
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from kappascope.lab import optimizers as ours
from kappascope.matrix.orthogonal import orthogonalized
from kappascope.monitor.promises import iteration_schedule


class Specimen(NamedTuple):
    model: nn.Module
    optimizer: Any
    closure: Callable[[], Tensor]


HONEST: dict[str, Callable[[], Specimen]] = {}
SABOTAGED: dict[str, Callable[[], Specimen]] = {}


# --- models ---------------------------------------------------------------------------------------


def batches(model: nn.Module, inputs: Callable[[], Tensor], classes: int) -> Callable[[], Tensor]:
    def closure() -> Tensor:
        x = inputs()
        logits = model(x).float().flatten(0, -2)
        loss = functional.cross_entropy(logits, torch.randint(classes, (len(logits),)))
        loss.backward()
        return loss

    return closure


def mlp(dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    layers = nn.Linear(20, 48), nn.ReLU(), nn.Linear(48, 32), nn.Tanh(), nn.Linear(32, 10)
    model = nn.Sequential(*layers).to(dtype)
    return model, batches(model, lambda: torch.randn(64, 20, dtype=dtype), 10)


def conv() -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    body = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=2)
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    return model, batches(model, lambda: torch.randn(16, 3, 9, 9), 5)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, is_fused: bool) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        if is_fused:
            self.c_attn = nn.Linear(width, 3 * width, bias=False)
        else:
            for part in "qkv":
                setattr(self, f"{part}_proj", nn.Linear(width, width, bias=False))
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = (self.q_proj(x), self.k_proj(x), self.v_proj(x)) if not self.is_fused else (
            self.c_attn(x).chunk(3, -1)
        )  # fmt: skip
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, is_fused: bool) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = Attention(width, heads, is_fused)
        up, down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.mlp = nn.ModuleDict({"c_fc": up, "c_proj": down})
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x)))
        return x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    """A small GPT whose head is its embedding."""

    def __init__(self, width: int = 32, heads: int = 4, is_fused: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(60, width), nn.Embedding(24, width)
        self.h = nn.ModuleList(Block(width, heads, is_fused) for _ in range(2))
        self.ln_f = nn.LayerNorm(width)
        self.lm_head = nn.Linear(width, 60, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight[: tokens.shape[1]]
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


def gpt(
    is_fused: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[nn.Module, Callable[[], Tensor]]:
    torch.manual_seed(0)
    model = GPT(is_fused=is_fused).to(dtype)
    return model, batches(model, lambda: torch.randint(60, (8, 24)), 60)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    """The hidden matrices: what Muon is for."""
    named = model.named_parameters()
    return [p for name, p in named if p.ndim == 2 and "wte" not in name and "wpe" not in name]


def others_than(model: nn.Module, taken: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    ids = {id(p) for p in taken}
    return [p for p in model.parameters() if id(p) not in ids]


# --- hand-written optimizers, whose every part can be sabotaged -----------------------------------


class ByHand(Optimizer):
    """An optimizer of one method, ``move``, of a parameter, its gradient, state and group."""

    defaults_of: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {**self.defaults_of, **settings})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] = self.state[p].get("step", 0) + 1
                    self.move(p, p.grad, self.state[p], group)

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        raise NotImplementedError


ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
MUON = {"lr": 0.02, "momentum": 0.95, "nesterov": True, "ns_steps": 5, "weight_decay": 0.1}


class HandAdam(ByHand):
    """AdamW, with L2 decay instead if ``is_coupled``."""

    defaults_of = ADAM
    is_coupled = False
    has_bias_correction = True
    is_eps_inside = False
    decays = 1

    def betas(self, group: dict[str, Any]) -> tuple[float, float]:
        return group["betas"]

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        (b1, b2), lr, t = self.betas(group), group["lr"], state["step"]
        decay = group["weight_decay"] * self.decays
        g = g + decay * p if self.is_coupled else g
        p.mul_(1.0 if self.is_coupled else 1 - lr * decay)
        m = state["exp_avg"] = b1 * state.get("exp_avg", 0.0) + (1 - b1) * g
        v = state["exp_avg_sq"] = b2 * state.get("exp_avg_sq", 0.0) + (1 - b2) * g * g
        if self.has_bias_correction:
            m, v = m / (1 - b1**t), v / (1 - b2**t)
        root = (v + group["eps"]).sqrt() if self.is_eps_inside else v.sqrt() + group["eps"]
        p.sub_(lr * m / root)


class HandMuon(ByHand):
    """Keller Jordan's Muon for 2-D parameters; the others are stepped by AdamW."""

    defaults_of = MUON
    iterations = 5

    def averaged(self, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> Tensor:
        mu = group["momentum"]
        buffer = state["momentum_buffer"] = torch.lerp(
            g, state.get("momentum_buffer", torch.zeros_like(g)), mu
        )
        return g.lerp(buffer, mu) if group["nesterov"] else buffer

    def orthogonal(self, average: Tensor, group: dict[str, Any]) -> Tensor:
        return orthogonalized(
            average.flatten(1), iteration_schedule({"ns_steps": self.iterations})
        ).view_as(average)

    def scale(self, p: Tensor) -> float:
        return max(1.0, len(p) / p[0].numel()) ** 0.5

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        p.mul_(1 - group["lr"] * group["weight_decay"])
        update = self.orthogonal(self.averaged(g, state, group), group)
        p.sub_(update, alpha=group["lr"] * self.scale(p))


class HandMuonWithAdam(HandMuon):
    """Groups with ``use_muon`` false are stepped by AdamW, as in ``MuonWithAuxAdam``."""

    def move(self, p: Tensor, g: Tensor, state: dict[str, Any], group: dict[str, Any]) -> None:
        move = super().move if group["use_muon"] else partial(HandAdam.move, _ADAM_RULES)
        move(p, g, state, group)


_ADAM_RULES = HandAdam([nn.Parameter(torch.zeros(1))])


def named(name: str, kind: type[Optimizer], **changes: Any) -> type[Any]:
    """A class of another name, with some of its parts exchanged."""
    return type(name, (kind,), changes)


# --- honest ---------------------------------------------------------------------------------------


def honest(make: Callable[[], Specimen]) -> Callable[[], Specimen]:
    HONEST[make.__name__] = make
    return make


def _torch(kind: str, make_model: Any, **settings: Any) -> Specimen:
    model, closure = make_model()
    return Specimen(model, getattr(torch.optim, kind)(model.parameters(), **settings), closure)


TORCH: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sgd": ("SGD", mlp, {"lr": 0.1}),
    "sgd_momentum": ("SGD", gpt, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4}),
    "sgd_nesterov": ("SGD", conv, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "sgd_dampening": ("SGD", mlp, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}),
    "sgd_foreach": ("SGD", mlp, {"lr": 0.1, "momentum": 0.9, "foreach": True}),
    "sgd_fused": ("SGD", mlp, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "sgd_bf16": ("SGD", partial(mlp, torch.bfloat16), {"lr": 0.1, "momentum": 0.9}),
    "adam": ("Adam", mlp, {}),
    "adam_l2": ("Adam", gpt, {"weight_decay": 0.1}),
    "adam_decoupled": ("Adam", mlp, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adam_amsgrad": ("Adam", conv, {"amsgrad": True, "maximize": True}),
    "adam_fused": ("Adam", gpt, {"fused": True, "weight_decay": 0.01}),
    "adamw": ("AdamW", gpt, {"weight_decay": 0.1}),
    "adamw_foreach": ("AdamW", conv, {"foreach": True, "betas": (0.8, 0.95)}),
    "adamw_tensor_lr": ("AdamW", mlp, {"lr": torch.tensor(3e-4), "amsgrad": True}),
    "adamw_bf16": ("AdamW", partial(mlp, torch.bfloat16), {"lr": 1e-2}),
    "adamw_bf16_gpt": ("AdamW", partial(gpt, True, torch.bfloat16), {}),
    "adamw_float64": ("AdamW", partial(mlp, torch.float64), {}),
    "adamax": ("Adamax", mlp, {"weight_decay": 0.01}),
    "nadam": ("NAdam", gpt, {"decoupled_weight_decay": True, "weight_decay": 0.05}),
    "nadam_l2": ("NAdam", mlp, {"weight_decay": 0.05}),
    "radam": ("RAdam", gpt, {"betas": (0.9, 0.9)}),
    "radam_decoupled": ("RAdam", mlp, {"decoupled_weight_decay": True, "weight_decay": 0.05}),
    "rmsprop": ("RMSprop", conv, {}),
    "rmsprop_centered": ("RMSprop", mlp, {"centered": True, "momentum": 0.9, "weight_decay": 0.01}),
    "adagrad": ("Adagrad", mlp, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    "adadelta": ("Adadelta", conv, {"weight_decay": 0.01}),
    "adafactor": ("Adafactor", gpt, {"weight_decay": 0.1}),
    "asgd": ("ASGD", mlp, {}),
    "rprop": ("Rprop", mlp, {}),
}
HONEST |= {name: partial(_torch, kind, make, **s) for name, (kind, make, s) in TORCH.items()}


@honest
def muon() -> Specimen:
    model, closure = gpt()
    return Specimen(model, torch.optim.Muon(matrices(model), lr=0.02), closure)


@honest
def muon_matched_and_adamw() -> Specimen:
    model, closure = gpt(is_fused=True)
    muon = torch.optim.Muon(matrices(model), adjust_lr_fn="match_rms_adamw", nesterov=False)
    rest = torch.optim.AdamW(others_than(model, matrices(model)))
    return Specimen(model, [muon, rest], closure)


@honest
def muon_of_the_laboratory() -> Specimen:
    model, closure = gpt()
    return Specimen(model, ours.Muon(matrices(model), lr=0.02), closure)


@honest
def muon_by_hand() -> Specimen:
    model, closure = gpt()
    hidden = matrices(model)
    groups = [
        {"params": hidden, "use_muon": True},
        {"params": others_than(model, hidden), "use_muon": False, **ADAM},
    ]
    return Specimen(model, named("MuonWithAuxAdam", HandMuonWithAdam)(groups), closure)


class PerHead(HandMuon):
    """Newton and Schulz for the rows of every head."""

    def orthogonal(self, average: Tensor, group: dict[str, Any]) -> Tensor:
        pieces = average.chunk(group["num_heads"])
        return torch.cat([orthogonalized(piece) for piece in pieces])


@honest
def muon_per_head() -> Specimen:
    model, closure = gpt()
    queries = [block.attn.q_proj.weight for block in model.h]
    return Specimen(model, named("Muon", PerHead)(queries, num_heads=4), closure)


@honest
def muon_of_fused_parts() -> Specimen:
    class Muon(HandMuon):
        def orthogonal(self, average: Tensor, group: dict[str, Any]) -> Tensor:
            return torch.cat([orthogonalized(piece) for piece in average.chunk(3)])

    model, closure = gpt(is_fused=True)
    fused = [block.attn.c_attn.weight for block in model.h]
    return Specimen(model, Muon(fused, split_qkv=True), closure)


@honest
def muon_of_micro_batches() -> Specimen:
    model, closure = gpt()
    return Specimen(
        model, torch.optim.Muon(matrices(model)), lambda: sum(closure() for _ in range(3))
    )


@honest
def adam_by_hand() -> Specimen:
    model, closure = mlp()
    kind = named("Adam", HandAdam, is_coupled=True)
    return Specimen(model, kind(model.parameters(), weight_decay=0.1), closure)


@honest
def frozen_layers_and_groups() -> Specimen:
    model, closure = gpt()
    model.h[0].requires_grad_(requires_grad=False)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0, "lr": 1e-4},
    ]
    return Specimen(model, torch.optim.AdamW(groups), closure)


@honest
def clipped_and_scheduled() -> Specimen:
    model, closure = gpt()
    optimizer = torch.optim.AdamW(model.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer)

    def clipped() -> Tensor:
        loss = closure()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return loss

    optimizer.schedule = schedule
    return Specimen(model, optimizer, clipped)


@honest
def in_the_middle_of_a_run() -> Specimen:
    model, closure = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    for _ in range(3):
        optimizer.zero_grad()
        closure()
        optimizer.step()
    return Specimen(model, optimizer, closure)


@honest
def schedule_free() -> Specimen:
    model, closure = mlp()
    optimizer = schedulefree.AdamWScheduleFree(model.parameters())
    optimizer.train()
    return Specimen(model, optimizer, closure)


@honest
def sparse_adam() -> Specimen:
    torch.manual_seed(0)
    table = nn.Embedding(30, 8, sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())

    def closure() -> Tensor:
        loss = (table(torch.randint(30, (7,))) * torch.randn(7, 8)).sum()
        loss.backward()
        return loss

    return Specimen(table, optimizer, closure)


OTHERS = (
    "lion",
    "lamb",
    "adabelief",
    "adan",
    "radam",
    "adopt",
    "sgdw",
    "tiger",
    "ademamix",
    "soap",
)


def _other(name: str) -> Specimen:
    model, closure = mlp()
    return Specimen(model, others.load_optimizer(name)(model.parameters()), closure)


HONEST |= {f"pytorch_optimizer_{name}": partial(_other, name) for name in OTHERS}


@honest
def pytorch_optimizer_muon() -> Specimen:
    model, closure = gpt()
    hidden = matrices(model)
    groups = [
        {"params": hidden, "use_muon": True, "weight_decay": 0.1},
        {"params": others_than(model, hidden), "use_muon": False},
    ]
    return Specimen(model, others.Muon(groups), closure)


# --- sabotaged ------------------------------------------------------------------------------------


def sabotaged(make: Callable[[], Specimen]) -> Callable[[], Specimen]:
    SABOTAGED[make.__name__] = make
    return make


def _false_muon(kind: type[Optimizer], **settings: Any) -> Specimen:
    model, closure = gpt()
    return Specimen(model, kind(matrices(model), **settings), closure)


def _false(kind: type[Optimizer], **settings: Any) -> Specimen:
    model, closure = mlp()
    return Specimen(model, kind(model.parameters(), **settings), closure)


@sabotaged
def muon_that_runs_as_sgd() -> Specimen:
    return _false_muon(named("Muon", torch.optim.SGD), lr=0.02, momentum=0.95, nesterov=True)


@sabotaged
def muon_that_runs_as_adamw() -> Specimen:
    return _false_muon(named("Muon", HandAdam), momentum=0.95)


@sabotaged
def muon_that_wraps_sgd() -> Specimen:
    class Muon:
        def __init__(self, optimizer: Optimizer) -> None:
            self.optimizer, self.param_groups = optimizer, optimizer.param_groups

        def step(self) -> None:
            self.optimizer.step()

    model, closure = gpt()
    return Specimen(model, Muon(torch.optim.SGD(matrices(model), lr=0.02, momentum=0.9)), closure)


@sabotaged
def muon_for_the_wrong_group() -> Specimen:
    class MuonWithAuxAdam(HandMuonWithAdam):
        def move(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
            wrong = group["use_muon"] and p is not group["params"][0]
            super().move(p, g, state, {**group, **ADAM, "use_muon": False} if wrong else group)

    model, closure = gpt()
    groups = [{"params": matrices(model), "use_muon": True}]
    return Specimen(model, MuonWithAuxAdam(groups), closure)


@sabotaged
def muon_per_micro_batch() -> Specimen:
    class Muon(HandMuon):
        def __init__(self, params: Any) -> None:
            super().__init__(params)
            for p in self.param_groups[0]["params"]:
                p.register_post_accumulate_grad_hook(self.take)

        @torch.no_grad()
        def take(self, p: Tensor) -> None:
            group, state = self.param_groups[0], self.state[p]
            update = self.orthogonal(
                self.averaged(p.grad - state.get("seen", 0.0), state, group), group
            )
            state["sum"] = state.get("sum", 0.0) + update
            state["seen"] = p.grad.clone()

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            group = self.param_groups[0]
            for p in group["params"]:
                state = self.state[p]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(state.pop("sum"), alpha=group["lr"] * self.scale(p) / 2)
                del state["seen"]

    model, closure = gpt()
    return Specimen(model, Muon(matrices(model)), lambda: sum(closure() for _ in range(2)))


@sabotaged
def muon_that_normalises_its_momentum_in_place() -> Specimen:
    def averaged(self: HandMuon, g: Tensor, state: Any, group: Any) -> Tensor:
        average = HandMuon.averaged(self, g, state, group)
        state["momentum_buffer"] /= state["momentum_buffer"].norm()
        return average

    return _false_muon(named("Muon", HandMuon, averaged=averaged))


def torch_normalises_momentum() -> bool:
    """Whether torch's Muon has the bug pytorch#190597: it changes its momentum in bfloat16."""
    weight = nn.Parameter(torch.zeros(2, 3, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.Muon([weight], momentum=0.5, nesterov=False)
    optimizer.step()
    return bool(optimizer.state[weight]["momentum_buffer"][0, 0] != 0.5)


if torch_normalises_momentum():

    @sabotaged
    def muon_of_torch_in_bfloat16() -> Specimen:
        model, closure = mlp(dtype=torch.bfloat16)
        kind = torch.optim.Muon
        return Specimen(model, kind(matrices(model), lr=0.3, nesterov=False), closure)


@sabotaged
def muon_without_nesterov() -> Specimen:
    def averaged(self: HandMuon, g: Tensor, state: Any, group: Any) -> Tensor:
        return HandMuon.averaged(self, g, state, {**group, "nesterov": False})

    return _false_muon(named("Muon", HandMuon, averaged=averaged))


@sabotaged
def muon_without_momentum() -> Specimen:
    return _false_muon(named("Muon", HandMuon, averaged=lambda self, g, state, group: g))


@sabotaged
def muon_with_too_few_iterations() -> Specimen:
    return _false_muon(named("Muon", HandMuon, iterations=2))


@sabotaged
def muon_without_decay() -> Specimen:
    def move(self: HandMuon, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        HandMuon.move(self, p, g, state, {**group, "weight_decay": 0.0})

    return _false_muon(named("Muon", HandMuon, move=move))


@sabotaged
def muon_of_another_size() -> Specimen:
    def scale(self: HandMuon, p: Tensor) -> float:
        return 0.2 * max(p.shape) ** 0.5

    return _false_muon(named("Muon", HandMuon, scale=scale), adjust_lr_fn="original")


@sabotaged
def muon_per_head_on_the_wrong_axis() -> Specimen:
    def orthogonal(self: HandMuon, average: Tensor, group: Any) -> Tensor:
        pieces = average.chunk(group["num_heads"], dim=1)
        return torch.cat([orthogonalized(piece) for piece in pieces], 1)

    model, closure = gpt()
    queries = [block.attn.q_proj.weight for block in model.h]
    return Specimen(
        model, named("Muon", HandMuon, orthogonal=orthogonal)(queries, num_heads=4), closure
    )


@sabotaged
def muon_of_the_whole_where_parts_are_promised() -> Specimen:
    model, closure = gpt(is_fused=True)
    fused = [block.attn.c_attn.weight for block in model.h]
    return Specimen(model, named("Muon", HandMuon)(fused, split_qkv=True), closure)


@sabotaged
def adam_without_bias_correction() -> Specimen:
    return _false(named("AdamW", HandAdam, has_bias_correction=False))


@sabotaged
def adam_with_epsilon_inside_the_root() -> Specimen:
    return _false(named("Adam", HandAdam, is_eps_inside=True))


@sabotaged
def adam_with_swapped_betas() -> Specimen:
    return _false(named("Adam", HandAdam, betas=lambda self, group: group["betas"][::-1]))


@sabotaged
def adamw_with_coupled_decay() -> Specimen:
    return _false(named("AdamW", HandAdam, is_coupled=True), weight_decay=0.01)


@sabotaged
def adam_with_decoupled_decay() -> Specimen:
    return _false(named("Adam", HandAdam), weight_decay=0.01)


@sabotaged
def adamw_without_decay() -> Specimen:
    return _false(named("AdamW", HandAdam, decays=0), weight_decay=0.01)


@sabotaged
def adamw_that_decays_twice() -> Specimen:
    return _false(named("AdamW", HandAdam, decays=2), weight_decay=0.01)


@sabotaged
def adamw_with_ten_times_the_rate() -> Specimen:
    def move(self: HandAdam, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
        HandAdam.move(self, p, g, state, {**group, "lr": 10 * group["lr"]})

    return _false(named("AdamW", HandAdam, move=move))


@sabotaged
def adamw_that_uses_the_first_groups_rate() -> Specimen:
    class AdamW(HandAdam):
        def move(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
            super().move(p, g, state, {**group, "lr": self.param_groups[0]["lr"]})

    model, closure = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2:].parameters(), "lr": 1e-4}]
    return Specimen(model, AdamW(groups), closure)


@sabotaged
def sgd_without_nesterov() -> Specimen:
    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["nesterov"] = False
            super().step()
            for group in self.param_groups:
                group["nesterov"] = True

    return _false(SGD, lr=0.1, momentum=0.9, nesterov=True)


@sabotaged
def sgd_that_turns_half_of_the_rows() -> Specimen:
    class SGD(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.grad[::2] *= -1
            super().step()
            for p in self.param_groups[0]["params"]:
                p.grad[::2] *= -1

    return _false(SGD, lr=0.1, momentum=0.9)


@sabotaged
def adamw_that_steps_twice() -> Specimen:
    class AdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            super().step()
            super().step()

    return _false(AdamW)


@sabotaged
def two_optimizers_for_one_weight() -> Specimen:
    model, closure = mlp()
    both = torch.optim.AdamW(model.parameters()), torch.optim.SGD(model[0].parameters(), lr=0.1)
    return Specimen(model, both, closure)


@sabotaged
def a_layer_that_nobody_steps() -> Specimen:
    model, closure = mlp()
    kept = [*model[0].parameters(), *model[4].parameters()]
    return Specimen(model, torch.optim.AdamW(kept), closure)


@sabotaged
def adamw_that_moves_what_is_frozen() -> Specimen:
    class AdamW(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            super().step()
            for p in self.param_groups[0]["params"]:
                p.mul_(1 - 1e-4) if not p.requires_grad else None

    model, closure = mlp()
    model[0].requires_grad_(requires_grad=False)
    return Specimen(model, AdamW(model.parameters()), closure)


@sabotaged
def adamw_that_forgets_a_layer() -> Specimen:
    class AdamW(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:
            left_out = self.param_groups[0]["params"][2]
            gradient, left_out.grad = left_out.grad, None
            super().step()
            left_out.grad = gradient

    return _false(AdamW)


@sabotaged
def rmsprop_that_sums_squares() -> Specimen:
    class RMSprop(ByHand):
        defaults_of = {"lr": 0.01, "alpha": 0.99, "eps": 1e-8}  # noqa: RUF012

        def move(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
            state["square_avg"] = state.get("square_avg", 0.0) + (1 - group["alpha"]) * g * g
            p.sub_(group["lr"] * g / (state["square_avg"].sqrt() + group["eps"]))

    return _false(RMSprop)


@sabotaged
def lion_with_one_beta() -> Specimen:
    class Lion(ByHand):
        defaults_of = {"lr": 1e-4, "betas": (0.9, 0.99)}  # noqa: RUF012

        def move(self, p: Tensor, g: Tensor, state: Any, group: Any) -> None:
            beta = group["betas"][1]
            state["exp_avg"] = beta * state.get("exp_avg", torch.zeros_like(g)) + (1 - beta) * g
            p.sub_(group["lr"] * state["exp_avg"].sign())

    return _false(Lion)
