"""Spectra of checkpoints beside those of random matrices."""

import numpy as np
import pytest
import torch

from kappascope.lab.tasks import generator
from kappascope.studies.pretrained.spectra import random_product, spectrum_rows


def test_the_anatomy_names_every_used_matrix_once_with_its_kappa() -> None:
    random = generator("anatomy")
    heads = [f"layers.2.self_attn.{x}_proj.weight" for x in "qkvo"]
    state = {name: torch.randn(32, 32, generator=random) for name in heads}
    state |= {
        "layers.2.mlp.up_proj.weight": torch.randn(64, 32, generator=random),
        "pooler.dense.weight": torch.randn(32, 32, generator=random),
        "lm_head.weight": state[heads[0]].clone(),
        "narrow.weight": torch.randn(8, 32, generator=random),
        "norm.weight": torch.ones(32),
    }
    rows = list(spectrum_rows(state, {"hidden_size": 32, "num_attention_heads": 2}))
    kappas = {r["matrix"]: r for r in rows if r.get("component") == "condition_number"}
    whole = {name: row for name, row in kappas.items() if row["kind"] not in ("QK", "OV")}
    assert set(whole) == {*heads, "layers.2.mlp.up_proj.weight"}
    for name, row in whole.items():
        assert row["value"] == pytest.approx(np.linalg.cond(state[name].double().numpy()), rel=1e-6)
    assert len(kappas) - len(whole) == 4  # QK and OV of two heads
    ratios = [r["value"] for r in rows if r.get("component") == "middle"]
    assert all(0.9 < ratio < 1.1 for ratio in ratios)  # random matrices are like chance
    covered = [r["value"] for r in rows if r.get("component") == "covered"]
    assert len(covered) == 5 and all(covered)
    assert len([r for r in rows if "values" in r]) == 2 * 5  # each beside its null


def test_products_of_random_factors_are_known() -> None:
    assert random_product((400, 400), 1) == 1.0
    random = np.random.default_rng(0)
    drawn = [random.standard_normal((60, 8)) @ random.standard_normal((8, 50)) for _ in range(50)]
    values = [np.linalg.svd(product, compute_uv=False) for product in drawn]
    expected = np.median([one[0] / one[7] for one in values])
    assert random_product((60, 50), 8) == pytest.approx(expected, rel=0.1)
