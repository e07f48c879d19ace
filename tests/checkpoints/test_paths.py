"""What is surely no checkpoint is refused before torch is loaded, and nothing else is."""

import os
import pickle
from pathlib import Path

import pytest
import torch

from every_format import FORMATS
from kappascope.checkpoints.formats import HEAD
from kappascope.checkpoints.paths import is_remote, is_text, refuse_unreadable
from kappascope.refusal import Refusal


def advice(given: object) -> str:
    with pytest.raises(Refusal) as caught:
        refuse_unreadable(str(given))
    return caught.value.advice


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_that_is_read_passes(form: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = FORMATS[form](tmp_path, {"fc.weight": torch.randn(4, 3), "fc.bias": torch.zeros(4)})
    refuse_unreadable(str(path))


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_no_pickle_is_taken_for_text(protocol: int) -> None:
    for value in ({"w": [1.0, 2.0]}, [*range(1000)], "text", {f"name {i}": i for i in range(99)}):
        assert not is_text(pickle.dumps(value, protocol)[:HEAD])


@pytest.mark.parametrize(
    "text", ["# Title\n\nwords", "Dear all,\n", "lr: 0.1\n", "größe\n", "x = 3\n" * 200]
)
def test_texts_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    path.write_text(text)
    with pytest.raises(Refusal, match="it is text"):
        refuse_unreadable(str(path))


def test_a_character_cut_in_two_is_text_still() -> None:
    assert is_text(("#" * (HEAD - 1) + "ö").encode()[:HEAD])
    assert not is_text(b"\xff\xfe words")


def test_a_name_of_the_hub_gets_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "hf://microsoft/phi-2" in advice("microsoft/phi-2")
    assert "hf://ORGANIZATION/gpt2" in advice("gpt2")
    (tmp_path / "models").mkdir()
    for path in (
        "models/phi-2",
        "org/model.safetensors",
        "/org/name",
        "a/b/c",
        "../name",
        "model.pt",
    ):
        assert "hf://" not in advice(path)
    assert "--table out.csv" in advice("out.csv")


def test_addresses_folders_and_pipes_are_left_to_their_readers(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # to open it would wait for ever
    for given in ("hf://org/name", "https://example.org/notes.txt", str(tmp_path), str(pipe)):
        refuse_unreadable(given)


def test_an_index_is_json_and_no_text_to_be_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text('{"weight_map": {}}')
    refuse_unreadable(str(path))
    (tmp_path / "config.json").write_text("{}")
    assert "weights or the folder" in advice(tmp_path / "config.json")


def test_addresses_are_told_from_paths() -> None:
    assert [*map(is_remote, ["s3://a/b", "https://x", "a/b.pt", "C:\\x", "./x://y"])] == [
        True,
        True,
        False,
        False,
        False,
    ]
