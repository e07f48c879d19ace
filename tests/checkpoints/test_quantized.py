"""Quantized weights: decoded as their own libraries do, or as a loop over entries does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import broken_files
import broken_formats
import checkpoint_files
from kappascope.checkpoints import codes
from kappascope.checkpoints.codes import CodedLocation
from kappascope.checkpoints.formats import Malformed
from kappascope.checkpoints.open import Checkpoint
from kappascope.checkpoints.open import open as open_checkpoint
from kappascope.checkpoints.quantized import GroupedIntegers, unpacked
from kappascope.clinic.diagnose import diagnose
from kappascope.model.skipped import Reason

RANDOM = torch.Generator().manual_seed(5)


def opened(folder: Path, tensors: dict[str, Tensor], **quantization: Any) -> Checkpoint:
    """A folder with these tensors, and a config if it says anything."""
    (folder / "model.safetensors").write_bytes(checkpoint_files.safetensors(tensors))
    if quantization:
        (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return open_checkpoint(folder)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=RANDOM)


def words(codes: Tensor, bits: int) -> Tensor:
    """Codes packed along the first dimension, bit by bit: slow and obviously right."""
    packed = torch.zeros(codes.shape[0] * bits // 32, codes.shape[1], dtype=torch.int64)
    for i, line in enumerate(codes.tolist()):
        for j, code in enumerate(line):
            for bit in range(bits):
                place = i * bits + bit
                packed[place // 32, j] |= ((code >> bit) & 1) << (place % 32)
    return packed.to(torch.uint32).view(torch.int32)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_come_out_of_words_as_they_went_in(bits: int) -> None:
    packed = integers(1 << bits, 64, 3)
    assert torch.equal(unpacked(words(packed, bits), bits), packed.int())


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_is_code_minus_zero_times_scale(tmp_path: Path, bits: int, version: str) -> None:
    rows, columns, groups = 32, 64, 4
    q, z = integers(1 << bits, columns, rows), integers((1 << bits) - 1, groups, rows)
    scales = torch.rand(groups, rows, generator=RANDOM).half()
    order = torch.arange(columns) % groups  # as with act-order: neighbours in other groups
    tensors = {
        "fc.qweight": words(q, bits),
        "fc.qzeros": words(z.T.contiguous(), bits).T.contiguous(),
        "fc.scales": scales,
        "fc.g_idx": order.int(),
        "fc.bias": torch.zeros(rows),
    }
    checkpoint = opened(tmp_path, tensors, quant_method="gptq", checkpoint_format=version)
    shift = 1 if version == "gptq" else 0
    expected = torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            g = int(order[j])
            expected[i, j] = (int(q[j, i]) - int(z[g, i]) - shift) * float(scales[g, i])
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected)
    steps = checkpoint.half_steps(("fc.weight",)).float()
    torch.testing.assert_close(steps, scales.float().T[:, order] / 2, rtol=0.03, atol=0)
    assert bool((steps >= scales.float().T[:, order] / 2).all())
    assert isinstance(checkpoint.contents["fc.qzeros"], Reason)


def test_awq_unpacks_eight_rows_of_a_word_in_its_own_order(tmp_path: Path) -> None:
    rows, columns, groups = 16, 8, 2
    q, z = integers(16, columns, rows), integers(16, groups, rows)
    scales = torch.rand(groups, rows, generator=RANDOM).half()

    def awq(codes: Tensor) -> Tensor:  # as its converter packs: the i-th place holds order[i]
        packed = torch.zeros(codes.shape[0], rows // 8, dtype=torch.int64)
        for column in range(rows // 8):
            for i, place in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                packed[:, column] |= codes[:, column * 8 + place] << (4 * i)
        return packed.to(torch.uint32).view(torch.int32)

    tensors = {"fc.qweight": awq(q), "fc.qzeros": awq(z), "fc.scales": scales}
    checkpoint = opened(tmp_path, tensors, quant_method="awq")
    spread = scales.float().repeat_interleave(columns // groups, 0)
    expected = ((q - z.repeat_interleave(columns // groups, 0)) * spread).T
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected)


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "double"])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_four_bits_are_decoded_as_bitsandbytes_does(
    tmp_path: Path, kind: str, nested: bool
) -> None:
    library = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(96, 64, generator=RANDOM)
    packed, state = library.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    tensors = {"fc.weight": packed}
    tensors |= {f"fc.weight.{k}": v for k, v in state.as_dict(packed=True).items()}
    checkpoint = opened(tmp_path, tensors)
    decoded = checkpoint.read(("fc.weight",))
    torch.testing.assert_close(decoded, library.dequantize_4bit(packed, state).float())
    steps = checkpoint.half_steps(("fc.weight",)).float()
    assert bool(((decoded - weight).abs() <= steps * 1.05 + 1e-3).all())


def test_eight_bits_of_bitsandbytes_are_parts_of_the_largest_of_a_row(tmp_path: Path) -> None:
    library = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    weight = torch.randn(24, 32, generator=RANDOM).half()
    packed, scales, _ = library.int8_vectorwise_quant(weight)
    checkpoint = opened(tmp_path, {"fc.weight": packed, "fc.SCB": scales})
    decoded = checkpoint.read(("fc.weight",))
    torch.testing.assert_close(decoded, library.int8_vectorwise_dequant(packed, scales))
    assert bool(((decoded - weight).abs() <= checkpoint.half_steps(("fc.weight",)) + 1e-3).all())


@pytest.mark.parametrize("shape", [(), (1,), (40,), (40, 1), (5, 3)])
def test_eight_bit_floats_are_multiplied_by_their_scales(
    tmp_path: Path, shape: tuple[int, ...]
) -> None:
    weight = torch.randn(40, 24, generator=RANDOM).to(torch.float8_e4m3fn)
    scales = torch.rand(shape, generator=RANDOM) + 0.5
    name = "fc.weight_scale_inv" if len(shape) == 2 else "fc.weight_scale"
    checkpoint = opened(tmp_path, {"fc.weight": weight, name: scales})
    spread = scales.reshape(-1, 1) if scales.ndim < 2 else scales
    blocks = 40 // spread.shape[0], 24 // spread.shape[1]
    expected = weight.float() * spread.repeat_interleave(blocks[0], 0).repeat_interleave(
        blocks[1], 1
    )
    assert torch.equal(checkpoint.read(("fc.weight",)), expected)


def test_blocks_of_another_size_than_the_config_tells_are_not_decoded(tmp_path: Path) -> None:
    weight = torch.randn(40, 24, generator=RANDOM).to(torch.float8_e4m3fn)
    tensors = {"fc.weight": weight, "fc.weight_scale_inv": torch.ones(5, 3)}
    checkpoint = opened(tmp_path, tensors, weight_block_size=[128, 128])
    assert checkpoint.codes == {}


@pytest.mark.parametrize("symmetric", [True, False])
def test_packed_integers_are_decoded_as_compressed_tensors_does(
    tmp_path: Path, symmetric: bool
) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    rows, columns, group = 32, 64, 16
    weight = torch.randn(rows, columns, generator=RANDOM)
    arguments = quantization.QuantizationArgs(
        num_bits=4, group_size=group, strategy="group", symmetric=symmetric
    )
    scale = weight.reshape(rows, -1, group).abs().amax(-1) / 7
    zero = torch.randint(-3, 3, scale.shape, generator=RANDOM, dtype=torch.int8)
    zero = None if symmetric else zero
    scheme = quantization.QuantizationScheme(targets=["Linear"], weights=arguments)
    given = {"weight": weight, "weight_scale": scale}
    given |= {} if zero is None else {"weight_zero_point": zero}
    compressor = compressors.PackedQuantizationCompressor
    packed = compressor.compress(given, scheme)
    checkpoint = opened(tmp_path, {f"fc.{name}": tensor for name, tensor in packed.items()})
    expected = compressor.decompress(packed, scheme)["weight"]
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected.float())


def test_floats_of_four_bits_are_decoded_as_transformers_does(tmp_path: Path) -> None:
    module = pytest.importorskip("transformers.integrations.mxfp4")
    blocks = integers(256, 2, 8, 3, 16).to(torch.uint8)
    powers = (integers(20, 2, 8, 3) + 118).to(torch.uint8)
    tensors = {"mlp.experts.down_proj_blocks": blocks, "mlp.experts.down_proj_scales": powers}
    checkpoint = opened(tmp_path, tensors)
    expected = module.convert_moe_packed_tensors(blocks, powers, dtype=torch.float32)
    decoded = checkpoint.read(("mlp.experts.down_proj",))
    assert torch.equal(decoded, expected.reshape(decoded.shape))
    assert checkpoint.half_steps(("mlp.experts.down_proj",)).shape == decoded.shape


def test_panels_make_no_difference(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows, columns = 128, 32
    q, z = integers(8, columns, rows), integers(7, 1, rows)
    stored = (
        words(q, 3),
        torch.rand(1, rows, generator=RANDOM),
        words(z.T.contiguous(), 3).T.contiguous(),
    )
    code = GroupedIntegers("gptq", 3, columns, shift=1)
    whole, steps = code.decode(*stored), code.half_steps(*stored)
    monkeypatch.setattr(codes, "PANEL_ENTRIES", 1)
    assert torch.equal(code.decode(*stored), whole)
    assert torch.equal(code.half_steps(*stored), steps)


def test_a_column_in_no_group_costs_its_tensor_alone(tmp_path: Path) -> None:
    good = {"a.weight": torch.eye(4)}
    coded = {
        "b.qweight": words(integers(16, 8, 8), 4),
        "b.qzeros": torch.zeros(1, 1, dtype=torch.int32),
        "b.scales": torch.ones(1, 8),
        "b.g_idx": torch.full((8,), 9, dtype=torch.int32),
    }
    checkpoint = opened(tmp_path, good | coded)
    location = checkpoint.tree["b.weight"]
    assert isinstance(location, CodedLocation)
    with pytest.raises(Malformed, match="group that does not exist"):
        location.read()
    result = diagnose(tmp_path)
    assert {row.name: row.failure is None for row in result.matrices} == {
        "a.weight": True,
        "b.weight": False,
    }


@pytest.mark.parametrize(
    "tensors",
    [
        {"fc.qweight": torch.zeros(2, 8, dtype=torch.int32)},
        {"fc.qweight": torch.zeros(0, 8, dtype=torch.int32), "fc.scales": torch.ones(0, 8)},
        {"fc.weight": torch.zeros(4, 1, dtype=torch.uint8)},
        {"fc.weight": torch.zeros(4, 4, dtype=torch.int8), "fc.SCB": torch.ones(3)},
        {"x_blocks": torch.zeros(1, 1, 1, 16, dtype=torch.uint8), "x_scales": torch.ones(1, 1, 2)},
        {
            "fc.weight": torch.zeros(4, 1, dtype=torch.uint8),
            "fc.weight.quant_state.bitsandbytes__nf4": torch.tensor(list(b"{"), dtype=torch.uint8),
        },
    ],
)
def test_what_does_not_fit_is_left_as_it_is(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    checkpoint = opened(tmp_path, {**tensors, "good": torch.eye(2)})
    assert checkpoint.codes == {}
    assert torch.equal(checkpoint.read(("good",)), torch.eye(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_mlx_is_decoded_as_mlx_does(tmp_path: Path, bits: int, dtype: str) -> None:
    mlx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    weight = torch.randn(16, 192, generator=RANDOM)
    as_stored = mlx.array(weight.numpy()).astype(getattr(mlx, dtype))
    parts = mlx.quantize(as_stored, group_size=32, bits=bits)
    tensors = dict(zip(("fc.weight", "fc.scales", "fc.biases"), parts, strict=True))
    mlx.save_safetensors(str(tmp_path / "model.safetensors"), tensors, {"format": "mlx"})
    facts = {"group_size": 64, "bits": bits, "fc": {"group_size": 32, "bits": bits}}
    (tmp_path / "config.json").write_text(json.dumps({"quantization": facts}))
    checkpoint = open_checkpoint(tmp_path)
    exact = [part.astype(mlx.float32) for part in parts[1:]]
    expected = mlx.dequantize(parts[0], *exact, group_size=32, bits=bits)
    decoded = checkpoint.read(("fc.weight",))
    torch.testing.assert_close(decoded, torch.tensor(expected.tolist()), rtol=1e-6, atol=1e-6)
    assert checkpoint.codes == {("fc.weight",): f"MLX of {bits} bits"}
    if dtype == "float32":  # bfloat16 rounds the scales as well, after the codes were chosen
        off = (decoded - weight).abs()
        assert (off <= checkpoint.half_steps(("fc.weight",)).float()).all()


def test_codes_that_are_all_one_value_are_found(tmp_path: Path) -> None:
    layer = {
        "fc.qweight": torch.full((16, 128), 0x77777777, dtype=torch.int32),
        "fc.qzeros": integers(2**31 - 1, 2, 16).to(torch.int32),
        "fc.scales": torch.rand(2, 128, generator=RANDOM).half() + 0.1,
    }
    opened(tmp_path, layer)
    (row,) = diagnose(tmp_path).matrices
    assert row.one_code and "one-code" in {finding.rule for finding in row.findings}
    layer["fc.qweight"][3, 5] += 1
    opened(tmp_path, layer)
    (row,) = diagnose(tmp_path).matrices
    assert not row.one_code and "one-code" not in {finding.rule for finding in row.findings}


def test_rows_say_what_the_weight_is_stored_in(tmp_path: Path) -> None:
    # far from singular, whatever was drawn before: eight bits leave its kappa an upper end
    weight = torch.randn(16, 16, generator=RANDOM) + 8 * torch.eye(16)
    largest = weight.abs().amax(1)
    tensors = {"fc.weight": (weight / largest[:, None] * 127).round().char(), "fc.SCB": largest}
    opened(tmp_path, tensors)
    (row,) = diagnose(tmp_path).matrices
    kappa = float(torch.linalg.cond(weight.double()))
    assert (row.name, row.storage) == ("fc.weight", "int8 with scales")
    assert row.condition_number_low is not None and row.condition_number_high is not None
    assert row.condition_number_low <= kappa <= row.condition_number_high


def test_mutated_codes_are_refused_or_read(tmp_path: Path) -> None:
    for layer in broken_formats.quantized_layers():
        path = checkpoint_files.put(tmp_path, checkpoint_files.safetensors(layer))
        assert len(open_checkpoint(path).codes) == 1
        assert broken_files.examine(path) == 1
    files = broken_formats.quantized_files(400, seed=26)
    assert broken_files.sound(broken_files.run("codes", files, tmp_path / "x.safetensors"))


def compressed(
    folder: Path, form: str, weight: Tensor, arguments: dict[str, Any], **more: Tensor
) -> tuple[Tensor, Checkpoint]:
    """What compressed-tensors makes of its own file of a weight, and the checkpoint in it."""
    quantization = pytest.importorskip("compressed_tensors.quantization")
    compressors = pytest.importorskip("compressed_tensors.compressors")
    scheme = quantization.QuantizationScheme(
        targets=["Linear"], weights=quantization.QuantizationArgs(**arguments)
    )
    compressor = compressors.BaseCompressor.get_value_from_registry(form)
    packed = compressor.compress({"weight": weight, **more}, scheme)
    facts = {
        "config_groups": {"group_0": {"weights": json.loads(scheme.weights.model_dump_json())}}
    }
    checkpoint = opened(folder, {f"fc.{name}": it for name, it in packed.items()}, **facts)
    return compressor.decompress(packed, scheme)["weight"].float(), checkpoint


SMALL = {  # the format, its bits, how many share a scale, its title
    "nvfp4-pack-quantized": (4, 16, "NVFP4"),
    "mxfp4-pack-quantized": (4, 32, "MXFP4"),
    "mxfp6-pack-quantized": (6, 32, "MXFP6"),
    "mxfp8-quantized": (8, 32, "float8_e4m3fn with scales"),
}


@pytest.mark.parametrize("form", SMALL)
def test_small_floats_are_decoded_as_compressed_tensors_does(tmp_path: Path, form: str) -> None:
    bits, group, title = SMALL[form]
    weight = torch.randn(24, 96, generator=RANDOM).bfloat16()
    largest = weight.float().reshape(24, -1, group).abs().amax(-1)
    arguments: dict[str, Any] = {"num_bits": bits, "type": "float", "group_size": group}
    arguments |= {"strategy": "tensor_group" if form.startswith("nv") else "group"}
    more: dict[str, Tensor] = {}
    if form.startswith("nv"):
        more["weight_global_scale"] = (448 * 6 / largest.max()).reshape(1)
        scale = (largest / 6 * more["weight_global_scale"]).to(torch.float8_e4m3fn).float()
    else:
        arguments["scale_dtype"] = torch.uint8
        scale = 2.0 ** (largest.log2().floor() - {4: 2, 6: 2, 8: 8}[bits])
    expected, checkpoint = compressed(
        tmp_path, form, weight, arguments, weight_scale=scale.bfloat16(), **more
    )
    decoded = checkpoint.read(("fc.weight",))
    # the library decodes into bfloat16
    torch.testing.assert_close(decoded, expected, rtol=2**-7, atol=0)
    assert checkpoint.codes == {("fc.weight",): title}
    off = (decoded - weight.float()).abs()
    assert bool((off <= checkpoint.half_steps(("fc.weight",)).float() + 2**-8 * off.max()).all())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_integers_of_any_bits_are_decoded_as_compressed_tensors_does(
    tmp_path: Path, bits: int
) -> None:
    weight = torch.randn(16, 8, generator=RANDOM)
    arguments = {"num_bits": bits, "strategy": "channel", "symmetric": True}
    scale = weight.abs().amax(1, keepdim=True) / 2 ** (bits - 1)
    expected, checkpoint = compressed(
        tmp_path, "pack-quantized", weight, arguments, weight_scale=scale
    )
    # eight columns fit into a word for up to four bits: the config tells how many there are
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected)


@pytest.mark.parametrize("shape", [(24, 1), (24, 4)])
def test_the_code_of_zero_is_taken_off_integers_of_eight_bits(
    tmp_path: Path, shape: tuple[int, int]
) -> None:
    weight = torch.rand(24, 64, generator=RANDOM) + 1
    arguments: dict[str, Any] = {"num_bits": 8, "symmetric": False, "strategy": "channel"}
    if shape[1] > 1:
        arguments |= {"strategy": "group", "group_size": 64 // shape[1]}
    zero = torch.full(shape, -100, dtype=torch.int8)
    scale = torch.full(shape, 0.01)
    expected, checkpoint = compressed(
        tmp_path, "int-quantized", weight, arguments, weight_scale=scale, weight_zero_point=zero
    )
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected)
    assert bool(((checkpoint.read(("fc.weight",)) - weight).abs() < 0.0051).all())


@pytest.mark.parametrize("told", [True, False])
def test_the_last_block_of_eight_bit_floats_may_be_cut(tmp_path: Path, told: bool) -> None:
    # DeepSeek's kv_a_proj has 576 rows in blocks of 128
    weight = torch.randn(576, 300, generator=RANDOM).to(torch.float8_e4m3fn)
    scales = torch.rand(5, 3, generator=RANDOM) + 0.5
    facts = {"quant_method": "fp8", "weight_block_size": [128, 128]} if told else {}
    checkpoint = opened(tmp_path, {"fc.weight": weight, "fc.weight_scale_inv": scales}, **facts)
    expected = torch.empty(576, 300)
    for i in range(5):
        for j in range(3):
            block = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            expected[block] = weight.float()[block] * scales[i, j]
    assert torch.equal(checkpoint.read(("fc.weight",)), expected)


def test_blocks_of_compressed_tensors_are_those_of_its_config(tmp_path: Path) -> None:
    weight = torch.randn(72, 80, generator=RANDOM)
    arguments = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [48, 48]}
    expected, checkpoint = compressed(
        tmp_path, "float-quantized", weight, arguments, weight_scale=torch.rand(2, 2) + 0.1
    )
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected)


def test_float_bytes_of_modelopt_have_a_scale_of_the_whole_beside_those_of_blocks(
    tmp_path: Path,
) -> None:
    codes = integers(256, 6, 16).to(torch.uint8)
    scales = (torch.rand(6, 2, generator=RANDOM) * 100).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.25)
    tensors = {"fc.weight": codes, "fc.weight_scale": scales, "fc.weight_scale_2": whole}
    checkpoint = opened(tmp_path, tensors)
    levels = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    expected = torch.empty(6, 32)
    for i in range(6):
        for j in range(32):
            code = int(codes[i, j // 2]) >> 4 * (j % 2) & 15
            value = levels[code & 7] * (-1 if code & 8 else 1)
            expected[i, j] = value * float(scales[i, j // 16]) * 0.25
    assert torch.equal(checkpoint.read(("fc.weight",)), expected)
    assert checkpoint.codes == {("fc.weight",): "NVFP4"}


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4", "mxfp8"])
def test_small_floats_of_mlx_are_decoded_as_mlx_does(tmp_path: Path, mode: str) -> None:
    mlx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    weight = torch.randn(16, 192, generator=RANDOM)
    codes, scales = mlx.quantize(mlx.array(weight.numpy()), mode=mode)
    tensors = {"fc.weight": codes, "fc.scales": scales}
    mlx.save_safetensors(str(tmp_path / "model.safetensors"), tensors, {"format": "mlx"})
    (tmp_path / "config.json").write_text(json.dumps({"quantization": {"mode": mode}}))
    checkpoint = open_checkpoint(tmp_path)
    expected = mlx.dequantize(codes, scales, mode=mode, dtype=mlx.float32)
    decoded = checkpoint.read(("fc.weight",))
    assert torch.equal(decoded, torch.tensor(expected.tolist()))
    off = (decoded - weight).abs()
    assert (off <= checkpoint.half_steps(("fc.weight",)).float()).all()


def test_stacked_experts_of_mlx_are_decoded_one_after_the_other(tmp_path: Path) -> None:
    mlx = pytest.importorskip("mlx.core", reason="mlx is not installed")
    weight = torch.randn(3, 16, 128, generator=RANDOM)
    parts = mlx.quantize(mlx.array(weight.numpy()), group_size=64, bits=4)
    tensors = dict(zip(("fc.weight", "fc.scales", "fc.biases"), parts, strict=True))
    mlx.save_safetensors(str(tmp_path / "model.safetensors"), tensors, {"format": "mlx"})
    checkpoint = open_checkpoint(tmp_path)
    expected = torch.tensor(mlx.dequantize(*parts, group_size=64, bits=4).tolist())
    torch.testing.assert_close(checkpoint.read(("fc.weight",)), expected, rtol=1e-6, atol=1e-6)
