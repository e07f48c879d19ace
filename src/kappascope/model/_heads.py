"""How many heads an attention layer has, from the ``config.json`` of its model or what is near it.

A config may speak of several models (text and vision, encoder and decoder), each with its own
numbers. What counts for a layer are the numbers that fit its shapes; if several do and differ,
those whose section is named in the layer's name; and if that does not decide, nothing does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
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


@dataclass(frozen=True, eq=False)
class Config:
    """What a ``config.json`` says; it is gone through once, for all layers.

    >>> Config({"text_config": {"model_type": "gpt2"}}).types
    {'gpt2'}
    """

    content: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def sections(self) -> list[tuple[str, Mapping[str, Any]]]:
        """The config and the configs inside it, each with its name.

        >>> [label for label, _ in Config({"text_config": {"n_head": 2}}).sections]
        ['', 'text_config']
        """
        sections: list[tuple[str, Mapping[str, Any]]] = [("", self.content)]
        for _, section in sections:  # which grows as it is gone through
            inside = ((str(k), value) for k, value in section.items() if isinstance(value, Mapping))
            sections.extend(islice(inside, _SECTIONS - len(sections)))
        return sections

    @cached_property
    def types(self) -> set[str]:
        """The families of models of which it speaks."""
        return {str(value) for value in self.all("model_type")}

    def all(self, key: str) -> list[Any]:
        """What stands under ``key``, wherever it does and is something.

        >>> Config({"n_head": 2, "text_config": {"n_head": 4}}).all("n_head")
        [2, 4]
        """
        return [section[key] for _, section in self.sections if section.get(key)]

    def heads(self, name: str, fits: Callable[[Heads], bool]) -> Heads | None:
        """The heads of the layer ``name``, if there is exactly one answer that ``fits``.

        >>> config = Config({"hidden_size": 64, "num_attention_heads": 4})
        >>> config.heads("attn", lambda h: h.size == 16)
        Heads(queries=4, keys=4, size=16)
        """
        fitting = [(label, heads) for label, heads in self._candidates if fits(heads)]
        named = {heads for label, heads in fitting if _speaks_of(label, name)}
        for answers in ({heads for _, heads in fitting}, named):
            if len(answers) == 1:
                return answers.pop()
        return None

    @cached_property
    def _candidates(self) -> list[tuple[str, Heads]]:
        return [pair for label, section in self.sections for pair in _candidates(label, section)]


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


def _candidates(label: str, section: Mapping[str, Any]) -> Iterator[tuple[str, Heads]]:
    """The heads of which one section speaks."""
    width, size = _number(section, _WIDTHS), _number(section, _SIZES)
    inner = section.get("attn_config")  # of MPT and DBRX, for the keys only
    for prefix in ("", "encoder_", "decoder_"):  # the last two of BART and Whisper
        queries = _number(section, [prefix + key for key in _QUERIES])
        if not queries or not (size or width % queries == 0 < width):
            continue
        keys = _keys(section, queries, _number(section, _KEYS) or _number(inner, _KEYS))
        if queries % keys == 0:
            yield prefix or label, Heads(queries, keys, size or width // queries)


def _keys(section: Mapping[str, Any], queries: int, keys: int) -> int:
    """The number of key heads, of which ``section`` says ``keys``."""
    if keys and section.get("new_decoder_architecture") is not False:
        return keys
    return 1 if section.get("multi_query") is True else queries  # Falcon and StarCoder


def _number(section: object, keys: Any) -> int:
    """The first of ``keys`` that holds a usable number, or 0."""
    values = [section.get(key) for key in keys] if isinstance(section, Mapping) else []
    usable = (v for v in values if type(v) is int and 0 < v <= _LARGEST)
    return next(usable, 0)
