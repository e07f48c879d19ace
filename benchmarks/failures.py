"""Training runs in which something goes wrong at a known step, for whatever watches them.

Six kinds: a learning rate that is too high, a bad batch, dead rows, updates that bfloat16 swallows,
queries and keys that grow, and a rank that collapses. Each trains a small GPT on a language of its
own, healthy until the failure is injected, and yields after
every step, so that a monitor can look:

    for step in failing("QK growth", seed=0):
        monitor_sees(step.model, step.optimizer, step.loss)

:func:`loss_shows` says from which step on the loss alone tells, by one rule for all of them; it is
printed for every kind and seed by

    OMP_NUM_THREADS=1 python benchmarks/failures.py [--seeds 3] [--steps 500] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import environment
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import AdamW, Optimizer

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from optimizer_zoo import GPT

STEPS, INJECTED = 500, 300  # the failure begins when the rule has been learned
RATE = 3e-3  # with which that takes 250 steps
VOCABULARY, LENGTH, BATCH = 60, 24, 16


@dataclass(frozen=True)
class RunStep:
    """One finished step of a run, with the model as it is after it."""

    index: int  # from 1
    loss: float
    model: nn.Module
    optimizer: Optimizer
    is_failing: bool  # whether the failure has been injected before or at this step


@dataclass
class Run:
    """A run under way, which a failure may change before every step."""

    model: Any
    optimizer: Optimizer
    random: torch.Generator
    batch: Callable[[torch.Generator], Tensor]
    since: int = 0  # steps since the failure began, from 1; 0 before

    def parameters(self, ending: str) -> list[Tensor]:
        """The parameters whose names end so."""
        return [p for name, p in self.model.named_parameters() if name.endswith(ending)]


Failure = Callable[[Run], None]
FAILURES: dict[str, Failure] = {}


def failure(name: str) -> Callable[[Failure], Failure]:
    """Register what goes wrong under the name of its kind."""

    def register(inject: Failure) -> Failure:
        FAILURES[name] = inject
        return inject

    return register


@failure("lr too high")
def _rate(run: Run) -> None:
    """The learning rate grows by a fifth every step, up to a thousand times itself."""
    for group in run.optimizer.param_groups:
        group["lr"] = min(group["lr"] * 1.2, 1.0)


@failure("bad batch")
def _batch(run: Run) -> None:
    """Five batches are one token repeated, with its successor forbidden by all that was learned."""
    if run.since <= 5:
        token = int(torch.randint(VOCABULARY, (), generator=run.random))
        run.batch = lambda _: torch.full((BATCH, LENGTH + 1), token)
    else:
        run.batch = sentences


@failure("dead rows")
@torch.no_grad()
def _dead_rows(run: Run) -> None:
    """One more row of every up-projection is set to zero, with its bias, at every step."""
    for weight in run.parameters("c_fc.weight"):
        weight[: run.since] = 0.0
    for bias in run.parameters("c_fc.bias"):
        bias[: run.since] = -10.0  # behind a GELU: no gradient ever revives it


@failure("bf16 stall")
@torch.no_grad()
def _stall(run: Run) -> None:
    """Weights are kept in bfloat16, and the learning rate falls until rounding swallows updates."""
    for group in run.optimizer.param_groups:
        group["lr"] *= 0.97
    for p in run.model.parameters():
        p.copy_(p.bfloat16())


@failure("QK growth")
@torch.no_grad()
def _growth(run: Run) -> None:
    """Queries and keys grow by five per cent a step, as without a bound on attention logits."""
    for weight in (*run.parameters("q_proj.weight"), *run.parameters("k_proj.weight")):
        weight.mul_(1.05)


@failure("rank collapse")
@torch.no_grad()
def _collapse(run: Run) -> None:
    """All but one direction of every value and output matrix fades by five per cent a step."""
    for weight in (*run.parameters("v_proj.weight"), *run.parameters("out_proj.weight")):
        u, s, vt = torch.linalg.svd(weight, full_matrices=False)
        s[1:] *= 0.95
        weight.copy_((u * s) @ vt)


def sentences(random: torch.Generator) -> Tensor:
    """Tokens that follow from the last but one by a fixed rule, nine times of ten.

    One token back tells nothing: without attention the loss stays that of chance.
    """
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=random)
    is_ruled = torch.rand((BATCH, LENGTH + 1), generator=random) < 0.9
    for i in range(2, LENGTH + 1):
        ruled = (7 * tokens[:, i - 2] + 3) % VOCABULARY
        tokens[:, i] = torch.where(is_ruled[:, i], ruled, tokens[:, i])
    return tokens


def failing(
    kind: str | None, seed: int, *, steps: int = STEPS, injected: int = INJECTED
) -> Iterator[RunStep]:
    """Train a small GPT, in which something begins to go wrong at a step; ``None`` is healthy."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = GPT(width=48)
        nn.init.normal_(model.wte.weight, std=0.1)  # logits of order one at the start
    random = torch.Generator().manual_seed(seed)
    run = Run(model, AdamW(model.parameters(), lr=RATE), random, sentences)
    for index in range(1, steps + 1):
        if kind is not None and index >= injected:
            run.since = index - injected + 1
            FAILURES[kind](run)
        tokens = run.batch(run.random)
        logits = model.eval()(tokens[:, :-1])  # no dropout: the run depends on its seed alone
        loss = functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        run.optimizer.zero_grad()
        loss.backward()
        run.optimizer.step()
        yield RunStep(index, loss.item(), model, run.optimizer, run.since > 0)


def loss_shows(losses: Sequence[float], healthy: Sequence[float]) -> int | None:
    """The first step at which the loss tells, beside that of the same run without the failure.

    It is not finite, or above the healthy run's by six of the deviations that this has from its own
    mean over ten steps in the second half. A monitor has no healthy twin: no alert from the loss
    alone comes earlier.

    >>> loss_shows([1.0] * 20 + [9.0], [1.0, 1.1] * 10 + [1.0])
    21
    """
    smooth = [statistics.fmean(healthy[max(0, i - 9) : i + 1]) for i in range(len(healthy))]
    half = len(healthy) // 2
    spread = statistics.pstdev(a - b for a, b in zip(healthy[half:], smooth[half:], strict=True))
    for index, (loss, twin) in enumerate(zip(losses, healthy, strict=True), start=1):
        if not math.isfinite(loss) or loss > twin + 6 * spread:
            return index
    return None


def main() -> None:
    """Run every kind, print where the loss tells, keep it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    default = Path(__file__).parent / "results" / "failures.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for seed in range(options.seeds):
        healthy = [step.loss for step in failing(None, seed, steps=options.steps)]
        for kind in FAILURES:
            losses = [step.loss for step in failing(kind, seed, steps=options.steps)]
            shows = loss_shows(losses, healthy)
            rows.append({"kind": kind, "seed": seed, "injected": INJECTED, "loss_shows": shows,
                         "last_loss": losses[-1], "healthy": healthy[-1]})  # fmt: skip
            print("{kind:14} seed {seed}: the loss shows it at {loss_shows}, and ends at "
                  "{last_loss:.3f} (healthy {healthy:.3f})".format(**rows[-1]))  # fmt: skip
    report = {"what": str(__doc__).splitlines()[0], "environment": environment(), "rows": rows}
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
