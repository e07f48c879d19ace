"""Experiment 1: component learning quality (Section 4.1).

Which components of a matrix does gradient descent learn, and how does that change with size? One
matrix, 200 plain steps, all components. The extreme singular values are looked at alone as well:
is it their ratio that is not learned, or one of them?
"""

from collections.abc import Iterator
from functools import partial

import torch

from kappascope.components import Components
from kappascope.experiments.e1_claims import CLAIMS, NORMS, SIZES
from kappascope.figures import errors, sheet, spectrum, tail
from kappascope.lab import Batch, Experiment, grid
from kappascope.measures import printed
from kappascope.networks import Matrix
from kappascope.tasks import Regression, Streams, heterogeneous, start
from kappascope.training import descend, last, outcome


def trials(streams: Streams, size: int) -> Iterator[Batch]:
    """Learn a target of one size."""
    # float32 on our own streams: the tail of kappa's error is that of float64 there (tested)
    random = streams.random(dtype=torch.float32)
    target = heterogeneous(random, size)
    random.normal(size, size)  # the paper draws a start here and throws it away
    model = Matrix(start(random, size))
    step = last(descend(model, Regression(target).batches(random)))
    learned, wanted = Components(step.weight), Components(target)
    yield from outcome(learned, wanted)
    for name, place in ("largest_singular_value", 0), ("smallest_singular_value", -1):
        value, goal = (s.singular_values[:, place] for s in (learned, wanted))
        found = {"error": (value - goal).abs() / goal, "value": value, "target": goal}
        yield {"component": name, **found}


figure = partial(printed, seed=range(15))
SMALL = (32, 64, 128, 256)  # the sizes of the earlier version that the review quotes
FIGURES = (
    figure("e1/condition_number/d=32/mean", "0.27", "P abstract, 4.1"),
    figure("e1/condition_number/d=32/std", "0.31", "P abstract, 4.1"),
    figure("e1/condition_number/d=512/mean", "34.9", "P abstract, 4.1"),
    figure("e1/condition_number/d=512/std", "126.8", "P abstract, 4.1"),
    figure("e1/condition_number/d=128/mean", "1.59", "S"),
    *(figure(f"e1/{name}/d={d}/mean", "~0.13", "P 4.1") for name in NORMS for d in SIZES),
    figure("e1/spectral_gap/d/mean", "0.03-0.13", "P 4.1", size=SIZES),
    figure("e1/effective_rank/mean", "~0.001", "P 4.1, over all d", size=SIZES),
    printed("e1/condition_number/d=32/trials=10/mean", "0.18", "R W6"),
    printed("e1/condition_number/d=128/trials=10/mean", "1.10", "R W6"),
    printed("e1/condition_number/d=256/trials=10/mean", "~1.0", "R S4"),
    printed("e1/condition_number/d/trials=10/std", "0.54-2.53", "R W5", size=SMALL),
    printed("e1/spectral_gap/d/trials=10/mean", "0.030-0.040", "R W6", size=SMALL),
)

EXPERIMENT = Experiment(
    number=1,
    title="Component learning quality",
    section="4.1",
    question=__doc__,
    grid=grid(size=SIZES),
    trials=trials,
    paper=15,
    own={32: 2000, 64: 1000, 128: 600, 256: 100, 512: 15},
    figures=FIGURES,
    claims=CLAIMS,
    plot=sheet(
        errors("condition_number", "row_norms", "spectral_gap", "effective_rank", by="size",
               stream="paper", printed={"condition_number": {32: 0.27, 512: 34.9}}),
        errors("overall_matrix", "singular_values", "column_norms", "frobenius_norm", by="size",
               stream="paper", title="The other components"),
        tail("condition_number", by="size", stream="own"),
        spectrum("Singular values, size 128", size=128),
    ),
    quick={
        "paper": {32: 15, 64: 15, 128: 15},
        "own": {32: 32, 64: 16, 128: 6},  # from 6 on a median has an interval
    },
)  # fmt: skip
