"""TensorBoard gets tens of curves, and spectra as histograms."""

from pathlib import Path

import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from kappascope import Monitor
from kappascope.integrations.tensorboard import TensorBoardSink
from monitored_training import texts, train, transformer


def test_curves_and_histograms_are_written(tmp_path: Path) -> None:
    model = transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sink = TensorBoardSink(tmp_path / "board")
    with Monitor(tmp_path / "run", every=2, strict=True, spectra_every=2, sinks=[sink]).attach(
        model, optimizer
    ) as monitor:
        train(model, optimizer, texts(4))
    board = EventAccumulator(str(tmp_path / "board"))
    board.Reload()
    tags = board.Tags()
    assert set(tags["scalars"]) == set(monitor.last) and 20 < len(tags["scalars"]) <= 200
    steps = [event.step for event in board.Scalars("condition_number/query")]
    assert steps == [0, 2, 4]
    assert "singular_values/query" in tags["histograms"]
