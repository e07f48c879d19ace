"""Read a pickle as what it is, a program, without running it.

Every opcode of the protocols 0 to 5 does what it says to a stack of plain values
(`kappascope.files.machine`). Nothing is imported or called; steps and bytes are bounded.
"""

from __future__ import annotations

import codecs
import re
import struct
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from kappascope.files.formats import AGAIN, Malformed
from kappascope.files.machine import Asks, Builders, Machine, Pairs, refused

# 100,000 tensors take about 2.5 million steps; a step makes at most one object of about 100 bytes.
MOST_STEPS = 6_000_000
MOST_BYTES = 1 << 26  # the names of 100,000 tensors take less than a quarter of it
_LONGEST_NUMBER = 4000  # digits; Python itself stops at 4300, for the time it takes


class Loaded(NamedTuple):
    """The value of a pickle, where the pickle ends, and the foreign names it asks for."""

    value: Any
    end: int
    asked: dict[str, None]


def load(
    data: bytes, builders: Builders, persistent: Callable[[Any], Any], begin: int = 0
) -> Loaded:
    r"""Work out the pickle that begins at ``begin``.

    >>> import pickle
    >>> load(pickle.dumps([1, ("a", None)]), {}, persistent=str).value
    [1, ('a', None)]
    >>> load(b"cos\nsystem\n(S'true'\ntR.", {}, persistent=str)
    Traceback (most recent call last):
    kappascope.files.machine.Asks: a pickle that asks for 'os.system' (...)
    """
    machine = Machine(data, begin, builders, persistent)
    try:
        return Loaded(_run(machine), machine.at, machine.asked)
    except (IndexError, KeyError, ValueError, OverflowError, struct.error, Malformed) as error:
        if isinstance(error, Asks):
            raise
        if machine.asked:
            raise refused(*machine.asked, wrong="a damaged pickle") from error
        if isinstance(error, Malformed):
            raise
        short = machine.at >= len(data) or isinstance(error, struct.error)
        what = "truncated: its pickle ends early" if short else "damaged pickle"
        wrong = f"{what}, at byte {machine.at}"
        raise Malformed(wrong, AGAIN) from error


def _run(machine: Machine) -> Any:
    data = machine.data
    for _ in range(MOST_STEPS):
        code = data[machine.at]
        machine.at += 1
        if code == _STOP:
            return machine.stack.pop()
        _OPCODES[code](machine)
    raise Malformed(f"its pickle takes more than {MOST_STEPS} steps", "save the tensors alone")


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


# The opcodes: what each pushes, and what else the others do

_Step: TypeAlias = Callable[[Machine], Any]


def _sized(layout: str) -> Callable[[Machine], bytes]:
    return lambda m: m.take(m.number(layout))


def _dict(items: list[Any]) -> Pairs:
    return Pairs(zip(items[::2], items[1::2], strict=True))


def _popped(m: Machine, count: int) -> tuple[Any, ...]:
    if len(m.stack) < count:
        raise ValueError("too few values")
    taken = tuple(m.stack[-count:])
    del m.stack[-count:]
    return taken


def _instance(m: Machine) -> Any:
    kind = m.name(_text(m.line()), _text(m.line()))
    return m.call(kind, tuple(m.above()))


def _object(m: Machine) -> Any:
    kind, *given = m.above()
    return m.call(kind, tuple(given))


def _foreign(m: Machine) -> Any:
    raise Malformed("a pickle that asks for a registered extension", "save the tensors alone")


def _outside(m: Machine) -> Any:
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
    b"}": lambda m: Pairs(),
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


def _mark(m: Machine) -> None:
    m.marks.append(m.stack)
    m.stack = []


def _drop(m: Machine) -> None:
    if m.stack:
        m.stack.pop()
    else:
        m.above()


# The two most frequent, which is why they are so short.


def _keep(m: Machine) -> None:
    m.memo[m.data[m.at]] = m.stack[-1]
    m.at += 1


def _again(m: Machine) -> None:
    m.stack.append(m.memo[m.data[m.at]])
    m.at += 1


def _protocol(m: Machine) -> None:
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
    def step(m: Machine) -> None:
        it = value(m)  # first, for it may bring back the stack below the mark
        m.stack.append(it)

    return step


_OPCODES: dict[int, _Step] = {ord(code): _pushing(value) for code, value in _PUSHED.items()}
_OPCODES |= {ord(code): step for code, step in _DONE.items()}
