"""What experiment 14 decides: which corrections help, and which only as they know the answer."""

from collections.abc import Callable
from typing import Any

from kappascope.claims import Above, Below, Claim, Measure
from kappascope.measures import improvement, listed, select
from kappascope.statistics import Estimate, Table, wins

LOG, ROWS, WHOLE = "log_condition_number", "row_norms", "overall_matrix"
BLIND = (
    "multipliers",
    "norm pin",
    "penalty",
    "orthogonal",
    "srip",
    "svd",
    "re-projection",
    "decay",
    "bound",
    "value multipliers",
    "hybrid",
    "spectral norm",
)
TOLD = ("penalty", "svd", "re-projection", "bound", "hybrid", "spectral norm")


def gain(strategy: str, component: str, told: bool = False) -> Measure:
    """By how many per cent an error is below that of plain training, trial by trial."""
    ours = {"strategy": strategy, "oracle": told}
    return improvement(ours, {"strategy": "standard", "oracle": False}, component=component)


def helped(strategy: str) -> Measure:
    """In which share of the trials the oracle makes the error of log kappa smaller."""

    def measure(rows: Table) -> Estimate:
        chosen = select(rows, stream="own", strategy=strategy, component=LOG)
        told, blind = (chosen.where(oracle=oracle) for oracle in (True, False))
        return wins(*told.paired(blind))

    return measure


def beside(names: tuple[str, ...], sentence: str) -> Callable[..., str]:
    """Whole numbers beside the names of corrections."""

    def explain(*found: Any) -> str:
        *gains, _ = found
        parts = (f"{name} {one:.0f}" for name, one in zip(names, gains, strict=True))
        return sentence.format(", ".join(parts), n=gains[0].n)

    return explain


CLAIMS = (
    Claim(
        "e14.value-multipliers",
        "Learnable multipliers of the singular values treat what is not learned of the spectrum: "
        "they take half of log kappa's error away.",
        "R Q6, W4(c)",
        gain("value multipliers", LOG),
        Above(50),
        "Of log kappa's error they take {0:.0f} % away, trial by trial (n = {0.n}), of the row "
        "norms' {1:.0f} % and of the matrix's {2:.0f} %; row and column multipliers take {3:.0f} % "
        "of log kappa's and {4:.0f} % of the matrix's.",
        also=(
            gain("value multipliers", ROWS),
            gain("value multipliers", WHOLE),
            gain("multipliers", LOG),
            gain("multipliers", WHOLE),
        ),
    ),
    Claim(
        "e14.oracle",
        "What a spectral correction does for kappa depends on being told the target's spectrum.",
        "R W4",
        tuple(map(helped, TOLD)),
        (Above(0.5),) * len(TOLD),
        listed(
            "The oracle lowers the error of log kappa in this share of the trials: {0} (n = {n}).",
            *(f"for {name}" for name in TOLD),
        ),
    ),
    Claim(
        "e14.blind",
        "No correction without an oracle takes half of the error of log kappa away.",
        "R W4",
        tuple(gain(name, LOG) for name in BLIND),
        (Below(50),) * len(BLIND),
        beside(
            BLIND,
            "Per cent of log kappa's error taken away (negative: added), medians over paired "
            "trials (n = {n}): {0}.",
        ),
    ),
    Claim(
        "e14.better-matrix",
        "A better kappa makes a better matrix: with the oracle's penalty the overall error falls.",
        "R W4(a); P 4.4",
        gain("penalty", WHOLE, told=True),
        Above(1),
        "The penalty takes {1:.0f} % of log kappa's error away and {0:.2f} % of the matrix's; "
        "re-projection on the target's spectrum takes {2:.0f} % and {3:.1f} % (n = {0.n}).",
        also=(
            gain("penalty", LOG, told=True),
            gain("re-projection", LOG, told=True),
            gain("re-projection", WHOLE, told=True),
        ),
    ),
    Claim(
        "e14.harmless",
        "No correction without an oracle makes the matrix worse by more than 5 %.",
        "R W4",
        tuple(gain(name, WHOLE) for name in BLIND),
        (Above(-5),) * len(BLIND),
        beside(
            BLIND,
            "Per cent of the overall error taken away (negative: added), medians over paired "
            "trials (n = {n}): {0}.",
        ),
    ),
)
