"""Experiment 4: corrective strategies (Section 4.4).

Which correction repairs which component? Four strategies, and the hybrid that the paper and its
slides prescribe but did not measure. The spectral ones are told the target's spectrum.
"""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial

from torch import Tensor
from torch.optim import SGD

from kappascope.corrections import Correction, Hybrid, Multipliers, PaperPenalty, SVDCorrection
from kappascope.lab.claims import Above, Below, Between, Claim, Measure, no_mean
from kappascope.lab.experiment import Experiment, Rows, grid
from kappascope.lab.figures import sheet, spectrum_lines, strips, tail
from kappascope.lab.measures import (
    KAPPA,
    LOG_KAPPA,
    ROW_NORMS,
    compared,
    growth_with_size,
    improvement,
    printed,
    select,
    typical,
)
from kappascope.lab.statistics import tail_index
from kappascope.lab.tasks import LinearBatch, Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, Step, last, outcome, together, train
from kappascope.matrix.components import Components


def strategies(spectrum: Tensor) -> dict[str, Correction | None]:
    """Give the paper's settings; an oracle tells the spectral ones what is to be learned."""
    multipliers = Multipliers(rate=0.1, weight_decay=0.0)
    spectral = PaperPenalty(0.005, target=lambda weight: spectrum)
    return {
        "standard": None,
        "multipliers": multipliers,
        "spectral": spectral,
        "svd": SVDCorrection(every=20, step=0.1, target=lambda weight: spectrum),
        "hybrid": Hybrid(multipliers, spectral),
    }


def fit(
    origin: Tensor, correction: Correction | None, batches: Iterator[LinearBatch]
) -> Iterator[Step]:
    """Train from a start, with a correction attached."""
    model = Matrix(origin)
    optimizer = SGD(model.parameters(), lr=0.01)
    with correction.attach(model, optimizer) if correction else nullcontext():
        yield from train(model, optimizer, batches)


def trials(streams: Streams, size: int) -> Iterator[Rows]:
    """Learn the same target with every strategy."""
    target, random = heterogeneous(streams.random(), size), streams.random(7)
    origin, corrections = start(random, size), strategies(Components(target).singular_values)
    arms: dict[str, Callable[[Iterator[LinearBatch]], Iterator[Step]]] = {
        name: partial(fit, origin, correction) for name, correction in corrections.items()
    }
    for strategy, step in last(together(arms, Regression(target).batches(random))).items():
        yield from outcome(step.weight, target, strategy=strategy)


figure = partial(printed, seed=range(10))
FIGURES = (
    figure("e4/condition_number/strategy=standard/mean", "1.23", "P 4.4"),
    figure("e4/condition_number/strategy=multipliers/mean", "1.11", "P 4.4"),
    figure("e4/condition_number/strategy=multipliers/improvement", "10 %", "P 4.4, 5.2; S"),
    figure("e4/condition_number/strategy=spectral/mean", "0.29", "P 4.4"),
    figure("e4/condition_number/strategy=spectral/improvement", "77 %", "P abstract, 4.4; S"),
    figure("e4/condition_number/strategy=svd/improvement", "32 %", "P 4.4, 5.2; S"),
    figure("e4/row_norms/strategy=standard/mean", "0.134", "P 4.4"),
    figure("e4/row_norms/strategy=multipliers/mean", "0.044", "P 4.4"),
    figure("e4/row_norms/strategy=multipliers/improvement", "67 %", "P abstract, 4.4; S"),
    figure("e4/row_norms/strategy=spectral/mean", "0.134", "P 4.4"),
    figure("e4/row_norms/strategy=spectral/improvement", "0 %", "P 5.2; S"),
    figure("e4/row_norms/strategy=svd/improvement", "64 %", "P 4.4, 5.2; S"),
)

STANDARD = {"strategy": "standard"}


def gain(strategy: str, component: str) -> Measure:
    """Measure by how many per cent a strategy lowers an error of plain SGD, trial by trial."""
    return improvement({"strategy": strategy}, STANDARD, experiment="e4", component=component)


def left(strategy: str, component: str, than: str = "standard") -> Measure:
    """Measure the error under a strategy in units of the error under another."""
    return compared({"strategy": strategy}, {"strategy": than}, component=component)


def cut_of_kappa(strategy: str) -> dict[str, Measure]:
    """Measure what a strategy does to kappa's error, to log kappa's and to the tail."""
    heavy = {"stream": "own", "strategy": strategy, "component": KAPPA}
    return {
        "cut": gain(strategy, KAPPA),
        "before": typical(KAPPA, strategy="standard"),
        "after": typical(KAPPA, strategy=strategy),
        "log_cut": gain(strategy, LOG_KAPPA),
        "tail": lambda rows: tail_index(select(rows, **heavy).values()),
    }


EXPLAIN_CUT = (
    "Medians exist: the error goes from {before:.3f} to {after:.3f}, trial by trial it falls by "
    "{cut:.0f} %, that of log kappa by {log_cut:.0f} % (n = {cut.n}). The tail index with the "
    "strategy is {tail:.2f}."
)
quoted = partial(no_mean, stream="own", component=KAPPA, **STANDARD)
growth = partial(growth_with_size, experiment="e1", stream="own")

CLAIMS = (
    Claim(
        "e4.multipliers-norms",
        "Multipliers cut norm errors by 67 %.",
        "P 4.4, 5.2; S",
        measures={
            "cut": gain("multipliers", ROW_NORMS),
            "before": typical(ROW_NORMS, strategy="standard"),
            "after": typical(ROW_NORMS, strategy="multipliers"),
        },
        expect={"cut": Between(60, 74)},
        explain="Of plain SGD's row-norm error multipliers take away {cut:.1f} % (n = {cut.n}), "
        "from {before.value:.4f} to {after.value:.4f} in the median; without them, "
        "0.99^200 = 0.1340 is what 200 steps leave of any difference.",
        teaches={"multipliers learn the scale": "holds"},
    ),
    Claim(
        "e4.multipliers-kappa",
        "Multipliers cut the error of kappa by only 10 %.",
        "P 4.4, 5.2; S",
        measures=cut_of_kappa("multipliers"),
        expect={"cut": Between(5, 15)},
        explain=EXPLAIN_CUT,
        quotes=quoted("e4/condition_number/strategy=multipliers/improvement"),
        answers=("Section 3, components",),
    ),
    Claim(
        "e4.spectral-kappa",
        "Spectral regularization cuts the error of kappa by 77 %.",
        "P abstract, 1(5), 4.4, 5.2; S",
        measures=cut_of_kappa("spectral"),
        expect={"cut": Between(70, 84)},
        explain=EXPLAIN_CUT,
        quotes=quoted("e4/condition_number/strategy=spectral/improvement"),
        answers=("W4(a)",),
    ),
    Claim(
        "e4.spectral-norms",
        "Spectral regularization leaves norm errors unchanged.",
        "P 4.4, 5.2; S",
        measures={"left": left("spectral", ROW_NORMS)},
        expect={"left": Between(0.98, 1.02)},
        explain="The row norms' error is {left:.4f} times that of plain SGD in the median of "
        "{left.n} trials.",
    ),
    Claim(
        "e4.svd-middle",
        "SVD correction is a middle ground: 64 % on norms, 32 % on kappa.",
        "P 4.4, 5.2; S",
        measures={
            "rows": gain("svd", ROW_NORMS),
            "of_multipliers": left("svd", LOG_KAPPA, "multipliers"),
            "of_spectral": left("svd", LOG_KAPPA, "spectral"),
            "log_kappa": gain("svd", LOG_KAPPA),
        },
        expect={"rows": Between(58, 70), "of_multipliers": Below(1), "of_spectral": Above(1)},
        explain="It takes {rows:.1f} % of the row norms' error away. What it leaves of |log kappa "
        "- log kappa*| is {of_multipliers:.2f} times what multipliers leave and "
        "{of_spectral:.2f} times what spectral regularization leaves; of plain SGD's it takes "
        "{log_kappa:.0f} % away (n = {rows.n}).",
        answers=("W4(e)",),
    ),
    Claim(
        "e4.trade-off",
        "There is a fundamental trade-off between norms and spectrum: no single strategy treats "
        "both.",
        "P abstract, 4.4, 5.2; S",
        measures={
            f"{strategy}_{name}": gain(strategy, component)
            for strategy in ("multipliers", "spectral", "svd", "hybrid")
            for name, component in (("rows", ROW_NORMS), ("kappa", LOG_KAPPA))
        },
        expect=dict.fromkeys(("multipliers_kappa", "spectral_rows", "svd_kappa"), Below(50)),
        explain="Multipliers take {multipliers_rows:.0f} % of the row norms' error away and "
        "{multipliers_kappa:.0f} % of |log kappa - log kappa*|, spectral regularization "
        "{spectral_rows:.1f} % and {spectral_kappa:.0f} %, SVD correction {svd_rows:.0f} % and "
        "{svd_kappa:.0f} %; a treatment of both would take half of each. It need not be a "
        "conflict: multipliers and spectral regularization together take {hybrid_rows:.0f} % and "
        "{hybrid_kappa:.0f} % (n = {multipliers_kappa.n}).",
    ),
    Claim(
        "e4.hybrid",
        "Combining multipliers and spectral regularization treats both.",
        "P 5.2, 6; S",
        measures={
            "rows": gain("hybrid", ROW_NORMS),
            "log_kappa": gain("hybrid", LOG_KAPPA),
            "multipliers_rows": gain("multipliers", ROW_NORMS),
            "spectral_kappa": gain("spectral", LOG_KAPPA),
        },
        expect={"rows": Above(50), "log_kappa": Above(50)},
        explain="Both together take {rows:.1f} % of the row norms' error away and "
        "{log_kappa:.0f} % of |log kappa - log kappa*| (n = {log_kappa.n}); multipliers alone "
        "{multipliers_rows:.1f} % of the former, spectral regularization alone "
        "{spectral_kappa:.0f} % of the latter.",
    ),
    Claim(
        "all.correctable",
        "Scale errors do not depend on dimension, are correctable by multipliers and vanish; "
        "kappa errors grow, resist and plateau.",
        "P 5.1",
        measures={
            "rows_power": growth(component=ROW_NORMS),
            "rows_cut": gain("multipliers", ROW_NORMS),
            "rows_late": typical(ROW_NORMS, experiment="e9", intervention=None, epoch=1000),
            "kappa_power": growth(component=KAPPA),
            "kappa_cut": gain("multipliers", LOG_KAPPA),
            "kappa_left": compared({"epoch": 2000}, {"epoch": 1000}, experiment="e9",
                                   intervention="none", component=KAPPA),
        },
        expect={
            "rows_power": Between(-0.05, 0.05),
            "rows_cut": Above(50),
            "rows_late": Below(1e-3),
            "kappa_power": Above(0),
            "kappa_cut": Below(50),
            "kappa_left": Above(0.5),
        },
        explain="Row norms: the error grows with size to the power {rows_power:.3f} (experiment "
        "1), multipliers take {rows_cut:.0f} % away (4), and {rows_late:.2g} is left after 1000 "
        "steps (9). Kappa: the power is {kappa_power:.2f}, multipliers take {kappa_cut:.0f} % of "
        "|log kappa - log kappa*| away, and 2000 steps leave {kappa_left:.2f} times the error that "
        "1000 steps leave.",
    ),
)  # fmt: skip

ARMS = ("standard", "multipliers", "spectral", "svd", "hybrid")
MEANS = {
    "condition_number": {"standard": 1.23, "multipliers": 1.11, "spectral": 0.29},
    "row_norms": {"standard": 0.134, "multipliers": 0.044, "spectral": 0.134},
}
PLOT = sheet(
    strips(ROW_NORMS, KAPPA, by="strategy", strategy=ARMS, stream="paper",
           printed=MEANS, title="The paper's ten trials"),
    strips(ROW_NORMS, KAPPA, by="strategy", strategy=ARMS, stream="own",
           title="Trials of our own"),
    tail(KAPPA, by="strategy", stream="own"),
    spectrum_lines("Singular values, hybrid", strategy="hybrid"),
)  # fmt: skip

EXPERIMENT = Experiment(
    number=4,
    title="Corrective strategies",
    section="4.4",
    question=__doc__,
    grid=grid(size=(64,)),
    trials=trials,
    paper=10,
    own=512,  # from 500 on a tail index has an interval
    effort=16.0,
    figures=FIGURES,
    claims=CLAIMS,
    plot=PLOT,
    quick={"own": 6},  # give an interval
)
