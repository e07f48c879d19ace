"""The stack on which a pickle is worked out, and the plain values that lie on it.

A name stays a name, a call makes a value only through ``builders``, and all else that is called
becomes an `Inert` object or ends the reading (`kappascope.trust`). Nothing is hashed that the file
chose, and no nesting is followed: a hostile pickle costs no more than a large one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kappascope import trust
from kappascope.formats import Malformed, quoted

Builders: TypeAlias = Mapping[str, Callable[..., Any]]
_AGAIN = "download or save it again"


class Asks(Malformed):
    """A pickle that wants something to be run."""


class Pairs(list[tuple[Any, Any]]):
    """What a dict is made of, in order. A list, since hostile keys can make a dict crawl."""


@dataclass(frozen=True, slots=True)
class Name:
    """A function or class that a pickle asks for by name; never the thing itself."""

    text: str


@dataclass(slots=True)
class Inert:
    """Stands for an object of a foreign class: it keeps what it was given and does nothing."""

    kind: str
    given: Any = ()
    state: Any = None
    pairs: Pairs = field(default_factory=Pairs)
    items: list[Any] = field(default_factory=list)


def refused(name: str) -> Asks:
    """What to say of a pickle that wants ``name`` to be run."""
    return Asks(
        f"a pickle that asks for {quoted(name)}",
        "ask its author for safetensors",
    )


def built(builders: Builders, name: str, given: tuple[Any, ...]) -> Any:
    """What the builder makes of arguments that may be anything."""
    try:
        return builders[name](*given)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        wrong = f"damaged pickle: {name} cannot be called this way"
        raise Malformed(wrong, _AGAIN) from error


@dataclass
class Machine:
    data: bytes
    at: int
    builders: Builders
    persistent: Callable[[Any], Any]
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)

    def take(self, size: int) -> bytes:
        end = self.at + size
        if not self.at <= end <= len(self.data):
            raise Malformed("truncated: its pickle ends early", _AGAIN)
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def line(self) -> bytes:
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1]

    def above(self) -> list[Any]:
        """Everything above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def name(self, module: Any, name: Any) -> None:
        if not (isinstance(module, str) and isinstance(name, str)):
            raise ValueError("a name is two texts")
        full = f"{module}.{name}"
        if full not in self.builders and trust.is_refused(full):
            raise refused(full)
        self.stack.append(Name(full))

    def call(self, what: Any, given: Any) -> Any:
        if not isinstance(what, Name) or not isinstance(given, tuple):
            raise ValueError("only what has a name is called")
        if what.text in self.builders:
            return built(self.builders, what.text, given)
        if not trust.is_data(what.text):
            raise refused(what.text)
        return Inert(what.text, given)

    def new(self, kind: Any, given: Any) -> Any:
        """An object made by its class; what makes one this way is a class, whatever its name."""
        if not isinstance(kind, Name):
            raise ValueError("only what has a name is made")
        known = kind.text in self.builders
        return self.call(kind, given) if known else Inert(kind.text, given)

    def put(self, items: list[Any]) -> None:
        it = self.stack[-1]
        if len(items) % 2 or not isinstance(it, Pairs | Inert):
            raise ValueError("pairs are put into a dict")
        pairs = it.pairs if isinstance(it, Inert) else it
        pairs.extend(zip(items[::2], items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        it = self.stack[-1]
        if type(it) is not list and not isinstance(it, Inert):
            raise ValueError("items are put into a list")
        (it.items if isinstance(it, Inert) else it).extend(items)

    def build(self, state: Any) -> None:
        it = self.stack[-1]
        if isinstance(it, Inert):
            it.state = state  # anything else keeps what it is: attributes hold no tensor's numbers

    def keep(self, index: int) -> None:
        self.memo[index] = self.stack[-1]

    def again(self, index: int) -> None:
        self.stack.append(self.memo[index])
