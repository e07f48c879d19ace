"""Study of what is not learned: which parts of a GPT's matrices are what noise and decay make.

Are there parts of parameter matrices, apart from row and column norms, that are not learned? A part
is unlearned if its value is what the same optimizer, rates, decay and start would have made of it
without a coherent signal. So every run has its nulls beside it: four ghosts, which get the same
gradients with random signs; the closed law of white noise; the law of noise with the covariances
that its gradients have; and what decay leaves of the start. Stages, in their order:

- ``grid``: rate x decay x AdamW, Muon, SGD: which part is beyond noise, where, and by which law;
- ``matter``: the norm, or the lower half of the spectrum, is held at a quarter to four times what
  it was, or is freed by multipliers: does the loss care?
- ``data``: four texts x settings: does a part follow the text or the settings?
- ``width``: 32 to 128, standard and muP.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kappascope import corrections
from kappascope.lab import downloads
from kappascope.lab.experiment import Rows, Setting, Study
from kappascope.lab.resume import ResumePoint
from kappascope.lab.tasks import generator
from kappascope.matrix import spectra
from kappascope.matrix.parts import StartFrame
from kappascope.model.names import kind as kind_of
from kappascope.monitor.ghosts import Ghosts
from kappascope.studies.gpt.model import GPT, validation
from kappascope.studies.unlearned.claims import CLAIMS
from kappascope.studies.unlearned.exhibits import exhibits, plot
from kappascope.studies.unlearned.model import (
    BASE_WIDTH,
    LAYERS,
    GradientNoise,
    every_part,
    fed_by,
    forgetting,
    gains,
    hidden,
    seen,
    steppers,
)
from kappascope.studies.unlearned.texts import TEXTS, corpus
from kappascope.theory.beyond import place
from kappascope.theory.noise import NoiseLaw, noise_law

BATCH = 4  # windows of 64 characters: little, so that gradients are noisy, as the question has it
WARMUP = 100  # steps; the rate is constant afterwards
CLIP = 1.0  # of the gradient's norm, as is usual
GHOSTS = 4
SAMPLED = 4  # steps from one look at a gradient's covariance to the next
WHITE_DRAWS, SHAPED_DRAWS = 999, 99  # p-values need many, a mean does not
MUON_DRAWS = 199  # each is a sum of hundreds of orthogonal factors
HELD_FROM = 750  # steps that every arm of `matter` has in common
HOLD_EVERY = 10  # steps from one correction of the spectrum to the next
FREED: Mapping[str, corrections.Correction] = {
    "multipliers": corrections.Multipliers(),
    "values": corrections.SingularValueMultipliers(),
}


def trials(
    seed: int,
    resume_point: ResumePoint,
    *,
    stage: str,
    text: str,
    optimizer: str,
    rate: float,
    decay: float,
    steps: int,
    width: int,
    scaling: str,
    held: str,
    level: float,
) -> Iterator[Rows]:
    """Train one model; all arms of a seed share start and batches."""
    source = corpus(text)
    model = GPT(source.vocabulary, LAYERS, width, generator("unlearned start", seed, width))
    data = generator("unlearned data", seed)
    growth = width / BASE_WIDTH if scaling == "mup" else 1.0
    if scaling == "mup":  # whose limit has a head that begins with nothing
        nn.init.zeros_(model.head.weight)
    asked = steppers(model, optimizer, decay, growth)
    matrices = hidden(model)
    freed = FREED[held].attach(model, list(asked.values())) if held in FREED else None
    nulls = None
    if stage != "matter":
        starts = {name: p.detach().clone() for name, p in matrices.items()}
        ghosts = Ghosts(matrices, asked["hidden"], GHOSTS, seed)
        noise = GradientNoise(matrices, (1 - forgetting(optimizer, rate, decay)) ** 2)
        nulls = Nulls(optimizer, asked["hidden"], starts, ghosts, noise)
    holding = Held(held, level)
    parts: dict[str, Any] = {"model": model, "data": data, "held": holding, **asked}
    parts |= {"ghosts": nulls.ghosts, "noise": nulls.noise} if nulls else {}
    parts |= {"freed": freed} if freed else {}
    log: list[dict[str, Any]] = []
    rates = [rate / growth * min(1.0, (step + 1) / WARMUP) for step in range(steps)]
    for step in resume_point.steps(steps, log, **parts):
        if nulls and step in (steps // 8, steps // 2):
            log += nulls.readings(model, rates[:step], is_last=False)
        began = time.process_time()
        asked["hidden"].param_groups[0]["lr"] = rates[step] * holding.rate_factor(step)
        for stepper in asked.values():
            stepper.zero_grad()
        loss = model.loss(source.batch(BATCH, data))
        loss.backward()
        with freed.unclipped() if freed else nullcontext():  # a correction's own factors
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        watcher = nulls.before_step(step) if nulls else None
        for stepper in asked.values():
            stepper.step()
        holding.apply(matrices, step)
        if nulls and watcher:
            nulls.after_step(matrices, watcher)
        log.append({"loss": loss.item(), "seconds": time.process_time() - began})
        if not math.isfinite(loss.item()):
            break
    taken = [row for row in log if "loss" in row]
    is_whole = len(taken) == steps and math.isfinite(taken[-1]["loss"])
    final = validation(model, source.held_out()) if is_whole else math.inf
    yield {"component": "seconds", "value": float(np.median([row["seconds"] for row in taken]))}
    yield {"component": "training_loss", "value": float(np.mean([r["loss"] for r in taken[-200:]]))}
    yield {"component": "validation_loss", "value": final, "epoch": steps}
    yield from (row for row in log if "loss" not in row)
    if nulls and is_whole:
        yield from nulls.readings(model, rates, is_last=True)


@dataclass(frozen=True)
class Nulls:
    """What a run is compared with: ghosts, and laws of noise with what gradients are like."""

    optimizer: str
    stepper: Optimizer
    starts: Mapping[str, Tensor]
    ghosts: Ghosts
    noise: GradientNoise

    @property
    def group(self) -> Mapping[str, Any]:
        """The settings of the optimizer, whose groups are new ones after a resumption."""
        return self.stepper.param_groups[0]

    def before_step(self, step: int) -> dict[str, Tensor] | None:
        """Return a ghost of every matrix before steps that are looked at."""
        if (step + 1) % SAMPLED:
            return None
        return {name: self.ghosts.weights(name)[0].clone() for name in self.starts}

    def after_step(
        self, matrices: Mapping[str, nn.Parameter], before: Mapping[str, Tensor]
    ) -> None:
        """Take what noise fed to every matrix: for Muon, what it fed to the ghost."""
        rate, decay = self.group["lr"], self.group["weight_decay"]
        for name, p in matrices.items():
            fed = fed_by(self.stepper, p)
            if self.optimizer == "Muon":
                fed = (self.ghosts.weights(name)[0] - (1 - rate * decay) * before[name]) / rate
            assert p.grad is not None
            self.noise.add(name, fed, p.grad, SAMPLED)

    def laws(self, rates: Sequence[float]) -> dict[str, NoiseLaw]:
        """Return the law of white noise for every matrix after steps at these rates."""
        found: dict[tuple[int, ...], NoiseLaw] = {}
        laws = {}
        for name, start in self.starts.items():
            shape = (start.shape[0], start.shape[1])
            if self.optimizer == "SGD":
                deviation = self.noise.deviation(name)
                laws[name] = noise_law("SGD", self.group, rates, shape, deviation)
            else:
                if shape not in found:
                    found[shape] = noise_law(self.optimizer, self.group, rates, shape)
                laws[name] = found[shape]
        return laws

    def readings(
        self, model: GPT, rates: Sequence[float], is_last: bool
    ) -> Iterator[dict[str, Any]]:
        """Yield every part of every matrix and product, beside what each null gives for it."""
        gain, laws = gains(model), self.laws(rates)
        trained = {name: p.detach() for name, p in hidden(model).items()}
        frames = {name: StartFrame(w) for name, w in seen(self.starts, gain).items()}
        stacks: dict[str, dict[str, Tensor]] = {
            "ghost": {name: torch.stack(self.ghosts.weights(name)) for name in trained},
            "start": {name: laws[name].kept * w[None] for name, w in self.starts.items()},
            "shaped": self._drawn(laws, SHAPED_DRAWS, is_shaped=True),
        }
        if is_last and trained[next(iter(trained))].shape[-1] <= BASE_WIDTH:
            count = MUON_DRAWS if self.optimizer == "Muon" else WHITE_DRAWS
            stacks["white"] = self._drawn(laws, count, is_shaped=False)
        nulls = {
            label: {name: found for name, _, found in every_part(seen(stack, gain), frames)}
            for label, stack in stacks.items()
        }
        lots = np.random.default_rng(len(rates))
        for name, kind, found in every_part(seen(trained, gain), frames):
            for part, value in found.items():
                row = {"component": part, "matrix": name, "kind": kind, "epoch": len(rates)}
                row["value"] = float(value)
                for label, null in nulls.items():
                    draws = null[name][part]
                    row[label] = float(draws.mean())
                    row[f"{label}_spread"] = float(draws.std()) if len(draws) > 1 else 0.0
                if "white" in nulls:
                    row["place"] = place(float(value), nulls["white"][name][part].numpy(), lots)
                yield row

    def _drawn(
        self, laws: Mapping[str, NoiseLaw], count: int, is_shaped: bool
    ) -> dict[str, Tensor]:
        """Draw every matrix from its law; the two factors of a product have noise of their own."""
        drawn = {}
        for name, start in self.starts.items():
            law, sums = laws[name], self.noise.state[name]
            law = law.shaped(sums["rows"], sums["columns"]) if is_shaped else law
            seed = 1 if kind_of(name) in ("key", "value") else 0
            drawn[name] = torch.cat(list(law.draws(start, count, seed)))
        return drawn


class Held:
    """Hold a part of every matrix, from `HELD_FROM` on, at a multiple of what it was then.

    ``norm``: the Frobenius norm; the rate is multiplied alike, so that a step turns the matrix by
    the same angle. ``tail``: the lower half of the singular values, each at its multiple.
    """

    def __init__(self, what: str, level: float) -> None:
        self.what, self.level = what, level
        self.levels: dict[str, Tensor] = {}

    def rate_factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        return self.level if self.what == "norm" and step > HELD_FROM else 1.0

    @torch.no_grad()
    def apply(self, matrices: Mapping[str, nn.Parameter], step: int) -> None:
        """Bring every matrix back to where it is held."""
        if self.what not in ("norm", "tail") or step < HELD_FROM:
            return
        if self.what == "norm":
            for name, p in matrices.items():
                norm = torch.linalg.matrix_norm(p)
                p.mul_(self.level * self.levels.setdefault(name, norm.clone()) / norm)
        elif step % HOLD_EVERY == 0:
            for name, p in matrices.items():
                u, s, vt = spectra.decomposition(p.detach())
                half = len(s) // 2
                tail = self.levels.setdefault(name, s[half:].clone())
                p.copy_((u * torch.cat([s[:half], self.level * tail])) @ vt)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the levels that are held, by matrix."""
        return self.levels

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take what an interrupted run held."""
        self.levels = dict(state)


# --- the grid -------------------------------------------------------------------------------------

STEPS = 3000
RATE: Mapping[str, float] = {"AdamW": 0.005, "Muon": 0.005, "SGD": 0.1}
# the sum of rate times decay over a run: 0, 1.5, 7.5 and 30, momentum of SGD counted
DECAYS: Mapping[str, tuple[float, ...]] = {
    "AdamW": (0.0, 0.1, 0.5, 2.0),
    "Muon": (0.0, 0.1, 0.5, 2.0),
    "SGD": (0.0, 0.0005, 0.0025, 0.01),
}
OPTIMIZERS = tuple(RATE)
CENTRE = 2  # of the decays
PLAIN: Setting = {
    "text": "prose", "steps": STEPS, "width": BASE_WIDTH, "scaling": "standard",
    "held": "nothing", "level": 1.0,
}  # fmt: skip
LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)
WIDTHS = (32, 64, 128)
SEEDS = {"grid": 4, "matter": 8, "data": 3, "width": 3}


def cell(optimizer: str, decay: float, rate_factor: float = 1.0, **changes: Any) -> Setting:
    """Describe a run: an optimizer at its usual rate, times a factor, with some decay."""
    about = {"stage": "grid", **PLAIN, "optimizer": optimizer, "decay": decay}
    return {**about, "rate": RATE[optimizer] * rate_factor, **changes}


def whole_grid(steps: int = STEPS) -> tuple[Setting, ...]:
    """List every run, those that tell most first: a run that is cut has whole parts."""
    found = [cell(o, DECAYS[o][k], steps=steps) for k in (2, 0, 3, 1) for o in OPTIMIZERS]
    short: dict[str, Any] = {"stage": "matter", "steps": steps * 3 // 4}
    arms = [("nothing", 1.0), *(("norm", level) for level in LEVELS)]
    later = [*((freed, 1.0) for freed in FREED), *(("tail", level) for level in LEVELS)]
    found += [cell("AdamW", DECAYS["AdamW"][CENTRE], held=h, level=x, **short) for h, x in arms]
    found += [cell(o, DECAYS[o][CENTRE], f, steps=steps) for f in (0.5, 2.0) for o in OPTIMIZERS]
    found += [cell("Muon", DECAYS["Muon"][CENTRE], held=h, level=x, **short) for h, x in arms]
    for optimizer in ("AdamW", "Muon"):
        decay = DECAYS[optimizer][CENTRE]
        found += [cell(optimizer, decay, held=h, level=x, **short) for h, x in later]
    centre = DECAYS["AdamW"][CENTRE]
    for rate_factor, decay_factor in ((1.0, 1.0), (2.0, 0.5), (0.5, 4.0)):
        about: dict[str, Any] = {"stage": "data", "steps": steps}
        found += [
            cell("AdamW", centre * decay_factor, rate_factor, text=text, **about) for text in TEXTS
        ]
    for scaling in ("standard", "mup"):
        about = {"stage": "width", "scaling": scaling, "steps": steps}
        found += [cell("AdamW", centre, width=width, **about) for width in WIDTHS]
    return tuple(found)


STUDY = Study(
    number=24,
    name="unlearned",
    title="What is not learned",
    section="review W1(b)",
    question=__doc__,
    grid=whole_grid(),
    trials=trials,
    own=lambda setting: SEEDS[str(setting["stage"])],
    seconds=20.0,  # the same for all: they are run in the order of the grid
    claims=CLAIMS,
    exhibits=exhibits,
    plot=plot,
    downloads=(downloads.SHAKESPEARE,),
    quick={"grid": whole_grid(steps=40)[:6], "own": 2},
)
