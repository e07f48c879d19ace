"""Numbers of a few bits times scales: what eight-bit, MX and Nvidia's formats have in common.

A number is an integer or a float of four, six or eight bits. Those of the whole tensor, of a row
or of a block have one scale, and a second one may belong to the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, log2

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.checkpoints.codes import Code, enlarged, panels
from kappascope.matrix.precision import half_ulps

MX_BLOCK = 32  # numbers that share a power of two in the formats that are called MX
# The magnitudes of floats without infinities: of exponent two bits, behind the point one or three.
FLOAT_LEVELS = {
    "float4": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    "float6": (*(m / 8 for m in range(8)),
               *((1 + m / 8) * 2**e for e in range(3) for m in range(8))),
}  # fmt: skip
_TILE = 128, 4  # scales that Nvidia's matrix units load at once
_TILE_ROWS = 32  # of a tile as it is stored, each with the scales of four rows


def block_of(
    shape: Sequence[int], counts: Sequence[int], told: Sequence[tuple[int, int]] = ()
) -> tuple[int, int] | None:
    """Return how many rows and columns of a matrix share a scale, by the numbers of scales.

    The last block of a row or column may be cut: then a config has to tell how large blocks are, or
    they are taken for the power of two that fits.

    >>> block_of((576, 256), (5, 2)), block_of((576, 256), (5, 2), told=[(64, 64)])
    ((128, 128), None)
    """
    for block in told:
        if all(ceil(n / b) == count for n, b, count in zip(shape, block, counts, strict=True)):
            return block
    sizes = []
    for n, count in zip(shape, counts, strict=True):
        if not 0 < count <= n or (told and count not in (1, n)):
            return None
        powers = [1 << k for k in range(n.bit_length() + 1) if ceil(n / (1 << k)) == count]
        even = [n // count] if n % count == 0 else []
        own = [n] if count == 1 else [1] if count == n else powers or even
        if not own:
            return None
        sizes.append(own[0])
    return sizes[0], sizes[1]


@dataclass(frozen=True)
class ScaledNumbers(Code):
    """Numbers times scales, ``block`` of which share a scale: rows and columns.

    ``number`` names a dtype of torch or one of `FLOAT_LEVELS`. Scales are stored as ``plain``
    numbers, as the exponents of a ``power`` of two, or as the bits of ``e4m3`` floats;
    ``swizzled`` in the order of Nvidia's matrix units. They are divided by ``divisor``:
    bitsandbytes stores the largest number of a row, of which 127 is the code. With ``has_zeros``
    the code of zero follows them. Last comes the scale of the ``whole``, ``times`` or ``over``
    which they are.
    """

    number: str
    block: tuple[int, int]
    scale: str = "plain"
    divisor: float = 1.0
    has_zeros: bool = False
    whole: str = ""
    swizzled: bool = False
    title: str = ""

    @property
    def name(self) -> str:
        """The name of the format, or of the numbers."""
        return self.title or f"{self.number} with scales"

    def decode(self, *stored: Tensor) -> Float[Tensor, "rows columns"]:
        """Return number times scale."""
        return self._by_rows(stored, torch.float32, lambda numbers, scales: numbers * scales)

    def half_steps(self, *stored: Tensor) -> Float[Tensor, "rows columns"]:
        """Return half the distance to the next number, times the scale."""
        return self._by_rows(
            stored,
            torch.bfloat16,
            lambda numbers, scales: enlarged(self._half_steps(numbers) * scales.abs()),
        )

    def _half_steps(self, numbers: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Return half the wider of the steps to both neighbours.

        A power of two is rounded down, so that what lies between the largest number and the next
        power is cut off to that number.
        """
        if self.number in FLOAT_LEVELS:
            levels = torch.tensor(FLOAT_LEVELS[self.number])
            gaps = levels.diff()
            wider = torch.cat([gaps[:1], torch.maximum(gaps[:-1], gaps[1:]), gaps[-1:]])
            steps = wider[torch.searchsorted(levels, numbers.abs())] / 2
            top = float(levels[-1])
        else:
            dtype = getattr(torch, self.number)
            if not dtype.is_floating_point:
                return torch.full_like(numbers, 0.5)
            steps = half_ulps(numbers.double(), dtype).float()
            top = torch.finfo(dtype).max
        if self.scale == "power":
            steps[numbers.abs() == top] = 2.0 ** ceil(log2(top)) - top
        return steps

    def _by_rows(
        self,
        stored: tuple[Tensor, ...],
        dtype: torch.dtype,
        of: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        """Return a function of number and scale of every entry, a panel of rows at a time."""
        numbers, scales, *more = stored
        numbers = numbers.contiguous().flatten(0, -2)
        columns = numbers[:1].view(torch.uint8).shape[1] * 8 // self._bits
        height, width = self.block
        scales = self._scales(scales, ceil(len(numbers) / height), ceil(columns / width))
        zeros = more.pop(0).float().reshape(scales.shape) if self.has_zeros else None
        whole = more.pop(0).float().flatten() if self.whole else torch.ones(1)
        each = whole.repeat_interleave(len(numbers) // len(whole))[:, None]
        result = torch.empty(len(numbers), columns, dtype=dtype)
        for rows in panels(len(numbers), columns, multiple=height):
            count = rows.stop - rows.start

            def spread(parts: Tensor, rows: slice = rows, count: int = count) -> Tensor:
                lines = parts[rows.start // height : ceil(rows.stop / height)]
                lines = lines.repeat_interleave(height, 0)[:count]
                return lines.repeat_interleave(width, 1)[:, :columns]

            own = spread(scales)
            own = own / each[rows] if self.whole == "over" else own * each[rows]
            values = self._floats(numbers[rows])
            result[rows] = of(values if zeros is None else values - spread(zeros), own)
        return result

    @property
    def _bits(self) -> int:
        """The bits of a number."""
        widths = {"float4": 4, "float6": 6}
        return widths.get(self.number) or 8 * getattr(torch, self.number).itemsize

    def _floats(self, numbers: Tensor) -> Float[Tensor, "rows columns"]:
        """Return the numbers of some rows, in which the first lies in the lowest bits."""
        if self.number not in FLOAT_LEVELS:
            return numbers.view(getattr(torch, self.number)).float()
        data = numbers.view(torch.uint8).int()
        if self.number == "float4":
            codes = torch.stack([data & 15, data >> 4], dim=-1).flatten(1)
        else:
            a, b, c = data.unflatten(1, (-1, 3)).unbind(-1)
            word = a | b << 8 | c << 16
            codes = torch.stack([word >> k & 63 for k in (0, 6, 12, 18)], dim=-1).flatten(1)
        levels = torch.tensor(FLOAT_LEVELS[self.number])
        return torch.cat([levels, -levels])[codes]

    def _scales(self, scales: Tensor, rows: int, columns: int) -> Float[Tensor, "rows columns"]:
        """Return the scales of all blocks."""
        if self.scale == "power":
            powers = power_of_two(scales.contiguous().view(torch.uint8))
        elif self.scale == "e4m3":
            powers = scales.contiguous().view(torch.float8_e4m3fn).float()
        else:
            powers = scales.float() / self.divisor
        if self.swizzled:
            return unswizzled(powers.flatten(), rows, columns)
        return powers.reshape(-1, columns)


def power_of_two(exponents: Tensor) -> Float[Tensor, "*shape"]:
    """Return the powers of two that exponents stand for, 127 for one.

    >>> power_of_two(torch.tensor([126, 128], dtype=torch.uint8))
    tensor([0.5000, 2.0000])
    """
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def unswizzled(scales: Float[Tensor, " stored"], rows: int, columns: int) -> Tensor:
    """Return scales by row and column that are stored in tiles, as Nvidia's matrix units load them.

    A tile holds 128 rows of four; one of its 32 lines holds those of every 32nd row. Tiles are
    filled up where there are fewer.
    """
    high, wide = ceil(rows / _TILE[0]), ceil(columns / _TILE[1])
    tiles = scales.view(high, wide, _TILE_ROWS, -1, _TILE[1]).permute(0, 3, 2, 1, 4)
    return tiles.reshape(high * _TILE[0], wide * _TILE[1])[:rows, :columns]


@dataclass(frozen=True)
class TurnedExperts(Code):
    """MXFP4 as gpt-oss stores experts: (out, in), used (in, out) as they are without codes."""

    @property
    def name(self) -> str:
        """The name of the standard."""
        return "MXFP4"

    def decode(self, *stored: Tensor) -> Float[Tensor, experts in out]:
        """Return level times power of two."""
        return self._turned(stored, _MXFP4.decode)

    def half_steps(self, *stored: Tensor) -> Float[Tensor, experts in out]:
        """Return half the distance to the next level, times the power of two."""
        return self._turned(stored, _MXFP4.half_steps)

    def _turned(
        self, stored: tuple[Tensor, ...], of: Callable[..., Tensor]
    ) -> Float[Tensor, experts in out]:
        codes, powers = (part.flatten(0, 1) for part in stored)
        return of(codes.flatten(1), powers).view(*stored[1].shape[:2], -1).mT


_MXFP4 = ScaledNumbers("float4", (1, MX_BLOCK), "power")
