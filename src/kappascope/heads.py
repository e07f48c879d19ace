"""How many heads an attention layer has, from the ``config.json`` of its model or what is near it.

A config may speak of several models (text and vision, encoder and decoder), each with its own
numbers. What counts for a layer are the numbers that fit its shapes; if several do and differ,
those whose section is named in the layer's name; and if that does not decide, nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

_WIDTHS = ("hidden_size", "n_embd", "d_model", "dim", "embed_dim", "model_dim", "width")
_QUERIES = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "heads")
_KEYS = (
    *("num_key_value_heads", "n_kv_heads", "num_kv_heads", "kv_n_heads"),
    *("multi_query_group_num", "n_head_kv", "num_query_groups"),
)
_SIZES = ("head_dim", "d_kv", "kv_channels", "d_head", "attention_head_size")
# Tensors that stand beside queries: with a place for every head, and with one for a head's rows
_COUNTING = {
    "sinks": 0,  # gpt-oss
    "logit_scale": 0,  # Swin 2
    "relative_position_bias_table": -1,  # Swin
    "relative_position_bias.relative_position_bias_table": -1,  # BEiT
    "relative_attention_bias.weight": -1,  # T5
}
_SIZING = ("q_norm.weight", "q_layernorm.weight", "query_layernorm.weight", "norm_q.weight")
_LARGEST = 2**20  # no model has more of anything; a file nobody vouches for may say so
_SECTIONS = 64  # as many are looked at; configs have a handful
_SYNONYMS = {"vision": ("vision", "visual", "image"), "text": ("text", "language", "llm")}


@dataclass(frozen=True)
class Heads:
    """Heads of an attention layer: of its queries, of its keys and values, and rows of each.

    >>> Heads(queries=32, keys=8, size=128).shared
    4
    """

    queries: int
    keys: int
    size: int

    @property
    def shared(self) -> int:
        """How many queries use the same key (1, or more with grouped queries)."""
        return self.queries // self.keys


def heads(config: Mapping[str, Any], name: str, fits: Callable[[Heads], bool]) -> Heads | None:
    """The heads of the layer ``name``, if ``config`` has exactly one answer that ``fits``.

    >>> heads({"hidden_size": 64, "num_attention_heads": 4}, "attn", lambda h: h.size == 16)
    Heads(queries=4, keys=4, size=16)
    >>> both = {"text_config": {"num_heads": 2, "head_dim": 8}, "vision_config": {"num_heads": 4,
    ...     "head_dim": 4}}
    >>> heads(both, "vision_model.attn", lambda h: h.queries * h.size == 16)
    Heads(queries=4, keys=4, size=4)
    """
    fitting = [(label, found) for label, found in _candidates(config) if fits(found)]
    named = [found for label, found in fitting if _speaks_of(label, name)]
    for answers in ({found for _, found in fitting}, set(named)):
        if len(answers) == 1:
            return answers.pop()
    return None


def count_beside(
    path: str, rows: int, near: Callable[[str], tuple[int, ...] | None], *modules: object
) -> int:
    """The heads of the queries at ``path`` by modules around or tensors beside it, 0 if unknown.

    >>> count_beside("attn.q_proj", 64, {"attn.q_norm.weight": (16,)}.get)
    4
    """
    stem = path.rpartition(".")[0]
    stem = f"{stem}." if stem else ""
    counts = [getattr(module, key, 0) for module in modules for key in _QUERIES]
    for key, places in _COUNTING.items():
        counts += [shape[places] for shape in [near(stem + key)] if shape]
    for key in _SIZING:
        shape = near(stem + key) or (rows,)
        counts += [rows // shape[0]] if len(shape) == 1 and 0 < shape[0] < rows else []
    return next((n for n in counts if type(n) is int and n > 0 and rows % n == 0), 0)


def _speaks_of(label: str, name: str) -> bool:
    """Whether the section ``label`` of a config is the one for the layer ``name``."""
    word = label.removesuffix("_config").removesuffix("_")
    return bool(word) and any(each in name for each in _SYNONYMS.get(word, (word,)))


def _candidates(config: Mapping[str, Any]) -> Iterator[tuple[str, Heads]]:
    for label, section in sections(config):
        width = _number(section, _WIDTHS)
        inner = section.get("attn_config")  # of MPT and DBRX, for the keys only
        for prefix in ("", "encoder_", "decoder_"):  # the last two of BART and Whisper
            queries = _number(section, [prefix + key for key in _QUERIES])
            size = _number(section, _SIZES)
            if not queries or not (size or width % queries == 0 < width):
                continue
            keys = _number(section, _KEYS) or _number(inner, _KEYS)
            for count in _keys(section, queries, keys):
                if queries % count == 0:
                    yield prefix or label, Heads(queries, count, size or width // queries)


def _keys(section: Mapping[str, Any], queries: int, keys: int) -> Iterator[int]:
    """Numbers of key heads that ``section`` may mean."""
    if keys and section.get("new_decoder_architecture") is not False:
        yield keys
    elif section.get("multi_query") is True:  # Falcon and StarCoder
        yield 1
    else:
        yield queries


def sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """``config`` and the configs inside it, each with its name.

    >>> [label for label, _ in sections({"text_config": {"n_head": 2}})]
    ['', 'text_config']
    """
    waiting = [("", config)]
    for label, section in waiting:  # which grows as it is gone through
        yield label, section
        inside = ((str(key), value) for key, value in section.items() if isinstance(value, Mapping))
        waiting.extend(islice(inside, _SECTIONS - len(waiting)))


def model_types(config: Mapping[str, Any]) -> set[str]:
    """The families of models of which ``config`` speaks.

    >>> model_types({"model_type": "gpt2"})
    {'gpt2'}
    """
    return {str(section.get("model_type", "")) for _, section in sections(config)} - {""}


def _number(section: object, keys: Any) -> int:
    """The first of ``keys`` that holds a usable number, or 0."""
    values = [section.get(key) for key in keys] if isinstance(section, Mapping) else []
    usable = (v for v in values if type(v) is int and 0 < v <= _LARGEST)
    return next(usable, 0)
