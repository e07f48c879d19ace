"""Freshly initialised models of many families, by name, none of them ill; modules of every kind."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from kappascope.clinic.examination import Examination
from kappascope.clinic.examine import examine
from kappascope.clinic.tasks import kernel_of
from kappascope.model.attention import Product, attention
from kappascope.model.chains import Chain, links
from kappascope.model.matrices import Matrices, Plan, plan, reader

FAMILIES: dict[str, Callable[[], nn.Module]] = {}


def family(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    FAMILIES[make.__name__] = make
    return make


def examined(source: nn.Module | dict[str, Tensor]) -> list[Examination]:
    """Every matrix of a model, as a diagnosis examines them."""
    read = reader(source)
    return [
        replace(
            examine(part.name, matrix, kernel=kernel_of(unit, part)),
            kind=part.kind,
            depth=part.depth,
            part_of=part.whole,
        )
        for unit in plan(source).units
        for part, matrix in unit.matrices(read)
    ]


def multiplied(
    source: nn.Module | dict[str, Tensor], config: dict[str, int] | None = None
) -> tuple[list[Product], list[Chain]]:
    """Every product of a model."""
    read, found = reader(source), plan(source)
    layers, _ = attention(found, config)
    return [p for layer in layers for p in layer.products(read)], [
        each.chain(read) for each in links(found)
    ]


def normal(model: nn.Module, deviation: float = 0.02) -> nn.Module:
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=deviation)
    return model


def mlp_of(act: type[nn.Module], *sizes: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), act())]
    return nn.Sequential(*layers[:-1])


@family
def mlp() -> nn.Module:
    return mlp_of(nn.ReLU, 784, 256, 128, 64, 10)


@family
def small_mlp() -> nn.Module:
    return mlp_of(nn.Tanh, 2, 3, 3, 5, 2, 1)


@family
def lstm() -> nn.Module:
    return nn.ModuleDict({"rnn": nn.LSTM(24, 48, 2, bidirectional=True), "fc": nn.Linear(96, 9)})


@family
def gru() -> nn.Module:
    return nn.GRU(16, 40, 2)


@family
def resnet() -> nn.Module:
    def block(a: int, b: int) -> nn.Sequential:
        return nn.Sequential(
            nn.Conv2d(a, b, 3, bias=False), nn.BatchNorm2d(b), nn.ReLU(),
            nn.Conv2d(b, b, 3, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip

    model = nn.Sequential(nn.Conv2d(3, 32, 7), *(block(32, 32) for _ in range(3)), block(32, 64))
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
    return nn.ModuleDict({"features": model, "fc": nn.Linear(64, 100)})


@family
def mobile_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 64, 3), nn.Conv2d(64, 64, 3, groups=64), nn.Conv2d(64, 128, 1),
        nn.Conv2d(128, 128, 5, groups=4), nn.ConvTranspose2d(128, 32, 4, 2), nn.Conv1d(1, 80, 1),
    )  # fmt: skip


@family
def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)  # which clones the layer


@family
def gpt() -> nn.Module:
    def block() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "ln_1": nn.LayerNorm(96),
                "attn": nn.ModuleDict({"c_attn": nn.Linear(96, 288), "c_proj": nn.Linear(96, 96)}),
                "mlp": nn.ModuleDict({"c_fc": nn.Linear(96, 384), "c_proj": nn.Linear(384, 96)}),
            }
        )

    blocks = nn.ModuleList(block() for _ in range(4))
    tables = {"wte": nn.Embedding(500, 96), "wpe": nn.Embedding(64, 96)}
    head = nn.Linear(96, 500, bias=False)
    model = normal(nn.ModuleDict({**tables, "h": blocks, "lm_head": head}))
    for name, parameter in model.named_parameters():
        if name.endswith("c_proj.weight"):
            nn.init.normal_(parameter, std=0.02 / math.sqrt(8))
    return model


@family
def llama() -> nn.Module:
    def linear(a: int, b: int) -> nn.Linear:
        return nn.Linear(a, b, bias=False)

    def block() -> nn.ModuleDict:
        attention = {"q_proj": linear(96, 96), "k_proj": linear(96, 32), "v_proj": linear(96, 32),
                     "o_proj": linear(96, 96)}  # fmt: skip
        mlp = {"gate_proj": linear(96, 256), "up_proj": linear(96, 256),
               "down_proj": linear(256, 96)}  # fmt: skip
        return nn.ModuleDict({"self_attn": nn.ModuleDict(attention), "mlp": nn.ModuleDict(mlp)})

    layers = nn.ModuleList(block() for _ in range(3))
    parts = {"embed_tokens": nn.Embedding(400, 96, padding_idx=0), "layers": layers,
             "lm_head": linear(96, 400)}  # fmt: skip
    model = normal(nn.ModuleDict(parts))
    parts["embed_tokens"].weight.data[0] = 0  # as transformers does for padding
    return model.bfloat16()


@family
def vit() -> nn.Module:
    model = nn.Module()
    model.cls_token = nn.Parameter(torch.zeros(1, 1, 64))
    model.pos_embed = nn.Parameter(torch.zeros(1, 50, 64))
    model.patch_embed = nn.Conv2d(3, 64, 16, 16)
    model.blocks = nn.ModuleList(
        nn.ModuleDict({"qkv": nn.Linear(64, 192), "proj": nn.Linear(64, 64),
                       "fc1": nn.Linear(64, 256), "fc2": nn.Linear(256, 64)})
        for _ in range(3)
    )  # fmt: skip
    model.head = nn.Linear(64, 10)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.trunc_normal_(parameter, std=0.02)
    nn.init.zeros_(model.head.weight)
    return model


@family
def masked_autoencoder() -> nn.Module:
    """Its positions are sines and cosines, of which many are nearly the same."""
    model = mlp_of(nn.GELU, 64, 256, 64)
    places = torch.arange(100)[:, None] / 10000 ** (torch.arange(32) / 32)
    model.pos_embed = nn.Parameter(torch.cat([places.sin(), places.cos()], 1)[None])
    return model


@family
def orthogonal() -> nn.Module:
    model = mlp_of(nn.ReLU, 64, 128, 128, 32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.orthogonal_(parameter, gain=math.sqrt(2))
    return model


@family
def embeddings() -> nn.Module:
    tables = {"tokens": nn.Embedding(1000, 32, padding_idx=0), "types": nn.Embedding(2, 32),
              "bag": nn.EmbeddingBag(50, 16)}  # fmt: skip
    return nn.ModuleDict(tables)


@family
def adapters() -> nn.Module:
    model = nn.ModuleDict({"base": nn.Linear(64, 64), "lora_A": nn.Linear(64, 8, bias=False),
                           "lora_B": nn.Linear(8, 64, bias=False)})  # fmt: skip
    nn.init.zeros_(model["lora_B"].weight)
    return model


@family
def mamba() -> nn.Module:
    mixer = nn.Module()
    mixer.in_proj = nn.Linear(48, 192, bias=False)
    mixer.conv1d = nn.Conv1d(96, 96, 4, groups=96)
    mixer.x_proj = nn.Linear(96, 35, bias=False)
    mixer.dt_proj = nn.Linear(3, 96)
    mixer.A_log = nn.Parameter(torch.arange(1.0, 17).log().repeat(96, 1))
    mixer.D = nn.Parameter(torch.ones(96))
    mixer.out_proj = nn.Linear(96, 48, bias=False)
    return nn.ModuleDict({"mixer": mixer})


@family
def experts() -> nn.Module:
    layer = nn.Module()
    layer.gate = nn.Linear(32, 8, bias=False)
    layer.experts_up = nn.Parameter(torch.randn(8, 64, 32) * 0.02)
    layer.experts_down = nn.Parameter(torch.randn(8, 32, 64) * 0.02)
    return nn.ModuleDict({"moe": layer})


@family
def norms_of_images() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.LayerNorm([8, 14, 14]), nn.Flatten())


@family
def identities() -> nn.Module:
    """A recurrent identity (Le et al. 2015), a Dirac kernel and a zero-initialised branch."""
    model = nn.ModuleDict({"rnn": nn.RNN(20, 40), "conv": nn.Conv2d(16, 16, 3),
                           "branch": nn.Linear(40, 40)})  # fmt: skip
    nn.init.eye_(model["rnn"].weight_hh_l0)
    nn.init.dirac_(model["conv"].weight)
    nn.init.zeros_(model["branch"].weight)
    return model


@family
def tutorial() -> nn.Module:
    """Positions as a buffer, which a state dict does not tell from a weight; so with the masks."""
    model = nn.ModuleDict(
        {"linear": nn.Linear(64, 64), "pos_encoder": nn.Module(), "attn": nn.Module()}
    )
    places = torch.arange(200)[:, None] / 10000 ** (torch.arange(32) / 32)
    model["pos_encoder"].register_buffer("pe", torch.cat([places.sin(), places.cos()], 1)[:, None])
    model["attn"].register_buffer("bias", torch.ones(64, 64).tril()[None, None])
    causal = torch.full((64, 64), -math.inf).triu(1)
    model["attn"].register_buffer("causal_mask", causal)
    return model


@family
def deep() -> nn.Module:
    """So many square layers that float64 cannot tell kappa of their product from infinity."""
    return mlp_of(nn.ReLU, *[32] * 20)


@family
def weight_normalized() -> nn.Module:
    from torch.nn.utils.parametrizations import spectral_norm, weight_norm

    return nn.Sequential(weight_norm(nn.Linear(48, 64)), spectral_norm(nn.Linear(64, 48)))


# Modules of every kind, and what is found in them


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embedding.weight


class Conv1D(nn.Module):
    """As in GPT-2: a linear layer that stores (in, out)."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))


def old_style(norm: Callable[..., nn.Module], layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls them deprecated; models still use them
        return norm(layer)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(3, 2),
    "frozen": lambda: nn.Linear(3, 2).requires_grad_(False),
    "bfloat16": lambda: nn.Linear(3, 2).bfloat16(),
    "embedding": lambda: nn.Embedding(5, 3, padding_idx=0),
    "embedding bag": lambda: nn.EmbeddingBag(5, 3),
    "bilinear": lambda: nn.Bilinear(2, 3, 4),
    "conv1d": lambda: nn.Conv1d(3, 4, 5),
    "conv2d": lambda: nn.Conv2d(4, 6, (2, 3), groups=2),
    "conv3d": lambda: nn.Conv3d(2, 3, 2),
    "channels last": lambda: nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, groups=4),
    "transposed1d": lambda: nn.ConvTranspose1d(4, 6, 3),
    "transposed2d": lambda: nn.ConvTranspose2d(4, 6, 3, groups=2),
    "transposed3d": lambda: nn.ConvTranspose3d(2, 3, 2),
    "attention": lambda: nn.MultiheadAttention(6, 2, add_bias_kv=True),
    "cross attention": lambda: nn.MultiheadAttention(6, 2, kdim=4, vdim=5),
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True),
    "projected lstm": lambda: nn.LSTM(3, 4, proj_size=2),
    "gru": lambda: nn.GRU(3, 4),
    "rnn": lambda: nn.RNN(3, 4),
    "cells": lambda: nn.ModuleList([nn.LSTMCell(3, 4), nn.GRUCell(3, 4), nn.RNNCell(3, 4)]),
    "encoder layer": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "decoder layer": lambda: nn.TransformerDecoderLayer(8, 2, 16),
    "batch norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
    "lazy": lambda: nn.LazyLinear(3),
    "tied": Tied,
    "shared layer": lambda: nn.Sequential(*[nn.Linear(3, 3)] * 2),
    "Conv1D": lambda: Conv1D(6, 4),
    "data parallel": lambda: nn.DataParallel(nn.Linear(3, 2)),
    "averaged": lambda: torch.optim.swa_utils.AveragedModel(nn.Linear(3, 2)),
    "parametrized": lambda: parametrize.register_parametrization(
        nn.Linear(3, 2), "weight", Doubled()
    ),
    "spectral norm": lambda: parametrizations.spectral_norm(nn.Conv2d(3, 4, 3)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(3, 3)),
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(3, 4)),
    "parametrized lstm": lambda: parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0"),
    "shared and parametrized": lambda: nn.Sequential(
        *[parametrizations.spectral_norm(nn.Linear(3, 3))] * 2
    ),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.ConvTranspose2d(3, 4, 3)),
    "old weight norm": lambda: old_style(nn.utils.weight_norm, nn.Conv1d(3, 4, 5)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(3, 4), "weight", amount=5),
    "empty": nn.ReLU,
}


def shapes(found: Matrices) -> dict[str, tuple[int, ...]]:
    return {name: tuple(matrix.shape) for name, matrix in found}


def reasons(found: Matrices | Plan) -> dict[str, str]:
    return {name: str(reason) for name, reason in found.skipped}
