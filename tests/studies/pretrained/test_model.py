"""The Llama and the BERT answer as independent implementations do."""

import math
import os
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kappascope.lab import downloads
from kappascope.lab.tasks import generator
from kappascope.studies.pretrained import study
from kappascope.studies.pretrained.model import (
    Bert,
    KeyValueCache,
    Tokenizer,
    llama2c,
    rotated,
    rotations,
)
from small_llama import HEADS, INNER, LAYER, PLACES, SIZE, WIDTH, written


def by_loops(w: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits after the last token, one place and one head at a time, as run.c goes."""
    size = WIDTH // HEADS
    keys: list[list[np.ndarray]] = [[] for _ in range(LAYER)]
    values: list[list[np.ndarray]] = [[] for _ in range(LAYER)]

    def norm(x, gain):
        return x / math.sqrt(sum(v * v for v in x) / WIDTH + 1e-5) * gain

    for place, token in enumerate(tokens):
        x = w["tok"][token].astype(float)
        for n in range(LAYER):
            y = norm(x, w["rms_att"][n])
            q, k, v = (w[name][n] @ y for name in ("wq", "wk", "wv"))
            for i in range(0, WIDTH, 2):
                angle = place / 10_000 ** ((i % size) / size)
                c, s = math.cos(angle), math.sin(angle)
                for vector in (q, k):
                    a, b = vector[i], vector[i + 1]
                    vector[i], vector[i + 1] = a * c - b * s, a * s + b * c
            keys[n].append(k)
            values[n].append(v)
            seen = np.zeros(WIDTH)
            for h in range(HEADS):
                part = slice(h * size, (h + 1) * size)
                scores = np.array([q[part] @ past[part] / math.sqrt(size) for past in keys[n]])
                chances = np.exp(scores - scores.max())
                chances /= chances.sum()
                seen[part] = sum(p * past[part] for p, past in zip(chances, values[n], strict=True))
            x = x + w["wo"][n] @ seen
            y = norm(x, w["rms_ffn"][n])
            gate = w["w1"][n] @ y
            x = x + w["w2"][n] @ (gate / (1 + np.exp(-gate)) * (w["w3"][n] @ y))
    return w["tok"] @ norm(x, w["rms_final"])


def test_the_llama_answers_as_explicit_loops_do() -> None:
    data, arrays = written()
    llama, _ = llama2c(data)
    tokens = [1, 5, 200, 7, 7, 261, 30]
    found = llama(torch.tensor([tokens]))[0]
    for length in (1, 4, 7):
        expected = by_loops(arrays, tokens[:length])
        assert np.allclose(found[length - 1].numpy(), expected, atol=1e-4)


def test_reading_token_by_token_is_reading_at_once() -> None:
    llama, _ = llama2c(written()[0])
    tokens, memory = torch.randint(SIZE, (2, 9), generator=generator("test")), KeyValueCache()
    pieces = [llama.words(llama.read(tokens[:, i : i + 1], memory)) for i in range(9)]
    assert torch.allclose(torch.cat(pieces, 1), llama(tokens), atol=1e-5)


def test_its_own_texts_follow_its_distribution_and_the_generator() -> None:
    llama, _ = llama2c(written()[0])
    texts = llama.sampled(4000, 2, generator("test"))
    assert (
        torch.equal(texts, llama.sampled(4000, 2, generator("test"))) and (texts[:, 0] == 1).all()
    )
    chances = llama(torch.ones(1, 1, dtype=torch.long))[0, 0].softmax(-1)
    counts = torch.bincount(texts[:, 1], minlength=SIZE) / 4000
    assert (counts - chances).abs().max() < 5 * (0.25 / 4000) ** 0.5


def test_a_turn_keeps_lengths_and_sees_only_distances() -> None:
    q, k = torch.randn(2, 1, 8, generator=generator("turn")).double()

    def compared(i: int, j: int) -> float:
        return float((rotated(q, rotations(i, 1, 8)) * rotated(k, rotations(j, 1, 8))).sum())

    assert rotated(q, rotations(0, 1, 8)).allclose(q)
    assert rotated(q, rotations(13, 1, 8)).norm().allclose(q.norm())
    assert compared(3, 1) == pytest.approx(compared(12, 10), abs=1e-5)
    assert compared(3, 1) != pytest.approx(compared(3, 2), abs=1e-3)


def test_a_file_that_shares_keys_between_heads_is_refused() -> None:
    data = struct.pack("<7i", WIDTH, INNER, LAYER, HEADS, 1, SIZE, PLACES)
    with pytest.raises(ValueError, match="2 key heads are expected, got 1"):
        llama2c(data + written()[0][28:])


def merged(tokenizer: Tokenizer, text: str) -> list[int]:
    """The rule itself: over the whole text, join the best neighbours until none join."""
    letters = [letter.encode() for letter in f" {text}"]
    known = tokenizer.numbers
    tokens = [t for x in letters for t in ([known[x]] if x in known else [b + 3 for b in x])]
    while True:
        found = [
            (tokenizer.scores[known[union]], -i, known[union])
            for i, (a, b) in enumerate(pairwise(tokens))
            if (union := tokenizer.pieces[a] + tokenizer.pieces[b]) in known
        ]
        if not found:
            return tokens
        _, i, token = max(found)
        tokens[-i : 2 - i] = [token]


@settings(max_examples=60)
@given(st.text("the äß\n", max_size=30) | st.text(max_size=6))
def test_tokens_are_those_of_the_rule_and_give_the_text_back(text: str) -> None:
    tokenizer = llama2c(written()[0])[1]
    tokens = tokenizer.encode(text)
    assert tokens == merged(tokenizer, text)
    assert b"".join(tokenizer.pieces[t] for t in tokens).decode() == f" {text}"


@pytest.fixture(scope="module")
def encoder() -> tuple[Bert, nn.TransformerEncoder]:
    """A small BERT beside the same network built of PyTorch's own layers."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        32, 4, 48, activation="gelu", batch_first=True, layer_norm_eps=1e-12
    )
    built = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for parameter in built.parameters():
        nn.init.normal_(parameter, std=0.3)
    state = {
        f"embeddings.{name}_embeddings.weight": torch.randn(count, 32)
        for name, count in (("word", 30), ("position", 20), ("token_type", 2))
    }
    state |= {
        "embeddings.LayerNorm.weight": torch.ones(32),
        "embeddings.LayerNorm.bias": torch.ones(32),
    }
    for i, one in enumerate(built.layers):
        home = f"encoder.layer.{i}"
        parts = {"attention.output.dense": one.self_attn.out_proj,
                 "intermediate.dense": one.linear1, "output.dense": one.linear2,
                 "attention.output.LayerNorm": one.norm1,
                 "output.LayerNorm": one.norm2}  # fmt: skip
        for name, module in parts.items():
            state |= {f"{home}.{name}.{k}": v.detach() for k, v in module.named_parameters()}
        for part, w, b in zip(
            ("query", "key", "value"),
            one.self_attn.in_proj_weight.detach().chunk(3),
            one.self_attn.in_proj_bias.detach().chunk(3),
            strict=True,
        ):
            state |= {
                f"{home}.attention.self.{part}.weight": w,
                f"{home}.attention.self.{part}.bias": b,
            }
    config = {"num_attention_heads": 4, "num_hidden_layers": 2, "layer_norm_eps": 1e-12}
    pieces = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "play", "##ing", "##s", "hero", "!", "'", "_")
    return Bert(state, config, {word: i for i, word in enumerate(pieces)}), built


@torch.no_grad()
def test_the_encoder_answers_as_pytorchs_own_layers_do(encoder) -> None:
    bert, built = encoder
    tokens = [2, 5, 9, 9, 3]
    x = bert.state["embeddings.word_embeddings.weight"][tokens]
    x = x + bert.state["embeddings.position_embeddings.weight"][:5]
    x = x + bert.state["embeddings.token_type_embeddings.weight"][0]
    x = nn.functional.layer_norm(x, (32,), eps=1e-12) + 1.0
    mean = built(x[None])[0].mean(0)
    assert torch.allclose(bert([tokens])[0], mean / mean.norm(), atol=1e-5)


@torch.no_grad()
def test_who_rides_along_does_not_change_an_answer(encoder) -> None:
    bert, _ = encoder
    both = bert([[2, 4, 3], [2, 5, 6, 7, 8, 3]])
    assert torch.allclose(both[0], bert([[2, 4, 3]])[0], atol=1e-5)


def test_words_are_cut_into_the_longest_pieces(encoder) -> None:
    bert, _ = encoder
    assert bert.encode("Playing plays!") == [2, 4, 5, 4, 6, 8, 3]
    assert bert.encode("Héro's_") == [2, 7, 9, 1, 10, 3]  # s begins no word here


@pytest.mark.skipif(
    not os.environ.get("KAPPASCOPE_REAL_WEIGHTS"), reason="set KAPPASCOPE_REAL_WEIGHTS=1 to fetch"
)
@torch.no_grad()
def test_the_real_networks_answer_as_they_are_known_to() -> None:
    llama, tokenizer = llama2c(downloads.fetch("stories15m").read_bytes())
    tokens = [1, *tokenizer.encode("Once upon a time")]
    for _ in range(30):
        tokens.append(int(llama(torch.tensor([tokens]))[0, -1].argmax()))
    assert (
        "there was a little girl named Lily. She loved to play"
        in b"".join(tokenizer.pieces[token] for token in tokens).decode()
    )
    own = llama.sampled(4, 256, generator("real"))
    losses = nn.functional.cross_entropy(llama(own)[:, :-1].flatten(0, 1), own[:, 1:].flatten())
    assert 0.8 < losses < 1.5
    bert = study.bert(downloads.fetch("minilm"))
    texts = ("A man is eating food.", "A man is eating a piece of bread.")
    first, second = bert([bert.encode(text) for text in texts])
    assert float(first @ second) == pytest.approx(0.7553, abs=1e-4)  # as its authors print
