"""The texts of a document by which code may go: here alone they are taken apart.

A status, and the reason for a number that is not there, begin with a word (``ok``, ``degenerate``,
``skipped`` and ``failed``, or ``infinite``); what follows its colon is for people.
"""

from __future__ import annotations

from dataclasses import dataclass

from kappascope.weights.reasons import Masking, NonFinite

INFINITE = "infinite"  # how the reason begins where JSON has no number for infinity
NON_FINITE, MASKING = "non-finite", ", all minus infinity"  # how it begins, and ends in a mask


@dataclass(frozen=True)
class Status:
    """What became of a matrix, a product or a chain, as a document tells it.

    >>> Status("failed: non-finite (1 of 4)").failed, Status("ok").reason
    (True, 'ok')
    """

    text: str

    @property
    def word(self) -> str:
        """That it begins with."""
        return self.text.partition(":")[0]

    @property
    def failed(self) -> bool:
        """Whether nothing could be measured."""
        return self.word == "failed"

    @property
    def reason(self) -> str:
        """What is told behind the word, or else the word.

        >>> isinstance(Status("failed: non-finite (1 of 4)").reason, NonFinite)
        True
        """
        told = self.text.partition(": ")[2] or self.text
        if not told.startswith(NON_FINITE):
            return told
        return Masking(told) if told.endswith(MASKING) else NonFinite(told)
