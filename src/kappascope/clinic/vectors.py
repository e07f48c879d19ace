"""The rows of gains, biases and running statistics, which act beside matrices."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kappascope.matrix.precision import FloatGrid

MOST_KEPT = 2**16  # entries of a vector that are kept to be compared with others
Role: TypeAlias = Literal["gain", "bias", "mean", "variance", "other"]
_ROLES: dict[Role, str] = {
    "mean": "running_mean|moving_mean",
    "variance": "running_var|moving_variance",
    "gain": "weight|gamma|gain|scale|g",
    "bias": r"(\w+_)?bias(_\w+)?|beta|b",
}
START = {"gain": 1.0, "bias": 0.0, "mean": 0.0, "variance": 1.0}  # of nearly every initialisation


@dataclass(frozen=True, eq=False)
class Vector:
    """What is known of a vector: the value of all its entries if they are equal, and its numbers.

    >>> one = Vector.of("norm.weight", torch.ones(8))
    >>> one.role, one.constant, one.is_at_start
    ('gain', 1.0, True)
    """

    name: str
    count: int
    dtype: str
    constant: float | None
    values: Tensor | None = field(default=None, repr=False)

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Vector:
        """Look at a vector of finite numbers."""
        flat = tensor.detach().flatten()
        is_constant = flat.numel() > 0 and bool((flat == flat[0]).all())
        return cls(
            name,
            flat.numel(),
            str(tensor.dtype).removeprefix("torch."),
            float(flat[0]) if is_constant else None,
            flat.double() if flat.numel() <= MOST_KEPT else None,
        )

    @property
    def role(self) -> Role:
        """What it does, by its name."""
        leaf = self.name.rstrip("'").rpartition(".")[2]
        return next((role for role, names in _ROLES.items() if re.fullmatch(names, leaf)), "other")

    @property
    def is_at_start(self) -> bool:
        """Whether all entries have the value with which training begins."""
        return self.constant is not None and self.constant == START.get(self.role)

    def differs_by_one(self, other: Vector) -> bool:
        """Tell whether every entry is that of the other and one, or less one, up to rounding.

        >>> norm = torch.tensor([0.5, 0.25])
        >>> Vector.of("g", 1 + norm).differs_by_one(Vector.of("g", norm))
        True
        """
        if self.values is None or other.values is None or self.count != other.count:
            return False
        eps = max(FloatGrid.of(getattr(torch, one.dtype)).eps for one in (self, other))
        distance = self.values - other.values
        largest = torch.maximum(self.values.abs(), other.values.abs()).clamp(min=1)
        return any(bool(((distance - by).abs() <= eps * largest).all()) for by in (1.0, -1.0))
