"""Study of handwritten digits.

Does kappa, or any other component of its weights, tell how good a trained network is? Four things
count: how often the network errs, how far its confidence can be trusted, and what noise in the
pixels and rounding of the weights do to it. Does kappa tell more than the norms do? Networks are
trained at settings drawn at random, with several seeds each. They learn one half of the images to
the same training loss and are judged on the other half.
"""

import time
from collections.abc import Iterator

import torch
from torch.nn.functional import cross_entropy

from kappascope.lab.experiment import Rows, Setting, Study
from kappascope.lab.resume import ResumePoint
from kappascope.lab.tasks import generator
from kappascope.studies.digits.claims import CLAIMS
from kappascope.studies.digits.exhibits import exhibits, plot
from kappascope.studies.digits.model import (
    TRAIN,
    TRAIN_LOSS,
    component_rows,
    images,
    log_kappa,
    network,
    optimizers,
    outcomes,
)

MAX_STEPS = 4000
EVERY = 20  # steps between two measurements of the training loss
RATES = {"momentum": (0.03, 0.06), "adam": (0.001, 0.003), "muon": (0.003, 0.01)}
SPACE: dict[str, tuple[str | int | float, ...]] = {
    "optimizer": tuple(RATES),
    "width": (32, 64, 128),
    "depth": (1, 2, 3),  # hidden layers
    "pace": (0, 1),  # the slower rate or the faster
    "decay": (0.0, 1e-4, 5e-4),  # the share that weights lose in a step, under every optimizer
    "scale": (0.5, 1.0, 2.0),  # in the standard deviations of He et al. 2015
    "batch": (32, 128),
}


def drawn(count: int) -> tuple[Setting, ...]:
    """Draw settings independently: an interval over them speaks of the whole space."""
    random = generator("digits space")

    def setting(draw: int) -> Setting:
        picks = {k: v[int(torch.randint(len(v), (), generator=random))] for k, v in SPACE.items()}
        rate = RATES[str(picks["optimizer"])][int(picks.pop("pace"))]
        return {"draw": draw, **picks, "rate": rate}

    return tuple(setting(draw) for draw in range(count))


def trials(
    seed: int,
    resume_point: ResumePoint,
    *,
    draw: int,
    optimizer: str,
    width: int,
    depth: int,
    decay: float,
    scale: float,
    batch: int,
    rate: float,
) -> Iterator[Rows]:
    """Train one network until its training loss is low enough, and measure it."""
    pixels, labels, *_ = images()
    model = network(width, depth, scale, generator("digits weights", draw, seed))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    biases = [p for p in model.parameters() if p.ndim == 1]
    steppers = optimizers(optimizer, list(matrices), list(biases), rate)
    data = generator("digits batches", draw, seed)
    initial_kappa = log_kappa(matrices[0])
    log: list[Rows] = []
    began = time.process_time()
    for step in resume_point.steps(MAX_STEPS, log, model=model, data=data, **steppers):
        if step % EVERY == 0:
            with torch.no_grad():
                loss = cross_entropy(model(pixels), labels).item()
            log.append({"steps": step, "train_loss": loss})
            if loss <= TRAIN_LOSS:
                break
        chosen = torch.randint(TRAIN, (batch,), generator=data)
        model.zero_grad()
        cross_entropy(model(pixels[chosen]), labels[chosen]).backward()
        with torch.no_grad():
            for p in matrices:
                p.mul_(1 - decay)
        for stepper in steppers.values():
            stepper.step()
    yield {"component": "seconds", "value": time.process_time() - began}
    yield {"component": "condition_number", "matrix": "start", "value": initial_kappa}
    yield from component_rows([p.detach() for p in matrices])
    for name, value in {**log[-1], **outcomes(model)}.items():
        yield {"component": name, "value": float(value)}


STUDY = Study(
    number=21,
    title="Digits",
    section="review W1(a)",
    question=__doc__,
    finding=(
        "Hardly. Among networks with the same norms and training loss, κ's rank correlation with "
        "error, calibration, robustness and rounding is at most "
        "{{digits.kappa-calibration across|.2f|interval}} in size across settings and about zero "
        "between the seeds of one setting [[digits.kappa-accuracy fails, "
        "digits.kappa-calibration fails, digits.kappa-noise fails, digits.kappa-quantization "
        "fails]]."
    ),
    grid=drawn(160),
    trials=trials,
    own=6,
    name="digits",
    seconds=0.9,
    claims=CLAIMS,
    exhibits=exhibits,
    plot=plot,
    quick={"grid": drawn(16), "own": 2},
)
