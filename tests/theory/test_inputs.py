"""SGD with inputs that are not white, against SGD."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from torch import Tensor

from kappascope import errors
from kappascope.lab.tasks import Own, heterogeneous, start
from kappascope.theory import Directions, Relaxation, predicted_weights, steps_to_learn

SIZE, COUNT = 10, 400


def covariance(power: float) -> Tensor:
    draw = torch.Generator().manual_seed(3)
    turn = torch.linalg.qr(torch.randn(SIZE, SIZE, generator=draw, dtype=torch.float64)).Q
    values = 3 * torch.arange(1, SIZE + 1, dtype=torch.float64) ** -power
    return turn @ torch.diag(values) @ turn.mT


def sgd(setting: Directions, left: Tensor, streams: Own) -> Iterator[Tensor]:
    """W_t - W* after each step, by the definition."""
    values, vectors = torch.linalg.eigh(setting.covariance)
    root = vectors @ torch.diag(values.sqrt()) @ vectors.mT
    for x, e in streams.random(1).pairs(setting.rows, SIZE):
        residual = (x @ root) @ left.mT - setting.noise * e
        left = left - setting.learning_rate / setting.rows * residual.mT @ (x @ root)
        yield left


@pytest.mark.parametrize(("power", "noise"), [(1.0, 0.01), (0.5, 0.5), (0.0, 0.01)])
def test_moments_are_exact_and_every_component_is_predicted(power: float, noise: float) -> None:
    streams = Own(range(COUNT), f"inputs {power}")
    random = streams.random()
    target, begin = heterogeneous(random, SIZE), start(random, SIZE)
    setting, looks = Directions(covariance(power), rows=32, noise=noise), (30, 200, 400)
    draws = predicted_weights(target, begin, looks, streams.random(2).normal, setting)
    path = enumerate(islice(sgd(setting, begin - target, streams), looks[-1]), 1)
    for (step, left), weight in zip((x for x in path if x[0] in looks), draws, strict=True):
        mean = setting.mean_weight(target, begin, step)
        assert (target + left - mean).mean(0).abs().max() < 0.05
        _, vectors = torch.linalg.eigh(setting.covariance)
        squares = (left @ vectors).square().sum(-2).mean(0)
        expected = setting.squares(target, begin, step).mean(0)
        np.testing.assert_allclose(squares, expected, rtol=0.12)
        true, model = errors(target + left, target), errors(weight, target)
        overall = setting.overall_error(target, begin, step)
        assert ((true["overall_matrix"] / overall) ** 2).mean() == pytest.approx(1, abs=0.03)
        for name in ("row_norms", "column_norms", "singular_values", "overall_matrix"):
            assert model[name].median() == pytest.approx(float(true[name].median()), rel=0.04)
        kappa = float(true["condition_number"].median())
        assert model["condition_number"].median() == pytest.approx(kappa, rel=0.3)


def test_white_inputs_are_the_isotropic_case() -> None:
    target, begin = torch.eye(5).double(), torch.zeros(5, 5).double()
    white = Directions(torch.eye(5), noise=0.3).overall_error(target, begin, 120)
    torch.testing.assert_close(white, Relaxation(5, noise=0.3).overall_error(target, begin, 120))


def test_a_direction_is_learned_when_its_time_has_come() -> None:
    setting = Directions(torch.diag(torch.tensor([2.0, 0.02]).double()), noise=0.0)
    target, begin = torch.eye(2).double(), torch.zeros(2, 2).double()
    for place, value in ((0, 2.0), (1, 0.02)):
        step = int(steps_to_learn(value, share=0.1))
        left = (target - setting.mean_weight(target, begin, step))[place, place]
        assert float(left) == pytest.approx(0.1, rel=0.03)
    assert steps_to_learn(0.0) == np.inf  # never seen, never learned
    assert steps_to_learn([50.0, 100.0, 150.0, 200.0, 300.0]) == pytest.approx(
        [np.log(0.01) / np.log(0.5), 0, np.log(0.01) / np.log(0.5), np.inf, np.inf]
    )  # beyond a gain of one the error swings, from two on it stays or grows


def test_an_unseen_direction_stays_as_it_started() -> None:
    setting = Directions(torch.diag(torch.tensor([1.0, 0.0])))
    target, begin = torch.eye(2).double()[None], torch.full((1, 2, 2), 0.3).double()
    (weight,) = predicted_weights(
        target, begin, [2000], Own([1], "unseen").random().normal, setting
    )
    torch.testing.assert_close(weight[..., 1], begin[..., 1])
    torch.testing.assert_close(weight[..., 0], target[..., 0], rtol=0, atol=0.01)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 3), torch.tensor([[1.0, 2.0], [0.0, 1.0]]), -torch.eye(2)]
)
def test_what_is_no_covariance_is_refused(wrong: Tensor) -> None:
    with pytest.raises(ValueError, match="covariance"):
        Directions(wrong)
