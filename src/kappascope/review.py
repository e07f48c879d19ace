"""The paper's peer review, item by item, and the claims that answer it.

This is the one place that says which claim answers which question; the table in ``docs/paper.md``
is made of it and of a run's verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from kappascope.prose import Record, cell, interval, measured

BEGIN = "<!-- begin: written by `kappascope findings` -->"
END = "<!-- end: written by `kappascope findings` -->"


@dataclass(frozen=True)
class Item:
    """Something the review asks or objects to, and what answers it.

    Claims answer with a measurement. ``otherwise`` says where else an answer is, ``lacking``
    plainly what is not answered.

    >>> Item("Q9", "Is it blue?", lacking="Nobody has looked.").claims
    ()
    """

    id: str
    asks: str
    claims: tuple[str, ...] = ()
    otherwise: str = ""
    lacking: str = ""


def _item(id: str, asks: str, claims: str = "", otherwise: str = "", lacking: str = "") -> Item:
    return Item(id, asks, tuple(claims.split()), otherwise, lacking)


BOUND = "`theory.log_kappa_bound` is one; its proof and its condition are in docs/theory.md."
THROUGH = "`theory.gradient_bounds` and `theory.log_gradient_norm` say it (docs/theory.md)."
REPORT = "Every number of the report has its n and interval, or the reason why it has none."
ITEMS = (
    _item("W1(a)", "Do failures persist in networks of two or three layers?",
          "e7.depth-explodes e7.amplification e7.relu e18.kappa teacher.kappa-worst "
          "teacher.special teacher.stays teacher.adam teacher.muon teacher.depth "
          "teacher.layernorm teacher.found digits.kappa-accuracy digits.kappa-calibration "
          "digits.kappa-noise digits.kappa-quantization digits.norms-first digits.others "
          "digits.first-layer"),
    _item("W1(b)", "Do they in a transformer that is trained?",
          "e7.llm gpt.exploded gpt.prognosis gpt.warmup gpt.larger"),
    _item("W1(c)", "Are they seen in public checkpoints?",
          "pretrained.severe pretrained.bottom-heavy pretrained.depth-grows pretrained.products"),
    _item("W2", "What is the trend at d = 1024 and 2048?",
          "e10.trend e10.superlinear e10.learned e10.norms"),
    _item("W3(a)", "Do small singular values receive a vanishing gradient?",
          "e13.proportional e13.relative e13.drowned e3.signal e3.cause"),
    _item("W3(b)", "How is it related to gradients through ill-conditioned matrices?",
          "e16.rates e16.stays", THROUGH),
    _item("W3(c)", "Is there a bound on the rate at which SGD reduces kappa's error?",
          "e19.bound e19.rate e19.tight e19.condition e12.floor e16.rates", BOUND),
    _item("W4(a)", "Does a penalty on the condition number help?",
          "e4.spectral-kappa e14.oracle e14.better-matrix e15.penalty"),
    _item("W4(b)", "Does orthogonal regularization?", "e14.blind e14.harmless"),
    _item("W4(c)", "Do learnable multipliers of singular values?", "e14.value-multipliers"),
    _item("W4(d)", "Does structured weight decay?", "e14.blind e14.harmless"),
    _item("W4(e)", "Does periodic re-projection of the spectrum?",
          "e4.svd-middle e14.oracle e14.blind"),
    _item("W5", "Where are error bars and intervals?", "e1.kappa-grows", REPORT),
    _item("W6", "Are kappa and gap errors 2-5 times those of the norms?",
          "e1.v1-ratio e1.gap-well-learned e18.gap"),
    _item("W7", "What of spectral normalization, orthogonal starts, implicit bias?",
          "e14.oracle e15.orthogonal e17.completion"),
    _item("W8", "How do errors evolve, and what do the spectra look like?",
          "e5.smooth-norms e5.erratic-kappa e15.multiplier-rate",
          "Target and learned spectra of every experiment are in the report."),
    _item("W9(a)", "Does Adam show the same failure?",
          "e2.adam-worse e2.both-poor e11.adam e11.persists"),
    _item("W9(b)", "Does longer training close the gap?",
          "e9.kappa-plateaus e12.plateau e12.noiseless e12.remedies"),
    _item("W9(c)", "How does the learning rate act on it?",
          "e8.every-lr e8.ratio-grows e15.learning-rate e15.batch"),
    _item("W9(d)", "Does weight decay help or hurt?", "e8.decay-no-effect e14.harmless"),
    _item("W10", "Are both arms of the multiplier experiment on one target?", "e6.same-target"),
    _item("W11", "Is the effective rank well learned, other than kappa?",
          "e1.rank-well-learned e15.threshold e18.rank"),
    _item("Section 2, threshold", "Does the threshold of the effective rank matter?",
          "e15.threshold"),
    _item("Section 2, definition", "Which condition number, and what near rank deficiency?",
          "e17.higher-rank",
          "Largest over smallest singular value, infinite where the smallest is rounding."),
    _item("Section 2, dimensions", "16 to 64, or 32 to 256?", "",
          "Sizes are a column of `trials.parquet`: 32 to 512 in experiment 1, to 2048 in 10."),
    _item("Section 3, table", "Is there a table of the key numbers?", "",
          "The report has one for every experiment, with medians, quartiles, mean and n."),
    _item("Section 3, components", "What do multipliers do to kappa and gap?",
          "e4.multipliers-kappa e6.kappa-less"),
    _item("Section 3, captions", "Do figures say what they show?", "",
          "Each caption explains its marks and tells the n of every panel."),
    _item("Section 4, layer types", "Which correction for which kind of layer?",
          "e6.block e6.low-rank e18.kappa e18.columns gpt.multipliers gpt.penalty gpt.hybrid "
          "gpt.bound gpt.kappa-controlled",
          lacking="in the trained network all kinds of layers were corrected alike."),
    _item("Section 4, gradients", "How does it relate to exploding and vanishing gradients?", "",
          THROUGH),
    _item("Code, fresh batches", "Are batches fresh in every step?", "e17.inputs",
          "Yes, except in the part of experiment 17 that asks what fixed data do."),
    _item("Code, noise", "What do higher noise levels do?", "e15.noise e12.floor"),
    _item("Code, multiplier rate", "Why a tenth of the learning rate for multipliers?",
          "e15.multiplier-rate"),
    _item("Q1", "Does the failure persist with Adam?",
          "e11.adam e11.adamw e11.momentum e11.muon e11.persists e2.mechanism"),
    _item("Q2", "Is it a matter of speed, or a fundamental limitation?",
          "e12.plateau e12.floor e12.noiseless e12.remedies e9.not-speed"),
    _item("Q3", "What gradient signal do single singular values receive?",
          "e3.signal e3.cause e13.proportional e13.relative e13.drowned"),
    _item("Q4", "How can the gap be poorly learned if its error is below the norms'?",
          "e1.gap-well-learned e1.v1-ratio e18.gap"),
    _item("Q5", "Does SGD end at a higher rank, and what of its known low-rank bias?",
          "e17.outside e17.higher-rank e17.inputs e17.completion"),
    _item("Q6", "Would multipliers of singular values help?", "e14.value-multipliers"),
    _item("Q7", "Have pre-trained models been looked at?",
          "pretrained.severe pretrained.bottom-matters pretrained.bottom-count "
          "pretrained.bottom-energy pretrained.rounding-kappa pretrained.rounding-loss "
          "pretrained.interval pretrained.kappa-predicts",
          "`kappascope diagnose` reads any."),
)  # fmt: skip
"""Weaknesses, detailed comments and questions, in the order of the review."""


def table(claims: Iterable[Record]) -> str:
    """Every item with the verdicts that answer it, as a Markdown table.

    >>> lines = table([]).splitlines()
    >>> len(lines) == len(ITEMS) + 2, "not in this run" in lines[2]
    (True, True)
    """
    judged = {claim["id"]: claim for claim in claims}
    head = ("| item | question | answer |", "|---|---|---|")
    return "\n".join((*head, *(_line(item, judged) for item in ITEMS)))


def _line(item: Item, judged: Mapping[str, Record]) -> str:
    lacking = f"**Not answered**: {item.lacking}" if item.lacking else ""
    told = filter(None, (*_answers(item, judged), item.otherwise, lacking))
    return f"| {item.id} | {item.asks} | {'<br>'.join(told)} |"


def _answers(item: Item, judged: Mapping[str, Record]) -> Iterator[str]:
    for name in item.claims:
        if name in judged:
            yield answer(judged[name])
        else:
            yield f"`{name}`: not in this run."


def answer(claim: Record) -> str:
    """A claim in one line: experiment, sentence, verdict, the number that decided it, n.

    >>> print(answer({"id": "e1.x", "experiment": "e1", "sentence": "It is blue.", "n": 9,
    ...     "verdict": "holds", "measured": 0.2, "interval": (0.1, 0.3)}))
    `e1.x` “It is blue” **holds**: 0.200 [0.100, 0.300], n = 9.
    """
    found = f"{measured(claim)} {interval(claim['interval'])}".strip()
    number = f": {found}, n = {claim['n']}." if claim["n"] else ": not measured."
    sentence = cell(claim["sentence"].rstrip("."))
    return f"`{claim['id']}` “{sentence}” **{claim['verdict']}**{number}"


def inserted(page: str, text: str) -> str:
    """A page with the text between its two marks in place of what stood there.

    >>> inserted(f"Before {BEGIN} old {END} after", "new").split(BEGIN)[1].split(END)[0].strip()
    'new'
    """
    before, found, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not found or not closed:
        raise ValueError(f"expected a page with {BEGIN} and {END}; put them where the table goes")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"
