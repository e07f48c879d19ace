"""Experiments and studies that take milliseconds, well-behaved and failing ones."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from kappascope.corrections import Hybrid
from kappascope.lab.claims import Below, Claim, Printed
from kappascope.lab.experiment import Exhibit, Experiment, Rows, Setting, Study, grid
from kappascope.lab.resume import ResumePoint
from kappascope.lab.statistics import mean, median
from kappascope.lab.table import Table
from kappascope.lab.tasks import generator


def trials(streams: Any, size: int, pause: float = 0.0) -> Iterator[Rows]:
    """Norms of random matrices, after a rest."""
    time.sleep(pause)
    matrix = streams.random().normal(size, size)
    for epoch in (1, 2):
        error = epoch * matrix.norm(dim=(-2, -1))
        yield {"epoch": epoch, "component": "frobenius_norm", "error": error, "value": None}
    yield {"which": "target", "values": matrix.double().norm(dim=-1)}


def misfortune(streams: Any, kind: str) -> Iterator[Rows]:
    """Everything that can happen to a trial."""
    match kind:
        case "raises":
            raise ValueError("no \x1b[31mred\x1b[0m\nlines")
        case "hangs":
            time.sleep(600)
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "memory":
            raise MemoryError
        case "exits":
            sys.exit(3)
        case "wrong shape":
            yield {"component": "row_norms", "error": torch.zeros(len(streams.seeds) + 1)}
        case "nan":
            yield {"component": "row_norms", "error": torch.full((len(streams.seeds),), torch.nan)}
    yield {"component": "column_norms", "error": torch.ones(len(streams.seeds))}


def norm(table: Table) -> Any:
    return median(table.where(epoch=1).values())


TOY = Experiment(
    number=1,
    title="Toy",
    section="0",
    question="How large is a random matrix?",
    grid=grid(size=(2, 4), pause=(0.0,)),
    trials=trials,
    paper=5,
    own=130,
    figures=(
        Printed("e1/size=2/mean", "mean", "2", lambda t: mean(t.where(size=2).values()).value),
        Printed("e1/size=99/mean", "mean", "2", lambda t: t.where(nothing=2).values().mean()),
    ),
    claims=(
        Claim(
            "e1.small",
            "norms are small",
            "0",
            {"norm": norm},
            {"norm": Below(100)},
            "It is {norm:.2f}.",
        ),
        Claim(
            "e1.absent",
            "what is not there",
            "0",
            {"absent": lambda t: t.missing},
            {"absent": Below(1)},
            "?",
        ),
    ),
    quick={"own": 10},
)
SLOW = Experiment(2, "Slow", "0", "?", grid(size=(2,), pause=(0.4,)), trials, own=64 * 12)
KINDS = ("fine", "raises", "killed", "memory", "exits", "wrong shape", "nan")
BAD = Experiment(3, "Bad", "0", "?", grid(kind=KINDS), misfortune, own=2)


def lessons(
    seed: int, resume_point: ResumePoint, stage: str, rate: float, pause: float
) -> Iterator[Rows]:
    """A layer that learns to double, corrected, with a rest before every step."""
    resume_point.every = 0.0
    data, log = generator("toy", stage, seed), list[dict[str, Any]]()
    model = torch.nn.Linear(4, 4)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    handle = Hybrid().attach(model, optimizer)
    for step in resume_point.steps(
        20, log, model=model, optimizer=optimizer, hand=handle, data=data
    ):
        time.sleep(pause)
        x = torch.randn(8, 4, generator=data)
        loss = (model(x) - 2 * x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.append({"epoch": step, "component": "loss", "value": loss.item()})
    handle.close()
    yield from log
    yield {"component": "seconds", "value": time.perf_counter()}
    yield {"which": "learned", "values": model.weight.detach().norm(dim=1)}


def best(rows: Table) -> tuple[Setting, ...]:
    """The rate with the lowest loss."""
    ends = rows.where(epoch=19).rows.to_pylist()
    found = min(ends, key=lambda row: row["value"])
    return ({"stage": "compare", "rate": found["rate"], "pause": found["pause"]},)


def shown(rows: Table) -> Iterator[Exhibit]:
    losses = median(rows.where(epoch=19).values("value"))
    yield Exhibit("Losses", ("loss", "seconds"), ((f"{losses:.2f}", "[1]"),), "In the end.")


STUDY = Study(
    number=22,
    title="Doubling",
    section="review W1",
    question="Can it double?",
    grid=grid(stage=("tune",), rate=(0.01, 0.1), pause=(0.0,)),
    trials=lessons,
    own=lambda setting: 1 if setting["stage"] == "tune" else 8,
    name="toy",
    then=best,
    exhibits=shown,
    finding="Not yet: the loss is {{toy.learns loss|.0f}} [[toy.learns undecided]].",
    claims=(
        Claim("toy.learns", "it learns", "0",
              {"loss": lambda t: median(t.where(epoch=19).values("value"))},
              {"loss": Below(100)}, "It is {loss:.2f}."),
    ),
    quick={"own": 1},
)  # fmt: skip
LASTING = Study(23, "Lasting", "0", "?", grid(stage=("tune",), rate=(0.1,), pause=(0.1,)), lessons,
                own=2, name="lasting")  # fmt: skip
