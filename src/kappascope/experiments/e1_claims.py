"""What experiment 1 decides: the claims of Section 4.1, judged on medians of many trials."""

from collections.abc import Iterable
from typing import Any

from kappascope import statistics
from kappascope.claims import Above, Below, Between, Claim, Measure, no_mean
from kappascope.measures import compared, select, typical
from kappascope.statistics import Estimate, Table

SIZES = (32, 64, 128, 256, 512)
NORMS = ("row_norms", "column_norms")
MODERATE = (*NORMS, "singular_values", "frobenius_norm", "overall_matrix")
LEFT = 0.99**200  # of what was to be learned, 200 steps at rate 0.01 leave this
KAPPA, SMALLEST = {"component": "condition_number"}, {"component": "smallest_singular_value"}


def at_each_size(*components: str) -> tuple[Measure, ...]:
    """The median errors."""
    return tuple(typical(name, size=d) for name in components for d in SIZES)


def growth(rows: Table) -> Estimate:
    """The power of the size with which kappa's median error grows."""
    kappa = select(rows, stream="own", component="condition_number", size=SIZES)
    return statistics.growth_exponent({d: part.values() for d, part in kappa.by("size").items()})


def heaviest(rows: Table) -> Estimate:
    """How many per cent of the paper's mean at the largest size are one trial."""
    found = statistics.influence(
        rows.where(stream="paper", component="condition_number", size=512).values()
    )
    return statistics.exactly(100 * found.share, found.n, "share of one trial")


def times_norms(component: str, size: int) -> Measure:
    """The median error in those of the row norms."""
    pair = (component, "row_norms")
    return lambda rows: statistics.ratio(
        *(select(rows, stream="own", component=name, size=size).values() for name in pair)
    )


def span(estimates: Iterable[Estimate]) -> str:
    """From the least to the greatest."""
    values = sorted(estimate.value for estimate in estimates)
    return " to ".join(dict.fromkeys(f"{value:.3g}" for value in (values[0], values[-1])))


def grows(power: Estimate, *found: Any) -> str:
    """The medians, and what became of the printed mean."""
    *medians, share, _ = found
    small, *_, large = (f"{one:.2f} at d = {d}" for d, one in zip(SIZES, medians, strict=True))
    told = f"The median error goes from {small} to {large}, as d to the power {power:.2f}."
    if share.n < 15:
        return told
    return f"{told} Of the printed mean at d = 512, one of 15 trials is {share.value:.0f} %."


def classes(*found: Any) -> str:
    """The medians of each class."""
    well, moderate, overall, power = found[:10], found[10:30], found[30:35], found[35]
    return (
        f"The medians at all sizes are {span(well)} for gap and rank, {span(moderate)} for norms "
        f"and singular values; the overall error goes from {overall[0]:.3f} at d = 32 to "
        f"{overall[4]:.3f} at d = 512, and kappa's as d to the power {power:.2f}."
    )


CLAIMS = (
    Claim(
        "e1.norms-flat",
        "Norm errors stay at about 0.13 for d = 32 to 512.",
        "P abstract, 4.1",
        measure=at_each_size(*NORMS),
        expect=(Between(0.125, 0.135),) * 10,
        explain=lambda *found: (
            f"The medians are {span(found[:-1])}: 200 steps at rate 0.01 leave "
            f"0.99^200 = {LEFT:.3f} of what was to be learned, at every size."
        ),
    ),
    Claim(
        "e1.kappa-grows",
        "The relative error of kappa grows faster than linearly with d, 0.27 to 34.9.",
        "P abstract, 1(1), 4.1, 6(1); S",
        measure=growth,
        expect=Above(1),
        also=(*at_each_size("condition_number"), heaviest),
        presumes=no_mean(
            "A mean of this error does not exist at any size: the smallest singular value has a "
            "positive density at 0, so the share of errors above x falls like 1/x.",
            stream="own",
            component="condition_number",
            size=64,
        ),
        explain=grows,
    ),
    Claim(
        "e1.gap-well-learned",
        "The spectral gap is well learned (0.03-0.13).",
        "P 4.1",
        measure=at_each_size("spectral_gap"),
        expect=(Below(0.13),) * 5,
        explain=lambda *found: f"The medians are {span(found[:5])}, at d = 512 {found[4]:.3f}.",
    ),
    Claim(
        "e1.rank-well-learned",
        "The effective rank is well learned (about 0.001).",
        "P 4.1",
        measure=at_each_size("effective_rank"),
        expect=(Below(0.005),) * 5,
        explain=lambda *found: (
            f"The median error at all sizes is {span(found[:5])}, at d = 512 {found[4]:.3g}; where "
            "it is 0, half of the trials or more have exactly the rank of their target."
        ),
    ),
    Claim(
        "e1.taxonomy",
        "Components are learned well (below 0.05), moderately (about 0.13) or poorly (growing).",
        "S",
        measure=(*at_each_size("spectral_gap", "effective_rank", *MODERATE), growth),
        expect=(*[Below(0.05)] * 10, *[Between(0.12, 0.14)] * 25, Above(0)),
        explain=classes,
    ),
    Claim(
        "e1.specific",
        "The flaw is specific to the ratio of the extreme singular values.",
        "P 4.1",
        measure=tuple(compared(KAPPA, SMALLEST, size=d) for d in SIZES),
        expect=(Above(1.5),) * 5,
        also=at_each_size("smallest_singular_value", "largest_singular_value"),
        explain=lambda *found: (
            f"Trial by trial kappa's error is {span(found[:5])} times that of the smallest value "
            f"alone (medians at each size), which is off by {span(found[5:10])}; the largest is "
            f"off by {span(found[10:15])}."
        ),
    ),
    Claim(
        "e1.v1-ratio",
        "The errors of kappa and of the spectral gap are 2-5 times those of the norms.",
        "R W6",
        measure=tuple(
            times_norms(c, d) for c in ("condition_number", "spectral_gap") for d in SIZES
        ),
        expect=(Between(2, 5),) * 10,
        explain=lambda *found: (
            f"In medians, kappa's error is {span(found[:5])} times, the gap's "
            f"{span(found[5:10])} times the row norms'."
        ),
    ),
)
