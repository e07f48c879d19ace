"""Tensor subclasses of torchao: decoded as torchao does, or as a loop over entries does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import broken_files
import broken_formats
import checkpoint_files
from kappascope.checkpoints.open import open as open_checkpoint
from kappascope.clinic.diagnose import diagnose
from torchao_files import eight_bits, flat, saved

RANDOM = torch.Generator().manual_seed(33)


def test_an_object_is_decoded_and_its_class_is_not_built(tmp_path: Path) -> None:
    parts, expected = eight_bits()
    path = saved(tmp_path, "IntxUnpackedToInt8Tensor", (6, 24), **parts, block_size=(1, 8))
    checkpoint = open_checkpoint(path)
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected)
    assert (checkpoint.notes, checkpoint.faults) == ((), ())
    assert checkpoint.codes == {("fc.weight",): "int8 with scales"}


def test_safetensors_hold_the_same_weight(tmp_path: Path) -> None:
    parts, expected = eight_bits()
    checkpoint = open_checkpoint(
        flat(tmp_path, "IntxUnpackedToInt8Tensor", parts, block_size=[1, 8])
    )
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected)
    assert str(checkpoint.contents["fc._weight_scale"]) == "read as a part of fc.weight"


def test_parts_in_two_shards_are_one_weight(tmp_path: Path) -> None:
    parts, expected = eight_bits()
    facts = {"_type": "Int8Tensor", "_data": {"block_size": [1, 8]}}
    metadata = {"tensor_names": '["fc.weight"]', "fc.weight": json.dumps(facts)}
    places = {}
    for i, (end, part) in enumerate(parts.items(), start=1):
        shard = f"model-0000{i}-of-00003.safetensors"
        header, data = checkpoint_files.entries({f"fc._weight_{end}": part})
        raw = checkpoint_files.raw({"__metadata__": metadata, **header}, data)
        (tmp_path / shard).write_bytes(raw)
        places[f"fc._weight_{end}"] = shard
    index = json.dumps({"weight_map": places})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    checkpoint = open_checkpoint(tmp_path)
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected)
    assert (checkpoint.notes, checkpoint.faults) == ((), ())


def test_four_bits_have_an_offset_and_a_sign(tmp_path: Path) -> None:
    codes = torch.randint(0, 256, (5, 16), generator=RANDOM).to(torch.uint8)
    scale, zero = torch.rand(2, 4, 5, generator=RANDOM)
    parts = {"qdata": codes, "scale": scale, "zero_point": zero}
    checkpoint = open_checkpoint(flat(tmp_path, "Int4Tensor", parts, block_size=[1, 8]))
    expected = torch.empty(5, 32)
    for i in range(5):
        for j in range(32):
            code = int(codes[i, j // 2]) >> 4 * (j % 2) & 15
            code -= 16 if code > 7 else 0
            expected[i, j] = code * float(scale[j // 8, i]) + float(zero[j // 8, i])
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected)
    assert checkpoint.codes == {("fc.weight",): "int4 with scales"}


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("Int4TilePackedTo4dTensor", {}),
        ("Int8Tensor", {"act_pre_scale": torch.ones(24)}),
        ("Int8Tensor", {"scale": torch.ones(6, 5)}),
        ("Int8Tensor", {"scale": torch.ones(0)}),
        ("Int8Tensor", {"zero_point": torch.ones(2)}),
        ("Int8Tensor", {"qdata": torch.ones(6, 24)}),
        ("NVFP4Tensor", {}),
        ("MXTensor", {}),
    ],
)
def test_what_is_not_known_to_the_letter_is_named(
    tmp_path: Path, name: str, change: dict[str, Tensor]
) -> None:
    checkpoint = open_checkpoint(flat(tmp_path, name, eight_bits()[0] | change))
    assert checkpoint.codes == {}
    assert str(checkpoint.contents["fc.weight"]) == f"tensor subclass torchao.{name}"


def test_rows_are_those_of_the_decoded_weight(tmp_path: Path) -> None:
    parts, expected = eight_bits()
    (row,) = diagnose(flat(tmp_path, "Int8Tensor", parts)).matrices
    (plain,) = diagnose({"fc.weight": expected}).matrices
    assert row.storage == "int8 with scales"
    assert row.condition_number == pytest.approx(plain.condition_number, rel=1e-6)


def test_objects_are_decoded_as_torchao_does(tmp_path: Path) -> None:
    package = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    safe = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    from safetensors.torch import save_file

    weight = torch.randn(48, 256, generator=RANDOM)
    granularities = package.PerRow(), package.PerTensor()
    made = {f"int8 {i}": package.Int8Tensor.from_hp(weight, g) for i, g in enumerate(granularities)}
    made |= {f"f8 {i}": package.Float8Tensor.from_hp(weight, granularity=g)
             for i, g in enumerate(granularities)}  # fmt: skip
    made["intx"] = package.IntxUnpackedToInt8Tensor.from_hp(weight, (1, 32), torch.int4)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float4_e2m1fn_x2):
        made[f"mx {dtype}"] = mx.MXTensor.to_mx(weight, dtype, 32)
    whole = torch.tensor(0.01)
    for name, options in {
        "nv": {},
        "nv whole": {"per_tensor_scale": whole},
        "nv swizzled": {"is_swizzled_scales": True},
    }.items():
        made[name] = nv.NVFP4Tensor.to_nvfp4(weight, **options)
    state = {f"{name}.weight": it for name, it in made.items()}
    torch.save(state, tmp_path / "x.pt")
    tensors, metadata = safe.flatten_tensor_state_dict(state)
    save_file(tensors, tmp_path / "x.safetensors", metadata)
    for path in (tmp_path / "x.pt", tmp_path / "x.safetensors"):
        checkpoint = open_checkpoint(path)
        assert len(checkpoint.codes) == len(state)
        for name, it in state.items():
            decoded = checkpoint.read((name,))
            expected = it.dequantize().float()
            # the whole of NVFP4 is multiplied in another order
            torch.testing.assert_close(decoded, expected, rtol=1e-6, atol=0, msg=name)
            off = (decoded - weight).abs()
            steps = checkpoint.half_steps((name,)).float()
            if name != "nv whole.weight":  # whose scale was not chosen to fit
                assert bool((off <= steps * 1.01 + 0.004 * weight.abs()).all()), name


def test_mutated_objects_are_refused_or_read(tmp_path: Path) -> None:
    for seed in broken_formats.torchao_seeds():
        path = checkpoint_files.put(tmp_path, seed, "x.bin")
        assert len(open_checkpoint(path).codes) == 1
        assert broken_files.examine(path) == 2
    files = broken_formats.torchao_files(400, seed=32)
    assert broken_files.sound(broken_files.run("torchao", files, tmp_path / "x.bin"))
