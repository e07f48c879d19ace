"""Optional packages are refused with the command that installs them; plug-ins are loaded once."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

from kappascope.refusal import Refusal
from kappascope.system import extras

WITHOUT = """
import sys
sys.modules |= dict.fromkeys(("pyarrow", "matplotlib"))  # as if they were not installed
"""


def run_without_the_laboratory(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", WITHOUT + code]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_the_light_core_diagnoses_watches_and_corrects_without_the_laboratory(tmp_path) -> None:
    done = run_without_the_laboratory(f"""
import torch, kappascope
from torch import nn
model = nn.Linear(16, 8)
optimizer = torch.optim.AdamW(model.parameters())
assert kappascope.diagnose(model).html()
with kappascope.Monitor({str(tmp_path)!r}, every=1).attach(model, optimizer) as monitor:
    handle = kappascope.corrections.Multipliers().attach(model, optimizer)
    model(torch.randn(4, 16)).square().mean().backward()
    optimizer.step()
    handle.close()
assert len(monitor.table()) > 10
monitor.report({str(tmp_path / "run.html")!r})
try:
    kappascope.diagnose(model).table()
except kappascope.Refusal as refusal:
    print(refusal)
""")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "pyarrow: is not installed (pip install 'kappascope[lab]')\n"


@pytest.mark.parametrize("command", ["reproduce", "study", "findings x", "verify x"])
def test_a_command_of_the_laboratory_says_how_to_install_it(command: str) -> None:
    done = run_without_the_laboratory(
        f"from kappascope.cli import app; sys.exit(app.run({command.split()!r}))"
    )
    assert done.returncode == 5 and done.stdout == ""
    assert "pip install 'kappascope[lab]'" in done.stderr and done.stderr.count("\n") == 1


def offered(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint("mine", value, "kappascope.rules")
    monkeypatch.setattr(extras, "entry_points", lambda group: [entry])
    extras.plugins.cache_clear()


def test_a_plugin_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, "math:sqrt")
    assert extras.plugins("rules")["mine"](9.0) == 3.0
    extras.plugins.cache_clear()


def test_a_broken_plugin_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offered(monkeypatch, "math:no_such_function")
    with pytest.raises(Refusal, match=r"plug-in math:no_such_function: cannot be loaded"):
        extras.plugins("rules")
    extras.plugins.cache_clear()
