"""How the defaults of Hybrid were chosen, and what they do elsewhere.

Chosen on *heterogeneous* targets (32 x 32, the paper's generator) learned by SGD and by AdamW;
checked on *block-diagonal* and *spiked* targets (48 x 48), which had no part in the choice. A
setting is scored by how many times smaller than without a correction it makes the error of the
matrix and the error of log kappa: the geometric mean over both and over trials, so above 1 is
better. The correction does not know the spectrum of any target.

    OMP_NUM_THREADS=1 python benchmarks/hybrid.py [--out FILE]
"""

import argparse
import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

from kappascope.components import errors
from kappascope.corrections import Correction, Hybrid, Multipliers, SpectralPenalty
from kappascope.networks import Matrix
from kappascope.tasks import Own, Random, Regression, block_diagonal, heterogeneous, start
from kappascope.training import last, train

RATES = (0.1, 0.3, 1.0, 3.0)
STRENGTHS = (0.0, 5e-4, 5e-3, 5e-2)
COMPONENTS = ("overall_matrix", "log_condition_number")
TRIALS = 32


def spiked(random: Random, size: int) -> Tensor:
    """Gaussian with three strong directions: what a trained layer looks like."""
    left, right = random.normal(size, 3), random.normal(3, size)
    return random.normal(size, size) / size**0.5 + 3 * left @ right / size


@dataclass(frozen=True)
class Problem:
    """A family of targets, and the optimizer that learns them in 300 steps."""

    target: Callable[[Random, int], Tensor]
    size: int
    optimizer: type[Optimizer]
    learning_rate: float

    def learned(self, correction: Correction | None) -> dict[str, Tensor]:
        """Errors by component, one a trial."""
        streams = Own(range(TRIALS), f"hybrid {self.target.__name__}")
        target, random = self.target(streams.random(), self.size), streams.random(1)
        model = Matrix(start(random, self.size))
        optimizer = self.optimizer(model.parameters(), lr=self.learning_rate)  # type: ignore[call-arg]
        handle = correction.attach(model, optimizer) if correction else None
        step = last(train(model, optimizer, Regression(target).batches(random), steps=300))
        if handle:
            handle.close()
        return errors(step.weight, target)


CHOICE = (Problem(heterogeneous, 32, SGD, 0.01), Problem(heterogeneous, 32, AdamW, 0.003))
CHECK = tuple(
    Problem(target, 48, optimizer, rate)
    for target in (block_diagonal, spiked)
    for optimizer, rate in ((SGD, 0.01), (AdamW, 0.003))
)


@cache
def plain(problem: Problem) -> dict[str, Tensor]:
    """Without a correction."""
    return problem.learned(None)


def gains(problem: Problem, correction: Correction) -> dict[str, float]:
    """How many times smaller each error becomes."""
    before, after = plain(problem), problem.learned(correction)
    return {
        key: float((before[key].log() - after[key].log()).mean().exp()) for key in COMPONENTS
    }


def score(problems: tuple[Problem, ...], correction: Correction) -> float:
    """The geometric mean of all gains."""
    every = [g for problem in problems for g in gains(problem, correction).values()]
    return float(torch.tensor(every).log().mean().exp())


def hybrid(rate: float, strength: float) -> Hybrid:
    """With the cadence that the benchmark of its cost allows."""
    return Hybrid(Multipliers(rate=rate), SpectralPenalty(strength, every=5))


def main() -> None:
    """Choose, check, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    default = Path(__file__).parent / "results" / "hybrid.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    scores = {
        setting: score(CHOICE, hybrid(*setting)) for setting in itertools.product(RATES, STRENGTHS)
    }
    for (rate, strength), value in scores.items():
        print(f"rate {rate:4}, strength {strength:6}: {value:.3f}")
    best = max(scores, key=lambda setting: scores[setting])
    print(f"chosen: rate {best[0]}, strength {best[1]}")
    checked = []
    for problem in (*CHOICE, *CHECK):
        found = gains(problem, hybrid(*best))
        name = f"{problem.target.__name__} {problem.size}, {problem.optimizer.__name__}"
        checked.append({"problem": name, "chosen_on": problem in CHOICE, **found})
        print(name, {key: round(value, 3) for key, value in found.items()})
    report = {
        "what": __doc__.splitlines()[0],
        "trials": TRIALS,
        "scores": [{"rate": r, "strength": s, "score": v} for (r, s), v in scores.items()],
        "chosen": {"rate": best[0], "strength": best[1]},
        "default": asdict(Hybrid()),
        "gains": checked,
        "score_elsewhere": score(CHECK, hybrid(*best)),
    }
    print(f"elsewhere: {report['score_elsewhere']:.3f}")
    options.out.parent.mkdir(exist_ok=True)
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
