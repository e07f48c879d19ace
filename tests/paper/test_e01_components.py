"""Experiment 1: component learning quality (Section 4.1)."""

import pytest
import torch
from scipy import stats

from experiment_rows import Found, mean, numbers, prints, run
from kappascope.lab.tasks import LinearBatch, Own, Paper, Regression, Streams, heterogeneous, start
from kappascope.lab.training import Matrix, descend, last, outcome
from kappascope.paper.e01_components import net_of_scale


def test_experiment_1_prints_its_digits() -> None:
    found = run(1, Paper(range(15)), size=32)
    error = numbers(found, component="condition_number")
    assert prints(error.mean().item(), "0.27") and prints(error.std(correction=0).item(), "0.31")
    assert prints(error[:10].mean().item(), "0.18")  # the earlier version's, of ten trials
    assert prints(mean(found, component="row_norms"), "0.13")


def plainly(streams: Streams, size: int) -> Found:
    """Experiment 1 with full batches in float64."""
    random = streams.random()
    task = Regression(heterogeneous(random, size))
    batches = (LinearBatch(x, e, task) for x, e in random.pairs(64, size))
    step = last(descend(Matrix(start(random, size)), batches))
    return list(outcome(step.weight, task.target))


@pytest.mark.parametrize(("size", "blocks"), [(32, 5), (64, 3)])
def test_large_studies_have_the_law_of_a_plain_loop(size: int, blocks: int) -> None:
    """Decided beforehand: no component's two-sample test below 0.001, shared among them."""
    seeds = [range(64 * i, 64 * (i + 1)) for i in range(blocks)]
    fast = [run(1, Own(block, "fast"), size=size) for block in seeds]
    plain = [plainly(Own(block, "plain"), size) for block in seeds]

    def errors(study: list[Found], name: object) -> torch.Tensor:
        return torch.cat([numbers(found, component=name) for found in study])

    names = {row["component"] for row in plain[0] if "component" in row}
    tests = [
        stats.ks_2samp(errors(fast, name), errors(plain, name), method="asymp").pvalue
        for name in names
    ]
    assert min(tests) > 0.001 / len(tests)


@pytest.mark.parametrize("size", [32, 64])
def test_single_precision_leaves_the_tail_as_it_is(size: int) -> None:
    def error(dtype: torch.dtype) -> torch.Tensor:
        random = Own(range(64), "tail").random(dtype=dtype)
        target = heterogeneous(random, size)
        step = last(descend(Matrix(start(random, size)), Regression(target).batches(random)))
        return numbers(list(outcome(step.weight, target.double())), component="condition_number")

    single, double = error(torch.float32), error(torch.float64)
    worst = double.argsort()[-10:]
    torch.testing.assert_close(single[worst], double[worst], rtol=0.02, atol=0)
    torch.testing.assert_close(single.median(), double.median(), rtol=0.001, atol=0)


def test_a_common_factor_is_no_error_of_single_singular_values() -> None:
    wanted = torch.arange(16.0, 0.0, -1.0).double()[None]
    learned = 0.8 * wanted
    learned[:, -1] *= 1.5
    found = list(net_of_scale(learned, wanted))
    for position in ("second", "fourth", "eighth", "middle", "largest"):
        torch.testing.assert_close(numbers(found, position=position), torch.zeros(1).double())
    torch.testing.assert_close(numbers(found, position="smallest"), torch.full((1,), 0.5).double())
