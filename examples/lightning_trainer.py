"""Watch a model in the Trainer of Lightning: one callback.

It needs ``pip install 'kappascope[lightning]'``.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kappascope.integrations.lightning import MonitorCallback
from kappascope.monitor.record import Run


class Module(lightning.LightningModule):
    """A perceptron that learns zero."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """Measure the mean square of what comes out."""
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Train with AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=0.01)


torch.manual_seed(0)
data = DataLoader(TensorDataset(torch.randn(64, 16)), batch_size=8)
quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
callback = MonitorCallback("runs/lightning", every=4)
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", callbacks=[callback], enable_model_summary=False, **quiet
)
trainer.fit(Module(), data)

run = Run.read("runs/lightning")
assert {reading.step for reading in run.readings} >= {0, 4, 8}
print(f"{len(run.readings)} readings of {len(run.matrices)} matrices")
print("see them: kappascope watch runs/lightning --once")
