"""Study: a teacher whose weights are known.

Do networks learn the condition number of the matrices that teach them? Students have the teacher's
own architecture. They see its answers, without noise, on fresh Gaussian inputs. They are trained
under SGD with momentum, Adam and Muon, from one start and in one order of data. Each student is
looked at when its held-out loss first falls below a level, whenever that is. Permuting hidden
units, scaling ReLU units and LayerNorm leave something undetermined in the weights; this is not
counted as an error. A fresh start shows who finds the teacher at all. A start near the teacher
shows what is recovered in its basin. Every optimizer has four rates to choose from, for every
architecture and start, on seeds of their own.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from kappascope.lab.experiment import Rows, Setting, Study
from kappascope.lab.resume import ResumePoint
from kappascope.lab.table import Table
from kappascope.lab.tasks import generator
from kappascope.matrix.components import Components
from kappascope.studies.teacher.claims import CLAIMS
from kappascope.studies.teacher.exhibits import exhibits, plot
from kappascope.studies.teacher.model import (
    ARCHITECTURES,
    LEVELS,
    OUTER,
    Architecture,
    Network,
    optimizers,
    student,
    teacher,
)
from kappascope.studies.teacher.symmetry import canonical, recovery

BATCH = 64  # inputs
HELD_OUT = 512  # inputs; their loss differs from the true one by a few per cent
EVERY = 2  # steps between two held-out losses: they overshoot a level by per cents
STEPS = 1200  # in which rates fall to zero, as Muon needs: its steps have one length
QUICK = tuple(one for one in ARCHITECTURES if one.activation == "relu")
RATES = {  # half decades about the fastest of a coarse search; SGD's moved up by one after a pilot
    "sgd": (0.1, 0.3, 1.0, 3.0),
    "adam": (0.01, 0.03, 0.1, 0.3),
    "muon": (0.01, 0.03, 0.1, 0.3),
}


def trials(
    seed: int,
    resume_point: ResumePoint,
    *,
    stage: str,
    start: str,
    depth: int,
    activation: str,
    variant: str,
    optimizer: str,
    learning_rate: float,
    steps: int,
) -> Iterator[Rows]:
    """Train one student; yield what it has recovered at every level it reaches."""
    architecture = Architecture(depth, activation, variant)
    # optimizers share all that is random; "judged": no pilot ever drew from these streams
    key = ("teacher judged", stage, start, str(architecture), seed)
    master = teacher(architecture, generator(*key, "teacher"))
    model = student(master, start, generator(*key, "start"))
    data = generator(*key, "data")
    held_out = torch.randn(HELD_OUT, OUTER, generator=generator(*key, "held out"))
    answers = master(held_out)
    unit = 1 / answers.var(0, correction=0).sum().item()  # of the loss: that of the best constant
    steppers = optimizers(optimizer, model, learning_rate)
    log: list[Rows] = []

    @torch.no_grad()
    def held_out_loss() -> float:
        return squared_error(model, held_out, answers).item() * unit

    for step in resume_point.steps(steps, log, model=model, data=data, **steppers):
        for stepper in steppers.values():
            for group in stepper.param_groups:
                group["lr"] = learning_rate * (1 - step / steps)
        model.zero_grad()
        inputs = torch.randn(BATCH, OUTER, generator=data)
        squared_error(model, inputs, master(inputs)).mul(unit).backward()
        for stepper in steppers.values():
            stepper.step()
        if (step + 1) % EVERY == 0:
            loss = held_out_loss()
            reached = {row["level"] for row in log}
            for level in LEVELS:
                if loss < level and level not in reached:
                    log += recovered_at(level, model, master, step + 1, loss)
            if loss < LEVELS[-1] or not math.isfinite(loss):
                break
    yield from log
    yield from end_rows(model, master, held_out_loss())
    if stage == "compare" and optimizer == "adam":
        yield from first_spectra(model, master)


def squared_error(model: Network, inputs: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Return the mean over inputs of the squared error, summed over the outputs."""
    return (model(inputs) - answers).square().sum() / len(inputs)


def recovered_at(
    level: float, model: Network, master: Network, step: int, loss: float
) -> list[Rows]:
    """Compare every matrix with the teacher's at the step that first falls below a level."""
    errors = recovery(master.architecture, model.matrices, master.matrices)
    whole = {"level": level, "matrix": "all"}
    return [
        *(
            {"level": level, "matrix": matrix, "component": component, "error": error}
            for (matrix, component), error in errors.items()
        ),
        {**whole, "component": "steps", "value": float(step)},
        {**whole, "component": "loss", "value": loss},
    ]


def end_rows(model: Network, master: Network, loss: float) -> Iterator[Rows]:
    """Yield where the student ended (level 0): its loss and its distance from the teacher."""
    distance = math.inf  # where training diverged
    if math.isfinite(loss):
        errors = recovery(master.architecture, model.matrices, master.matrices)
        overall = [error for (_, name), error in errors.items() if name == "overall_matrix"]
        distance = math.sqrt(sum(error**2 for error in overall) / len(overall))
    for component, value in (("distance", distance), ("loss", loss)):
        yield {"level": 0.0, "matrix": "all", "component": component, "value": value}


def first_spectra(model: Network, master: Network) -> Iterator[Rows]:
    """Yield the final singular values of the first matrix, student's and teacher's."""
    architecture = master.architecture
    for which, network in (("target", master), ("learned", model)):
        first = canonical(architecture, network.matrices)[0][:, :-1]
        values = Components(first).singular_values
        if architecture.variant == "layernorm":
            values = values[:-1]  # the last is that of the subtracted mean row
        yield {"which": which, "matrix": "first", "values": values}


def settings(
    architectures: tuple[Architecture, ...], steps: int, starts: tuple[str, ...] = ("fresh", "near")
) -> tuple[dict[str, str | int | float], ...]:
    """List the settings of the trials that tune learning rates."""
    return tuple(
        {"stage": "tune", "start": start, **asdict(architecture),
         "optimizer": optimizer, "learning_rate": rate, "steps": steps}
        for start in starts
        for architecture in architectures
        for optimizer, rates in RATES.items()
        for rate in rates
    )  # fmt: skip


def best_rates(rows: Table) -> Iterator[dict[str, Any]]:
    """Compare every architecture, start and optimizer at the rate that reaches most levels soonest.

    Where no rate reaches any level, it is the one that ends at the lowest loss.
    """
    names = ("start", "depth", "activation", "variant", "optimizer", "steps", "learning_rate")
    arms: dict[tuple[Any, ...], dict[float, list[dict[str, Any]]]] = {}
    for row in rows.where(stage="tune", matrix="all").rows.to_pylist():
        *arm, rate = (row[name] for name in names)
        arms.setdefault(tuple(arm), {}).setdefault(rate, []).append(row)

    def rank(trials: list[dict[str, Any]]) -> tuple[float, float, float]:
        steps = [row["value"] for row in trials if row["component"] == "steps"]
        final = [row["value"] for row in trials if row["component"] == "loss" and not row["level"]]
        worst = float(np.nan_to_num(max(final), nan=np.inf))
        return -len(steps), float(np.sum(np.log(steps))), worst

    for arm_values, rates in arms.items():
        best = min(rates, key=lambda rate: rank(rates[rate]))
        yield {"stage": "compare", **dict(zip(names, (*arm_values, best), strict=True))}


def seconds(setting: Setting) -> float:
    """Estimate the time of a trial: near starts arrive soon, Muon's steps take twice as long."""
    plain = (8e-4 if setting["start"] == "fresh" else 3e-4) * float(setting["steps"] or 0)
    return plain * (2 if setting["optimizer"] == "muon" else 1)


STUDY = Study(
    number=20,
    name="teacher",
    title="A teacher whose weights are known",
    section="review W1(a)",
    question=__doc__,
    finding=(
        "κ is not learned worse than the rest. With Adam the error of log κ is {{teacher.special "
        "ratios/(adam, fresh, loss 0.1)|.2f|interval}} times that of the whole matrix at a loss "
        "of a tenth, from fresh starts, and {{teacher.special ratios/(adam, near, loss "
        "0.001)|.2f|interval}} times at a loss of a thousandth, from starts near the teacher "
        "[[teacher.special fails, teacher.stays fails]]. Adam is not worse at it than SGD in "
        "general [[teacher.adam fails]]. Three layers leave a larger error than two "
        "[[teacher.depth holds]]."
    ),
    grid=settings(ARCHITECTURES, STEPS),
    trials=trials,
    own=lambda setting: 2 if setting["stage"] == "tune" else 20,
    seconds=seconds,
    then=best_rates,
    claims=CLAIMS,
    exhibits=exhibits,
    plot=plot,
    quick={
        "grid": settings(QUICK, 300, ("near",)) + settings(QUICK[:2], 300, ("fresh",)),
        "own": lambda setting: 1 if setting["stage"] == "tune" else 6,
    },
)
