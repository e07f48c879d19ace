"""Options that several commands take: a folder has a name, and every command can be debugged."""

import inspect
from typing import get_type_hints

import pytest
import typer

from kappascope.cli import app
from kappascope.cli._options import Debug, _folder


def test_a_folder_without_a_name_is_refused() -> None:
    assert _folder("results") == "results"
    with pytest.raises(typer.BadParameter, match="expected a folder, got nothing"):
        _folder("")


def test_every_command_takes_debug() -> None:
    for command in app.app.registered_commands:
        assert command.callback is not None
        assert get_type_hints(command.callback, include_extras=True)["debug"] == Debug
        assert inspect.signature(command.callback).parameters["debug"].default is False
