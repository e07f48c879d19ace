"""Weights saved in parts by older versions: an original and its factors, put together again.

Once an attached correction kept a weight as ``X.parametrizations.weight.original``
with factors of rows and columns, or of singular values, beside it. What the layer used is their
product, and that is what is read here, as ``X.weight``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor

from kappascope.model.layouts import Layout
from kappascope.model.parametrized import factor_layout, factored
from kappascope.model.skipped import Reason, no_weight, unreadable
from kappascope.model.tensors import DEEPEST, Path, Read

Shape: TypeAlias = tuple[int, ...]
_FACTOR = re.compile(r"(?P<of>(.+\.)?parametrizations\.\w+)\.(?P<step>\d+)\.(?P<what>\w+)")
_SPECTRAL = {"values", "basis"}
_FORMS = ({"rows"}, {"columns"}, {"rows", "columns"}, _SPECTRAL, {*_SPECTRAL, "age"})
_CONV1D = re.compile(r"(^|\.)(c_(attn|fc|proj)|q_attn)\.parametrizations")  # GPT-2 stores (in, out)
_OPEN = "a factor of {} that is not applied: shapes do not tell to which side it belongs"


@dataclass(frozen=True)
class MergedContents:
    """The contents of a checkpoint with whole weights in place of their parts, and their reader.

    >>> MergedContents({}, read=lambda path: None).contents
    {}
    """

    contents: Mapping[Any, Any]
    read: Read


@dataclass(frozen=True)
class _Recipe:
    """The path of an original, and those of its factors, step by step."""

    original: Path
    steps: tuple[Mapping[str, Path], ...]

    def read(self, read: Read) -> Tensor:
        weight = read(self.original)
        for step in self.steps:
            weight = factored(weight, {what: read(path) for what, path in step.items()})
        return weight


def merged(contents: Mapping[Any, Any], read: Read) -> MergedContents:
    """``contents`` as the layers use them; the same where no correction was attached.

    >>> import torch
    >>> from kappascope.model.tensors import reader
    >>> kept = {"fc.parametrizations.weight.original": torch.ones(2, 3)}
    >>> kept["fc.parametrizations.weight.0.rows"] = torch.tensor([1.0, 2.0])
    >>> found = merged(kept, reader(kept))
    >>> list(found.contents), found.read(("fc.weight",))[1]
    (['fc.weight', 'fc.parametrizations.weight.0.rows'], tensor([2., 2., 2.]))
    """
    recipes: dict[Path, _Recipe] = {}
    whole = _level(contents, (), recipes)
    if not recipes:
        return MergedContents(contents, read)

    def made(path: Path) -> Tensor:
        return recipes[path].read(read) if path in recipes else read(path)

    return MergedContents(whole, made)


def _level(
    contents: Mapping[Any, Any], at: Path, recipes: dict[Path, _Recipe]
) -> Mapping[Any, Any]:
    """One mapping and those in it; a mapping of another's making is asked for its keys alone."""
    originals = dict(_originals(contents)) if any(map(_is_factor, contents)) else {}
    taken: dict[Any, Any] = {}
    for key, steps in originals.items():
        whole = key.replace("parametrizations.", "").removesuffix(".original")
        if whole in contents:
            continue
        shapes = [{what: _shape(contents[name]) for what, name in step.items()} for step in steps]
        fits = all(_fits(key, _shape(contents[key]), step) for step in shapes)
        paths = [{what: (*at, name) for what, name in step.items()} for step in steps if fits]
        recipes[*at, whole] = _Recipe((*at, key), tuple(paths))
        reason = no_weight(f"read as {whole}") if fits else unreadable(_OPEN.format(whole))
        taken |= {name: reason for step in steps for name in step.values()} | {key: whole}
    if not isinstance(contents, dict):
        return _replaced(contents, taken) if taken else contents
    inner = {
        key: _level(value, (*at, key), recipes)
        for key, value in contents.items()
        if isinstance(value, dict) and len(at) < DEEPEST
    }
    return _replaced({**contents, **inner}, taken)


def _replaced(contents: Mapping[Any, Any], taken: Mapping[Any, Any]) -> dict[Any, Any]:
    """Keep the order, and put originals under the names of their weights."""
    pairs = ((key, taken.get(key), value) for key, value in contents.items())
    return {
        new if isinstance(new, str) else key: new if isinstance(new, Reason) else value
        for key, new, value in pairs
    }


def _is_factor(key: object) -> bool:
    return isinstance(key, str) and ".parametrizations." in f".{key}"


def _originals(contents: Mapping[Any, Any]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """The originals, each with its factors step by step, as far as all of them are known here."""
    steps: dict[str, dict[int, dict[str, str]]] = {}
    for key in filter(_is_factor, contents):
        if factor := _FACTOR.fullmatch(key):
            own = steps.setdefault(f"{factor['of']}.original", {})
            own.setdefault(int(factor["step"]), {})[factor["what"]] = key
    for original, kept in steps.items():
        in_order = [kept[step] for step in sorted(kept)]
        if original in contents and all(set(step) in _FORMS for step in in_order):
            yield original, in_order


def _shape(value: object) -> Shape:
    return tuple(value.shape) if isinstance(value, Tensor) else ()


def _fits(key: str, weight: Shape, step: Mapping[str, Shape]) -> bool:
    """Whether shapes alone tell how the factors go into the weight."""
    layout = factor_layout(weight, step) if len(weight) > 1 else None
    if layout is None or weight[0] != weight[1]:
        return layout is not None
    # of two sides that are as long, a layer that stores (in, out) means the other one
    return layout == Layout.plain(weight) and not (len(weight) == 2 and _CONV1D.search(key))
