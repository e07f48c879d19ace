"""Corrections and the monitor in Lightning: with a real ``Trainer``, by hand, and in Fabric."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from correction_examples import perceptron, steps
from kappascope.corrections import Correction, Hybrid, Multipliers, NormPin
from kappascope.monitor.record import Run

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning's own, about loaders and loggers

lightning = pytest.importorskip("lightning")
adapters = pytest.importorskip("kappascope.integrations.lightning")
CorrectionCallback, MonitorCallback = adapters.CorrectionCallback, adapters.MonitorCallback

from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402  # once it is known to be there

CORRECTIONS = [Multipliers(rate=1.0), Hybrid(), NormPin()]
each = pytest.mark.parametrize("correction", CORRECTIONS, ids=lambda c: type(c).__name__)


class Module(lightning.LightningModule):
    """A perceptron that learns zero."""

    def __init__(self, by_hand: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = not by_hand
        torch.manual_seed(0)
        self.net = perceptron()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        loss = self.net(batch[0]).square().mean()
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def data() -> DataLoader:
    x = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x), batch_size=4)


def trainer(folder: Path, callback, **more):
    return lightning.Trainer(
        default_root_dir=folder, max_epochs=2, accelerator="cpu", logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[callback, ModelCheckpoint(folder, "{epoch}", save_top_k=-1)], **more,
    )  # fmt: skip


def by_loop(correction: Correction | None, clip: float | None = None) -> nn.Module:
    """The same training without Lightning."""
    model = Module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    handle = correction.attach(model, optimizer) if correction else None
    for (batch,) in (*data(), *data()):  # epochs
        optimizer.zero_grad()
        model.net(batch).square().mean().backward()
        if clip is not None and handle is not None:
            with handle.unclipped():
                nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return model


def assert_same(model: nn.Module, other: nn.Module) -> None:
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=0, atol=0)


@each
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_trainer_trains_as_a_loop_does_and_resumes_to_the_bit(
    correction, by_hand, tmp_path: Path
) -> None:
    whole, again, callback = Module(by_hand), Module(by_hand), CorrectionCallback(correction)
    trainer(tmp_path, callback).fit(whole, data())
    assert callback.handle is None
    assert_same(whole, by_loop(correction))
    half = tmp_path / "epoch=0.ckpt"
    kept = torch.load(half, weights_only=False)["state_dict"]
    assert kept.keys() == by_loop(None).state_dict().keys()
    trainer(tmp_path, CorrectionCallback(correction)).fit(again, data(), ckpt_path=half)
    assert_same(again, whole)


def test_a_callback_takes_several_corrections_by_pattern(tmp_path: Path) -> None:
    whole, again = Module(), Module()
    settings = {"net.0.*": Hybrid(), "*": NormPin()}
    trainer(tmp_path, CorrectionCallback(settings)).fit(whole, data())
    half = tmp_path / "epoch=0.ckpt"
    trainer(tmp_path, CorrectionCallback(settings)).fit(again, data(), ckpt_path=half)
    assert_same(again, whole)
    norms = [model.net[2].weight.norm() for model in (Module(), whole)]
    torch.testing.assert_close(*norms, rtol=1e-5, atol=0)


def test_what_is_no_correction_is_told_to_the_callback_at_once() -> None:
    with pytest.raises(TypeError, match=r"^expected a correction, as NormPin\(\), .*; got list$"):
        CorrectionCallback([NormPin()])
    with pytest.raises(TypeError, match=r"^expected where= beside one correction; patterns say"):
        CorrectionCallback({"*": NormPin()}, where="net.0.*")


def test_factors_are_spared_the_trainers_clip(tmp_path: Path) -> None:
    model, correction = Module(), Multipliers(rate=1.0)
    run = trainer(tmp_path, CorrectionCallback(correction), gradient_clip_val=0.05)
    run.fit(model, data())
    assert_same(model, by_loop(correction, clip=0.05))


@each
def test_fabrics_models_and_optimizers_are_unwrapped(correction) -> None:
    fabric = lightning.Fabric(accelerator="cpu")
    trained = []
    for wrapped in (False, True):
        torch.manual_seed(0)
        model = perceptron()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        both = fabric.setup(model, optimizer) if wrapped else (model, optimizer)
        with correction.attach(*both) as handle:
            assert handle.weights == ("0.weight", "2.weight")
            steps(*both, 4)
        trained.append(model)
    assert_same(*trained)


def test_what_a_module_calls_its_optimizers_is_unwrapped(tmp_path: Path) -> None:
    found = []

    class Attaching(Module):
        """Attaches by itself, to what Lightning gives it."""

        def on_train_start(self) -> None:
            found.append(NormPin().attach(self, self.optimizers()))

    module = Attaching(by_hand=True)
    norm = module.net[0].weight.detach().norm()
    trainer(tmp_path, lightning.Callback()).fit(module, data())
    torch.testing.assert_close(module.net[0].weight.detach().norm(), norm)
    assert found[0].state_dict()["steps"] == [6]


def test_a_monitor_in_a_trainer_records_and_disturbs_nothing(tmp_path: Path) -> None:
    plain, watched = Module(), Module()
    for module, callback in (
        (plain, lightning.Callback()),
        (watched, MonitorCallback(tmp_path / "run", every=2, strict=True)),
    ):
        trainer(tmp_path, callback, gradient_clip_val=0.5).fit(module, data())
    assert_same(plain, watched)
    run = Run.read(tmp_path / "run")
    assert run.is_closed and run.step == 6
    assert [step for step, _ in run.series("net.0.weight", "sigma_max")] == [0, 2, 4, 6]
    assert len(run.series("net.0.weight", "signal", 0.0)) == 3
    assert [step for step, _ in run.logs["loss"]] == list(range(1, 7))
