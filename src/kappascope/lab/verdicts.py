"""What came out of the claims and the printed figures, counted and said in sentences."""

from __future__ import annotations

from collections.abc import Sequence

from kappascope.text import Record, number, plural

VERBS = {  # of one claim and of several; in the order in which verdicts are listed
    "holds": ("holds", "hold"),
    "fails": ("fails", "fail"),
    "undecided": ("is undecided", "are undecided"),
    "ill-posed": ("is ill-posed", "are ill-posed"),
}
OUTCOMES = tuple(VERBS)


def conclusion(claims: Sequence[Record], figures: Sequence[Record]) -> tuple[str, str, str]:
    """Say in three sentences what came out: the claims, the most prominent, the figures.

    >>> claim = {"verdict": "fails", "sentence": "κ plateaus.", "id": "e9.x", "source": "abstract"}
    >>> for sentence in conclusion([claim], []):
    ...     print(sentence)
    Of 1 claim, 0 hold, 1 fails, 0 are undecided and 0 are ill-posed.
    The most prominent of those that fail: “κ plateaus” (e9.x).
    No printed figure was compared.
    """
    # for each verdict the claim with most sources; the abstract's claims come first
    ranked = sorted(claims, key=lambda c: ("abstract" not in c["source"], -c["source"].count(",")))
    first = {claim["verdict"]: claim for claim in reversed(ranked)}
    sentences = [
        f"{VERBS[outcome][1]}: “{first[outcome]['sentence'].rstrip('.')}” ({first[outcome]['id']})"
        for outcome in OUTCOMES
        if outcome in first
    ]
    prominent = f"The most prominent of those that {'; that '.join(sentences)}."
    absent, matched = (
        sum(map(unmeasured, figures)),
        sum(bool(figure["matches"]) for figure in figures),
    )
    missed = len(figures) - matched - absent
    left = f"; {plural(missed, 'differs', 'differ')}" if missed else ""
    left += f"; {plural(absent, 'was', 'were')} not measured here" if absent else ""
    many = plural(len(figures), "figure")
    compared = f"Of {many} that the paper prints, {matched} come out as printed{left}."
    return (
        verdict_counts(claims),
        prominent if sentences else "",
        compared if figures else "No printed figure was compared.",
    )


def verdict_counts(claims: Sequence[Record]) -> str:
    """Say how many claims have which verdict.

    >>> verdict_counts([{"verdict": "holds"}])
    'Of 1 claim, 1 holds, 0 fail, 0 are undecided and 0 are ill-posed.'
    >>> verdict_counts([{"verdict": "undecided", "explanation": "Not measured: no rows"}])[-52:]
    'ill-posed; 1 of the undecided was not measured here.'
    """
    if not claims:
        return "In this run no claim was judged."
    verdicts = [claim["verdict"] for claim in claims]
    counts = [plural(verdicts.count(outcome), *VERBS[outcome]) for outcome in OUTCOMES]
    many = plural(len(claims), "claim")
    absent = sum(map(unmeasured, claims))
    left = f"; {plural(absent, 'of the undecided was', 'of the undecided were')} not measured here"
    return f"Of {many}, {', '.join(counts[:-1])} and {counts[-1]}{left if absent else ''}."


def measured(record: Record, digits: int = 3) -> str:
    """Write the measured number of a record, or the two ends of a range.

    >>> measured({"measured": 0.5}), measured({"measured": [1.0, 20.0]}, 2)
    ('0.500', '1.0 to 20')
    """
    value = record["measured"]
    values = value if isinstance(value, Sequence) else [value]
    return " to ".join(number(each, digits) for each in values)


def unmeasured(record: Record) -> bool:
    """Tell whether the trials that a claim or figure speaks of were not run.

    >>> unmeasured({"agreement": "not measured: this run has no trials with size 512"})
    True
    """
    reason = record.get("agreement") or record.get("explanation") or ""
    return str(reason).lower().startswith("not measured")
