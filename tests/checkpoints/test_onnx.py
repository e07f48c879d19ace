"""ONNX: tensors as the package writes them, wherever their numbers stand; files that lie."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import broken_files
import broken_formats
from broken_files import refused
from checkpoint_files import everything, put
from kappascope.checkpoints import onnx
from kappascope.checkpoints.locations import CheckpointFile
from kappascope.checkpoints.onnx import read_onnx
from kappascope.checkpoints.open import open as open_checkpoint
from kappascope.clinic.diagnose import diagnose

package = pytest.importorskip("onnx", reason="the package onnx is not installed")
helper = pytest.importorskip("onnx.helper")
numpy_helper = pytest.importorskip("onnx.numpy_helper")
TYPES = {
    name: number for name, number in package.TensorProto.DataType.items() if number in onnx._DTYPES
}


def model(initializers: list[Any], nodes: list[Any] | None = None, **parts: Any) -> Any:
    graph = helper.make_graph(nodes or [], "g", [], [], initializer=initializers, **parts)
    return helper.make_model(graph, producer_name="test")


def saved(path: Path, it: Any, **options: Any) -> Path:
    package.save(it, path, **options)
    return path


def tree(path: Path) -> dict[str, Any]:
    return read_onnx(CheckpointFile.at(path), path.parent).tree


def weight(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits(tensor: Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("raw", [True, False], ids=["raw", "listed"])
@pytest.mark.parametrize("kind", TYPES)
def test_every_type_in_both_forms_as_the_package_reads_it(
    kind: str, raw: bool, tmp_path: Path
) -> None:
    number = TYPES[kind]
    dtype = helper.tensor_dtype_to_np_dtype(number)
    drawn = np.random.default_rng(1).integers(0, 3, (2, 3, 4))
    values = (drawn - (0 if dtype.kind in "ub" else 1)).astype(dtype)
    values = np.abs(values) if kind == "FLOAT8E8M0" else values
    given = values.tobytes() if raw else values.flatten()
    tensor = helper.make_tensor("w", number, values.shape, given, raw=raw)
    expected = numpy_helper.to_array(tensor)
    found = tree(saved(tmp_path / "x.onnx", model([tensor])))["w"]
    assert found.shape == (2, 3, 4)
    assert bits(found.read()) == expected.tobytes()


def test_every_type_of_the_package_is_read_or_named() -> None:
    numbers = set(package.TensorProto.DataType.values())
    assert numbers - onnx._DTYPES.keys() - onnx._UNREAD.keys() == {package.TensorProto.UNDEFINED}


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 0)])
def test_shapes_without_or_with_one_number(shape: tuple[int, ...], tmp_path: Path) -> None:
    for raw in (True, False):
        values = np.ones(shape, np.float16)
        given = values.tobytes() if raw else values.flatten()
        tensor = helper.make_tensor("w", package.TensorProto.FLOAT16, shape, given, raw=raw)
        found = tree(saved(tmp_path / "x.onnx", model([tensor])))["w"].read()
        assert torch.equal(found, torch.from_numpy(values))


@pytest.mark.parametrize("numbers", [[1, -1, 127, 128, 2**31 - 1, -(2**31)] * 100_000])
def test_long_lists_of_numbers_are_decoded_in_parts(numbers: list[int], tmp_path: Path) -> None:
    tensor = helper.make_tensor("w", package.TensorProto.INT32, [len(numbers)], numbers)
    found = tree(saved(tmp_path / "x.onnx", model([tensor])))["w"].read()
    assert found.dtype == torch.int32
    assert found.tolist() == numbers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.up = nn.Embedding(9, 6), nn.Linear(6, 8)
        self.down, self.flat = nn.Linear(8, 6, bias=False), nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.flat(self.down(self.up(self.emb(x)).relu()).mean(1))


def test_what_torch_exports_is_the_state_dict(tmp_path: Path) -> None:
    """Products that were folded into transposes get their names and their orientation back."""
    net = Net().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        where = tmp_path / "x.onnx"
        torch.onnx.export(net, (torch.zeros(2, 3, dtype=torch.long),), where, dynamo=False)
    torch.save(net.state_dict(), tmp_path / "x.pt")
    checkpoint = open_checkpoint(where)
    assert checkpoint.format == "ONNX"
    found = everything(checkpoint)
    for name, tensor in net.state_dict().items():
        assert torch.equal(found[name], tensor)
    rows = [
        {row.name: row for row in diagnose(tmp_path / f"x.{end}").matrices}
        for end in ("onnx", "pt")
    ]
    assert rows[0].keys() == rows[1].keys()
    for name, row in rows[0].items():
        assert math.isclose(row.condition_number, rows[1][name].condition_number, rel_tol=1e-6)
        assert row.row_norms == pytest.approx(rows[1][name].row_norms)


class Recurrent(nn.Module):
    """All kinds of recurrent layers, one of them in two layers and two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.LSTM(12, 8, num_layers=2, bidirectional=True)
        self.b, self.c = nn.GRU(16, 6), nn.RNN(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c):
            x = layer(x)[0]
        return x


def test_gates_of_recurrent_layers_are_those_of_torch(tmp_path: Path) -> None:
    net = Recurrent().eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(net, (torch.zeros(3, 1, 12),), tmp_path / "x.onnx", dynamo=False)
    found = everything(open_checkpoint(tmp_path / "x.onnx"))
    weights = {name: t for name, t in net.state_dict().items() if "bias" not in name}
    assert len(weights) == 12
    for name, tensor in weights.items():
        assert torch.equal(found[name], tensor), name
    rows = diagnose(tmp_path / "x.onnx").matrices
    assert {row.name.partition("[")[0] for row in rows} == weights.keys()  # no bias, no state
    assert "a.weight_hh_l1_reverse[f]" in {row.name for row in rows}


@pytest.mark.parametrize("shape", [(1, 31, 4), (2, 0, 4), (32, 4), (1, 1, 32, 4)])
def test_weights_that_no_recurrent_layer_has_are_shown_as_they_are(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    node = helper.make_node("LSTM", ["x", "w", "r"], ["y"], name="n", hidden_size=8)
    it = numpy_helper.from_array(weight(*shape), "w")
    assert tree(saved(tmp_path / "x.onnx", model([it], [node])))["w"].shape == shape


def product(op: str, *inputs: str, **attributes: Any) -> Any:
    return helper.make_node(op, list(inputs), ["y"], name="n", **attributes)


@pytest.mark.parametrize(
    ("nodes", "turned"),
    [
        ([product("MatMul", "x", "w")], True),
        ([product("MatMul", "w", "x")], False),
        ([product("Gemm", "x", "w", "b")], True),
        ([product("Gemm", "x", "w", "b", transB=1)], False),
        ([product("MatMul", "x", "w"), product("Gather", "w", "i")], False),
        ([], False),
    ],
)
@pytest.mark.parametrize("raw", [True, False])
def test_a_matrix_is_shown_as_out_by_in(
    nodes: list[Any], turned: bool, raw: bool, tmp_path: Path
) -> None:
    values = weight(3, 4).astype(np.float16)
    given = values.tobytes() if raw else values.flatten()
    tensor = helper.make_tensor("w", package.TensorProto.FLOAT16, (3, 4), given, raw=raw)
    found = tree(saved(tmp_path / "x.onnx", model([tensor], nodes)))["w"]
    expected = torch.from_numpy(values.T.copy() if turned else values)
    assert found.shape == expected.shape
    assert torch.equal(found.read(), expected)


def test_constants_and_subgraphs_and_functions(tmp_path: Path) -> None:
    def constant(name: str, values: np.ndarray[Any, Any]) -> Any:
        return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(values, name))

    inside = [numpy_helper.from_array(weight(2, 5, seed=3), "inner")]
    branch = helper.make_graph([constant("deep", weight(4, 2, seed=4))], "b", [], [], inside)
    nodes = [
        constant("c", weight(3, 3, seed=2)),
        constant("axes", np.array([1, 2])),
        constant("half", np.float32(0.5)),
        helper.make_node("If", ["t"], ["y"], name="if", then_branch=branch, else_branch=branch),
    ]
    it = model([numpy_helper.from_array(weight(2, 2), "w")], nodes)
    body = [constant("c", weight(2, 2, seed=5))]
    operators = [helper.make_opsetid("", 17)]
    it.functions.append(helper.make_function("local", "Act", [], ["c"], body, operators))
    found = everything(open_checkpoint(saved(tmp_path / "x.onnx", it)))
    assert list(found) == [
        "c", "w", "if.deep", "if.inner", "if 1.deep", "if 1.inner", "Act.c",
    ]  # fmt: skip
    assert torch.equal(found["if.deep"], torch.from_numpy(weight(4, 2, seed=4)))


def outside(path: Path) -> Any:
    it = model([numpy_helper.from_array(weight(8, 6, seed=k), f"w{k}") for k in range(2)])
    saved(path, it, save_as_external_data=True, location="w.data", size_threshold=0)
    return package.load(path, load_external_data=False)


def test_numbers_in_another_file_of_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    outside(path)
    found = everything(open_checkpoint(tmp_path))
    for k in range(2):
        assert torch.equal(found[f"w{k}"], torch.from_numpy(weight(8, 6, seed=k)))
    (tmp_path / "w.data").write_bytes((tmp_path / "w.data").read_bytes()[:200])
    contents = open_checkpoint(path).contents
    assert "truncated" in str(contents["w1"])
    assert isinstance(contents["w0"], Tensor)
    (tmp_path / "w.data").unlink()
    assert "No such file" in str(open_checkpoint(path).contents["w0"])


@pytest.mark.parametrize(
    ("key", "value", "word"),
    [
        ("location", "../secret", "not a plain file name"),
        ("location", "/etc/hostname", "not a plain file name"),
        ("location", "link", "link out of the folder"),
        ("location", "", "not a plain file name"),
        ("offset", "-4", "cannot be understood"),
        ("offset", "9" * 18, "truncated"),
        ("length", "1e3", "cannot be understood"),
        ("length", "4", "4 bytes of 192"),
    ],
)
def test_places_that_lead_elsewhere(key: str, value: str, word: str, tmp_path: Path) -> None:
    path = tmp_path / "x.onnx"
    it = outside(path)
    (tmp_path / "link").symlink_to("/etc/hostname")
    entries = it.graph.initializer[0].external_data
    for entry in [entry for entry in entries if entry.key == key]:
        entries.remove(entry)
    entries.add(key=key, value=value)
    path.write_bytes(it.SerializeToString())
    contents = open_checkpoint(path).contents
    assert word in str(contents["w0"])
    assert isinstance(contents["w1"], Tensor)


def lying(change: Callable[[Any], Any]) -> bytes:
    it = model(
        [numpy_helper.from_array(weight(4, 3), "w"), numpy_helper.from_array(weight(2), "b")]
    )
    change(it.graph.initializer[0])
    return bytes(it.SerializeToString())


LIES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another shape": (lambda t: t.dims.append(2), "48 bytes of 96"),
    "a negative size": (lambda t: t.dims.append(-1), "cannot be"),
    "an endless shape": (lambda t: t.dims.extend([2**40] * 3), "cannot be"),
    "many dimensions": (lambda t: t.dims.extend([1] * 70), "cannot be"),
    "an unknown type": (lambda t: setattr(t, "data_type", 99), "unknown type 99"),
    "texts": (lambda t: setattr(t, "data_type", 8), "texts are not read"),
    "four bits": (lambda t: setattr(t, "data_type", 22), "less than a byte"),
    "no numbers": (lambda t: t.ClearField("raw_data"), "0 bytes of 48"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_tensor_that_lies_costs_itself_only(lie: str, tmp_path: Path) -> None:
    change, word = LIES[lie]
    contents = open_checkpoint(put(tmp_path, lying(change), "x.onnx")).contents
    assert word in str(contents["w"])
    assert isinstance(contents["b"], Tensor)


def test_sparse_tensors_say_so(tmp_path: Path) -> None:
    values = numpy_helper.from_array(weight(2), "s")
    indices = numpy_helper.from_array(np.array([0, 3]), "")
    sparse = helper.make_sparse_tensor(values, indices, [2, 3])
    it = model([numpy_helper.from_array(weight(2, 2), "w")], sparse_initializer=[sparse])
    assert "sparse" in str(open_checkpoint(saved(tmp_path / "x.onnx", it)).contents["s"])


def test_every_cut_is_refused(tmp_path: Path) -> None:
    whole = lying(lambda tensor: None)
    for cut in range(1, len(whole), 3):
        refused(put(tmp_path, whole[:cut], "x.onnx"))


def test_two_tensors_of_one_name_and_graphs_without_end(tmp_path: Path) -> None:
    twice = [numpy_helper.from_array(weight(2, 2), "w")] * 2
    refused(saved(tmp_path / "x.onnx", model(twice)), "duplicate tensor name 'w'")
    graph = helper.make_graph([], "g", [], [], twice[:1])
    for _ in range(20):
        node = helper.make_node("Loop", [], [], body=graph)
        graph = helper.make_graph([node], "g", [], [])
    refused(saved(tmp_path / "x.onnx", helper.make_model(graph, producer_name="t")), "nested more")


def test_mutated_models_are_refused_or_read(tmp_path: Path) -> None:
    path = put(tmp_path, lying(lambda tensor: None), "x.onnx")
    assert broken_files.examine(path) == 2
    files = broken_formats.onnx_files(400, seed=23)
    assert broken_files.sound(broken_files.run("ONNX", files, tmp_path / "x.onnx"))


# --- what a tensor is, by what nodes do with it ---------------------------------------------------


def shapes(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {row.name: (row.kind, row.shape) for row in diagnose(path, jobs=1).matrices}


def test_a_kernel_is_one_whatever_its_name(tmp_path: Path) -> None:
    """Files of PaddlePaddle: 3 x 3 taps were examined as thousands of matrices."""
    kernels = [("plain", (6, 4, 3, 3)), ("deep", (6, 1, 3, 3)), ("turned", (4, 6, 2, 2))]
    nodes = [
        product("Conv", "x", "plain"),
        helper.make_node("Identity", ["deep"], ["copy"]),
        helper.make_node("Conv", ["x", "copy"], ["z"], group=6),
        helper.make_node("ConvTranspose", ["x", "turned"], ["t"]),
    ]
    tensors = [numpy_helper.from_array(weight(*shape), name) for name, shape in kernels]
    found = shapes(saved(tmp_path / "x.onnx", model(tensors, nodes)))
    assert found == {
        "plain": ("convolution", (6, 36)),
        "deep": ("depthwise", (6, 9)),
        "turned": ("convolution", (6, 16)),
    }


def test_a_kernel_in_a_branch_and_a_table(tmp_path: Path) -> None:
    inner = helper.make_graph(
        [helper.make_node("Conv", ["x", "k"], ["y"])], "then", [], [],
        initializer=[numpy_helper.from_array(weight(4, 2, 3), "k")],
    )  # fmt: skip
    nodes = [
        helper.make_node("If", ["c"], ["y"], name="If_0", then_branch=inner),
        helper.make_node("Gather", ["table", "i"], ["e"]),
    ]
    table = numpy_helper.from_array(weight(40, 8), "table")
    found = shapes(saved(tmp_path / "x.onnx", model([table], nodes)))
    assert found == {"table": ("embedding", (40, 8)), "If_0.k": ("convolution", (4, 6))}


@pytest.mark.parametrize("axis", [0, 1, None], ids=["rows", "columns", "whole"])
@pytest.mark.parametrize("raw", [True, False], ids=["raw", "listed"])
def test_codes_are_decoded_as_the_package_does(axis: int | None, raw: bool, tmp_path: Path) -> None:
    reference = pytest.importorskip("onnx.reference")
    drawn = np.random.default_rng(0)
    codes = drawn.integers(-128, 128, (5, 7)).astype(np.int8)
    count = 1 if axis is None else codes.shape[axis]
    scale = drawn.random(count).astype(np.float32)
    zero = drawn.integers(-9, 9, count).astype(np.int8)
    if axis is None:
        scale, zero = scale.reshape(()), zero.reshape(())
    listed = zero.tobytes() if raw else zero.flatten()
    initializers = [
        numpy_helper.from_array(codes, "codes"),
        numpy_helper.from_array(scale, "scale"),
        helper.make_tensor("zero", TYPES["INT8"], zero.shape, listed, raw=raw),
    ]
    more = {} if axis is None else {"axis": axis}
    node = helper.make_node("DequantizeLinear", ["codes", "scale", "zero"], ["w"], **more)
    output = helper.make_tensor_value_info("w", package.TensorProto.FLOAT, [5, 7])
    graph = helper.make_graph([node], "g", [], [output], initializer=initializers)
    opset = [helper.make_opsetid("", 21)]
    (expected,) = reference.ReferenceEvaluator(helper.make_model(graph, opset_imports=opset)).run(
        None, {}
    )
    graph.node.append(product("MatMul", "x", "w"))
    path = saved(tmp_path / "x.onnx", helper.make_model(graph))
    found = tree(path)["codes"]
    assert np.array_equal(found.read().T.numpy(), expected)  # turned: it is B of x B
    half = np.broadcast_to(np.reshape(scale / 2, _along(axis)), (5, 7))
    assert (found.half_steps().T.float().numpy() >= half).all()


def _along(axis: int | None) -> tuple[int, ...]:
    return {None: (1, 1), 0: (5, 1), 1: (1, 7)}[axis]


def test_codes_that_are_not_decoded_are_told(tmp_path: Path) -> None:
    """A quantized model was called healthy, with its one table examined and nothing said."""
    codes = numpy_helper.from_array(np.ones((4, 4), np.uint8), "codes")
    late = numpy_helper.from_array(np.ones((4, 4), np.int8), "late")
    nodes = [
        helper.make_node("MatMulInteger", ["x", "codes"], ["y"]),
        helper.make_node("DequantizeLinear", ["late", "computed"], ["w"]),
    ]
    tensors = [codes, late, numpy_helper.from_array(weight(4, 4), "table")]
    found = diagnose(saved(tmp_path / "x.onnx", model(tensors, nodes)), jobs=1)
    failed = {one.name: str(one.reason) for one in found.failed}
    assert failed["codes"] == "quantized codes (torch.uint8)"
    assert "scales are not beside them" in failed["late"]


def test_minus_infinity_that_fills_a_mask_is_no_damage(tmp_path: Path) -> None:
    fill = numpy_helper.from_array(np.array([-np.inf], np.float32), "fill")
    scale = numpy_helper.from_array(np.array([-np.inf], np.float32), "scale")
    nodes = [
        helper.make_node("Where", ["mask", "x", "fill"], ["y"]),
        helper.make_node("Mul", ["y", "scale"], ["z"]),
    ]
    tensors = [fill, scale, numpy_helper.from_array(weight(4, 4), "w")]
    found = diagnose(saved(tmp_path / "x.onnx", model(tensors, nodes)), jobs=1)
    assert [(one.rule, one.subject) for one in found.findings if one.severity == "critical"] == [
        ("non-finite", "scale")
    ]
