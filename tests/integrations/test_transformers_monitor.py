"""Callbacks with a real Trainer of transformers and a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from kappascope.integrations.transformers import MonitorCallback
from kappascope.monitor.record import Run

pytestmark = pytest.mark.filterwarnings("default")  # the libraries' own


class Texts(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Random text, the same at every visit."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        text = torch.randint(17, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": text, "labels": text}


def trained(folder: Path, callbacks: list[Any], **options: Any) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=17, n_positions=8, n_embd=16, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config)
    settings = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "logging_steps": 2,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "disable_tqdm": True,
        "gradient_accumulation_steps": 2,
    }
    arguments = TrainingArguments(**(settings | options))
    trainer = Trainer(model=model, args=arguments, train_dataset=Texts(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=options.get("resume_from_checkpoint"))
    return model


def test_a_trainer_is_watched_and_not_disturbed(tmp_path: Path) -> None:
    plain = trained(tmp_path / "a", [])
    callback = MonitorCallback(tmp_path / "run", every=2, strict=True)
    watched = trained(tmp_path / "b", [callback])
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(p, q)
    run = Run.read(tmp_path / "run")
    assert run.is_closed and run.model == "GPT2LMHeadModel" and run.step == 6
    name = "transformer.h.0.attn.c_attn.weight[q]"
    assert [step for step, _ in run.series(name, "condition_number")] == [0, 2, 4, 6]
    assert run.series(name, "signal", 0.0) and run.series(name, "update_size")
    assert [step for step, _ in run.logs["loss"]] == [2, 4, 6]
    assert "transformer.h.1.attn[qk.1]" in run.matrices


class Interrupted(TrainerCallback):
    """Raises at the end of the first step that it sees."""

    is_armed = True

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt


def test_a_trainer_that_was_interrupted_can_train_again(tmp_path: Path) -> None:
    callbacks = [MonitorCallback(tmp_path / "run", every=2, strict=True), Interrupted()]
    with pytest.raises(KeyboardInterrupt):
        trained(tmp_path / "a", callbacks)
    trained(tmp_path / "a", callbacks)
    run = Run.read(tmp_path / "run")
    assert run.is_closed and run.step == 6 and len(run.sessions) == 2
