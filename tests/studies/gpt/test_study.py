"""Trials of the GPT study: shared starts, resumption, and what is recorded."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from kappascope.lab.resume import ResumePoint
from kappascope.studies.gpt import study as gpt
from kappascope.studies.gpt.model import Corpus
from odd_text import TEXT

ARM = {"optimizer": "AdamW", "correction": "alone", "rate": 0.004}


TINY = {"stage": "compare", "text": "own", "steps": 12, "warmup": 3, "layers": 1, "width": 32}


def run(
    seed: int = 0, resume_point: ResumePoint | None = None, **setting: Any
) -> list[dict[str, Any]]:
    """Everything a trial yields but its times."""
    rows = gpt.trials(seed, resume_point or ResumePoint(), **{**ARM, **TINY, **setting})
    return [dict(row) for row in rows if row["component"] != "seconds"]


def losses(rows: list[dict[str, Any]], component: str = "loss_on_the_way") -> list[float]:
    return [row["value"] for row in rows if row["component"] == component]


def test_a_text_of_odd_characters_is_learned() -> None:
    corpus = Corpus.of(TEXT)
    assert corpus.vocabulary % 2 == 1
    assert corpus.validation[-9] == len(set(TEXT[: len(TEXT) * 9 // 10]))  # omega is unknown
    way = losses(run(steps=40, rate=0.01))
    assert way[-1] < way[0] - 0.5


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
    kept, calls = ResumePoint(tmp_path / "trial", every=0.0), 0
    drawn = Corpus.batch

    def killed(*given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 8:
            raise KeyboardInterrupt
        return drawn(*given)

    monkeypatch.setattr(Corpus, "batch", killed)
    with pytest.raises(KeyboardInterrupt):
        run(resume_point=kept, **setting)
    resumed = run(resume_point=kept, **setting)
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
