"""Corrections in the ``Trainer`` of Lightning (``kappascope[lightning]``)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from kappascope.corrections import Correction, Handle
from kappascope.model.weights import Where


class CorrectionCallback(Callback):
    """Correct the weights of a module while ``Trainer.fit`` trains it.

        Trainer(callbacks=[CorrectionCallback(Hybrid())]).fit(module, data)

    Checkpoints are those of the plain module; the state of the optimizers in them carries what a
    resume to the last bit needs. Factors are spared the effect of the Trainer's gradient clip.
    ``handle`` is what is attached.

    >>> from kappascope.corrections import NormPin
    >>> CorrectionCallback(NormPin()).handle is None
    True
    """

    def __init__(self, correction: Correction, where: Where = None) -> None:
        self.correction, self.where = correction, where
        self.handle: Handle | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach to the optimizers; a checkpoint's states are loaded into them after this."""
        self.close()
        self.handle = self.correction.attach(pl_module, trainer.optimizers, self.where)

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
