"""Mutants of what others write: GGUF, NumPy, ONNX, distributed and quantized checkpoints."""

from __future__ import annotations

import io
import json
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

import checkpoint_files
import every_format
import torchao_files as objects
import zero_folders
from broken_files import NUMBERS, VALUES, altered, damaged, rearranged, steps_of

WEIGHTS = {"fc.weight": torch.arange(24.0).reshape(4, 6), "fc.bias": torch.ones(3)}


def flipped(data: bytes, random: Random) -> bytes:
    """The same number of bytes, a few of them others: lengths stay right, contents do not."""
    new = bytearray(data)
    for _ in range(random.choice((1, 2, 8))):
        at = random.randrange(len(new))
        new[at] = random.choice((0, 1, 127, 128, 255, random.randrange(256)))
    return bytes(new)


def gguf_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated GGUF files: anywhere, or in the header alone."""
    random, seeds = Random(seed), gguf_seeds()
    for i in range(count):
        data = random.choice(seeds)
        head, rest = data[:800], data[800:]
        match i % 3:
            case 0:
                yield damaged(data, random)
            case 1:
                yield flipped(head, random) + rest
            case 2:
                at, size = random.randrange(len(head)), random.choice((4, 8))
                number = (random.choice(NUMBERS) % 256**size).to_bytes(size, "little")
                yield head[:at] + number + head[at + size :] + rest


def gguf_seeds() -> list[bytes]:
    """Sound files of several types."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    numbers = np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)
    seeds = []
    for kinds in (("Q4_0", "Q8_0"), ("MXFP4", "TQ1_0"), ("Q5_1", "F16"), ("BF16", "Q4_1")):
        with tempfile.TemporaryDirectory() as folder:
            writer = GGUFWriter(Path(folder) / "x.gguf", "llama")
            writer.add_uint32("llama.attention.head_count", 2)
            writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
            writer.add_tensor("plain", numbers)
            for kind, name in zip(kinds, ("blk.0.attn_q.weight", "output.weight"), strict=True):
                code = GGMLQuantizationType[kind]
                writer.add_tensor(name, quantize(numbers, code), raw_dtype=code)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            seeds.append((Path(folder) / "x.gguf").read_bytes())
    return seeds


def numpy_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated arrays and archives of them: whole, or the header of a member of a sound archive."""
    random = Random(seed)
    members = {f"{name}.npy": _npy(tensor.numpy()) for name, tensor in WEIGHTS.items()}
    members["turned.npy"] = _npy(np.asfortranarray(np.ones((3, 4), np.float16)))
    members["objects.npy"] = _npy(np.array([{}, None], dtype=object))
    packed = [_npz(members, kind) for kind in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)]
    for i in range(count):
        name = random.choice(list(members))
        member = members[name]
        mutate = random.choice((damaged, flipped))
        match i % 4:
            case 0:
                yield damaged(checkpoint_files.unsigned(random.choice(packed)), random)
            case 1:
                yield mutate(member, random)
            case 2:
                changed = mutate(member[:128], random) + member[128:]
                yield _npz({**members, name: changed}, zipfile.ZIP_STORED)
            case 3:
                head = member[:10] + _facts(member[10:128], random)
                yield _npz({**members, name: head + member[128:]}, zipfile.ZIP_DEFLATED)


def _facts(header: bytes, random: Random) -> bytes:
    """The text of a header with another value in it, as long as it was."""
    keys = (b"'<f4'", b"False", b"(4, 6)", b"(3,)", b"'descr'")
    new = header.replace(random.choice(keys), repr(random.choice(VALUES)).encode())
    return new.rstrip()[: len(header) - 1].ljust(len(header) - 1) + b"\n"


def _npy(array: np.ndarray[Any, Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def _npz(members: dict[str, bytes], method: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def onnx_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated models: their bytes, or the fields of their tensors."""
    from onnx import ModelProto

    random, seeds = Random(seed), _onnx()
    numbers = [number for number in NUMBERS if -(2**63) <= number < 2**63]
    texts = ["", "x", "../x", "/etc/hostname", "w.data", "9" * 30, "-1", "a\0b"]
    for i in range(count):
        data = random.choice(seeds)
        if i % 3 < 2:
            yield (damaged, flipped)[i % 3](data, random)
            continue
        model = ModelProto.FromString(data)
        tensor = random.choice(model.graph.initializer)
        match random.randrange(6):
            case 0:
                tensor.dims[:] = [random.choice(numbers) for _ in range(random.randrange(5))]
            case 1:
                tensor.data_type = random.choice([*range(30), 2**31 - 1])
            case 2:
                tensor.raw_data = damaged(tensor.raw_data, random)
            case 3:
                tensor.int32_data[:] = [random.choice((0, 1, -1, 2**31 - 1)) for _ in range(24)]
            case 4:
                tensor.data_location = 1
                for key in ("location", "offset", "length"):
                    tensor.external_data.add(key=key, value=random.choice(texts))
            case 5:
                tensor.name = random.choice(["", "fc.bias", "x" * 70_000, "a\nb"])
        yield model.SerializeToString()


def _onnx() -> list[bytes]:
    from onnx import TensorProto, helper, numpy_helper

    inner = helper.make_graph(
        [], "b", [], [], [numpy_helper.from_array(np.ones((2, 3), np.float16), "inner")]
    )
    seeds = []
    for raw in (True, False):
        model = every_format.onnx_model(WEIGHTS)
        values = np.arange(12, dtype=np.float16)
        given = values.tobytes() if raw else values
        half = helper.make_tensor("half", TensorProto.FLOAT16, (3, 4), given, raw=raw)
        model.graph.initializer.append(half)
        constant = numpy_helper.from_array(np.ones((2, 2), np.float32), "c")
        model.graph.node.extend([
            helper.make_node("MatMul", ["x", "half"], ["y"], name="/a/MatMul"),
            helper.make_node("Constant", [], ["c"], value=constant),
            helper.make_node("If", ["y"], ["z"], then_branch=inner, else_branch=inner),
        ])  # fmt: skip
        seeds.append(model.SerializeToString())
    return seeds


def distributed_folder(folder: Path) -> Path:
    """A sound distributed checkpoint; where its metadata lie."""
    nested = {"model": WEIGHTS, "list": [torch.eye(2).bfloat16()], "epoch": 3}
    return every_format.distributed(folder, nested) / ".metadata"  # type: ignore[arg-type]


def metadata_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated metadata of the checkpoint of `distributed_folder`."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        data = distributed_folder(Path(folder)).read_bytes()
    steps = steps_of(data)
    for i in range(count):
        yield damaged(data, random) if i % 2 else rearranged(steps, random)


def chunk_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated files of chunks of the checkpoint of `distributed_folder`."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        data = (distributed_folder(Path(folder)).parent / "__0_0.distcp").read_bytes()
    for i in range(count):
        yield (flipped if i % 4 else damaged)(data, random)


def quantized_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated safetensors of codes: in their header, or in what stands beside the codes."""
    random = Random(seed)
    seeds = [checkpoint_files.entries(group) for group in quantized_layers()]
    for i in range(count):
        header, data = random.choice(seeds)
        match i % 3:
            case 0:
                yield checkpoint_files.raw(header, flipped(data, random))
            case 1:
                yield checkpoint_files.raw(altered(header, random), data)
            case 2:
                one = random.choice(list(header))
                other = header[random.choice(list(header))]["shape"]
                changed = {
                    **header[one],
                    "shape": random.choice([other, header[one]["shape"][::-1]]),
                }
                yield checkpoint_files.raw({**header, one: changed}, flipped(data, random))


def torchao_seeds() -> list[bytes]:
    """Two sound files of one weight of torchao: of torch.save, and safetensors."""
    parts, _ = objects.eight_bits()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pickled = objects.saved(folder, "Int8Tensor", (6, 24), **parts, block_size=[1, 8])
        plain = objects.flat(folder, "Int8Tensor", parts, block_size=[1, 8])
        return [pickled.read_bytes(), plain.read_bytes()]


def torchao_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated files of a weight of torchao: its pickle, or header and metadata, or its numbers."""
    random = Random(seed)
    pickled, plain = torchao_seeds()
    members = checkpoint_files.members(pickled)
    steps = steps_of(members["data.pkl"])
    length = int.from_bytes(plain[:8], "little")
    header, data = json.loads(plain[8 : 8 + length]), plain[8 + length :]
    for i in range(count):
        match i % 4:
            case 0:
                mutated = (damaged(members["data.pkl"], random), rearranged(steps, random))[
                    i // 4 % 2
                ]
                yield checkpoint_files.archive(mutated, members={**members, "data.pkl": mutated})
            case 1:
                yield checkpoint_files.raw(altered(header, random), data)
            case 2:
                metadata = header["__metadata__"]
                told = json.dumps(altered(json.loads(metadata["fc.weight"]), random))
                changed = {**header, "__metadata__": {**metadata, "fc.weight": told}}
                yield checkpoint_files.raw(changed, flipped(data, random))
            case 3:
                yield flipped(checkpoint_files.unsigned(pickled), random)


def zero_folder(folder: Path, stage: int) -> Path:
    """Sound partitions of ZeRO; where the file lies that tells of them."""
    name = "mp_rank_00" if stage < 3 else "zero_pp_rank_0_mp_rank_00"
    return zero_folders.save_zero(folder, stage) / f"{name}_model_states.pt"


def zero_files(count: int, seed: int, stage: int) -> Iterator[bytes]:
    """Mutated files that tell of partitions: the pickle, or the numbers."""
    random = Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        data = zero_folder(Path(folder) / "x", stage).read_bytes()
    members = checkpoint_files.members(data)
    pickled = members.pop("data.pkl")
    steps = steps_of(pickled)
    for i in range(count):
        match i % 4:
            case 0:
                yield flipped(checkpoint_files.unsigned(data), random)
            case 1:
                yield checkpoint_files.archive(damaged(pickled, random), members=members)
            case _:
                yield checkpoint_files.archive(rearranged(steps, random), members=members)


def flax_seed() -> bytes:
    """A sound file of Flax, with one array in two chunks."""
    rows = np.arange(24, dtype=np.float32).reshape(4, 6)
    chunks = {"0": rows.reshape(-1)[:10], "1": rows.reshape(-1)[10:]}
    cut = {"__msgpack_chunked_array__": True, "shape": {"0": 4, "1": 6}, "chunks": chunks}
    dense = {"kernel": rows, "bias": np.ones(6, np.float16)}
    return every_format.flax_bytes(
        {"params": {"fc": dense, "embed": {"embedding": cut}}, "step": 7}
    )


def flax_files(count: int, seed: int) -> Iterator[bytes]:
    """Mutated files of Flax."""
    random, data = Random(seed), flax_seed()
    for i in range(count):
        yield (damaged, flipped)[i % 2](data, random)


def quantized_layers() -> list[dict[str, torch.Tensor]]:
    """A layer of each kind of codes."""

    def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=torch.manual_seed(0)).to(dtype)

    facts = {"quant_type": "nf4", "blocksize": 64, "shape": [8, 16], "dtype": "float16"}
    nested = {**facts, "nested_blocksize": 256, "nested_offset": 0.5}
    states = [
        torch.tensor(list(json.dumps(text).encode()), dtype=torch.uint8) for text in (facts, nested)
    ]
    four = {
        "a.weight": drawn(torch.uint8, 64, 1),
        "a.weight.quant_map": torch.linspace(-1, 1, 16),
        "a.weight.absmax": torch.ones(2),
        "a.weight.quant_state.bitsandbytes__nf4": states[0],
    }
    return [
        {
            "a.weight": drawn(torch.int32, 8, 16).view(torch.uint32),
            "a.scales": torch.ones(8, 2).half(),
            "a.biases": torch.ones(8, 2).half(),
        },
        {
            "a.qweight": drawn(torch.int32, 2, 8),
            "a.qzeros": drawn(torch.int32, 2, 1),
            "a.scales": torch.ones(2, 8).half(),
            "a.g_idx": torch.arange(16, dtype=torch.int32) // 8,
        },
        {
            "a.qweight": drawn(torch.int32, 16, 1),
            "a.qzeros": drawn(torch.int32, 2, 1),
            "a.scales": torch.ones(2, 8).half(),
        },
        four,
        four
        | {
            "a.weight.absmax": drawn(torch.uint8, 2),
            "a.weight.nested_absmax": torch.ones(1),
            "a.weight.nested_quant_map": torch.linspace(-1, 1, 256),
            "a.weight.quant_state.bitsandbytes__nf4": states[1],
        },
        {"a.weight": drawn(torch.int8, 4, 6), "a.SCB": torch.ones(4)},
        {
            "a.weight": drawn(torch.float8_e4m3fn, 4, 6),
            "a.weight_scale_inv": torch.ones(2, 3),
        },
        {
            "a.weight_packed": drawn(torch.int32, 4, 2),
            "a.weight_scale": torch.ones(4, 2),
            "a.weight_shape": torch.tensor([4, 16]),
            "a.weight_zero_point": drawn(torch.int32, 1, 2),
        },
        {
            "a.weight_packed": drawn(torch.uint8, 4, 16),
            "a.weight_scale": drawn(torch.float8_e4m3fn, 4, 2),
            "a.weight_global_scale": torch.ones(1),
        },
        {
            "a.weight": drawn(torch.uint8, 4, 16),
            "a.weight_scale": drawn(torch.float8_e4m3fn, 4, 2),
            "a.weight_scale_2": torch.ones(()),
        },
        {"a.weight_packed": drawn(torch.uint8, 4, 24), "a.weight_scale": drawn(torch.uint8, 4, 1)},
        {
            "a.weight": drawn(torch.int32, 4, 8).view(torch.uint32),
            "a.scales": drawn(torch.uint8, 4, 1),
        },
        {
            "a.weight": drawn(torch.int8, 4, 6),
            "a.weight_scale": torch.ones(4, 1),
            "a.weight_zero_point": drawn(torch.int8, 4, 1),
        },
        {
            "experts_blocks": drawn(torch.uint8, 1, 2, 1, 16),
            "experts_scales": drawn(torch.uint8, 1, 2, 1),
        },
    ]
