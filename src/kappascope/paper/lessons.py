"""What a run says as a whole, on one page: what is learned last and why, and what to do about it.

A lesson stands on the verdicts of claims, which name it in ``teaches``. It is told if a run bears
every one of them out, and otherwise listed as not borne out; no number is written here.

>>> print(page([], {}).splitlines()[0])
# Findings
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kappascope.lab.verdicts import OUTCOMES, measured, verdict_counts
from kappascope.paper.review import ITEMS, all_claims
from kappascope.text import Record, bracketed, markdown_table

# The conclusions by name. Claims name the lessons that stand on them in ``teaches``.
WHY = {
    "one rate": "With white inputs every direction of the matrix is learned at one rate, and the "
    "norm errors of the paper are what 200 steps at that rate leave.",
    "imbalance is no cause": "The smallest singular value is learned as fast as the largest, "
    "relative to itself: the imbalance of gradients is no cause.",
    "random start": "What is left of kappa's error after the paper's 200 steps is the random "
    "start: it is of the size of the entries, and the smallest singular value is much smaller "
    "than those.",
    "noise floor": "What is left in the end is a noise floor, set by label noise, learning rate "
    "and batch. Without label noise nothing is left.",
    "inputs decide": "Learned last are the directions that inputs hardly show, each at the rate "
    "of its variance; what they never show is never learned.",
    "inputs delay": "Where inputs vary in every direction they only delay.",
    "depth delays": "In products of layers the small singular values wait for the large ones, and "
    "kappa's error is large for a time.",
    "no fixed classes": "No component is well or poorly learned by itself: its class changes with "
    "optimizer, inputs and depth.",
    "size": "With size kappa's error grows far slower than the size, and at 2048 training still "
    "brings kappa nearer to its target.",
    "no mean": "The mean error of kappa, of which the paper's figures are made, does not exist.",
}
DO = {
    "decay first": "Before correcting anything, let the learning rate decay or the batch grow.",
    "start small": "Start small, and take a larger learning rate than the paper's.",
    "look at inputs": "Look at the covariance of a layer's inputs: it says which directions of "
    "the weight are unlearned. Whitening the inputs treats the cause.",
    "kappa is no end in itself": "Do not correct the spectrum for its own sake: a better kappa is "
    "not a better matrix, and some corrections that need no oracle make the matrix worse.",
    "multipliers learn the scale": "Multipliers learn the scale quickly, those of singular values "
    "the whole matrix; give them the full learning rate, and expect little of them for kappa.",
    "compare at equal loss": "Compare optimizers at equal training loss: there SGD learns kappa "
    "better than Adam.",
    "expect no more of Muon": "Do not expect Muon to learn kappa better than SGD because it moves "
    "all directions alike.",
    "report medians": "Report medians of |log kappa - log kappa*| with n and interval, never a "
    "mean of kappa.",
}
NETWORKS = {
    "nothing special in networks": "Nothing about kappa is specially unlearned in networks whose "
    "weights are known: as the loss falls, its error falls with that of the whole matrix.",
    "norms tell more": "Kappa tells nothing of a trained network's accuracy, calibration or "
    "robustness that its norms do not; and norms tell it across settings, hardly between seeds of "
    "one.",
    "no lower loss": "Do not expect a correction of scale or shape to lower the loss of a "
    "language model: none is shown to do so under both optimizers, each arm at its own best "
    "learning rate.",
    "kappa without gain": "Corrections do what they say to kappa; no gain in loss is shown to "
    "follow from it.",
    "heads": "What heads compare and write depends on the optimizer: with AdamW QK is conditioned "
    "far worse than products of random factors, the more the higher the rate, with Muon little.",
    "hybrid under AdamW": "Under AdamW, multipliers with a penalty on kappa lower the loss of a "
    "small language model, at their cost in time.",
    "bottom matters": "The bottom of the spectrum is not noise: a pretrained language model needs "
    "its smallest singular values, energy for energy more than the bulk.",
    "rounding": "Kappa does not tell which matrix suffers from rounding, and int8 with a scale a "
    "row costs next to nothing.",
    "trust the interval": "Trust a kappa as far as its interval: it covers what the weights were "
    "before rounding.",
}


def page(claims: Sequence[Record], provenance: Mapping[str, Any]) -> str:
    """Write the findings of a run as Markdown."""
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
            f"The paper: {verdict_counts(paper)} Beyond it: {verdict_counts(own)}",
            "",
            "## What the optimizer learns last, and why",
            "",
            *_with_evidence(WHY, judged),
            "## What to do",
            "",
            *_with_evidence(DO, judged),
            "## In real networks",
            "",
            "The tables and figures are in [the studies](studies.md).",
            "",
            *_with_evidence(NETWORKS, judged),
            *_not_borne_out(judged),
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
    """Tell whether a claim is of an experiment after the paper's nine, or of a study."""
    name = str(claim["experiment"])
    return name != "all" and not (name[1:].isdigit() and int(name[1:]) <= 9)


def evidence(lesson: str) -> dict[str, str]:
    """Name the claims that teach a lesson, each with the verdict that the lesson needs.

    >>> evidence("report medians")
    {'e1.kappa-grows': 'ill-posed'}
    """
    teachers = (claim for claim in all_claims() if lesson in claim.teaches)
    return {claim.id: claim.teaches[lesson] for claim in teachers}


def borne_out(lesson: str, judged: Mapping[str, Record]) -> bool:
    """Tell whether every claim that teaches a lesson has the verdict that the lesson needs.

    >>> borne_out("report medians", {"e1.kappa-grows": {"verdict": "undecided"}})
    False
    """
    return all(
        name in judged and judged[name]["verdict"] == verdict
        for name, verdict in evidence(lesson).items()
    )


def _with_evidence(lessons: Mapping[str, str], judged: Mapping[str, Record]) -> Iterator[str]:
    """Write the lessons that a run bears out, each with its evidence."""
    for lesson, text in lessons.items():
        if borne_out(lesson, judged):
            yield from (f"**{text}**", "")
            for claim in (judged[name] for name in evidence(lesson)):
                yield f"- `{claim['id']}` {claim['verdict']}. {claim['explanation']}"
            yield ""


def _not_borne_out(judged: Mapping[str, Record]) -> Iterator[str]:
    """Write the other lessons, each with the verdicts that came out."""
    every = {**WHY, **DO, **NETWORKS}
    remaining = [lesson for lesson in every if not borne_out(lesson, judged)]
    if remaining:
        yield from ("## Not borne out by this run", "")
    for lesson in remaining:
        verdicts = [
            f"`{name}` {judged[name]['verdict'] if name in judged else 'was not judged'}"
            for name in evidence(lesson)
        ]
        yield f"- {every[lesson]} ({', '.join(verdicts)})"
    yield ""


def _sentences(claims: Sequence[Record]) -> Iterator[str]:
    """List the paper's sentences by verdict."""
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


def _rows(claims: Sequence[Record]) -> list[str]:
    """Write a table of claims, their verdicts and numbers."""
    cells = [
        (
            f"`{claim['id']}`",
            claim["sentence"],
            claim["verdict"],
            f"{measured(claim)} {bracketed(claim['interval'])}".strip(),
            str(claim["n"]),
        )
        for claim in claims
    ]
    columns = ("claim", "sentence", "verdict", "measured", "n")
    return markdown_table(columns, cells) if cells else ["None."]


def _review(judged: Mapping[str, Record]) -> str:
    """Count the items of the review that are answered, and name those that are not."""
    decided = {name for name, claim in judged.items() if claim["verdict"] != "undecided"}
    settled = [item for item in ITEMS if decided.intersection(item.claims)]
    lacking = [item.id for item in ITEMS if item.lacking]
    return (
        f"Of its {len(ITEMS)} items {len(settled)} are answered by a claim that is decided. Not "
        f"answered, or not wholly: {'; '.join(lacking)}. [The paper](paper.md) lists them all."
    )
