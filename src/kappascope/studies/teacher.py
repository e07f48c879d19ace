"""Study: a teacher whose weights are known.

Do networks learn the condition number of the matrices they are taught by? Students of the
teacher's own architecture see its answers, without noise, on fresh Gaussian inputs, under SGD with
momentum, Adam and Muon, from one start and one order of data. Each is looked at when its held-out
loss first falls below a level, whenever that is. What permuting hidden units, scaling ReLU units
or LayerNorm leave undetermined is not counted as an error. A fresh start shows who finds the
teacher at all; one near it, what is recovered once in its basin. Every optimizer has four rates
to choose from, for every architecture and start, on seeds of their own.
"""

import math
from collections.abc import Iterator

import torch

from kappascope.bookmarks import Bookmark
from kappascope.components import Components
from kappascope.lab import Batch, Setting, Study
from kappascope.studies.teacher_claims import CLAIMS, LEVELS, tuned
from kappascope.studies.teacher_exhibits import exhibits, plot
from kappascope.studies.teacher_model import (
    ARCHITECTURES,
    OUTER,
    Architecture,
    Network,
    optimizers,
    student,
    teacher,
)
from kappascope.studies.teacher_symmetry import canonical, recovery
from kappascope.tasks import generator

ROWS = 64  # of a batch
HELD_OUT = 512  # inputs; their loss differs from the true one by a few per cent
LOOK = 2  # steps between two looks at the held-out loss: it overshoots a level by per cents
STEPS = 1200  # in which rates fall to zero, as Muon needs: its steps have one length
QUICK = tuple(one for one in ARCHITECTURES if one.activation == "relu")
RATES = {  # half decades about the fastest of a coarse search; SGD's moved up by one after a pilot
    "sgd": (0.1, 0.3, 1.0, 3.0),
    "adam": (0.01, 0.03, 0.1, 0.3),
    "muon": (0.01, 0.03, 0.1, 0.3),
}


def trials(
    seed: int,
    bookmark: Bookmark,
    *,
    stage: str,
    start: str,
    depth: int,
    activation: str,
    variant: str,
    optimizer: str,
    learning_rate: float,
    steps: int,
) -> Iterator[Batch]:
    """Train one student; say what it has recovered at every level it reaches."""
    architecture = Architecture(depth, activation, variant)
    # optimizers share all that is random; "judged": no pilot ever drew from these streams
    key = ("teacher judged", stage, start, str(architecture), seed)
    master = teacher(architecture, generator(*key, "teacher"))
    model = student(master, start, generator(*key, "start"))
    data = generator(*key, "data")
    held_out = torch.randn(HELD_OUT, OUTER, generator=generator(*key, "held out"))
    answers = master(held_out)
    unit = 1 / answers.var(0, correction=0).sum().item()  # of the loss: that of the best constant
    parts = optimizers(optimizer, model, learning_rate)
    log: list[Batch] = []

    @torch.no_grad()
    def scored() -> float:
        return mistake(model, held_out, answers).item() * unit

    for step in bookmark.steps(steps, log, model=model, data=data, **parts):
        for part in parts.values():
            for group in part.param_groups:
                group["lr"] = learning_rate * (1 - step / steps)
        model.zero_grad()
        inputs = torch.randn(ROWS, OUTER, generator=data)
        mistake(model, inputs, master(inputs)).mul(unit).backward()
        for part in parts.values():
            part.step()
        if (step + 1) % LOOK == 0:
            loss = scored()
            for level in reached(log, loss):
                log += look(model, master, level, step + 1, loss)
            if loss < LEVELS[-1] or not math.isfinite(loss):
                break
    yield from log
    yield from ending(model, master, scored())
    if stage == "compare" and optimizer == "adam":
        yield from spectra(model, master)


def mistake(model: Network, inputs: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """Mean squared error, summed over the outputs."""
    return (model(inputs) - answers).square().sum() / len(inputs)


def reached(log: list[Batch], loss: float) -> list[float]:
    """The levels that this loss is the first to be below."""
    before = {row["level"] for row in log}
    return [level for level in LEVELS if loss < level and level not in before]


def look(model: Network, master: Network, level: float, step: int, loss: float) -> list[Batch]:
    """Everything recovered so far."""
    found = recovery(master.architecture, model.matrices, master.matrices)
    whole = {"level": level, "matrix": "all"}
    return [
        *(
            {"level": level, "matrix": matrix, "component": component, "error": error}
            for (matrix, component), error in found.items()
        ),
        {**whole, "component": "steps", "value": float(step)},
        {**whole, "component": "loss", "value": loss},
    ]


def ending(model: Network, master: Network, loss: float) -> Iterator[Batch]:
    """Where the student ended (level 0): its loss, and how far it is from the teacher."""
    distance = math.inf  # where training diverged
    if math.isfinite(loss):
        found = recovery(master.architecture, model.matrices, master.matrices)
        overall = [error for (_, name), error in found.items() if name == "overall_matrix"]
        distance = math.sqrt(sum(error**2 for error in overall) / len(overall))
    for component, value in (("distance", distance), ("loss", loss)):
        yield {"level": 0.0, "matrix": "all", "component": component, "value": value}


def spectra(model: Network, master: Network) -> Iterator[Batch]:
    """Singular values of the first matrix in the end, as they are compared."""
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
    """The trials that tune."""
    return tuple(
        {
            "stage": "tune", "start": start, "depth": one.depth, "activation": one.activation,
            "variant": one.variant, "optimizer": optimizer, "learning_rate": rate, "steps": steps,
        }
        for start in starts
        for one in architectures
        for optimizer, rates in RATES.items()
        for rate in rates
    )  # fmt: skip


def count(setting: Setting) -> int:
    """Two seeds tune every rate, twenty others compare."""
    return 2 if setting["stage"] == "tune" else 20


def seconds(setting: Setting) -> float:
    """Near starts arrive soon; Muon's steps take twice as long."""
    plain = (8e-4 if setting["start"] == "fresh" else 3e-4) * float(setting["steps"] or 0)
    return plain * (2 if setting["optimizer"] == "muon" else 1)


STUDY = Study(
    number=20,
    name="teacher",
    title="A teacher whose weights are known",
    section="review W1(a)",
    question=__doc__,
    grid=settings(ARCHITECTURES, STEPS),
    trials=trials,
    own=count,
    seconds=seconds,
    then=tuned,
    claims=CLAIMS,
    exhibits=exhibits,
    plot=plot,
    quick={
        "grid": settings(QUICK, 300, ("near",)) + settings(QUICK[:2], 300, ("fresh",)),
        "own": lambda setting: 1 if setting["stage"] == "tune" else 6,
    },
)
