"""Study of what is not learned: which parts of a GPT's matrices are what noise and decay make.

Are there parts of parameter matrices, apart from row and column norms, that are not learned? A part
is unlearned if its value is what the same optimizer, rates, decay and start would have made of it
without a coherent signal. Every run has four null models beside it. Four ghosts, copies of the
network, get the same gradients with random signs. The closed law of white noise knows the size of
the gradients. The law of shaped noise knows their covariances, too. The last null is what decay
leaves of the start. The gap of a part is its trained value less that of its ghosts.

These are the stages:

- ``grid``: decay x AdamW, Muon, SGD. Which part is beyond noise, where, and by which law?
- ``rate``: half and twice the rate, at the same decay and at the same product of both.
- ``start``: a start of half and of twice the size. What remembers it?
- ``matter``: the norm, or the lower half of the spectrum, is held at a quarter to four times what
  it was; or the spectrum is held flatter or steeper at the same norm; or a part is freed by
  multipliers. Does the loss care?
- ``balance``: the square of every norm, less its mean over all ghosts in closed form. What did
  gradients that pointed the same way add? Does the loss want more or less of it?
- ``data``: four texts x settings of equal loss. Does a part follow the text or the settings?
- ``width``: 32 to 256, under standard scaling and under muP.
- ``file``: public checkpoints, beside the nulls that a file alone allows.

A pilot of 98 runs came before, with other seeds and 3,000 steps. It made the predictions that are
judged here, and the settings of equal loss. None of its rows counts. Some rules came after other
rows had been seen, and before their own rows: the balance after the grid, the shape after the tail,
the share of the lower half after both, and width 256 after the lesser widths.
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
from kappascope.monitor.ghosts import Ghosts, GhostSquares
from kappascope.studies.gpt.model import GPT, validation
from kappascope.studies.unlearned.claims import CLAIMS
from kappascope.studies.unlearned.exhibits import exhibits, plot
from kappascope.studies.unlearned.files import CHECKPOINTS, file_rows
from kappascope.studies.unlearned.model import (
    BASE_WIDTH,
    CENTRE,
    DECAYS,
    GHOSTS,
    LAYERS,
    LIGHT,
    OPTIMIZERS,
    RATE,
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
SAMPLED = 4  # steps from one look at a gradient's covariance to the next
WHITE_DRAWS, SHAPED_DRAWS = 199, 99  # what is judged are means, which need few
HELD_FROM = 3 / 8  # the share of the steps that every arm of `matter` has in common
HOLD_EVERY = 10  # steps from one correction of the spectrum to the next
FREED: Mapping[str, tuple[corrections.Correction, str | None]] = {
    "multipliers": (corrections.Multipliers(), None),
    "values": (corrections.SingularValueMultipliers(), None),
    # one factor for a layer's query: the temperature at which its heads compare
    "temperature": (
        corrections.Multipliers(rows=False, columns=False, gauge=True, rate=1.0),
        "*.query.weight",
    ),
}
HELD = ("norm", "tail", "share", "shape")
# stages that ask for losses, compare runs with one another, or have a null of their own
WITHOUT_NULLS = ("matter", "data", "balance")


def trials(seed: int, resume_point: ResumePoint, *, stage: str, **setting: Any) -> Iterator[Rows]:
    """Train one model beside its nulls, or compare a checkpoint with those of a file."""
    if stage == "file":
        return file_rows(**setting)
    return network_rows(seed, resume_point, stage=stage, **setting)


def network_rows(
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
    start_scale: float,
    held: str,
    level: float,
) -> Iterator[Rows]:
    """Train one model; all arms of a seed share start and batches."""
    source = corpus(text)
    model = started(source.vocabulary, seed, width, scaling, start_scale)
    data = generator("unlearned confirmation", "data", seed)
    growth = width / BASE_WIDTH if scaling == "mup" else 1.0
    asked = steppers(model, optimizer, decay, growth)
    matrices = hidden(model)
    freed = freed_by(held, model, list(asked.values()))
    nulls = None
    if stage not in WITHOUT_NULLS:
        starts = {name: p.detach().clone() for name, p in matrices.items()}
        ghosts = Ghosts(matrices, asked["hidden"], GHOSTS, seed)
        noise = GradientNoise(matrices, (1 - forgetting(optimizer, rate, decay)) ** 2)
        nulls = Nulls(optimizer, asked["hidden"], starts, ghosts, noise)
    squares = GhostSquares(matrices, asked["hidden"]) if stage == "balance" else None
    holding = Held(held, level, round(HELD_FROM * steps))
    beside = {"freed": freed, "squares": squares, **(nulls.stateful if nulls else {})}
    parts: dict[str, Any] = {"model": model, "data": data, "held": holding, **asked}
    parts |= {name: part for name, part in beside.items() if part}
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
    yield from losses(taken, final, steps)
    yield from (row for row in log if "loss" not in row)
    if nulls and is_whole:
        yield from nulls.readings(model, rates, is_last=True)
    elif is_whole and stage == "data":
        yield from bare_parts(model, steps)
    elif is_whole and squares:
        yield from balances(model, squares, source.held_out())


def losses(
    taken: Sequence[Mapping[str, float]], final: float, steps: int
) -> Iterator[dict[str, Any]]:
    """Yield what a step took, the loss of the last steps and that of held-out text."""
    yield {"component": "seconds", "value": float(np.median([row["seconds"] for row in taken]))}
    yield {"component": "training_loss", "value": float(np.mean([r["loss"] for r in taken[-200:]]))}
    yield {"component": "validation_loss", "value": final, "epoch": steps}


@torch.no_grad()
def started(vocabulary: int, seed: int, width: int, scaling: str, start_scale: float) -> GPT:
    """Start a model; the blocks' matrices of two scales differ in size alone."""
    random = generator("unlearned confirmation", "start", seed, width)
    model = GPT(vocabulary, LAYERS, width, random)
    if scaling == "mup":  # whose limit has a head that begins with nothing
        nn.init.zeros_(model.head.weight)
    for p in hidden(model).values():
        p.mul_(start_scale)
    return model


def freed_by(held: str, model: GPT, optimizers: list[Optimizer]) -> corrections.Handle | None:
    """Give a model the factors that free a part, if this arm has some."""
    if held not in FREED:
        return None
    correction, where = FREED[held]
    return correction.attach(model, optimizers, where=where)


def bare_parts(model: GPT, epoch: int) -> Iterator[dict[str, Any]]:
    """Yield every part of every matrix and product as it is."""
    trained = seen({name: p.detach() for name, p in hidden(model).items()}, gains(model))
    frames = {name: StartFrame(w) for name, w in trained.items()}
    for name, kind, found in every_part(trained, frames):
        for part, value in found.items():
            if not part.endswith("alignment"):
                about = {"component": part, "matrix": name, "kind": kind, "epoch": epoch}
                yield {**about, "value": float(value)}


def balances(model: GPT, squares: GhostSquares, held_out: Tensor) -> Iterator[dict[str, Any]]:
    """Yield what coherent gradients added to every norm, and what the loss says of its size.

    ``push_gap``: half the log of the squared norm over its mean over all ghosts, as the network
    sees the matrix; ``push``: the difference of the two, of the matrix alone; ``radial``: how the
    loss of held-out text changes with the log of the matrix's size.
    """
    gain, matrices = gains(model), hidden(model)
    model.zero_grad()
    parts = held_out.split(64)
    for part in parts:
        (model.loss(part) / len(parts)).backward()
    for name, p in matrices.items():
        assert p.grad is not None
        about = {"matrix": name, "kind": kind_of(name)}
        trained, ghosts = p.detach().square(), squares.of(name)
        weight = gain[name].square() if name in gain else torch.ones(p.shape[1])
        seen_gap = float(((trained * weight).sum() / (ghosts * weight).sum()).log() / 2)
        yield {"component": "push_gap", **about, "value": seen_gap}
        yield {"component": "push", **about, "value": float((trained - ghosts).sum())}
        yield {"component": "radial", **about, "value": float((p.detach() * p.grad).sum())}


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

    @property
    def stateful(self) -> Mapping[str, Any]:
        """The nulls that change from step to step."""
        return {"ghosts": self.ghosts, "noise": self.noise}

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
            stacks["white"] = self._drawn(laws, WHITE_DRAWS, is_shaped=False)
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
    """Hold a part of every matrix, from a step ``since`` on, at a multiple of what it was then.

    ``norm``: the Frobenius norm; the rate is multiplied alike, so that a step turns the matrix by
    the same angle. ``tail``: the lower half of the singular values, each at its multiple.
    ``share``: the lower half at a multiple of what it was beside the upper half, which is free, at
    the same norm. ``shape``: all singular values at what they were to the power of the level, at
    the same norm: at zero the spectrum is flat, at a half kappa is its root.
    """

    def __init__(self, what: str, level: float, since: int) -> None:
        self.what, self.level, self.since = what, level, since
        self.levels: dict[str, Tensor] = {}

    def rate_factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step."""
        return self.level if self.what == "norm" and step > self.since else 1.0

    @torch.no_grad()
    def apply(self, matrices: Mapping[str, nn.Parameter], step: int) -> None:
        """Bring every matrix back to where it is held."""
        if self.what not in HELD or step < self.since:
            return
        if self.what == "norm":
            for name, p in matrices.items():
                norm = torch.linalg.matrix_norm(p)
                p.mul_(self.level * self.levels.setdefault(name, norm.clone()) / norm)
        elif step % HOLD_EVERY == 0:
            for name, p in matrices.items():
                u, s, vt = spectra.decomposition(p.detach())
                p.copy_((u * getattr(self, f"_{self.what}")(name, s)) @ vt)

    def _tail(self, name: str, s: Tensor) -> Tensor:
        half = len(s) // 2
        return torch.cat([s[:half], self.level * self.levels.setdefault(name, s[half:].clone())])

    def _share(self, name: str, s: Tensor) -> Tensor:
        size, half = torch.linalg.vector_norm, len(s) // 2
        held = self.levels.setdefault(name, s.clone())
        tail = self.level * held[half:] * (size(s[:half]) / size(held[:half]))
        found = torch.cat([s[:half], tail])
        return found * (size(held) / size(found))

    def _shape(self, name: str, s: Tensor) -> Tensor:
        held = self.levels.setdefault(name, s.clamp(min=1e-6 * float(s[0])))
        powers = held**self.level
        return powers * (torch.linalg.vector_norm(held) / torch.linalg.vector_norm(powers))

    def state_dict(self) -> dict[str, Tensor]:
        """Return the levels that are held, by matrix."""
        return self.levels

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Take what an interrupted run held."""
        self.levels = dict(state)


# --- the grid -------------------------------------------------------------------------------------

STEPS = 2000
QUICK_STEPS = 40
PLAIN: Setting = {
    "text": "prose", "steps": STEPS, "width": BASE_WIDTH, "scaling": "standard",
    "start_scale": 1.0, "held": "nothing", "level": 1.0,
}  # fmt: skip
LEVELS = (0.25, 0.5, 1.0, 2.0, 4.0)
POWERS = (0.0, 0.5, 1.0, 2.0)  # to which singular values are taken at the same norm
# factors of the rate, and decays: 2.27 to 2.29 nats a character in two runs of the pilot each
EQUAL_LOSS = ((0.5, 0.8), (2.0, 0.25), (1.0, 0.5))
WIDTHS = (32, 64, 128, 256)
SEEDS = 8


def cell(optimizer: str, decay: float, rate_factor: float = 1.0, **changes: Any) -> Setting:
    """Describe a run: an optimizer at its usual rate, times a factor, with some decay."""
    about = {"stage": "grid", **PLAIN, "optimizer": optimizer, "decay": decay}
    return {**about, "rate": RATE[optimizer] * rate_factor, **changes}


def centre(optimizer: str, **changes: Any) -> Setting:
    """Describe a run at the usual rate, with the decay at the centre of the grid."""
    return cell(optimizer, DECAYS[optimizer][CENTRE], **changes)


def rate_cells(optimizer: str, power: int) -> Iterator[Setting]:
    """Yield half and twice the rate, at one product with decay (a power of 1) or one decay (0)."""
    decay = DECAYS[optimizer][CENTRE]
    for factor in (0.5, 2.0):
        yield cell(optimizer, decay / factor**power, factor, stage="rate")


def whole_grid() -> tuple[Setting, ...]:
    """List every run, those that tell most first: a run that is cut has whole parts."""
    found: list[Setting] = [{"stage": "file", "model": name} for name in CHECKPOINTS]
    norms = [("norm", level) for level in LEVELS]
    freed = [("nothing", 1.0), *((name, 1.0) for name in FREED)]
    found += [centre(o) for o in OPTIMIZERS]
    found += [centre("AdamW", stage="matter", held=held, level=level) for held, level in norms]
    found += [
        centre(o, stage="matter", held=held, level=level)
        for o in ("AdamW", "Muon")
        for held, level in freed
    ]
    texts = [
        cell("AdamW", decay, factor, stage="data", text=text)
        for factor, decay in EQUAL_LOSS
        for text in TEXTS
    ]
    found += texts[: 2 * len(TEXTS)]  # two settings, the farthest apart, tell most of it
    found += [cell for o in ("AdamW", "Muon") for cell in rate_cells(o, power=1)]
    found += [cell(o, DECAYS[o][k]) for o in OPTIMIZERS for k in (3, 1)]
    found += texts[2 * len(TEXTS) :]
    found += [centre("Muon", stage="matter", held=held, level=level) for held, level in norms]
    found += [cell(o, DECAYS[o][0]) for o in OPTIMIZERS]
    found += [cell for o in ("AdamW", "Muon") for cell in rate_cells(o, power=0)]
    found += [
        cell(o, DECAYS[o][LIGHT], stage="start", start_scale=scale)
        for scale in (0.5, 2.0)
        for o in OPTIMIZERS
    ]
    found += [centre("AdamW", stage="matter", held="tail", level=level) for level in LEVELS]
    found += [
        centre(o, stage="matter", held="shape", level=power)
        for o, powers in (("AdamW", POWERS), ("Muon", POWERS[1:]))
        for power in powers
    ]
    shares = [("AdamW", level) for level in LEVELS] + [("Muon", 1.0), ("Muon", 4.0)]
    found += [centre(o, stage="matter", held="share", level=level) for o, level in shares]
    found += [
        cell(o, DECAYS[o][k], stage="balance") for k in (CENTRE, 3, LIGHT) for o in ("AdamW", "SGD")
    ]
    # half the steps at twice the decay: wide models are dear
    decay = 2 * DECAYS["AdamW"][CENTRE]
    found += [
        cell("AdamW", decay, stage="width", steps=STEPS // 2, width=width, scaling=scaling)
        for width in WIDTHS
        for scaling in ("standard", "mup")
    ]
    return tuple(found)


def quick_grid() -> tuple[Setting, ...]:
    """List one run or two of every stage, with few steps."""
    found: dict[tuple[Any, ...], Setting] = {}
    for setting in whole_grid():
        if setting["stage"] == "file":
            found.setdefault(("file",), {**setting, "model": "albert"})
        elif setting["width"] == BASE_WIDTH:
            name = tuple(setting[key] for key in ("stage", "optimizer", "held", "scaling"))
            found.setdefault(name, {**setting, "steps": QUICK_STEPS})
    return tuple(found.values())


STUDY = Study(
    number=24,
    name="unlearned",
    title="What is not learned",
    section="review W1(b)",
    question=__doc__,
    finding=(
        "Yes, whole matrices rather than parts of them. Noise and decay set the norm of every "
        "kind of matrix of a small GPT within a factor of two [[unlearned.level holds]]. Training "
        "adds a factor to that: under AdamW the logarithm of the norm differs from that of noise "
        "by {{unlearned.above gaps/(query, AdamW)|+.2f|interval}} for query [[unlearned.above "
        "holds]] and by {{unlearned.below gaps/(down, AdamW)|+.2f|interval}} for down "
        "[[unlearned.below holds]]. [The open question](open-question.md) tells this study from "
        "beginning to end."
    ),
    grid=whole_grid(),
    trials=trials,
    own=lambda setting: 1 if setting["stage"] == "file" else SEEDS,
    seconds=12.0,  # the same for all: they are run in the order of the grid
    claims=CLAIMS,
    exhibits=exhibits,
    plot=plot,
    downloads=(downloads.SHAKESPEARE, *CHECKPOINTS),
    quick={
        "grid": quick_grid(),
        "own": lambda setting: 1 if setting["stage"] == "file" else 2,
        "downloads": (downloads.SHAKESPEARE, "albert"),
    },
)
