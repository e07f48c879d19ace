"""What looks as it was drawn: fresh models do, and a little training shows."""

import pytest
import torch

from fresh_models import FAMILIES, examined
from ill_matrices import gaussian, taught
from kappascope.clinic.examine import examine
from kappascope.clinic.fresh import is_fresh, usual_distance
from kappascope.clinic.symptoms import Measurements


def test_training_that_the_spectrum_hides_shows_in_the_entries() -> None:
    counts = [sum(map(is_fresh, examined(taught(steps)))) for steps in (0, 20)]
    assert counts[0] == 3 and counts[1] <= 1


def test_a_fresh_model_looks_fresh() -> None:
    torch.manual_seed(3)
    model = Measurements(tuple(examined(FAMILIES["gpt"]())))
    large = [row for row in model.rows if min(row.shape) >= 32]
    assert sum(is_fresh(row, model.layers) for row in large) >= 0.99 * len(large)


@pytest.mark.parametrize("shape", [(32, 32), (40, 400), (128, 96)])
def test_fresh_spectra_stay_below_the_usual_distance(shape: tuple[int, int]) -> None:
    rows = [examine("w", gaussian(*shape, seed=seed)) for seed in range(100)]
    beyond = sum(row.null_distance > usual_distance(row) for row in rows)
    assert beyond <= 2  # one in a thousand


def test_little_training_shows() -> None:
    weight = gaussian(256, 256) / 16
    weight += 0.1 * torch.outer(*gaussian(2, 256)) / 16  # one direction, a tenth of the norm
    assert not is_fresh(examine("w", weight))
