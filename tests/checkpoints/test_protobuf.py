"""The wire format: fields as the format's own document has them, and lists of numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_files import put
from kappascope.checkpoints import protobuf
from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.locations import CheckpointFile
from kappascope.checkpoints.protobuf import VariableLength, WireReader, span_of


def wire(folder: Path, data: bytes) -> WireReader:
    return WireReader(CheckpointFile.at(put(folder, data, "x")))


def varint(number: int) -> bytes:
    """A number seven bits at a time, the lowest first; all but the last byte have their top bit."""
    number %= 1 << 64
    last, rest = number & 127, number >> 7
    return bytes([last | 128]) + varint(rest) if rest else bytes([last])


def test_the_examples_of_the_format(tmp_path: Path) -> None:
    """150 in field 1 is 08 96 01, "testing" in field 2 is 12 07 and its letters."""
    data = bytes.fromhex("089601") + b"\x12\x07testing" + b"\x1d\0\0\0\0" + b"\x21" + bytes(8)
    reader = wire(tmp_path, data)
    fields = list(reader.fields((0, len(data))))
    assert fields == [(1, 150), (2, (5, 12)), (3, (13, 17)), (4, (18, 26))]
    assert reader.text(fields[1][1]) == "testing"


@settings(max_examples=50, deadline=None)
@given(numbers=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=50), panel=st.integers(10, 40))
def test_lists_of_numbers_come_back(numbers: list[int], panel: int) -> None:
    data = b"".join(map(varint, numbers))
    stored = torch.frombuffer(bytearray(data or b"\0"), dtype=torch.uint8)[: len(data)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protobuf, "_PANEL", panel)
        code = VariableLength(torch.int64, (len(numbers),), turned=False)
        assert code.decode(stored).tolist() == numbers
        for count in {0, len(numbers) - 1, len(numbers) + 1} - {len(numbers), -1}:
            with pytest.raises(Malformed, match="number"):
                VariableLength(torch.int64, (count,), turned=False).decode(stored)


@pytest.mark.parametrize("data", [b"\x80", b"\xff" * 11, b"\x0b", b"\x12\x05ab", b"\x09abc"])
def test_damage_is_refused(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(Malformed, match=r"truncated|damaged"):
        list(wire(tmp_path, data).fields((0, len(data))))


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data: Any = b"\x12" + varint(protobuf.LONGEST_TEXT + 1) + bytes(protobuf.LONGEST_TEXT + 1)
    reader = wire(tmp_path, data)
    ((_, span),) = reader.fields((0, len(data)))
    with pytest.raises(Malformed, match="a name of"):
        reader.text(span)
    with pytest.raises(Malformed, match="a number where"):
        span_of(3)
    monkeypatch.setattr(protobuf, "MOST_FIELDS", 3)
    with pytest.raises(Malformed, match="more than 3 fields"):
        list(wire(tmp_path, b"\x08\x01" * 4).fields((0, 8)))
