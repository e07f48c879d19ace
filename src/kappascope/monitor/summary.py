"""A few curves out of many rows: by kind and by depth, for loggers that draw each key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median
from typing import Any

# What a logger shows, the most asked for first; the record on disk has the rest.
BY_KIND = (
    "condition_number", "sigma_max", "sigma_min", "frobenius_norm", "stable_rank", "update_size",
    "swallowed", "signal_relative", "gradient_norm",
)  # fmt: skip
BY_DEPTH = ("condition_number", "sigma_max", "update_size", "swallowed")
ENDS = {0.0: "first", 1.0: "last"}
MAX_DEPTHS = 12  # curves of one quantity by depth: more are binned
MAX_KEYS = 200


def aggregated(
    latest: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, Mapping[str, Any]],
    most: int = MAX_KEYS,
) -> dict[str, float]:
    """Medians of the latest readings by kind and by depth, under at most so many keys.

    A key is ``quantity/kind`` or ``quantity/layer_03``; of a vector its first and last entry.

    >>> facts = {"a": {"kind": "up", "depth": 0}, "b": {"kind": "up", "depth": 1}}
    >>> aggregated({"a": {"sigma_max": 1.0}, "b": {"sigma_max": 3.0}}, facts)
    {'sigma_max/up': 2.0, 'sigma_max/layer_00': 1.0, 'sigma_max/layer_01': 3.0}
    """
    depths = sorted({f["depth"] for f in facts.values() if f.get("depth") is not None})
    width = math.ceil(len(depths) / MAX_DEPTHS) or 1
    bins = {depth: depths[i - i % width] for i, depth in enumerate(depths)}
    kinds: dict[str, list[float]] = {}
    layers: dict[str, list[float]] = {}
    for quantity in BY_KIND:
        for matrix, quantities in latest.items():
            about = facts.get(matrix, {})
            for name, value in _numbers(quantity, quantities.get(quantity)):
                kinds.setdefault(f"{name}/{about.get('kind', 'other')}", []).append(value)
                if quantity in BY_DEPTH and about.get("depth") is not None:
                    key = f"{name}/layer_{bins[about['depth']]:02d}"
                    layers.setdefault(key, []).append(value)
    groups = {**kinds, **layers}
    return {key: median(values) for key, values in list(groups.items())[:most]}


def _numbers(quantity: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, int | float):
        return [(quantity, float(value))] if math.isfinite(value) else []
    pairs = value if isinstance(value, list) else []
    return [(f"{quantity}_{ENDS[i]}", x) for i, x in pairs if i in ENDS and math.isfinite(x)]


def histograms(
    latest: Mapping[str, Mapping[str, Any]], facts: Mapping[str, Mapping[str, Any]]
) -> dict[str, list[float]]:
    """Singular values of all matrices of a kind, where whole spectra were read.

    >>> latest = {"a": {"singular_values": [(0.0, 2.0), (1.0, 1.0)]}}
    >>> histograms(latest, {"a": {"kind": "up", "depth": 0}})
    {'singular_values/up': [2.0, 1.0]}
    """
    spectra: dict[str, list[float]] = {}
    for matrix, quantities in latest.items():
        if values := quantities.get("singular_values"):
            key = f"singular_values/{facts.get(matrix, {}).get('kind', 'other')}"
            spectra.setdefault(key, []).extend(value for _, value in values)
    return spectra
