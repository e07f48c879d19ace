"""Spectra of trained weights beside those of random matrices of the same shape and norm."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kappascope.clinic.diagnose import diagnose
from kappascope.clinic.examination import Examination
from kappascope.clinic.examine import examine
from kappascope.lab.experiment import Rows
from kappascope.lab.tasks import generator
from kappascope.matrix.components import Components
from kappascope.matrix.spectra import product_singular_values
from kappascope.model.attention import attention
from kappascope.model.matrices import plan, reader
from kappascope.studies.pretrained.changes import FORMATS
from kappascope.studies.pretrained.model import State
from kappascope.theory import MarchenkoPastur

MIN_SIDE = 16  # rows or columns: below, a spectrum is a handful of numbers
UNUSED = ("pooler",)  # read by none of these networks: the sentence encoder's was never trained
DRAWN_LAYER = 2  # the layer whose spectra are drawn: in the middle of six
DRAWS = 16  # of random factors: their products are thin, and log kappa spreads by a few per cent
EXAMINED = ("condition_number", "null_z", "alpha", "stable_rank", "outliers", "null_distance")


def spectrum_rows(state: State, config: Mapping[str, Any]) -> Iterator[Rows]:
    """Yield rows about every matrix of a state dict, and about the products of its heads."""
    chosen = {name: state[name] for name in used(state)}
    for row in diagnose(chosen, spectrum="full").matrices:
        for name in EXAMINED:
            null = row.null_condition_number if name == "condition_number" else None
            yield {**about(row), "component": name, "value": getattr(row, name), "target": null}
        matrix = chosen[row.name].flatten(1).float()
        yield from _edges(row, matrix)
        yield from _rounded(row, matrix)
    for layer in attention(plan(state), config)[0]:
        for product in layer.products(reader(state)):
            where = {"matrix": product.name, "kind": product.kind, "depth": product.depth}
            null = random_product(product.shape, layer.heads.size)
            kappa = {"value": product.condition_number, "target": null}
            yield {**where, "component": "condition_number", **kappa}


def used(state: State) -> list[str]:
    """List matrices that are used, each once, and wide enough to have a spectrum."""
    names: dict[bytes, str] = {}
    for name, tensor in state.items():
        narrow = tensor.ndim < 2 or min(tensor.flatten(1).shape) < MIN_SIDE
        if not narrow and not any(word in name for word in UNUSED):
            names.setdefault(tensor.numpy().tobytes(), name)  # a tied one is stored twice
    return list(names.values())


def about(row: Examination) -> dict[str, Any]:
    """Name the matrix that a row is about."""
    kind = "convolution" if "conv" in row.name else row.kind
    return {"matrix": row.name, "kind": kind, "depth": row.depth}


def _edges(row: Examination, matrix: Tensor) -> Iterator[Rows]:
    """Divide the largest, median and smallest value by those of a random matrix like it."""
    m, n = row.shape
    values = Components(matrix.double()).singular_values.numpy()
    null = MarchenkoPastur(m, n, float(np.linalg.norm(values)) / (m * n) ** 0.5)
    top = null.edges[1]
    parts = {
        "top": values[0] / top,
        "middle": float(np.median(values)) / float(null.quantile(0.5)),
        "bottom": values[-1] / (top / (row.null_condition_number or np.nan)),
    }
    for name, value in parts.items():
        yield {**about(row), "component": name, "value": float(value)}
    if row.depth == DRAWN_LAYER:
        quantiles = 1 - (np.arange(len(values)) + 0.5) / len(values)
        yield {"kind": row.kind, "which": "learned", "values": values}
        yield {"kind": row.kind, "which": "target", "values": null.quantile(quantiles)}


def _rounded(row: Examination, matrix: Tensor) -> Iterator[Rows]:
    """Yield kappa after rounding, and whether the interval given for bf16 covers kappa before."""
    before = row.condition_number
    if before is None:
        return
    for what, function in FORMATS.items():
        after = float(Components(function(matrix).double()).condition_number)
        change = {"change": what, "error": abs(after / before - 1)}
        yield {**about(row), "component": "kappa_rounded", "value": after, **change}
    examined = examine(row.name, matrix.bfloat16())
    low, high = examined.condition_number_low or 1.0, examined.condition_number_high or np.inf
    facts = {"resolved": examined.resolved, "covered": low <= before <= high}
    for name, fact in facts.items():
        yield {**about(row), "component": name, "value": float(fact), "change": "bf16"}


@cache
def random_product(shape: tuple[int, int], size: int) -> float:
    """Return the median kappa of products of Gaussian factors of these shapes."""
    random = generator("pretrained factors", *shape, size)
    left = torch.randn(DRAWS, shape[0], size, generator=random, dtype=torch.float64)
    right = torch.randn(DRAWS, size, shape[1], generator=random, dtype=torch.float64)
    values, _ = product_singular_values(left, right)
    return float((values[:, 0] / values[:, -1]).median())
