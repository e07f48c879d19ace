"""Checkpoints gone wrong in every way that bytes and structure allow, and what becomes of them."""

from __future__ import annotations

import io
import json
import pickletools
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

import checkpoint_files
from kappascope.checkpoints import open
from kappascope.checkpoints.locations import TensorLocation
from kappascope.refusal import Refusal

NUMBERS = [0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**30]
VALUES = [*NUMBERS, None, True, 1.5, "", "x", [], {}, [[]], [1, 2], "F32", "F4", "../x", "\0"]
LIMIT = 10  # seconds that no file of a few kilobytes may take


# Mutations of bytes


def damaged(data: bytes, random: Random) -> bytes:
    """A few bytes changed, added, doubled or lost."""
    new = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(len(new) + 1)
        size = random.choice((1, 2, 4, 8, 32))
        match random.randrange(7):
            case 0 if at < len(new):
                new[at] ^= 1 << random.randrange(8)
            case 1 if at < len(new):
                new[at] = random.randrange(256)
            case 2:
                new[at:at] = random.randbytes(size)
            case 3:
                del new[at : at + size]
            case 4:
                number = random.choice(NUMBERS) % 256**size
                new[at : at + size] = number.to_bytes(size, "little")
            case 5:
                del new[at:]
            case 6:
                new[at:at] = new[at : at + size * 4]
    return bytes(new)


def altered(value: Any, random: Random) -> Any:
    """A JSON value with one part of it exchanged, lost, renamed or doubled."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        return _altered_object(value, random.choice(list(value)), random)
    if isinstance(value, list) and value and random.random() < 0.8:
        at = random.randrange(len(value))
        return [*value[:at], altered(value[at], random), *value[at + 1 :]]
    if isinstance(value, int) and random.random() < 0.5:
        return value + random.choice((-8, -4, -1, 1, 4, 8))
    return random.choice(VALUES)


def _altered_object(value: dict[str, Any], key: str, random: Random) -> dict[str, Any]:
    match random.randrange(6):
        case 0:
            return {k: v for k, v in value.items() if k != key}
        case 1:
            return {random.choice([k, k + "x", ""]): v for k, v in value.items()}
        case 2:
            return {**value, key: value[random.choice(list(value))]}
    return {**value, key: altered(value[key], random)}


# Mutants of each kind of file


def tensor_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated safetensors files."""
    random = Random(seed)
    seeds = _safetensors()
    for i in range(count):
        data = random.choice(seeds)
        length = int.from_bytes(data[:8], "little")
        header, rest = data[8 : 8 + length], data[8 + length :]
        if i % 3 == 0:
            yield damaged(data, random)
        elif i % 3 == 1:
            yield checkpoint_files.raw(damaged(header, random), rest)
        else:
            value = altered(json.loads(header), random)
            yield checkpoint_files.raw(value, damaged(rest, random) if i % 9 == 2 else rest)


def _safetensors() -> list[bytes]:
    wanted = ("single precision", "eight bits", "an empty tensor", "strange names", "metadata")
    with tempfile.TemporaryDirectory() as folder:
        return [checkpoint_files.BENIGN[name][0](Path(folder)).read_bytes() for name in wanted]


def torch_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated files of ``torch.save``: whole, or the pickle or a member of a sound archive."""
    random = Random(seed)
    seeds = _pickled()
    signed = [data for data in seeds if data.startswith(b"PK")]
    zipped, opened = (
        [*map(checkpoint_files.unsigned, signed)],
        [*map(checkpoint_files.members, signed)],
    )
    steps = {members["data.pkl"]: steps_of(members["data.pkl"]) for members in opened}
    plain = [data for data in seeds if not data.startswith(b"PK")]
    for i in range(count):
        members = dict(random.choice(opened))
        match i % 5:
            case 0:
                yield damaged(random.choice(zipped), random)
            case 1:
                yield damaged(random.choice(plain), random)
            case 2:
                yield _archive({**members, "data.pkl": damaged(members["data.pkl"], random)})
            case 3:
                pickled = members["data.pkl"]
                yield _archive({**members, "data.pkl": rearranged(steps[pickled], random)})
            case 4:
                name = random.choice(list(members))
                data = members.pop(name)
                new = random.choice([name, name + "x", "../" + name, "data/0", "/x", "code/x.py"])
                members[new] = random.choice([data, damaged(data, random), b"", data * 2])
                yield _archive(members)


def _archive(members: dict[str, bytes]) -> bytes:
    return checkpoint_files.archive(members.pop("data.pkl", b"."), members=members)


def _pickled() -> list[bytes]:
    wanted = ("a plain state dict", "a list of tensors", "newer formats", "before 1.6",
              "protocol 4", "before 1.6, nested", "plain values beside", "views",
              "objects_beside_the_tensors",
              "lightning", "with_an_optimizer", "packed")  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        return [checkpoint_files.BENIGN[name][0](Path(folder)).read_bytes() for name in wanted]


def steps_of(pickled: bytes) -> list[bytes]:
    places = [at for _, _, at in pickletools.genops(pickled)]
    return [pickled[a:b] for a, b in pairwise([*places, len(pickled)])]


OPCODES = [code.code.encode("latin1") for code in pickletools.opcodes]


def rearranged(steps: list[bytes], random: Random) -> bytes:
    """A pickle with some of its opcodes lost, doubled, swapped, exchanged or added."""
    steps = list(steps)
    for _ in range(random.choice((1, 1, 2, 5))):
        a, b = random.randrange(len(steps)), random.randrange(len(steps))
        match random.randrange(6):
            case 0:
                del steps[a]
            case 1:
                steps[a:a] = steps[b : b + random.choice((1, 3))]
            case 2:
                steps[a], steps[b] = steps[b], steps[a]
            case 3:
                steps[a] = random.choice(OPCODES) + steps[a][1:]
            case 4:
                steps[a:a] = [random.choice(OPCODES) + random.randbytes(random.choice((0, 1, 4)))]
            case 5:
                number = random.choice(NUMBERS)
                size = (number.bit_length() + 8) // 8
                steps[a] = b"\x8a" + bytes([size]) + number.to_bytes(size, "little", signed=True)
        steps = steps or [b"."]
    return b"".join(steps)


def indexes(count: int, seed: int) -> Iterator[bytes]:
    """Mutated indexes of the shards of `shards`."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = checkpoint_files.sharded(Path(folder)) / "model.safetensors.index.json"
        text = path.read_bytes()
    names = ["../x", "/etc/hostname", "a/../../b", "..\\x", "C:\\x", "~", "a\0b", "x" * 5000, "."]
    names += ["", "config.json", "out.safetensors", "folder", "model-00001-of-00003.safetensors"]
    for i in range(count):
        if i % 3 == 0:
            yield damaged(text, random)
            continue
        value = json.loads(text)
        if i % 3 == 1:
            places = value["weight_map"]
            places[random.choice([*places, "new"])] = random.choice(names)
        else:
            value = altered(value, random)
        yield json.dumps(value).encode()


# What becomes of them


@dataclass
class Tally:
    """How many of the files were refused and accepted, and what should not have happened."""

    what: str
    count: int = 0
    refused: int = 0
    accepted: int = 0
    slowest: float = 0.0
    crashes: list[str] = field(default_factory=list)
    executions: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)


_EVENTS = ("os.system", "os.exec", "os.spawn", "os.posix_spawn", "os.fork", "subprocess.",
           "socket.", "import", "exec", "compile", "pickle.", "marshal.", "ctypes.", "os.remove",
           "os.rename",
           "os.mkdir", "os.link", "os.symlink", "shutil.", "os.chmod", "os.truncate")  # fmt: skip
_seen: list[str] = []
_watching = False


def _audit(event: str, given: tuple[Any, ...]) -> None:
    if not _watching:
        return
    writes = event == "open" and isinstance(given[2], int) and given[2] & 0b11  # not O_RDONLY
    if writes or event.startswith(_EVENTS):
        _seen.append(f"{event} {given!r}"[:200])


@contextmanager
def watched() -> Iterator[list[str]]:
    """Everything that is run, imported or written meanwhile, as Python itself reports it."""
    global _watching  # noqa: PLW0603 - an audit hook stays for good
    if not hasattr(sys, "_kappascope_audit"):
        sys.addaudithook(_audit)
        sys._kappascope_audit = True  # type: ignore[attr-defined]
    _seen.clear()
    _watching = True
    try:
        yield _seen
    finally:
        _watching = False


def examine(path: Path) -> int:
    """Open a checkpoint and read all of it; how many tensors it has."""
    checkpoint = open.open(path)
    assert checkpoint.contents
    count = 0
    todo: list[tuple[tuple[str, ...], Any, Any]] = [((), checkpoint.tree, checkpoint.contents)]
    while todo:
        keys, node, shown = todo.pop()
        if isinstance(node, dict):
            todo += [((*keys, key), node[key], shown[key]) for key in node]
        elif isinstance(node, open._LOCATIONS):
            tensor = checkpoint.read(keys)
            assert (tensor.shape, tensor.dtype) == (shown.shape, shown.dtype)
            if isinstance(node, TensorLocation):
                assert tensor.stride() == shown.stride()
            if keys in checkpoint.codes:
                assert checkpoint.half_steps(keys).shape == shown.shape
            count += 1
    return count


def overdue(*_: Any) -> None:
    raise TimeoutError("more seconds than it may take")


def judge(tally: Tally, path: Path) -> None:
    """Open one file and take down what happened."""
    began = time.perf_counter()
    signal.signal(signal.SIGALRM, overdue)
    signal.alarm(LIMIT)
    try:
        with watched() as seen:
            examine(path)
        tally.accepted += 1
    except Refusal as refusal:
        tally.refused += 1
        tally.reasons[str(refusal.args[2]).split("'")[0][:40]] += 1
        line = str(refusal)
        if refusal.code not in (2, 5) or not all(refusal.args) or not line.isprintable():
            tally.crashes.append(f"unfit refusal: {line!r}")
    except Exception as error:  # what must not happen, whatever it is
        tally.crashes.append(f"{type(error).__name__}: {error}")
    finally:
        signal.alarm(0)
    tally.executions += seen
    tally.count += 1
    tally.slowest = max(tally.slowest, time.perf_counter() - began)


Keep = Callable[[int, bytes], None]


def run(what: str, files: Iterator[bytes], place: Path, keep: Keep | None = None) -> Tally:
    """Judge files one after the other at one place: that of a checkpoint, or in its folder."""
    tally = Tally(what)
    part = place.name.endswith((".index.json", ".metadata", ".distcp", "_states.pt"))
    target = place.parent if part else place
    for i, data in enumerate(files):
        place.write_bytes(data)
        before = len(tally.crashes) + len(tally.executions)
        judge(tally, target)
        if keep and len(tally.crashes) + len(tally.executions) > before:
            keep(i, data)
    return tally


def shards(folder: Path) -> Path:
    """A folder of sound shards, with a link out of it and a folder inside; where its index goes."""
    checkpoint_files.sharded(folder)
    (folder / "config.json").write_text("{}")
    (folder / "folder").mkdir()
    (folder / "out.safetensors").symlink_to("/etc/hostname")
    return folder / "model.safetensors.index.json"


def layouts() -> Tally:
    """The layouts that must be accepted, with all their tensors."""
    tally = Tally("benign layouts")
    for name, (layout, count) in checkpoint_files.BENIGN.items():
        with tempfile.TemporaryDirectory() as folder:
            path = layout(Path(folder))
            judge(tally, path)
            if not tally.refused and (found := examine(path)) != count:
                tally.crashes.append(f"{name}: {found} tensors instead of {count}")
    return tally


def warm_up() -> None:
    """Do once what imports modules when it is first done."""
    with tempfile.TemporaryDirectory() as folder:
        for layout, _ in checkpoint_files.BENIGN.values():
            inner = Path(tempfile.mkdtemp(dir=folder))
            examine(layout(inner))
    torch.save({}, io.BytesIO())
    random.seed()


def refused(path: Path, *words: str) -> str:
    """The line with which a path is refused, once it has these words and keeps the contract."""
    with pytest.raises(Refusal) as refusal:
        examine(path)
    code, given, wrong, advice = refusal.value.args
    assert code == 2
    assert given
    assert wrong
    assert advice
    line = str(refusal.value)
    assert line.isprintable()
    assert len(line.replace(str(path), "")) < 200
    for word in words:
        assert word in line
    return line


def sound(tally: Tally) -> bool:
    """Whether some files were refused and some accepted, once none did what it should not."""
    assert not tally.crashes
    assert not tally.executions
    return tally.refused > 0 < tally.accepted
