"""The paper's peer review, item by item, and the claims that answer it.

Every claim names the items that it answers. The table in ``docs/paper.md`` is made of the items
listed here, of those names and of a run's verdicts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from kappascope.lab.claims import Claim
from kappascope.lab.experiment import NINE, discover, studies
from kappascope.lab.verdicts import DECIDED, is_control, measured
from kappascope.text import Record, bracketed, markdown_cell

BEGIN = "<!-- begin: written by `kappascope findings` -->"
END = "<!-- end: written by `kappascope findings` -->"


@cache
def all_claims() -> tuple[Claim, ...]:
    """Collect the claims of all experiments and studies, in their order.

    >>> all_claims()[0].id
    'e1.norms-flat'
    """
    pages = (*discover().values(), *studies().values())
    return tuple(claim for page in pages for claim in page.claims)


@dataclass(frozen=True)
class Item:
    """Something the review asks or objects to.

    The claims that name the item in ``answers`` answer it with a measurement. ``otherwise`` says
    where else an answer is, ``lacking`` plainly what is missing in it. An item is *answered* if the
    question in it is: by a decided claim, or otherwise, with nothing lacking.

    >>> Item("Q6", "Would multipliers of singular values help?").claims
    ('e14.value-multipliers',)
    """

    id: str
    asks: str
    otherwise: str = ""
    lacking: str = ""

    @property
    def claims(self) -> tuple[str, ...]:
        """The ids of the claims that answer the item."""
        return tuple(claim.id for claim in all_claims() if self.id in claim.answers)

    def status(self, judged: Mapping[str, Record]) -> str:
        """Tell whether the item is answered, partly answered, or not.

        >>> Item("W5", "Where are error bars?", otherwise="In the report.").status({})
        'partly'
        """
        decided = [
            judged.get(name, {}).get("verdict") in (*DECIDED, "ill-posed") for name in self.claims
        ]
        if not any(decided) and not self.otherwise:
            return "not"
        return "answered" if not self.lacking and (any(decided) or not self.claims) else "partly"


BOUND = "`theory.log_kappa_bound` is such a bound; docs/theory.md has its proof and its condition."
THROUGH = "docs/theory.md has the relation: `theory.gradient_bounds`, `theory.log_gradient_norm`."
REPORT = "Every number of the report has its n and interval, or the reason why it has none."
ITEMS = (
    Item(
        "S4",
        "Does kappa's error grow from 18 % at d = 32 to 100 % at 128, while that of the norms "
        "stays flat?",
        otherwise="In medians it grows too, but far more slowly. The printed growth is that of the "
        "worst of fifteen trials.",
    ),
    Item(
        "S5",
        "Are block-diagonal targets worst for kappa, and heterogeneous norms hardest to learn?",
        otherwise="At equal Frobenius norm most of the difference between structures is gone: it "
        "was a difference of scale.",
        lacking="no rule for kinds of layers follows from this.",
    ),
    Item("W1(a)", "Do failures persist in networks of two or three layers?"),
    Item(
        "W1(b)",
        "Do failures persist in a transformer that is trained?",
        lacking="two character models of up to 0.8 million weights are no large language model.",
    ),
    Item(
        "W1(c)",
        "Are failures seen in public checkpoints?",
        lacking="only five small networks were looked at. Their targets are unknown, so kappa is "
        "compared with chance.",
    ),
    Item("W2", "What is the trend at d = 1024 and 2048?"),
    Item("W3(a)", "Do small singular values receive a vanishing gradient?"),
    Item(
        "W3(b)",
        "How is the failure related to gradients through ill-conditioned matrices?",
        otherwise=THROUGH,
        lacking="the relation is derived and tested on simulated layers. No trained network was "
        "measured.",
    ),
    Item(
        "W3(c)", "Is there a bound on the rate at which SGD reduces kappa's error?", otherwise=BOUND
    ),
    Item("W4(a)", "Does a penalty on the condition number help?"),
    Item("W4(b)", "Does orthogonal regularization help?"),
    Item("W4(c)", "Do learnable multipliers of singular values help?"),
    Item("W4(d)", "Does structured weight decay help?"),
    Item("W4(e)", "Does periodic re-projection of the spectrum help?"),
    Item("W5", "Where are error bars and intervals?", otherwise=REPORT),
    Item("W6", "Are kappa and gap errors 2-5 times those of the norms?"),
    Item(
        "W7",
        "What is known of spectral normalization, orthogonal starts, implicit bias and spectra of "
        "trained networks?",
        otherwise="[Related work](related.md) says what each work found and what is measured here.",
    ),
    Item(
        "W8",
        "How do errors evolve, and what do the spectra look like?",
        otherwise="Target and learned spectra of every experiment are in the report.",
    ),
    Item("W9(a)", "Does Adam show the same failure?"),
    Item("W9(b)", "Does longer training close the gap?"),
    Item("W9(c)", "How does the learning rate act on the failure?"),
    Item("W9(d)", "Does weight decay help or hurt?"),
    Item("W10", "Do both arms of the multiplier experiment have one target?"),
    Item("W11", "Is the effective rank well learned, unlike kappa?"),
    Item("Section 2, threshold", "Does the threshold of the effective rank matter?"),
    Item(
        "Section 2, definition",
        "Which condition number is meant, and what is it near rank deficiency?",
        otherwise="The largest over the smallest singular value. It is infinite where the smallest "
        "is rounding.",
    ),
    Item(
        "Section 2, dimensions",
        "Are the dimensions 16 to 64, or 32 to 256?",
        otherwise="Sizes are a column of `trials.parquet`: 32 to 512 in experiment 1, up to 2048 "
        "in experiment 10.",
    ),
    Item(
        "Section 3, table",
        "Is there a table of the key numbers?",
        otherwise="The report has such a table for every experiment, with medians, quartiles, mean "
        "and n.",
    ),
    Item("Section 3, components", "What do multipliers do to kappa and gap?"),
    Item(
        "Section 3, captions",
        "Do figures say what they show?",
        otherwise="Each caption explains its marks and tells the n of every panel.",
    ),
    Item(
        "Section 4, layer types",
        "Which correction suits which kind of layer?",
        lacking="in the trained network all kinds of layers were corrected alike.",
    ),
    Item(
        "Section 4, gradients",
        "How does the failure relate to exploding and vanishing gradients?",
        otherwise=THROUGH,
        lacking="the gradients of a deep network were not measured.",
    ),
    Item(
        "Code, fresh batches",
        "Are batches fresh in every step?",
        otherwise="Yes, except in the part of experiment 17 that asks what fixed data do.",
    ),
    Item("Code, noise", "What do higher noise levels do?"),
    Item("Code, multiplier rate", "Why do multipliers get a tenth of the learning rate?"),
    Item("Q1", "Does the failure persist with Adam?"),
    Item("Q2", "Is the failure a matter of speed, or a fundamental limitation?"),
    Item("Q3", "What gradient does each singular value receive?"),
    Item("Q4", "How can the gap be poorly learned if its error is below the norms'?"),
    Item("Q5", "Does SGD end at a higher rank, although it is known for a bias towards low rank?"),
    Item("Q6", "Would multipliers of singular values help?"),
    Item(
        "Q7",
        "Have pre-trained models been looked at?",
        otherwise="`kappascope diagnose` reads such models.",
    ),
)
"""Weaknesses, detailed comments and questions, in the order of the review."""


def table(claims: Iterable[Record]) -> str:
    """Write a Markdown table of every item with the verdicts that answer it.

    >>> lines = table([]).splitlines()
    >>> len(lines) == len(ITEMS) + 2, "not in this run" in lines[4]
    (True, True)
    """
    judged = {claim["id"]: claim for claim in claims}
    lines = ["| item | question | | answer |", "|---|---|---|---|"]
    for item in ITEMS:
        answers = [
            answer(judged[name]) if name in judged else f"`{name}`: not in this run."
            for name in item.claims
        ]
        lacking = f"**Missing**: {item.lacking}" if item.lacking else ""
        cell = "<br>".join(filter(None, (item.otherwise, *answers, lacking)))
        name = item.id.replace("(", r"\(")  # or a site makes a sign of copyright of W1(c)
        lines.append(f"| {name} | {item.asks} | {item.status(judged)} | {cell} |")
    return "\n".join(lines)


def review_counts(claims: Iterable[Record]) -> str:
    """Say how many items of the review are answered, partly answered, and not."""
    judged = {claim["id"]: claim for claim in claims}
    statuses = [item.status(judged) for item in ITEMS]
    answered, partly, not_answered = map(statuses.count, ("answered", "partly", "not"))
    return (
        f"Of {len(ITEMS)} items of the review {answered} are answered, {partly} partly and "
        f"{not_answered} not."
    )


def of_paper(claim: Record) -> bool:
    """Tell whether a claim is a sentence of the paper, its slides or the review's figures of it.

    Controls on the paper's pages, experiments after its nine and studies are our own.

    >>> of_paper({"experiment": "e7", "source": "control; P 4.7"})
    False
    """
    name = str(claim["experiment"])
    nine = name == "all" or (name[1:].isdigit() and int(name[1:]) <= NINE)
    return nine and not is_control(claim)


def answer(claim: Record) -> str:
    """Write a claim in one line: id, sentence, verdict, the number that decided it, n.

    >>> print(answer({"id": "e1.x", "experiment": "e1", "sentence": "It is blue.", "n": 9,
    ...     "verdict": "holds", "measured": 0.2, "interval": (0.1, 0.3)}))
    `e1.x` “It is blue” **holds**: 0.200 [0.100, 0.300], n = 9.
    """
    value = f"{measured(claim)} {bracketed(claim['interval'])}".strip()
    number = f": {value}, n = {claim['n']}." if claim["n"] else ": not measured."
    sentence = markdown_cell(claim["sentence"].rstrip("."))
    return f"`{claim['id']}` “{sentence}” **{claim['verdict']}**{number}"


def inserted(page: str, text: str) -> str:
    """Replace what stands between the two marks of a page.

    >>> inserted(f"Before {BEGIN} old {END} after", "new").split(BEGIN)[1].split(END)[0].strip()
    'new'
    """
    before, opened, rest = page.partition(BEGIN)
    _, closed, after = rest.partition(END)
    if not opened or not closed:
        raise ValueError(f"expected a page with {BEGIN} and {END}; put them where the table goes")
    return f"{before}{BEGIN}\n{text}\n{END}{after}"
