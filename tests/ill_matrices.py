"""Matrices with one flaw among trained ones, and what the rules say of them."""

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from kappascope.clinic.atlas import Atlas, TrainedRange
from kappascope.clinic.examination import Examination, Finding
from kappascope.clinic.examine import examine
from kappascope.clinic.judgement import judgement
from kappascope.clinic.symptoms import Measurements
from kappascope.model.attention import Product
from kappascope.model.chains import Chain
from kappascope.model.skipped import Skipped

NORMS = TrainedRange(24, 3, 0.01, 0.35, {}, (0.3495, 0.3498, 0.35))
TRAINED = Atlas({("up", shape, "row_norm_cv"): NORMS for shape in ("square", "tall")})


def gaussian(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def with_values(values: Tensor, rows: int, columns: int) -> Tensor:
    u, _, vt = torch.linalg.svd(gaussian(rows, columns), full_matrices=False)
    return (u * values) @ vt


def trained(rows: int = 96, columns: int = 64) -> Tensor:
    """A spectrum that chance does not give, and nothing else remarkable."""
    values = torch.linspace(3, 0.5, min(rows, columns), dtype=torch.float64)
    return with_values(values, rows, columns)


def changed(change: Callable[[Tensor], object], matrix: Tensor | None = None) -> Tensor:
    result = (trained() if matrix is None else matrix).clone()
    change(result)
    return result


def findings(
    rows: Iterable[Examination],
    products: Iterable[Product] = (),
    chains: Iterable[Chain] = (),
    unsound: Iterable[Skipped] = (),
) -> tuple[Finding, ...]:
    model = Measurements(
        tuple(rows), tuple(products), tuple(chains), tuple(unsound), given_atlas=TRAINED
    )
    return judgement(model).findings


def sick(
    matrix: Tensor | Examination, kind: str = "up", name: str = "ill.weight"
) -> tuple[Finding, ...]:
    """The findings of a matrix among healthy, trained ones."""
    healthy = [examine(f"{i}.weight", trained(80 + i)) for i in range(3)]
    row = matrix if isinstance(matrix, Examination) else examine(name, matrix)
    rows = [*healthy, replace(row, kind=kind)]
    return tuple(one for one in findings(rows) if one.subject == name)


def severities(found: tuple[Finding, ...]) -> dict[str, str]:
    return {one.rule: one.severity for one in found}


def taught(steps: int) -> nn.Sequential:
    """A small network that has learned something, if it was given the time."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 48)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        x = torch.randn(32, 48)
        optimizer.zero_grad()
        (model(x) - x.roll(1, 1).sign()).square().mean().backward()
        optimizer.step()
    return model
