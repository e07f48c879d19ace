"""Which layout a stored tensor has, by its name, its shape and what stands beside it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kappascope.weights.heads import Heads
from kappascope.weights.layouts import ALL, GATED, Index, Layout, Parts, Place, Shape
from kappascope.weights.stacks import flat_stack, stack

# Layers that hold q, k and v below one another, each with the layer that follows attention: this
# one is as wide as q, which tells where k and v begin if they are narrower than q.
_JOINED = {
    "in_proj_weight": "out_proj",  # torch
    "c_attn": "c_proj",  # GPT-2
    "qkv": "proj",  # timm, SAM
    "Wqkv": "out_proj",  # MPT, DBRX
    "W_pack": "o_proj",  # Baichuan
    "qkv_proj": "o_proj",  # Phi-3
    "att_proj": "attn_out",  # OLMo
}
# Families that store (in, out)
_CONV1D = {"gpt2", "openai-gpt", "imagegpt", "decision_transformer"}


def layout(place: Place) -> Layout:
    """The cut of a tensor with two or more dimensions.

    >>> layout(Place("attn.qkv.weight", (12, 4))).parts[1]
    ('k', (slice(4, 8, None),))
    >>> layout(Place("conv.weight", (8, 3, 5, 5))).shape
    (8, 75)
    """
    if len(place.shape) > 2:
        return stack(place)
    for rule in (_gates, _interleaved, _joined, _gated, flat_stack):
        if found := rule(place):
            return found
    return _plain(place)


def _plain(place: Place, *parts: tuple[str, Index]) -> Layout:
    return Layout(place.shape, (1, 0) if _is_turned(place) else (0, 1), parts)


def _below(place: Place, sizes: Mapping[str, int]) -> Layout:
    """Parts of the given sizes, one below another."""
    parts, start = [], 0
    for label, size in sizes.items():
        parts.append((label, (slice(start, start + size),)))
        start += size
    return _plain(place, *parts)


# --- stored (in, out) -----------------------------------------------------------------------------


def _is_turned(place: Place) -> bool:
    """Whether a matrix is stored (in, out), as GPT-2's ``Conv1D`` does."""
    if place.owner is not None:
        return any(kind.__name__ == "Conv1D" for kind in type(place.owner).__mro__)
    match = re.fullmatch(r"(|.*\.)(c_attn|c_proj|c_fc|q_attn)\.weight", place.key)
    if not match:
        return False
    block = re.sub(r"(^|\.)\w+\.$", r"\1", match[1])
    keys = [place.key, f"{match[1]}c_attn.weight", f"{block}attn.c_attn.weight"]
    for found in map(place.near, keys):
        if found and len(found) == 2 and 3 in (found[0] / found[1], found[1] / found[0]):
            return found[1] == 3 * found[0]
    return bool(place.config.types & _CONV1D)


def _oriented(place: Place) -> Shape:
    """(out, in)."""
    out, width = place.shape
    return (width, out) if _is_turned(place) else (out, width)


# --- matrices of several in one -------------------------------------------------------------------


def _gates(place: Place) -> Layout | None:
    """Of LSTM and GRU."""
    gates = re.fullmatch(r"(?:.*\.)?weight_[ih]h(.*)", place.path)
    if not gates:
        return None
    hidden = getattr(place.owner, "hidden_size", 0)
    # the width of what the projection takes in; without a projection, of what the gates do
    for leaf in ("weight_hr", "weight_hh"):
        hidden = hidden or place.beside(leaf + gates[1])[1]
    labels = {3 * hidden: "rzn", 4 * hidden: "ifgo"}.get(place.shape[0], "")
    return _below(place, dict.fromkeys(labels, hidden))


def _joined(place: Place) -> Layout | None:
    """q, k and v below one another."""
    leaf = place.path.rpartition(".")[2]
    if leaf == "query_key_value" and "chatglm" in place.config.types:
        found = _heads(place) if place.config.all("multi_query_group_num") else None
        return _below(place, _thirds(found)) if found else None
    if leaf not in _JOINED:
        return None
    length, width = _oriented(place)
    if any(place.beside("q_attn")):  # GPT-2's attention to another text: k and v alone
        return _below(place, dict.fromkeys("kv", length // 2)) if length % 2 == 0 else None
    outputs, inputs = place.beside(_JOINED[leaf])[:2]
    if not outputs and leaf == "qkv_proj":  # CodeGen shuffles its own, which has no o_proj
        return None
    if length == 2 * width and not _heads(place):  # k and v alone, or two queries to a key
        return None
    q = inputs if outputs == width else length // 3 if length == 3 * width else 0
    k = (length - q) // 2
    certain = 0 < k <= q and q % k == 0 and q + 2 * k == length
    return _below(place, {"q": q, "k": k, "v": k}) if certain else None


def _thirds(found: Heads) -> dict[str, int]:
    return {"q": found.queries * found.size} | dict.fromkeys("kv", found.keys * found.size)


def _interleaved(place: Place) -> Layout | None:
    """q, k and v of one head (or of the heads that share a key) together, then of the next.

    So store GPT-NeoX, BLOOM, Falcon, Megatron and InternLM2. Only a config tells how many.
    """
    leaf, types = place.path.rpartition(".")[2], place.config.types
    rows, columns = place.shape
    if leaf == "qkv_proj" and "codegen" in types and rows == 3 * columns and rows % 12 == 0:
        # four pieces for as many of the machines that trained it, and values before keys
        indices = [(label, (ALL, i)) for label, i in (("q", 0), ("k", 2), ("v", 1))]
        return Layout((4, 3, rows // 12, columns), (0, 1, 2, 3), tuple(indices))
    starcoder = leaf == "c_attn" and "gpt_bigcode" in types and not place.config.all("multi_query")
    chatglm = "chatglm" in types and place.config.all("multi_query_group_num")
    if chatglm or not (starcoder or leaf in ("query_key_value", "wqkv")):
        return None
    if (found := _heads(place)) is None:
        return None
    g = found.shared
    parts: Parts = (
        ("q", (ALL, slice(g))), ("k", (ALL, g)), ("v", (ALL, g + 1)),
    )  # fmt: skip
    return Layout((found.keys, g + 2, found.size, columns), (0, 1, 2, 3), parts)


def _heads(place: Place) -> Heads | None:
    """Heads of a layer that holds q, k and v, by its length."""
    rows = _oriented(place)[0]
    return place.config.heads(place.key, lambda h: (h.queries + 2 * h.keys) * h.size == rows)


def _gated(place: Place) -> Layout | None:
    """Gate and up, one below the other."""
    for leaf, (sibling, order) in GATED.items():
        if not f".{place.path}".endswith(f".{leaf}"):
            continue
        rows, columns = place.shape
        beside = place.beside(sibling, leaf)
        certain = rows == 2 * beside[1] or (leaf == "gate_up_proj" and beside == (0, 0))
        if rows % 2 or not certain or (leaf == "fc1" and not _speaks_of_gates(place)):
            return None
        labels = enumerate(order.split())
        parts = tuple((label, (i,)) for i, label in labels)
        return Layout((2, rows // 2, columns), (0, 1, 2), parts)
    return None


def _speaks_of_gates(place: Place) -> bool:
    keys = ("hidden_act", "activation_function", "activation", "hidden_activation", "mlp_type")
    values = [value for key in keys for value in place.config.all(key)]
    return any("glu" in str(value).lower() for value in values)
