"""Why something stored is not examined: a kind for code and a sentence for people.

Code decides by ``kind`` alone, so that rewording a sentence changes no rule and no exit code.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple


class ReasonKind(Enum):
    """What it means that something was not examined."""

    NOT_A_WEIGHT = auto()  # or examined under another name
    ACTS_BESIDE = auto()  # a bias, a gain, a scale: no matrix, but a broken one breaks its output
    OPTIMIZER_STATE = auto()
    TIED = auto()  # the same memory is examined under an earlier name
    NOT_CHOSEN = auto()  # the user did not ask for it
    HEADS_UNKNOWN = auto()  # products of attention heads whose number nothing tells
    UNREADABLE = auto()  # it may well be a weight, in a form that is not understood here
    FOREIGN_OBJECT = auto()  # of a class that is not built: only the tensors it keeps are read
    NO_MEMORY = auto()  # it needs more than there is, or than the user allows
    NON_FINITE = auto()
    MINUS_INFINITY = auto()  # all its non-finite numbers are: what a mask adds to logits
    NO_COUNTERPART = auto()  # another model has no matrix of its name and shape
    RULE_FAILED = auto()  # it was measured, but a rule could not judge it


_HARMLESS = {
    ReasonKind.NOT_A_WEIGHT,
    ReasonKind.ACTS_BESIDE,
    ReasonKind.OPTIMIZER_STATE,
    ReasonKind.TIED,
    ReasonKind.NOT_CHOSEN,
    ReasonKind.HEADS_UNKNOWN,
}


@dataclass(frozen=True, repr=False)
class Reason:
    """A kind that code goes by, and a text that people read and that no code takes apart.

    In the contents of a checkpoint it stands in the place of what is no tensor of numbers.

    >>> print(Reason(ReasonKind.ACTS_BESIDE, "one-dimensional"))
    one-dimensional
    """

    kind: ReasonKind
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return repr(self.text)

    @property
    def is_loss(self) -> bool:
        """Whether what was not examined may well be a weight.

        >>> Reason(ReasonKind.TIED, "tied to a").is_loss, unreadable("quantized").is_loss
        (False, True)
        """
        return self.kind not in _HARMLESS

    @property
    def is_non_finite(self) -> bool:
        """Whether numbers were read and some of them are NaN or infinite."""
        return self.kind in (ReasonKind.NON_FINITE, ReasonKind.MINUS_INFINITY)


def unreadable(text: str) -> Reason:
    """The reason for what may well be a weight and cannot be read.

    >>> unreadable("quantized").kind.name
    'UNREADABLE'
    """
    return Reason(ReasonKind.UNREADABLE, text)


def no_weight(text: str) -> Reason:
    """The reason for what is no weight matrix, or is examined under another name.

    >>> no_weight("empty").kind.name
    'NOT_A_WEIGHT'
    """
    return Reason(ReasonKind.NOT_A_WEIGHT, text)


def acts_beside(text: str) -> Reason:
    """The reason for numbers that act beside a matrix: biases, gains, scales.

    >>> acts_beside("scalar").kind.name
    'ACTS_BESIDE'
    """
    return Reason(ReasonKind.ACTS_BESIDE, text)


class Skipped(NamedTuple):
    """Something stored that is not among the matrices, and why.

    >>> Skipped("fc.bias", acts_beside("one-dimensional"))
    Skipped(name='fc.bias', reason='one-dimensional')
    """

    name: str
    reason: Reason

    @property
    def lost(self) -> bool:
        """Whether it may well be a weight, stored in a way that is not understood here.

        >>> Skipped("qweight", unreadable("quantized codes (torch.int8)")).lost
        True
        """
        return self.reason.is_loss

    @property
    def unbuilt(self) -> bool:
        """Whether it is an object of a foreign class, of which its tensors alone are read.

        >>> reason = Reason(ReasonKind.FOREIGN_OBJECT, "object of class argparse.Namespace")
        >>> Skipped("args", reason).unbuilt
        True
        """
        return self.reason.kind is ReasonKind.FOREIGN_OBJECT
