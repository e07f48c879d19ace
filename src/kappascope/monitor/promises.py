"""What the class name and the settings of an optimizer promise: its update, from gradients alone.

Each family is one short function of settings, state, weight and gradient, written from the
published formula and independent of any optimizer's code. It returns the step that is to come,
without decoupled weight decay. Where honest implementations differ (epsilon inside or beside the
bias correction, how Muon scales its learning rate) it returns all of them by name, and one of them
has to come at every step.

State has the names of torch's optimizers, so that an audit can begin in the middle of a run.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from kappascope.matrix import spectra
from kappascope.matrix.orthogonal import MUON, Coefficients, orthogonalized

T = TypeVar("T", bound=Tensor | None)
Settings: TypeAlias = Mapping[str, Any]


class Candidate(NamedTuple):
    """An update that may come, and what of it is left open by what was promised.

    ``slack`` is a share of its size; ``projected`` takes a difference to the directions in which
    something was promised.
    """

    update: Tensor
    slack: float = 0.0
    projected: Callable[[Tensor], Tensor] = lambda difference: difference


Candidates: TypeAlias = dict[str, Candidate]


class Unpromised(Exception):  # noqa: N818 - nothing has failed: there is only nothing to check
    """Name and settings leave open what the update of this parameter is."""


class State(dict[str, Any]):
    """The memory of one parameter's update, begun by the optimizer's own where it has one.

    ``time`` is the number of the step, from one; ``is_exact`` says that nothing is to be rounded
    but float64; ``undecided`` marks the entries of the last update whose sign depends on rounding.
    """

    def __init__(self, begun: Mapping[str, Any] | None = None) -> None:
        super().__init__(begun or {})
        self.is_exact = True
        self.is_begun = any(isinstance(value, Tensor) and value.ndim for value in self.values())
        self.time: Any = self.pop("step", 0)
        self.undecided: Tensor | None = None

    def kept(self, name: str, start: T) -> Tensor | T:
        """What is remembered under a name, or what it starts from.

        >>> State().kept("exp_avg", torch.zeros(1))
        tensor([0.])
        """
        if self.is_begun and self.get(name) is None:
            raise Unpromised(f"its state has no {name}; audit it before its first step")
        value = self.get(name)
        return start if value is None else value


Update: TypeAlias = Callable[[Settings, State, Tensor, Tensor], Candidates]


@dataclass(frozen=True)
class Promise:
    """The update that a class name stands for, and whether its weight decay is decoupled."""

    name: str
    update: Update
    is_decoupled: bool

    def decay(self, settings: Settings) -> tuple[float, float]:
        """The weight decay that joins the gradient, and the share that is taken off the weight.

        >>> promises()["AdamW"].decay({"lr": 0.1, "weight_decay": 0.5})
        (0.0, 0.05)
        """
        rate = float(settings.get("weight_decay", settings.get("wd", 0.0)) or 0.0)
        said = settings.get("decoupled_weight_decay", settings.get("weight_decouple"))
        if not (self.is_decoupled if said is None else said):
            return rate, 0.0
        return 0.0, rate * (1.0 if settings.get("fixed_decay") else settings["lr"])

    def steps(
        self, settings: Settings, state: State, weight: Tensor, gradient: Tensor
    ) -> tuple[Candidates, Tensor]:
        """What may come at this step, with decay, and the decay alone; the state moves on.

        >>> weight, gradient = torch.ones(1), torch.tensor([2.0])
        >>> steps, _ = promises()["SGD"].steps({"lr": 0.5}, State(), weight, gradient)
        >>> steps[""].update
        tensor([-1.])
        """
        state.time = state.time + 1
        state.undecided = None
        coupled, share = self.decay(settings)
        gradient = -gradient if settings.get("maximize") else gradient
        gradient = gradient + coupled * weight if coupled else gradient
        shrunk = -share * weight
        try:
            candidates = self.update(settings, state, weight, gradient)
        except (KeyError, TypeError, ValueError) as error:  # another's optimizer of this name
            what = f"no {error.args[0]}" if isinstance(error, KeyError) else str(error)
            raise Unpromised(f"its settings are not those of {self.name}: {what}") from error
        if candidates.pop(UNMOVED, None):  # no step, and no decay either
            return {"": Candidate(torch.zeros_like(weight))}, torch.zeros_like(weight)
        return {
            name: s._replace(update=s.update + shrunk) for name, s in candidates.items()
        }, shrunk


UNMOVED = "unmoved"
_PROMISES: dict[str, Promise] = {}


def promises() -> Mapping[str, Promise]:
    """Every class name that promises an update.

    >>> sorted(promises())[:4]
    ['ASGD', 'Adadelta', 'Adafactor', 'Adagrad']
    """
    return _PROMISES


def _promised_by(*names: str, is_decoupled: bool = False) -> Callable[[Update], Update]:
    def register(update: Update) -> Update:
        _PROMISES.update({name: Promise(name, update, is_decoupled) for name in names})
        return update

    return register


# Settings that change a formula in ways that no function below knows.
VARIANTS = (
    "cautious",
    "adanorm",
    "use_gc",
    "adam_debias",
    "orthograd",
    "stable_adamw",
    "kahan_sum",
)


def promise_of(optimizer: object, settings: Settings) -> Promise:
    """The promise of a class by its own name, or by that of a class of torch's that it extends.

    What extends the optimizer of another package under a name of its own is a variant of it, which
    promises nothing that is known here.

    >>> promise_of(torch.optim.AdamW([torch.ones(1)]), {"lr": 0.1}).name
    'AdamW'
    """
    kinds = type(optimizer).__mro__
    candidates = [kinds[0], *(kind for kind in kinds if kind.__module__.startswith("torch.optim"))]
    promise = next(filter(None, (_named(kind.__name__) for kind in candidates)), None)
    if promise is None:
        raise Unpromised(f"{kinds[0].__name__} is no optimizer that is known here")
    if settings.get("lr") is None:  # as transformers' Adafactor, which makes its own
        raise Unpromised("its settings have no lr")
    if getattr(getattr(optimizer, "args", None), "optim_bits", 32) < 32:  # bitsandbytes'
        raise Unpromised("what it keeps in 8 bits is rounded in a way that is not known here")
    if variants := [key for key in VARIANTS if settings.get(key)]:
        raise Unpromised(f"what {', '.join(variants)} makes of {promise.name} is not known here")
    return promise


_MUONS = re.compile(
    r"(SingleDevice|Distributed|Torch|Fused|Hybrid)?Muon((With|And|Plus)?(Aux)?AdamW?)?(Optimizer)?"
)


def _named(name: str) -> Promise | None:
    return _PROMISES.get("Muon" if _MUONS.fullmatch(name) else name.removesuffix("Optimizer"))


# --- one function a family ------------------------------------------------------------------------


def _mixed(old: Tensor, new: Tensor, share: float) -> Tensor:
    """An exponential average, of which ``share`` stays."""
    return share * old + (1 - share) * new


@_promised_by("SGD")
def _sgd(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    mu = s["momentum"] if "momentum" in s else s.get("betas", (0.0,))[0]  # as bitsandbytes has it
    if not mu:
        return {"": Candidate(-s["lr"] * g)}
    old = state.kept("momentum_buffer", None)
    buffer = g if old is None else mu * old + (1 - s.get("dampening", 0.0)) * g
    state["momentum_buffer"] = buffer
    return {"": Candidate(-s["lr"] * (g + mu * buffer if s.get("nesterov") else buffer))}


_promised_by("SGDW", is_decoupled=True)(_sgd)


@_promised_by("Adam")
def _adam(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    beta1, beta2 = s.get("betas", s.get("adamw_betas", (0.9, 0.999)))
    eps = s.get("eps", s.get("adamw_eps", 1e-8))
    zero = torch.zeros_like(g)
    m = state["exp_avg"] = _mixed(state.kept("exp_avg", zero), g, beta1)
    v = state["exp_avg_sq"] = _mixed(state.kept("exp_avg_sq", zero), g * g, beta2)
    if s.get("amsgrad"):
        v = state["max_exp_avg_sq"] = torch.maximum(state.kept("max_exp_avg_sq", zero), v)
    first, second = 1 - beta1**state.time, (1 - beta2**state.time) ** 0.5
    return {
        "": Candidate(-s["lr"] / first * m / (v.sqrt() / second + eps)),
        # the paper's more efficient order: epsilon is not corrected
        "epsilon uncorrected": Candidate(-s["lr"] * second / first * m / (v.sqrt() + eps)),
    }


_promised_by("AdamW", is_decoupled=True)(_adam)


@_promised_by("SparseAdam")
def _sparse_adam(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    touched = s.get("touched")  # entries in rows that the sparse gradient has
    if touched is None or not touched.any():
        state.time -= touched is not None
        return {"": Candidate(torch.zeros_like(g))}
    zero = torch.zeros_like(g)
    old = state.kept("exp_avg", zero), state.kept("exp_avg_sq", zero)
    steps = _adam({**s, "amsgrad": False}, state, weight, g)
    for name, before in zip(("exp_avg", "exp_avg_sq"), old, strict=True):
        state[name] = torch.where(touched, state[name], before)
    return {"": Candidate(torch.where(touched, steps["epsilon uncorrected"].update, 0.0))}


@_promised_by("Adamax")
def _adamax(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    beta1, beta2 = s["betas"]
    zero = torch.zeros_like(g)
    m = state["exp_avg"] = _mixed(state.kept("exp_avg", zero), g, beta1)
    largest = torch.maximum(beta2 * state.kept("exp_inf", zero), g.abs() + s["eps"])
    state["exp_inf"] = largest
    return {"": Candidate(-s["lr"] / (1 - beta1**state.time) * m / largest)}


@_promised_by("NAdam")
def _nadam(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    (beta1, beta2), t = s["betas"], state.time
    speed = s["momentum_decay"]
    zero = torch.zeros_like(g)
    m = state["exp_avg"] = _mixed(state.kept("exp_avg", zero), g, beta1)
    v = state["exp_avg_sq"] = _mixed(state.kept("exp_avg_sq", zero), g * g, beta2)
    mu, ahead = (beta1 * (1 - 0.5 * 0.96 ** (i * speed)) for i in (t, t + 1))
    product = state["mu_product"] = state.get("mu_product", 1.0) * mu
    denominator = (v / (1 - beta2**t)).sqrt() + s["eps"]
    now, momentum = (1 - mu) / (1 - product) * g, ahead / (1 - product * ahead) * m
    return {"": Candidate(-s["lr"] * (now + momentum) / denominator)}


@_promised_by("RAdam")
def _radam(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    (beta1, beta2), t = s["betas"], float(state.time)
    zero = torch.zeros_like(g)
    m = state["exp_avg"] = _mixed(state.kept("exp_avg", zero), g, beta1)
    v = state["exp_avg_sq"] = _mixed(state.kept("exp_avg_sq", zero), g * g, beta2)
    first, second = 1 - beta1**state.time, 1 - beta2**state.time
    limit = 2 / (1 - beta2) - 1
    length = limit - 2 * t * beta2**t / (1 - beta2**t)
    if length <= s.get("n_sma_threshold", 5.0):  # too few steps to know the variance
        if not s.get("degenerated_to_sgd", True):
            return {UNMOVED: Candidate(zero)}
        return {"": Candidate(-s["lr"] / first * m)}
    top, bottom = (length - 4) * (length - 2) * limit, (limit - 4) * (limit - 2) * length
    return {
        "": Candidate(
            -s["lr"] * (top / bottom) ** 0.5 / first * m * second**0.5 / (v.sqrt() + s["eps"])
        )
    }


@_promised_by("RMSprop")
def _rmsprop(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    zero, alpha = torch.zeros_like(g), s["alpha"]
    v = state["square_avg"] = _mixed(state.kept("square_avg", zero), g * g, alpha)
    if s.get("centered"):
        mean = state["grad_avg"] = _mixed(state.kept("grad_avg", zero), g, alpha)
        v = v - mean * mean
    step = g / (v.sqrt() + s["eps"])
    if mu := s.get("momentum", 0.0):
        step = mu * state.kept("momentum_buffer", zero) + step
        state["momentum_buffer"] = step
    return {"": Candidate(-s["lr"] * step)}


@_promised_by("Adagrad")
def _adagrad(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    start = torch.full_like(g, s.get("initial_accumulator_value", 0.0))
    total = state["sum"] = state.kept("sum", start) + g * g
    rate = s["lr"] / (1 + (state.time - 1) * s.get("lr_decay", 0.0))
    return {"": Candidate(-rate * g / (total.sqrt() + s.get("eps", 1e-10)))}


@_promised_by("Adadelta")
def _adadelta(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    zero, rho, eps = torch.zeros_like(g), s["rho"], s["eps"]
    v = state["square_avg"] = _mixed(state.kept("square_avg", zero), g * g, rho)
    moved = state.kept("acc_delta", zero)
    step = (moved + eps).sqrt() / (v + eps).sqrt() * g
    state["acc_delta"] = _mixed(moved, step * step, rho)
    return {"": Candidate(-s["lr"] * step)}


@_promised_by("Adafactor", is_decoupled=True)
def _adafactor(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    fresh = float(state.time) ** s["beta2_decay"]
    least, smallest_scale = s["eps"]
    least = torch.finfo(s.get("dtype", g.dtype)).eps if least is None else least
    square = g * g
    if g.ndim > 1:
        means = square.mean(-1, keepdim=True), square.mean(-2, keepdim=True)
        for name, mean in zip(("row_var", "col_var"), means, strict=True):
            state[name] = _mixed(state.kept(name, torch.zeros_like(mean)), mean, 1 - fresh)
        rows, columns = state["row_var"], state["col_var"]
        v = rows @ columns / rows.mean(-2, keepdim=True).clamp(min=least)
    else:
        old = state.kept("variance", torch.zeros_like(g))
        v = state["variance"] = _mixed(old, square, 1 - fresh)
    step = g / v.clamp(min=least**2).sqrt()
    scale = max(smallest_scale, float(_root_mean_square(weight)))
    rate = scale * min(s["lr"], float(state.time) ** -0.5)
    return {"": Candidate(-rate * step / max(1.0, float(_root_mean_square(step)) / s["d"]))}


def _root_mean_square(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x) / x.numel() ** 0.5


@_promised_by("Lion", is_decoupled=True)
def _lion(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    beta1, beta2 = s["betas"]
    old = state.kept("exp_avg", torch.zeros_like(g))
    state["exp_avg"] = _mixed(old, g, beta2)
    mixed = _mixed(old, g, beta1)
    precision = torch.finfo(s.get("dtype", g.dtype)).eps
    state.undecided = mixed.abs() <= 8 * precision * (old.abs() + g.abs())
    return {"": Candidate(-s["lr"] * mixed.sign())}


@_promised_by("Rprop")
def _rprop(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    slower, faster = s["etas"]
    last = state.kept("prev", torch.zeros_like(g))
    turned = (g * last).sign()
    factor = torch.where(turned > 0, faster, torch.where(turned < 0, slower, 1.0)).to(g)
    size = state.kept("step_size", torch.full_like(g, s["lr"]))
    size = state["step_size"] = (size * factor).clamp(*s["step_sizes"])
    g = state["prev"] = torch.where(turned < 0, 0.0, g)
    return {"": Candidate(-size * g.sign())}


@_promised_by("ASGD")
def _asgd(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    shrink, lr = s["lambd"], s["lr"]
    rate: Any = state.get("eta", lr)
    state["eta"] = lr / (1 + shrink * lr * state.time) ** s["alpha"]
    return {"": Candidate(-rate * g - shrink * rate * weight)}


# --- Muon -----------------------------------------------------------------------------------------

Partition: TypeAlias = Callable[[Tensor], Sequence[Tensor]]
"""From a tensor to views of the matrices in it, which together are all of it."""


@_promised_by("Muon", is_decoupled=True)
def _muon(s: Settings, state: State, weight: Tensor, g: Tensor) -> Candidates:
    if s.get("use_muon") is False:
        return _adam(s, state, weight, g)
    if g.ndim < 2 and not s.get("use_muon"):
        raise Unpromised("Muon orthogonalises matrices; what else it does is not known here")
    if s.get("use_muon") is None and not s.get("is_hidden", True):
        raise Unpromised("embeddings and heads may have another update under Muon")
    steps: Candidates = {}
    for momentum_kind, momentum in _momenta(s, state, g):
        for matrices, partition in s.get("partitions", {"": _whole}).items():
            for factor in _orthogonal_factors(s, state, momentum, partition):
                for scale in _muon_scales(s, g, partition):
                    kind = "any orthogonal factor" if factor.slack == POLAR_SLACK else ""
                    parts = (momentum_kind, matrices, kind, f"rate x {scale:.4g}")
                    steps[", ".join(filter(None, parts))] = factor._replace(
                        update=-s["lr"] * scale * factor.update
                    )
    return steps


def _momenta(s: Settings, state: State, g: Tensor) -> Iterable[tuple[str, Tensor]]:
    """What is made orthogonal: an average, whose size does not matter.

    Buffers that are sums differ from averages by a factor, unless the audit begins in mid-run.
    """
    mu = s.get("momentum", 0.95)
    is_begun = state.is_begun
    for name, share in (("", 1 - mu), ("summed", 1.0))[: 1 + is_begun]:
        key = "momentum_buffer" + name
        old = state.get(key, state.kept("momentum_buffer", torch.zeros_like(g)))
        state[key] = buffer = mu * old + share * g
        yield name, share * g + mu * buffer if s.get("nesterov", True) else buffer


def _whole(tensor: Tensor) -> Sequence[Tensor]:
    return [tensor.flatten(1)]


# In bfloat16 the order of products moves all singular values of the iteration by 2 per cent.
ITERATION_SLACK = 0.05
POLAR_SLACK = 0.35  # Newton and Schulz's values lie within 0.68 ... 1.21


def _orthogonal_factors(
    s: Settings, state: State, momentum: Tensor, partition: Partition
) -> Iterable[Candidate]:
    """The momentum with every matrix in it made orthogonal.

    Where the settings do not tell the iteration, any orthogonal factor will do, and whatever it
    makes of directions that the momentum does not have.
    """
    factor = momentum.clone(memory_format=torch.contiguous_format)
    dtype = torch.float64 if state.is_exact else torch.bfloat16  # in which Muon iterates
    for piece in partition(factor):
        piece.copy_(orthogonalized(piece.to(dtype), iteration_schedule(s)))
    yield Candidate(factor, ITERATION_SLACK)
    if any(key in s for key in ("ns_steps", "ns_coefficients", "ns_coeffs")):
        return
    factor = momentum.clone(memory_format=torch.contiguous_format)
    sides = []
    for piece in partition(factor):
        u, vt = heard_directions(piece)
        piece.copy_(u @ vt)
        sides.append((u @ u.mT, vt.mT @ vt))

    def projected(difference: Tensor) -> Tensor:
        difference = difference.clone(memory_format=torch.contiguous_format)
        for piece, (left, right) in zip(partition(difference), sides, strict=True):
            piece.copy_(left.to(piece) @ piece @ right.to(piece))
        return difference

    yield Candidate(factor, POLAR_SLACK, projected)


def heard_directions(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """U and V' of the directions U S V' of a matrix that are not lost in rounding.

    >>> u, vt = heard_directions(torch.diag(torch.tensor([9.0, 3.0, 1e-9])))
    >>> (u @ vt).diagonal()
    tensor([1., 1., 0.])
    """
    if not matrix.isfinite().all() or not matrix.any():
        return matrix[:, :0], matrix[:0]
    u, values, vt = spectra.decomposition(matrix.double())
    count = int((values > 0.01 * torch.linalg.vector_norm(values)).sum())
    return u[:, :count].to(matrix), vt[:count].to(matrix)


def iteration_schedule(settings: Settings) -> list[Coefficients]:
    """The coefficients of each step of Newton and Schulz's iteration; the last ones are repeated.

    >>> iteration_schedule({"ns_coefficients": (2, -1.5, 0.5), "ns_steps": 2})
    [(2, -1.5, 0.5), (2, -1.5, 0.5)]
    """
    stated = settings.get("ns_coefficients", settings.get("ns_coeffs")) or MUON
    schedule = [stated] if isinstance(stated[0], int | float) else list(stated)
    return [schedule[min(i, len(schedule) - 1)] for i in range(settings.get("ns_steps", 5))]


def _muon_scales(s: Settings, g: Tensor, partition: Partition) -> set[float]:
    """What the learning rate is multiplied by: the convention that is stated, or any known one."""
    shapes = {(len(g), g[0].numel()), *(tuple(piece.shape) for piece in partition(g))}
    original = {math.sqrt(max(1, rows / columns)) for rows, columns in shapes}
    matched = {0.2 * math.sqrt(max(shape)) for shape in shapes}
    stated = s.get("adjust_lr_fn", s)  # which is itself where nothing is stated
    if stated in (None, "original") or s.get("use_adjusted_lr") is False:
        return original
    if stated == "match_rms_adamw" or s.get("use_adjusted_lr") is True:
        return matched
    spectral = {math.sqrt(rows / columns) for rows, columns in shapes}
    return original | matched | spectral | {1.0, *(max(1, r / c) for r, c in shapes)}
