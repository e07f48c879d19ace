"""Loss spikes, and how well a predictor tells that one follows."""

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kappascope.lab.table import Table
from kappascope.studies.gpt.prognosis import area, predictions, spikes, warning_pairs, windows


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_pairs_are_counted_as_one_by_one(drawn: list[tuple[int, bool]]) -> None:
    values, follows = (np.array(column, float) for column in zip(*drawn, strict=True))
    pairs = [(a, b) for a, yes in drawn for b, no in drawn if yes and not no]
    brute = sum((a > b) + (a == b) / 2 for a, b in pairs)
    assert warning_pairs(values, follows) == (brute, len(pairs))


def test_a_spike_stands_out_from_the_fifty_steps_before() -> None:
    noise = np.random.default_rng(0).normal(2, 0.1, 200)
    assert not any(spikes(noise.tolist()))
    assert not any(spikes((noise - np.arange(200) / 20).tolist()))  # progress is none
    noise[120] += 1
    assert [i for i, spiked in enumerate(spikes(noise.tolist())) if spiked] == [120]


def test_a_predictor_that_knows_is_always_right_and_one_that_guesses_is_not() -> None:
    steps = [
        {"loss": 2 + i % 2 / 10 + 3 * (i == 155), "gradient": 1.0}
        | ({"kappa": 5.0 + (i == 139) + 2 * (i == 149)} if i % 10 == 9 else {})
        for i in range(200)
    ]
    said, follows = predictions(Table.of({"seed": 0, **row} for row in windows(steps)))
    assert follows.sum() == 2  # the windows that end at 140 and 150
    assert warning_pairs(said["kappa"], follows)[0] == warning_pairs(said["kappa"], follows)[1] > 0
    won, asked = warning_pairs(said["gradient"], follows)
    assert won == asked / 2


def test_the_interval_of_an_area_covers_where_runs_of_one_seed_are_alike() -> None:
    random, covered = np.random.default_rng(0), 0
    for _ in range(500):
        asked = random.integers(20, 200, (8, 4))
        luck = random.beta(6, 4, (8, 1))  # of a seed, shared by its runs; its mean is 0.6
        won = random.binomial(asked, luck)
        found = area({k: [*zip(won[k], asked[k], strict=True)] for k in range(8)})
        assert found.interval and found.n == 8
        covered += found.interval[0] <= 0.6 <= found.interval[1]
    assert covered / 500 > 0.91  # 0.94 is expected of eight


def test_seeds_without_spikes_tell_nothing() -> None:
    found = area({k: [(3, 4), (0, 0)] for k in range(5)} | {5: [(0, 0)]})
    assert found.n == 5 and found.value == 0.75 and found.interval is None


def test_windows_that_no_spike_can_follow_are_not_asked() -> None:
    steps = [{"loss": 2 + i % 2 / 10, "gradient": 1.0, "kappa": 5.0} for i in range(200)]
    whole, _ = predictions(Table.of({"seed": 0, **row} for row in windows(steps)))
    assert len(whole["loss"]) == 20 - 4 - 2  # five windows of memory end with the fifth; two follow
    broken = [*steps[:-5], {"loss": math.nan, "gradient": math.nan}]
    _, follows = predictions(Table.of({"seed": 0, **row} for row in windows(broken)))
    assert follows.tolist() == [0.0] * 13 + [1.0, 1.0]
