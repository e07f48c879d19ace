"""The networks whose weights other people trained, run in plain PyTorch: a Llama and a BERT.

A network is frozen data, a state dict and the numbers of its shape; one with other weights is
another network (:meth:`Network.altered`). Names are those of Hugging Face's state dicts.
"""

from __future__ import annotations

import math
import re
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Self, final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear, rms_norm, silu
from torch.nn.functional import scaled_dot_product_attention as attention

from kappascope.checkpoints import open

State = Mapping[str, Tensor]
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Network(ABC):
    """A network is its weights and the config that Hugging Face would give with them."""

    state: State
    config: Mapping[str, Any]

    def altered(self, changes: State) -> Self:
        """Replace some of the network's weights."""
        return replace(self, state={**self.state, **changes})

    def _heads(self, x: Tensor) -> Float[Tensor, "batch heads place size"]:
        return x.unflatten(-1, (int(self.config["num_attention_heads"]), -1)).transpose(-2, -3)

    @abstractmethod
    def __call__(self, tokens: Any) -> Tensor:
        """Answer a batch of tokens."""


@final
@dataclass(frozen=True)
class Llama(Network):
    """A causal language model: RMSNorm, rotary positions, SwiGLU; embedding and classifier tied.

    Positions turn neighbouring entries (0 and 1, 2 and 3, ...) as llama2.c has them, which is
    Hugging Face's layout up to a permutation that queries and keys share.
    """

    def __call__(self, tokens: Int[Tensor, "batch place"]) -> Float[Tensor, "batch place word"]:
        """Give logits of the token after each position."""
        return self.words(self.read(tokens, KeyValueCache()))

    def read(self, tokens: Int[Tensor, "batch place"], cache: KeyValueCache) -> Tensor:
        """Compute the stream after the last layer, reading and extending ``cache``."""
        x = embedding(tokens, self.state[EMBEDDING])
        head_size = int(self.config["hidden_size"]) // int(self.config["num_attention_heads"])
        turn = rotations(cache.length, x.shape[-2], head_size)
        for layer in range(int(self.config["num_hidden_layers"])):
            x = x + self._attend(x, layer, turn, cache)
            x = x + self._feed_forward(x, layer)
        return self._norm(x, "model.norm")

    def words(self, x: Tensor) -> Float[Tensor, "batch place word"]:
        """Compute logits from the stream."""
        return linear(x, self.state[EMBEDDING])

    @torch.no_grad()
    def sampled(
        self, count: int, length: int, random: torch.Generator
    ) -> Int[Tensor, "count length"]:
        """Sample texts token by token from its own distribution, each begun by token 1."""
        cache, tokens = KeyValueCache(), torch.ones(count, 1, dtype=torch.long)
        while tokens.shape[1] < length:
            chances = self.words(self.read(tokens[:, -1:], cache))[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=random)], 1)
        return tokens

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.state[f"{name}.weight"], eps=1e-5)

    def _attend(self, x: Tensor, layer: int, turn: Tensor, cache: KeyValueCache) -> Tensor:
        prefix = f"model.layers.{layer}"
        y = self._norm(x, f"{prefix}.input_layernorm")
        q, k, v = (
            self._heads(linear(y, self.state[f"{prefix}.self_attn.{part}_proj.weight"]))
            for part in "qkv"
        )
        k, v = cache.extended(layer, rotated(k, turn), v)
        single = q.shape[-2] == 1  # the last token sees all
        seen = attention(rotated(q, turn), k, v, is_causal=not single)
        return linear(
            seen.transpose(-2, -3).flatten(-2), self.state[f"{prefix}.self_attn.o_proj.weight"]
        )

    def _feed_forward(self, x: Tensor, layer: int) -> Tensor:
        prefix = f"model.layers.{layer}"
        y = self._norm(x, f"{prefix}.post_attention_layernorm")
        gate, up, down = (
            self.state[f"{prefix}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
        )
        return linear(silu(linear(y, gate)) * linear(y, up), down)


class KeyValueCache:
    """The keys and values of the positions that were read, layer by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """The number of positions that were read."""
        return self.layers[0][0].shape[-2] if self.layers else 0

    def extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values of new positions to those of a layer, and return all."""
        if layer in self.layers:
            before_k, before_v = self.layers[layer]
            k, v = torch.cat([before_k, k], -2), torch.cat([before_v, v], -2)
        self.layers[layer] = k, v
        return k, v


def rotations(first: int, count: int, size: int) -> Tensor:
    """Compute the rotation of each position and pair of entries, as a complex number."""
    speeds = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(first, first + count)[:, None] * speeds
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Rotate pairs of neighbouring entries, each in its plane."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def llama2c(data: bytes) -> tuple[Llama, Tokenizer]:
    """Read the model and the tokenizer that llama2.c keeps one after the other.

    The file has seven int32 (sizes), float32 weights kind by kind, all layers of a kind together,
    two tables of rotations that follow from the sizes; then every token's score, length and bytes.
    """
    width, inner, layers, heads, keys, words, places = np.frombuffer(data, "<i4", 7).tolist()
    if words < 0 or keys != heads:
        raise ValueError(f"a tied classifier and {heads} key heads are expected, got {keys}")
    square, wide, norm = (width, width), (inner, width), (width,)
    kinds: dict[str, tuple[int, ...]] = {
        "input_layernorm": norm,
        **{f"self_attn.{part}_proj": square for part in "qkvo"},
        "post_attention_layernorm": norm,
        "mlp.gate_proj": wide, "mlp.down_proj": (width, inner), "mlp.up_proj": wide,
    }  # fmt: skip
    place = 28  # bytes, after the sizes

    def take(*shape: int) -> Tensor:
        nonlocal place
        count = math.prod(shape)
        weights = np.frombuffer(data, "<f4", count, place)
        place += 4 * count
        return torch.from_numpy(weights.copy()).view(shape)

    state = {EMBEDDING: take(words, width)}
    for kind, shape in kinds.items():
        stack = take(layers, *shape)
        state |= {f"model.layers.{i}.{kind}.weight": stack[i] for i in range(layers)}
    state["model.norm.weight"] = take(width)
    take(2, places, width // heads // 2)
    config = {"model_type": "llama", "hidden_size": width, "num_attention_heads": heads,
              "num_hidden_layers": layers, "max_position_embeddings": places}  # fmt: skip
    return Llama(state, config), Tokenizer.of(data[place:], words)


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer has pieces of words with scores; neighbours whose union scores best are joined.

    That is repeated until none can be. Words are joined one by one, since no piece reaches over a
    space but at its beginning. A character without a piece becomes its bytes.
    """

    pieces: tuple[bytes, ...]
    scores: tuple[float, ...]

    @classmethod
    def of(cls, data: bytes, count: int) -> Tokenizer:
        """Read what llama2.c writes: the longest length, then score, length and bytes of each."""
        place, pieces, scores = 4, [], []
        for _ in range(count):
            (score,) = np.frombuffer(data, "<f4", 1, place)
            (length,) = np.frombuffer(data, "<i4", 1, place + 4)
            pieces.append(data[place + 8 : place + 8 + length])
            scores.append(float(score))
            place += 8 + int(length)
        return cls(tuple(pieces), tuple(scores))

    @cached_property
    def numbers(self) -> dict[bytes, int]:
        """The number of each piece; of two equal ones the later: the first are single bytes."""
        return {piece: place for place, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        """Cut a text into tokens, without one that begins it."""
        words = re.findall(r" *[^ ]+| +", f" {text}")
        known = {word: self._joined(word) for word in set(words)}
        return [token for word in words for token in known[word]]

    def _joined(self, word: str) -> list[int]:
        tokens: list[int] = []
        for letter in map(str.encode, word):
            known = self.numbers.get(letter)
            tokens += [byte + 3 for byte in letter] if known is None else [known]
        while True:
            unions = [
                (self.scores[union], -place, union)
                for place, (left, right) in enumerate(pairwise(tokens))
                if (union := self.numbers.get(self.pieces[left] + self.pieces[right])) is not None
            ]
            if not unions:
                return tokens
            _, place, union = max(unions)  # of equals the first
            tokens[-place : 2 - place] = [union]


@final
@dataclass(frozen=True)
class Bert(Network):
    """An encoder with post-norm; a text is the mean of its tokens, scaled to length 1."""

    words: Mapping[str, int]

    def __call__(self, tokens: list[list[int]]) -> Float[Tensor, "text width"]:
        """Place each text on the unit sphere."""
        longest = max(map(len, tokens))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in tokens])
        real = torch.tensor([[place < len(text) for place in range(longest)] for text in tokens])
        part = {
            name: self.state[f"embeddings.{name}_embeddings.weight"]
            for name in ("word", "position", "token_type")
        }
        x = embedding(padded, part["word"]) + part["position"][:longest] + part["token_type"][0]
        x = self._norm(x, "embeddings.LayerNorm")
        for layer in range(int(self.config["num_hidden_layers"])):
            x = self._layer(x, real, f"encoder.layer.{layer}")
        total = (x * real[..., None]).sum(-2)
        return total / total.norm(dim=-1, keepdim=True)

    def encode(self, text: str) -> list[int]:
        """Cut a text into WordPiece tokens: lower case, no accents, the longest piece first."""
        plain = unicodedata.normalize("NFD", text.lower())
        letters = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        words = re.findall(r"[^\W_]+|[^\w\s]|_", letters)
        pieces = [piece for word in words for piece in self._pieces(word)]
        return [self.words["[CLS]"], *pieces, self.words["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        pieces: list[int] = []
        rest, mark = word, ""
        while rest:
            ends = range(len(rest), 0, -1)
            end = next((end for end in ends if mark + rest[:end] in self.words), None)
            if end is None:
                return [self.words["[UNK]"]]
            pieces.append(self.words[mark + rest[:end]])
            rest, mark = rest[end:], "##"
        return pieces

    def _layer(self, x: Tensor, real: Tensor, prefix: str) -> Tensor:
        q, k, v = (
            self._heads(self._linear(x, f"{prefix}.attention.self.{part}"))
            for part in ("query", "key", "value")
        )
        seen = attention(q, k, v, attn_mask=real[:, None, None])
        seen = self._linear(seen.transpose(-2, -3).flatten(-2), f"{prefix}.attention.output.dense")
        x = self._norm(x + seen, f"{prefix}.attention.output.LayerNorm")
        y = gelu(self._linear(x, f"{prefix}.intermediate.dense"))
        return self._norm(
            x + self._linear(y, f"{prefix}.output.dense"), f"{prefix}.output.LayerNorm"
        )

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return layer_norm(x, x.shape[-1:], weight, bias, float(self.config["layer_norm_eps"]))


def bert(folder: Path) -> Bert:
    """Load a BERT from its folder: weights, config and vocabulary."""
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    state, config = stored(folder)
    return Bert(state, config, {word: place for place, word in enumerate(words)})


def stored(path: Path) -> tuple[State, Mapping[str, Any]]:
    """Read the tensors of a checkpoint by name, in their precision, and its config."""
    checkpoint = open.open(path)
    names = [name for name, value in checkpoint.contents.items() if isinstance(value, Tensor)]
    return {name: checkpoint.read((name,)) for name in names}, checkpoint.config
