"""GGUF files, as llama.cpp writes them: a header that is taken apart here, and codes of many types.

The header is parsed by us, within limits, for a length in it may be anything. Codes are decoded by
the ``gguf`` package (the extra ``kappascope[gguf]``), a panel of rows at a time. Names are those of
the file (``blk.0.attn_q.weight``). Two conventions of llama.cpp are known: it stores the rows of
queries and keys of some architectures in the order in which it rotates them, which is undone here,
and it adds one to the norm gains of others, which is said in a note.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kappascope.checkpoints.codes import Code, CodedLocation, enlarged, panels
from kappascope.checkpoints.formats import AGAIN, Malformed, quoted
from kappascope.checkpoints.locations import (
    CheckpointFile,
    FileContents,
    StorageLocation,
    TensorLocation,
)
from kappascope.checkpoints.safetensors import MOST_TENSORS
from kappascope.model.skipped import Reason, unreadable

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # the first counted in 32 bits and has not been written since 2023
MOST_SETTINGS = 100_000  # beside tensors; models in use have fewer than a hundred
LONGEST_NAME = 1 << 16  # bytes of a key or a tensor's name: the format's own limit
LONGEST_TEXT = 1 << 26  # bytes of a value; chat templates have a few thousand
MOST_DIMENSIONS = 4

_CHUNK = 1 << 20  # bytes of the header read at a time
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q",
            12: "d"}  # fmt: skip
_TEXT, _ARRAY = 8, 9

# Numbers that are stored as they are.
_PLAIN = {0: torch.float32, 1: torch.float16, 24: torch.int8, 25: torch.int16, 26: torch.int32,
          27: torch.int64, 28: torch.float64, 30: torch.bfloat16}  # fmt: skip


class _Step(NamedTuple):
    """Where a block keeps its codes, two bytes that give the ends of its levels, and the steps."""

    codes: slice
    low: int
    high: int
    divisor: float  # the distance of the two ends, over the largest half step between them


class _Type(NamedTuple):
    name: str
    block: int  # numbers in a block
    bytes: int  # that a block takes
    step: _Step | None = None  # none: the codes of several numbers are chosen together


# An evenly spaced code of n levels has half a step of its range over 2 (n - 1). The sixteen levels
# of IQ4 are -127 ... 89, 113, so the largest half step is 12 of 240; those of the four-bit floats
# are 0, 1, 2, 3, 4, 6, 8, 12 and their negatives, so it is 2 of 24.
_TYPES = {
    2: _Type("Q4_0", 32, 18, _Step(slice(2, 18), 0, 255, 30)),
    3: _Type("Q4_1", 32, 20, _Step(slice(4, 20), 0, 255, 30)),
    6: _Type("Q5_0", 32, 22, _Step(slice(2, 22), 0, 255, 62)),
    7: _Type("Q5_1", 32, 24, _Step(slice(4, 24), 0, 255, 62)),
    8: _Type("Q8_0", 32, 34, _Step(slice(2, 34), 128, 127, 510)),
    10: _Type("Q2_K", 256, 84, _Step(slice(16, 80), 0, 255, 6)),
    11: _Type("Q3_K", 256, 110, _Step(slice(0, 96), 0, 255, 14)),
    12: _Type("Q4_K", 256, 144, _Step(slice(16, 144), 0, 255, 30)),
    13: _Type("Q5_K", 256, 176, _Step(slice(16, 176), 0, 255, 62)),
    14: _Type("Q6_K", 256, 210, _Step(slice(0, 192), 0, 255, 126)),
    16: _Type("IQ2_XXS", 256, 66),
    17: _Type("IQ2_XS", 256, 74),
    18: _Type("IQ3_XXS", 256, 98),
    19: _Type("IQ1_S", 256, 50),
    20: _Type("IQ4_NL", 32, 18, _Step(slice(2, 18), 0, 255, 20)),
    21: _Type("IQ3_S", 256, 110),
    22: _Type("IQ2_S", 256, 82),
    23: _Type("IQ4_XS", 256, 136, _Step(slice(8, 136), 0, 255, 20)),
    29: _Type("IQ1_M", 256, 56),
    34: _Type("TQ1_0", 256, 54, _Step(slice(0, 52), 0, 255, 4)),
    35: _Type("TQ2_0", 256, 66, _Step(slice(0, 64), 0, 255, 6)),
    39: _Type("MXFP4", 32, 17, _Step(slice(1, 17), 0x77, 0xFF, 12)),
    40: _Type("NVFP4", 64, 36, _Step(slice(4, 36), 0x77, 0xFF, 12)),
}
# Types that llama.cpp knows and nobody stores weights in, or that it has not anymore.
_UNDECODED = {4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 15: "Q8_K", 31: "Q4_0_4_4", 32: "Q4_0_4_8",
              33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8",
              41: "Q1_0"}  # fmt: skip

CODEBOOK = 32  # numbers that share a scale, at the most, where codes stand for several at once

# Whose queries and keys llama.cpp stores in the order of its rotations, and whose gains have one
# added: what its converter does for these architectures.
_ROTATED = {"llama", "llama4", "baichuan", "xverse", "minicpm", "granite", "granitemoe", "deci",
            "olmo", "arctic"}  # fmt: skip
_PLUS_ONE = {"gemma", "gemma2", "gemma3"}

# What a header calls the facts that a config.json tells.
_CONFIG = {
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_local_experts",
    "vocab_size": "vocab_size",
}


def read_gguf(file: CheckpointFile) -> FileContents:
    """Return what a GGUF file holds; its numbers are read when they are asked for."""
    header = _Header(file)
    settings, entries = header.settings(), []
    if header.tensors > MOST_TENSORS:
        wrong = f"{header.tensors} tensors, more than {MOST_TENSORS}"
        raise Malformed(wrong, "give a part of the model")
    for _ in range(header.tensors):
        entries.append(header.entry())
    if len({entry.name for entry in entries}) < len(entries):
        raise Malformed("two tensors of one name", AGAIN)
    alignment = settings.get("general.alignment", 32)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise Malformed(f"an alignment of {quoted(str(alignment))}, no power of two", AGAIN)
    begin = -(-header.position // alignment) * alignment
    _check_places(entries, begin, alignment, file.size)
    config = _config(settings)
    rotated = config.get("model_type") in _ROTATED
    tree = {entry.name: _leaf(entry, file, begin, config, rotated) for entry in entries}
    notes = ("one is added to the gains of norms in it",)
    return FileContents(tree, {}, config, notes if config.get("model_type") in _PLUS_ONE else ())


@dataclass(frozen=True)
class _Entry:
    name: str
    shape: tuple[int, ...]  # rows first, as torch has it
    type: int
    offset: int

    @property
    def size(self) -> int | None:
        """Bytes that the tensor takes, if its type is known and its rows are whole blocks."""
        if self.type in _PLAIN:
            return prod(self.shape) * _PLAIN[self.type].itemsize
        code = _TYPES.get(self.type)
        if code is None or (self.shape and self.shape[-1] % code.block):
            return None
        return prod(self.shape) // code.block * code.bytes


@dataclass
class _Header:
    """Read a header from its beginning to its end, a chunk at a time."""

    file: CheckpointFile
    position: int = 0
    tensors: int = 0
    count: int = 0
    chunk: bytes = b""
    begin: int = 0  # of the chunk in the file
    known: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.take(4) != MAGIC:
            raise Malformed("not a GGUF file", AGAIN)
        (version,) = self.unpack("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            what = "a big-endian GGUF file" if swapped else f"version {version} of GGUF"
            raise Malformed(what, "convert it again with llama.cpp")
        self.tensors, self.count = self.unpack("QQ")
        if self.count > MOST_SETTINGS:
            raise Malformed(f"a header of {self.count} settings", AGAIN)

    def take(self, size: int) -> bytes:
        """Return the next bytes of the header."""
        if size > self.file.size - self.position:
            need = self.position + size
            raise Malformed(f"truncated: need {need} bytes, have {self.file.size}", AGAIN)
        start = self.position - self.begin
        if start + size > len(self.chunk):
            self.begin = self.position
            self.chunk, start = self.file.read(self.position, max(size, _CHUNK)), 0
        self.position += size
        return self.chunk[start : start + size]

    def unpack(self, form: str) -> tuple[Any, ...]:
        """Return the next little-endian numbers of a form, as :mod:`struct` names it."""
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}")))

    def text(self, longest: int) -> str:
        """Return the next text: its length, then its bytes."""
        (length,) = self.unpack("Q")
        if length > longest:
            raise Malformed(f"a text of {length} bytes in its header", AGAIN)
        try:
            return self.take(length).decode()
        except UnicodeDecodeError:
            raise Malformed("a text in its header is not UTF-8", AGAIN) from None

    def settings(self) -> dict[str, Any]:
        """Return the settings that are one number or a short text; lists are passed over."""
        for _ in range(self.count):
            key = self.text(LONGEST_NAME)
            (kind,) = self.unpack("I")
            if key in self.known:
                raise Malformed(f"duplicate setting {quoted(key)}", AGAIN)
            self.known[key] = self._value(kind)
        return self.known

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.unpack(_NUMBERS[kind])[0]
        if kind == _TEXT:
            return self.text(LONGEST_TEXT)
        if kind != _ARRAY:
            raise Malformed(f"a setting of unknown type {kind}", AGAIN)
        inner, length = self.unpack("IQ")
        if inner in _NUMBERS:
            self._skip(length * struct.calcsize(f"<{_NUMBERS[inner]}"))
        elif inner == _TEXT:
            for _ in range(length):  # each takes eight bytes of the file at least
                self._skip(self.unpack("Q")[0])
        else:
            raise Malformed("a list of lists in its header", AGAIN)
        return None

    def _skip(self, size: int) -> None:
        if size > self.file.size - self.position:
            wrong = f"truncated: need {self.position + size} bytes, have {self.file.size}"
            raise Malformed(wrong, AGAIN)
        self.position += size

    def entry(self) -> _Entry:
        """Return the next tensor: its name, sizes (columns first), type and place."""
        name = self.text(LONGEST_NAME)
        (dimensions,) = self.unpack("I")
        if not 0 < dimensions <= MOST_DIMENSIONS:
            raise Malformed(f"tensor {quoted(name)} has {dimensions} dimensions", AGAIN)
        sizes = self.unpack(f"{dimensions}Q")
        kind, offset = self.unpack("IQ")
        if prod(max(size, 1) for size in sizes) >= 1 << 63:
            raise Malformed(f"tensor {quoted(name)}: its shape {list(sizes)} overflows", AGAIN)
        if kind not in _PLAIN and kind not in _TYPES and kind not in _UNDECODED:
            raise Malformed(f"tensor {quoted(name)} is of unknown type {kind}", "update kappascope")
        return _Entry(name, tuple(sizes[::-1]), kind, offset)


def _check_places(entries: list[_Entry], begin: int, alignment: int, size: int) -> None:
    """Refuse tensors that overlap, leave a hole or lie outside the file.

    After a tensor of a type whose size is not known here, places can only be bounded.
    """
    end: int | None = 0
    for entry in entries:
        if entry.offset % alignment or (end is not None and entry.offset != end):
            raise Malformed(f"tensor {quoted(entry.name)} is not where it should be", AGAIN)
        if entry.size is None and entry.type in _TYPES:
            wrong = f"its rows of {entry.shape[-1]} are not whole blocks"
            raise Malformed(f"tensor {quoted(entry.name)}: {wrong}", AGAIN)
        last = begin + entry.offset + (entry.size or 0)
        if last > size:
            raise Malformed(f"truncated: need {last} bytes, have {size}", AGAIN)
        end = None
        if entry.size is not None:
            end = -(-(entry.offset + entry.size) // alignment) * alignment


def _config(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a header by the names that a ``config.json`` has for them."""
    architecture = settings.get("general.architecture")
    if not isinstance(architecture, str):
        return {}
    facts = {name: settings.get(f"{architecture}.{key}") for key, name in _CONFIG.items()}
    known = {name: fact for name, fact in facts.items() if fact is not None}
    return {"model_type": architecture, **known}


def _leaf(
    entry: _Entry, file: CheckpointFile, begin: int, config: Mapping[str, Any], rotated: bool
) -> TensorLocation | CodedLocation | Reason:
    """Return where a tensor lies and how it is read, or why it cannot be."""
    if entry.type in _UNDECODED:
        return unreadable(f"quantized {_UNDECODED[entry.type]}: not decoded")
    code: _Type | None = _TYPES.get(entry.type)
    location = StorageLocation(file, begin + entry.offset, entry.size or 0)
    rows, columns = prod(entry.shape[:-1]), entry.shape[-1]
    heads = _heads(entry, config) if rotated else 0
    if code is None:
        dtype = _PLAIN[entry.type]
        strides = tuple(prod(entry.shape[i + 1 :]) for i in range(len(entry.shape)))
        plain = TensorLocation(location, dtype, entry.shape, strides)
        if fault := plain.fault():
            return unreadable(fault)
        return CodedLocation((plain,), RotatedRows(heads), entry.shape, dtype) if heads else plain
    if find_spec("gguf") is None:
        return unreadable(f"quantized {code.name}: needs pip install 'kappascope[gguf]'")
    length = columns // code.block * code.bytes
    blocks = TensorLocation(location, torch.uint8, (rows, length), (length, 1))
    if fault := blocks.fault():
        return unreadable(fault)
    return CodedLocation((blocks,), GgufCode(entry.type, heads), entry.shape)


def _heads(entry: _Entry, config: Mapping[str, Any]) -> int:
    """Return the heads whose rows were put into the order of rotations, or 0."""
    queries = config.get("num_attention_heads")
    keys = config.get("num_key_value_heads", queries)
    heads = {"attn_q.weight": queries, "attn_k.weight": keys}
    count = heads.get(entry.name.split(".", 2)[-1])
    if type(count) is not int or count < 1 or len(entry.shape) != 2 or entry.shape[0] % (2 * count):
        return 0
    return count


def in_order(rows: Tensor, heads: int) -> Tensor:
    """Return rows in the order of the original, halves of each head in place of pairs.

    >>> in_order(torch.tensor([[0], [2], [1], [3]]), heads=1).flatten().tolist()
    [0, 1, 2, 3]
    """
    if not heads:
        return rows
    half = rows.shape[0] // heads // 2
    pairs = rows.reshape(heads, half, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class RotatedRows(Code):
    """Plain numbers whose rows are stored in the order in which llama.cpp rotates them."""

    heads: int

    @property
    def name(self) -> str:
        """An empty name: the numbers themselves are not coded."""
        return ""

    def decode(self, *stored: Tensor) -> Tensor:
        """Return the rows in the order of the original."""
        return in_order(stored[0], self.heads)

    def half_steps(self, *stored: Tensor) -> Tensor:
        """Return zeros; the dtype tells how far such numbers were rounded."""
        return torch.zeros_like(stored[0])


@dataclass(frozen=True)
class GgufCode(Code):
    """One of the block codes of llama.cpp, decoded by its own package."""

    type: int
    heads: int = 0

    @property
    def name(self) -> str:
        """The name that llama.cpp has for it."""
        return _TYPES[self.type].name

    def decode(self, *stored: Tensor) -> Tensor:
        """Return the numbers of all blocks, row by row."""
        (blocks,) = stored
        decoded = torch.empty(self._shape(blocks), dtype=torch.float32)
        for rows in panels(*decoded.shape):
            decoded[rows] = torch.from_numpy(self._decoded(blocks[rows].numpy()))
        return in_order(decoded, self.heads)

    def half_steps(self, *stored: Tensor) -> Tensor:
        """Return half the largest step of each number's levels.

        Where the codes of several numbers are chosen together there is no step: there the largest
        number under the same scale stands for it, which no error of rounding exceeds.
        """
        (blocks,) = stored
        steps, step = torch.empty(self._shape(blocks), dtype=torch.bfloat16), _TYPES[self.type].step
        for rows in panels(*steps.shape):
            panel = blocks[rows].numpy()
            half = self._largest(panel) if step is None else self._step(panel, step)
            steps[rows] = enlarged(torch.from_numpy(half))
        return in_order(steps, self.heads)

    def _shape(self, blocks: Tensor) -> tuple[int, int]:
        code = _TYPES[self.type]
        return blocks.shape[0], blocks.shape[1] // code.bytes * code.block

    def _decoded(self, panel: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        from gguf import GGMLQuantizationType, dequantize

        with np.errstate(all="ignore"):  # a hostile scale may be infinite: that is told later
            return np.asarray(dequantize(panel, GGMLQuantizationType(self.type)))

    def _step(self, panel: np.ndarray[Any, Any], step: _Step) -> np.ndarray[Any, Any]:
        ends = []
        for byte in (step.low, step.high):
            blocks = panel.reshape(-1, _TYPES[self.type].bytes).copy()
            blocks[:, step.codes] = byte
            ends.append(self._decoded(blocks.reshape(panel.shape)))
        with np.errstate(all="ignore"):
            return np.abs(ends[1] - ends[0]) / np.float32(step.divisor)

    def _largest(self, panel: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        decoded = self._decoded(panel)
        groups = np.abs(decoded).reshape(-1, CODEBOOK)
        return np.repeat(groups.max(1), CODEBOOK).reshape(decoded.shape)
