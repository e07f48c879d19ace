"""What a layer does by its shape and its neighbours, where its name says nothing or misleads.

A language model's head has as many outputs as the table of tokens has rows, up to padding, and
stands outside the blocks. A router has as many outputs as there are experts beside it. A layer
called an embedding that has a bias, or writes what others read, is multiplied and not looked up. A
kernel of one input is depthwise where as many channels as it has outputs come before it.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from kappascope.model import names

# Tables whose rows are no tokens: positions, types of tokens, relative distances, steps in time.
_NO_TOKENS = re.compile(
    r"(^|[._])(pos\w*|wpe|types?|segments?|time\w*|rel|relative\w*|pe|cls|class)([._]|$)"
)
_READS_A_BLOCK = {"head", "other", "output", "down"}  # kinds that a head's name may suggest
_INSIDE_A_BLOCK = {"query", "key", "value", "fused", "up", "gate"}
_MULTIPLES = [2**n for n in range(1, 11)]  # to which vocabularies are padded; 1024 is 8 times 128


class Layer(NamedTuple):
    """A weight's name and matrix shape, its kind by name, and its matrices if it is a stack.

    >>> Layer("wte.weight", (50257, 768), "embedding").matrices
    1
    """

    name: str
    shape: tuple[int, ...]
    kind: str
    matrices: int = 1
    taps: tuple[int, ...] = ()  # of a convolution's kernel
    biased: bool = False  # it has a bias beside it


def kinds_by_neighbours(layers: Sequence[Layer]) -> dict[str, str]:
    """The kinds of layers that shapes and neighbours tell, by name.

    >>> table = Layer("tok.weight", (50257, 8), "embedding")
    >>> kinds_by_neighbours([table, Layer("proj.weight", (50304, 8), "output")])
    {'proj.weight': 'head'}
    """
    multiplied = dict.fromkeys(_multiplied_embeddings(layers), "other")
    placed = [each._replace(kind=multiplied.get(each.name, each.kind)) for each in layers]
    kinds = dict.fromkeys(language_heads(placed), "head") | dict(_routers_and_gates(placed))
    return multiplied | dict.fromkeys(_depthwise(layers), "depthwise") | kinds


def _multiplied_embeddings(layers: Sequence[Layer]) -> Iterator[str]:
    """Find layers called embeddings that are maps: with a bias, or writing what others read.

    A table is as wide as what reads it; a map has as many rows.
    """
    read = {each.shape[1] for each in layers if each.kind != "embedding" and not each.taps}
    for each in layers:
        if each.kind == "embedding" and len(each.shape) == 2:
            rows, columns = each.shape
            if each.biased or (read and rows in read and columns not in read):
                yield each.name


def _depthwise(layers: Sequence[Layer]) -> Iterator[str]:
    """Find kernels of one input after a layer with as many outputs, or twice as many for a gate."""
    for before, each in pairwise(layers):
        rows, columns = each.shape[0], each.shape[1] if len(each.shape) == 2 else 0
        of_one_input = prod(each.taps) > 1 and columns == prod(each.taps)
        is_kernel = each.kind == "convolution" and of_one_input and rows > 1
        is_fed = before.shape[0] in (rows, 2 * rows) and before.kind not in ("embedding", "adapter")
        if is_kernel and is_fed:
            yield each.name


def language_heads(layers: Sequence[Layer]) -> list[str]:
    """The names of the layers whose outputs are tokens.

    Those that are called heads, if their shape fits. Else the model's last layer, or else those
    outside of any block: what has no number in its name and no attention or perceptron beside it.

    >>> blocks = [Layer("wte.weight", (65, 8), "embedding"), Layer("h.0.up.weight", (65, 8), "up")]
    >>> language_heads([*blocks, Layer("fc_out.weight", (65, 8), "down")])
    ['fc_out.weight']
    """
    tables = [each for each in layers if each.kind == "embedding"]
    tokens = {each.shape[0] for each in tables if not _NO_TOKENS.search(each.name)}
    readers = [each for each in layers if each.kind in _READS_A_BLOCK and len(each.shape) == 2]
    fitting = [each for each in readers if any(_pads(each.shape[0], size) for size in tokens)]
    called = [each.name for each in fitting if each.kind == "head"]
    blocks = {names.family(each.name) for each in layers if each.kind in _INSIDE_A_BLOCK} - {""}
    outside = [each.name for each in fitting if names.family(each.name) not in blocks]
    maps = [each.name for each in layers if each.kind not in ("embedding", "adapter")]
    last = [name for name in outside if name == maps[-1]]
    return called or last or [name for name in outside if names.depth(name) is None]


def _pads(outputs: int, tokens: int) -> bool:
    """Whether one number is the other, or the next multiple above it of a power of two."""
    less, more = sorted((outputs, tokens))
    return less > 1 and any(-(-less // m) * m == more for m in (1, *_MULTIPLES) if m <= less)


def _routers_and_gates(layers: Sequence[Layer]) -> Iterator[tuple[str, str]]:
    """Layers with an output for each expert beside them; gates that a name mistakes for routers."""
    experts: dict[str, set[str | int]] = defaultdict(set)  # numbers of single ones, sizes of stacks
    ups = {(names.family(each.name), each.shape[0]) for each in layers if each.kind == "up"}
    for name, _, kind, count, *_ in layers:
        if kind != "expert":
            continue
        parts = names.layer(name).split(".")
        at = next((i for i, part in enumerate(parts) if "expert" in part), len(parts) - 1)
        number = parts[at + 1] if at + 1 < len(parts) and parts[at + 1].isdigit() else ""
        experts[".".join(parts[:at])].add(number or count)
    for name, shape, kind, *_ in layers:
        place = names.family(name)
        around = {place, place.rpartition(".")[0]} & experts.keys()
        numbers = {n for path in around for n in experts[path]}
        count = sum(isinstance(n, str) for n in numbers)
        if kind in ("other", "gate", "output") and shape[0] in {count, *numbers} - {0, 1}:
            yield name, "router"
        if kind == "router" and not around and (place, shape[0]) in ups:
            yield name, "gate"
