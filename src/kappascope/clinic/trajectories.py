"""Checkpoints of one run: which there are, in the order of their steps, and how each matrix went.

>>> in_step_order(["run/step100.pt", "run/step20.pt"])
['run/step20.pt', 'run/step100.pt']
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kappascope.checkpoints.folders import choose_files
from kappascope.checkpoints.formats import Malformed
from kappascope.clinic.diagnosis import Diagnosis, short_sources
from kappascope.clinic.source import WEIGHT_SUFFIXES

TRAJECTORY_LINES = 24  # of matrices, as many as a screen holds
_NUMBER = re.compile(r"\d+")


def in_step_order(paths: Sequence[str]) -> list[str]:
    """Sort paths that differ in a number alone by that number; others stay as they were given.

    >>> in_step_order(["tuned.pt", "base.pt"])
    ['tuned.pt', 'base.pt']
    """
    if len({_NUMBER.sub("#", path) for path in paths}) > 1:
        return list(paths)
    return sorted(paths, key=lambda path: [int(digits) for digits in _NUMBER.findall(path)])


def steps(paths: Sequence[str]) -> list[str]:
    """Return the checkpoints that are meant, in order: a folder of steps stands for all of them.

    >>> steps(["nowhere.pt"])
    ['nowhere.pt']
    """
    found = [step for path in in_step_order(paths) for step in _steps_in(Path(path)) or [path]]
    return in_step_order(found) if len(paths) > 1 else found


def _steps_in(folder: Path) -> list[str]:
    """Return the steps in a folder that is no checkpoint itself; nothing if there are none."""
    try:
        if not folder.is_dir() or _is_checkpoint(folder):
            return []
        inner = sorted(folder.iterdir())
    except OSError:  # not ours to look at: who opens it will say why
        return []
    # what is no step has no number in its name: the last epoch again, a log, a configuration
    numbered = [path for path in inner if _NUMBER.search(path.name)]
    members = [str(path) for path in numbered if path.is_dir() and _is_checkpoint(path)]
    members = members or [
        str(path) for path in numbered if path.suffix in WEIGHT_SUFFIXES and path.is_file()
    ]
    is_one_run = len({_NUMBER.sub("#", Path(member).name) for member in members}) == 1
    is_sharded = any(re.search(r"-of-\d{5}", member) for member in members)
    return in_step_order(members) if is_one_run and len(members) > 1 and not is_sharded else []


def _is_checkpoint(folder: Path) -> bool:
    try:
        choose_files(folder)
    except (Malformed, OSError):
        return False
    return True


@dataclass(frozen=True)
class MatrixTrajectory:
    """The way of one matrix through the steps: a row of a heat map of steps and layers.

    ``kappas`` are condition numbers, or the least that they can be; ``moves`` are relative changes
    of the matrix since the step before. ``None`` stands where a step has none.
    """

    name: str
    depth: int | None
    kind: str
    kappas: tuple[float | None, ...]
    moves: tuple[float | None, ...]

    @property
    def moved(self) -> float:
        """The largest move in one step, by which trajectories are ordered."""
        return max((move for move in self.moves if move is not None), default=0.0)


def matrix_trajectories(diagnoses: Sequence[Diagnosis]) -> list[MatrixTrajectory]:
    """Return a row for each matrix of the last step, what moved most first.

    >>> matrix_trajectories([Diagnosis("1.pt")])
    []
    """
    tables = [{row.name: row for row in step.matrices} for step in diagnoses]
    found = []
    for row in diagnoses[-1].matrices:
        rows = [table.get(row.name) for table in tables]
        kappas = tuple(each.kappa if each else None for each in rows)
        moves = tuple((each.errors or {}).get("overall_matrix") if each else None for each in rows)
        found.append(MatrixTrajectory(row.name, row.depth, row.kind, kappas, moves))
    return sorted(found, key=lambda each: each.moved, reverse=True)


def trajectory_lines(diagnoses: Sequence[Diagnosis]) -> Iterator[str]:
    """Yield a line for each matrix: how far it went in each step, and its kappa then and now."""
    from kappascope.text import number

    rows = matrix_trajectories(diagnoses)
    if not any(row.moved for row in rows):
        return
    names = short_sources(diagnoses)
    yield f"What moved most, step by step from {names[0]} to {names[-1]} (relative change; κ):"
    largest = max(row.moved for row in rows)
    for row in rows[:TRAJECTORY_LINES]:
        bars = "".join(_bar(move, largest) for move in row.moves[1:])
        ends = f"{number(row.moved, 2)}; κ {number(row.kappas[0])} → {number(row.kappas[-1])}"
        yield f"    {bars}  {row.name.removesuffix('.weight')}  {ends}"
    if len(rows) > TRAJECTORY_LINES:
        yield f"    {len(rows) - TRAJECTORY_LINES} more; --table has all of them."


def _bar(move: float | None, largest: float) -> str:
    blocks = "▁▂▃▄▅▆▇█"
    return " " if move is None else blocks[min(7, int(8 * move / largest))]
