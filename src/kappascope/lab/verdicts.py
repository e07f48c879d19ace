"""What came out of the claims and the printed figures, counted and said in sentences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kappascope.lab.claims import CATEGORIES, ERROR_RATE, NOT_MATCHED
from kappascope.lab.statistics import holm
from kappascope.text import Record, number, plural

VERBS = {  # of one claim and of several; in the order in which verdicts are listed
    "holds": ("holds", "hold"),
    "fails": ("fails", "fail"),
    "undecided": ("is undecided", "are undecided"),
    "ill-posed": ("is ill-posed", "are ill-posed"),
}
OUTCOMES = tuple(VERBS)
DECIDED = ("holds", "fails")


def corrected(pages: Iterable[Sequence[Record]]) -> list[dict[str, Any]]:
    """Decide the claims of each page together, by Holm's correction; over all it is shown.

    A verdict that its claim has alone and that does not survive becomes undecided, and says so.

    >>> page = [
    ...     {"id": f"e1.{k}", "verdict": "holds", "alone": "holds", "p": p, "explanation": "It is."}
    ...     for k, p in enumerate((0.001, 0.03, 0.04))
    ... ]
    >>> [(claim["verdict"], claim["p_page"], claim["p_all"]) for claim in corrected([page])]
    [('holds', 0.003, 0.003), ('undecided', 0.06, 0.06), ('undecided', 0.06, 0.06)]
    >>> corrected([page])[1]["explanation"]
    "It is. Alone it holds (p = 0.03); it does not survive Holm's correction over the 3 claims of its page (p = 0.06)."
    """  # noqa: E501 - one sentence is one line of output
    decided: list[dict[str, Any]] = []
    for page in pages:
        claims = [dict(claim) for claim in page]
        for claim, p in zip(
            with_p_value(claims), holm([c["p"] for c in with_p_value(claims)]), strict=True
        ):
            claim["p_page"] = p
            if claim["alone"] in DECIDED and p > ERROR_RATE:
                claim["verdict"] = "undecided"
                claim["explanation"] += (
                    f" Alone it {claim['alone']} (p = {claim['p']:.2g}); it does not survive "
                    f"Holm's correction over the {len(with_p_value(claims))} claims of its page "
                    f"(p = {p:.2g})."
                )
        decided += claims
    return over_all(decided)


def over_all(claims: Iterable[Record]) -> list[dict[str, Any]]:
    """Correct the p-values of all these claims for their number; nothing is decided by it."""
    everything = [dict(claim) for claim in claims]
    for claim, p in zip(
        with_p_value(everything), holm([c["p"] for c in with_p_value(everything)]), strict=True
    ):
        claim["p_all"] = p
    return everything


def with_p_value(claims: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Keep the claims that were measured and therefore have a p-value."""
    return [claim for claim in claims if claim.get("p") is not None]


def survives_all(claim: Record) -> bool:
    """Tell whether a decided claim would be decided over the whole run as well."""
    return claim["verdict"] in DECIDED and (claim.get("p_all") or 0.0) <= ERROR_RATE


def with_printed_means(claims: Iterable[Record], figures: Iterable[Record]) -> list[dict[str, Any]]:
    """Add to the claims that quote means what became of these means as numbers.

    ``printed_mean`` then says whether they exist, why not, and which come out as printed.
    """
    checked = {figure["id"]: figure for figure in figures}
    told = []
    for claim in map(dict, claims):
        if quoted := claim.get("printed_mean"):
            records = [checked[name] for name in quoted["figures"] if name in checked]
            kept = ("id", "printed", "measured", "matches")
            claim["printed_mean"] = {
                "exists": False,
                "why": quoted["why"],
                "matches": bool(records) and all(record["matches"] for record in records),
                "figures": [{name: record[name] for name in kept} for record in records],
            }
        told.append(claim)
    return told


def is_control(claim: Record) -> bool:
    """Tell whether a claim on a page of the paper is a control of our own."""
    return str(claim["source"]).startswith("control")


def failures_first(claims: Iterable[Record]) -> list[Record]:
    """Order claims by verdict, those that fail first, else as they are.

    >>> [claim["verdict"] for claim in failures_first([{"verdict": "holds"}, {"verdict": "fails"}])]
    ['fails', 'holds']
    """
    order = ("fails", "ill-posed", "undecided", "holds")
    return sorted(claims, key=lambda claim: order.index(claim["verdict"]))


def printed_mean(claim: Record) -> str:
    """Say what the means are worth that a claim quotes, if it quotes any.

    >>> figure = {"id": "e9/x", "printed": "0.017", "measured": 0.0171, "matches": True}
    >>> printed_mean({"printed_mean": {"figures": [figure], "matches": True}})
    'The printed mean (0.017) does not exist; as a number it comes out as printed.'
    """
    quoted = claim.get("printed_mean")
    if not quoted:
        return ""
    figures = quoted["figures"]
    values = ", ".join(figure["printed"] for figure in figures)
    subject = "The printed mean" if len(figures) < 2 else "The printed means"
    does, comes = ("does", "it comes") if len(figures) < 2 else ("do", "all come")
    missed = [figure for figure in figures if not figure["matches"]]
    if not figures or any(figure["measured"] is None for figure in figures):
        quoted_values = f" ({values})" if values else ""
        return f"{subject}{quoted_values} {does} not exist."
    if missed:
        came = ", ".join(f"{f['printed']} as {measured(f)}" for f in missed)
        return f"{subject} ({values}) {does} not exist; as numbers, these differ here: {came}."
    pronoun = "as a number" if len(figures) == 1 else "as numbers"
    return f"{subject} ({values}) {does} not exist; {pronoun} {comes} out as printed."


def categories(figures: Iterable[Record]) -> dict[str, int]:
    """Count the printed figures by what their match is worth, in a fixed order.

    >>> categories([{"category": "fitted"}, {"category": "matched"}])["fitted"]
    1
    """
    counts = Counter(figure["category"] for figure in figures)
    return {name: counts[name] for name in (*CATEGORIES.values(), NOT_MATCHED)}


def conclusion(claims: Sequence[Record], figures: Sequence[Record]) -> tuple[str, str, str]:
    """Say in three sentences what came out: the claims, the most prominent, the figures.

    >>> claim = {"verdict": "fails", "sentence": "κ plateaus.", "id": "e9.x", "source": "abstract"}
    >>> for sentence in conclusion([claim], []):
    ...     print(sentence)
    Of 1 claim, 0 hold, 1 fails and 0 are undecided.
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
    return verdict_counts(claims), prominent if sentences else "", figure_counts(figures)


def figure_counts(figures: Sequence[Record]) -> str:
    """Say how many printed figures come out as printed, and what that is worth.

    >>> figure_counts([{"category": "matched", "agreement": "to its digits"},
    ...     {"category": "fitted", "agreement": "to its digits"},
    ...     {"category": "not matched", "agreement": "not measured: no rows"}])
    'Of 3 figures that the paper prints, 1 matched, 1 fitted; 1 was not measured here.'
    """
    if not figures:
        return "No printed figure was compared."
    absent = sum(map(unmeasured, figures))
    counts = categories(figures)
    counts[NOT_MATCHED] -= absent
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    left = f"; {plural(absent, 'was', 'were')} not measured here" if absent else ""
    return f"Of {plural(len(figures), 'figure')} that the paper prints, {told or 'none'}{left}."


def verdict_counts(claims: Sequence[Record]) -> str:
    """Say how many claims have which verdict.

    >>> verdict_counts([{"verdict": "holds"}])
    'Of 1 claim, 1 holds, 0 fail and 0 are undecided.'
    >>> verdict_counts([{"verdict": "undecided", "explanation": "Not measured: no rows"}])[-42:]
    ' 1 of the undecided was not measured here.'
    """
    if not claims:
        return "In this run no claim was judged."
    verdicts = [claim["verdict"] for claim in claims]
    told = [each for each in OUTCOMES if each != "ill-posed" or each in verdicts]
    counts = [plural(verdicts.count(outcome), *VERBS[outcome]) for outcome in told]
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
