"""Adapters: what the small tensors of one add to the weights of the model it was trained on.

A LoRA is a product ``B A`` with the scale of its config, alpha / r or alpha / sqrt(r); LoHa an
elementwise product of two such, LoKr a Kronecker product. DoRA also sets the norm of every output,
which takes the weight itself. Names and formulas are those of peft's files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kappascope.model.names import layer
from kappascope.model.skipped import no_weight
from kappascope.model.tensors import Path, Read
from kappascope.text import first_few, plural

WRAPPER = "base_model.model."  # what peft writes before every name
FORMS = {
    "lora": re.compile(
        r"(?P<module>.+)\.(?P<part>lora_(A|B|embedding_A|embedding_B|magnitude_vector))"
        r"(\.(?!weight$)(?P<adapter>\w+))?(\.weight)?"
    ),
    "loha": re.compile(
        r"(?P<module>.+)\.(?P<part>hada_(w1_a|w1_b|w2_a|w2_b|t1|t2))(\.(?P<adapter>\w+))?"
    ),
    "lokr": re.compile(
        r"(?P<module>.+)\.(?P<part>lokr_(w1|w2|w1_a|w1_b|w2_a|w2_b|t2))(\.(?P<adapter>\w+))?"
    ),
}
NEEDED = {
    "lora": ({"lora_A", "lora_B"}, {"lora_embedding_A", "lora_embedding_B"}),
    "loha": ({"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"},),
    "lokr": (
        {"lokr_w1", "lokr_w2"}, {"lokr_w1", "lokr_w2_a", "lokr_w2_b"},
        {"lokr_w1_a", "lokr_w1_b", "lokr_w2"},
        {"lokr_w1_a", "lokr_w1_b", "lokr_w2_a", "lokr_w2_b"},
    ),
}  # fmt: skip
DORA = "DoRA also sets the norms of outputs, which takes the model: --base merges both"
PRODUCTS = {"lora": "lora_BA.weight", "loha": "hada_delta", "lokr": "lokr_delta"}


@dataclass(frozen=True)
class AdapterPart:
    """The change of one weight: where its tensors are, how they are multiplied, and the scale.

    >>> shapes = {"lora_A": (2, 3), "lora_B": (4, 2)}
    >>> AdapterPart("fc", "lora", {"lora_A": ("fc.lora_A.weight",)}, shapes, scale=0.5).rank
    2
    """

    module: str  # the path of the layer in the model
    form: str
    paths: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    scale: float
    transposed: bool = False  # the layer stores (in, out)
    adapter: str = ""  # its name, where several may lie in one file

    @property
    def name(self) -> str:
        """The name of the change among the adapter's own tensors."""
        path = next(iter(self.paths.values()))
        stem = str(path[-1]).partition(f"{self.module}.")[0]
        product = PRODUCTS[self.form]
        if self.adapter:
            product = f"{product.removesuffix('.weight')}.{self.adapter}.weight"
        return f"{stem}{self.module}.{product}"

    @property
    def rank(self) -> int | None:
        """The rank that its tensors allow; nothing where a product of ranks allows more."""
        if self.form == "lora":
            inner = self.shapes.get("lora_A") or self.shapes["lora_embedding_A"]
            return inner[0]
        if self.form == "loha" and "hada_t1" not in self.shapes:
            return self.shapes["hada_w1_a"][1] * self.shapes["hada_w2_a"][1]
        return None

    def delta(self, read: Read) -> Tensor:
        """Return what is added to the weight, in float32 at least."""
        tensors = {what: _wide(read(path)) for what, path in self.paths.items()}
        return self.scale * _DELTAS[self.form](tensors)

    def merged(self, weight: Tensor, read: Read) -> Tensor:
        """Return the weight with the change in it, in the dtype of the weight."""
        wide, change = _wide(weight), self.delta(read)
        if self.transposed or (change.ndim == 2 and change.shape != wide.shape == change.mT.shape):
            change = change.mT
        tuned = wide + change.reshape(wide.shape)
        if magnitude := self.paths.get("lora_magnitude_vector"):
            rows = tuned.mT if self.transposed else tuned
            norms = torch.linalg.vector_norm(rows.flatten(1), dim=1)
            factors = (_wide(read(magnitude)).flatten() / norms).to(rows.dtype)
            rows = rows * factors.reshape(-1, *[1] * (rows.ndim - 1))
            tuned = rows.mT if self.transposed else rows
        return tuned.to(weight.dtype)


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _lora(parts: Mapping[str, Tensor]) -> Tensor:
    if "lora_embedding_A" in parts:
        return (parts["lora_embedding_B"] @ parts["lora_embedding_A"]).mT
    a, b = parts["lora_A"], parts["lora_B"]
    return torch.tensordot(b.flatten(1), a, dims=1)  # of a convolution with its taps


def _loha(parts: Mapping[str, Tensor]) -> Tensor:
    pairs = [
        (parts[f"hada_w{k}_a"], parts[f"hada_w{k}_b"], parts.get(f"hada_t{k}")) for k in (1, 2)
    ]
    first, second = (_low_rank(a, b, core) for a, b, core in pairs)
    return first * second


def _lokr(parts: Mapping[str, Tensor]) -> Tensor:
    sides = []
    for k in (1, 2):
        whole = parts.get(f"lokr_w{k}")
        if whole is None:
            a, b = parts[f"lokr_w{k}_a"], parts[f"lokr_w{k}_b"]
            whole = _low_rank(a, b, parts.get(f"lokr_t{k}"))
        sides.append(whole)
    left, right = sides
    every = torch.einsum("ij,kl...->ikjl...", left, right)  # of the taps of a convolution, too
    height, width = left.shape[0] * right.shape[0], left.shape[1] * right.shape[1]
    return every.reshape(height, width, *right.shape[2:])


def _low_rank(a: Tensor, b: Tensor, core: Tensor | None) -> Tensor:
    """Return ``a b``, or a core of taps multiplied by both."""
    return a @ b if core is None else torch.einsum("ijkl,jr,ip->prkl", core, b, a)


_DELTAS = {"lora": _lora, "loha": _loha, "lokr": _lokr}


def adapter_parts(contents: Mapping[Any, Any], config: Mapping[str, Any]) -> list[AdapterPart]:
    """Return the changes that an adapter makes, weight by weight.

    >>> tensors = {"fc.lora_A.weight": torch.ones(2, 3), "fc.lora_B.weight": torch.ones(4, 2)}
    >>> part, = adapter_parts(tensors, {"r": 2, "lora_alpha": 8})
    >>> part.module, part.scale, part.delta(lambda path: tensors[path[0]])[0]
    ('fc', 4.0, tensor([8., 8., 8.]))
    """
    found: dict[tuple[str, str, str], dict[str, str]] = {}
    for key, value in contents.items():
        for form, pattern in FORMS.items():
            named = pattern.fullmatch(key) if isinstance(key, str) else None
            if named and isinstance(value, Tensor):
                place = form, named["module"], named["adapter"] or ""
                found.setdefault(place, {})[named["part"]] = key
    parts = []
    for (form, module, adapter), keys in found.items():
        if any(needed <= keys.keys() for needed in NEEDED[form]):
            inside = module.removeprefix(WRAPPER)
            shapes = {what: tuple(contents[key].shape) for what, key in keys.items()}
            paths: dict[str, Path] = {what: (key,) for what, key in keys.items()}
            turned = bool(config.get("fan_in_fan_out")) and "lora_embedding_A" not in keys
            scale = _scale(inside, form, shapes, config)
            parts.append(AdapterPart(inside, form, paths, shapes, scale, turned, adapter))
    return parts


def _scale(
    module: str, form: str, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any]
) -> float:
    """Return alpha / r, or alpha / sqrt(r), of a layer; 1 where the config does not tell."""
    alpha = _patterned(
        module, config.get("alpha_pattern"), config.get("lora_alpha", config.get("alpha"))
    )
    rank = _patterned(module, config.get("rank_pattern"), config.get("r"))
    if form == "lora":
        rank = float((shapes.get("lora_A") or shapes["lora_embedding_A"])[0])
    if alpha is None or not rank:
        return 1.0
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _patterned(module: str, patterns: object, usual: object) -> float | None:
    """Return the number of a layer: that of the first pattern that its name ends with, or usual."""
    if isinstance(patterns, Mapping):
        for pattern, value in patterns.items():
            try:
                fits = re.match(rf"(.*\.)?({pattern})$", module)
            except re.error:
                fits = None
            if fits and isinstance(value, int | float):
                return float(value)
    return float(usual) if isinstance(usual, int | float) else None


def adapted_layer(name: str) -> str:
    """Return the layer whose weight a matrix is or changes, as peft's patterns name it.

    >>> adapted_layer("base_model.model.h.0.q_proj.lora_BA.weight"), adapted_layer("h.0.fc.weight")
    ('h.0.q_proj', 'h.0.fc')
    """
    plain = layer(name).removeprefix(WRAPPER)
    return re.sub(r"\.(lora_BA|hada_delta|lokr_delta)(\.\w+)?$", "", plain)


@dataclass(frozen=True)
class AdapterContents:
    """The contents of an adapter with its changes in place of their factors, and their reader.

    >>> AdapterContents({}, read=lambda path: None, ranks={}).notes
    ()
    """

    contents: Mapping[Any, Any]
    read: Read
    ranks: Mapping[str, int]  # by the names of the changes: what their factors allow
    notes: tuple[str, ...] = ()


def with_deltas(
    contents: Mapping[Any, Any], config: Mapping[str, Any], read: Read
) -> AdapterContents:
    """Return an adapter as the changes that it makes; the same where no config tells of one.

    >>> tensors = {"fc.lora_A.weight": torch.ones(2, 3), "fc.lora_B.weight": torch.ones(4, 2)}
    >>> with_deltas(tensors, {"r": 2}, read=lambda path: tensors[path[0]]).ranks
    {'fc.lora_BA.weight': 2}
    """
    parts = {part.name: part for part in adapter_parts(contents, config)} if config else {}
    if not parts:
        return AdapterContents(contents, read, {})
    taken: dict[str, str] = {
        str(path[-1]): name for name, part in parts.items() for path in part.paths.values()
    }
    changed: dict[Any, Any] = {}
    for key, value in contents.items():
        if (name := taken.get(key)) is None:
            changed[key] = value
            continue
        if name not in changed:
            changed[name] = _shaped(parts[name])
        changed[key] = no_weight(f"a factor of {name}")

    def made(path: Path) -> Tensor:
        return parts[path[0]].delta(read).flatten(1) if path[0] in parts else read(path)

    ranks = {name: part.rank for name, part in parts.items() if part.rank is not None}
    is_dora = any("lora_magnitude_vector" in part.paths for part in parts.values())
    return AdapterContents(changed, made, ranks, (DORA,) if is_dora else ())


def _shaped(part: AdapterPart) -> Tensor:
    """Return a valueless tensor like the flat change."""
    meta = {
        what: torch.empty(shape, device="meta", dtype=torch.float32)
        for what, shape in part.shapes.items()
    }
    return _DELTAS[part.form](meta).flatten(1)


def merged_contents(
    base: Mapping[Any, Any],
    read_base: Read,
    adapter: Mapping[Any, Any],
    config: Mapping[str, Any],
    read: Read,
) -> AdapterContents:
    """Return a model with an adapter in its weights, and say which changes found no weight.

    Weights that were trained whole beside the adapter take the place of the model's.

    >>> base = {"model.fc.weight": torch.zeros(4, 3)}
    >>> tensors = {"fc.lora_A.weight": torch.ones(2, 3), "fc.lora_B.weight": torch.ones(4, 2)}
    >>> readers = [lambda path, held=held: held[path[0]] for held in (base, tensors)]
    >>> found = merged_contents(base, readers[0], tensors, {"r": 2, "lora_alpha": 4}, readers[1])
    >>> found.read(("model.fc.weight",))[0]
    tensor([4., 4., 4.])
    """
    parts = adapter_parts(adapter, config)
    places = dict(_tensor_paths(base, ()))
    targets: dict[Path, AdapterPart] = {}
    lost = []
    for part in parts:
        if (place := _place(f"{part.module}.weight", places)) is None:
            lost.append(part.module)
        else:
            targets[place] = part
    factors = {path[-1] for part in parts for path in part.paths.values()}
    whole: dict[Path, Path] = {}
    for key, value in adapter.items():
        if key not in factors and isinstance(value, Tensor):
            place = _place(str(key).removeprefix(WRAPPER), places)
            if place is not None:
                whole[place] = (key,)
    notes = [f"{len(targets)} of {plural(len(parts), 'change')} of the adapter merged"]
    if whole:
        notes.append(f"{plural(len(whole), 'tensor')} taken whole from the adapter")
    if lost:
        notes.append(f"no single weight in the model for the adapter's {first_few(lost)}")

    def made(path: Path) -> Tensor:
        weight = read(whole[path]) if path in whole else read_base(path)
        return targets[path].merged(weight, read) if path in targets else weight

    return AdapterContents(base, made, {}, tuple(notes))


def _place(name: str, places: Mapping[str, Path]) -> Path | None:
    """Return the one tensor that is called so, but for what either side has before it."""
    if name in places:
        return places[name]
    longer = [path for other, path in places.items() if other.endswith(f".{name}")]
    shorter = [path for other, path in places.items() if name.endswith(f".{other}")]
    found = longer or shorter
    return found[0] if len(found) == 1 else None


def _tensor_paths(contents: Mapping[Any, Any], at: Path) -> Iterator[tuple[str, Path]]:
    """Yield the names and paths of all tensors, in mappings of mappings."""
    for key, value in contents.items():
        if isinstance(value, Tensor):
            yield str(key), (*at, key)
        elif isinstance(value, Mapping) and len(at) < 8:
            yield from _tensor_paths(value, (*at, key))
