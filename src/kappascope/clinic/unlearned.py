"""What of a training run is learned: every part of every matrix against what noise would have done.

>>> import torch
>>> start = {"fc.weight": 0.1 * torch.randn(12, 8, generator=torch.Generator().manual_seed(0))}
>>> signal = torch.zeros(12, 8)
>>> signal[0, 0] = 3.0
>>> trained = {"fc.weight": start["fc.weight"] + signal}
>>> found = unlearned(start, trained, "AdamW lr=0.001 weight_decay=0.1", steps=100)
>>> found["fc.weight"]["log_sigma_1"].answer
'beyond noise'
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch.optim import Optimizer

from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.source import Source
from kappascope.clinic.training import Training, Trainings
from kappascope.system.workers import CORES
from kappascope.text import plural
from kappascope.theory.beyond import BEYOND, NOISE, UNDECIDED, PartComparison


@dataclass(frozen=True)
class Unlearned(Mapping[str, Mapping[str, PartComparison]]):
    """Comparisons by matrix and part; ``missing`` says why a matrix has none."""

    matrices: Mapping[str, Mapping[str, PartComparison]]
    missing: Mapping[str, str]

    def __getitem__(self, name: str) -> Mapping[str, PartComparison]:
        return self.matrices[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.matrices)

    def __len__(self) -> int:
        return len(self.matrices)

    def __str__(self) -> str:
        """Say for every part in how many matrices it is what."""
        parts = dict.fromkeys(part for found in self.matrices.values() for part in found)
        lines = [f"{plural(len(self.matrices), 'matrix', 'matrices')} against noise alone:"]
        for part in parts:
            answers = [found[part].answer for found in self.matrices.values() if part in found]
            counts = [f"{answers.count(a)} {a}" for a in (BEYOND, NOISE, UNDECIDED) if a in answers]
            lines.append(f"  {part.replace('_', ' ')}: {', '.join(counts)}")
        return "\n".join(lines)


def unlearned(
    before: Source,
    after: Source,
    optimizer: str | Training | Optimizer | Sequence[Optimizer],
    *,
    steps: int,
    rates: Sequence[float] | None = None,
    gradient: float | None = None,
    include: str | Iterable[str] = (),
    exclude: str | Iterable[str] = (),
    jobs: int = CORES,
) -> Unlearned:
    """Ask of every part of every matrix whether it is beyond what noise alone would have done.

    ``before`` and ``after`` are checkpoints, models or state dicts around ``steps`` steps of an
    ``optimizer``: one of torch's (with a model as ``after``, each matrix gets its group's settings)
    or text such as ``"AdamW lr=0.001 weight_decay=0.1"``. ``rates`` lists the learning rates where
    they changed; ``gradient`` is the root mean square of a gradient's entries, which SGD needs.
    """
    trainings = Trainings.of(optimizer, after, steps, rates, gradient)
    found = diagnose(
        after, before, include=include, exclude=exclude, jobs=jobs, trainings=trainings
    )
    rows = [row for row in found.matrices if row.unlearned]
    missing = {row.name: row.reasons.get("unlearned", row.status) for row in found.matrices}
    matrices = {row.name: {c.part: c for c in row.unlearned or ()} for row in rows}
    return Unlearned(matrices, {name: why for name, why in missing.items() if name not in matrices})
