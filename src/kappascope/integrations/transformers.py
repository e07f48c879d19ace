"""Callbacks for the ``Trainer`` of Hugging Face's transformers (``kappascope[transformers]``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME

from kappascope.corrections import Correction, Handle
from kappascope.corrections.correction import Settings, attaching
from kappascope.corrections.optimizers import STATE_KEY
from kappascope.monitor.monitor import Monitor
from kappascope.refusal import Refusal


class CorrectionCallback(TrainerCallback):
    """Correct the weights of a ``Trainer``'s model while it trains.

        Trainer(model, args, train_dataset=..., callbacks=[CorrectionCallback(Hybrid())])

    Checkpoints are those of the plain model; the optimizer's file in them carries what a resume to
    the last bit needs, and a resumed run takes it from there. The folder it resumes from is not
    told to callbacks: where it is not ``checkpoint-<step>`` in the output folder (or
    ``args.resume_from_checkpoint``), pass it as ``resume_from``. Several corrections by
    pattern are passed as to :func:`~kappascope.corrections.attach`; ``where`` and ``exclude`` are
    those of :meth:`~kappascope.corrections.Correction.attach`; ``handle`` is what is attached.

    >>> from kappascope.corrections import NormPin
    >>> CorrectionCallback(NormPin()).handle is None
    True
    """

    def __init__(
        self,
        correction: Correction | Settings,
        where: Any = None,
        exclude: Any = None,
        resume_from: str | Path | None = None,
    ) -> None:
        self._attach = attaching(correction, where, exclude)
        self.resume_from = resume_from
        self.handle: Handle | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **others: Any,
    ) -> None:
        """Attach, once the optimizer is there, and go on where a checkpoint was saved."""
        self.close()
        model, optimizer = others["model"], others["optimizer"]
        self.handle = self._attach(model, optimizer)
        if state.global_step:
            try:
                self._resume(args, state)
            except BaseException:
                self.close()
                raise

    def _resume(self, args: TrainingArguments, state: TrainerState) -> None:
        assert self.handle is not None
        usual = Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"
        folders = [self.resume_from] if self.resume_from else [args.resume_from_checkpoint, usual]
        files = [Path(f) / OPTIMIZER_NAME for f in folders if isinstance(f, str | Path)]
        file = next((file for file in files if file.is_file()), None)
        if file is None:
            given = f"a run that goes on at step {state.global_step}"
            looked = " or ".join(map(str, files))
            advice = "pass its checkpoint: CorrectionCallback(..., resume_from=folder)"
            raise Refusal(4, given, f"there is no {looked} to take the correction from", advice)
        saved = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
        if states := saved.get(STATE_KEY, []):  # none: nothing was attached before
            self.handle.load_state_dict(_fitting(self.handle, states))

    def on_train_end(self, *args: Any, **others: Any) -> None:
        """Let go: the weights stay as they are."""
        self.close()

    def close(self) -> None:
        """Close the handle, if something is attached."""
        if self.handle is not None:
            self.handle.close()
        self.handle = None


def _fitting(handle: Handle, states: Sequence[Any]) -> Any:
    """The one of several corrections' states that is of this one; else the first, to be refused."""
    kinds = [(t.weight.name, t.kind.__name__) for t in handle.treatments]
    for state in states:
        if [(one["weight"], one["kind"]) for one in state["treatments"]] == kinds:
            return state
    return states[0]


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
        self.monitor.close()  # of training that raised, which no callback is told
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
