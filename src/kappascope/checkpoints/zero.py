"""What DeepSpeed's ZeRO writes: weights in float32, laid flat and cut, a part for every process.

The files of the model (``..._model_states.pt``) tell names, shapes and order. Those of the
optimizer (``..._optim_states.pt``) hold the partitions. In stages 1 and 2 a group of parameters is
laid end to end, and then cut. In stage 3 every parameter is cut, and what a process has of all of
them is laid end to end. Pickles are read by our own machine, and a weight is put together when it
is read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import ceil, prod
from pathlib import Path
from typing import Any

from kappascope.checkpoints import folders
from kappascope.checkpoints.formats import AGAIN, Malformed
from kappascope.checkpoints.locations import (
    CheckpointFile,
    FileContents,
    StitchedLocation,
    TensorLocation,
    Tree,
    row_major,
)
from kappascope.checkpoints.torchfiles import zipped
from kappascope.model.skipped import Reason, unreadable

_CUT_ALIKE = "single_partition_of_fp32_groups"  # of stages 1 and 2
_CUT_EACH = "fp32_flat_groups"  # of stage 3
_OWN = "deepspeed."  # whose classes tell of the training alone
_CONVERT = "python zero_to_fp32.py, which lies beside the checkpoint"


def read_zero(folder: Path, names: Sequence[str]) -> FileContents:
    """Return the weights that the files of these names hold together."""
    trees: dict[str, dict[int, Mapping[str, Any]]] = {"model": {}, "optim": {}}
    kinds: dict[str, bool] = {}
    for name in names:
        found = re.fullmatch(folders.ZERO_FILE, name)
        if found is None:
            continue
        if int(found["tensor"]):
            raise Malformed("a model that is split within layers as well", _CONVERT)
        held = zipped(CheckpointFile.at(folders.inside(folder, name)).whole)
        trees[found["what"]][int(found["rank"] or 0)] = held.tree
        kinds |= {kind: holds for kind, holds in held.kinds.items() if not kind.startswith(_OWN)}
    partitions = _partitions(trees["optim"])
    models = [trees["model"][rank] for rank in sorted(trees["model"])]
    if not models:
        raise Malformed("partitions of ZeRO without its model_states.pt", "copy all of its files")
    tree = _buffers(models[0])
    tree |= _frozen(models)
    tree |= _trained(models[0], partitions)
    shared = models[0].get("shared_params")
    for name, source in shared.items() if isinstance(shared, dict) else ():
        if isinstance(source, str) and source in tree:
            tree.setdefault(name, tree[source])
    stage = "3" if partitions.key == _CUT_EACH else "1 or 2"
    note = f"ZeRO of stage {stage}, the weights in float32; partitions: {len(partitions.groups)}"
    return FileContents(tree, kinds, notes=(note,))


@dataclass(frozen=True)
class _Partitions:
    """The flat groups of numbers that every process has, and how they were cut."""

    key: str
    groups: tuple[tuple[TensorLocation, ...], ...]  # by process
    paddings: Any


def _partitions(optimizers: Mapping[int, Mapping[str, Any]]) -> _Partitions:
    """Return the partitions, once there is one of every process."""
    held = [optimizers[rank].get("optimizer_state_dict") for rank in sorted(optimizers)]
    states = [state for state in held if isinstance(state, dict)]
    if not states or len(states) < len(held):
        raise Malformed("no optimizer_state_dict in its optim_states.pt", "copy all of its files")
    first = states[0]
    key = next((key for key in (_CUT_ALIKE, _CUT_EACH) if key in first), None)
    if key is None:
        raise Malformed("no partitions of float32 numbers in its optim_states.pt", _CONVERT)
    count = first.get("partition_count")
    counts = [count] if type(count) is int else count if isinstance(count, list | tuple) else []
    numbers = [n for n in counts if type(n) is int]
    expected = max(numbers, default=len(states))
    if sorted(optimizers) != list(range(expected)):
        wrong = f"{len(optimizers)} of {expected} partitions of ZeRO"
        raise Malformed(wrong, "copy the optim_states.pt of all processes")
    if len(set(numbers)) > 1:
        raise Malformed("experts that are cut otherwise than the rest", _CONVERT)
    groups = tuple(_flat_groups(state.get(key)) for state in states)
    if len({len(each) for each in groups}) != 1:
        raise Malformed("partitions of different numbers of groups", AGAIN)
    return _Partitions(key, groups, first.get("param_alignment_paddings"))


def _flat_groups(groups: Any) -> tuple[TensorLocation, ...]:
    """Return the groups of a process, each a row of numbers side by side."""
    nodes = list(groups.values()) if isinstance(groups, dict) else []
    flat = [node for node in nodes if isinstance(node, TensorLocation)]
    sound = [g for g in flat if len(g.shape) == 1 and g.stride == (1,) and g.dtype == flat[0].dtype]
    if not nodes or len(sound) != len(nodes):
        raise Malformed("partitions that are no flat tensors", _CONVERT)
    return tuple(sound)


def _trained(model: Mapping[str, Any], partitions: _Partitions) -> Tree:
    """Return the parameters that were trained."""
    shapes = model.get("param_shapes")
    groups = list(shapes.values()) if isinstance(shapes, dict) else []
    groups = [group for group in groups if isinstance(group, dict)]
    if not groups:
        raise Malformed("no param_shapes in its model_states.pt", _CONVERT)
    tree: Tree = {}
    if partitions.key == _CUT_EACH:
        processes = [_Row(groups) for groups in partitions.groups]
        at = 0
        for name, shape in (item for group in groups for item in group.items()):
            count = _count(shape)
            each = ceil(count / len(processes))
            cuts = [row.cut(at, at + each) for row in processes]
            tree[name] = _stitched(shape, [piece for cut in cuts for piece in cut])
            at += each
        return tree
    if len(groups) != len(partitions.groups[0]):
        raise Malformed("more groups in param_shapes than in its partitions, or fewer", AGAIN)
    for i, group in enumerate(groups):
        row = _Row([of_process[i] for of_process in partitions.groups])
        pads, at = _paddings(partitions.paddings, i, len(group)), 0
        for (name, shape), pad in zip(group.items(), pads, strict=True):
            end = at + _count(shape)
            tree[name] = _stitched(shape, list(row.cut(at, end)))
            at = end + pad
    return tree


def _paddings(told: Any, group: int, count: int) -> list[int]:
    """Return how many numbers follow each parameter of a group that belong to none."""
    if told is None:
        return [0] * count
    lists = list(told.values()) if isinstance(told, dict) else told
    pads = lists[group] if isinstance(lists, list | tuple) and group < len(lists) else None
    if not isinstance(pads, list | tuple) or len(pads) != count:
        raise Malformed("paddings that are not those of its parameters", _CONVERT)
    if not all(type(pad) is int and 0 <= pad < 1 << 40 for pad in pads):
        raise Malformed("paddings that are no numbers", AGAIN)
    return list(pads)


class _Row:
    """Flat tensors that lie end to end."""

    def __init__(self, parts: Sequence[TensorLocation]) -> None:
        self.parts = parts
        self.ends = list(accumulate(part.shape[0] for part in parts))

    def cut(self, begin: int, end: int) -> Iterator[TensorLocation]:
        """Yield the pieces from ``begin`` to ``end``, as many of them as there are."""
        at = bisect_right(self.ends, begin)
        while begin < end and at < len(self.parts):
            part, start = self.parts[at], self.ends[at] - self.parts[at].shape[0]
            stop = min(end, self.ends[at])
            if stop > begin:
                offset = part.offset + begin - start
                yield replace(part, shape=(stop - begin,), offset=offset)
            begin, at = stop, at + 1


def _frozen(models: Sequence[Mapping[str, Any]]) -> Tree:
    """Return the parameters that were not trained: whole, or a piece for every process."""
    shapes = models[0].get("frozen_param_shapes")
    fragments = [model.get("frozen_param_fragments") for model in models]
    tree: Tree = {}
    for name, shape in shapes.items() if isinstance(shapes, dict) else ():
        nodes = [each.get(name) for each in fragments if isinstance(each, dict)]
        pieces = [
            replace(node, shape=(prod(node.shape),), stride=(1,))
            for node in nodes
            if isinstance(node, TensorLocation) and node.span == prod(node.shape)
        ]
        lost = unreadable("a piece of it is missing")
        tree[name] = _stitched(shape, pieces) if len(pieces) == len(models) else lost
    return tree


def _buffers(model: Mapping[str, Any]) -> Tree:
    """Return what no optimizer has, as the first process saved it."""
    names, module = model.get("buffer_names"), model.get("module")
    if not isinstance(names, list | tuple) or not isinstance(module, dict):
        return {}
    return {name: module[name] for name in names if isinstance(name, str) and name in module}


def _count(shape: Any) -> int:
    """Return how many numbers a parameter of a shape has."""
    sizes = isinstance(shape, tuple) and all(type(n) is int and 0 <= n < 1 << 62 for n in shape)
    if not sizes or prod(n or 1 for n in shape) >= 1 << 62:
        raise Malformed("a parameter of a shape that cannot be", AGAIN)
    return prod(shape)


def _stitched(shape: Any, pieces: list[TensorLocation]) -> StitchedLocation | Reason:
    """Return a parameter of its pieces, which may have a padding at their end."""
    left, kept = _count(shape), list[TensorLocation]()
    for piece in pieces:
        size = min(left, piece.shape[0])
        if size:
            kept.append(replace(piece, shape=(size,)))
        left -= size
    if left or not kept or len({piece.dtype for piece in kept}) > 1:
        return unreadable("its pieces do not make it whole")
    return StitchedLocation(tuple(kept), kept[0].dtype, shape, row_major(shape))
