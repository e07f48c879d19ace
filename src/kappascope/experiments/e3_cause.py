"""Whether the imbalance of gradient signal is why kappa does not converge (Sections 4.3, 6).

Tested by interventions: leave the imbalance and take away the label noise, then the random start
too; or leave both and take away the imbalance, by steps that are equally long in every singular
direction.
"""

from collections.abc import Iterator

from torch import Tensor

from kappascope.claims import Above, Below, Claim
from kappascope.lab import Batch
from kappascope.measures import compared, typical
from kappascope.networks import Matrix
from kappascope.spectra import decomposition
from kappascope.statistics import Estimate
from kappascope.tasks import LinearBatch, Regression, Streams, heterogeneous, noiseless, start
from kappascope.training import Descent, Step, descend, last, rows, together, train


def orthogonalized(gradient: Tensor) -> Tensor:
    """The same singular vectors, every singular value one."""
    u, _, vt = decomposition(gradient)
    return u @ vt


def interventions(streams: Streams, size: int) -> Iterator[Batch]:
    """Take away, one at a time, what may keep kappa from converging."""
    target, random = heterogeneous(streams.random(), size), streams.random(1)
    origin = start(random, size)

    def alike(batches: Iterator[LinearBatch]) -> Iterator[Step]:
        descent = Descent(model := Matrix(origin))
        model.weight.register_hook(orthogonalized)
        for step in train(model, descent, batches):
            # falls to zero; all steps together reach the largest singular values, about 3
            descent.learning_rate = 0.03 * (1 - step.index / 200)
            yield step

    arms = {
        "none": lambda batches: descend(Matrix(origin), batches),
        "no noise": lambda batches: descend(Matrix(origin), noiseless(batches)),
        "no noise, from 0": lambda batches: descend(Matrix(0 * origin), noiseless(batches)),
        "no imbalance": alike,
    }
    for name, step in last(together(arms, Regression(target).batches(random))).items():
        yield from rows(step.weight, target, intervention=name)


KAPPA = {"component": "log_condition_number", "question": "cause"}
PLAIN, NOISELESS, CLEAN, ALIKE = (
    {"intervention": name} for name in ("none", "no noise", "no noise, from 0", "no imbalance")
)


def told(clean: Estimate, alike: Estimate, quiet: Estimate, error: Estimate, _: str) -> str:
    """What each intervention makes of the error."""
    start = ": it is what remains of the start" if quiet.value > 0.9 and clean.value < 0.5 else ""
    return (
        "With the imbalance left as it is, taking away label noise and random start multiplies the "
        f"error of log kappa after 200 steps ({error:.2f}) by {clean:.2f}, the noise alone by "
        f"{quiet:.2f}{start}. Taking away the imbalance, by steps of equal length in all singular "
        f"directions, multiplies it by {alike:.2f} (medians, paired, n = {clean.n})."
    )


CLAIM = Claim(
    "e3.cause",
    "The imbalance of gradient signal prevents kappa from converging: it is the root cause.",
    "P abstract, 4.3, 6; S",
    measure=(compared(CLEAN, PLAIN, **KAPPA), compared(ALIKE, PLAIN, **KAPPA)),
    expect=(Above(0.5), Below(1)),
    also=(compared(NOISELESS, PLAIN, **KAPPA), typical(**KAPPA, **PLAIN)),
    explain=told,
)
