"""How far above what a network does the bound of its attention logits lies, and whether it holds.

``python benchmarks/logits.py [TOKENS]`` reads tiny-shakespeare with stories15M (a Llama) and with
all-MiniLM-L6-v2 (a BERT), and tokens drawn from its vocabulary with rxnmapper's ALBERT. It takes
the largest |q·k| / sqrt(d) of every head over all pairs of tokens that attend to each other, and
compares it with the bound from the file alone. Results go to ``benchmarks/results/logits.json``.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import embedding, gelu, layer_norm, linear

from kappascope.clinic.diagnose import Inventory
from kappascope.clinic.source import OnDisk
from kappascope.clinic.tasks import AttentionTask
from kappascope.lab.downloads import fetch
from kappascope.model.logits import LogitBound, Tables
from kappascope.studies.pretrained.model import (
    EMBEDDING,
    Bert,
    KeyValueCache,
    Llama,
    bert,
    llama2c,
    rotated,
    rotations,
)
from kappascope.system.files import environment

RESULTS = Path(__file__).parent / "results" / "logits.json"
TOKENS = 100_000
LENGTH, BATCH = 256, 16  # tokens of a text, texts at once


def bounds(folder: Path) -> list[LogitBound]:
    """The bounds of all heads of a checkpoint, layer by layer."""
    model = OnDisk.at(folder)
    found, opened = Inventory.of(model), model.opened()
    tasks = [
        AttentionTask(layer, Tables.of(found.plan) if layer.depth == 0 else None)
        for layer in found.attention
    ]
    rows = [row for task in tasks for row in task.rows(opened, None, "none")]
    return [row for row in rows if isinstance(row, LogitBound)]


@torch.no_grad()
def llama_logits(net: Llama, tokens: Tensor) -> Iterator[Tensor]:
    """The largest logit of every head, layer by layer, over a batch of texts."""
    x, heads = embedding(tokens, net.state[EMBEDDING]), int(net.config["num_attention_heads"])
    size = x.shape[-1] // heads
    turn, cache = rotations(0, tokens.shape[1], size), KeyValueCache()
    for layer in range(int(net.config["num_hidden_layers"])):
        prefix = f"model.layers.{layer}"
        y = net._norm(x, f"{prefix}.input_layernorm")
        q, k = (
            rotated(
                net._heads(linear(y, net.state[f"{prefix}.self_attn.{part}_proj.weight"])), turn
            )
            for part in "qk"
        )
        yield (q @ k.mT).tril().abs().amax((0, 2, 3)) / math.sqrt(size)
        x = x + net._attend(x, layer, turn, cache)
        x = x + net._feed_forward(x, layer)


@torch.no_grad()
def bert_logits(net: Bert, tokens: Tensor) -> Iterator[Tensor]:
    """The same for an encoder, in which every token attends to every other."""
    part = {
        name: net.state[f"embeddings.{name}_embeddings.weight"]
        for name in ("word", "position", "token_type")
    }
    x = (
        embedding(tokens, part["word"])
        + part["position"][: tokens.shape[1]]
        + part["token_type"][0]
    )
    x = net._norm(x, "embeddings.LayerNorm")
    real = torch.ones(tokens.shape, dtype=torch.bool)
    for layer in range(int(net.config["num_hidden_layers"])):
        prefix = f"encoder.layer.{layer}"
        q, k = (
            net._heads(net._linear(x, f"{prefix}.attention.self.{name}"))
            for name in ("query", "key")
        )
        yield (q @ k.mT).abs().amax((0, 2, 3)) / math.sqrt(q.shape[-1])
        x = net._layer(x, real, prefix)


@torch.no_grad()
def albert_logits(
    state: dict[str, Tensor], config: dict[str, Any], ids: Tensor
) -> Iterator[Tensor]:
    """The largest logit of every head of the one layer, over all its rounds."""

    def normed(x: Tensor, name: str) -> Tensor:
        gain, shift = state[f"{name}.weight"], state[f"{name}.bias"]
        return layer_norm(x, (x.shape[-1],), gain, shift, config["layer_norm_eps"])

    def mapped(x: Tensor, name: str) -> Tensor:
        return linear(x, state[f"{name}.weight"], state[f"{name}.bias"])

    part = {name: state[f"albert.embeddings.{name}_embeddings.weight"]
            for name in ("word", "position", "token_type")}  # fmt: skip
    x = embedding(ids, part["word"]) + part["position"][: ids.shape[1]] + part["token_type"][0]
    x = mapped(
        normed(x, "albert.embeddings.LayerNorm"), "albert.encoder.embedding_hidden_mapping_in"
    )
    block = "albert.encoder.albert_layer_groups.0.albert_layers.0"
    heads, seen = config["num_attention_heads"], []
    for _ in range(config["num_hidden_layers"]):
        q, k, v = (
            mapped(x, f"{block}.attention.{name}").unflatten(2, (heads, -1)).transpose(1, 2)
            for name in ("query", "key", "value")
        )
        logits = (q @ k.mT) / math.sqrt(q.shape[-1])
        seen.append(logits.abs().amax((0, 2, 3)))
        mixed = (logits.softmax(3) @ v).transpose(1, 2).flatten(2)
        x = normed(x + mapped(mixed, f"{block}.attention.dense"), f"{block}.attention.LayerNorm")
        up = mapped(gelu(mapped(x, f"{block}.ffn")), f"{block}.ffn_output")
        x = normed(x + up, f"{block}.full_layer_layer_norm")
    yield torch.stack(seen).amax(0)


def measured(name: str, found: list[LogitBound], observe: Any, tokens: Tensor) -> dict[str, Any]:
    """Observe all batches and compare with the bounds."""
    largest: Tensor | None = None
    for batch in tokens.split(BATCH):
        seen = torch.stack(list(observe(batch)))
        largest = seen if largest is None else torch.maximum(largest, seen)
    assert largest is not None
    observed = largest.flatten().tolist()
    ratios = [one.bound / seen for one, seen in zip(found, observed, strict=True)]
    first = [r for one, r in zip(found, ratios, strict=True) if one.depth == 0]
    return {
        "network": name,
        "tokens": tokens.numel(),
        "heads": len(found),
        "violations": sum(ratio < 1 for ratio in ratios),
        "median_bound_over_observed": statistics.median(ratios),
        "largest_bound_over_observed": max(ratios),
        "median_bound_over_observed_in_layer_0": statistics.median(first),
        "median_proxy_over_bound": statistics.median(one.proxy / one.bound for one in found),
        "rows": [
            {"layer": one.layer, "head": one.head, "bound": one.bound, "observed": seen,
             "proxy": one.proxy, "method": one.method}
            for one, seen in zip(found, observed, strict=True)
        ],
    }  # fmt: skip


def texts(ids: list[int], count: int) -> Tensor:
    """The first tokens of a text as texts of equal length, from the beginning again if short."""
    rows = -(-count // LENGTH)
    repeated = ids * -(-rows * LENGTH // len(ids))
    return torch.tensor(repeated[: rows * LENGTH]).view(rows, LENGTH)


def main() -> None:
    """Measure both networks and write the results after each."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else TOKENS
    torch.set_num_threads(1)
    text = fetch("tiny-shakespeare").read_text(encoding="utf-8")
    results = []
    with tempfile.TemporaryDirectory() as folder:
        net, tokenizer = llama2c(fetch("stories15m").read_bytes())
        save_file({k: v.contiguous() for k, v in net.state.items()}, f"{folder}/model.safetensors")
        Path(folder, "config.json").write_text(json.dumps(dict(net.config)))
        ids = texts(tokenizer.encode(text[: 5 * count]), count)
        found = bounds(Path(folder))
        results.append(measured("stories15M", found, lambda b: llama_logits(net, b), ids))
        _write(results)
    encoder = bert(fetch("minilm"))
    words = texts(encoder.encode(text[: 5 * count]), count)
    found = bounds(fetch("minilm"))
    results.append(measured("all-MiniLM-L6-v2", found, lambda b: bert_logits(encoder, b), words))
    _write(results)
    albert = fetch("albert")
    state = torch.load(albert / "pytorch_model.bin", weights_only=True, map_location="cpu")
    config = json.loads((albert / "config.json").read_text())
    vocabulary = len(state["albert.embeddings.word_embeddings.weight"])
    random = torch.Generator().manual_seed(0)
    drawn = torch.randint(vocabulary, (-(-count // LENGTH), LENGTH), generator=random)
    found = bounds(albert)
    results.append(
        measured("rxnmapper ALBERT", found, lambda b: albert_logits(state, config, b), drawn)
    )
    _write(results)


def _write(results: list[dict[str, Any]]) -> None:
    document = {"environment": dict(environment()), "results": results}
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    for one in results:
        print({name: value for name, value in one.items() if name != "rows"}, flush=True)


if __name__ == "__main__":
    main()
