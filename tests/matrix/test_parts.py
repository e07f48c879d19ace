"""The parts of a matrix: definitions by hand, and what leaves them as they are."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kappascope.matrix.parts import DECILES, PARTS, StartFrame, matrix_parts, spectral_parts


def matrix(rows: int = 7, columns: int = 11, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=random, dtype=torch.float64)


def test_every_part_is_what_numpy_makes_of_its_definition() -> None:
    start, w = matrix(seed=1), matrix()
    found = {name: float(v) for name, v in matrix_parts(w, StartFrame(start)).items()}
    a, b = w.numpy(), start.numpy()
    s = np.linalg.svd(a, compute_uv=False)
    u0, _, vt0 = np.linalg.svd(b)
    expected = {
        "log_norm": np.log(np.sqrt(np.mean(a**2))),
        "row_spread": np.std(np.log(np.linalg.norm(a, axis=1))),
        "column_spread": np.std(np.log(np.linalg.norm(a, axis=0))),
        "log_sigma_1": np.log(s[0]),
        **{f"log_sigma_{d}": np.quantile(np.log(s), d / 100) for d in DECILES},
        "log_sigma_min": np.log(s[-1]),
        "log_kappa": np.log(s[0] / s[-1]),
        "log_stable_rank": np.log((a**2).sum() / s[0] ** 2),
        "effective_rank": (s > 0.01 * s[0]).mean(),
        "alignment": (a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b),
        "top_alignment": (u0[:, 0] @ a @ vt0[0]) ** 2 / (a**2).sum(),
        "bottom_alignment": (u0[:, 6] @ a @ vt0[6]) ** 2 / (a**2).sum(),
    }
    assert found == pytest.approx(expected, abs=1e-12)
    assert set(found) == set(PARTS)


def test_a_stack_has_the_parts_of_each_of_its_matrices() -> None:
    frame = StartFrame(matrix(seed=5))
    stack = torch.stack([matrix(seed=k) for k in range(3)])
    together = matrix_parts(stack, frame)
    for k in range(3):
        alone = matrix_parts(stack[k], frame)
        for name, values in together.items():
            torch.testing.assert_close(values[k], alone[name])


def test_scale_moves_log_parts_alike_and_leaves_the_shape() -> None:
    once, twice = matrix_parts(matrix()), matrix_parts(2 * matrix())
    for name in once:
        is_size = name.startswith("log_sigma") or name == "log_norm"
        moved = float(twice[name] - once[name])
        assert moved == pytest.approx(np.log(2) if is_size else 0.0, abs=1e-12)


def test_values_of_zero_stay_finite() -> None:
    assert all(bool(v.isfinite()) for v in spectral_parts(torch.tensor([1.0, 0.0])).values())
