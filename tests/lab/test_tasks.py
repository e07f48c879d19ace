"""Streams are the trials' own, targets are what they say, condensed batches have the same law."""

from itertools import islice

import numpy as np
import pytest
import torch
from scipy import stats

from kappascope.lab.tasks import (
    STRUCTURES,
    LinearBatch,
    Own,
    Paper,
    Regression,
    Streams,
    Teacher,
    heterogeneous,
    low_rank,
    noiseless,
    start,
)

BOTH = [Paper, lambda seeds: Own(seeds, key="tests")]


def test_a_paper_trial_draws_what_numpys_legacy_generator_draws() -> None:
    random = Paper([0, 3]).random(offset=7)
    expected = np.random.RandomState(42 + 300 + 7).standard_normal(10)
    assert np.array_equal(random.normal(4)[1], expected[:4])
    assert np.array_equal(random.normal(2, 3)[1].flatten(), expected[4:])


@pytest.mark.parametrize("streams", BOTH)
@pytest.mark.parametrize("size", [8, 64, 96])
def test_a_trials_numbers_do_not_depend_on_who_rides_along(streams, size: int) -> None:
    def numbers(block: Streams) -> torch.Tensor:
        random = block.random()
        pairs = islice(random.condensed(64, size), 7)
        drawn = [random.normal(3, 5).flatten(1), *(t.flatten(1) for pair in pairs for t in pair)]
        return torch.cat(drawn, dim=1)

    assert torch.equal(numbers(streams([0, 1, 2, 3]))[2:3], numbers(streams([2])))


def test_own_streams_differ_by_key_seed_and_offset() -> None:
    draws = [
        Own([0], "a").random().normal(4),
        Own([0], "b").random().normal(4),
        Own([1], "a").random().normal(4),
        Own([0], "a").random(1).normal(4),
        Own([2**32], "a").random().normal(4),  # a seed of more than 32 bits is another seed
    ]
    assert len({tuple(draw.flatten().tolist()) for draw in draws}) == len(draws)


def test_single_precision_draws_the_numbers_of_double_precision() -> None:
    single = Own([0], "a").random(dtype=torch.float32).normal(100)
    double = Own([0], "a").random().normal(100)
    assert single.dtype == torch.float32 and double.dtype == torch.float64
    assert torch.equal(single.double(), double)


def test_own_numbers_are_standard_normal() -> None:
    drawn = Own(range(10), "normal").random().normal(2000).flatten()
    assert stats.kstest(drawn, "norm").pvalue > 0.001


def test_the_papers_target_has_lognormal_row_scales() -> None:
    scales = heterogeneous(Own(range(20), "rows").random(), 64).square().sum(-1) / 2
    # log of exp(z) times a chi-square of 64 degrees over 64: variance 1 + about 2/64
    assert scales.log().std().item() == pytest.approx((1 + 2 / 64) ** 0.5, rel=0.1)


def test_low_rank_targets_have_a_quarter_of_the_rank() -> None:
    assert torch.linalg.matrix_rank(low_rank(Paper(range(3)).random(), 16)).tolist() == [4, 4, 4]


def test_block_diagonal_targets_are_zero_outside_four_blocks() -> None:
    target = STRUCTURES["block-diagonal"](Paper([0]).random(), 8)
    inside = torch.block_diag(*[torch.ones(2, 2)] * 4).bool()
    assert (target[0][~inside] == 0).all() and (target[0][inside] != 0).all()


def test_the_gradient_is_that_of_the_loss() -> None:
    random = Paper(range(2)).random()
    batch = next(Regression(heterogeneous(random, 6)).batches(random))
    weight = start(random, 6).requires_grad_()
    (expected,) = torch.autograd.grad(batch.loss(weight).sum(), weight)
    torch.testing.assert_close(batch.gradient(weight), expected)


def test_quiet_batches_have_no_noise() -> None:
    random = Paper(range(2)).random()
    task = Regression(heterogeneous(random, 6))
    batch: LinearBatch = next(task.batches(random))
    (quiet,) = noiseless(iter([batch]))
    assert quiet.gradient(task.target).abs().max() == 0 != batch.gradient(task.target).abs().max()


def test_a_teachers_answers_carry_noise_of_the_size_it_says() -> None:
    random = Paper(range(2)).random()
    batch = next(Teacher(torch.relu, size=16).batches(random))
    noise = batch.answers - batch.inputs.relu()
    assert noise.std().item() == pytest.approx(0.01, rel=0.1)


class TestCondensedBatches:
    """Fewer rows, the same law: every test decides at p > 0.001, fixed before it was run."""

    @pytest.mark.parametrize("size", [5, 32, 64])
    def test_have_as_many_rows_as_columns(self, size: int) -> None:
        inputs, noise = next(Own(range(3), "shape").random().condensed(64, size))
        assert inputs.shape == noise.shape == (3, size, size)

    def test_are_full_batches_where_that_would_be_more_rows(self) -> None:
        inputs, _ = next(Own(range(3), "shape").random().condensed(64, 65))
        assert inputs.shape == (3, 64, 65)

    @pytest.mark.parametrize("which", [0, 1], ids=["upper triangle", "lower triangle"])
    def test_give_the_gradient_the_same_law(self, which: int) -> None:
        size, rows = 6, 9
        random = Own(range(4000), "law").random()
        difference = torch.linspace(-1, 1, size * size, dtype=torch.float64).view(1, size, size)

        def gradients(pairs) -> torch.Tensor:
            x, e = next(islice(pairs, which * max(1, 2**14 // (3 * size * size)), None))
            return (x @ difference.mT - e).mT @ x

        ours, theirs = gradients(random.condensed(rows, size)), gradients(random.pairs(rows, size))
        tests = [
            stats.ks_2samp(ours[:, i, j], theirs[:, i, j]).pvalue
            for i, j in [(0, 0), (0, 5), (2, 3), (5, 0), (5, 5)]
        ]
        tests += [
            stats.ks_2samp(torch.linalg.det(ours), torch.linalg.det(theirs)).pvalue,
            stats.ks_2samp(ours.sum((-2, -1)), theirs.sum((-2, -1))).pvalue,
        ]
        assert min(tests) > 0.001
