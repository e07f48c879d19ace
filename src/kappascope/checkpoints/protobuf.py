"""The wire format of protobuf messages, walked from field to field without loading them.

A message is fields one after the other: a number that tells which field it is and how long, then
its content, which may be a message again. Lengths in it may lie, so every field must end where the
message around it ends, and a file has only so many of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from kappascope.checkpoints.codes import Code
from kappascope.checkpoints.formats import AGAIN, Malformed
from kappascope.checkpoints.locations import CheckpointFile, uninitialized

MOST_FIELDS = 5_000_000  # of a file: a graph of 100,000 nodes has a million
LONGEST_TEXT = 1 << 16  # bytes of a name
_WINDOW = LONGEST_TEXT  # bytes of the file read at a time, so that a text fits
_PANEL = 1 << 19  # bytes of numbers of variable length that are decoded together

Span: TypeAlias = tuple[int, int]
"""Where a field of some length begins and ends in the file."""


@dataclass
class WireReader:
    """Go through a file from field to field."""

    file: CheckpointFile
    count: int = 0  # of fields so far
    window: bytes = b""
    begin: int = 0  # of the window in the file

    def fields(self, span: Span) -> Iterator[tuple[int, Any]]:
        """Yield the fields of a message: the number, and a whole number or a span."""
        at, end = span
        while at < end:
            self.count += 1
            if self.count > MOST_FIELDS:
                raise Malformed(f"more than {MOST_FIELDS} fields", "give the weights alone")
            tag, at = self.varint(at, end)
            number, wire = tag >> 3, tag & 7
            if wire == 0:
                value, at = self.varint(at, end)
                yield number, value
                continue
            if wire == 2:
                size, at = self.varint(at, end)
            elif wire in (1, 5):
                size = 8 if wire == 1 else 4
            else:
                raise Malformed(f"damaged: a field of kind {wire} at byte {at}", AGAIN)
            if size > end - at:
                raise Malformed(f"truncated: need {at + size} bytes, have {end}", AGAIN)
            yield number, (at, at + size)
            at += size

    def varint(self, at: int, end: int) -> tuple[int, int]:
        """Return a number of variable length, and where it ends."""
        value = 0
        for shift in range(0, 70, 7):
            if at >= end:
                raise Malformed(f"truncated: a number is cut off at byte {at}", AGAIN)
            (byte,) = self._bytes(at, at + 1)
            at += 1
            value |= (byte & 127) << shift
            if byte < 128:
                return value, at
        raise Malformed(f"damaged: a number of more than ten bytes at byte {at}", AGAIN)

    def text(self, value: Any) -> str:
        """Return the text that a field is."""
        begin, end = span_of(value)
        if end - begin > LONGEST_TEXT:
            raise Malformed(f"a name of {end - begin} bytes", AGAIN)
        return self._bytes(begin, end).decode("utf-8", "backslashreplace")

    def _bytes(self, begin: int, end: int) -> bytes:
        if begin < self.begin or end > self.begin + len(self.window):
            self.begin, self.window = begin, self.file.read(begin, _WINDOW)
        return self.window[begin - self.begin : end - self.begin]

    def varints(self, value: Any, most: int) -> list[int]:
        """Return a list of numbers of variable length, or the first of more than ``most``."""
        if isinstance(value, int):
            return [value]
        at, end = span_of(value)
        numbers: list[int] = []
        while at < end and len(numbers) <= most:
            number, at = self.varint(at, end)
            numbers.append(number)
        return numbers


def span_of(value: Any) -> Span:
    """Return where a field lies that must not be a plain number."""
    if not isinstance(value, tuple):
        raise Malformed("damaged: a number where a message should be", AGAIN)
    return value


@dataclass(frozen=True)
class VariableLength(Code):
    """Numbers of as many bytes as they need, seven bits in each: how ONNX lists whole numbers.

    Those of sixteen or eight bits are listed by their bits. Nothing is rounded.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]  # as it is listed
    turned: bool  # whether its transpose is the weight

    @property
    def name(self) -> str:
        """An empty name: the numbers are stored as they are, in another form."""
        return ""

    def decode(self, *stored: Tensor) -> Tensor:
        """Return the numbers, some at a time."""
        data, at, done = stored[0].numpy(), 0, 0
        count = prod(self.shape)
        numbers = uninitialized((count,), self.dtype)
        while at < len(data):
            part = data[at : at + _PANEL]
            ends = np.flatnonzero(part < 128)
            begins = np.concatenate([[0], ends[:-1] + 1])
            if not len(ends) or (ends - begins).max() > 9 or done + len(ends) > count:
                raise Malformed("its list of numbers is damaged", AGAIN)
            part = part[: ends[-1] + 1]
            place = np.arange(len(part)) - np.repeat(begins, ends - begins + 1)
            bits = (part & 127).astype(np.uint64) << (7 * place).astype(np.uint64)
            values = torch.from_numpy(np.bitwise_or.reduceat(bits, begins).view(np.int64))
            numbers[done : done + len(ends)] = self._typed(values)
            done, at = done + len(ends), at + len(part)
        if done < count:
            raise Malformed(f"{done} numbers, its shape needs {count}", AGAIN)
        whole = numbers.view(self.shape)
        return whole.T if self.turned else whole

    def half_steps(self, *stored: Tensor) -> Tensor:
        """Return zeros, for nothing was rounded."""
        return torch.zeros(prod(self.shape))

    def _typed(self, values: Tensor) -> Tensor:
        if not self.dtype.is_floating_point:
            return values.to(self.dtype)
        return values.to({1: torch.uint8, 2: torch.int16}[self.dtype.itemsize]).view(self.dtype)
