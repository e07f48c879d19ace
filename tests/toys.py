"""Experiments that take milliseconds."""

import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

from kappascope.claims import Below, Claim, Printed
from kappascope.lab import Batch, Experiment, grid
from kappascope.statistics import Table, mean, median


def trials(streams: Any, size: int, pause: float = 0.0) -> Iterator[Batch]:
    """Norms of random matrices, after a rest."""
    time.sleep(pause)
    matrix = streams.random().normal(size, size)
    for epoch in (1, 2):
        error = epoch * matrix.norm(dim=(-2, -1))
        yield {"epoch": epoch, "component": "frobenius_norm", "error": error, "value": None}
    yield {"which": "target", "values": matrix.double().norm(dim=-1)}


def misfortune(streams: Any, kind: str) -> Iterator[Batch]:
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
        Claim("e1.small", "norms are small", "0", norm, Below(100), "It is {0:.2f}."),
        Claim("e1.absent", "what is not there", "0", lambda t: t.missing, Below(1), "?"),
    ),
    quick={"own": 10},
)
SLOW = Experiment(2, "Slow", "0", "?", grid(size=(2,), pause=(0.4,)), trials, own=64 * 12)
KINDS = ("fine", "raises", "killed", "memory", "exits", "wrong shape", "nan")
BAD = Experiment(3, "Bad", "0", "?", grid(kind=KINDS), misfortune, own=2)
