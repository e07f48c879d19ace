"""Maximal update parametrization: learning rates and output scales that carry over between widths.

Yang et al. (2021) ask how every weight's scale and learning rate must follow the width of a network
so that features move by as much in a wide one as in a narrow one. The answer depends on which
dimensions of a weight grow with the width, which shows when a model is compared with a narrower
one of the same architecture, its *base*: its shapes, and nothing else, are looked at.

With m the ratio of inputs (fan-in) to those of the base, under Adam:

- weights whose inputs and outputs both grow (hidden) take the learning rate over m;
- weights whose outputs alone grow (from the input), biases and gains take it as it is;
- weights whose inputs alone grow (to the output) take it as it is, and what they give is over m.

Under SGD hidden weights take the learning rate times the ratio of outputs over that of inputs,
and what has one growing dimension takes it times that dimension's ratio. Initial variances are to
fall as 1 / fan-in, as torch's do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from kappascope.model.weights import LiveWeight, live_weights, unwrapped, why_not_multiplied

Base: TypeAlias = nn.Module | Mapping[str, Sequence[int]]
"""A narrower model of the same architecture, or the shapes of its parameters by name."""


@dataclass(frozen=True)
class Growth:
    """By how many times a parameter has more outputs and inputs than in the base.

    >>> Growth(outputs=4.0, inputs=4.0).kind, Growth(outputs=1.0, inputs=4.0).kind
    ('hidden', 'output')
    """

    outputs: float
    inputs: float

    @property
    def kind(self) -> str:
        """What the parameter is to the width: input, hidden, output, or fixed."""
        grows = self.outputs != 1, self.inputs != 1
        names = {(True, True): "hidden", (True, False): "input", (False, True): "output"}
        return names.get(grows, "fixed")

    def rate(self, optimizer: type[Optimizer]) -> float:
        """How many times the base's learning rate the parameter takes.

        >>> Growth(4.0, 4.0).rate(AdamW), Growth(4.0, 1.0).rate(AdamW), Growth(4.0, 1.0).rate(SGD)
        (0.25, 1.0, 4.0)
        """
        if issubclass(optimizer, SGD):
            return (
                self.outputs / self.inputs if self.kind == "hidden" else self.outputs * self.inputs
            )
        return 1 / self.inputs if self.kind == "hidden" else 1.0


def growths(model: nn.Module, base: Base) -> dict[str, Growth]:
    """How every parameter grew from the base, by name; tied ones once.

    >>> growths(nn.Linear(8, 3), nn.Linear(4, 3))
    {'weight': Growth(outputs=1.0, inputs=2.0), 'bias': Growth(outputs=1.0, inputs=1.0)}
    """
    model = unwrapped(model)
    shapes: Mapping[str, Sequence[int]]
    if isinstance(base, nn.Module):
        shapes = {name: p.shape for name, p in unwrapped(base).named_parameters()}
    else:
        shapes = base
    weights = {id(leaf): weight for weight in live_weights(model) for leaf in weight.leaves}
    by_name = {}
    for name, parameter in model.named_parameters():
        if name not in shapes or len(shapes[name]) != parameter.ndim:
            expected = f"the base to have {name} with {parameter.ndim} dimensions"
            came = tuple(shapes[name]) if name in shapes else "none"
            raise ValueError(f"expected {expected}; got {came}; build it by the same code")
        ratios = [a / b for a, b in zip(parameter.shape, shapes[name], strict=True)]
        by_name[name] = _growth(weights.get(id(parameter)), parameter, ratios)
    return by_name


def _growth(weight: LiveWeight | None, parameter: Tensor, ratios: Sequence[float]) -> Growth:
    """How a parameter grew, from the ratios of its dimensions to those of the base."""
    is_itself = weight is not None and tuple(parameter.shape) == weight.shape
    if weight is None or not is_itself or why_not_multiplied(weight) is not None:
        return Growth(prod(ratios), 1.0)  # a number for every output, as biases and tables have
    outputs, inputs = (
        prod(ratio for ratio, its in zip(ratios, weight.layout.sides, strict=True) if its == side)
        for side in ("rows", "columns")
    )
    return Growth(outputs, inputs)


def parameter_groups(
    model: nn.Module, base: Base, lr: float, *, optimizer: type[Optimizer] = AdamW
) -> list[dict[str, Any]]:
    """Parameter groups of an optimizer, each with the learning rate that ``lr`` of the base means.

    >>> wide, narrow = (nn.Sequential(nn.Linear(2, n), nn.Linear(n, n)) for n in (8, 4))
    >>> optimizer = AdamW(parameter_groups(wide, narrow, lr=0.1))
    >>> [(group["lr"], len(group["params"])) for group in optimizer.param_groups]
    [(0.1, 3), (0.05, 1)]
    """
    parameters = dict(unwrapped(model).named_parameters())
    groups: dict[float, list[nn.Parameter]] = {}
    for name, growth in growths(model, base).items():
        if parameters[name].requires_grad:
            groups.setdefault(lr * growth.rate(optimizer), []).append(parameters[name])
    return [{"params": members, "lr": rate} for rate, members in groups.items()]


def output_scales(model: nn.Module, base: Base) -> dict[str, float]:
    """The factors of what output weights give, by the names of their uses: one over inputs' growth.

    >>> output_scales(nn.Linear(8, 3), nn.Linear(4, 3))
    {'weight': 0.5}
    """
    by_name = growths(model, base)
    by_leaf = {id(p): by_name[name] for name, p in unwrapped(model).named_parameters()}
    scales = {}
    for weight in live_weights(unwrapped(model)):
        leaf = next((p for p in weight.leaves if tuple(p.shape) == weight.shape), None)
        growth = Growth(1.0, 1.0) if leaf is None else by_leaf[id(leaf)]
        is_table = any(isinstance(module, nn.Embedding) for _, module, _ in weight.uses)
        for name, module, _ in weight.uses:
            is_output = growth.kind == ("input" if is_table else "output")
            if is_output and not isinstance(module, nn.Embedding):
                scales[name] = 1 / (growth.outputs if is_table else growth.inputs)
    return scales


def scale_outputs(model: nn.Module, base: Base) -> ExitStack:
    """Multiply the inputs of output layers by their scales in every forward pass, until closed.

    A tied embedding is an output layer where it is used as one. What is scaled is what goes into
    the layer, so a bias counts in full. A module that holds other matrices beside an output weight
    is refused, for what it takes need not go there.

    >>> layer, narrow = nn.Linear(8, 3), nn.Linear(4, 3)
    >>> plain = layer(2 * torch.ones(8))
    >>> with scale_outputs(layer, narrow):
    ...     torch.equal(layer(4 * torch.ones(8)), plain)
    True
    """
    scales = output_scales(model, base)
    uses = [use for weight in live_weights(unwrapped(model)) for use in weight.uses]
    with ExitStack() as undo:
        for name, module, _ in uses:
            if name not in scales:
                continue
            if sum(its is module for _, its, _ in uses) > 1 or any(module.children()):
                kind = type(module).__name__
                problem = f"{name} is an output weight, and {kind} holds more than it"
                raise ValueError(f"{problem}; give it a layer of its own, such as nn.Linear")
            undo.callback(module.register_forward_pre_hook(_scaling(scales[name])).remove)
        return undo.pop_all()


def _scaling(scale: float) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda module, args: (args[0] * scale, *args[1:])


@dataclass(frozen=True)
class Coordinate:
    """How large the outputs of a layer are, and their change since the start, at one step.

    Both are means of absolute entries.
    """

    width: int
    step: int
    layer: str
    size: float
    change: float

    def document(self) -> dict[str, Any]:
        """The same as a row of a table.

        >>> Coordinate(64, 0, "fc", 1.0, 0.0).document()["layer"]
        'fc'
        """
        return asdict(self)


def coordinate_check(
    make: Callable[[int], nn.Module],
    widths: Sequence[int],
    loss: Callable[[nn.Module], Tensor],
    *,
    lr: float = 1e-2,
    steps: int = 3,
    seed: int = 0,
) -> list[Coordinate]:
    """Train models of several widths for a few steps, and note the size of what every layer gives.

    ``make`` builds a model of a width, ``loss`` is what it minimises, on a fixed batch. The first
    width is the base. Under muP the change of no layer grows or falls with the width: see
    :func:`growth_exponents`, and :func:`plot_coordinates` for the eye. Torch's global generator is
    seeded alike for every width and put back.

    >>> make = lambda n: nn.Sequential(nn.Linear(2, n), nn.ReLU(), nn.Linear(n, 1))
    >>> rows = coordinate_check(make, [4, 8], lambda m: m(torch.ones(3, 2)).square().mean())
    >>> sorted({(row.width, row.layer) for row in rows})
    [(4, '0'), (4, '1'), (4, '2'), (8, '0'), (8, '1'), (8, '2')]
    """
    rows: list[Coordinate] = []
    with torch.random.fork_rng():
        for width in widths:
            torch.manual_seed(seed)
            base, model = make(widths[0]), make(width)
            optimizer = AdamW(parameter_groups(model, base, lr), weight_decay=0.0)
            with scale_outputs(model, base):
                rows += _watched(model, width, loss, optimizer, steps)
    return rows


def _watched(
    model: nn.Module,
    width: int,
    loss: Callable[[nn.Module], Tensor],
    optimizer: Optimizer,
    steps: int,
) -> Iterator[Coordinate]:
    outputs: dict[str, Tensor] = {}
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if not any(module.children()):
                hook = module.register_forward_hook(_noting(outputs, name))
                undo.callback(hook.remove)
        first: dict[str, Tensor] = {}
        for step in range(steps + 1):
            optimizer.zero_grad()
            value = loss(model)
            first = first or dict(outputs)
            for name, output in outputs.items():
                change = float((output - first[name]).abs().mean())
                yield Coordinate(width, step, name, float(output.abs().mean()), change)
            value.backward()
            optimizer.step()


def _noting(outputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def note(module: nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, Tensor) and output.is_floating_point():
            outputs[name] = output.detach().clone()

    return note


def growth_exponents(rows: Sequence[Coordinate]) -> dict[str, float]:
    """The power of the width with which every layer's change grows, after the last step.

    Near zero, or below, where the parametrization is right; 0.5 or 1 where learning rates are too
    large for wide models.

    >>> rows = [Coordinate(n, 1, "fc", 1.0, n**0.5) for n in (16, 64, 256)]
    >>> growth_exponents(rows)
    {'fc': 0.5}
    """
    end = max(row.step for row in rows)
    exponents = {}
    for layer in dict.fromkeys(row.layer for row in rows):
        points = [(row.width, row.change) for row in rows if (row.layer, row.step) == (layer, end)]
        x, y = torch.tensor(points, dtype=torch.float64).clamp(min=1e-300).log().unbind(1)
        centred = x - x.mean()
        exponents[layer] = round(float((centred @ y) / (centred @ centred)), 6)
    return exponents


def plot_coordinates(rows: Sequence[Coordinate], axes: Any) -> None:
    """Draw the change of every layer against the width, after the last step, on axes of matplotlib.

    >>> class Axes:
    ...     def __getattr__(self, name): return lambda *args, **kwargs: None
    >>> plot_coordinates([Coordinate(64, 1, "fc", 1.0, 0.5)], Axes())
    """
    end = max(row.step for row in rows)
    for layer in dict.fromkeys(row.layer for row in rows):
        points = [(row.width, row.change) for row in rows if (row.layer, row.step) == (layer, end)]
        axes.plot(*zip(*points, strict=True), marker="o", label=layer)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("width")
    axes.set_ylabel(f"mean change after {end} steps")
    axes.legend()
