"""Texts that differ in what there is to learn, made of one: the plays, and what is left of them.

- ``prose``: Shakespeare's plays as they are;
- ``markov``: the same statistics of three characters in a row, and nothing beyond;
- ``shuffled``: the same characters in random order: only their frequencies can be learned;
- ``code``: programs of a little grammar, with names, brackets and indentation that must agree.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch

from kappascope.lab import downloads
from kappascope.lab.tasks import generator
from kappascope.studies.gpt.model import Corpus

TEXTS = ("prose", "code", "markov", "shuffled")
CHARACTERS = 400_000  # of each text: a run reads 768,000, so that none is learned by heart
ORDER = 3  # characters that a state of the Markov chain has


@cache
def corpus(text: str) -> Corpus:
    """Make one of the texts, the same in every process; another label is the user's own text."""
    if text not in TEXTS:
        return Corpus.of(downloads.text(text))
    if text == "code":
        return Corpus.of(programs(CHARACTERS))
    prose = downloads.text(downloads.SHAKESPEARE)[:CHARACTERS]
    if text == "markov":
        return Corpus.of(markov(prose, len(prose)))
    if text == "shuffled":
        order = torch.randperm(len(prose), generator=generator("unlearned shuffle"))
        return Corpus.of("".join(prose[k] for k in order.tolist()))
    return Corpus.of(prose)


def markov(text: str, length: int) -> str:
    """Write a text whose next character depends on the last three as it does in another.

    >>> markov("abcd" * 10, 8)
    'abcdabcd'
    """
    followers: dict[str, list[str]] = {}
    for place in range(len(text) - ORDER):
        followers.setdefault(text[place : place + ORDER], []).append(text[place + ORDER])
    lots = torch.rand(length, generator=generator("unlearned markov"), dtype=torch.float64).tolist()
    written = text[:ORDER]
    parts = [written]
    for lot in lots[: length - ORDER]:
        choices = followers.get(written) or followers[text[:ORDER]]
        parts.append(choices[int(lot * len(choices))])
        written = written[1:] + parts[-1]
    return "".join(parts)


NAMES = ("total", "count", "left", "right", "value", "index", "limit", "scale", "row", "item")
OPERATORS = ("+", "-", "*", "//", "%")


def programs(length: int) -> str:
    """Write small functions until there are so many characters.

    >>> print(programs(60)[:12])
    def ...
    """
    lots = torch.randint(2**31, (length,), generator=generator("unlearned code")).tolist()
    draw = iter(lots)
    lines: list[str] = []
    size = 0
    while size < length:
        new = _function(draw)
        lines += new
        size += sum(len(line) + 1 for line in new)
    return "\n".join(lines)[:length]


def _function(lots: Iterator[int]) -> list[str]:
    """Write the lines of one function; each choice takes one of the lots."""

    def one(choices: tuple[str, ...]) -> str:
        return choices[next(lots) % len(choices)]

    def expression(depth: int, known: tuple[str, ...]) -> str:
        if depth == 0 or one(("leaf", "node")) == "leaf":
            return one((*known, str(next(lots) % 100)))
        return f"({expression(depth - 1, known)} {one(OPERATORS)} {expression(depth - 1, known)})"

    place = next(lots)
    known = tuple(NAMES[(place + shift) % len(NAMES)] for shift in (0, 3, 7))  # three that differ
    first, second, result = known
    lines = [f"def {one(NAMES)}_{one(NAMES)}({first}, {second}):"]
    lines.append(f"    {result} = {expression(2, known[:2])}")
    if one(("loop", "branch")) == "loop":
        lines.append(f"    for index in range({first}):")
        lines.append(f"        {result} = {expression(2, known)}")
    else:
        lines.append(f"    if {first} > {expression(1, known)}:")
        lines.append(f"        return {expression(1, known)}")
    return [*lines, f"    return {result}", ""]
