"""GGUF: headers within limits, every type decoded, half steps held against all levels of a code."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import broken_files
import broken_formats
from checkpoint_files import put
from kappascope.checkpoints import codes, gguf
from kappascope.checkpoints.codes import CodedLocation
from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.locations import CheckpointFile, TensorLocation
from kappascope.checkpoints.open import open as open_checkpoint
from kappascope.clinic.diagnose import diagnose
from kappascope.refusal import Refusal

package = pytest.importorskip("gguf", reason="the extra kappascope[gguf] is not installed")
TYPES = {code.name: number for number, code in gguf._TYPES.items()}
QUANTIZED = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "TQ1_0", "TQ2_0", "MXFP4"]  # it can write


def written(path: Path, tensors: dict[str, Any], architecture: str = "llama", **facts: Any) -> Path:
    """A file as the package writes it; an array with a type is quantized."""
    writer = package.GGUFWriter(path, architecture)
    for key, value in facts.items():
        writer.add_uint32(f"{architecture}.{key.replace('__', '.')}", value)
    for name, (array, kind) in tensors.items():
        if kind is None:
            writer.add_tensor(name, array)
        else:
            numbered = package.GGMLQuantizationType[kind]
            writer.add_tensor(name, package.quantize(array, numbered), raw_dtype=numbered)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def numbers(*shape: int, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def read(path: Path) -> Any:
    return gguf.read_gguf(CheckpointFile.at(path))


def test_plain_numbers_come_back_as_they_were(tmp_path: Path) -> None:
    arrays = {"a": numbers(3, 4), "b": numbers(2, 3, 4).astype(np.float16), "c": numbers(5)}
    path = written(tmp_path / "x.gguf", {name: (array, None) for name, array in arrays.items()})
    for name, array in arrays.items():
        assert torch.equal(read(path).tree[name].read(), torch.from_numpy(array))


@pytest.mark.parametrize("kind", QUANTIZED)
def test_what_was_rounded_lies_within_a_half_step(tmp_path: Path, kind: str) -> None:
    weight = numbers(8, 256)
    location = read(written(tmp_path / "x.gguf", {"w": (weight, kind)})).tree["w"]
    decoded, steps = location.read(), location.half_steps().float()
    error = (decoded - torch.from_numpy(weight)).abs()
    slack = 2e-3 * decoded.abs()  # a scale in float16 is itself rounded
    assert float((error <= steps + slack).float().mean()) > 0.95
    assert bool((error <= 2 * steps + slack).all())  # the last code of some stands for what is cut


@pytest.mark.parametrize(
    "kind", [name for name, number in TYPES.items() if gguf._TYPES[number].step]
)
def test_half_steps_are_half_the_largest_distance_of_levels(kind: str) -> None:
    """Random codes under one scale show every level; neighbours are two half steps apart."""
    code, random = gguf._TYPES[TYPES[kind]], np.random.default_rng(1)
    block = random.integers(0, 256, code.bytes, dtype=np.uint8)
    scales = {"MXFP4": [(0, [120])], "NVFP4": [(0, [56, 57, 58, 59])]}
    for begin, values in scales.get(kind, []):
        block[begin : begin + len(values)] = values
    for begin in _scales(kind):  # a finite scale in float16
        block[begin : begin + 2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    blocks = np.repeat(block[None], 4000, axis=0)
    assert code.step is not None
    length = len(range(code.bytes)[code.step.codes])
    blocks[:, code.step.codes] = random.integers(0, 256, (4000, length), dtype=np.uint8)
    decoded = gguf.GgufCode(TYPES[kind]).decode(torch.from_numpy(blocks)).numpy()
    steps = gguf.GgufCode(TYPES[kind]).half_steps(torch.from_numpy(blocks[:1])).float().numpy()[0]
    levels = [np.unique(column) for column in decoded.T]
    largest = np.array([np.diff(each).max() / 2 if len(each) > 1 else 0.0 for each in levels])
    np.testing.assert_allclose(steps, largest * (1 + 1 / 64), rtol=0.01, atol=1e-12)


def _scales(kind: str) -> list[int]:
    """Where a block keeps its scales in float16."""
    places = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "TQ1_0": [52], "TQ2_0": [64]}
    if kind in ("MXFP4", "NVFP4"):
        return []
    two = kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    return places.get(kind, [0, 2] if two else [0])


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_type_is_decoded_as_its_package_does(tmp_path: Path, kind: str) -> None:
    code = gguf._TYPES[TYPES[kind]]
    blocks = np.random.default_rng(2).integers(0, 120, (6, 2 * code.bytes), dtype=np.uint8)
    expected = package.dequantize(blocks, package.GGMLQuantizationType[kind])
    decoded = gguf.GgufCode(TYPES[kind]).decode(torch.from_numpy(blocks))
    np.testing.assert_array_equal(decoded.numpy(), expected)
    steps = gguf.GgufCode(TYPES[kind]).half_steps(torch.from_numpy(blocks))
    assert steps.shape == decoded.shape
    assert bool((steps >= 0).all())


def test_every_size_of_a_block_is_that_of_the_package() -> None:
    for number, code in gguf._TYPES.items():
        kind = package.GGMLQuantizationType(number)
        assert (code.name, (code.block, code.bytes)) == (kind.name, package.GGML_QUANT_SIZES[kind])


def test_rows_of_queries_are_put_back_into_their_order(tmp_path: Path) -> None:
    heads, size, width = 4, 8, 16
    weight = torch.from_numpy(numbers(heads * size, width))
    # how llama.cpp's converter orders the rows of a head: the two halves in turn
    stored = weight.reshape(heads, 2, size // 2, width).transpose(1, 2).reshape(weight.shape)
    tensors = {"blk.0.attn_q.weight": (stored.numpy(), None), "other": (stored.numpy(), None)}
    facts = {"attention__head_count": heads, "embedding_length": width}
    tree = read(written(tmp_path / "x.gguf", tensors, **facts)).tree
    assert torch.equal(tree["blk.0.attn_q.weight"].read(), weight)
    assert torch.equal(tree["other"].read(), stored)
    plain = read(written(tmp_path / "y.gguf", tensors, architecture="qwen2", **facts)).tree
    assert torch.equal(plain["blk.0.attn_q.weight"].read(), stored)


def test_the_header_tells_what_a_config_does(tmp_path: Path) -> None:
    facts = {"attention__head_count": 4, "embedding_length": 16, "attention__head_count_kv": 2}
    path = written(tmp_path / "x.gguf", {"a": (numbers(2, 2), None)}, **facts)
    expected = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
    assert open_checkpoint(path).config == {"model_type": "llama", **expected}


def test_the_same_model_in_two_formats_gives_the_same_rows(tmp_path: Path) -> None:
    kept = {
        "blk.0.ffn_up.weight": numbers(32, 64),
        "blk.0.ffn_down.weight": numbers(64, 32, seed=3),
    }
    torch.save({name: torch.from_numpy(array) for name, array in kept.items()}, tmp_path / "x.pt")
    plain = diagnose(tmp_path / "x.pt")
    same = diagnose(written(tmp_path / "x.gguf", {n: (a, None) for n, a in kept.items()}))
    coded = diagnose(written(tmp_path / "y.gguf", {n: (a, "Q8_0") for n, a in kept.items()}))
    assert [row.kind for row in same.matrices] == ["up", "down"]
    for exact, copy, rounded in zip(plain.matrices, same.matrices, coded.matrices, strict=True):
        assert copy.condition_number == exact.condition_number
        assert copy.storage == exact.storage == "float32"
        assert (rounded.storage, rounded.dtype) == ("Q8_0", "Q8_0")
        low, high = rounded.condition_number_low, rounded.condition_number_high
        assert low is not None and high is not None and exact.condition_number is not None
        assert low <= exact.condition_number <= high
        assert rounded.frobenius_norm == pytest.approx(exact.frobenius_norm, rel=0.01)


def test_without_the_package_a_coded_tensor_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "x.gguf", {"w": (numbers(4, 64), "Q4_0"), "v": (numbers(4, 4), None)})
    monkeypatch.setattr(gguf, "find_spec", lambda name: None)
    tree = read(path).tree
    assert "kappascope[gguf]" in str(tree["w"])
    assert isinstance(tree["v"], TensorLocation)


def test_shards_without_an_index_are_one_model(tmp_path: Path) -> None:
    written(tmp_path / "m-00001-of-00002.gguf", {"a": (numbers(2, 2), None)})
    written(tmp_path / "m-00002-of-00002.gguf", {"b": (numbers(2, 2), None)})
    assert list(open_checkpoint(tmp_path).contents) == ["a", "b"]


# --- headers that lie -----------------------------------------------------------------------------


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def setting(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str = "w", sizes: tuple[int, ...] = (4, 2), kind: int = 0, at: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    return text(name) + shape + struct.pack("<IQ", kind, at)


def header(
    settings: list[bytes] | None = None,
    tensors: list[bytes] | None = None,
    counts: tuple[int, int] | None = None,
    version: int = 3,
    data: int = 32,
) -> bytes:
    settings, tensors = settings or [], [tensor()] if tensors is None else tensors
    many = counts or (len(tensors), len(settings))
    start = b"GGUF" + struct.pack("<IQQ", version, *many) + b"".join(settings + tensors)
    return start + bytes(-len(start) % 32) + bytes(data)


LYING: dict[str, tuple[Callable[[], bytes], str]] = {
    "a version of the future": (lambda: header(version=9), "version 9"),
    "big-endian": (lambda: header(version=3 << 24), "big-endian"),
    "2^63 tensors": (lambda: header(counts=(1 << 63, 0)), "tensors, more than"),
    "2^63 settings": (lambda: header(counts=(1, 1 << 63)), "settings"),
    "a key of 2^62 bytes": (
        lambda: header([struct.pack("<Q", 1 << 62)], counts=(1, 1)), "a text of"),
    "a list of 2^63 numbers": (
        lambda: header([setting("a", 9, struct.pack("<IQ", 4, 1 << 63))]), "truncated"),
    "a list of 2^63 texts": (
        lambda: header([setting("a", 9, struct.pack("<IQ", 8, 1 << 63))]), "truncated"),
    "a list of lists": (
        lambda: header([setting("a", 9, struct.pack("<IQ", 9, 1))]), "list of lists"),
    "a setting of no known type": (lambda: header([setting("a", 77, b"")]), "unknown type 77"),
    "a setting twice": (
        lambda: header([setting("a", 0, b"\1"), setting("a", 0, b"\1")]), "duplicate"),
    "an alignment of three": (
        lambda: header([setting("general.alignment", 4, struct.pack("<I", 3))]), "alignment"),
    "an alignment of zero": (
        lambda: header([setting("general.alignment", 4, struct.pack("<I", 0))]), "alignment"),
    "2^32 dimensions": (
        lambda: header(tensors=[text("w") + struct.pack("<I", 2**32 - 1)]), "dimensions"),
    "no dimension": (lambda: header(tensors=[text("w") + bytes(64)]), "0 dimensions"),
    "sizes whose product wraps": (
        lambda: header(tensors=[tensor(sizes=(1 << 32, 1 << 33))]), "overflows"),
    "a tensor twice": (lambda: header(tensors=[tensor(), tensor(at=32)], data=64), "one name"),
    "a tensor over another": (
        lambda: header(tensors=[tensor("a"), tensor("b")], data=64), "not where"),
    "a tensor off its place": (lambda: header(tensors=[tensor(at=8)], data=64), "not where"),
    "a tensor beyond the end": (lambda: header(data=8), "truncated"),
    "an unknown type": (lambda: header(tensors=[tensor(kind=99)]), "unknown type 99"),
    "rows that are no whole blocks": (lambda: header(tensors=[tensor(kind=2)]), "whole blocks"),
    "a name that is no text": (
        lambda: header(tensors=[struct.pack("<Q", 2) + b"\xff\xfe" + bytes(40)]), "UTF-8"),
}  # fmt: skip


@pytest.mark.parametrize("lie", sorted(LYING))
def test_a_header_that_lies_is_refused_at_once(tmp_path: Path, lie: str) -> None:
    make, said = LYING[lie]
    path = tmp_path / "x.gguf"
    path.write_bytes(make())
    with pytest.raises(Malformed, match=said):
        read(path)
    with pytest.raises(Refusal):
        open_checkpoint(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = written(tmp_path / "x.gguf", {"w": (numbers(4, 64), "Q4_0")}).read_bytes()
    path = tmp_path / "cut.gguf"
    for length in range(4, len(whole) - 32, 7):
        path.write_bytes(whole[:length])
        with pytest.raises(Malformed):
            read(path)


def test_a_type_that_is_not_decoded_costs_only_its_tensor(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(header(tensors=[tensor("a"), tensor("b", (256, 1), 15, 32)], data=400))
    tree = read(path).tree
    assert str(tree["b"]) == "quantized Q8_K: not decoded"
    assert isinstance(tree["a"], TensorLocation)


def test_coded_tensors_are_decoded_a_panel_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    location = read(written(tmp_path / "x.gguf", {"w": (numbers(10, 64), "Q4_0")})).tree["w"]
    assert isinstance(location, CodedLocation)
    whole, steps = location.read(), location.half_steps()
    monkeypatch.setattr(codes, "PANEL_ENTRIES", 128)
    assert torch.equal(location.read(), whole)
    assert torch.equal(location.half_steps(), steps)


def test_mutated_files_are_refused_or_read(tmp_path: Path) -> None:
    for seed in broken_formats.gguf_seeds():
        assert broken_files.examine(put(tmp_path, seed, "x.gguf")) == 3
    files = broken_formats.gguf_files(400, seed=21)
    assert broken_files.sound(broken_files.run("GGUF", files, tmp_path / "x.gguf"))
