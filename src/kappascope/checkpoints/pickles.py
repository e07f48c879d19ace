"""Read a pickle as what it is, a program, without running it.

Every opcode of the protocols 0 to 5 does what it says to a stack of plain values. Nothing is
imported or called: a global name stays a name, a call makes a value only through ``builders``, and
all else that is called becomes a `ForeignObject` or ends the reading. Steps and bytes are bounded,
nothing is hashed that the file chose, and no nesting is followed: a hostile pickle costs no more
than a large one.
"""

from __future__ import annotations

import codecs
import re
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from kappascope.checkpoints.formats import AGAIN, Malformed, quoted

Builders: TypeAlias = Mapping[str, Callable[..., Any]]

# 100,000 tensors take about 2.5 million steps; a step makes at most one object of about 100 bytes.
MOST_STEPS = 6_000_000
MOST_BYTES = 1 << 26  # the names of 100,000 tensors take less than a quarter of it
_LONGEST_NUMBER = 4000  # digits; Python itself stops at 4300, for the time it takes
_LONGEST_NAME = 300  # letters of a module's name, and of a name in it
_MOST_GIVEN = 16  # values that a builder is given; to hand over a million time and again would take


class LoadedPickle(NamedTuple):
    """The value of a pickle, where the pickle ends, and the foreign names it asks for."""

    value: Any
    end: int
    asked: dict[str, None]


def load(
    data: bytes, builders: Builders, persistent: Callable[[Any], Any], begin: int = 0
) -> LoadedPickle:
    r"""Work out the pickle that begins at ``begin``.

    >>> import pickle
    >>> load(pickle.dumps([1, ("a", None)]), {}, persistent=str).value
    [1, ('a', None)]
    >>> load(b"cos\nsystem\n(S'true'\ntR.", {}, persistent=str)
    Traceback (most recent call last):
    kappascope.checkpoints.pickles.ForbiddenCall: a pickle that asks for 'os.system' (...)
    """
    machine = PickleMachine(data, begin, builders, persistent)
    try:
        return LoadedPickle(_run(machine), machine.at, machine.asked)
    except (IndexError, KeyError, ValueError, OverflowError, struct.error, Malformed) as error:
        if isinstance(error, ForbiddenCall):
            raise
        if any(name.startswith("joblib.") for name in machine.asked):  # arrays between opcodes
            raise Malformed("a pickle of joblib", "ask its author for safetensors") from error
        if machine.asked:
            raise forbidden(*machine.asked, wrong="a damaged pickle") from error
        if isinstance(error, Malformed):
            raise
        short = machine.at >= len(data) or isinstance(error, struct.error)
        what = "truncated: its pickle ends early" if short else "damaged pickle"
        wrong = f"{what}, at byte {machine.at}"
        raise Malformed(wrong, AGAIN) from error


def _run(machine: PickleMachine) -> Any:
    data = machine.data
    for _ in range(MOST_STEPS):
        code = data[machine.at]
        machine.at += 1
        if code == _STOP:
            return machine.stack.pop()
        _OPCODES[code](machine)
    raise Malformed(f"its pickle takes more than {MOST_STEPS} steps", "save the tensors alone")


# --- the stack machine ----------------------------------------------------------------------------


class ForbiddenCall(Malformed):
    """A pickle that wants something to be run."""


class DictItems(list[tuple[Any, Any]]):
    """What a dict is made of, in order. A list, since hostile keys can make a dict crawl."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class GlobalName:
    """A function or class that a pickle asks for by name; never the thing itself."""

    text: str


@dataclass(slots=True)
class ForeignObject:
    """Stands for an object of a foreign class: it keeps what it was given and does nothing."""

    kind: str
    given: Any = ()
    state: Any = None
    pairs: DictItems = field(default_factory=DictItems)
    items: list[Any] = field(default_factory=list)


def forbidden(*names: str, wrong: str = "a pickle") -> ForbiddenCall:
    """Return what to say of a pickle that wants these names to be run.

    >>> forbidden("os.system").wrong
    "a pickle that asks for 'os.system'"
    """
    asked = ", ".join(quoted(name) for name in names[:2])
    return ForbiddenCall(f"{wrong} that asks for {asked}", "ask its author for safetensors")


def build_value(builders: Builders, name: str, given: tuple[Any, ...]) -> Any:
    """Return what the builder makes of arguments that may be anything.

    >>> build_value({"torch.Size": tuple}, "torch.Size", ([2, 3],))
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
class PickleMachine:
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
        """Take the next bytes of the pickle."""
        end = self.at + size
        if not self.at <= end <= len(self.data):
            raise Malformed("truncated: its pickle ends early", AGAIN)
        taken = self.data[self.at : end]
        self.at = end
        return taken

    def number(self, layout: str) -> Any:
        """Return the next bytes as a number."""
        (value,) = struct.unpack_from(layout, self.data, self.at)
        self.at += struct.calcsize(layout)
        return value

    def line(self) -> bytes:
        """Return the bytes up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        return self.take(end + 1 - self.at)[:-1]

    def above(self) -> list[Any]:
        """Return everything above the last mark."""
        items, self.stack = self.stack, self.marks.pop()
        return items

    def name(self, module: Any, name: Any) -> GlobalName:
        """Return a name of a module; some are refused at the mere mention."""
        if not all(isinstance(text, str) and len(text) < _LONGEST_NAME for text in (module, name)):
            raise ValueError("a name is two short texts")
        full = f"{module}.{name}"
        if full not in self.builders:
            if is_refused(full):
                raise forbidden(full)
            if not _OWN.fullmatch(full):
                self.asked[full] = None
        return GlobalName(full)

    def call(self, what: Any, given: Any) -> Any:
        """Return what a call makes: the builder's value, or an inert object."""
        if not isinstance(what, GlobalName) or not isinstance(given, tuple):
            raise ValueError("only what has a name is called")
        if what.text in self.builders:
            return build_value(self.builders, what.text, given)
        if not is_data(what.text):
            raise forbidden(what.text)
        return ForeignObject(what.text, given)

    def new(self, kind: Any, given: Any) -> Any:
        """Return an object made by its class.

        What makes one this way is a class, whatever its name.
        """
        if not isinstance(kind, GlobalName):
            raise ValueError("only what has a name is made")
        known = kind.text in self.builders
        return self.call(kind, given) if known else ForeignObject(kind.text, given)

    def put(self, items: list[Any]) -> None:
        """Put keys and values into the dict on top."""
        it = self.stack[-1]
        if len(items) % 2 or not isinstance(it, DictItems | ForeignObject):
            raise ValueError("pairs are put into a dict")
        pairs = it.pairs if isinstance(it, ForeignObject) else it
        pairs.extend(zip(items[::2], items[1::2], strict=True))

    def extend(self, items: list[Any]) -> None:
        """Put items into the list on top."""
        it = self.stack[-1]
        if type(it) is not list and not isinstance(it, ForeignObject):
            raise ValueError("items are put into a list")
        (it.items if isinstance(it, ForeignObject) else it).extend(items)

    def build(self, state: Any) -> None:
        """Give the object on top its attributes."""
        it = self.stack[-1]
        if isinstance(it, ForeignObject):
            it.state = state  # anything else keeps what it is: attributes hold no tensor's numbers

    def keep(self, index: int) -> None:
        """Remember what is on top."""
        self.memo[index] = self.stack[-1]

    def again(self, index: int) -> None:
        """Put what was remembered on top."""
        self.stack.append(self.memo[index])


# --- the opcodes: what each pushes, and what else the others do -----------------------------------


def _text(data: bytes) -> str:
    # Half a surrogate is no text: it could be neither printed nor written to a file.
    return data.decode("utf-8", "backslashreplace")


def _escaped(data: bytes) -> str:
    text, _ = codecs.raw_unicode_escape_decode(data, "backslashreplace")
    return _text(text.encode("utf-8", "surrogatepass"))


def _whole(line: bytes) -> int | bool:
    if len(line) > _LONGEST_NUMBER:
        raise ValueError("too long a number")
    return line == b"01" if line in (b"00", b"01") else int(line)  # how protocol 0 writes a bool


def _plain(line: bytes) -> str:
    quoted_text = re.fullmatch(rb"(['\"])(.*)\1", line.strip(), re.DOTALL)
    if not quoted_text:
        raise ValueError("a string without quotes")
    return _text(codecs.escape_decode(quoted_text[2])[0])


_Step: TypeAlias = Callable[[PickleMachine], Any]


def _sized(layout: str) -> Callable[[PickleMachine], bytes]:
    return lambda m: m.take(m.number(layout))


def _dict(items: list[Any]) -> DictItems:
    return DictItems(zip(items[::2], items[1::2], strict=True))


def _popped(m: PickleMachine, count: int) -> tuple[Any, ...]:
    if len(m.stack) < count:
        raise ValueError("too few values")
    taken = tuple(m.stack[-count:])
    del m.stack[-count:]
    return taken


def _instance(m: PickleMachine) -> Any:
    kind = m.name(_text(m.line()), _text(m.line()))
    return m.call(kind, tuple(m.above()))


def _object(m: PickleMachine) -> Any:
    kind, *given = m.above()
    return m.call(kind, tuple(given))


def _foreign(m: PickleMachine) -> Any:
    raise Malformed("a pickle that asks for a registered extension", "save the tensors alone")


def _outside(m: PickleMachine) -> Any:
    raise Malformed("a pickle whose data lies outside of it", "save the tensors alone")


_PUSHED: dict[bytes, _Step] = {
    b"N": lambda m: None,
    b"\x88": lambda m: True,
    b"\x89": lambda m: False,
    b"I": lambda m: _whole(m.line()),
    b"J": lambda m: m.number("<i"),
    b"K": lambda m: m.number("<B"),
    b"M": lambda m: m.number("<H"),
    b"L": lambda m: _whole(m.line().rstrip(b"L")),
    b"\x8a": lambda m: int.from_bytes(_sized("<B")(m), "little", signed=True),
    b"\x8b": lambda m: int.from_bytes(_sized("<i")(m), "little", signed=True),
    b"F": lambda m: float(m.line()),
    b"G": lambda m: m.number(">d"),
    b"S": lambda m: _plain(m.line()),
    b"T": lambda m: _text(_sized("<i")(m)),
    b"U": lambda m: _text(_sized("<B")(m)),
    b"V": lambda m: _escaped(m.line()),
    b"X": lambda m: _text(_sized("<I")(m)),
    b"\x8c": lambda m: _text(_sized("<B")(m)),
    b"\x8d": lambda m: _text(_sized("<Q")(m)),
    b"B": _sized("<I"),
    b"C": _sized("<B"),
    b"\x8e": _sized("<Q"),
    b"\x96": _sized("<Q"),
    b"]": lambda m: [],
    b"}": lambda m: DictItems(),
    b")": lambda m: (),
    b"\x8f": lambda m: [],  # a set, of what may have no hash
    b"\x91": lambda m: m.above(),
    b"l": lambda m: m.above(),
    b"t": lambda m: tuple(m.above()),
    b"d": lambda m: _dict(m.above()),
    b"\x85": lambda m: _popped(m, 1),
    b"\x86": lambda m: _popped(m, 2),
    b"\x87": lambda m: _popped(m, 3),
    b"2": lambda m: m.stack[-1],
    b"R": lambda m: m.call(*_popped(m, 2)),
    b"\x81": lambda m: m.new(*_popped(m, 2)),
    b"\x92": lambda m: m.new(*_popped(m, 3)[:2]),
    b"c": lambda m: m.name(_text(m.line()), _text(m.line())),
    b"\x93": lambda m: m.name(*_popped(m, 2)),
    b"i": _instance,
    b"o": _object,
    b"P": lambda m: m.persistent(_text(m.line())),
    b"Q": lambda m: m.persistent(m.stack.pop()),
    b"\x82": _foreign,
    b"\x83": _foreign,
    b"\x84": _foreign,
    b"\x97": _outside,
    b"\x98": _outside,
}


def _mark(m: PickleMachine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _drop(m: PickleMachine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.above()


# The two most frequent, which is why they are so short.


def _keep(m: PickleMachine) -> None:
    m.memo[m.data[m.at]] = m.stack[-1]
    m.at += 1


def _again(m: PickleMachine) -> None:
    m.stack.append(m.memo[m.data[m.at]])
    m.at += 1


def _protocol(m: PickleMachine) -> None:
    if m.number("<B") > 5:
        raise ValueError("no such protocol")


_DONE: dict[bytes, _Step] = {
    b"(": _mark,
    b"0": _drop,
    b"1": lambda m: m.above(),
    b"a": lambda m: m.extend([m.stack.pop()]),
    b"e": lambda m: m.extend(m.above()),
    b"\x90": lambda m: m.extend(m.above()),
    b"s": lambda m: m.put(list(_popped(m, 2))),
    b"u": lambda m: m.put(m.above()),
    b"b": lambda m: m.build(m.stack.pop()),
    b"g": lambda m: m.again(int(m.line()[:20])),
    b"h": _again,
    b"j": lambda m: m.again(m.number("<I")),
    b"p": lambda m: m.keep(int(m.line()[:20])),
    b"q": _keep,
    b"r": lambda m: m.keep(m.number("<I")),
    b"\x94": lambda m: m.keep(len(m.memo)),
    b"\x80": _protocol,
    b"\x95": lambda m: m.number("<Q"),  # the length of a frame, which reading ahead would need
}
_STOP = ord(".")


def _pushing(value: _Step) -> _Step:
    def step(m: PickleMachine) -> None:
        it = value(m)  # first, for it may bring back the stack below the mark
        m.stack.append(it)

    return step


_OPCODES: dict[int, _Step] = {ord(code): _pushing(value) for code, value in _PUSHED.items()}
_OPCODES |= {ord(code): step for code, step in _DONE.items()}


# --- which names a pickle may ask for -------------------------------------------------------------

# The names in a pickle are the functions it wants to call. Some build tensors and containers:
# `rebuild.py` does so instead. A class of someone else becomes a stand-in, which does nothing and
# keeps what it was given. All the rest is refused by name: whatever the standard library can do,
# and every function, since only running it would tell what it makes. This labels files, it guards
# nothing: a file is safe to read here because nothing in it is run.

# Names that tell no more than a dtype, a kind of storage, or a plain type.
_OWN = re.compile(
    r"torch\.(q?u?int\w*|b?float\w*|complex\d+|bool|half|double|short|long)"
    r"|torch\.(Tensor|nn\.parameter\.Parameter|(cuda\.|storage\.)?\w*Storage)"
    r"|(builtins|__builtin__|collections)\.\w+|__torch__\.[\w.]+"
)
SCRIPT = "__torch__"  # where TorchScript keeps its classes, of which the archive has the code
# Names of the standard library that hold data; the rest of it is refused at the mere mention.
_DATA = {
    "builtins": "object set frozenset list dict tuple int float bool str bytes bytearray complex "
    "slice range NotImplementedType ellipsis unicode long xrange",
    "collections": "OrderedDict defaultdict Counter deque",
    "argparse": "Namespace",
    "types": "SimpleNamespace",
    "datetime": "date time datetime timedelta timezone",
    "pathlib": "Path PurePath PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "pathlib._local": "Path PurePath PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "uuid": "UUID",
    "zoneinfo": "ZoneInfo",
    "functools": "partial",
    "copyreg": "_reconstructor __newobj__",
    "_codecs": "encode",
    "re": "_compile Pattern",
    "typing": "Any Union Optional List Dict Tuple Callable Sequence Mapping Type",
    "string": "Template",
    "random": "Random",
}
_DATA |= {"__builtin__": _DATA["builtins"], "copy_reg": _DATA["copyreg"]}
_HARMLESS = {f"{module}.{name}" for module, names in _DATA.items() for name in names.split()}

# Functions of NumPy that rebuild its own values.
_REBUILD = re.compile(
    r"numpy\.(_?core\.(multiarray|numeric)\.(_reconstruct|scalar|_frombuffer)"
    r"|dtype|ndarray|random\._pickle\.__\w+_ctor)"
)
_PYTHON2 = {"__builtin__", "__builtins__", "commands", "copy_reg", "cPickle", "cStringIO"}
_PYTHON2 |= {"urllib2", "popen2", "dummy_thread", "thread", "exceptions", "imp", "distutils"}
_SYSTEM = (set(sys.stdlib_module_names) | _PYTHON2) - {"__main__"}
_PACKAGERS = {"pip", "setuptools", "pkg_resources", "_distutils_hack", "ensurepip", "pytest", "py"}


def is_refused(name: str) -> bool:
    """Tell whether the mere mention of ``module.name`` ends the reading.

    >>> is_refused("os.system"), is_refused("argparse.Namespace"), is_refused("my.Config")
    (True, False, False)
    """
    if name in _HARMLESS:
        return False
    parts = name.split(".")
    return parts[0] in _SYSTEM | _PACKAGERS or not all(map(_is_word, parts))


def is_data(name: str) -> bool:
    """Tell whether calling ``module.name`` can be no more than the making of a value.

    >>> is_data("torch.optim.adam.Adam"), is_data("torch.load")
    (True, False)
    """
    last = name.rpartition(".")[2]
    looks_like_a_class = bool(re.match("_*[A-Z]", last))
    return name in _HARMLESS or bool(_REBUILD.fullmatch(name)) or looks_like_a_class


def _is_word(part: str) -> bool:
    """Not ``__getattribute__`` and its like, nor what no name can be."""
    special = part.startswith("__") and part.endswith("__")
    special = special and part not in ("__main__", SCRIPT)
    return part.isidentifier() and not special
