"""What is measured of a model: an error costs its own matrix, and memory is known beforehand."""

import pickle
from collections.abc import Callable

import pytest
import torch

from kappascope.checkpoints.open import Exhausted
from kappascope.clinic import source as sources
from kappascope.clinic import tasks
from kappascope.clinic.diagnose import case, diagnose
from kappascope.matrix import spectra
from kappascope.model.skipped import ReasonKind
from kappascope.refusal import Refusal

ENOMEM = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError(ENOMEM), Exhausted(5, "x.pt", "too large", "buy more")]
)
def test_too_little_memory_is_known_by_its_type_from_any_process(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise pickle.loads(pickle.dumps(error))

    monkeypatch.setattr(tasks, "examine", fails)
    (failed,) = diagnose({"w": torch.eye(2)}).failed
    assert failed.name == "w" and failed.reason.kind is ReasonKind.NO_MEMORY
    assert "more memory needed than" in str(failed.reason) and "--memory" in str(failed.reason)


@pytest.mark.parametrize("size", [6144, 8192, 10240, 16384])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_worker_may_use_what_large_matrices_need(size, dtype) -> None:
    matrix = torch.ones(1, 1, dtype=dtype).expand(size, size)
    (task,) = case({"w": matrix}).tasks
    stored = size * size * dtype.itemsize
    assert task.memory.at_most(1) >= stored + spectra.bytes_needed((size, size))
    assert task.memory.at_least(1) <= 2 * (8 * size * size) + 2**30  # twice in float64, and buffers


def test_an_error_that_only_speaks_of_memory_is_told_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("not enough memory in the title")

    monkeypatch.setattr(tasks, "examine", fails)
    (failed,) = diagnose({"w": torch.eye(2)}).failed
    assert str(failed.reason) == "ValueError: not enough memory in the title"


@pytest.mark.parametrize("error", [Refusal(2, "x", "too short", ""), ZeroDivisionError("none")])
def test_a_reference_tensor_that_cannot_be_read_costs_only_the_comparison(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = {"a": torch.eye(3), "b": torch.eye(4)}
    reader = sources.reader

    def broken(model: object) -> Callable[[tuple[object, ...]], torch.Tensor]:
        def read(path: tuple[object, ...]) -> torch.Tensor:
            if model is theirs and path == ("b",):
                raise error
            return reader(model)(path)

        return read

    monkeypatch.setattr(sources, "reader", broken)
    found = diagnose({"a": 2 * torch.eye(3), "b": torch.eye(4)}, reference=theirs)
    assert [row.condition_number for row in found.matrices] == [1.0, 1.0]
    assert [bool(row.errors) for row in found.matrices] == [True, False]
    (failed,) = found.failed
    assert failed.name == "b" and "the reference cannot be read" in str(failed.reason)
    assert "the reference cannot be read" in found.matrices[1].reasons["errors"]
    assert [one.name for one in found.uncompared] == ["b"]
