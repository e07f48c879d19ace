"""The study of pretrained checkpoints, on small networks made here; the real ones by opting in."""

import math
import os
import struct
from itertools import islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from kappascope import materials
from kappascope.bookmarks import Bookmark
from kappascope.figures import NOTHING
from kappascope.lab import verdicts
from kappascope.statistics import Table
from kappascope.studies import pretrained
from kappascope.studies.pretrained import LAYERS, STUDY, Reader, trials
from kappascope.studies.pretrained_anatomy import anatomy, random_product
from kappascope.studies.pretrained_changes import (
    FORMATS,
    REMOVALS,
    Change,
    Factors,
    noise,
    rounded,
    smallest,
)
from kappascope.studies.pretrained_models import (
    Bert,
    Memory,
    Tokenizer,
    llama2c,
    rotated,
    rotations,
)
from kappascope.tasks import generator

WIDTH, INNER, LAYER, HEADS, PLACES = 16, 24, 2, 2, 64
WORDS = (b"<unk>", b"\n<s>\n", b"\n</s>\n", *(bytes([b]) for b in range(256)),
         b" ", b"t", b"h", b"e", b"th", b"the", b" t", b" th", b" the", b"he", b"  ",
         "ä".encode())  # fmt: skip
SIZE = len(WORDS)


def written(seed: int = 0) -> tuple[bytes, dict[str, np.ndarray]]:
    """A small model in llama2.c's layout, and its arrays by llama2.c's own names."""
    random = np.random.default_rng(seed)
    shapes = {
        "tok": (SIZE, WIDTH), "rms_att": (LAYER, WIDTH), "wq": (LAYER, WIDTH, WIDTH),
        "wk": (LAYER, WIDTH, WIDTH), "wv": (LAYER, WIDTH, WIDTH), "wo": (LAYER, WIDTH, WIDTH),
        "rms_ffn": (LAYER, WIDTH), "w1": (LAYER, INNER, WIDTH), "w2": (LAYER, WIDTH, INNER),
        "w3": (LAYER, INNER, WIDTH), "rms_final": (WIDTH,),
        "turns": (2, PLACES, WIDTH // HEADS // 2),
    }  # fmt: skip
    arrays = {k: (0.5 * random.standard_normal(v)).astype("<f4") for k, v in shapes.items()}
    head = struct.pack("<7i", WIDTH, INNER, LAYER, HEADS, HEADS, SIZE, PLACES)
    scores = (-float(i) for i in range(SIZE))
    vocabulary = struct.pack("<i", max(map(len, WORDS))) + b"".join(
        struct.pack("<fi", score, len(word)) + word
        for score, word in zip(scores, WORDS, strict=True)
    )
    return head + b"".join(a.tobytes() for a in arrays.values()) + vocabulary, arrays


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
    tokens, memory = torch.randint(SIZE, (2, 9), generator=generator("test")), Memory()
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
    known = tokenizer.places
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


@pytest.fixture(scope="module")
def factors() -> Factors:
    return Factors.of("matrix", torch.randn(40, 30, generator=generator("matrix")))


@pytest.mark.parametrize("what", REMOVALS)
def test_a_removal_keeps_all_other_singular_values(what: str, factors: Factors) -> None:
    by = REMOVALS[what](factors.s, 0.1)
    found = np.linalg.svd(factors.lowered(by).double().numpy(), compute_uv=False)
    expected = np.sort((factors.s - by).numpy())[::-1]
    assert np.allclose(found, expected, atol=1e-5) and (by >= 0).all() and (by <= factors.s).all()


def test_what_is_removed_is_what_is_said(factors: Factors) -> None:
    moved = {what: REMOVALS[what](factors.s, 0.1).nonzero().ravel().tolist() for what in REMOVALS}
    assert moved["smallest"] == [27, 28, 29] and moved["largest"] == [0, 1, 2]
    assert moved["bulk"] == [13, 14, 15] and moved["largest at equal energy"] == [0]
    assert moved["bulk at equal energy"] == [14]


@pytest.mark.parametrize("share", [0.05, 0.1, 0.4])
def test_equal_energies_are_equal(share: float, factors: Factors) -> None:
    energy = smallest(factors.s, share).square().sum()
    for what in ("bulk at equal energy", "largest at equal energy"):
        assert torch.allclose(REMOVALS[what](factors.s, share).square().sum(), energy)
    added = noise(factors, share, seed=0) - factors.matrix
    assert torch.allclose(added.double().square().sum(), energy, rtol=1e-4)


@settings(max_examples=50)
@given(st.lists(st.lists(st.floats(-8, 8, width=32), min_size=3, max_size=3), min_size=1),
       st.sampled_from([4, 8]), st.sampled_from([None, 1]))  # fmt: skip
def test_rounding_takes_the_nearest_multiple_of_a_step(entries, bits, dim) -> None:
    matrix = torch.tensor(entries, dtype=torch.float64)
    found, top = rounded(matrix, bits, dim), 2 ** (bits - 1) - 1
    for row, line in zip(found.tolist(), matrix.tolist(), strict=True):
        largest = max(map(abs, line if dim else matrix.ravel().tolist()))
        step = largest / top if largest else 1.0
        for after, before in zip(row, line, strict=True):
            assert abs(after - before) <= step / 2 * (1 + 1e-9)
            assert after == pytest.approx(round(after / step) * step)
            assert abs(after) <= largest * (1 + 1e-12)


def test_bf16_keeps_eight_bits() -> None:
    values = torch.tensor([[1 + 2**-7, 1 + 2**-8, 1 + 3 * 2**-8, -3.0]])
    assert FORMATS["bf16"](values).tolist() == [[1 + 2**-7, 1.0, 1 + 2**-6, -3.0]]


def test_the_anatomy_names_every_used_matrix_once_with_its_kappa() -> None:
    random = generator("anatomy")
    heads = [f"layers.2.self_attn.{x}_proj.weight" for x in "qkvo"]
    state = {name: torch.randn(32, 32, generator=random) for name in heads}
    state |= {
        "layers.2.mlp.up_proj.weight": torch.randn(64, 32, generator=random),
        "pooler.dense.weight": torch.randn(32, 32, generator=random),
        "lm_head.weight": state[heads[0]].clone(),
        "narrow.weight": torch.randn(8, 32, generator=random),
        "norm.weight": torch.ones(32),
    }
    rows = list(anatomy(state, {"hidden_size": 32, "num_attention_heads": 2}))
    kappas = {r["matrix"]: r for r in rows if r.get("component") == "condition_number"}
    whole = {name: row for name, row in kappas.items() if row["kind"] not in ("QK", "OV")}
    assert set(whole) == {*heads, "layers.2.mlp.up_proj.weight"}
    for name, row in whole.items():
        assert row["value"] == pytest.approx(np.linalg.cond(state[name].double().numpy()), rel=1e-6)
    assert len(kappas) - len(whole) == 4  # QK and OV of two heads
    ratios = [r["value"] for r in rows if r.get("component") == "middle"]
    assert all(0.9 < ratio < 1.1 for ratio in ratios)  # random matrices are like chance
    covered = [r["value"] for r in rows if r.get("component") == "covered"]
    assert len(covered) == 5 and all(covered)
    assert len([r for r in rows if "values" in r]) == 2 * 5  # each beside its null


def test_products_of_random_factors_are_known() -> None:
    assert random_product((400, 400), 1) == 1.0
    random = np.random.default_rng(0)
    drawn = [random.standard_normal((60, 8)) @ random.standard_normal((8, 50)) for _ in range(50)]
    values = [np.linalg.svd(product, compute_uv=False) for product in drawn]
    expected = np.median([one[0] / one[7] for one in values])
    assert random_product((60, 50), 8) == pytest.approx(expected, rel=0.1)


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The small Llama in the place of the real one, and a text."""
    place = tmp_path / "llama2.data"
    place.write_bytes(written()[0])
    monkeypatch.setattr(materials, "path", lambda name: place)
    monkeypatch.setattr(materials, "text", lambda label: "then the theft\nof the tea\n" * 40)


def test_a_change_is_measured_as_loops_would(toy) -> None:
    reader = Reader(seed=0, tokens=8)
    change = Change("smallest", 0.1, LAYERS)
    with torch.no_grad():
        rows = list(reader.rows(change, "whole"))
        names = [n for n in reader.factors if "embed" not in n]
        altered = reader.llama.altered({n: change(reader.factors[n], 0) for n in names})
        p, q = (net(reader.texts["own"]).softmax(-1).double() for net in (reader.llama, altered))
    total = 0.0
    for text in range(2):
        for place in range(8):
            total += sum(
                float(a * (a / b).log())
                for a, b in zip(p[text, place], q[text, place], strict=True)
            )
    found = {(r.get("text"), r["component"]): r for r in rows}
    assert found["own", "divergence"]["value"] == pytest.approx(total / 16, rel=1e-3)
    was = found["own", "loss"]["target"]
    assert found["own", "rise"]["value"] == pytest.approx(total / 16 / was, rel=1e-3)
    assert found["own", "energy_spoken"]["value"] == 0.0
    taken = sum(float(smallest(reader.factors[n].s, 0.1).square().sum()) for n in names)
    whole = sum(float(reader.factors[n].s.square().sum()) for n in names)
    assert found[None, "energy"]["value"] == pytest.approx(taken / whole, rel=1e-4)


class KillError(Exception):
    """A kill in the middle."""


class Stopping(Bookmark):
    """Is killed before its fifth step."""

    def steps(self, *args, **parts):
        yield from islice(super().steps(*args, **parts), 4)
        raise KillError


def test_a_killed_trial_goes_on_to_the_same_rows(toy, tmp_path) -> None:
    setting = {"model": "stories15m", "part": "kinds", "tokens": 6}
    with pytest.raises(KillError):
        list(trials(1, Stopping(tmp_path / "mark", every=0.0), **setting))
    resumed = list(trials(1, Bookmark(tmp_path / "mark", every=0.0), **setting))
    whole = list(trials(1, Bookmark(), **setting))
    assert (tmp_path / "mark").exists() and resumed == whole
    assert len({(r["scope"], r["change"]) for r in whole}) == 7 * 4


def test_tables_panels_and_claims_stand_on_what_was_run(toy) -> None:
    rows = [
        {"experiment": "pretrained", "stream": "own", "seed": seed, **setting, **row}
        for part, seeds in (("spectra", 1), ("whole", 6), ("single", 1))
        for seed in range(seeds)
        for setting in ({"model": "stories15m", "part": part},)
        for row in trials(seed, Bookmark(), **setting, tokens=6)
        if "values" not in row
    ]
    table = Table.of(rows)
    tables = {one.title: one for one in STUDY.exhibits(table)}
    assert len(tables) == 4
    assert all(len(r) == len(one.columns) for one in tables.values() for r in one.rows)
    found = {one["id"]: one for one in verdicts([STUDY], table)["claims"]}
    assert found["pretrained.bottom-matters"]["interval"] is not None
    assert "(not run)" in found["pretrained.bottom-count"]["explanation"]
    assert found["pretrained.depth-grows"]["explanation"].startswith("Not measured")
    assert len(STUDY.plot(table, NOTHING).axes) == len(STUDY.plot(NOTHING, NOTHING).axes) == 6
    assert list(STUDY.exhibits(NOTHING)) == []


def test_what_the_forms_need_is_known() -> None:
    for form in (STUDY, STUDY.quickly()):
        assert set(form.materials) <= set(materials.MATERIALS)
        needed = {str(setting["model"]).split()[0] for setting in form.grid}
        assert needed <= set(form.materials) and all(form.count(s, "own") for s in form.grid)
        assert all(pretrained.seconds(setting) > 0 for setting in form.grid)


@pytest.mark.skipif(
    not os.environ.get("KAPPASCOPE_REAL_WEIGHTS"), reason="set KAPPASCOPE_REAL_WEIGHTS=1 to fetch"
)
@torch.no_grad()
def test_the_real_networks_answer_as_they_are_known_to() -> None:
    llama, tokenizer = llama2c(materials.fetch("stories15m").read_bytes())
    tokens = [1, *tokenizer.encode("Once upon a time")]
    for _ in range(30):
        tokens.append(int(llama(torch.tensor([tokens]))[0, -1].argmax()))
    assert "there was a little girl named Lily. She loved to play" in tokenizer.decode(tokens)
    own = llama.sampled(4, 256, generator("real"))
    losses = nn.functional.cross_entropy(llama(own)[:, :-1].flatten(0, 1), own[:, 1:].flatten())
    assert 0.8 < losses < 1.5
    bert = pretrained.bert(materials.fetch("minilm"))
    texts = ("A man is eating food.", "A man is eating a piece of bread.")
    first, second = bert([bert.encode(text) for text in texts])
    assert float(first @ second) == pytest.approx(0.7553, abs=1e-4)  # as its authors print
