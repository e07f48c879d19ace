"""Models that are odd but valid, and what a diagnosis makes of each: an answer, or one line."""

from __future__ import annotations

import json
import math
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

import checkpoint_files
from broken_files import Tally, overdue
from kappascope.clinic.diagnose import Case, Inventory, Room, Selection, diagnose
from kappascope.clinic.diagnosis import Diagnosis, spreadsheet
from kappascope.clinic.source import OnDisk
from kappascope.clinic.tasks import AttentionTask, Task, TensorTask
from kappascope.refusal import Refusal
from kappascope.system.files import strict
from kappascope.system.workers import Here

MOST_SECONDS = 60  # of CPU time, for 300 matrices twice, with their pages


class OddModel(NamedTuple):
    """A state dict, and the ``config.json`` beside it."""

    state: dict[Any, Any]
    config: Any


# Names of layers as models in use have them; which of them stand together is left to chance.
ATTENTION = (
    *("qkv.weight", "c_attn.weight", "in_proj_weight", "Wqkv.weight", "query_key_value.weight"),
    *("q_attn.weight", "c_proj.weight", "out_proj.weight", "proj.weight", "dense.weight"),
    *("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "qkv_proj.weight"),
    *("q_norm.weight", "sinks", "logit_scale", "relative_position_bias_table", "rel_attn.q"),
    *("rel_attn.k", "relative_attention_bias.weight", "weight_ih_l0", "weight_hh_l0"),
)
PERCEPTRON = (
    *("gate_up_proj.weight", "down_proj.weight", "up_proj.weight", "fc1.weight", "fc2.weight"),
    *("Wi.weight", "Wo.weight", "c_fc.weight", "c_proj.weight", "experts.gate_up_proj"),
    *("experts.gate_up_proj_bias", "experts.down_proj", "experts.mlp.w1", "experts.mlp.w2"),
    *("0.weight", "2.weight", "gate.weight", "dense_h_to_4h.weight", "ff_proj.weight"),
)
OTHERS = (
    *("conv.weight", "conv.weight_v", "conv.weight_g", "fc.weight_orig", "fc.weight_mask"),
    *("fc.parametrizations.weight.original0", "fc.parametrizations.weight.original1"),
    *("wte.weight", "lm_head.weight", "position_ids", "attn.bias", "x.qweight", "x.scales"),
    *("w", "w_scale", "lora_A.weight", "lora_B.weight", "norm.weight", "norm.bias", "bias"),
)
WEIRD = (
    *(
        "",
        ".",
        "..",
        "a.",
        ".weight",
        "weight",
        "[0]",
        "w[q]",
        "w'",
        "w''",
        "=1+1",
        "@x",
        "-",
        "\t",
    ),
    *("a\nb", "\x1b[31mred", "a\0b", "</script>", "{{ 7 }}", "x" * 3000, "\u202eright", "\u00e9"),
    *("e\u0301", "module.module.w", "_orig_mod.w", "9" * 400 + ".weight", "layers.999999999.w"),
    *("None", "nan", "fc1000000.weight", "../../etc/passwd", "%s%n", "a,b;c", '"', "🦊.weight"),
)
SIZES = (0, 1, 1, 2, 3, 4, 4, 6, 8, 12, 16, 24)
SCALES = (5e-324, 1e-310, 1e-300, 1e-160, 1e-45, 1e-38, 1e-8, 1e8, 1e30, 1e38, 1e150, 1e160, 1e300)
DTYPES = (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.int64, torch.bool,
          torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)  # fmt: skip
HEADS = (
    *("num_attention_heads", "n_head", "num_key_value_heads", "head_dim", "hidden_size"),
    *("n_embd", "d_kv", "moe_num_experts", "multi_query_group_num", "kv_channels"),
)
FAMILIES = ("gpt2", "llama", "chatglm", "codegen", "gpt_bigcode", "gpt_oss", "t5", "dbrx", "falcon")
WRONG = (
    None,
    0,
    -1,
    3,
    7,
    2**40,
    10**400,
    1.5,
    True,
    "8",
    "",
    [],
    [4],
    {},
    {"n_head": 2},
    "swiglu",
)


def odd_models(count: int, seed: int) -> Iterator[OddModel]:
    """As many models, each of one of the kinds below, with a config that may be wrong."""
    random = Random(seed)
    for i in range(count):
        state = KINDS[i % len(KINDS)](random)
        yield OddModel(state, config(random))


def config(random: Random) -> Any:
    """No config, one that may fit, one with fields of wrong types, or no mapping at all."""
    if random.random() < 0.2:
        return {} if random.random() < 0.8 else random.choice(WRONG)
    found: dict[str, Any] = {"model_type": random.choice(FAMILIES)}
    for key in random.sample(HEADS, random.randint(1, 6)):
        found[key] = random.choice((1, 2, 2, 3, 4, 4, 8, *random.sample(WRONG, 1)))
    if random.random() < 0.2:
        found |= {"hidden_act": random.choice(WRONG), "multi_query": random.choice(WRONG)}
    if random.random() < 0.2:
        inner = {random.choice(HEADS): random.choice(WRONG)}
        found[random.choice(("text_config", "attn_config", "ffn_config"))] = inner
    return found


def values(random: Random, shape: tuple[int, ...]) -> Tensor:
    """Numbers of some kind: drawn, equal, zero, of rank one, graded, or at an end of the range."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(random.getrandbits(32)))
    graded = len(shape) == 2
    largest = torch.finfo(torch.float64).max
    kinds: list[Callable[[], Tensor]] = [
        lambda: torch.zeros(shape),
        lambda: torch.full(shape, random.choice((1.0, -3.0))),
        lambda: drawn[:1].expand(shape).contiguous() if graded and shape[0] else drawn,
        lambda: (
            drawn.double() * torch.logspace(0, -300, shape[-1], dtype=torch.float64)
            if graded
            else drawn
        ),
        lambda: drawn.double() * random.choice(SCALES),
        lambda: drawn.double().sign() * largest,
        lambda: drawn.to(random.choice(DTYPES)),
        *[lambda: drawn] * 2,
    ]
    return random.choice(kinds)()


def shape(random: Random) -> tuple[int, ...]:
    """Two sizes mostly, of which some are zero or one; a table, a vector, a stack, a scalar."""
    dimensions = random.choice((0, 1, 1, 2, 2, 2, 2, 2, 2, 3, 3, 4, 5))
    return tuple(random.choice(SIZES[:8] if dimensions > 3 else SIZES) for _ in range(dimensions))


# --- the kinds ------------------------------------------------------------------------------------


def scattered(random: Random) -> dict[Any, Any]:
    """Layers of any name and shape, side by side."""
    places = [f"{random.choice(('h.0.', 'h.1.', 'model.layers.3.', ''))}attn." for _ in range(2)]
    keys = [place + leaf for place in places for leaf in random.sample(ATTENTION, 4)]
    keys += [f"h.0.mlp.{leaf}" for leaf in random.sample(PERCEPTRON, 3)]
    keys += random.sample(OTHERS, 3)
    return {key: values(random, shape(random)) for key in keys}


def transformer(random: Random) -> dict[Any, Any]:
    """Attention and perceptrons whose shapes fit, some of them empty."""
    width, inner = random.choice((0, 4, 8, 8, 12)), random.choice((0, 1, 8, 16))
    keys = random.choice((width, width // 2, 0))
    state = {}
    for depth in range(random.choice((1, 2, 3))):
        at = f"model.layers.{depth}."
        shapes = {"q": (width, width), "k": (keys, width), "v": (keys, width), "o": (width, width)}
        if random.random() < 0.3:
            state[f"{at}attn.c_attn.weight"] = values(random, (width, 3 * width))
            state[f"{at}attn.c_proj.weight"] = values(random, (width, width))
        for letter, size in shapes.items():
            state[f"{at}self_attn.{letter}_proj.weight"] = values(random, size)
        state[f"{at}mlp.up_proj.weight"] = values(random, (inner, width))
        state[f"{at}mlp.gate_up_proj.weight"] = values(random, (2 * inner, width))
        state[f"{at}mlp.down_proj.weight"] = values(random, (width, inner))
    return state


def equal_layers(random: Random) -> dict[Any, Any]:
    """Up to hundreds of equal layers in a row, of any scale."""
    width = random.choice((1, 2, 3))
    layer = values(random, (width, width))
    if random.random() < 0.3:
        layer = torch.eye(width, dtype=torch.float64) * random.choice(SCALES)
    stem = random.choice(("net.{}.weight", "fc{}.weight", "layers.{}.fc.weight"))
    shared = random.random() < 0.3  # as tied weights
    count = random.choice((2, 3, 10, 130, 300))
    return {stem.format(i): layer if shared else layer.clone() for i in range(count)}


def shared_storages(random: Random) -> dict[Any, Any]:
    """Views of one storage: the same, turned, shifted, expanded, and with gaps."""
    base = values(random, (8, 8))
    views = [base, base.T, base[:4], base[4:], base[::2, ::2], base[1:, 1:], base[:1].expand(5, 8)]
    views += [base.reshape(4, 16), base.reshape(-1), base[0:0], base.unfold(1, 3, 1), base]
    return {f"w.{i}": views[i] for i in sorted(random.sample(range(len(views)), 6))}


def prefixed(random: Random) -> dict[Any, Any]:
    """The same names under several wrappers, nested and side by side."""
    inner = {f"{p}fc.weight": values(random, (3, 4)) for p in ("", "module.", "_orig_mod.")}
    wrapped = {key: dict(inner) for key in random.sample(("state_dict", "model", "ema", "net"), 2)}
    state: dict[Any, Any] = {**inner, **wrapped, 7: values(random, (2, 2)), "7": torch.eye(3)}
    state["optimizer"] = {"state": {0: {"exp_avg": torch.eye(2)}}, "param_groups": [{"lr": 0.1}]}
    state["epoch"], state["args"], state["empty"] = 3, None, {}
    if random.random() < 0.3:
        state["again"] = state
    return state


def weird_names(random: Random) -> dict[Any, Any]:
    """Names that a terminal, a page, a table or a file system may stumble over."""
    keys = random.sample(WEIRD, 8)
    return {key: values(random, random.choice(((3, 4), (4, 4), (1, 5), (2, 2, 2)))) for key in keys}


def extremes(random: Random) -> dict[Any, Any]:
    """Every scale of float64 in one model, in matrices of one row, one column or several."""
    state = {}
    for i, scale in enumerate(random.sample(SCALES, 5)):
        size = random.choice(((1, 1), (1, 6), (6, 1), (4, 4), (5, 3)))
        drawn = torch.randn(size, generator=torch.Generator().manual_seed(i))
        state[f"layers.{i}.fc.weight"] = drawn.double() * scale
    largest = torch.finfo(torch.float64).max
    state["largest"] = torch.full((3, 3), largest, dtype=torch.float64)
    state["least"] = torch.full((3, 3), 5e-324, dtype=torch.float64)
    state["bad"] = torch.tensor([[1.0, random.choice((math.nan, math.inf, 1.0))]])
    return state


KINDS: tuple[Callable[[Random], dict[Any, Any]], ...] = (
    scattered,
    transformer,
    equal_layers,
    shared_storages,
    prefixed,
    weird_names,
    extremes,
)


# --- what becomes of them -------------------------------------------------------------------------


def run(what: str, models: Iterator[OddModel], folder: Path) -> Tally:
    """Examine models in memory, and every other one in a file, too, and take down what happened."""
    tally = Tally(what)
    for i, model in enumerate(models):
        began = time.perf_counter()
        signal.signal(signal.SIGPROF, overdue)
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        try:
            for found in _diagnoses(model, folder, i):
                tally.crashes += [f"{i}: {fault}" for fault in faults(found)]
            tally.accepted += 1
        except Refusal as refusal:
            tally.refused += 1
            if refusal.code not in (2, 5) or not str(refusal).isprintable():
                tally.crashes.append(f"{i}: unfit refusal: {str(refusal)!r}")
        except Exception as error:  # what must not happen, whatever it is
            tally.crashes.append(f"{i}: {type(error).__name__}: {error} at {_origin(error)}")
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
        tally.count += 1
        tally.slowest = max(tally.slowest, time.perf_counter() - began)
    return tally


def _diagnoses(model: OddModel, folder: Path, number: int) -> Iterator[Diagnosis]:
    yield diagnose(model.state)
    if number % 2:
        return
    (folder / "config.json").write_text(json.dumps(model.config))
    path = folder / "x.safetensors"
    plain = {k: v for k, v in model.state.items() if isinstance(k, str) and isinstance(v, Tensor)}
    if number % 4 or len(plain) < len(model.state):
        path = folder / "x.pt"
        path.write_bytes(checkpoint_files.saved(model.state))
    else:
        path.write_bytes(checkpoint_files.safetensors(plain))
    yield in_this_process(path)


def in_this_process(path: Path) -> Diagnosis:
    """The diagnosis of a file without the processes that would guard us from it."""
    model = OnDisk.at(path)
    inventory = Inventory.of(model)
    tasks: list[Task] = [
        TensorTask(unit, frozenset(part.name for part in unit.parts))
        for unit in inventory.plan.units
    ]
    tasks += [AttentionTask(layer) for layer in inventory.attention]
    room = Room(None, copies=1, limited=False)
    case = Case(model, None, Selection(), inventory, tuple(tasks), Here(), room)
    return case.concluded(row for done in case.examine() for row in done.result)


def faults(found: Diagnosis) -> Iterator[str]:
    """What is wrong with a diagnosis: no strict JSON, an error for a reason, a broken table."""
    json.loads(strict(found.document(plots=True)))
    lines = spreadsheet(found.table()).decode().splitlines()
    if len(lines) != 1 + len(found.matrices) or not all(map(str.isprintable, lines)):
        yield "a table that is not one line for each matrix"
    if not str(found) or not found.html().startswith("<!doctype html>"):
        yield "no page"
    for one in found.failed:
        if re.match(r"\w*(Error|Exception|Warning)\b", str(one.reason)):
            yield f"{one.name!r:.60}: {one.reason}"
    for note in found.notes:
        if re.search(r"\w(Error|Exception)\b", note):
            yield note


def _origin(error: BaseException) -> str:
    """Where an error came from."""
    at = error.__traceback__
    while at and at.tb_next:
        at = at.tb_next
    return f"{at.tb_frame.f_code.co_filename}:{at.tb_lineno}" if at else ""
