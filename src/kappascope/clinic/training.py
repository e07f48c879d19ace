"""How a model was trained, as far as noise depends on it, and what noise alone would have done.

Two checkpoints and the optimizer's settings tell, for every part of every matrix, whether it ended
beyond noise. What this null cannot know: gradients that are larger in some directions than in
others (their noise is not white; `kappascope.monitor.ghosts` knows), the size of SGD's gradients
(pass ``gradient``), clipping of updates, and anything that changed the weights beside the
optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope.matrix.parts import StartFrame, matrix_parts
from kappascope.model.tensors import stripped
from kappascope.refusal import Refusal
from kappascope.theory.beyond import DRAWS, PartComparison, drawn_parts, parts_compared
from kappascope.theory.noise import LAWS, noise_law

MAX_SIDE = 512  # of the shorter side: the spectra of 999 draws take half a minute there
FORM = "give it like 'AdamW lr=0.001 weight_decay=0.1 betas=0.9,0.95'"


@dataclass(frozen=True)
class Training:
    """An optimizer by its class name, the settings of its parameter group, and its rates by step.

    >>> training = Training.told("AdamW lr=0.001 weight_decay=0.1 betas=0.9,0.95", steps=500)
    >>> training.optimizer, training.settings["betas"], len(training.rates)
    ('AdamW', (0.9, 0.95), 500)
    """

    optimizer: str
    rates: tuple[float, ...]
    settings: Mapping[str, Any] = field(default_factory=dict)
    gradient: float | None = None

    @classmethod
    def told(
        cls,
        text: str,
        steps: int,
        rates: Sequence[float] | None = None,
        gradient: float | None = None,
    ) -> Training:
        """Read an optimizer's name and settings, as a command line gives them."""
        name, *given = text.split() or [""]
        if name not in LAWS:
            raise Refusal(4, text, f"expected one of {', '.join(LAWS)} first", FORM)
        settings: dict[str, Any] = {}
        for each in given:
            key, equals, value = each.partition("=")
            if not equals:
                raise Refusal(4, text, f"{each} is no setting", FORM)
            settings[key] = _setting(value)
        if rates is None and not isinstance(settings.get("lr"), float):
            raise Refusal(4, text, "has no learning rate", FORM)
        if not isinstance(steps, int) or steps < 1:
            raise Refusal(4, str(steps), "expected the number of steps, at least one", FORM)
        lasting = tuple(rates) if rates is not None else (settings["lr"],) * steps
        return cls(name, lasting, settings, gradient)

    def compared(self, after: Tensor, before: Tensor) -> list[PartComparison]:
        """Compare every part of a matrix with what noise would have made of its start."""
        shape = (after.shape[0], after.shape[1])
        if before.shape != after.shape:
            raise ValueError(f"the start has another shape: {tuple(before.shape)}, not {shape}")
        if min(shape) > MAX_SIDE:
            raise ValueError(f"too large: the shorter side has {min(shape)}, above {MAX_SIDE}")
        if not bool(before.isfinite().all() and after.isfinite().all()):
            raise ValueError("a matrix is not finite")
        start = before.float()
        law = noise_law(self.optimizer, self.settings, self.rates, shape, self.gradient)
        frame = StartFrame(start) if bool(start.any()) else None
        drawn = drawn_parts(law, start, DRAWS, frame=frame)
        values = {name: float(value) for name, value in matrix_parts(after.float(), frame).items()}
        usable = {name: draws for name, draws in drawn.items() if math.isfinite(values[name])}
        return parts_compared(values, usable, f"{self.optimizer} on white noise", seed=0)


def _setting(text: str) -> Any:
    """Read a setting: a number, several of them, yes or no, or a word.

    >>> _setting("0.9,0.95"), _setting("True"), _setting("match_rms_adamw")
    ((0.9, 0.95), True, 'match_rms_adamw')
    """
    if text in ("True", "False"):
        return text == "True"
    try:
        numbers = tuple(float(each) for each in text.split(","))
    except ValueError:
        return text
    return numbers if len(numbers) > 1 else numbers[0]


class Trainings:
    """The training of each matrix by its name: one for all, or by the optimizer that steps it.

    >>> layer = nn.Linear(3, 2)
    >>> adam = torch.optim.AdamW(layer.parameters(), lr=0.1)
    >>> Trainings.of(adam, layer, steps=3).of_matrix("weight").rates
    (0.1, 0.1, 0.1)
    """

    def __init__(self, every: Training | None, by_name: Mapping[str, Training]) -> None:
        self.every, self.by_name = every, by_name

    @classmethod
    def of(
        cls,
        optimizer: str | Training | Optimizer | Sequence[Optimizer],
        after: object,
        steps: int,
        rates: Sequence[float] | None = None,
        gradient: float | None = None,
    ) -> Trainings:
        """Take what is told, or look it up in the groups of optimizers that step the model."""
        if isinstance(optimizer, Training):
            return cls(optimizer, {})
        if isinstance(optimizer, str):
            return cls(Training.told(optimizer, steps, rates, gradient), {})
        several = [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)
        names = {}
        if isinstance(after, nn.Module):
            names = {id(p): stripped(name) for name, p in after.named_parameters()}
        by_name: dict[str, Training] = {}
        found: list[Training] = []
        for each in several:
            for group in each.param_groups:
                lasting = tuple(rates) if rates is not None else (float(group["lr"]),) * steps
                settings = {key: value for key, value in group.items() if key != "params"}
                training = Training(type(each).__name__, lasting, settings, gradient)
                if any(p.ndim > 1 for p in group["params"]):
                    found.append(training)
                by_name |= {names[id(p)]: training for p in group["params"] if id(p) in names}
        if not by_name and len(found) > 1:
            wrong = "has several groups, and no model tells which matrix is in which"
            raise Refusal(4, "the optimizer", wrong, "pass the module as after, or one group")
        return cls(None if by_name else next(iter(found), None), by_name)

    def of_matrix(self, name: str) -> Training | None:
        """Return how a matrix was trained, if that is known."""
        return self.by_name.get(name, self.every)
