"""Pairs of checkpoints of a small language model, with what became of every layer between them.

Ten transformations that do no harm or that training does, and five kinds of damage; each pair is
drawn from a seed, with its sizes, its type and where it strikes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

Weights = dict[str, Tensor]
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class Pair:
    """Two checkpoints, and the verdicts that are right: of named layers, and of all others."""

    kind: str
    before: Weights
    after: Weights
    verdicts: Mapping[str, str] = field(default_factory=dict)
    others: str = "same"
    is_damage: bool = False


class Draw:
    """Random choices from one seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def below(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.generator))

    def one(self, *choices):
        return choices[self.below(len(choices))]

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator)

    def weight(self, rows: int, columns: int) -> Tensor:
        """A matrix like a trained one: singular values that fall, rows of unlike size."""
        short = min(rows, columns)
        u = torch.linalg.qr(self.normal(rows, short)).Q
        v = torch.linalg.qr(self.normal(columns, short)).Q
        spectrum = 1 + 9 * torch.linspace(1, 0, short) ** 3
        return (0.3 * self.normal(rows, 1)).exp() * (u * spectrum @ v.T) / columns**0.5


def language_model(draw: Draw) -> Weights:
    """A Llama of two layers; every other one has biases in its attention."""
    width, inner, vocabulary = draw.one(32, 48, 64), draw.one(72, 96), draw.one(100, 128)
    weights = {"model.embed_tokens.weight": draw.weight(vocabulary, width)}
    biased = draw.one(True, False)
    for layer in range(2):
        for name in MATRICES:
            rows = inner if name in ("gate_proj", "up_proj") else width
            columns = inner if name == "down_proj" else width
            weights[path(layer, name)] = draw.weight(rows, columns)
            if biased and name[0] in "qkv":
                weights[path(layer, name, "bias")] = 0.1 * draw.normal(width)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{norm}.weight"] = 1 + 0.2 * draw.normal(width)
    weights["model.norm.weight"] = 1 + 0.2 * draw.normal(width)
    weights["lm_head.weight"] = draw.weight(vocabulary, width)
    dtype = draw.one(torch.float32, torch.float32, torch.bfloat16)
    return {name: weight.to(dtype) for name, weight in weights.items()}


def path(layer: int, name: str, leaf: str = "weight") -> str:
    place = "self_attn" if name[0] in "qkvo" else "mlp"
    return f"model.layers.{layer}.{place}.{name}.{leaf}"


def exact(draw: Draw) -> Weights:
    """A model in float32, where a rounding is to be seen."""
    return {name: weight.float() * (1 + 2**-20) for name, weight in language_model(draw).items()}


# --- ten transformations --------------------------------------------------------------------------


def renamed(draw: Draw) -> Pair:
    before = language_model(draw)
    prefix = draw.one("module.", "base_model.model.", "bert.", "_orig_mod.", "a.b.")
    if draw.one(True, False):
        return Pair("renamed", before, {prefix + name: it for name, it in before.items()})
    return Pair("renamed", {prefix + name: it for name, it in before.items()}, before)


def rounded_to(*dtypes: torch.dtype) -> Callable[[Draw], Pair]:
    def rounded(draw: Draw) -> Pair:
        before, dtype = exact(draw), draw.one(*dtypes)
        back = draw.one(torch.float32, dtype if dtype.itemsize > 1 else torch.bfloat16)
        after = {name: it.to(dtype).to(back) for name, it in before.items()}
        return Pair(str(dtype).removeprefix("torch."), before, after, others="rounding")

    return rounded


def eight_bits(draw: Draw) -> Pair:
    if draw.one(True, False):
        return rounded_to(torch.float8_e4m3fn, torch.float8_e5m2)(draw)
    before = exact(draw)
    after, verdicts = dict(before), {}
    for name, it in before.items():
        if it.ndim == 2:
            step = it.abs().amax(1, True) / 127
            after[name], verdicts[name] = (it / step).round() * step, "rounding"
    return Pair("int8", before, after, verdicts)


def transposed(draw: Draw) -> Pair:
    before = language_model(draw)
    after, verdicts = dict(before), {}
    for name in draw.one(MATRICES, ("up_proj", "down_proj"), ("o_proj",)):
        layer = draw.below(2)
        after[path(layer, name)] = before[path(layer, name)].T.contiguous()
        verdicts[path(layer, name)] = "rearranged"
    return Pair("transposed", before, after, verdicts)


def between_layers(draw: Draw) -> Pair:
    """What one layer does and another undoes: neurons, gains, heads, scales."""
    before, layer = exact(draw), draw.below(2)
    after = dict(before)
    what = draw.one("neurons", "gains", "heads", "scales")
    q, k, _, _, gate, up, down = (path(layer, name) for name in MATRICES)
    if what == "neurons":
        order = draw.order(len(before[up]))
        changed = {gate: before[gate][order], up: before[up][order], down: before[down][:, order]}
    elif what == "gains":
        norm = f"model.layers.{layer}.post_attention_layernorm.weight"
        gain = before[norm]
        changed = {norm: torch.ones_like(gain), gate: before[gate] * gain, up: before[up] * gain}
    elif what == "heads":
        turn = torch.block_diag(*[torch.linalg.qr(draw.normal(8, 8)).Q] * (len(before[q]) // 8))
        changed = {q: turn @ before[q], k: turn @ before[k]}
        for one in (q, k):
            bias = one.replace("weight", "bias")
            after.pop(bias, None), before.pop(bias, None)
    else:
        factors = (0.5 * draw.normal(len(before[up]))).exp()
        changed = {up: factors[:, None] * before[up], down: before[down] / factors}
    return Pair(what, before, after | changed, dict.fromkeys(changed, "rearranged"))


def rotary(draw: Draw) -> Pair:
    """Halves of heads in place of pairs, as other programs rotate them."""
    before, layer = language_model(draw), draw.below(2)
    after, verdicts = dict(before), {}
    size = draw.one(8, 16)
    order = torch.arange(len(before[path(0, "q_proj")])).view(-1, 2, size // 2).mT.flatten()
    order = draw.one(order, order.argsort())
    for name in ("q_proj", "k_proj"):
        for leaf in ("weight", "bias"):
            if (key := path(layer, name, leaf)) in before:
                after[key], verdicts[key] = before[key][order], "rearranged"
    return Pair("rotary order", before, after, verdicts)


def fused(draw: Draw) -> Pair:
    """Queries, keys and values in one tensor: one after another, or by head; or the other way."""
    split = {name: it for name, it in language_model(draw).items() if not name.endswith("bias")}
    joined, heads, by_head = dict(split), 4, draw.one(True, False)
    for layer in range(2):
        three = [joined.pop(path(layer, f"{x}_proj")) for x in "qkv"]
        whole = torch.cat(three)
        if by_head:
            whole = torch.stack([x.view(heads, -1, x.shape[1]) for x in three], 1).flatten(0, 2)
        name = "query_key_value" if by_head else "qkv"
        joined[f"model.layers.{layer}.self_attn.{name}.weight"] = whole
    before, after = draw.one((split, joined), (joined, split))
    verdicts = {name: "rearranged" for name in after if "query_key_value" in name or "qkv" in name}
    if after is split:
        verdicts = {path(layer, f"{x}_proj"): "rearranged" for layer in (0, 1) for x in "qkv"}
    else:
        verdicts |= {
            f"{name}[{x}]": "rearranged" for name in after if name.endswith("qkv.weight")
            for x in "qkv"
        }  # fmt: skip
    return Pair("fused", before, after, verdicts)


def tied(draw: Draw) -> Pair:
    """A head that repeats the table, stored in one of the two only."""
    both = language_model(draw)
    both["lm_head.weight"] = both["model.embed_tokens.weight"].clone()
    once = {name: it for name, it in both.items() if name != "lm_head.weight"}
    return Pair("tied", *draw.one((both, once), (once, both)))


def trained(draw: Draw) -> Pair:
    before = language_model(draw)
    before = {name: it for name, it in before.items() if it.ndim == 2}
    how = draw.one("dense", "low rank", "tokens", "decay", "signs")
    after, verdicts = dict(before), {}
    for name, it in before.items():
        size = float(it.float().std()) * draw.one(0.01, 0.05, 0.2)
        if how == "tokens" and "embed" in name:
            rows = draw.order(len(it))[: len(it) // 3]
            moved = torch.zeros(it.shape)
            moved[rows] = size * draw.normal(len(rows), it.shape[1])
        elif how == "low rank":
            moved = size * draw.normal(len(it), 4) @ draw.normal(4, it.shape[1]) / 2
        elif how == "signs":  # as one step of Adam
            moved = size * draw.normal(*it.shape).sign()
        elif how == "decay":
            moved = -0.03 * it.float()
        else:
            moved = size * draw.normal(*it.shape) * (0.3 * draw.normal(len(it), 1)).exp()
        after[name] = (it.float() + moved).to(it.dtype)
        verdicts[name] = "trained"
    return Pair(f"trained: {how}", before, after, verdicts)


# --- five kinds of damage -------------------------------------------------------------------------


def struck(kind: str, draw: Draw, strike: Callable[[Tensor], Tensor | None]) -> Pair:
    """Damage one matrix of a model that is the same otherwise, or rounded, or trained a little."""
    before = exact(draw)
    state = draw.one("same", "rounding", "trained")
    after = dict(before)
    if state == "rounding":
        after = {name: it.bfloat16() for name, it in before.items()}
    elif state == "trained":
        after = {name: it + 0.01 * it.std() * draw.normal(*it.shape) for name, it in before.items()}
    name = draw.one(*(path(draw.below(2), name) for name in MATRICES), "lm_head.weight")
    broken = strike(after[name].clone())
    assert broken is not None
    after[name] = broken.contiguous()
    return Pair(f"{kind}, {state}", before, after, {name: "damaged"}, state, True)


def run_of(matrix: Tensor, draw: Draw) -> slice:
    """A run of entries of a matrix in memory: from a few to a third."""
    length = draw.one(24, 100, matrix.numel() // 8, matrix.numel() // 3)
    begin = draw.below(matrix.numel() - length)
    return slice(begin, begin + length)


def zeroed(draw: Draw) -> Pair:
    def strike(matrix: Tensor) -> Tensor:
        matrix.view(-1)[run_of(matrix, draw)] = 0
        return matrix

    return struck("zeroed", draw, strike)


def non_finite(draw: Draw) -> Pair:
    def strike(matrix: Tensor) -> Tensor:
        matrix.view(-1)[draw.below(matrix.numel())] = draw.one(torch.nan, torch.inf, -torch.inf)
        return matrix

    return struck("non-finite", draw, strike)


def flipped(draw: Draw) -> Pair:
    """One to three bits of sign or exponent, of entries that are not among the small ones."""

    def strike(matrix: Tensor) -> Tensor:
        is_wide = matrix.dtype == torch.float32
        bits = matrix.view(torch.int32 if is_wide else torch.int16).view(-1)
        large = matrix.abs().flatten().argsort(descending=True)[: matrix.numel() // 10]
        for _ in range(draw.one(1, 3)):
            place = large[draw.below(len(large))]
            bit = draw.one(*range(26, 32)) if is_wide else draw.one(*range(10, 16))
            number = 1 << bit
            limit = 1 << (31 if is_wide else 15)
            bits[place] ^= number - 2 * limit if number == limit else number
        return matrix

    return struck("flipped bits", draw, strike)


def overwritten(draw: Draw) -> Pair:
    def strike(matrix: Tensor) -> Tensor:
        run, flat = run_of(matrix, draw), matrix.view(-1)
        noise = draw.normal(len(flat[run])).to(matrix.dtype)
        flat[run] = draw.one(noise * matrix.std(), noise, flat.flip(0)[run].clone())
        return matrix

    return struck("overwritten", draw, strike)


def misplaced(draw: Draw) -> Pair:
    """Numbers that are whole but in the wrong place, or without their scale."""
    how = draw.one("shift", "bytes", "rows", "scale", "shuffle", "layer")
    if how == "layer":
        before = exact(draw)
        one, other = (path(layer, draw.one("k_proj", "up_proj")) for layer in (0, 1))
        one = other.replace("layers.1", "layers.0")
        after = before | {other: before[one].clone()}
        return Pair("another layer", before, after, {other: "damaged"}, "same", True)

    def strike(matrix: Tensor) -> Tensor:
        flat = matrix.view(-1)
        if how == "shift":
            return flat.roll(draw.one(1, 3, 17)).view_as(matrix)
        if how == "bytes":
            size = matrix.element_size()
            turned = matrix.contiguous().view(torch.uint8).view(-1, size).flip(1)
            return turned.contiguous().view(matrix.dtype).view_as(matrix)
        if how == "rows":
            return matrix[draw.order(len(matrix))]
        if how == "scale":
            return matrix * draw.one(16, 0.125)
        return flat[draw.order(len(flat))].view_as(matrix)

    return struck(f"misplaced: {how}", draw, strike)


TRANSFORMATIONS = (
    renamed,
    rounded_to(torch.float16),
    rounded_to(torch.bfloat16),
    eight_bits,
    transposed,
    between_layers,
    rotary,
    fused,
    tied,
    trained,
)
DAMAGES = (zeroed, non_finite, flipped, overwritten, misplaced)


def drawn_pairs(transformed: int, damaged: int, first: int = 0):
    """So many pairs of every transformation, then of every kind of damage, from a seed on."""
    for makers, count in ((TRANSFORMATIONS, transformed), (DAMAGES, damaged)):
        for place, make in enumerate(makers):
            for seed in range(count):
                yield make(Draw(first + 1000 * place + seed + (500 if makers is DAMAGES else 0)))
