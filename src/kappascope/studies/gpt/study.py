"""Study of a character GPT on real text.

Does a correction of scale or shape help a language model, at what cost, and what does it do to
kappa? There are ten arms. The optimizer is AdamW, or Muon for the matrices of the blocks with AdamW
for the rest. It works alone, or with multipliers, spectral penalty, Hybrid or singular-value bound
as they come. The effort of tuning is the same for all arms: five learning rates at one seed. Then
eight fresh seeds are trained at the rate with the lowest validation loss. Start and batches are the
same in every arm. A larger model confirms. Last, runs are trained at rates that are too high, with
and without warmup: does kappa foretell what goes wrong?
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kappascope import corrections
from kappascope.lab import downloads
from kappascope.lab.experiment import Rows, Setting, Study
from kappascope.lab.resume import ResumePoint
from kappascope.lab.table import Table
from kappascope.lab.tasks import generator
from kappascope.matrix.components import Components
from kappascope.model import attention
from kappascope.model.matrices import matrices, plan, reader
from kappascope.model.names import kind
from kappascope.studies.gpt.claims import CLAIMS
from kappascope.studies.gpt.exhibits import exhibits, plot
from kappascope.studies.gpt.model import GPT, HEAD, Corpus, optimizers, schedule, validation
from kappascope.studies.gpt.prognosis import WINDOW, end_rows, too_high, windows
from kappascope.studies.gpt.tuning import ARMS, best_correction, best_rate

CORRECTIONS: Mapping[str, corrections.Correction | None] = {
    "alone": None,
    "multipliers": corrections.Multipliers(),
    "penalty": corrections.SpectralPenalty(),
    "hybrid": corrections.Hybrid(),
    "bound": corrections.SingularValueBound(),
}
RATES: Mapping[str, tuple[float, ...]] = {  # about the best of a coarse search without corrections
    "AdamW": (0.002, 0.004, 0.008, 0.016, 0.032),
    "Muon": (0.004, 0.008, 0.016, 0.032, 0.064),
}
BATCH = 12  # windows of 64 characters: a step takes some 13 ms of one core
CLIP = 1.0  # of the gradient's norm, as is usual
MAIN: Setting = {"steps": 1000, "warmup": 100, "layers": 2, "width": 64}
LARGE: Setting = {"steps": 400, "warmup": 40, "layers": 4, "width": 128}
HIGH: Setting = {"steps": 300, "layers": 2, "width": 64}
WARMUPS = (0, 100)  # steps, at constant rates that are too high
SEEDS = {"tune": 1, "compare": 8, "confirm": 8, "warmup": 8}
MILLISECONDS = {"alone": 14, "multipliers": 18, "penalty": 27, "hybrid": 23, "bound": 34}


def trials(
    seed: int,
    resume_point: ResumePoint,
    *,
    stage: str,
    text: str,
    optimizer: str,
    correction: str,
    rate: float,
    steps: int,
    warmup: int,
    layers: int,
    width: int,
) -> Iterator[Rows]:
    """Train one model; arms share start and batches, for neither is keyed by the arm."""
    corpus, high = read(text), stage == "warmup"
    model = GPT(corpus.vocabulary, layers, width, generator("gpt start", stage, seed))
    data = generator("gpt data", stage, seed)
    steppers = optimizers(model, optimizer)
    chosen = CORRECTIONS[correction]
    handle = chosen.attach(model, list(steppers.values())) if chosen else None
    parts: dict[str, Any] = {"model": model, "data": data, **steppers}
    parts |= {"handle": handle} if handle else {}
    log: list[dict[str, Any]] = []
    for step in resume_point.steps(steps, log, **parts):
        if not high:
            log += state_rows(model, corpus, step, steps)
        start = time.process_time()
        for stepper in steppers.values():
            stepper.param_groups[0]["lr"] = rate * schedule(step, steps, warmup, decay=not high)
            stepper.zero_grad()
        loss = model.loss(corpus.batch(BATCH, data))
        loss.backward()
        with handle.unclipped() if handle else nullcontext():  # a correction's own factors
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        for stepper in steppers.values():
            stepper.step()
        taken = time.process_time() - start
        log.append({"loss": loss.item(), "gradient": norm, "seconds": taken})
        if high and (step + 1) % WINDOW == 0:
            log[-1]["kappa"] = largest_log_kappa(model)
        if not math.isfinite(loss.item()):
            break
    steps_taken = [row for row in log if "loss" in row]
    times = [row["seconds"] for row in steps_taken]
    yield {"component": "seconds", "value": float(np.median(times))}
    if high:
        yield from windows(steps_taken)
        yield from end_rows(steps_taken, steps, corpus.frequency_loss)
        return
    yield from (row for row in log if "loss" not in row)
    yield from state_rows(model, corpus, steps, steps)
    final = validation(model, corpus.held_out())
    yield {"component": "validation_loss", "value": final, "epoch": steps}


@cache  # a process trains many models on one text
def read(text: str) -> Corpus:
    """Read the text that a label names."""
    return Corpus.of(downloads.text(text))


def state_rows(model: GPT, corpus: Corpus, step: int, steps: int) -> Iterator[dict[str, Any]]:
    """Yield the validation loss at most 20 times in a run, the state of every matrix 5 times."""
    if step % max(10, steps // 20) == 0:
        loss = validation(model, corpus.held_out(64))
        yield {"component": "loss_on_the_way", "value": loss, "epoch": step}
    if step in (0, steps // 10, steps // 4, steps // 2, steps):
        for row in matrix_rows(model.state_dict()):
            yield {**row, "epoch": step}


def matrix_rows(weights: Mapping[str, Tensor]) -> Iterator[dict[str, Any]]:
    """Yield norm and log kappa of every matrix, and log kappa of what heads compare and write."""
    for name, weight in matrices(weights):
        if weight.isfinite().all():
            components, about = Components(weight), {"matrix": name, "kind": kind(name)}
            norm, log = float(components.frobenius_norm), float(components.log_condition_number)
            yield {"component": "frobenius_norm", "value": norm, **about}
            yield {"component": "log_condition_number", "value": log, **about}
    width = weights["head.weight"].shape[1]
    heads = {"hidden_size": width, "num_attention_heads": width // HEAD}
    for layer in attention.attention(plan(weights), heads)[0]:
        for head in layer.products(reader(weights)):
            log = math.log(head.condition_number) if head.condition_number else math.nan
            about = {"matrix": head.name, "kind": head.kind}
            yield {"component": "log_condition_number", "value": log, **about}


def largest_log_kappa(model: GPT) -> float:
    """Return the largest log kappa of the matrices in the blocks."""
    hidden = [p.detach() for p in model.blocks.parameters() if p.ndim == 2]
    if not all(bool(p.isfinite().all()) for p in hidden):
        return math.nan
    shapes = {p.shape for p in hidden}
    stacks = [torch.stack([p for p in hidden if p.shape == shape]) for shape in shapes]
    return max(float(Components(stack).log_condition_number.max()) for stack in stacks)


def later_settings(rows: Table, large: Setting = LARGE, high: Setting = HIGH) -> Iterator[Setting]:
    """Yield every arm at its best rate, a few in a larger model, and rates that are too high."""
    first = rows.rows.slice(0, 1).to_pylist()[0]
    shared = {"text": first["text"]}
    main = {name: first[name] for name in MAIN}
    for optimizer, correction in ARMS:
        arm = {"optimizer": optimizer, "correction": correction}
        yield {"stage": "compare", **shared, **arm, "rate": best_rate(rows, **arm), **main}
    further = ("AdamW", "hybrid"), ("AdamW", best_correction(rows)), ("Muon", "alone")
    for optimizer, correction in (("AdamW", "alone"), *further):
        arm = {"optimizer": optimizer, "correction": correction}
        # twice the width, half the rate: how Adam's best rate goes with width (Yang et al. 2022)
        rate = best_rate(rows, **arm) * first["width"] / float(large["width"] or 0)
        yield {"stage": "confirm", **shared, **arm, "rate": rate, **large}
    for optimizer, warmup in product(("AdamW", "Muon"), WARMUPS):
        arm = {"optimizer": optimizer, "correction": "alone"}
        for rate in too_high(best_rate(rows, **arm)):
            yield {"stage": "warmup", **shared, **arm, "rate": rate, "warmup": warmup, **high}


def tuning(rates: slice, form: Setting) -> tuple[Setting, ...]:
    """List every arm at every rate of its optimizer."""
    shared: Setting = {"stage": "tune", "text": downloads.SHAKESPEARE}
    return tuple(
        {**shared, "optimizer": optimizer, "correction": correction, "rate": rate, **form}
        for optimizer, correction in ARMS
        for rate in RATES[optimizer][rates]
    )


def seconds(setting: Setting) -> float:
    """Estimate the time of a run: twice the layers and width take five times as long."""
    size = 5.0 if setting["width"] == LARGE["width"] else 1.0
    return 2 + size * MILLISECONDS[str(setting["correction"])] * float(setting["steps"] or 0) / 1000


STUDY = Study(
    number=22,
    name="gpt",
    title="A character GPT",
    section="review W1(b)",
    question=__doc__,
    finding=(
        "No correction is shown to lower the loss under both AdamW and Muon [[gpt.multipliers "
        "undecided, gpt.penalty undecided, gpt.hybrid undecided, gpt.bound undecided]]. κ of QK, "
        "the product that a head compares, depends on the optimizer: it ends at {{gpt.exploded "
        "adamw_QK|.1f|interval}} times that of products of random factors under AdamW "
        "[[gpt.qk-adamw holds]] and at {{gpt.exploded muon_QK|.1f|interval}} times under Muon "
        "[[gpt.muon-heads holds]]. κ is not shown to foretell spikes of the loss [[gpt.prognosis "
        "undecided]]."
    ),
    grid=tuning(slice(None), MAIN),
    trials=trials,
    own=lambda setting: SEEDS[str(setting["stage"])],
    seconds=seconds,
    then=later_settings,
    claims=CLAIMS,
    exhibits=exhibits,
    plot=plot,
    downloads=(downloads.SHAKESPEARE,),
    quick={
        "grid": tuning(slice(1, 3), {**MAIN, "steps": 60, "warmup": 6}),
        "then": partial(
            later_settings, large={**LARGE, "steps": 20, "warmup": 2}, high={**HIGH, "steps": 120}
        ),
        "own": lambda setting: 2 if setting["stage"] == "compare" else 1,
    },
)
