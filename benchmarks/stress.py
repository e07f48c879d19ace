"""Every correction on many models, optimizers and loops: exact, explained or failed.

A combination is *exact* if attaching changes no output, training goes through, the state dict has
the keys of the plain model, closing changes no bit of the function and leaves no hook, and a run
through files at every step ends at the same bits as one without. It is *explained* if it is refused
in one line, at attach or in a step, or if plain training fails in the same way. Anything else has
*failed*, and is printed.

    OMP_NUM_THREADS=1 python benchmarks/stress.py [--sample N] [--seed S]
"""

import argparse
import copy
import io
import itertools
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from correction_examples import EXAMPLES, FOR_ATTENTION, MODELS, answers, inputs
from kappascope.corrections import Correction
from kappascope.refusal import Refusal

o = torch.optim
OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "SGD": partial(o.SGD, lr=0.05),
    "momentum": partial(o.SGD, lr=0.05, momentum=0.9),
    "Nesterov": partial(o.SGD, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD, foreach": partial(o.SGD, lr=0.05, foreach=True),
    "SGD, fused": partial(o.SGD, lr=0.05, fused=True),
    "SGD, maximize": partial(o.SGD, lr=0.01, maximize=True),
    "Adam": partial(o.Adam, lr=0.01, eps=1e-4),
    "AMSGrad": partial(o.Adam, lr=0.01, eps=1e-4, amsgrad=True),
    "AdamW": partial(o.AdamW, lr=0.01, eps=1e-4),
    "AdamW, fused": partial(o.AdamW, lr=0.01, eps=1e-4, fused=True),
    "AdamW, foreach": partial(o.AdamW, lr=0.01, eps=1e-4, foreach=True),
    "AdamW, lr tensor": lambda p: o.AdamW(p, lr=torch.tensor(0.01), eps=1e-4),
    "Adamax": partial(o.Adamax, lr=0.01, eps=1e-4),
    "NAdam": partial(o.NAdam, lr=0.01, eps=1e-4),
    "RAdam": partial(o.RAdam, lr=0.01, eps=1e-4),
    "RMSprop": partial(o.RMSprop, lr=0.01, eps=1e-4),
    "Rprop": partial(o.Rprop, lr=0.01),
    "Adagrad": partial(o.Adagrad, lr=0.01, eps=1e-4),
    "Adadelta": partial(o.Adadelta, lr=0.5, eps=1e-4),
    "ASGD": partial(o.ASGD, lr=0.01),
    "Adafactor": partial(o.Adafactor, lr=0.01),
    "LBFGS": partial(o.LBFGS, lr=0.1, max_iter=1),
    "two groups": lambda p: _two_groups(list(p)),
}


def _two_groups(parameters: list[nn.Parameter]) -> Optimizer:
    """Half of the parameters at another learning rate."""
    middle = len(parameters) // 2 or 1
    groups = [{"params": parameters[:middle]}, {"params": parameters[middle:], "lr": 0.02}]
    return o.AdamW([group for group in groups if group["params"]], lr=0.01, eps=1e-4)


def loss(model: nn.Module) -> torch.Tensor:
    """What is minimised."""
    return model(inputs(model)).float().square().mean()


def plain(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Zero, backward, step."""
    optimizer.zero_grad()
    loss(model).backward()
    optimizer.step()


def accumulated(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Three backward passes a step."""
    optimizer.zero_grad()
    for _ in range(3):
        (loss(model) / 3).backward()
    optimizer.step()


def clipped(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """The norm of all gradients clipped."""
    optimizer.zero_grad()
    loss(model).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def closure(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """``step(closure)``."""

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model)
        value.backward()
        return value

    optimizer.step(evaluate)


def kept_zeros(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Gradients zeroed in place."""
    optimizer.zero_grad(set_to_none=False)
    loss(model).backward()
    optimizer.step()


def autocast(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Forward in bfloat16."""
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model)
    value.backward()
    optimizer.step()


def sometimes_frozen(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Parameters that take no gradient in every second step."""
    first = next(model.parameters())
    first.requires_grad_(step % 2 == 0)
    plain(model, optimizer, step)
    first.requires_grad_(True)


def scheduled(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """A learning rate that falls."""
    plain(model, optimizer, step)
    for group in optimizer.param_groups:
        if isinstance(group["lr"], float):
            group["lr"] *= 0.9


def saved_and_loaded(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    """Model and optimizer through a file at every step."""
    plain(model, optimizer, step)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    states = torch.load(file, weights_only=True)
    model.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])


LOOPS = (plain, accumulated, clipped, closure, kept_zeros, autocast, sometimes_frozen, scheduled)
LOOPS = (*LOOPS, saved_and_loaded)
STEPS = 4


def trains(shape: str, optimizer: str, loop: Callable[..., None]) -> str | None:
    """Why plain training itself does not work, if that is so."""
    ends = []
    for taken in (loop, plain) if loop is saved_and_loaded else (loop,):
        torch.manual_seed(0)
        model = MODELS[shape]()
        try:
            stepper = OPTIMIZERS[optimizer](model.parameters())
            for step in range(STEPS):
                taken(model, stepper, step)
        except Exception as error:
            return type(error).__name__
        if not all(p.isfinite().all() for p in model.parameters()):
            return "not finite"
        held = stepper.state_dict()["state"].values()
        numbers = [v for one in held for v in one.values() if torch.is_tensor(v)]
        ends.append([*model.parameters(), *numbers])
    same = all(torch.equal(a.double(), b.double()) for a, b in zip(ends[0], ends[-1], strict=True))
    return None if same else "a run through files ends elsewhere"


class Failed(Exception):  # noqa: N818 - a verdict
    """What is not as it was promised."""


def tried(
    correction: Correction, shape: str, optimizer: str, loop: Callable[..., None]
) -> torch.Tensor:
    """Attach, train, close, and look whether all is as it should be; the function at the end."""
    torch.manual_seed(0)
    model = MODELS[shape]()
    keys = list(model.state_dict())
    stepper = OPTIMIZERS[optimizer](model.parameters())
    before = answers(model)
    handle = correction.attach(model, stepper)
    if not torch.equal(answers(model), before):
        raise Failed("attaching changed the output")
    for step in range(STEPS):
        loop(model, stepper, step)
    if list(model.state_dict()) != keys:
        raise Failed("the state dict has other keys")
    trained = answers(copy.deepcopy(model))
    handle.close()
    if not all(p.isfinite().all() for p in model.parameters()):
        raise Failed("not finite")
    if not torch.equal(answers(model), trained) or handle.difference != 0.0:
        raise Failed("closing changed the function")
    if stepper._optimizer_step_pre_hooks or stepper._optimizer_step_post_hooks:
        raise Failed("a hook is left")
    return trained


def outcome(
    correction: Correction, shape: str, optimizer: str, loop: Callable[..., None]
) -> tuple[str, str]:
    """What became of one combination: a word, and why."""
    try:
        end = tried(correction, shape, optimizer, loop)
        if loop is saved_and_loaded and not torch.equal(
            end, tried(correction, shape, optimizer, plain)
        ):
            raise Failed("a run through files ends elsewhere")
    except (Refusal, ValueError, TypeError) as error:
        in_one_line = "\n" not in str(error) and len(str(error)) < 2000
        return "explained" if in_one_line else "failed", str(error)
    except Exception as error:
        return "failed", f"{type(error).__name__}: {error}"
    return "exact", ""


def stressed(sample: int | None, seed: int) -> tuple[Counter[str], Counter[str]]:
    """Try all combinations, or a sample; print what failed, count outcomes and explanations."""
    grid = list(itertools.product([*EXAMPLES, *FOR_ATTENTION], MODELS, OPTIMIZERS, LOOPS))
    if sample is not None:
        grid = random.Random(seed).sample(grid, min(sample, len(grid)))
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for correction, shape, optimizer, loop in grid:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            verdict, why = outcome(correction, shape, optimizer, loop)
            if verdict == "failed" and (reason := trains(shape, optimizer, loop)) is not None:
                verdict, why = "explained", f"plain training: {reason}"
        counts[verdict] += 1
        if verdict == "explained":
            reasons[f"{type(correction).__name__}, {shape}: {why}"[:150]] += 1
        if verdict == "failed":
            name = f"{correction}, {shape}, {optimizer}, {loop.__name__}"
            print(f"{name}: {' '.join(why.split())[:200]}", flush=True)
    return counts, reasons


def main() -> None:
    """Run and count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sample", type=int, help="so many combinations, drawn at random")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    counts, reasons = stressed(options.sample, options.seed)
    for reason, count in reasons.most_common(12):
        print(f"{count} times: {reason}")
    print(", ".join(f"{counts[name]} {name}" for name in ("exact", "explained", "failed")))
    sys.exit(bool(counts["failed"]))


if __name__ == "__main__":
    main()
