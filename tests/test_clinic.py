"""The page of a diagnosis: what was found first, names as text, and every matrix on demand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kappascope.clinic import PLOTTED, findings, groups, legible, opening, page
from kappascope.components import Components
from kappascope.glance import FACTORS, Row, heat, ranked
from kappascope.theory import GaussianNull, MarchenkoPastur
from test_report import HOSTILE, Elements, Visit, browser

__all__ = ["browser"]  # a fixture

SHAPES = {
    "query": (256, 256), "key": (64, 256), "value": (64, 256), "output": (256, 256),
    "gate": (688, 256), "up": (688, 256), "down": (256, 688),
}  # fmt: skip
PATHS = {
    "query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj",
    "output": "self_attn.o_proj", "gate": "mlp.gate_proj", "up": "mlp.up_proj",
    "down": "mlp.down_proj", "embedding": "embed_tokens", "head": "lm_head",
}  # fmt: skip
ERRORS = (*Components.names, "overall_matrix", "log_condition_number")


@cache
def chance(shape: tuple[int, int], points: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """Places and singular values of a random matrix."""
    many = min(shape)
    places = np.unique(np.geomspace(1, many, points).round().astype(int))
    return places, MarchenkoPastur(*shape).quantile(1 - (places - 0.5) / many)


def matrix(name: str, kind: str, depth: int | None, random: Any, **more: Any) -> dict[str, Any]:
    """One as trained models have them: a few large values, a tail that falls."""
    shape = more.get("shape") or SHAPES.get(kind, (1024, 256))
    places, null = chance(tuple(shape))
    many, deviation = min(shape), 0.02 * random.uniform(0.6, 1.5)
    values = deviation * null * (1 + 6 * random.uniform() * places**-0.9)
    values = values * (1 + 1e-3 * random.normal(size=len(values)))
    values[-1] *= random.uniform(0.02, 1)
    kappa = values[0] / values[-1]
    rows = np.sort(deviation * math.sqrt(shape[1]) * random.lognormal(0, 0.15, shape[0]))
    counts, edges = np.histogram(rows, 32)
    cv = float(rows.std() / rows.mean())
    return {
        "name": name, "shape": list(shape), "dtype": "bfloat16", "storage": "bfloat16",
        "status": "ok: all singular values", "method": "svd", "kind": kind, "depth": depth,
        "part_of": None,
        "row_norms": {"min": rows[0], "median": float(np.median(rows)), "max": rows[-1], "cv": cv},
        "column_norms": {"min": 0.1, "median": 0.2, "max": 0.3, "cv": 0.1},
        "sigma_max": values[0], "sigma_2": values[1], "sigma_min": values[-1],
        "condition_number": kappa, "condition_number_low": kappa * 0.97,
        "condition_number_high": kappa * 1.03, "resolved": True,
        "effective_rank": int((values > 0.01 * values[0]).mean() * many),
        "effective_ranks": {"0.001": many, "0.01": many - 3, "0.1": many // 2},
        "stable_rank": many / 7.3, "entropy_rank": many * 0.71,
        "spectral_gap": values[0] - values[1], "frobenius_norm": deviation * math.sqrt(math.prod(shape)),
        "null_z": float(GaussianNull(*shape).z(kappa)), "null_tail": 1e-5, "entry_std": deviation,
        "entry_mean": 1e-5, "entry_kurtosis": 0.4, "alpha": random.uniform(2, 6),
        "alpha_xmin": 0.3, "alpha_distance": 0.05, "alpha_count": 99,
        "edge": deviation * (math.sqrt(shape[0]) + math.sqrt(shape[1])), "outliers": 4,
        "dead_rows": 0, "dead_columns": 0, "outlier_rows": 2, "outlier_columns": 0,
        "null_distance": 0.12, "errors": None, "reasons": {}, "findings": [],
        "plot": {
            "spectrum": [[int(i), float(s)] for i, s in zip(places, values, strict=True)],
            "null": [[int(i), float(s)] for i, s in zip(places, deviation * null, strict=True)],
            "floor": values[0] * 2.0**-9, "rows": {"edges": edges.tolist(), "counts": counts.tolist()},
        },
        **more,
    }  # fmt: skip


def finding(subject: str, rule: str = "dead-rows", **more: Any) -> dict[str, Any]:
    snippet = (
        "from kappascope.corrections import Multipliers\n\n"
        "handle = Multipliers().attach(model, optimizer)\n"
    )
    return {
        "rule": rule, "severity": "warning", "subject": subject,
        "evidence": "12 of 256 rows have less than a millionth of the median norm.",
        "advice": "Rows this small do not take part; prune them or let their norms grow.",
        "correction": "Multipliers", "snippet": snippet, **more,
    }  # fmt: skip


def spoiled(one: dict[str, Any], severity: str, rule: str, **more: Any) -> dict[str, Any]:
    """With a finding."""
    return {**one, "findings": [finding(one["name"], rule, severity=severity)], **more}


def trained(layers: int = 8, seed: int = 0, kinds: tuple[str, ...] = tuple(SHAPES)) -> list[Any]:
    """The matrices of a made-up language model."""
    random = np.random.default_rng(seed)
    many = [matrix("model.embed_tokens.weight", "embedding", None, random, shape=(1024, 256))]
    many += [
        matrix(f"model.layers.{depth}.{PATHS[kind]}.weight", kind, depth, random)
        for depth in range(layers)
        for kind in kinds
    ]
    return [*many, matrix("lm_head.weight", "head", None, random, shape=(1024, 256))]


def document(matrices: list[Any], **more: Any) -> dict[str, Any]:
    told = [one for m in matrices for one in m["findings"]]
    return {
        "schema": "kappascope.diagnosis/1", "source": "models/small-llama", "matrices": matrices,
        "products": [], "reference": None, "findings": told,
        "skipped": [{"name": f"model.layers.{k}.norm.weight", "reason": "one-dimensional"} for k in range(9)],
        "summary": {
            "matrices": len(matrices), "analysed": len(matrices), "failed": 0, "skipped": 9,
            "by_severity": {"critical": 1},
            "verdict": "One matrix needs attention and 3 are worth a look.\n"
            "The condition number of model.layers.3.self_attn.k_proj.weight cannot be told from infinity.\n"
            "All others are conditioned as random matrices of their shapes or somewhat worse.",
        },
        "provenance": {"kappascope": "0.1.0", "torch": "2.10", "threads": 2, "notes": ["a note"]},
        **more,
    }  # fmt: skip


UNKNOWN = dict.fromkeys(("alpha", "stable_rank", "condition_number", "null_z"))


def clinic() -> dict[str, Any]:
    """A model with a bit of everything."""
    many = trained()
    many[2] = spoiled(many[2], "warning", "dead-rows")
    many[5] = spoiled(many[5], "info", "like-initial")
    many[23] = spoiled(
        many[23], "critical", "unresolved-kappa", resolved=False, condition_number=None,
        condition_number_low=5000.0, condition_number_high=None, null_z=None,
        reasons={"condition_number": "infinite: the smallest singular value cannot be told from zero"},
    )  # fmt: skip
    for k in range(30, 42):
        many[k] = spoiled(many[k], "warning", "norm-dispersion")
    many[17] = {
        **many[17],
        "alpha": None,
        "reasons": {"alpha": "needs all singular values: --spectrum full"},
    }
    products = [
        {"name": f"model.layers.{d}.self_attn[{k.lower()}.{h}]", "kind": k, "depth": d, "head": h,
         "sigma_max": 3.0 + h, "sigma_min": 0.01, "condition_number": 300.0 * (d + 1) + h,
         "effective_rank": 12 if h else None, "reasons": {"effective_rank": "not asked for"}}
        for d in range(8) for h in range(4) for k in ("QK", "OV")
    ]  # fmt: skip
    return document(many, products=products)


def compared() -> dict[str, Any]:
    random = np.random.default_rng(1)
    sizes = dict(zip(ERRORS, (0.2, 0.15, 0.02, 3.0, 0.0004, 0.4, 0.01, 0.6, 0.9), strict=True))
    many = [
        {
            **m,
            "errors": {
                name: float(size * random.lognormal(0, 0.5)) for name, size in sizes.items()
            },
        }
        for m in trained()
    ]
    many[3]["errors"]["condition_number"] = None
    return document(many, reference="models/small-llama-base")


def stepped() -> dict[str, Any]:
    steps = [
        {"source": f"step-{1000 * k}", "matrices": [
            {**m, "condition_number": m["condition_number"] * 1.3**k, "plot": None} for m in trained(4)]}
        for k in range(6)
    ]  # fmt: skip
    return document(trained(4), trajectory=steps)
