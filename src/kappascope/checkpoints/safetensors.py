"""The header of a safetensors file, held to the letter of the format.

Eight bytes of length, a JSON object that says where each tensor lies, and then the tensors without
a hole, an overlap or a byte too many: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from functools import partial, reduce
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from kappascope.checkpoints.formats import AGAIN, LONGEST_HEADER, Malformed, quoted
from kappascope.checkpoints.locations import (
    CheckpointFile,
    FileContents,
    StorageLocation,
    TensorLocation,
    Tree,
)
from kappascope.model.skipped import Reason, unreadable

# The names of number formats, the bits a number takes, and torch's name (None: it has none).
_DTYPES: dict[str, tuple[int, torch.dtype | None]] = {
    "BOOL": (8, torch.bool),
    "F4": (4, None),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, torch.uint8),
    "I8": (8, torch.int8),
    "F8_E5M2": (8, torch.float8_e5m2),
    "F8_E4M3": (8, torch.float8_e4m3fn),
    "F8_E8M0": (8, torch.float8_e8m0fnu),
    "F8_E4M3FNUZ": (8, torch.float8_e4m3fnuz),
    "F8_E5M2FNUZ": (8, torch.float8_e5m2fnuz),
    "I16": (16, torch.int16),
    "U16": (16, torch.uint16),
    "F16": (16, torch.float16),
    "BF16": (16, torch.bfloat16),
    "I32": (32, torch.int32),
    "U32": (32, torch.uint32),
    "F32": (32, torch.float32),
    "C64": (64, torch.complex64),
    "F64": (64, torch.float64),
    "I64": (64, torch.int64),
    "U64": (64, torch.uint64),
}
_METADATA = "__metadata__"  # the one name in a header that is no tensor's
# The largest models have 140,000; as many as this take half an hour, however small they are.
MOST_TENSORS = 250_000
# A million tensors of four dimensions; more brackets and commas would only fill the memory.
_MOST_BRACKETS, _MOST_COMMAS = 4_000_000, 10_000_000


class _Entry(NamedTuple):
    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


def read_safetensors(file: CheckpointFile) -> FileContents:
    """Return what a safetensors file holds: its tensors in the order of its header, its metadata.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> header = b'{"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}'
    >>> with TemporaryDirectory() as folder:
    ...     path = Path(folder) / "one.safetensors"
    ...     _ = path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    ...     read_safetensors(CheckpointFile.at(path)).tree["w"].read()
    tensor([0.])
    """
    length = _length(file)
    header = parsed(file.read(8, length))
    metadata = header.pop(_METADATA, None)
    metadata = {} if metadata is None else metadata  # MLX writes null where it has none
    _check_metadata(metadata)
    check_count(header)
    entries = [_entry(name, value) for name, value in header.items()]
    _check_places(entries, 8 + length, file.size)
    tree: Tree = {entry.name: _leaf(entry, file, 8 + length) for entry in entries}
    return FileContents(tree, {}, metadata=metadata)


def parsed(text: bytes, what: str = "header") -> dict[str, Any]:
    """Return a JSON object, strictly: UTF-8, no name twice, no NaN, no end of brackets.

    >>> parsed(b'{"a": {}, "a": {}}')
    Traceback (most recent call last):
    kappascope.checkpoints.formats.Malformed: duplicate tensor name 'a' (download or save it again)
    """
    if sum(map(text.count, (b"[", b"{"))) > _MOST_BRACKETS or text.count(b",") > _MOST_COMMAS:
        raise Malformed("more than a million tensors", "split it into shards")
    unique = partial(_unique, tensor=dict if what == "header" else str)  # what a name leads to
    try:
        value = json.loads(
            text.decode("utf-8"), object_pairs_hook=unique, parse_constant=_no_number
        )
    except (ValueError, RecursionError) as error:
        why = "nested too deep" if isinstance(error, RecursionError) else "not valid JSON in UTF-8"
        raise Malformed(f"{what} is {why}", AGAIN) from error
    if not isinstance(value, dict):
        raise Malformed(f"{what} is not a JSON object", AGAIN)
    return value


def check_count(names: Collection[str]) -> None:
    """Refuse more tensors than can be examined in a reasonable time.

    >>> check_count(["a", "b"])
    """
    if len(names) > MOST_TENSORS:
        wrong = f"{len(names)} tensors, more than {MOST_TENSORS}"
        raise Malformed(wrong, "give a part of the model, or stack tensors of one shape")


def _unique(pairs: list[tuple[str, Any]], tensor: type) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
        named = isinstance(unique[twice], tensor) and twice != _METADATA
        raise Malformed(f"duplicate {'tensor ' if named else ''}name {quoted(twice)}", AGAIN)
    return unique


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _check_metadata(metadata: Any) -> None:
    texts = metadata.values() if isinstance(metadata, dict) else [None]
    if not all(isinstance(text, str) for text in texts):
        raise Malformed(f"{_METADATA} is not an object of texts", AGAIN)


def _length(file: CheckpointFile) -> int:
    """Return the length of the header, once there can be such a header."""
    start = file.read(0, 9)
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8:
        wrong = f"not a safetensors file, or truncated: need 8 bytes, have {len(start)}"
    elif length == 0:
        wrong = "not a safetensors file: header length 0"
    elif length > LONGEST_HEADER:
        wrong = f"not a safetensors file: header length {length} is over {LONGEST_HEADER}"
    elif 8 + length > file.size:
        wrong = f"truncated: need {8 + length} bytes for its header, have {file.size}"
    elif start[8:] != b"{":
        wrong = "not a safetensors file: its header does not begin with {"
    else:
        return length
    raise Malformed(wrong, AGAIN)


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0  # bool is an int to isinstance


def _entry(name: str, value: Any) -> _Entry:
    def malformed(wrong: str) -> Malformed:
        return Malformed(f"tensor {quoted(name)}: {wrong}", AGAIN)

    try:
        name.encode()
        dtype, shape, (begin, end) = value["dtype"], value["shape"], value["data_offsets"]
    except UnicodeEncodeError:
        raise malformed("its name is not valid Unicode") from None
    except (TypeError, KeyError, ValueError):
        raise malformed("expected dtype, shape and two data_offsets") from None
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise malformed(f"unknown dtype {quoted(dtype)}")
    if not isinstance(shape, list) or not all(map(_whole, shape)):
        raise malformed("its shape is not a list of whole numbers")
    if not (_whole(begin) and _whole(end) and begin <= end < 1 << 63):
        raise malformed("its offsets are not two rising whole numbers")
    # A tensor without numbers takes no bytes, whatever else its shape says: it alone is lost.
    count = 0 if 0 in shape else _product(shape)
    if count >= 1 << 64:
        raise malformed(f"its shape {quoted(str(shape))} overflows")
    bits = count * _DTYPES[dtype][0]
    if bits != 8 * (end - begin):
        raise malformed(f"{dtype} of shape {quoted(str(shape))} is not {end - begin} bytes long")
    return _Entry(name, dtype, shape, begin, end)


def _check_places(entries: list[_Entry], start: int, size: int) -> None:
    """Refuse a hole, an overlap, and what does not end where the file ends."""
    last = 0
    for entry in sorted(entries, key=lambda entry: (entry.begin, entry.end)):
        if entry.begin != last:
            wrong = "overlaps the one before it" if entry.begin < last else "comes after a hole"
            raise Malformed(f"tensor {quoted(entry.name)} {wrong}", AGAIN)
        last = entry.end
    if start + last > size:
        raise Malformed(f"truncated: need {start + last} bytes, have {size}", AGAIN)
    if start + last < size:
        after = quoted(max(entries, key=lambda entry: entry.end).name) if entries else "the header"
        raise Malformed(f"{size - start - last} bytes too many after {after}", AGAIN)


def _leaf(entry: _Entry, file: CheckpointFile, start: int) -> TensorLocation | Reason:
    dtype = _DTYPES[entry.dtype][1]
    if dtype is None:
        return unreadable(f"dtype {entry.dtype}: numbers of less than a byte are not unpacked")
    location = StorageLocation(file, start + entry.begin, entry.end - entry.begin)
    tensor = TensorLocation(location, dtype, tuple(entry.shape), tuple(_strides(entry.shape)))
    fault = tensor.fault()
    return unreadable(fault) if fault else tensor


def _strides(shape: list[int]) -> list[int]:
    """Return the steps between neighbours, the last index the fastest."""
    factors = (max(size, 1) for size in shape[:0:-1])
    return list(accumulate(factors, _times, initial=1))[len(shape) - 1 :: -1] if shape else []


def _product(shape: list[int]) -> int:
    """Tell how many numbers a tensor has."""
    return reduce(_times, shape, 1)


def _times(a: int, b: int) -> int:
    return min(a * b, 1 << 64)  # that is enough of an overflow: a file may name a million sizes
