"""The doctor: what is installed, and what is missing for what."""

import tomllib
from pathlib import Path

import pytest

from kappascope.cli import doctor

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]


def test_it_names_versions_threads_and_every_extra(run) -> None:
    code, output, errors = run("doctor")
    assert (code, errors) == (0, "")
    words = ("torch", "BLAS of scipy", "OMP_NUM_THREADS=1", "come out right")
    assert [word for word in words if word not in output] == []
    assert [name for name in doctor.PURPOSES if f"[{name}]" not in output.replace("\n", "")] == []


def test_every_extra_has_a_purpose() -> None:
    assert {*PROJECT["optional-dependencies"]} <= {*doctor.PURPOSES}


def test_many_missing_packages_of_one_extra_are_counted(run, monkeypatch) -> None:
    lines = [f"absent{i}>=1; extra == 'test'" for i in range(9)]
    monkeypatch.setattr(doctor, "requires", lambda _: lines)
    code, output, errors = run("doctor")
    assert (code, errors) == (0, "") and "missing: 9 packages" in output
    assert "absent3" not in output


def test_what_is_missing_is_named(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "requires", lambda _: ["torch>=2", "absent>=1; extra == 'gguf'"])
    code, output, errors = run("doctor")
    assert (code, errors) == (0, "") and "missing: absent" in output
