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

from kappascope import checkpoints

State = Mapping[str, Tensor]
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class Network(ABC):
    """Weights, and the config that Hugging Face would give with them."""

    state: State
    config: Mapping[str, Any]

    def altered(self, changes: State) -> Self:
        """The same network with some of its weights replaced."""
        return replace(self, state={**self.state, **changes})

    def _heads(self, x: Tensor) -> Float[Tensor, "batch heads place size"]:
        return x.unflatten(-1, (int(self.config["num_attention_heads"]), -1)).transpose(-2, -3)

    @abstractmethod
    def __call__(self, tokens: Any) -> Tensor:
        """What it answers."""


@final
@dataclass(frozen=True)
class Llama(Network):
    """A causal language model: RMSNorm, rotary positions, SwiGLU; embedding and classifier tied.

    Positions turn neighbouring entries (0 and 1, 2 and 3, ...) as llama2.c has them, which is
    Hugging Face's layout up to a permutation that queries and keys share.
    """

    def __call__(self, tokens: Int[Tensor, "batch place"]) -> Float[Tensor, "batch place word"]:
        """Logits of the token after each place."""
        return self.words(self.read(tokens, Memory()))

    def read(self, tokens: Int[Tensor, "batch place"], memory: Memory) -> Tensor:
        """The stream after the last layer; ``memory`` holds what was read before, and now this."""
        x = embedding(tokens, self.state[EMBEDDING])
        turn = rotations(memory.length, x.shape[-2], self._size)
        for layer in range(int(self.config["num_hidden_layers"])):
            x = x + self._attend(x, layer, turn, memory)
            x = x + self._think(x, layer)
        return self._norm(x, "model.norm")

    def words(self, x: Tensor) -> Float[Tensor, "batch place word"]:
        """Logits from the stream."""
        return linear(x, self.state[EMBEDDING])

    @torch.no_grad()
    def sampled(
        self, count: int, length: int, random: torch.Generator
    ) -> Int[Tensor, "count length"]:
        """Texts of its own, token by token from its own distribution, each begun by token 1."""
        memory, tokens = Memory(), torch.ones(count, 1, dtype=torch.long)
        while tokens.shape[1] < length:
            chances = self.words(self.read(tokens[:, -1:], memory))[:, -1].softmax(-1)
            tokens = torch.cat([tokens, torch.multinomial(chances, 1, generator=random)], 1)
        return tokens

    @property
    def _size(self) -> int:
        return int(self.config["hidden_size"]) // int(self.config["num_attention_heads"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.state[f"{name}.weight"], eps=1e-5)

    def _attend(self, x: Tensor, layer: int, turn: Tensor, memory: Memory) -> Tensor:
        home, y = f"model.layers.{layer}", self._norm(x, f"model.layers.{layer}.input_layernorm")
        q, k, v = (
            self._heads(linear(y, self.state[f"{home}.self_attn.{part}_proj.weight"]))
            for part in "qkv"
        )
        k, v = memory.extended(layer, rotated(k, turn), v)
        one = q.shape[-2] == 1  # the last token sees all
        seen = attention(rotated(q, turn), k, v, is_causal=not one)
        return linear(
            seen.transpose(-2, -3).flatten(-2), self.state[f"{home}.self_attn.o_proj.weight"]
        )

    def _think(self, x: Tensor, layer: int) -> Tensor:
        home = f"model.layers.{layer}"
        y = self._norm(x, f"{home}.post_attention_layernorm")
        gate, up, down = (self.state[f"{home}.mlp.{part}_proj.weight"] for part in WAYS)
        return linear(silu(linear(y, gate)) * linear(y, up), down)


WAYS = ("gate", "up", "down")


class Memory:
    """Keys and values of the places that were read, layer by layer."""

    def __init__(self) -> None:
        self.layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def length(self) -> int:
        """How many places were read."""
        return self.layers[0][0].shape[-2] if self.layers else 0

    def extended(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Those of the new places after those before them."""
        if layer in self.layers:
            before_k, before_v = self.layers[layer]
            k, v = torch.cat([before_k, k], -2), torch.cat([before_v, v], -2)
        self.layers[layer] = k, v
        return k, v


def rotations(first: int, count: int, size: int) -> Tensor:
    """A complex number for each place and pair of entries: by how much it is turned."""
    speeds = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(first, first + count)[:, None] * speeds
    return torch.polar(torch.ones_like(angles), angles)


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """Neighbouring entries turned as a plane."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turn).flatten(-2)


def llama2c(data: bytes) -> tuple[Llama, Tokenizer]:
    """The model and the tokenizer that llama2.c keeps one after the other.

    Seven int32 (sizes), float32 weights kind by kind, all layers of a kind together, two tables of
    rotations that follow from the sizes; then every token's score, length and bytes.
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
    reader = _Reader(data, 28)
    state = {EMBEDDING: reader.take(words, width)}
    for kind, shape in kinds.items():
        stack = reader.take(layers, *shape)
        state |= {f"model.layers.{i}.{kind}.weight": stack[i] for i in range(layers)}
    state["model.norm.weight"] = reader.take(width)
    reader.take(2, places, width // heads // 2)
    config = {"model_type": "llama", "hidden_size": width, "num_attention_heads": heads,
              "num_hidden_layers": layers, "max_position_embeddings": places}  # fmt: skip
    return Llama(state, config), Tokenizer.of(data[reader.place :], words)


class _Reader:
    """Float32 tensors one after the other."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data, self.place = data, place

    def take(self, *shape: int) -> Tensor:
        count = math.prod(shape)
        found = np.frombuffer(self.data, "<f4", count, self.place)
        self.place += 4 * count
        return torch.from_numpy(found.copy()).view(shape)


@dataclass(frozen=True)
class Tokenizer:
    """Pieces of words with scores: neighbours whose union scores best are joined, again and again.

    Words are joined one by one, since no piece reaches over a space but at its beginning. A
    character without a piece becomes its bytes.
    """

    pieces: tuple[bytes, ...]
    scores: tuple[float, ...]

    @classmethod
    def of(cls, data: bytes, count: int) -> Tokenizer:
        """As llama2.c writes it: the longest length, then score, length and bytes of each."""
        place, pieces, scores = 4, [], []
        for _ in range(count):
            (score,) = np.frombuffer(data, "<f4", 1, place)
            (length,) = np.frombuffer(data, "<i4", 1, place + 4)
            pieces.append(data[place + 8 : place + 8 + length])
            scores.append(float(score))
            place += 8 + int(length)
        return cls(tuple(pieces), tuple(scores))

    @cached_property
    def places(self) -> dict[bytes, int]:
        """Where each piece stands; of two that are equal, the later: the first are single bytes."""
        return {piece: place for place, piece in enumerate(self.pieces)}

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without one that begins it."""
        words = re.findall(r" *[^ ]+| +", f" {text}")
        known = {word: self._joined(word) for word in set(words)}
        return [token for word in words for token in known[word]]

    def decode(self, tokens: list[int]) -> str:
        """The text of tokens."""
        return b"".join(self.pieces[token] for token in tokens).decode(errors="replace").lstrip()

    def _joined(self, word: str) -> list[int]:
        tokens = [token for letter in word for token in self._letter(letter.encode())]
        while True:
            unions = [
                (self.scores[found], -place, found)
                for place, (left, right) in enumerate(pairwise(tokens))
                if (found := self.places.get(self.pieces[left] + self.pieces[right])) is not None
            ]
            if not unions:
                return tokens
            _, place, found = max(unions)  # of equals the first
            tokens[-place : 2 - place] = [found]

    def _letter(self, letter: bytes) -> list[int]:
        found = self.places.get(letter)
        return [byte + 3 for byte in letter] if found is None else [found]


@final
@dataclass(frozen=True)
class Bert(Network):
    """An encoder with post-norm; a text is the mean of its tokens, its length made 1."""

    words: Mapping[str, int]

    def __call__(self, tokens: list[list[int]]) -> Float[Tensor, "text width"]:
        """Where each text lies on the sphere."""
        longest = max(map(len, tokens))
        padded = torch.tensor([text + [0] * (longest - len(text)) for text in tokens])
        real = torch.tensor([[place < len(text) for place in range(longest)] for text in tokens])
        x = self._embedded(padded)
        for layer in range(int(self.config["num_hidden_layers"])):
            x = self._layer(x, real, f"encoder.layer.{layer}")
        total = (x * real[..., None]).sum(-2)
        return total / total.norm(dim=-1, keepdim=True)

    def encode(self, text: str) -> list[int]:
        """Its WordPiece tokens: lower case, no accents, the longest piece first."""
        plain = unicodedata.normalize("NFD", text.lower())
        letters = "".join(c for c in plain if unicodedata.category(c) != "Mn")
        words = re.findall(r"[^\W_]+|[^\w\s]|_", letters)
        pieces = [piece for word in words for piece in self._pieces(word)]
        return [self.words["[CLS]"], *pieces, self.words["[SEP]"]]

    def _pieces(self, word: str) -> list[int]:
        found: list[int] = []
        rest, mark = word, ""
        while rest:
            ends = range(len(rest), 0, -1)
            end = next((end for end in ends if mark + rest[:end] in self.words), None)
            if end is None:
                return [self.words["[UNK]"]]
            found.append(self.words[mark + rest[:end]])
            rest, mark = rest[end:], "##"
        return found

    def _embedded(self, tokens: Tensor) -> Tensor:
        part = {name: self.state[f"embeddings.{name}_embeddings.weight"] for name in TABLES}
        places = part["position"][: tokens.shape[-1]]
        x = embedding(tokens, part["word"]) + places + part["token_type"][0]
        return self._norm(x, "embeddings.LayerNorm")

    def _layer(self, x: Tensor, real: Tensor, home: str) -> Tensor:
        q, k, v = (
            self._heads(self._linear(x, f"{home}.attention.self.{part}"))
            for part in ("query", "key", "value")
        )
        seen = attention(q, k, v, attn_mask=real[:, None, None])
        seen = self._linear(seen.transpose(-2, -3).flatten(-2), f"{home}.attention.output.dense")
        x = self._norm(x + seen, f"{home}.attention.output.LayerNorm")
        y = gelu(self._linear(x, f"{home}.intermediate.dense"))
        return self._norm(x + self._linear(y, f"{home}.output.dense"), f"{home}.output.LayerNorm")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.state[f"{name}.weight"], self.state[f"{name}.bias"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.state[f"{name}.weight"], self.state[f"{name}.bias"]
        return layer_norm(x, x.shape[-1:], weight, bias, float(self.config["layer_norm_eps"]))


TABLES = ("word", "position", "token_type")


def bert(folder: Path) -> Bert:
    """A BERT from its folder: weights, config and vocabulary."""
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    state, config = stored(folder)
    return Bert(state, config, {word: place for place, word in enumerate(words)})


def stored(path: Path) -> tuple[State, Mapping[str, Any]]:
    """The tensors of a checkpoint by name, in the precision it has, and its config."""
    found = checkpoints.open(path)
    names = [name for name, value in found.contents.items() if isinstance(value, Tensor)]
    return {name: found.read((name,)) for name in names}, found.config
