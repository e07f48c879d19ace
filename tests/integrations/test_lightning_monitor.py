"""Callbacks with a real Trainer of Lightning and a tiny model."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.filterwarnings("default")  # the library's own
lightning = pytest.importorskip("lightning.pytorch")

from kappascope.integrations.lightning import MonitorCallback  # noqa: E402
from kappascope.monitor.record import Run  # noqa: E402


class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """A perceptron that Lightning trains with a closure."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def trained(folder: Path, callbacks: list[Any]) -> Model:
    torch.manual_seed(0)
    model = Model()
    random = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(24, 6, generator=random), torch.randint(3, (24,), generator=random)
    )
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=callbacks, accelerator="cpu", logger=False, gradient_clip_val=0.5,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=4))
    return model


def test_a_trainer_is_watched_and_not_disturbed(tmp_path: Path) -> None:
    plain = trained(tmp_path, [])
    watched = trained(tmp_path, [MonitorCallback(tmp_path / "run", every=3, strict=True)])
    for p, q in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(p, q)
    run = Run.read(tmp_path / "run")
    assert run.is_closed and run.step == 12
    assert [step for step, _ in run.series("net.0.weight", "sigma_max")] == [0, 3, 6, 9, 12]
    assert len(run.series("net.0.weight", "signal", 0.0)) == 4
    assert [step for step, _ in run.logs["loss"]] == list(range(1, 13))
