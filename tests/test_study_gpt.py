"""The character GPT: its model, its pairing, its resumption, and how its rows are read."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kappascope import materials
from kappascope.bookmarks import Bookmark
from kappascope.lab import verdicts
from kappascope.refusals import Refusal
from kappascope.statistics import Table
from kappascope.studies import gpt, gpt_exhibits, gpt_model
from kappascope.studies.gpt_claims import best_correction, best_rate, over_seeds
from kappascope.studies.gpt_model import CONTEXT, GPT, Corpus, optimizers
from kappascope.studies.gpt_prognosis import area, pairs_won, spikes, windows, witnessed
from kappascope.studies.muon import Muon
from kappascope.tasks import generator

ODD = "naïve 漢字 \U0001f600\t– " + "".join(map(chr, range(33, 80)))
TEXT = "".join(f"{i * i} {ODD[i % 50 :]} the {i}th line\n" for i in range(800)) + "Ω ends it"
ARM = {"optimizer": "AdamW", "correction": "alone", "rate": 0.004}
TINY = {"stage": "compare", "text": "own", "steps": 12, "warmup": 3, "layers": 1, "width": 32}


@pytest.fixture(autouse=True)
def own_text(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(materials, "text", lambda label: TEXT)
    gpt.read.cache_clear()
    yield
    gpt.read.cache_clear()


def model(vocabulary: int = 67, width: int = 64) -> GPT:
    return GPT(vocabulary, 2, width, generator("test", 0))


def run(seed: int = 0, bookmark: Bookmark | None = None, **setting: Any) -> list[dict[str, Any]]:
    """Everything a trial yields but its times."""
    rows = gpt.trials(seed, bookmark or Bookmark(), **{**ARM, **TINY, **setting})
    return [dict(row) for row in rows if row["component"] != "seconds"]


def losses(rows: list[dict[str, Any]], component: str = "loss_on_the_way") -> list[float]:
    return [row["value"] for row in rows if row["component"] == component]


# --- the model ------------------------------------------------------------------------------------


def test_the_future_does_not_change_the_past() -> None:
    net, text = model(), torch.randint(67, (2, CONTEXT), generator=generator("text"))
    changed = text.clone()
    changed[:, 40:] = (changed[:, 40:] + 1) % 67
    with torch.no_grad():
        before, after = net(text), net(changed)
    torch.testing.assert_close(before[:, :40], after[:, :40])
    assert not torch.allclose(before[:, 40:], after[:, 40:])


def test_the_first_loss_is_that_of_guessing() -> None:
    corpus = Corpus.of(TEXT)
    loss = gpt_model.validation(model(corpus.vocabulary), corpus.held_out())
    assert loss == pytest.approx(math.log(corpus.vocabulary), abs=0.35)


def test_every_matrix_in_the_blocks_but_the_keys_may_have_multipliers() -> None:
    net = model()
    handle = gpt.CORRECTIONS["multipliers"].attach(net, list(optimizers(net, "AdamW").values()))  # type: ignore[union-attr]
    kinds = {name.split(".")[-2] for name in handle.left_out}
    assert kinds == {"token_embedding", "position_embedding", "key", "head"}


@pytest.mark.filterwarnings("ignore:TF32 acceleration")  # said when flags are set
def test_muon_is_torch_s_but_for_rounding() -> None:
    shapes = [(24, 24), (24, 96), (96, 24), (24, 24)]
    starts = [torch.randn(*shape, generator=generator("muon", *shape)) for shape in shapes]
    ours, theirs = ([torch.nn.Parameter(s.clone()) for s in starts] for _ in range(2))
    makers = [
        maker(those, lr=0.02, adjust_lr_fn="match_rms_adamw")
        for maker, those in ((Muon, ours), (torch.optim.Muon, theirs))
    ]
    for step in range(3):
        for mine, torchs in zip(ours, theirs, strict=True):
            gradient = torch.randn(mine.shape, generator=generator("gradient", step, *mine.shape))
            mine.grad, torchs.grad = gradient, gradient.clone()
        makers[0].step()
        # torch multiplies in bfloat16, with instructions that some machines only announce
        with torch.backends.mkldnn.flags(enabled=False):
            makers[1].step()
    for mine, torchs, start in zip(ours, theirs, starts, strict=True):
        moved = (torchs - start).norm()
        assert (mine - torchs).norm() < 0.03 * moved  # bfloat16 has 8 bits


# --- the text -------------------------------------------------------------------------------------


def test_a_text_of_odd_characters_is_learned() -> None:
    corpus = Corpus.of(TEXT)
    assert corpus.vocabulary % 2 == 1
    assert corpus.validation[-9] == len(set(TEXT[: len(TEXT) * 9 // 10]))  # omega is unknown
    way = losses(run(steps=40, rate=0.01))
    assert way[-1] < way[0] - 0.5


def test_a_short_text_is_refused_in_one_line() -> None:
    with pytest.raises(Refusal, match=r"the text: has 19,999 characters \(give one of 20,000"):
        Corpus.of("a" * 19_999)


def test_windows_fit_the_shortest_text_and_know_its_end() -> None:
    corpus = Corpus.of("ab" * 10_000)
    assert corpus.held_out().shape == (512, CONTEXT + 1)
    assert corpus.batch(5, generator("x")).shape == (5, CONTEXT + 1)
    assert torch.equal(corpus.held_out()[-1], corpus.validation[-CONTEXT - 1 :])
    assert corpus.letters_alone == pytest.approx(math.log(2))


# --- training -------------------------------------------------------------------------------------


def test_arms_share_start_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    drawn = Corpus.batch
    monkeypatch.setattr(Corpus, "batch", lambda *given: (seen.append(drawn(*given)), seen[-1])[1])
    arms = [("AdamW", "alone"), ("Muon", "hybrid"), ("AdamW", "bound")]
    found = [run(steps=4, optimizer=o, correction=c) for o, c in arms]
    first = [losses(rows)[0] for rows in found]
    assert first[0] == first[1] == first[2]
    batches = [torch.stack(seen[place : place + 4]) for place in (0, 4, 8)]
    assert torch.equal(batches[0], batches[1]) and torch.equal(batches[0], batches[2])
    run(seed=1, steps=1)
    assert not torch.equal(seen[0], seen[-1])


@pytest.mark.parametrize(
    ("optimizer", "correction", "stage"),
    [("AdamW", "hybrid", "compare"), ("Muon", "multipliers", "compare"),
     ("AdamW", "bound", "compare"), ("Muon", "alone", "warmup")],
)  # fmt: skip
def test_what_was_killed_goes_on_to_the_last_bit(
    optimizer: str, correction: str, stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = {"optimizer": optimizer, "correction": correction, "stage": stage}
    whole = run(**setting)
    kept, calls = Bookmark(tmp_path / "trial", every=0.0), 0
    drawn = Corpus.batch

    def killed(*given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return drawn(*given)

    monkeypatch.setattr(Corpus, "batch", killed)
    with pytest.raises(KeyboardInterrupt):
        run(bookmark=kept, **setting)
    resumed = run(bookmark=kept, **setting)
    assert repr(resumed) == repr(whole)
    assert calls == 8 + 12 - 7  # steps 0 to 6 were not taken again


def test_a_run_that_breaks_off_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = run(stage="warmup", steps=30, rate=1e30)
    assert losses(rows, "diverged") == [1.0]
    assert losses(rows, "final_loss") == [math.inf]
    assert losses(rows, "spikes")[-1] >= 1
    run(steps=4, rate=1e30)  # nothing that is looked at raises


def test_every_matrix_and_product_is_looked_at_five_times() -> None:
    rows = [row for row in run(steps=20) if row["component"] == "log_condition_number"]
    assert {row["epoch"] for row in rows} == {0, 2, 5, 10, 20}
    kinds = {"query", "key", "value", "output", "up", "down", "head", "embedding", "QK", "OV"}
    assert {row["kind"] for row in rows} == kinds
    assert len(rows) == 5 * (6 + 1 + 2 + 4)


# --- spikes ---------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), min_size=1, max_size=30))
def test_pairs_are_counted_as_one_by_one(drawn: list[tuple[int, bool]]) -> None:
    values, follows = (np.array(column, float) for column in zip(*drawn, strict=True))
    pairs = [(a, b) for a, yes in drawn for b, no in drawn if yes and not no]
    brute = sum((a > b) + (a == b) / 2 for a, b in pairs)
    assert pairs_won(values, follows) == (brute, len(pairs))


def test_a_spike_stands_out_from_the_fifty_steps_before() -> None:
    noise = np.random.default_rng(0).normal(2, 0.1, 200)
    assert not any(spikes(noise.tolist()))
    assert not any(spikes((noise - np.arange(200) / 20).tolist()))  # progress is none
    noise[120] += 1
    assert [i for i, spiked in enumerate(spikes(noise.tolist())) if spiked] == [120]


def test_a_witness_that_knows_is_always_right_and_one_that_guesses_is_not() -> None:
    steps = [
        {"loss": 2 + i % 2 / 10 + 3 * (i == 155), "gradient": 1.0}
        | ({"kappa": 5.0 + (i == 139) + 2 * (i == 149)} if i % 10 == 9 else {})
        for i in range(200)
    ]
    said, follows = witnessed(Table.of({"seed": 0, **row} for row in windows(steps)))
    assert follows.sum() == 2  # the windows that end at 140 and 150
    assert pairs_won(said["kappa"], follows)[0] == pairs_won(said["kappa"], follows)[1] > 0
    won, asked = pairs_won(said["gradient"], follows)
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
    whole, _ = witnessed(Table.of({"seed": 0, **row} for row in windows(steps)))
    assert len(whole["loss"]) == 20 - 4 - 2  # five windows of memory end with the fifth; two follow
    broken = [*steps[:-5], {"loss": math.nan, "gradient": math.nan}]
    _, follows = witnessed(Table.of({"seed": 0, **row} for row in windows(broken)))
    assert follows.tolist() == [0.0] * 13 + [1.0, 1.0]


# --- reading --------------------------------------------------------------------------------------


def tuning(**best: float) -> Table:
    """Rows of tuning in which each arm is best at a known rate, the penalty best of all."""
    return Table.of(
        {**setting, "stream": "own", "seed": 0, "component": "validation_loss", "epoch": 1000,
         "value": 2 + abs(math.log2(setting["rate"] / best[setting["optimizer"]]))
         - 0.1 * (setting["correction"] == "penalty") - 0.2 * (setting["correction"] == "hybrid")}
        for setting in gpt.STUDY.grid
    )  # fmt: skip


def test_the_best_rate_of_each_arm_goes_on() -> None:
    found = tuning(AdamW=0.004, Muon=0.032)
    assert best_rate(found, "AdamW", "bound") == 0.004
    assert best_rate(found, "Muon", "alone") == 0.032
    assert best_correction(found) == "penalty"
    further = list(gpt.then(found))
    rates = {s["rate"] for s in further if s["optimizer"] == "Muon" and s["stage"] == "compare"}
    assert rates == {0.032}
    confirm = [
        (s["optimizer"], s["correction"], s["rate"]) for s in further if s["stage"] == "confirm"
    ]
    assert confirm == [
        ("AdamW", "alone", 0.002), ("AdamW", "hybrid", 0.002), ("AdamW", "penalty", 0.002),
        ("Muon", "alone", 0.016),
    ]  # fmt: skip
    assert {s["rate"] for s in further if s["stage"] == "warmup"} == {0.032, 0.256, 1.0}
    keys = [repr(sorted(setting.items())) for setting in further]
    assert len(set(keys)) == len(keys)
    assert {frozenset(s) for s in further} == {frozenset(gpt.STUDY.grid[0])}


def test_a_run_that_diverged_in_tuning_is_never_the_best() -> None:
    rows = tuning(AdamW=0.004, Muon=0.032).rows.to_pylist()
    lost = [{**row, "value": math.nan} if row["rate"] == 0.004 else row for row in rows]
    assert best_rate(Table.of(lost), "AdamW", "alone") in (0.002, 0.008)


def test_every_arm_is_tuned_alike() -> None:
    counts = {}
    for setting in gpt.STUDY.grid:
        arm = setting["optimizer"], setting["correction"]
        counts[arm] = counts.get(arm, 0) + gpt.STUDY.count(setting, "own")
    assert set(counts.values()) == {5} and len(counts) == 10


def test_steps_to_a_level_are_read_between_looks() -> None:
    steps, curve = np.array([0.0, 10, 20]), np.array([4.0, 3, 2])
    assert gpt_exhibits._crossing(steps, curve, 2.5) == 15
    assert math.isnan(gpt_exhibits._crossing(steps, curve, 1.0))


def test_two_seeds_decide_nothing() -> None:
    assert over_seeds([0.1, 0.2]).interval is None
    assert over_seeds([0.1, 0.2, math.nan, 0.3]).interval is None


@cache
def small() -> Table:
    """The whole study, as small as it can be."""
    form = {"steps": 10, "warmup": 2, "layers": 1, "width": 32}
    study = replace(gpt.STUDY, grid=tuple({**s, **form} for s in gpt.STUDY.grid[::5]))
    rows = list(rows_of(study.grid))
    large, high = {**form, "width": 64}, {"steps": 40, "layers": 1, "width": 32}
    return Table.of([*rows, *rows_of(tuple(gpt.then(Table.of(rows), large=large, high=high)))])


def rows_of(settings: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    about = {"experiment": "gpt", "stream": "own", "seed": 0}
    for setting in settings:
        yield from ({**about, **setting, **row} for row in gpt.trials(0, Bookmark(), **setting))


def test_claims_exhibits_and_figure_bear_the_smallest_study() -> None:
    found = small()
    for claim in verdicts([gpt.STUDY], found)["claims"]:
        assert claim["verdict"] == "undecided"
        assert "Not measured" not in claim["explanation"], claim
    tables = list(gpt_exhibits.exhibits(found))
    assert [len(table.rows) for table in tables] == [10, 10, 4, 8]
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    assert "Too few seeds" in tables[0].note
    assert len(gpt.STUDY.plot(found, Table.of([])).axes) == 6  # type: ignore[misc]


def test_a_study_that_was_stopped_early_shows_what_there_is() -> None:
    begun, nothing = small().where(stage="tune"), Table.of([])
    for found in (begun, nothing):
        assert list(gpt_exhibits.exhibits(found)) == []
        assert len(gpt.STUDY.plot(found, nothing).axes) == 6  # type: ignore[misc]
