"""The correction of attention logits: queries and keys of a head are scaled down together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, final

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.corrections._selection import AnalysedModel
from kappascope.corrections._treatments import OptimizerStep, Rewrite, State, Treatment
from kappascope.corrections.correction import Allowed, Correction, pure_form, why_not_written
from kappascope.matrix import spectra
from kappascope.model.attention import Attention, attention
from kappascope.model.matrices import Plan, Unit, plan
from kappascope.model.weights import LiveWeight, precise

Measured = Callable[[str], Tensor | None]


@final
@dataclass(frozen=True)
class QKClip(Correction):
    """After a step, scale queries and keys of every head whose logits may exceed ``tau``.

    As in Kimi Team (2025), a head h whose largest logit is ``m > tau`` has its query and key rows
    multiplied by ``sqrt(tau / m)`` each, biases too, and other heads stay as they are. With
    grouped queries a key is scaled for the worst query that uses it, and the other queries make up
    for it.

    ``measured`` tells m: a function of the name of an attention layer, which gives the largest
    logits of its heads in the last forward pass (with whatever was added to them), or ``None`` if
    it has none. Without it m is what the weights alone bound: ``sigma_1(Wq' Wk) n / sqrt(size)``,
    the largest logit that inputs of root mean square one (as a norm layer of gain one gives them)
    and width n can have, biases aside. That bound is seldom reached, so it clips sooner. The
    number of heads comes from the model's config or its modules, or from ``heads``.

    >>> query = key = torch.eye(4) * 10.0
    >>> QKClip(tau=50.0, heads=2).corrected(query, key).diagonal()    # 10 * 10 * 4 / sqrt(2) = 283
    tensor([4.2045, 4.2045, 4.2045, 4.2045])
    """

    allowed: ClassVar[Allowed] = {
        **Correction.allowed,
        "tau": Correction.allowed["clip"],
        "heads": (
            lambda n: n is None or Correction.allowed["every"][0](n),
            "a whole number, at least 1, or None",
        ),
        "measured": (lambda f: f is None or callable(f), "a function of a layer's name, or None"),
    }

    tau: float = 100.0
    heads: int | None = None
    measured: Measured | None = None

    @pure_form
    def corrected(
        self, weight: Tensor, key: Tensor | None = None
    ) -> Float[Tensor, "*stack out in"]:
        """The query matrix clipped by the bound of it and ``key``; without one, as it is."""
        if key is None:
            return weight
        heads = self.heads or 1
        queries, keys = (w.unflatten(-2, (heads, -1)) for w in (weight, precise(key)))
        part = self._part(_bound(queries, keys))
        return (queries * part.sqrt()[..., None, None].to(weight)).flatten(-3, -2)

    def _part(self, logits: Tensor) -> Tensor:
        """Which part of each head's logits is left."""
        return (self.tau / logits.clamp(min=self.tau)).nan_to_num(1.0)

    def objection(self, weight: LiveWeight, model: AnalysedModel) -> str | None:
        """Why the weight has no heads to be clipped, if that is so."""
        if not self._layers(weight, model):
            return "it is no query or key of an attention layer whose heads are known (pass heads=)"
        return why_not_written(weight)

    def treatments(self, weight: LiveWeight, model: AnalysedModel) -> Iterator[Treatment]:
        """Rewrite query and key after every step, each by its part of what is due."""
        rule = _Clip(self, weight, self._layers(weight, model))
        rewrite = Rewrite(QKClip, weight, rule, {})
        rewrite.beside = tuple(_biases(weight))
        yield rewrite

    def _layers(self, weight: LiveWeight, model: AnalysedModel) -> list[_Heads]:
        """The attention layers in which the weight is a query or key."""
        layers = _layers_of(model, self.heads)
        return [heads for heads in layers if weight in (heads.query, heads.key)]


@dataclass(eq=False)
class _Heads:
    """An attention layer of a live model: which rows of which weights its heads have."""

    name: str
    query: LiveWeight
    key: LiveWeight
    query_rows: Tensor  # (heads, size): numbers of rows of the weight's matrix
    key_rows: Tensor
    known_parts: dict[int, Tensor] = field(default_factory=dict)  # parts of logits, by the step

    @property
    def shared(self) -> int:
        """How many queries use the same key."""
        return len(self.query_rows) // len(self.key_rows)

    def parts(self, clip: QKClip, step: int) -> Tensor:
        """Which part of its logits every head keeps, found out before either weight is scaled."""
        if step not in self.known_parts:
            logits = None if clip.measured is None else clip.measured(self.name)
            if clip.measured is None:
                query, key = (precise(w.matrix()) for w in (self.query, self.key))
                keys = key[self.key_rows.to(key.device)].repeat_interleave(self.shared, 0)
                logits = _bound(query[self.query_rows.to(query.device)], keys)
            parts = torch.ones(len(self.query_rows), dtype=torch.float64)
            if logits is not None:
                if tuple(logits.shape) != tuple(parts.shape):
                    expected = f"{len(parts)} largest logits of {self.name}, one a head"
                    raise ValueError(f"expected {expected}; got shape {tuple(logits.shape)}")
                parts = clip._part(logits.detach().double().cpu())
            self.known_parts = {step: parts}
        return self.known_parts[step]

    def factors(
        self, clip: QKClip, step: int, weight: LiveWeight
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Rows of the weight, and what they are to be multiplied by."""
        parts = self.parts(clip, step)
        keys = parts.unflatten(0, (-1, self.shared)).amin(1).sqrt()
        if weight is self.key:
            yield self.key_rows, keys
        if weight is self.query:
            yield self.query_rows, parts / keys.repeat_interleave(self.shared)


@dataclass(frozen=True, eq=False)
class _Clip:
    """The rule of one weight, which may hold queries, keys or both."""

    clip: QKClip
    weight: LiveWeight
    layers: list[_Heads]

    def __call__(self, matrix: Tensor, step: OptimizerStep, memory: State) -> Tensor | None:
        factor = torch.ones(matrix.shape[-2], dtype=torch.float64)
        for heads in self.layers:
            for rows, values in heads.factors(self.clip, step.index, self.weight):
                factor[rows.flatten()] = values.repeat_interleave(rows.shape[1])
        if bool((factor == 1).all()):
            return None
        wide = precise(matrix)
        for bias in _biases(self.weight):
            bias.detach().mul_(factor.to(bias))
        return wide * factor.to(wide)[:, None]


def _biases(weight: LiveWeight) -> Iterator[Tensor]:
    """The biases beside a weight, entry by entry those of its rows."""
    for module, attribute in weight.owners:
        name = attribute.replace("weight", "bias")
        bias = module._parameters.get(name) if name != attribute else None
        if bias is not None and bias.shape == weight.matrix().shape[-2:-1]:
            yield bias


def _bound(queries: Tensor, keys: Tensor) -> Tensor:
    """The largest logit of each head for inputs of root mean square one."""
    largest = spectra.product_singular_values(queries.mT, keys)[0][..., 0]
    return largest * queries.shape[-1] / math.sqrt(queries.shape[-2])


def _layers_of(model: AnalysedModel, heads: int | None) -> list[_Heads]:
    """The attention layers of the model, found once for every number of heads."""
    cache = vars(model).setdefault("_attention_layers", {})
    if heads not in cache:
        cache[heads] = list(_live_heads(model, heads))
    layers: list[_Heads] = cache[heads]
    return layers


def _live_heads(model: AnalysedModel, heads: int | None) -> Iterator[_Heads]:
    by_name = {name: weight for weight in model.weights for name, *_ in weight.uses}
    surveyed = plan(model.model)
    for each in _known_attention(surveyed, heads):
        rows = {}
        for unit in each.units:
            weight = by_name.get(unit.parts[0].name)
            if weight is not None and weight.matrix().ndim == 2:
                for part, numbers in _row_numbers(unit, weight):
                    rows[part] = weight, numbers
        if each.query.name in rows and each.key.name in rows:
            (query, query_rows), (key, key_rows) = rows[each.query.name], rows[each.key.name]
            size = each.heads.size
            yield _Heads(
                each.name,
                query,
                key,
                query_rows.unflatten(0, (-1, size)),
                key_rows.unflatten(0, (-1, size)),
            )


def _known_attention(surveyed: Plan, heads: int | None) -> Iterator[Attention]:
    """The attention layers whose heads are known, or which ``heads`` fit."""
    if heads is None:
        yield from attention(surveyed)[0]
        return
    widths = {part.shape[-1] for unit in surveyed.units for part in unit.parts}
    seen = set()
    for width in sorted(widths):
        config = {"num_attention_heads": heads, "hidden_size": width}
        for each in attention(surveyed, config)[0]:
            if each.name not in seen:
                seen.add(each.name)
                yield each


def _row_numbers(unit: Unit, weight: LiveWeight) -> Iterator[tuple[str, Tensor]]:
    """For every part of a stored weight, which rows of the live matrix it has."""
    rows, columns = weight.matrix().shape
    ranks = torch.arange(rows, dtype=torch.float64)[:, None].expand(rows, columns)
    numbers = weight.layout.tensor(ranks.contiguous())
    for part, (_, matrix) in zip(unit.parts, unit.layout.cut(numbers), strict=True):
        yield part.name, matrix[:, 0].long()
