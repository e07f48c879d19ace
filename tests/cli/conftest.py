"""The command with tiny experiments in place of the real ones."""

from collections.abc import Callable

import pytest

from kappascope.cli import app
from kappascope.lab import experiment
from tiny_experiments import BAD, LASTING, SLOW, STUDY, TOY


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command with toys for experiments: code, output, errors."""
    monkeypatch.setattr(experiment, "discover", lambda: {1: TOY, 2: SLOW, 3: BAD})
    monkeypatch.setattr(experiment, "studies", lambda: {"toy": STUDY, "lasting": LASTING})

    def run(*arguments: object) -> tuple[int, str, str]:
        code = app.run([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    return run
