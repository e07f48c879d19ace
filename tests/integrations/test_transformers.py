"""Corrections and the monitor in a real ``Trainer``, and with accelerate."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from correction_examples import answers, inputs, perceptron
from kappascope.corrections import Correction, Hybrid, Multipliers, NormPin
from kappascope.monitor.record import Run
from kappascope.refusal import Refusal

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
adapters = pytest.importorskip("kappascope.integrations.transformers")
CorrectionCallback, MonitorCallback = adapters.CorrectionCallback, adapters.MonitorCallback

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")

CORRECTIONS = [Multipliers(rate=1.0), Hybrid(), NormPin()]
each = pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: type(c).__name__)


class Tokens(Dataset):
    """Random text, the same at every start."""

    def __init__(self) -> None:
        self.tokens = torch.randint(32, (24, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def language_model() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=8, n_layer=1, n_head=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def arguments(folder: Path, **more):
    settings = {
        "output_dir": str(folder), "max_steps": 6, "save_steps": 3, "learning_rate": 0.01,
        "per_device_train_batch_size": 4, "use_cpu": True, "disable_tqdm": True,
        "report_to": "none", "logging_steps": 100,
    }  # fmt: skip
    return transformers.TrainingArguments(**(settings | more))


def trainer(folder: Path, correction: Correction, resume_from: Path | None = None):
    callback = CorrectionCallback(correction, resume_from=resume_from)
    model, args = language_model(), arguments(folder)
    return transformers.Trainer(model, args, train_dataset=Tokens(), callbacks=[callback]), callback


def assert_same(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


def test_a_correction_in_a_trainer_makes_a_difference(tmp_path: Path) -> None:
    trained = []
    for correction in (Multipliers(rate=0.0, weight_decay=0.0), Multipliers(rate=1.0)):
        run, _ = trainer(tmp_path, correction)
        run.train()
        trained.append(run.model.state_dict())
    assert not torch.equal(*(one["transformer.h.0.mlp.c_fc.weight"] for one in trained))


def test_a_trainers_callback_selects_as_attach_does(tmp_path: Path) -> None:
    one = NormPin()
    for correction, where, exclude, expected in (
        (one, re.compile("c_fc"), None, ["mlp.c_fc"]),
        (one, lambda name, module: "attn" in name, "*c_attn*", ["attn.c_proj"]),
        (one, {"*mlp*": NormPin(), "*attn*": None}, "*lm_head*", ["mlp.c_fc", "mlp.c_proj"]),
        ({"*attn*": one, "*c_fc*": Hybrid()}, None, "*c_attn*", ["attn.c_proj", "mlp.c_fc"]),
    ):
        callback = CorrectionCallback(correction, where, exclude)
        seen = []

        class Look(transformers.TrainerCallback):
            def on_step_end(self, *args, callback=callback, seen=seen, **others) -> None:
                seen.append(callback.handle.weights)

        args = arguments(tmp_path, max_steps=1)
        callbacks = [callback, Look()]
        transformers.Trainer(
            language_model(), args, train_dataset=Tokens(), callbacks=callbacks
        ).train()
        assert [list(one) for one in seen] == [[f"transformer.h.0.{n}.weight" for n in expected]]


@each
def test_a_trainers_checkpoint_is_a_plain_model_and_resumes_to_the_bit(
    correction, tmp_path: Path
) -> None:
    whole, callback = trainer(tmp_path / "run", correction)
    whole.train()
    assert callback.handle is None  # and nothing is left
    assert not whole.optimizer.optimizer._optimizer_step_pre_hooks
    read = type(whole.model).from_pretrained(tmp_path / "run" / "checkpoint-6")
    tokens = Tokens().tokens
    assert torch.equal(read.eval()(tokens).logits, whole.model.eval()(tokens).logits)

    again, _ = trainer(tmp_path / "run", correction)
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_same(again.model, whole.model)


def test_a_checkpoint_elsewhere_has_to_be_named(tmp_path: Path) -> None:
    whole, _ = trainer(tmp_path / "run", Multipliers(rate=1.0))
    whole.train()
    kept = tmp_path / "kept"
    shutil.copytree(tmp_path / "run" / "checkpoint-3", kept)
    lost, callback = trainer(tmp_path / "new", Multipliers(rate=1.0))
    with pytest.raises(Refusal, match=r"goes on at step 3: there is no .*resume_from="):
        lost.train(resume_from_checkpoint=str(kept))
    assert callback.handle is None
    again, _ = trainer(tmp_path / "new", Multipliers(rate=1.0), resume_from=kept)
    again.train(resume_from_checkpoint=str(kept))
    assert_same(again.model, whole.model)


def test_a_trainer_without_an_optimizer_yet_is_told_so(tmp_path: Path) -> None:
    early, _ = trainer(tmp_path, NormPin())
    with pytest.raises(TypeError, match=r"before create_optimizer\(\)"):
        NormPin().attach(early.model, early.optimizer)


def test_an_optimizer_of_ones_own_is_attached_to_before_the_trainer_is_made(tmp_path: Path) -> None:
    trained = []
    for resumed in (False, True):
        model = language_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        Multipliers(rate=1.0).attach(model, optimizer)
        args = transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=6, save_steps=3, per_device_train_batch_size=4,
            use_cpu=True, disable_tqdm=True, report_to="none",
        )  # fmt: skip
        run = transformers.Trainer(
            model, args, train_dataset=Tokens(), optimizers=(optimizer, None)
        )
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3") if resumed else None)
        trained.append(model)
    assert_same(*trained)


@each
@pytest.mark.parametrize("early", [False, True])
def test_accelerate_saves_and_resumes_to_the_bit(correction, early, tmp_path: Path) -> None:
    def run(steps: int, load: bool) -> nn.Module:
        torch.manual_seed(0)
        accelerator = accelerate.Accelerator(cpu=True)
        plain = perceptron()
        own = torch.optim.AdamW(plain.parameters(), lr=0.05)
        if early:
            correction.attach(plain, own)
        data = DataLoader(TensorDataset(inputs(plain)), batch_size=8)
        model, optimizer, loader = accelerator.prepare(plain, own, data)
        if not early:
            correction.attach(model, optimizer)
        if load:
            accelerator.load_state(str(tmp_path))
        for step in range(steps):
            if step == 3 and not load:
                accelerator.save_state(str(tmp_path))
            for (batch,) in loader:
                optimizer.zero_grad()
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
        return plain

    whole = run(6, load=False)
    torch.testing.assert_close(answers(run(3, load=True)), answers(whole), rtol=0, atol=0)


def test_a_monitor_in_a_trainer_records_and_disturbs_nothing(tmp_path: Path) -> None:
    trained = []
    for callbacks in ([], [MonitorCallback(tmp_path / "run", every=2, strict=True)]):
        args = arguments(tmp_path, gradient_accumulation_steps=2, logging_steps=2)
        run = transformers.Trainer(
            language_model(), args, train_dataset=Tokens(), callbacks=callbacks
        )
        run.train()
        trained.append(run.model)
    assert_same(*trained)
    record = Run.read(tmp_path / "run")
    assert record.is_closed and record.model == "GPT2LMHeadModel" and record.step == 6
    name = "transformer.h.0.attn.c_attn.weight[q]"
    assert [step for step, _ in record.series(name, "condition_number")] == [0, 2, 4, 6]
    assert record.series(name, "signal", 0.0) and record.series(name, "update_size")
    assert [step for step, _ in record.logs["loss"]] == [2, 4, 6]
    assert "transformer.h.0.attn[qk.1]" in record.matrices


class Interrupted(transformers.TrainerCallback):
    """Raises at the end of the first step that it sees."""

    is_armed = True

    def on_step_end(self, *args, **kwargs) -> None:
        if self.is_armed:
            self.is_armed = False
            raise KeyboardInterrupt


def test_a_monitored_trainer_that_was_interrupted_can_train_again(tmp_path: Path) -> None:
    callbacks = [MonitorCallback(tmp_path / "run", every=2, strict=True), Interrupted()]

    def train() -> None:
        run = transformers.Trainer(
            language_model(), arguments(tmp_path), train_dataset=Tokens(), callbacks=callbacks
        )
        run.train()

    with pytest.raises(KeyboardInterrupt):
        train()
    train()
    record = Run.read(tmp_path / "run")
    assert record.is_closed and record.step == 6 and len(record.sessions) == 2
