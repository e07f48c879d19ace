"""Where a model is: read once, from any device, and no more of it sent than is needed."""

import math
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from every_format import FORMATS
from kappascope.clinic import source as sources
from kappascope.clinic.diagnose import diagnose
from kappascope.model.matrices import plan
from kappascope.model.skipped import Reason, ReasonKind, Skipped, unreadable
from kappascope.refusal import Refusal


def test_a_vector_that_cannot_be_read_is_lost_and_the_others_are_not() -> None:
    def read(path: tuple[str, ...]) -> torch.Tensor:
        if path == ("a",):
            raise Refusal(2, "x.pt", "truncated", "download it again")
        return torch.tensor([math.nan])

    opened = sources.Opened(plan({}), read, vectors={"a": ("a",), "b": ("b",)})
    assert list(opened.examined_vectors()) == [
        Skipped("a", unreadable("cannot be read: truncated")),
        Skipped("b", Reason(ReasonKind.NON_FINITE, "non-finite (1 of 1), first at [0]")),
    ]


def test_a_tensor_of_the_reference_is_read_once_for_all_its_parts(monkeypatch) -> None:
    reads, original = [], sources.Opened.matrices
    monkeypatch.setattr(
        sources.Opened, "matrices", lambda self, names: reads.append(1) or original(self, names)
    )
    stack = {"experts.w": torch.randn(5, 4, 3, generator=torch.Generator().manual_seed(0))}
    found = diagnose(stack, reference=stack)
    parts = [row for row in found.matrices if row.errors is not None]
    assert len(parts) >= 5 and len(reads) == 1


def test_a_model_in_memory_is_looked_over_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    monkeypatch.setattr(sources, "plan", lambda model: looks.append(1) or plan(model))
    weights = {f"{k}.weight": torch.eye(3) for k in range(9)}
    assert len(diagnose(weights, reference=weights).analysed) == 9
    assert len(looks) == 2


class Elsewhere(torch.Tensor):
    """Of a device from which numbers must be brought before they can be used."""

    def cpu(self) -> torch.Tensor:
        return torch.diag(torch.arange(1.0, self.shape[0] + 1))


def test_a_model_on_any_device_is_examined_with_its_products_and_reference() -> None:
    blank = [torch.zeros(4, 4).as_subclass(Elsewhere) for _ in range(2)]
    found = diagnose(dict(zip(("fc1.weight", "fc2.weight"), blank, strict=True)),
                     reference={"fc1.weight": torch.eye(4)})  # fmt: skip
    assert not found.failed
    assert [row.condition_number for row in found.matrices] == [4.0, 4.0]
    assert found.matrices[0].errors["condition_number"] == pytest.approx(3.0)
    assert found.chains[0].condition_number == pytest.approx(16.0)


def test_what_is_sent_to_a_process_is_no_more_than_a_task_needs() -> None:
    flat = torch.zeros(2**20)
    weights = {f"{k}.weight": flat[9 * k : 9 * k + 9].view(3, 3) for k in range(9)}
    assert len(pickle.dumps(sources.InMemory(weights).portion(["0.weight"]))) < 10_000


@pytest.mark.parametrize("source", [3, None, torch.eye(2), [1]])
def test_what_is_no_model_is_named(source: object) -> None:
    with pytest.raises(TypeError, match=r"expected a path, an nn\.Module or a mapping"):
        diagnose(source)


@pytest.mark.parametrize("folder", [False, True])
def test_a_checkpoint_rewritten_before_a_worker_opens_it_is_refused(
    folder: bool, tmp_path: Path
) -> None:
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a.weight": torch.eye(3)}, file)
    found = sources.OnDisk.at(tmp_path if folder else file)
    assert found.opened().plan.units
    torch.save({"a.weight": torch.ones(3, 3)}, file)
    with pytest.raises(Refusal, match="changed while it was read"):
        found.opened()
    assert sources.OnDisk.at(tmp_path if folder else file).opened().plan.units


@pytest.mark.parametrize(
    "form", [form for form in FORMATS if form != "npz"]
)  # a file, in no folder
def test_all_files_of_a_folder_that_hold_tensors_tell_it_from_a_later_one(
    form: str, tmp_path: Path
) -> None:
    written = FORMATS[form](tmp_path, {"fc.weight": torch.eye(4), "fc.bias": torch.zeros(4)})
    found = sources.OnDisk.at(written if written.is_dir() else written.parent)
    assert {file for file, _ in found.stamp} >= set(found.opened().files) != set()


def _config(folder: Path) -> Path:
    torch.save({"a.weight": torch.eye(3)}, folder / "pytorch_model.bin")
    (folder / "adapter_config.json").write_text("{}")
    return folder


def _index(folder: Path) -> Path:
    _config(folder)
    index = folder / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"a.weight": "pytorch_model.bin"}}')
    return index


def _steps(folder: Path) -> Path:
    for step in ("global_step1", "global_step22"):
        (folder / step).mkdir()
        _config(folder / step)
    (folder / "latest").write_text("global_step1")
    return folder


@pytest.mark.parametrize(
    ("written", "changed"),
    [(_config, "adapter_config.json"), (_index, "pytorch_model.bin"), (_steps, "latest")],
)
def test_a_checkpoint_is_another_once_what_tells_of_its_weights_is_changed(
    written: Callable[[Path], Path], changed: str, tmp_path: Path
) -> None:
    path = written(tmp_path)
    before = sources.OnDisk.at(path).identity
    assert sources.OnDisk.at(path).identity == before
    (tmp_path / changed).write_text("global_step22")
    assert sources.OnDisk.at(path).identity != before
