"""From the value of a pickle to a tree of tensors: mappings with text for keys, and leaves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch

from kappascope.builders import Storage, View
from kappascope.formats import Malformed, quoted
from kappascope.machine import Inert, Name, Pairs
from kappascope.pieces import Piece, Room, Unreadable

_AGAIN = "download or save it again"
_SAVE = "where you trust it: torch.save(model.state_dict(), ...) or safetensors"
_MOST_NODES = 2_000_000  # of the tree: 100,000 tensors with their optimizer's state, four times
_DEEPEST = 32  # checkpoints nest two or three levels; one that contains itself never ends

Tree: TypeAlias = dict[str, Any]


class Found(NamedTuple):
    """What a file holds, and the foreign classes it asks for (true: with tensors inside)."""

    tree: Tree
    kinds: dict[str, bool]


@dataclass
class Grower:
    """Turns what a pickle holds into a tree, node by node within a budget."""

    locate: Callable[[Storage], Room | str]
    nodes: int = 0
    tensors: int = 0
    kinds: dict[str, bool] = field(default_factory=dict)

    def grow(self, value: Any) -> Found:
        """The tree; refused if there is no tensor in it."""
        tree = self._node(value, 0)
        if not self.tensors:
            asked = [quoted(kind) for kind in self.kinds][:2]
            raise Malformed("; it asks for ".join(["holds no tensors", *asked]), _SAVE)
        return Found(tree if isinstance(tree, dict) else {"0": tree}, self.kinds)

    def _node(self, value: Any, depth: int) -> Any:
        self.nodes += 1
        if self.nodes > _MOST_NODES:
            raise Malformed(f"more than {_MOST_NODES} values beside one another", _SAVE)
        match value:
            case View():
                self.tensors += 1
                return self._leaf(value)
            case Unreadable():
                self.tensors += 1
                return value
            case Name(text=text):
                return text
            case list() | tuple() | Inert() if depth == _DEEPEST:
                return Unreadable(f"nested more than {_DEEPEST} deep")
            case Inert():
                return self._object(value, depth)
            case Pairs():
                return self._mapping(value, depth)
            case list() | tuple():
                plain = all(isinstance(item, _PLAIN) for item in value)
                return list(value) if plain else self._mapping(enumerate(value), depth)
        return value

    def _mapping(self, pairs: Iterable[tuple[Any, Any]], depth: int) -> Tree:
        tree: Tree = {}
        for key, value in pairs:
            label = _label(key, len(tree))
            if label in tree:
                raise Malformed(f"duplicate name {quoted(label)}", _AGAIN)
            tree[label] = self._node(value, depth + 1)
        return tree

    def _object(self, it: Inert, depth: int) -> Any:
        """The tensors that an object of a foreign class keeps, if there are any."""
        before = self.tensors
        states = it.state if isinstance(it.state, tuple) else (it.state,)  # of its dict, its slots
        tree: Tree = {}
        for pairs in (*(s for s in states if isinstance(s, Pairs)), it.pairs, enumerate(it.items)):
            tree |= self._mapping(pairs, depth)
        holds = self.tensors > before
        self.kinds[it.kind] = holds or self.kinds.get(it.kind, False)
        return _module(tree) if holds else Unreadable(f"object of class {it.kind}")

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
    if isinstance(key, str):
        return key
    if isinstance(key, int) and abs(key) < 1 << 63:  # longer ones may be too long to print
        return str(key)
    return f"{type(key).__name__} {index}"


def _module(tree: Tree) -> Tree:
    """What an ``nn.Module`` keeps, in the places where its state dict has it."""
    if not {"_parameters", "_buffers", "_modules"} <= tree.keys():
        return tree
    parts = [tree[part] for part in ("_parameters", "_buffers", "_modules")]
    return {key: value for part in parts if isinstance(part, dict) for key, value in part.items()}
