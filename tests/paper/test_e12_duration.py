"""Experiment 12: duration of training, up to 20,000 steps."""

import itertools

import torch

from kappascope.lab.tasks import Own
from kappascope.paper.e12_duration import growing


def test_experiment_12_doubles_the_batch_whenever_training_is_twice_as_long() -> None:
    batches = growing(torch.ones(1, 2, 2), Own([0], "x").random(), "growing batch")
    sizes = [batch.task.rows for batch in itertools.islice(batches, 4001)]
    changes = {i: size for i, size in enumerate(sizes) if i == 0 or size != sizes[i - 1]}
    assert changes == {0: 64, 1000: 128, 2000: 256, 4000: 512}
