"""SGD on a matrix, against SGD on a matrix."""

from collections.abc import Iterator
from itertools import islice

import numpy as np
import pytest
import torch
from scipy.stats import ks_2samp
from torch import Tensor

from kappascope import errors
from kappascope.lab.tasks import Own, Regression, heterogeneous, start
from kappascope.lab.training import Matrix, descend, last
from kappascope.theory import Relaxation, predicted_weights, relaxation, walk


def trials(count: int, key: str, size: int, scale: float = 0.1) -> tuple[Own, Tensor, Tensor]:
    streams = Own(range(count), key)
    random = streams.random()
    return streams, heterogeneous(random, size), start(random, size, scale)


def trained(
    streams: Own, target: Tensor, begin: Tensor, steps: tuple[int, ...], noise: float = 0.01
) -> Iterator[Tensor]:
    batches = Regression(target, noise=noise).batches(streams.random(1))
    for step in descend(Matrix(begin), batches, steps=steps[-1]):
        if step.index in steps:
            yield step.weight.clone()


def products(size: int, rows: int, rate: float, steps: int, count: int) -> Tensor:
    """P by its definition."""
    draw = torch.Generator().manual_seed(size)
    p = torch.eye(size, dtype=torch.float64).repeat(count, 1, 1)
    for _ in range(steps):
        x = torch.randn(count, rows, size, generator=draw, dtype=torch.float64)
        p = p - rate / rows * (p @ x.mT) @ x
    return p


def test_the_weight_is_the_product_of_the_batches_and_the_noise() -> None:
    streams, target, begin = trials(3, "exact", size=7)
    eye, zero = torch.eye(7).double().repeat(3, 1, 1), torch.zeros(3, 7, 7).double()
    (weight,) = trained(streams, target, begin, (40,))
    p = zero + next(trained(streams, zero, eye, (40,), noise=0.0))
    n = next(trained(streams, zero, zero, (40,)))
    torch.testing.assert_close(weight, target + (begin - target) @ p + n, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("size", "rows", "rate", "steps"), [(3, 2, 0.1, 9), (8, 4, 0.05, 30)])
def test_moments_of_the_product_are_exact(size: int, rows: int, rate: float, steps: int) -> None:
    p = products(size, rows, rate, steps, count=20_000)
    setting = Relaxation(size, rate, rows)
    eye = torch.eye(size, dtype=torch.float64)
    square = (p @ p.mT).mean(0)
    torch.testing.assert_close(p.mean(0), setting.mean(steps) * eye, rtol=0, atol=0.006)
    torch.testing.assert_close(square, setting.mean_square(steps) * eye, rtol=0, atol=0.01)
    off, on = setting.spread(steps)
    deviation = p.std(0)
    assert deviation.diagonal().mean() == pytest.approx(on, rel=0.02)
    assert deviation[~eye.bool()].mean() == pytest.approx(off, rel=0.02)


@pytest.mark.parametrize(("size", "steps"), [(6, 100), (32, 200)])
def test_overall_error_and_noise_are_exact_in_the_mean_square(size: int, steps: int) -> None:
    streams, target, begin = trials(150, "overall", size)
    (weight,) = trained(streams, target, begin, (steps,), noise=0.3)
    relative = errors(weight, target)["overall_matrix"]
    expected = Relaxation(size, noise=0.3).overall_error(target, begin, steps)
    assert ((relative / expected) ** 2).mean() == pytest.approx(1, abs=0.03)


def test_noise_floor_is_where_training_ends() -> None:
    streams, target, _ = trials(100, "floor", size=12)
    (weight,) = trained(streams, target, target, (900,), noise=0.5)
    setting = Relaxation(12, noise=0.5)
    assert float((weight - target).std()) == pytest.approx(setting.noise_floor, rel=0.02)
    assert setting.noise_floor == pytest.approx(0.5 * np.sqrt(0.01 / 128), rel=0.01)
    assert setting.noise_variance(10**6) ** 0.5 == pytest.approx(setting.noise_floor)


def test_a_learning_rate_beyond_the_limit_diverges_in_the_mean_square() -> None:
    assert Relaxation(31, learning_rate=0.9, rows=32).converges
    high = Relaxation(31, learning_rate=1.1, rows=32)
    assert not high.converges
    assert high.mean_square(100) > 1
    assert high.noise_floor == np.inf
    p = products(31, 32, 1.1, 40, count=200)
    assert p.square().sum((-2, -1)).mean() > 31


def test_the_model_has_the_moments_of_the_product() -> None:
    setting = Relaxation(12, learning_rate=0.05, rows=8, noise=0.0)
    random = Own(range(4000), "moments").random()
    eye = torch.eye(12).double().repeat(4000, 1, 1)
    (p,) = walk(setting, eye, [60], random.normal)
    assert (p @ p.mT).mean(0).diagonal().mean() == pytest.approx(setting.mean_square(60), rel=0.01)
    assert p.mean(0).diagonal().mean() == pytest.approx(setting.mean(60), rel=0.01)
    off, on = setting.spread(60)
    assert p.std(0).diagonal().mean() == pytest.approx(on, rel=0.05)
    assert p.std(0)[~eye[0].bool()].mean() == pytest.approx(off, rel=0.05)


def test_the_model_has_the_spectrum_of_a_long_product() -> None:
    """Fluctuations of order one, where a single Gaussian matrix would fail."""
    size, rows, rate, steps = 48, 16, 0.05, 160  # h^2 t d / B = 1.2
    true = torch.linalg.svdvals(products(size, rows, rate, steps, count=40)).log().mean(0)
    setting = Relaxation(size, rate, rows, noise=0.0)
    eye = torch.eye(size).double().repeat(200, 1, 1)
    (p,) = walk(setting, eye, [steps], Own(range(200), "long").random().normal)
    model = torch.linalg.svdvals(p).log().mean(0)
    assert (model - true).abs().max() < 0.12
    one = setting.factor(steps, Own(range(200), "one").random().normal)
    assert (torch.linalg.svdvals(one).log().mean(0) - true).abs().max() > 1


STEPS = (50, 200, 500)


@pytest.mark.parametrize(
    ("size", "scale", "noise"), [(16, 0.1, 0.01), (12, 0.1, 1.0), (12, 0.0, 0.0), (16, 1.0, 0.01)]
)
def test_every_component_is_predicted(size: int, scale: float, noise: float) -> None:
    """By distribution; the paper's grid is in benchmarks/prediction.py."""
    streams, target, begin = trials(400, f"every {size} {scale} {noise}", size, scale)
    setting = Relaxation(size, noise=noise)
    predicted = predicted_weights(target, begin, STEPS, streams.random(2).normal, setting)
    measured = trained(streams, target, begin, STEPS, noise=noise)
    for ours, theirs in zip(measured, predicted, strict=True):
        true, model = errors(ours, target), errors(theirs, target)
        for name in true:
            assert ks_2samp(true[name], model[name], method="asymp").pvalue > 1e-4, name
        middle = {name: float(true[name].median()) for name in true}
        for name in ("row_norms", "singular_values", "overall_matrix"):
            assert float(model[name].median()) == pytest.approx(middle[name], rel=0.03)
        kappa = float(model["condition_number"].median())
        assert kappa == pytest.approx(middle["condition_number"], rel=0.25)  # 400 allow no less


def test_the_model_fails_where_one_batch_carries_too_far_and_its_moments_do_not() -> None:
    streams, target, begin = trials(400, "far", size=16)
    setting = Relaxation(16, learning_rate=0.05, rows=1)
    assert setting.reach > 1
    batches = Regression(target, rows=1).batches(streams.random(1))
    weight = last(descend(Matrix(begin), batches, setting.learning_rate, steps=10)).weight
    draws = predicted_weights(target, begin, [10], streams.random(2).normal, setting)
    true, model = errors(weight, target), errors(next(draws), target)
    assert model["condition_number"].median() < 0.5 * true["condition_number"].median()
    expected = setting.overall_error(target, begin, 10)
    assert ((true["overall_matrix"] / expected) ** 2).mean() == pytest.approx(1, abs=0.03)


def test_finer_factors_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, target, begin = trials(1000, "finer", size=16)
    coarse = next(predicted_weights(target, begin, [300], streams.random(2).normal))
    monkeypatch.setattr(relaxation, "FEWEST", 20)
    fine = next(predicted_weights(target, begin, [300], streams.random(3).normal))
    kappas = [errors(weight, target)["condition_number"] for weight in (coarse, fine)]
    assert ks_2samp(*kappas, method="asymp").pvalue > 1e-3


def test_steps_of_one_walk_belong_to_one_run() -> None:
    """Label noise and fluctuations are carried on from look to look."""
    streams, target, begin = trials(2, "one run", size=8)
    normal = streams.random(1).normal
    first, second = islice(predicted_weights(target, begin, [100, 101], normal), 2)
    assert (second - first).norm() < 0.05 * (first - target).norm()


@pytest.mark.parametrize(
    "wrong", [{"size": 0}, {"learning_rate": 0.0}, {"rows": 0}, {"noise": -1.0}]
)
def test_a_setting_without_meaning_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected size, rows"):
        Relaxation(**{"size": 4, **wrong})  # type: ignore[arg-type]
