"""What experiment 9 decides: the claims of Section 4.9."""

from math import log

import numpy as np

from kappascope.claims import Above, Below, Between, Claim
from kappascope.experiments import e9_speed as speed
from kappascope.measures import select, typical
from kappascope.statistics import Estimate, Table, paired_ratio


def at(found: Table, component: str, epoch: int) -> np.ndarray:
    """The errors of our own trials after some steps."""
    return select(found, stream="own", size=128, component=component, epoch=epoch).values()


def rate(found: Table) -> Estimate:
    """The rate per step at which the norm error falls from step 10 to 500, trial by trial."""
    fall = paired_ratio(at(found, "row_norms", 500), at(found, "row_norms", 10))
    return fall.map(lambda left: log(left) / 490, "rate per step")


def widening(found: Table) -> Estimate:
    """The ratio of kappa's error to the norms' at step 1000, over that at step 1."""
    before, after = (
        at(found, "condition_number", epoch) / at(found, "row_norms", epoch) for epoch in (1, 1000)
    )
    return paired_ratio(after, before)


CLAIMS = (
    Claim(
        "e9.norms-vanish",
        "Norm errors fall exponentially, to 6.6e-5 after 1000 steps.",
        "P 4.9",
        measure=(typical("row_norms", size=128, epoch=1000), rate),
        expect=(Below(1e-4), Between(-0.0105, -0.0095)),
        also=(speed.left("row_norms"),),
        explain="The median is {0:.2g} after 1000 steps (n = {0.n}) and falls at a rate of {1:.5f} "
        "per step before (log 0.99 is -0.01005: every step takes its hundredth); another 1000 "
        "steps leave {2:.2f} of it (size 32), where 0.99^1000 would be 0.00004.",
    ),
    Claim(
        "e9.kappa-plateaus",
        "Kappa's error plateaus at 0.017 rather than vanishing.",
        "P abstract, 4.9, 5.1, 6(5); S",
        measure=speed.left("condition_number"),
        expect=Above(0.5),
        also=(
            speed.end("condition_number", "none"),
            speed.end("condition_number", "no noise"),
            typical("condition_number", size=128, epoch=1000),
        ),
        explain="Another 1000 steps leave {0:.2f} of the error (n = {0.n}, size 32), at a median "
        "of {1:.2g}, or of {2:.2g} if labels have no noise (for the norms see e9.norms-vanish); at "
        "size 128 the median after 1000 steps is {3:.2g}.",
    ),
    Claim(
        "e9.gap-widens",
        "The ratio of kappa's error to the norms' widens with training, from 0.8 to 250.",
        "P abstract, 4.9",
        measure=widening,
        expect=Above(1),
        explain="In the median trial the ratio is {0:.3g} times as large after 1000 steps as after "
        "one (n = {0.n}).",
    ),
    speed.NOT_SPEED,
    speed.OPEN_QUESTION,
)
