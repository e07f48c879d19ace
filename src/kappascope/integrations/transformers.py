"""Callbacks for the Trainer of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from kappascope.monitor.monitor import Monitor


class MonitorCallback(TrainerCallback):
    """Watch what the Trainer trains, from its first step to its last.

    ``Trainer(..., callbacks=[MonitorCallback("runs/gpt", every=50)])``; instead of a folder and
    the options of a :class:`~kappascope.Monitor`, a monitor may be given. A run resumed from a
    checkpoint continues its record at the checkpoint's step.
    """

    def __init__(self, monitor: Monitor | str | Path, **options: Any) -> None:
        self.monitor = monitor if isinstance(monitor, Monitor) else Monitor(monitor, **options)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Attach to the model and to the optimizer inside accelerate's wrapper."""
        self.monitor.attach(kwargs["model"], kwargs["optimizer"], step=state.global_step)

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Keep the losses that the Trainer logs."""
        logs = kwargs.get("logs") or {}
        kept = {name: logs[name] for name in ("loss", "eval_loss") if name in logs}
        if kept and self.monitor.is_attached:
            self.monitor.log(**kept)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Finish the record, and leave no hook behind."""
        self.monitor.close()
