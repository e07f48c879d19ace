"""A contract over all pages of experiments: what holds for each, and for all of them together.

No source file has this name; what one experiment says alone is tested in the file of its page.
"""

from pathlib import Path

import pyarrow as pa
import pytest
import torch

from experiment_rows import EXPERIMENTS, hurry
from kappascope import paper
from kappascope.lab import runs as study
from kappascope.lab.experiment import Experiment
from kappascope.lab.tasks import Paper

JUDGED = {
    1: "norms-flat kappa-grows gap-well-learned rank-well-learned taxonomy specific v1-ratio",
    2: "adam-worse both-poor mechanism",
    3: "signal cause",
    4: "multipliers-norms multipliers-kappa spectral-kappa spectral-norms svd-middle trade-off "
    "hybrid",
    5: "smooth-norms erratic-kappa",
    6: "block low-rank kappa-less scale same-target",
    7: "depth-explodes untrained amplification overall-moderate relu llm",
    8: "every-lr ratio-grows decay-no-effect decay-acts",
    9: "norms-vanish kappa-plateaus gap-widens not-speed law",
    10: "trend superlinear learned norms drawn",
    11: "adam momentum adamw muon persists",
    12: "plateau floor noiseless remedies",
    13: "proportional relative drowned",
    14: "value-multipliers oracle blind better-matrix harmless",
    15: "learning-rate batch noise start orthogonal multiplier-rate penalty threshold",
    16: "stays delay rates never norms",
    17: "outside higher-rank inputs completion",
    18: "kappa rows columns values gap rank matrix",
    19: "bound rate tight direction direction-tight condition",
}  # what the paper, its slides and its review say, and our controls of it


def test_the_papers_nine_experiments_come_first_and_the_others_follow_without_a_gap() -> None:
    assert [number for number, one in EXPERIMENTS.items() if not one.beyond] == list(range(1, 10))
    assert sorted(EXPERIMENTS) == list(range(1, len(EXPERIMENTS) + 1))


@pytest.mark.parametrize("number", JUDGED)
def test_every_sentence_is_judged(number: int) -> None:
    wanted = [f"e{number}.{name}" for name in JUDGED[number].split()]
    found = [claim.id for claim in EXPERIMENTS[number].claims]
    assert [one for one in found if not one.startswith("all.")] == wanted


@pytest.mark.parametrize("experiment", EXPERIMENTS.values(), ids=lambda e: e.id)
class TestEveryExperiment:
    """What holds for each page, the next one included."""

    def test_is_one_file(self, experiment: Experiment) -> None:
        [page] = Path(paper.__file__).parent.glob(f"e{experiment.number:02}_*")
        assert experiment.trials.__module__ == f"{paper.__name__}.{page.stem}"

    def test_has_a_number_of_trials_for_every_setting(self, experiment: Experiment) -> None:
        for setting in experiment.grid:
            assert experiment.count(setting, "paper") + experiment.count(setting, "own") > 0

    def test_a_trial_has_the_same_rows_in_any_company(
        self, experiment: Experiment, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        hurry(monkeypatch, 100)
        setting = {**experiment.grid[0], "size": 8}
        many = list(experiment.trials(Paper([0, 1, 2]), **setting))
        one = list(experiment.trials(Paper([1]), **setting))
        assert len(many) == len(one)
        for a, b in zip(many, one, strict=True):
            assert a.keys() == b.keys()
            for key in a:
                if isinstance(a[key], torch.Tensor):
                    assert torch.equal(a[key][1], b[key][0]) or a[key][1].isnan().all()
                else:
                    assert a[key] == b[key]


def test_all_experiments_fit_into_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch, 2)
    parts = []
    for experiment in EXPERIMENTS.values():
        setting = {**experiment.grid[0], "size": 8}
        trials, code = experiment.trials, "digest"
        block = study.Block(experiment.id, trials, setting, "own", range(2), "one table", 1.0, code)
        parts.append(block.rows())
    table = pa.concat_tables(parts, promote_options="permissive")
    assert len(table["experiment"].unique()) == len(EXPERIMENTS)
