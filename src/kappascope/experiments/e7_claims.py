"""What experiment 7 decides: the printed figures and the claims of Section 4.7."""

from math import nan

from kappascope.claims import Above, Between, Claim, Measure
from kappascope.experiments.e7_amplification import CLAIM as AMPLIFICATION
from kappascope.measures import Where, printed, select, typical
from kappascope.statistics import Estimate, Table, paired_ratio, ratio

PRODUCT: Where = {"network": "linear", "size": 64, "layer": 0}
PAPER: Where = {**PRODUCT, "seed": range(10)}
LAYERS: Where = {**PAPER, "depth": (2, 3), "layer": (1, 2, 3)}
GUARDED: Where = {**PAPER, "component": "floored_condition_number"}  # the paper's s1 / (sd + 1e-10)


def each_mean(rows: Table) -> list[float]:
    """The mean kappa of every layer, at every depth."""
    layers = (layer for depth in rows.by("depth").values() for layer in depth.by("layer").values())
    return [float(layer.values("value").mean()) for layer in layers]


RECTIFIED = tuple(
    printed(f"e7/{id}", text, "P 4.7", layer=layer, seed=range(10))
    for id, text, layer in (
        ("condition_number/network=relu/target", "~1,136", (1, 2)),
        ("condition_number/network=relu/layer=1/learned", "2,719", 1),
        ("condition_number/network=relu/layer=2/learned", "6,060", 2),
        ("condition_number/network=relu/mean", "9.1", (1, 2)),
        ("overall_matrix/network=relu/mean", "0.57", 0),  # the paper may mean the answers' error
    )
)

FIGURES = (
    printed("e7/condition_number/depth=1/target", "~928", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=1/mean", "0.24", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=2/mean", "653", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=3/mean", "13,167", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=1/learned", "1,510", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=2/learned", "242,566", "P 4.7", **GUARDED),
    printed("e7/condition_number/depth=3/learned", "4.8e6", "P 4.7", **GUARDED),
    printed("e7/overall_matrix/depth=1/mean", "0.05", "P 4.7", **PAPER),
    printed("e7/overall_matrix/depth=2/mean", "0.22", "P 4.7", **PAPER),
    printed("e7/overall_matrix/depth=3/mean", "0.26", "P 4.7", **PAPER),
    printed("e7/condition_number/layer/learned", "1,000-1,600", "P 4.7", each_mean, **LAYERS),
    *RECTIFIED,
)


def error(depth: int, component: str = "condition_number") -> Measure:
    """The median error of the product."""
    return typical(component, depth=depth, **PRODUCT)


def factor(depth: int) -> Measure:
    """What the last layer multiplies the median kappa error by."""
    where = {"stream": "own", "component": "condition_number", **PRODUCT}
    return lambda rows: ratio(
        *(select(rows, depth=d, **where).values() for d in (depth, depth - 1))
    )


def excess(layer: int) -> Measure:
    """The student's kappa over the teacher's."""

    def measure(rows: Table) -> Estimate:
        where = {"network": "relu", "layer": layer, "component": "condition_number"}
        chosen = select(rows, stream="own", **where)
        return paired_ratio(chosen.values("value"), chosen.values("target"))

    return measure


CLAIMS = (
    Claim(
        "e7.depth-explodes",
        "The kappa error of a product grows exponentially with depth: 0.24, 653, 13,167.",
        "P abstract, 1(2), 4.7, 5.1, 6(2); S",
        measure=(factor(2), factor(3)),
        expect=(Above(1), Above(1)),
        also=(error(1), error(2), error(3)),
        explain="After 300 steps the median errors at depth 1, 2 and 3 are {2:.2g}, {3:.3g} and "
        "{4:.3g} (n = {2.n} each): the second layer multiplies the median by {0:.3g}, the third by "
        "{1:.2g}; what is left of it when training goes on, e7.amplification tells.",
    ),
    AMPLIFICATION,
    Claim(
        "e7.overall-moderate",
        "The overall error stays moderate at every depth: 0.05, 0.22, 0.26.",
        "P 4.7",
        measure=tuple(error(depth, "overall_matrix") for depth in (1, 2, 3)),
        expect=(Between(0.045, 0.055), Between(0.20, 0.24), Between(0.235, 0.285)),
        explain="The medians at depth 1, 2, 3 are {0:.3f}, {1:.3f} and {2:.3f} (n = {0.n} each).",
    ),
    Claim(
        "e7.relu",
        "A two-layer ReLU network shows the same flaw: layer kappas far above its teacher's.",
        "P 4.7",
        measure=(excess(1), excess(2)),
        expect=(Above(1), Above(1)),
        explain="In the median trial the student's kappa is {0:.3g} times the teacher's in the "
        "first layer and {1:.3g} times in the second (n = {0.n}), after 300 steps.",
    ),
    Claim(
        "e7.llm",
        "So deep transformers are likely severely distorted.",
        "P 5.1; S",
        measure=lambda rows: Estimate(
            nan, None, None, 0, "distortion", "no transformer was trained"
        ),
        expect=Above(1),
        explain="Products of up to three linear layers and one ReLU network of two layers do not "
        "decide it: a transformer has residual paths, normalization and no known target.",
    ),
)
