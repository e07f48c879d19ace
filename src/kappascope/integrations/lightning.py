"""Callbacks for the ``Trainer`` of Lightning (``kappascope[lightning]``)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from kappascope.corrections import Correction, Handle
from kappascope.corrections.correction import Settings, attaching
from kappascope.monitor.monitor import Monitor


class CorrectionCallback(Callback):
    """Correct the weights of a module while ``Trainer.fit`` trains it.

        Trainer(callbacks=[CorrectionCallback(Hybrid())]).fit(module, data)

    Checkpoints are those of the plain module; the state of the optimizers in them carries what a
    resume to the last bit needs. Factors are spared the effect of the Trainer's gradient clip.
    Several corrections by pattern are passed as to :func:`~kappascope.corrections.attach`;
    ``where`` and ``exclude`` are those of :meth:`~kappascope.corrections.Correction.attach`, and
    ``handle`` is what is attached.

    >>> from kappascope.corrections import NormPin
    >>> CorrectionCallback(NormPin()).handle is None
    True
    """

    def __init__(
        self,
        correction: Correction | Settings,
        where: Any = None,
        exclude: Any = None,
    ) -> None:
        self._attach = attaching(correction, where, exclude)
        self.handle: Handle | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizers; a checkpoint's states are loaded into them after this."""
        self.close()
        self.handle = self._attach(pl_module, trainer.optimizers)

    def on_before_optimizer_step(self, *args: Any) -> None:
        """Spare the factors, for the gradients are clipped after this."""
        if self.handle is not None:
            self.handle.spare_factors()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Let go: the weights stay as they are."""
        self.close()

    def on_exception(self, *args: Any) -> None:
        """Let go when training has failed or was interrupted."""
        self.close()

    def close(self) -> None:
        """Close the handle, if something is attached."""
        if self.handle is not None:
            self.handle.close()
        self.handle = None


class MonitorCallback(Callback):
    """Watch what Lightning's Trainer trains, from its first step to its last.

    ``Trainer(callbacks=[MonitorCallback("runs/gpt", every=50)])``; instead of a folder and the
    options of a :class:`~kappascope.Monitor`, a monitor may be given.
    """

    def __init__(self, monitor: Monitor | str | Path, **options: Any) -> None:
        self.monitor = monitor if isinstance(monitor, Monitor) else Monitor(monitor, **options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the module and to its optimizers."""
        self.monitor.close()
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
