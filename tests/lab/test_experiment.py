"""Experiments: found, counted, and judged even where their rows are not there."""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kappascope.lab import experiment as lab
from kappascope.lab.claims import Above, Claim
from kappascope.lab.experiment import Experiment, discover, grid, size_of, studies
from kappascope.lab.statistics import median
from kappascope.lab.table import Table
from kappascope.system import files
from tiny_experiments import SLOW, TOY, trials
from tiny_runs import complete


def test_every_page_belongs_to_the_experiment_whose_number_is_in_its_name() -> None:
    pages = Path(lab.__file__).parents[1].joinpath("paper").glob("e[0-9]*_*.py")
    numbers = {int(page.stem.split("_")[0][1:]) for page in pages}
    assert set(discover()) == numbers >= set(range(1, 10))


@pytest.mark.parametrize("experiment", discover().values(), ids=lambda e: e.id)
class TestEveryExperiment:
    """What holds for each experiment, the next one included."""

    def test_it_says_what_it_is(self, experiment: Experiment) -> None:
        assert experiment.title and experiment.section and experiment.question
        assert experiment.page.stem.startswith(f"e{experiment.number:02d}_")

    def test_its_settings_are_distinct_and_have_trials(self, experiment: Experiment) -> None:
        for form in (experiment, experiment.quickly()):
            settings = [files.digest(setting) for setting in form.grid]
            assert len(set(settings)) == len(settings) > 0
        # a quick run may leave out what takes long; the whole one runs every setting
        assert all(
            experiment.count(s, "paper") + experiment.count(s, "own") for s in experiment.grid
        )

    def test_a_quick_run_is_a_part_of_the_whole(self, experiment: Experiment) -> None:
        for setting in experiment.quickly().grid:
            assert setting in experiment.grid

    def test_its_claims_and_figures_carry_its_name(self, experiment: Experiment) -> None:
        assert {c.experiment for c in experiment.claims} <= {experiment.id, "all"}
        assert {f.experiment for f in experiment.figures} <= {experiment.id}


def test_what_comes_after_the_papers_nine_is_beyond_it() -> None:
    assert [replace(TOY, number=number).beyond for number in (1, 9, 10)] == [False, False, True]


def test_claims_and_figures_are_unique() -> None:
    everything = discover().values()
    for ids in (
        [claim.id for e in everything for claim in e.claims],
        [figure.id for e in everything for figure in e.figures],
    ):
        assert len(set(ids)) == len(ids)


def test_a_grid_varies_its_last_axis_fastest() -> None:
    assert [tuple(s.values()) for s in grid(a=(1, 2), b="xy")] == [
        (1, "x"), (1, "y"), (2, "x"), (2, "y"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("own", "asked", "counts"),
    [
        (9, None, (9, 9)),
        (9, 100, (100, 9)),
        (9, 4, (4, 4)),
        (0, 100, (0, 0)),
        ({64: 7}, None, (7, 0)),
        (lambda setting: setting["size"] // 64, None, (1, 8)),
    ],
)
def test_trials_are_counted_by_number_size_or_rule(own, asked, counts) -> None:
    experiment = replace(TOY, own=own)
    assert tuple(experiment.count({"size": d}, "own", asked) for d in (64, 512)) == counts
    assert experiment.count({"size": 64}, "paper", asked) == 5


def test_a_quick_run_replaces_what_it_names() -> None:
    assert TOY.quickly().own == 10
    assert SLOW.quickly() == SLOW


def test_trials_must_be_a_function_of_the_page() -> None:
    with pytest.raises(TypeError, match="setting"):
        replace(TOY, trials=partial(trials, pause=1.0))


def test_what_cannot_be_measured_says_so(tmp_path: Path) -> None:
    rows = complete(TOY, tmp_path).rows
    found = lab.verdicts([TOY], rows)
    measured, absent = found["figures"]
    assert measured["measured"] is not None
    assert (absent["measured"], absent["matches"]) == (None, False)
    assert absent["agreement"].startswith("not measured: KeyError: \"no column 'nothing'")
    held, unknown = found["claims"]
    assert (held["verdict"], held["n"]) == ("holds", 2 * (5 + 130))
    assert (unknown["verdict"], unknown["measured"]) == ("undecided", None)
    assert unknown["explanation"].startswith("Not measured: AttributeError")


def test_verdicts_are_as_promised(tmp_path: Path) -> None:
    complete(TOY, tmp_path)
    found = json.loads((tmp_path / "verdicts.json").read_bytes(), parse_constant=pytest.fail)
    assert found.keys() == {"figures", "claims", "provenance"}
    figure = {"id", "experiment", "what", "printed", "measured", "matches"}
    assert all(one.keys() >= figure for one in found["figures"])
    claim = "id experiment sentence source verdict measured interval n explanation"
    assert all(one.keys() >= set(claim.split()) for one in found["claims"])
    assert found["provenance"]["failed"] == []


def test_without_any_rows_all_is_undecided() -> None:
    empty = Table.of([{"experiment": "e9"}])
    assert {one["verdict"] for one in lab.verdicts([TOY], empty)["claims"]} == {"undecided"}


def test_studies_that_are_run_together_mean_one_kind_of_value_by_a_name() -> None:
    kinds: dict[str, set[bool]] = {}
    for one in studies().values():
        for name, value in (pair for setting in one.grid for pair in setting.items()):
            kinds.setdefault(name, set()).add(isinstance(value, str))
    assert not [name for name, found in kinds.items() if len(found) > 1]


def test_a_setting_that_names_no_size_has_the_papers() -> None:
    assert (size_of({"size": 128}), size_of({"optimizer": "sgd"})) == (128, 64)


def test_studies_stand_in_their_order() -> None:
    assert list(studies()) == ["teacher", "digits", "gpt", "pretrained", "unlearned"]


def test_another_text_is_for_settings_that_read_one() -> None:
    asked = studies()["unlearned"].on("mine.txt 0123456789ab")
    assert {setting.get("text") for setting in asked.grid} == {None, "mine.txt 0123456789ab"}
    assert all("text" not in setting for setting in asked.grid if setting["stage"] == "file")


def test_only_the_page_that_is_asked_for_is_loaded() -> None:
    code = """
import sys
from kappascope.lab.experiment import discover
assert discover()[2].id == "e2"
pages = [name for name in sys.modules if name.startswith("kappascope.paper.")]
sys.exit(pages != ["kappascope.paper.e02_optimizers"])
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_claim_may_be_judged_on_the_rows_of_another_page() -> None:
    claim = Claim(
        "e1.elsewhere", "it is large", "0",
        {"it": lambda t: median(t.values())}, {"it": Above(1)}, "{it:.1f}", judged_on=("toy",),
    )  # fmt: skip
    page = replace(TOY, number=1, claims=(claim,), figures=())
    rows = [{"experiment": "toy", "seed": k, "error": 2.0 + k} for k in range(9)]
    here = [{"experiment": "e1", "seed": 0, "error": 0.0}]
    [found] = lab.verdicts([page], Table.of([*rows, *here]))["claims"]
    assert (found["verdict"], found["n"]) == ("holds", 9)
    [absent] = lab.verdicts([page], Table.of(here))["claims"]
    assert absent["explanation"].startswith("Not measured: it is judged on the trials of toy")
