"""Why something stored is not examined: sentences for people, of which code asks the type alone.

A plain text tells of a loss: what nobody calls harmless may well be a weight.
"""

from __future__ import annotations

TIED = "tied to"  # and to which name: one reason for many


class Harmless(str):
    """Of what is no weight matrix, or is examined under another name.

    >>> Harmless("one-dimensional")
    'one-dimensional'
    """

    __slots__ = ()


class Beside(Harmless):
    """Of numbers that act with a matrix and are none: broken ones break what the matrix makes."""

    __slots__ = ()


class Headless(Harmless):
    """Of the products of heads whose number nothing tells: no weight is lost by that."""

    __slots__ = ()


class Unbuilt(str):
    """Of an object of a foreign class, of which no more is read than the tensors it keeps."""

    __slots__ = ()


class NonFinite(str):
    """Of numbers that are none."""

    __slots__ = ()


class Masking(NonFinite):
    """Of numbers that are minus infinity all: what a mask adds to logits."""

    __slots__ = ()


class Unlike(str):
    """Of a matrix for which another model has none of its name and shape."""

    __slots__ = ()
