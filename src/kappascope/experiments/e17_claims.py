"""What experiment 17 decides: what becomes of directions that target or data do not have."""

from typing import Any

from kappascope.claims import Above, Below, Between, Claim, Measure
from kappascope.measures import compared, listed, typical

DEPTHS, SIZE = (1, 2, 3), 32
LOOKS = (0, 200, 1000, 5000)


def unseen(data: str, depth: int) -> Measure:
    """What is lacking of what the data do not show."""
    return typical("unseen", data=data, depth=depth)


def kept(depth: int, epoch: int = 200) -> Measure:
    """What is left of the start in directions that the target does not have."""
    where: Any = {"component": "outside", "data": "endless", "depth": depth, "column": "value"}
    return compared({"epoch": epoch}, {"epoch": 0}, **where)


BY_DEPTH = ("at depth 1", "at depth 2", "at depth 3")
CLAIMS = (
    Claim(
        "e17.outside",
        "Directions that a low-rank target does not have keep what is left of the start, 0.99^200.",
        "R Q5",
        kept(1), Between(0.125, 0.145),
        "After 200 steps they keep {0:.3f} of the start (n = {0.n}; 0.99^200 = 0.134), after 5,000 "
        "{1:.2g}; at depth 3 {2:.2f} and {3:.2g}. At depth 1 what is to be unlearned goes at the "
        "rate at which everything is learned.",
        also=(kept(1, 5000), kept(3), kept(3, 5000)),
    ),
    Claim(
        "e17.higher-rank",
        "On low-rank targets SGD converges to a solution of higher effective rank.",
        "R Q5",
        lambda found: typical("effective_rank", column="value", data="endless", depth=1,
                              epoch=5000)(found).map(lambda rank: rank / (SIZE // 4), "ratio"),
        Above(1),
        "After 5,000 steps the effective rank is {0:.2f} times the target's (n = {0.n}), with an "
        "overall error of {1:.2g}; the kappa of such a target is infinite, and an error of about "
        "1.0 is the number 1e-10 that the paper adds to its denominator.",
        also=(typical("overall_matrix", data="endless", depth=1, epoch=5000),),
    ),
    Claim(
        "e17.inputs",
        "With fewer inputs than columns nothing is learned of what they do not show, at any depth.",
        "R Q5; refs 1, 2, 13",
        tuple(unseen("inputs", depth) for depth in DEPTHS), (Above(0.9),) * 3,
        listed("Of the part of the target that the inputs do not show this is lacking: {0} "
               "(n = {n}).", *BY_DEPTH),
    ),
    Claim(
        "e17.completion",
        "With half of the entries shown, depth fills in the others: a bias towards low rank.",
        "R Q5; refs 1, 2, 13",
        tuple(unseen("entries", depth) for depth in (3, 2, 1)),
        (Below(0.5), Below(0.5), Above(0.9)),
        listed("Of the entries that were not shown this is lacking: {0} (n = {n}).",
               *reversed(BY_DEPTH)),
    ),
)  # fmt: skip
