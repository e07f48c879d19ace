"""NumPy's files: one array (``.npy``) or an archive of them (``.npz``), without their pickles.

A header is the text of a Python dictionary, which is matched and not evaluated. Arrays of objects
are pickles and are not read.
"""

from __future__ import annotations

import re
from itertools import accumulate
from operator import mul
from pathlib import PurePath

import torch

from kappascope.checkpoints.formats import AGAIN, Malformed, quoted
from kappascope.checkpoints.locations import (
    CheckpointFile,
    FileContents,
    StorageLocation,
    TensorLocation,
    Tree,
)
from kappascope.checkpoints.zips import archive_members
from kappascope.model.skipped import Reason, unreadable

MAGIC = b"\x93NUMPY"
LONGEST_HEADER = 1 << 16  # bytes; NumPy itself reads no more than 10,000 of one nobody vouches for
_HEAD = 12 + LONGEST_HEADER  # of a file, so that all of its header is in it

_DTYPES = {
    "b1": torch.bool, "i1": torch.int8, "u1": torch.uint8, "i2": torch.int16, "u2": torch.uint16,
    "i4": torch.int32, "u4": torch.uint32, "i8": torch.int64, "u8": torch.uint64,
    "f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "c8": torch.complex64,
    "c16": torch.complex128,
}  # fmt: skip
# A key of a header and its value: a text, a list, a truth or a tuple of sizes.
_ITEM = r"\s*['\"](\w+)['\"]\s*:\s*('[^']*'|\"[^\"]*\"|\[[^\]]*\]|\w+|\([^()]*\))\s*"
_SHAPE = r"\(\)|\((?:\d{1,20},\s*)+(?:\d{1,20})?\)"  # a tuple of one has a comma


def read_npy(file: CheckpointFile) -> FileContents:
    """Return the one array of a file, by the name of the file without its end."""
    return FileContents({PurePath(file.path).stem: _array(file.whole, file.read(0, _HEAD))}, {})


def is_npz(file: CheckpointFile) -> bool:
    """Tell whether a zip archive is one of NumPy's, by the names of its members."""
    names = archive_members(file.whole)
    return bool(names) and all(name.endswith(".npy") for name in names)


def read_npz(file: CheckpointFile) -> FileContents:
    """Return the arrays of an archive by their names."""
    tree: Tree = {}
    for name, member in archive_members(file.whole).items():
        tree[name.removesuffix(".npy")] = _array(member, member.first(_HEAD))
    return FileContents(tree, {})


def _array(storage: StorageLocation, head: bytes) -> TensorLocation | Reason:
    """Return where the array of a storage lies, which begins with its header."""
    if head[:6] != MAGIC or len(head) < 12:
        raise Malformed("not a NumPy array, or truncated", AGAIN)
    wide = 2 if head[6] == 1 else 4  # bytes of the header's length, by the version
    length = int.from_bytes(head[8 : 8 + wide], "little")
    begin = 8 + wide + length
    if head[6] not in (1, 2, 3) or length > LONGEST_HEADER:
        raise Malformed(
            f"a NumPy array of version {head[6]} with a header of {length} bytes", AGAIN
        )
    if begin > len(head):
        raise Malformed(f"truncated: need {begin} bytes, have {len(head)}", AGAIN)
    kind, fortran, shape = _facts(head[8 + wide : begin])
    order, code = kind[:1], kind[1:]
    if code not in _DTYPES or order not in "<|=>":
        objects = "objects, which are pickled" if "O" in kind else f"dtype {quoted(kind)}"
        return unreadable(f"an array of {objects}")
    dtype = _DTYPES[code]
    if order == ">" and dtype.itemsize > 1:
        return unreadable("its numbers are big-endian")
    sizes = [max(size, 1) for size in shape]
    steps = sizes[:-1] if fortran else sizes[:0:-1]
    strides = tuple(accumulate(steps, mul, initial=1))[: len(shape)]
    strides = strides if fortran else strides[::-1]
    # NumPy fills headers up to a whole number of elements; MLX does not
    offset, skip = divmod(begin, dtype.itemsize)
    tensor = TensorLocation(storage, dtype, shape, strides, offset, skip)
    fault = tensor.fault()
    return unreadable(fault) if fault else tensor


def _facts(text: bytes) -> tuple[str, bool, tuple[int, ...]]:
    """Return dtype, order and shape from the text of a header."""
    header = text.decode("latin-1").strip()
    pairs = (
        re.findall(_ITEM, header)
        if re.fullmatch(rf"{{{_ITEM}(?:,{_ITEM})*(?:,\s*)?}}", header)
        else []
    )
    facts = dict(pairs)
    if len(pairs) != 3 or facts.keys() != {"descr", "fortran_order", "shape"}:
        raise Malformed("the header of a NumPy array cannot be understood", AGAIN)
    kind, fortran, shape = facts["descr"][1:-1], facts["fortran_order"], facts["shape"]
    if fortran not in ("True", "False") or not re.fullmatch(_SHAPE, shape):
        raise Malformed("the header of a NumPy array has no shape or order", AGAIN)
    sizes = tuple(int(size) for size in re.findall(r"\d+", shape))
    plain = facts["descr"][0] in "'\"" and re.fullmatch(r"[<>|=]\w{1,8}", kind)
    return (kind if plain else "|V"), fortran == "True", sizes
