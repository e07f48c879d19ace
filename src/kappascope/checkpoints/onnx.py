"""ONNX models: their initializers and constants, found by our own reader.

A model is one protobuf message, of which a tensor's numbers are a field, or a part of another file
in the same folder. The message is walked from field to field without its numbers, which are read
where they lie when they are asked for. No operator is run.

A matrix B of a product x B (``MatMul``, or ``Gemm`` without ``transB``) is shown transposed, as
(out, in): so torch keeps the weight of a linear layer. What a node does with a tensor tells what it
is, whatever its name: the kernel of a convolution with its groups, or a table in which rows are
looked up. The gates of a recurrent layer are shown in PyTorch's order, each direction apart. Whole
numbers that ``DequantizeLinear`` reads are decoded; those that integer products
read are said to be codes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kappascope.checkpoints import folders
from kappascope.checkpoints.codes import Code, CodedLocation, enlarged
from kappascope.checkpoints.formats import AGAIN, Malformed, quoted
from kappascope.checkpoints.locations import (
    CheckpointFile,
    FileContents,
    StitchedLocation,
    StorageLocation,
    TensorLocation,
    Tree,
    row_major,
)
from kappascope.checkpoints.protobuf import Span, VariableLength, WireReader, span_of
from kappascope.checkpoints.safetensors import MOST_TENSORS
from kappascope.model.layouts import GRAPH_FACTS
from kappascope.model.skipped import Reason, no_weight, unreadable

DEEPEST_GRAPH = 16  # graphs inside one another; loops and branches nest two or three
MOST_DIMENSIONS = 64

# The names of onnx.proto for its fields.
_GRAPH, _FUNCTION = 7, 25  # of a model
_NODE, _INITIALIZER, _SPARSE = 1, 5, 15  # of a graph
_FUNCTION_NAME, _FUNCTION_NODE = 1, 7
_INPUT, _OUTPUT, _NAME, _OPERATOR, _ATTRIBUTE = 1, 2, 3, 4, 5  # of a node
_INTEGER, _TENSOR, _SUBGRAPH, _SUBGRAPHS = 3, 5, 6, 11  # of an attribute

# What operators do with an input, by its place. Those of the first line pass it on.
_PASSING = {("Identity", 0), ("Cast", 0), ("QuantizeLinear", 0), ("DequantizeLinear", 0),
            ("Expand", 0)}  # fmt: skip
_GATES = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}  # where PyTorch's gates are
_RECURRENT = {1: "weight_ih", 2: "weight_hh", 3: "bias", 7: "peepholes"}  # by their places
_STATES = {(operator, place) for operator in _GATES for place in (5, 6)}
_PRODUCTS = {("MatMul", 1), ("Gemm", 1)}
_KERNELS = {("Conv", 1), ("FusedConv", 1), ("ConvInteger", 1), ("QLinearConv", 3),
            ("ConvTranspose", 1)}  # fmt: skip
_CODES = {("ConvInteger", 1), ("QLinearConv", 3), ("MatMulInteger", 1), ("QLinearMatMul", 3),
          ("MatMulIntegerToFloat", 1), ("DynamicQuantizeMatMul", 1), ("MatMulNBits", 1),
          ("QGemm", 3), ("QAttention", 1), ("DynamicQuantizeLSTM", 1),
          ("DynamicQuantizeLSTM", 2)}  # fmt: skip
_TABLE = ("Gather", 0)
_FILLING = {("Where", 1), ("Where", 2), ("Pad", 2), ("Clip", 1), ("Clip", 2), ("Max", 0),
            ("Max", 1), ("Min", 0), ("Min", 1)}  # fmt: skip
_MOST_PASSED = 32  # operators in a row that pass a tensor on: a cast or two are usual
_DIMS, _TYPE, _TENSOR_NAME, _RAW, _EXTERNAL, _LOCATION = 1, 2, 8, 9, 13, 14  # of a tensor
_PACKED = {4: torch.float32, 10: torch.float64}  # fields of a tensor: numbers side by side
_VARIABLE = (5, 7, 11)  # the same with numbers of variable length

_DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 4: torch.uint16, 5: torch.int16,
    6: torch.int32, 7: torch.int64, 9: torch.bool, 10: torch.float16, 11: torch.float64,
    12: torch.uint32, 13: torch.uint64, 14: torch.complex64, 15: torch.complex128,
    16: torch.bfloat16, 17: torch.float8_e4m3fn, 18: torch.float8_e4m3fnuz, 19: torch.float8_e5m2,
    20: torch.float8_e5m2fnuz, 24: torch.float8_e8m0fnu,
}  # fmt: skip
_WIDE = {torch.float32, torch.float64, torch.complex64, torch.complex128}  # never so listed
_UNREAD = {8: "texts", **dict.fromkeys((21, 22, 23, *range(25, 29)), "numbers of less than a byte")}


def read_onnx(file: CheckpointFile, folder: Path) -> FileContents:
    """Return the tensors of a model; those outside of it are looked for in its folder."""
    walk = _Walk(WireReader(file))
    whole: _Graph | None = None
    functions: list[_Graph] = []
    for number, value in walk.wire.fields((0, file.size)):
        if number == _GRAPH and whole is None:
            whole = walk.graph(value)
        elif number == _FUNCTION:
            functions.append(walk.graph(value, node=_FUNCTION_NODE))
    if whole is None:
        raise Malformed("an ONNX model without a graph", AGAIN)
    whole.inner += functions
    tree = _tree(whole, walk, folder)
    return FileContents(tree, {}, {GRAPH_FACTS: walk.facts} if any(walk.facts.values()) else {})


# --- the graph ------------------------------------------------------------------------------------


@dataclass
class _TensorFields:
    """What the file says of a tensor, with its numbers left where they are."""

    name: str = ""
    kind: int = 0
    dims: list[int] = field(default_factory=list)
    numbers: dict[int, Span] = field(default_factory=dict)  # by their fields
    outside: dict[str, str] = field(default_factory=dict)
    is_outside: bool = False
    fault: str = ""


@dataclass
class _Graph:
    name: str = ""
    tensors: list[_TensorFields] = field(default_factory=list)
    inner: list[_Graph] = field(default_factory=list)


@dataclass(frozen=True)
class _Use:
    """What a node does with one of its inputs."""

    operator: str
    place: int
    numbers: dict[str, int]  # its attributes that are whole numbers
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @property
    def key(self) -> tuple[str, int]:
        """The operator and the place of the input, which together tell what is done with it."""
        return self.operator, self.place

    @property
    def turns(self) -> bool:
        """Whether it is B of x B."""
        return self.key in _PRODUCTS and not self.numbers.get("transB", 0)


@dataclass
class _Walk:
    """Go through a file from field to field, and note how its tensors are used."""

    wire: WireReader
    uses: dict[str, list[_Use]] = field(default_factory=dict)  # of tensors, by their names
    scopes: dict[str, str] = field(default_factory=dict)  # names of the nodes that use them
    named: dict[str, _TensorFields] = field(default_factory=dict)
    facts: dict[str, dict[str, Any]] = field(default_factory=lambda: {"kernels": {}, "tables": {}})
    tensors: int = 0

    def used(self, name: str) -> Iterator[_Use]:
        """Yield what is done with a tensor, also after it was copied, cast or dequantized."""
        seen, names = {name}, [name]
        for _ in range(_MOST_PASSED):
            uses = [use for each in names for use in self.uses.get(each, ())]
            yield from (use for use in uses if use.key not in _PASSING)
            passed = [out for use in uses if use.key in _PASSING for out in use.outputs]
            names = [each for each in dict.fromkeys(passed) if each not in seen]
            seen.update(names)
            if not names:
                return

    def graph(self, value: Any, node: int = _NODE, depth: int = 0) -> _Graph:
        """Return the tensors of a graph and of those inside it."""
        if depth > DEEPEST_GRAPH:
            raise Malformed(f"graphs nested more than {DEEPEST_GRAPH} deep", AGAIN)
        graph = _Graph()
        for number, part in self.wire.fields(span_of(value)):
            if number == node:
                self.node(part, graph, depth)
            elif number == _FUNCTION_NAME and node == _FUNCTION_NODE:
                graph.name = self.wire.text(part)
            elif number == _INITIALIZER and node == _NODE:
                graph.tensors.append(self.tensor(part))
            elif number == _SPARSE and node == _NODE:
                values = next((p for n, p in self.wire.fields(span_of(part)) if n == 1), None)
                sparse = self.tensor(values) if values else _TensorFields()
                sparse.fault = "a sparse tensor"
                graph.tensors.append(sparse)
        return graph

    def node(self, value: Any, graph: _Graph, depth: int) -> None:
        """Take note of what a node uses, and of the tensor and the graphs that it holds."""
        texts: dict[int, list[str]] = {_INPUT: [], _OUTPUT: [], _NAME: [""], _OPERATOR: [""]}
        attributes: dict[str, dict[int, Any]] = {}
        inner: list[_Graph] = []
        for number, part in self.wire.fields(span_of(value)):
            if number in texts:
                texts[number].append(self.wire.text(part))
            elif number == _ATTRIBUTE:
                fields: dict[int, Any] = {}
                for kind, field_value in self.wire.fields(span_of(part)):
                    fields[kind] = field_value
                    if kind in (_SUBGRAPH, _SUBGRAPHS):
                        inner.append(self.graph(field_value, depth=depth + 1))
                attributes[self.wire.text(fields[1]) if 1 in fields else ""] = fields
        name, operator = texts[_NAME][-1], texts[_OPERATOR][-1]
        for each in inner:
            each.name = name or operator
        graph.inner += inner
        constant = attributes.get("value", {}).get(_TENSOR)
        if operator == "Constant" and constant and texts[_OUTPUT]:
            tensor = self.tensor(constant)
            tensor.name = texts[_OUTPUT][0]
            self.named.setdefault(tensor.name, tensor)
            dtype = _DTYPES.get(tensor.kind)
            # whole and single numbers are axes, shapes and factors of the graph, not weights
            if tensor.dims and (dtype is None or dtype.is_floating_point):
                graph.tensors.append(tensor)
        whole = {key: fields[_INTEGER] for key, fields in attributes.items() if _INTEGER in fields}
        whole = {key: value for key, value in whole.items() if isinstance(value, int)}
        inputs, outputs = tuple(texts[_INPUT]), tuple(texts[_OUTPUT])
        for place, used in enumerate(inputs):
            use = _Use(operator, place, whole, inputs, outputs)
            self.uses.setdefault(used, []).append(use)
            self.scopes.setdefault(used, name)

    def tensor(self, value: Any) -> _TensorFields:
        """Return what a message says of a tensor."""
        self.tensors += 1
        if self.tensors > MOST_TENSORS:
            raise Malformed(f"more than {MOST_TENSORS} tensors", "give a part of the model")
        it = _TensorFields()
        for number, part in self.wire.fields(span_of(value)):
            if number == _DIMS:
                it.dims += self.wire.varints(part, MOST_DIMENSIONS)
            elif number == _TYPE and isinstance(part, int):
                it.kind = part
            elif number == _TENSOR_NAME:
                it.name = self.wire.text(part)
            elif number == _EXTERNAL:
                pair = dict(self.wire.fields(span_of(part)))
                if 1 in pair and 2 in pair:
                    it.outside[self.wire.text(pair[1])] = self.wire.text(pair[2])
            elif number == _LOCATION:
                it.is_outside = part == 1
            elif number in (_RAW, *_PACKED, *_VARIABLE):
                if isinstance(part, int) or number in it.numbers:
                    it.fault = "its numbers lie in pieces"
                else:
                    it.numbers[number] = part
        self.named.setdefault(it.name, it)
        return it


# --- tensors --------------------------------------------------------------------------------------


def _tree(graph: _Graph, walk: _Walk, folder: Path, at: str = "") -> Tree:
    """Return the tensors of a graph by their names, and below them those of inner graphs."""
    tree: Tree = {}

    def put(name: str, node: Any) -> None:
        if name in tree:
            raise Malformed(f"duplicate tensor name {quoted(name)}", AGAIN)
        tree[name] = node

    own = {tensor.name for tensor in graph.tensors}
    for tensor in graph.tensors:
        use = _recurrent(tensor, walk)
        shown = _gated(tensor, use, walk, folder) if use else {}
        if shown and not shown.keys() & (own | tree.keys()):
            tree |= shown
            continue
        name = _layer(walk.scopes.get(tensor.name, ""), tensor.name)
        name = tensor.name if name in tree else name
        put(name, _leaf(tensor, walk, folder))
        _note(tensor, f"{at}{name}", walk)
    for i, inner in enumerate(graph.inner):
        name = f"{inner.name} {i}" if inner.name in tree else inner.name
        if below := _tree(inner, walk, folder, f"{at}{name}."):
            put(name, below)
    return tree


def _recurrent(it: _TensorFields, walk: _Walk) -> _Use | None:
    """Return what a recurrent layer does with a tensor, if that is all that is done with it."""
    uses = list(walk.used(it.name))
    layers = [use for use in uses if use.operator in _GATES and use.place in _RECURRENT]
    return layers[0] if layers and len({use.key for use in uses}) == 1 else None


def _gated(it: _TensorFields, use: _Use, walk: _Walk, folder: Path) -> Tree:
    """Return the tensors of a recurrent layer's directions; none where they are not plain.

    A weight is stored as (directions, gates times outputs, inputs), a bias without inputs.
    """
    dtype, order, label = _DTYPES.get(it.kind), _GATES[use.operator], _RECURRENT[use.place]
    whole = _leaf(it, walk, folder)
    is_weight = use.place in (1, 2)
    sizes = it.dims[1:] if is_weight else [*it.dims[1:], 1]
    if dtype is None or not isinstance(whole, TensorLocation) or len(it.dims) != 2 + is_weight:
        return {}
    if 0 in it.dims or sizes[0] % len(order) or whole.stride != row_major(whole.shape):
        return {}
    size = prod(sizes)  # of a direction
    gate = size // len(order)
    scope = re.fullmatch(r"/(.+)/(?:LSTM|GRU|RNN)(?:_(\d+))?", walk.scopes.get(it.name, ""))
    folded = scope and re.fullmatch(r"onnx::(LSTM|GRU|RNN)_\d+", it.name)
    layer = f"{scope[1].replace('/', '.')}" if scope and folded else it.name
    tree: Tree = {}
    for direction in range(it.dims[0]):
        begin = whole.offset + direction * size
        suffix = f"_l{(scope[2] if scope and folded else 0) or 0}{'_reverse' * direction}"
        name = f"{layer}.{label}{suffix}"
        if is_weight:
            pieces = tuple(
                TensorLocation(whole.storage, dtype, (gate,), (1,), begin + k * gate) for k in order
            )
            shape = tuple(sizes)
            tree[name] = StitchedLocation(pieces, dtype, shape, row_major(shape))
        else:
            tree[name] = TensorLocation(whole.storage, dtype, (size,), (1,), begin)
    return tree


def _note(it: _TensorFields, path: str, walk: _Walk) -> None:
    """Take note of a tensor that is a kernel or a table, by what is done with it."""
    uses = list(walk.used(it.name))
    kernels = {
        (max(1, use.numbers.get("group", 1)), use.operator == "ConvTranspose")
        for use in uses
        if use.key in _KERNELS
    }
    if len(kernels) == 1 and len(it.dims) > 2:
        walk.facts["kernels"][path] = list(kernels.pop())
    is_table = len(it.dims) == 2 and bool(uses)
    if is_table and all(use.key == _TABLE and not use.numbers.get("axis", 0) for use in uses):
        walk.facts["tables"][path] = True


def _layer(node: str, name: str) -> str:
    """Return the name of the weight that torch's exporter folded into a number, or the name.

    >>> _layer("/encoder/0/linear/MatMul", "onnx::MatMul_12")
    'encoder.0.linear.weight'
    """
    scope = re.fullmatch(r"/(.+)/(MatMul|Gemm)(_\d+)?", node)
    folded = re.fullmatch(r"onnx::(MatMul|Gemm)_\d+", name)
    return f"{scope[1].replace('/', '.')}.weight" if scope and folded else name


def _leaf(it: _TensorFields, walk: _Walk, folder: Path) -> TensorLocation | CodedLocation | Reason:
    """Return where the numbers of a tensor lie, or why they cannot be read."""
    dtype, shape, file = _DTYPES.get(it.kind), tuple(it.dims), walk.wire.file
    if dtype is None or it.fault:
        what = _UNREAD.get(it.kind, f"numbers of the unknown type {it.kind}")
        return unreadable(it.fault or f"{what} are not read")
    if len(shape) > MOST_DIMENSIONS or prod(size or 1 for size in shape) >= 1 << 62:
        return unreadable(f"a shape of {len(shape)} dimensions that cannot be")
    uses = list(walk.used(it.name))
    turned = len(shape) == 2 and bool(uses) and all(use.turns for use in uses)
    for keys, what, is_such in (
        (_FILLING, "a constant of the graph, put where others are left out", prod(shape) == 1),
        (_STATES, "the state with which a recurrent layer begins", True),
    ):
        if is_such and uses and all(use.key in keys for use in uses):
            return no_weight(what)
    if not dtype.is_floating_point and any(use.key in _CODES for use in uses):
        return unreadable(f"quantized codes ({dtype})")
    scaled = [use for use in walk.uses.get(it.name, ()) if use.key == ("DequantizeLinear", 0)]
    if scaled and not dtype.is_complex:
        return _dequantized(it, scaled[0], turned, walk, folder)
    return _plain(it, dtype, turned, file, folder)


def _plain(
    it: _TensorFields, dtype: torch.dtype, turned: bool, file: CheckpointFile, folder: Path
) -> TensorLocation | CodedLocation | Reason:
    """Return where the numbers of a tensor lie, in whichever of the forms that the format has."""
    listed = _RAW not in it.numbers and any(kind in it.numbers for kind in _VARIABLE)
    if listed and not it.is_outside:
        return _listed(it, file, dtype, turned)
    return _located(it, dtype, turned, file, folder)


def _located(
    it: _TensorFields, dtype: torch.dtype, turned: bool, file: CheckpointFile, folder: Path
) -> TensorLocation | Reason:
    """Return where numbers stand side by side, in the model or outside."""
    shape = tuple(it.dims)
    place = _outside(it, folder) if it.is_outside else _inside(it, file, dtype)
    need = prod(shape) * dtype.itemsize
    if isinstance(place, str) or place.size != need:
        wrong = place if isinstance(place, str) else f"{place.size} bytes of {need} that it needs"
        return unreadable(wrong)
    steps = tuple(accumulate((max(size, 1) for size in shape[:0:-1]), mul, initial=1))
    strides = steps[::-1] if shape else ()
    if turned:
        shape, strides = shape[::-1], strides[::-1]
    tensor = TensorLocation(place, dtype, shape, strides)
    fault = tensor.fault()
    return unreadable(fault) if fault else tensor


def _dequantized(
    it: _TensorFields, use: _Use, turned: bool, walk: _Walk, folder: Path
) -> CodedLocation | Reason:
    """Return a tensor whose codes are multiplied by scales: one, or one for each index of an axis.

    Scales that the graph computes, and those of blocks, are not known here.
    """
    dtype, shape, file = _DTYPES[it.kind], tuple(it.dims), walk.wire.file
    unknown = unreadable(f"quantized codes ({dtype}) whose scales are not beside them")
    beside = [walk.named.get(name) if name else None for name in use.inputs[1:3]]
    if not beside or None in beside or use.numbers.get("block_size", 0):
        return unknown
    axis = use.numbers.get("axis", 1)
    axis += len(shape) if axis < 0 else 0
    count = shape[axis] if 0 <= axis < len(shape) else 1
    stored: list[TensorLocation | CodedLocation] = []
    for each in (it, *(one for one in beside if one is not None)):
        kind = _DTYPES.get(each.kind)
        if kind is None or kind.is_complex or each.fault:
            return unknown
        found = _plain(each, kind, False, file, folder)
        if isinstance(found, Reason):
            return found
        if stored and prod(found.shape) not in (1, count):
            return unknown
        stored.append(found)
    code = LinearCodes(str(dtype).removeprefix("torch."), axis, turned)
    return CodedLocation(tuple(stored), code, shape[::-1] if turned else shape)


@dataclass(frozen=True)
class LinearCodes(Code):
    """Codes less a zero point, times a scale: of the whole tensor, or of each index of an axis.

    >>> codes, scale = torch.tensor([[-2, 4]], dtype=torch.int8), torch.tensor([0.5, 0.25])
    >>> LinearCodes("int8", axis=1).decode(codes, scale)
    tensor([[-1.,  1.]])
    """

    dtype: str
    axis: int
    turned: bool = False

    @property
    def name(self) -> str:
        """The format and the type of its codes."""
        return f"ONNX {self.dtype}"

    def decode(self, *stored: Tensor) -> Float[Tensor, "*shape"]:
        """Return (code - zero point) * scale."""
        codes, scale, *zero = stored
        numbers = codes.float()
        if zero:
            numbers = numbers - self._along(zero[0].float(), codes)
        numbers = numbers * self._along(scale.float(), codes)
        return numbers.mT if self.turned else numbers

    def half_steps(self, *stored: Tensor) -> Float[Tensor, "*shape"]:
        """Return half the scale of every entry."""
        codes, scale, *_ = stored
        steps = enlarged(self._along(scale.float().abs() / 2, codes)).expand(codes.shape)
        return steps.mT if self.turned else steps

    def _along(self, values: Tensor, codes: Tensor) -> Tensor:
        if values.numel() == 1:
            return values.reshape(())
        return values.reshape([-1 if i == self.axis else 1 for i in range(codes.ndim)])


def _listed(
    it: _TensorFields, file: CheckpointFile, dtype: torch.dtype, turned: bool
) -> CodedLocation | Reason:
    """Return a tensor whose numbers are listed in as many bytes as each of them needs."""
    begin, end = next(it.numbers[kind] for kind in _VARIABLE if kind in it.numbers)
    shape = tuple(it.dims)
    if dtype in _WIDE or end - begin < prod(shape):  # a number takes a byte at least
        return unreadable(f"{end - begin} bytes of numbers do not fit {dtype} of {list(shape)}")
    place = StorageLocation(file, begin, end - begin)
    stored = TensorLocation(place, torch.uint8, (end - begin,), (1,))
    seen = shape[::-1] if turned else shape
    return CodedLocation((stored,), VariableLength(dtype, shape, turned), seen, dtype)


def _inside(it: _TensorFields, file: CheckpointFile, dtype: torch.dtype) -> StorageLocation:
    """Return the bytes of a tensor whose numbers stand side by side in the model, if any do."""
    real = {torch.complex64: torch.float32, torch.complex128: torch.float64}.get(dtype, dtype)
    kinds = [_RAW, *(kind for kind, kept in _PACKED.items() if kept == real)]
    begin, end = next((it.numbers[kind] for kind in kinds if kind in it.numbers), (0, 0))
    return StorageLocation(file, begin, end - begin)


def _outside(it: _TensorFields, folder: Path) -> StorageLocation | str:
    """Return the bytes of a tensor in another file of the folder, or what is wrong with them."""
    name = it.outside.get("location", "").removeprefix("./")
    offset, length = it.outside.get("offset", "0"), it.outside.get("length", "")
    if not re.fullmatch(r"[0-9]{1,18}", offset) or not re.fullmatch(r"[0-9]{0,18}", length):
        return f"the place of its numbers in {quoted(name)} cannot be understood"
    try:
        file = CheckpointFile.at(folders.inside(folder, name))
    except (Malformed, OSError) as error:
        wrong = error.wrong if isinstance(error, Malformed) else error.strerror
        return f"its numbers in {quoted(name)} are lost: {wrong}"
    begin = int(offset)
    size = int(length) if length else max(file.size - begin, 0)
    if begin + size > file.size:
        return f"truncated: {quoted(name)} has {file.size} of {begin + size} bytes"
    return StorageLocation(file, begin, size)
