"""The stack on which a pickle is worked out, and the plain values that lie on it.

A name stays a name, a call makes a value only through ``builders``, and all else that is called
becomes an `Inert` object or ends the reading (`trust.py`). Nothing is hashed that the file
chose, and no nesting is followed: a hostile pickle costs no more than a large one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kappascope.files import trust
from kappascope.files.formats import AGAIN, Malformed, quoted

Builders: TypeAlias = Mapping[str, Callable[..., Any]]
_LONGEST_NAME = 300  # letters of a module's name, and of a name in it
_MOST_GIVEN = 16  # values that a builder is given; to hand over a million time and again would take
# Names that tell no more than a dtype, a kind of storage, or a plain type.
_OWN = re.compile(
    r"torch\.(q?u?int\w*|b?float\w*|complex\d+|bool|half|double|short|long)"
    r"|torch\.(Tensor|nn\.parameter\.Parameter|(cuda\.|storage\.)?\w*Storage)"
    r"|(builtins|__builtin__|collections)\.\w+"
)


class Asks(Malformed):
    """A pickle that wants something to be run."""


class Pairs(list[tuple[Any, Any]]):
    """What a dict is made of, in order. A list, since hostile keys can make a dict crawl."""

    __slots__ = ()


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


def refused(*names: str, wrong: str = "a pickle") -> Asks:
    """What to say of a pickle that wants these names to be run.

    >>> refused("os.system").wrong
    "a pickle that asks for 'os.system'"
    """
    asked = ", ".join(quoted(name) for name in names[:2])
    return Asks(f"{wrong} that asks for {asked}", "ask its author for safetensors")


def built(builders: Builders, name: str, given: tuple[Any, ...]) -> Any:
    """What the builder makes of arguments that may be anything.

    >>> built({"torch.Size": tuple}, "torch.Size", ([2, 3],))
    (2, 3)
    """
    if len(given) > _MOST_GIVEN:
        raise Malformed(f"damaged pickle: {name} is given {len(given)} values", AGAIN)
    try:
        return builders[name](*given)
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        wrong = f"damaged pickle: {name} cannot be called this way"
        raise Malformed(wrong, AGAIN) from error


@dataclass
class Machine:
    """The state between two steps; a method is what one or several opcodes do."""

    data: bytes
    at: int  # where the next opcode is
    builders: Builders
    persistent: Callable[[Any], Any]
    stack: list[Any] = field(default_factory=list)
    marks: list[list[Any]] = field(default_factory=list)
    memo: dict[int, Any] = field(default_factory=dict)
    asked: dict[str, None] = field(default_factory=dict)  # names of what is neither built nor known

    def take(self, size: int) -> bytes:
        """The next bytes."""
        end = self.at + size
        if not self.at <= end <= len(self.data):
            raise Malformed("truncated: its pickle ends early", AGAIN)
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, layout: str) -> Any:
        """The next bytes as a number."""
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def line(self) -> bytes:
        """The bytes up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1]

    def above(self) -> list[Any]:
        """Everything above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def name(self, module: Any, name: Any) -> Name:
        """A name of a module; some are refused at the mere mention."""
        if not all(isinstance(text, str) and len(text) < _LONGEST_NAME for text in (module, name)):
            raise ValueError("a name is two short texts")
        full = f"{module}.{name}"
        if full not in self.builders:
            if trust.is_refused(full):
                raise refused(full)
            if not _OWN.fullmatch(full):
                self.asked[full] = None
        return Name(full)

    def call(self, what: Any, given: Any) -> Any:
        """What a call makes: the builder's value, or an inert object."""
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
        """Put keys and values into the dict on top."""
        it = self.stack[-1]
        if len(items) % 2 or not isinstance(it, Pairs | Inert):
            raise ValueError("pairs are put into a dict")
        pairs = it.pairs if isinstance(it, Inert) else it
        pairs.extend(zip(items[::2], items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        """Put items into the list on top."""
        it = self.stack[-1]
        if type(it) is not list and not isinstance(it, Inert):
            raise ValueError("items are put into a list")
        (it.items if isinstance(it, Inert) else it).extend(items)

    def build(self, state: Any) -> None:
        """Give the object on top its attributes."""
        it = self.stack[-1]
        if isinstance(it, Inert):
            it.state = state  # anything else keeps what it is: attributes hold no tensor's numbers

    def keep(self, index: int) -> None:
        """Remember what is on top."""
        self.memo[index] = self.stack[-1]

    def again(self, index: int) -> None:
        """Put what was remembered on top."""
        self.stack.append(self.memo[index])
