"""The public names: they come when asked for, and no module takes their place."""

import subprocess
import sys

import pytest

import kappascope


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_every_public_name_is_there_and_listed() -> None:
    from kappascope import (
        Components,
        Refusal,
        audit,
        corrections,
        diagnose,
        errors,
        matrices,
        spectra,
        theory,
    )  # fmt: skip

    assert callable(audit) and callable(diagnose) and callable(errors) and callable(matrices)
    assert issubclass(Refusal, Exception) and isinstance(Components, type)
    assert corrections.Hybrid and theory.GaussianNull and spectra.vitals
    assert {*kappascope.__all__} <= {*dir(kappascope)}


def test_the_package_alone_loads_nothing_heavy() -> None:
    done = run("import sys, kappascope; dir(kappascope); sys.exit('torch' in sys.modules)")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("first", ["clinic.diagnose", "cli.diagnose", "matrix.spectra"])
def test_a_module_does_not_hide_the_function_of_its_name(first: str) -> None:
    code = f"""
import kappascope.{first}, kappascope.model.matrices
from kappascope import diagnose, matrices, spectra
assert callable(kappascope.diagnose) and diagnose is kappascope.diagnose
assert callable(matrices) and spectra.__name__ == "kappascope.matrix.spectra"
"""
    done = run(code)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_is_not_public_is_told_by_name() -> None:
    with pytest.raises(AttributeError, match="'kappascope' has no attribute 'nothing'"):
        kappascope.nothing  # noqa: B018 - asking for it is what fails
