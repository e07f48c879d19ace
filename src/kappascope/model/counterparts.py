"""Which matrix of one model is which of another, though wrappers and prefixes changed the names.

Names are compared as they are, then without what wraps a model (``base_model.model.``), then
without the leading parts whose removal brings the most names together (``model.``, ``bert.``), and
what is left by what it does: the query of layer 0 is ``blk.0.attn_q.weight`` in a GGUF file,
``model.layers.0.self_attn.q_proj.weight`` in another, and a part of ``h.0.attn.c_attn.weight`` in a
third. A name alone is never enough: the shapes must be equal, or turned round.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from kappascope.model import names
from kappascope.model.matrices import Logical
from kappascope.model.tensors import stripped
from kappascope.text import plural

Renames: TypeAlias = Sequence[tuple[str, str]]
Prefixes: TypeAlias = tuple[str, str]  # what names begin with here, and what there

_WRAPPERS = re.compile(r"^(base_model\.model\.)+|\.(base_layer|original_module)(?=\.|$)")
# What a GGUF file calls the layers that have biases and gains.
_GGUF = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
_EXPERT = re.compile(r"\.experts\.(\d+)\.|_exps\.weight\[(\d+)\]$")


@dataclass(frozen=True)
class Counterparts:
    """The names there of matrices here, and in words what was done to the names.

    >>> Counterparts({"fc.weight": "model.fc.weight"}, (("", "model."),)).there("fc.bias")
    'model.fc.bias'
    """

    names: Mapping[str, str]
    prefixes: tuple[Prefixes, ...] = ()
    notes: tuple[str, ...] = ()

    def there(self, name: str) -> str:
        """Return what a tensor of this name is called there, be it a matrix or not."""
        if name in self.names:
            return self.names[name]
        plain = without_wrappers(name)
        exchanged = (new + plain.removeprefix(old) for old, new in self.prefixes
                     if plain.startswith(old))  # fmt: skip
        return next(exchanged, plain)


def without_wrappers(name: str) -> str:
    """Return a name without what DDP, ``torch.compile`` and peft wrap a model in.

    >>> without_wrappers("base_model.model.model.q_proj.base_layer.weight")
    'model.q_proj.weight'
    """
    return _WRAPPERS.sub("", stripped(name))


def as_hugging_face(name: str) -> str:
    """Return what Hugging Face calls a bias or a gain of a GGUF file; other names as they are.

    >>> as_hugging_face("blk.3.attn_norm.weight"), as_hugging_face("output_norm.weight")
    ('model.layers.3.input_layernorm.weight', 'model.norm.weight')
    """
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if block and block[2] in _GGUF:
        return f"model.layers.{block[1]}.{_GGUF[block[2]]}.{block[3]}"
    return re.sub(r"^output_norm\.", "model.norm.", name)


def counterparts(
    here: Sequence[Logical], there: Sequence[Logical], renames: Renames = ()
) -> Counterparts:
    """Find for every matrix here the one there that it should be compared with.

    ``renames`` are pairs of texts: what a name has here, and what it has instead there.

    >>> import torch
    >>> from kappascope.model.matrices import plan
    >>> sides = [plan({name: torch.ones(2, 3)}) for name in ("bert.fc.weight", "fc.weight")]
    >>> found = counterparts(*(side.units[0].parts for side in sides))
    >>> found.names, found.notes
    ({'bert.fc.weight': 'fc.weight'}, ("'bert.' stripped here (1 name)",))
    """
    ours = {
        part.name: _Named(without_wrappers(_renamed(part.name, renames)), part) for part in here
    }
    theirs = {part.name: _Named(without_wrappers(part.name), part) for part in there}
    found: dict[str, str] = {}
    prefixes: list[Prefixes] = []
    notes: list[str] = []

    def take(matches: Mapping[str, str]) -> None:
        found.update(matches)
        for name, other in matches.items():
            del ours[name], theirs[other]

    known = {named.key: name for name, named in theirs.items()}
    same = {name: known[named.key] for name, named in ours.items() if named.key in known}
    notes += _unwrapping(same, renames)
    take(same)
    while best := _best_prefixes(ours, theirs):
        pair, matches = best
        take(matches)
        prefixes.append(pair)
        notes.append(_stripping(pair, len(matches)))
    by_role = _by_role(ours, theirs)
    if by_role:
        one, other = next(iter(by_role.items()))
        notes.append(f"{plural(len(by_role), 'name')} matched by what they do, as {one} = {other}")
    take(by_role)
    return Counterparts(found, tuple(prefixes), tuple(notes))


class _Named(NamedTuple):
    """A matrix, and its name without what wraps it."""

    key: str
    part: Logical

    def fits(self, other: _Named) -> bool:
        shape = self.part.shape
        return other.part.shape in (shape, shape[::-1])


def _renamed(name: str, renames: Renames) -> str:
    for old, new in renames:
        name = name.replace(old, new)
    return name


def _unwrapping(same: Mapping[str, str], renames: Renames) -> Iterator[str]:
    """Say what was taken off names that are equal without it."""
    wrapped = {
        "here": sum(without_wrappers(name) != name for name in same),
        "there": sum(without_wrappers(name) != name for name in same.values()),
    }
    for side, many in wrapped.items():
        if many:
            yield f"what wraps a model is stripped {side} ({plural(many, 'name')})"
    for old, new in renames:
        many = sum(old in name for name in same)
        yield f"{old!r} here read as {new!r} there ({plural(many, 'name')} matched)"


def _stripping(pair: Prefixes, many: int) -> str:
    here, there = pair
    count = plural(many, "name")
    if here and there:
        return f"{here!r} here is {there!r} there ({count})"
    return f"{here or there!r} stripped {'here' if here else 'there'} ({count})"


def _best_prefixes(
    ours: Mapping[str, _Named], theirs: Mapping[str, _Named]
) -> tuple[Prefixes, dict[str, str]] | None:
    """Find the leading parts without which the most names are the same on both sides.

    Where two choices bring as many names together and want the same matrix, neither is taken.
    """
    ends: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for name, named in theirs.items():
        for prefix, end in _endings(named.key):
            ends[end].append((prefix, name))
    pairs: dict[Prefixes, dict[str, str]] = defaultdict(dict)
    for name, named in ours.items():
        for prefix, end in _endings(named.key):
            fitting = [(p, other) for p, other in ends.get(end, ()) if named.fits(theirs[other])]
            for other_prefix, other in fitting:
                pairs[prefix, other_prefix][name] = other
            if fitting:  # a shorter end is the same match, or a worse one
                break
    starts = [{named.key.partition(".")[0] for named in side.values()} for side in (ours, theirs)]
    allowed = {pair: matches for pair, matches in pairs.items() if _is_renaming(pair, *starts)}
    for pair, matches in sorted(allowed.items(), key=lambda it: (-len(it[1]), it[0])):
        rivals = (
            other
            for rival, other in allowed.items()
            if rival != pair and len(other) == len(matches)
        )
        wanted = set(matches) | set(matches.values())
        if not any(wanted & {*other, *other.values()} for other in rivals):
            return pair, matches
    return None


def _endings(key: str) -> Iterator[tuple[str, str]]:
    """Cut a name after each of its parts; two parts remain at least, for one tells nothing."""
    parts = key.split(".")
    for cut in range(max(1, len(parts) - 1)):
        prefix = "".join(f"{part}." for part in parts[:cut])
        yield prefix, ".".join(parts[cut:])


def _is_renaming(pair: Prefixes, ours: Set[str], theirs: Set[str]) -> bool:
    """Tell whether two beginnings may name the same module.

    ``encoder.`` is not ``decoder.`` of a model that has both: each must be unknown to the other.
    """
    here, there = (prefix.partition(".")[0] for prefix in pair)
    if not pair[0] or not pair[1]:
        return pair[0] != pair[1]
    return here not in theirs and there not in ours and {here, there} != {"encoder", "decoder"}


def _by_role(ours: Mapping[str, _Named], theirs: Mapping[str, _Named]) -> dict[str, str]:
    """Match what does the same in the same layer, where no other does on either side."""
    sides: list[dict[Hashable, list[str]]] = []
    for side in (ours, theirs):
        roles: dict[Hashable, list[str]] = defaultdict(list)
        for name, named in side.items():
            if (role := _role(named.part)) is not None:
                roles[role].append(name)
        sides.append(roles)
    here, there = sides
    pairs = ((here[role], there[role]) for role in here if role in there)
    unique = ((one[0], other[0]) for one, other in pairs if len(one) == len(other) == 1)
    return {one: other for one, other in unique if ours[one].fits(theirs[other])}


def _role(part: Logical) -> Hashable | None:
    """Return layer, expert and task of a matrix, if the model has only one of the kind there."""
    if expert := _EXPERT.search(part.name):
        gguf = re.sub(r"_exps$", "", names.layer(part.name))
        return part.depth, int(expert[1] or expert[2]), names.role(gguf)
    is_outside = part.kind in ("embedding", "head")
    if part.kind in ("other", "adapter", "expert") or (part.depth is None and not is_outside):
        return None
    return part.depth, None, part.kind
