"""From the value of a pickle to a tree of tensors: mappings with text for keys, and leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from kappascope.files.builders import Storage, View
from kappascope.files.formats import AGAIN, SAVE, Malformed, quoted
from kappascope.files.machine import Inert, Name, Pairs
from kappascope.files.pickles import Loaded
from kappascope.files.pieces import Piece, Room, Unreadable

_MOST_NODES = 1_000_000  # of the tree: 100,000 tensors with their optimizer's state, twice
_DEEPEST = 32  # checkpoints nest two or three levels; one that contains itself never ends

Tree: TypeAlias = dict[str, Any]


class Found(NamedTuple):
    """What a file holds, and the foreign names it asks for (true: a class with tensors inside)."""

    tree: Tree
    kinds: dict[str, bool]


@dataclass
class Grower:
    """Turns what a pickle holds into a tree, node by node within a budget.

    >>> lost = View(Storage("0", torch.float32, 4), torch.float32, 0, (2, 2), (2, 1))
    >>> Grower(lambda storage: "its storage is lost").grow(Loaded(Pairs([("w", lost)]), 0, {})).tree
    {'w': Unreadable(reason='its storage is lost', ...)}
    """

    locate: Callable[[Storage], Room | str]  # a storage in its file, or why it is not there
    kinds: dict[str, bool] = field(default_factory=dict)
    plain: dict[int, bool] = field(default_factory=dict)  # sequences by id: numbers and texts only
    nodes: int = 0
    tensors: int = 0

    def grow(self, loaded: Loaded) -> Found:
        """The tree; refused if there is no tensor in it."""
        self.kinds = dict.fromkeys(loaded.asked, False)
        tree = self._node(loaded.value, 0)
        if not self.tensors:
            asked = ", ".join([quoted(kind) for kind in self.kinds][:2])
            raise Malformed(f"holds no tensors{'; it asks for ' if asked else ''}{asked}", SAVE)
        return Found(tree if isinstance(tree, dict) else {"0": tree}, self.kinds)

    def _node(self, value: Any, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise Malformed(f"more than {_MOST_NODES} values beside one another", SAVE)
        if isinstance(value, View | Unreadable):
            self.tensors += 1
            return self._leaf(value) if isinstance(value, View) else value
        if isinstance(value, Pairs | list | tuple | Inert):
            if depth == _DEEPEST:
                return Unreadable(f"nested more than {_DEEPEST} deep")
            return self._branch(value, depth)
        return value.text if isinstance(value, Name) else value

    def _branch(self, value: Any, depth: int) -> Any:
        if isinstance(value, Inert):
            return self._object(value, depth)
        if isinstance(value, Pairs):
            return self._mapping(value, depth)
        if id(value) not in self.plain:
            self.plain[id(value)] = all(isinstance(item, _PLAIN) for item in value)
        return value if self.plain[id(value)] else self._mapping(enumerate(value), depth)

    def _mapping(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> Tree:
        tree: Tree = {}
        for key, value in pairs:
            label = _label(key, len(tree))
            if label in tree:
                raise Malformed(f"duplicate name {quoted(label)}", AGAIN)
            tree[label] = self._node(value, depth + 1)
        return tree

    def _object(self, it: Inert, depth: int) -> Any:
        """The tensors that an object of a foreign class keeps, if there are any."""
        before = self.tensors
        states = it.state[:2] if isinstance(it.state, tuple) else (it.state,)  # dict and slots
        tree: Tree = {}
        for pairs in (*(s for s in states if isinstance(s, Pairs)), it.pairs, enumerate(it.items)):
            tree |= self._mapping(pairs, depth)
        holds = self.tensors > before
        self.kinds[it.kind] = holds or self.kinds.get(it.kind, False)
        return _module(tree) if holds else Unreadable(f"object of class {it.kind}", it.kind)

    def _leaf(self, view: View) -> Piece | Unreadable:
        room, storage = self.locate(view.storage), view.storage
        if isinstance(room, str):
            return Unreadable(room)
        said = storage.count * (storage.dtype.itemsize if storage.dtype else 1)
        if said != room.size:
            return Unreadable(f"its storage has {room.size} bytes, its pickle says {said}")
        piece = Piece(room, view.dtype or torch.uint8, view.shape, view.stride, view.offset)
        fault = piece.fault()
        return Unreadable(fault) if fault else piece


_PLAIN = (str, bytes, int, float, type(None))


def _label(key: Any, index: int) -> str:
    if isinstance(key, str | Name):
        return key if isinstance(key, str) else key.text
    if isinstance(key, int) and abs(key) < 1 << 63:  # longer ones may be too long to print
        return str(key)
    return f"{type(key).__name__} {index}"


def _module(tree: Tree) -> Tree:
    """What an ``nn.Module`` keeps, in the places where its state dict has it."""
    if not {"_parameters", "_buffers", "_modules"} <= tree.keys():
        return tree
    parts = [tree[part] for part in ("_parameters", "_buffers", "_modules")]
    pairs = [pair for part in parts if isinstance(part, dict) for pair in part.items()]
    return {key: value for key, value in pairs if value is not None}  # as a bias that is not there
