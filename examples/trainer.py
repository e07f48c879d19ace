"""Watch and correct a model in the Trainer of Hugging Face: two callbacks.

It needs ``pip install 'kappascope[transformers]'``.
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from kappascope.corrections import Multipliers
from kappascope.integrations.transformers import CorrectionCallback, MonitorCallback
from kappascope.monitor.record import Run

torch.manual_seed(0)
sentences = torch.randint(32, (24, 8))
data = [{"input_ids": one, "labels": one} for one in sentences]
model = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=32, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
)
names = list(model.state_dict())
arguments = TrainingArguments(
    "trainer",
    num_train_epochs=2,
    report_to="none",
    use_cpu=True,
    save_strategy="no",
    disable_tqdm=True,
)
callbacks = [MonitorCallback("runs/trainer", every=2), CorrectionCallback(Multipliers())]
Trainer(model, arguments, train_dataset=data, callbacks=callbacks).train()

assert list(model.state_dict()) == names  # the plain model, all along
run = Run.read("runs/trainer")
assert {reading.step for reading in run.readings} >= {0, 2, 4, 6}
print(f"{len(run.readings)} readings of {len(run.matrices)} matrices, with Multipliers attached")
print("see them: kappascope watch runs/trainer --once")
