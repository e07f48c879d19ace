"""What a run says as a whole, on one page: what is learned last and why, and what to do about it.

A lesson stands on verdicts. It is told if a run bears every one of them out, and otherwise listed
as not borne out; no number is written here.

>>> print(page([], {}).splitlines()[0])
# Findings
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kappascope.prose import OUTCOMES, Record, cell, interval, measured, tally
from kappascope.review import ITEMS


@dataclass(frozen=True)
class Lesson:
    """A conclusion, and the verdicts it stands on.

    >>> Lesson("So it is.", {"e1.x": "holds"}).borne_out({"e1.x": {"verdict": "fails"}})
    False
    """

    text: str
    because: Mapping[str, str]  # claim and the verdict it must have

    def borne_out(self, judged: Mapping[str, Record]) -> bool:
        """Whether every verdict is as it must be."""
        return all(
            name in judged and judged[name]["verdict"] == wanted
            for name, wanted in self.because.items()
        )


def _lesson(text: str, **because: str) -> Lesson:
    return Lesson(text, {n: word for word, names in because.items() for n in names.split()})


WHY = (
    _lesson(
        "With white inputs every direction of the matrix is learned at one rate, and the norm "
        "errors of the paper are what 200 steps at that rate leave.",
        holds="e1.norms-flat e13.proportional",
    ),
    _lesson(
        "The smallest singular value is learned as fast as the largest, relative to itself: the "
        "imbalance of gradients is no cause.",
        holds="e13.relative",
        fails="e3.cause",
    ),
    _lesson(
        "What is left of kappa's error after the paper's 200 steps is the random start: it is of "
        "the size of the entries, and the smallest singular value is much smaller than those.",
        holds="e15.start",
    ),
    _lesson(
        "What is left in the end is a noise floor, set by label noise, learning rate and batch. "
        "Without label noise nothing is left.",
        holds="e12.plateau e12.floor e12.noiseless",
    ),
    _lesson(
        "Learned last are the directions that inputs hardly show, each at the rate of its "
        "variance; what they never show is never learned.",
        holds="e16.rates e16.stays e16.never",
    ),
    _lesson(
        "Where inputs vary in every direction they only delay.",
        holds="e16.delay",
    ),
    _lesson(
        "In products of layers the small singular values wait for the large ones, and kappa's "
        "error is large for a time.",
        holds="e7.depth-explodes",
    ),
    _lesson(
        "No component is well or poorly learned by itself: its class changes with optimizer, "
        "inputs and depth.",
        fails="e18.kappa e18.gap e18.rank",
    ),
    _lesson(
        "With size kappa's error grows far slower than the size, and at 2048 training still brings "
        "kappa nearer to its target.",
        fails="e10.superlinear",
        holds="e10.learned",
    ),
    Lesson(
        "The mean error of kappa, of which the paper's figures are made, does not exist.",
        {"e1.kappa-grows": "ill-posed"},
    ),
)
DO = (
    _lesson(
        "Before correcting anything, let the learning rate decay or the batch grow.",
        holds="e12.remedies",
    ),
    _lesson(
        "Start small, and take a larger learning rate than the paper's.",
        holds="e15.start e15.learning-rate",
    ),
    _lesson(
        "Look at the covariance of a layer's inputs: it says which directions of the weight are "
        "unlearned. Whitening the inputs treats the cause.",
        holds="e16.rates e16.stays",
    ),
    _lesson(
        "Do not correct the spectrum for its own sake: a better kappa is not a better matrix, and "
        "some corrections that need no oracle make the matrix worse.",
        fails="e14.better-matrix e14.harmless",
    ),
    _lesson(
        "Multipliers learn the scale quickly, those of singular values the whole matrix; give them "
        "the full learning rate, and expect little of them for kappa.",
        holds="e4.multipliers-norms e15.multiplier-rate",
        fails="e14.value-multipliers",
    ),
    _lesson(
        "Compare optimizers at equal training loss: there SGD learns kappa better than Adam.",
        holds="e11.adam",
    ),
    _lesson(
        "Do not expect Muon to learn kappa better than SGD because it moves all directions alike.",
        fails="e11.muon",
    ),
    Lesson(
        "Report medians of |log kappa - log kappa*| with n and interval, never a mean of kappa.",
        {"e1.kappa-grows": "ill-posed"},
    ),
)
NETWORKS = (
    _lesson(
        "Nothing about kappa is specially unlearned in networks whose weights are known: as the "
        "loss falls, its error falls with that of the whole matrix.",
        fails="teacher.special teacher.stays",
    ),
    _lesson(
        "Kappa tells nothing of a trained network's accuracy, calibration or robustness that its "
        "norms do not; and norms tell it across settings, hardly between seeds of one.",
        fails="digits.kappa-accuracy digits.kappa-calibration digits.kappa-noise "
        "digits.kappa-quantization digits.norms-first",
    ),
    _lesson(
        "Do not expect a correction of scale or shape to lower the loss of a language model: none "
        "is shown to do so under both optimizers, each arm at its own best learning rate.",
        undecided="gpt.multipliers gpt.penalty gpt.hybrid gpt.bound",
    ),
    _lesson(
        "Corrections do what they say to kappa; no gain in loss is shown to follow from it.",
        holds="gpt.kappa-controlled",
        undecided="gpt.penalty gpt.bound",
    ),
    _lesson(
        "Training does not explode the condition numbers of a small language model.",
        fails="gpt.exploded",
    ),
    _lesson(
        "The bottom of the spectrum is not noise: a pretrained language model needs its smallest "
        "singular values, energy for energy more than the bulk.",
        holds="pretrained.bottom-matters pretrained.bottom-energy",
    ),
    _lesson(
        "Kappa does not tell which matrix suffers from rounding, and int8 with a scale a row "
        "costs next to nothing.",
        holds="pretrained.rounding-loss",
        fails="pretrained.kappa-predicts",
    ),
    _lesson(
        "Trust a kappa as far as its interval: it covers what the weights were before rounding.",
        holds="pretrained.interval",
    ),
)


def page(claims: Sequence[Record], provenance: Mapping[str, Any]) -> str:
    """The findings of a run, as Markdown."""
    judged = {claim["id"]: claim for claim in claims}
    paper = [claim for claim in claims if not _beyond(claim)]
    own = [claim for claim in claims if _beyond(claim)]
    trials = f"{provenance['trials']:,} trials" if "trials" in provenance else "the trials"
    return "\n".join(
        (
            "# Findings",
            "",
            f"Written by `kappascope findings` from {trials} of `kappascope reproduce"
            f"{' --beyond' if own else ''}`; every number is measured on its `trials.parquet`, in "
            "brackets the 95 % interval. A verdict is decided by that interval and a rule fixed "
            "beforehand; the report explains each.",
            "",
            f"The paper: {tally(paper)} Beyond it: {tally(own)}",
            "",
            "## What the optimizer learns last, and why",
            "",
            *_told(WHY, judged),
            "## What to do",
            "",
            *_told(DO, judged),
            "## In real networks",
            "",
            "The tables and figures are in [the studies](studies.md).",
            "",
            *_told(NETWORKS, judged),
            *_not_borne_out((*WHY, *DO, *NETWORKS), judged),
            *_sentences(paper),
            "## Beyond the paper",
            "",
            *_rows(own),
            "",
            "## The review",
            "",
            _review(judged),
            "",
        )
    )


def _beyond(claim: Record) -> bool:
    name = str(claim["experiment"])
    return name != "all" and not (name[1:].isdigit() and int(name[1:]) <= 9)


def _told(lessons: Iterable[Lesson], judged: Mapping[str, Record]) -> Iterator[str]:
    """The lessons a run bears out, each with its evidence."""
    for lesson in lessons:
        if lesson.borne_out(judged):
            yield f"**{lesson.text}**"
            yield ""
            yield from (_evidence(judged[name]) for name in lesson.because)
            yield ""


def _evidence(claim: Record) -> str:
    return f"- `{claim['id']}` {claim['verdict']}. {claim['explanation']}"


def _not_borne_out(lessons: Iterable[Lesson], judged: Mapping[str, Record]) -> Iterator[str]:
    left = [lesson for lesson in lessons if not lesson.borne_out(judged)]
    if left:
        yield from ("## Not borne out by this run", "")
    for lesson in left:
        names = [
            f"`{name}` {judged[name]['verdict'] if name in judged else 'was not judged'}"
            for name in lesson.because
        ]
        yield f"- {lesson.text} ({', '.join(names)})"
    yield ""


def _sentences(claims: Sequence[Record]) -> Iterator[str]:
    """The paper's sentences by verdict."""
    titles = {
        "holds": "Sentences of the paper that survive",
        "fails": "Sentences that do not",
        "undecided": "Sentences that this run does not decide",
        "ill-posed": "Sentences about quantities that do not exist",
    }
    for outcome in OUTCOMES:
        yield from (f"## {titles[outcome]}", "")
        yield from _rows([claim for claim in claims if claim["verdict"] == outcome])
        yield ""


def _rows(claims: Sequence[Record]) -> Iterator[str]:
    if not claims:
        yield "None."
        return
    yield "| claim | sentence | verdict | measured | n |"
    yield "|---|---|---|---|---|"
    for claim in claims:
        found = f"{measured(claim)} {interval(claim['interval'])}".strip()
        cells = (f"`{claim['id']}`", claim["sentence"], claim["verdict"], found, str(claim["n"]))
        yield f"| {' | '.join(map(cell, cells))} |"


def _review(judged: Mapping[str, Record]) -> str:
    decided = {name for name, claim in judged.items() if claim["verdict"] != "undecided"}
    settled = [item for item in ITEMS if decided.intersection(item.claims)]
    lacking = [item.id for item in ITEMS if item.lacking]
    return (
        f"Of its {len(ITEMS)} items {len(settled)} are answered by a claim that is decided. Not "
        f"answered, or not wholly: {'; '.join(lacking)}. [The paper](paper.md) lists them all."
    )
