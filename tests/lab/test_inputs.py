"""Inputs have the moments they say, and belong to their trial."""

import pytest
import torch

from kappascope.lab.inputs import INPUTS, digits
from kappascope.lab.tasks import Own, Regression, heterogeneous, start


@pytest.mark.parametrize("name", INPUTS)
class TestEveryKindOfInputs:
    """What holds for each, the next one included."""

    def test_has_the_moments_it_says(self, name: str) -> None:
        source = INPUTS[name](64)
        drawn = source.draw(Own([0], name).random(), 40_000)[0]
        found = drawn.mT @ drawn / len(drawn)
        torch.testing.assert_close(source.moments.diagonal().mean().item(), 1.0)
        off = torch.linalg.matrix_norm(found - source.moments)
        assert off < 0.05 * torch.linalg.matrix_norm(source.moments)

    def test_a_trial_is_shown_the_same_in_any_company(self, name: str) -> None:
        source = INPUTS[name](64)
        many, one = (source.draw(Own(seeds, "k").random(), 5) for seeds in ([3, 8], [8]))
        assert torch.equal(many[1], one[0])

    def test_the_loss_is_that_of_the_answers(self, name: str) -> None:
        source, random = INPUTS[name](64), Own([0], "loss").random()
        target, weight = heterogeneous(random, 64), start(random, 64)
        x = source.draw(random, 40_000)
        wrong, answers = x @ (weight - target).mT, x @ target.mT
        measured = wrong.square().sum() / answers.square().sum()
        torch.testing.assert_close(source.loss(target)(weight).item(), measured.item(), rtol=0.02,
                                   atol=0)  # fmt: skip

    def test_the_mean_gradient_follows_the_moments(self, name: str) -> None:
        source, random = INPUTS[name](64), Own([0], "slope").random()
        target = heterogeneous(random, 64)
        batch = next(source.batches(Regression(target, rows=40_000), random))
        slope, wanted = batch.gradient(0 * target), -target @ source.moments
        assert (slope - wanted).norm() < 0.05 * wanted.norm()

    def test_directions_take_the_moments_apart(self, name: str) -> None:
        source = INPUTS[name](64)
        variances, directions = source.directions()
        assert (variances.diff() <= 1e-12).all() and (variances >= 0).all()
        torch.testing.assert_close(directions * variances @ directions.mT, source.moments)


def test_digits_have_64_pixels() -> None:
    with pytest.raises(ValueError, match="64 pixels"):
        digits(32)
