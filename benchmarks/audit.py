"""The optimizer audit: sabotaged optimizers caught within five steps, honest ones accused.

Three collections: the zoo of the tests, honest and sabotaged; random settings of every optimizer of
torch, on several models, types and at several moments of a run; every optimizer of
``pytorch_optimizer`` that steps from parameters and gradients alone. No sabotage is expected to be
seen where sixteen bits round it away, so the sabotaged ones are counted by type, too.

One setting of torch's own is not honest, and was found here: Muon without Nesterov's momentum
normalises the momentum of bfloat16 weights in place (pytorch#190597). It is among the sabotaged.

    OMP_NUM_THREADS=1 python benchmarks/audit.py [--random 400] [--out FILE]
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_optimizer
import torch
from measuring import environment

import kappascope

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import optimizer_zoo as zoo

TYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def verdicts(collection: dict[str, Callable[[], zoo.Specimen]]) -> dict[str, bool]:
    """Whether each member passed its audit."""
    found = {}
    for name, make in collection.items():
        specimen = make()
        torch.manual_seed(1)
        found[name] = kappascope.audit(*specimen).passed
    return found


def caught_by_type() -> dict[str, str]:
    """How many of the sabotaged optimizers are caught where the weights have each type."""
    counts, mlp, gpt = {}, zoo.mlp, zoo.gpt
    for dtype in TYPES:
        zoo.mlp = partial(mlp, dtype=dtype)
        zoo.gpt = partial(gpt, dtype=dtype)
        found = verdicts(zoo.SABOTAGED)
        counts[str(dtype)] = f"{len(found) - sum(found.values())} of {len(found)}"
    zoo.mlp, zoo.gpt = mlp, gpt
    return counts


def random_settings(pick: random.Random) -> tuple[str, dict[str, Any]]:
    """One of torch's optimizers, with settings that it accepts."""
    either = partial(pick.choice, [False, True])
    kind = pick.choice(
        ["SGD", "Adam", "AdamW", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "Adamax",
         "Adafactor", "ASGD", "Rprop", "Muon"]
    )  # fmt: skip
    settings: dict[str, Any] = {"lr": 10 ** pick.uniform(-6, 0)}
    if kind != "Rprop":
        settings["weight_decay"] = pick.choice([0, 0, 1e-4, 0.1, 1.0])
    if kind == "Muon":
        adjust = pick.choice([None, "original", "match_rms_adamw"])
        momentum, count = pick.choice([0.0, 0.9, 0.95]), pick.choice([3, 5, 7])
        return kind, settings | {"nesterov": either(), "momentum": momentum, "ns_steps": count,
                                 "adjust_lr_fn": adjust}  # fmt: skip
    settings |= {"maximize": pick.random() < 0.2, "foreach": pick.choice([None, True, False])}
    if kind in ("SGD", "RMSprop"):
        settings["momentum"] = pick.choice([0, 0.5, 0.99])
    if kind == "SGD" and settings["momentum"]:
        settings |= {"nesterov": True} if either() else {"dampening": 0.3}
    if kind in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax"):
        settings["betas"] = pick.choice([0.0, 0.5, 0.9, 0.95]), pick.choice([0.5, 0.9, 0.999])
        settings["eps"] = pick.choice([1e-8, 1e-3, 1e-12])
    if kind in ("Adam", "AdamW"):
        settings["amsgrad"] = either()
    if kind in ("NAdam", "RAdam"):
        settings["decoupled_weight_decay"] = either()
    if kind == "RMSprop":
        settings["centered"] = either()
    if kind == "Adagrad":
        settings |= {"lr_decay": pick.choice([0, 0.1]), "initial_accumulator_value": 0.1 * either()}
    return kind, settings


def random_honest(count: int) -> Iterator[tuple[str, Callable[[], zoo.Specimen]]]:
    """Torch's optimizers, each with a model that has been trained for a while or not at all."""

    def make(network: Any, kind: str, settings: dict[str, Any], before: int) -> zoo.Specimen:
        model, closure = network()
        trained = zoo.matrices(model) if kind == "Muon" else model.parameters()
        optimizer = getattr(torch.optim, kind)(trained, **settings)
        for _ in range(before):
            optimizer.zero_grad()
            closure()
            optimizer.step()
        return zoo.Specimen(model, optimizer, closure)

    pick = random.Random(0)
    for index in range(count):
        dtype, before = pick.choice(TYPES), pick.choice([0, 0, 3, 30])
        kind, settings = random_settings(pick)
        if kind == "Muon" and dtype is torch.bfloat16:
            settings["nesterov"] = True  # without it torch's is not honest: pytorch#190597
        networks = [partial(zoo.mlp, dtype), zoo.conv, partial(zoo.gpt, dtype=dtype)]
        network = networks[0] if dtype is torch.float16 else pick.choice(networks)
        label = f"{index}: {kind} {settings}, {dtype}, after {before} steps"
        yield label, partial(make, network, kind, settings, before)


def of_others() -> Iterator[tuple[str, Callable[[], zoo.Specimen]]]:
    """The optimizers of ``pytorch_optimizer`` that step a small network by themselves."""

    def make(name: str, network: Any) -> zoo.Specimen:
        model, closure = network()
        optimizer = pytorch_optimizer.load_optimizer(name)(model.parameters())
        if hasattr(optimizer, "train"):
            optimizer.train()
        closure()
        optimizer.step()  # some refuse here, and are not counted
        return zoo.Specimen(model, optimizer, closure)

    for name in pytorch_optimizer.get_supported_optimizers():
        for network in (zoo.mlp, zoo.gpt):
            trial = partial(make, name, network)
            try:
                trial()
            except Exception:
                continue
            yield f"{name} {network.__name__}", trial


def main() -> None:
    """Count, print, keep."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--random", type=int, default=400)
    default = Path(__file__).parent / "results" / "audit.json"
    parser.add_argument("--out", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)

    sabotaged, began = verdicts(zoo.SABOTAGED), time.perf_counter()
    honest = {
        "zoo": verdicts(zoo.HONEST),
        "random settings of torch's": verdicts(dict(random_honest(options.random))),
        "pytorch_optimizer": verdicts(dict(of_others())),
    }
    caught = len(sabotaged) - sum(sabotaged.values())
    print(f"sabotaged: {caught} of {len(sabotaged)} caught within five steps")
    missed = [name for name, passed in sabotaged.items() if passed]
    by_type = caught_by_type()
    print("".join(f"  {dtype}: {count}\n" for dtype, count in by_type.items()), end="")
    alarms = {}
    for name, found in honest.items():
        alarms[name] = [each for each, passed in found.items() if not passed]
        print(f"honest, {name}: {len(alarms[name])} of {len(found)} accused")
    report = {
        "what": str(__doc__).splitlines()[0],
        "environment": environment(),
        "sabotaged": {"caught": caught, "of": len(sabotaged), "missed": missed},
        "sabotaged_by_type": by_type,
        "honest": {
            name: {"accused": alarms[name], "of": len(found)} for name, found in honest.items()
        },
        "seconds": round(time.perf_counter() - began, 1),
    }
    options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
