"""Callbacks for the Trainer of Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from kappascope.monitor.monitor import Monitor


class MonitorCallback(Callback):
    """Watch what Lightning's Trainer trains, from its first step to its last.

    ``Trainer(callbacks=[MonitorCallback("runs/gpt", every=50)])``; instead of a folder and the
    options of a :class:`~kappascope.Monitor`, a monitor may be given.
    """

    def __init__(self, monitor: Monitor | str | Path, **options: Any) -> None:
        self.monitor = monitor if isinstance(monitor, Monitor) else Monitor(monitor, **options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module and to its optimizers."""
        several = max(len(trainer.optimizers), 1)  # each counts in Lightning's global step
        self.monitor.attach(pl_module, trainer.optimizers, step=trainer.global_step // several)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Keep the loss of every batch."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor) and self.monitor.is_attached:
            self.monitor.log(loss=loss)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the record, and leave no hook behind."""
        self.monitor.close()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Write the last readings before the record is closed."""
        self.monitor.__exit__(type(exception), exception, None)
