"""What a file really is, whatever its name says: the cases A12 and A31 to A35 of the contract."""

import struct
from pathlib import Path

import pytest

from broken_files import refused
from checkpoint_files import NOT_SAFETENSORS, put
from kappascope.checkpoints import open
from kappascope.checkpoints.formats import quoted


@pytest.mark.parametrize("what", NOT_SAFETENSORS)
@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x"])
def test_a12_what_a_file_really_is(what: str, name: str, tmp_path: Path) -> None:
    if what == "ONNX" and not name.endswith("safetensors"):
        refused(put(tmp_path, NOT_SAFETENSORS[what], name), "truncated")
    elif what == "zip archive" and not name.endswith("safetensors"):
        assert open.open(put(tmp_path, NOT_SAFETENSORS[what], name)).format == "PyTorch"
    else:
        refused(put(tmp_path, NOT_SAFETENSORS[what], name), what)


@pytest.mark.parametrize("name", ["model.gguf", "model.bin", "model.onnx", "model.safetensors"])
def test_a31_to_a35_gguf_and_onnx_are_recognised_and_refused(name: str, tmp_path: Path) -> None:
    huge = b"GGUF" + struct.pack("<IQQ", 3, 2**63, 2**63) + bytes(64)
    wrong = "a GGUF file" if name.endswith("safetensors") else "a header of 9223372036854775808"
    refused(put(tmp_path, huge, name), wrong)
    wrong = "an ONNX model" if name.endswith("safetensors") else "truncated"
    refused(put(tmp_path, NOT_SAFETENSORS["ONNX"], name), wrong)


def test_what_a_sentence_names_is_text_or_has_a_type() -> None:
    assert quoted("x") == "'x'" and quoted(3) == "(of type int)"
